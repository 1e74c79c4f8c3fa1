"""From settings to plain values: what parameters become, and what is derived instead of asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from headrace import build, roles
from headrace.algos.pivots import PivotRule
from headrace.config import from_dict
from headrace.config.parameters import algo_parameters, loss_options, pivot_parameters
from headrace.errors import ConfigError
from headrace.launch.proxies import DEADLINES_S
from headrace.models.loading import make_tiny_model


def test_parameters_of_long_completions_reach_the_plan():
    options = {
        "overlong.tokens": 16,
        "overlong.penalty": 0.5,
        "truncated": {"mode": "penalise", "penalty": 2},
    }
    plan = build.plan(from_dict({"algo.options": options}))
    assert (plan.overlong_buffer_tokens, plan.overlong_factor, plan.truncated_penalty) == (16, 0.5, 2.0)
    plain = build.plan(from_dict({}))
    assert (plain.overlong_buffer_tokens, plain.truncated_penalty) == (0, 0.0)


def test_a_divergence_is_estimated_where_it_has_a_weight():
    assert "kl.estimator" not in algo_parameters(from_dict({}))
    assert algo_parameters(from_dict({"algo.kl_coef": 0.1}))["kl.estimator"] == "k3"
    chosen = from_dict({"algo.kl_coef": 0.1, "algo.options.kl.estimator": "k2"})
    assert algo_parameters(chosen)["kl.estimator"] == "k2"


def test_the_loss_is_given_its_own_options_and_no_others():
    options = {"tis.cap": 3.0, "balance.coef": 0.1, "truncated.mode": "mask", "guard.mismatch": 0.2}
    settings = from_dict({"algo.corrections": ["tis"], "algo.options": options})
    assert loss_options(settings) == {"tis.cap": 3.0, "truncated.mode": "mask", "guard.mismatch": 0.2}
    assert algo_parameters(settings)["balance.coef"] == 0.1


def test_pivots_have_their_rule_s_defaults():
    assert build.pivot_rule(from_dict({"pivots.branches": 4})) == PivotRule(branches=4)
    assert pivot_parameters(from_dict({}))["weight"] == 1.0
    options = {"gamma": 2, "segments": 3, "per_group": 2, "success": 0.5}
    rule = build.pivot_rule(from_dict({"pivots.branches": 4, "pivots.options": options}))
    assert rule == PivotRule(branches=4, gamma=2.0, num_segments=3, per_group=2, success=0.5)


@pytest.mark.parametrize(("max_tokens", "on_cpu"), [(1, 1), (8, 2), (18, 4), (63, 8), (64, 16), (4096, 16)])
def test_blocks_are_small_where_short_attempts_share_them(max_tokens, on_cpu):
    branching = from_dict({"pivots.branches": 2, "rollout.max_tokens": max_tokens})
    assert build.block_tokens(branching, "cpu") == on_cpu
    assert build.block_tokens(branching, "cuda") == 16
    assert build.block_tokens(from_dict({"rollout.max_tokens": max_tokens}), "cpu") == 16


class NoArguments:
    def __init__(self):
        raise AssertionError("must not be made")


class NoRun:
    def __init__(self, renderer, sampling): ...


class Fine(NoRun):
    async def run(self, task, policy): ...


def test_an_environment_is_made_from_renderer_and_sampling_or_refused_with_what_it_is_given():
    settings, renderer = from_dict({}), SimpleNamespace(stop_ids=(1,), single_token_ids=lambda texts: ())
    said = r"^environment: NoArguments cannot be made .*the model's renderer and how tokens are drawn.*__init__\("
    with pytest.raises(ConfigError, match=said):
        build.environment(settings, renderer, NoArguments)
    with pytest.raises(ConfigError, match=r"^environment: a NoRun has no method run; give it async def run"):
        build.environment(settings, renderer, NoRun)
    assert isinstance(build.environment(settings, renderer, Fine), Fine)
    assert isinstance(build.environment(settings, renderer, lambda *given: Fine(*given)), Fine)


def test_an_update_is_given_up_before_the_run_stalls():
    assert build.plan(from_dict({"run.stall_s": 100.0})).sync_s == 25.0


def test_split_and_subset_of_a_dataset_are_options_of_the_source(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"prompt": f"q{i}"} for i in range(5)])
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "saved"))
    chosen = {"tasks.source": f"hf:{tmp_path / 'saved'}", "tasks.options": {"split": "test"}}
    source = build.task_source(from_dict({**chosen, "tasks.shuffle": False}))
    assert source.task(3).prompt == "q3"


def test_what_a_snapshot_makes_of_the_bundle_is_said():
    asked = {"model.device": "cpu", "model.dtype": "bfloat16", "weights.transport": "files"}
    assert build.route(from_dict(asked)).bundle == "delta"
    followed = build.route(from_dict({**asked, "distill.teachers": {"past": "snapshot:2"}}))
    assert followed.bundle == "full" and "distill.teachers" in followed.why_bundle
    chosen = {**asked, "distill.teachers": {"past": "snapshot:2"}, "weights.bundle": "full"}
    assert build.route(from_dict(chosen)).why_bundle == "asked for by weights.bundle"


@pytest.mark.parametrize("transport", ["auto", "files"])
def test_of_an_adapter_the_bundle_is_the_adapter(transport):
    asked = {"model.device": "cpu", "model.dtype": "bfloat16", "weights.transport": transport}
    chosen = build.route(from_dict({**asked, "lora.rank": 4}))
    assert (chosen.bundle, chosen.why_bundle) == ("adapter", "lora.rank is 4: only the adapter changes")


@pytest.mark.parametrize(("free", "expected"), [(10**9, "SharedMemorySender"), (1000, "CheckpointNamed")])
def test_a_sender_uses_shared_memory_where_two_versions_fit(tmp_path, monkeypatch, free, expected):
    model = make_tiny_model(tmp_path / "model", vocab_size=31)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    settings = from_dict({"model.path": str(tmp_path / "model"), "model.device": "cpu"}, training=False)
    told = {"segments": tmp_path / "segments", "folder": tmp_path / "folder", "threaded": False}
    sender = roles._sender(settings, told, model)
    assert type(sender).__name__ == expected
    sender.close()


@pytest.mark.parametrize(("free", "expected"), [(10**6, "SharedMemorySender"), (1000, "CheckpointNamed")])
def test_an_adapter_needs_room_in_shared_memory_as_well(tmp_path, monkeypatch, free, expected):
    pytest.importorskip("peft")
    model = make_tiny_model(tmp_path / "model", vocab_size=31)
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    asked = {"model.path": str(tmp_path / "model"), "model.device": "cpu", "lora.rank": 4}
    told = {"segments": tmp_path / "segments", "folder": tmp_path / "folder", "threaded": False}
    sender = roles._sender(from_dict(asked, training=False), told, model)
    assert type(sender).__name__ == expected
    sender.close()


def test_versions_that_wait_for_a_late_teacher_need_room_too(monkeypatch):
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: SimpleNamespace(free=300))
    plain, late = {"model.device": "cpu"}, {"distill.teachers": {"past": "snapshot:2"}}
    assert build.route(from_dict(plain), version_bytes=100).transport == "shared_memory"
    assert build.route(from_dict({**plain, **late}), version_bytes=75).transport == "shared_memory"
    assert build.route(from_dict({**plain, **late}), version_bytes=100).transport == "files"


@pytest.mark.parametrize("name", ["run.stall_s", "rollout.attempt_s", "reward.timeout_s"])
def test_no_call_is_given_up_before_a_deadline_that_is_set(name, monkeypatch, tmp_path):
    class Launcher:
        def __init__(self, roles, **given):
            told.update(given["deadlines_s"])

        async def spawn(self):
            return None

    told: dict[str, float] = {}
    monkeypatch.setattr(build, "LocalLauncher", Launcher)
    make_tiny_model(tmp_path / "model", vocab_size=64)
    asyncio.run(
        build.cluster(from_dict({name: 9000.0, "model.path": str(tmp_path / "model")}), (), run_dir=tmp_path)
    )
    assert min(told[call] for call in ("generate", "apply", "score", "step", "begin_update")) > 9000.0
    assert told["abort"] == DEADLINES_S["abort"]
