"""Several rewards, one of them slow: none of them ever stalls generation.

    python examples/custom_reward.py

Reward functions have TRL's signature: lists in, one number (or None, not applicable) per completion
out. Plain functions run on worker threads of the controller, ``async`` ones on its event loop, and those
given as ``module:function`` in a process of their own. One that raises, overruns its deadline or returns
nonsense is tried again, then its group is dropped and counted; the run stops only when
``reward.error_budget`` is used up.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import headrace
from headrace import demo


def exact(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


async def judge(completions: list[str]) -> list[float | None]:
    """Stands for a call to a judge on another machine; it has no opinion on empty answers."""
    await asyncio.sleep(0.2)
    return [None if not text else float(len(set(text)) > 1) for text in completions]


with tempfile.TemporaryDirectory() as made:
    settings = {**demo.prepare(Path(made)), "run.steps": 60, "reward.weights": [1.0, 0.1]}
    result = headrace.train(tasks=demo.tasks(), reward=[exact, judge], settings=settings)
print(result.summary.verdict.text)
