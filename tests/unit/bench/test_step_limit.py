"""The least time of a step, by hand on a small model."""

from __future__ import annotations

import pytest

from headrace.bench.shapes import shape_config
from headrace.bench.step_limit import step_limit
from headrace.bench.step_workload import StepWorkload

WORKLOAD = StepWorkload(num_groups=2, group_size=3, prompt_tokens=12, completion_tokens=4)
BODY, HEAD = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96), 64 * 50
PAIR = 4 * 64 * 2
"""Operations for a pair of tokens, over all heads and layers."""


@pytest.fixture
def config():
    config = shape_config("qwen2-0.5b")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 2, 64, 96, 50
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    return config


def test_slow_memory_counts_weights_a_pass_and_prompts_a_group(config):
    limit = step_limit(config, WORKLOAD, bytes_per_s=1.0, flops_per_s=1e30)
    row_bytes = 2 * 2 * 32 * 2
    read = sum(2 * (BODY + HEAD) + (2 * 12 + 6 * n) * row_bytes for n in (1, 2, 3))
    assert limit.generation_s == pytest.approx(read) and limit.training_s == pytest.approx(0)


def test_slow_arithmetic_counts_every_row_and_the_prompts_once(config):
    limit = step_limit(config, WORKLOAD, bytes_per_s=1e30, flops_per_s=1.0)
    decoded = sum(6 * (2 * (BODY + HEAD) + (12 + n) * PAIR) for n in (1, 2, 3))
    prompts = 2 * (2 * (BODY * 12 + HEAD) + 12 * 13 / 2 * PAIR)
    assert limit.generation_s == pytest.approx(decoded + prompts)
    # The prompt's last token belongs to each continuation: 11 tokens once a group and 4 for each sample.
    tokens, pairs = 2 * 11 + 6 * 4, 2 * 66 + 6 * (4 * 11 + 10)
    assert limit.training_s == pytest.approx(3 * (2 * BODY * tokens + 2 * HEAD * 24 + PAIR * pairs))


def test_the_step_that_is_compared_has_a_limit_of_a_few_seconds():
    """Near what was estimated for this GPU, 6 s, before prompts were taken to be computed once a group."""
    limit = step_limit(shape_config("qwen2-1.5b"), StepWorkload(), bytes_per_s=4.1e12, flops_per_s=780e12)
    assert 4.0 < limit.seconds < 6.0 and limit.seconds == limit.generation_s + limit.training_s


def test_every_expert_is_read_and_few_are_multiplied_with():
    config = shape_config("moe-small")
    body, head = 12 * (2 * 2048 * 2048 + 2 * 2048 * 512), 151936 * 2048
    experts = 12 * 64 * 3 * 512 * 2048
    slow_memory = step_limit(config, WORKLOAD, bytes_per_s=1.0, flops_per_s=1e30)
    row_bytes = 2 * 2 * 4 * 128 * 12
    read = sum(2 * (body + experts + head) + (2 * 12 + 6 * n) * row_bytes for n in (1, 2, 3))
    assert slow_memory.generation_s == pytest.approx(read)
    slow_arithmetic = step_limit(config, WORKLOAD, bytes_per_s=1e30, flops_per_s=1.0)
    tokens, pairs = 2 * 11 + 6 * 4, 2 * 66 + 6 * (4 * 11 + 10)
    used = body + experts // 8
    expected = 3 * (2 * used * tokens + 2 * head * 24 + 4 * 16 * 128 * 12 * pairs)
    assert slow_arithmetic.training_s == pytest.approx(expected)
