"""Which way the weights take, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_shared_memory import as_bytes, blobs

from headrace.errors import ConfigError, WeightSyncError
from headrace.weights.transports import Route, TransportReceiver, choose, weight_sender


@pytest.mark.parametrize(
    ("device", "one_machine", "expected"),
    [
        ("cpu", True, "shared_memory"),
        ("cuda", True, "cuda_ipc"),
        ("cpu", False, "files"),
        ("cuda", False, "files"),
    ],
)
def test_the_way_follows_from_where_the_roles_are(device, one_machine, expected):
    assert choose("auto", device=device, one_machine=one_machine).transport == expected


def test_weights_that_do_not_fit_into_shared_memory_go_through_files():
    room = {"device": "cpu", "needed_bytes": 2_000_000_000}
    assert choose("auto", **room, shared_bytes=2_000_000_000).transport == "shared_memory"
    small = choose("auto", **room, shared_bytes=64 << 20)
    assert small.transport == "files"
    assert small.why.startswith("shared memory has 0.07 GB free and the versions held at once take 2.00")
    assert choose("shared_memory", **room, shared_bytes=0).transport == "shared_memory"
    assert choose("auto", **{**room, "device": "cuda"}, shared_bytes=0).transport == "cuda_ipc"


@pytest.mark.parametrize(
    ("asked", "device", "one_machine"),
    [("cuda_ipc", "cpu", True), ("cuda_ipc", "cuda", False), ("shared_memory", "cpu", False)],
)
def test_a_way_that_does_not_exist_is_refused(asked, device, one_machine):
    with pytest.raises(ConfigError, match=f"weights.transport is {asked}"):
        choose(asked, device=device, one_machine=one_machine)


@pytest.mark.parametrize("transport", ["shared_memory", "files"])
def test_receivers_follow_the_manifest(tmp_path, transport):
    sender = weight_sender(Route(transport=transport, why=""), segments=tmp_path / "a", folder=tmp_path / "b")
    receiver = TransportReceiver()
    assert as_bytes(receiver.receive(sender.send(1, blobs(1)))) == as_bytes(blobs(1))
    sender.close()
    receiver.close()


def test_an_unknown_transport_is_refused(tmp_path):
    sender = weight_sender(Route(transport="files", why=""), segments=tmp_path, folder=tmp_path)
    manifest = replace(sender.send(1, blobs(1)), transport="pigeon")
    with pytest.raises(WeightSyncError, match="pigeon"):
        TransportReceiver().receive(manifest)
