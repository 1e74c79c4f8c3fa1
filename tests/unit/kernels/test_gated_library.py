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
        self.prepared, self.launched, self.epilogues = [], [], []
        product, self.cache = SimpleNamespace(gemm=self.gemm), SimpleNamespace(CACHE_DIR=None)
        self.modules = {
            "quack.cache": self.cache,
            "quack.epilogue.library": SimpleNamespace(linear_act_mod=lambda _, **__: product),
            "quack.epilogue.frontend": SimpleNamespace(gemm_epilogue=self.gemm_epilogue),
            "quack.activation": SimpleNamespace(dswiglu=lambda *given: given),
            "quack.gemm_runtime.host": SimpleNamespace(
                run_gemm_epi_plan=lambda *given: self.launched.append(given)
            ),
            "cutlass": SimpleNamespace(Int32=torch.int32, Float32=torch.float32),
        }

    def gemm_epilogue(self, outputs):
        def made(function):
            self.epilogues.append((outputs, function))
            return SimpleNamespace(gemm=self.gemm)

        return made

    def gemm(self, left, right, written, read, **chosen):
        self.prepared.append((left.shape[0], written is not None, read is not None, chosen))
        return f"plan {len(self.prepared)}"


class Register(torch.Tensor):
    """Some of them: what is done to one of the chip's is done to all."""

    bitcast = torch.Tensor.view


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

    package.modules["quack.epilogue.library"].linear_act_mod("swiglu").gemm = failing
    monkeypatch.setattr(
        gated_library, "import_module", failing if where == "import_module" else package.modules.__getitem__
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


def test_products_do_not_need_what_gradients_are_made_with(monkeypatch):
    package = Recorded()
    del package.modules["quack.activation"].dswiglu
    monkeypatch.setattr(gated_library, "import_module", package.modules.__getitem__)
    multiply_two_rows()
    with pytest.raises(ModelError, match="dswiglu"):
        make_gradients(5)


def test_a_cache_that_was_chosen_is_kept(monkeypatch):
    package = Recorded()
    package.cache.CACHE_DIR = "/elsewhere"
    monkeypatch.setattr(gated_library, "import_module", package.modules.__getitem__)
    multiply_two_rows()
    assert package.cache.CACHE_DIR == "/elsewhere"


def test_a_product_is_prepared_once_for_all_numbers_of_rows(monkeypatch):
    package = Recorded()
    monkeypatch.setattr(gated_library, "import_module", package.modules.__getitem__)
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


def make_gradients(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """And the products they are made from."""
    grad, down, products = (
        torch.randn(shape).bfloat16() for shape in ((num_rows, 24), (24, 8), (num_rows, 16))
    )
    return *gated_library.library_gradients(grad, down, products, TILES), products


def test_gradients_are_prepared_once_too_and_lie_apart(monkeypatch):
    package = Recorded()
    monkeypatch.setattr(gated_library, "import_module", package.modules.__getitem__)
    for num_rows in (5, 6):
        grads, inner, products = make_gradients(num_rows)
        assert grads.shape == (num_rows, 16) and inner.shape == (num_rows, 8)
    assert [case[:3] for case in package.prepared] == [(5, True, True)]
    assert package.prepared[0][3]["concat_layout"] is None
    ((plan, left, right, of_gate, pairs, made),) = package.launched
    assert plan == "plan 1" and left.shape == (6, 24)
    # The right operand has a row for each column of the result.
    assert right.shape == (8, 24)
    of_gate.fill_(1.0), made["of_up"].fill_(2.0)
    assert grads.tolist() == [[1.0] * 8 + [2.0] * 8] * 6 and made["mAuxOut"] is inner
    assert torch.equal(pairs.view(torch.bfloat16), products)


def test_a_pair_is_taken_apart_bit_by_bit(monkeypatch):
    package = Recorded()
    monkeypatch.setattr(gated_library, "import_module", package.modules.__getitem__)
    _, _, products = make_gradients(5)
    ((outputs, epilogue),) = package.epilogues
    pairs, grad = products.view(torch.float32).as_subclass(Register), torch.randn(5, 8)
    made = epilogue(grad, pairs)
    assert set(made) == {"D", *outputs}
    assert torch.equal(made["D"], products[:, ::2].float())
    assert torch.equal(made["of_up"], products[:, 1::2].float())
    assert torch.equal(made["mAuxOut"], grad)


@pytest.mark.parametrize("wrong", ["dtype", "layout"])
def test_gradients_of_other_forms_are_refused(wrong):
    down = torch.zeros(24, 8).bfloat16()
    down = down.half() if wrong == "dtype" else down.t().contiguous().t()
    with pytest.raises(AssertionError):
        gated_library.library_gradients(
            torch.zeros(5, 24).bfloat16(), down, torch.zeros(5, 16).bfloat16(), TILES
        )
