"""What the tests of weight updates share: a tiny model whose weights are known for every version, an engine on
it, and digests of what either computes with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.engines.driver import EngineDriver
from headrace.engines.make import torch_engine
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.lora import LoraSpec
from headrace.models.tensors import named_tensors, to_blobs
from headrace.protocols import WeightSender
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.trainers.adapter_weights import AdapterWeights
from headrace.trainers.agreement import trainer_logprobs
from headrace.types import Request, Sampling, TensorBlob, TensorSlot, WeightManifest
from headrace.weights.bundle import digest, on_host
from headrace.weights.shared_memory import HEADER_BYTES
from headrace.weights.transports import Route, TransportReceiver, weight_sender

VOCAB = 61
LORA = LoraSpec(rank=4, alpha=8.0, policy="solver")
EXPERT_LORA = replace(LORA, targets=("all-linear", "experts"))


@dataclass(frozen=True)
class Way:
    """A transport, and where the weights are at its ends."""

    transport: str
    trainer: str = "cpu"
    engine: str = "cpu"
    num_engines: int = 2

    def entered(self) -> AbstractContextManager[object]:
        """What is launched without a word about the device is the engine's, as in a process of its own."""
        return current(self.engine)


def current(device: str) -> AbstractContextManager[object]:
    """The device that is meant where none is named."""
    return nullcontext() if device == "cpu" else torch.cuda.device(device)


WAYS = {
    "shared_memory": Way("shared_memory"),
    "files": Way("files"),
    "collective": Way("collective"),
    "cuda_ipc": Way("cuda_ipc", "cuda", "cuda"),
    "shared_memory-one_gpu": Way("shared_memory", "cuda", "cuda"),
    "files-one_gpu": Way("files", "cuda", "cuda"),
    "collective-one_gpu": Way("collective", "cuda", "cuda"),
    "cuda_ipc-two_gpus": Way("cuda_ipc", "cuda:0", "cuda:1"),
    # Every member of a group needs a GPU of its own.
    "nccl": Way("collective", "cuda:0", "cuda:1", num_engines=1),
}


def write_checkpoint(directory: Path, **settings) -> Path:
    make_tiny_model(
        directory, vocab_size=VOCAB, hidden_size=32, init_std=0.12, context_tokens=256, seed=0, **settings
    )
    return directory


