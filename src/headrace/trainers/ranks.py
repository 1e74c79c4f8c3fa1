"""One process among those that train a model together.

In: small numbers and tensors of this rank. Out: what all ranks make of them; every rank must ask the same
questions in the same order. Alone, every question is its own answer and no process group exists. Numbers
travel between hosts' memories (gloo), weights between devices (NCCL on GPUs). Every wait has the group's
deadline.

Legend: N rows of this rank, any number of further dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from headrace.errors import DeadlineError

Rows = tuple[tuple[int, int], ...]
"""Where each rank's rows of a tensor begin and end."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank's number, how many there are, and the device it computes on (None: the model's)."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def totals(self, *values: float) -> list[float]:
        """Sums over all ranks."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, operation)
        return numbers.tolist()

    def counts(self, count: int) -> list[int]:
        """Every rank's number, in order of rank."""
        if self.size == 1:
            return [count]
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = count
        dist.all_reduce(counts)
        return counts.tolist()

    def join(self, own_N: torch.Tensor) -> torch.Tensor:
        """All ranks' rows in order of rank, on the CPU if there are several ranks."""
        if self.size == 1:
            return own_N
        counts = self.counts(own_N.shape[0])
        parts = [own_N.new_empty((max(counts), *own_N.shape[1:]), device="cpu") for _ in counts]
        dist.all_gather(parts, _padded(own_N.cpu(), max(counts)))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def problems(self, own: str) -> str:
        """What went wrong on any rank, each rank's words in a line; empty: nothing did."""
        line = f"rank {self.rank}: {own}\n" if own and self.size > 1 else own
        letters = torch.tensor(list(line.encode()), dtype=torch.uint8)
        return bytes(self.join(letters).tolist()).decode().strip()

    def gather(self, own_N: torch.Tensor, rows: Rows, *, to: int) -> torch.Tensor | None:
        """A whole tensor of which each rank has its ``rows``; None on the other ranks."""
        if self.size == 1:
            return own_N
        longest, num_rows = max(stop - start for start, stop in rows), max(stop for _, stop in rows)
        padded = _padded(own_N, longest)
        if self.rank != to:
            dist.gather(padded, None, dst=to)
            return None
        whole = own_N.new_empty((num_rows, *own_N.shape[1:]))
        # Rows arrive where they belong, save those of a rank that has fewer.
        parts = [whole[a:b] if b - a == longest else torch.empty_like(padded) for a, b in rows]
        dist.gather(padded, parts, dst=to)
        for (a, b), part in zip(rows, parts, strict=True):
            if b - a != longest:
                whole[a:b] = part[: b - a]
        return whole

    def scatter(self, whole: torch.Tensor | None, rows: Rows, into_N: torch.Tensor) -> None:
        """The first rank's ``whole`` tensor, to each rank its rows."""
        if self.size == 1:
            assert whole is not None
            into_N.copy_(whole)
            return
        longest = max(stop - start for start, stop in rows)
        received = into_N.new_empty((longest, *into_N.shape[1:]))
        parts = None
        if whole is not None:
            parts = [_padded(whole[start:stop].to(into_N), longest) for start, stop in rows]
        dist.scatter(received, parts, src=0)
        into_N.copy_(received[: into_N.shape[0]])

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The first rank's ``tensor``, in place."""
        if self.size > 1:
            dist.broadcast(tensor, src=0)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


ALONE = Ranks()


def _padded(own_N: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Collectives want the same shape of everyone."""
    if own_N.shape[0] == num_rows:
        return own_N.contiguous()
    padded = own_N.new_zeros((num_rows, *own_N.shape[1:]))
    padded[: own_N.shape[0]] = own_N
    return padded


def join_ranks(rank: int, size: int, *, device: str, meeting_point: Path, deadline_s: float) -> Ranks:
    """Meet the other ranks of this machine at a file that only they use. ``deadline_s`` bounds this wait and
    every later one for another rank."""
    place = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    timeout = timedelta(seconds=deadline_s)
    store = dist.FileStore(str(meeting_point), size)
    store.set_timeout(timeout)
    ranks = Ranks(rank, size, place)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=place if place.type == "cuda" else None,
        )
        ranks.counts(1)
    except (dist.DistError, RuntimeError) as error:
        raise DeadlineError(
            f"trainer rank {rank} could not meet the other {size - 1} within {deadline_s:g} s ({error}); "
            "the logs of the other ranks may say why"
        ) from error
    return ranks
