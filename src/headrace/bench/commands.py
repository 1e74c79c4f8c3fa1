"""``headrace bench``: one command a measurement, each with ``--json``."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.bench import provenance
from headrace.cli_common import JsonFile, Traceback, output, write_json
from headrace.errors import ConfigError

_BEGUN = time.monotonic()
PeerPython = Annotated[
    Path | None,
    typer.Option(
        help="with --against: the interpreter of another environment, with Headrace and the peer in it"
    ),
]
bench = typer.Typer(help="Measure Headrace on this machine, side by side with a peer.", no_args_is_help=True)


@bench.command("engine")
def bench_engine(
    shape: Annotated[str | None, typer.Option(help="on a GPU: a model shape, such as qwen2-1.5b")] = None,
    against: Annotated[str | None, typer.Option(help="with --shape: vllm, run in the same command")] = None,
    peer_python: PeerPython = None,
    routes: Annotated[
        bool, typer.Option("--routes", help="with --shape moe-small: what recording routes costs")
    ] = False,
    rounds: Annotated[
        int, typer.Option(min=1, help="with --shape: so many times the samples that run at once")
    ] = 1,
    turns: Annotated[
        int, typer.Option(min=1, max=32, help="with --shape: of a sample, with replies of 64 tokens between")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 0,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Generation: on a CPU against ``model.generate``; with ``--shape`` rollouts on a GPU."""
    from headrace import build
    from headrace.bench.rollout_workload import Workload

    build.quieten()
    _check_peer(against, peer_python)
    given = {"--rounds": rounds > 1, "--turns": turns > 1, "--against": against is not None}
    for option in (name for name, is_given in given.items() if is_given):
        if shape is None or routes:
            raise ConfigError(f"{option}: goes with --shape, and not with --routes")
    if shape is None:
        from headrace.bench import engine

        figures = engine.run(repeats=repeats, seed=seed)
        output().print(engine.table(figures))
    elif routes:
        from headrace.bench import routes as recording

        _require_gpu("bench engine --routes")
        figures = recording.run(shape, workload=Workload(seed=seed), repeats=repeats, progress=_tell)
        output().print(recording.table(figures))
    else:
        from headrace.bench import rollouts

        _require_gpu("bench engine --shape")
        figures = rollouts.compare(
            shape,
            against=against,
            peer_python=peer_python,
            workload=Workload(seed=seed, rounds=rounds, turns=turns),
            repeats=repeats,
            progress=_tell,
        )
        output().print(rollouts.table(figures))
    _write("engine", json_file, figures, on_gpu=shape is not None)
    _fail_with(against, figures)


