"""A tiny model and short ways to build engines and requests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.engines.device_executor import DeviceExecutor
from headrace.engines.make import torch_engine
from headrace.engines.torch_engine import TorchEngine
from headrace.models.loading import load_model, make_tiny_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Completion, Request, Sampling

VOCAB = 61


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_model(directory, vocab_size=VOCAB, init_std=0.12, tie_embeddings=False, context_tokens=256)
    return directory


@pytest.fixture
def make_engine(tiny_checkpoint) -> Callable[..., TorchEngine]:
    def build(**settings):
        return torch_engine(load_model(tiny_checkpoint), ledger=TimeLedger(ENGINE_ACTIVITIES), **settings)

    return build


@pytest.fixture
def make_device_engine(tiny_checkpoint) -> Callable[..., TorchEngine]:
    """The device path on a CPU: uncompiled, with plain torch in place of kernels."""

    def build(checkpoint=tiny_checkpoint, **settings):
        given = {"max_running": 12, "block_size": 16, "kv_tokens": 2048, "prefill_tokens": 512, **settings}
        executor = DeviceExecutor(load_model(checkpoint), compiled=False, **given)
        return TorchEngine(
            executor, ledger=TimeLedger(ENGINE_ACTIVITIES), prefill_tokens=given["prefill_tokens"]
        )

    return build


@pytest.fixture
def make_request() -> Callable[..., Request]:
    def build(name, *, prompt=12, seed=None, prefix=None, **sampling):
        number = sum(map(ord, str(name)))
        ids = np.random.default_rng(number).integers(0, VOCAB, prompt) if isinstance(prompt, int) else prompt
        return Request(
            id=str(name),
            prompt_ids=np.asarray(ids, dtype=np.int32),
            sampling=Sampling(**{"max_tokens": 20, **sampling}),
            seed=number if seed is None else seed,
            prefix=prefix,
        )

    return build


@pytest.fixture
def run_engine() -> Callable[..., dict[str, Completion]]:
    def run(engine, *requests):
        for request in requests:
            engine.submit(request)
        done = {}
        while engine.has_work:
            done.update(engine.step())
        return done

    return run


@pytest.fixture
def same_bits() -> Callable[[Completion, Completion], bool]:
    def same(a, b):
        return np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.logprobs, b.logprobs)

    return same
