"""Routes on a GPU: recorded inside compiled layers and captured passes, replayed in compiled layers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.data.routing import check_routing
from headrace.engines.make import torch_engine
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.routers import routers
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Request, Sample, Sampling, TrainBatch

# Compilers warn of what they could do better, which is no error of ours.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

VOCAB, LAYERS, EXPERTS, CHOSEN = 199, 3, 16, 4


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    make_tiny_model(
        directory, family="qwen3_moe", vocab_size=VOCAB, hidden_size=128, num_layers=LAYERS, num_heads=4,
        num_kv_heads=2, context_tokens=512, num_experts=EXPERTS, experts_per_token=CHOSEN, init_std=0.08,
    )  # fmt: skip
    return directory


def sampled(directory, **settings):
    """Prompts, of which each belongs to four requests, and what the engine drew for them."""
    engine = torch_engine(
        load_model(directory, dtype="bfloat16", device="cuda"),
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        max_running=16,
        record_routes=True,
        **settings,
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 20 + 13 * (i // 4)).astype(np.int32) for i in range(24)]
    prompts = [prompts[i - i % 4] for i in range(24)]
    for i, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=20 + 3 * i)
        engine.submit(Request(id=str(i), prompt_ids=prompt, sampling=sampling, seed=i))
    done = {}
    while engine.has_work:
        done.update(engine.step())
    return prompts, [done[str(i)] for i in range(24)], engine.counters()


def plain_routes(directory, token_ids):
    """Sorted experts [T, M, K] of a plain forward in bfloat16 on the GPU."""
    model, heard = load_model(directory, dtype="bfloat16", device="cuda"), []
    for router in routers(model).values():
        router.register_forward_hook(lambda _, __, output: heard.append(output[2]))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        model(input_ids=torch.from_numpy(token_ids.astype(np.int64)).cuda()[None], use_cache=False)
    return torch.stack(heard, 1).sort(-1).values.cpu().numpy()


@pytest.mark.parametrize(
    "settings",
    [{"kv_tokens": 4096}, {"kv_tokens": 512}, {"kv_tokens": 4096, "compiled": False}],
    ids=["captured", "preempted", "uncompiled"],
)
def test_recorded_routes_are_those_of_a_plain_forward(moe, settings):
    """But for ties that bfloat16 rounds to the other side."""
    prompts, completions, counters = sampled(moe, **settings)
    same = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = np.concatenate((prompt, completion.token_ids))
        check_routing(
            completion.routing, num_tokens=len(tokens), num_layers=LAYERS, num_experts=EXPERTS, top_k=CHOSEN
        )
        assert completion.routing.recorded[:-1].all()
        found = np.sort(completion.routing.experts, -1)
        same.append((found == plain_routes(moe, tokens)[:-1]).all(-1).mean())
    assert np.mean(same) > 0.95
    assert (counters["preemptions"] > 0) == (settings["kv_tokens"] == 512)


def batch_of(prompts, completions):
    rng, samples = np.random.default_rng(1), []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = np.concatenate((prompt, completion.token_ids))
        mask = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.zeros(len(tokens), np.float32)
        logprobs[mask] = completion.logprobs
        samples.append(
            Sample(
                group=i // 4,
                attempt=i % 4,
                token_ids=tokens,
                loss_mask=mask,
                behavior_logprobs=logprobs,
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                temperature=1.0,
                kv_versions=completion.kv_versions,
                routing=completion.routing,
            )
        )
    return TrainBatch(step=1, version=0, samples=tuple(samples))


def test_compiled_layers_replay_what_uncompiled_ones_do(moe):
    prompts, completions, _ = sampled(moe, kv_tokens=4096)
    batch = batch_of(prompts, completions)
    metrics = {}
    for name, settings in {
        "compiled": {},
        "eager": {"eager": True},
        "live": {"routing": "live"},
    }.items():
        trainer = TorchTrainer(
            load_model(moe, device="cuda"), sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES),
            compute_dtype="bf16", row_tokens=1024, **settings,
        )  # fmt: skip
        metrics[name] = trainer.step(batch).metrics
    assert metrics["compiled"]["routing_fallback"] == 0.0
    # Flips are the engine's and the trainer's rounding; uncompiled layers round in more places.
    assert metrics["compiled"]["route_flips"] <= metrics["eager"]["route_flips"] + 0.01 < 0.04
    assert metrics["compiled"]["grad_norm"] == pytest.approx(metrics["eager"]["grad_norm"], rel=0.05)
    assert metrics["compiled"]["mismatch_p99"] < metrics["live"]["mismatch_p99"]
