"""Attention over key-value rows kept in blocks, called by transformers in place of its own.

In: queries, keys and values of a flat pass [1, heads, T, head dim], and a ``PagedPlan`` that says where
each row's key and value are written and which blocks each row reads. Out: [1, T, heads, head dim].

Every row is attended on its own, as a query of length one, and its key-value length is rounded up by
``padded_length`` of that row alone. What a row computes therefore depends neither on the other rows of
the pass, nor on where a prompt was cut into chunks, nor on whether its key-value rows were computed or
found in the cache. Rows that share a table and a padded length share one call.

Shape legend: T rows of the pass, N rows of a group, B blocks or block tables, S rows of a block, L padded
key-value length, K key-value heads, G query heads of each, D head dim, W key and value width of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from headrace.errors import ModelError

PAGED = "headrace_paged"
_SHORTEST = 32
_LONGEST_TABLE = 512


def register() -> None:
    """Make ``PAGED`` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, _no_mask)


def padded_length(length: int, block_size: int) -> int:
    """The key-value length a row of this length is computed with: two steps an octave (32, 48, 64, 96...),
    each a whole number of blocks."""
    octave = max(_SHORTEST, 2 * block_size)
    while octave < length:
        if length <= octave + octave // 2:
            return octave + octave // 2
        octave *= 2
    return octave


def padded_octave(length: int, block_size: int) -> int:
    """As ``padded_length`` with one step an octave."""
    octave = max(_SHORTEST, 2 * block_size)
    while octave < length:
        octave *= 2
    return octave


class KvTensors:
    """The key-value memory: one [B, S, W] tensor a layer, made when the layer first writes."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, torch.Tensor] = {}
        self._scratch: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    @property
    def row_bytes(self) -> int:
        """Bytes one token takes over all layers that have been written."""
        return sum(pool.shape[2] * pool.element_size() for pool in self._layers.values())

    def write(self, layer: int, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
        pool_BSW = self._layers.get(layer)
        if pool_BSW is None:
            shape = (self.num_blocks, self.block_size, rows_TW.shape[1])
            pool_BSW = torch.zeros(shape, dtype=rows_TW.dtype, device=rows_TW.device)
            self._layers[layer] = pool_BSW
        pool_BSW.view(-1, rows_TW.shape[1]).index_copy_(0, slots_T, rows_TW)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """[blocks, S, W]; valid until the next read, since the copy lands in memory that is used again."""
        pool_BSW = self._layers[layer]
        width, count = pool_BSW.shape[2], blocks.shape[0]
        key = (width, pool_BSW.dtype, pool_BSW.device)
        scratch = self._scratch.get(key)
        if scratch is None or scratch.shape[0] < count:
            scratch = pool_BSW.new_empty((max(count, 64), self.block_size, width))
            self._scratch[key] = scratch
        out = scratch[:count]
        torch.index_select(pool_BSW, 0, blocks, out=out)
        return out


class CausalTables:
    """Additive causal masks [L, L] to copy rows from, for lengths that are met again and again."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def rows(self, positions_N: torch.Tensor, kv_length: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, L]: zero up to each position, -inf after it."""
        key = (kv_length, dtype, positions_N.device)
        table = self._tables.get(key)
        if table is None:
            full = torch.full((kv_length, kv_length), float("-inf"), dtype=dtype, device=positions_N.device)
            table = self._tables[key] = full.triu_(1)
        return table.index_select(0, positions_N)