@bench.command("train")
def bench_train(
    shape: Annotated[str, typer.Option(help="a model shape, such as qwen2-1.5b")] = "qwen2-1.5b",
    optimizer: Annotated[bool, typer.Option(help="the optimizer's step too; needs memory for it")] = True,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    groups: Annotated[int, typer.Option(min=1, help="of 8 rollouts of 256 + 512 tokens")] = 64,
    row_tokens: Annotated[int, typer.Option(min=1, help="trainer.row_tokens")] = 16384,
    offload: Annotated[str, typer.Option(help="trainer.offload: none, first_moments or moments")] = "none",
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Forward, backward and optimizer on a GPU, with and without shared prefixes."""
    from headrace.bench import train
    from headrace.bench.step_workload import StepWorkload
    from headrace.config import from_dict

    _require_gpu("bench train")
    figures = train.run(
        shape=shape,
        workload=StepWorkload(num_groups=groups),
        repeats=repeats,
        optimizer=optimizer,
        row_tokens=row_tokens,
        offload=from_dict({"trainer.offload": offload}).trainer.offload,
    )
    output().print(train.table(figures))
    _write("train", json_file, figures)


@bench.command("head")
def bench_head(
    vocab_size: Annotated[int | None, typer.Option("--vocab", min=64, help="151936 on a GPU")] = None,
    hidden_size: Annotated[int | None, typer.Option("--hidden", min=8, help="1536 on a GPU")] = None,
    num_tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="16384 on a GPU")] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """The trainer's head over kept sets (top-k, top-p) against the whole vocabulary: time and memory."""
    from headrace.bench import head

    device = "cuda" if _sees_gpu() else "cpu"
    usual = {"cuda": (151936, 1536, 16384), "cpu": (32768, 256, 512)}[device]
    figures = head.run(
        vocab_size=vocab_size or usual[0],
        hidden_size=hidden_size or usual[1],
        num_tokens=num_tokens or usual[2],
        device=device,
        repeats=repeats,
    )
    output().print(head.table(figures))
    _write("head", json_file, figures)


@bench.command("step")
def bench_step(
    shape: Annotated[str, typer.Option(help="a model shape, such as qwen2-1.5b")] = "qwen2-1.5b",
    against: Annotated[str | None, typer.Option(help="trl (with vLLM), run in the same command")] = None,
    peer_python: PeerPython = None,
    max_lag: Annotated[
        list[int] | None, typer.Option(min=0, help="one run for each; may be repeated; 0 if not given")
    ] = None,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    row_tokens: Annotated[int, typer.Option(min=1, help="trainer.row_tokens")] = 12288,
    offload: Annotated[str, typer.Option(help="trainer.offload")] = "none",
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """A whole step on a GPU: rollouts, training and new weights, engine and trainer sharing it."""
    from headrace.bench import step

    _check_peer(against, peer_python)
    _require_gpu("bench step")
    figures = step.run(
        shape,
        against=against,
        peer_python=peer_python,
        max_lags=tuple(dict.fromkeys(max_lag or (0,))),
        steps=steps,
        row_tokens=row_tokens,
        offload=offload,
        progress=_tell,
    )
    output().print(step.table(figures))
    _write("step", json_file, figures)
    _fail_with(against, figures)


@bench.command("sync")
def bench_sync(
    shape: Annotated[str | None, typer.Option(help="a model shape, such as qwen2-1.5b")] = None,
    only: Annotated[str | None, typer.Option(help="one bundle and transport, such as full-files")] = None,
    updates: Annotated[int, typer.Option(min=1)] = 5,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """What new weights from another process cost, for each bundle and transport: bytes, seconds, stalls."""
    from headrace.bench import sync

    device = "cuda" if _sees_gpu() else "cpu"
    bundle, _, transport = (only or "").partition("-")
    figures = sync.run(
        shape or {"cuda": "qwen2-1.5b", "cpu": "qwen2-0.2b"}[device],
        device=device,
        cells=[(bundle, transport)] if only else None,
        updates=updates,
        progress=_tell,
    )
    output().print(sync.table(figures))
    _write("sync", json_file, figures)


@bench.command("adapters")
def bench_adapters(
    shape: Annotated[str | None, typer.Option(help="on a GPU: a model shape, such as qwen2-1.5b")] = None,
    rank: Annotated[int, typer.Option(min=1)] = 16,
    num_adapters: Annotated[int, typer.Option(min=1)] = 4,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Decoding with adapters, and a new one landing; on a CPU with a tiny model."""
    from headrace import build
    from headrace.bench import adapters

    build.quieten()
    if shape is not None:
        _require_gpu("bench adapters --shape")
    figures = adapters.run(shape, rank=rank, num_adapters=num_adapters, progress=_tell)
    output().print(adapters.table(figures))
    _write("adapters", json_file, figures, on_gpu=shape is not None)


@bench.command("mismatch")
def bench_mismatch(
    shape: Annotated[str, typer.Option(help="a model shape, such as qwen2-1.5b")] = "qwen2-1.5b",
    against: Annotated[
        str | None, typer.Option(help="vllm (with TRL's trainer), in the same command")
    ] = None,
    peer_python: PeerPython = None,
    seed: int = 0,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """How far the trainer's log-probabilities are from the engine's on a GPU in bf16, and why."""
    from headrace import build
    from headrace.bench import mismatch

    _check_peer(against, peer_python)
    _require_gpu("bench mismatch")
    build.quieten()
    workload = mismatch.Workload(seed=seed)
    figures = mismatch.run(shape, against=against, peer_python=peer_python, workload=workload, progress=_tell)
    output().print(mismatch.table(figures))
    _write("mismatch", json_file, figures)


@bench.command("start")
def bench_start(
    shape: Annotated[str | None, typer.Option(help="a model shape, such as qwen2-1.5b")] = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """From the start of a process to the engine's first token: with empty caches, then with warm ones."""
    from headrace.bench import start

    usual = "qwen2-1.5b" if _sees_gpu() else "qwen2-0.2b"
    figures = start.run(shape or usual, progress=_tell)
    output().print(start.table(figures))
    _write("start", json_file, figures)


@bench.command("passes")
def bench_passes(
    shape: Annotated[str, typer.Option(help="a model shape, such as qwen2-1.5b")] = "qwen2-1.5b",
    rows: Annotated[
        list[str] | None, typer.Option(help="rows and tokens of each, such as 24x1500; may be repeated")
    ] = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Single decode passes on a GPU, kernel by kernel, beside what reading their bytes would take."""
    from headrace import build
    from headrace.bench import passes

    kinds = [passes.kind_of(text) for text in rows or ()] or passes.USUAL
    _require_gpu("bench passes")
    build.quieten()
    figures = passes.run(shape, kinds=kinds, progress=_tell)
    output().print(passes.table(figures))
    _write("passes", json_file, figures)


@bench.command("kernels")
def bench_kernels(
    only: Annotated[str, typer.Option(help="cases with this in their name, such as 'decode 7B'")] = "",
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="without a GPU: what they are compiled to for an H200")
    ] = False,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Every GPU kernel by itself: how close it comes to what the chip can do, or which resources it takes."""
    _require_triton("bench kernels")
    if not compile_only:
        _require_gpu("bench kernels", "run it on a machine with one, or with --compile-only")
    from headrace.bench import kernels

    figures = (kernels.run_compiled if compile_only else kernels.run)(only, progress=_tell)
    output().print(kernels.table(figures))
    _write("kernels", json_file, figures, on_gpu=not compile_only)


@bench.command("soak")
def bench_soak(
    shape: Annotated[str, typer.Option(help="a model shape, such as qwen2-0.5b")] = "qwen2-0.5b",
    minutes: Annotated[float, typer.Option(min=0.1)] = 8.0,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """A long run of the engine on a GPU under pressure, with new weights all along: does anything leak?"""
    from headrace.bench import soak

    _require_gpu("bench soak")
    figures = soak.run(shape, minutes=minutes, progress=_tell)
    for name, value in figures.items():
        output().print(f"{name:>16}  {value}")
    _write("soak", json_file, figures)


@bench.command("overlap")
def bench_overlap(
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 0,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="more makes training dearer")] = 88,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Asynchronous against synchronous training on the same two cores."""
    from headrace.bench import overlap

    figures = overlap.run(
        repeats=repeats,
        seed=seed,
        prompt_tokens=prompt_tokens,
        on_run=_tell,
    )
    output().print(overlap.table(figures))
    _write("overlap", json_file, figures, on_gpu=False)


@bench.command("trl")
def bench_trl(
    workload: Annotated[str, typer.Option(help="even or long-tailed completion lengths")] = "long-tailed",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    seed: int = 0,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """The whole loop against TRL's GRPOTrainer (needs the extra ``bench``)."""
    from headrace.bench import against_trl

    figures = against_trl.run(
        repeats=repeats,
        seed=seed,
        workload=workload,
        on_run=_tell,
    )
    output().print(against_trl.table(figures))
    _write("trl", json_file, figures, on_gpu=False)


@bench.command("lag")
def bench_lag(
    seeds: Annotated[int, typer.Option(min=1, help="how many seeds")] = 5,
    first_seed: Annotated[int, typer.Option(min=0, help="the first of them")] = 0,
    picture: Annotated[Path | None, typer.Option(help="write the figure here as SVG")] = None,
    sweep: Annotated[
        Path | None, typer.Option(help="sweep lags and compositions; finished runs are kept in this folder")
    ] = None,
    lag: Annotated[list[int] | None, typer.Option(min=0, help="of the sweep; may be repeated")] = None,
    composition: Annotated[
        list[str] | None, typer.Option(help="of the sweep, such as cispo+tis@tis.cap=3; may be repeated")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="of each run of the sweep")] = 120,
    groups: Annotated[int, typer.Option(min=1, help="groups of 16 attempts a step of the sweep")] = 8,
    learning_rate: Annotated[float, typer.Option(min=0, help="of each run of the sweep")] = 8e-4,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """The demo's reward at lag 0 and 4, seed by seed; or a sweep over lags, losses and corrections."""
    from headrace.bench import lag as two_lags
    from headrace.bench import staleness, staleness_picture

    chosen = range(first_seed, first_seed + seeds)
    if sweep is None:
        figures = two_lags.run(seeds=chosen, on_run=_tell)
        output().print(two_lags.table(figures))
    else:
        figures = staleness.sweep(
            sweep,
            seeds=chosen,
            lags=tuple(lag or staleness.LAGS),
            compositions=tuple(composition or staleness.COMPOSITIONS),
            budget=staleness.Budget(steps=steps, groups=groups, learning_rate=learning_rate),
            on_run=_tell,
        )
        output().print(staleness.table(figures))
    _write("lag", json_file, figures, on_gpu=False)
    if picture is not None:
        (two_lags.write_picture if sweep is None else staleness_picture.write)(figures, picture)


@bench.command("aims")
def bench_aims(
    files: Annotated[list[Path], typer.Argument(help="what --json has written, or folders of such files")],
    picture: Annotated[
        Path | None, typer.Option(help="draw rollouts and steps beside their peers here, as SVG")
    ] = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """What Headrace is held to on one GPU, beside figures that were written to files."""
    from headrace.bench import aims, gpu_picture

    found = aims.read(files, progress=_tell)
    figures = aims.run(found)
    output().print(aims.table(figures))
    write_json(json_file, figures)
    if picture is not None:
        gpu_picture.write(found, picture)


def _write(name: str, json_file: Path | None, figures: Mapping[str, Any], *, on_gpu: bool = True) -> None:
    """Into the file with what they are to be quoted with, which is also told below the table."""
    facts = provenance.taken(name, on_gpu=on_gpu and _sees_gpu())
    write_json(json_file, {"taken": facts, **figures})
    output().print(f"\n{provenance.quoted(facts)}", style="dim", markup=False)


def _check_peer(against: str | None, peer_python: Path | None) -> None:
    if peer_python is not None and against is None:
        raise ConfigError("--peer-python: goes with --against")


def _fail_with(against: str | None, figures: Mapping[str, Any]) -> None:
    """A peer that was asked for and has no time makes the command fail, once our own figures are safe."""
    if against is not None and "seconds" not in figures[against]:
        raise typer.Exit(1)


def _tell(line: str) -> None:
    output(stderr=True).print(f"{time.monotonic() - _BEGUN:6.1f} s  {line}")


def _sees_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _require_gpu(command: str, remedy: str = "run it on a machine with one") -> None:
    if not _sees_gpu():
        raise ConfigError(f"{command} needs a GPU and torch sees none; {remedy}")


def _require_triton(command: str) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{command} needs Triton, which is not installed; pip install triton")
