"""Where tasks come from: lists, JSONL files, Hugging Face datasets and reasoning-gym generators.

In: rows of any of those kinds. Out: a ``TaskStream``, an endless stream that wraps around with a fresh
shuffle for every pass. Invariant: the n-th task depends only on (source, seed, n), so a resumed run
needs nothing but the number of tasks it has already drawn. A task's id is its source's name and the
row it came from, whatever the shuffle, so the same problem keeps its id over passes and resumes.

A row holds the prompt in one column (text, or chat messages) and everything a reward function wants
to know in the others. Options shared by every source: ``prompt_column``; ``limit``, the first rows
only; ``shuffle`` and ``seed``; ``chat`` turns a text prompt into a user message; ``system_prompt`` does
that too and puts a system message first, unless the row's own messages already begin with one.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace import wire
from headrace.errors import TaskError
from headrace.types import Task

RESERVED_COLUMNS = ("prompts", "completions", "completion_ids")
"""Names that reward functions receive from the trainer, so no task column may carry them."""

Row = Mapping[str, Any] | tuple[str, Any] | Task


@dataclass(frozen=True, slots=True)
class _PromptRules:
    """How a row's prompt column becomes a task's prompt."""

    column: str
    chat: bool
    system_prompt: str | None


class TaskStream:
    """An endless task source over ``num_rows`` rows that ``read`` turns into tasks on demand."""

    def __init__(self, read: Callable[[int], Task], num_rows: int, *, shuffle: bool, seed: int) -> None:
        self._read = read
        self._num_rows = num_rows
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, np.ndarray] = (-1, np.zeros(0, dtype=np.int64))

    def __len__(self) -> int:
        return self._num_rows

    def task(self, index: int) -> Task:
        """The ``index``-th task of the stream; past the end of the rows a new pass begins."""
        if index < 0:
            raise IndexError(f"task index {index} is negative")
        num_pass, position = divmod(index, self._num_rows)
        return self._read(int(self._pass_order(num_pass)[position]))

    def _pass_order(self, num_pass: int) -> np.ndarray:
        if self._order[0] != num_pass:
            order = np.arange(self._num_rows)
            if self._shuffle:
                # Raw bits and a stable sort: numpy promises these streams never change, unlike permutation().
                bits = np.random.PCG64([self._seed, num_pass]).random_raw(self._num_rows)
                order = np.argsort(bits, kind="stable")
            self._order = (num_pass, order)
        return self._order[1]


def from_list(
    rows: Iterable[Row],
    *,
    name: str = "list",
    prompt_column: str = "prompt",
    limit: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    chat: bool = False,
    system_prompt: str | None = None,
) -> TaskStream:
    """Tasks from dicts, (prompt, answer) pairs or ``Task`` objects (whose ids are kept)."""
    if not isinstance(rows, Iterable):
        raise TaskError(f"{name} is a {type(rows).__name__}: give a list of rows")
    labelled = [(f"{name}[{i}]", row) for i, row in enumerate(rows)]
    rules = _PromptRules(prompt_column, chat, system_prompt)
    return _from_rows(labelled, name, rules, limit, shuffle, seed)


def from_jsonl(
    path: str | Path,
    *,
    name: str | None = None,
    prompt_column: str = "prompt",
    limit: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    chat: bool = False,
    system_prompt: str | None = None,
) -> TaskStream:
    """Tasks from a file with one JSON object a line; blank lines are skipped."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TaskError(f"task file {path} does not exist: check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task file {path} cannot be read as UTF-8 text: {error}") from error
    labelled: list[tuple[str, Row]] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            labelled.append((f"{path}:{number}", _json_object(line, f"{path}:{number}")))
    rules = _PromptRules(prompt_column, chat, system_prompt)
    return _from_rows(labelled, name or path.stem, rules, limit, shuffle, seed)


def from_hf(
    dataset: str | Path | Any,
    *,
    split: str = "train",
    subset: str | None = None,
    name: str | None = None,
    prompt_column: str = "prompt",
    limit: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    chat: bool = False,
    system_prompt: str | None = None,
) -> TaskStream:
    """Tasks from a Hugging Face dataset: a hub id, a folder of ``save_to_disk``, or the object itself.

    Rows are read when they are needed, so a large dataset stays on disk.
    """
    label = name or (str(dataset) if isinstance(dataset, str | Path) else "dataset")
    table = _load_hf(dataset, split, subset)
    columns = list(table.column_names)
    _require_column(prompt_column, columns, label)
    _refuse_reserved(columns, label)
    rules = _PromptRules(prompt_column, chat, system_prompt)

    def read(row: int) -> Task:
        return _task(table[row], f"{label}/{row}", f"{label}[{row}]", rules)

    return _stream(read, len(table), label, limit, shuffle, seed)


def from_reasoning_gym(
    name: str,
    *,
    size: int = 10_000,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    limit: int | None = None,
    shuffle: bool = False,
    chat: bool = False,
    system_prompt: str | None = None,
) -> TaskStream:
    """Tasks of a reasoning-gym generator: columns ``question``, ``answer`` and ``metadata``.

    ``options`` configure the generator (``{"min_terms": 2}``). Rows are made when they are needed and are
    a function of (options, seed, row), so there is nothing to shuffle unless the same rows come round again.
    """
    reasoning_gym = _optional("reasoning_gym")
    given = {"size": size, "seed": seed, **(options or {})}
    try:
        dataset = reasoning_gym.create_dataset(name, **given)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(f"reasoning-gym cannot make {name!r} with options {given}: {error}") from error
    rules = _PromptRules("prompt", chat, system_prompt)

    def read(row: int) -> Task:
        entry = dataset[row]
        return _task({"prompt": entry["question"], **entry}, f"{name}/{row}", f"{name}[{row}]", rules)

    return _stream(read, len(dataset), name, limit, shuffle, seed)