@dataclass(slots=True)
class Masks:
    """Additive masks [N, 1, 1, L] of one group of rows by window, each made once a pass."""

    positions: torch.Tensor
    """int64 [N]."""
    kv_length: int
    tables: CausalTables
    _made: dict[int | None, torch.Tensor] = field(default_factory=dict)
    _by_head: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def get(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        mask = self._made.get(window)
        if mask is None:
            mask = self._make(window, dtype).view(-1, 1, 1, self.kv_length)
            self._made[window] = mask
        return mask

    def _make(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        if window is None and self.kv_length <= _LONGEST_TABLE:
            return self.tables.rows(self.positions, self.kv_length, dtype)
        kv_L = torch.arange(self.kv_length, device=self.positions.device)
        hidden_NL = kv_L > self.positions.unsqueeze(1)
        if window is not None:
            hidden_NL |= kv_L <= (self.positions - window).unsqueeze(1)
        mask = torch.zeros(hidden_NL.shape, dtype=dtype, device=kv_L.device)
        return mask.masked_fill_(hidden_NL, float("-inf"))

    def by_head(
        self, window: int | None, dtype: torch.dtype, num_tables: int, num_heads: int
    ) -> torch.Tensor:
        """The same for rows in equal runs of one table each: [tables * heads, rows of a run, 1, L]."""
        mask = self._by_head.get(window)
        if mask is None:
            per_table = self.get(window, dtype).view(num_tables, 1, -1, 1, self.kv_length)
            mask = per_table.expand(-1, num_heads, -1, -1, -1).flatten(0, 1)
            self._by_head[window] = mask
        return mask


class NewRows(NamedTuple):
    """Keys and values a layer computed in this pass, in two shapes of the same numbers."""

    key_TKD: torch.Tensor
    value_TKD: torch.Tensor
    rows_TW: torch.Tensor


class RowGroup(Protocol):
    """Rows of the pass that are attended in one call: all of one padded length L."""

    rows: slice
    masks: Masks

    def read(self, kv: KvTensors, layer: int, new: NewRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [tables, K, L, D] of the group; ``kv`` already holds the new ones. Rows come in
        runs of equal length, one table a run."""
        ...


@dataclass(slots=True)
class BlockGroup:
    """Rows whose keys and values are collected from their blocks."""

    rows: slice
    masks: Masks
    blocks: torch.Tensor
    """int64 [tables * L / S], block ids in order of position."""
    num_tables: int
    """A divisor of the number of rows: each run of rows / tables rows reads one table."""

    def read(self, kv: KvTensors, layer: int, new: NewRows) -> tuple[torch.Tensor, torch.Tensor]:
        return split_heads(kv.read(layer, self.blocks).view(self.num_tables, self.masks.kv_length, -1), new)


def split_heads(kv_NLW: torch.Tensor, like: NewRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Collected rows as keys and values [N, K, L, D], without a copy."""
    (_, num_heads, key_dim), value_dim = like.key_TKD.shape, like.value_TKD.shape[2]
    num_tables, kv_length, _ = kv_NLW.shape
    split = num_heads * key_dim
    key = kv_NLW[..., :split].view(num_tables, kv_length, num_heads, key_dim).transpose(1, 2)
    value = kv_NLW[..., split:].view(num_tables, kv_length, num_heads, value_dim).transpose(1, 2)
    return key, value


class LayerCall(NamedTuple):
    """One layer's attention as it was asked for."""

    layer: int
    heads_per_kv: int
    key_dim: int
    value_dim: int
    fused: bool
    """True when torch's own attention function computed it."""


@dataclass(slots=True)
class PagedPlan:
    """Where the rows of one forward pass are written and what they read; shared by all layers."""

    kv: KvTensors
    slots: torch.Tensor
    """int64 [T], block id * S + row within the block."""
    groups: Sequence[RowGroup]
    num_rows: int
    """Rows that mean something; the rest of T is padding and attends to nothing."""
    calls: list[LayerCall] = field(default_factory=list)
    """What was computed here, for the start-up check."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    paged_plan: PagedPlan | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls once a layer. Masks are ours, so ``attention_mask`` is not read."""
    if paged_plan is None:
        raise ModelError(
            f"{type(module).__name__} does not hand the engine's plan to its attention; use another model."
        )
    if position_bias is not None:
        raise ModelError(f"{type(module).__name__} adds a position bias, which paged attention lacks.")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    _, num_kv_heads, num_rows, key_dim = key.shape
    value_dim, heads_per_kv = value.shape[-1], query.shape[1] // num_kv_heads
    fused = softcap is None and s_aux is None
    paged_plan.calls.append(LayerCall(layer, heads_per_kv, key_dim, value_dim, fused))
    key_TKD, value_TKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    rows_TW = torch.cat((key_TKD.reshape(num_rows, -1), value_TKD.reshape(num_rows, -1)), dim=1)
    new = NewRows(key_TKD, value_TKD, rows_TW)
    paged_plan.kv.write(layer, paged_plan.slots, rows_TW)
    query_TKGD = query[0].transpose(0, 1).reshape(num_rows, num_kv_heads, heads_per_kv, key_dim)
    options = _Options(sliding_window, scaling, softcap, s_aux)
    outputs = []
    for group in paged_plan.groups:
        key_BKLD, value_BKLD = group.read(paged_plan.kv, layer, new)
        outputs.append(_attend(query_TKGD[group.rows], key_BKLD, value_BKLD, group.masks, options))
    if num_rows > paged_plan.num_rows:
        outputs.append(outputs[0].new_zeros((num_rows - paged_plan.num_rows, *outputs[0].shape[1:])))
    out_TKGD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_TKGD.reshape(1, num_rows, query.shape[1], value_dim), None


@dataclass(frozen=True, slots=True)
class _Options:
    """What a layer asks of its attention."""

    window: int | None
    scaling: float | None
    softcap: float | None
    sinks: torch.Tensor | None


def _attend(
    query_NKGD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    masks: Masks,
    options: _Options,
) -> torch.Tensor:
    """[N, K, G, D]. Query heads that share a key-value head are the rows of one small product."""
    num_rows, num_tables = query_NKGD.shape[0], key_BKLD.shape[0]
    fused = options.softcap is None and options.sinks is None
    if fused and num_tables != num_rows:
        return _attend_runs(query_NKGD, key_BKLD, value_BKLD, masks, options)
    mask_N11L = masks.get(options.window, query_NKGD.dtype)
    if fused:
        return torch.nn.functional.scaled_dot_product_attention(
            query_NKGD, key_BKLD, value_BKLD, attn_mask=mask_N11L, scale=options.scaling
        )
    if num_tables in (1, num_rows):
        return _attend_plainly(query_NKGD, key_BKLD, value_BKLD, mask_N11L, options)
    runs = zip(
        query_NKGD.chunk(num_tables),
        key_BKLD.chunk(num_tables),
        value_BKLD.chunk(num_tables),
        mask_N11L.chunk(num_tables),
        strict=True,
    )
    return torch.cat([_attend_plainly(q, k, v, mask, options) for q, k, v, mask in runs])


def _attend_runs(
    query_NKGD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    masks: Masks,
    options: _Options,
) -> torch.Tensor:
    """Runs of rows over one table each, in one call: (table, head) takes the place of the batch and the
    rows of a run that of the heads, so that every row is still a product of its own."""
    num_tables, num_heads, _, _ = key_BKLD.shape
    run = query_NKGD.shape[0] // num_tables
    mask = masks.by_head(options.window, query_NKGD.dtype, num_tables, num_heads)
    out = torch.nn.functional.scaled_dot_product_attention(
        query_NKGD.unflatten(0, (num_tables, run)).transpose(1, 2).flatten(0, 1),
        key_BKLD.contiguous().flatten(0, 1).unsqueeze(1).expand(-1, run, -1, -1),
        value_BKLD.contiguous().flatten(0, 1).unsqueeze(1).expand(-1, run, -1, -1),
        attn_mask=mask,
        scale=options.scaling,
    )
    return out.unflatten(0, (num_tables, num_heads)).transpose(1, 2).flatten(0, 1)


def _attend_plainly(
    query_NKGD: torch.Tensor,
    key_BKLD: torch.Tensor,
    value_BKLD: torch.Tensor,
    mask_N11L: torch.Tensor,
    options: _Options,
) -> torch.Tensor:
    """With a soft cap or sinks, which torch's own function lacks; one table a row, or one for all."""
    num_rows = query_NKGD.shape[0]
    key_NKLD = key_BKLD.expand(num_rows, -1, -1, -1)
    value_NKLD = value_BKLD.expand(num_rows, -1, -1, -1)
    scale = query_NKGD.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores_NKGL = torch.matmul(query_NKGD, key_NKLD.transpose(2, 3)) * scale
    if options.softcap is not None:
        scores_NKGL = torch.tanh(scores_NKGL / options.softcap) * options.softcap
    scores_NKGL = (scores_NKGL + mask_N11L).float()
    if options.sinks is None:
        weights = torch.softmax(scores_NKGL, dim=-1)
    else:
        # A sink is one more score that takes probability and has no value.
        sink = options.sinks.float().view(1, *query_NKGD.shape[1:3], 1).expand(num_rows, -1, -1, 1)
        weights = torch.softmax(torch.cat((scores_NKGL, sink), dim=-1), dim=-1)[..., :-1]
    return torch.matmul(weights.to(value_NKLD.dtype), value_NKLD)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Transformers asks for a mask to pass along; the plan carries ours."""
    return None
