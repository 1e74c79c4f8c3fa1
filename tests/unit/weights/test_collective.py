"""Broadcasts between threads of one process, each end as it would be in its own."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

import pytest
from test_shared_memory import as_bytes, blobs

from headrace import wire
from headrace.errors import WeightSyncError
from headrace.weights.collective import CollectiveReceiver, CollectiveSender
from headrace.weights.process_group import Abandonable

DEADLINE_S = 30.0


@pytest.fixture
def make_sender():
    senders = []

    def make(num_receivers=1, *, deadline_s=DEADLINE_S, settle_s=0.05):
        senders.append(
            CollectiveSender(num_receivers=num_receivers, deadline_s=deadline_s, settle_s=settle_s)
        )
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()


def receive_all(receivers, manifest):
    with ThreadPoolExecutor(len(receivers)) as pool:
        return [as_bytes(found) for found in pool.map(lambda r: list(r.receive(manifest)), receivers)]


def test_tensors_arrive_as_sent_at_every_receiver(make_sender):
    sender, receivers = make_sender(3, settle_s=DEADLINE_S), [CollectiveReceiver() for _ in range(3)]
    groups = set()
    for version in (1, 2):
        manifest = wire.decode(wire.encode(sender.send(version, blobs(version))))
        assert receive_all(receivers, manifest) == [as_bytes(blobs(version))] * 3
        groups.add(receivers[0]._group)
        sender.retire(version)
    assert len(groups) == 1, "the group was built twice"


def test_large_bundles_and_empty_ones_travel(make_sender):
    sender, receiver = make_sender(), CollectiveReceiver()
    for version, tensors in enumerate([blobs(1, sizes=(3 << 20, 5, 70 << 20)), [], blobs(2, sizes=(0,))]):
        assert as_bytes(receiver.receive(sender.send(version, tensors))) == as_bytes(tensors)


def test_members_come_and_go(make_sender):
    sender, early, late = make_sender(2), CollectiveReceiver(), CollectiveReceiver()
    assert receive_all([early], sender.send(1, blobs(1))) == [as_bytes(blobs(1))]
    # Whoever comes second is served alone, or with the first if it asks in time.
    assert receive_all([early, late], sender.send(2, blobs(2))) == [as_bytes(blobs(2))] * 2
    assert receive_all([late], sender.send(3, blobs(3))) == [as_bytes(blobs(3))]
    assert receive_all([early], sender.send(4, blobs(4))) == [as_bytes(blobs(4))]


def test_a_receiver_may_ask_twice(make_sender):
    sender, receiver = make_sender(), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    assert as_bytes(receiver.receive(manifest)) == as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


def test_a_retired_version_is_refused_at_once(make_sender):
    sender, receiver = make_sender(), CollectiveReceiver()
    first = sender.send(1, blobs(1))
    sender.retire(1)
    with pytest.raises(WeightSyncError, match="version 1 was retired"):
        receiver.receive(first)
    assert as_bytes(receiver.receive(sender.send(2, blobs(2)))) == as_bytes(blobs(2))


def test_bytes_that_do_not_match_are_refused(make_sender):
    sender, receiver = make_sender(), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    with pytest.raises(WeightSyncError, match="does not match its digest"):
        receiver.receive(replace(manifest, digest="0" * 32))
    assert as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


def test_a_member_that_vanishes_costs_the_others_one_attempt(make_sender):
    """It asks, is counted in, and never joins the group."""
    sender, receiver = make_sender(2, deadline_s=1.0, settle_s=0.5), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    told = json.loads(manifest.location)
    ghost = CollectiveReceiver()
    store = sender._meeting.connect()
    ask = {"offer": told["offer"], "member": ghost._member, "group": "", "gpu": ""}
    store.set(f"ask/{store.add('asks', 1)}", json.dumps(ask))
    with pytest.raises(WeightSyncError, match="version 1 by broadcast"):
        receiver.receive(manifest)
    assert as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


def test_a_sender_that_is_gone_is_an_error(make_sender):
    sender, receiver = make_sender(deadline_s=0.3), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    sender.close()
    sender._desk.run()
    with pytest.raises(WeightSyncError, match="version 1 by broadcast"):
        receiver.receive(manifest)
    other = make_sender()
    assert as_bytes(receiver.receive(other.send(2, blobs(2)))) == as_bytes(blobs(2))


def test_a_call_that_hangs_is_left_behind():
    never = Event()
    with pytest.raises(WeightSyncError, match=r"waited 0\.01 s for godot"):
        Abandonable(lambda: never.wait() and None, "test").wait(0.01, "godot")
    never.set()
    with pytest.raises(WeightSyncError, match=r"division failed \(division by zero\)"):
        Abandonable(lambda: 1 / 0, "test").wait(DEADLINE_S, "division")
