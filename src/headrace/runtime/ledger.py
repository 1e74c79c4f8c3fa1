"""Law one: no token lost. Counts attempts and tokens in every state; the counts always add up.

An admitted attempt moves

    generating -> scoring -> buffered -> training -> trained
         \\------------\\-----------\\----------\\---> dropped:<reason>

and ends in exactly one of the last two. Every move is a method; a move that is not in the picture is
an ``InvariantError``. Attempts that reached an end survive only as counts, so the ledger stays small.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args

from headrace.errors import InvariantError
from headrace.types import DropReason

LIVE_STATES = ("generating", "scoring", "buffered", "training")
_NEXT = dict(pairwise((*LIVE_STATES, "trained")))
END_STATES = ("trained", *(f"dropped:{reason}" for reason in get_args(DropReason)))


@dataclass(slots=True)
class _Attempt:
    state: str
    num_tokens: int


class AttemptLedger:
    def __init__(self) -> None:
        self._live: dict[tuple[int, int], _Attempt] = {}
        self._ended_attempts = dict.fromkeys(END_STATES, 0)
        self._ended_tokens = dict.fromkeys(END_STATES, 0)
        self.num_admitted = 0
        self.num_sampled_tokens = 0

    def admit(self, group: int, num_attempts: int) -> None:
        for attempt in range(num_attempts):
            key = (group, attempt)
            if key in self._live:
                raise InvariantError(f"attempt {key} was admitted twice")
            self._live[key] = _Attempt("generating", 0)
            self.num_admitted += 1

    def sampled(self, group: int, attempt: int, num_tokens: int) -> None:
        """``num_tokens`` more tokens exist for this attempt."""
        entry = self._entry(group, attempt)
        if entry.state != "generating":
            raise InvariantError(f"attempt {(group, attempt)} sampled tokens while {entry.state}")
        entry.num_tokens += num_tokens
        self.num_sampled_tokens += num_tokens

    def move(self, group: int, attempts: Iterable[int], before: str, after: str) -> None:
        """Move live attempts one state on, or to ``trained``."""
        if _NEXT.get(before) != after:
            raise InvariantError(f"an attempt cannot go from {before} to {after}")
        for attempt in attempts:
            entry = self._entry(group, attempt)
            if entry.state != before:
                raise InvariantError(f"attempt {(group, attempt)} is {entry.state}, not {before}")
            if after == "trained":
                self._end(group, attempt, after)
            else:
                entry.state = after

    def drop(self, group: int, attempts: Iterable[int], reason: DropReason) -> None:
        for attempt in attempts:
            self._end(group, attempt, f"dropped:{reason}")

    def attempts(self) -> dict[str, int]:
        """Attempts by state; they sum to ``num_admitted``."""
        counts = dict.fromkeys(LIVE_STATES, 0) | self._ended_attempts
        for entry in self._live.values():
            counts[entry.state] += 1
        return counts

    def tokens(self) -> dict[str, int]:
        """Sampled tokens by state; they sum to ``num_sampled_tokens``."""
        counts = dict.fromkeys(LIVE_STATES, 0) | self._ended_tokens
        for entry in self._live.values():
            counts[entry.state] += entry.num_tokens
        return counts

    def length_bias(self) -> float | None:
        """Mean tokens of a trained attempt over the mean of every attempt whose sampling has ended: below 1, training
        saw shorter answers than the policy gives. One that was dropped unfinished counts with what it had, so the
        bias it stands for is at least this far from 1; what only the end of the run cut off does not count. None:
        nothing was sampled or trained yet."""
        attempts, tokens = self.attempts(), self.tokens()
        ended = [state for state in attempts if state not in ("generating", "dropped:cancelled")]
        num_ended, ended_tokens = sum(attempts[s] for s in ended), sum(tokens[s] for s in ended)
        if not attempts["trained"] or not ended_tokens:
            return None
        return (tokens["trained"] / attempts["trained"]) / (ended_tokens / num_ended)

    def check(self) -> None:
        """Raise if the books do not balance."""
        if sum(self.attempts().values()) != self.num_admitted:
            raise InvariantError(f"{self.num_admitted} attempts admitted, but states hold {self.attempts()}")
        if sum(self.tokens().values()) != self.num_sampled_tokens:
            raise InvariantError(f"{self.num_sampled_tokens} tokens sampled, but states hold {self.tokens()}")

    def snapshot(self) -> dict[str, Any]:
        """Everything needed by ``restore``, as plain values."""
        return {
            "live": [[g, a, e.state, e.num_tokens] for (g, a), e in self._live.items()],
            "ended_attempts": dict(self._ended_attempts),
            "ended_tokens": dict(self._ended_tokens),
            "num_admitted": self.num_admitted,
            "num_sampled_tokens": self.num_sampled_tokens,
        }

    @classmethod
    def restore(cls, snapshot: dict[str, Any]) -> AttemptLedger:
        ledger = cls()
        ledger._live = {(g, a): _Attempt(state, n) for g, a, state, n in snapshot["live"]}
        ledger._ended_attempts |= snapshot["ended_attempts"]
        ledger._ended_tokens |= snapshot["ended_tokens"]
        ledger.num_admitted = snapshot["num_admitted"]
        ledger.num_sampled_tokens = snapshot["num_sampled_tokens"]
        ledger.check()
        return ledger

    def _entry(self, group: int, attempt: int) -> _Attempt:
        try:
            return self._live[(group, attempt)]
        except KeyError:
            raise InvariantError(f"attempt {(group, attempt)} is not live") from None

    def _end(self, group: int, attempt: int, state: str) -> None:
        entry = self._entry(group, attempt)
        del self._live[(group, attempt)]
        self._ended_attempts[state] += 1
        self._ended_tokens[state] += entry.num_tokens
