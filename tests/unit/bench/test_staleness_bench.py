"""The sweep goes on where it ended, pairs by seed, and draws what it found; the runs themselves are faked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import staleness, staleness_picture
from headrace.config import load
from headrace.errors import ConfigError

SMALL = {"lags": (0, 4), "compositions": ("ppo", "ppo+tis"), "budget": staleness.Budget(steps=10, groups=1)}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, str]]:
    """What was run: (seed, loss and corrections, lag). The reward falls with the lag, less with a correction."""
    made: list[tuple[int, str, str]] = []

    def run(settings: list[str], seed: int) -> tuple[float, ...]:
        given = dict(text.split("=", 1) for text in settings)
        name = given["algo.loss"] + given["algo.corrections"]
        lag = given["rollout.max_lag"]
        made.append((seed, name, lag))
        return (0.1,) * 9 + (0.9 - 0.05 * int(lag) * (1 if name == "ppo[]" else 0.5) - 0.01 * seed,)

    monkeypatch.setattr(staleness, "_run", run)
    return made


def test_a_sweep_runs_each_cell_once_and_goes_on_where_it_ended(
    tmp_path: Path, runs: list[tuple[int, str, str]]
) -> None:
    path = tmp_path / "sweep"
    staleness.sweep(path, seeds=[0], **SMALL)
    # At lag 0 every composition is the same, so it is run once.
    assert runs == [(0, "ppo[]", "0"), (0, "ppo[]", "4"), (0, 'ppo["tis"]', "4")]
    found = staleness.sweep(path, seeds=[0, 1], **SMALL)
    assert len(runs) == 6 and all(seed == 1 for seed, _, _ in runs[3:])
    assert len(list(path.glob("*.json"))) == 6 == len(list(path.iterdir()))
    assert json.loads((path / "seed-1-lag-4-ppo+tis.json").read_text())["final"] == pytest.approx(0.79)
    assert found["rewards"]["ppo"][4] == pytest.approx([0.7, 0.69])
    assert found["against_first"]["ppo+tis"][4] == pytest.approx([0.1, 0.1])
    assert found["against_first_lag"]["ppo"][4] == pytest.approx([-0.2, -0.2])


def test_an_interrupted_sweep_keeps_what_it_has(
    tmp_path: Path, runs: list[tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sweep"
    inner = staleness._run

    def interrupted(settings: Any, seed: int) -> tuple[float, ...]:
        if len(runs) == 2:
            raise KeyboardInterrupt
        return inner(settings, seed)

    monkeypatch.setattr(staleness, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        staleness.sweep(path, seeds=[0], **SMALL)
    monkeypatch.setattr(staleness, "_run", inner)
    staleness.sweep(path, seeds=[0], **SMALL)
    assert len(runs) == 3


def test_cells_of_another_budget_and_impossible_compositions_are_refused(
    tmp_path: Path, runs: list[tuple[int, str, str]]
) -> None:
    path = tmp_path / "sweep"
    staleness.sweep(path, seeds=[0], **SMALL)
    with pytest.raises(ConfigError, match="another budget"):
        staleness.sweep(path, seeds=[0], **SMALL | {"budget": staleness.Budget()})
    with pytest.raises(ConfigError, match=r"algo\.corrections has tis"):
        staleness.sweep(path, seeds=[0], **SMALL | {"compositions": ("gspo+tis",)})
    assert len(runs) == 3


def test_every_composition_of_the_sweep_can_be_built() -> None:
    for name in staleness.COMPOSITIONS:
        load(None, staleness.overrides(name, 4, staleness.Budget()))
    given = staleness.overrides("cispo+tis+opsm@tis.cap=3", 4, staleness.Budget())
    settings = load(None, given)
    assert settings.algo.corrections == ("tis", "opsm") and settings.algo.options == {"tis.cap": 3}


def test_the_picture_and_the_table_name_every_composition(
    tmp_path: Path, runs: list[tuple[int, str, str]]
) -> None:
    found = staleness.sweep(tmp_path / "sweep", seeds=[0, 1, 2], **SMALL)
    staleness_picture.write(found, tmp_path / "sweep.svg")
    text = (tmp_path / "sweep.svg").read_text()
    assert text.startswith("<svg") and text.count("<polyline") == 2 and ">ppo+tis</text>" in text
    assert staleness.table(found).row_count == 4
