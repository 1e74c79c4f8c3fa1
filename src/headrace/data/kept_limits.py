"""What training asks of recorded kept sets, before a group is scored.

In: the finished episodes of a group. Out: the reason to drop the group and its details, or None. A group whose
distribution was not cut costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.data import masks
from headrace.types import MAX_KEPT_TOKENS, DropReason, Episode, SamplingMask, Turn


def mask_fault(
    episodes: Sequence[Episode], *, vocab_size: int | None = None
) -> tuple[DropReason, str] | None:
    """``failed``: a mask that does not belong to its tokens or to the model; ``wide-mask``: one with too many ids for
    a token. What is not trained on may have any."""
    for episode in episodes:
        turns = [
            turn for trajectory in episode.trajectories if trajectory.trainable for turn in trajectory.turns
        ]
        for number, turn in enumerate(turns):
            mask = turn.completion.sampling_mask
            wrong = None if mask is None else _fault(turn, mask, vocab_size)
            if wrong is not None:
                reason, text = wrong
                return reason, f"attempt {episode.group}/{episode.attempt}, turn {number}: {text}"
    return None


def _fault(turn: Turn, mask: SamplingMask, vocab_size: int | None) -> tuple[DropReason, str] | None:
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
