"""Bars as long as the seconds, of the last figures that have a peer."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from headrace.bench import gpu_picture
from headrace.bench.commands import bench
from headrace.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def engine(seconds, *, shape="qwen2-7b", date="2026-11-18 10:00 UTC", rounds=1, vllm=None):
    ours = {"shape": shape, "rounds": rounds, "turns": 1, "seconds": seconds, "limit_s": 8.0}
    vllm = {"seconds": 20.0} if vllm is None else vllm
    return {"taken": {"bench": "engine", "date": date}, "headrace": ours, "vllm": vllm}


def step(*seconds, trl=({"seconds": 25.0, "peak_bytes": 59e9}, {"failed": "out of memory"})):
    ours = [
        {"max_lag": lag, "seconds": taken, "peak_bytes": 52e9}
        for lag, taken in zip((0, 1, 3), seconds, strict=False)
    ]
    peer = {**next((one for one in trl if "seconds" in one), {}), "tried": list(trl)}
    taken = {"bench": "step", "date": "2026-11-18 10:00 UTC"}
    return {"taken": taken, "shape": "qwen2-1.5b", "limit_s": 4.5, "headrace": ours, "trl": peer}


def drawn(tmp_path, *found):
    gpu_picture.write(found, tmp_path / "gpu.svg")
    root = ElementTree.parse(tmp_path / "gpu.svg").getroot()
    bars = [float(bar.get("width")) for bar in root.iter(f"{SVG}rect")][1:]
    return bars, [text.text for text in root.iter(f"{SVG}text")]


def test_bars_are_on_one_scale_and_ours_is_held_against_the_quickest_peer(tmp_path):
    bars, texts = drawn(tmp_path, engine(16.0), step(8.0, 7.0))
    longest = gpu_picture.WIDTH - gpu_picture.LEFT - gpu_picture.RIGHT
    assert bars == pytest.approx([longest * s / 25.0 for s in (16.0, 20.0, 8.0, 7.0, 25.0)], abs=0.2)
    assert "16.00 s, 1.25 times as fast" in texts and "7.00 s, 3.6 times as fast" in texts
    assert "Headrace, at the same time, 52 GB" in texts and "TRL with vLLM, 59 GB" in texts
    assert "limit 8.00 s" in texts and "limit, taking turns, 4.50 s" in texts


def test_only_the_last_figures_of_the_usual_workload_count(tmp_path):
    older = engine(19.0, date="2026-11-17 10:00 UTC")
    bars, texts = drawn(tmp_path, engine(16.0), older, engine(3.0, rounds=3), engine(2.0, shape="qwen2-3b"))
    assert len(bars) == 2 and "16.00 s, 1.25 times as fast" in texts


@pytest.mark.parametrize(
    "figures",
    [
        engine(3.0, vllm={"failed": "no memory"}),
        step(3.0, trl=()),
        {"taken": {"bench": "soak", "date": "2026"}},
    ],
)
def test_without_a_peer_there_is_nothing_to_draw(tmp_path, figures):
    with pytest.raises(ConfigError, match="--picture: no file has figures beside a peer"):
        gpu_picture.write([figures], tmp_path / "gpu.svg")


def test_it_is_drawn_beside_the_aims(tmp_path):
    figures = step(8.0)
    figures["taken"] |= {"device": "a GPU", "source": "aaaa"}
    figures["trl"]["tried"][0]["checkpointing"] = True
    figures["trl"]["tried"][1]["checkpointing"] = False
    (tmp_path / "step.json").write_text(json.dumps(figures))
    told = ["aims", str(tmp_path / "step.json"), "--picture", str(tmp_path / "gpu.svg")]
    assert CliRunner().invoke(bench, told, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "gpu.svg").read_text().startswith("<svg")
