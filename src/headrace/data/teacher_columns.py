"""Teachers' scores of several samples laid end to end, as the samples are.

In: samples and the stretches of them that make a row. Out: one ``TeacherScores`` for the row. A stretch whose sample
has no teacher is blank (log-probability 0, no entries); whether a sample has one is known to its owner, who gives its
tokens no weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.types import Sample, TeacherScores


def join_teachers(samples: Sequence[Sample], spans: Sequence[tuple[int, int, int]]) -> TeacherScores | None:
    """``spans`` are (sample, start, stop) in row order; None where no sample has a teacher."""
    given = [teacher for index, _, _ in spans if (teacher := samples[index].teacher) is not None]
    if not given:
        return None
    logprobs = [_part(samples[i].teacher, "logprobs", start, stop) for i, start, stop in spans]
    width = max(0 if teacher.top_ids is None else teacher.top_ids.shape[1] for teacher in given)
    if not width:
        return TeacherScores(logprobs=np.concatenate(logprobs))
    top_ids = [_part(samples[i].teacher, "top_ids", start, stop, width) for i, start, stop in spans]
    top_logprobs = [_part(samples[i].teacher, "top_logprobs", start, stop, width) for i, start, stop in spans]
    return TeacherScores(
        logprobs=np.concatenate(logprobs),
        top_ids=np.concatenate(top_ids),
        top_logprobs=np.concatenate(top_logprobs),
    )


_BLANK = {"logprobs": (np.float32, 0.0), "top_ids": (np.int32, 0), "top_logprobs": (np.float32, -np.inf)}


def _part(
    teacher: TeacherScores | None, name: str, start: int, stop: int, width: int | None = None
) -> np.ndarray:
    """The stretch of one column, with blanks where the teacher has nothing."""
    dtype, blank = _BLANK[name]
    values = None if teacher is None else getattr(teacher, name)
    shape = (stop - start,) if width is None else (stop - start, width)
    part = np.full(shape, blank, dtype=dtype)
    if values is not None:
        part[..., : values.shape[-1] if width is not None else None] = values[start:stop]
    return part
