"""Differences of weights: bit for bit, small, and only on the base they were made for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_shared_memory import as_bytes

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorPatch
from headrace.weights import device
from headrace.weights.bundle import chunk_sums
from headrace.weights.bundle_sender import DeltaSender
from headrace.weights.delta import decode, encode
from headrace.weights.shared_memory import SharedMemorySender
from headrace.weights.transports import TransportReceiver


def blob(data: np.ndarray, dtype: str = "BF16", name: str = "w") -> TensorBlob:
    raw = data.view(np.uint8)
    return TensorBlob(name=name, dtype=dtype, shape=(len(data),), data=raw)


def applied(old: np.ndarray, patch: TensorPatch) -> np.ndarray:
    data = old.copy()
    data.view(patch.bits.dtype)[patch.places] = patch.bits
    return data


def adam_weights(num: int, steps: int, *, seed: int = 0) -> list[np.ndarray]:
    """bf16 weights of sigma 0.02 under Adam at learning rate 1e-6, before and after each step."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.nn.Parameter(torch.randn(num, generator=generator) * 0.02)
    optimizer = torch.optim.AdamW([weights], lr=1e-6, weight_decay=0.0)
    versions = []
    for _ in range(steps + 1):
        versions.append(weights.detach().bfloat16().view(torch.int16).numpy().copy())
        weights.grad = torch.randn(num, generator=generator)
        optimizer.step()
    return versions


def test_twenty_adam_steps_take_at_most_seven_percent():
    versions = adam_weights(400_000, 20)
    before, after = blob(versions[0]), blob(versions[-1])
    found = encode(before.data, after)
    assert found.form == "sparse" and found.data.nbytes <= 0.07 * after.data.nbytes
    patch = decode(found, before.data)
    np.testing.assert_array_equal(applied(before.data, patch), after.data)
    np.testing.assert_array_equal(patch.places, np.flatnonzero(versions[0] != versions[-1]))
    single = encode(blob(versions[-2]).data, after)
    assert single.data.nbytes <= 0.02 * after.data.nbytes


@given(
    dtype=st.sampled_from([("U8", np.uint8), ("BF16", np.uint16), ("F32", np.uint32), ("F64", np.uint64)]),
    length=st.integers(1, 3000),
    share=st.sampled_from([0.0, 0.0005, 0.01, 0.2, 1.0]),
    spread=st.sampled_from([1, 2, 127, 128, 200, 2**40]),
    seed=st.integers(0, 10**6),
)
def test_any_difference_comes_back_bit_for_bit(dtype, length, share, spread, seed):
    name, unsigned = dtype
    rng = np.random.default_rng(seed)
    top = np.iinfo(unsigned).max
    old = rng.integers(0, top, length, dtype=unsigned, endpoint=True)
    steps = rng.integers(-spread, spread + 1, length).astype(np.int64).astype(unsigned)
    new = np.where(rng.random(length) < share, old + steps, old)
    found = encode(old.view(np.uint8), blob(new, name))
    assert found.data.nbytes <= new.nbytes
    if found.form == "dense":
        np.testing.assert_array_equal(found.data, new.view(np.uint8))
    else:
        patch = decode(found, old.view(np.uint8))
        np.testing.assert_array_equal(applied(old.view(np.uint8), patch), new.view(np.uint8))


def test_bits_are_compared_and_not_numbers():
    """Zero and minus zero are equal, and no number equals itself that is not one."""
    old = np.array([0.0, np.nan, 1.0] * 50, np.float32)
    new = old.copy()
    new[0] = -0.0
    found = encode(blob(old, "F32").data, blob(new, "F32"))
    patch = decode(found, blob(old, "F32").data)
    assert patch.places.tolist() == [0] and applied(old, patch).tobytes() == new.tobytes()


@pytest.mark.parametrize("harm", [lambda d: d[:-1], lambda d: d[:3], lambda d: np.append(d, d[:1])])
def test_malformed_bytes_are_refused(harm):
    versions = adam_weights(5000, 1)
    found = encode(blob(versions[0]).data, blob(versions[1]))
    with pytest.raises(WeightSyncError, match="'w' is malformed"):
        decode(replace(found, data=harm(found.data)), blob(versions[0]).data)
    with pytest.raises(WeightSyncError, match="past its end"):
        decode(found, blob(versions[0][:10]).data)


