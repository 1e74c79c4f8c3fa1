"""Process-reward models on a GPU: reading in pieces, side by side, against reading the whole in float32 on the CPU."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from headrace.scoring.process_model import ProcessModel
from headrace.types import StepQuestion, Task

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCAB = 199
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def tiny(kind, family):
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_labels": 2,
        "pad_token_id": 0,
    }
    if family == "llama":
        del small["sliding_window"], small["layer_types"]
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.for_model(family, **small)).eval()


def ask(model, texts, ends, num_known):
    questions = [
        StepQuestion(
            attempt=str(i),
            task=Task(id="0", prompt="p"),
            token_ids=text[: ends[i][-1]],
            num_prompt=4,
            ends=ends[i],
            num_known=num_known,
            last=False,
        )
        for i, text in enumerate(texts)
    ]
    return [answer.scores for answer in model.score(questions)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        (AutoModelForCausalLM, "llama"),
        (AutoModelForCausalLM, "gemma2"),
        (AutoModelForTokenClassification, "llama"),
    ],
)
def test_pieces_on_the_device_agree_with_the_whole_on_the_cpu(kind, family, dtype):
    model = tiny(kind, family)
    pair = (5, 6) if kind is AutoModelForCausalLM else None
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, VOCAB, n).astype(np.int32) for n in (40, 700, 123, 256)]
    ends = [np.array([10, len(text) // 2, len(text)]) for text in texts]
    whole = ask(ProcessModel(model, kv_tokens=10_000, pair=pair), texts, ends, 0)
    device = copy.deepcopy(model).to(device="cuda", dtype=dtype)
    judge = ProcessModel(device, kv_tokens=10_000, pair=pair)
    first = ask(judge, texts, [e[:2] for e in ends], 0)
    second = ask(judge, texts, ends, 2)
    for early, late, wanted in zip(first, second, whole, strict=True):
        np.testing.assert_allclose(np.concatenate([early, late]), wanted, atol=TOLERANCE[dtype])
    assert judge.counters()["read_tokens"] == sum(map(len, texts))
