"""Cases of the kernels that bring new weights: whole tensors, an adapter's many small ones, and their check sums.

Bytes are those read and, where something is copied, those written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headrace.bench.kernel_cases import Case, cold_copies, launching
from headrace.kernels.checksum import Chunks
from headrace.kernels.many_copies import ManyCopies
from headrace.kernels.whole_copies import WholeCopies

WHOLE = (28, 8960, 1536)
"""As many matrices of this shape: one of each layer of 1.5B."""
SMALL = (392, 16, 1536)
"""The same of an adapter: fourteen matrices a layer."""


def cases(device: torch.device) -> Iterator[Case]:
    yield from (case._replace(in_graph=False) for case in whole_tensors(device))
    yield from small_tensors(device)


def whole_tensors(device: torch.device) -> Iterator[Case]:
    """The host lists addresses at each launch, so no graph can hold them; beside so many bytes that is little."""
    sources, targets = _tensors(WHOLE, device), _tensors(WHOLE, device)
    num_bytes = 2.0 * sources.nbytes
    name = f"{WHOLE[0]} of {WHOLE[1]} x {WHOLE[2]}"
    copies = WholeCopies(list(targets))
    yield Case(f"whole copies, {name}", [launching(copies.copy_from, list(sources))], num_bytes, "TB/s")
    of_torch = launching(torch._foreach_copy_, list(targets), list(sources))
    yield Case(f"whole copies, {name}", [of_torch], num_bytes, "TB/s", "torch")
    size = sources[0].nbytes
    chunks = Chunks([(i * size, size) for i in range(len(sources))], device)
    payload = targets.view(-1).view(torch.uint8)
    yield Case(f"sums, {name}", [launching(chunks.sums, payload)], num_bytes / 2, "TB/s")
    summed = launching(chunks.copied_sums, list(sources), payload)
    yield Case(f"copied sums, {name}", [summed], num_bytes, "TB/s")


def small_tensors(device: torch.device) -> Iterator[Case]:
    """Into columns of wider matrices, as an adapter of less than the largest rank lies in its bank, and into rows."""
    count, rank, width = SMALL
    num_bytes = 4.0 * count * rank * width
    places = {"rows": ((rank, width), (2 * rank, width)), "columns": ((width, rank), (width, 2 * rank))}
    for name, (shape, room) in places.items():
        ours, of_torch = [], []
        for _ in range(cold_copies(num_bytes, least=2)):
            sources = list(_tensors((count, *shape), device))
            views = [matrix[: shape[0], : shape[1]] for matrix in _tensors((count, *room), device)]
            copies = ManyCopies(views)
            ours.append(launching(copies.copy_listed, copies.listed(sources)))
            of_torch.append(launching(torch._foreach_copy_, views, sources))
        label = f"many copies, {count} of {shape[0]} x {shape[1]} into {name}"
        yield Case(label, ours, num_bytes, "TB/s")
        yield Case(label, of_torch, num_bytes, "TB/s", "torch")


def _tensors(shape: tuple[int, int, int], device: torch.device) -> torch.Tensor:
    return torch.randn(shape, device=device).bfloat16()
