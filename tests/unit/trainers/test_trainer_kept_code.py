"""A trainer's compiled code is kept where the next process looks for it, whatever part of it is compiled."""

from __future__ import annotations

import os

from headrace.timekeeping import TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer


def test_a_trainer_tells_compilers_where(make_model, sender, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        # Set first, so that it is put back even where nothing had been there.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    TorchTrainer(
        make_model(), sender=sender, ledger=TimeLedger(TRAINER_ACTIVITIES), max_tokens=16, row_tokens=24
    )
    assert os.environ["TRITON_CACHE_DIR"].endswith("headrace/compiled/triton")
