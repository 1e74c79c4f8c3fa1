"""Any carrier of ``types`` as bytes, for sockets and the journal: JSON for structure, safetensors for arrays.

In: a tree of dataclasses from ``types``, mappings, lists, tuples, scalars and numpy arrays. Out: one
byte string, and back. Arrays of one dtype are joined into one tensor, so a batch of thousands of
small arrays costs a handful of headers. Nothing is pickled and no class is looked up outside
``types``: a frame can only name what the data contract names.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from headrace import types

_TYPES = {
    name: value
    for name, value in vars(types).items()
    if dataclasses.is_dataclass(value) and isinstance(value, type)
}
_HEADER = struct.Struct("<I")


def encode(value: Any) -> bytes:
    """Bytes of ``value``; raises TypeError naming the path of anything the contract does not carry."""
    arrays: dict[str, list[np.ndarray]] = {}
    sizes: dict[str, int] = {}

    def array(a: np.ndarray) -> dict[str, Any]:
        key = a.dtype.name
        start = sizes.get(key, 0)
        arrays.setdefault(key, []).append(a.reshape(-1))
        sizes[key] = start + a.size
        return {"$a": [key, start, list(a.shape)]}

    def walk(v: Any, path: str) -> Any:
        if v is None or isinstance(v, (str, bool, int, float)):
            return v
        if isinstance(v, np.ndarray):
            return array(v)
        if isinstance(v, np.generic):
            return v.item()
        if isinstance(v, tuple):
            return {"$t": [walk(x, f"{path}[{i}]") for i, x in enumerate(v)]}
        if isinstance(v, list):
            return [walk(x, f"{path}[{i}]") for i, x in enumerate(v)]
        if type(v).__name__ in _TYPES and type(v) is _TYPES[type(v).__name__]:
            fields = [walk(getattr(v, n), f"{path}.{n}") for n in v.__dataclass_fields__]
            return {"$c": type(v).__name__, "f": fields}
        if isinstance(v, dict):
            return {"$d": [[walk(k, path), walk(x, f"{path}.{k}")] for k, x in v.items()]}
        raise TypeError(f"{path or 'value'}: {type(v).__name__} cannot cross a process boundary")

    head = json.dumps(walk(value, ""), separators=(",", ":")).encode()
    joined = {key: np.concatenate(parts) for key, parts in arrays.items()}
    return _HEADER.pack(len(head)) + head + (save(joined) if joined else b"")


def decode(frame: bytes | memoryview) -> Any:
    """The value behind ``encode``'s bytes. Arrays are read-only views where possible."""
    frame = bytes(frame)
    (length,) = _HEADER.unpack_from(frame)
    tree = json.loads(frame[4 : 4 + length])
    body = frame[4 + length :]
    joined = load(body) if body else {}

    def walk(v: Any) -> Any:
        if isinstance(v, list):
            return [walk(x) for x in v]
        if not isinstance(v, dict):
            return v
        if "$a" in v:
            key, start, shape = v["$a"]
            size = int(np.prod(shape, dtype=np.int64))
            return joined[key][start : start + size].reshape(shape)
        if "$t" in v:
            return tuple(walk(x) for x in v["$t"])
        if "$d" in v:
            return {walk(k): walk(x) for k, x in v["$d"]}
        cls = _TYPES[v["$c"]]
        return cls(**dict(zip(cls.__dataclass_fields__, map(walk, v["f"]), strict=True)))

    return walk(tree)
