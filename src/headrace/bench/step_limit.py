"""The least time a step can take on one GPU: what it must read and multiply, at the rates measured there.

In: a model's configuration, the size of a step, bytes and floating-point operations a second. Out: seconds of
generating and of training. A decode pass takes as long as reading the weights and every visible key and value once,
prompts once a group, or as long as its arithmetic, whichever is longer; prompts are computed once a group; training is
the model FLOPs that ``bench.train`` counts. Of a mixture every expert is read in each pass. Sampling, the optimizer and
all that is elementwise cost nothing here. Where both run at the same time one may read while the other multiplies: the
sum bounds a step at lag 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from transformers import PretrainedConfig

from headrace.bench import train
from headrace.bench.shapes import build_random_model
from headrace.bench.step_workload import StepWorkload
from headrace.data.packing import pack
from headrace.trainers.blocks import decoder_layers


class StepLimit(NamedTuple):
    generation_s: float
    training_s: float

    @property
    def seconds(self) -> float:
        """One after the other."""
        return self.generation_s + self.training_s


def step_limit(
    config: PretrainedConfig, workload: StepWorkload, *, bytes_per_s: float, flops_per_s: float
) -> StepLimit:
    model = build_random_model(config, device="meta", dtype=torch.bfloat16)
    layers = decoder_layers(model)
    body = train.layer_weights(model)
    head = model.get_output_embeddings().weight.numel()
    head_dim = train.head_size(config)
    num_prompts, prompt = workload.num_groups, workload.prompt_tokens
    num_rows = num_prompts * workload.group_size
    # One entry for each pass; the first token of a completion is drawn from the prompt's.
    sampled = np.arange(1, workload.completion_tokens, dtype=np.float64)
    pair_flops = 4.0 * config.num_attention_heads * head_dim * len(layers)
    each = train.bytes_read(model)
    read = each.weights + (num_prompts * prompt + num_rows * sampled) * each.token
    flops = num_rows * (2.0 * (body.used + head) + (prompt + sampled) * pair_flops)
    prompt_flops = num_prompts * (2.0 * (body.used * prompt + head) + prompt * (prompt + 1) / 2 * pair_flops)
    passes_s = np.maximum(read / bytes_per_s, flops / flops_per_s).sum()
    samples = train.random_samples(workload, vocab_size=config.vocab_size)
    rows = pack(samples, row_tokens=1 << 20, share_prefixes=True)
    return StepLimit(
        float(passes_s + prompt_flops / flops_per_s), train.model_flops(model, rows) / flops_per_s
    )
