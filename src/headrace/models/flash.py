"""Flash attention over segments of uneven lengths, forward and backward.

In: queries of all segments laid end to end, the keys and values each reads, and where both begin. Out: what every
segment gives with causal attention, the last query of a segment seeing its last key and each before it one less;
then the gradients. On Hopper flash-attn-4 computes it where it is installed (the extra ``flash``), elsewhere the
kernels that torch brings along. The two agree up to the rounding of bfloat16.

Legend: T queries, R keys, Hq query heads, Hk key-value heads, D head size, S segments.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any, NamedTuple

import torch

from headrace.errors import ModelError
from headrace.kernels.chip import HOPPER, chip
from headrace.kernels.kept_code import folder

_MAX_HEAD_SIZE = 256
_FAST_SIZES = (64, 128)
"""Those that are tested; with 80 its version 4.0.0b36 gives wrong gradients."""
_FAST_PACKAGE = "flash-attn-4"
_FAST_MODULE = "flash_attn.cute.interface"


@dataclass(frozen=True, slots=True)
class Segments:
    """Where they lie, and what a query sees."""

    queries: torch.Tensor
    """int32 [S + 1], edges of the segments' queries."""
    keys: torch.Tensor
    """The same of their keys."""
    longest_query: int
    longest_key: int
    scale: float
    window_left: int
    """Keys before a query's own place that it sees; -1: all."""


def flash_fits(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the kernels take these tensors."""
    size = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and size == value.shape[-1]
        and size % 8 == 0
        and size <= _MAX_HEAD_SIZE
    )


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, Hq, D] queries over [R, Hk, D] keys and values: output and log-sum-exp [Hq, T]."""
    fast = fast_kernels(query.device, query.shape[-1])
    if fast is not None:
        out, lse, *_ = fast.forward(query, key, value, return_lse=True, **_fast_options(segments))
        return out, lse.contiguous()
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        segments.queries,
        segments.keys,
        segments.longest_query,
        segments.longest_key,
        0.0,
        True,
        False,
        scale=segments.scale,
        window_size_left=segments.window_left,
        window_size_right=0,
    )
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    segments: Segments,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values."""
    fast = fast_kernels(query.device, query.shape[-1])
    if fast is not None:
        of_query, of_key, of_value = fast.backward(
            query, key, value, out, grad, lse, **_fast_options(segments)
        )
        return of_query, of_key, of_value
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return torch.ops.aten._flash_attention_backward(
        grad,
        query,
        key,
        value,
        out,
        lse,
        segments.queries,
        segments.keys,
        segments.longest_query,
        segments.longest_key,
        0.0,
        True,
        no_dropout,
        torch.empty(0, device=query.device),
        scale=segments.scale,
        window_size_left=segments.window_left,
        window_size_right=0,
    )


def _fast_options(segments: Segments) -> dict[str, Any]:
    return {
        "cu_seqlens_q": segments.queries,
        "cu_seqlens_k": segments.keys,
        "max_seqlen_q": segments.longest_query,
        "max_seqlen_k": segments.longest_key,
        "softmax_scale": segments.scale,
        "causal": True,
        "window_size_left": None if segments.window_left < 0 else segments.window_left,
    }


class FastKernels(NamedTuple):
    """flash-attn-4's two functions."""

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Any, ...]]


@cache
def fast_kernels(device: torch.device, head_size: int) -> FastKernels | None:
    """Those for heads of this size; None: they are not installed, or not made for this device."""
    # On later GPUs it has not been tried.
    if chip(device).generation != HOPPER or head_size not in _FAST_SIZES or not _is_installed():
        return None
    # It compiles for seconds at first use, and keeps the result where it is told, but only if it is told.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", folder("flash"))
    # What it says of an argument of its own each time it compiles.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")
    try:
        module = import_module(_FAST_MODULE)
        return FastKernels(module._flash_attn_fwd, module._flash_attn_bwd)
    except (ImportError, OSError, RuntimeError) as error:
        raise ModelError(
            f"attention: flash-attn-4 is installed and cannot be imported ({error}); install Headrace's extra "
            "flash anew, or uninstall flash-attn-4 to use torch's own kernels"
        ) from error
    except AttributeError as error:
        raise ModelError(
            f"attention: this version of flash-attn-4 is not known ({error}); install the one that Headrace's extra "
            "flash asks for"
        ) from error


def kernels_in_use(device: torch.device, head_size: int) -> str:
    """Name and version of what computes attention on a GPU."""
    if fast_kernels(device, head_size) is None:
        return f"torch {torch.__version__}"
    return f"{_FAST_PACKAGE} {metadata.version(_FAST_PACKAGE)}"


def _is_installed() -> bool:
    """Asked of the package and not of the module, whose name it has in common with flash-attn, the generation before:
    that may bring a module of this name which is another, and may fail when it is imported."""
    try:
        metadata.version(_FAST_PACKAGE)
    except metadata.PackageNotFoundError:
        return False
    return True
