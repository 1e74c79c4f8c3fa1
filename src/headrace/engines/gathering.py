"""When waiting sequences begin beside decoding ones: several at a time.

In: for every pass, how many sequences decode. Out: how many must be ready before any begins. Where prompts are a pass
of their own, that pass reads all weights, however few tokens it has; so those that could begin are gathered until
there is one for every sixteen that decode. Once 32 passes have gone by since the last began, the next need not wait for
others; so those that come one by one, far apart, begin at once.
"""

from __future__ import annotations

from dataclasses import dataclass

_DECODING_FOR_ONE = 16
_MOST_PASSES = 32


@dataclass(slots=True)
class Gathering:
    gathers: bool
    """False: each begins as soon as it can."""
    is_open: bool = True
    """Whether sequences may begin in this pass; left so while passes are too full for all that are ready."""
    _num_passes: int = _MOST_PASSES
    """Since a sequence began."""

    def next_pass(self, num_decoding: int) -> int:
        """How many must be ready for any to begin in the next pass."""
        self._num_passes += 1
        if self.is_open or not self.gathers or self._num_passes >= _MOST_PASSES:
            return 0
        return -(-num_decoding // _DECODING_FOR_ONE)

    def began(self) -> None:
        """A sequence began: the next ones are gathered anew."""
        self._num_passes = 0
