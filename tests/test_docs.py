"""What the documentation points to is there: files, headings, commands and their options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from headrace.cli import app

ROOT = Path(__file__).parents[1]
GENERATED = {"settings.md", "losses.md", "pivots.md"}
WIDEST = 120
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def headings(page):
    """As they are linked to."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(page):
    """Everything that is written as code and begins with the name of the program."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    quoted = re.findall(r"(?<!`)`(headrace [^`]+)`", text)
    indented = re.findall(r"^ {4,}(headrace .+)$", text, re.MULTILINE)
    return [" ".join(found.split()) for found in (*quoted, *indented)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        file, _, heading = target.partition("#")
        found = page.parent / file if file else page
        if not target.startswith("http") and (
            not found.exists() or (heading and heading not in headings(found))
        ):
            lost.append(target)
    assert not lost


def test_commands_are_found_in_pages_that_have_some():
    found = commands(ROOT / "README.md")
    assert len(found) > 15 and any(line.startswith("headrace bench step --against trl") for line in found)
    assert len(commands(ROOT / "docs" / "one_gpu.md")) >= 3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_their_options_exist(page):
    unknown = []
    for line in commands(page):
        command, rest = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        options = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        is_group = bool(getattr(command, "commands", {}))
        if is_group or not given <= options | {"--help"}:
            unknown.append(line)
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_prose_is_wrapped(page):
    """Tables, commands, and pages that are generated are as wide as they must be."""
    if page.name in GENERATED:
        return
    lines = page.read_text(encoding="utf-8").splitlines()
    prose = [line for line in lines if not line.startswith(("|", "    "))]
    assert [line for line in prose if len(line) > WIDEST] == []
