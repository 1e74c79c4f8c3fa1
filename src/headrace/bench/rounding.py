"""Which rounding to bfloat16 moves a model's log-probabilities, and by how much.

In: the layers of a Qwen2-like shape with random weights. Out: for several choices of places that are rounded, all
else being float32, the mean distance of log-probabilities from those without any rounding. What an engine and a
trainer differ by on a GPU comes from these places; here each can be looked at alone. On a CPU, in some minutes.

Shape legend: T tokens, H hidden size, D head dim, N heads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import torch
from torch.nn import functional as F

LAYERS, HIDDEN, WIDE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, TOKENS = 28, 1536, 8960, 12, 2, 128, 20_000, 48

PLACES = {
    "norms": "what norms hand to the products",
    "qk": "queries and keys",
    "rope": "queries and keys after rotation",
    "values": "values",
    "probs": "attention's probabilities",
    "attention": "attention's result",
    "added": "the two products added to the running sum",
    "sum": "the running sum",
    "gated": "the gated layer's two products",
    "inner": "what the gated layer hands to its last product",
}
OPERANDS = ("norms", "rope", "values", "probs", "attention", "inner")
"""What a product in bfloat16 takes."""


class _Row:
    """One row of random tokens through random layers."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weight(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

        self._weights = [
            {
                "q": weight(HEADS * HEAD_DIM, HIDDEN),
                "k": weight(KV_HEADS * HEAD_DIM, HIDDEN),
                "v": weight(KV_HEADS * HEAD_DIM, HIDDEN),
                "o": weight(HIDDEN, HEADS * HEAD_DIM),
                "gate": weight(WIDE, HIDDEN),
                "up": weight(WIDE, HIDDEN),
                "down": weight(HIDDEN, WIDE),
            }
            for _ in range(LAYERS)
        ]
        self._embedding = weight(VOCAB, HIDDEN)
        self._ids_T = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
        frequencies = 1e6 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles_TD = torch.outer(torch.arange(TOKENS).float(), frequencies).repeat(1, 2)
        self._cos_TD, self._sin_TD = angles_TD.cos(), angles_TD.sin()
        self._mask_TT = torch.full((TOKENS, TOKENS), -math.inf).triu(1)

    def logprobs(self, rounded: Collection[str]) -> torch.Tensor:
        """float32 [T - 1] of the row's own tokens, these places being rounded to bfloat16."""

        def at(place: str, x: torch.Tensor) -> torch.Tensor:
            return x.bfloat16().float() if place in rounded else x

        sum_TH = self._embedding[self._ids_T].float()
        for narrow in self._weights:
            w = {name: tensor.float() for name, tensor in narrow.items()}
            read_TH = at("norms", _norm(sum_TH))
            q, k, v = (
                at(place, read_TH @ w[name].T).view(TOKENS, -1, HEAD_DIM).transpose(0, 1)
                for name, place in (("q", "qk"), ("k", "qk"), ("v", "values"))
            )
            q, k = at("rope", self._rotated(q)), at("rope", self._rotated(k))
            k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
            probs_NTT = (q @ k.mT / math.sqrt(HEAD_DIM) + self._mask_TT).softmax(-1)
            seen_TH = at("attention", (at("probs", probs_NTT) @ v).transpose(0, 1).reshape(TOKENS, -1))
            sum_TH = at("sum", sum_TH + at("added", seen_TH @ w["o"].T))
            read_TH = at("norms", _norm(sum_TH))
            gate, up = (at("gated", read_TH @ w[name].T) for name in ("gate", "up"))
            inner = at("inner", F.silu(gate) * up)
            sum_TH = at("sum", sum_TH + at("added", inner @ w["down"].T))
        logits_TV = at("norms", _norm(sum_TH)) @ self._embedding.float().T
        return logits_TV[:-1].log_softmax(-1).gather(1, self._ids_T[1:, None])[:, 0]

    def _rotated(self, x_NTD: torch.Tensor) -> torch.Tensor:
        first, second = x_NTD.chunk(2, -1)
        return x_NTD * self._cos_TD + torch.cat((-second, first), -1) * self._sin_TD


def _norm(x_TH: torch.Tensor) -> torch.Tensor:
    return x_TH * torch.rsqrt(x_TH.square().mean(-1, keepdim=True) + 1e-6)


def distances(num_rows: int = 8) -> Iterator[tuple[str, float]]:
    """What was rounded, and the mean distance it makes, over so many rows of other weights and tokens."""
    rest = [place for place in PLACES if place != "sum"]
    cases: list[tuple[str, Collection[str]]] = [
        ("everything", PLACES),
        ("everything but the running sum", rest),
        ("nor the products added to it", [place for place in rest if place != "added"]),
        ("nor the gated layer's two products", [p for p in rest if p not in ("added", "gated")]),
        ("only operands of products", OPERANDS),
        *((f"only {told}", (place,)) for place, told in PLACES.items()),
    ]
    totals = [0.0] * len(cases)
    for seed in range(num_rows):
        row = _Row(seed)
        exact = row.logprobs(())
        for i, (_, rounded) in enumerate(cases):
            totals[i] += float((row.logprobs(rounded) - exact).abs().mean()) / num_rows
    for (told, _), total in zip(cases, totals, strict=True):
        yield told, total


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    for told, distance in distances():
        print(f"{distance:.5f}  {told}", flush=True)
