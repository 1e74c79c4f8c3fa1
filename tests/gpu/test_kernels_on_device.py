"""Kernels at the shapes of real models, inside CUDA graphs, against float32 torch on the same device."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.engines import noise
from headrace.engines.sampler import SamplerRows, sample
from headrace.kernels.truncation import TruncatedRows, new_draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
# (query heads, key-value heads, head dim) of Qwen2 0.5B, 1.5B and 7B, and with more query heads a key-value head.
HEADS = [(14, 2, 64), (12, 2, 128), (28, 4, 128), (32, 2, 128), (64, 2, 128), (16, 1, 64)]
BLOCK = 16


def attend(query_THD, kv_LW, start, num_kv, scale):
    """float32 [T, H, D]; query t is at position start + t."""
    num_rows, num_heads, dim = query_THD.shape
    key, value = kv_LW.float().view(-1, 2, num_kv, dim).unbind(1)
    group = num_heads // num_kv
    scores = torch.einsum("thd,lhd->htl", query_THD.float(), key.repeat_interleave(group, 1)) * scale
    position = start + torch.arange(num_rows, device=CUDA)[:, None]
    scores = scores.masked_fill(torch.arange(len(kv_LW), device=CUDA) > position, float("-inf"))
    return torch.einsum("htl,lhd->thd", scores.softmax(-1), value.repeat_interleave(group, 1))


def shuffled_tables(num_slots, max_length):
    """A pool's worth of block ids from 1, each used once, as int32 [slots, blocks]."""
    num_blocks = num_slots * max_length // BLOCK
    return (1 + torch.randperm(num_blocks, device=CUDA)).int().view(num_slots, -1)


