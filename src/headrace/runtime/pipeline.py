"""The loops: tasks in, trained weights out, generation and training at the same time.

    loop            waits for                                 unblocked by
    admission       a free slot                               a landed update or a dropped group
    group (many)    engines, then scores                      their answers, or the scores' deadlines
    training        a batch the staleness policy allows       a scored group; a straggler that ended
    landing         every engine to apply the new weights     the engines, between two forward passes

Branch groups (``branching``) begin as soon as pivots are found and there is room; they ride along with a step, and so
do the late attempts of groups that were released with a quorum.

Everything that happens is a journal record first (``_record``), so a run killed at any moment is resumed
by ``checkpoint.recover``. ``max_lag = 0`` is synchronous training through exactly this code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from headrace.data.faults import FirstFaults
from headrace.errors import CheckpointError, DeadlineError
from headrace.protocols import (
    Cluster,
    Engine,
    Environment,
    Scorer,
    ScoreSource,
    Sink,
    StepScorer,
    TaskSource,
)
from headrace.runtime.batches import describe, make_batch, means_after
from headrace.runtime.branching import Branching
from headrace.runtime.buffer import ReadyGroup, RolloutBuffer
from headrace.runtime.checkpoint import CheckpointStore, recover
from headrace.runtime.drops import DropWatch
from headrace.runtime.groups import GroupRunner, ready_part
from headrace.runtime.journal import Journal, Record
from headrace.runtime.outcome import OutcomeSource
from headrace.runtime.parts import group_of, is_late
from headrace.runtime.plan import RunPlan
from headrace.runtime.process_rewards import ProcessRewards
from headrace.runtime.reference import ReferencePolicy
from headrace.runtime.report import Reporter
from headrace.runtime.router import Router
from headrace.runtime.scoring_meter import ScoringMeter
from headrace.runtime.scoring_stage import ScoringStage
from headrace.runtime.slots import Slots
from headrace.runtime.state import RunState
from headrace.runtime.supervisor import Supervisor
from headrace.runtime.teachers import Teachers
from headrace.runtime.weight_sync import WeightSync
from headrace.types import DropReason, RoleStatus, StepResult, WeightManifest

T = TypeVar("T")


class Pipeline:
    def __init__(
        self,
        plan: RunPlan,
        *,
        cluster: Cluster,
        environment: Environment,
        scorer: Scorer,
        tasks: TaskSource,
        run_dir: Path,
        sink: Sink,
        reference: Engine | None = None,
        teachers: Teachers | None = None,
        sources: Sequence[ScoreSource] = (),
        process: StepScorer | None = None,
        own_status: Callable[[], RoleStatus] | None = None,
    ) -> None:
        """``reference``: an engine with the starting weights, which computes their log-probabilities (None: the
        trainer does, where it needs them). ``teachers``: who is imitated (None: nobody). ``sources`` score attempts
        beside these and ``scorer``. ``process`` judges their steps, as the plan says (None: nobody does).
        ``own_status`` tells where the controller's own time went; None: it is not metered."""
        self._plan = plan
        self._supervisor = Supervisor()
        self._cluster = cluster
        self._trainer = cluster.trainer
        self._tasks = tasks
        self._sink = sink
        self._store = CheckpointStore(run_dir, keep=plan.keep_checkpoints)
        self._recovery = recover(self._store)
        self.state: RunState = self._recovery.state
        self._journal = Journal(self._store.journal_directory, self._recovery.segment)
        self._sync = WeightSync(
            cluster.engines,
            cluster.trainer,
            mode=plan.interrupt,
            deadline_s=plan.sync_s,
            drain_s=plan.attempt_s,
            step_s=plan.stall_s,
            warn=lambda text: sink.emit("warning", {"text": text}),
        )
        self._slots = Slots(plan.capacity)
        self._buffer = RolloutBuffer(plan, self._unfinished, self._rides)
        meter = ScoringMeter(asyncio.get_running_loop().time)
        steps = self._process_rewards(process, meter)
        references = [] if reference is None else [ReferencePolicy(reference, deadline_s=plan.stall_s)]
        asked = [source for source in (*references, teachers, *sources, steps) if source is not None]
        self._scoring = ScoringStage(
            [OutcomeSource(scorer, concurrency=plan.capacity), *asked],
            meter=meter,
            record=self._record,
            warn=self._warn_of,
        )
        self._runner = GroupRunner(
            plan,
            router=Router(cluster.engines),
            environment=environment,
            scoring=self._scoring,
            process=steps,
            record=self._record,
            on_returns=lambda *scored: self._branching.scored(*scored),
            on_ready=self._ready,
            on_dropped=self._dropped,
            on_fatal=self._supervisor.fail,
        )
        self._branching = self._make_branching()
        self._teachers = teachers
        engines = (reference, *(() if teachers is None else teachers.engines))
        self._report = Reporter(
            self.state,
            cluster,
            sink,
            own_status,
            only_scoring=[engine for engine in engines if engine is not None],
            scoring=self._scoring.status,
            process=process,
        )
        self._landings: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._faults = FirstFaults()
        self._drops = DropWatch(error_budget=plan.error_budget, groups_per_step=plan.groups_per_step)
        self._num_groups_before = self.state.next_group - len(self.state.groups)

    def request_stop(self) -> None:
        """Finish the step under way, save everything, return."""
        self._stop.set()

    async def run(self) -> RunState:
        """Train until the plan is fulfilled, ``request_stop``, or an error."""
        self._supervisor.spawn(self._watch_workers())
        try:
            await self._supervisor.guard(self._run())
        finally:
            # Admission ends first: a group it still starts would outlive the others.
            await self._supervisor.close()
            await self._runner.cancel()
            self._journal.close()
        return self.state

    async def _run(self) -> None:
        await self._restore()
        await self._land(await self._sync.publish(self.state.version))
        self._adopt()
        self._branching.begin()
        self._report.start()
        admission = self._supervisor.spawn(self._admit())
        while self.state.step < self._plan.steps:
            groups = await self._next_groups()
            if groups is None:
                break
            await self._train(groups)
        admission.cancel()
        await self._finish()

    async def _restore(self) -> None:
        """Start from the last checkpoint; train again what the journal says was trained since."""
        if self._recovery.checkpoint is None:
            await self._save()
            return
        self._sink.emit("phase", {"text": f"restoring {self._recovery.checkpoint.name}"})
        if self._journal.cut_off:
            self._sink.emit("warning", {"text": f"{self._journal.cut_off}, and what it told is done again"})
        version = await self._within("the trainer to load", self._trainer.load(self._recovery.checkpoint))
        if version != self.state.version:
            raise CheckpointError(
                f"{self._recovery.checkpoint} holds weights of version {version} but a controller state of "
                f"version {self.state.version}; remove that directory to resume from the one before"
            )
        for step, groups in self._recovery.batches:
            self._sink.emit("phase", {"text": f"training step {step} again from the journal"})
            result = await self._step([self._rebuild(group) for group in groups])
            if result.skipped:
                self._sink.emit("warning", {"text": f"step {step} was skipped: {result.skipped}"})

    def _adopt(self) -> None:
        """Take up the groups the journal holds: finished ones are not generated again."""
        for group, live in self.state.groups.items():
            if live.is_first_open:
                (self._branching.slots if live.is_branch else self._slots).charge(group)
            for part in live.parts:
                if live.scored_part(part) is not None:
                    self._buffer.put(self._rebuild(part))
            if live.unscored is not None:
                self._runner.start(live)

    async def _admit(self) -> None:
        while True:
            await self._slots.wait_free(self._more_wanted)
            group = self.state.next_group
            self._record(
                {
                    "kind": "admit",
                    "group": group,
                    "task": self._tasks.task(self.state.next_task),
                    "attempts": self._plan.group_size,
                    "version": self._sync.version,
                }
            )
            self._slots.charge(group)
            self._runner.start(self.state.live(group))

    def _more_wanted(self) -> bool:
        """No more groups than the remaining steps will train."""
        num_missing, live_groups = self._plan.total_groups - self.state.num_trained_groups, self.state.groups
        if len(live_groups) < num_missing:
            # However many of them count.
            return True
        return sum(not g.is_branch and g.is_first_open for g in live_groups.values()) < num_missing

    async def _next_groups(self) -> tuple[ReadyGroup, ...] | None:
        """The next batch's groups, or None when asked to stop."""
        if self._stop.is_set():
            return None
        take = asyncio.ensure_future(
            self._buffer.take(
                self.state.version,
                on_stale=lambda group: self._end(group, "stale"),
                progress=lambda: self.state.progress,
            )
        )
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({take, stop}, return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() else None
        finally:
            take.cancel()
            stop.cancel()

    async def _train(self, groups: Sequence[ReadyGroup]) -> None:
        means = {f"baseline_{agent}": mean for agent, mean in self.state.means.items()}
        version = self.state.version
        result = await self._step(groups)
        if self._plan.staleness == "drop":
            # Work that this step made too old is cancelled now, not when it finishes.
            for group in self._buffer.decide(self.state.version).drop:
                self._end(group, "stale")
        manifest = await self._sync.publish(result.version)

        def summary() -> dict[str, float]:
            return describe(groups, version, with_kl=self._plan.reward_kl > 0) | means

        landing = self._supervisor.spawn(self._land(manifest, groups, result, summary))
        self._landings.add(landing)
        landing.add_done_callback(self._landings.discard)
        every = self._plan.checkpoint_every
        if every and result.step % every == 0 and result.step < self._plan.steps:
            await self._save()

    async def _step(self, groups: Sequence[ReadyGroup]) -> StepResult:
        """One training step, journalled before and after."""
        step = self.state.step + 1
        names = sorted(group.group for group in groups)
        self._record({"kind": "take", "step": step, "groups": names})
        batch = make_batch(
            groups,
            step=step,
            version=self.state.version,
            advantage=self._plan.advantage,
            means=self.state.means,
            reward_kl=self._plan.reward_kl,
        )
        # Weights must never hold a batch that the journal does not.
        self._journal.flush()
        result = await self._within(f"training step {step}", self._trainer.step(batch))
        means = means_after(self.state.means, groups, decay=self._plan.rae_decay)
        kept = {"means": means} if means else {}
        self._record({"kind": "trained", "step": step, "version": result.version, "groups": names, **kept})
        return result

    async def _land(
        self,
        manifest: WeightManifest,
        groups: Sequence[ReadyGroup] = (),
        result: StepResult | None = None,
        summary: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Every engine gets the weights; only then are the slots of the step free again. ``summary`` tells what people
        want to know of the batch."""
        await self._sync.land(manifest)
        for group in groups:
            self._release(group.group)
        if groups:
            self._branching.begin()
        if result is not None:
            await self._report.step(result, summary)
        unneeded = [manifest.version] if self._teachers is None else await self._teachers.landed(manifest)
        for version in unneeded:
            await self._sync.retire(version)
        if self._teachers is not None:
            # No part of the landing, which the end of the run waits for: it takes as long as a model is read.
            self._supervisor.spawn(self._teachers.look(manifest.version))

    async def _save(self) -> None:
        self._sink.emit("phase", {"text": f"saving the checkpoint of step {self.state.step}"})
        await self._store.save(self.state, self._trainer, self._journal)

    def books(self) -> dict[str, Any]:
        """The step, and attempts and tokens by state, as they stand."""
        return {"step": self.state.step, **self._report.ledger()}

    async def closing(self) -> dict[str, Any]:
        """Both ledgers as they stand, for the closing summary."""
        return {"roles": [asdict(role) for role in await self._report.statuses()], **self.books()}

    async def _finish(self) -> None:
        """Let landings end, settle what is unfinished, save."""
        if self._stop.is_set():
            await self._runner.pause()
        else:
            for part in [part for live in self.state.groups.values() for part in live.parts]:
                self._end(part, "cancelled")
            await self._runner.idle()
        if self._landings:
            await asyncio.wait(set(self._landings), timeout=self._plan.sync_s)
        await self._save()

    def _end(self, part: int, reason: DropReason) -> None:
        if part in self._buffer:
            self._buffer.remove(part)
            self._runner.drop(part, reason)
        else:
            self._runner.end(part, reason)

    def _ready(self, group: ReadyGroup) -> None:
        self._drops.scored()
        self._buffer.put(group)

    def _dropped(self, part: int, reason: DropReason, detail: str, fault: BaseException | None) -> None:
        fields = {"group": group_of(part), "reason": reason, "detail": detail}
        self._sink.emit("drop", fields | self._traceback(fault))
        is_branch = self._release(part)
        self._buffer.notify()
        self._branching.begin()
        if is_branch and reason != "failed":
            return
        num_groups = self.state.next_group - self._num_groups_before
        error = self._drops.dropped(reason, detail, num_groups=num_groups, fault=fault)
        if error is not None:
            self._supervisor.fail(error)

    def _warn_of(self, text: str, fault: BaseException) -> None:
        self._sink.emit("warning", {"text": text} | self._traceback(fault))

    def _traceback(self, fault: BaseException | None) -> dict[str, str]:
        """As a field of the event that tells of the fault; empty where one like it was told."""
        text = "" if fault is None else self._faults.traceback(fault)
        return {"traceback": text} if text else {}

    def _release(self, group: int) -> bool:
        """Give back a group's slot (late parts have none); returns whether it was a branch group's."""
        if is_late(group):
            return False
        is_branch = group in self._branching.slots
        (self._branching.slots if is_branch else self._slots).release((group,))
        self._branching.ended(group)
        return is_branch

    def _make_branching(self) -> Branching:
        return Branching(
            self._plan,
            self.state,
            record=self._record,
            start=self._runner.start,
            release=self._runner.release,
            engines_version=lambda: self._sync.version,
            next_version=lambda: self._buffer.next_version,
            wanted=lambda: not self._stop.is_set() and self._more_wanted(),
        )

    def _process_rewards(self, scorer: StepScorer | None, meter: ScoringMeter) -> ProcessRewards | None:
        if scorer is None or self._plan.process is None:
            return None
        return ProcessRewards(
            scorer, self._plan.process, live=self.state.live, meter=meter, record=self._record
        )

    def _unfinished(self) -> dict[int, int]:
        groups = self.state.groups.values()
        return {part: live.version for live in groups if (part := live.unscored) is not None}

    def _rides(self, part: int) -> bool:
        return is_late(part) or self.state.live(part).is_branch

    def _rebuild(self, part: int) -> ReadyGroup:
        return ready_part(self._plan, self.state.live_part(part), part)

    def _record(self, record: Record) -> None:
        """Journal, then memory. What one turn of the event loop records is written at its end, together; a
        kill before that is a kill a moment earlier, since nothing that cannot be done again happened since."""
        if self._journal.write(record):
            asyncio.get_running_loop().call_soon(self._flush)
        self.state.apply(record)

    def _flush(self) -> None:
        try:
            self._journal.flush()
        except CheckpointError as error:
            self._supervisor.fail(error)

    async def _watch_workers(self) -> None:
        raise await self._cluster.wait_failure()

    async def _within(self, what: str, wait: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._plan.stall_s):
                return await wait
        except TimeoutError:
            raise DeadlineError(
                f"waited {self._plan.stall_s:g} s for {what}; look at the role's log, or raise run.stall_s"
            ) from None
