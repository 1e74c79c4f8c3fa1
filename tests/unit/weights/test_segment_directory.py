from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from headrace.weights.segment_directory import (
    create_segment_directory,
    process_start,
    segment_root,
    sweep,
)


def test_root_is_shared_memory_or_the_temporary_directory():
    assert segment_root().is_dir()
    if os.access("/dev/shm", os.W_OK):
        assert segment_root() == Path("/dev/shm")


def test_directory_is_private_and_survives_a_sweep_while_its_owner_lives(tmp_path):
    mine = create_segment_directory(tmp_path)
    assert mine.stat().st_mode & 0o777 == 0o700
    assert sweep(tmp_path) == []
    assert mine.is_dir()


def test_directory_of_a_dead_process_is_swept(tmp_path):
    program = (
        "import sys, pathlib\n"
        "from headrace.weights.segment_directory import create_segment_directory\n"
        "path = create_segment_directory(pathlib.Path(sys.argv[1]))\n"
        "(path / 'segment').write_bytes(b'x')\n"
        "print(path)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    owner = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    orphan = Path(owner.stdout.strip())
    assert orphan.is_dir()
    assert sweep(tmp_path) == [orphan]
    assert not orphan.exists()


def test_process_id_used_again_does_not_protect_a_dead_owners_directory(tmp_path):
    mine = create_segment_directory(tmp_path)
    prefix, namespace, pid, start, suffix = mine.name.split("-")
    earlier = mine.rename(tmp_path / "-".join([prefix, namespace, pid, str(int(start) - 1), suffix]))
    assert sweep(tmp_path) == [earlier]


def test_directories_of_other_process_namespaces_and_strangers_are_left_alone(tmp_path):
    (tmp_path / "headrace-1-999999999-5-abc").mkdir()
    (tmp_path / "headrace-notes").mkdir()
    (tmp_path / "other").mkdir()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


def test_a_process_that_ended_unreaped_counts_as_dead():
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start(child.pid) is not None
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process_start(child.pid) is None
    child.wait(10)
