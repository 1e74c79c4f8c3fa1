"""One attempt: an environment talks to the policy, and every token is journalled on the way.

``RolloutClient`` is what the environment sees as the policy. Behind ``sample`` it picks an engine,
resumes from what the journal already holds, and goes on when an engine hands back a partial
completion because weights arrived. An attempt replayed after a crash gets its finished turns back
from the journal in order, so an environment only has to be deterministic given its turns. A turn that an environment
gives up on and asks for again goes on where it was.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from headrace.data import completions
from headrace.data.faults import in_words
from headrace.data.routing import RouterShape, check_routing
from headrace.errors import HeadraceError, RecordError, RolloutError
from headrace.protocols import Environment, PolicyClient
from headrace.runtime.cancellation import no_stray_cancellation
from headrace.runtime.journal import Record
from headrace.runtime.pivots import request_id
from headrace.runtime.process_rewards import StepWatch
from headrace.runtime.router import Router
from headrace.runtime.state import LiveGroup
from headrace.types import Completion, ForkPoint, Request, Routing, Sampling, Task, Trajectory, Turn


class Interrupted(Exception):
    """The attempt was stopped on purpose; what it sampled is in the journal."""


class RolloutClient:
    """The policy as one attempt sees it (``protocols.PolicyClient``)."""

    def __init__(
        self,
        live: LiveGroup,
        attempt: int,
        *,
        router: Router,
        record: Callable[[Record], None],
        seed: int,
        stopping: Callable[[], bool],
        watch: StepWatch | None = None,
        routers: RouterShape | None = None,
        hold_s: float = 0.0,
    ) -> None:
        """``stopping`` turns true when the group is to end without finishing. ``watch`` is shown every token and may
        end the attempt early; None: nobody looks before the end. ``routers``: of the model that samples; None: not
        known. What it computes is held for ``hold_s`` afterwards, for others to branch off."""
        self._live = live
        self.attempt = attempt
        self._router = router
        self._record = record
        self._seed = seed
        self._stopping = stopping
        self._watch = watch
        self._routers = routers
        self._hold_s = hold_s
        self._next_turn = 0
        self._asked: np.ndarray | None = None
        """The prompt of the turn that is under way, or was given up on."""
        self.is_sampling = False
        """Whether the environment waits for a turn, and not for something of its own."""
        self.was_interrupted = False
        """Whether the environment was told so, whatever it makes of it."""

    @cached_property
    def seed(self) -> int:
        return turn_seed(self._seed, self._live.group, self.attempt, -1)

    async def sample(self, prompt_ids: np.ndarray | Sequence[int], sampling: Sampling) -> Turn:
        prompt_ids = prompt_array(prompt_ids)
        self._check_turn(prompt_ids)
        self.is_sampling = True
        try:
            number = self._next_turn
            if number == len(self._finished):
                await self._sample(number, prompt_ids, sampling)
        finally:
            self.is_sampling = False
        self._next_turn, self._asked = number + 1, None
        return self._finished[number]

    def _check_turn(self, prompt_ids: np.ndarray) -> None:
        task = self._live.task.id
        if self.is_sampling:
            raise RolloutError(
                f"environment: it asked for two turns of task {task} at once; await policy.sample before the next, or "
                "make them attempts of a group"
            )
        begun = None if self._unfinished is None else self._asked
        if begun is not None and not np.array_equal(begun, prompt_ids):
            raise RolloutError(
                f"environment: it gave up on a turn of task {task} that had begun, and asked for one with another "
                "prompt; ask for the same again, or end the attempt"
            )
        # A copy: an environment may write its next prompt into the same array.
        self._asked = np.array(prompt_ids)

    async def _sample(self, number: int, prompt_ids: np.ndarray, sampling: Sampling) -> None:
        request = Request(
            id=request_id(self._live.group, self.attempt, number),
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=turn_seed(self._seed, self._live.group, self.attempt, number),
            prefix=self._unfinished,
            hold_s=self._hold_s,
            fork=self._fork(number, prompt_ids),
        )
        completion, engine = await self._generate(request, number)
        if completion.routing is not None:
            fault = self._routing_fault(completion.routing, len(prompt_ids) + completion.num_tokens)
            if fault:
                # The tokens were sampled and count, and the fault ends this group alone.
                self._journal(number, replace(completion, routing=None))
                raise RecordError(f"request {request.id} on {engine}: {fault}")
        turn = Turn(
            prompt_ids=prompt_ids,
            completion=self._news(completion),
            sampling=sampling,
            seed=request.seed,
            engine=engine,
        )
        self._record({**self._where(number), "kind": "turn", "value": turn})

    def _routing_fault(self, routing: Routing, num_tokens: int) -> str:
        """What is wrong with routes of so many tokens; empty: nothing."""
        known = {} if self._routers is None else self._routers._asdict()
        try:
            check_routing(routing, num_tokens=num_tokens, **known)
        except RecordError as error:
            return str(error)
        return ""

    def _fork(self, number: int, prompt_ids: np.ndarray) -> ForkPoint | None:
        """Where a branch leaves the earlier attempt; its later turns leave nothing."""
        pivot = self._live.task.pivot
        if pivot is None or number > 0:
            return None
        if not np.array_equal(prompt_ids, pivot.token_ids):
            raise RolloutError(
                f"task {self._live.task.id} begins at a pivot, but the environment showed the policy something else: "
                "let it sample from the pivot's tokens, or set pivots.branches = 0"
            )
        return pivot.fork

    async def _generate(self, request: Request, number: int) -> tuple[Completion, str]:
        """Until the completion is finished, whatever interrupts it, or is given up; with the last engine's name."""
        name, prompt_ids = "", request.prompt_ids
        while not self._stopping():
            if self._watch is not None and self._watch.gave_up:
                return self._unfinished or completions.EMPTY, name
            engine = self._router.lease(self._live.group, request.id)
            name = engine.name
            if self._watch is not None:
                self._watch.abort = functools.partial(engine.abort, (request.id,))
            try:
                completion = await engine.generate(request, lambda c: self._grew(number, prompt_ids, c))
            except asyncio.CancelledError:
                await engine.abort((request.id,))
                raise
            finally:
                self._router.release(self._live.group, request.id)
            if completion.finish_reason != "abort":
                return completion, name
            self._journal(number, completion)
            request = replace(request, prefix=self._unfinished)
        self.was_interrupted = True
        raise Interrupted

    def _grew(self, number: int, prompt_ids: np.ndarray, so_far: Completion) -> None:
        self._journal(number, so_far)
        if self._watch is not None:
            self._watch.grew(prompt_ids, so_far)

    def _journal(self, number: int, so_far: Completion) -> None:
        news = self._news(so_far)
        routing = news.routing
        # A snapshot on the way has some of the routes only.
        if routing is not None and self._routing_fault(routing, len(routing.recorded)):
            news = replace(news, routing=None)
        if news.num_tokens:
            self._record({**self._where(number), "kind": "tokens", "more": news})

    def _news(self, completion: Completion) -> Completion:
        """What the journal does not hold yet."""
        known = self._unfinished
        return completion if known is None else completions.tail(completion, known.num_tokens)

    def _where(self, number: int) -> dict[str, int]:
        return {"group": self._live.group, "attempt": self.attempt, "turn": number}

    @property
    def _finished(self) -> list[Turn]:
        return self._live.turns.get(self.attempt, [])

    @property
    def _unfinished(self) -> Completion | None:
        """What the journal holds of the running turn; None: nothing."""
        return self._live.unfinished.get(self.attempt)


