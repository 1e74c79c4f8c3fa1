"""The adapter benchmark on its tiny model: an update sends the adapter and next to nothing else."""

from __future__ import annotations

from headrace.bench import adapters


def test_an_update_sends_the_adapters_own_bytes():
    figures = adapters.run(rank=2, num_adapters=2, num_running=4, updates=2)
    assert 0 < figures["sent_beside_own"] <= 0.01
    assert figures["adapter_bytes"] == 4 * 2 * 2 * (4 * (192 + 192) + 3 * (192 + 768))
    assert adapters.table(figures).row_count == 10