def _from_rows(
    labelled: Sequence[tuple[str, Row]],
    name: str,
    rules: _PromptRules,
    limit: int | None,
    shuffle: bool,
    seed: int,
) -> TaskStream:
    """Check every row now: a list is in memory anyway, and a bad row must not surface hours into a run."""
    tasks = [_task(row, f"{name}/{i}", where, rules) for i, (where, row) in enumerate(labelled[:limit])]
    seen: dict[str, int] = {}
    for i, task in enumerate(tasks):
        if seen.setdefault(task.id, i) != i:
            raise TaskError(
                f"{name}: tasks {seen[task.id]} and {i} share the id {task.id!r}: give each its own"
            )
    return _stream(tasks.__getitem__, len(tasks), name, limit, shuffle, seed)


def _stream(
    read: Callable[[int], Task], num_rows: int, name: str, limit: int | None, shuffle: bool, seed: int
) -> TaskStream:
    if limit is not None and limit < 1:
        raise TaskError(f"{name}: limit is {limit}, but at least one task is needed: set limit to 1 or more")
    if num_rows == 0:
        raise TaskError(f"{name} holds no tasks: give a source with at least one row")
    kept = num_rows if limit is None else min(limit, num_rows)
    return TaskStream(read, kept, shuffle=shuffle, seed=seed)


def _task(row: Row, task_id: str, where: str, rules: _PromptRules) -> Task:
    if isinstance(row, Task):
        prompt, columns, task_id = row.prompt, row.columns, row.id
    elif isinstance(row, Mapping):
        _require_column(rules.column, list(row), where)
        columns = {key: value for key, value in row.items() if key != rules.column}
        prompt = row[rules.column]
    elif isinstance(row, tuple) and len(row) == 2:
        prompt, columns = row[0], {"answer": row[1]}
    else:
        raise TaskError(f"{where} is a {type(row).__name__}: give a dict, a (prompt, answer) pair or a Task")
    _refuse_reserved(columns, where)
    _refuse_foreign(columns, where)
    return Task(id=task_id, prompt=_prompt(prompt, where, rules), columns=columns)


def _prompt(prompt: Any, where: str, rules: _PromptRules) -> str | tuple[Mapping[str, Any], ...]:
    if isinstance(prompt, str):
        if not rules.chat and rules.system_prompt is None:
            return prompt
        messages: tuple[Mapping[str, Any], ...] = ({"role": "user", "content": prompt},)
    else:
        messages = _messages(prompt, where)
    if rules.system_prompt is not None and messages[0]["role"] != "system":
        messages = ({"role": "system", "content": rules.system_prompt}, *messages)
    return messages


def _messages(prompt: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    good = (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in prompt)
    )
    if not good:
        raise TaskError(
            f"{where}: the prompt is a {type(prompt).__name__} that is neither text nor a list of messages "
            "with 'role' and 'content': give one of the two"
        )
    return tuple(dict(message) for message in prompt)


def _require_column(column: str, present: Sequence[Any], where: str) -> None:
    if column not in present:
        names = ", ".join(map(str, present)) or "none"
        raise TaskError(
            f"{where} has no column {column!r} (it has: {names}): set tasks.prompt_column to one of them"
        )


def _refuse_reserved(columns: Iterable[str], where: str) -> None:
    for column in columns:
        if column in RESERVED_COLUMNS:
            raise TaskError(f"{where}: reward functions already receive {column!r}: rename that column")


def _refuse_foreign(columns: Mapping[str, Any], where: str) -> None:
    """Tasks are journalled and sent to scorers, so a value that cannot travel is refused here."""
    for column, value in columns.items():
        try:
            wire.encode(value)
        except TypeError as error:
            raise TaskError(
                f"{where}: column {column!r} cannot be recorded ({error}): give text, numbers, lists or dicts"
            ) from error


def _json_object(line: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TaskError(f"{where} is not valid JSON ({error}): write one JSON object a line") from None
    if not isinstance(row, dict):
        raise TaskError(f"{where} holds a JSON {type(row).__name__}: write one JSON object a line")
    return row


def _load_hf(dataset: Any, split: str, subset: str | None) -> Any:
    datasets = _optional("datasets")
    if isinstance(dataset, str | Path):
        folder = Path(dataset)
        try:
            if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
                dataset = datasets.load_from_disk(str(folder))
            else:
                dataset = datasets.load_dataset(str(dataset), subset, split=split)
        except Exception as error:
            # The library raises a dozen unrelated types for a bad name, subset, split or connection.
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise TaskError(
                f"dataset {str(dataset)!r} (subset {subset!r}, split {split!r}) cannot be loaded: {reason}"
            ) from error
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            raise TaskError(f"the dataset has no split {split!r} (it has: {', '.join(dataset)}): set split")
        dataset = dataset[split]
    if not isinstance(dataset, datasets.Dataset):
        raise TaskError(
            f"a {type(dataset).__name__} cannot be read by row: give a datasets.Dataset or the name of one"
        )
    return dataset


def _optional(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TaskError(
            f"this task source needs {module} ({error}): install Headrace's extra tasks, in its checkout by "
            "pip install -e '.[tasks]'"
        ) from error
