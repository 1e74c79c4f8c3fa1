"""Routes of a mixture of experts: checked, cut and put together.

In and out: ``Routing`` records. A record ends with its owner's last token and may begin later than the first, so
two records of the same tokens are laid over each other by their ends. Where both know a token, the earlier
record is kept: it is of the pass whose logits were sampled from.

Legend: N recorded rows, M mixture-of-experts layers, K experts of a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import RecordError
from headrace.types import Routing

_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16))


class RouterShape(NamedTuple):
    """What a model's routers choose: for each token, ``top_k`` of ``num_experts`` in ``num_layers`` layers."""

    num_layers: int
    num_experts: int
    top_k: int


def id_dtype(num_experts: int) -> np.dtype[Any]:
    """The narrowest that holds every expert's number."""
    return _DTYPES[num_experts > 256]


def check_routing(
    routing: Routing,
    *,
    num_tokens: int,
    num_layers: int | None = None,
    num_experts: int | None = None,
    top_k: int | None = None,
) -> None:
    """Raise RecordError unless the record can be of so many tokens and of such a model; None: not known here."""
    experts, recorded = routing.experts, routing.recorded
    if experts.dtype not in _DTYPES or experts.ndim != 3 or recorded.dtype != bool or recorded.ndim != 1:
        raise _bad(
            f"{experts.dtype} {experts.shape} with recorded {recorded.dtype} {recorded.shape} is no record, which "
            "is uint8 or uint16 [rows, layers, experts] with bool [tokens]"
        )
    if len(recorded) != num_tokens:
        raise _bad(f"it is of {len(recorded)} tokens and there are {num_tokens}")
    if np.count_nonzero(recorded) != len(experts):
        raise _bad(f"{np.count_nonzero(recorded)} tokens are marked and {len(experts)} have experts")
    if num_tokens and recorded[-1]:
        raise _bad("the last token is marked, which no pass has computed")
    for name, found, wanted in (
        ("layers", experts.shape[1], num_layers),
        ("experts a token", experts.shape[2], top_k),
    ):
        if wanted is not None and found != wanted:
            raise _bad(f"it has {found} {name} and the model has {wanted}")
    _check_ids(routing, num_experts)


def _check_ids(routing: Routing, num_experts: int | None) -> None:
    experts_NMK = routing.experts
    if num_experts is not None and experts_NMK.size and int(experts_NMK.max()) >= num_experts:
        row, layer, _ = np.argwhere(experts_NMK >= num_experts)[0].tolist()
        raise _bad(
            f"{_place(routing, row, layer)} names expert {experts_NMK[row, layer].max()} of {num_experts}"
        )
    # Column against column: to sort every row would take ten times as long.
    columns = np.ascontiguousarray(np.moveaxis(experts_NMK, 2, 0))
    twice_NM = np.zeros(experts_NMK.shape[:2], dtype=bool)
    for a, b in combinations(columns, 2):
        twice_NM |= a == b
    if twice_NM.any():
        row, layer = np.argwhere(twice_NM)[0].tolist()
        raise _bad(
            f"{_place(routing, row, layer)} names an expert twice ({experts_NMK[row, layer].tolist()})"
        )


def _place(routing: Routing, row: int, layer: int) -> str:
    return f"token {np.flatnonzero(routing.recorded)[row]} in layer {layer}"


def _bad(what: str) -> RecordError:
    return RecordError(
        f"routing: {what}; engine and trainer must have the same model, or set algo.routing to live"
    )


def merge_routing(parts: Sequence[tuple[Routing, int]], num_tokens: int) -> Routing | None:
    """One record of ``num_tokens`` tokens out of several, each with the position it ends before; of two that
    know a token the first one given is kept. None: there are no parts."""
    if not parts:
        return None
    shapes = {part.experts.shape[1:] for part, _ in parts}
    if len(shapes) > 1:
        raise _bad(
            f"records of one sequence have layers and experts {' and '.join(map(str, sorted(shapes)))}"
        )
    for part, end in parts:
        if end < len(part.recorded):
            raise _bad(f"it is of {len(part.recorded)} tokens and there are {end}")
    if len(parts) == 1 and parts[0][1] == num_tokens == len(parts[0][0].recorded):
        return parts[0][0]
    found = [end - len(part.recorded) + np.flatnonzero(part.recorded) for part, end in parts]
    experts_NMK = np.concatenate([part.experts for part, _ in parts])
    positions_N, recorded_T = np.concatenate(found), np.zeros(num_tokens, dtype=bool)
    recorded_T[positions_N] = True
    if not (positions_N[1:] > positions_N[:-1]).all():
        # Of equal positions the first is taken.
        experts_NMK = experts_NMK[np.unique(positions_N, return_index=True)[1]]
    return Routing(experts=experts_NMK, recorded=recorded_T)


def join_routing(first: Routing | None, later: Routing | None, more_tokens: int) -> Routing | None:
    """``later`` ends so many tokens after ``first``."""
    if first is None:
        return later
    ends = [(first, len(first.recorded))]
    if later is not None:
        ends.append((later, len(first.recorded) + more_tokens))
    # A record that begins before the first one moves all positions up.
    before = max(0, *(len(part.recorded) - end for part, end in ends))
    ends = [(part, end + before) for part, end in ends]
    return merge_routing(ends, len(first.recorded) + more_tokens + before)


def routing_tail(routing: Routing, num_tokens: int) -> Routing:
    """The record of the last so many tokens."""
    recorded = routing.recorded[max(len(routing.recorded) - num_tokens, 0) :]
    num_rows = int(np.count_nonzero(recorded))
    return Routing(experts=routing.experts[len(routing.experts) - num_rows :], recorded=recorded)


def router_shape(config_file: Path) -> RouterShape | None:
    """What the model's configuration says of its routers; None: nothing, or not all of it."""
    config = json.loads(config_file.read_text())
    num_experts = _first(config, "num_experts", "n_routed_experts", "num_local_experts")
    top_k, num_layers = config.get("num_experts_per_tok"), config.get("num_hidden_layers")
    if not num_experts or not top_k or not num_layers:
        return None
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    routed = [n for n in range(first, num_layers) if n not in dense and (n + 1) % step == 0]
    return RouterShape(len(routed), num_experts, top_k)


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name)), None)
