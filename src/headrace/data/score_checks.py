"""Are recorded scores whole? What teachers and judges of steps said of an attempt, held against its tokens.

In: the columns that name an attempt, its turns or token sequences, and what is known of the run. Out: what is wrong, in
words; nothing for sound scores. Nothing is raised, so a checker goes on with the next attempt.

Shape legend: T tokens of a sample, K likeliest tokens of a position, C steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.data.record_checks import ABOVE_ZERO, Limits
from headrace.data.steps import PROCESS
from headrace.types import ScoreColumn, TeacherScores

SAME_LOGPROB = 1e-3
"""How far two roundings of one log-probability may lie apart."""


def step_faults(
    columns: Sequence[ScoreColumn], turn_tokens: Sequence[int] | None, *, is_settled: bool
) -> Iterator[str]:
    """Of one source, in the order they were told. ``turn_tokens``: what each turn sampled; None: one is lost.
    ``is_settled``: the attempt was scored, and the source is not said to be missing."""
    wrong = [text for column in columns for text in _step_shape(column)]
    if wrong:
        yield from wrong
        return
    ends_C = np.concatenate([column.step_ends for column in columns if column.step_ends is not None])
    scores_C = np.concatenate([column.step_scores for column in columns if column.step_scores is not None])
    unfit = np.flatnonzero(~np.isfinite(scores_C))
    if len(unfit):
        yield f"step {unfit[0]} has the score {scores_C[unfit[0]]}"
    befores = np.concatenate([np.zeros(1, np.int32), ends_C[:-1]])
    falls = np.flatnonzero(ends_C <= befores)
    if len(falls):
        yield f"step {falls[0]} ends at token {ends_C[falls[0]]}, the one before it at {befores[falls[0]]}"
    elif turn_tokens is not None:
        yield from _step_places(columns[0].source, ends_C, np.cumsum([0, *turn_tokens]), is_settled)


def _step_shape(column: ScoreColumn) -> Iterator[str]:
    for name, dtype in (("step_ends", np.int32), ("step_scores", np.float32)):
        values = getattr(column, name)
        if values is None or values.ndim != 1 or values.dtype != dtype:
            found = "missing" if values is None else f"{values.dtype} of shape {values.shape}"
            yield f"{name} is {found}, not {np.dtype(dtype)} [C]"
            return
    ends, scores, versions = column.step_ends, column.step_scores, column.versions
    if ends is not None and scores is not None and len(ends) != len(scores):
        yield f"{len(scores)} scores for {len(ends)} steps"
    elif versions is not None and ends is not None:
        if versions.shape != ends.shape or versions.dtype != np.int32:
            yield f"the judge's versions are {versions.dtype} of shape {versions.shape}, for {len(ends)} steps"
        elif (versions < 0).any():
            yield f"a step was judged by version {versions.min()}"


def _step_places(source: str, ends_C: np.ndarray, borders: np.ndarray, is_settled: bool) -> Iterator[str]:
    """``borders``: where turns begin and end, in sampled tokens."""
    last, num_tokens = int(ends_C[-1]) if len(ends_C) else 0, int(borders[-1])
    if last > num_tokens:
        yield f"step {len(ends_C) - 1} ends at token {last}, the attempt has {num_tokens}"
    elif is_settled and last < num_tokens:
        yield f"its steps end at token {last} of {num_tokens}, and none is said to be missing"
    inner = [border for border in borders.tolist() if 0 < border < min(last, num_tokens)]
    crossed = [border for border in inner if border not in ends_C]
    if source == PROCESS and crossed:
        yield f"a step begins before token {crossed[0]} and ends behind it, but a turn ends there"


def teacher_faults(
    scores: Sequence[TeacherScores], sequences: Sequence[np.ndarray] | None, limits: Limits
) -> Iterator[str]:
    """``sequences``: int32 [T] of each of the attempt's samples; None: a part of them is lost."""
    if sequences is not None and len(scores) != len(sequences):
        yield f"{len(scores)} sequences are scored, the attempt has {len(sequences)} samples"
        return
    for place, said in enumerate(scores):
        token_ids = None if sequences is None else sequences[place]
        yield from (f"sample {place}: {text}" for text in _sample_faults(said, token_ids, limits))


