"""How good a model is at a task source: one engine, no training.

In: settings, tasks, rewards. Out: an ``Evaluation`` with the mean of each reward and a few completions to
look at. Tasks are taken in the source's own order, and the noise depends only on ``run.seed``, so
two evaluations of the same weights agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace import build, roles
from headrace.config import Settings
from headrace.data.returns import weighted_return
from headrace.protocols import Engine, Environment, Scorer
from headrace.runtime.rollout import played, prompt_array, turn_seed
from headrace.types import Episode, Request, Sampling, Task, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    num_tasks: int
    num_samples: int
    """Attempts at each task."""
    mean_return: float
    rewards: Mapping[str, float]
    """Mean of each reward over the attempts it applies to."""
    mean_tokens: float
    share_cut: float
    """Share of completions that hit ``rollout.max_tokens``."""
    examples: tuple[tuple[str, str, float], ...]
    """(prompt, completion, return) of the first few attempts."""


class _EngineClient:
    """The policy as one evaluated attempt sees it."""

    def __init__(self, engine: Engine, task: int, attempt: int, seed: int) -> None:
        self._engine, self._task, self._attempt, self._seed = engine, task, attempt, seed
        self._turn = 0
        self.seed = turn_seed(seed, task, attempt, -1)

    async def sample(self, prompt_ids: np.ndarray | Sequence[int], sampling: Sampling) -> Turn:
        prompt_ids = prompt_array(prompt_ids)
        turn, self._turn = self._turn, self._turn + 1
        seed = turn_seed(self._seed, self._task, self._attempt, turn)
        name = f"eval-{self._task}/{self._attempt}/{turn}"
        request = Request(id=name, prompt_ids=prompt_ids, sampling=sampling, seed=seed)
        completion = await self._engine.generate(request)
        return Turn(
            prompt_ids=prompt_ids,
            completion=completion,
            sampling=sampling,
            seed=seed,
            engine=self._engine.name,
        )


async def evaluate(
    *,
    engine: Engine,
    environment: Environment,
    scorer: Scorer,
    tasks: Sequence[Task],
    weights: Sequence[float] | None,
    num_samples: int,
    seed: int,
    on_task: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Attempt every task ``num_samples`` times and score the attempts."""
    done = 0

    async def one(index: int, task: Task) -> tuple[list[Episode], list[Mapping[str, float | None]]]:
        nonlocal done
        clients = [_EngineClient(engine, index, attempt, seed) for attempt in range(num_samples)]
        runs = await asyncio.gather(*(played(environment, task, client) for client in clients))
        episodes = [
            Episode(group=index, attempt=attempt, task=task, trajectories=run)
            for attempt, run in enumerate(runs)
        ]
        rewards = await scorer.score(task, episodes)
        done += 1
        on_task(done)
        return episodes, rewards

    answers = await asyncio.gather(*(one(i, task) for i, task in enumerate(tasks)))
    episodes = [episode for group, _ in answers for episode in group]
    rewards = [reward for _, group in answers for reward in group]
    return _evaluation(episodes, rewards, weights, num_samples)


def _evaluation(
    episodes: Sequence[Episode],
    rewards: Sequence[Mapping[str, float | None]],
    weights: Sequence[float] | None,
    num_samples: int,
) -> Evaluation:
    returns = [weighted_return(r, weights) for r in rewards]
    by_name: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.items():
            by_name.setdefault(name, [])
            if value is not None:
                by_name[name].append(value)
    ends = [e.trajectories[0].turns[-1].completion.finish_reason for e in episodes]
    return Evaluation(
        num_tasks=len(episodes) // num_samples,
        num_samples=num_samples,
        mean_return=float(np.mean(returns)),
        rewards={
            name: float(np.mean(values)) if values else float("nan") for name, values in by_name.items()
        },
        mean_tokens=float(np.mean([e.num_tokens for e in episodes])),
        share_cut=sum(end == "length" for end in ends) / len(ends),
        examples=tuple(
            (str(e.task.prompt), e.trajectories[0].text, r)
            for e, r in list(zip(episodes, returns, strict=True))[:5]
        ),
    )


async def run(
    settings: Settings,
    tasks: Any,
    rewards: Sequence[build.Reward],
    *,
    num_tasks: int,
    num_samples: int,
    make: Callable[[build.Renderer, Sampling], Environment] = build.SingleTurn,
    on_task: Callable[[int], None] = lambda done: None,
) -> Evaluation:
    """Evaluate ``model.path`` on the first ``num_tasks`` tasks, in this process; ``make`` makes the environment."""
    directory = build.model_directory(settings)
    renderer = build.policy_renderer(settings)
    source = build.task_source(settings, tasks)
    engine = roles.engine_role(
        {
            "settings": settings.model_dump(mode="json", exclude_none=True),
            "model": str(directory),
            "version": 0,
        }
    )
    scoring = build.scorer_settings(settings, rewards)
    scorer = build.scorer(settings, rewards, [build.build_scorer(scoring)] if scoring else [])
    try:
        return await evaluate(
            engine=engine,
            environment=build.environment(settings, renderer, make),
            scorer=scorer,
            tasks=[source.task(i) for i in range(min(num_tasks, len(source)))],
            weights=settings.reward.weights,
            num_samples=num_samples,
            seed=settings.run.seed,
            on_task=on_task,
        )
    finally:
        await engine.close()
        await scorer.close()