def weights_of_version(model: PreTrainedModel, version: int) -> None:
    """Move a model's weights from one version to the next: few of them, and other ones each time."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for tensor in named_tensors(model).values():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.02
            change = torch.randn(tensor.shape, generator=generator) * 0.05
            tensor.add_((chosen * change).to(tensor.device, tensor.dtype))


def digest_of(blobs: Iterable[TensorBlob]) -> str:
    """Of the tensors themselves, read where they are computed with."""
    tensors = list(blobs)
    return digest(0, tensors, on_host(tensors))


class Publisher:
    """A trainer that only moves on and publishes."""

    def __init__(self, checkpoint: Path, sender: WeightSender | None, *, device: str = "cpu") -> None:
        dtype = "float32" if device == "cpu" else "bfloat16"
        self.model = load_model(checkpoint, dtype=dtype, device=device)
        self.sender = sender
        self.device = device
        self.version = 0
        self.digests = {0: digest_of(to_blobs(self.model))}

    def advance(self, version: int) -> None:
        while self.version < version:
            self.version += 1
            weights_of_version(self.model, self.version)
            self.digests[self.version] = digest_of(to_blobs(self.model))

    async def publish(self, version: int) -> WeightManifest:
        self.advance(version)
        with current(self.device):
            return self.sender.send(version, to_blobs(self.model))

    async def publish_whole(self) -> WeightManifest:
        with current(self.device):
            return self.sender.send(self.version, to_blobs(self.model), kind="full")

    async def retire(self, version: int) -> None:
        self.sender.retire(version)

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return trainer_logprobs(self.model, token_ids, temperature=1.0)


class AdapterPublisher(Publisher):
    """The same for an adapter of the model, which itself stays as it is."""

    def __init__(
        self, checkpoint: Path, sender: WeightSender | None, *, device: str = "cpu", lora: LoraSpec = LORA
    ) -> None:
        dtype = "float32" if device == "cpu" else "bfloat16"
        model = load_model(checkpoint, dtype=dtype, device=device)
        self.adapter = AdapterWeights(model, getattr(torch, dtype), lora)
        self.model, self.sender, self.device, self.version = model, sender, device, 0
        self.digests = {0: digest_of(self.adapter.blobs())}

    def advance(self, version: int) -> None:
        while self.version < version:
            self.version += 1
            for _ in range(5):
                weights_of_version(self.adapter.model, self.version)
            self.adapter.refresh()
            self.digests[self.version] = digest_of(self.adapter.blobs())

    async def publish(self, version: int) -> WeightManifest:
        self.advance(version)
        return await self.publish_whole()

    async def publish_whole(self) -> WeightManifest:
        with current(self.device):
            manifest = self.sender.send(self.version, self.adapter.blobs(), kind="adapter")
        return replace(manifest, policy=LORA.policy)


def publisher_of(
    bundle: str, checkpoint: Path, sender: WeightSender | None, *, device: str = "cpu"
) -> Publisher:
    return (AdapterPublisher if bundle == "adapter" else Publisher)(checkpoint, sender, device=device)


def make_engine(
    checkpoint: Path, name: str = "engine-0", *, device: str = "cpu", lora: LoraSpec | None = None
) -> EngineDriver:
    """An engine with nothing to serve before its first update."""
    ledger = TimeLedger(ENGINE_ACTIVITIES)
    dtype = "float32" if device == "cpu" else "bfloat16"
    model = load_model(checkpoint, dtype=dtype, device=device)
    core = torch_engine(
        model,
        ledger=ledger,
        version=-1,
        kv_tokens=1024,
        compiled=False,
        lora=lora,
    )
    receiver = TransportReceiver(place=model.device)
    return EngineDriver(core, receiver, ledger=ledger, name=name, threaded=True)


def sender_for(
    transport: str, bundle: str, place: Path, *, num_receivers: int = 1, deadline_s: float = 20.0
) -> WeightSender:
    route = Route(transport=transport, why="", bundle=bundle)
    return weight_sender(
        route,
        segments=place / "segments",
        folder=place / "folder",
        num_receivers=num_receivers,
        deadline_s=deadline_s,
    )


def request(name: str, *, max_tokens: int = 24, **settings) -> Request:
    prompt = np.random.default_rng(len(name)).integers(0, VOCAB, 9).astype(np.int32)
    return Request(id=name, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens), seed=3, **settings)


def _flip(path: Path, place: int) -> None:
    """Damage one byte of a file."""
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def _largest(manifest: WeightManifest) -> TensorSlot:
    return max(manifest.slots, key=lambda slot: slot.num_bytes)


def _damage_segment(sender: WeightSender, manifest: WeightManifest) -> None:
    _flip(Path(manifest.location), HEADER_BYTES + _largest(manifest).offset)


def _damage_files(sender: WeightSender, manifest: WeightManifest) -> None:
    path = sorted(Path(manifest.location).glob("*.safetensors"))[-1]
    _flip(path, path.stat().st_size - 1)


def _damage_offer(sender: WeightSender, manifest: WeightManifest) -> None:
    carrier = getattr(sender, "_carrier", sender)
    _, buckets = carrier._live[json.loads(manifest.location)["offer"]]
    place = _largest(manifest).offset
    for bucket in buckets:
        if 0 <= place < len(bucket):
            bucket[place] ^= 1
        place -= len(bucket)
    if buckets[0].is_cuda:
        torch.cuda.synchronize(buckets[0].device)


def _damage_gpu_memory(sender: WeightSender, manifest: WeightManifest) -> None:
    memory = sender._live[manifest.version][-1].bytes
    memory[_largest(manifest).offset] ^= 1
    torch.cuda.synchronize(memory.device)


DAMAGE: dict[str, Callable[[WeightSender, WeightManifest], None]] = {
    "shared_memory": _damage_segment,
    "files": _damage_files,
    "collective": _damage_offer,
    "cuda_ipc": _damage_gpu_memory,
}
