"""The part of a row's loss that pulls the policy towards a teacher.

In: a row whose samples carry a teacher's scores. Out: one scalar to add to the row's loss, divided by a normaliser
of its own: the loss tokens that have a teacher, counted over the whole optimizer step before the first backward. A
step may thus hold tasks with and without a teacher, and how many of either there are changes neither part.

Legend: N loss tokens of the row, K entries of the teacher, A ids at which the head is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from headrace.algos import distillation
from headrace.algos.aggregation import aggregate
from headrace.errors import ConfigError, TrainingError
from headrace.trainers.device_rows import TeacherInputs, TrainRow
from headrace.trainers.logprobs import RowTensors, TokenValues
from headrace.trainers.objective import RowOutcome
from headrace.types import TrainBatch


class PolicyWeights(Protocol):
    """What is asked of the weights that are trained."""

    def values(self, row: RowTensors) -> TokenValues: ...

    def logprobs_at(self, row: RowTensors, ids_NA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """What one forward pass says of a row's loss tokens."""

    sampled_N: torch.Tensor
    entropy_N: torch.Tensor
    at_teachers_NK: torch.Tensor | None
    """Of the teacher's likeliest tokens; None: they are not compared."""
    kept_mass_N: torch.Tensor | None = None
    """As in ``TokenValues``."""
    environment_E: torch.Tensor | None = None
    """Likewise."""


def row_logprobs(weights: PolicyWeights, row: TrainRow, *, compared: bool) -> RowLogprobs:
    """The sampled tokens, and where they are ``compared`` the teacher's beside them, from one pass over the head. It
    is over the whole vocabulary then: ``Distillation.check`` lets no kept sets through."""
    ids_NK = None if row.teacher is None else row.teacher.top_ids_NK
    if ids_NK is None or not compared:
        values = weights.values(row.tensors)
        return RowLogprobs(
            values.logprobs_N, values.entropy_N, None, values.kept_mass_N, values.environment_E
        )
    ids_NA = torch.cat([row.tensors.targets_N[:, None], ids_NK], dim=1)
    logprobs_NA, entropy_N = weights.logprobs_at(row.tensors, ids_NA)
    return RowLogprobs(logprobs_NA[:, 0], entropy_N, logprobs_NA[:, 1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """Which divergence, and how much it counts."""

    divergence: distillation.DivergenceName = "sampled"
    coef: float = 1.0

    def __post_init__(self) -> None:
        if self.divergence != "sampled" and self.divergence not in distillation.COMPUTED:
            raise ConfigError(
                f"divergence {self.divergence!r} is unknown: use sampled, {', '.join(distillation.COMPUTED)}"
            )
        if self.coef <= 0:
            raise ConfigError(f"coef of the distillation must be above 0, not {self.coef}")

    @property
    def compares(self) -> bool:
        """Whether it reads the policy at the teacher's likeliest tokens."""
        return self.divergence != "sampled"

    def check(self, parts: Sequence[TrainBatch]) -> None:
        """Raise TrainingError for scores that this divergence cannot use. A sample without a teacher may lie in a row
        with one that has, so it must not be of a kept set either."""
        samples = [sample for part in parts for sample in part.samples]
        if not self.compares or all(sample.teacher is None for sample in samples):
            return
        for sample in samples:
            name = f"sample {sample.group}/{sample.attempt}"
            if sample.teacher is not None and sample.teacher.top_ids is None:
                raise TrainingError(
                    f"{name}: its teacher gave no likeliest tokens, which divergence {self.divergence!r} compares; set "
                    "distill.divergence to sampled"
                )
            if sample.sampling_mask is not None:
                raise TrainingError(
                    f"{name}: its distribution was truncated, those of teachers are not; set distill.divergence to "
                    "sampled, or top_k to 0, top_p to 1 and min_p to 0"
                )

    def added_to(self, outcome: RowOutcome, policy: RowLogprobs, row: TrainRow) -> RowOutcome:
        """The row's outcome with this part in its loss; unchanged where the row has no teacher."""
        if row.teacher is None:
            return outcome
        tokens = self._divergence(policy, row.teacher, row.inputs.behavior_logprobs_N)
        loss = outcome.loss + self.coef * aggregate(tokens.loss_T, row.teacher.weights_N)
        return replace(outcome, loss=loss, distillation=aggregate(tokens.value_T, row.teacher.weights_N))

    def _divergence(
        self, policy: RowLogprobs, teacher: TeacherInputs, behavior_N: torch.Tensor
    ) -> distillation.TokenDivergence:
        if self.divergence == "sampled":
            return distillation.sampled(
                policy.sampled_N, behavior_N, teacher.logprobs_N, baseline=teacher.mean_gap
            )
        assert policy.at_teachers_NK is not None and teacher.top_logprobs_NK is not None
        return distillation.COMPUTED[self.divergence](policy.at_teachers_NK, teacher.top_logprobs_NK)
