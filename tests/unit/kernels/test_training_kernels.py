"""The trainer's kernels against the plain functions they stand for, in float64."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, relative_error, require_kernels

require_kernels()

from headrace.kernels.add import add_to  # noqa: E402
from headrace.kernels.head_values import token_values  # noqa: E402
from headrace.kernels.repeated_rows import lay_out, row_sums  # noqa: E402
from headrace.trainers.whole_head import plain_token_values  # noqa: E402

# What the interpreter's exponentials overflow to is what the kernel wants.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def random_logits(num_tokens: int, vocab_size: int, generator: torch.Generator) -> torch.Tensor:
    """Each row of another width about another offset, in memory that is NaN beyond the vocabulary."""
    wide = torch.full((num_tokens, vocab_size + 32), float("nan"))
    spread = torch.tensor([0.1, 1.0, 3.0, 10.0]).repeat(num_tokens)[:num_tokens, None]
    offset = torch.randn((num_tokens, 1), generator=generator) * 10
    wide[:, :vocab_size] = torch.randn((num_tokens, vocab_size), generator=generator) * spread + offset
    return wide.to(DEVICE)[:, :vocab_size]


@pytest.mark.parametrize("softcap", [None, 12.0])
@pytest.mark.parametrize("ids_shape", [(), (1,), (3,), (300,)], ids=["one", "column", "few", "many"])
@pytest.mark.parametrize("vocab_size", [1, 17, 2048, 5003])
def test_values_follow_the_plain_function(
    vocab_size: int, ids_shape: tuple[int, ...], softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = random_logits(7, vocab_size, generator)
    temperatures = (0.3 + 1.5 * torch.rand(7, generator=generator)).to(DEVICE)
    ids = torch.randint(0, vocab_size, (7, *ids_shape), generator=generator).to(DEVICE)
    found = token_values(logits, ids, temperatures, softcap)
    expected = plain_token_values(logits.cpu().double(), ids.cpu(), temperatures.cpu().double(), softcap)
    for values, right in zip(found, expected, strict=True):
        assert values.shape == right.shape and values.dtype == torch.float32
        if vocab_size == 1 and values is not found[0]:
            # A certain token has log-probability and entropy 0.
            assert torch.count_nonzero(values) == 0
        else:
            assert relative_error(values, right) < TOLERANCE[torch.float32]


def test_a_common_offset_changes_nothing_but_the_normaliser() -> None:
    """Multiples of 1 / 64 stay what they are beside 2^16."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn((4, 3000), generator=generator) * 128).round() / 64
    ids, temperatures = torch.randint(0, 3000, (4,), generator=generator), torch.full((4,), 0.5)
    given = ids.to(DEVICE), temperatures.to(DEVICE), None
    near = token_values(logits.to(DEVICE), *given)
    for offset in (2.0**16, -(2.0**16)):
        far = token_values((logits + offset).to(DEVICE), *given)
        torch.testing.assert_close(far[0], near[0] + 2 * offset, rtol=3e-7, atol=0)
        assert torch.equal(far[1], near[1]) and torch.equal(far[2], near[2])


def test_extreme_logits() -> None:
    size = 5000
    logits = torch.zeros(6, size)
    logits[1, -1] = 1e4
    logits[2] = -1e4
    logits[3, 1:] = -torch.inf
    logits[4, ::2] = -torch.inf
    logits[5, 0], logits[5, 4999] = 3e4, 3e4
    ids = torch.tensor([[0, 4999]] * 6)
    normaliser, logprobs, entropy = (
        values.cpu()
        for values in token_values(logits.to(DEVICE), ids.to(DEVICE), torch.ones(6).to(DEVICE), None)
    )
    full, half, two = math.log(size), math.log(size // 2), math.log(2)
    torch.testing.assert_close(normaliser, torch.tensor([full, 1e4, full - 1e4, 0.0, half, 3e4 + two]))
    torch.testing.assert_close(entropy, torch.tensor([full, 0.0, full, 0.0, half, two]))
    never = -torch.inf
    expected = [[-full, -full], [-1e4, 0.0], [-full, -full], [0.0, never], [never, -half], [-two, -two]]
    torch.testing.assert_close(logprobs, torch.tensor(expected))


@pytest.mark.parametrize("place", [0, 2047, 2048, 4999])
def test_a_logit_that_is_not_a_number_is_not_passed_over(place: int) -> None:
    logits = torch.randn((2, 5000), generator=torch.Generator().manual_seed(place))
    logits[1, place] = torch.nan
    given = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.ones(2, device=DEVICE), None
    for values in token_values(logits.to(DEVICE), *given):
        assert values.isnan().tolist() == [False, True]


def test_no_tokens_have_no_values() -> None:
    nothing = torch.empty(0, device=DEVICE)
    for values in token_values(torch.empty((0, 50), device=DEVICE), nothing.long(), nothing, None):
        assert values.shape == (0,)


ROW_SHAPES = [(1, 8), (2, 16), (3, 40), (5, 3), (2, 512), (9, 257)]
"""Of which a program takes many, some or one."""


def random_pair(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for _ in range(2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ROW_SHAPES)
@pytest.mark.parametrize("num_places", [0, 1, 64, 133])
def test_keys_and_values_are_laid_out_as_torch_does(
    num_places: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    key, value = random_pair((31, *shape), dtype)
    generator = torch.Generator().manual_seed(num_places)
    tokens = torch.randint(0, 31, (num_places,), generator=generator, dtype=torch.int32).to(DEVICE)
    found = lay_out(key, value, tokens)
    for laid, rows in zip(found, (key, value), strict=True):
        assert laid.dtype == dtype and torch.equal(laid, rows[tokens.long()])


def in_order(rows: torch.Tensor, places: list[int]) -> torch.Tensor:
    """One float32 addition after another."""
    total = torch.zeros(rows.shape[1:], device=rows.device)
    for place in places:
        total = total + rows[place].float()
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", ROW_SHAPES)
def test_sums_of_rows_are_taken_in_the_order_of_their_places(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """Of none, of one, and of so many that they are read in several turns."""
    sizes = [3, 1, 0, 2, 4, 1, 1, 5, 16, 9, 0, *[1] * 60, 8, 0]
    order = torch.randperm(sum(sizes), generator=torch.Generator().manual_seed(1)).int()
    starts = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
    key, value = random_pair((sum(sizes), *shape), dtype)
    found = row_sums(key, value, starts.to(DEVICE), order.to(DEVICE))
    for sums, rows in zip(found, (key, value), strict=True):
        expected = torch.stack([in_order(rows, part.tolist()) for part in order.split(sizes)])
        assert sums.dtype == dtype
        if dtype == torch.float32:
            assert torch.equal(sums, expected)
        else:
            # The interpreter cuts float32 off to bfloat16 instead of rounding it.
            assert relative_error(sums, expected.double().cpu()) < 2**-7


def test_no_rows_have_no_sums() -> None:
    nothing = torch.empty((0, 2, 8), device=DEVICE)
    edge, places = (torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (1, 0))
    assert [x.shape for x in row_sums(nothing, nothing, edge, places)] == [(0, 2, 8)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(0,), (1,), (16, 256), (3, 5, 811), (12_304,)])
def test_a_term_is_added_with_the_bits_of_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    room = math.prod(shape) + 64
    total = torch.randn(room, generator=generator).to(DEVICE)
    term = torch.randn(shape, generator=generator).to(dtype).to(DEVICE)
    expected = total.clone()
    expected[: room - 64].view(shape).add_(term)
    add_to(total[: room - 64].view(shape), term)
    assert torch.equal(total, expected)
