"""A teacher whose folder is a link that changes: who is given what and when, and that a group has one version."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from harness import MemorySink, make_pipeline, make_plan
from test_teachers import RecordingTrainer, TeacherEngine, episode

from headrace.errors import DeadlineError, ModelError, RoleError, WeightSyncError
from headrace.plan import virtual_clock
from headrace.runtime.linked_weights import LinkedWeights, _manifest
from headrace.runtime.teachers import Teacher, Teachers


class FolderEngine(TeacherEngine):
    """Scores every token with minus the number its folder has for a name; reading takes ``read_s``."""

    def __init__(self, *, read_s: float = 0.0, seconds: float = 0.0) -> None:
        super().__init__(-1.0, seconds=seconds)
        self._version, self.read_s = 0, read_s

    async def apply(self, manifest):
        await asyncio.sleep(self.read_s)
        if manifest.location.endswith("torn"):
            raise WeightSyncError("a file ends too early; write it again")
        self.number = -float(manifest.location.rpartition("/")[2])
        return await super().apply(manifest)


@pytest.fixture
def link(tmp_path):
    for name in ("1", "2", "3", "torn", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "teacher").symlink_to("1")
    return tmp_path / "teacher"


def point(link, name):
    (link.parent / "next").symlink_to(name)
    (link.parent / "next").rename(link)


def test_the_engine_is_given_what_the_link_points_to_once_a_version(link):
    async def main():
        weights = LinkedWeights(engine := FolderEngine(), link, deadline_s=5.0)
        seen = []
        for version, name in enumerate(["2", "2", "2", "3", "3"]):
            point(link, name)
            await weights.look(version)
            seen.append((await weights.current(), engine.number))
        return seen, engine.applied

    seen, applied = asyncio.run(main())
    # At version 0 it would have the version of the weights it started with.
    assert seen == [(0, -1.0), (1, -2.0), (1, -2.0), (3, -3.0), (3, -3.0)]
    assert applied == [1, 3]


def test_a_folder_that_cannot_be_taken_is_named_once_and_left_out(link):
    def check(folder):
        if folder.name == "other":
            raise ModelError("other has another configuration; restart the run with it")

    async def main():
        said = []
        weights = LinkedWeights(engine := FolderEngine(), link, deadline_s=5.0, check=check, warn=said.append)
        for version, name in enumerate(["torn", "torn", "other", "other", "2"], start=1):
            point(link, name)
            await weights.look(version)
        return said, await weights.current(), engine.applied

    said, version, applied = asyncio.run(main())
    assert len(said) == 2
    assert "teacher-1 goes on with" in said[0] and "a file ends too early" in said[0]
    assert "another configuration" in said[1]
    assert version == 5 and applied == [5]


def test_an_engine_that_takes_too_long_is_named_and_what_it_has_is_asked(link):
    async def main():
        said = []
        weights = LinkedWeights(engine := FolderEngine(read_s=9.0), link, deadline_s=5.0, warn=said.append)
        point(link, "2")
        # The engine goes on reading when nobody waits any more.
        engine.apply = _in_background(engine.apply)
        await weights.look(1)
        before = await weights.current()
        await asyncio.sleep(10.0)
        return said, before, await weights.current(), weights.num_swaps

    said, before, after, num_swaps = virtual_clock.run(main())
    (text,) = said
    assert "waited 5 s for teacher-1 to take" in text and "run.stall_s" in text
    assert (before, after, num_swaps) == (0, 1, 1)


def test_what_did_not_arrive_in_time_is_given_again(link):
    async def main():
        weights = LinkedWeights(engine := FolderEngine(read_s=9.0), link, deadline_s=5.0)
        point(link, "2")
        await weights.look(1)
        assert (await weights.current(), engine.number) == (0, -1.0)
        engine.read_s = 1.0
        await weights.look(2)
        assert (await weights.current(), engine.number, weights.num_swaps) == (2, -2.0, 1)

    virtual_clock.run(main())


def test_a_call_that_is_given_up_sooner_ends_nothing(link):
    """Calls to another process have a deadline of their own."""

    async def main():
        said = []
        weights = LinkedWeights(engine := FolderEngine(), link, deadline_s=900.0, warn=said.append)

        async def given_up(manifest):
            raise DeadlineError("teacher-1 did not answer 'apply' within 600 s; its log may say why")

        apply, engine.apply = engine.apply, given_up
        point(link, "2")
        await weights.look(1)
        before = await weights.current()
        # The engine has gone on, and is done.
        await apply(_manifest(link.resolve(), 1))
        return said, before, await weights.current()

    (text,), before, after = asyncio.run(main())
    assert "within 600 s" in text and "goes on with" in text
    assert (before, after) == (0, 1)


def _in_background(apply):
    async def given(manifest):
        return await asyncio.shield(asyncio.ensure_future(apply(manifest)))

    return given


def test_an_answer_that_was_overtaken_takes_nothing_back(link):
    async def main():
        weights = LinkedWeights(engine := FolderEngine(read_s=1.0), link, deadline_s=5.0)
        status = engine.status

        async def late():
            told = await status()
            await asyncio.sleep(2.0)
            return told

        engine.status = late
        point(link, "2")
        looking = asyncio.create_task(weights.look(1))
        await asyncio.sleep(0.5)
        during = await weights.current()
        await looking
        return during, await weights.current(), weights.num_swaps

    assert virtual_clock.run(main()) == (1, 1, 1)


def test_an_engine_that_does_not_say_what_it_has_is_named(link):
    async def main():
        engine = FolderEngine(read_s=1e6)
        weights = LinkedWeights(engine, link, deadline_s=5.0)
        point(link, "2")
        await weights.look(1)
        engine.status = lambda: asyncio.sleep(1e6)
        await weights.current()

    with pytest.raises(RoleError, match="waited 5 s for teacher-1 to say which weights it has"):
        virtual_clock.run(main())


def test_a_group_that_a_change_falls_into_is_asked_about_again(link):
    """Two temperatures are two questions; the engine has other weights before the second."""

    async def main():
        engine = FolderEngine(read_s=1.5, seconds=1.0)
        weights = LinkedWeights(engine, link, deadline_s=5.0)
        teachers = Teachers({"first": Teacher(engine, link=weights)}, top_k=0, deadline_s=5.0)
        point(link, "2")
        looking = asyncio.create_task(teachers.look(4))
        asked = [episode([1, 2]), episode([1, 3], temperature=0.5)]
        scores = await teachers.scores(3, asked)
        await looking
        return scores, engine.num_asked

    scores, num_asked = virtual_clock.run(main())
    assert [(s.version, s.logprobs.tolist()) for s in scores] == [(4, [-2.0, -2.0]), (4, [-4.0, -4.0])]
    assert num_asked == 4


@pytest.mark.parametrize("read_s", [0.0, 0.7])
def test_a_run_whose_teacher_is_exchanged(tmp_path, link, read_s):
    """Scores say which weights they are of, and steps take no longer than with a teacher that stays as it is."""

    class Exchanging(RecordingTrainer):
        def __init__(self, change) -> None:
            super().__init__(token_s=0.01)
            self._change, self.step_at = change, []

        async def step(self, batch):
            if batch.step in (2, 4):
                self._change(str(1 + batch.step // 2))
            self.step_at.append(asyncio.get_running_loop().time())
            return await super().step(batch)

    async def main(run_dir, change):
        engine, sink, trainer = FolderEngine(read_s=read_s), MemorySink(), Exchanging(change)
        weights = LinkedWeights(engine, link, deadline_s=5.0)
        teachers = Teachers({"first": Teacher(engine, link=weights)}, top_k=0, deadline_s=5.0)
        plan = make_plan(steps=8)
        await make_pipeline(run_dir, plan, trainer=trainer, teachers=teachers, sink=sink).run()
        return trainer, weights

    trainer, weights = virtual_clock.run(main(tmp_path / "a", lambda name: point(link, name)))
    alone, _ = virtual_clock.run(main(tmp_path / "b", lambda name: None))
    assert weights.num_swaps == 2
    assert trainer.step_at == alone.step_at
    found = {}
    for sample in trainer.samples:
        found.setdefault(sample.teacher.version, set()).update(np.unique(sample.teacher.logprobs).tolist())
    assert [found[version] for version in sorted(found)] == [{-1.0}, {-2.0}, {-3.0}]


def test_the_end_of_a_run_does_not_wait_for_a_folder_to_be_read(tmp_path, link):
    class Changing(RecordingTrainer):
        async def step(self, batch):
            if batch.step == 4:
                point(link, "2")
            return await super().step(batch)

    async def main(run_dir, read_s):
        engine = FolderEngine(read_s=read_s)
        weights = LinkedWeights(engine, link, deadline_s=600.0)
        teachers = Teachers({"first": Teacher(engine, link=weights)}, top_k=0, deadline_s=600.0)
        trainer = Changing(token_s=0.01)
        await make_pipeline(run_dir, make_plan(steps=4), trainer=trainer, teachers=teachers).run()
        return asyncio.get_running_loop().time()

    at_once = virtual_clock.run(main(tmp_path / "a", 0.0))
    point(link, "1")
    assert virtual_clock.run(main(tmp_path / "b", 500.0)) == pytest.approx(at_once)
