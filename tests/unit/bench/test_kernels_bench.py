"""Cases of single kernels: which there are, and what is made of their times. Nothing is launched here."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

pytest.importorskip("triton")

from headrace.bench import kernel_cases, kernels
from headrace.bench.kernel_cases import cold_copies
from headrace.errors import ConfigError

META = torch.device("meta")


def shown(figures):
    console = Console(width=160, file=io.StringIO())
    console.print(kernels.table(figures))
    return console.file.getvalue()


def test_cases_have_names_of_their_own_and_something_to_launch():
    found = list(kernels.cases(META))
    names = [(case.name, case.of) for case in found]
    assert len(set(names)) == len(names) > 200
    assert all(case.launches and case.amount > 0 and case.unit in ("TB/s", "TFLOP/s") for case in found)
    # A peer stands beside a case of ours.
    ours = {case.name for case in found if not case.of}
    beside = {case.name for case in found if case.of and not case.name.startswith("gated")}
    assert beside <= ours


def test_cases_are_chosen_by_a_part_of_their_name():
    found = [case.name for case in kernels.cases(META, "decode 7B 24 x")]
    assert len(found) == 2 and found[0] == "decode 7B 24 x 1756" and "up to" in found[1]
    assert all(case.of == "torch" for case in kernels.cases(META, "torch") if "compiled" not in case.of)
    with pytest.raises(ConfigError, match="--only 'none such'"):
        list(kernels.cases(META, "none such"))


def test_launches_fill_the_cache_whatever_one_of_them_reads():
    assert cold_copies(1e6) * 1e6 >= 2e8
    assert cold_copies(1e9) == 1 and cold_copies(1e9, least=2) == 2 and cold_copies(1.0, most=16) == 16


def test_rates_are_held_against_the_same_run(monkeypatch):
    monkeypatch.setattr(kernels, "seconds", lambda case: 1e-4)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(kernels, "matmul_flops_per_s", lambda: 8e14)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    figures = kernels.run("7B 1024", device="meta")
    torch_case = next(case for case in figures["cases"] if case["of"] == "torch")
    flops = 2 * 1024 * 3584 * 2 * 18944
    assert torch_case["unit"] == "TFLOP/s" and torch_case["rate"] == pytest.approx(flops / 1e-4 / 1e12)
    assert torch_case["fraction_of_limit"] == pytest.approx(flops / 1e-4 / 8e14)
    figures = kernels.run("add 1536", device="meta")
    (ours, _) = (case for case in figures["cases"] if case["case"] == "add 1536 x 1536")
    assert ours["of"] == "headrace" and ours["fraction_of_limit"] == pytest.approx(
        10 * 1536 * 1536 / 1e-4 / 4e12
    )
    assert "a large copy 4.00 TB/s, a large product 800 TFLOP/s" in shown(figures)
    assert "100.0" in shown(figures)


def test_times_are_of_one_launch(monkeypatch):
    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 6.0

    launched = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    launches = [lambda i=i: launched.append(i) for i in range(3)]
    case = kernel_cases.Case("a case", launches, 1.0, "TB/s", in_graph=False)
    assert kernel_cases.seconds(case, repeats=2) == pytest.approx(2e-3)
    # Once to compile, once to warm up, and then what is timed.
    assert launched == [0, *[0, 1, 2] * 3]
