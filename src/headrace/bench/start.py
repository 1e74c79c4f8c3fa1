"""``headrace bench start``: from the start of a process until the engine's first token, cold and with a warm cache.

In: a model shape. Out: for each of two processes, one after the other, seconds until the first token and of each phase
before it. Both live in a home directory made for them, where every cache lies: the first finds nothing there, the
second what the first has left. Weights are random and made on the device, so reading a checkpoint is not counted.
"""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.errors import ConfigError

_DEADLINE_S = 900.0
_LEFT_OUT = {
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "CUTE_DSL_CACHE_DIR",
    "QUACK_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
    "PYTHONDONTWRITEBYTECODE",
}
"""Variables that would lead a process to another cache than its home's, or have it compile what it imports."""


def run(shape: str, *, progress: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """``cold`` and ``warm``, each with its phases in their order."""
    from headrace.bench.shapes import shape_config

    shape_config(shape)
    figures: dict[str, Any] = {"shape": shape}
    with tempfile.TemporaryDirectory(prefix="headrace-start-") as home:
        for name in ("cold", "warm"):
            progress(f"starting, {name}")
            marks = _marks(shape, Path(home))
            figures[name] = {"seconds": marks[-1][0], "phases": phases(marks)}
    return figures


def phases(marks: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Seconds of each, from when it was told of until the next was. What is told again and again, with other numbers,
    is one phase; all that comes before the first is the imports and the model."""
    found: dict[str, float] = {}
    since, name = 0.0, "imports and the model"
    for at, line in marks:
        found[name] = found.get(name, 0.0) + at - since
        since, name = at, re.sub(r"\s*[\d,]+/[\d,]+$", "", line)
    return found


def table(figures: Mapping[str, Any]) -> Table:
    """The figures for people."""
    title = f"{figures['shape']}: seconds from the start of the process to the first token"
    drawn = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    drawn.add_column("phase")
    for name in ("cold", "warm"):
        drawn.add_column(name, justify="right")
    sides = [figures[name] for name in ("cold", "warm")]
    for phase in dict.fromkeys(phase for side in sides for phase in side["phases"]):
        drawn.add_row(phase, *(f"{side['phases'].get(phase, 0.0):.1f}" for side in sides))
    drawn.add_row("in all", *(f"{side['seconds']:.1f}" for side in sides))
    return drawn


def _marks(shape: str, home: Path) -> list[tuple[float, str]]:
    """What a process that starts an engine told, and when."""
    command = [sys.executable, "-m", "headrace.bench.start", shape]
    try:
        done = subprocess.run(
            command, env=environment(home), capture_output=True, text=True, timeout=_DEADLINE_S
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"bench start: no first token {_DEADLINE_S:.0f} s after the start; free the device, or name another --shape"
        ) from error
    if done.returncode:
        raise ConfigError(
            f"bench start: the process ended with {done.returncode}; mend what it says:\n{done.stderr[-3000:]}"
        )
    return [(at, line) for at, line in json.loads(done.stdout.splitlines()[-1])]


def environment(home: Path) -> dict[str, str]:
    """Of a process whose caches all lie in this home."""
    temporary = home / "tmp"
    temporary.mkdir(exist_ok=True)
    # Packages that were installed for the user alone stay where they are.
    own = {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONUSERBASE": site.getuserbase()}
    return {name: value for name, value in os.environ.items() if name not in _LEFT_OUT} | own


def _start(shape: str) -> list[tuple[float, str]]:
    import numpy as np
    import torch

    from headrace.bench.peers import process_age_s
    from headrace.bench.shapes import create_random_model
    from headrace.engines.make import torch_engine
    from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
    from headrace.types import Request, Sampling

    marks: list[tuple[float, str]] = []

    def tell(line: str) -> None:
        marks.append((process_age_s(), line))

    model = create_random_model(shape, device="cuda" if torch.cuda.is_available() else "cpu")
    tell("making the engine")
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), progress=tell)
    tell("a prompt")
    prompt = np.arange(256, dtype=np.int32) % int(model.config.vocab_size)
    engine.submit(Request(id="first", prompt_ids=prompt, sampling=Sampling(max_tokens=1), seed=0))
    sampled = 0
    while engine.has_work:
        sampled += sum(completion.num_tokens for _, completion in engine.step())
    assert sampled == 1, f"{sampled} tokens instead of the first"
    tell("the first token")
    return marks


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1])))
