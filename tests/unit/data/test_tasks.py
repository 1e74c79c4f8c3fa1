from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.tasks import TaskStream, from_hf, from_jsonl, from_list, from_reasoning_gym
from headrace.errors import TaskError
from headrace.types import Task

PAIRS = [(f"question {i}", i) for i in range(7)]


def ids(stream: TaskStream, count: int) -> list[str]:
    return [stream.task(i).id for i in range(count)]


@given(size=st.integers(1, 30), seed=st.integers(0, 2**32), index=st.integers(0, 300))
def test_nth_task_depends_only_on_source_seed_and_n(size: int, seed: int, index: int) -> None:
    rows = [(str(i), i) for i in range(size)]
    walked = from_list(rows, seed=seed)
    for i in range(index % 7):
        walked.task(i)
    assert walked.task(index) == from_list(rows, seed=seed).task(index)


@given(size=st.integers(1, 30), seed=st.integers(0, 100))
def test_every_pass_yields_every_task_once(size: int, seed: int) -> None:
    stream = from_list([(str(i), i) for i in range(size)], seed=seed)
    assert len(stream) == size
    for start in (0, size, 5 * size):
        assert sorted(stream.task(start + i).id for i in range(size)) == sorted(
            f"list/{i}" for i in range(size)
        )


def test_passes_are_shuffled_afresh_and_by_seed() -> None:
    rows = [(str(i), i) for i in range(50)]
    order = ids(from_list(rows, seed=1), 100)
    assert order[:50] != order[50:]
    assert order != ids(from_list(rows, seed=2), 100)
    assert order[:50] != [f"list/{i}" for i in range(50)]


def test_shuffle_order_is_pinned_for_resumes_by_later_versions() -> None:
    assert ids(from_list(PAIRS, seed=3), 7) == [f"list/{i}" for i in (0, 4, 1, 5, 6, 3, 2)]


def test_unshuffled_stream_keeps_row_order() -> None:
    assert ids(from_list(PAIRS, shuffle=False), 9) == [f"list/{i % 7}" for i in range(9)]


def test_rows_may_be_pairs_dicts_or_tasks() -> None:
    own = Task(id="mine", prompt="p", columns={"answer": 3})
    stream = from_list([("p", 1), {"prompt": "p", "answer": 2, "hint": "h"}, own], shuffle=False)
    assert stream.task(0) == Task(id="list/0", prompt="p", columns={"answer": 1})
    assert stream.task(1).columns == {"answer": 2, "hint": "h"}
    assert stream.task(2) == own


def test_limit_keeps_the_first_rows() -> None:
    stream = from_list(PAIRS, limit=3)
    assert len(stream) == 3
    assert set(ids(stream, 12)) == {"list/0", "list/1", "list/2"}


def test_system_prompt_makes_chat_messages() -> None:
    task = from_list([("hello", 1)], system_prompt="be brief").task(0)
    assert task.prompt == ({"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"})
    assert from_list([("hello", 1)], chat=True).task(0).prompt == ({"role": "user", "content": "hello"},)


def test_own_system_message_wins_over_system_prompt() -> None:
    own = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    assert from_list([{"prompt": own}], system_prompt="other").task(0).prompt == tuple(own)
    assert from_list([{"prompt": own[1:]}], system_prompt="other").task(0).prompt[0]["content"] == "other"


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([], {}, ["list", "no tasks"]),
        ([{"question": "q", "answer": 1}], {}, ["'prompt'", "question, answer", "prompt_column"]),
        ([{"prompt": 3}], {}, ["list[0]", "int", "messages"]),
        ([{"prompt": [{"role": "user"}]}], {}, ["list[0]", "'content'"]),
        ([{"prompt": []}], {}, ["list[0]"]),
        (["text"], {}, ["list[0]", "str"]),
        ([("p", 1)], {"limit": 0}, ["limit is 0"]),
        ([{"prompt": "p", "completions": 1}], {}, ["'completions'", "rename"]),
        ([{"prompt": "p", "tags": {1, 2}}], {}, ["list[0]", "'tags'", "set"]),
        ([Task(id="a", prompt="p"), Task(id="a", prompt="q")], {}, ["'a'", "0 and 1"]),
    ],
)
def test_bad_rows_are_named(rows: list, options: dict, words: list[str]) -> None:
    with pytest.raises(TaskError) as caught:
        from_list(rows, **options)
    for word in words:
        assert word in str(caught.value)


