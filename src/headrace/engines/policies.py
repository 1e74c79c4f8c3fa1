"""Who can be asked to sample: the model itself, and the adapters beside it, each at its own version.

In: names of policies, as requests and updates carry them. Out: the number of their adapter and the version it is at.
Number 0 is the model without an adapter. An engine without room for adapters has one policy, the model; one with
room never answers for a policy whose adapter has not arrived.
"""

from __future__ import annotations

import numpy as np

from headrace.errors import TaskError, WeightSyncError

POLICY = "policy"
BASE = "base"


class Policies:
    def __init__(self, num_adapters: int, version: int) -> None:
        """``version`` is that of the model's own weights."""
        self.versions = np.full(num_adapters + 1, -1, dtype=np.int32)
        """By adapter."""
        self.versions[0] = version
        self._adapters: dict[str, int] = {}

    @property
    def version(self) -> int:
        """The lowest version any policy is at; the model's own while there is no adapter."""
        numbers = list(self._adapters.values()) or [0]
        return int(self.versions[numbers].min())

    def adapter_of(self, policy: str) -> int:
        """Raises TaskError for a policy that cannot be computed here."""
        if policy == BASE or (policy == POLICY and len(self.versions) == 1):
            return 0
        if policy not in self._adapters:
            known = ", ".join([BASE, *self._adapters]) if len(self.versions) > 1 else f"{BASE}, {POLICY}"
            raise TaskError(
                f"policy {policy!r} has no adapter on this engine, which serves {known}; publish its adapter first "
                "or name another policy"
            )
        return self._adapters[policy]

    def room_for(self, policy: str) -> int:
        """The number its adapter has or would have."""
        if policy in self._adapters:
            return self._adapters[policy]
        room = len(self.versions) - 1
        if policy == BASE or len(self._adapters) == room:
            taken = f"has room for {room} ({', '.join(self._adapters) or 'none there'})"
            raise WeightSyncError(
                f"there is no room for an adapter of policy {policy!r}: the engine {taken}; set lora.rank, or start "
                "the engine with room for more adapters"
            )
        return len(self._adapters) + 1

    def settle(self, policy: str, adapter: int, version: int) -> None:
        """The policy's adapter is there, at this version."""
        self._adapters[policy] = adapter
        self.versions[adapter] = version
