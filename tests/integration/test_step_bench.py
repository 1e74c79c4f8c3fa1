"""``headrace bench step`` as it runs on a GPU, with processes of its own, on a CPU and a model of a few numbers."""

from __future__ import annotations

import json

import pytest

from headrace.bench import aims, shapes, step, step_with_trl
from headrace.bench.step_workload import StepWorkload

TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}


def test_taking_turns_and_at_the_same_time_beside_one_peer(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    def trl(*_: object, steps: int, checkpointing: bool, **__: object) -> dict[str, object]:
        assert steps == 2
        return {"checkpointing": checkpointing, "seconds": 100.0, "peak_bytes": 1}

    # Its aim is about this shape.
    monkeypatch.setitem(shapes.SHAPES, "qwen2-1.5b", TINY)
    monkeypatch.setattr(step_with_trl, "check_installed", lambda python: None)
    monkeypatch.setattr(step_with_trl, "run", trl)
    told: list[str] = []
    figures = step.run(
        workload=StepWorkload(num_groups=2, group_size=4, prompt_tokens=16, completion_tokens=6),
        against="trl",
        max_lags=(0, 1),
        steps=2,
        row_tokens=64,
        offload="moments",
        device="cpu",
        progress=told.append,
    )
    assert [row["max_lag"] for row in figures["headrace"]] == [0, 1]
    for row in figures["headrace"]:
        assert len(row["all_seconds"]) == 2 and row["seconds"] > 0 and not row["side_by_side"]
        assert row["generation_s"] > 0 and row["training_s"] > 0
        assert row["metrics"]["lag_max"] <= row["max_lag"]
    assert sum(line.startswith("step ") for line in told) == 2 * 4
    assert step.table(figures).row_count == 4
    # A CPU's memory is not watched.
    for row in figures["headrace"]:
        row["peak_bytes"] = 2
    file = tmp_path / "step.json"
    taken = {"bench": "step", "date": "2026-11-19 10:00 UTC", "device": "a CPU", "source": "aaaa"}
    file.write_text(json.dumps(figures | {"taken": taken}))
    (line,) = (
        line
        for line in aims.run(aims.read([file], progress=told.append))["aims"]
        if line["aim"].startswith("the quicker step")
    )
    quickest = min(row["seconds"] for row in figures["headrace"])
    assert line["seen"] == pytest.approx(100.0 / quickest)
