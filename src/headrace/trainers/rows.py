"""Samples -> rows on the device, with everything their loss needs.

In: the samples of one optimizer step. Out: rows whose loss tokens already carry their weight in the step's
loss; the normaliser is counted here, over all rows, before any of them is computed.

Legend: N loss tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.algos.aggregation import Aggregation, sequence_weights
from headrace.data.packing import PackedRow, pack
from headrace.trainers.logprobs import RowTensors, row_tensors
from headrace.trainers.objective import LossInputs
from headrace.types import Sample


@dataclass(frozen=True, slots=True)
class TrainRow:
    """A packed row on the device."""

    tensors: RowTensors
    inputs: LossInputs


def train_rows(
    samples: Sequence[Sample],
    *,
    version: int,
    aggregation: Aggregation,
    max_tokens: int | None,
    row_tokens: int,
    share_prefixes: bool,
    device: torch.device,
) -> list[TrainRow]:
    """Rows of at most ``row_tokens`` tokens; one without loss tokens is left out."""
    packed = pack(samples, row_tokens=row_tokens, share_prefixes=share_prefixes)
    counts = np.zeros(len(samples), dtype=np.int64)
    for row in packed:
        counts[row.sample_index] = np.bincount(row.sequence[row.loss_mask], minlength=row.num_sequences)
    weights = sequence_weights(counts, aggregation=aggregation, max_tokens=max_tokens)
    return [
        _device_row(row, weights[row.sample_index], version=version, device=device)
        for row in packed
        if row.loss_mask.any()
    ]


def _device_row(row: PackedRow, weights: np.ndarray, *, version: int, device: torch.device) -> TrainRow:
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
    return TrainRow(tensors, inputs)
