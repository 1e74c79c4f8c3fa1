"""Cutting and joining completions, for interrupted attempts.

``join(tail(c, 0), tail(c, n))`` style round trips are exact: tokens, log-probabilities and versions of
the earlier part are never touched, and so are routes. Key-value versions always describe the whole
sequence, so the later part's record wins.
"""

from __future__ import annotations

import numpy as np

from headrace.data import masks
from headrace.data.routing import join_routing, routing_tail
from headrace.types import NO_KV, Completion, SamplingMask

EMPTY = Completion(
    token_ids=np.zeros(0, np.int32),
    logprobs=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    finish_reason="abort",
    kv_versions=NO_KV,
)


def tail(completion: Completion, start: int) -> Completion:
    """The tokens from ``start`` on. Their routes begin with the token before, which had none when it was the last."""
    mask, routing = completion.sampling_mask, completion.routing
    if routing is not None and start:
        routing = routing_tail(routing, completion.num_tokens - start + 1)
    return Completion(
        token_ids=completion.token_ids[start:],
        logprobs=completion.logprobs[start:],
        versions=completion.versions[start:],
        finish_reason=completion.finish_reason,
        kv_versions=completion.kv_versions,
        routing=routing,
        sampling_mask=None if mask is None else masks.cut(mask, start, completion.num_tokens),
    )


def join(first: Completion, rest: Completion) -> Completion:
    """``rest`` continues ``first``."""
    return Completion(
        token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        versions=np.concatenate([first.versions, rest.versions]),
        finish_reason=rest.finish_reason,
        kv_versions=rest.kv_versions,
        routing=join_routing(first.routing, rest.routing, rest.num_tokens),
        sampling_mask=_join_masks(first, rest),
    )


def _join_masks(first: Completion, rest: Completion) -> SamplingMask | None:
    if first.sampling_mask is None and rest.sampling_mask is None:
        return None
    return masks.join([_mask_or_whole(first), _mask_or_whole(rest)])


def _mask_or_whole(completion: Completion) -> SamplingMask:
    mask = completion.sampling_mask
    return masks.whole(completion.num_tokens) if mask is None else mask
