"""The simplest environment: show the task, sample one completion, hand it to scoring.

In: a task and a policy. Out: one trajectory of one turn. Invariant: the token ids that reach training are
those the policy sampled; the text is decoded from them for rewards and people and goes no further. A branch is
shown what an earlier attempt had sampled up to its pivot, and judged by that and its own tokens together.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from headrace.data.rendering import Renderer
from headrace.errors import PromptTooLongError
from headrace.protocols import PolicyClient
from headrace.types import Sampling, Task, Trajectory


class SingleTurn:
    """Runs one attempt as one model call."""

    def __init__(self, renderer: Renderer, sampling: Sampling, max_context: int | None = None) -> None:
        self._renderer = renderer
        self._sampling = sampling
        self._max_context = renderer.max_context if max_context is None else max_context
        self._last: tuple[Task, np.ndarray, Sampling] | None = None

    async def run(self, task: Task, policy: PolicyClient) -> tuple[Trajectory, ...]:
        turn = await policy.sample(*self._question(task))
        answer_ids = turn.completion.token_ids
        if task.pivot is not None:
            answer_ids = np.concatenate([task.pivot.prefix_ids, answer_ids])
        text = self._renderer.decode(answer_ids)
        return (Trajectory(turns=(turn,), text=text),)

    def _question(self, task: Task) -> tuple[np.ndarray, Sampling]:
        """Prompt and sampling settings. A group's attempts begin one after the other, so the last are kept."""
        if self._last is None or self._last[0] is not task:
            self._last = (task, *self._shown(task))
        return self._last[1:]

    def _shown(self, task: Task) -> tuple[np.ndarray, Sampling]:
        if task.pivot is None:
            prompt_ids = self._renderer.prompt_ids(task)
            return prompt_ids, self._fitting(task, len(prompt_ids))
        whole, num_prefix = self._fitting(task, len(task.pivot.prompt_ids)), len(task.pivot.prefix_ids)
        return task.pivot.token_ids, replace(whole, max_tokens=whole.max_tokens - num_prefix)

    def _fitting(self, task: Task, num_prompt_tokens: int) -> Sampling:
        """The sampling settings, with ``max_tokens`` cut to what the context leaves."""
        if self._max_context is None:
            return self._sampling
        room = self._max_context - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"task {task.id} has a prompt of {num_prompt_tokens} tokens, which leaves no room in a "
                f"context of {self._max_context}: shorten or remove the task, or use a model made for more"
            )
        if room >= self._sampling.max_tokens:
            return self._sampling
        return replace(self._sampling, max_tokens=room)
