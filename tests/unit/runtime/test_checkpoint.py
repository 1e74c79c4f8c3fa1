"""Checkpoints that cannot be written, or are written twice for one step: nothing is lost or counted twice."""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from harness import make_pipeline, make_plan

from headrace.engines.scripted import ScriptedEngine
from headrace.errors import CheckpointError
from headrace.plan import virtual_clock
from headrace.runtime.checkpoint import STATE_FILE, CheckpointStore, recover
from headrace.trainers.scripted import ScriptedTrainer


class FullDisk(ScriptedTrainer):
    """Writes a part of each checkpoint from the second on, and then finds the disk full."""

    num_saves = 0

    async def save(self, directory):
        self.num_saves += 1
        await super().save(directory)
        # Generation goes on meanwhile and writes to the journal.
        await asyncio.sleep(0.2)
        if self.num_saves > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def run(run_dir, plan, make_trainer=ScriptedTrainer, *, make_engine=ScriptedEngine, stop_after_s=None):
    """Returns (state, trainer) at the end of the plan, or when stopped."""

    async def main():
        trainer = make_trainer()
        pipeline = make_pipeline(run_dir, plan, trainer=trainer, engines=[make_engine()])
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, pipeline.request_stop)
        try:
            return await pipeline.run(), trainer
        finally:
            assert asyncio.all_tasks() == {asyncio.current_task()}

    return virtual_clock.run(main())


def finish(run_dir, plan):
    """Resume; every attempt of the plan must be in the weights once."""
    state, trainer = run(run_dir, plan)
    assert state.step == plan.steps
    assert set(trainer.counts.values()) == {1}
    assert len(trainer.counts) == plan.steps * plan.groups_per_step * plan.group_size
    state.ledger.check()


@pytest.mark.parametrize("keep_checkpoints", [1, 2])
def test_stopping_again_before_the_next_step_keeps_the_journal_readable(tmp_path, keep_checkpoints):
    plan = make_plan(keep_checkpoints=keep_checkpoints)
    first, _ = run(tmp_path, plan, stop_after_s=0.35)
    second, _ = run(tmp_path, plan, stop_after_s=0.0)
    third, _ = run(tmp_path, plan, stop_after_s=0.03)
    assert 0 < first.step == second.step == third.step
    assert third.ledger.num_sampled_tokens > first.ledger.num_sampled_tokens
    assert recover(CheckpointStore(tmp_path, keep=1)).state.ledger.tokens() == third.ledger.tokens()
    finish(tmp_path, plan)


def test_a_full_disk_leaves_the_last_checkpoint_and_the_journal_intact(tmp_path):
    plan = make_plan()
    with pytest.raises(CheckpointError, match=r"step 2 cannot be written to .*No space left.*free some disk"):
        run(tmp_path, plan, FullDisk)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000000"]
    recovery = recover(CheckpointStore(tmp_path, keep=2))
    assert [step for step, _ in recovery.batches] == [1, 2]
    finish(tmp_path, plan)


def test_a_run_that_fails_admits_nothing_while_it_ends(tmp_path):
    class SlowEngine(ScriptedEngine):
        """Weights land, and free slots, while the groups under way are being given up."""

        async def apply(self, manifest):
            await asyncio.sleep(0.25)
            return await super().apply(manifest)

        async def abort(self, request_ids):
            await asyncio.sleep(0.2)
            await super().abort(request_ids)

    with pytest.raises(CheckpointError, match="step 2 cannot be written"):
        run(tmp_path, make_plan(), FullDisk, make_engine=SlowEngine)
    finish(tmp_path, make_plan())


def test_a_step_whose_checkpoint_was_cut_short_can_be_saved_later(tmp_path):
    plan = make_plan()
    with pytest.raises(CheckpointError):
        run(tmp_path, plan, FullDisk)
    state, _ = run(tmp_path, plan, stop_after_s=0.0)
    assert state.step == 2
    assert [step for step, _ in recover(CheckpointStore(tmp_path, keep=2)).batches] == []
    finish(tmp_path, plan)


def test_a_trainers_own_checkpoint_error_leaves_no_partial_directory(tmp_path):
    class Refusing(ScriptedTrainer):
        async def save(self, directory):
            (directory / "half").write_text("x")
            raise CheckpointError("the weights cannot be written; free space")

    with pytest.raises(CheckpointError, match="the weights cannot be written"):
        run(tmp_path, make_plan(), Refusing)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("damage", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:-9])])
def test_an_unreadable_state_names_the_checkpoint_and_the_remedy(tmp_path, damage):
    plan = make_plan()
    run(tmp_path, plan, stop_after_s=0.35)
    newest = max((tmp_path / "checkpoints").iterdir())
    damage(newest / STATE_FILE)
    with pytest.raises(
        CheckpointError, match=rf"{newest.name}/{STATE_FILE} cannot be read.*remove .*to resume"
    ):
        run(tmp_path, plan)
