"""A run whose processes are killed at random moments ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import pytest
from kill_program import GROUP_SIZE, GROUPS_PER_STEP, INTERRUPTED
from kill_tools import Life, segment_directories

from headrace.runtime.checkpoint import CheckpointStore, recover
from headrace.runtime.ledger import LIVE_STATES
from headrace.runtime.state import RunState

NUM_KILLS = 20
STEPS = 60
VICTIMS = ("controller", "engine-0", "engine-1", "trainer", "all")
EVERYONE = ("guardian", "controller", "engine-0", "engine-1", "trainer")
MOMENTS = {"spawn": 1, "started": 1, "phase": 4, "attempt": 9, "score": 4, "drop": 2, "step": 2}
"""Lines of the controller after which a kill may come, and how many of them at most."""


def start(run_dir: Path, *options: str, steps: int = STEPS) -> Life:
    program = Path(__file__).with_name("kill_program.py")
    return Life([str(program), str(run_dir), "--steps", str(steps), *options], run_dir)


def said(kind: str):
    return lambda line: line.split(" ", 1)[0].strip() == kind


def saved_state(run_dir: Path) -> RunState:
    """What a run that was stopped in order has saved: no step is left to be trained again."""
    recovery = recover(CheckpointStore(run_dir, keep=2))
    assert recovery.batches == ()
    return recovery.state


def trained_attempts(run_dir: Path) -> dict[str, int]:
    """What the newest weights say they were trained on: times by ``group/attempt``."""
    checkpoint = recover(CheckpointStore(run_dir, keep=2)).checkpoint
    assert checkpoint is not None
    return json.loads((checkpoint / "counts.json").read_text())["counts"]


def check_books(run_dir: Path, *, steps: int) -> None:
    """Each attempt that was admitted is in the weights exactly once, or was dropped with its whole group."""
    state, counts = saved_state(run_dir), trained_attempts(run_dir)
    assert state.step == steps
    assert set(counts.values()) == {1}
    trained = {int(key.split("/")[0]) for key in counts}
    assert counts.keys() == {f"{group}/{attempt}" for group in trained for attempt in range(GROUP_SIZE)}
    assert len(trained) == steps * GROUPS_PER_STEP
    assert trained <= set(range(state.next_group))
    state.ledger.check()
    attempts = state.ledger.attempts()
    assert all(attempts[live] == 0 for live in LIVE_STATES)
    assert state.ledger.num_admitted == state.next_group * GROUP_SIZE
    assert attempts["trained"] == len(counts)
    dropped = sum(number for name, number in attempts.items() if name.startswith("dropped:"))
    assert dropped == (state.next_group - len(trained)) * GROUP_SIZE


def killed_life(run_dir: Path, draw: random.Random) -> int:
    """One life and its violent end; returns the controller's process id."""
    moment = draw.choice(list(MOMENTS))
    victim = "controller" if moment == "spawn" else draw.choice(VICTIMS)
    mode = draw.choice(["never", "drain", "abort", "block"])
    with start(run_dir, "--staleness", "drop", "--interrupt", mode) as life:
        life.wait_for(said(moment), draw.randint(1, MOMENTS[moment]))
        life.kill(*(draw.sample(EVERYONE, len(EVERYONE)) if victim == "all" else [victim]))
        code, _, errors = life.end()
        if victim in ("controller", "all"):
            assert code == -signal.SIGKILL
            life.expect_no_workers()
        else:
            assert code == 1
            assert errors.startswith(f"error: {victim} died (killed by SIGKILL)")
            assert "Traceback" not in errors
        if victim != "all" and moment != "spawn":
            # Without a guardian, or before it has one, a killed run leaves this to the next start.
            life.expect_nothing_left()
        return life.process.pid


def test_twenty_kills_lose_nothing_and_count_nothing_twice(tmp_path):
    run_dir, draw = tmp_path / "run", random.Random(20)
    controllers = [killed_life(run_dir, draw) for _ in range(NUM_KILLS)]
    assert len(trained_attempts(run_dir)) < STEPS * GROUPS_PER_STEP * GROUP_SIZE
    with start(run_dir, "--staleness", "drop") as life:
        code, _, errors = life.end()
        assert (code, errors) == (0, "")
        life.expect_nothing_left()
    assert [path for pid in controllers for path in segment_directories(pid)] == []
    check_books(run_dir, steps=STEPS)


@pytest.mark.parametrize("mode", ["never", "abort"])
def test_an_interrupted_run_goes_on_where_it_stood_and_samples_no_token_twice(tmp_path, mode):
    run_dir, steps = tmp_path / "run", 12
    num_tokens, num_unfinished = 0, 0
    # The second interruption comes before another step is trained, the others between steps.
    for moment, count in (("step", 2), ("started", 1), ("attempt", 4), ("score", 5), ("", 0)):
        with start(run_dir, "--interruptible", "--interrupt", mode, steps=steps) as life:
            if moment:
                life.wait_for(said(moment), count)
                life.process.send_signal(signal.SIGINT)
            code, output, errors = life.end()
            assert (code, errors) == (INTERRUPTED if moment else 0, "")
            life.expect_nothing_left()
        num_tokens += json.loads(output.splitlines()[-1].removeprefix("end "))["engine_tokens"]
        state = saved_state(run_dir)
        assert state.ledger.num_sampled_tokens == num_tokens
        num_unfinished += sum(len(group.unfinished) for group in state.groups.values())
    assert num_unfinished > 0
    check_books(run_dir, steps=steps)
