"""A model's weights as named raw bytes, and back.

In and out: ``TensorBlob`` under the model's own parameter names (those of its checkpoint, save that fused
experts stay fused). Tensors that share memory, as tied embeddings do, travel once. ``load_blobs`` checks
every blob before it touches anything, then copies in place, so addresses held elsewhere stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch

from headrace.errors import WeightSyncError
from headrace.types import TensorBlob

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
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        data = raw.numpy() if raw.device.type == "cpu" else raw
        yield TensorBlob(name=name, dtype=_DTYPE_NAMES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def load_blobs(model: torch.nn.Module, blobs: Iterable[TensorBlob]) -> None:
    """Replace all of the model's tensors. Raises WeightSyncError, with nothing changed, unless the blobs
    are exactly the model's tensors."""
    load_into(named_tensors(model), blobs)


def load_into(targets: Mapping[str, torch.Tensor], blobs: Iterable[TensorBlob]) -> None:
    """As ``load_blobs`` for tensors that were named before; from GPU memory nothing here waits."""
    arrived = list(blobs)
    _check(targets, arrived)
    on_device = [blob for blob in arrived if isinstance(blob.data, torch.Tensor)]
    with torch.no_grad():
        if on_device:
            torch._foreach_copy_(
                [targets[blob.name] for blob in on_device], [_tensor(targets, blob) for blob in on_device]
            )
        for blob in arrived:
            if not isinstance(blob.data, torch.Tensor):
                _copy_into(targets[blob.name], blob.data)


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


def dtype_name(dtype: torch.dtype) -> str:
    """As blobs spell it."""
    return _DTYPE_NAMES[dtype]


def as_tensor(blob: TensorBlob) -> torch.Tensor:
    """What the blob stands for, where its bytes are; bytes of this process's memory are copied."""
    data = blob.data
    raw = data if isinstance(data, torch.Tensor) else torch.from_numpy(np.array(data, dtype=np.uint8))
    return raw.view(_DTYPES[blob.dtype]).view(blob.shape)


def _tensor(targets: Mapping[str, torch.Tensor], blob: TensorBlob) -> torch.Tensor:
    """The blob's bytes on its device, seen as what they stand for."""
    target = targets[blob.name]
    raw: torch.Tensor = blob.data
    return raw.view(target.dtype).view(target.shape)


def _check(targets: Mapping[str, torch.Tensor], blobs: list[TensorBlob]) -> None:
    names = [blob.name for blob in blobs]
    missing, unknown = sorted(targets.keys() - set(names)), sorted(set(names) - targets.keys())
    if missing or unknown or len(names) != len(set(names)):
        raise WeightSyncError(
            f"the update does not match the model (missing {missing[:3]}, unknown {unknown[:3]}, "
            f"{len(names)} tensors for {len(targets)}); sender and engine must load the same model."
        )
    for blob in blobs:
        target = targets[blob.name]
        expected = (_DTYPE_NAMES[target.dtype], tuple(target.shape), target.numel() * target.element_size())
        if (blob.dtype, tuple(blob.shape), blob.data.nbytes) != expected:
            raise WeightSyncError(
                f"tensor {blob.name!r} arrived as {blob.dtype} {tuple(blob.shape)} ({blob.data.nbytes} bytes) "
                f"for {expected[0]} {expected[1]} ({expected[2]} bytes); sender and engine must agree on both."
            )


def _copy_into(target: torch.Tensor, data: np.ndarray) -> None:
    if target.device.type == "cpu" and target.is_contiguous():
        np.copyto(target.detach().reshape(-1).view(torch.uint8).numpy(), data.view(np.uint8).reshape(-1))
        return
    raw = torch.from_numpy(np.array(data, dtype=np.uint8))
    target.detach().copy_(raw.view(target.dtype).reshape(target.shape))
