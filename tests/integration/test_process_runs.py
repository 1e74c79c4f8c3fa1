"""Process rewards in whole runs: a tiny model, a judge in this process or in one of its own, also one that dies."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import headrace
from headrace.cli import app
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.steps import step_borders
from headrace.errors import ConfigError, ModelError
from headrace.models.loading import make_tiny_model
from headrace.runtime.journal import read
from headrace.runtime.state import RunState
from headrace.scoring.process_model import ProcessModel, load_process_model
from headrace.types import StepQuestion

JUDGES = """
import os, signal, time

calls = 0

def vowels(steps):
    return [sum(c in "ae" for c in step) / max(1, len(step)) - 0.5 for step in steps]

def mortal(steps):
    global calls
    calls += 1
    if calls > 10:
        os.kill(os.getpid(), signal.SIGKILL)
    return vowels(steps)

def sleepy(steps):
    global calls
    calls += 1
    time.sleep(1e6 if calls > 10 else 0)
    return vowels(steps)
"""


def reward(completions):
    return [float(text.count("b")) for text in completions]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A policy and a causal judge over the same characters."""
    directory = tmp_path_factory.mktemp("models")
    for name, seed in (("policy", 0), ("judge", 1)):
        vocab_size = make_char_tokenizer(directory / name, "abcde+-")
        make_tiny_model(
            directory / name,
            vocab_size=vocab_size,
            hidden_size=32,
            context_tokens=64,
            init_std=0.3,
            seed=seed,
        )
    (directory / "judges.py").write_text(JUDGES)
    return directory


def train(models, tmp_path, process, **more):
    settings = {
        "run.dir": str(tmp_path),
        "run.name": "run",
        "run.steps": 3,
        "run.launcher": "inline",
        "run.checkpoint_every": 0,
        "run.console": "off",
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "rollout.max_tokens": 40,
        "trainer.learning_rate": 1e-3,
        "scoring.process": process,
        "scoring.steps": "tokens:4",
        **more,
    }
    tasks = [{"prompt": f"{a}{b}"} for a in "abcde" for b in "abcde"]
    return headrace.train(model=models / "policy", tasks=tasks, reward=reward, settings=settings)


def scored_groups(run_dir):
    state = RunState()
    for record in read(run_dir / "journal", 0):
        state.apply(record)
        if record["kind"] == "scored":
            yield state.live(record["group"]).scored


def events(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "events.jsonl").read_text().splitlines()]


def test_a_causal_judge_reads_along_and_says_what_it_would_say_of_the_whole(models, tmp_path):
    result = train(models, tmp_path, f"{models / 'judge'}?good=+&bad=-&marker=+")
    assert result.num_steps == 3
    assert result.summary.missing_scores == {}
    judge = ProcessModel(
        load_process_model(str(models / "judge"), dtype="float32", device="cpu"),
        kv_tokens=1000,
        pair=(9, 10),
        marker=(9,),
    )
    num_scores = 0
    for group in scored_groups(result.run_dir):
        for episode in group.episodes:
            ends, scores = step_borders(group, episode.attempt)
            turn = episode.trajectories[0].turns[0]
            question = StepQuestion(
                attempt="whole",
                task=episode.task,
                token_ids=np.concatenate([turn.prompt_ids, turn.completion.token_ids]),
                num_prompt=len(turn.prompt_ids),
                ends=len(turn.prompt_ids) + ends,
                num_known=0,
                last=True,
            )
            (whole,) = judge.score([question])
            np.testing.assert_allclose(scores, whole.scores, atol=1e-5)
            num_scores += len(scores)
    assert num_scores >= 24


def test_a_function_judges_and_hopeless_attempts_end_early(models, tmp_path):
    plain = train(models, tmp_path / "plain", f"{models}/judges.py:vowels")
    cut = train(models, tmp_path / "cut", f"{models}/judges.py:vowels", **{"scoring.abort_below": 0.0})
    assert plain.summary.num_given_up == 0
    assert cut.summary.num_given_up > 0
    assert sum(cut.summary.tokens.values()) < sum(plain.summary.tokens.values())
    lengths = [e.num_tokens for group in scored_groups(cut.run_dir) for e in group.episodes]
    assert len(lengths) == sum(cut.summary.attempts.values())
    # What was given up is whole as it is.
    checked = CliRunner().invoke(app, ["replay", str(cut.run_dir), "--check"], catch_exceptions=False)
    assert checked.exit_code == 0, checked.output


def test_a_judge_that_is_killed_ends_nothing_but_its_scores(models, tmp_path):
    process = f"{models}/judges.py:mortal"
    result = train(models, tmp_path, process, **{"run.launcher": "local", "reward.timeout_s": 20.0})
    assert result.num_steps == 3
    assert result.summary.attempts["trained"] == 24
    assert result.summary.missing_scores["process: dead"] > 0
    assert any("killed by SIGKILL" in e.get("text", "") for e in events(result.run_dir))


def test_a_judge_that_falls_asleep_costs_its_deadline_and_ends_with_the_run(models, tmp_path):
    process = f"{models}/judges.py:sleepy"
    result = train(models, tmp_path, process, **{"run.launcher": "local", "reward.timeout_s": 1.0})
    assert result.num_steps == 3
    assert result.summary.attempts["trained"] == 24
    assert result.summary.missing_scores.keys() == {"process: late"}


def test_a_judge_with_another_tokenizer_is_refused(models, tmp_path):
    vocab_size = make_char_tokenizer(tmp_path / "other", "edcba+-")
    make_tiny_model(tmp_path / "other", vocab_size=vocab_size)
    with pytest.raises(ModelError, match=r"scoring\.process: .*another tokenizer than model\.path"):
        train(models, tmp_path, f"{tmp_path / 'other'}?good=+&bad=-")


def test_a_causal_judge_without_its_two_tokens_is_refused(models, tmp_path):
    with pytest.raises(ModelError, match="needs the two tokens that mean good and bad"):
        train(models, tmp_path, str(models / "judge"))
    with pytest.raises(ConfigError, match=r"write PATH\?good=TOKEN&bad=TOKEN"):
        train(models, tmp_path, f"{models / 'judge'}?good=+&evil=-")
