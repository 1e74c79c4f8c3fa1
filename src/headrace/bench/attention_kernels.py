"""Cases of the attention kernels: decoding with and without prompts that are read once, and prefill.

Blocks are shuffled, and queries and keys are rotated as they are read, as in the engine. Bytes are those of the keys
and values that must be read; operations those of both products of every visible pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch

from headrace.bench.kernel_cases import MODELS, Case, cold_copies, launching
from headrace.kernels import decode_attention, paged_attention
from headrace.kernels.dealing import spans_of_rows
from headrace.kernels.decode_shapes import PrefixShape
from headrace.kernels.rotation import Rotation
from headrace.kernels.shared_prefixes import MAX_MEMBERS, SharedPrefixes

OTHERS = {
    "32/2 heads": (32, 2, 128),
    "64/2 heads": (64, 2, 128),
    "64/1 heads": (64, 1, 128),
    "8/8 heads": (8, 8, 64),
}
"""As ``MODELS``, with other numbers of query heads a key-value head."""
HEADS = MODELS | OTHERS
DECODES = (
    (512, 512), (256, 1024), (224, 680), (160, 800), (128, 900), (96, 1000), (64, 1100), (40, 1300), (24, 1756),
    (16, 2150), (16, 4096), (1, 4096),
)  # fmt: skip
"""Rows, and key-value rows of each: with the shorter ones as in the passes of the rollout benchmark."""
MIXED_DECODES = ((512, 512), (160, 800), (24, 1756))
"""The same with log-normal lengths of this mean."""
SHARED_DECODES = (
    (512, 256, 65), (512, 256, 130), (384, 256, 220), (256, 256, 400), (128, 256, 500), (64, 256, 200),
    (16, 8192, 200),
)  # fmt: skip
"""Rows in groups of eight, tokens of their prompt, tokens of their own."""
OTHER_PREFIXES = {
    "half the tile": PrefixShape(64, 32, 4, 2),
    "one for every piece": PrefixShape(64, 64, 4, 3),
    "half the tile, one at once": PrefixShape(64, 32, 4, 2, num_at_once=1),
    "half the tile, three fit": PrefixShape(64, 32, 4, 2, most_registers=168),
    "half the tile, four fit": PrefixShape(64, 32, 4, 2, most_registers=128),
    "half the lines": PrefixShape(32, 32, 4, 2),
    "half the lines, one at once": PrefixShape(32, 32, 4, 2, num_at_once=1),
    "half the lines, two at once": PrefixShape(32, 32, 4, 2, num_at_once=2),
}
"""Beside the one in use for 64 rows and more: programs that leave other room for those beside them."""
PREFILLS = ((8, 2048), (1, 2048), (16, 512))
WRITES = (64, 8192)
ONE_LONG_ROW = np.array([16000, *[800] * 255])
BLOCK_SIZE = 16


def cases(device: torch.device) -> Iterator[Case]:
    for model in MODELS:
        yield from (decode(model, np.full(rows, length), device) for rows, length in DECODES)
        yield from (decode(model, mixed(rows, length), device) for rows, length in MIXED_DECODES)
        yield decode(model, ONE_LONG_ROW, device)
        for shape in SHARED_DECODES:
            yield from shared_decodes(model, *shape, device)
        yield from (prefill(model, pieces, length, device) for pieces, length in PREFILLS)
        yield from (write(model, rows, device) for rows in WRITES)
    for model in OTHERS:
        yield from (decode(model, np.full(rows, 800), device) for rows in (16, 160, 512))
        yield next(shared_decodes(model, *SHARED_DECODES[0], device))
        yield prefill(model, *PREFILLS[0], device)


class _Inputs(NamedTuple):
    """Of a decode pass with rows of these lengths, and as many further ones over memory of their own."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotation: Rotation
    pool: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    copies: int

    def launches(
        self, own: np.ndarray, shared: SharedPrefixes | None = None, of_prefixes: PrefixShape | None = None
    ) -> list[Callable[[], None]]:
        """``own``: key-value rows that each row reads by itself."""
        rows, num_heads, dim = self.query.shape
        device, longest = self.query.device, self.tables.shape[1] * BLOCK_SIZE
        workspace = decode_attention.decode_workspace(rows, num_heads, dim, longest, device)
        at_once = decode_attention.spans_at_once(
            rows, num_heads, self.key.shape[1], dim, self.pool.dtype, device, sharing=shared is not None
        )
        spans = spans_of_rows(own, at_once, device)
        out = torch.empty_like(self.query)

        def launch(copy: int) -> Callable[[], None]:
            slots = torch.arange(copy * rows, (copy + 1) * rows, device=device)
            return lambda: decode_attention.decode_attention(
                self.query, self.key, self.value, self.pool, self.tables, slots, self.lengths, scale=dim**-0.5,
                shared=shared, rotation=self.rotation, spans=spans, out_BHE=out, workspace=workspace,
                of_prefixes=of_prefixes,
            )  # fmt: skip

        return [launch(copy) for copy in range(self.copies)]


def mixed(rows: int, mean: int) -> np.ndarray:
    """Lengths of that mean, log-normal."""
    drawn = np.random.default_rng(rows).lognormal(0.0, 0.7, rows)
    return np.maximum(1, drawn * mean / drawn.mean()).astype(np.int64)


