"""What a role's process is told by its environment."""

from __future__ import annotations

import pytest

from headrace.launch.role_process import torch_defaults


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.11.0+cu130", {"TORCH_FR_BUFFER_SIZE": "0"}),
        ("2.12.1", {"TORCH_FR_BUFFER_SIZE": "0"}),
        ("2.13.0", {}),
        ("3.0.0a1", {}),
    ],
)
def test_versions_whose_record_of_collectives_is_not_safe_keep_none(version, told):
    assert torch_defaults(version) == told
