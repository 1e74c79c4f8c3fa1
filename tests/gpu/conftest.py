"""Everything here needs a GPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
