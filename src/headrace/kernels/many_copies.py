"""Many small copies in one launch.

In: views that are written over again and again, then sources of the same shapes, each dense. Out: the sources' bytes
in the views. A copy at a time costs the host some microseconds each, which is milliseconds for the hundreds of tensors
of an adapter; here the host lists addresses and launches once.
"""

# mypy: allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_TILE = 4096
_UNIT_BYTES = 2
"""What is moved at a time: the smallest element of a model's weights."""


class ManyCopies:
    """Views of memory that stays where it is."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """Each is dense in its last dimension, and its leading ones are rows one constant stride apart."""
        rows = [_as_rows(view) for view in views]
        self._places = torch.tensor([[view.data_ptr(), *row] for view, row in zip(views, rows, strict=True)])
        self._places = self._places.to(views[0].device)
        self._num_tiles = max(triton.cdiv(count * width, _TILE) for count, width, _ in rows)

    def copy_from(self, sources: Sequence[torch.Tensor]) -> None:
        """In the order of the views; shapes and types are the caller's to check. Nothing here waits for the device."""
        addresses = torch.tensor([source.data_ptr() for source in sources]).to(
            self._places.device, non_blocking=True
        )
        _copy[(self._num_tiles, len(sources))](addresses, self._places, TILE=_TILE, num_warps=4)


def _as_rows(view: torch.Tensor) -> tuple[int, int, int]:
    """How many rows of how many units, and the units from one to the next."""
    units = view.element_size() // _UNIT_BYTES
    width, dims = 1, list(zip(view.shape, view.stride(), strict=True))
    while dims and dims[-1][1] == width:
        width *= dims.pop()[0]
    count = 1
    step = dims[-1][1] if dims else width
    for size, stride in reversed(dims):
        assert stride == step * count, "the rows of a view must lie one constant stride apart"
        count *= size
    return count, width * units, step * units


@triton.jit
def _copy(addresses, places, TILE: tl.constexpr):
    # Tiles come first: a grid may be 2^31 wide, but only 65,535 high, and experts' adapters are large.
    number = tl.program_id(1)
    source = tl.load(addresses + number).to(tl.pointer_type(tl.int16))
    place = places + number * 4
    target = tl.load(place).to(tl.pointer_type(tl.int16))
    count, width, step = tl.load(place + 1), tl.load(place + 2), tl.load(place + 3)
    units = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = units < count * width
    tl.store(
        target + units // width * step + units % width, tl.load(source + units, mask=inside), mask=inside
    )
