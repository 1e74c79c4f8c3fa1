"""What is read off a compiled kernel, and how many of its programs a multiprocessor has room for."""

from __future__ import annotations

import subprocess

import pytest

pytest.importorskip("triton")

from headrace.bench import compiling
from headrace.bench.compiling import Compiled, Resources, read_resources
from headrace.errors import ConfigError

USAGE = """
Resource usage:
 Common:
  GLOBAL:11 CONSTANT[4]:8
 Function other_kernel:
  REG:10 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:728 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel:
  REG:126 STACK:16 SHARED:1024 LOCAL:0 CONSTANT[0]:728 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
CODE = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0018*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
.L_x_1:
        /*0020*/                   EXIT ;
.L_x_2:
        /*0ff0*/                   BRA `(.L_x_2);
        /*1000*/                   NOP;
        /*1010*/                   NOP;
"""


def test_resources_are_those_of_the_kernel_and_padding_is_no_instruction():
    assert read_resources("kernel", USAGE, CODE) == Resources(126, 16, 5, 1)
    assert read_resources("other_kernel", USAGE, CODE).registers == 10
    with pytest.raises(AssertionError, match="no word of absent"):
        read_resources("absent", USAGE, CODE)


@pytest.mark.parametrize(
    ("registers", "num_warps", "shared_bytes", "at_once"),
    [
        (128, 1, 0, 16),  # registers: four warps in each of four parts
        (129, 1, 0, 12),  # given out in steps of eight a thread, so three
        (
            88,
            2,
            0,
            10,
        ),  # five warps a part, and not the eleven programs that all registers together would hold
        (255, 4, 0, 2),
        (32, 1, 0, 32),  # programs
        (16, 8, 0, 8),  # warps
        (126, 1, 18432, 12),  # shared memory, of which a kibibyte is kept for each program
        (16, 4, 232448, 1),
    ],
)
def test_programs_at_once_are_bounded_by_what_runs_out_first(registers, num_warps, shared_bytes, at_once):
    made = Compiled("kernel", "v", (1, 1, 1), num_warps, shared_bytes, Resources(registers, 0, 1, 0))
    assert made.at_once == at_once


def test_a_tool_that_fails_is_named_with_a_remedy(monkeypatch):
    def failing(command, **_):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(compiling.subprocess, "run", failing)
    with pytest.raises(ConfigError, match=r"nvdisasm.*install triton anew"):
        compiling._said_by("nvdisasm", "-c", "file")
