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
        self.copy_listed(self.listed(sources))

    def listed(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        """Where they begin."""
        addresses = torch.tensor([source.data_ptr() for source in sources])
        return addresses.to(self._places.device, non_blocking=True)

    def copy_listed(self, addresses: torch.Tensor) -> None:
        _copy[(self._num_tiles, len(addresses))](addresses, self._places, TILE=_TILE, num_warps=8)


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
    first = tl.program_id(0).to(tl.int64) * TILE
    if first >= count * width:
        return
    # One division of wide numbers tells where the tile begins; where rows end within it is told in narrow ones.
    column = first % width
    left = tl.minimum(width - column, TILE).to(tl.int32)
    units = tl.arange(0, TILE)
    behind = units - left
    num_ends = (behind >= 0).to(tl.int32)
    if width < TILE:
        num_ends += tl.maximum(behind, 0) // width.to(tl.int32)
    inside = units < count * width - first
    begin = target + first // width * step + column
    to = begin + units + num_ends.to(tl.int64) * (step - width)
    tl.store(to, tl.load(source + first + units, mask=inside), mask=inside)
