"""Prompts to token ids and back, without torch or transformers, so that the controller starts at once.

In: a folder with a model's ``tokenizer.json``, ``tokenizer_config.json`` and, where present, its
``chat_template.jinja``, ``generation_config.json`` and ``config.json``. Out: a ``Renderer``. Invariant: a
prompt becomes the same ids as with transformers' ``AutoTokenizer`` (text with the tokenizer's own
special tokens, messages through the chat template and no others), never truncated or padded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.chat_template import ChatTemplate
from headrace.errors import ModelError, TaskError
from headrace.types import Task

__all__ = ["Renderer", "make_char_tokenizer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Renderer:
    """One model's way of turning tasks into token ids and token ids into text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop_ids: tuple[int, ...],
        pad_id: int,
        template: ChatTemplate | None = None,
        max_context: int | None = None,
        name: str = "the tokenizer",
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._name = name
        self.stop_ids = stop_ids
        """Tokens that end a completion; the first is the one to end a written example with."""
        self.pad_id = pad_id
        self.max_context = max_context
        """Positions the model was made for; None: its configuration does not say."""

    @classmethod
    def from_directory(
        cls, model_dir: str | Path, *, template_options: Mapping[str, Any] | None = None
    ) -> Renderer:
        """Read a model's folder; ``template_options`` reach the chat template (``enable_thinking``, ...)."""
        folder = Path(model_dir)
        tokenizer = _load_tokenizer(folder)
        settings = _special_tokens(folder)
        config = _read_json(folder / "config.json")
        generation = _read_json(folder / "generation_config.json")
        source = _template_source(folder, settings)
        named = {key: settings[key] for key in _NAMED_TOKENS if settings.get(key) is not None}
        return cls(
            tokenizer,
            stop_ids=_stop_ids(tokenizer, settings, generation, config, folder),
            pad_id=_pad_id(tokenizer, settings, generation, config, folder),
            template=None if source is None else ChatTemplate(source, {**named, **(template_options or {})}),
            max_context=_max_context(config),
            name=str(folder),
        )

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer can produce; a model's embedding may be padded to more."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def prompt_ids(self, task: Task) -> np.ndarray:
        """int32 [P] the model is shown for ``task``, up to where its answer begins."""
        if isinstance(task.prompt, str):
            ids = self._tokenizer.encode(task.prompt, add_special_tokens=True).ids
        else:
            ids = self._tokenizer.encode(self._chat_text(task), add_special_tokens=False).ids
        if not ids:
            raise TaskError(f"task {task.id} has an empty prompt: remove it or give it text")
        return np.asarray(ids, dtype=np.int32)

    def encode(self, text: str) -> np.ndarray:
        """int32 ids of ``text`` alone, no special tokens added: example answers, for instance."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``token_ids``, special tokens removed."""
        ids = token_ids.tolist() if isinstance(token_ids, np.ndarray) else list(token_ids)
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def single_token_ids(self, texts: Iterable[str]) -> tuple[int, ...]:
        """The id of each text; raises ModelError for one that is not exactly one token."""
        found = []
        for text in texts:
            token_id = self._tokenizer.token_to_id(text)
            ids = [token_id] if token_id is not None else self.encode(text).tolist()
            if len(ids) != 1:
                raise ModelError(
                    f"{text!r} is {len(ids)} tokens for {self._name}: name a string that is one token"
                )
            found.append(int(ids[0]))
        return tuple(found)

    def same_ids_as(self, other: Renderer) -> bool:
        """Whether a token id means the same to another model."""
        ours = self._tokenizer.get_vocab(with_added_tokens=True)
        return ours == other._tokenizer.get_vocab(with_added_tokens=True)

    def ids_containing(self, text: str) -> tuple[int, ...]:
        """Every token whose own text has ``text`` in it."""
        ids = sorted(self._tokenizer.get_vocab(with_added_tokens=True).values())
        texts = self._tokenizer.decode_batch([[token_id] for token_id in ids], skip_special_tokens=True)
        return tuple(token_id for token_id, its in zip(ids, texts, strict=True) if text in its)

    def _chat_text(self, task: Task) -> str:
        if self._template is None:
            raise ModelError(
                f"task {task.id} has chat messages but {self._name} has no chat template: use text prompts, "
                "or put a chat_template.jinja beside the tokenizer"
            )
        try:
            return self._template.render(task.prompt)  # type: ignore[arg-type]
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TaskError(
                f"task {task.id}: the chat template refuses its messages ({error}): change or remove them"
            ) from error


def _load_tokenizer(folder: Path) -> Tokenizer:
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist: check the path")
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(
            f"{folder} has no tokenizer.json: write it with "
            f"AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # The Rust side raises bare Exception for every kind of damage.
        raise ModelError(
            f"{path} is not a tokenizer this version can read ({error}): save it again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; a file that is not there is an empty one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}): save the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object: save the model again")
    return value


def _special_tokens(folder: Path) -> dict[str, Any]:
    """Tokenizer settings with the named special tokens as plain strings."""
    settings = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    for key in _NAMED_TOKENS:
        if isinstance(settings.get(key), Mapping):
            settings[key] = settings[key]["content"]
    return settings


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    return source


def _stop_ids(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
) -> tuple[int, ...]:
    """The tokenizer's end token first, then those the generation settings (or else the model's) add."""
    stated = generation.get("eos_token_id")
    ids = _as_ids(config.get("eos_token_id") if stated is None else stated)
    token = settings.get("eos_token")
    if token is not None:
        ids = [_token_id(tokenizer, "eos_token", token, folder), *ids]
    if not ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token: set eos_token in its tokenizer_config.json to a token "
            "of the vocabulary"
        )
    return tuple(dict.fromkeys(ids))


def _pad_id(
    tokenizer: Tokenizer,
    settings: Mapping[str, Any],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
) -> int:
    token = settings.get("pad_token")
    if token is not None:
        return _token_id(tokenizer, "pad_token", token, folder)
    for source in (generation, config):
        if isinstance(source.get("pad_token_id"), int):
            return int(source["pad_token_id"])
    raise ModelError(
        f"{folder} names no padding token: set pad_token in its tokenizer_config.json "
        "(the end-of-sequence token will do, since padding is never trained on)"
    )


def _token_id(tokenizer: Tokenizer, key: str, token: str, folder: Path) -> int:
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ModelError(
            f"{folder}: {key} {token!r} is not in the vocabulary: name a token of tokenizer.json"
        )
    return token_id


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(i) for i in value] if isinstance(value, list) else [int(value)]


def _max_context(config: Mapping[str, Any]) -> int | None:
    for source in (config, config.get("text_config") or {}):
        for key in ("max_position_embeddings", "n_positions"):
            if isinstance(source.get(key), int):
                return int(source[key])
    return None
