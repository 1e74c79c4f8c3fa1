"""The operations a device pass is made of, in two forms: Triton for a GPU, plain torch to check against.

Both compute the same functions on the same memory. The torch form is slow, runs anywhere, and defines what
the kernels must return; with it the whole device path runs in tests without a GPU.

Shape legend: T rows of a pass, B decoding rows, N pieces, R sampled rows, V vocabulary, H query heads, K
key-value heads, D key head dim, E value head dim, S rows of a block, W width of a key-value row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

from headrace.engines.device_model import LayerShape
from headrace.engines.noise import exponential, row_keys
from headrace.engines.plain_truncation import draw_truncated
from headrace.kernels.dealing import Spans
from headrace.kernels.rotation import Rotation, rotated
from headrace.kernels.shared_prefixes import SharedPrefixes
from headrace.kernels.truncation import TruncatedDraws, TruncatedRows
from headrace.models.device_attention import LayerOptions


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one query each, whose keys and values are the last of their sequences."""

    tables: torch.Tensor
    """int32 [slots, blocks], of all slots."""
    slots: torch.Tensor
    """int64 [B], the table of each row."""
    lengths: torch.Tensor
    """int32 [B], key-value rows each row sees, its own included; 0: padding."""
    spans: Spans
    """What each row is split into."""
    shared: SharedPrefixes | None = None
    """Prefixes to be read once for several rows."""


@dataclass(frozen=True, slots=True)
class PieceRows:
    """Consecutive rows of several sequences, as int32 [N] each."""

    tables: torch.Tensor
    slots: torch.Tensor
    starts: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor
    """Where in the pass each piece begins."""
    places: torch.Tensor
    """int64 [T], where each row's key and value belong: block * S + row."""
    covers_pass: bool = True
    """False: some rows of the pass belong to no piece. Attention gives zeros for them."""


class Kernels(Protocol):
    sharing_pays_bytes: int
    """Key-value bytes a layer must be spared for shared prefixes to be worth their own launch."""

    def spans_at_once(self, num_rows: int, layer: LayerShape, dtype: torch.dtype, *, sharing: bool) -> int:
        """Spans of a pass of so many rows that are read at the same time."""
        ...

    def decode(
        self, query_BHD: torch.Tensor, key_BKD: torch.Tensor, value_BKE: torch.Tensor, rotation: Rotation | None,
        pool_BSW: torch.Tensor, rows: DecodeRows, options: LayerOptions,
    ) -> torch.Tensor:  # fmt: skip
        """Attention [B, H, E] after ``rotation``; keys and values are in the pool afterwards, as with ``prefill``."""
        ...

    def prefill(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor, rotation: Rotation | None,
        pool_BSW: torch.Tensor, rows: PieceRows, options: LayerOptions,
    ) -> torch.Tensor: ...  # fmt: skip

    def sample(
        self,
        logits_RV: torch.Tensor,
        seed_keys_R: torch.Tensor,
        positions_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        token_ids_R: torch.Tensor,
        logprobs_R: torch.Tensor,
    ) -> None:
        """Draw one token a row into int32 ``token_ids_R`` and its float32 log-probability."""
        ...

    def sample_truncated(self, logits_RV: torch.Tensor, rows: TruncatedRows, draws: TruncatedDraws) -> None:
        """Draw these rows from what truncation leaves of them, and write down what that is."""
        ...


