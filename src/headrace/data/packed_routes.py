"""Recorded routes in packed rows.

In: samples and how their segments lie in a row. Out: the record of every token of the row, and how far two samples
with the same tokens were routed alike, since what is computed once can be routed in one way only.

Legend: T tokens of the row, M mixture-of-experts layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.types import Sample


def lay_routes(
    samples: Sequence[Sample], spans: Sequence[tuple[int, int, int]], cu_seqlens: np.ndarray
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The records of the segments, (sample, start, stop) each, laid out like their tokens: [T, M, K] and bool [T].
    None: there are none."""
    records = [routing for index, _, _ in spans if (routing := samples[index].routing) is not None]
    if not records:
        return None, None
    routed_T = np.zeros(cu_seqlens[-1], dtype=bool)
    dtype = np.result_type(*{routing.experts.dtype for routing in records})
    routes_TMK = np.zeros((len(routed_T), *records[0].experts.shape[1:]), dtype)
    for (index, start, stop), at in zip(spans, cu_seqlens[:-1].tolist(), strict=True):
        routing = samples[index].routing
        if routing is not None:
            own = routing.recorded[start:stop]
            first = int(np.count_nonzero(routing.recorded[:start]))
            routed_T[at : at + stop - start] = own
            routes_TMK[at + np.flatnonzero(own)] = routing.experts[first : first + np.count_nonzero(own)]
    return routes_TMK, routed_T


def equally_routed(a: Sample, b: Sample, num_tokens: int) -> int:
    """How many of their first ``num_tokens`` tokens, which are the same, have the same record."""
    if a.routing is None or b.routing is None:
        return num_tokens if a.routing is b.routing else 0
    marks_a, marks_b = a.routing.recorded[:num_tokens], b.routing.recorded[:num_tokens]
    num_tokens = _num_equal(marks_a, marks_b)
    positions = np.flatnonzero(marks_a[:num_tokens])
    num_rows = len(positions)
    same = _num_equal(a.routing.experts[:num_rows], b.routing.experts[:num_rows])
    return num_tokens if same == num_rows else int(positions[same])


def _num_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Leading entries in which both agree."""
    differs = (a != b).reshape(len(a), -1).any(axis=1)
    return int(differs.argmax()) if differs.any() else len(a)
