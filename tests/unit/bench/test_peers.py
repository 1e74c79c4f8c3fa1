"""A peer that is not there is missed before anything is measured."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import pytest
import typer
from rich.console import Console

from headrace.bench import commands, peers, rollouts, step
from headrace.bench.step_workload import StepWorkload
from headrace.config import Settings
from headrace.errors import ConfigError


def measured(*_: object, **__: object) -> NoReturn:
    raise AssertionError("it was measured all the same")


def test_our_side_is_not_measured_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(rollouts, "run", measured)
    monkeypatch.setattr(step, "write_checkpoint", measured)
    with pytest.raises(ConfigError, match="--against vllm: vllm is not installed; install the extra vllm"):
        rollouts.compare("qwen2-0.5b", against="vllm")
    with pytest.raises(
        ConfigError, match="--against trl: trl is not installed; install the extras bench and vllm"
    ):
        step.run(against="trl")


def test_options_that_would_do_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="--against: goes with --shape"):
        commands.bench_engine(against="vllm")
    with pytest.raises(ConfigError, match="--rounds: goes with --shape, and not with --routes"):
        commands.bench_engine(shape="moe-small", routes=True, rounds=2)
    with pytest.raises(ConfigError, match="--turns: goes with --shape"):
        commands.bench_engine(turns=2)
    for command in (commands.bench_engine, commands.bench_step, commands.bench_mismatch):
        with pytest.raises(ConfigError, match="--peer-python: goes with --against"):
            command(peer_python=Path(sys.executable))


def test_what_was_measured_stays_when_the_peer_fails(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from headrace.bench import step_with_trl

    def failing(*_: object, **__: object) -> NoReturn:
        raise ConfigError("out of memory")

    monkeypatch.setattr(step_with_trl, "run", failing)
    lines: list[str] = []
    found = step._with_trl(tmp_path, StepWorkload(), 3, lines.append)
    assert [one["failed"] for one in found["tried"]] == ["out of memory"] * 2
    ours = [{"max_lag": 0, "side_by_side": False, "seconds": 9.0, "peak_bytes": 5e10}]
    limit = {"limit_s": 4.5, "limit_generation_s": 1.1, "limit_training_s": 3.4}
    figures = {"shape": "qwen2-1.5b", **limit, "headrace": ours, "trl": found}
    table = step.table(figures)
    assert table.row_count == 1 and any("failed" in line for line in lines)


def test_a_command_whose_peer_fails_keeps_our_figures_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run_with(peer: dict[str, object]) -> None:
        figures = {"headrace": [{"seconds": 9.0}], "trl": peer}
        monkeypatch.setattr(step, "run", lambda *_, **__: figures)
        monkeypatch.setattr(step, "table", lambda figures: "a table")
        monkeypatch.setattr(commands, "_require_gpu", lambda command: None)
        commands.bench_step(against="trl", json_file=tmp_path / "figures.json")

    with pytest.raises(typer.Exit) as left:
        run_with({"tried": [{"failed": "out of memory"}]})
    assert left.value.exit_code == 1 and "out of memory" in (tmp_path / "figures.json").read_text()
    run_with({"seconds": 20.0, "tried": []})


def test_the_sampler_of_a_missing_library_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert peers.environment()["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    assert "VLLM_USE_FLASHINFER_SAMPLER" not in peers.environment()


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """An interpreter that finds this Headrace, and of the peers TRL alone."""
    (tmp_path / "packages" / "trl").mkdir(parents=True)
    (tmp_path / "packages" / "trl" / "__init__.py").write_text("")
    python, source = tmp_path / "python", Path(peers.__file__).parents[2]
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path}/packages:{source} exec {sys.executable} "$@"\n', encoding="utf-8"
    )
    python.chmod(0o755)
    return python


@pytest.fixture
def run_peer(tmp_path: Path, other_python: Path) -> Callable[..., None]:
    """Runs a program as TRL's, in its interpreter."""

    def run(program: str, *, deadline_s: float = 60) -> None:
        (tmp_path / "packages" / "trl" / "__main__.py").write_text(program)
        told, result = [str(tmp_path / "result"), "b"], tmp_path / "result"
        peers.run("trl", "trl", told, result, python=other_python, deadline_s=deadline_s)

    return run


