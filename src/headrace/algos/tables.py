"""The tables of ``docs/losses.md`` and ``docs/pivots.md`` from the catalogue, so that no page can lag behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence

from headrace.algos import pivots
from headrace.algos.catalog import CORRECTIONS, LOSSES, PARAMETERS
from headrace.algos.composition import ratio_plan
from headrace.algos.parameters import Parameter, Value
from headrace.errors import ConfigError


def losses_table() -> str:
    rows = [
        (
            f"`{name}`",
            entry.formula,
            "none" if entry.clips is None else f"{entry.clips[0]:g} / {entry.clips[1]:g}",
            entry.source,
        )
        for name, entry in LOSSES.items()
    ]
    return _table(("loss", "per token", "clip low / high", "source"), rows)


def corrections_table() -> str:
    rows = [(f"`{name}`", c.kind, c.formula, c.source) for name, c in CORRECTIONS.items()]
    return _table(("correction", "kind", "what it does", "source"), rows)


def parameters_table() -> str:
    return _parameters(PARAMETERS)


def pivots_table() -> str:
    return _parameters(pivots.PARAMETERS)


def _parameters(parameters: Iterable[Parameter]) -> str:
    def row(parameter: Parameter) -> tuple[str, ...]:
        # A name with a dot is quoted where it is a key of a table.
        name = f'"{parameter.name}"' if parameter.field else parameter.name
        return f"`{name}`", parameter.takes, f"`{_shown(parameter.default)}`", parameter.meaning

    return _table(("parameter", "takes", "default", "meaning"), map(row, parameters))


def _shown(default: Value) -> str:
    if isinstance(default, tuple):
        return json.dumps(default)
    return f'"{default}"' if isinstance(default, str) else f"{default:g}"


def pairings_table() -> str:
    """For each loss: the anchor without and with each weight, or that the pairing is refused."""
    weights = [name for name, entry in CORRECTIONS.items() if entry.kind != "filter"]
    rows = [
        (f"`{loss}`", *(_pairing(loss, names) for names in ((), *((w,) for w in weights)))) for loss in LOSSES
    ]
    return _table(("loss", "no weight", *(f"`{weight}`" for weight in weights)), rows)


def _pairing(loss: str, corrections: Sequence[str]) -> str:
    try:
        return ratio_plan(loss, corrections).anchor
    except ConfigError:
        return "refused"


TABLES: dict[str, Callable[[], str]] = {
    "losses": losses_table,
    "corrections": corrections_table,
    "pairings": pairings_table,
    "parameters": parameters_table,
    "pivots": pivots_table,
}


def fill(page: str) -> str:
    """The page with every table between ``<!-- name -->`` and ``<!-- end -->`` written anew."""
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n{table()}\n<!-- end -->"
        parts = re.split(rf"<!-- {name} -->\n.*?<!-- end -->", page, flags=re.DOTALL)
        page = block.join(parts)
    return page


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
