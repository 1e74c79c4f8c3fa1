"""Distillation on a GPU: the teacher's entries, the head at given ids, and a whole run, against float32 on the CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from test_engine_gpu import TOLERANCE, VOCAB, build, on_gpu, tiny

import headrace
from headrace import demo
from headrace.data.char_tokenizer import make_char_tokenizer
from headrace.models.loading import make_tiny_model
from headrace.trainers.whole_head import HeadLogprobs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_entries_are_those_of_the_plain_engine(tmp_path, dtype):
    model = tiny(tmp_path)
    texts = [np.random.default_rng(n).integers(0, VOCAB, n) for n in (2, 40, 300)]
    right = build(model).score_top(texts, VOCAB, 0.8)
    found = build(on_gpu(model, dtype), prefill_tokens=128).score_top(texts, 8, 0.8)
    for a, b in zip(found, right, strict=True):
        assert a.top_ids.shape == (len(a.logprobs), 8) and np.isneginf(a.top_logprobs[0]).all()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=TOLERANCE[dtype])
        # Near ties may be told in another order, so entries are compared by their ids.
        for t in range(1, len(a.logprobs)):
            by_id = dict(zip(b.top_ids[t].tolist(), b.top_logprobs[t].tolist(), strict=True))
            expected = [by_id[i] for i in a.top_ids[t].tolist()]
            np.testing.assert_allclose(a.top_logprobs[t], expected, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_head_at_given_ids(softcap):
    hidden_NH, weight_VH = (torch.randn(n, 64, device="cuda").to(torch.bfloat16) for n in (300, 5000))
    hidden_NH, weight_VH = hidden_NH.requires_grad_(), weight_VH.requires_grad_()
    ids_NA = torch.randint(0, 5000, (300, 17), device="cuda")
    temperatures_N = torch.rand(300, device="cuda") + 0.5
    weights_NA = torch.randn(300, 17, device="cuda")
    found_NA, entropy_N = HeadLogprobs.apply(
        hidden_NH, weight_VH, None, ids_NA, temperatures_N, softcap, 128, None
    )
    wide = [x.detach().double().requires_grad_() for x in (hidden_NH, weight_VH)]
    logits_NV = wide[0] @ wide[1].T
    logits_NV = logits_NV if softcap is None else torch.tanh(logits_NV / softcap) * softcap
    full_NV = (logits_NV / temperatures_N[:, None].double()).log_softmax(-1)
    torch.testing.assert_close(found_NA.double(), full_NV.gather(1, ids_NA), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(
        entropy_N.double(), -(full_NV.exp() * full_NV).sum(-1).detach(), atol=1e-3, rtol=1e-3
    )
    grads = torch.autograd.grad((found_NA * weights_NA).sum(), (hidden_NH, weight_VH))
    rights = torch.autograd.grad((full_NV.gather(1, ids_NA) * weights_NA).sum(), wide)
    for grad, right in zip(grads, rights, strict=True):
        assert float((grad.double() - right).norm() / right.norm()) < 2e-2


def test_a_large_vocabulary_is_never_held_whole():
    num_tokens, vocab_size, chunk = 8192, 151_936, 1024
    hidden_NH = torch.randn(num_tokens, 64, device="cuda").to(torch.bfloat16).requires_grad_()
    weight_VH = torch.randn(vocab_size, 64, device="cuda").to(torch.bfloat16).requires_grad_()
    ids_NA = torch.randint(0, vocab_size, (num_tokens, 17), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found_NA, _ = HeadLogprobs.apply(
        hidden_NH, weight_VH, None, ids_NA, torch.ones(num_tokens, device="cuda"), None, chunk, None
    )
    found_NA.sum().backward()
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 0.6 * num_tokens * vocab_size * 4


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_whole_run_with_a_teacher_and_a_snapshot(tmp_path, monkeypatch, launcher):
    monkeypatch.chdir(tmp_path)
    prepared = demo.prepare(tmp_path, warm_steps=0)
    size = make_char_tokenizer(tmp_path / "teacher", demo.LETTERS + ">")
    make_tiny_model(
        tmp_path / "teacher", vocab_size=size, hidden_size=128, init_std=0.3, context_tokens=64, seed=5
    )
    tasks = [{**row, "teacher": ("wise", "snapshot")[i % 2]} for i, row in enumerate(demo.tasks(64))]
    settings = {
        **prepared,
        "run.steps": 6,
        "run.launcher": launcher,
        "run.console": "off",
        "model.device": "cuda",
        "model.eager": True,
        "engine.kv_tokens": 4096,
        "engine.max_running": 16,
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "distill.teachers": {"wise": str(tmp_path / "teacher"), "snapshot": "snapshot:2"},
        "distill.divergence": "forward",
        "distill.top_k": 4,
    }
    result = headrace.train(tasks=tasks, reward=[], settings=settings)
    events = [json.loads(line) for line in (result.run_dir / "events.jsonl").read_text().splitlines()]
    (end,) = [event for event in events if event["event"] == "run.end"]
    versions = {role["role"]: role["version"] for role in end["roles"]}
    assert versions["teacher-snapshot"] == 6 - 2 and versions["engine-0"] == 6
    steps = [event["metrics"] for event in events if event["event"] == "step"]
    assert len(steps) == 6 and all(step["teacher_divergence"] >= 0 for step in steps)
