"""Samples -> rows on the device, with everything their loss needs.

In: this rank's samples of one optimizer step. Out: rows whose loss tokens already carry their weight in the
step's loss; the normaliser is counted here, over all rows of all ranks, before any of them is computed.
Every rank has the same number of rows, since each row is one turn of what the ranks do together: a rank
with fewer is given rows without loss tokens.

Legend: N loss tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.algos.aggregation import Aggregation, component_weights
from headrace.data.packing import PackedRow, pack
from headrace.trainers.logprobs import RowTensors, row_tensors
from headrace.trainers.objective import LossInputs
from headrace.trainers.ranks import ALONE, Ranks
from headrace.types import NO_KV, Sample

COMPONENTS = ("main", "pivot")
"""What ``Sample.component`` may name."""


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A packed row on the device."""

    tensors: RowTensors
    inputs: LossInputs
    sequence_share: float
    """What each of the row's sequences counts in a mean over those of the step."""

    @property
    def is_filler(self) -> bool:
        """Computed only to keep in step with the other ranks."""
        return self.tensors.targets_N.numel() == 0


def train_rows(
    samples: Sequence[Sample],
    *,
    version: int,
    aggregation: Aggregation,
    max_tokens: int | None,
    row_tokens: int,
    share_prefixes: bool,
    device: torch.device,
    ranks: Ranks = ALONE,
    pivot_weight: float = 1.0,
) -> list[TrainRow]:
    """Rows of at most ``row_tokens`` tokens; one without loss tokens is left out. ``pivot_weight``: of the branches'
    part of the loss."""
    packed = pack(samples, row_tokens=row_tokens, share_prefixes=share_prefixes)
    counts = np.zeros((len(samples), 2), dtype=np.int64)
    counts[:, 1] = [COMPONENTS.index(sample.component) for sample in samples]
    for row in packed:
        counts[row.sample_index, 0] = np.bincount(row.sequence[row.loss_mask], minlength=row.num_sequences)
    everyones = ranks.join(torch.from_numpy(counts)).numpy()
    first = sum(ranks.counts(len(samples))[: ranks.rank])
    weights = component_weights(
        everyones[:, 0],
        everyones[:, 1],
        (1.0, pivot_weight),
        aggregation=aggregation,
        max_tokens=max_tokens,
    )[first:]
    share = 1.0 / max(len(everyones), 1)
    rows = [
        _device_row(row, weights[row.sample_index], share, version=version, device=device)
        for row in packed
        if row.loss_mask.any()
    ]
    num_fillers = int(ranks.largest(len(rows))[0]) - len(rows)
    return rows + [_device_row(*_EMPTY, version=version, device=device)] * num_fillers


_SILENT = Sample(
    group=0,
    attempt=0,
    token_ids=np.zeros(2, dtype=np.int32),
    loss_mask=np.zeros(2, dtype=bool),
    behavior_logprobs=np.zeros(2, dtype=np.float32),
    versions=np.full(2, -1, dtype=np.int32),
    advantages=np.zeros(2, dtype=np.float32),
    temperature=1.0,
    kv_versions=NO_KV,
)
_EMPTY = (pack([_SILENT], row_tokens=2)[0], np.zeros(1), 0.0)
"""A row without loss tokens, whose sequence weighs nothing."""


def _device_row(
    row: PackedRow, weights: np.ndarray, sequence_share: float, *, version: int, device: torch.device
) -> TrainRow:
    mask = row.loss_mask

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    tensors = row_tensors(row, device=device)
    inputs = LossInputs(
        behavior_logprobs_N=put(row.behavior_logprobs[mask]),
        advantages_N=put(row.advantages[mask]),
        lags_N=put(version - row.versions[mask].astype(np.int64)),
        weights_N=put(weights[row.sequence[mask]].astype(np.float32)),
        sequence_N=tensors.sequence_N,
        num_sequences=row.num_sequences,
        prox_logprobs_N=None,
        ref_logprobs_N=None if row.ref_logprobs is None else put(row.ref_logprobs[mask]),
    )
    return TrainRow(tensors, inputs, sequence_share)
