"""What training asks of recorded tokens and kept sets, before a group is scored.

In: the finished episodes of a group. Out: the reason to drop the group and its details, or None. What an engine hands
over that the trainer could not use, or would use wrongly, costs its group here and not the run there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.data import masks
from headrace.types import MAX_KEPT_TOKENS, DropReason, Episode, Turn


def record_fault(
    episodes: Sequence[Episode], *, vocab_size: int | None = None
) -> tuple[DropReason, str] | None:
    """``failed``: tokens that the model does not have, a mask that is missing or does not belong to its tokens or to
    the model; ``wide-mask``: one with too many ids for a token. What is not trained on may have any."""
    of_episodes = [[u for t in episode.trajectories if t.trainable for u in t.turns] for episode in episodes]
    if _is_plain([turn for turns in of_episodes for turn in turns], vocab_size):
        return None
    for episode, turns in zip(episodes, of_episodes, strict=True):
        for number, turn in enumerate(turns):
            wrong = _token_fault(turn, vocab_size) or _mask_fault(turn, vocab_size)
            if wrong is not None:
                reason, text = wrong
                return reason, f"attempt {episode.group}/{episode.attempt}, turn {number}: {text}"
    return None


def _is_plain(turns: Sequence[Turn], vocab_size: int | None) -> bool:
    """Nothing was cut and all tokens are in the vocabulary: one look at all, since nearly every group is like that."""
    if any(turn.completion.sampling_mask is not None or turn.sampling.truncates for turn in turns):
        return False
    if vocab_size is None or not turns:
        return True
    ids = np.concatenate([turn.completion.token_ids for turn in turns])
    return not ids.size or bool(ids.min() >= 0 and ids.max() < vocab_size)


def _token_fault(turn: Turn, vocab_size: int | None) -> tuple[DropReason, str] | None:
    ids = turn.completion.token_ids
    if vocab_size is None or not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size):
        return None
    return "failed", (
        f"{turn.engine} sampled the ids {ids.min()} to {ids.max()}, some outside the vocabulary of {vocab_size}; give "
        "engine and trainer the same model"
    )


def _mask_fault(turn: Turn, vocab_size: int | None) -> tuple[DropReason, str] | None:
    mask = turn.completion.sampling_mask
    if mask is None:
        if not turn.sampling.truncates or not turn.completion.num_tokens:
            return None
        return "failed", (
            f"{turn.engine} recorded no sampling mask, though top_k, top_p or min_p cut its distribution; without it "
            "every ratio is wrong"
        )
    wrong = masks.fault(mask, turn.completion.token_ids, vocab_size=vocab_size)
    if wrong is not None:
        return "failed", f"the sampling mask from {turn.engine} is not that of its tokens: {wrong}"
    row, count = masks.widest_row(mask)
    if count > MAX_KEPT_TOKENS:
        return "wide-mask", (
            f"token {row} was drawn among {count} ids, and {MAX_KEPT_TOKENS} are recorded for one token at "
            f"most; set rollout.top_k to {MAX_KEPT_TOKENS} or less"
        )
    return None
