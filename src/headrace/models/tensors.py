"""A model's weights as named raw bytes, and back.

In and out: ``TensorBlob`` under the model's own parameter names (those of its checkpoint, save that fused
experts stay fused; ``checkpoint_names`` takes them apart). Tensors that share memory, as tied embeddings do,
travel once. ``load_blobs`` checks every update before it touches anything, then copies in place, so addresses
held elsewhere stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob, TensorPatch

Update = TensorBlob | TensorPatch

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


def to_blobs(model: torch.nn.Module) -> Iterator[TensorBlob]:
    """Every distinct tensor of the model, where it is; the bytes are the model's own memory, not a copy."""
    return blobs_of(named_tensors(model))


def blobs_of(tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorBlob]:
    """As ``to_blobs`` for tensors that were named before."""
    for name, tensor in tensors.items():
        yield to_blob(name, tensor)


def to_blob(name: str, tensor: torch.Tensor) -> TensorBlob:
    """A tensor's own memory under a name."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    data = raw.numpy() if raw.device.type == "cpu" else raw
    return TensorBlob(name=name, dtype=_DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def load_blobs(model: torch.nn.Module, updates: Iterable[Update]) -> None:
    """Replace all of the model's tensors, or change elements of them. Raises WeightSyncError, with nothing
    changed, unless the updates are for exactly the model's tensors."""
    load_into(named_tensors(model), updates)


def copy_on_device(targets: Mapping[str, torch.Tensor], blobs: Sequence[TensorBlob]) -> None:
    """Launches copies of what is in GPU memory already."""
    torch._foreach_copy_([targets[blob.name] for blob in blobs], [_tensor(targets, blob) for blob in blobs])


def load_into(
    targets: Mapping[str, torch.Tensor],
    updates: Iterable[Update],
    *,
    on_device: Callable[[Mapping[str, torch.Tensor], Sequence[TensorBlob]], None] = copy_on_device,
) -> None:
    """As ``load_blobs`` for tensors that were named before; from GPU memory, which is copied by ``on_device``,
    nothing here waits."""
    arrived = list(updates)
    _check(targets, arrived)
    blobs = [update for update in arrived if isinstance(update, TensorBlob)]
    there = [blob for blob in blobs if isinstance(blob.data, torch.Tensor)]
    with torch.no_grad():
        if there:
            on_device(targets, there)
        for blob in blobs:
            if not isinstance(blob.data, torch.Tensor):
                _copy_into(targets[blob.name], blob.data)
        for update in arrived:
            if isinstance(update, TensorPatch) and len(update.places):
                _patch(targets[update.name], update)


def dtype_name(dtype: torch.dtype) -> str:
    """As blobs spell it."""
    return _DTYPE_NAMES[dtype]


def as_tensor(blob: TensorBlob) -> torch.Tensor:
    """What the blob stands for, where its bytes are; bytes of this process's memory are copied."""
    data = blob.data
    raw = data if isinstance(data, torch.Tensor) else torch.from_numpy(np.array(data, dtype=np.uint8))
    return raw.view(_DTYPES[blob.dtype]).view(blob.shape)


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and saved buffers by name, each piece of memory once."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor
    return tensors


def tensor_bytes(model: torch.nn.Module, dtype: str) -> list[int]:
    """The length of every tensor of the model, floating ones in ``dtype``."""
    return [
        tensor.numel() * (getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype).itemsize
        for tensor in named_tensors(model).values()
    ]


def _tensor(targets: Mapping[str, torch.Tensor], blob: TensorBlob) -> torch.Tensor:
    """The blob's bytes on its device, seen as what they stand for."""
    target = targets[blob.name]
    raw: torch.Tensor = blob.data
    return raw.view(target.dtype).view(target.shape)


def _check(targets: Mapping[str, torch.Tensor], updates: list[Update]) -> None:
    names = [update.name for update in updates]
    missing, unknown = sorted(targets.keys() - set(names)), sorted(set(names) - targets.keys())
    if missing or unknown or len(names) != len(set(names)):
        raise WeightSyncError(
            f"the update does not match the model (missing {missing[:3]}, unknown {unknown[:3]}, "
            f"{len(names)} tensors for {len(targets)}); sender and engine must load the same model."
        )
    for update in updates:
        target = targets[update.name]
        expected = (_DTYPE_NAMES[target.dtype], tuple(target.shape), target.numel() * target.element_size())
        # Where a patch may write was checked when it was made.
        num_bytes = update.data.nbytes if isinstance(update, TensorBlob) else expected[2]
        if (update.dtype, tuple(update.shape), num_bytes) != expected:
            raise WeightSyncError(
                f"tensor {update.name!r} arrived as {update.dtype} {tuple(update.shape)} ({num_bytes} bytes) "
                f"for {expected[0]} {expected[1]} ({expected[2]} bytes); sender and engine must agree on both."
            )


def _patch(target: torch.Tensor, patch: TensorPatch) -> None:
    places, bits = patch.places, patch.bits
    if isinstance(places, np.ndarray):
        places = torch.from_numpy(places).to(target.device)
        bits = torch.from_numpy(bits.view(f"i{bits.itemsize}")).to(target.device)
    flat = target.detach().view(-1) if target.is_contiguous() else target.detach().reshape(-1)
    flat.view(bits.dtype)[places] = bits
    if not target.is_contiguous():
        target.detach().copy_(flat.view(target.shape))


def _copy_into(target: torch.Tensor, data: np.ndarray) -> None:
    if target.device.type == "cpu" and target.is_contiguous():
        np.copyto(target.detach().reshape(-1).view(torch.uint8).numpy(), data.view(np.uint8).reshape(-1))
        return
    raw = torch.from_numpy(np.array(data, dtype=np.uint8))
    target.detach().copy_(raw.view(target.dtype).reshape(target.shape))
