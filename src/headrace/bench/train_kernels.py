"""Cases of the trainer's kernels, each beside the function it stands for, over the same memory.

Shapes are those of Qwen2 1.5B and rows of 12,051 tokens, where a case does not name another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional as F

from headrace.bench.kernel_cases import MODELS, VOCAB_SIZE, Case, cold_copies, launching
from headrace.kernels import add as add_kernel
from headrace.kernels import head_values, repeated_rows, turn
from headrace.kernels.rotation import Rotation, rotated
from headrace.models.shared_prefix import segment_bounds
from headrace.trainers.head import fused
from headrace.trainers.whole_head import plain_token_values

HEAD_CHUNKS = (1722, 256, 16)
"""Tokens whose logits are held at once: many, some, and few."""
ADDED_SHAPES = ((8960, 1536), (1536, 1536), (256, 1536), (1536,))
NUM_TOKENS = 8702
"""Of a row whose heads are turned: two groups of eight over prompts of 255 with 512 tokens each."""
GROUPS = (4, 192, 8, 384)
"""Of a row with shared prompts: how many, tokens of a prompt, continuations of each and their tokens."""


def cases(device: torch.device) -> Iterator[Case]:
    for num_tokens in HEAD_CHUNKS:
        yield from token_values(num_tokens, device)
    for shape in ADDED_SHAPES:
        yield from add(shape, device)
    for model in MODELS:
        yield from shared_rows(model, device)
        yield from turned_heads(model, device)


def token_values(num_tokens: int, device: torch.device) -> Iterator[Case]:
    """Its bytes are one reading of the logits."""
    num_bytes = num_tokens * VOCAB_SIZE * 4
    copies = cold_copies(num_bytes, most=16)
    logits = [torch.randn((num_tokens, VOCAB_SIZE), device=device) * 3.0 for _ in range(copies)]
    ids = torch.randint(VOCAB_SIZE, (num_tokens,), device=device)
    temperatures = torch.ones(num_tokens, device=device)
    peer = fused(plain_token_values, device.type)

    def launches(function: Callable[..., object]) -> list[Callable[[], None]]:
        return [launching(function, x, ids, temperatures, None) for x in logits]

    name = f"head {num_tokens} x {VOCAB_SIZE}"
    yield Case(name, launches(head_values.token_values), num_bytes, "TB/s")
    yield Case(name, launches(peer), num_bytes, "TB/s", "torch, compiled")


def add(shape: tuple[int, ...], device: torch.device) -> Iterator[Case]:
    """Its bytes are a float32 sum read and written and a bf16 term read."""
    num_bytes = 10 * math.prod(shape)
    copies = cold_copies(num_bytes, least=2)
    sums = [torch.randn(shape, device=device) for _ in range(copies)]
    terms = [torch.randn(shape, device=device).bfloat16() for _ in range(copies)]
    peer = torch.compile(_plain_add, dynamic=True)

    def launches(function: Callable[..., object]) -> list[Callable[[], None]]:
        pairs = zip(sums, terms, strict=True)
        return [launching(function, total.view(-1), term.view(-1)) for total, term in pairs]

    name = f"add {' x '.join(map(str, shape))}"
    yield Case(name, launches(add_kernel.add_to), num_bytes, "TB/s")
    yield Case(name, launches(peer), num_bytes, "TB/s", "torch, compiled")


def shared_rows(model: str, device: torch.device) -> Iterator[Case]:
    """Keys and values laid out as they are read, then their gradients summed; bytes are of each row read once and each
    result written."""
    num_groups, prompt, members, own = GROUPS
    lengths = [prompt] * num_groups + [own] * (num_groups * members)
    parents = [-1] * num_groups + [group for group in range(num_groups) for _ in range(members)]
    bounds = segment_bounds(lengths, parents, device=device)
    num_segments, _, _, num_tokens, num_places = bounds.counts.tolist()
    sizes = [num_segments + 1, num_segments + 1, num_places, num_tokens + 1, num_places]
    _, _, tokens, starts, places = bounds.edges.split(sizes)
    _, num_kv, dim = MODELS[model]
    num_bytes = 2 * (num_tokens + num_places) * num_kv * dim * 2
    copies = cold_copies(num_bytes, least=2)

    def pairs(count: int) -> list[torch.Tensor]:
        return [torch.randn((2, count, num_kv, dim), device=device).bfloat16() for _ in range(copies)]

    def plain_lay_out(key: torch.Tensor, value: torch.Tensor) -> None:
        key.index_select(0, tokens), value.index_select(0, tokens)

    def plain_sums(*grads: torch.Tensor) -> None:
        for grad in grads:
            total = grad.new_zeros((num_tokens, num_kv, dim), dtype=torch.float32)
            total.index_add_(0, tokens, grad.float()).to(grad.dtype)

    laid, summed = pairs(num_tokens), pairs(num_places)
    shape = f"{model} {num_places} keys"
    ours = [launching(repeated_rows.lay_out, *pair, tokens) for pair in laid]
    yield Case(f"lay out {shape}", ours, num_bytes, "TB/s")
    yield Case(
        f"lay out {shape}", [launching(plain_lay_out, *pair) for pair in laid], num_bytes, "TB/s", "torch"
    )
    ours = [launching(repeated_rows.row_sums, *pair, starts, places) for pair in summed]
    yield Case(f"sum {shape}", ours, num_bytes, "TB/s")
    yield Case(f"sum {shape}", [launching(plain_sums, *pair) for pair in summed], num_bytes, "TB/s", "torch")


def turned_heads(model: str, device: torch.device) -> Iterator[Case]:
    """Queries, keys and values out of their product, then gradients back; bytes are of each number read and written
    once. The peer is what autograd makes of three slices."""
    num_query, num_kv, dim = MODELS[model]
    counts = (num_query, num_kv, num_kv)
    num_bytes = NUM_TOKENS * (2 * sum(counts) + 2) * dim * 2
    copies = cold_copies(num_bytes, least=2)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn((NUM_TOKENS, *shape), device=device).bfloat16()

    rotation = Rotation(numbers(dim), numbers(dim))
    products = [numbers(sum(counts) * dim) for _ in range(copies)]
    parts = [[numbers(count, dim) for count in counts] for _ in range(copies)]

    def plain(product: torch.Tensor) -> list[torch.Tensor]:
        query, key, value = product.unflatten(1, (-1, dim)).split(counts, dim=1)
        return [part.contiguous() for part in (rotated(query, rotation), rotated(key, rotation), value)]

    def plain_gradients(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        back = rotation._replace(sin=-rotation.sin.roll(dim // 2, dims=1))
        grads = (rotated(query, back), rotated(key, back), value)
        total, begin = torch.zeros_like(products[0]), 0
        for grad in grads:
            behind = total.shape[1] - begin - grad[0].numel()
            total = total + F.pad(grad.flatten(1), (begin, behind))
            begin += grad[0].numel()
        return total

    name = f"turn heads {model} {NUM_TOKENS} tokens"
    ours = [launching(turn.turn_heads, product, rotation, num_query) for product in products]
    peers = _launches_compiled(plain, [[product] for product in products])
    yield Case(name, ours, num_bytes, "TB/s")
    yield Case(name, peers, num_bytes, "TB/s", "torch, compiled")
    name = f"turn gradients {model} {NUM_TOKENS} tokens"
    ours = [launching(turn.turn_gradients, *three, rotation) for three in parts]
    yield Case(name, ours, num_bytes, "TB/s")
    yield Case(name, _launches_compiled(plain_gradients, parts), num_bytes, "TB/s", "torch, compiled")


def _launches_compiled(
    function: Callable[..., object], given: Sequence[Sequence[torch.Tensor]]
) -> list[Callable[[], None]]:
    peer = torch.compile(function, dynamic=True)
    return [launching(peer, *tensors) for tensors in given]


def _plain_add(total: torch.Tensor, term: torch.Tensor) -> None:
    total += term
