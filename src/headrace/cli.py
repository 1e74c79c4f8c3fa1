"""The command line: ``headrace train | demo | eval | doctor | replay | plan | bench``.

Every command that prints figures takes ``--json FILE``. A mistake is one sentence on standard error and
an exit code that is not zero; ``--traceback`` shows where it came from.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from headrace import __version__
from headrace.bench.commands import bench
from headrace.cli_common import JsonFile, Overrides, RunFile, Traceback, output, write_json
from headrace.config import Settings, load
from headrace.errors import HeadraceError
from headrace.memory.commands import plan
from headrace.replay.commands import replay

app = typer.Typer(
    help="Reinforcement learning for language models that keeps every GPU fed with tokens.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(plan, name="plan")
app.command()(replay)


@app.command()
def train(
    run_file: RunFile = None,
    overrides: Overrides = None,
    resume: Annotated[Path | None, typer.Option(help="directory of a run to go on with")] = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Train a model."""
    from headrace import api

    if resume is not None and run_file is None:
        settings = load(resume / "settings.toml", overrides or ()) if overrides else None
    else:
        settings = load(run_file, overrides or ())
    with _told_interrupts():
        result = api.train(settings=settings, resume=resume)
    write_json(json_file, result.summary.as_dict())
    if result.interrupted:
        _end_interrupted(f"stopped; go on with: headrace train --resume {result.run_dir}")


@app.command()
def demo(
    seed: Annotated[int, typer.Option(help="seed of the model, the tasks and the sampling")] = 0,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Watch a tiny model learn to spell words backwards; nothing is downloaded."""
    from headrace import demo as program

    result = program.run(seed=seed, overrides=overrides or ())
    write_json(json_file, {**result.summary.as_dict(), "rewards": result.rewards})
    if result.interrupted:
        _end_interrupted(f"stopped at step {result.num_steps}; a demo is not resumed: start it again")


@app.command("eval")
def evaluate(
    run_file: RunFile = None,
    overrides: Overrides = None,
    num_tasks: Annotated[int, typer.Option("--tasks", min=1, help="how many tasks")] = 256,
    num_samples: Annotated[int, typer.Option("--samples", min=1, help="attempts at each")] = 1,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Score a model on its tasks without training it."""
    from headrace import evaluation as program

    settings = load(run_file, overrides or (), training=False)
    rewards = _needed_rewards(settings)
    work = program.run(settings, None, rewards, num_tasks=num_tasks, num_samples=num_samples)
    evaluation = asyncio.run(work)
    console = output()
    console.print(
        f"return {evaluation.mean_return:.4f} over {evaluation.num_tasks} tasks x {num_samples}, "
        f"{evaluation.mean_tokens:.1f} tokens each, {evaluation.share_cut:.1%} cut at rollout.max_tokens"
    )
    for name, value in evaluation.rewards.items():
        console.print(f"  {name:<24} {value:.4f}")
    write_json(json_file, evaluation)


@app.command()
def doctor(
    run_file: RunFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Check this machine and, with a run file, its model, tasks and reward; says what to fix."""
    from headrace import doctor as program

    settings = load(run_file, overrides or ()) if run_file or overrides else None
    findings = program.examine(settings)
    program.show(findings, output())
    write_json(json_file, [asdict(finding) for finding in findings])
    if any(finding.verdict == "fail" for finding in findings):
        raise typer.Exit(1)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@contextmanager
def _told_interrupts() -> Iterator[None]:
    """A run that is ended at once says what is left of it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        _end_interrupted("\n".join(getattr(stop, "__notes__", ())))


def _end_interrupted(text: str) -> NoReturn:
    if text:
        print(text, file=sys.stderr)
    raise typer.Exit(130)


def _needed_rewards(settings: Settings) -> list[Any]:
    from headrace.config import require

    require(settings, "reward.functions")
    return list(settings.reward.functions)


def main() -> None:
    # Modules in the working directory are importable, as they are for `python -m`.
    sys.path.insert(0, str(Path.cwd()))
    try:
        app()
    except HeadraceError as error:
        if "--traceback" in sys.argv:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
