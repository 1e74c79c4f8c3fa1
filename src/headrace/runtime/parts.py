"""Parts of a group: those of its attempts that are trained together.

A group whose quorum was released before its last attempts ended has two parts, the quorum and the late attempts. The
journal, the buffer and the staleness decision call the first by the group's number and the second by its complement,
``~group``, which is negative; so a group without late attempts is simply its number everywhere.
"""

from __future__ import annotations


def late_part(group: int) -> int:
    return ~group


def is_late(part: int) -> bool:
    return part < 0


def group_of(part: int) -> int:
    return ~part if part < 0 else part
