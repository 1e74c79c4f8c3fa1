from __future__ import annotations

import pytest

from headrace.errors import ModelError
from headrace.model_paths import found_model


def test_a_run_is_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    (run / "settings.toml").write_text("")
    with pytest.raises(ModelError, match=r"^model\.path: runs/first is a run, .* no checkpoint yet"):
        found_model("runs/first", "model.path")
    for step in (4, 12):
        (run / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    with pytest.raises(ModelError, match=r"such as runs/first/checkpoints/step-00000012$"):
        found_model("runs/first", "model.path")
    last = "runs/first/checkpoints/step-00000012"
    assert str(found_model(last, "model.path")) == last


def test_a_model_that_lies_beside_settings_of_its_own_is_one(tmp_path):
    for name in ("settings.toml", "config.json"):
        (tmp_path / name).write_text("")
    assert found_model(str(tmp_path), "model.path") == tmp_path
