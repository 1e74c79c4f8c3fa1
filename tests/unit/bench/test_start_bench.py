"""A start taken apart into phases, and two real ones."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headrace.bench import start
from headrace.errors import ConfigError


def test_phases_last_until_the_next_is_told_of():
    marks = [
        (7.0, "making the engine"),
        (7.5, "compiling the model's layers"),
        (10.0, "capturing decode graphs 1/30"),
        (10.5, "capturing decode graphs 2/30"),
        (12.0, "a prompt"),
        (12.25, "the first token"),
    ]
    found = start.phases(marks)
    assert found == {
        "imports and the model": 7.0,
        "making the engine": 0.5,
        "compiling the model's layers": 2.5,
        "capturing decode graphs": 2.0,
        "a prompt": 0.25,
    }
    assert sum(found.values()) == marks[-1][0]


def test_phases_of_one_side_alone_have_a_line():
    figures = {
        "shape": "qwen2-1.5b",
        "cold": {"seconds": 9.0, "phases": {"one": 4.0, "two": 5.0}},
        "warm": {"seconds": 4.0, "phases": {"one": 4.0}},
    }
    console = Console(width=100, file=io.StringIO())
    console.print(start.table(figures))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert lines[-3:] == [["one", "4.0", "4.0"], ["two", "5.0", "0.0"], ["in", "all", "9.0", "4.0"]]


def test_an_unknown_shape_is_refused_before_anything_is_started():
    with pytest.raises(ConfigError, match=r"qwen2-1\.5b"):
        start.run("qwen2-9b")


def test_a_process_that_fails_is_told_with_what_it_said(tmp_path):
    with pytest.raises(ConfigError, match=r"ended with 1(.|\n)*model shape 'nothing' is unknown"):
        start._marks("nothing", tmp_path)


def test_all_caches_of_a_start_lie_in_its_home(monkeypatch, tmp_path):
    outside = {
        "TORCHINDUCTOR_CACHE_DIR": "/c",
        "QUACK_CACHE_DIR": "/q",
        "XDG_CACHE_HOME": "/x",
        "KEPT": "yes",
    }
    for name, value in {**outside, "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": "/t"}.items():
        monkeypatch.setenv(name, value)
    given = start.environment(tmp_path)
    assert given["HOME"] == str(tmp_path) and given["KEPT"] == "yes"
    assert Path(given["TMPDIR"]).parent == tmp_path and Path(given["TMPDIR"]).is_dir()
    assert not given.keys() & {
        "TORCHINDUCTOR_CACHE_DIR",
        "QUACK_CACHE_DIR",
        "XDG_CACHE_HOME",
        "PYTHONDONTWRITEBYTECODE",
    }


def test_a_start_that_takes_too_long_is_ended(monkeypatch, tmp_path):
    monkeypatch.setattr(start, "_DEADLINE_S", 0.01)
    with pytest.raises(ConfigError, match="no first token 0 s after the start"):
        start._marks("qwen2-0.2b", tmp_path)


def test_the_first_process_is_the_cold_one(monkeypatch):
    homes = []

    def marks(shape, home):
        homes.append(home)
        return [(9.0 - len(homes), "making the engine"), (10.0 - len(homes), "the first token")]

    monkeypatch.setattr(start, "_marks", marks)
    figures = start.run("qwen2-0.5b")
    assert (figures["cold"]["seconds"], figures["warm"]["seconds"]) == (9.0, 8.0)
    assert homes[0] == homes[1] and not homes[0].exists()


@pytest.mark.slow
def test_two_processes_start_one_after_the_other_and_leave_nothing():
    figures = start.run("qwen2-0.2b")
    for name in ("cold", "warm"):
        # On a GPU there are more of them.
        assert figures[name]["phases"].keys() >= {"imports and the model", "making the engine", "a prompt"}
        assert figures[name]["seconds"] == pytest.approx(sum(figures[name]["phases"].values()))
