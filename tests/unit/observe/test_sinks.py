from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import CheckpointError
from headrace.observe.events import Fanout
from headrace.observe.jsonl import JsonlSink, read_events
from headrace.observe.tracebacks import TracebackSink
from headrace.types import RoleStatus


class Memory:
    def __init__(self, fails_on_close: bool = False) -> None:
        self.seen: list[tuple[str, Mapping[str, Any]]] = []
        self.closed = False
        self.fails_on_close = fails_on_close

    def emit(self, event: str, fields: Mapping[str, Any]) -> None:
        self.seen.append((event, fields))

    def close(self) -> None:
        self.closed = True
        if self.fails_on_close:
            raise OSError("disk gone")


def test_fanout_reaches_every_sink_and_closes_all_even_after_a_failure() -> None:
    sinks = [Memory(fails_on_close=True), Memory()]
    fanout = Fanout(sinks)
    fanout.emit("phase", {"text": "loading"})
    with pytest.raises(OSError, match="disk gone"):
        fanout.close()
    assert [s.seen for s in sinks] == [[("phase", {"text": "loading"})]] * 2
    assert all(s.closed for s in sinks)


def test_every_line_is_a_json_object_as_soon_as_it_is_emitted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    sink = JsonlSink(path, clock=lambda: 12.3456)
    role = RoleStatus(role="trainer", version=1, progress=2, seconds={"loading": 0.5})
    fields = {
        "roles": [role],
        "reward": np.float32(0.5),
        "ids": np.arange(3),
        "loss": math.nan,
        "path": tmp_path,
        "states": {"trained": np.int64(4)},
    }
    sink.emit("step", fields)
    event = json.loads(path.read_text())
    sink.close()
    assert event == {
        "time": 12.346,
        "event": "step",
        "roles": [
            {"role": "trainer", "version": 1, "progress": 2, "seconds": {"loading": 0.5}, "counters": {}}
        ],
        "reward": 0.5,
        "ids": [0, 1, 2],
        "loss": None,
        "path": str(tmp_path),
        "states": {"trained": 4},
    }


def test_a_resumed_run_appends_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first = JsonlSink(path)
    first.emit("phase", {"text": "one"})
    first.close()
    with path.open("a") as file:
        file.write('{"time": 1, "event": "st')
    second = JsonlSink(path)
    second.emit("phase", {"text": "two"})
    second.close()
    assert [event["text"] for event in read_events(path)] == ["one", "two"]
    JsonlSink(path).close()
    assert len(path.read_text().splitlines()) == 3


def test_tracebacks_are_written_for_people_and_only_where_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "controller.log"
    sink = TracebackSink(path)
    sink.emit("drop", {"group": 3, "reason": "stale", "detail": ""})
    assert not path.exists()
    fault = {"group": 4, "reason": "failed", "detail": "KeyError: 'x' (game.py:4)"}
    sink.emit("drop", {**fault, "traceback": "Traceback ...\nKeyError: 'x'\n"})
    sink.emit("warning", {"text": "a score is missing", "traceback": "Traceback ..."})
    lines = path.read_text().splitlines()
    assert lines[:3] == [
        "dropped group 4: failed (KeyError: 'x' (game.py:4))",
        "Traceback ...",
        "KeyError: 'x'",
    ]
    assert "warning: a score is missing" in lines
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"controller\.log cannot be written"):
        TracebackSink(tmp_path / "file" / "controller.log").emit("warning", {"text": "", "traceback": "T"})


def test_unwritable_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent/events\.jsonl cannot be opened"):
        JsonlSink(tmp_path / "absent" / "events.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_says_so() -> None:
    sink = JsonlSink("/dev/full")
    with pytest.raises(CheckpointError, match="No space left on device; free space"):
        sink.emit("phase", {"text": "x"})
    sink.close()
