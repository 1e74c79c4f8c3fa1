"""Samples -> rows on the device, with everything their loss needs.

In: this rank's samples of one optimizer step. Out: rows whose loss tokens already carry their weight in the
step's loss; the normaliser is counted here, over all rows of all ranks, before any of them is computed.
Every rank has the same number of rows, since each row is one turn of what the ranks do together: a rank
with fewer is given rows without loss tokens. A row is brought to the device when it is first asked for, on a GPU while
the one before it is computed, so that the first does not wait for the others.

Legend: N loss tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from headrace.algos.aggregation import Aggregation, component_weights, sequence_weights
from headrace.algos.corrections import m2po_cutoff
from headrace.data.packing import PackedRow, pack
from headrace.models.uploads import to_device
from headrace.trainers.device_rows import LazyRows, TeacherInputs, TrainRow, known_starts
from headrace.trainers.logprobs import row_tensors
from headrace.trainers.objective import LossInputs, Part
from headrace.trainers.ranks import ALONE, Ranks
from headrace.types import NO_KV, Sample, TrainBatch

COMPONENTS = ("main", "pivot")
"""What ``Sample.component`` may name."""


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
    parts: Sequence[Part] = (),
    with_teachers: bool = False,
    with_environment: bool = False,
    pivot_weight: float = 1.0,
) -> LazyRows:
    """Rows of at most ``row_tokens`` tokens; one without loss tokens is left out. Each of ``parts``, the loss's
    further components, has a normaliser over the tokens it covers. Teachers' scores are brought along where they
    are asked for, their normaliser being that of the samples that have one; so are the tokens that an environment
    wrote, with a normaliser over these alone. ``pivot_weight``: of the branches' part of the loss, whose normaliser is
    its own too."""
    packed = pack(samples, row_tokens=row_tokens, share_prefixes=share_prefixes)
    first = sum(ranks.counts(len(samples))[: ranks.rank])
    kinds = ranks.join(
        torch.tensor([COMPONENTS.index(s.component) for s in samples], dtype=torch.int64)
    ).numpy()

    def token_weights(covered: Sequence[np.ndarray], of: Sequence[np.ndarray]) -> Callable[[int], np.ndarray]:
        """By row, the weights of the tokens ``of``, 0 where they are not covered."""
        counts = np.zeros(len(samples), dtype=np.int64)
        for row, is_covered in zip(packed, covered, strict=True):
            counts[row.sample_index] = np.bincount(row.sequence[is_covered], minlength=row.num_sequences)
        everyones = ranks.join(torch.from_numpy(counts)).numpy()
        weights = component_weights(
            everyones, kinds, (1.0, pivot_weight), aggregation=aggregation, max_tokens=max_tokens
        )[first:]

        def of_row(i: int) -> np.ndarray:
            row_weights = weights[packed[i].sample_index][packed[i].sequence] * covered[i]
            return row_weights[of[i]].astype(np.float32)

        return of_row

    sampled = [row.loss_mask for row in packed]
    own = token_weights(sampled, sampled)
    extra = {
        part.name: token_weights([part.covers(row) & row.loss_mask for row in packed], sampled)
        for part in parts
    }
    answered = [row.environment_mask for row in packed] if with_environment else []
    environment = token_weights(answered, answered) if with_environment else None
    share = 1.0 / max(ranks.totals(len(samples))[0], 1)
    teach = _teaching(samples, aggregation, max_tokens, ranks) if with_teachers else None

    def made(i: int) -> TrainRow:
        row = _device_row(
            packed[i], own(i), share, parts={name: weights(i) for name, weights in extra.items()},
            version=version, device=device, environment=None if environment is None else environment(i),
        )  # fmt: skip
        return row if teach is None else replace(row, teacher=teach(packed[i], device))

    nothing = {part.name: _NO_WEIGHTS for part in parts}
    makers = [partial(made, i) for i, row in enumerate(packed) if row.loss_mask.any()]
    num_fillers = int(ranks.largest(len(makers))[0]) - len(makers)
    filler = partial(_device_row, *_EMPTY, parts=nothing, version=version, device=device)
    longest = max((row.num_computed for row in packed if row.loss_mask.any()), default=0)
    return LazyRows(
        makers + [filler] * num_fillers,
        most_tokens=max(longest, _EMPTY[0].num_computed if num_fillers else 0),
    )


def without_truncated(parts: Sequence[TrainBatch], ranks: Ranks) -> tuple[list[TrainBatch], float]:
    """The minibatches without samples that end with a completion cut off at its length, and the share of tokens left
    out."""
    kept = [
        replace(part, samples=tuple(s for s in part.samples if s.finish_reason != "length")) for part in parts
    ]
    before, after = ranks.totals(
        *(sum(s.num_loss_tokens for part in side for s in part.samples) for side in (parts, kept))
    )
    return kept, 1 - after / max(before, 1)


def with_cutoff(
    rows_of_parts: Sequence[Sequence[TrainRow]], *, tau: float, ranks: Ranks
) -> list[list[TrainRow]]:
    """Rows that know which of their tokens ``m2po`` leaves out, judged over the whole batch; prox is computed."""
    known = [start for rows in rows_of_parts for start in known_starts(rows)]
    gaps = [prox_N - inputs.behavior_logprobs_N for prox_N, inputs in known]
    cutoff = m2po_cutoff(ranks.join(torch.cat(gaps) if gaps else torch.zeros(0)), tau=tau)
    return [
        [replace(row, inputs=replace(row.inputs, m2po_cutoff=cutoff)) for row in rows]
        for rows in rows_of_parts
    ]


_SILENT_TOKENS = 3
"""Two are computed. One alone would be compiled for by itself, while the other ranks wait."""
_SILENT = Sample(
    group=0,
    attempt=0,
    token_ids=np.zeros(_SILENT_TOKENS, dtype=np.int32),
    loss_mask=np.zeros(_SILENT_TOKENS, dtype=bool),
    behavior_logprobs=np.zeros(_SILENT_TOKENS, dtype=np.float32),
    versions=np.full(_SILENT_TOKENS, -1, dtype=np.int32),
    advantages=np.zeros(_SILENT_TOKENS, dtype=np.float32),
    temperature=1.0,
    kv_versions=NO_KV,
)
_NO_WEIGHTS = np.zeros(0, dtype=np.float32)
_EMPTY = (pack([_SILENT], row_tokens=_SILENT_TOKENS)[0], _NO_WEIGHTS, 0.0)
"""A row without loss tokens, whose sequence weighs nothing."""


def _device_row(
    row: PackedRow,
    weights: np.ndarray,
    sequence_share: float,
    *,
    parts: Mapping[str, np.ndarray],
    version: int,
    device: torch.device,
    environment: np.ndarray | None = None,
) -> TrainRow:
    """``environment``: weights of the tokens that one wrote; None: they are not trained on."""
    mask = row.loss_mask

    def put(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    tensors = row_tensors(row, device=device, with_environment=environment is not None)
    inputs = LossInputs(
        behavior_logprobs_N=put(row.behavior_logprobs[mask]),
        advantages_N=put(row.advantages[mask]),
        lags_N=put(version - row.versions[mask].astype(np.int64)),
        weights_N=put(weights),
        sequence_N=tensors.sequence_N,
        num_sequences=row.num_sequences,
        prox_logprobs_N=None,
        ref_logprobs_N=None if row.ref_logprobs is None else put(row.ref_logprobs[mask]),
        part_weights_N={name: put(part) for name, part in parts.items()},
    )
    answered = None if environment is None else put(environment)
    return TrainRow(tensors, inputs, sequence_share, environment_weights_E=answered)


def _teaching(
    samples: Sequence[Sample], aggregation: Aggregation, max_tokens: int | None, ranks: Ranks
) -> Callable[[PackedRow, torch.device], TeacherInputs | None]:
    """What teachers said of a row, with each token's share in the step's distillation."""
    first = sum(ranks.counts(len(samples))[: ranks.rank])
    counts = np.array([s.num_loss_tokens if s.teacher is not None else 0 for s in samples], dtype=np.int64)
    everyones = ranks.join(torch.from_numpy(counts)).numpy()
    weights = sequence_weights(everyones, aggregation=aggregation, max_tokens=max_tokens)
    own = weights[first : first + len(samples)] * (counts > 0)
    mean_gap = _mean_gap(samples, own, ranks)
    return lambda row, device: _teacher_inputs(row, own[row.sample_index], mean_gap, device)


def _mean_gap(samples: Sequence[Sample], weights: np.ndarray, ranks: Ranks) -> float:
    """Mean of log mu - log teacher over the loss tokens of all ranks that have a teacher, by their weights."""
    gap, weight = 0.0, 0.0
    for sample, its in zip(samples, weights.tolist(), strict=True):
        if sample.teacher is not None:
            mask = sample.loss_mask
            gap += its * float((sample.behavior_logprobs[mask] - sample.teacher.logprobs[mask]).sum())
            weight += its * int(mask.sum())
    gap, weight = ranks.totals(gap, weight)
    return gap / weight if weight else 0.0


def _teacher_inputs(
    source: PackedRow, weights: np.ndarray, mean_gap: float, device: torch.device
) -> TeacherInputs | None:
    mask, scores = source.loss_mask, source.teacher
    if scores is None:
        return None

    def put(array: np.ndarray) -> torch.Tensor:
        return to_device(array, device)

    return TeacherInputs(
        logprobs_N=put(scores.logprobs[mask]),
        top_ids_NK=None if scores.top_ids is None else put(scores.top_ids[mask].astype(np.int64)),
        top_logprobs_NK=None if scores.top_logprobs is None else put(scores.top_logprobs[mask]),
        weights_N=put(weights[source.sequence[mask]].astype(np.float32)),
        mean_gap=mean_gap,
    )
