"""How close the GPU kernels come to what the chip can do: ``python -m headrace.bench.kernels``.

Out: one line a kernel and shape, with its time and the bytes it must read, or the operations it must do, a second.
Times are medians of replayed CUDA graphs that walk over enough memory to find none of it in the cache. Shapes are
those of Qwen2 0.5B, 1.5B and 7B in bfloat16; blocks are shuffled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from headrace.kernels import decode_attention, paged_attention, sampling, truncation
from headrace.kernels.shared_prefixes import MAX_MEMBERS, SharedPrefixes

MODELS = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128)}
"""Query heads, key-value heads, head dim."""
DECODES = ((512, 512), (256, 1024), (64, 1024), (16, 4096), (1, 4096))
SHARED_DECODES = ((512, 256, 200), (64, 256, 200), (16, 8192, 200))
"""Rows in groups of eight, tokens of their prompt, tokens of their own."""
PREFILLS = ((8, 2048), (1, 2048), (16, 512))
SAMPLES = (512, 64, 1)
TRUNCATIONS = {
    "top-k 50": (50, 1.0, False),
    "top-p 0.95": (0, 0.95, False),
    "top-p 0.95 flat": (0, 0.95, True),
}
"""Top-k, top-p, and whether tens of thousands of tokens share the mass, where a trained model has a few."""
LISTED_TOKENS = 1024
"""Ids of a kept set that are listed, as in the engine."""
VOCAB_SIZE = 151936
BLOCK_SIZE = 16
COLD_BYTES = 3e8


class Case(NamedTuple):
    name: str
    launches: list[Callable[[], None]]
    """Each over memory of its own."""
    amount: float
    """Of one launch: bytes, or operations."""
    unit: str


def cases(device: torch.device) -> Iterator[Case]:
    for model in MODELS:
        yield from (decode(model, rows, length, device) for rows, length in DECODES)
        yield from (shared_decode(model, *shape, device) for shape in SHARED_DECODES)
        yield from (prefill(model, pieces, length, device) for pieces, length in PREFILLS)
    for dtype in (torch.float32, torch.bfloat16):
        yield from (sample(rows, VOCAB_SIZE, dtype, device) for rows in SAMPLES)
    for truncated in TRUNCATIONS:
        yield from (sample_truncated(truncated, rows, VOCAB_SIZE, device) for rows in SAMPLES)


def decode(model: str, rows: int, length: int, device: torch.device) -> Case:
    num_heads, num_kv, dim = MODELS[model]
    width = 2 * num_kv * dim
    num_bytes = rows * length * width * 2
    copies = max(1, min(32, int(COLD_BYTES // num_bytes)))
    pool, tables = _cache(rows * copies, length, width, device)
    query = torch.randn((rows, num_heads, dim), device=device).bfloat16()
    own_rows = torch.randn((2, rows, num_kv, dim), device=device).bfloat16()
    out = torch.empty_like(query)
    lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
    total = torch.full_like(lengths[:1], rows * length)
    workspace = decode_attention.decode_workspace(rows, num_heads, dim, length, device)

    def launch(copy: int) -> Callable[[], None]:
        slots = torch.arange(copy * rows, (copy + 1) * rows, device=device)
        return lambda: decode_attention.decode_attention(
            query, own_rows[0], own_rows[1], pool, tables, slots, lengths, scale=dim**-0.5, total=total, out_BHE=out,
            workspace=workspace,
        )  # fmt: skip

    name = f"decode {model} {rows} x {length}"
    return Case(name, [launch(copy) for copy in range(copies)], num_bytes, "TB/s")


def shared_decode(model: str, rows: int, prompt: int, own: int, device: torch.device) -> Case:
    """Its bytes are those of every prompt once and of what each row has for itself."""
    num_heads, num_kv, dim = MODELS[model]
    width, length, num_groups = 2 * num_kv * dim, prompt + own, rows // MAX_MEMBERS
    num_bytes = (num_groups * prompt + rows * own) * width * 2
    copies = max(1, min(32, int(COLD_BYTES // num_bytes)))
    pool, tables = _cache(rows * copies, length, width, device)
    by_group = tables.view(-1, MAX_MEMBERS, tables.shape[1])
    by_group[:, :, : prompt // BLOCK_SIZE] = by_group[:, :1, : prompt // BLOCK_SIZE]
    query = torch.randn((rows, num_heads, dim), device=device).bfloat16()
    own_rows = torch.randn((2, rows, num_kv, dim), device=device).bfloat16()
    out = torch.empty_like(query)
    order = torch.arange(rows, dtype=torch.int32, device=device)
    lengths, total = torch.full_like(order, length), torch.full_like(order[:1], rows * own)
    shared = SharedPrefixes(
        begins=torch.full_like(order, prompt),
        members=order,
        starts=torch.arange(0, rows + 1, MAX_MEMBERS, dtype=torch.int32, device=device),
        num_pieces=torch.full_like(order[:1], num_groups),
    )
    workspace = decode_attention.decode_workspace(rows, num_heads, dim, length, device)

    def launch(copy: int) -> Callable[[], None]:
        slots = torch.arange(copy * rows, (copy + 1) * rows, device=device)
        return lambda: decode_attention.decode_attention(
            query, own_rows[0], own_rows[1], pool, tables, slots, lengths, scale=dim**-0.5, shared=shared, total=total,
            out_BHE=out, workspace=workspace,
        )  # fmt: skip

    name = f"shared {model} {rows} x {prompt}+{own}"
    return Case(name, [launch(copy) for copy in range(copies)], num_bytes, "TB/s")


def prefill(model: str, pieces: int, length: int, device: torch.device) -> Case:
    num_heads, num_kv, dim = MODELS[model]
    pool, tables = _cache(pieces, length, 2 * num_kv * dim, device)
    query = torch.randn((pieces * length, num_heads, dim), device=device).bfloat16()
    out = torch.empty_like(query)
    order = torch.arange(pieces, dtype=torch.int32, device=device)
    starts, counts, offsets = torch.zeros_like(order), torch.full_like(order, length), order * length

    def launch() -> None:
        paged_attention.prefill_attention(
            query, pool, tables, slots=order, starts=starts, counts=counts, offsets=offsets,
            value_dim=dim, scale=dim**-0.5, out_THE=out,
        )  # fmt: skip

    operations = 4 * pieces * num_heads * dim * length * (length + 1) / 2
    return Case(f"prefill {model} {pieces} x {length}", [launch] * 4, operations, "TFLOP/s")


def sample(rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Case:
    num_bytes = rows * vocab_size * dtype.itemsize
    copies = max(2, min(32, int(COLD_BYTES // num_bytes)))
    logits = [(torch.randn((rows, vocab_size), device=device) * 3.0).to(dtype) for _ in range(copies)]
    keys = torch.randint(-(2**62), 2**62, (rows,), device=device)
    positions, temperatures = torch.arange(rows, device=device), torch.ones(rows, device=device)
    token_ids = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, device=device)
    workspace = sampling.sample_workspace(rows, device)

    def launch(logits_RV: torch.Tensor) -> Callable[[], None]:
        return lambda: sampling.sample_rows(
            logits_RV, keys, positions, temperatures, token_ids_out_R=token_ids, logprobs_out_R=logprobs,
            workspace=workspace,
        )  # fmt: skip

    name = f"sample {str(dtype).removeprefix('torch.')} {rows} x {vocab_size}"
    return Case(name, [launch(x) for x in logits], num_bytes, "TB/s")


def sample_truncated(truncated: str, rows: int, vocab_size: int, device: torch.device) -> Case:
    """Counted is one reading of the logits; a truncated draw takes several."""
    top_k, top_p, flat = TRUNCATIONS[truncated]
    num_bytes = rows * vocab_size * 4
    copies = max(2, min(32, int(COLD_BYTES // num_bytes)))
    logits = [torch.randn((rows, vocab_size), device=device) * 2.0 for _ in range(copies)]
    for x in logits if not flat else ():
        likely = torch.randint(vocab_size, (rows, 64), device=device)
        x.scatter_add_(1, likely, 12.0 + 3.0 * torch.randn((rows, 64), device=device))
    room = top_k or LISTED_TOKENS
    given = truncation.TruncatedRows(
        sources=torch.arange(rows, device=device),
        seed_keys=torch.randint(-(2**62), 2**62, (rows,), device=device),
        positions=torch.arange(rows, device=device),
        temperatures=torch.ones(rows, device=device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        list_starts=torch.arange(rows + 1, device=device) * room,
    )
    draws = truncation.new_draws(rows, rows * room, vocab_size, device)
    workspace = sampling.sample_workspace(rows, device)

    def launch(logits_RV: torch.Tensor) -> Callable[[], None]:
        return lambda: sampling.sample_rows_truncated(logits_RV, given, draws, workspace)

    return Case(f"{truncated} {rows} x {vocab_size}", [launch(x) for x in logits], num_bytes, "TB/s")


def seconds(launches: list[Callable[[], None]], repeats: int = 9) -> float:
    """Of one launch, from a graph of all of them."""
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times) / len(launches)


def _cache(
    num_slots: int, length: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of random rows and tables [slots, blocks] of shuffled ids."""
    blocks = -(-length // BLOCK_SIZE)
    pool = torch.randn((num_slots * blocks + 1, BLOCK_SIZE, width), dtype=torch.bfloat16, device=device)
    tables = 1 + torch.randperm(num_slots * blocks, device=device)
    return pool, tables.int().view(num_slots, blocks)


def report(of: Iterator[Case]) -> None:
    for case in of:
        time = seconds(case.launches)
        print(
            f"{case.name:32} {time * 1e6:9.1f} us {case.amount / time * 1e-12:8.2f} {case.unit}", flush=True
        )


if __name__ == "__main__":
    report(cases(torch.device("cuda")))