class TritonKernels:
    """For CUDA. Scratch memory is made for the largest pass and used by all."""

    # By timing on an H200: below this the cache serves most of the second to eighth reading (docs/kernels.md).
    sharing_pays_bytes = 96 << 20

    def __init__(
        self, *, max_rows: int, num_heads: int, value_dim: int, max_length: int, device: torch.device
    ) -> None:
        from headrace.kernels import decode_attention, paged_attention, sampling

        self._attention: Any = paged_attention
        self._decode_attention: Any = decode_attention
        self._device = device
        self._sampling: Any = sampling
        self._decoding = decode_attention.decode_workspace(max_rows, num_heads, value_dim, max_length, device)
        self._drawing = sampling.sample_workspace(max_rows, device)

    def spans_at_once(self, num_rows: int, layer: LayerShape, dtype: torch.dtype, *, sharing: bool) -> int:
        count = self._decode_attention.spans_at_once(
            num_rows, layer.num_heads, layer.num_kv_heads, layer.key_dim, dtype, self._device, sharing=sharing
        )
        return int(count)

    def decode(
        self, query_BHD: torch.Tensor, key_BKD: torch.Tensor, value_BKE: torch.Tensor, rotation: Rotation | None,
        pool_BSW: torch.Tensor, rows: DecodeRows, options: LayerOptions,
    ) -> torch.Tensor:  # fmt: skip
        out_BHE = query_BHD.new_empty((*query_BHD.shape[:2], value_BKE.shape[2]))
        self._decode_attention.decode_attention(
            query_BHD, key_BKD, value_BKE, pool_BSW, rows.tables, rows.slots, rows.lengths,
            scale=options.scale, window=options.window, softcap=options.softcap, shared=rows.shared,
            rotation=rotation, spans=rows.spans, out_BHE=out_BHE, workspace=self._decoding,
        )  # fmt: skip
        return out_BHE

    def prefill(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor, rotation: Rotation | None,
        pool_BSW: torch.Tensor, rows: PieceRows, options: LayerOptions,
    ) -> torch.Tensor:  # fmt: skip
        value_dim = value_TKE.shape[2]
        new = query_THD.new_empty if rows.covers_pass else query_THD.new_zeros
        out_THE = new((*query_THD.shape[:2], value_dim))
        self._attention.write_rows(pool_BSW, rows.places, key_TKD, value_TKE, rotation)
        self._attention.prefill_attention(
            query_THD, pool_BSW, rows.tables, slots=rows.slots, starts=rows.starts, counts=rows.counts,
            offsets=rows.offsets, value_dim=value_dim, scale=options.scale, window=options.window,
            softcap=options.softcap, rotation=rotation, out_THE=out_THE,
        )  # fmt: skip
        return out_THE

    def sample(
        self,
        logits_RV: torch.Tensor,
        seed_keys_R: torch.Tensor,
        positions_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        token_ids_R: torch.Tensor,
        logprobs_R: torch.Tensor,
    ) -> None:
        self._sampling.sample_rows(
            logits_RV, seed_keys_R, positions_R, temperatures_R, token_ids_out_R=token_ids_R,
            logprobs_out_R=logprobs_R, workspace=self._drawing,
        )  # fmt: skip

    def sample_truncated(self, logits_RV: torch.Tensor, rows: TruncatedRows, draws: TruncatedDraws) -> None:
        self._sampling.sample_rows_truncated(logits_RV, rows, draws, self._drawing)


