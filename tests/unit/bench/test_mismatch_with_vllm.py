"""The peer's process without vLLM itself, which a stand-in with its interface takes the place of."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from headrace.bench import mismatch, peers
from headrace.bench import mismatch_with_vllm as peer_process
from headrace.bench.mismatch_with_vllm import Peer
from headrace.errors import ConfigError
from headrace.models.loading import load_model, make_tiny_model

PROMPTS = np.random.default_rng(0).integers(0, 40, (3, 6)).astype(np.int32)


def found() -> Peer:
    return Peer(
        token_ids_SL=np.arange(6, dtype=np.int32).reshape(3, 2),
        sampled_SL=np.linspace(-3, 0, 6, dtype=np.float32).reshape(3, 2),
        trained_SL={
            name: np.full((3, 2), -i, dtype=np.float32) for i, name in enumerate(peer_process.WEIGHTS)
        },
        about={"vllm": "0.25.1", "vllm_settings": peer_process.VLLM_SETTINGS},
    )


def assert_same(left: Peer, right: Peer) -> None:
    np.testing.assert_array_equal(left.token_ids_SL, right.token_ids_SL)
    np.testing.assert_array_equal(left.sampled_SL, right.sampled_SL)
    assert left.about == right.about and left.trained_SL.keys() == right.trained_SL.keys()
    for name, values in left.trained_SL.items():
        np.testing.assert_array_equal(values, right.trained_SL[name])


def test_what_the_process_found_travels_in_a_file(tmp_path: Path) -> None:
    peer_process.write(tmp_path / "found.npz", found())
    assert_same(peer_process.read(tmp_path / "found.npz"), found())


def test_the_process_is_told_its_prompts_and_its_answer_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def process(against, module, told, result, *, python, deadline_s):
        assert (against, module, python) == ("vllm", "headrace.bench.mismatch_with_vllm", None)
        assert told[0] == str(tmp_path) and told[2] == str(result) and deadline_s > 0
        with np.load(told[1]) as given:
            np.testing.assert_array_equal(given["prompts"], PROMPTS)
            assert int(given["num_tokens"]) == 2
        peer_process.write(result, found())

    monkeypatch.setattr(peers, "run", process)
    assert_same(peer_process.run(tmp_path, PROMPTS, 2), found())


def test_a_missing_package_is_named_before_a_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delattr(mismatch, "create_random_model")
    with pytest.raises(ConfigError, match="vllm is not installed; install the extras bench and vllm"):
        mismatch.run("qwen2-0.5b", against="vllm")


def test_vllm_is_set_up_as_trl_does_and_gives_the_sampled_tokens_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class LLM:
        def __init__(self, model, **settings):
            assert model == str(tmp_path)
            assert settings["logprobs_mode"] == "processed_logprobs" and settings["dtype"] == "bfloat16"
            assert (settings["max_model_len"], settings["max_num_seqs"]) == (8, 3)

        def generate(self, prompts, sampling, use_tqdm):
            assert sampling["max_tokens"] == 2 and sampling["logprobs"] == 0 and sampling["ignore_eos"]
            return [self.answer(prompt["prompt_token_ids"]) for prompt in prompts]

        def answer(self, ids):
            tokens = (ids[0], ids[1])
            values = (-float(ids[0]), math.nan)
            logprobs = [{t: SimpleNamespace(logprob=v)} for t, v in zip(tokens, values, strict=True)]
            return SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)])

    vllm = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, dict
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    tokens, logprobs = peer_process.sample(tmp_path, PROMPTS, 2)
    np.testing.assert_array_equal(tokens, PROMPTS[:, :2])
    np.testing.assert_array_equal(logprobs[:, 0], -PROMPTS[:, 0].astype(np.float32))
    assert np.isnan(logprobs[:, 1]).all()


@pytest.mark.parametrize("weights", peer_process.WEIGHTS)
def test_trl_gives_the_models_log_probabilities_rounded_as_bf16_autocast_rounds(
    tmp_path: Path, weights: str
) -> None:
    pytest.importorskip("trl")
    make_tiny_model(tmp_path, family="qwen2", vocab_size=40, init_std=0.2)
    model = load_model(tmp_path)
    tokens = np.random.default_rng(1).integers(0, 40, (3, 4)).astype(np.int32)
    trained = peer_process.trained_logprobs(tmp_path, PROMPTS, tokens, weights=weights, device="cpu")
    ids = torch.from_numpy(np.concatenate([PROMPTS, tokens], axis=1)).long()
    with torch.no_grad():
        expected = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    gaps = np.abs(trained - expected.numpy()[:, -4:])
    assert trained.dtype == np.float32 and 1e-4 < gaps.mean() < 0.1
