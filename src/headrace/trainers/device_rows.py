"""What a packed row is on the device, and rows that come there one by one.

In: functions that make rows. Out: the rows, each made when it is first asked for, and once. On a GPU that is while the
row before it is computed, so that the first does not wait for the others. What has to be known of all of them before,
such as the longest, is known without making any.

Legend: N loss tokens of a row, K likeliest tokens of a teacher, E tokens that an environment wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch

from headrace.trainers.logprobs import RowTensors
from headrace.trainers.objective import LossInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherInputs:
    """What a teacher said of a row's loss tokens."""

    logprobs_N: torch.Tensor
    top_ids_NK: torch.Tensor | None
    """int64; None: its likeliest tokens are not known."""
    top_logprobs_NK: torch.Tensor | None
    weights_N: torch.Tensor
    """float32, each token's share in the step's distillation; 0 where there is no teacher."""
    mean_gap: float
    """Mean of log mu - log teacher over the whole step."""


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A packed row on the device."""

    tensors: RowTensors
    inputs: LossInputs
    sequence_share: float
    """What each of the row's sequences counts in a mean over those of the step."""
    teacher: TeacherInputs | None = None
    """None: none of the row's samples has a teacher."""
    environment_weights_E: torch.Tensor | None = None
    """float32, the share in their own component of the tokens an environment wrote; None: they are not trained on."""

    @property
    def is_filler(self) -> bool:
        """Computed only to keep in step with the other ranks."""
        return self.tensors.targets_N.numel() == 0

    @property
    def start(self) -> tuple[torch.Tensor, LossInputs] | None:
        """Log-probabilities of the weights the step starts from and what they are compared with; None: they are not
        known before the row is computed."""
        prox_N = self.inputs.prox_logprobs_N
        return None if prox_N is None or self.is_filler else (prox_N, self.inputs)


class LazyRows(Sequence[TrainRow]):
    """Rows that are made when they are first asked for."""

    def __init__(self, makers: Sequence[Callable[[], TrainRow]], *, most_tokens: int) -> None:
        self._makers = list(makers)
        self._made: dict[int, TrainRow] = {}
        self.most_tokens = most_tokens
        """Of the longest row, as it is computed."""

    def __len__(self) -> int:
        return len(self._makers)

    def __iter__(self) -> Iterator[TrainRow]:
        # A sequence's own ends at the first IndexError, and would take one from making a row for the last row.
        return (self[i] for i in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> TrainRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainRow]: ...
    def __getitem__(self, index: int | slice) -> TrainRow | list[TrainRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place not in self._made:
            self._made[place] = self._makers[place]()
        return self._made[place]


def most_tokens(rows: Sequence[TrainRow]) -> int:
    """Of the longest row, as it is computed."""
    if isinstance(rows, LazyRows):
        return rows.most_tokens
    return max((row.tensors.token_ids_T.numel() for row in rows), default=0)


def known_starts(rows: Sequence[TrainRow]) -> list[tuple[torch.Tensor, LossInputs]]:
    """The ``start`` of every row that has one; rows that are still to be made have none."""
    if isinstance(rows, LazyRows):
        return []
    return [start for row in rows if (start := row.start) is not None]
