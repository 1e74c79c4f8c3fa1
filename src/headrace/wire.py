"""Any carrier of ``types`` as bytes, for sockets and the journal: JSON for structure, raw bytes for arrays.

In: a tree of dataclasses from ``types``, mappings, lists, tuples, scalars and numpy arrays. Out: one
byte string, and back. Nothing is pickled and no class is looked up outside ``types``: a frame can only
name what the data contract names. A frame is a header of numbers (bytes of the tree, entries of each
dtype), the tree as JSON, and all entries of one dtype after those of the other, so a batch of thousands of
small arrays costs no more than one of a few large ones. Every JSON object has one key, which says what it
stands for:

    {"Task": [...]}     a carrier, its fields in order          {"()": [...]}           a tuple
    {"i": 17}           the next 17 entries of the int32        {"{}": [key, value, ..]}  a mapping
                        array; a list is a shape                {"=": 3}                what was met fourth
    {"[]": ["Task", columns]}  a list of carriers by column     {"*i": [lengths, [2]]}  a column of arrays

Carriers and arrays outside columns are numbered as they end. One that a frame holds more than once, such as
the sampling settings of a group's requests, is written once and shared by what comes back.

The controller encodes and decodes every attempt several times, on a core it shares: dispatch is by exact
type, scalars are passed over without a call, and the JSON parser itself builds what a frame holds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from headrace import types

_TYPES: dict[str, type] = {
    name: value
    for name, value in vars(types).items()
    if dataclasses.is_dataclass(value) and isinstance(value, type)
}
_FIELDS = {name: tuple(field.name for field in dataclasses.fields(cls)) for name, cls in _TYPES.items()}
_VALUES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    cls: attrgetter(*_FIELDS[name]) for name, cls in _TYPES.items()
}
_SLOTS = {name: tuple([vars(cls)[field].__set__ for field in _FIELDS[name]]) for name, cls in _TYPES.items()}
"""By carrier, what sets each of its fields. A frozen class does nothing else when it is called, but takes its time."""


class _Unsupported(Exception):
    """Something the contract does not carry; ``_tree`` finds out where."""


class _Codes(dict[np.dtype[Any], str]):
    def __missing__(self, dtype: np.dtype[Any]) -> str:
        raise _Unsupported(f"an array of {dtype}")


_PLAIN = frozenset({type(None), str, bool, int, float})
_DTYPES = {
    code: np.dtype(name)
    for code, name in {
        "l": "int64",
        "L": "uint64",
        "d": "float64",
        "i": "int32",
        "I": "uint32",
        "f": "float32",
        "h": "int16",
        "H": "uint16",
        "e": "float16",
        "b": "bool",
        "B": "uint8",
        "c": "int8",
    }.items()
}
"""By letter, the widest first."""
_CODES = _Codes((dtype, code) for code, dtype in _DTYPES.items())
_NOTHING = {code: np.empty(0, dtype) for code, dtype in _DTYPES.items()}
_HEADER = struct.Struct(f"<{1 + len(_DTYPES)}Q")
_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def encode(value: Any) -> bytes:
    """Bytes of ``value``; raises TypeError naming the path of anything the contract does not carry."""
    encoder = _Encoder()
    return _frame(_tree(encoder, value), encoder)


def decode(frame: bytes | memoryview) -> Any:
    """The value behind ``encode``'s bytes. Arrays share the memory of the frame, and cannot be written to."""
    frame = memoryview(frame).toreadonly()
    num_bytes, *counts = _HEADER.unpack_from(frame)
    decoder = _Decoder(frame, _HEADER.size + num_bytes, counts)
    text = bytes(frame[_HEADER.size : _HEADER.size + num_bytes])
    return json.loads(text, object_pairs_hook=decoder.build)


