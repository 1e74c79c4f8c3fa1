"""Compiled code is kept where the next process looks for it."""

from __future__ import annotations

import os

import pytest

from headrace.kernels.kept_code import keep_compiled

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in VARIABLES:
        # Set first, so that it is put back even where nothing had been there.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_both_compilers_are_told_where():
    keep_compiled()
    layers, kernels = (os.environ[name] for name in VARIABLES)
    assert layers.endswith(".cache/headrace/compiled") and kernels == f"{layers}/triton"


@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(monkeypatch, name):
    monkeypatch.setenv(name, "/mine")
    keep_compiled()
    assert os.environ[name] == "/mine"
    assert os.environ["TRITON_CACHE_DIR"].startswith("/mine")


def test_an_engine_tells_them(make_device_engine):
    """Left to itself torch tells Triton in the process that compiles layers, not in one that finds them compiled."""
    make_device_engine()
    assert os.environ["TRITON_CACHE_DIR"].endswith("headrace/compiled/triton")