def prompt_array(prompt_ids: Any) -> np.ndarray:
    """The prompt that an environment gives, as an array; RolloutError where it is not token ids."""
    try:
        array = np.asarray(prompt_ids)
    except (TypeError, ValueError):
        # Rows of different lengths, or a tensor on a device.
        array = np.zeros(())
    if array.ndim == 1 and array.dtype.kind in "iu":
        return array if array is prompt_ids else array.astype(np.int32)
    raise RolloutError(
        f"environment: it gave policy.sample the prompt {prompt_ids!r:.60}; give token ids, an array or list of ints, "
        "such as renderer.prompt_ids(task) or renderer.encode(text)"
    )


async def played(environment: Environment, task: Task, policy: PolicyClient) -> Any:
    """What an environment returns; what it raises is a RolloutError with its place in the environment's file."""
    try:
        running = environment.run(task, policy)
        if not inspect.isawaitable(running):
            raise RolloutError(
                f"environment: {type(environment).__name__}.run returned a {type(running).__name__} that cannot be "
                "awaited; write it as async def run(self, task, policy)"
            )
        return await running
    except HeadraceError:
        raise
    except Exception as error:
        raise RolloutError(f"environment: {in_words(error)}") from error


async def run_attempt(environment: Environment, live: LiveGroup, client: RolloutClient) -> Record:
    """Run the environment; returns the ``episode`` record. Raises Interrupted where the client was, whatever the
    environment made of it."""
    with no_stray_cancellation("environment"):
        try:
            trajectories = await played(environment, live.task, client)
        except Exception as error:
            if client.was_interrupted:
                raise Interrupted from error
            raise
    if client.was_interrupted:
        raise Interrupted
    turns = live.turns.get(client.attempt, [])
    fault = _fault(trajectories, turns)
    if fault:
        raise RolloutError(f"environment: what it returned for task {live.task.id} {fault}")
    return {
        "kind": "episode",
        "group": live.group,
        "attempt": client.attempt,
        "trajectories": [_by_number(trajectory, turns) for trajectory in trajectories],
    }


def _fault(returned: Any, turns: list[Turn]) -> str:
    """What is wrong with the trajectories of an environment that sampled these turns; empty: nothing."""
    if not isinstance(returned, tuple | list) or not all(isinstance(t, Trajectory) for t in returned):
        return f"is a {type(returned).__name__}; return a tuple of Trajectory"
    if not returned or not all(trajectory.turns for trajectory in returned):
        return "holds no turn; return at least one Trajectory, and none without turns"
    named = [id(turn) for trajectory in returned for turn in trajectory.turns]
    if not set(named) <= set(map(id, turns)):
        return "has a turn that policy.sample did not return; put those it returned into trajectories as they are"
    if len(set(named)) < len(named):
        return "has one turn twice, which would be trained on twice; put every turn into one Trajectory"
    for trajectory in returned:
        own, peers = trajectory.own_reward, trajectory.peers
        # Asking for the exact type first: an abstract class takes its time to answer.
        if not (type(own) is float or isinstance(own, Real)) or not math.isfinite(own):
            return f"has own_reward = {own!r}; give a finite number"
        if not isinstance(peers, str):
            return f"has peers = {peers!r}; give a text"
    return ""


def _by_number(trajectory: Trajectory, turns: list[Turn]) -> list[object]:
    numbers = {id(turn): i for i, turn in enumerate(turns)}
    own = [float(trajectory.own_reward), trajectory.peers]
    return [
        [numbers[id(turn)] for turn in trajectory.turns],
        trajectory.text,
        trajectory.policy,
        trajectory.trainable,
        *(own if any(own) else ()),
    ]


def turn_seed(seed: int, group: int, attempt: int, turn: int) -> int:
    """The noise stream of one turn: the same in every run with the same seed."""
    digest = hashlib.blake2b(f"{seed}/{group}/{attempt}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
