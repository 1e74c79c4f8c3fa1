"""What figures are quoted with: the command, the moment, the place and the source."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from headrace.bench import commands, provenance


@pytest.fixture
def checkout(tmp_path):
    """A package of one file, committed."""

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, timeout=60
        )

    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "errors.py").write_text("x = 1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    return tmp_path


def test_figures_say_how_they_were_taken(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/somewhere/headrace", "bench", "head", "--tokens", "8"])
    found = provenance.taken("head", on_gpu=False)
    assert found["bench"] == "head" and found["command"] == "headrace bench head --tokens 8"
    assert re.fullmatch(r"20\d\d-[01]\d-[0-3]\d \d\d:\d\d UTC", found["date"])
    assert "cores" in found["device"] and found["versions"]["torch"]
    assert found["source"] == provenance.fingerprint(provenance.PACKAGE, "**/*.py")[:12]
    assert provenance.quoted(found).startswith(f"headrace bench head --tokens 8; {found['date']}; ")


def test_a_later_moment_sorts_behind_an_earlier_one(monkeypatch):
    assert provenance.written(1_700_000_000.0) == "2023-11-14 22:13 UTC"
    assert provenance.written(1_700_000_000.0) < provenance.written(1_702_000_000.0)


def test_the_device_is_the_one_that_was_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    assert provenance.device(True) == "a GPU" and "cores" in provenance.device(False)


def test_a_source_is_known_by_names_and_contents(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    (tmp_path / "within").mkdir()
    first = provenance.fingerprint(tmp_path, "**/*.py")
    (tmp_path / "b.txt").write_text("not source")
    assert provenance.fingerprint(tmp_path, "**/*.py") == first
    (tmp_path / "a.py").rename(tmp_path / "within" / "a.py")
    second = provenance.fingerprint(tmp_path, "**/*.py")
    (tmp_path / "within" / "a.py").write_text("x = 2")
    assert len({first, second, provenance.fingerprint(tmp_path, "**/*.py")}) == 3


def test_the_commit_is_told_and_whether_files_differ_from_it(monkeypatch, checkout):
    monkeypatch.setattr(provenance, "PACKAGE", checkout / "package")
    clean = provenance.commit()
    assert re.fullmatch(r"[0-9a-f]{10}", clean)
    (checkout / "package" / "errors.py").write_text("x = 2")
    assert provenance.commit() == f"{clean}-dirty"
    facts = {"command": "c", "date": "d", "device": "e", "versions": {"torch": "2"}, "source": "s"}
    assert provenance.quoted({**facts, "commit": clean}) == f"c; d; e; commit {clean}; torch 2"
    assert provenance.quoted({**facts, "commit": None}) == "c; d; e; source s; torch 2"


def test_a_package_that_no_checkout_holds_has_no_commit(monkeypatch, checkout, tmp_path):
    installed = checkout / "environment"
    installed.mkdir()
    (installed / "errors.py").write_text("x = 1")
    monkeypatch.setattr(provenance, "PACKAGE", installed)
    assert provenance.commit() is None
    monkeypatch.setattr(provenance, "_GIT_S", 0.0)
    monkeypatch.setattr(provenance, "PACKAGE", checkout / "package")
    assert provenance.commit() is None


def test_figures_are_in_the_file_whatever_the_command_looks_like(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["headrace", "bench", "head", "--json", "[/tmp]a"])
    file = tmp_path / "figures.json"
    commands._write("head", file, {"seconds": 1.0})
    found = json.loads(file.read_text())
    assert found["seconds"] == 1.0 and found["taken"]["bench"] == "head"
