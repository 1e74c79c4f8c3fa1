from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace.errors import ConfigError
from headrace.trainers.warm_start import warm_start

PAIRS = [([a, b, 30], [b, a, 31]) for a in range(6) for b in range(6)]


def test_the_first_loss_is_that_of_the_answer_tokens_alone(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    model = make_model()
    total = 0.0
    for prompt, answer in PAIRS:
        ids = torch.tensor([*prompt, *answer])
        full = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        total -= sum(float(full[t - 1, ids[t]].detach()) for t in range(len(prompt), len(ids)))
    losses = warm_start(model, PAIRS, steps=1, batch_size=len(PAIRS), learning_rate=0.0, row_tokens=40)
    assert losses[0] == pytest.approx(total / (3 * len(PAIRS)), rel=1e-5)


def test_it_learns_repeats_exactly_and_leaves_the_model_as_it_was(
    make_model: Callable[..., PreTrainedModel],
) -> None:
    runs = []
    for _ in range(2):
        model, seen = make_model(), []
        losses = warm_start(
            model,
            PAIRS,
            steps=30,
            batch_size=16,
            learning_rate=5e-3,
            seed=3,
            on_step=lambda step, loss, seen=seen: seen.append((step, loss)),
        )
        assert seen == list(enumerate(losses, start=1))
        assert model.config._attn_implementation == "eager"
        runs.append(losses)
    assert runs[0] == runs[1]
    assert runs[0][-1] < 0.5 * runs[0][0]


def test_pairs_that_teach_nothing_are_refused(make_model: Callable[..., PreTrainedModel]) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match="no example answers"):
        warm_start(model, [], steps=1, batch_size=1, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="pair 1"):
        warm_start(model, [([1], [2]), ([1], np.zeros(0))], steps=1, batch_size=1, learning_rate=1e-3)
