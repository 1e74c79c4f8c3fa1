"""Any carrier of ``types`` as bytes, for sockets and the journal: JSON for structure, safetensors for arrays.

In: a tree of dataclasses from ``types``, mappings, lists, tuples, scalars and numpy arrays. Out: one
byte string, and back. Arrays of one dtype are joined into one tensor, so a batch of thousands of
small arrays costs a handful of headers. Nothing is pickled and no class is looked up outside
``types``: a frame can only name what the data contract names.

The controller encodes and decodes every attempt several times, on a core it shares: dispatch is by exact
type, and what can be known of a class is looked up once.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from headrace import types

_HEADER = struct.Struct("<I")
_TYPES: dict[str, type] = {
    name: value
    for name, value in vars(types).items()
    if dataclasses.is_dataclass(value) and isinstance(value, type)
}
_FIELDS = {cls: tuple(field.name for field in dataclasses.fields(cls)) for cls in _TYPES.values()}
_VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    cls: attrgetter(*names) for cls, names in _FIELDS.items()
}
_PLAIN = {type(None), str, bool, int, float}
_CODES = {
    np.dtype(name): code
    for code, name in {
        "i": "int32",
        "f": "float32",
        "b": "bool",
        "B": "uint8",
        "H": "uint16",
        "l": "int64",
        "h": "int16",
        "I": "uint32",
        "e": "float16",
        "L": "uint64",
        "c": "int8",
        "d": "float64",
    }.items()
}
"""A letter a dtype, which names its joined tensor."""
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(value: Any) -> bytes:
    """Bytes of ``value``; raises TypeError naming the path of anything the contract does not carry."""
    encoder = _Encoder()
    return _frame(encoder.tree(value), encoder)


def decode(frame: bytes | memoryview) -> Any:
    """The value behind ``encode``'s bytes. Arrays share the memory of one read-only buffer a dtype."""
    frame = bytes(frame)
    (length,) = _HEADER.unpack_from(frame)
    tree = json.loads(frame[4 : 4 + length])
    body = frame[4 + length :]
    return _decoded(tree, load(body) if body else {})


class FrameBuilder:
    """Several values in one frame, decoded as a list: the cost of a frame is paid once for all of them.

    A value that cannot be carried raises when it is added and leaves the others as they were. The arrays
    of what was added must not change before ``take``.
    """

    def __init__(self) -> None:
        self._encoder = _Encoder()
        self._trees: list[Any] = []

    def __len__(self) -> int:
        return len(self._trees)

    def add(self, value: Any) -> None:
        self._trees.append(self._encoder.tree(value))

    def take(self) -> bytes:
        """The frame of everything added since the last ``take``."""
        trees, encoder = self._trees, self._encoder
        self._trees, self._encoder = [], _Encoder()
        return _frame(trees, encoder)


def _frame(tree: Any, encoder: _Encoder) -> bytes:
    head = _to_json(tree).encode()
    return _HEADER.pack(len(head)) + head + encoder.body()


class _Encoder:
    """Turns values into JSON trees and collects their arrays, by dtype."""

    def __init__(self) -> None:
        self._parts: dict[str, list[np.ndarray]] = {}
        self._sizes: dict[str, int] = {}

    def tree(self, value: Any) -> Any:
        try:
            return self.walk(value)
        except _Unsupported as e:
            where = _path_of_fault(value) or "value"
            raise TypeError(f"{where}: {e} cannot cross a process boundary") from None

    def walk(self, v: Any) -> Any:
        kind = type(v)
        if kind in _PLAIN:
            return v
        if kind is np.ndarray:
            return self._array(v)
        values = _VALUES.get(kind)
        if values is not None:
            return {"$c": kind.__name__, "f": list(map(self.walk, values(v)))}
        if kind is tuple:
            return {"$t": list(map(self.walk, v))}
        if kind is list:
            return list(map(self.walk, v))
        if kind is dict:
            return {"$d": [[self.walk(k), self.walk(x)] for k, x in v.items()]}
        if isinstance(v, np.generic):
            return v.item()
        for plain in (str, int, float):
            # A subclass, such as an enumeration's member, travels as what it extends.
            if isinstance(v, plain):
                return str.__str__(v) if isinstance(v, str) else plain(v)
        raise _Unsupported(kind.__name__)

    def _array(self, a: np.ndarray) -> dict[str, Any]:
        code = _CODES.get(a.dtype)
        if code is None:
            raise _Unsupported(f"an array of {a.dtype}")
        start = self._sizes.get(code, 0)
        self._parts.setdefault(code, []).append(a.reshape(-1))
        self._sizes[code] = start + a.size
        return {"$a": [code, start, *a.shape]}

    def body(self) -> bytes:
        joined = {code: np.concatenate(parts) for code, parts in self._parts.items()}
        return save(joined) if joined else b""


class _Unsupported(Exception):
    """Something the contract does not carry; ``encode`` finds out where."""


def _path_of_fault(v: Any, path: str = "") -> str:
    """Where in ``v`` the first thing lies that cannot be encoded."""
    children: list[tuple[str, Any]] = []
    if type(v) in _FIELDS:
        children = [(f"{path}.{name}", getattr(v, name)) for name in _FIELDS[type(v)]]
    elif type(v) is dict:
        children = [(path, k) for k in v] + [(f"{path}.{k}", x) for k, x in v.items()]
    elif type(v) in (list, tuple):
        children = [(f"{path}[{i}]", x) for i, x in enumerate(v)]
    for where, child in children:
        try:
            _Encoder().walk(child)
        except _Unsupported:
            return _path_of_fault(child, where)
    return path


def _decoded(v: Any, joined: dict[str, np.ndarray]) -> Any:
    if type(v) is list:
        return [_decoded(x, joined) for x in v]
    if type(v) is not dict:
        return v
    if "f" in v:
        cls = _TYPES[v["$c"]]
        names = _FIELDS[cls]
        values = v["f"]
        if len(values) != len(names):
            raise ValueError(f"a {cls.__name__} of {len(values)} fields; this version has {len(names)}")
        return cls(**{name: _decoded(x, joined) for name, x in zip(names, values, strict=True)})
    if "$a" in v:
        code, start, *shape = v["$a"]
        array = joined[code][start : start + math.prod(shape)]
        return array if len(shape) == 1 else array.reshape(shape)
    if "$t" in v:
        return tuple([_decoded(x, joined) for x in v["$t"]])
    return {_decoded(k, joined): _decoded(x, joined) for k, x in v["$d"]}