def test_device_code_finds_the_same():
    """The code for GPUs is torch code, which runs on a CPU too."""
    versions = adam_weights(700_001, 1)
    old, new = (torch.from_numpy(v.view(np.uint8)) for v in versions)
    on_host = encode(blob(versions[0]).data, blob(versions[1]))
    there = encode(old, replace(blob(versions[1]), data=new))
    assert there.data.tobytes() == on_host.data.tobytes()
    patch = decode(there, old)
    np.testing.assert_array_equal(patch.bits, decode(on_host, blob(versions[0]).data).bits)
    moved = device.uploaded(patch, old.device)
    assert torch.equal(device.patched(old, moved), new)
    np.testing.assert_array_equal(device.chunk_sums(new), chunk_sums([versions[1].view(np.uint8)])[0])


def several(values: np.ndarray) -> list[TensorBlob]:
    """Tensors that change little, not at all, wholly, and one that is empty."""
    rng = np.random.default_rng(int(values.astype(np.int64).sum()) % 2**32)
    return [
        blob(values, name="little"),
        blob(np.arange(50, dtype=np.uint16), name="same"),
        blob(rng.integers(0, 2**16, 40).astype(np.uint16), name="wholly"),
        blob(np.zeros(0, np.uint16), name="empty"),
    ]


@pytest.fixture
def sender(tmp_path):
    sender = DeltaSender(SharedMemorySender(tmp_path))
    yield sender
    sender.close()


def test_a_chain_of_deltas_leads_to_the_weights(sender):
    receiver = TransportReceiver()
    versions = adam_weights(2000, 4)
    have: dict[str, TensorBlob] = {}
    for version, values in enumerate(versions):
        manifest = sender.send(version, several(values))
        assert (manifest.kind, manifest.base_version) == (
            ("delta", version - 1) if version else ("full", None)
        )
        for update in receiver.receive(manifest, have.values()):
            if isinstance(update, TensorPatch):
                have[update.name] = replace(have[update.name], data=applied(have[update.name].data, update))
            else:
                have[update.name] = replace(update, data=update.data.copy())
        assert as_bytes(have.values()) == as_bytes(several(values))


def test_weights_that_change_wholly_travel_whole(sender):
    rng = np.random.default_rng(0)
    sender.send(0, [blob(rng.random(100, np.float32), "F32")])
    second = sender.send(1, [blob(rng.random(100, np.float32), "F32")])
    assert (second.kind, second.base_version) == ("full", None)


def test_all_weights_can_be_asked_for_without_moving_the_base(sender):
    versions = adam_weights(2000, 2)
    sender.send(0, several(versions[0]))
    whole = sender.send(1, several(versions[1]), kind="full")
    assert as_bytes(TransportReceiver().receive(whole)) == as_bytes(several(versions[1]))
    assert sender.send(1, several(versions[1])).base_version == 0


def test_another_base_of_the_same_version_is_noticed(sender):
    """What the engine would compute with is checked, not only what it says it has."""
    versions = adam_weights(2000, 1)
    sender.send(0, several(versions[0]))
    manifest = sender.send(1, several(versions[1]))
    wrong = several(versions[0])
    wrong[0].data[77] ^= 1
    with pytest.raises(WeightSyncError, match="does not lead from this engine's weights"):
        TransportReceiver().receive(manifest, wrong)
    with pytest.raises(WeightSyncError, match="the engine has 3"):
        TransportReceiver().receive(manifest, wrong[:-1])


def test_another_model_starts_anew(sender):
    sender.send(0, several(adam_weights(2000, 0)[0]))
    assert sender.send(1, several(adam_weights(2001, 0)[0])).kind == "full"


@pytest.mark.parametrize("last", [2, 1])
def test_fewer_tensors_or_more_are_no_delta(sender, last):
    tensors = several(adam_weights(2000, 0)[0])
    sender.send(0, tensors[:last])
    assert sender.send(1, tensors[: 3 - last]).kind == "full"


def test_a_base_that_was_half_written_is_nobodys_base(sender, monkeypatch):
    """A gather that fails on the way leaves tensors of two versions behind."""
    monkeypatch.setattr("headrace.weights.bundle_sender._BUCKET_BYTES", 1)
    versions = adam_weights(2000, 2)
    sender.send(0, several(versions[0]))

    def gathered():
        yield from several(versions[1])[:2]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        sender.send(1, gathered())
    whole = sender.send(1, several(versions[1]))
    assert whole.kind == "full"
    assert as_bytes(TransportReceiver().receive(whole)) == as_bytes(several(versions[1]))
    assert sender.send(2, several(versions[2])).base_version == 1
