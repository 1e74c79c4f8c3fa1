from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.trainers.ranks import Ranks, join_ranks
from headrace.types import NO_KV, Sample, TensorBlob, TensorSlot, TrainBatch, WeightManifest

VOCAB_SIZE = 32


class MemorySender:
    """A weight transport that keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: dict[int, dict[str, TensorBlob]] = {}
        self.closed = False

    def send(self, version: int, blobs: Iterable[TensorBlob], *, kind: str | None = None) -> WeightManifest:
        kept = {}
        slots = []
        for blob in blobs:
            data = blob.data.copy()
            kept[blob.name] = TensorBlob(name=blob.name, dtype=blob.dtype, shape=blob.shape, data=data)
            slots.append(
                TensorSlot(
                    name=blob.name, dtype=blob.dtype, shape=blob.shape, offset=0, num_bytes=data.nbytes
                )
            )
        self.sent[version] = kept
        return WeightManifest(
            version=version,
            base_version=None,
            kind=kind or "full",
            transport="memory",
            location="",
            num_bytes=sum(slot.num_bytes for slot in slots),
            digest="",
            slots=tuple(slots),
        )

    def retire(self, version: int) -> None:
        del self.sent[version]

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def sender() -> MemorySender:
    return MemorySender()


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    def make(seed: int = 0, *, tied: bool = True, num_layers: int = 2) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.15,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def make_batch() -> Callable[..., TrainBatch]:
    """Batches of ragged samples whose behaviour log-probabilities lie near those of a random policy."""

    def make(step: int = 1, *, seed: int = 0, num_samples: int = 6, version: int | None = None) -> TrainBatch:
        rng = np.random.default_rng([seed, step])
        version = step - 1 if version is None else version
        samples = []
        for i in range(num_samples):
            prompt, sampled = int(rng.integers(1, 6)), int(rng.integers(1, 12))
            num_tokens = prompt + sampled
            loss_mask = np.arange(num_tokens) >= prompt
            ages = np.where(rng.random(num_tokens) < 0.5, version, max(version - 1, 0))
            samples.append(
                Sample(
                    group=i // 2,
                    attempt=i % 2,
                    token_ids=rng.integers(0, VOCAB_SIZE, num_tokens).astype(np.int32),
                    loss_mask=loss_mask,
                    behavior_logprobs=np.where(loss_mask, -rng.uniform(2.5, 4.5, num_tokens), 0).astype(
                        np.float32
                    ),
                    versions=np.where(loss_mask, ages, -1).astype(np.int32),
                    advantages=np.where(loss_mask, rng.normal(), 0).astype(np.float32),
                    temperature=float(rng.choice([0.7, 1.0])),
                    kv_versions=NO_KV,
                )
            )
        return TrainBatch(step=step, version=version, samples=tuple(samples))

    return make


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """A world of one: everything of several ranks but the others."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    joined = join_ranks(0, 1, device="cpu", meeting_point=tmp_path / "ranks", deadline_s=30.0)
    yield joined
    joined.close()
