from __future__ import annotations

import pytest

from headrace.weights import gpu_segments
from headrace.weights.gpu_segments import fixed_segments


def test_segments_grow_again_whatever_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(gpu_segments, "grow_segments", lambda growing=True: told.append(growing))
    with fixed_segments():
        assert told == [False]
    assert told == [False, True]
    with pytest.raises(MemoryError), fixed_segments():
        raise MemoryError
    assert told[-1] is True
