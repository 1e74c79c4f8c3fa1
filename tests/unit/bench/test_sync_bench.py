from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.bench import delta_size, sync
from headrace.models.loading import make_tiny_model
from headrace.weights.shared_memory import SharedMemoryReceiver, SharedMemorySender


def test_a_delta_after_twenty_steps_is_small_and_exact():
    shares = delta_size.run(steps=20)
    assert shares["bytes_share"] <= 0.07
    assert 0 < shares["one_step_bytes_share"] < shares["bytes_share"] < shares["changed_share"]


def test_every_cell_has_a_row():
    cell = {
        "bundle": "delta",
        "transport": "files",
        "sent_bytes": 1e6,
        "own_bytes": 4e8,
        "changed_share": 0.02,
        "publish_ms": 1.0,
        "publish_gb_s": 2.0,
        "receive_ms": 3.0,
        "receive_gb_s": 4.0,
        "apply_ms": 0.5,
        "stall_ms": 0.5,
        "worst_stall_ms": 0.7,
    }
    figures = {
        "shape": "qwen2-0.2b",
        "weight_bytes": 4e8,
        "copy_gb_s": 10.0,
        "usual_pass_ms": 30.0,
        "delta_after_adam": delta_size.run(steps=2),
        "cells": [cell, {**cell, "transport": "collective"}],
    }
    console = Console(width=200, file=io.StringIO())
    console.print(sync.table(figures))
    text = console.file.getvalue()
    assert (
        "files" in text
        and "0.25%" in text
        and "collective" in text
        and "this machine copies 10.0 GB/s" in text
        and "2.0 20%" in text
        and "4.0 40%" in text
    )


def test_an_adapter_moves_whole_and_sends_little_beside_itself(tmp_path):
    pytest.importorskip("peft")
    model = make_tiny_model(tmp_path / "model", vocab_size=61, hidden_size=192)
    own_bytes, moves, blobs = sync._adapter_source(model, "adapter")
    sender = SharedMemorySender(tmp_path / "segments")
    sent = []
    for version in (1, 2):
        assert next(moves) == 1.0
        manifest = sender.send(version, blobs(), kind="adapter")
        assert own_bytes < manifest.num_bytes <= 1.01 * own_bytes
        received = list(SharedMemoryReceiver().receive(manifest))
        sent.append({blob.name: blob.data.tobytes() for blob in received if "lora" in blob.name})
    assert sent[0].keys() == sent[1].keys()
    assert all(sent[0][name] != sent[1][name] for name in sent[0])
    sender.close()
