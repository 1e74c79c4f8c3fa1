"""Cases of the kernels that bring new weights: whole tensors, an adapter's many small ones, and their check sums.

Bytes are those read and, where something is copied, those written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.bench.kernel_cases import Case, launching
from headrace.kernels.checksum import Chunks
from headrace.kernels.many_copies import ManyCopies
from headrace.kernels.whole_copies import WholeCopies

WHOLE = (28, 8960, 1536)
"""As many matrices of this shape: one of each layer of 1.5B."""
SMALL = (392, 16, 1536)
"""The same of an adapter: fourteen matrices a layer."""


def cases(device: torch.device) -> Iterator[Case]:
    """The host lists addresses at each launch, so no graph can hold them."""
    for case in _cases(device):
        yield case._replace(in_graph=False)


def _cases(device: torch.device) -> Iterator[Case]:
    sources, targets = _tensors(WHOLE, device), _tensors(WHOLE, device)
    num_bytes = 2.0 * sources.nbytes
    name = f"{WHOLE[0]} of {WHOLE[1]} x {WHOLE[2]}"
    copies = WholeCopies(list(targets))
    yield Case(f"whole copies, {name}", [launching(copies.copy_from, list(sources))], num_bytes, "TB/s")
    yield Case(f"whole copies, {name}", [launching(targets.copy_, sources)], num_bytes, "TB/s", "torch")
    size = sources[0].nbytes
    chunks = Chunks([(i * size, size) for i in range(len(sources))], device)
    payload = targets.view(-1).view(torch.uint8)
    yield Case(f"sums, {name}", [launching(chunks.sums, payload)], num_bytes / 2, "TB/s")
    summed = launching(chunks.copied_sums, list(sources), payload)
    yield Case(f"copied sums, {name}", [summed], num_bytes, "TB/s")
    small, places = _tensors(SMALL, device), _tensors(SMALL, device)
    launch = launching(ManyCopies(list(places)).copy_from, list(small))
    yield Case(f"many copies, {SMALL[0]} of {SMALL[1]} x {SMALL[2]}", [launch], 2.0 * small.nbytes, "TB/s")


def _tensors(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()
