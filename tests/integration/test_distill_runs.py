"""Whole runs that imitate a teacher: alone, beside a reward, several teachers, the policy's own past."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from run_tools import SMALL
from safetensors.torch import load_file

import headrace
from headrace import demo
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.samples import sequences
from headrace.engines.make import torch_engine
from headrace.errors import ConfigError, ModelError
from headrace.models.loading import load_model, make_tiny_model
from headrace.runtime.recording import read_recording
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger

SETTINGS = {
    "run.steps": 4,
    **SMALL,
    "rollout.max_lag": 0,
    "distill.divergence": "reverse",
    "distill.top_k": 4,
}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """A student, and two teachers of other weights and other sizes."""
    monkeypatch.chdir(tmp_path)
    prepared = demo.prepare(tmp_path, warm_steps=0)
    teachers = {}
    for seed, name in ((5, "small"), (6, "wide")):
        size = make_char_tokenizer(tmp_path / name, demo.LETTERS + ">")
        make_tiny_model(
            tmp_path / name, vocab_size=size, hidden_size=16 * seed, init_std=0.3, context_tokens=64
        )
        teachers[name] = str(tmp_path / name)
    return {**prepared, **SETTINGS, "distill.teachers": teachers}


def letters_a(completions: list[str], **_: object) -> list[float]:
    return [text.count("a") / 8 for text in completions]


def metrics(result) -> list[dict[str, float]]:
    lines = (result.run_dir / "events.jsonl").read_text().splitlines()
    return [event["metrics"] for event in map(json.loads, lines) if event["event"] == "step"]


def weights(result) -> dict[str, torch.Tensor]:
    return load_file(result.model_dir / "model.safetensors")


@pytest.mark.parametrize("divergence", ["sampled", "forward", "reverse"])
def test_without_a_reward_the_teacher_is_the_whole_loss(settings, divergence):
    chosen = {**settings, "distill.divergence": divergence, "run.steps": 12, "trainer.learning_rate": 3e-3}
    if divergence == "sampled":
        del chosen["distill.top_k"]
    result = headrace.train(tasks=demo.tasks(64), reward=[], settings=chosen)
    seen = [step["teacher_divergence"] for step in metrics(result)]
    assert set(result.rewards) == {0.0}
    assert result.summary.attempts["trained"] == 12 * 2 * 4
    if divergence != "sampled":
        assert sum(seen[-3:]) < sum(seen[:3])


def test_beside_a_reward_both_count(settings):
    both = headrace.train(tasks=demo.tasks(64), reward=letters_a, settings={**settings, "run.name": "both"})
    alone = headrace.train(tasks=demo.tasks(64), reward=[], settings={**settings, "run.name": "alone"})
    assert any(reward > 0 for reward in both.rewards)
    assert metrics(both)[0]["teacher_divergence"] == pytest.approx(metrics(alone)[0]["teacher_divergence"])
    assert any(not torch.equal(tensor, weights(alone)[name]) for name, tensor in weights(both).items())


def test_a_teacher_of_the_students_own_weights_has_nothing_to_say_of_a_cut_distribution_either(settings):
    own = {"distill.teachers": {"self": settings["model.path"]}, "distill.divergence": "sampled"}
    del settings["distill.top_k"]
    still = {"rollout.top_p": 0.7, "run.steps": 2, "trainer.learning_rate": 1e-12}
    result = headrace.train(tasks=demo.tasks(64), reward=[], settings={**settings, **own, **still})
    for step in metrics(result):
        assert step["kept_mass"] < 0.95
        assert step.get("teacher_divergence", 0.0) < 1e-6


def test_a_run_that_dies_is_resumed_with_the_same_scores(settings, die_after):
    whole = headrace.train(tasks=demo.tasks(64), reward=[], settings={**settings, "run.name": "whole"})
    die_after(3, lambda: headrace.train(tasks=demo.tasks(64), reward=[], settings=settings))
    resumed = headrace.train(tasks=demo.tasks(64), reward=[], resume="runs/run")
    expected = weights(whole)
    for name, tensor in weights(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_teachers_are_processes_beside_the_others_and_tasks_choose_among_them(settings):
    names = ("small", "wide", "none", "unheard")
    tasks = [{**row, "teacher": names[i % 8 if i % 8 < 4 else 0]} for i, row in enumerate(demo.tasks(64))]
    chosen = {
        **settings, "run.launcher": "local", "rollout.max_lag": 1, "tasks.shuffle": False,
        "reward.error_budget": 0.5, "distill.teachers.snapshot": "snapshot:1",
    }  # fmt: skip
    result = headrace.train(tasks=tasks, reward=[], settings=chosen)
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    (end,) = [event for event in events if event["event"] == "run.end"]
    roles = {role["role"]: role for role in end["roles"]}
    for name in ("small", "wide"):
        assert (result.run_dir / "logs" / f"teacher-{name}.log").exists()
        assert roles[f"teacher-{name}"]["counters"]["prefill_tokens"] > 0
    # The follower was given the versions it may have, though no task asked for it.
    assert roles["teacher-snapshot"]["version"] == 4 - 1
    failed = [event for event in events if event["event"] == "drop" and event["reason"] == "failed"]
    assert failed and all("'unheard'" in event["detail"] for event in failed)
    assert result.summary.attempts["trained"] == 4 * 2 * 4


@pytest.mark.parametrize("launcher", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_a_teacher_whose_folder_is_a_link_is_exchanged_while_the_run_goes_on(settings, tmp_path, launcher):
    """First to a model of another size, which is refused, then to one of the same."""
    size = make_char_tokenizer(tmp_path / "better", demo.LETTERS + ">")
    make_tiny_model(
        tmp_path / "better", vocab_size=size, hidden_size=80, init_std=0.3, context_tokens=64, seed=9
    )
    link, num_asked = tmp_path / "teacher", 0
    link.symlink_to("small")

    def changing(completions: list[str], **_: object) -> list[float]:
        nonlocal num_asked
        num_asked += 1
        target = {5: "wide", 9: "better"}.get(num_asked)
        if target is not None:
            (tmp_path / "next").symlink_to(target)
            (tmp_path / "next").rename(link)
        return letters_a(completions)

    chosen = {
        **settings, "run.launcher": launcher, "run.steps": 40 if launcher == "local" else 10,
        "run.checkpoint_every": 0, "distill.teachers": {"linked": str(link)},
    }  # fmt: skip
    result = headrace.train(tasks=demo.tasks(64), reward=changing, settings=chosen)
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    (warning,) = [event["text"] for event in events if event["event"] == "warning"]
    assert "teacher-linked goes on with" in warning and "a configuration unlike" in warning
    scored = [
        (ids, scores)
        for group in read_recording(result.run_dir).groups.values()
        for episode in group.episodes()
        for (ids, _), scores in zip(
            sequences([episode]), group.columns[episode.attempt]["teacher"][0].teacher, strict=True
        )
    ]
    versions = sorted({scores.version for _, scores in scored})
    assert len(versions) == 2 and versions[0] == 0
    for version, name in zip(versions, ("small", "better"), strict=True):
        engine = torch_engine(load_model(tmp_path / name), ledger=TimeLedger(ENGINE_ACTIVITIES))
        ids, scores = next((ids, scores) for ids, scores in scored if scores.version == version)
        np.testing.assert_allclose(engine.score([ids])[0], scores.logprobs, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapter"])
def test_a_student_learns_from_what_it_was_some_versions_ago(settings, rank):
    chosen = {k: v for k, v in settings.items() if k != "distill.teachers"}
    chosen |= {
        "distill.teachers.past": "snapshot:2",
        "trainer.learning_rate": 1e-2 if rank else 1e-3,
        "lora.rank": rank,
    }
    result = headrace.train(tasks=demo.tasks(64), reward=letters_a, settings=chosen)
    seen = [step.get("teacher_divergence", 0.0) for step in metrics(result)]
    # At first it is its own teacher; then it has moved away from it.
    assert seen[0] < 1e-5 < max(seen)


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_starts(settings, tmp_path):
    size = make_char_tokenizer(tmp_path / "other", "zyx" + demo.LETTERS + ">")
    make_tiny_model(tmp_path / "other", vocab_size=size, context_tokens=64)
    chosen = {**settings, "distill.teachers": {"other": str(tmp_path / "other")}}
    with pytest.raises(ModelError, match=r"distill\.teachers: other has another tokenizer than model\.path"):
        headrace.train(tasks=demo.tasks(8), reward=[], settings=chosen)
    gone = {**settings, "distill.teachers": {"gone": str(tmp_path / "gone")}}
    with pytest.raises(ModelError, match=r"distill\.teachers\.gone: .* does not exist"):
        headrace.train(tasks=demo.tasks(8), reward=[], settings=gone)
    assert not (tmp_path / "runs").exists()


def test_nothing_to_learn_from_is_refused(settings):
    bare = {k: v for k, v in settings.items() if not k.startswith("distill.")}
    with pytest.raises(ConfigError, match=r"reward\.functions is not set"):
        headrace.train(tasks=demo.tasks(8), reward=[], settings=bare)
    idle = {
        "rollout.drop_zero_variance would drop every group": {"rollout.drop_zero_variance": True},
        "rollout.quorum would release no group": {"rollout.quorum": 0.75, "rollout.max_lag": 2},
        "pivots.branches would branch off every attempt": {"pivots.branches": 2},
    }
    for says, also in idle.items():
        with pytest.raises(ConfigError, match=says):
            headrace.train(tasks=demo.tasks(8), reward=[], settings={**settings, **also})
