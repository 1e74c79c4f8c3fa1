from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.scoring.process import build_scorer
from headrace.scoring.resolve import function_name, resolve
from headrace.types import Task

SOURCE = """
NUMBER = 3

def exact_match(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "raising_rewards.py").write_text("raise RuntimeError('on import')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_rewards"


def test_module_and_file_references(module: str, tmp_path: Path) -> None:
    for reference in (f"{module}:exact_match", f"{tmp_path}/my_rewards.py:exact_match"):
        assert resolve(reference)(completions=["a"], answer=["a"]) == [1.0]
        assert function_name(reference) == "exact_match"


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("exact_match", ["'exact_match'", "module:function"]),
        (":f", ["module:function"]),
        ("my_rewards:", ["module:function"]),
        ("my_rewards:exact_mach", ["'exact_mach'", "did you mean 'exact_match'?"]),
        ("my_rewards:zzz", ["define it in my_rewards"]),
        ("my_rewards:NUMBER", ["int", "not a function"]),
        ("no_such_module_here:f", ["'no_such_module_here'", "not importable"]),
        ("my_rewards.sub:f", ["'my_rewards.sub'"]),
        ("broken_rewards:f", ["'broken_rewards'", "'no_such_package_at_all'", "install"]),
        ("raising_rewards:f", ["RuntimeError", "on import"]),
        ("nowhere/file.py:f", ["nowhere/file.py", "does not exist"]),
    ],
)
def test_bad_references_are_explained(module: str, reference: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(reference)
    for word in words:
        assert word in str(caught.value)


def test_errors_speak_of_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"^tasks\.source module 'absent_rows' is not importable"):
        resolve("absent_rows:rows", what="tasks.source")


def test_scorer_is_built_from_plain_settings(module: str) -> None:
    settings = {"functions": {"exact": f"{module}:exact_match"}, "weights": {"exact": 2.0}, "timeout_s": 5.0}
    scorer = build_scorer(settings)
    assert asyncio.run(scorer.score(Task(id="t", prompt="p", columns={"answer": "a"}), [])) == []
    assert scorer.total({"exact": 0.5}) == 1.0
    with pytest.raises(ConfigError, match="'retrys' is unknown"):
        build_scorer({**settings, "retrys": 1})