def decode(model: str, lengths: np.ndarray, device: torch.device) -> Case:
    num_bytes = int(lengths.sum()) * _row_bytes(model)
    launches = _inputs(model, lengths, num_bytes, device).launches(lengths)
    least, most = int(lengths.min()), int(lengths.max())
    seen = f"{most}" if least == most else f"{lengths.mean():.0f}, up to {most}"
    return Case(f"decode {model} {len(lengths)} x {seen}", launches, num_bytes, "TB/s")


def shared_decodes(model: str, rows: int, prompt: int, own: int, device: torch.device) -> Iterator[Case]:
    """As it is in use and in other shapes. Bytes are those of every prompt once and of what each row has for itself."""
    num_groups = rows // MAX_MEMBERS
    num_bytes = (num_groups * prompt + rows * own) * _row_bytes(model)
    inputs = _inputs(model, np.full(rows, prompt + own), num_bytes, device)
    by_group = inputs.tables.view(-1, MAX_MEMBERS, inputs.tables.shape[1])
    by_group[:, :, : prompt // BLOCK_SIZE] = by_group[:, :1, : prompt // BLOCK_SIZE]
    order = torch.arange(rows, dtype=torch.int32, device=device)
    shared = SharedPrefixes(
        begins=torch.full_like(order, prompt),
        members=order,
        starts=torch.arange(0, rows + 1, MAX_MEMBERS, dtype=torch.int32, device=device),
        num_pieces=torch.full_like(order[:1], num_groups),
    )
    name, of_rows = f"shared {model} {rows} x {prompt}+{own}", np.full(rows, own)
    yield Case(name, inputs.launches(of_rows, shared), num_bytes, "TB/s")
    for of, of_prefixes in OTHER_PREFIXES.items():
        yield Case(name, inputs.launches(of_rows, shared, of_prefixes), num_bytes, "TB/s", of)


def prefill(model: str, pieces: int, length: int, device: torch.device) -> Case:
    num_heads, _, dim = HEADS[model]
    pool, tables = _cache(pieces, length, _row_bytes(model) // 2, device)
    query = torch.randn((pieces * length, num_heads, dim), device=device).bfloat16()
    out = torch.empty_like(query)
    order = torch.arange(pieces, dtype=torch.int32, device=device)
    starts, counts, offsets = torch.zeros_like(order), torch.full_like(order, length), order * length
    rotation = _rotation(pieces * length, dim, device)

    def launch() -> None:
        paged_attention.prefill_attention(
            query, pool, tables, slots=order, starts=starts, counts=counts, offsets=offsets,
            value_dim=dim, scale=dim**-0.5, rotation=rotation, out_THE=out,
        )  # fmt: skip

    operations = 4 * pieces * num_heads * dim * length * (length + 1) / 2
    return Case(f"prefill {model} {pieces} x {length}", [launch] * 4, operations, "TFLOP/s")


def write(model: str, rows: int, device: torch.device) -> Case:
    """Keys and values of prompts into their blocks; its bytes are read and written."""
    _, num_kv, dim = HEADS[model]
    num_bytes = 2 * rows * _row_bytes(model)
    copies = cold_copies(num_bytes, least=2)
    pool, _ = _cache(copies * rows // BLOCK_SIZE, BLOCK_SIZE, 2 * num_kv * dim, device)
    key, value = torch.randn((2, rows, num_kv, dim), device=device).bfloat16()
    places = (torch.randperm(copies * rows, device=device) + BLOCK_SIZE).view(copies, rows)
    rotation = _rotation(rows, dim, device)
    launches = [
        launching(paged_attention.write_rows, pool, places[i], key, value, rotation) for i in range(copies)
    ]
    return Case(f"write {model} {rows}", launches, num_bytes, "TB/s")


def _inputs(model: str, lengths: np.ndarray, num_bytes: int, device: torch.device) -> _Inputs:
    num_heads, num_kv, dim = HEADS[model]
    rows, copies = len(lengths), cold_copies(num_bytes)
    pool, tables = _cache(rows * copies, int(lengths.max()), 2 * num_kv * dim, device)
    key, value = torch.randn((2, rows, num_kv, dim), device=device).bfloat16()
    return _Inputs(
        query=torch.randn((rows, num_heads, dim), device=device).bfloat16(),
        key=key,
        value=value,
        rotation=_rotation(rows, dim, device),
        pool=pool,
        tables=tables,
        lengths=torch.from_numpy(lengths).int().to(device),
        copies=copies,
    )


def _row_bytes(model: str) -> int:
    """Of a key and a value."""
    _, num_kv, dim = HEADS[model]
    return 2 * num_kv * dim * 2


def _rotation(rows: int, dim: int, device: torch.device) -> Rotation:
    angles = torch.rand((rows, dim), device=device)
    return Rotation(angles.cos(), angles.sin())


def _cache(
    num_slots: int, length: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of random rows and tables [slots, blocks] of shuffled ids."""
    blocks = -(-length // BLOCK_SIZE)
    pool = torch.randn((num_slots * blocks + 1, BLOCK_SIZE, width), dtype=torch.bfloat16, device=device)
    tables = 1 + torch.randperm(num_slots * blocks, device=device)
    return pool, tables.int().view(num_slots, blocks)
