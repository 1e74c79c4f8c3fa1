"""One group: its attempts run side by side, are scored by the scoring stage and become samples, or the group
ends with a named reason.

In: admitted groups. Out: ``ReadyGroup`` for the buffer through ``on_ready``, or a ``drop`` record and
``on_dropped``. A group that is told to end (too old, run over, a sibling failed) first gets back
from the engines what it had sampled, so that no token goes uncounted. The attempts of a branch group must have begun
under one version, since they are compared with each other alone; where an update came between, the group is stale.

With a quorum (``plan.quorum``) a group becomes ready when so many of its attempts have ended and can be told apart; the
others go on and become ready as a part of their own, held against the returns of the quorum, which never change again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from headrace.algos.advantages import (
    ADVANTAGES,
    BY_THE_TRAINER,
    RUNNING,
    against_frozen,
    is_zero_variance,
    overlong_penalty,
)
from headrace.algos.process import trajectory_advantages
from headrace.data.faults import in_words
from headrace.data.kept_limits import record_fault
from headrace.data.returns import weighted_return
from headrace.data.samples import agent_of, agents, build_samples
from headrace.data.steps import trajectory_steps
from headrace.errors import (
    CheckpointError,
    InvariantError,
    PromptTooLongError,
    RoleError,
    RolloutError,
    WeightSyncError,
)
from headrace.protocols import Environment
from headrace.runtime import peers
from headrace.runtime.buffer import ReadyGroup
from headrace.runtime.journal import Record
from headrace.runtime.parts import group_of, is_late
from headrace.runtime.pivots import start_versions
from headrace.runtime.plan import RunPlan
from headrace.runtime.process_rewards import ProcessRewards
from headrace.runtime.rollout import Interrupted, RolloutClient, run_attempt
from headrace.runtime.router import Router
from headrace.runtime.scoring_stage import Missing, ScoringStage
from headrace.runtime.state import TEACHER, LiveGroup
from headrace.types import DropReason, Episode, EpisodeGroup

FATAL = (InvariantError, RoleError, CheckpointError, WeightSyncError)
"""Faults of the run itself; anything else is the group's own and ends only the group."""
_Attempts = dict[asyncio.Task[None], RolloutClient]
"""Attempts under way, and how each talks to the policy, by their tasks."""


