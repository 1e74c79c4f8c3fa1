"""``headrace plan``: what a run will need, before it is started."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli_common import JsonFile, Overrides, RunFile, Traceback, output, write_json
from headrace.config import Settings, load, require

if TYPE_CHECKING:
    from transformers import PretrainedConfig

plan = typer.Typer(help="Say what a run will need, before it is started.", no_args_is_help=True)


@plan.callback()
def _plan() -> None:
    """A command of one subcommand would otherwise lose its name."""


@plan.command("memory")
def plan_memory(
    run_file: RunFile = None,
    overrides: Overrides = None,
    shape: Annotated[
        str | None, typer.Option(help="instead of model.path: a model shape, such as qwen2-1.5b")
    ] = None,
    device_memory: Annotated[
        float | None, typer.Option(min=0.001, help="GB of each device; not given: of this machine's")
    ] = None,
    json_file: JsonFile = None,
    show_traceback: Traceback = False,
) -> None:
    """Bytes by purpose, process and device, whether they fit, and what to change if not."""
    import torch

    from headrace import build
    from headrace.memory import plan as program
    from headrace.memory.architecture import examine
    from headrace.memory.table import lines, table

    build.quieten()
    settings = load(run_file, overrides or ())
    kind = _kind(settings, device_memory)
    device_bytes = program.memory_of(kind) if device_memory is None else round(device_memory * 1e9)
    model = examine(
        _configuration(settings, shape), getattr(torch, build.dtype(settings, kind)), build.lora(settings)
    )
    planned = program.plan_memory(settings, model, kind=kind, device_bytes=device_bytes)
    found = program.remedies(settings, model, planned, kind=kind) if planned.crowded else []
    console = output()
    console.print(table(planned))
    longest = program.longest_sequence(settings, model, kind=kind, device_bytes=device_bytes)
    for line in lines(planned, found, longest, model.context_tokens):
        console.print(line, soft_wrap=True)
    write_json(json_file, {**planned.as_dict(), "longest_sequence": longest, "remedies": found})
    if planned.crowded:
        raise typer.Exit(1)


def _kind(settings: Settings, device_memory: float | None) -> str:
    """A GPU that is only planned for need not be there."""
    import torch

    if settings.model.device != "auto":
        return settings.model.device
    return "cuda" if device_memory is not None or torch.cuda.is_available() else "cpu"


def _configuration(settings: Settings, shape: str | None) -> PretrainedConfig:
    if shape is not None:
        from headrace.bench.shapes import shape_config

        return shape_config(shape)
    from headrace.models.loading import load_config

    require(settings, "model.path")
    return load_config(str(settings.model.path))
