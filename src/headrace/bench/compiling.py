"""A GPU that kernels are compiled for and that runs nothing, so that what they need is known without one.

In: a launch over tensors without memory (device ``meta``), as the library makes it. Out: every kernel of the launch as
Triton and its assembler leave it for an H200: registers, what is spilled of them, shared memory, instructions, and how
many of its programs a multiprocessor has room for. It is the real compiler; of speed it says nothing.

The driver stays Triton's for the rest of the process.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from headrace.errors import ConfigError

_TARGET = GPUTarget("cuda", 90, 32)
_PARTS, _REGISTERS, _REGISTERS_AT_A_TIME = 4, 16384, 256
"""Of a multiprocessor; registers of a part, and in what steps a warp is given them. A warp stays in its part."""
_WARPS, _PROGRAMS = 64, 32
"""That a multiprocessor has at most."""
_SHARED_BYTES, _SHARED_BYTES_KEPT = 233472, 1024
"""Of a multiprocessor, and what the driver keeps for each program."""
_MOST_SHARED_BYTES, _MOST_THREADS = 232448, 1024
"""Of one program."""
_TOOL_S = 60


class Resources(NamedTuple):
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread: what it keeps in memory for want of registers."""
    num_instructions: int
    num_loads_ahead: int
    """Of these, copies to shared memory that the program does not wait for; none: its loops are not pipelined."""


class Compiled(NamedTuple):
    """A kernel as it was launched."""

    kernel: str
    variant: str
    """The same for launches that the same code was compiled for."""
    grid: tuple[int, int, int]
    num_warps: int
    shared_bytes: int
    resources: Resources

    @property
    def at_once(self) -> int:
        """Programs that a multiprocessor has room for."""
        of_warp = -(-32 * self.resources.registers // _REGISTERS_AT_A_TIME) * _REGISTERS_AT_A_TIME
        by_registers = _REGISTERS // of_warp * _PARTS // self.num_warps
        by_memory = _SHARED_BYTES // (self.shared_bytes + _SHARED_BYTES_KEPT)
        return min(by_registers, by_memory, _WARPS // self.num_warps, _PROGRAMS)


def compiled(launch: Callable[[], object]) -> list[Compiled]:
    """The kernels of this launch, in their order."""
    driver = _driver()
    driver.launched = []
    launch()
    return driver.launched


class _CompilingDriver(DriverBase):
    """What Triton asks of a GPU between compiling a kernel and launching it."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[Compiled] = []
        self.utils = self

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return _TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": _MOST_SHARED_BYTES}

    def load_binary(
        self, name: str, binary: bytes, shared_bytes: int, device: int
    ) -> tuple[object, Resources, int, int, int]:
        """The second of what it returns is what a launcher is given as the function to launch."""
        found = resources_of(name, binary)
        return object(), found, found.registers, found.spilled_bytes // 4, _MOST_THREADS

    def launcher_cls(self, source: object, metadata: Any) -> Callable[..., None]:
        def launch(x: int, y: int, z: int, stream: int, function: Resources, *_: object) -> None:
            self.launched.append(
                Compiled(
                    metadata.name, metadata.hash, (x, y, z), metadata.num_warps, metadata.shared, function
                )
            )

        return launch

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("nothing is launched here")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed here")


@cache
def _driver() -> _CompilingDriver:
    if triton.knobs.runtime.interpret:
        raise ConfigError(
            "TRITON_INTERPRET is set, so kernels are interpreted and not compiled; unset it for this command"
        )
    driver = _CompilingDriver()
    triton.runtime.driver.set_active(driver)
    return driver


def resources_of(name: str, binary: bytes) -> Resources:
    """Of a kernel's code for a GPU, by the tools that come with Triton."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(binary)
        usage = _said_by(triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file))
        code = _said_by(triton.knobs.nvidia.nvdisasm.path, "-c", str(file))
    return read_resources(name, usage, code)


def read_resources(name: str, usage: str, code: str) -> Resources:
    """From what the tools say of a kernel: its resources, and its code line by line."""
    found = re.search(rf"Function {name}:\s+REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, f"no word of {name} in: {usage}"
    # The end of a kernel is padded with instructions that do nothing.
    lines = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*)$", code, re.MULTILINE)
    real = [line for line in lines if not line.startswith("NOP")]
    ahead = [line for line in real if re.search(r"\b(LDGSTS|UTMALDG)\b", line)]
    return Resources(int(found[1]), int(found[2]), len(real), len(ahead))


def _said_by(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"{command[0]}, which comes with Triton, does not read a compiled kernel ({error}); install triton anew"
        ) from error
    return done.stdout
