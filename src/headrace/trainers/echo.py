"""Cross-entropy on what an environment answered, as a part of the loss beside the policy's (ECHO, arXiv 2605.24517).

In: a row whose attempts have several turns. Out: one scalar to add to the row's loss, divided by a normaliser of its
own: the tokens that lie between sampled ones, counted over the whole optimizer step by the same rule of aggregation.
Nobody sampled these tokens, so there is no behaviour policy, no ratio and no kept set: they are valued by the model's
own distribution, at temperature 1, in a pass of their own over the head. Every number of the sampled tokens is the same
to the last bit with it and without.

Legend: E environment tokens of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headrace.algos.aggregation import aggregate
from headrace.errors import ConfigError
from headrace.trainers.device_rows import TrainRow
from headrace.trainers.metrics import RowRecord
from headrace.trainers.objective import RowOutcome
from headrace.trainers.ranks import ALONE, Ranks


@dataclass(frozen=True, slots=True)
class Echo:
    coef: float

    def __post_init__(self) -> None:
        if self.coef <= 0:
            raise ConfigError(f"coef of the environment's tokens must be above 0, not {self.coef}")

    def added_to(self, outcome: RowOutcome, logprobs_E: torch.Tensor | None, row: TrainRow) -> RowOutcome:
        """The row's outcome with this part in its loss; unchanged where the environment answered nothing."""
        if logprobs_E is None or row.environment_weights_E is None:
            return outcome
        entropy = aggregate(-logprobs_E, row.environment_weights_E)
        return replace(
            outcome,
            loss=outcome.loss + self.coef * entropy,
            environment=entropy.detach(),
            num_environment_tokens=logprobs_E.numel(),
        )

    def metrics(
        self, records: Sequence[RowRecord], ranks: Ranks = ALONE, *, num_updates: int = 1
    ) -> dict[str, float]:
        """Of the loss the mean over so many minibatches."""
        outcomes = [record.outcome for record in records]
        loss, num_tokens = ranks.totals(
            float(sum(o.environment.double() for o in outcomes if o.environment is not None)),
            sum(o.num_environment_tokens for o in outcomes),
        )
        return {"environment_loss": loss / num_updates, "environment_tokens": num_tokens}
