"""The demo: a tiny model learns to spell words backwards, on a laptop, in about a minute.

In: a run directory's settings. Out: a small random model, tasks and a reward, made on the spot. The
model is a two-layer Llama over single characters; a short supervised warm start teaches it the form of
an answer, and reinforcement on an exact-match reward does the rest. With ``lora.rank`` an adapter of the
warm-started model is what reinforcement trains. Nothing is downloaded.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import api, build
from headrace.config import from_dict, load, to_toml
from headrace.data.char_tokenizer import make_char_tokenizer

LETTERS = "abcdef"
WORD_LENGTH = 4

SETTINGS: dict[str, Any] = {
    # A model this small leaves a GPU waiting for Python.
    "model.device": "cpu",
    "run.steps": 400,
    "run.checkpoint_every": 100,
    "rollout.group_size": 16,
    "rollout.groups_per_step": 16,
    "rollout.max_tokens": 8,
    "rollout.max_lag": 1,
    "engine.max_running": 256,
    "trainer.learning_rate": 8e-4,
    "trainer.schedule": "linear",
    "trainer.betas": [0.9, 0.95],
}
WARM_STEPS = 27
"""Supervised steps, after which the model knows the form of an answer and seldom gets one right."""

ADAPTER_SETTINGS: dict[str, Any] = {
    "lora.rank": 8,
    "trainer.learning_rate": 3e-3,
    # The frozen output head of a model this little trained gives small logits: at 1 nobody could be sure.
    "rollout.temperature": 0.5,
}
"""What is different where only an adapter is trained."""


def tasks(num: int = 4096, *, seed: int = 0) -> list[dict[str, str]]:
    """Words to reverse, with the right answer beside them."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(LETTERS, k=WORD_LENGTH)) for _ in range(num)]
    return [{"prompt": f"{word}>", "answer": word[::-1]} for word in words]


def exact(completions: list[str], answer: list[str]) -> list[float]:
    """1 for the word backwards and nothing else."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def prepare(
    directory: Path, *, seed: int = 0, warm_steps: int = WARM_STEPS, model: Path | None = None
) -> Mapping[str, Any]:
    """Write a warm-started model to ``model`` (None: in ``directory``); returns the settings of a run with it."""
    from headrace.models.loading import make_tiny_model

    build.quieten()
    model, blank = model or directory / "model", directory / "blank"
    made = blank if warm_steps else model
    vocab_size = make_char_tokenizer(made, LETTERS + ">")
    make_tiny_model(made, vocab_size=vocab_size, hidden_size=64, num_layers=2, context_tokens=64, seed=seed)
    if warm_steps:
        api.warm_start(
            model=blank,
            examples=tasks(4096, seed=seed + 1_000_000),
            output=model,
            steps=warm_steps,
            learning_rate=3e-3,
            seed=seed,
            device="cpu",
        )
    return {**SETTINGS, "run.seed": seed, "model.path": str(model.absolute())}


def run(*, seed: int = 0, overrides: Sequence[str] = (), warm_steps: int = WARM_STEPS) -> api.RunResult:
    """Train the demo model in a new run directory; with a ``lora`` setting among ``overrides``, an adapter."""
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    ranks = [o.partition("=")[2].strip() for o in overrides if o.startswith("lora.rank=")]
    adapter = any(override.startswith("lora.") for override in overrides) and ranks[-1:] != ["0"]
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as made:
        # An adapter is nothing without the model it was trained on, which is therefore kept.
        chosen_dirs = [o.partition("=")[2] for o in overrides if o.startswith("run.dir=")] or ["runs"]
        kept = Path(chosen_dirs[-1]) / f"{name}-base" if adapter else None
        prepared = prepare(Path(made), seed=seed, warm_steps=warm_steps, model=kept)
        settings = {**prepared, **(ADAPTER_SETTINGS if adapter else {}), "run.name": name}
        run_file = Path(made) / "run.toml"
        run_file.write_text(to_toml(from_dict(settings)), encoding="utf-8")
        chosen = load(run_file, overrides)
        return api.train(tasks=tasks(seed=seed), reward=exact, settings=chosen)
