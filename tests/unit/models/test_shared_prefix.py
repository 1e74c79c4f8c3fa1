"""Attention over segments that share prefixes, with dense float64 attention in place of the GPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.models import shared_prefix
from headrace.models.flash import Segments
from headrace.models.packed_attention import build_layout, use_packed_attention
from headrace.models.shared_prefix import segment_attention, segment_bounds

HEADS, KV_HEADS, SIZE = 4, 2, 8
ROWS = {
    "no-prefix": ([5, 3, 7], [-1, -1, -1]),
    "one-group": ([6, 4, 1, 3], [-1, 0, 0, 0]),
    "groups-and-loners": ([6, 2, 4, 3, 5, 1, 9], [-1, -1, 0, 0, 1, 1, -1]),
}


def dense_scores(query: torch.Tensor, key: torch.Tensor, segments: Segments) -> torch.Tensor:
    """[Hq, Tq, Tk], minus infinity where a query may not look."""
    window_left = segments.window_left
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * segments.scale
    seen = torch.zeros(scores.shape[1:], dtype=torch.bool)
    edges = zip(pairwise(segments.queries.tolist()), pairwise(segments.keys.tolist()), strict=True)
    for (q_start, q_end), (k_start, k_end) in edges:
        offset = (k_end - k_start) - (q_end - q_start)
        block = torch.ones(q_end - q_start, k_end - k_start, dtype=torch.bool).tril(offset)
        seen[q_start:q_end, k_start:k_end] = block if window_left < 0 else block.triu(offset - window_left)
    return scores.masked_fill(~seen, -torch.inf)


def dense_forward(query, key, value, segments):
    longest = segments.queries.diff().max(), segments.keys.diff().max()
    assert longest == (segments.longest_query, segments.longest_key)
    scores = dense_scores(query, key, segments)
    lse = scores.logsumexp(-1)
    value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value)
    return out, lse if query.dtype == torch.float64 else lse.float()


def dense_backward(grad, query, key, value, out, lse, segments):
    """As the kernels do it: probabilities from the given log-sum-exp, the row term from the given output."""
    scores = dense_scores(query, key, segments)
    probs = (scores - lse[..., None]).exp().to(query.dtype)
    groups = query.shape[1] // key.shape[1]
    wide_key, wide_value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    row_term = (grad * out).sum(-1).T[..., None]
    grad_scores = probs * (torch.einsum("qhd,khd->hqk", grad, wide_value) - row_term) * segments.scale

    def narrow(wide: torch.Tensor) -> torch.Tensor:
        return wide.unflatten(1, (key.shape[1], groups)).sum(2)

    return (
        torch.einsum("hqk,khd->qhd", grad_scores, wide_key),
        narrow(torch.einsum("hqk,qhd->khd", grad_scores, query)),
        narrow(torch.einsum("hqk,qhd->khd", probs, grad)),
    )


@pytest.fixture(autouse=True)
def dense_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_prefix, "flash_forward", dense_forward)
    monkeypatch.setattr(shared_prefix, "flash_backward", dense_backward)
    return


def whole_attention(query, key, value, lengths, parents, scale, window):
    """One softmax over prefix and continuation, by a mask."""
    segment = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    parent = torch.tensor(parents)[segment]
    before = torch.tensor([0 if parent < 0 else lengths[parent] for parent in parents])[segment]
    place = before + torch.cat([torch.arange(length) for length in lengths])
    gap = place[:, None] - place[None, :]
    mine = (segment[:, None] == segment[None, :]) | (parent[:, None] == segment[None, :])
    seen = mine & (gap >= 0) & (gap < (window or 10**9))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


def random_inputs(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    return [
        torch.randn(num_tokens, heads, SIZE, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_prefix_and_continuation_are_one_softmax_and_one_gradient(
    row: tuple[list[int], list[int]], window: int | None
) -> None:
    lengths, parents = row
    inputs = random_inputs(sum(lengths))
    expected = whole_attention(*inputs, lengths, parents, 0.3, window)
    weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    bounds = segment_bounds(lengths, parents, device="cpu")
    found = segment_attention(*inputs, bounds, scale=0.3, window=window)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    for grad, right in zip(torch.autograd.grad((found * weights).sum(), inputs), expected_grads, strict=True):
        torch.testing.assert_close(grad, right, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_layers_and_rows_of_any_shape_share_one_graph() -> None:
    """A graph per layer or per row would make compiling as long as the run."""
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    use_packed_attention(model)
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph

    def run(lengths: list[int], parents: list[int]) -> torch.Tensor:
        layout = build_layout(lengths, parents)
        layout = replace(layout, bounds=segment_bounds(lengths, parents, device="cpu"))
        ids = torch.arange(sum(lengths))[None] % 32
        return model.model(ids, use_cache=False, packed_layout=layout).last_hidden_state

    rows = [([30], [-1]), *ROWS.values(), ([5, 7, 2, 2, 3], [-1, -1, 0, 1, 1])]
    plain = [run(*row) for row in rows]
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend=count, dynamic=True, fullgraph=True)
    for row, expected in zip(rows, plain, strict=True):
        found = run(*row)
        found.float().sum().backward()
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0)
    assert len(graphs) == 1
