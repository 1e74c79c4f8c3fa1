from __future__ import annotations

import asyncio

import pytest

from headrace.errors import RoleError
from headrace.launch.inline import InlineCluster
from headrace.types import RoleStatus


class Role:
    def __init__(self, name: str, error: Exception | None = None) -> None:
        self.name = name
        self.closed = False
        self._error = error

    async def status(self) -> RoleStatus:
        return RoleStatus(role=self.name, version=0, progress=1, seconds={})

    async def close(self) -> None:
        self.closed = True
        if self._error is not None:
            raise self._error


def test_close_closes_every_role_even_when_one_fails():
    roles = [Role("engine-0", ValueError("broken")), Role("engine-1"), Role("trainer"), Role("scorer-0")]
    cluster = InlineCluster(roles[:2], roles[2], roles[3:])
    with pytest.raises(ValueError, match="broken"):
        asyncio.run(cluster.close())
    assert all(role.closed for role in roles)


def test_statuses_by_role():
    cluster = InlineCluster([Role("engine-0")], Role("trainer"))
    assert set(asyncio.run(cluster.statuses())) == {"engine-0", "trainer"}


def test_nothing_fails_alone():
    async def main() -> None:
        waiting = asyncio.create_task(InlineCluster([Role("engine-0")], None).wait_failure())
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(main())


def test_cluster_without_a_trainer_says_so():
    with pytest.raises(RoleError, match="without a trainer"):
        _ = InlineCluster([], None).trainer
