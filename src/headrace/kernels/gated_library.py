"""The gated product by quack's kernel for Hopper, where that package is installed (the extra ``flash``).

In: dense rows, the weights of gate and up one behind the other in one matrix, and tiles. Out: as of ``gated``. Or in:
the gradient of what a gated layer adds, and both its products in pairs. Out: their gradients, each product's by itself,
by a kernel that never writes down the product it makes them of. A kernel is compiled when its tiles are first used, for
any number of rows and widths, and kept on disk.

What is called is nothing that the package promises to keep, so other versions than the one of the extra are left alone.

Shape legend: T rows, I inputs, W inner width, O = 2 W.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module, metadata
from typing import Any, Literal, NamedTuple

import torch

from headrace.errors import ModelError
from headrace.kernels.chip import HOPPER, chip
from headrace.kernels.gated_tiles import LibraryTiles
from headrace.kernels.kept_code import folder

_PACKAGE, _VERSION = "quack-kernels", "0.6.5"
_MOST_WAIT_S = 600.0
_INNER = "mAuxOut"
"""What the package calls the values that are made of both products."""
_OF_UP = "of_up"


@cache
def is_installed() -> bool:
    try:
        return metadata.version(_PACKAGE) == _VERSION
    except metadata.PackageNotFoundError:
        return False


def kernels_in_use(device: torch.device) -> str:
    """Name and version of what computes many rows of gated layers on a GPU."""
    if chip(device).generation != HOPPER or not is_installed():
        return f"torch {torch.__version__}" + (" and Triton" if device.type == "cuda" else "")
    _library()
    return f"{_PACKAGE} {_VERSION}"


def library_product(
    x_TI: torch.Tensor, whole_OI: torch.Tensor, tiles: LibraryTiles, *, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[T, W], and with ``keep`` both products in pairs, [T, O]."""
    num_rows, width = x_TI.shape[0], whole_OI.shape[0] // 2
    inner_TW = x_TI.new_empty((num_rows, width))
    products_TO = x_TI.new_empty((num_rows, 2 * width)) if keep else None
    launch = _launcher(x_TI.device, x_TI.dtype, tiles, "products" if keep else "values")
    launch(x_TI, whole_OI, products_TO, None, {_INNER: inner_TW})
    return inner_TW, products_TO


def library_gradients(
    grad_TI: torch.Tensor, down_IW: torch.Tensor, products_TO: torch.Tensor, tiles: LibraryTiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both products, all of the gate's before all of the others, [T, O], and the inner values once more,
    [T, W]; from products in pairs and the gradient of what the layer adds. All are dense, in bfloat16."""
    assert all(t.is_contiguous() and t.dtype == torch.bfloat16 for t in (grad_TI, down_IW, products_TO))
    inner_TW = grad_TI.new_empty((grad_TI.shape[0], down_IW.shape[1]))
    grads_TO = torch.empty_like(products_TO)
    of_gate_TW, of_up_TW = grads_TO.chunk(2, 1)
    launch = _launcher(grad_TI.device, grad_TI.dtype, tiles, "gradients")
    made = {_OF_UP: of_up_TW, _INNER: inner_TW}
    launch(grad_TI, down_IW.t(), of_gate_TW, products_TO.view(torch.float32), made)
    return grads_TO, inner_TW


_What = Literal["values", "products", "gradients"]
"""By a kernel: inner values; with them both products; or gradients of these."""


class _Library(NamedTuple):
    product: Any
    """Of two matrices, with what is made of each pair of sums."""
    gradients: Callable[[], Any]
    """Makes one of two matrices, with what is made of each sum and the pair that lies at its place."""
    launch: Callable[..., None]
    """A product once more, by what its first call has prepared."""


@cache
def _library() -> _Library:
    with _at_work():
        kernels: Any = import_module("quack.cache")
        # Not by its variable of the environment: others may have imported the package before.
        kernels.CACHE_DIR = kernels.CACHE_DIR or folder("quack")
        epilogues = import_module("quack.epilogue.library")
        return _Library(
            epilogues.linear_act_mod("swiglu", gated=True, has_c=False, has_rowvec=False, has_colvec=False),
            _gradients,
            import_module("quack.gemm_runtime.host").run_gemm_epi_plan,
        )


def _gradients() -> Any:
    """The package has one too, which writes pairs as it reads them. This one is of its ordinary kind, with a place for
    each result, which may be part of a larger matrix; what it reads as a number of 32 bits is a pair."""
    cutlass, frontend = import_module("cutlass"), import_module("quack.epilogue.frontend")
    bits_of, number, make = cutlass.Int32, cutlass.Float32, import_module("quack.activation").dswiglu

    def gated_gradients(acc: Any, c: Any) -> dict[str, Any]:
        # The first of a pair is the lower half; a bfloat16 is the upper half of its float32.
        pair = c.bitcast(bits_of)
        gate, up = (pair << 16).bitcast(number), (pair & -0x10000).bitcast(number)
        of_gate, of_up, inner = make(gate, up, acc)
        return {"D": of_gate, _OF_UP: of_up, _INNER: inner}

    # The kernel is kept by the source of functions of the package, but by the mere name of others that are installed,
    # and would outlive a change of this one.
    gated_gradients.__module__ = "quack.headrace"
    return frontend.gemm_epilogue(outputs=(_OF_UP, _INNER))(gated_gradients)


@cache
def _launcher(
    device: torch.device, dtype: torch.dtype, tiles: LibraryTiles, what: _What
) -> Callable[..., None]:
    """Prepares at its first call, which also computes. What is prepared serves all numbers of rows, inputs and
    columns; the package would prepare, and remember, each anew."""
    library = _library()
    prepared: Any = None

    def launch(
        left: torch.Tensor,
        right: torch.Tensor,
        written: torch.Tensor | None,
        read: torch.Tensor | None,
        made: dict[str, torch.Tensor],
    ) -> None:
        nonlocal prepared
        if prepared is not None:
            library.launch(prepared, left, right, written, read, made)
            return
        with _at_work():
            product = library.gradients() if what == "gradients" else library.product
            prepared = product.gemm(
                left, right, written, read, epi_args=made, tile_M=tiles.rows, tile_N=tiles.columns,
                cluster_M=tiles.cluster[0], cluster_N=tiles.cluster[1], pingpong=tiles.in_turns,
                concat_layout=None if what == "gradients" else ("B",),
            )  # fmt: skip

    return launch


_lock = threading.Lock()


@contextmanager
def _at_work() -> Iterator[None]:
    """Around what the package imports and compiles: one thread at a time, since filters of warnings are everybody's;
    without what it is told about its own use of CUTLASS; and whatever fails says what to do."""
    if not _lock.acquire(timeout=_MOST_WAIT_S):
        raise ModelError(
            f"gated layers: waited {_MOST_WAIT_S:.0f} s for another thread that imports {_PACKAGE} or compiles a "
            f"kernel of it; see what it waits for, or uninstall {_PACKAGE}"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except Exception as error:
        raise ModelError(
            f"gated layers: {_PACKAGE} {_VERSION} is installed and cannot be used ({error!r}); install Headrace's "
            f"extra flash anew, or uninstall {_PACKAGE} to use kernels that are slower with many rows"
        ) from error
    finally:
        _lock.release()
