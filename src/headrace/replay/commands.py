"""``headrace replay``: the rollouts that a run has recorded."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from headrace.cli_common import JsonFile, Traceback, output, write_json
from headrace.config import Settings, load
from headrace.errors import ConfigError, ModelError
from headrace.replay import view
from headrace.replay.check import Found, Report, check_recording, run_limits
from headrace.run_directory import latest_checkpoint
from headrace.runtime.recording import Recording, read_recording


def replay(
    run_dir: Annotated[Path, typer.Argument(help="directory of a run, such as runs/NAME")],
    group: Annotated[int | None, typer.Option(min=0, help="show this group turn by turn")] = None,
    check: Annotated[bool, typer.Option("--check", help="verify every record; exit code 1: a fault")] = False,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="with --check: logprobs again, where weights are there")
    ] = False,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Show the rollouts a run has recorded, or verify them."""
    if recompute and not check:
        raise ConfigError("--recompute is a part of checking: give --check with it")
    settings, console = _settings(run_dir), output()
    recording = read_recording(run_dir)
    _only(recording, group)
    if not check:
        _show(recording, run_dir, settings, group, console)
        write_json(json_file, {"groups": len(recording.groups), "records": recording.num_records})
        return
    report = check_recording(recording, run_limits(run_dir, settings, recording), seed=settings.run.seed)
    figures: dict[str, Any] = {}
    if recompute:
        figures["recomputed"] = _recompute(recording, run_dir, settings, report, console)
    console.print(view.report_table(report))
    for line in view.report_lines(report):
        console.print(line, soft_wrap=True, markup=False)
    verdict = f"{len(report.faults)} faults" if report.faults else "every record is sound"
    console.print(f"{len(recording.groups)} groups, {recording.num_records:,} records: {verdict}")
    write_json(json_file, {**report.as_dict(), **figures})
    if report.faults:
        raise typer.Exit(1)


def _settings(run_dir: Path) -> Settings:
    file = run_dir / "settings.toml"
    if not file.exists():
        raise ConfigError(f"{run_dir} holds no run (there is no settings.toml); check the path")
    return load(file, training=False)


def _only(recording: Recording, group: int | None) -> None:
    """Leave the others out."""
    if group is None:
        return
    if group not in recording.groups:
        known = f"{min(recording.groups)} to {max(recording.groups)}" if recording.groups else "none"
        raise ConfigError(
            f"--group: {group} is not in the journal, which holds {known}; groups that ended before the oldest kept "
            "checkpoint are gone (run.keep_checkpoints)"
        )
    recording.groups = {group: recording.groups[group]}


def _show(
    recording: Recording, run_dir: Path, settings: Settings, group: int | None, console: Console
) -> None:
    if group is None:
        console.print(view.groups_table(recording))
    else:
        decode = _decoder(run_dir, settings)
        for line in view.group_lines(recording.groups[group], decode):
            console.print(line, soft_wrap=True, markup=False)
    for damage in recording.damages:
        console.print(f"{damage.file}, byte {damage.offset}: {damage.text}", soft_wrap=True, markup=False)


def _decoder(run_dir: Path, settings: Settings) -> view.Decode | None:
    """None: neither a checkpoint nor the model has a tokenizer that can be read."""
    from headrace.data.rendering import Renderer

    for place in (latest_checkpoint(run_dir), settings.model.path):
        if place is not None and (Path(place) / "tokenizer.json").is_file():
            try:
                return Renderer.from_directory(place).decode
            except ModelError:
                continue
    return None


def _recompute(
    recording: Recording, run_dir: Path, settings: Settings, report: Report, console: Console
) -> list[dict[str, Any]]:
    from headrace import build
    from headrace.replay.recompute import LARGEST_MEAN_GAP, recompute

    build.quieten()
    gaps = recompute(recording, run_dir, settings)
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in ("version", "samples", "tokens", "mean gap", "largest gap", "weights"):
        drawn.add_column(column, justify="left" if column == "weights" else "right", overflow="fold")
    for gap in gaps:
        sizes = (str(gap.version), str(gap.num_samples), f"{gap.num_tokens:,}")
        drawn.add_row(*sizes, f"{gap.mean:.2e}", f"{gap.largest:.2e}", gap.weights)
        report.num_checked["recomputed"] += gap.num_samples
        # Written so that a gap which is not a number fails too.
        if not gap.mean <= LARGEST_MEAN_GAP:
            text = f"recomputed logprobs are {gap.mean:.3g} from the recorded ones on average"
            report.faults.append(Found(f"version {gap.version}", "recomputed", text))
    console.print(drawn)
    if not gaps:
        console.print("no sample is wholly of a version whose weights are here; nothing was recomputed")
    return [asdict(gap) for gap in gaps]