class TorchKernels:
    """The same functions row by row."""

    sharing_pays_bytes = 1

    def spans_at_once(self, num_rows: int, layer: LayerShape, dtype: torch.dtype, *, sharing: bool) -> int:
        """Rows are not split here, so any answer will do."""
        return num_rows

    def decode(
        self, query_BHD: torch.Tensor, key_BKD: torch.Tensor, value_BKE: torch.Tensor, rotation: Rotation | None,
        pool_BSW: torch.Tensor, rows: DecodeRows, options: LayerOptions,
    ) -> torch.Tensor:  # fmt: skip
        if rotation is not None:
            query_BHD, key_BKD = rotated(query_BHD, rotation), rotated(key_BKD, rotation)
        size, value_dim = pool_BSW.shape[1], value_BKE.shape[2]
        at_B = (rows.lengths - 1).clamp(min=0).long()
        blocks_B = rows.tables[rows.slots, at_B // size].long()
        # A padding row writes to block 0, which nobody reads.
        places_B = torch.where(rows.lengths > 0, blocks_B * size + at_B % size, 0)
        _write(pool_BSW, places_B, key_BKD, value_BKE)
        leaders = {} if options.window is not None else _prefixes(rows)
        out = []
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            kv_LW = _collected(pool_BSW, rows.tables[slot], length)
            if row in leaders:
                leader, prefix = leaders[row]
                shared_LW = _collected(pool_BSW, rows.tables[rows.slots[leader]], prefix)
                kv_LW = torch.cat((shared_LW, kv_LW[prefix:]))
            out.append(_attend(query_BHD[row : row + 1], kv_LW, length - 1, options, value_dim))
        return torch.cat(out)

    def prefill(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor, rotation: Rotation | None,
        pool_BSW: torch.Tensor, rows: PieceRows, options: LayerOptions,
    ) -> torch.Tensor:  # fmt: skip
        if rotation is not None:
            query_THD, key_TKD = rotated(query_THD, rotation), rotated(key_TKD, rotation)
        value_dim = value_TKE.shape[2]
        out_THE = query_THD.new_zeros((*query_THD.shape[:2], value_dim))
        _write(pool_BSW, rows.places, key_TKD, value_TKE)
        pieces = (rows.slots, rows.starts, rows.counts, rows.offsets)
        for slot, start, count, offset in zip(*(x.tolist() for x in pieces), strict=True):
            kv_LW = _collected(pool_BSW, rows.tables[slot], start + count)
            span = slice(offset, offset + count)
            out_THE[span] = _attend(query_THD[span], kv_LW, start, options, value_dim)
        return out_THE

    def sample(
        self,
        logits_RV: torch.Tensor,
        seed_keys_R: torch.Tensor,
        positions_R: torch.Tensor,
        temperatures_R: torch.Tensor,
        token_ids_R: torch.Tensor,
        logprobs_R: torch.Tensor,
    ) -> None:
        keys = row_keys(seed_keys_R.cpu().numpy().view("uint64"), positions_R.cpu().numpy())
        greedy_R = temperatures_R <= 0.0
        scaled_RV = logits_RV.float() / torch.where(greedy_R, 1.0, temperatures_R).unsqueeze(1)
        noise_RV = exponential(keys, logits_RV.shape[1], logits_RV.device)
        noise_RV[greedy_R] = 1.0
        lp_RV = torch.log_softmax(scaled_RV, dim=-1)
        drawn_R = lp_RV.exp().div_(noise_RV).argmax(dim=-1)
        token_ids_R.copy_(drawn_R)
        picked_R = lp_RV.gather(1, drawn_R.unsqueeze(1)).squeeze(1)
        logprobs_R.copy_(torch.where(greedy_R, 0.0, picked_R))

    def sample_truncated(self, logits_RV: torch.Tensor, rows: TruncatedRows, draws: TruncatedDraws) -> None:
        draw_truncated(logits_RV, rows, draws)


def _write(
    pool_BSW: torch.Tensor, places_T: torch.Tensor, key_TKD: torch.Tensor, value_TKE: torch.Tensor
) -> None:
    rows_TW = torch.cat((key_TKD.flatten(1), value_TKE.flatten(1)), dim=1)
    pool_BSW.view(-1, pool_BSW.shape[2]).index_copy_(0, places_T, rows_TW.to(pool_BSW.dtype))


def _prefixes(rows: DecodeRows) -> dict[int, tuple[int, int]]:
    """For each row that shares one: the first row of its piece, and the length of the prefix."""
    shared = rows.shared
    if shared is None:
        return {}
    bounds = shared.starts[: int(shared.num_pieces) + 1].tolist()
    pieces = [shared.members[a:b].tolist() for a, b in pairwise(bounds)]
    return {row: (piece[0], int(shared.begins[piece[0]])) for piece in pieces for row in piece}


def _collected(pool_BSW: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[L, W]: the rows of one sequence in order."""
    num_blocks = -(-length // pool_BSW.shape[1])
    return pool_BSW[table[:num_blocks].long()].flatten(0, 1)[:length]


def _attend(
    query_NHD: torch.Tensor, kv_LW: torch.Tensor, start: int, options: LayerOptions, value_dim: int
) -> torch.Tensor:
    """[N, H, E] in float32 arithmetic, for queries at consecutive positions from ``start``."""
    num_rows, num_heads, key_dim = query_NHD.shape
    num_kv = kv_LW.shape[1] // (key_dim + value_dim)
    key_LKD = kv_LW[:, : num_kv * key_dim].view(-1, num_kv, key_dim).float()
    value_LKE = kv_LW[:, num_kv * key_dim :].view(-1, num_kv, value_dim).float()
    query_NKGD = query_NHD.float().view(num_rows, num_kv, num_heads // num_kv, key_dim)
    scores = torch.einsum("nkgd,lkd->nkgl", query_NKGD, key_LKD) * options.scale
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    positions_N1 = start + torch.arange(num_rows, device=scores.device).unsqueeze(1)
    rows_L = torch.arange(kv_LW.shape[0], device=scores.device)
    hidden_NL = rows_L > positions_N1
    if options.window is not None:
        hidden_NL |= rows_L <= positions_N1 - options.window
    weights = torch.softmax(scores.masked_fill(hidden_NL[:, None, None], float("-inf")), dim=-1)
    out = torch.einsum("nkgl,lke->nkge", weights, value_LKE)
    return out.reshape(num_rows, num_heads, value_dim).to(query_NHD.dtype)
