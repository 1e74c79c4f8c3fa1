"""The demo: a tiny model learns to spell words backwards, on a laptop, in about a minute.

In: a run directory's settings. Out: a small random model, tasks and a reward, made on the spot. The
model is a two-layer Llama over single characters; a short supervised warm start teaches it the form of
an answer, and reinforcement on an exact-match reward does the rest. With ``lora.rank`` the warm-started model is
written first, and an adapter of it is what reinforcement trains. Nothing is downloaded.
"""

from __future__ import annotations

import json
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
    "warm_start.steps": 27,
    "warm_start.learning_rate": 3e-3,
}


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


def prepare(directory: Path, *, seed: int = 0) -> Mapping[str, Any]:
    """Write the model and the warm-start examples; returns the settings that name them."""
    from headrace.models.loading import make_tiny_model

    build.quieten()
    model = directory / "model"
    vocab_size = make_char_tokenizer(model, LETTERS + ">")
    make_tiny_model(model, vocab_size=vocab_size, hidden_size=64, num_layers=2, context_tokens=64, seed=seed)
    examples = directory / "examples.jsonl"
    lines = (json.dumps(row) for row in tasks(4096, seed=seed + 1_000_000))
    examples.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {**SETTINGS, "run.seed": seed, "model.path": str(model), "warm_start.examples": str(examples)}


def prepare_adapter(settings: Mapping[str, Any], base: Path) -> Mapping[str, Any]:
    """The settings of ``prepare`` for training an adapter: the warm start is done now, and its model kept in
    ``base``, because an adapter is nothing without the model it was trained on."""
    seed = settings["run.seed"]
    api.warm_start(
        model=settings["model.path"],
        examples=tasks(4096, seed=seed + 1_000_000),
        output=base,
        steps=settings["warm_start.steps"],
        learning_rate=settings["warm_start.learning_rate"],
        seed=seed,
    )
    rest = {name: value for name, value in settings.items() if not name.startswith("warm_start.")}
    return {**rest, **ADAPTER_SETTINGS, "model.path": str(base.absolute())}


def run(*, seed: int = 0, overrides: Sequence[str] = ()) -> api.RunResult:
    """Train the demo model in a new run directory; with a ``lora`` setting among ``overrides``, an adapter."""
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    with tempfile.TemporaryDirectory(prefix="headrace-demo-") as made:
        settings: Mapping[str, Any] = {**prepare(Path(made), seed=seed), "run.name": name}
        if any(override.startswith("lora.") for override in overrides):
            chosen_dirs = [o.partition("=")[2] for o in overrides if o.startswith("run.dir=")]
            settings = prepare_adapter(settings, Path((chosen_dirs or ["runs"])[-1]) / f"{name}-base")
        run_file = Path(made) / "run.toml"
        run_file.write_text(to_toml(from_dict(settings)), encoding="utf-8")
        chosen = load(run_file, overrides)
        return api.train(tasks=tasks(seed=seed), reward=exact, settings=chosen)
