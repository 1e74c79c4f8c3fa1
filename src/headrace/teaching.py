"""From the ``distill`` settings to teachers: what their engines are told, who asks them, what the trainer makes of it.

A teacher must have the policy's tokenizer. Where the files of both can be compared they are, before anything starts;
what shows only in a group's tokens is found there (``runtime.teachers``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from headrace.config import Settings
from headrace.errors import ModelError
from headrace.model_paths import found_model
from headrace.protocols import Engine, Sink
from headrace.runtime.linked_weights import LinkedWeights
from headrace.runtime.snapshots import DelayedWeights
from headrace.runtime.teachers import Teacher, Teachers

_OF_THE_FILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "peft_version")
"""Entries of a configuration that say nothing of what is computed."""


def names(settings: Settings) -> tuple[str, ...]:
    """All teachers, the first of which is asked about tasks that name none; empty: nobody is imitated."""
    return tuple(settings.distill.teachers)


def told_teachers(settings: Settings, told: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By name, what ``roles.engine_role`` is told to build each."""
    return {
        name: {**told, "name": f"teacher-{name}", "scores": True, **_loaded(settings, name)}
        for name in settings.distill.teachers
    }


def _loaded(settings: Settings, name: str) -> dict[str, Any]:
    """The weights a teacher begins with; a snapshot waits for the policy's."""
    if name in settings.distill.snapshots:
        return {"version": -1, "follows": True}
    return {"version": 0, "model": str(_directory(settings, name))}


def teachers(settings: Settings, engines: Mapping[str, Engine], sink: Sink) -> Teachers | None:
    """Who asks the engines; None: there are none."""
    if not engines:
        return None
    distill = settings.distill
    made = {name: _teacher(settings, name, engines[name], sink) for name in distill.teachers}
    assert settings.model.path is not None
    return Teachers(
        made,
        top_k=0 if distill.divergence == "sampled" else distill.top_k,
        deadline_s=settings.run.stall_s,
        vocab_size=_vocab_size(found_model(settings.model.path, "model.path")),
    )


def _teacher(settings: Settings, name: str, engine: Engine, sink: Sink) -> Teacher:
    def warn(text: str) -> None:
        sink.emit("warning", {"text": text})

    if name in settings.distill.snapshots:
        lag = settings.distill.snapshots[name]
        follower = DelayedWeights(engine, lag=lag, deadline_s=settings.run.update_s, warn=warn)
        return Teacher(engine, snapshots=follower)
    directory = _directory(settings, name)
    check = likeness(directory.resolve())
    link = LinkedWeights(engine, directory, deadline_s=settings.run.stall_s, check=check, warn=warn)
    return Teacher(engine, vocab_size=_vocab_size(directory), link=link)


def distillation(settings: Settings) -> Any:
    """What the trainer makes of teachers' scores; None: there are none."""
    from headrace.trainers.distilling import Distillation

    if not names(settings):
        return None
    return Distillation(divergence=settings.distill.divergence, coef=settings.distill.coef)


def description(directory: Path) -> dict[str, dict[str, Any]]:
    """What a model must share with another to take its place in a running engine: its configuration, names and shapes
    of its tensors, and its tokens."""
    found = {}
    for what, of in (
        ("configuration", _configuration),
        ("set of tensors", _shapes),
        ("tokenizer", _vocabulary),
    ):
        try:
            found[what] = of(directory) or {}
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"{directory} has a {what} that cannot be read ({error}); write it again"
            ) from error
    return found


def likeness(old: Path) -> Callable[[Path], None]:
    """A check that raises ModelError unless a model may take the place of the one that lies here now. That one is read
    at once: its files may be gone when another comes."""
    before = description(old)

    def check(new: Path) -> None:
        for what, after in description(new).items():
            if not after and before[what]:
                raise ModelError(f"{new} has no {what}; link to a directory written by save_pretrained")
            known = before[what]
            other = sorted(map(str, {k for k in known.keys() | after.keys() if known.get(k) != after.get(k)}))
            if other:
                raise ModelError(
                    f"{new} has a {what} unlike that of {old} ({', '.join(other[:3])}); restart the run with it, or "
                    "link to a checkpoint of the same model"
                )

    return check


def check_tokenizers(settings: Settings) -> None:
    """Raise ModelError for a teacher whose tokenizer is known to be another."""
    if not settings.distill.models or settings.model.path is None:
        return
    own = _vocabulary(found_model(settings.model.path, "model.path"))
    for name in settings.distill.models:
        other = _vocabulary(_directory(settings, name))
        # A teacher may know more tokens; the student then has no use for them.
        unknown = [] if own is None or other is None else own.items() - other.items()
        if unknown:
            token, number = min(unknown, key=lambda pair: pair[1])
            raise ModelError(
                f"distill.teachers: {name} has another tokenizer than model.path, whose token {number} ({token!r}) it "
                "does not have, so its log-probabilities would be of other tokens; choose a teacher of the same family"
            )


def _directory(settings: Settings, name: str) -> Path:
    return found_model(settings.distill.models[name], f"distill.teachers.{name}")


def _vocabulary(directory: Path) -> dict[str, int] | None:
    """Ids by token; None: the files do not say."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    listed = content.get("model", {}).get("vocab")
    pairs = listed if isinstance(listed, dict) else {token: i for i, (token, _) in enumerate(listed or [])}
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return {**pairs, **added}


def _configuration(directory: Path) -> dict[str, Any] | None:
    """What a model or an adapter computes, without what only says how, whence and by whom it was saved; None: it does
    not say."""
    for file in (directory / "adapter_config.json", directory / "config.json"):
        if file.is_file():
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return {name: value for name, value in content.items() if name not in _OF_THE_FILE}
    return None


def _shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by name, as the heads of its files say."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _vocab_size(directory: Path) -> int | None:
    """Rows of the model's embedding; None: its configuration does not say."""
    file = directory / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return None if size is None else int(size)
