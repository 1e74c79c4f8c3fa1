"""When drops stop being bad luck: the error budget, and tasks from which nothing can be learnt.

In: every drop, as it happens. Out: the error that should end the run, or None. A run that is resumed with
its fault mended starts with a whole budget.
"""

from __future__ import annotations

from collections import Counter

from headrace.errors import HeadraceError, RewardError, RolloutError, TaskError
from headrace.types import DropReason

FREE_FAILURES = 3
"""Failed groups that are forgiven before the error budget counts as a share."""
BARREN_STEPS = 20
"""Batches' worth of groups dropped for one reason, none trained in between, after which it is hopeless."""


class DropWatch:
    def __init__(self, *, error_budget: float, groups_per_step: int) -> None:
        self._error_budget = error_budget
        self._patience = BARREN_STEPS * groups_per_step
        self._barren: Counter[DropReason] = Counter()
        self._num_failed = 0

    def scored(self) -> None:
        """A group made it."""
        self._barren.clear()

    def dropped(
        self, reason: DropReason, detail: str, *, num_groups: int, fault: BaseException | None = None
    ) -> HeadraceError | None:
        """``num_groups`` were admitted so far by this controller. ``fault``: what the group failed of."""
        self._barren[reason] += 1
        self._num_failed += reason == "failed"
        if self._num_failed > max(FREE_FAILURES, self._error_budget * num_groups):
            kind = RolloutError if isinstance(fault, RolloutError) else RewardError
            error = kind(
                f"{self._num_failed} of {num_groups} groups failed, over "
                f"reward.error_budget = {self._error_budget:g}; the last one: {detail}; "
                "mend the cause and resume the run, or raise reward.error_budget"
            )
            error.__cause__ = fault
            return error
        return self._hopeless(reason, detail) if self._barren[reason] >= self._patience else None

    def _hopeless(self, reason: DropReason, detail: str) -> HeadraceError | None:
        number = self._barren[reason]
        if reason == "zero-variance":
            return RewardError(
                f"{number} groups had equal rewards and none in between differed, so there is nothing to "
                "learn; use easier or harder tasks, a warm start, or rollout.drop_zero_variance = false"
            )
        if reason == "over-length":
            return TaskError(f"{number} groups had prompts too long for the model, none fitted; {detail}")
        if reason == "wide-mask":
            return TaskError(
                f"{number} groups were drawn from sets too wide to record, none fitted; {detail}"
            )
        return None