class FrameBuilder:
    """Several values in one frame, decoded as a list: the cost of a frame is paid once for all of them.

    A value that cannot be carried raises when it is added and leaves the others as they were. What was
    added must not change before ``take``.
    """

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._start()

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any) -> int:
        """Returns how many there are now."""
        try:
            tree = _tree(self._encoder, value)
        except TypeError:
            # The encoder has numbered parts of what is not going to be written.
            self._start()
            raise
        self._values.append(value)
        self._trees.append(tree)
        return len(self._trees)

    def take(self) -> bytes:
        """The frame of everything added since the last ``take``."""
        frame = _frame(self._trees, self._encoder)
        self._values = []
        self._start()
        return frame

    def _start(self) -> None:
        self._encoder = _Encoder()
        self._trees = [self._encoder.walk(value) for value in self._values]


def _frame(tree: Any, encoder: _Encoder) -> bytes:
    text = _to_json(tree).encode()
    # The widest entries come first and begin where they may lie, so all are aligned.
    text += b" " * (-len(text) % 8)
    of_code = [encoder.arrays.get(code, ()) for code in _DTYPES]
    counts = [sum(map(len, arrays)) for arrays in of_code]
    pieces: list[Any] = [_HEADER.pack(len(text), *counts), text, *chain.from_iterable(of_code)]
    return b"".join(pieces)


def _tree(encoder: _Encoder, value: Any) -> Any:
    try:
        return encoder.walk(value)
    except _Unsupported as e:
        where = _path_of_fault(value) or "value"
        raise TypeError(f"{where}: {e} cannot cross a process boundary") from None


class _Encoder:
    """Turns values into JSON trees and collects their arrays, by dtype."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[np.ndarray]] = {}
        """One-dimensional and without gaps, so that each is copied once, into its frame."""
        self._numbers: dict[int, int] = {}
        self._met: list[Any] = []
        """Carriers and arrays by number; held, so that no id is used again."""

    def walk(self, v: Any) -> Any:
        return _WALKS[type(v)](self, v)

    def _each(self, values: Iterable[Any]) -> list[Any]:
        return [x if type(x) in _PLAIN else _WALKS[type(x)](self, x) for x in values]

    def _carrier(self, v: Any) -> dict[str, Any]:
        number = self._numbers.get(id(v))
        if number is not None:
            return {"=": number}
        kind = type(v)
        body = [x if type(x) in _PLAIN else _WALKS[type(x)](self, x) for x in _VALUES[kind](v)]
        tree = {kind.__name__: body}
        self._numbers[id(v)] = len(self._met)
        self._met.append(v)
        return tree

    def _array(self, a: np.ndarray) -> dict[str, Any]:
        number = self._numbers.get(id(a))
        if number is not None:
            return {"=": number}
        self._numbers[id(a)] = len(self._met)
        self._met.append(a)
        code = _CODES[a.dtype]
        if a.ndim == 1 and a.flags.c_contiguous:
            self.arrays.setdefault(code, []).append(a)
            return {code: len(a)}
        self.arrays.setdefault(code, []).append(np.ravel(a))
        return {code: a.shape}

    def _mapping(self, v: dict[Any, Any]) -> dict[str, Any]:
        return {"{}": self._each(chain.from_iterable(v.items()))}

    def _tuple(self, v: tuple[Any, ...]) -> dict[str, Any]:
        return {"()": self._list(v)}

    def _list(self, values: Sequence[Any]) -> Any:
        kind = type(values[0]) if len(values) > 1 else None
        if kind not in _VALUES or any(type(v) is not kind for v in values):
            return self._each(values)
        columns = zip(*map(_VALUES[kind], values), strict=True)
        return {"[]": [kind.__name__, [self._column(column) for column in columns]]}

    def _column(self, values: tuple[Any, ...]) -> Any:
        first = values[0]
        if type(first) is not np.ndarray or first.ndim == 0:
            return self._each(values)
        dtype, num_dims, rest = first.dtype, first.ndim, first.shape[1:]
        is_flat = num_dims == 1
        for v in values:
            if type(v) is not np.ndarray or v.dtype != dtype or v.ndim != num_dims or v.shape[1:] != rest:
                return self._each(values)
            is_flat = is_flat and v.flags.c_contiguous
        code = _CODES[dtype]
        self.arrays.setdefault(code, []).extend(values if is_flat else map(np.ravel, values))
        return {f"*{code}": [list(map(len, values)), rest]}

    def _scalar(self, v: Any) -> Any:
        """A subclass, such as an enumeration's member, travels as what it extends."""
        if type(v) in _PLAIN:
            return v
        if isinstance(v, np.generic):
            return v.item()
        if isinstance(v, str):
            return str.__str__(v)
        for plain in (int, float):
            if isinstance(v, plain):
                return plain(v)
        raise _Unsupported(type(v).__name__)


