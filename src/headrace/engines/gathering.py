"""When new sequences begin beside decoding ones: several at a time.

In: for every pass, how many sequences decode and how many could begin. Out: whether they do. Where prompts are a
pass of their own, that pass reads all weights and is launched kernel by kernel, however few tokens it has; so those
that could begin are gathered until there is one for every eight that decode. None is put off for more than 32 passes
since the last began; those that come one by one, far apart, begin at once.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECODING_FOR_ONE = 8
_MOST_PASSES = 32


@dataclass(slots=True)
class Gathering:
    gathers: bool
    """False: all begin as soon as they can."""
    is_open: bool = True
    _num_passes: int = _MOST_PASSES
    """Since a sequence began."""

    def next_pass(self, num_decoding: int, num_ready: int) -> None:
        """Open, if it is not yet, when enough are ready to begin or they have waited for long enough."""
        self._num_passes += 1
        enough = num_ready * _DECODING_FOR_ONE >= num_decoding or self._num_passes >= _MOST_PASSES
        self.is_open = self.is_open or not self.gathers or enough

    def began(self) -> None:
        """A sequence began; others may follow in this pass, and in the next ones as long as they are full."""
        self._num_passes = 0

    def close(self) -> None:
        """Everything that could begin has begun."""
        self.is_open = False
