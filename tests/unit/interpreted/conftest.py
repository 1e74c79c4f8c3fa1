"""The GPU's path on any machine: every kernel for real, in Triton's interpreter, and nothing compiled or captured.

Where there is a GPU these tests are left out: there ``tests/gpu`` runs the same path compiled.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    # Read when Triton is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from headrace.kernels import chip


@pytest.fixture(autouse=True)
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here, not interpreted")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 does not run with numpy 2.4")
    teach_bfloat16(monkeypatch)
    monkeypatch.setattr(chip, "_WITH_KERNELS", {"cuda", "cpu"})


@pytest.fixture
def as_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Also the kernels that are for Hopper alone, sized for a small one."""
    with monkeypatch.context() as patched:
        patched.setattr(chip, "_INTERPRETED", chip.Chip(chip.HOPPER, 8))
        chip.chip.cache_clear()
        yield
    chip.chip.cache_clear()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """Counts the calls of functions of a module from then on."""
    calls: Counter[str] = Counter()

    def count(module, *names):
        for name in names:
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
        return calls

    def counting(name, real):
        def called(*given, **chosen):
            calls[name] += 1
            return real(*given, **chosen)

        return called

    return count


def teach_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter multiply bfloat16 matrices, and round to them as a GPU does."""
    import triton.language as tl
    from triton.runtime import interpreter

    multiply, convert = interpreter.InterpreterBuilder.create_dot, interpreter._convert_float

    def create_dot(builder, a, b, d, *others):
        if a.dtype.scalar != tl.bfloat16:
            return multiply(builder, a, b, d, *others)
        product = np.matmul(wide(a.data), wide(b.data))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def convert_float(numbers, from_dtype, to_dtype, rounding_mode):
        if (from_dtype, to_dtype) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(numbers, dtype=np.float32)).bfloat16()
            return rounded.view(torch.int16).numpy().view(np.uint16)
        if (from_dtype, to_dtype) == (tl.bfloat16, tl.float32):
            return wide(numbers)
        return convert(numbers, from_dtype, to_dtype, rounding_mode)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


def wide(bits: np.ndarray) -> np.ndarray:
    """float32 of bfloat16, which numpy has as uint16."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)