def test_jsonl_reads_rows_and_skips_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text(
        '{"question": "1+1", "answer": 2}\n\n{"question": "2+2\u2028", "answer": 4}\n', encoding="utf-8"
    )
    stream = from_jsonl(path, prompt_column="question", shuffle=False)
    assert [stream.task(i).prompt for i in range(2)] == ["1+1", "2+2\u2028"]
    assert stream.task(1).id == "sums/1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": ', ["bad.jsonl:2", "not valid JSON"]),
        ('{"prompt": "a"}\n\n[1]\n', ["bad.jsonl:3", "list"]),
        ('{"prompt": "a"}\n{"text": "b"}\n', ["bad.jsonl:2", "'prompt'", "text"]),
        ("\n", ["no tasks"]),
    ],
)
def test_malformed_jsonl_is_named_by_line(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TaskError) as caught:
        from_jsonl(path)
    for word in words:
        assert word in str(caught.value)


def test_missing_jsonl_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere\.jsonl does not exist"):
        from_jsonl(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("load", [lambda: from_hf("x"), lambda: from_reasoning_gym("gcd")])
def test_missing_package_names_the_extra(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"Headrace's extra tasks.*pip install -e '\.\[tasks\]'"):
        load()


def test_hf_dataset_object_and_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"q": f"q{i}", "answer": i} for i in range(5)])
    stream = from_hf(table, prompt_column="q", name="toy", seed=1)
    assert stream.task(3) == from_hf(table, prompt_column="q", name="toy", seed=1).task(3)
    assert {(stream.task(i).id, stream.task(i).columns["answer"]) for i in range(5)} == {
        (f"toy/{i}", i) for i in range(5)
    }
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "saved"))
    saved = from_hf(tmp_path / "saved", split="test", prompt_column="q", shuffle=False, limit=2)
    assert [saved.task(i).prompt for i in range(3)] == ["q0", "q1", "q0"]
    with pytest.raises(TaskError, match=r"no split 'train'.*test"):
        from_hf(tmp_path / "saved", prompt_column="q")


def test_hf_errors(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"q": "x", "answer": 1}])
    with pytest.raises(TaskError, match=r"'prompt' \(it has: q, answer\)"):
        from_hf(table)
    with pytest.raises(TaskError, match="list cannot be read by row"):
        from_hf([1, 2])
    with pytest.raises(TaskError, match="cannot be loaded"):
        from_hf(str(tmp_path / "absent"))
    with pytest.raises(TaskError, match="no tasks"):
        from_hf(datasets.Dataset.from_dict({"prompt": []}))


def test_reasoning_gym_tasks_are_reproducible() -> None:
    pytest.importorskip("reasoning_gym")
    stream = from_reasoning_gym("chain_sum", size=20, seed=4, options={"min_terms": 2, "max_terms": 2})
    again = from_reasoning_gym("chain_sum", size=20, seed=4, options={"min_terms": 2, "max_terms": 2})
    task = stream.task(7)
    assert task == again.task(7)
    assert task.id == "chain_sum/7"
    assert task.prompt == task.columns["question"]
    assert set(task.columns) == {"question", "answer", "metadata"}
    assert json.dumps(task.columns["metadata"])
    assert len(stream) == 20
    assert stream.task(20).id == "chain_sum/0"
    assert len(from_reasoning_gym("chain_sum", options={"size": 3})) == 3


def test_reasoning_gym_refuses_unknown_names_and_options() -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(TaskError, match="'no_such_generator'"):
        from_reasoning_gym("no_such_generator")
    with pytest.raises(TaskError, match="no_such_option"):
        from_reasoning_gym("gcd", options={"no_such_option": 1})
