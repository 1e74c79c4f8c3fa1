"""The trainer's kernels against the plain functions they stand for, in float64."""

from __future__ import annotations

import math
from itertools import accumulate, chain

import pytest
import torch
from kernel_cases import DEVICE, TOLERANCE, relative_error, require_kernels

require_kernels()

from headrace.kernels.add import add_to  # noqa: E402
from headrace.kernels.head_values import token_values  # noqa: E402
from headrace.kernels.row_sums import row_sums  # noqa: E402
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 16), (1, 8), (3, 40)])
def test_sums_of_rows_are_those_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Of several, of one and of none."""
    places = [[4, 0, 7], [1], [], [2, 3], [5, 6, 8, 9]]
    rows = torch.randn((10, *shape), generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)
    starts = torch.tensor([0, *accumulate(map(len, places))], dtype=torch.int32, device=DEVICE)
    found = row_sums(rows, starts, torch.tensor([*chain(*places)], dtype=torch.int32, device=DEVICE))
    expected = torch.stack([rows[part].double().sum(0) for part in places])
    assert found.dtype == dtype
    # The interpreter cuts float32 off to bfloat16 instead of rounding it.
    assert relative_error(found, expected.cpu()) < (1e-6 if dtype == torch.float32 else 2**-7)


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
