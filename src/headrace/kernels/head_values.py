"""What the output head says of a token, from one reading of its logits.

In: float32 logits before the softcap, a temperature for each token, and one or several ids at each. Out: the
normaliser (log of the sum of exponentials at that temperature), the log-probabilities at the ids and the entropy, all
float32. A softmax of its own runs in every lane of a tile, so that nothing is exchanged between threads before the row
has ended. Sums are taken relative to the maximum: a common offset of the logits costs no accuracy.

A token whose logit is minus infinity has probability 0 and adds nothing to the entropy.

Shape legend: C tokens, A ids at each, V lanes of a tile of the vocabulary.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1.0e30)
"""The maximum of a lane that has seen nothing: finite, so that a difference to it is a number."""
_FAR = tl.constexpr(200.0)
"""Powers of two that many steps apart are 0 beside each other in float32."""
_TILE = 2048
_NUM_WARPS = 8
_NUM_STAGES = 3
_MAX_IDS = 256


def token_values(
    logits_CV: torch.Tensor, ids: torch.Tensor, temperatures_C: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normaliser [C], log-probabilities in the shape of ``ids`` ([C] or [C, A]) and entropy [C]."""
    num_tokens, vocab_size = logits_CV.shape
    assert logits_CV.dtype == torch.float32 and logits_CV.stride(1) == 1
    normaliser_C = torch.empty(num_tokens, dtype=torch.float32, device=logits_CV.device)
    entropy_C = torch.empty_like(normaliser_C)
    logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits_CV.device)
    num_ids = 1 if ids.dim() == 1 else ids.shape[1]
    if num_tokens:
        _token_values[(num_tokens,)](
            logits_CV,
            ids.contiguous(),
            temperatures_C.contiguous(),
            normaliser_C,
            logprobs,
            entropy_C,
            vocab_size,
            logits_CV.stride(0),
            num_ids,
            SOFTCAP=softcap or 0.0,
            TILE=_TILE,
            IDS=min(triton.next_power_of_2(num_ids), _MAX_IDS),
            STAGES=_NUM_STAGES,
            num_warps=_NUM_WARPS,
        )
    return normaliser_C, logprobs, entropy_C


@triton.jit
def _capped(x, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which saturates rightly when exp overflows.
        x = (1.0 - 2.0 / (tl.exp2(x * (2.0 / SOFTCAP * LOG2_E)) + 1.0)) * SOFTCAP
    return x


@triton.jit
def _token_values(
    logits,
    ids,
    temperatures,
    normalisers,
    logprobs,
    entropies,
    vocab_size,
    stride_c,
    num_ids,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    IDS: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + token)
    rate = LOG2_E / temperature
    row = logits + token * stride_c
    top_V = tl.full((TILE,), _LOWEST, dtype=tl.float32)
    # Of exp2(y), and of exp2(y) * y, with y = (x - top) / temperature in units of log2.
    total_V = tl.zeros((TILE,), dtype=tl.float32)
    moment_V = tl.zeros((TILE,), dtype=tl.float32)
    for first in tl.range(0, vocab_size, TILE, num_stages=STAGES):
        places_V = first + tl.arange(0, TILE)
        x_V = tl.load(row + places_V, mask=places_V < vocab_size, other=0.0)
        x_V = tl.where(places_V < vocab_size, _capped(x_V, SOFTCAP), float("-inf"))
        rise_V = (x_V - top_V) * rate
        # One exponential does for both cases: it shrinks the sums under a new top, or else it is the new term.
        shrunk_V = tl.exp2(-tl.abs(rise_V))
        is_top_V = rise_V > 0.0
        old_V = tl.where(is_top_V, shrunk_V, 1.0)
        new_V = tl.where(is_top_V, 1.0, shrunk_V)
        up_V = tl.minimum(tl.maximum(rise_V, 0.0), _FAR)
        down_V = tl.maximum(tl.minimum(rise_V, 0.0), -_FAR)
        moment_V = (moment_V - up_V * total_V) * old_V + new_V * down_V
        total_V = total_V * old_V + new_V
        top_V = tl.maximum(top_V, x_V)

    top = tl.max(top_V, axis=0)
    down_V = tl.maximum((top_V - top) * rate, -_FAR)
    shrunk_V = tl.exp2(down_V)
    total = tl.sum(total_V * shrunk_V, axis=0)
    moment = tl.sum((moment_V + down_V * total_V) * shrunk_V, axis=0)
    log_total = tl.log(total)
    tl.store(normalisers + token, tl.div_rn(top, temperature) + log_total)
    tl.store(entropies + token, log_total - moment / (total * LOG2_E))
    for first in range(0, num_ids, IDS):
        at_A = first + tl.arange(0, IDS)
        asked_A = at_A < num_ids
        ids_A = tl.load(ids + token * num_ids + at_A, mask=asked_A, other=0)
        x_A = _capped(tl.load(row + ids_A, mask=asked_A, other=0.0), SOFTCAP)
        logprobs_A = tl.div_rn(x_A - top, temperature) - log_total
        tl.store(logprobs + token * num_ids + at_A, logprobs_A, mask=asked_A)