def captured(launch):
    """``launch`` as a CUDA graph, after a first run that compiles it."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph


def tell(places, tensors):
    for place, tensor in zip(places, tensors, strict=True):
        place.copy_(tensor)


@pytest.mark.parametrize(("num_heads", "num_kv", "dim"), HEADS)
@pytest.mark.parametrize("num_rows", [1, 13, 300])
def test_decode_in_a_graph_follows_its_inputs(num_heads, num_kv, dim, num_rows):
    from headrace.kernels.dealing import spans_of_rows
    from headrace.kernels.decode_attention import decode_attention, decode_workspace, spans_at_once

    max_length = 2048
    width = num_kv * 2 * dim
    tables = shuffled_tables(num_rows, max_length)
    pool = torch.randn((tables.numel() + 1, BLOCK, width), device=CUDA).bfloat16()
    slots = torch.empty(num_rows, dtype=torch.int64, device=CUDA)
    lengths = torch.empty(num_rows, dtype=torch.int32, device=CUDA)
    query = torch.empty((num_rows, num_heads, dim), dtype=torch.bfloat16, device=CUDA)
    out = torch.empty_like(query)
    workspace = decode_workspace(num_rows, num_heads, dim, max_length, CUDA)
    slots.zero_(), lengths.zero_(), query.zero_()
    own = torch.zeros((2, num_rows, num_kv, dim), dtype=torch.bfloat16, device=CUDA)
    options = {"scale": dim**-0.5, "out_BHE": out, "workspace": workspace}
    at_once = spans_at_once(num_rows, num_heads, num_kv, dim, torch.bfloat16, CUDA, sharing=False)
    spans = spans_of_rows(np.zeros(num_rows), at_once, CUDA)
    graph = captured(
        lambda: decode_attention(query, *own, pool, tables, slots, lengths, spans=spans, **options)
    )
    for _ in range(3):
        slots.copy_(torch.randperm(num_rows, device=CUDA))
        lengths.copy_(torch.randint(0, max_length + 1, (num_rows,), device=CUDA))
        tell(spans, spans_of_rows(lengths.cpu().numpy(), at_once, CUDA))
        query.normal_(), own.normal_()
        out.fill_(float("nan"))
        graph.replay()
        expected = torch.zeros((num_rows, num_heads, dim), device=CUDA)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
            if length:
                kv = pool[tables[slot].long()].flatten(0, 1)[:length]
                assert torch.equal(kv[-1], own[:, row].flatten())
                expected[row] = attend(query[row : row + 1], kv, length - 1, num_kv, dim**-0.5)[0]
        error = (out.float() - expected).norm() / expected.norm().clamp_min(1e-6)
        assert error < 5e-3


@pytest.mark.parametrize(("num_heads", "num_kv", "dim"), HEADS)
@pytest.mark.parametrize(("num_rows", "max_length"), [(13, 4096), (64, 1024), (300, 512)])
def test_shared_prefixes_in_a_graph_follow_their_inputs(num_heads, num_kv, dim, num_rows, max_length):
    """Groups of other sizes with other prefixes at each replay; a follower's own table is wrong up to there."""
    from headrace.engines.shared_prompts import shared_prompts
    from headrace.kernels.dealing import spans_of_rows
    from headrace.kernels.decode_attention import decode_attention, decode_workspace, spans_at_once
    from headrace.kernels.shared_prefixes import SharedPrefixes

    own = shuffled_tables(num_rows, max_length)
    pool = torch.randn((own.numel() + 1, BLOCK, num_kv * 2 * dim), device=CUDA).bfloat16()
    pool[0] = float("nan")
    tables = own.clone()
    numbers = {"dtype": torch.int32, "device": CUDA}
    slots, lengths = torch.arange(num_rows, device=CUDA), torch.zeros(num_rows, **numbers)
    shared = SharedPrefixes(
        torch.zeros(num_rows, **numbers), torch.zeros(num_rows, **numbers),
        torch.zeros(num_rows // 2 + 1, **numbers), torch.zeros(1, **numbers),
    )  # fmt: skip
    query = torch.zeros((num_rows, num_heads, dim), dtype=torch.bfloat16, device=CUDA)
    out = torch.empty_like(query)
    workspace = decode_workspace(num_rows, num_heads, dim, max_length, CUDA)
    own_row = torch.zeros((2, num_rows, num_kv, dim), dtype=torch.bfloat16, device=CUDA)
    options = {"scale": dim**-0.5, "out_BHE": out, "workspace": workspace, "shared": shared}
    at_once = spans_at_once(num_rows, num_heads, num_kv, dim, torch.bfloat16, CUDA, sharing=True)
    spans = spans_of_rows(np.zeros(num_rows), at_once, CUDA)

    def launch():
        decode_attention(query, *own_row, pool, tables, slots, lengths, spans=spans, **options)

    graph = captured(launch)
    rng = np.random.default_rng(num_rows)
    for most in (1, 3, 8, 20):
        depths = np.zeros(num_rows, dtype=np.int64)
        whole = own.clone()
        at = 0
        while at < num_rows:
            members = slice(at, at + int(rng.integers(1, most + 1)))
            depths[members] = depth = int(rng.integers(0, max_length // BLOCK))
            whole[members, :depth] = own[at, :depth]
            at = members.stop
        found = shared_prompts(whole.cpu().numpy().astype(np.int64), depths, BLOCK)
        followers = np.setdiff1d(found.members, found.members[found.starts[:-1]])
        tables.copy_(whole)
        for row in followers.tolist():
            tables[row, : int(found.begins[row]) // BLOCK] = 0
        given = (found.begins, found.members, found.starts, np.array([found.num_pieces]))
        for target, array in zip(
            (shared.begins, shared.members, shared.starts, shared.num_pieces), given, strict=True
        ):
            target[: len(array)] = torch.from_numpy(array).to(target)
        longest = torch.from_numpy(rng.integers(0, max_length + 1, num_rows)).int()
        lengths.copy_(torch.maximum(longest, torch.from_numpy(depths * BLOCK + 1).int()))
        tell(spans, spans_of_rows((lengths - shared.begins).cpu().numpy(), at_once, CUDA))
        query.normal_(), own_row.normal_()
        out.fill_(float("nan"))
        graph.replay()
        for row, length in enumerate(lengths.tolist()):
            kv = pool[whole[row].long()].flatten(0, 1)[:length]
            expected = attend(query[row : row + 1], kv, length - 1, num_kv, dim**-0.5)[0]
            assert (out[row].float() - expected).norm() / expected.norm() < 1e-2
        # Whichever kernel is last with a row, and however they were launched.
        first = out.clone()
        for again in (*[graph.replay] * 20, launch):
            out.fill_(float("nan"))
            again()
            assert torch.equal(out, first)
        assert not workspace.arrived.any()


@pytest.mark.parametrize(("num_heads", "num_kv", "dim"), HEADS)
def test_prefill_of_long_prompts_in_pieces(num_heads, num_kv, dim):
    from headrace.kernels.paged_attention import prefill_attention, write_rows

    pieces = [(0, 2048), (1500, 548), (0, 3), (777, 1000)]
    tables = shuffled_tables(len(pieces), 2048)
    pool = torch.full((tables.numel() + 1, BLOCK, num_kv * 2 * dim), float("nan"), device=CUDA).bfloat16()
    for slot in range(len(pieces)):
        places = (tables[slot].long()[:, None] * BLOCK + torch.arange(BLOCK, device=CUDA)).flatten()
        rows = torch.randn((2, 2048, num_kv, dim), device=CUDA).bfloat16()
        write_rows(pool, places, rows[0], rows[1])
    counts = [count for _, count in pieces]
    offsets = np.cumsum([0, *counts])[:-1].tolist()
    query = torch.randn((sum(counts), num_heads, dim), device=CUDA).bfloat16()
    out = torch.full_like(query, float("nan"))
    numbers = {"dtype": torch.int32, "device": CUDA}
    prefill_attention(
        query,
        pool,
        tables,
        slots=torch.arange(len(pieces), **numbers),
        starts=torch.tensor([start for start, _ in pieces], **numbers),
        counts=torch.tensor(counts, **numbers),
        offsets=torch.tensor(offsets, **numbers),
        value_dim=dim,
        scale=dim**-0.5,
        out_THE=out,
    )
    for slot, ((start, count), offset) in enumerate(zip(pieces, offsets, strict=True)):
        kv = pool[tables[slot].long()].flatten(0, 1)[: start + count]
        expected = attend(query[offset : offset + count], kv, start, num_kv, dim**-0.5)
        assert (out[offset : offset + count].float() - expected).norm() / expected.norm() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 30, 300])
def test_a_whole_vocabulary_is_sampled_as_on_the_cpu(dtype, truncated, num_rows):
    """At most one row in a hundred may differ, where the mass above a cut rounds otherwise."""
    from headrace.kernels import sampling

    vocab_size, generator = 151936, np.random.default_rng(num_rows)
    rows = SamplerRows(
        temperature=generator.choice(np.array([0.0, 0.7, 1.0, 1.0], dtype=np.float32), num_rows),
        top_k=generator.choice(np.array([0, 20, 200]), num_rows) * truncated,
        top_p=np.where(truncated, generator.choice([1.0, 0.9, 0.99], num_rows), 1.0).astype(np.float32),
        min_p=(generator.choice([0.0, 0.01], num_rows) * truncated).astype(np.float32),
        seed_key=np.array([noise.seed_key(s) for s in range(num_rows)], dtype=np.uint64),
        position=generator.integers(0, 5000, num_rows),
    )
    logits = (torch.randn((num_rows, vocab_size), device=CUDA) * 3.0).to(dtype)
    draws = new_draws(num_rows, num_rows * 256, vocab_size, CUDA)
    workspace = sampling.sample_workspace(num_rows, CUDA)

    def on_gpu(array):
        return torch.from_numpy(array).to(CUDA)

    basic = [on_gpu(array) for array in (rows.seed_key.view(np.int64), rows.position, rows.temperature)]
    if truncated:
        limits = [on_gpu(array) for array in (rows.top_k, rows.top_p, rows.min_p)]
        starts = torch.arange(num_rows + 1, device=CUDA) * 256
        given = TruncatedRows(torch.arange(num_rows, device=CUDA), *basic, *limits, starts)
        graph = captured(lambda: sampling.sample_rows_truncated(logits, given, draws, workspace))
    else:
        outputs = {"token_ids_out_R": draws.token_ids, "logprobs_out_R": draws.logprobs}
        graph = captured(lambda: sampling.sample_rows(logits, *basic, **outputs, workspace=workspace))
    draws.token_ids.fill_(-1), draws.logprobs.fill_(float("nan")), draws.listed.fill_(-1)
    graph.replay()
    expected = sample(logits.float(), rows)
    same = draws.token_ids.cpu().numpy() == expected.token_ids
    same &= np.abs(draws.logprobs.cpu().numpy() - expected.logprobs) < 1e-4
    listed, counts = draws.listed.cpu().numpy().reshape(num_rows, 256), draws.counts.cpu().numpy()
    words = draws.kept_words.cpu().numpy().view(np.uint8)
    for row, kept in expected.kept.items():
        bits = np.flatnonzero(np.unpackbits(words[row], bitorder="little"))
        # Mass above a cut rounds otherwise where thousands of tokens are kept, so only few may be otherwise.
        same[row] &= len(np.setxor1d(bits, kept)) <= len(kept) // 500
        assert counts[row] == len(bits)
        np.testing.assert_array_equal(listed[row, : len(bits)], bits[:256])
    assert (~same).sum() <= num_rows // 100


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("ids_shape", [(), (8,)], ids=["one", "several"])
@pytest.mark.parametrize(("num_tokens", "vocab_size"), [(1, 151936), (300, 151936), (131, 50257)])
def test_a_whole_vocabulary_is_valued_as_in_float64(num_tokens, vocab_size, ids_shape, softcap):
    from headrace.kernels.head_values import token_values
    from headrace.trainers.whole_head import plain_token_values

    spread = 1.0 + 5.0 * torch.rand((num_tokens, 1), device=CUDA)
    logits = torch.randn((num_tokens, vocab_size), device=CUDA) * spread + 15.0
    logits[:, 17] += 20.0
    temperatures = 0.5 + torch.rand(num_tokens, device=CUDA)
    ids = torch.randint(0, vocab_size, (num_tokens, *ids_shape), device=CUDA)
    found = token_values(logits, ids, temperatures, softcap)
    expected = plain_token_values(logits.double(), ids, temperatures.double(), softcap)
    for values, right in zip(found, expected, strict=True):
        assert values.shape == right.shape
        # Where one token has nearly all the mass, values are near zero and what they are made of is not.
        assert (values - right).norm() < 2e-6 * (right.norm() + num_tokens**0.5)


@pytest.mark.parametrize("offset", [0, 1], ids=["even", "odd-address"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(2, 128), (8, 128), (2, 16), (3, 40), (5, 3), (2, 80), (32, 128)])
def test_rows_read_in_many_places_are_laid_out_and_summed(shape, dtype, offset):
    """Copies have the bits of torch's, sums those of one float32 addition after another."""
    from headrace.kernels.repeated_rows import lay_out, row_sums

    num_tokens, num_places = 12_051, 17_003

    def random_rows(count):
        numel = count * math.prod(shape)
        return torch.randn(numel + offset, device=CUDA).to(dtype)[offset:].view(count, *shape)

    tokens = torch.randint(0, num_tokens, (num_places,), device=CUDA)
    tokens[: num_places // 8] %= 100
    pair = random_rows(num_tokens), random_rows(num_tokens)
    for laid, rows in zip(lay_out(*pair, tokens.int()), pair, strict=True):
        assert torch.equal(laid, rows.index_select(0, tokens))

    sizes = torch.bincount(tokens, minlength=num_tokens)
    starts = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    places = tokens.argsort(stable=True)
    pair = random_rows(num_places), random_rows(num_places)
    found = row_sums(*pair, starts.int(), places.int())
    again = row_sums(*pair, starts.int(), places.int())
    for sums, same, rows in zip(found, again, pair, strict=True):
        assert torch.equal(sums, same)
        expected = torch.zeros((num_tokens, *shape), device=CUDA, dtype=torch.float64)
        expected.index_add_(0, tokens, rows.double())
        assert (sums - expected).norm() / expected.norm() < (1e-6 if dtype == torch.float32 else 2**-8)
        in_order = torch.zeros((num_tokens, *shape), device=CUDA)
        for number in range(int(sizes.max())):
            more = sizes > number
            in_order[more] += rows[places[starts[:-1][more] + number]].float()
        assert torch.equal(sums, in_order.to(dtype))


@pytest.mark.parametrize("shape", [(8960, 1536), (1536,), (151_936, 1536), (1001, 33)])
def test_a_gradient_is_added_with_the_bits_of_torch(shape):
    from headrace.kernels.add import add_to

    total, term = torch.randn(shape, device=CUDA), torch.randn(shape, device=CUDA).bfloat16()
    expected = total + term.float()
    add_to(total, term)
    assert torch.equal(total, expected)


# (hidden size, inner width) of Qwen2 0.5B, 1.5B and 7B, and one whose width ends within a tile.
@pytest.mark.parametrize(("hidden", "width"), [(896, 4864), (1536, 8960), (3584, 18944), (520, 1000)])
@pytest.mark.parametrize("num_rows", [1, 16, 24, 64, 65, 200, 300, 350, 512, 1000])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_gated_products_in_a_graph_follow_their_inputs(hidden, width, num_rows, keep, joined):
    from headrace.kernels.gated import GatedWeights, gated_product, in_pairs

    x = torch.zeros((num_rows, hidden), device=CUDA, dtype=torch.bfloat16)
    whole = torch.zeros((2 * width, hidden), device=CUDA, dtype=torch.bfloat16)
    weights = GatedWeights(*whole.split(width), whole if joined else None)
    outputs = []
    graph = captured(lambda: outputs.append(gated_product(x, weights, keep=keep)))
    inner, kept = outputs[-1]
    for _ in range(2):
        x.normal_(), whole.normal_(std=hidden**-0.5)
        graph.replay()
        gate, up = (x.float() @ whole.float().T).chunk(2, -1)
        right = torch.nn.functional.silu(gate) * up
        # One rounding of the result; with both products rounded before, it would be 1.7 times as far.
        assert (inner.float() - right).norm() / right.norm() < 1.1 * (
            right.bfloat16().float() - right
        ).norm() / right.norm()
        if kept is not None:
            products = in_pairs(torch.cat((gate, up), -1))
            assert (kept.float() - products).norm() / products.norm() < 3e-3


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("num_rows", [65, 128, 177, 256, 384, 512, 1000, 9_001])
@pytest.mark.parametrize(("hidden", "width"), [(896, 4864), (3584, 18944), (520, 1000)])
def test_the_librarys_gated_products_have_the_sums_of_ours(hidden, width, num_rows, keep):
    from headrace.kernels import gated_library
    from headrace.kernels.gated import GatedWeights, tiled_product
    from headrace.kernels.gated_tiles import Tiles, choose_library_tiles

    if not gated_library.is_installed():
        pytest.skip("quack-kernels is not installed, or in another version")
    x = torch.randn((num_rows, hidden), device=CUDA).bfloat16()
    whole = (torch.randn((2 * width, hidden), device=CUDA) * hidden**-0.5).bfloat16()
    tiles = choose_library_tiles(num_rows, hidden, width)
    assert tiles is not None
    made, kept = gated_library.library_product(x, whole, tiles, keep=keep)
    ours, kept_by_us = tiled_product(
        x, GatedWeights(*whole.split(width), whole), Tiles(128, 128, 64, 8, 4, False, 8), keep=keep
    )
    # Sums are the same; the exponential of the gate is another approximation.
    assert (made != ours).float().mean() < 1e-3 and (
        made.float() - ours.float()
    ).norm() < 1e-4 * ours.float().norm()
    if kept is not None and kept_by_us is not None:
        assert torch.equal(kept, kept_by_us)


# The second has more rows than a grid of programs is high.
@pytest.mark.parametrize(("num_rows", "width"), [(8_702, 8_960), (70_000, 72)])
def test_gate_gradients_at_the_size_of_a_row(num_rows, width):
    from headrace.kernels.gated import gate, gate_gradients, in_pairs

    products = torch.randn((num_rows, 2 * width), device=CUDA).bfloat16()
    grad = torch.randn((num_rows, width), device=CUDA).bfloat16()
    right = products.float().requires_grad_()
    of_gate, up = right.chunk(2, -1)
    value = torch.nn.functional.silu(of_gate) * up
    value.backward(grad.float())
    grads, inner = gate_gradients(grad, in_pairs(products))
    assert (grads.float() - right.grad).norm() / right.grad.norm() < 3e-3
    assert (inner.float() - value).norm() / value.norm() < 3e-3
    assert torch.equal(gate(products, torch.bfloat16), inner)


@pytest.mark.parametrize("num_rows", [129, 1000, 9_001])
@pytest.mark.parametrize(("hidden", "width"), [(896, 4864), (3584, 18944), (520, 1000)])
def test_the_librarys_gate_gradients_are_those_of_float32(hidden, width, num_rows):
    from headrace.kernels import gated_library
    from headrace.kernels.gated import gate_gradients, in_pairs
    from headrace.kernels.gated_tiles import GRADIENT_TILES

    if not gated_library.is_installed():
        pytest.skip("quack-kernels is not installed, or in another version")
    grad = torch.randn((num_rows, hidden), device=CUDA).bfloat16()
    down = (torch.randn((hidden, width), device=CUDA) * hidden**-0.5).bfloat16()
    products = torch.randn((num_rows, 2 * width), device=CUDA).bfloat16()
    # A pair whose second is nothing, or next to nothing, is no usual number of 32 bits.
    products[::3, width:], products[1::7, width:] = 0.0, 1e-39
    exact = products.float().requires_grad_()
    of_gate, up = exact.chunk(2, -1)
    value = torch.nn.functional.silu(of_gate) * up
    value.backward(grad.float() @ down.float())
    pairs = in_pairs(products)
    by_pass, _ = gate_gradients(grad @ down, pairs)
    for tiles in GRADIENT_TILES:
        grads, inner = gated_library.library_gradients(grad, down, pairs, tiles)
        # It rounds once less, in both halves.
        for part, passed, right in zip(*(t.chunk(2, -1) for t in (grads, by_pass, exact.grad)), strict=True):
            assert (part.float() - right).norm() < (passed.float() - right).norm()
            assert (part.float() - right).norm() < 3e-3 * right.norm()
        assert (inner.float() - value).norm() / value.norm() < 3e-3


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("num_rows", [1024, 1301])
def test_a_gated_layers_gradients_are_the_same_by_the_library(monkeypatch, num_rows, joined):
    from headrace.kernels import gated, gated_library
    from headrace.models import gated_layer  # noqa: F401

    if not gated_library.is_installed():
        pytest.skip("quack-kernels is not installed, or in another version")
    hidden, width = 896, 4864
    x = torch.randn((num_rows, hidden), device=CUDA).bfloat16()
    whole = (torch.randn((2 * width, hidden), device=CUDA) * hidden**-0.5).bfloat16()
    down = (torch.randn((hidden, width), device=CUDA) * width**-0.5).bfloat16()
    pull = torch.randn((num_rows, hidden), device=CUDA)
    made = {}
    for by, choose in (("library", gated.choose_gradient_tiles), ("pass", lambda *_: None)):
        monkeypatch.setattr(gated, "choose_gradient_tiles", choose)
        inputs = [t.detach().requires_grad_() for t in (x, *whole.split(width), down)]
        out, _ = torch.ops.headrace.gated_layer(*inputs, whole if joined else None)
        made[by] = torch.autograd.grad(out, inputs, pull)
    assert not torch.equal(made["library"][0], made["pass"][0])
    for found, passed in zip(made["library"], made["pass"], strict=True):
        # Roundings are 2^-9 at most, and independent of each other.
        assert (found.float() - passed.float()).norm() < 5e-3 * passed.float().norm()


@pytest.mark.parametrize(
    ("inputs", "outputs"), [(896, 896), (1536, 1536), (8960, 1536), (18944, 3584), (520, 1000)]
)
@pytest.mark.parametrize("num_rows", [1, 16, 24, 32, 33, 64, 65, 200, 512])
def test_products_added_in_a_graph_where_the_sum_lies(inputs, outputs, num_rows):
    from headrace.kernels.added_product import MOST_TILES
    from headrace.models import merged_layer  # noqa: F401

    arrived = torch.zeros(MOST_TILES, device=CUDA, dtype=torch.int32)
    total = torch.zeros((1, num_rows, outputs), device=CUDA)
    x = torch.zeros((num_rows, inputs), device=CUDA, dtype=torch.bfloat16)
    weight = torch.zeros((outputs, inputs), device=CUDA, dtype=torch.bfloat16)
    graph = captured(lambda: torch.ops.headrace.add_product(total, x, weight, arrived))
    for _ in range(2):
        total.normal_(), x.normal_(), weight.normal_(std=inputs**-0.5)
        expected = total.double() + x.double() @ weight.double().T
        graph.replay()
        # Not rounded to bfloat16 on its way, which would make it 1e-3.
        assert (total.double() - expected).norm() / expected.norm() < 1e-4
        assert not arrived.any()


@pytest.mark.parametrize(("num_heads", "num_kv", "dim"), [*HEADS, (4, 4, 80)])
@pytest.mark.parametrize("num_rows", [1, 129, 4351])
def test_heads_turned_in_a_graph_and_back(num_heads, num_kv, dim, num_rows):
    from headrace.kernels.rotation import Rotation, rotated
    from headrace.kernels.turn import turn_gradients, turn_heads

    numbers = {"dtype": torch.bfloat16, "device": CUDA}
    counts = (num_heads, num_kv, num_kv)
    product = torch.zeros((num_rows, sum(counts) * dim), **numbers)
    rotation = Rotation(*torch.zeros((2, num_rows, dim), **numbers))
    made = []
    graph = captured(lambda: made.append(turn_heads(product, rotation, num_heads)))
    query, key, value = made[-1]
    graph_back = captured(lambda: made.append(turn_gradients(query, key, value, rotation)))
    for _ in range(2):
        product.normal_(), rotation.cos.normal_(), rotation.sin.normal_()
        graph.replay()
        wide = product.float().requires_grad_()
        *turning, kept = wide.unflatten(1, (-1, dim)).split(counts, dim=1)
        right = [*(rotated(part, rotation) for part in turning), kept]
        for found, exact in zip((query, key, value), right, strict=True):
            # Rounded once, in the same direction but where a multiplication was fused with a sum.
            assert (found.float() - exact.bfloat16().float()).norm() <= 1e-3 * exact.norm()
        assert torch.equal(value, kept.bfloat16())
        graph_back.replay()
        (exact,) = torch.autograd.grad(right, wide, [part.float() for part in (query, key, value)])
        assert (made[-1].float() - exact.bfloat16().float()).norm() <= 1e-3 * exact.norm()
