"""A real model trained through the command line, killed and resumed: each attempt is in the weights once."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest
from kill_tools import Life

from headrace import build, demo, roles
from headrace.config import Settings, from_dict, load, to_toml
from headrace.observe.jsonl import read_events
from headrace.runtime.batches import make_batch
from headrace.runtime.checkpoint import CheckpointStore, recover
from headrace.runtime.groups import ready_group
from headrace.runtime.journal import read
from headrace.runtime.state import RunState
from headrace.types import TrainBatch

VICTIMS = ("controller", "engine-0", "trainer", "scorer", "all")
EVERYONE = ("guardian", "controller", "engine-0", "trainer", "scorer")
STEPS, GROUP_SIZE, GROUPS_PER_STEP = 40, 4, 4
NUM_ATTEMPTS = STEPS * GROUP_SIZE * GROUPS_PER_STEP


def run_settings(directory: Path) -> Settings:
    return from_dict(
        {
            **demo.prepare(directory, warm_steps=2),
            "run.dir": str(directory),
            "run.name": "run",
            "run.console": "plain",
            "run.steps": STEPS,
            "run.checkpoint_every": 4,
            # All of them, so that the journal is there from its first record.
            "run.keep_checkpoints": STEPS,
            "tasks.source": "headrace.demo:tasks",
            "reward.functions": ["kill_tools:vowels"],
            "rollout.group_size": GROUP_SIZE,
            "rollout.groups_per_step": GROUPS_PER_STEP,
        }
    )


def start(run_dir: Path) -> Life:
    again = ["--resume", str(run_dir)] if run_dir.exists() else [str(run_dir.with_name("run.toml"))]
    return Life(["-m", "headrace.cli", "train", *again], run_dir)


def step_line(line: str) -> bool:
    return f"/{STEPS} " in line


def checkpoint_line(line: str) -> bool:
    """A step after which a checkpoint is written, or one that was written being restored."""
    return any(f" {step}/{STEPS} " in line for step in range(0, STEPS, 4)) or line.startswith("restoring")


def killed_life(run_dir: Path, victim: str, draw: random.Random) -> None:
    with start(run_dir) as life:
        wanted = draw.choice([step_line, checkpoint_line])
        life.wait_for(wanted, draw.randint(1, 3 if wanted is step_line else 1))
        life.kill(*(draw.sample(EVERYONE, len(EVERYONE)) if victim == "all" else [victim]))
        code, _, errors = life.end()
        life.expect_no_workers()
        if victim in ("controller", "all"):
            assert code == -signal.SIGKILL
        else:
            assert code == 1
            assert f"error: {victim} died (killed by SIGKILL)" in errors
            assert "Traceback" not in errors
            life.expect_nothing_left()


def interrupted_life(run_dir: Path) -> None:
    with start(run_dir) as life:
        life.wait_for(step_line)
        life.process.send_signal(signal.SIGINT)
        code, _, errors = life.end()
        assert code == 130
        assert f"headrace train --resume {run_dir}" in "".join(errors.split("\n"))
        life.expect_nothing_left()


def trained_batches(run_dir: Path, settings: Settings) -> list[TrainBatch]:
    """What the journal says each step trained, each step once: one trained again has the same groups."""
    plan, state = build.plan(settings), RunState()
    batches: list[TrainBatch] = []
    taken: dict[int, list[int]] = {}
    for record in read(run_dir / "journal", 0):
        if record["kind"] in ("take", "trained") and record["step"] <= state.step:
            assert record["groups"] == taken[record["step"]]
            continue
        if record["kind"] == "take":
            step, groups = record["step"], record["groups"]
            if step in taken:
                # Begun before, cut short by a kill, begun again.
                assert groups == taken[step]
                continue
            taken[step] = groups
            scored = [state.live(group).scored for group in groups]
            ready = [ready_group(plan, group) for group in scored if group is not None]
            batches.append(make_batch(ready, step=step, version=step - 1, advantage=plan.advantage))
        state.apply(record)
    return batches


async def trained_again(settings: Settings, run_dir: Path, batches: list[TrainBatch], output: Path) -> None:
    """The same batches from the first checkpoint, with nothing in between."""
    told = {
        "settings": settings.model_dump(mode="json", exclude_none=True),
        "model": settings.model.path,
        "segments": str(output / "segments"),
        "threaded": False,
    }
    trainer = roles.trainer_role(told)
    await trainer.load(run_dir / "checkpoints" / "step-00000000")
    for batch in batches:
        await trainer.step(batch)
    (output / "weights").mkdir()
    await trainer.save(output / "weights")
    await trainer.close()


@pytest.mark.slow
def test_five_kills_with_a_real_model_lose_nothing_and_count_nothing_twice(tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    draw, run_dir = random.Random(5), tmp_path / "run"
    (tmp_path / "run.toml").write_text(to_toml(run_settings(tmp_path)))
    for victim in draw.sample(VICTIMS, len(VICTIMS)):
        killed_life(run_dir, victim, draw)
    interrupted_life(run_dir)
    with start(run_dir) as life:
        code, _, errors = life.end()
        assert (code, errors) == (0, "")
        life.expect_nothing_left()

    recovery = recover(CheckpointStore(run_dir, keep=1))
    ledger = recovery.state.ledger
    ledger.check()
    assert ledger.attempts()["trained"] == ledger.num_admitted == NUM_ATTEMPTS
    last = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "run.end"][-1]
    assert last["attempts"] == ledger.attempts()
    assert last["tokens_by_state"] == ledger.tokens()

    settings = load(run_dir / "settings.toml")
    batches = trained_batches(run_dir, settings)
    names = [(sample.group, sample.attempt) for batch in batches for sample in batch.samples]
    assert len(names) == len(set(names)) == NUM_ATTEMPTS
    asyncio.run(trained_again(settings, run_dir, batches, tmp_path))
    final = run_dir / "checkpoints" / f"step-{STEPS:08d}"
    expected = load_file(tmp_path / "weights" / "model.safetensors")
    found = dict(AutoModelForCausalLM.from_pretrained(final).named_parameters())
    start_weights = load_file(run_dir / "checkpoints" / "step-00000000" / "model.safetensors")
    assert any(not torch.equal(start_weights[name], expected[name]) for name in expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
