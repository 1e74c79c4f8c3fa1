"""Process rewards while attempts are still sampled: a tiny model learns to count on, a tiny judge reads along.

    python examples/process_rewards.py

The task is to go on through the letters, round and round (``c>`` asks for ``defghabc...``). The judge is a token
classifier over the same characters, trained here on right and wrong answers: every six letters it says how likely it
is that all of them are right so far. It runs in a process of its own, keeps its keys and values by attempt, and its
scores shape the advantages of single tokens. At the end the journal is read again: every score that was given on the
way is compared with that of a judge that sees the whole text at once.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForTokenClassification

import headrace
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.data.rendering import Renderer
from headrace.data.steps import step_borders
from headrace.models.loading import make_tiny_model
from headrace.runtime.journal import read
from headrace.runtime.state import RunState
from headrace.scoring.process_model import ProcessModel, load_process_model
from headrace.types import StepQuestion

LETTERS, LENGTH = "abcdefgh", 24
POLICY, STARTED, JUDGE = (Path("runs") / f"process-{name}" for name in ("model", "started", "judge"))
draw = random.Random(0)


def row() -> dict[str, str]:
    start = draw.randrange(len(LETTERS))
    answer = [LETTERS[(start + i) % len(LETTERS)] for i in range(1, LENGTH + 1)]
    return {"prompt": f"{LETTERS[start]}>", "answer": "".join(answer)}


def letters_right(completions: list[str], answer: list[str]) -> list[float]:
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(completions, answer, strict=True)
    ]


def make_judge(vocab_size: int, *, steps: int = 150) -> None:
    """Learns to tell, at every letter of an answer, whether all letters so far are right."""
    renderer = Renderer.from_directory(JUDGE)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=2, classifier_dropout=0.0, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    judge = LlamaForTokenClassification(config)
    optimizer = torch.optim.AdamW(judge.parameters(), lr=3e-3)
    for _ in range(steps):
        texts, labels = [], []
        for task in (row() for _ in range(32)):
            right = task["answer"]
            said = "".join(c if draw.random() < 0.95 else draw.choice(LETTERS) for c in right)
            texts.append(renderer.encode(task["prompt"] + said))
            so_far = [int(said[: i + 1] == right[: i + 1]) for i in range(LENGTH)]
            labels.append([-100] * len(task["prompt"]) + so_far)
        loss = judge(torch.tensor(np.array(texts, np.int64)), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    judge.save_pretrained(JUDGE)
    print(f"the judge is trained, loss {loss.item():.3f}")


def largest_difference(run_dir: Path) -> tuple[int, float]:
    """Of all scores in the journal, how many there are and how far the farthest is from reading the whole at once."""
    judge = ProcessModel(load_process_model(str(JUDGE), dtype="float32", device="cpu"), kv_tokens=1000)
    state, count, largest = RunState(), 0, 0.0
    for record in read(run_dir / "journal", 0):
        state.apply(record)
        if record["kind"] == "scored":
            group = state.live(record["group"]).scored
            for episode in group.episodes:
                ends, scores = step_borders(group, episode.attempt)
                turn = episode.trajectories[0].turns[0]
                whole = np.concatenate([turn.prompt_ids, turn.completion.token_ids])
                question = StepQuestion(
                    attempt="whole", task=episode.task, token_ids=whole, num_prompt=len(turn.prompt_ids),
                    ends=len(turn.prompt_ids) + ends, num_known=0, last=True,
                )  # fmt: skip
                (again,) = judge.score([question])
                count += len(ends)
                largest = max(largest, float(np.abs(again.scores[: len(scores)] - scores).max(initial=0.0)))
    return count, largest


if __name__ == "__main__":
    vocab_size = make_char_tokenizer(POLICY, LETTERS + ">")
    make_char_tokenizer(JUDGE, LETTERS + ">")
    make_tiny_model(POLICY, vocab_size=vocab_size, context_tokens=64)
    make_judge(vocab_size)
    examples = [row() for _ in range(200)]
    headrace.warm_start(
        model=POLICY, examples=examples, output=STARTED, steps=30, batch_size=32, learning_rate=3e-3
    )
    result = headrace.train(
        model=STARTED,
        tasks=[row() for _ in range(2000)],
        reward=letters_right,
        settings={
            "run.steps": 40,
            "run.checkpoint_every": 0,
            "rollout.group_size": 8,
            "rollout.groups_per_step": 8,
            "rollout.max_tokens": LENGTH,
            "rollout.max_lag": 2,
            "engine.max_running": 192,
            "trainer.learning_rate": 1e-3,
            "trainer.betas": [0.9, 0.95],
            "scoring.process": str(JUDGE),
            "scoring.steps": "tokens:6",
            "algo.options": {"process.form": "potential", "process.weight": 0.5},
            "reward.timeout_s": 5.0,
        },
    )
    count, largest = largest_difference(result.run_dir)
    hidden = result.summary.seconds["scoring"]
    share = hidden["scoring-hidden"] / (hidden["scoring-hidden"] + hidden["scoring-exposed"])
    print(f"reward {np.mean(result.rewards[:5]):.2f} -> {np.mean(result.rewards[-5:]):.2f}")
    print(f"scoring hidden behind generation: {share:.1%}")
    print(f"{count} step scores; the farthest from reading the whole text at once: {largest:.1e}")
