from __future__ import annotations

import resource
from contextlib import contextmanager

import pytest

from headrace.errors import CheckpointError
from headrace.runtime.journal import Journal, read, segment_path


def written(directory, numbers, step=0):
    journal = Journal(directory, step)
    for n in numbers:
        journal.write({"kind": "drop", "group": n})
        journal.flush()
    journal.close()


def groups(directory, from_step=0):
    return [record["group"] for record in read(directory, from_step)]


def test_records_come_back_in_order_across_segments(tmp_path):
    written(tmp_path, [1, 2], step=0)
    written(tmp_path, [3], step=10)
    assert groups(tmp_path) == [1, 2, 3]
    assert groups(tmp_path, from_step=10) == [3]


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_a_record_cut_off_at_the_end_is_forgotten_and_overwritten(tmp_path, cut):
    written(tmp_path, [1, 2])
    path = segment_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-cut])
    assert groups(tmp_path) == [1]
    written(tmp_path, [3])
    assert groups(tmp_path) == [1, 3]


def test_a_last_record_of_full_length_whose_bytes_are_wrong_is_forgotten_too(tmp_path):
    """What a power failure leaves: the file has its length, its last page not its bytes."""
    written(tmp_path, [1, 2])
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 0xFF
    path.write_bytes(data)
    assert groups(tmp_path) == [1]
    written(tmp_path, [3])
    assert groups(tmp_path) == [1, 3]


def test_what_a_checkpoint_holds_already_is_skipped_in_its_own_segment_only(tmp_path):
    written(tmp_path, [1])
    num_bytes = segment_path(tmp_path, 0).stat().st_size
    written(tmp_path, [2])
    written(tmp_path, [3, 4], step=10)
    assert [record["group"] for record in read(tmp_path, 0, skip_bytes=num_bytes)] == [2, 3, 4]


def test_zeros_at_the_end_are_forgotten(tmp_path):
    """What a power failure leaves where the file had grown and its bytes were not written."""
    written(tmp_path, [1])
    path = segment_path(tmp_path, 0)
    path.write_bytes(path.read_bytes() + bytes(24))
    assert groups(tmp_path) == [1]
    written(tmp_path, [2])
    assert groups(tmp_path) == [1, 2]


def test_damage_in_the_middle_is_an_error_that_names_the_file(tmp_path):
    written(tmp_path, [1, 2])
    path = segment_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[12] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step-00000000.journal is damaged at byte 0"):
        groups(tmp_path)


def test_a_torn_end_is_only_forgiven_in_the_last_segment(tmp_path):
    written(tmp_path, [1], step=0)
    path = segment_path(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-1])
    written(tmp_path, [2], step=5)
    with pytest.raises(CheckpointError, match="step-00000000"):
        groups(tmp_path)


def test_prune_removes_only_what_no_checkpoint_needs(tmp_path):
    for step in (0, 5, 10):
        written(tmp_path, [step], step=step)
    Journal(tmp_path, 10).prune(before_step=5)
    assert groups(tmp_path) == [5, 10]


@contextmanager
def largest_file(num_bytes):
    """As on a full disk: no file grows past ``num_bytes``, and a write may be cut short there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_after_a_record_that_did_not_fit_nothing_is_written_that_would_build_on_it(tmp_path):
    journal = Journal(tmp_path, 0)
    journal.write({"kind": "drop", "group": 1})
    journal.flush()
    size = segment_path(tmp_path, 0).stat().st_size
    refused = pytest.raises(CheckpointError, match=r"journal .* cannot be written")
    with largest_file(size + 10), refused:
        journal.write({"kind": "drop", "group": 2})
        journal.flush()
    # There is room again, but it is too late for this writer; its successor reads on where it failed.
    journal.write({"kind": "drop", "group": 3})
    for write in (journal.flush, lambda: journal.rotate(4), journal.close, lambda: journal.rotate(4)):
        with refused:
            write()
    assert groups(tmp_path) == [1]
    written(tmp_path, [2])
    assert groups(tmp_path) == [1, 2]


def test_a_journal_that_cannot_be_opened_says_what_to_do(tmp_path):
    (tmp_path / "journal").write_text("a file where the directory should be")
    with pytest.raises(CheckpointError, match=r"journal .* cannot be written \(.*\); free some disk space"):
        Journal(tmp_path / "journal", 0)
