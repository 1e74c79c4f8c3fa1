"""Cases of the products that are not torch's: gated layers, and products added to the running sum.

Every way to compute a product is a case of its own, the one that is chosen in a pass among them; weights are cold.
With few rows a product is as fast as its weights are read, with many as its arithmetic: so its unit changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from headrace.bench.kernel_cases import Case, cold_copies, launching
from headrace.kernels import added_product, gated, gated_library, gated_tiles
from headrace.kernels.chip import chip

SIZES = {"0.5B": (896, 4864, 896), "1.5B": (1536, 8960, 1536), "7B": (3584, 18944, 3584)}
"""Hidden, inner and attention's width."""
GATED_ROWS = (8, 24, 64, 80, 96, 128, 144, 160, 192, 256, 288, 320, 352, 384, 448, 512, 1024)
KEPT_ROWS = (8702, 13053)
"""Of a training step, whose products are written down for the backward."""
ADDED_ROWS = (2, 16, 32, 48, 64)
_MANY = 192
"""Rows from which arithmetic counts."""


def cases(device: torch.device) -> Iterator[Case]:
    for model in SIZES:
        for rows in GATED_ROWS:
            yield from gated_products(model, rows, device, keep=False)
    for rows in KEPT_ROWS:
        yield from gated_products("1.5B", rows, device, keep=True)
        yield from gate_passes("1.5B", rows, device)
        yield from gradient_products("1.5B", rows, device)
    for rows in ADDED_ROWS:
        for model in SIZES:
            yield from added_products(model, rows, device)


def gated_products(model: str, rows: int, device: torch.device, *, keep: bool) -> Iterator[Case]:
    hidden, inner, _ = SIZES[model]
    name = f"gated {model} {rows}" + (" kept" if keep else "")
    amount, unit = _amount(rows, hidden, 2 * inner)
    copies = cold_copies(4.0 * hidden * inner, least=2)
    x_TI = torch.randn((rows, hidden), device=device).bfloat16()
    wholes = [torch.randn((2 * inner, hidden), device=device).bfloat16() for _ in range(copies)]
    weights = [gated.GatedWeights(whole[:inner], whole[inner:], whole) for whole in wholes]
    for tiles in _tiles_tried(rows, hidden, inner, keep, device):
        launches = [
            launching(partial(gated.tiled_product, keep=keep), x_TI, given, tiles) for given in weights
        ]
        yield Case(f"{name} in {tiles.rows}x{tiles.columns}x{tiles.inputs}", launches, amount, unit)
    of_torch = [launching(partial(gated.by_torch, keep=keep), x_TI, given) for given in weights]
    yield Case(name, of_torch, amount, unit, "torch")
    library_tiles = gated_tiles.choose_library_tiles(rows, hidden, inner)
    if gated_library.is_installed() and library_tiles is not None:
        product = partial(gated_library.library_product, keep=keep)
        of_library = [launching(product, x_TI, whole, library_tiles) for whole in wholes]
        yield Case(name, of_library, amount, unit, "quack")


def gate_passes(model: str, rows: int, device: torch.device) -> Iterator[Case]:
    """Over products, and over their gradients; bytes are of each number read and written once."""
    _, inner, _ = SIZES[model]
    copies = cold_copies(12.0 * rows * inner, least=2)
    wide = [torch.randn((rows, 2 * inner), device=device) for _ in range(copies)]
    launches = [launching(gated.gate, products, torch.bfloat16) for products in wide]
    yield Case(f"gate {model} {rows}", launches, 10.0 * rows * inner, "TB/s")
    pairs = [products.bfloat16() for products in wide]
    grads = [torch.randn((rows, inner), device=device).bfloat16() for _ in range(copies)]
    launches = [launching(gated.gate_gradients, *given) for given in zip(grads, pairs, strict=True)]
    yield Case(f"gate gradients {model} {rows}", launches, 12.0 * rows * inner, "TB/s")


def gradient_products(model: str, rows: int, device: torch.device) -> Iterator[Case]:
    """The product that makes the gradient of the inner values, with what makes that of gate and up from it."""
    hidden, inner, _ = SIZES[model]
    amount, unit = _amount(rows, hidden, inner)
    copies = cold_copies(2.0 * rows * (hidden + 3 * inner), least=2)
    down_IW = torch.randn((hidden, inner), device=device).bfloat16()
    grads = [torch.randn((rows, hidden), device=device).bfloat16() for _ in range(copies)]
    pairs = [torch.randn((rows, 2 * inner), device=device).bfloat16() for _ in range(copies)]

    def launches(function: Callable[..., object], *more: object) -> list[Callable[[], None]]:
        return [
            launching(function, grad, down_IW, kept, *more) for grad, kept in zip(grads, pairs, strict=True)
        ]

    name = f"gated gradients {model} {rows}"
    yield Case(name, launches(_product_and_pass), amount, unit)
    for tiles in gated_tiles.GRADIENT_TILES if gated_library.is_installed() else ():
        of_library = launches(gated_library.library_gradients, tiles)
        turns = ", in turns" if tiles.in_turns else ""
        yield Case(f"{name} in {tiles.rows}x{tiles.columns}{turns}", of_library, amount, unit, "quack")


def added_products(model: str, rows: int, device: torch.device) -> Iterator[Case]:
    """Those that end attention and feed-forward."""
    hidden, inner, attended = SIZES[model]
    for name, inputs in (("output", attended), ("down", inner)):
        amount, unit = _amount(rows, inputs, hidden)
        total_TO = torch.randn((rows, hidden), device=device)
        x_TI = torch.randn((rows, inputs), device=device).bfloat16()
        copies = cold_copies(2.0 * inputs * hidden, least=2)
        weights = [torch.randn((hidden, inputs), device=device).bfloat16() for _ in range(copies)]
        arrived = torch.zeros(added_product.MOST_TILES, dtype=torch.int32, device=device)
        ours = [launching(added_product.add_product, total_TO, x_TI, weight, arrived) for weight in weights]
        yield Case(f"added {name} {model} {rows}", ours, amount, unit)
        add = partial(torch.addmm, out_dtype=torch.float32, out=total_TO)
        of_torch = [launching(add, total_TO, x_TI, weight.t()) for weight in weights]
        yield Case(f"added {name} {model} {rows}", of_torch, amount, unit, "torch")


def _product_and_pass(grad_TI: torch.Tensor, down_IW: torch.Tensor, products_TO: torch.Tensor) -> None:
    gated.gate_gradients(grad_TI @ down_IW, products_TO)


def _tiles_tried(
    rows: int, hidden: int, inner: int, keep: bool, device: torch.device
) -> Sequence[gated_tiles.Tiles]:
    if rows > gated_tiles.FEW_ROWS and not keep:
        return gated_tiles.TILES_OF_MANY
    num_multiprocessors = chip(device).num_multiprocessors
    chosen = gated_tiles.choose_tiles(rows, hidden, inner, keep=keep, num_multiprocessors=num_multiprocessors)
    return () if chosen is None else (chosen,)


def _amount(rows: int, inputs: int, outputs: int) -> tuple[float, str]:
    if rows < _MANY:
        return 2.0 * inputs * outputs, "TB/s"
    return 2.0 * rows * inputs * outputs, "TFLOP/s"
