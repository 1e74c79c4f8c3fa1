"""Recorded routes in the trainer: replayed exactly, with a router that learns, however rows are cut or recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.engines.make import torch_engine
from headrace.errors import ModelError, RecordError, TrainingError
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.models.packed_attention import use_packed_attention
from headrace.models.route_replay import RouteReplay, RowRoutes
from headrace.models.routers import routers, scores_of
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.expert_parallel import expert_modules
from headrace.trainers.logprobs import row_tensors, token_logprobs
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import Request, Routing, Sample, Sampling, TrainBatch

VOCAB = 32
FAMILIES = ["qwen3_moe", "olmoe", "deepseek_v3"]


def make_moe(directory: Path, family: Any = "qwen3_moe", **settings: Any) -> Path:
    given = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 3, "init_std": 0.3, **settings}
    make_tiny_model(directory, family=family, **given)
    return directory


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe(tmp_path_factory.mktemp("moe"))


def sampled(
    checkpoint: Path, *, dtype: str = "bfloat16", num_groups: int = 3, group_size: int = 4
) -> TrainBatch:
    """What an engine in ``dtype`` sampled, with its routes; advantages are made up."""
    engine = torch_engine(
        load_model(checkpoint, dtype=dtype), ledger=TimeLedger(ENGINE_ACTIVITIES), record_routes=True
    )
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, 9 + 8 * n).astype(np.int32) for n in range(num_groups)]
    for i in range(num_groups * group_size):
        sampling = Sampling(max_tokens=8 + 3 * i)
        engine.submit(Request(id=str(i), prompt_ids=prompts[i // group_size], sampling=sampling, seed=i))
    samples: dict[int, Sample] = {}
    while engine.has_work:
        for name, completion in engine.step():
            index = int(name)
            prompt = prompts[index // group_size]
            tokens = np.concatenate((prompt, completion.token_ids))
            mask = np.arange(len(tokens)) >= len(prompt)
            logprobs = np.zeros(len(tokens), np.float32)
            logprobs[mask] = completion.logprobs
            samples[index] = Sample(
                group=index // group_size,
                attempt=index % group_size,
                token_ids=tokens,
                loss_mask=mask,
                behavior_logprobs=logprobs,
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                temperature=1.0,
                kv_versions=completion.kv_versions,
                routing=completion.routing,
            )
    return TrainBatch(step=1, version=0, samples=tuple(samples[i] for i in sorted(samples)))


@pytest.fixture(scope="module")
def batch(moe: Path) -> TrainBatch:
    return sampled(moe)


def trainer(checkpoint: Path, **settings: Any) -> TorchTrainer:
    given = {"sender": None, "learning_rate": 1e-3, "row_tokens": 200, **settings}
    return TorchTrainer(load_model(checkpoint), ledger=TimeLedger(TRAINER_ACTIVITIES), **given)


def gradients(core: TorchTrainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    for rows in core.prepare(batch):
        core.accumulate(rows, before_update=True)
    return {
        name: parameter.grad.clone()
        for name, parameter in core.model.named_parameters()
        if parameter.grad is not None
    }


def computed_with(model: PreTrainedModel) -> list[np.ndarray]:
    """Grows by the experts [T, K] that each layer really computes with."""
    heard: list[np.ndarray] = []
    for module in expert_modules(model).values():
        module.register_forward_pre_hook(lambda _, given: heard.append(given[1].numpy().copy()))
    return heard


def flips_of(core: TorchTrainer, samples: Sequence[Sample]) -> float:
    """Share of (token, layer) whose computed experts are not the recorded ones, each sample in a row of its own."""
    heard, num_flips, num_rows = computed_with(core.policy), 0, 0
    for sample in samples:
        (row,) = pack([sample], row_tokens=10_000)
        heard.clear()
        with torch.no_grad():
            core._weights.values(row_tensors(row, device="cpu"))
        used, routing = np.stack(heard, 1), sample.routing
        assert routing is not None
        wanted = np.sort(routing.experts, -1)
        # The last token of a sequence has no record and is not computed.
        num_flips += int((np.sort(used[routing.recorded[:-1]], -1) != wanted).any(-1).sum())
        num_rows += wanted.shape[0] * wanted.shape[1]
    return num_flips / num_rows


def test_flips_without_and_none_with_a_replay(moe: Path, batch: TrainBatch) -> None:
    """Engine in bfloat16, trainer in float32."""
    live, keep = trainer(moe, routing="live"), trainer(moe, routing="keep")
    assert flips_of(live, batch.samples) > 0.005
    assert flips_of(keep, batch.samples) == 0.0
    without, with_replay = (core.step(batch).metrics for core in (trainer(moe, routing="live"), keep))
    assert 0 < without["route_flips"] <= without["route_flips_worst"] < 0.5
    assert "routing_fallback" not in without
    assert with_replay["routing_fallback"] == 0.0
    assert with_replay["mismatch_p99"] < without["mismatch_p99"]
    assert with_replay["mismatch_mean"] < without["mismatch_mean"]


def test_metrics_count_what_the_routers_would_have_chosen(moe: Path, batch: TrainBatch) -> None:
    metrics = trainer(moe, routing="live").step(batch).metrics
    assert metrics["route_flips"] == pytest.approx(flips_of(trainer(moe, routing="live"), batch.samples))
    by_layer = [value for name, value in metrics.items() if name.startswith("route_flips_layer_")]
    assert len(by_layer) == len(routers(load_model(moe)))
    assert np.mean(by_layer) == pytest.approx(metrics["route_flips"])
    assert max(by_layer) == metrics["route_flips_worst"]


@pytest.mark.parametrize("routing", ["live", "keep"])
def test_a_guard_on_routes_stops_before_anything_is_updated(
    routing: str, moe: Path, batch: TrainBatch
) -> None:
    bounded = {"guard.route_flips": 0.001, "guard.mismatch": 100.0, "guard.effective_samples": 0.0}
    core = trainer(moe, routing=routing, guard="stop", options=bounded)
    before = [parameter.detach().clone() for parameter in core.model.parameters()]
    with pytest.raises(TrainingError, match=r"step 1: .*other experts.*guard\.route_flips = 0\.001"):
        core.step(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, core.model.parameters(), strict=True))
    assert trainer(moe, routing=routing, guard="stop", options=bounded | {"guard.route_flips": 1.0}).step(
        batch
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("normalised", [True, False])
def test_scores_of_its_own_choice_are_the_routers_own(family: Any, normalised: bool, tmp_path: Path) -> None:
    model = load_model(make_moe(tmp_path, family))
    for router in routers(model).values():
        router.norm_topk_prob = normalised  # type: ignore[assignment]
        if "e_score_correction_bias" in router._buffers:
            router.e_score_correction_bias.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore
        logits_TE, scores_TK, experts_TK = router(torch.randn(40, 32))
        torch.testing.assert_close(scores_of(router, logits_TE, experts_TK), scores_TK, rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_learns_from_experts_it_would_not_choose(family: Any, tmp_path: Path) -> None:
    model = load_model(make_moe(tmp_path, family, num_layers=2))
    router = next(iter(routers(model).values()))
    num_layers = len(routers(model))
    hidden_TH = torch.randn(10, 32)
    with torch.no_grad():
        own_TK = router(hidden_TH)[2]
    others_TK = torch.tensor([[e for e in range(4) if e not in row] for row in own_TK.tolist()])
    replay = RouteReplay(model, keep=True, device=torch.device("cpu"))
    told_MTK = others_TK.to(torch.uint8).expand(num_layers, -1, -1).contiguous()
    replay.follow(RowRoutes(told_MTK, torch.ones(10, dtype=torch.bool)))
    logits_TE, scores_TK, experts_TK = router(hidden_TH)
    assert torch.equal(experts_TK, others_TK)
    assert int(replay.flips()[0]) == 10
    logits_TE.retain_grad()
    (scores_TK * torch.randn(10, 2)).sum().backward()
    assert (logits_TE.grad.gather(1, others_TK).abs() > 1e-7).all()
    assert float(router.weight.grad.norm()) > 1e-4  # type: ignore[union-attr]


def test_router_gradients_are_alive_in_training(moe: Path, batch: TrainBatch) -> None:
    """Also with routes that no router of the model would have chosen."""
    rng = np.random.default_rng(0)
    drifted = replace(batch, samples=tuple(_with_random_routes(sample, rng) for sample in batch.samples))
    core = trainer(moe)
    found = gradients(core, drifted)
    norms = {name: float(grad.norm()) for name, grad in found.items() if name.endswith("gate.weight")}
    assert len(norms) == 3
    assert all(norm > 1e-5 for norm in norms.values())


def _with_random_routes(sample: Sample, rng: np.random.Generator) -> Sample:
    assert sample.routing is not None
    experts = rng.permuted(np.broadcast_to(np.arange(4), (*sample.routing.experts.shape[:2], 4)), axis=-1)
    return replace(sample, routing=replace(sample.routing, experts=experts[..., :2].astype(np.uint8)))


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert a.keys() == b.keys()
    for name in a:
        scale = float(a[name].abs().max()) + 1e-6
        assert float((a[name] - b[name]).abs().max()) <= tolerance * max(scale, 1e-3), name


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers_replay_the_same_routes(family: Any, tmp_path: Path) -> None:
    checkpoint = make_moe(tmp_path, family)
    batch = sampled(checkpoint, num_groups=2)
    drifted = replace(
        batch,
        samples=tuple(_with_random_routes(s, np.random.default_rng(1)) for s in batch.samples),
    )
    plain = gradients(trainer(checkpoint), drifted)
    recomputing = trainer(checkpoint)
    recomputing.blocks.num_recomputed = 3
    heard = computed_with(recomputing.policy)
    again = gradients(recomputing, drifted)
    for name in plain:
        assert torch.equal(plain[name], again[name]), name
    assert len(heard) > 0
    assert not np.allclose(
        np.concatenate(
            [g.flatten() for g in gradients(trainer(checkpoint, routing="live"), drifted).values()]
        ),
        np.concatenate([g.flatten() for g in plain.values()]),
    )


@pytest.mark.parametrize("row_tokens", [1, 64, 4000])
@pytest.mark.parametrize("share_prefixes", [False, True])
def test_packing_changes_nothing(moe: Path, batch: TrainBatch, row_tokens: int, share_prefixes: bool) -> None:
    """Members of a group differ in the routes of their prompt: what agrees is shared, the rest is their own."""
    samples = list(batch.samples)
    for index in (1, 6):
        routing = samples[index].routing
        assert routing is not None
        experts = routing.experts.copy()
        experts[5] = (experts[5] + 1) % 4
        samples[index] = replace(samples[index], routing=replace(routing, experts=experts))
    batch = replace(batch, samples=tuple(samples))
    apart = gradients(trainer(moe, row_tokens=1, share_prefixes=False), batch)
    packed = gradients(trainer(moe, row_tokens=row_tokens, share_prefixes=share_prefixes), batch)
    assert_same(apart, packed, 2e-4)


def test_tokens_without_a_record_are_routed_live(moe: Path, batch: TrainBatch) -> None:
    """One by one: dropping every record gives the live gradients, dropping some leaves the others replayed."""
    rng = np.random.default_rng(2)
    none = replace(batch, samples=tuple(replace(s, routing=None) for s in batch.samples))
    assert_same(gradients(trainer(moe), none), gradients(trainer(moe, routing="live"), batch), 0.0)
    some = tuple(_with_holes(sample, rng) for sample in batch.samples)
    core = trainer(moe)
    assert flips_of(core, some) == 0.0
    metrics = trainer(moe).step(replace(batch, samples=some)).metrics
    num_recorded = sum(int(s.routing.recorded.sum()) for s in some if s.routing is not None)
    num_tokens = sum(sample.num_tokens - 1 for sample in some)
    assert metrics["routing_fallback"] == pytest.approx(1 - num_recorded / num_tokens)
    assert trainer(moe).step(none).metrics["routing_fallback"] == 1.0


def _with_holes(sample: Sample, rng: np.random.Generator) -> Sample:
    assert sample.routing is not None
    kept = rng.random(len(sample.routing.experts)) < 0.5
    recorded = sample.routing.recorded.copy()
    recorded[:-1] = kept
    return replace(sample, routing=Routing(experts=sample.routing.experts[kept], recorded=recorded))


def test_the_policy_at_the_start_of_a_step_replays_and_the_reference_does_not(
    moe: Path, batch: TrainBatch
) -> None:
    """At equal weights prox is the policy to the bit, and the reference what live routing gives."""
    core = trainer(moe, loss="decoupled", minibatches=2, kl="k2", kl_coef=0.1)
    live = trainer(moe, loss="decoupled", minibatches=2, kl="k2", kl_coef=0.1, routing="live")
    rows, live_rows = (core.prepare(batch)[0], live.prepare(batch)[0])
    differs = False
    for row, other in zip(rows, live_rows, strict=True):
        policy_N = core._weights.values(row.tensors).logprobs_N
        assert torch.equal(row.inputs.prox_logprobs_N, policy_N.detach())
        assert torch.equal(row.inputs.ref_logprobs_N, other.inputs.ref_logprobs_N)
        differs |= not torch.equal(row.inputs.prox_logprobs_N, row.inputs.ref_logprobs_N)
    assert differs


def test_an_adapter_is_trained_on_the_recorded_experts_and_its_reference_is_live(
    moe: Path, batch: TrainBatch
) -> None:
    pytest.importorskip("peft")
    lora = LoraSpec(rank=4, alpha=8.0, targets=("all-linear", "experts"))
    core = trainer(moe, lora=lora, kl="k2", kl_coef=0.1)
    live = trainer(moe, lora=lora, kl="k2", kl_coef=0.1, routing="live")
    for row, other in zip(core.prepare(batch)[0], live.prepare(batch)[0], strict=True):
        assert torch.equal(row.inputs.ref_logprobs_N, other.inputs.ref_logprobs_N)
        # An adapter begins as nothing, so only the experts tell the policy from its reference.
        policy_N = core._weights.values(row.tensors).logprobs_N
        assert not torch.equal(policy_N, row.inputs.ref_logprobs_N)
    kept, without = (each.step(batch).metrics for each in (core, live))
    assert kept["mismatch_p99"] < without["mismatch_p99"]


def test_a_record_of_another_model_is_named(moe: Path, batch: TrainBatch, tmp_path: Path) -> None:
    dense = make_tiny_model(tmp_path, vocab_size=VOCAB, hidden_size=32)
    with pytest.raises(RecordError, match="sample 0/0: it has routes and the model routes nothing"):
        TorchTrainer(dense, sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES)).step(batch)
    first, *others = batch.samples
    assert first.routing is not None
    shallow = replace(first, routing=replace(first.routing, experts=first.routing.experts[:, :2]))
    with pytest.raises(RecordError, match="sample 0/0: routing: it has 2 layers and the model has 3"):
        trainer(moe).step(replace(batch, samples=(shallow, *others)))


def test_routers_of_another_kind_are_refused_unless_live(moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.models.routers._is_softmax_router", lambda router: False)
    with pytest.raises(ModelError, match=r"algo\.routing to live"):
        trainer(moe)
    trainer(moe, routing="live")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_replaying_routers_are_one_compiled_piece_of_code(moe: Path, batch: TrainBatch) -> None:
    """A record neither breaks the graph nor tells layers or rows apart."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, rows = load_model(moe), pack(batch.samples, row_tokens=80)
    use_packed_attention(model)
    RouteReplay(model, keep=True, device=model.device)
    heard, plain = computed_with(model), []
    for row in rows:
        logprobs_N, _ = token_logprobs(model, row_tensors(row, device="cpu"))
        logprobs_N.sum().backward()
        plain.append(logprobs_N.detach())
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert len(heard) == 3 * len(rows) > 6
    model.zero_grad(set_to_none=True)
    for router in routers(model).values():
        router.forward = torch.compile(router.forward, backend=counter, dynamic=True, fullgraph=True)
    for row, before_N in zip(rows, plain, strict=True):
        logprobs_N, _ = token_logprobs(model, row_tensors(row, device="cpu"))
        logprobs_N.sum().backward()
        torch.testing.assert_close(logprobs_N.detach(), before_N, atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 1
    assert_same(expected, {name: p.grad for name, p in model.named_parameters()}, 1e-3)
