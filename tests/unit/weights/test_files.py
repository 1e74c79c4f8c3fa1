"""Bundles as files: whole or not there, kept while in use, readable by anybody who knows safetensors."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from test_shared_memory import as_bytes, blobs

from headrace import wire
from headrace.errors import WeightSyncError
from headrace.weights import files
from headrace.weights.files import FilesReceiver, FilesSender, newest


@pytest.fixture
def sender(tmp_path: Path):
    sender = FilesSender(tmp_path / "weights")
    yield sender
    sender.close()


def receiver() -> FilesReceiver:
    return FilesReceiver(visible_s=0)


def test_tensors_arrive_as_sent(sender):
    manifest = wire.decode(wire.encode(sender.send(3, blobs(0))))
    assert (manifest.version, manifest.kind, manifest.transport) == (3, "full", "files")
    assert as_bytes(receiver().receive(manifest)) == as_bytes(blobs(0))


def test_buckets_are_safetensors_files(sender, monkeypatch):
    monkeypatch.setattr(files, "_BUCKET_BYTES", 400)
    manifest = sender.send(1, blobs(1))
    names = sorted(path.name for path in Path(manifest.location).iterdir())
    assert names == ["bucket-0000.safetensors", "bucket-0001.safetensors", "manifest"]
    found = {}
    for name in names[:2]:
        with safe_open(Path(manifest.location) / name, framework="np") as file:
            found |= {key: file.get_tensor(key).tobytes() for key in file.keys()}  # noqa: SIM118
    assert found == {blob.name: blob.data.tobytes() for blob in blobs(1)}
    assert as_bytes(receiver().receive(manifest)) == as_bytes(blobs(1))


def test_a_version_stays_until_retired_and_the_newest_full_one_beyond(sender):
    first, second = sender.send(1, blobs(1)), sender.send(2, blobs(2))
    assert as_bytes(receiver().receive(first)) == as_bytes(blobs(1))
    sender.retire(1)
    sender.retire(2)
    with pytest.raises(WeightSyncError, match="version 1 is not in"):
        receiver().receive(first)
    assert as_bytes(receiver().receive(second)) == as_bytes(blobs(2))
    sender.send(3, blobs(3))
    with pytest.raises(WeightSyncError, match="version 2 is not in"):
        receiver().receive(second)


def test_a_late_engine_finds_the_newest_full_bundle(sender, tmp_path):
    assert newest(tmp_path / "weights") is None
    sender.send(1, blobs(1))
    sender.send(2, blobs(2))
    sender.send(3, blobs(3), kind="delta", base_version=2)
    sender.retire(2)
    shutil.copytree(tmp_path / "weights", tmp_path / "elsewhere")
    found = newest(tmp_path / "elsewhere")
    assert found.version == 2
    assert as_bytes(receiver().receive(found)) == as_bytes(blobs(2))


def test_a_version_sent_again_leaves_the_first_to_its_readers(sender):
    first, delta = sender.send(1, blobs(1)), sender.send(1, blobs(4), kind="delta", base_version=0)
    second = sender.send(1, blobs(2))
    for manifest, seed in ((first, 1), (second, 2), (delta, 4)):
        assert as_bytes(receiver().receive(manifest)) == as_bytes(blobs(seed))
    sender.send(2, blobs(3))
    sender.retire(1)
    for manifest in (first, second, delta):
        with pytest.raises(WeightSyncError, match="version 1 is not in"):
            receiver().receive(manifest)


def test_a_folder_that_is_not_here_is_named(sender, tmp_path):
    manifest = replace(sender.send(1, blobs(1)), location=str(tmp_path / "unmounted" / "v00000001-full-1"))
    with pytest.raises(WeightSyncError, match="or the folder is not shared"):
        FilesReceiver(visible_s=0.05).receive(manifest)


def test_an_unfinished_bundle_is_never_seen_and_swept_by_the_next_sender(tmp_path, monkeypatch):
    def dies(*_):
        raise KeyboardInterrupt

    folder = tmp_path / "weights"
    sender = FilesSender(folder)
    sender.send(1, blobs(1))
    (folder / ".writing-1-1").mkdir()
    monkeypatch.setattr(Path, "rename", dies)
    with pytest.raises(KeyboardInterrupt):
        sender.send(2, blobs(2))
    monkeypatch.undo()
    assert newest(folder).version == 1
    (folder / "notes.txt").write_text("mine")
    FilesSender(folder).send(5, blobs(5))
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "v00000005-full-2"]


def test_close_leaves_only_the_folder(sender, tmp_path):
    sender.send(1, blobs(1))
    sender.retire(1)
    sender.close()
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "does not match its digest"),
        (lambda data: data[:-1], "ends within 'layer.3'"),
        (lambda data: b"x" * len(data), "holds other tensors than announced"),
    ],
)
def test_a_damaged_file_is_refused(sender, harm, complaint):
    manifest = sender.send(1, blobs(1))
    path = Path(manifest.location) / "bucket-0000.safetensors"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(WeightSyncError, match=complaint):
        receiver().receive(manifest)


def test_an_altered_announcement_is_refused(sender):
    manifest = sender.send(1, blobs(1))
    with pytest.raises(WeightSyncError, match="digest"):
        receiver().receive(replace(manifest, digest="0" * 32))
    renamed = (replace(manifest.slots[0], name="other"), *manifest.slots[1:])
    with pytest.raises(WeightSyncError, match="other tensors"):
        receiver().receive(replace(manifest, slots=renamed))


def test_a_directory_that_shows_late_is_waited_for(sender, tmp_path, monkeypatch):
    manifest = sender.send(1, blobs(1))
    hidden = tmp_path / "hidden"
    os.rename(manifest.location, hidden)
    monkeypatch.setattr(files.time, "sleep", lambda _: os.rename(hidden, manifest.location))
    assert as_bytes(FilesReceiver(visible_s=60).receive(manifest)) == as_bytes(blobs(1))


def test_no_room_is_an_error_that_leaves_nothing_behind(sender, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(WeightSyncError, match=r"cannot write version 1 .* make room"):
        sender.send(1, blobs(1))
    monkeypatch.undo()
    assert list((tmp_path / "weights").iterdir()) == []


def test_an_empty_bundle_travels(sender):
    assert list(receiver().receive(sender.send(1, []))) == []
    nothing = np.zeros(0, np.uint8)
    manifest = sender.send(2, [replace(blobs(1)[0], data=nothing, form="sparse")])
    assert next(receiver().receive(manifest)).form == "sparse"
