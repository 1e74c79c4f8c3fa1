"""``headrace replay`` over a run that was really made, cut distributions and all, and over what damage leaves of it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

import headrace
from headrace import demo
from headrace.cli import app
from headrace.errors import ConfigError
from headrace.runtime.journal import Journal, read, segment_path, segment_steps
from headrace.types import SamplingMask

SMALL = {
    "run.steps": 3,
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 0,
    "run.name": "run",
    "rollout.group_size": 4,
    "rollout.groups_per_step": 2,
    "rollout.top_p": 0.8,
    "rollout.top_k": 6,
    "rollout.temperature": 0.9,
    "algo.kl_coef": 0.1,
    "algo.options": {"kl.reference": "engine"},
}


def letters_a(completions: list[str], **_: object) -> list[float]:
    return [text.count("a") / 8 for text in completions]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replay")
    prepared = demo.prepare(folder, warm_steps=0)
    settings = {**prepared, **SMALL, "run.dir": str(folder / "runs")}
    return headrace.train(tasks=demo.tasks(64), reward=letters_a, settings=settings)


@pytest.fixture
def run_dir(finished, tmp_path):
    """A copy that may be damaged."""
    return shutil.copytree(finished.run_dir, tmp_path / "run")


def replay(*arguments: object):
    return CliRunner().invoke(app, ["replay", *map(str, arguments)], catch_exceptions=False)


def rewrite(run_dir, change) -> int:
    """The same journal with ``change`` made to its first turn; returns the turn's group."""
    directory, groups = run_dir / "journal", []
    step = min(segment_steps(directory))
    records = list(read(directory, step))
    for other in segment_steps(directory):
        segment_path(directory, other).unlink()
    journal = Journal(directory, step)
    for record in records:
        if record["kind"] == "turn" and not groups:
            groups.append(record["group"])
            record = {**record, "value": change(record["value"])}
        journal.write(record)
        journal.flush()
    journal.close()
    return groups[0]


def test_a_run_with_cut_distributions_is_trained_on_its_kept_sets(finished):
    lines = (finished.run_dir / "events.jsonl").read_text().splitlines()
    steps = [event["metrics"] for event in map(json.loads, lines) if event["event"] == "step"]
    assert len(steps) == 3
    for metrics in steps:
        assert metrics["truncated_fraction"] == 1.0 and 0.1 < metrics["kept_mass"] < 1.0
    # The first step is trained with the weights it was drawn with, and so is its reference.
    assert steps[0]["mismatch_max"] < 1e-5 and abs(steps[0]["kl"]) < 1e-9


def test_every_record_of_a_run_is_sound_and_is_computed_again(finished, tmp_path):
    result = replay(finished.run_dir, "--check", "--recompute", "--json", tmp_path / "report.json")
    assert result.exit_code == 0 and "every record is sound" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"] == []
    assert report["checks"]["mask"]["checked"] == report["checks"]["seed"]["checked"] >= 3 * 2 * 4
    (first, *_) = report["recomputed"]
    assert first["version"] == 0 and first["num_tokens"] > 0 and first["largest"] < 1e-5


def test_groups_and_turns_are_shown(finished):
    listed = replay(finished.run_dir)
    assert listed.exit_code == 0
    header, *rows = [line for line in listed.output.splitlines() if not line.startswith(" " * 40)]
    assert header.split() == ["group", "task", "attempts", "turns", "tokens", "versions", "return", "end"]
    assert rows[0].split()[0] == "0" and rows[0].split()[2:4] == ["4", "4"]
    shown = replay(finished.run_dir, "--group", 1)
    assert shown.exit_code == 0
    for part in ("attempt 3", "prompt", ">'", "ids kept a token", "top_k 6, top_p 0.8", "seed", "return"):
        assert part in shown.output


def test_a_record_cut_off_on_disk_is_named_with_file_and_offset(run_dir):
    step = max(
        s for s in segment_steps(run_dir / "journal") if segment_path(run_dir / "journal", s).stat().st_size
    )
    path = segment_path(run_dir / "journal", step)
    path.write_bytes(path.read_bytes()[:-3])
    result = replay(run_dir, "--check")
    assert result.exit_code == 1
    assert path.name in result.output and "byte" in result.output and "cut off" in result.output
    assert path.name in replay(run_dir).output


@pytest.mark.parametrize("kind", ["without-token", "vocabulary", "logprobs", "seed"])
def test_a_wrong_record_is_found_by_its_attempt(run_dir, kind):
    def change(turn):
        done = turn.completion
        if kind == "without-token":
            others = SamplingMask(token_ids=done.token_ids + 1, offsets=np.arange(done.num_tokens + 1))
            done = replace(done, sampling_mask=others)
        elif kind == "vocabulary":
            done = replace(done, token_ids=done.token_ids + 100_000)
        elif kind == "logprobs":
            done = replace(done, logprobs=np.full_like(done.logprobs, np.nan))
        return replace(turn, completion=done, seed=turn.seed + (kind == "seed"))

    group = rewrite(run_dir, change)
    result = replay(run_dir, "--check")
    assert result.exit_code == 1
    expected = {
        "without-token": "does not hold the sampled token",
        "vocabulary": "the vocabulary has",
        "logprobs": "has the logprob nan",
        "seed": "but the run's settings give",
    }
    assert expected[kind] in result.output and f"attempt {group}/" in result.output
    # The others are checked all the same, and are sound.
    other = replay(run_dir, "--check", "--group", group + 1)
    assert other.exit_code == 0


def test_logprobs_of_other_weights_are_found_by_computing_them_again(run_dir):
    def change(turn):
        done = turn.completion
        return replace(turn, completion=replace(done, logprobs=done.logprobs - 3.0))

    group = rewrite(run_dir, change)
    assert replay(run_dir, "--check", "--group", group).exit_code == 0
    result = replay(run_dir, "--check", "--recompute", "--group", group)
    assert result.exit_code == 1 and "recomputed logprobs are" in result.output


def test_what_cannot_be_replayed_is_refused_in_a_sentence(finished, tmp_path):
    with pytest.raises(ConfigError, match=r"settings\.toml"):
        replay(tmp_path)
    with pytest.raises(ConfigError, match=r"--group: 999 is not in the journal, which holds 0 to"):
        replay(finished.run_dir, "--group", 999)
    with pytest.raises(ConfigError, match="--check"):
        replay(finished.run_dir, "--recompute")
