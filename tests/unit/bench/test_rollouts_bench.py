"""The rollout workload and the bound it is held against; the engine itself runs it on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace.bench import against_vllm, peers, rollouts
from headrace.bench.rollout_workload import Workload
from headrace.bench.rollouts import generate, limit_seconds
from headrace.bench.shapes import build_random_model, shape_config
from headrace.engines.make import torch_engine
from headrace.errors import ConfigError
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger


def small_model() -> PreTrainedModel:
    config = shape_config("qwen2-0.5b")
    config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size = 1, 64, 96, 50
    config.num_attention_heads, config.num_key_value_heads = 4, 2
    return build_random_model(config, device="cpu", dtype=torch.float32)


def test_rounds_are_more_of_the_same_workload() -> None:
    several = Workload(num_prompts=64, rounds=4)
    assert several.lengths_UN.shape == (1, 4 * several.at_once) == (1, 4 * 512)
    assert len(np.unique(several.prompts(1000), axis=0)) == 4 * 64
    assert several.lengths_UN.mean() == pytest.approx(483, rel=0.01)
    assert Workload().num_tokens == pytest.approx(247_290, abs=1)


def test_turns_divide_a_sample_and_follow_one_another() -> None:
    several = Workload(num_prompts=2, group_size=3, turns=4, reply_tokens=5)
    assert several.lengths_UN.shape == (4, 6) and several.lengths_UN.max() <= 2048 // 4
    assert Workload(turns=4).lengths_UN.sum(axis=0).mean() == pytest.approx(483, rel=0.01)
    request, told = several.requests(1000, 0)[4], several.lengths_UN[:, 4].tolist()
    asked, seeds = [request.sampling.max_tokens], {request.seed}
    sampled = np.array([7, 8])
    while (following := several.next_request(request, sampled, 1000)) is not None:
        known = [*request.prompt_ids, *sampled]
        assert following.prompt_ids[: len(known)].tolist() == known
        assert len(following.prompt_ids) == len(known) + 5
        request = following
        asked.append(request.sampling.max_tokens)
        seeds.add(request.seed)
    assert asked == told and len(seeds) == 4


def test_the_limit_counts_a_pass_for_every_token_that_cannot_be_computed_beside_others() -> None:
    model = small_model()
    # Layers and head; the input's embedding, which this shape shares with the head, is looked up.
    weights = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 64 * 50
    queue = Workload(num_prompts=1, group_size=2, prompt_tokens=6, mean_tokens=5, cap_tokens=8, rounds=10)
    (lengths,) = queue.lengths_UN
    num_passes = max(lengths.max(), -(-lengths.sum() // 2))
    assert num_passes > lengths.max()
    prompts = sum(6 * max(pair) for pair in lengths.reshape(10, 2))
    seen = prompts + (lengths * (lengths + 1) // 2).sum()
    assert limit_seconds(model, queue, 1.0) == 2 * weights * num_passes + seen * 2 * 2 * 16 * 2


def test_the_limit_of_several_turns_reads_what_they_had_before() -> None:
    model = small_model()
    weights = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 64 * 50
    talk = Workload(
        num_prompts=1, group_size=1, prompt_tokens=6, mean_tokens=9, cap_tokens=40, turns=3, reply_tokens=4
    )
    (first, second, third) = talk.lengths_UN[:, 0].tolist()
    contexts = [*range(first), *range(first + 4, first + 4 + second)]
    contexts += range(first + second + 8, first + second + 8 + third)
    seen = sum(6 + context + 1 for context in contexts)
    assert limit_seconds(model, talk, 1.0) == 2 * weights * len(contexts) + seen * 2 * 2 * 16 * 2


def test_a_peer_is_told_the_same_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def note(against: str, module: str, told: list[str], result: Path, **_: object) -> None:
        asked.append(Workload(**json.loads(told[-1])))
        result.write_text(json.dumps({"seconds": 1.0}))

    monkeypatch.setattr(peers, "run", note)
    workload = Workload(seed=7, rounds=2, turns=3)
    assert against_vllm.run("qwen2-0.5b", workload, repeats=1) == {"seconds": 1.0}
    assert asked == [workload]


def test_what_waits_is_generated_too() -> None:
    model = small_model()
    queue = Workload(num_prompts=2, group_size=3, prompt_tokens=6, mean_tokens=5, cap_tokens=12, rounds=3)
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=queue.at_once)
    _, done = generate(engine, queue, 50, 0)
    assert len(done) == 18


def test_turns_find_what_the_ones_before_computed() -> None:
    model = small_model()
    talk = Workload(num_prompts=2, group_size=3, prompt_tokens=40, mean_tokens=60, turns=3, reply_tokens=20)
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=talk.at_once)
    _, done = generate(engine, talk, 50, 0)
    assert len(done) == 18
    # Of every later turn at most its reply, its last token and what its blocks of 16 hold besides.
    assert engine.counters()["prefill_tokens"] <= 2 * 40 + 4 * 16 + 12 * (20 + 1 + 15)


def test_no_repeat_finds_the_prompts_of_another() -> None:
    model = small_model()
    queue = Workload(num_prompts=2, group_size=3, prompt_tokens=40, mean_tokens=5, cap_tokens=12, rounds=2)
    engine = torch_engine(model, ledger=TimeLedger(ENGINE_ACTIVITIES), max_running=queue.at_once)
    computed = [0.0]
    for repeat in range(3):
        generate(engine, queue, 50, repeat)
        computed.append(engine.counters()["prefill_tokens"])
    assert len(set(np.diff(computed))) == 1 and computed[1] >= 4 * 40


def test_a_peer_that_fails_costs_nothing_of_our_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ConfigError("--against vllm: the run failed:\nout of memory")

    ours = {"shape": "qwen2-0.5b", "rounds": 1, "turns": 2, "tokens": 100}
    ours |= {"seconds": 2.0, "limit_s": 1.0, "ready_s": 9.0}
    monkeypatch.setattr(rollouts, "run", lambda *_, **__: ours)
    monkeypatch.setattr(against_vllm, "check_installed", lambda python: None)
    monkeypatch.setattr(against_vllm, "run", fail)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    said: list[str] = []
    figures = rollouts.compare("qwen2-0.5b", against="vllm", progress=said.append)
    assert figures["headrace"] is ours and "out of memory" in figures["vllm"]["failed"]
    assert "ratio" not in figures and "out of memory" in said[-1]
    assert rollouts.table(figures).row_count == 1