def test_another_interpreter_is_asked_what_it_has(other_python: Path) -> None:
    assert peers.lacking(["trl", "no_such_library", "json"], other_python) == ["no_such_library"]
    peers.need("trl", ["trl"], "the extra bench", other_python)
    with pytest.raises(
        ConfigError, match=r"no_such_library is not installed where .*python looks; install it"
    ):
        peers.need("trl", ["trl", "no_such_library"], "it", other_python)
    assert peers.environment(other_python)["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


def test_another_headrace_beside_the_peer_is_refused(
    other_python: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers.need("trl", ["trl"], "the extra bench", other_python)
    with monkeypatch.context() as here:
        here.setattr(peers, "fingerprint", lambda: "of other benchmarks")
        with pytest.raises(
            ConfigError, match=r"--peer-python .* has other benchmarks; install this one there"
        ):
            peers.need("trl", ["trl"], "the extra bench", other_python)
    # One of before there was a fingerprint.
    older = tmp_path / "packages" / "headrace" / "bench"
    older.mkdir(parents=True)
    for module in (older.parent / "__init__.py", older / "__init__.py", older / "peers.py"):
        module.write_text("")
    with pytest.raises(ConfigError, match=r"--peer-python .* has other benchmarks; install this one there"):
        peers.need("trl", ["trl"], "the extra bench", other_python)


def test_a_peer_is_told_what_to_do_and_leaves_a_result(run_peer, tmp_path: Path) -> None:
    run_peer("import sys; open(sys.argv[1], 'w').write(sys.argv[2])")
    assert (tmp_path / "result").read_text() == "b"


def test_a_peer_without_a_result_has_failed(run_peer) -> None:
    with pytest.raises(ConfigError, match=r"--against trl: the run failed \(exit status 1\):\nno GPU"):
        run_peer("import sys; sys.exit('no GPU')")
    with pytest.raises(ConfigError, match=r"exit status 0\):\nnothing to do"):
        run_peer("print('nothing to do')")


def test_a_peer_that_does_not_end_is_ended(run_peer) -> None:
    with pytest.raises(ConfigError, match=r"had not ended after 0\.5 s; free the GPU"):
        run_peer("import signal; signal.pause()", deadline_s=0.5)


def test_what_a_peer_leaves_behind_is_ended_and_not_waited_for(run_peer, tmp_path: Path) -> None:
    program = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open("{tmp_path}/child", "w").write(str(child.pid))
print("CUDA out of memory", file=sys.stderr, flush=True)
os._exit(1)
"""
    with pytest.raises(ConfigError, match="CUDA out of memory"):
        run_peer(program)
    stat = Path("/proc", (tmp_path / "child").read_text(), "stat")
    # Killed: gone, or waiting for whoever took it over to ask for its exit status.
    deadline = time.monotonic() + 30
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
        assert time.monotonic() < deadline, "the child still runs after 30 s"
        time.sleep(0.01)


def test_what_is_no_interpreter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--peer-python .*nothing: it is no Python that runs"):
        peers.need("vllm", ["vllm"], "it", tmp_path / "nothing")
    for program in ("/bin/false", "/bin/true"):
        with pytest.raises(ConfigError, match="it is no Python that runs"):
            peers.need("vllm", ["vllm"], "it", Path(program))
    # A name alone is that of a file here, not of a program elsewhere.
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="it is no Python that runs"):
        peers.need("vllm", ["vllm"], "it", Path("python3"))


def test_a_step_is_held_against_its_limit_and_its_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.bench import rates, step_with_trl

    class Watch:
        peak_bytes = 5e10

        def __enter__(self) -> Watch:
            return self

        def __exit__(self, *_: object) -> None: ...

    async def trained(settings: Settings, *_: object) -> int:
        return settings.rollout.max_lag

    monkeypatch.setattr(step, "write_checkpoint", lambda *_: 1000)
    monkeypatch.setattr(step, "MemoryWatch", Watch)
    monkeypatch.setattr(step, "_train", trained)
    monkeypatch.setattr(step, "_sharing", lambda run_dir, max_lag, progress: nullcontext(max_lag > 0))
    monkeypatch.setattr(step, "_steady", lambda max_lag: {"seconds": 9.0 - max_lag})
    monkeypatch.setattr(step_with_trl, "check_installed", lambda python: None)
    monkeypatch.setattr(
        step_with_trl,
        "run",
        lambda *_, checkpointing, **__: {
            "checkpointing": checkpointing,
            "seconds": 27.0 + checkpointing,
            "peak_bytes": 6e10,
        },
    )
    monkeypatch.setattr(rates, "copy_bandwidth", lambda device: 4.1e12)
    monkeypatch.setattr(rates, "matmul_flops_per_s", lambda device: 780e12)
    figures = step.run("qwen2-1.5b", against="trl", max_lags=(0, 1))
    assert [row["max_lag"] for row in figures["headrace"]] == [0, 1] and len(figures["trl"]["tried"]) == 2
    assert figures["limit_s"] == pytest.approx(4.54, abs=0.01)
    console = Console(width=160)
    with console.capture() as captured:
        console.print(step.table(figures))
    lines = [" ".join(line.split()) for line in captured.get().splitlines()]
    assert lines[0].endswith("the limit where both take turns, 4.54 s a step, is")
    assert lines[1] == "1.17 s of generating, then 3.37 s of training"
    assert lines[3:] == [
        "headrace, max_lag 0 9.00 50% 50.0 GB 3.00x",
        "headrace, max_lag 1, side by side 8.00 50.0 GB 3.38x",
        "trl, gradient checkpointing on 28.00 16% 60.0 GB",
        "trl, gradient checkpointing off 27.00 17% 60.0 GB",
    ]
