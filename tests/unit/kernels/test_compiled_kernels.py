"""Every GPU kernel through the real compiler, for a chip that need not be there: what the interpreter cannot tell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

KERNELS = Path(__file__).parents[3] / "src" / "headrace" / "kernels"
# The compiler takes a minute for all of them; a machine that is busy, several.
pytestmark = pytest.mark.timeout(600)


def said_by(folder, *command):
    """Standard output of a Python that compiles kernels instead of interpreting them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def kernels(folder):
    file = folder / "kernels.json"
    shown = said_by(folder, "-m", "headrace.cli", "bench", "kernels", "--compile-only", "--json", str(file))
    assert shown.startswith("compiled for an H200")
    return json.loads(file.read_text())["kernels"]


def test_every_kernel_that_is_launched_compiles(kernels):
    launched = {
        name
        for file in KERNELS.glob("*.py")
        for name in re.findall(r"(\w+)\[(?:grid\]|\()", file.read_text())
    }
    assert {kernel["kernel"] for kernel in kernels} == launched


def test_no_kernel_keeps_numbers_in_memory_for_want_of_registers(kernels):
    """But for one, a few bytes outside its loop, and by Triton 3.6 for another."""
    spilled = {kernel["kernel"] for kernel in kernels if kernel["spilled_bytes"]}
    assert spilled <= {"prefix_kernel", "cut_kernel"}
    assert all(kernel["spilled_bytes"] <= 16 for kernel in kernels)


def test_all_programs_that_rows_are_dealt_out_to_run_at_once(kernels):
    """Key-value rows of a pass are dealt out to three programs a multiprocessor at most, or to six of one warp; to two
    of four warps beside shared prompts. One that must wait for another costs as much as all before it."""
    for shared, least in ((False, {1: 6, 2: 3, 4: 3}), (True, {1: 6, 2: 3, 4: 2})):
        decoding = [
            kernel
            for kernel in kernels
            if kernel["kernel"] == "decode_kernel" and kernel["case"].startswith("shared") == shared
        ]
        assert {kernel["num_warps"] for kernel in decoding} == set(least)
        assert all(kernel["at_once"] >= least[kernel["num_warps"]] for kernel in decoding)


def test_loops_over_keys_and_values_read_ahead(kernels):
    """A loop that is not pipelined any more takes less of everything else that is looked at here."""
    attending = [k for k in kernels if k["kernel"] in ("decode_kernel", "prefix_kernel", "prefill_kernel")]
    assert len(attending) > 20 and all(kernel["num_loads_ahead"] >= 12 for kernel in attending)


def test_decoding_uses_no_products_of_whole_groups_of_warps(kernels):
    """Which take four; but for models with so many query heads a key-value head that two warps cannot hold them."""
    warps = {k["num_warps"] for k in kernels if k["kernel"] == "decode_kernel" and "64/1" not in k["case"]}
    assert warps == {1, 2}


def test_small_copies_leave_room_for_others(kernels):
    """Where rows end is told without dividing wide numbers, which takes all registers there are."""
    (copying,) = (kernel for kernel in kernels if kernel["kernel"] == "_copy")
    assert copying["at_once"] * copying["num_warps"] >= 24


def test_what_is_read_off_the_code_is_something(kernels):
    assert all(16 <= kernel["registers"] <= 255 and kernel["num_instructions"] > 40 for kernel in kernels)
    by_name = {kernel["kernel"]: kernel for kernel in kernels}
    assert (
        by_name["prefill_kernel"]["shared_bytes"] > 50_000 and by_name["_write_kernel"]["shared_bytes"] == 0
    )
    assert by_name["prefill_kernel"]["num_instructions"] > 10 * by_name["_write_kernel"]["num_instructions"]


def test_passes_of_all_sizes_need_few_variants(folder):
    """Each costs seconds of a start, or of the first pass that needs it."""
    told = said_by(folder, str(Path(__file__).with_name("launched_variants.py")))
    usual = {
        "decode_kernel": 4,  # three shapes, and one beside shared prompts
        "prefix_kernel": 1,
        "_write_kernel": 1,
        "prefill_kernel": 1,
        "scan_kernel": 6,  # one or two rows a program: of all rows, of those to be cut, of those that were
        "pick_kernel": 2,
        "cut_kernel": 1,
        "list_kernel": 1,
    }
    assert json.loads(told) == dict.fromkeys(("0.5B", "1.5B", "7B"), usual)
