"""Which kernels compute attention over segments, and what they are told."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import ModelError
from headrace.kernels.chip import Chip
from headrace.models import flash
from headrace.models.flash import FastKernels, Segments, flash_backward, flash_forward

CUDA = torch.device("cuda", 0)
chosen: Callable[..., Any] = flash.fast_kernels.__wrapped__
"""Without the memory of earlier answers."""


def with_gpus_of(generation: int) -> Callable[[torch.device], Chip]:
    return lambda device: Chip(generation if device.type == "cuda" else 0, 132)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package in the place of flash-attn-4 on a Hopper GPU; its interface is yet to be written."""
    home = tmp_path / "flash_attn" / "cute"
    home.mkdir(parents=True)
    for folder in (home, home.parent):
        (folder / "__init__.py").touch()
    about = tmp_path / "flash_attn_4-4.0.0b1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: flash-attn-4\nVersion: 4.0.0b1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(flash, "chip", with_gpus_of(9))
    for name in ("ENABLED", "DIR"):
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}", "kept as it was")
    return home / "interface.py"


def test_torch_serves_where_nothing_else_is_installed_or_made_for(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.write_text("_flash_attn_fwd = _flash_attn_bwd = print")
    assert chosen(CUDA, 128) == (print, print)
    assert chosen(torch.device("cpu"), 128) is None
    assert chosen(CUDA, 256) is None
    monkeypatch.setattr(flash, "chip", with_gpus_of(8))
    assert chosen(CUDA, 128) is None
    monkeypatch.setattr(flash, "chip", with_gpus_of(9))
    monkeypatch.setattr(flash, "_FAST_PACKAGE", "no-such-package")
    assert chosen(CUDA, 128) is None


def test_the_generation_before_is_not_taken_for_it(installed: Path, tmp_path: Path) -> None:
    """It has the same module names, and often cannot be imported beside another torch."""
    installed.write_text("_flash_attn_fwd = _flash_attn_bwd = print")
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    shutil.rmtree(tmp_path / "flash_attn_4-4.0.0b1.dist-info")
    assert chosen(CUDA, 128) is None


def test_the_kernels_are_named_with_their_version(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.write_text("_flash_attn_fwd = _flash_attn_bwd = print")
    monkeypatch.setattr(flash, "fast_kernels", chosen)
    assert flash.kernels_in_use(CUDA, 128) == "flash-attn-4 4.0.0b1"
    assert flash.kernels_in_use(CUDA, 80) == f"torch {torch.__version__}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_library", "no_such_library.*or uninstall"),
        ("raise RuntimeError('no driver')", "no driver.*or uninstall"),
        ("", "install the one that Headrace.s extra flash asks for"),
    ],
)
def test_an_installation_that_cannot_be_used_is_said_and_not_passed_over(
    text: str, said: str, installed: Path
) -> None:
    installed.write_text(text)
    with pytest.raises(ModelError, match=said):
        chosen(CUDA, 128)


@pytest.mark.parametrize("window_left", [-1, 7])
def test_the_fast_kernels_are_told_everything(window_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    query, key, value = (torch.randn(5, heads, 8) for heads in (4, 2, 2))
    lse = torch.randn(5, 4).T

    def forward(*tensors: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        assert [x is y for x, y in zip(tensors, (query, key, value), strict=True)] == [True] * 3
        assert options.pop("return_lse")
        told.append(options)
        return query, lse, None, None, None

    def backward(*tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, ...]:
        told.append(options)
        given = (query, key, value, out, grad, found)
        assert [x is y for x, y in zip(tensors, given, strict=True)] == [True] * 6
        return tensors[:3]

    monkeypatch.setattr(flash, "fast_kernels", lambda *_: FastKernels(forward, backward))
    of_queries, of_keys = (torch.tensor(edges, dtype=torch.int32) for edges in ([0, 2, 5], [0, 4, 9]))
    segments = Segments(of_queries, of_keys, 3, 5, 0.5, window_left)
    out, found = flash_forward(query, key, value, segments)
    assert torch.equal(found, lse) and found.is_contiguous()
    grad = torch.ones_like(out)
    grads = flash_backward(grad, query, key, value, out, found, segments)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, value.shape]
    assert told[0] == told[1]
    assert told[0]["cu_seqlens_q"] is of_queries and told[0]["cu_seqlens_k"] is of_keys
    assert (told[0]["max_seqlen_q"], told[0]["max_seqlen_k"]) == (3, 5)
    assert told[0]["window_size_left"] == (None if window_left < 0 else window_left)
    assert told[0]["causal"] and told[0]["softmax_scale"] == 0.5
