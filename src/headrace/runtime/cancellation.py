"""Cancellations that nobody asked for.

In: code of others, awaited in a task of ours. Out: what it raises, save that a CancelledError which is not this task's
own becomes an error with a name: a task that ends cancelled is taken for one that was told to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import TaskError


@contextmanager
def no_stray_cancellation(source: str) -> Iterator[None]:
    """Around what ``source`` does."""
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TaskError(
            f"{source}: a CancelledError came out of it, though nobody had cancelled it: something it awaited was "
            "cancelled; catch that there"
        ) from error
