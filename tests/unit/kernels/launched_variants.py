"""Run as a program: how many variants of each kernel an engine's passes of all sizes need, compiled for an H200.

Arrays that a pass is told by are real, since where they begin may make a variant of its own; what is read and written
has no memory.
"""

from __future__ import annotations

import json
from collections import defaultdict

import numpy as np
import torch

from headrace.bench.compiling import compiled
from headrace.bench.kernel_cases import MODELS, VOCAB_SIZE
from headrace.engines.decode_batches import DecodeBatch, bucket_sizes
from headrace.engines.device_kernels import DecodeRows, PieceRows, TritonKernels
from headrace.engines.device_model import LayerShape
from headrace.engines.prompt_batches import PromptBatch, bucket_rows
from headrace.engines.sequences import SlotTable
from headrace.engines.truncated_draws import cut_rows
from headrace.kernels.rotation import Rotation
from headrace.kernels.truncation import new_draws
from headrace.models.device_attention import LayerOptions

META, CPU = torch.device("meta"), torch.device("cpu")
MAX_ROWS, MAX_LENGTH = 512, 32768


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device=META)


def rows_of(model, count):
    num_heads, num_kv, dim = MODELS[model]
    joined = empty(count, num_heads + 2 * num_kv, dim)
    rotation = Rotation(empty(count, dim, dtype=torch.float32), empty(count, dim, dtype=torch.float32))
    return (*joined.split([num_heads, num_kv, num_kv], dim=1), rotation)


def launches(model):
    num_heads, num_kv, dim = MODELS[model]
    pool, tables = empty(4096, 16, 2 * num_kv * dim), empty(514, 2048, dtype=torch.int32)
    options = LayerOptions(dim**-0.5, None, None)
    kernels = TritonKernels(
        max_rows=MAX_ROWS, num_heads=num_heads, value_dim=dim, max_length=MAX_LENGTH, device=META
    )
    drawn = torch.empty(MAX_ROWS, dtype=torch.int32), torch.empty(MAX_ROWS)
    for size in bucket_sizes(MAX_ROWS):
        logits = empty(size, VOCAB_SIZE, dtype=torch.float32)
        for sharing in (False, True):
            at_once = kernels.spans_at_once(
                size, LayerShape(num_heads, num_kv, dim, dim), torch.bfloat16, sharing=sharing
            )
            batch = DecodeBatch(size, CPU, num_at_once=at_once, sharing=sharing)
            rows = DecodeRows(tables, batch.slots, batch.lengths, batch.spans, batch.shared)
            yield lambda rows=rows, size=size: kernels.decode(*rows_of(model, size), pool, rows, options)
            given = batch.seed_keys, batch.draws, batch.temperatures, drawn[0][:size], drawn[1][:size]
            yield lambda given=given, logits=logits: kernels.sample(logits, *given)
    table = SlotTable(MAX_ROWS, 16)
    for count in (1, 3, 16, 17, 512):
        cut = cut_rows(table, np.arange(count), np.arange(count), VOCAB_SIZE, CPU)
        draws = new_draws(count, int(cut.list_starts[-1]), VOCAB_SIZE, META)
        yield lambda cut=cut, draws=draws: kernels.sample_truncated(logits, cut.rows, draws)
    for size in bucket_rows(8192):
        batch = PromptBatch(size, min(size, 128), CPU)
        yield lambda batch=batch, size=size: kernels.prefill(
            *rows_of(model, size), pool, batch.piece_rows(tables), options
        )
    # As they are launched where no bucket holds them.
    for size, num_pieces in ((8000, 1), (8192, 16), (4999, 3)):
        pieces = torch.zeros((4, num_pieces), dtype=torch.int32)
        places = torch.zeros((4, size), dtype=torch.int64)[2]
        rows = PieceRows(tables, *pieces, places)
        yield lambda rows=rows, size=size: kernels.prefill(*rows_of(model, size), pool, rows, options)


if __name__ == "__main__":
    counts = {}
    for model in MODELS:
        found = defaultdict(set)
        for launch in launches(model):
            for made in compiled(launch):
                found[made.kernel].add(made.variant)
        counts[model] = {kernel: len(variants) for kernel, variants in found.items()}
    print(json.dumps(counts))