def _sample_faults(said: TeacherScores, token_ids: np.ndarray | None, limits: Limits) -> Iterator[str]:
    newest = limits.newest_version
    if said.version < 0 or (newest is not None and said.version > newest):
        yield f"the teacher is of version {said.version}, the run has reached {newest}"
    if not said.teacher:
        yield "the teacher has no name"
    num_tokens = len(said.logprobs) if token_ids is None else len(token_ids)
    wrong = list(_teacher_shape(said, num_tokens))
    if wrong:
        yield from wrong
        return
    logprobs_T = said.logprobs
    unfit = np.flatnonzero(~np.isfinite(logprobs_T) | (logprobs_T > ABOVE_ZERO))
    if len(unfit):
        yield f"token {unfit[0]} has the logprob {logprobs_T[unfit[0]]}"
    elif num_tokens and logprobs_T[0] != 0:
        yield f"token 0 has the logprob {logprobs_T[0]}, though nothing is before it"
    elif said.top_ids is not None and said.top_logprobs is not None:
        yield from _top_faults(said.top_ids, said.top_logprobs, limits)
        if token_ids is not None:
            yield from _own_faults(said, said.top_ids, said.top_logprobs, token_ids)


def _teacher_shape(said: TeacherScores, num_tokens: int) -> Iterator[str]:
    if said.logprobs.shape != (num_tokens,) or said.logprobs.dtype != np.float32:
        yield f"logprobs are {said.logprobs.dtype} of shape {said.logprobs.shape}, for {num_tokens} tokens"
    ids, logprobs = said.top_ids, said.top_logprobs
    if (ids is None) != (logprobs is None):
        yield "of the likeliest tokens, ids or log-probabilities are missing"
    elif ids is not None and logprobs is not None:
        if ids.ndim != 2 or len(ids) != num_tokens or ids.dtype != np.int32:
            yield f"top_ids are {ids.dtype} of shape {ids.shape}, for {num_tokens} tokens"
        if logprobs.shape != ids.shape or logprobs.dtype != np.float32:
            yield f"top_logprobs are {logprobs.dtype} of shape {logprobs.shape}, top_ids of shape {ids.shape}"


def _top_faults(ids_TK: np.ndarray, logprobs_TK: np.ndarray, limits: Limits) -> Iterator[str]:
    """An entry that is none has the log-probability -inf."""
    given_TK = logprobs_TK != -np.inf
    unfit = np.argwhere(given_TK & ~(logprobs_TK <= ABOVE_ZERO))
    if len(unfit):
        at, entry = unfit[0]
        yield f"token {at} has a likeliest one with the logprob {logprobs_TK[at, entry]}"
        return
    if len(given_TK) and given_TK[0].any():
        yield "token 0 has likeliest ones, though nothing is before it"
    mass_T = np.exp(logprobs_TK.astype(np.float64)).sum(axis=1)
    if len(mass_T) and mass_T.max() > 1 + SAME_LOGPROB:
        yield f"the likeliest tokens at {int(mass_T.argmax())} have the probability {mass_T.max():.4f} in all"
    vocab = limits.vocab_size
    beyond = given_TK & ((ids_TK < 0) | (False if vocab is None else ids_TK >= vocab))
    if beyond.any():
        at = int(beyond.any(axis=1).argmax())
        yield f"the likeliest tokens at {at} hold id {ids_TK[beyond][0]}, the vocabulary has {vocab}"
    # Blanks count down from -1, so that they never equal anything.
    blanks_K = -1 - np.arange(ids_TK.shape[1])
    doubled_T = (np.diff(np.sort(np.where(given_TK, ids_TK, blanks_K), axis=1), axis=1) == 0).any(axis=1)
    if doubled_T.any():
        yield f"the likeliest tokens at {int(doubled_T.argmax())} hold an id twice"


def _own_faults(
    said: TeacherScores, ids_TK: np.ndarray, logprobs_TK: np.ndarray, token_ids: np.ndarray
) -> Iterator[str]:
    """A token among the likeliest has the same log-probability there, any other one at most the least of them;
    scores of another sequence would not."""
    given_TK = logprobs_TK > -np.inf
    given_TK[:1] = False
    own_TK = given_TK & (ids_TK == token_ids[:, None])
    least_T = np.where(given_TK, logprobs_TK, np.inf).min(axis=1, initial=np.inf)
    among_T = np.where(own_TK, logprobs_TK, -np.inf).max(axis=1, initial=-np.inf)
    is_among_T = own_TK.any(axis=1)
    apart_T = np.abs(np.where(is_among_T, among_T, said.logprobs) - said.logprobs) > SAME_LOGPROB
    unfit = np.flatnonzero(apart_T | (~is_among_T & (said.logprobs > least_T + SAME_LOGPROB)))
    if len(unfit):
        at = int(unfit[0])
        row = dict(zip(ids_TK[at].tolist(), logprobs_TK[at].tolist(), strict=True))
        yield (
            f"token {at} is {token_ids[at]} with the logprob {said.logprobs[at]:.4f}, which the likeliest ones deny: "
            f"{', '.join(f'{i} {p:.4f}' for i, p in list(row.items())[:4])}"
        )
