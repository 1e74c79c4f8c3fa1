"""The library's gated product: which versions are used, what is prepared, what is said when it breaks."""

from __future__ import annotations

from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from headrace.errors import ModelError
from headrace.kernels import gated_library
from headrace.kernels.gated_tiles import LibraryTiles

TILES = LibraryTiles(128, 192, True, (2, 1))


@pytest.fixture(autouse=True)
def nothing_remembered():
    """Neither of what other tests have asked, nor afterwards of what these have."""
    cached = (gated_library.is_installed, gated_library._library, gated_library._launcher)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


class Recorded:
    """Stands in for the package: what it was given, and that it was prepared by the first call alone."""

    def __init__(self) -> None:
        self.prepared, self.launched, self.cache = [], [], SimpleNamespace(CACHE_DIR=None)

    def modules(self, name: str) -> SimpleNamespace:
        if name == "quack.cache":
            return self.cache
        if name == "quack.epilogue.library":
            product = SimpleNamespace(gemm=self.gemm)
            return SimpleNamespace(linear_act_mod=lambda _, **__: product, dgated_mod=lambda _, **__: product)
        assert name == "quack.gemm_runtime.host"
        return SimpleNamespace(run_gemm_epi_plan=lambda *given: self.launched.append(given))

    def gemm(self, x, whole, products, given_products, **chosen):
        self.prepared.append((x.shape[0], products is not None, given_products is not None, chosen))
        return f"plan {len(self.prepared)}"


@pytest.mark.parametrize(("version", "used"), [("0.6.5", True), ("0.6.6", False), (None, False)])
def test_one_version_is_used_and_others_are_left_alone(monkeypatch, version, used):
    def asked(_name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(gated_library.metadata, "version", asked)
    assert gated_library.is_installed() == used


def multiply_two_rows() -> None:
    gated_library.library_product(torch.zeros(2, 8), torch.zeros(16, 8), TILES, keep=False)


@pytest.mark.parametrize("where", ["import_module", "gemm"])
def test_a_package_that_fails_is_named_with_what_to_do(monkeypatch, where):
    """Whether it cannot be imported or cannot compile."""
    package = Recorded()

    def failing(*_given, **_chosen):
        raise ValueError("no such layout")

    package.gemm = failing
    monkeypatch.setattr(
        gated_library, "import_module", failing if where == "import_module" else package.modules
    )
    with pytest.raises(
        ModelError, match=r"no such layout.*install Headrace's extra flash anew, or uninstall quack"
    ):
        multiply_two_rows()
    assert not gated_library._lock.locked()


def test_a_thread_that_waits_for_another_says_so_in_the_end(monkeypatch):
    monkeypatch.setattr(gated_library, "_MOST_WAIT_S", 0.0)
    with gated_library._lock, pytest.raises(ModelError, match="waited 0 s for another thread"):
        multiply_two_rows()


def test_products_do_not_need_the_kernel_of_gradients(monkeypatch):
    package = Recorded()
    epilogues = package.modules("quack.epilogue.library")
    del epilogues.dgated_mod
    monkeypatch.setattr(
        gated_library,
        "import_module",
        lambda name: epilogues if name == "quack.epilogue.library" else package.modules(name),
    )
    multiply_two_rows()
    with pytest.raises(ModelError, match="dgated_mod"):
        gated_library.library_gradients(torch.zeros(5, 16), torch.zeros(16, 8), torch.zeros(5, 16), TILES)


def test_a_cache_that_was_chosen_is_kept(monkeypatch):
    package = Recorded()
    package.cache.CACHE_DIR = "/elsewhere"
    monkeypatch.setattr(gated_library, "import_module", package.modules)
    multiply_two_rows()
    assert package.cache.CACHE_DIR == "/elsewhere"


def test_a_product_is_prepared_once_for_all_numbers_of_rows(monkeypatch):
    package = Recorded()
    monkeypatch.setattr(gated_library, "import_module", package.modules)
    whole = torch.zeros(16, 8)
    for num_rows in (2, 3, 4):
        inner, kept = gated_library.library_product(torch.zeros(num_rows, 8), whole, TILES, keep=False)
        assert inner.shape == (num_rows, 8) and kept is None
    _, kept = gated_library.library_product(torch.zeros(5, 8), whole, TILES, keep=True)
    assert kept is not None and kept.shape == (5, 16)
    gated_library.library_product(torch.zeros(6, 8).half(), whole.half(), TILES, keep=True)
    assert [case[:3] for case in package.prepared] == [(2, False, False), (5, True, False), (6, True, False)]
    chosen = package.prepared[0][3]
    assert (chosen["tile_M"], chosen["tile_N"], chosen["pingpong"]) == (128, 192, True)
    assert (chosen["cluster_M"], chosen["cluster_N"], chosen["concat_layout"]) == (2, 1, ("B",))
    assert str(package.cache.CACHE_DIR).endswith(".cache/headrace/quack")
    assert [(given[0], given[1].shape[0]) for given in package.launched] == [("plan 1", 3), ("plan 1", 4)]


def test_gradients_are_prepared_once_too_and_from_pairs(monkeypatch):
    package = Recorded()
    monkeypatch.setattr(gated_library, "import_module", package.modules)
    down, products = torch.zeros(16, 8), torch.zeros(5, 16)
    for _ in range(2):
        grads, inner = gated_library.library_gradients(torch.zeros(5, 16), down, products, TILES)
        assert grads.shape == products.shape and inner.shape == (5, 8)
    assert [case[:3] for case in package.prepared] == [(5, True, True)]
    assert package.prepared[0][3]["concat_layout"] is None
    # The right operand has a row for each column of the result.
    (launched,) = package.launched
    assert launched[2].shape == (8, 16) and launched[3] is grads and launched[4] is products
