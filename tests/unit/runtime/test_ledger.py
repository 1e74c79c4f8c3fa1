from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.errors import InvariantError
from headrace.runtime.ledger import LIVE_STATES, AttemptLedger


class LedgerMachine(RuleBasedStateMachine):
    """Any order of legal moves, with restarts in between, keeps the books balanced."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = AttemptLedger()
        self.states: dict[int, str] = {}
        self.next_group = 0
        self.tokens = 0
        self.size = 2

    def pick(self, data: st.DataObject, *states: str) -> int | None:
        groups = [g for g, s in self.states.items() if s in states]
        return data.draw(st.sampled_from(groups)) if groups else None

    @rule()
    def admit(self) -> None:
        self.ledger.admit(self.next_group, self.size)
        self.states[self.next_group] = "generating"
        self.next_group += 1

    @precondition(lambda self: "generating" in self.states.values())
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def sample(self, data: st.DataObject, num_tokens: int) -> None:
        group = self.pick(data, "generating")
        self.ledger.sampled(group, 0, num_tokens)
        self.tokens += num_tokens

    @precondition(lambda self: self.states)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        group = self.pick(data, *LIVE_STATES)
        before = self.states[group]
        after = (*LIVE_STATES, "trained")[LIVE_STATES.index(before) + 1]
        self.ledger.move(group, range(self.size), before, after)
        if after == "trained":
            del self.states[group]
        else:
            self.states[group] = after

    @precondition(lambda self: self.states)
    @rule(data=st.data(), reason=st.sampled_from(["stale", "failed", "cancelled", "zero-variance"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        group = self.pick(data, *LIVE_STATES)
        self.ledger.drop(group, range(self.size), reason)
        del self.states[group]

    @rule()
    def restart(self) -> None:
        self.ledger = AttemptLedger.restore(self.ledger.snapshot())

    @invariant()
    def adds_up(self) -> None:
        self.ledger.check()
        assert self.ledger.num_admitted == self.next_group * self.size
        assert sum(self.ledger.tokens().values()) == self.tokens


TestLedgerMachine = LedgerMachine.TestCase


def test_a_move_out_of_order_is_refused():
    ledger = AttemptLedger()
    ledger.admit(0, 1)
    with pytest.raises(InvariantError, match="cannot go from generating to buffered"):
        ledger.move(0, (0,), "generating", "buffered")
    with pytest.raises(InvariantError, match="is generating, not scoring"):
        ledger.move(0, (0,), "scoring", "buffered")


def test_an_attempt_that_has_ended_samples_no_more():
    ledger = AttemptLedger()
    ledger.admit(0, 1)
    ledger.sampled(0, 0, 5)
    ledger.move(0, (0,), "generating", "scoring")
    with pytest.raises(InvariantError, match="sampled tokens while scoring"):
        ledger.sampled(0, 0, 1)
    assert ledger.num_sampled_tokens == 5


def test_nothing_ends_twice():
    ledger = AttemptLedger()
    ledger.admit(0, 1)
    ledger.drop(0, (0,), "stale")
    with pytest.raises(InvariantError, match="not live"):
        ledger.drop(0, (0,), "stale")
