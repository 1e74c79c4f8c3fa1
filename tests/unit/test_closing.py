"""The roles of a run are closed whatever happens, and why it ended is what is told."""

from __future__ import annotations

import asyncio

import pytest

from headrace.api import _closing
from headrace.errors import DeadlineError, RoleError


class Cluster:
    """Of roles that cannot close."""

    num_closed = 0

    async def close(self):
        self.num_closed += 1
        raise RoleError("trainer died (exit code 70)")


class Sink:
    def __init__(self):
        self.told = []

    def emit(self, event, fields):
        self.told.append((event, fields["text"]))


async def run(cluster, sink, error=None):
    async with _closing(cluster, sink):
        if error is not None:
            raise error


def test_a_role_that_cannot_close_does_not_hide_why_the_run_ended():
    cluster, sink = Cluster(), Sink()
    with pytest.raises(DeadlineError, match="waited 600 s"):
        asyncio.run(run(cluster, sink, DeadlineError("waited 600 s for step 7")))
    assert cluster.num_closed == 1
    assert sink.told == [("warning", "while the run was ended: trainer died (exit code 70)")]


def test_where_nothing_else_went_wrong_it_is_told():
    with pytest.raises(RoleError, match="exit code 70"):
        asyncio.run(run(Cluster(), Sink()))
