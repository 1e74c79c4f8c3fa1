"""Attention of the usual form, told by its own code.

In: an attention module of transformers. Out: how it makes its result of queries, keys and values, what it asks of the
function that attends, and whether it turns queries and keys as ``kernels/rotation`` does. What computes an attention in
another way asks here first; a module that does anything else is left to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from headrace.kernels.rotation import Rotation, rotated
from headrace.models.told import Told, ToldInHeads, how, of_one

PLAIN = "o_proj(attended(turned(q_proj(x)), turned(k_proj(x)), v_proj(x)))"
NORMALISING = "o_proj(attended(turned(q_norm(q_proj(x))), turned(k_norm(k_proj(x))), v_proj(x)))"
_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"}
_ROTATION = "apply_rotary_pos_emb"


class Attending(NamedTuple):
    form: str | None
    """``PLAIN`` and ``NORMALISING`` are the usual ones; None: something nobody here knows."""
    asked: Mapping[str, Any]
    """Of the function that attends, by name."""


def how_it_attends(attention: Any) -> Attending:
    asked: dict[str, Any] = {}

    def attended(
        _: Any, query: Told, key: Told, value: Told, *_mask: Any, **options: Any
    ) -> tuple[Told, None]:
        asked.update(options)
        return ToldInHeads(f"attended({query.how}, {key.how}, {value.how})"), None

    def turned(query: Told, key: Told, _cos: Told, _sin: Told) -> tuple[Told, Told]:
        return of_one("turned", query), of_one("turned", key)

    interface = SimpleNamespace(get_interface=lambda *_: attended)
    form = how(
        attention,
        _PARTS,
        hidden_states=ToldInHeads("x"),
        position_embeddings=(Told("cos"), Told("sin")),
        attention_mask=None,
        standing_in={_ROTATION: turned, "ALL_ATTENTION_FUNCTIONS": interface},
        first=True,
    )
    return Attending(form, asked)


def rotation_of(attention: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """What turns its queries and keys, of an attention of a usual form."""
    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]] = type(attention).forward.__globals__[_ROTATION]
    return rotate


def rotates_as_usual(attention: Any) -> bool:
    """Tried out: families that turn other pairs call it by the same name."""
    rotate = rotation_of(attention)
    generator = torch.Generator().manual_seed(5)
    query, key = torch.randn((2, 1, 3, 4, attention.head_dim), generator=generator)
    cos, sin = torch.randn((2, 1, 4, attention.head_dim), generator=generator)
    for given, made in zip((query, key), rotate(query, key, cos, sin), strict=True):
        expected = rotated(given[0].transpose(0, 1), Rotation(cos[0], sin[0])).transpose(0, 1)
        if made.shape != given.shape or not torch.allclose(made[0], expected, atol=1e-5):
            return False
    return True
