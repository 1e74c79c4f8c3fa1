"""Broadcasts between threads of one process, each end as it would be in its own."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Event
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from test_shared_memory import as_bytes, blobs

from headrace import wire
from headrace.errors import WeightSyncError
from headrace.weights import collective_desk, process_group
from headrace.weights.collective import CollectiveReceiver, CollectiveSender
from headrace.weights.process_group import Abandonable, Group, _environment, connect

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


def test_nobody_is_sent_other_bytes_than_were_announced(make_sender):
    """Neither those of a newer version nor those that were sent again."""
    sender, receiver = make_sender(), CollectiveReceiver()
    first, again = (sender.send(1, blobs(1, sizes=(n,))) for n in (7, 500))
    newer = sender.send(2, blobs(2))
    assert as_bytes(receiver.receive(first)) == as_bytes(blobs(1, sizes=(7,)))
    assert as_bytes(receiver.receive(again)) == as_bytes(blobs(1, sizes=(500,)))
    sender.retire(1)
    for retired in (first, again):
        with pytest.raises(WeightSyncError, match="version 1 was retired"):
            receiver.receive(retired)
    assert as_bytes(receiver.receive(newer)) == as_bytes(blobs(2))


def test_bytes_that_do_not_match_are_refused(make_sender):
    sender, receiver = make_sender(), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    with pytest.raises(WeightSyncError, match="does not match its digest"):
        receiver.receive(replace(manifest, digest="0" * 32))
    assert as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


def test_a_member_that_vanishes_costs_the_others_one_attempt(make_sender):
    """It asks, is counted in, and never joins the group."""
    sender, receiver = make_sender(2, deadline_s=4.0, settle_s=0.5), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    told = json.loads(manifest.location)
    # Its own way in is not what the short deadline is for.
    ghosts_store = connect(sender._meeting.host, sender._meeting.port, DEADLINE_S)
    ask = {k: told[k] for k in ("offer", "buckets")} | {"member": "ghost", "group": "", "gpu": ""}
    unasked, meet = [ask], receiver._meet

    def meet_after_the_ghost(meeting):
        # Right before the other asks, so that both are gathered however slow this machine is.
        store = meet(meeting)
        while unasked:
            ghosts_store.set(f"ask/{ghosts_store.add('asks', 1)}", json.dumps(unasked.pop()))
        return store

    receiver._meet = meet_after_the_ghost
    with pytest.raises(WeightSyncError, match="version 1 by broadcast"):
        receiver.receive(manifest)
    assert as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


def test_a_member_that_dies_while_it_asks_holds_up_nobody(make_sender):
    """Its question has a number and was never written."""
    sender, receiver = make_sender(), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    sender._meeting.connect().add("asks", 1)
    assert as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


def test_a_sender_that_is_gone_is_an_error(make_sender):
    sender, receiver = make_sender(deadline_s=2.0), CollectiveReceiver()
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


def test_a_bundle_is_offered_in_buckets(make_sender, monkeypatch):
    monkeypatch.setattr("headrace.weights.collective._BUCKET_BYTES", 1000)
    sender, receiver = make_sender(), CollectiveReceiver()
    tensors = blobs(1, sizes=(300, 5, 600, 900, 2000, 0, 10))
    manifest = wire.decode(wire.encode(sender.send(1, tensors)))
    assert len(json.loads(manifest.location)["buckets"]) > 2
    assert as_bytes(receiver.receive(manifest)) == as_bytes(tensors)


def test_buckets_of_another_length_are_refused(make_sender):
    manifest = make_sender().send(1, blobs(1))
    told = json.loads(manifest.location)
    longer = replace(manifest, location=json.dumps({**told, "buckets": [*told["buckets"], 8]}))
    with pytest.raises(WeightSyncError, match="buckets of version 1 are not its bytes"):
        CollectiveReceiver().receive(longer)


def test_room_in_other_buckets_than_are_sent_is_refused(make_sender):
    """Gloo would end the engine's process."""
    sender, receiver = make_sender(), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    told = json.loads(manifest.location)
    (size,) = told["buckets"]
    halves = {**told, "buckets": [size // 2, size - size // 2]}
    with pytest.raises(WeightSyncError, match="version 1 is on offer in other buckets; publish the weights"):
        receiver.receive(replace(manifest, location=json.dumps(halves)))
    assert as_bytes(receiver.receive(manifest)) == as_bytes(blobs(1))


class HangingGroup(Group):
    """A group whose broadcasts never end, as those of NCCL do not when a member is gone."""

    made: ClassVar[list[HangingGroup]] = []

    def __init__(self, store, name, backend, *, rank, size, deadline_s):
        self.name, self.backend, self.rank = name, backend, rank
        self.was_abandoned = Event()
        self.made.append(self)

    def broadcast(self, buckets):
        self.was_abandoned.wait(DEADLINE_S)
        raise RuntimeError("aborted")

    def abandon(self):
        self.was_abandoned.set()


def test_both_ends_abandon_a_group_that_hangs_and_build_another(make_sender, monkeypatch):
    """Also one that never did any work: its kernels would spin on the GPU for ever."""
    sender, receiver = make_sender(deadline_s=4.0), CollectiveReceiver()
    manifest = sender.send(1, blobs(1))
    with monkeypatch.context() as patch:
        for place in ("collective", "collective_desk"):
            patch.setattr(f"headrace.weights.{place}.Group", HangingGroup)
        patch.setattr(HangingGroup, "made", [])
        with pytest.raises(WeightSyncError, match="version 1 by broadcast"):
            receiver.receive(manifest)
        assert {group.rank for group in HangingGroup.made} == {0, 1}
        for group in HangingGroup.made:
            assert group.was_abandoned.wait(DEADLINE_S)
    sender = make_sender()
    assert as_bytes(receiver.receive(sender.send(2, blobs(2)))) == as_bytes(blobs(2))


class WatchedGroup(Group):
    """A group that says when it was given up."""

    made: ClassVar[list[WatchedGroup]] = []

    def __init__(self, *args, **settings):
        self.was_abandoned = Event()
        super().__init__(*args, **settings)
        self.made.append(self)

    def abandon(self):
        self.was_abandoned.set()


def test_both_ends_give_their_group_up_when_they_close(make_sender, monkeypatch):
    monkeypatch.setattr(WatchedGroup, "made", [])
    for place in ("collective", "collective_desk"):
        monkeypatch.setattr(f"headrace.weights.{place}.Group", WatchedGroup)
    sender, receiver = make_sender(), CollectiveReceiver()
    receiver.receive(sender.send(1, blobs(1)))
    sender.close()
    receiver.close()
    assert len(WatchedGroup.made) == 2
    for group in WatchedGroup.made:
        assert group.was_abandoned.wait(DEADLINE_S)


def test_what_torch_reads_from_the_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_A", "1")
    with _environment({"HEADRACE_TEST_A": "2", "HEADRACE_TEST_B": "3"}):
        assert (os.environ["HEADRACE_TEST_A"], os.environ["HEADRACE_TEST_B"]) == ("2", "3")
        # Another thread would take these for what was there before.
        assert process_group._environment_lock.locked()
    assert os.environ["HEADRACE_TEST_A"] == "1" and "HEADRACE_TEST_B" not in os.environ


class StandInForNccl:
    """What is asked of torch's NCCL group, recorded."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store, rank, size, options):
        self.environment = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
        self.rank, self.size, self.timeout = rank, size, options._timeout
        self.pieces = []
        self.aborted = Event()

    def broadcast(self, piece, root):
        self.pieces.append((len(piece), root))
        return SimpleNamespace(wait=lambda: None)

    def abort(self):
        self.aborted.set()


def test_a_group_of_gpus_outlives_failures_and_can_be_aborted(make_sender, monkeypatch):
    """Torch would end the process when a collective fails; who waits gives up before torch does."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", StandInForNccl, raising=False)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    store = make_sender()._meeting.connect()
    group = Group(store, "group/1", "nccl", rank=1, size=2, deadline_s=3.0)
    nccl = group._group
    assert (nccl.environment, nccl.timeout, nccl.rank, nccl.size) == ("2", timedelta(seconds=6), 1, 2)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    large = torch.zeros((64 << 20) + 5, dtype=torch.uint8)
    group.broadcast([large, torch.zeros(0, dtype=torch.uint8), torch.zeros(7, dtype=torch.uint8)])
    assert nccl.pieces == [(64 << 20, 0), (5, 0), (7, 0)]
    group.abandon()
    assert nccl.aborted.wait(DEADLINE_S)


@pytest.mark.parametrize(
    ("members", "expected"),
    [(["cuda:1"], "nccl"), (["cuda:1", "cuda:2"], "nccl"), (["cuda:0"], "gloo"), (["cuda:1", "cuda:1"], "gloo"),
     (["cuda:1", "cpu"], "gloo")],
)  # fmt: skip
def test_nccl_is_for_members_with_a_gpu_each(monkeypatch, members, expected):
    def name(device):
        return "" if device.type == "cpu" else str(device)

    monkeypatch.setattr(collective_desk, "gpu_name", name)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    offered = [SimpleNamespace(device=torch.device("cuda:0"))]
    gpus = [name(torch.device(member)) for member in members]
    assert collective_desk._backend(offered, gpus) == expected
    assert collective_desk._backend([torch.zeros(3)], gpus) == collective_desk._backend([], gpus) == "gloo"
