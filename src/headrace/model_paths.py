"""Where a model lies that a setting names.

In: a directory or a hub name. Out: a directory on this machine, or a ModelError that names the setting.
"""

from __future__ import annotations

from pathlib import Path

from headrace.errors import ModelError
from headrace.run_directory import holds_run, latest_checkpoint


def found_model(path: str, field: str) -> Path:
    """The directory that ``path`` names, which setting ``field`` gave."""
    if Path(path).is_dir():
        if holds_run(Path(path)) and not (Path(path) / "config.json").exists():
            raise ModelError(f"{field}: {path} is a run, not a model; {_of_run(Path(path))}")
        return Path(path)
    if Path(path).is_absolute() or path.startswith("."):
        raise ModelError(f"{field}: {path} does not exist; check the path")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path))
    except Exception as e:
        reason = str(e).strip().partition("\n")[0]
        raise ModelError(
            f"{field}: {path} is neither a directory nor a model that can be fetched ({reason})"
        ) from e


def _of_run(path: Path) -> str:
    """What to name instead."""
    last = latest_checkpoint(path)
    if last is None:
        return "it has no checkpoint yet, so name another model"
    return f"name one of its checkpoints, such as {last}"