class _Unusable(Exception):
    """Attempts ended, and cannot be trained."""

    def __init__(self, reason: DropReason, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


class GroupRunner:
    def __init__(
        self,
        plan: RunPlan,
        *,
        router: Router,
        environment: Environment,
        scoring: ScoringStage,
        process: ProcessRewards | None = None,
        record: Callable[[Record], None],
        on_returns: Callable[[LiveGroup, Sequence[Episode], Sequence[float]], None] = lambda *_: None,
        on_ready: Callable[[ReadyGroup], None],
        on_dropped: Callable[[int, DropReason, str, BaseException | None], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """``process`` None: attempts are judged when they have ended. ``on_returns`` hears what a group's attempts are
        worth just before its fate is recorded, ``on_dropped`` also of what a group failed."""
        self._plan = plan
        self._router = router
        self._environment = environment
        self._scoring = scoring
        self._process = process
        self._record = record
        self._on_returns = on_returns
        self._on_ready = on_ready
        self._on_dropped = on_dropped
        self._on_fatal = on_fatal
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._notices: set[asyncio.Task[None]] = set()
        """To engines; nobody waits for an answer."""
        self._settling: dict[int, asyncio.Timeout] = {}
        """How long groups wait for scores: until they are told to end."""
        self._stops: dict[int, asyncio.Future[None]] = {}
        """Done when a running group is to stop, whatever its attempts are busy with."""
        self._ending: dict[int, DropReason] = {}
        self._released: set[int] = set()
        """Parts of running groups that the buffer has got."""
        self._paused = False

    def start(self, live: LiveGroup) -> None:
        if live.task.pivot is not None:
            self._router.bind(live.group, live.task.pivot.engine)
        if live.quorum:
            self._released.add(live.group)
        self._stops[live.group] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(live), name=f"group {live.group}")
        self._tasks[live.group] = task
        task.add_done_callback(lambda t: self._finished(live.group, t))

    def end(self, part: int, reason: DropReason) -> None:
        """Drop a part that attempts run for as soon as its engines have handed back its tokens."""
        group = group_of(part)
        if group not in self._ending:
            self._ending[group] = reason
            self._abort(group)

    async def pause(self) -> None:
        """Stop every group where it stands, for a later resume; nothing is dropped."""
        self._paused = True
        for group in list(self._tasks):
            self._abort(group)
        await self.idle()
        await self.cancel()

    async def idle(self) -> None:
        """Until the groups that were told to end have ended."""
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=self._plan.sync_s)

    async def cancel(self) -> None:
        """Leave nothing running in this process."""
        tasks = [*self._tasks.values(), *self._notices]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def release(self, engine: str, request_ids: Sequence[str]) -> None:
        """Tell an engine that nobody will branch off these requests."""
        self._notify(self._router.release_holds(engine, request_ids))

    def _abort(self, group: int) -> None:
        """Engines hand back what they have; scores, and environments that are busy, are not waited for any longer."""
        stop = self._stops.get(group)
        if stop is not None and not stop.done():
            stop.set_result(None)
        patience = self._settling.pop(group, None)
        if patience is not None:
            patience.reschedule(asyncio.get_running_loop().time())
        self._notify(self._router.abort(group))

    def _notify(self, notice: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(notice)
        self._notices.add(task)
        task.add_done_callback(self._notices.discard)

    def _finished(self, group: int, task: asyncio.Task[None]) -> None:
        del self._tasks[group], self._stops[group]
        self._released.discard(group)
        self._router.forget(group)
        self._forget_scores(group)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_fatal(error)

    async def _run(self, live: LiveGroup) -> None:
        tasks = self._begin(live)
        try:
            await self._parts(live, tasks)
        except Interrupted:
            await self._hand_back(live, tasks)
            if not self._paused:
                self._drop(live, self._ending.pop(live.group), "")
        except FATAL:
            raise
        except _Unusable as e:
            await self._hand_back(live, tasks)
            self._drop(live, e.reason, e.detail)
        except PromptTooLongError as e:
            await self._hand_back(live, tasks)
            self._drop(live, "over-length", str(e))
        except Exception as e:
            await self._hand_back(live, tasks)
            self._drop(live, "failed", in_words(e), e)
        finally:
            await _end_all(tasks)

    def _begin(self, live: LiveGroup) -> _Attempts:
        for attempt in live.episodes:
            self._scoring.attempt_ended(live, attempt)
        known = {*live.quorum, *live.episodes}
        missing = [a for a in range(live.num_attempts) if a not in known]
        clients = [self._client(live, attempt) for attempt in missing]
        return {asyncio.create_task(self._attempt(live, client)): client for client in clients}

    async def _parts(self, live: LiveGroup, tasks: _Attempts) -> None:
        """The quorum first, then those that were late; all at once where nobody is."""
        # The attempts began together, so one deadline is the deadline of each.
        deadline = asyncio.get_running_loop().time() + self._plan.attempt_s
        if not live.quorum:
            # Branches must have begun under one version, and are few.
            needed = live.num_attempts if live.is_branch else self._plan.quorum_size
            await self._until_ended(live, tasks, needed, deadline)
            if await self._release(live, sorted(live.episodes)) and live.unscored is None:
                return
        await self._until_ended(live, tasks, live.num_attempts - len(live.quorum), deadline)
        await self._release(live, sorted(live.episodes))

    async def _until_ended(self, live: LiveGroup, tasks: _Attempts, needed: int, deadline: float) -> None:
        """Until so many attempts that are not released have ended well."""
        clock, stop = asyncio.get_running_loop().time, self._stops[live.group]
        while True:
            errors = [e for task in tasks if task.done() and (e := task.exception()) is not None]
            if not errors and len(live.episodes) >= needed:
                return
            if errors or deadline <= clock():
                break
            if stop.done():
                raise Interrupted
            running = [task for task in tasks if not task.done()]
            await asyncio.wait(
                [*running, stop], timeout=deadline - clock(), return_when=asyncio.FIRST_COMPLETED
            )
        if not errors:
            late = min(client.attempt for task, client in tasks.items() if not task.done())
            text = (
                f"attempt {live.group}/{late} took longer than rollout.attempt_s = {self._plan.attempt_s:g} s"
            )
            errors = [RolloutError(text)]
        real = [error for error in errors if not isinstance(error, Interrupted)]
        fault = (real or errors)[0]
        if isinstance(fault, (*FATAL, Interrupted, PromptTooLongError, RolloutError)):
            raise fault
        # Whatever went wrong before there was anything to score is no fault of a reward.
        raise RolloutError(in_words(fault)) from fault

    async def _hand_back(self, live: LiveGroup, tasks: _Attempts) -> None:
        """Until the attempts that still sample, which stop too, have told what they sampled: parts are trained or
        dropped whole."""
        running = [task for task, client in tasks.items() if not task.done() and client.is_sampling]
        if running:
            self._ending.setdefault(live.group, "failed")
            await self._router.abort(live.group)
            await asyncio.wait(running, timeout=self._plan.sync_s)

    def _client(self, live: LiveGroup, attempt: int) -> RolloutClient:
        return RolloutClient(
            live,
            attempt,
            router=self._router,
            record=self._record,
            seed=self._plan.seed,
            routers=self._plan.routers,
            stopping=lambda: self._is_stopping(live.group),
            hold_s=self._plan.attempt_s if self._plan.pivots is not None and not live.is_branch else 0.0,
            watch=None if self._process is None else self._process.watch(live, attempt),
        )

    async def _attempt(self, live: LiveGroup, client: RolloutClient) -> None:
        meter = self._scoring.meter
        meter.attempt_began()
        try:
            episode = await run_attempt(self._environment, live, client)
        finally:
            meter.attempt_ended()
        self._record(episode)
        self._scoring.attempt_ended(live, client.attempt)

    async def _release(self, live: LiveGroup, attempts: list[int]) -> bool:
        """Score these attempts and put them into the buffer; false: they cannot be told apart, and the others may yet
        make a difference."""
        episodes = tuple([live.episodes[a] for a in attempts])
        fault = record_fault(episodes, vocab_size=self._plan.vocab_size)
        if fault is not None:
            raise _Unusable(*fault)
        if live.is_branch and len(versions := start_versions(episodes)) > 1:
            raise _Unusable("stale", f"its branches began under versions {versions}")
        if len(attempts) < live.num_attempts and not live.quorum and peers.names_any(episodes):
            # A peer that is still missing has no frozen return to be held against.
            return False
        missing = await self._settle(live, attempts)
        returns = self._returns(live, episodes)
        if not live.quorum and self._tells_nothing(live, episodes, returns):
            if len(attempts) < live.num_attempts:
                return False
            if self._plan.drop_zero_variance and not _is_taught(live):
                self._on_returns(live, episodes, returns)
                raise _Unusable("zero-variance", "")
        part = live.unscored
        assert part is not None
        self._on_returns(live, episodes, returns)
        some = {"attempts": attempts} if len(attempts) < live.num_attempts else {}
        self._record({"kind": "scored", "group": live.group, "returns": returns, "missing": missing, **some})
        ready = ready_part(self._plan, live, part)
        if live.unscored is not None:
            self._released.add(part)
        self._on_ready(ready)
        return True

    async def _settle(self, live: LiveGroup, attempts: Sequence[int]) -> list[Missing]:
        missing: list[Missing] = []
        try:
            # Its deadlines are the sources' own; this one is for ``_abort`` to set.
            async with asyncio.timeout(None) as patience:
                self._settling[live.group] = patience
                missing = await self._scoring.settle(live, attempts)
        except Exception:
            # A group that ends has no use for what its sources say, be it a fault.
            if not self._is_stopping(live.group):
                raise
        finally:
            self._settling.pop(live.group, None)
        if self._is_stopping(live.group):
            raise Interrupted
        return missing

    def _is_stopping(self, group: int) -> bool:
        return self._paused or group in self._ending

    def _returns(self, live: LiveGroup, episodes: Sequence[Episode]) -> list[float]:
        rewards = live.rewards([episode.attempt for episode in episodes])
        returns = [weighted_return(given, self._plan.reward_weights) for given in rewards]
        if self._plan.overlong_buffer_tokens:
            returns = [r + self._overlong(e) for r, e in zip(returns, episodes, strict=True)]
        if self._plan.truncated_penalty:
            returns = [r - self._truncated(e) for r, e in zip(returns, episodes, strict=True)]
        return returns

    def _tells_nothing(self, live: LiveGroup, episodes: Sequence[Episode], returns: Sequence[float]) -> bool:
        # Against earlier steps equal attempts are not equal to nothing.
        if self._plan.advantage in RUNNING:
            return False
        # Steps that were judged tell attempts apart which ended alike.
        unjudged = self._process is None or not live.columns.get(self._process.name)
        if peers.names_any(episodes):
            return peers.tell_nothing(episodes, returns)
        return unjudged and is_zero_variance(np.array(returns))

    def _overlong(self, episode: Episode) -> float:
        """For the longest of its completions: each has all of ``rollout.max_tokens``."""
        pivot, turns = episode.task.pivot, [u for t in episode.trajectories if t.trainable for u in t.turns]
        longest = max((turn.completion.num_tokens for turn in turns), default=0)
        return overlong_penalty(
            longest + (0 if pivot is None else len(pivot.prefix_ids)),
            max_tokens=self._plan.max_tokens,
            buffer_tokens=self._plan.overlong_buffer_tokens,
            factor=self._plan.overlong_factor,
        )

    def _truncated(self, episode: Episode) -> float:
        """What an episode loses if a trainable trajectory of it ended at the length limit."""
        last_turns = [t.turns[-1] for t in episode.trajectories if t.trainable and t.turns]
        is_cut = any(turn.completion.finish_reason == "length" for turn in last_turns)
        return self._plan.truncated_penalty if is_cut else 0.0

    def _forget_scores(self, group: int) -> None:
        """An answer that came after a group's end would have nobody to belong to."""
        self._scoring.forget(group)
        if self._process is not None:
            self._process.forget(group)

    def drop(
        self, part: int, reason: DropReason, detail: str = "", fault: BaseException | None = None
    ) -> None:
        """Of a part for which nothing runs any longer."""
        self._record({"kind": "drop", "group": part, "reason": reason, "detail": detail})
        self._on_dropped(part, reason, detail, fault)

    def _drop(
        self, live: LiveGroup, reason: DropReason, detail: str, fault: BaseException | None = None
    ) -> None:
        """All that is not released: also what was scored, and could then not be built."""
        self._ending.pop(live.group, None)
        self._forget_scores(live.group)
        for part in [part for part in live.parts if part not in self._released]:
            self.drop(part, reason, detail, fault)


def _is_taught(live: LiveGroup) -> bool:
    """What a teacher says of tokens is worth a step whatever their attempts earned."""
    return any(column.teacher is not None for column in live.columns.get(TEACHER, {}).values())


def ready_part(plan: RunPlan, live: LiveGroup, part: int) -> ReadyGroup:
    """A part of a group as it waits for its batch; late attempts are held against the frozen returns."""
    scored = live.scored_part(part)
    assert scored is not None
    if not is_late(part):
        return ready_group(plan, scored)
    if peers.names_any(scored.episodes):
        raise RolloutError(
            f"environment: late attempts of group {live.group} name peers, but those of its quorum did not: let it "
            "name them in every attempt or in none"
        )
    advantages = against_frozen(plan.advantage, scored.returns, live.frozen, group_size=live.num_attempts)
    return replace(ready_group(plan, scored, advantages), group=part)


def ready_group(plan: RunPlan, scored: EpisodeGroup, advantages: Any = None) -> ReadyGroup:
    """Advantages (None: those among its attempts) and samples of a scored group; pure, so recovery builds the same
    ones again."""
    if advantages is None:
        advantages = _outcome_advantages(plan, scored)
    if plan.process is not None:
        steps = [trajectory_steps(scored, e.attempt) for e in scored.episodes]
        advantages = trajectory_advantages(
            advantages, steps, form=plan.process.form, weight=plan.process.weight
        )
    samples, is_branch = build_samples(scored, advantages), scored.task.pivot is not None
    keeps_means, told_apart = plan.advantage in RUNNING, peers.names_any(scored.episodes)
    worth = peers.worth(scored.episodes, scored.returns) if keeps_means or told_apart else []
    earned = [value for _, value in worth if told_apart] or scored.returns
    return ReadyGroup(
        group=scored.group,
        samples=tuple([replace(s, component="pivot") for s in samples]) if is_branch else samples,
        agents=tuple(agents(scored.episodes)) if keeps_means else (),
        earned=tuple([(agent_of(scored.task, t), value) for t, value in worth]) if keeps_means else (),
        is_branch=is_branch,
        oldest_version=scored.oldest_version,
        mean_return=sum(earned) / len(earned),
        returns=scored.returns,
        worth=tuple(earned) if told_apart else (),
    )


def _outcome_advantages(plan: RunPlan, scored: EpisodeGroup) -> Any:
    """A number for each attempt, or one for each of its sampled tokens where its trajectories name their peers."""
    function = ADVANTAGES[plan.advantage]
    if not peers.names_any(scored.episodes):
        return function(np.array(scored.returns, dtype=np.float64))
    if plan.process is not None:
        raise RolloutError(
            f"environment: trajectories of group {scored.group} have rewards or peers of their own, but "
            "scoring.process adds to what whole attempts earned: leave scoring.process out, or let it name none"
        )
    if plan.advantage in BY_THE_TRAINER:
        raise RolloutError(
            f"environment: trajectories of group {scored.group} have rewards or peers of their own, but algo.advantage "
            f"= {plan.advantage} compares attempts: set another one, or let it name none"
        )
    return peers.advantages(function, scored.episodes, scored.returns)


async def _end_all(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Nothing of these is left running, and no fault of theirs is left unheard."""
    running = [task for task in tasks if not task.done() or (not task.cancelled() and task.exception())]
    for task in running:
        task.cancel()
    if running:
        await asyncio.gather(*running, return_exceptions=True)