_WALKS: dict[type, Callable[[_Encoder, Any], Any]] = defaultdict(
    lambda: _Encoder._scalar,
    {
        **dict.fromkeys(_VALUES, _Encoder._carrier),
        np.ndarray: _Encoder._array,
        dict: _Encoder._mapping,
        tuple: _Encoder._tuple,
        list: _Encoder._list,
    },
)
"""How a value of exactly this type is encoded."""


class _Decoder:
    """Builds what the objects of a tree stand for, in the order in which they end."""

    def __init__(self, frame: memoryview, start: int, counts: Iterable[int]) -> None:
        """``start``: where the entries of the first dtype begin."""
        self._joined = dict(_NOTHING)
        for (code, dtype), count in zip(_DTYPES.items(), counts, strict=True):
            if count:
                self._joined[code] = np.frombuffer(frame, dtype, count, start)
                start += count * dtype.itemsize
        self._used = dict.fromkeys(_DTYPES, 0)
        self._met: list[Any] = []

    def build(self, pairs: list[tuple[str, Any]]) -> Any:
        ((tag, body),) = pairs
        if tag in _DTYPES:
            made = self._array(tag, body)
        elif tag in _TYPES:
            made = _carrier(tag, body)
        else:
            return self._unnumbered(tag, body)
        self._met.append(made)
        return made

    def _unnumbered(self, tag: str, body: Any) -> Any:
        if tag == "()":
            return tuple(body)
        if tag == "{}":
            return dict(zip(body[::2], body[1::2], strict=True))
        if tag == "=":
            return self._met[body]
        if tag == "[]":
            name, columns = body
            return [_carrier(name, row) for row in zip(*columns, strict=True)]
        if tag[0] == "*":
            return self._column(tag[1:], *body)
        raise KeyError(tag)

    def _column(self, code: str, lengths: list[int], rest: list[int]) -> list[np.ndarray]:
        """Pieces of one array: a batch has thousands of them."""
        joined, end = self._array(code, [sum(lengths), *rest]), 0
        return [joined[end : (end := end + length)] for length in lengths]

    def _array(self, code: str, shape: int | list[int]) -> np.ndarray:
        start = self._used[code]
        if isinstance(shape, int):
            end = self._used[code] = start + shape
            return self._joined[code][start:end]
        end = self._used[code] = start + math.prod(shape)
        return self._joined[code][start:end].reshape(shape)


def _carrier(name: str, values: Sequence[Any]) -> Any:
    slots = _SLOTS[name]
    if len(values) != len(slots):
        raise ValueError(f"a {name} of {len(values)} fields; this version has {len(slots)}")
    made: Any = object.__new__(_TYPES[name])
    for put, value in zip(slots, values, strict=True):
        put(made, value)
    return made


def _path_of_fault(v: Any, path: str = "") -> str:
    """Where in ``v`` the first thing lies that cannot be encoded."""
    children: list[tuple[str, Any]] = []
    if type(v) in _VALUES:
        children = [(f"{path}.{name}", getattr(v, name)) for name in _FIELDS[type(v).__name__]]
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
