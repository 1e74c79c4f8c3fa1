"""What a run will need, held against what runs on a GPU were seen to need, and against this machine's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from headrace import build
from headrace.bench.shapes import shape_config
from headrace.cli import app
from headrace.config import from_dict
from headrace.memory.architecture import Architecture, examine
from headrace.memory.plan import (
    CONTEXT_BYTES,
    HOST,
    MemoryPlan,
    longest_sequence,
    plan_memory,
    remedies,
)
from headrace.memory.table import table
from headrace.memory.trainer import TrainerPlan, trainer_bytes
from headrace.memory.uses import total
from headrace.models import float_residual
from headrace.models.loading import make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.trainers.adapter_weights import AdapterWeights
from headrace.trainers.blocks import bytes_of_a_step
from headrace.trainers.placement import HOST_MOMENTS

H200 = 150_000_000_000
FAMILIES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe", "olmoe", "deepseek_v3"]


@cache
def published(shape: str) -> Architecture:
    return examine(shape_config(shape), torch.bfloat16)


def gpu_plan(shape: str = "qwen2-1.5b", device_bytes: int = H200, **values: object) -> MemoryPlan:
    settings = from_dict({name.replace("__", "."): value for name, value in values.items()})
    return plan_memory(settings, published(shape), kind="cuda", device_bytes=device_bytes)


def bytes_for(plan: MemoryPlan, purpose: str, process: str = "trainer") -> int:
    return sum(use.num_bytes for use in plan.uses if (use.purpose, use.process) == (purpose, process))


# Most that was allocated in forward and backward on an H200: bf16 over float32, prompts once a group, moments on the
# host.
@pytest.mark.parametrize(
    ("shape", "row_tokens", "peak_gb", "apart"),
    # The second was seen before slopes were kept.
    [("qwen2-1.5b", 12051, 38.9, ()), ("qwen2-7b", 7692, 104.1, ("slopes of logits",))],
)
def test_a_trainer_takes_what_it_was_seen_to_take(shape, row_tokens, peak_gb, apart):
    # The trainer was alone, so there is room for whatever else the plan counts.
    plan = gpu_plan(shape, 3 * H200, trainer__row_tokens=row_tokens, trainer__offload="moments")
    apart = ("published weights", "between blocks", "process", *apart)
    on_gpu = total(plan.uses, process="trainer", place="GPU 0")
    allocated = on_gpu - sum(bytes_for(plan, purpose) for purpose in apart)
    assert plan.layers_recomputed == 0
    assert allocated / 1e9 == pytest.approx(peak_gb, rel=0.03)


# Memory in use on the GPU in `headrace bench step --offload moments`, whose own process has a context there too.
def test_a_whole_run_takes_what_it_was_seen_to_take():
    plan = gpu_plan(trainer__row_tokens=8718, trainer__offload="moments", engine__kv_tokens=294_912)
    in_use = total(plan.uses, place="GPU 0") + CONTEXT_BYTES
    assert in_use / 1e9 == pytest.approx(51.9, rel=0.05)


def test_moments_lie_where_they_are_put():
    def moments(offload: str) -> tuple[int, int]:
        uses = [u for u in gpu_plan(trainer__offload=offload).uses if u.purpose == "moments"]
        return tuple(sum(u.num_bytes for u in uses if u.place == place) for place in ("GPU 0", HOST))

    num = published("qwen2-1.5b").num_weights
    assert moments("none") == (8 * num, 0)
    assert moments("first_moments") == (4 * num, 4 * num)
    assert moments("moments") == (0, 8 * num)


def test_where_memory_is_short_layers_are_recomputed_until_it_fits():
    roomy, tight = (
        gpu_plan(device_bytes=size, trainer__row_tokens=13077, engine__kv_tokens=16384)
        for size in (H200, 45_000_000_000)
    )
    assert roomy.layers_recomputed == 0
    assert 0 < tight.layers_recomputed < 28
    assert bytes_for(tight, "activations") < bytes_for(roomy, "activations")
    assert not tight.crowded


def test_the_longest_sequence_is_the_longest_that_fits():
    settings, model, size = from_dict({"engine.kv_tokens": 16384}), published("qwen2-1.5b"), 40_000_000_000
    longest = longest_sequence(settings, model, kind="cuda", device_bytes=size)
    assert 1000 < longest < model.context_tokens
    crowded = [
        gpu_plan(
            device_bytes=size, trainer__row_tokens=n, rollout__max_tokens=1, engine__kv_tokens=16384
        ).crowded
        for n in (longest, longest + 1)
    ]
    assert crowded == [[], ["GPU 0"]]
    assert longest_sequence(settings, model, kind="cuda", device_bytes=H200) == model.context_tokens


def test_a_plan_that_does_not_fit_names_settings_with_which_it_does():
    plan = gpu_plan("qwen2-7b", 100_000_000_000)
    assert plan.crowded == ["GPU 0"]
    settings = from_dict({})
    found = remedies(settings, published("qwen2-7b"), plan, kind="cuda")
    assert "trainer.offload=all" in found
    moved = gpu_plan("qwen2-7b", 100_000_000_000, trainer__offload="all")
    assert not moved.crowded
    assert total(moved.uses, place=HOST) == 16 * published("qwen2-7b").num_weights


def test_ranks_divide_what_is_trained_and_only_the_first_publishes():
    plan = gpu_plan("qwen2-7b", trainer__ranks=4)
    whole = 8 * published("qwen2-7b").num_weights
    assert bytes_for(plan, "moments", "trainer-0") == pytest.approx(whole / 4, rel=1e-6)
    assert plan.places == ["GPU 0", "GPU 1", "GPU 2", "GPU 3"]
    assert bytes_for(plan, "published weights", "trainer-0") and not bytes_for(
        plan, "published weights", "trainer-1"
    )


def test_an_engine_told_nothing_stays_within_its_share():
    plan = gpu_plan(engine__memory_share=0.3)
    engine = total(plan.uses, process="engine-0") - CONTEXT_BYTES
    assert engine < 0.3 * H200 < engine + 1.1 * 2**30  # what it leaves alone, and one block
    assert plan.kv_tokens > 500_000


def test_a_reference_in_the_trainer_is_a_copy_of_the_weights():
    plan = gpu_plan(algo__kl_coef=0.1)
    assert bytes_for(plan, "reference") == 2 * published("qwen2-1.5b").num_weights


def test_a_reference_of_its_own_is_one_more_process():
    plan = gpu_plan(algo__kl_coef=0.1, algo__options={"kl.reference": "engine"})
    assert plan.processes == ["engine-0", "reference", "trainer"]
    assert bytes_for(plan, "reference") == 0
    assert bytes_for(plan, "keys and values", "reference") < 0.02 * bytes_for(
        plan, "keys and values", "engine-0"
    )


def test_processes_that_share_a_column_are_named():
    several = {"big": "snapshot:1"}
    plan = gpu_plan(algo__kl_coef=0.1, algo__options={"kl.reference": "engine"}, distill__teachers=several)
    headings = [str(column.header) for column in table(plan).columns[1:]]
    assert headings == ["engine-0\nGPU 0", "reference, teacher-big\nGPU 0", "trainer\nGPU 0"]
    ranks = gpu_plan(engine__count=3)
    assert str(table(ranks).columns[1].header) == "engine-0 to 2\nGPU 0"


def test_teachers_are_processes_and_a_snapshot_keeps_bundles(tmp_path):
    make_tiny_model(tmp_path, vocab_size=64)
    plan = gpu_plan(distill__teachers={"tiny": str(tmp_path), "snapshot": "snapshot:3"})
    assert plan.processes == ["engine-0", "teacher-tiny", "teacher-snapshot", "trainer"]
    weights = 2 * published("qwen2-1.5b").num_weights
    assert bytes_for(plan, "weights, computed with", "teacher-snapshot") == weights
    assert 0 < bytes_for(plan, "weights, computed with", "teacher-tiny") < 0.01 * weights
    assert bytes_for(plan, "published weights", "trainer") == (1 + 3) * weights


@pytest.mark.parametrize(
    ("family", "targets"),
    [("llama", ("all-linear",)), ("qwen2", ("q_proj", "down_proj")), ("qwen3_moe", ("q_proj", "experts"))],
)
def test_of_an_adapter_only_its_own_weights_are_trained_and_published(tmp_path, family, targets):
    pytest.importorskip("peft")
    real = make_tiny_model(tmp_path, family=family, vocab_size=48)
    settings = from_dict({"lora.rank": 4, "lora.targets": targets, "algo.kl_coef": 0.1})
    model = examine(real.config, torch.bfloat16, build.lora(settings))
    trained = AdapterWeights(real, torch.float32, build.lora(settings)).model
    num = sum(parameter.numel() for parameter in trained.parameters())
    assert model.num_adapter_weights == num
    plan = plan_memory(settings, model, kind="cuda", device_bytes=H200)
    assert bytes_for(plan, "moments") == 8 * num
    assert bytes_for(plan, "published weights") == 2 * num
    assert bytes_for(plan, "weights, computed with") == 2 * (model.num_weights + num)
    assert bytes_for(plan, "reference") == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_counted_without_its_weights(tmp_path, family):
    real = make_tiny_model(tmp_path, family=family, vocab_size=48)
    model = examine(AutoConfig.from_pretrained(tmp_path), torch.float32)
    assert model.num_weights == sum(parameter.numel() for parameter in real.parameters())
    assert (model.vocab_size, model.hidden_size, model.num_layers) == (48, 64, 2)
    assert 0 < model.compiled.layers < model.eager.layers


def test_compiled_layers_keep_what_only_products_and_attention_give():
    """Qwen2: the running sum in float32 before and behind attention, queries, keys, values, attention's result, and
    the two halves of the gated layer."""
    hidden, wide, heads, kv_width = 1536, 8960, 12, 256
    layer = 2 * 4 * hidden + 2 * (2 * hidden + 2 * kv_width + 2 * wide) + 4 * heads
    assert published("qwen2-1.5b").compiled.layers == 28 * layer


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [(torch.float32, None), (torch.bfloat16, LoraSpec(rank=2, alpha=4.0, targets=("down_proj",)))],
    ids=["float32", "adapter"],
)
def test_gated_layers_that_compute_as_their_class_are_counted_as_it(tmp_path, monkeypatch, dtype, lora):
    make_tiny_model(tmp_path, family="qwen2", vocab_size=48)
    config = AutoConfig.from_pretrained(tmp_path)
    found = examine(config, dtype, lora)
    monkeypatch.setattr(float_residual, "is_gated", lambda _: False)
    assert found == examine(config, dtype, lora)


def test_a_gated_layer_keeps_less_uncompiled_and_the_same_compiled(tmp_path, monkeypatch):
    make_tiny_model(tmp_path, family="qwen2", vocab_size=48)
    config = AutoConfig.from_pretrained(tmp_path)
    found = examine(config, torch.bfloat16)
    monkeypatch.setattr(float_residual, "is_gated", lambda _: False)
    own = examine(config, torch.bfloat16)
    assert found.eager.layers < own.eager.layers
    assert (found.compiled, found.pass_bytes) == (own.compiled, own.pass_bytes)


@pytest.mark.parametrize(
    ("on_gpu", "offload"), [(False, "none"), (True, "none"), (True, "first_moments"), (True, "moments")]
)
def test_plan_and_trainer_reserve_the_same_for_a_step(on_gpu, offload):
    model = examine(shape_config("qwen2-0.5b"), torch.float32)
    asked = TrainerPlan(
        dtype=torch.float32, on_gpu=on_gpu, compiled=False, ranks=1, offload=offload, row_tokens=512,
        with_reference=False,
    )  # fmt: skip
    planned = trainer_bytes(model, asked, room=H200, device_bytes=H200).device
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(shape_config("qwen2-0.5b"), dtype=torch.float32)
    step = bytes_of_a_step(
        real, real.get_output_embeddings().weight, torch.optim.AdamW(real.parameters()),
        num_tokens=512, dtype=torch.float32, on_gpu=on_gpu, host_moments=HOST_MOMENTS.get(offload, ()),
    )  # fmt: skip
    moments = planned.get("moments", 0)
    assert moments == 4 * real.num_parameters() * (2 - len(HOST_MOMENTS.get(offload, ())))
    assert step == planned["gradients"] + moments + planned["head and logits"]


def test_the_command_prints_a_table_and_writes_the_figures(tmp_path):
    make_tiny_model(tmp_path / "model", vocab_size=48)
    figures = tmp_path / "plan.json"
    asked = ["plan", "memory", "--set", f"model.path={tmp_path / 'model'}", "--json", str(figures)]
    done = CliRunner().invoke(app, [*asked, "--set", "model.device=cpu"])
    assert done.exit_code == 0, done.output
    assert "keys and values" in done.output and "it fits" in done.output
    written = json.loads(figures.read_text())
    assert written["fits"] and set(written["devices"]) == {HOST}
    assert sum(process["total"] for process in written["processes"]) == written["devices"][HOST]


def test_the_command_fails_where_it_does_not_fit():
    done = CliRunner().invoke(app, ["plan", "memory", "--shape", "qwen2-7b", "--device-memory", "24"])
    assert done.exit_code == 1
    assert "GPU 0 is too small" in done.output


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("row_tokens", [1024, 2048])
def test_a_trainer_on_a_cpu_takes_what_the_plan_says(tmp_path, row_tokens):
    config = LlamaConfig(
        vocab_size=16384, hidden_size=768, intermediate_size=2048, num_hidden_layers=6, num_attention_heads=12,
        tie_word_embeddings=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = examine(config, torch.float32)
    asked = TrainerPlan(
        dtype=torch.float32, on_gpu=False, compiled=False, ranks=1, offload="none", row_tokens=row_tokens,
        with_reference=False,
    )  # fmt: skip
    planned = sum(trainer_bytes(model, asked, room=H200, device_bytes=H200).device.values())
    program = Path(__file__).parents[2] / "integration" / "memory_program.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), str(row_tokens)],
        # Freed memory goes back at once, so that what is resident is what is held.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert int(done.stdout.split()[-1]) == pytest.approx(planned, rel=0.1)


@pytest.mark.parametrize(("shape", "held"), [("qwen2-1.5b", True), ("qwen2-7b", False)])
def test_ranks_divide_the_frozen_model_and_its_adapter(shape, held):
    """Where the GPU is small, a layer and the next one are whole, and gradients of one layer's adapter."""
    settings = from_dict({"lora.rank": 16, "trainer.ranks": 4, "algo.kl_coef": 0.1})
    model = examine(shape_config(shape), torch.bfloat16, LoraSpec(rank=16, alpha=32.0))
    num, own = model.num_weights, model.num_adapter_weights
    plan = plan_memory(settings, model, kind="cuda", device_bytes=24 * 10**9)
    for rank in range(4):
        process = f"trainer-{rank}"
        assert bytes_for(plan, "weights, computed with", process) == pytest.approx(2 * num / 4, abs=4)
        assert bytes_for(plan, "moments", process) == pytest.approx(8 * own / 4, abs=8)
        assert bytes_for(plan, "reference", process) == 0
        gathered = bytes_for(plan, "weights, gathered", process)
        layers = 2 * (2 * model.num_layer_weights + model.num_outside_weights)
        assert gathered == (2 * num + 6 * own if held else pytest.approx(layers, rel=0.05))
    assert bytes_for(plan, "published weights", "trainer-0") == 2 * own


def test_an_adapter_leaves_the_model_without_masters_gradients_and_moments():
    settings = from_dict({"lora.rank": 16, "model.device": "cuda"})
    model = examine(shape_config("qwen2-1.5b"), torch.bfloat16, LoraSpec(rank=16, alpha=32.0))
    # Seven projections in each of 28 layers, a row and a column for each of 16 ranks.
    assert model.num_adapter_weights == 28 * 16 * (3072 + 2 * 1792 + 3072 + 3 * 10496)
    plan = plan_memory(settings, model, kind="cuda", device_bytes=H200)
    assert bytes_for(plan, "moments") == 8 * model.num_adapter_weights
    assert bytes_for(plan, "weights, computed with") == 2 * (model.num_weights + model.num_adapter_weights)
    assert bytes_for(plan, "published weights") == 2 * model.num_adapter_weights


def test_weights_that_do_not_fit_into_shared_memory_are_planned_as_they_travel(monkeypatch):
    """By files, as the run will send them: none of a published version is held."""
    settings = from_dict({"model.device": "cpu"})
    for free, is_held in ((10**12, True), (64 << 20, False)):
        usage = type("Usage", (), {"free": free})()
        monkeypatch.setattr(build.shutil, "disk_usage", lambda path, usage=usage: usage)
        plan = plan_memory(settings, published("qwen2-1.5b"), kind="cpu", device_bytes=H200)
        assert bool(bytes_for(plan, "published weights")) == is_held


def test_gpus_that_need_the_same_share_a_line():
    asked = ["plan", "memory", "--shape", "qwen2-7b", "--device-memory", "80", "--set", "trainer.ranks=8"]
    done = CliRunner().invoke(app, asked)
    needed = [line for line in done.output.splitlines() if line.startswith("GPU ") and " of 80.00 GB" in line]
    assert [line.split(":")[0] for line in needed] == ["GPU 0", "GPU 1 to 7"]
    assert needed[1].endswith("each")
