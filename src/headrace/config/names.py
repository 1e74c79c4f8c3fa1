"""The dotted names of all settings, what each expects, and the nearest name to a wrong one.

Derived from the models in ``settings``, so nothing here has to be kept in step with them.
"""

from __future__ import annotations

import types
from difflib import SequenceMatcher
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.settings import Settings


def _section(field: FieldInfo) -> type[BaseModel]:
    model = field.annotation
    assert isinstance(model, type) and issubclass(model, BaseModel), model
    return model


SECTIONS: dict[str, type[BaseModel]] = {
    name: _section(field) for name, field in Settings.model_fields.items()
}
"""The model of each section, in the order of the documentation."""

FIELDS: dict[str, FieldInfo] = {
    f"{section}.{name}": field
    for section, model in SECTIONS.items()
    for name, field in model.model_fields.items()
}
"""Every setting by its dotted name."""

_PLAIN = {
    bool: ("true or false", "booleans"),
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
}
_COUNTS = {1: "one", 2: "two", 3: "three"}
_CUTOFF = 0.5


def expected(name: str) -> str:
    """What a setting takes, in words: ``a whole number of at least 1``."""
    return _describe(_without_none(FIELDS[name].annotation), FIELDS[name].metadata)


def may_be_left_out(name: str) -> bool:
    """True when "not set" has a meaning of its own, so that leaving the setting out is a remedy."""
    return FIELDS[name].default is None


def takes_text(name: str) -> bool:
    """True when a bare value, whatever it looks like, is meant as text."""
    inner = _without_none(FIELDS[name].annotation)
    return inner is str or (get_origin(inner) is Literal and all(isinstance(v, str) for v in get_args(inner)))


def takes_table(name: str) -> bool:
    return get_origin(FIELDS[name].annotation) is dict


def nearest(name: str) -> str | None:
    """The setting most likely meant by an unknown name, or None when nothing is near."""
    section, _, leaf = name.rpartition(".")
    if section in FIELDS:
        return section
    scores = {candidate: _likeness(section, leaf, candidate) for candidate in FIELDS}
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= _CUTOFF else None


def _likeness(section: str, leaf: str, candidate: str) -> float:
    """The field's own name decides; the section breaks ties, since a field is often put in the wrong one."""
    other_section, other_leaf = candidate.split(".")
    initials = "".join(word[:1] for word in other_leaf.split("_"))
    likeness = 1.0 if leaf == initials else SequenceMatcher(None, leaf, other_leaf).ratio()
    return 0.75 * likeness + 0.25 * SequenceMatcher(None, section, other_section).ratio()


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        (inner,) = (a for a in get_args(annotation) if a is not types.NoneType)
        return inner
    return annotation


def _describe(annotation: Any, metadata: list[Any], *, plural: int = 0) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _describe(args[0], [*args[1:], *metadata], plural=plural)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is dict and args[1] is str:
        return "a table of texts"
    if origin is dict:
        return "a table of texts, numbers, booleans, lists and tables"
    if origin is tuple:
        many = args[1:] == (...,)
        return ("a list of " if many else f"{_COUNTS[len(args)]} ") + _describe(args[0], [], plural=1)
    return " ".join([_PLAIN[annotation][plural], *_bounds(metadata)])


def _bounds(metadata: list[Any]) -> list[str]:
    """Lower bound, then upper bound, joined by ``and``; empty when there are none."""
    words = []
    for item in _flat(metadata):
        match item:
            case annotated_types.Ge(ge=bound):
                words.append(f"of at least {bound}")
            case annotated_types.Gt(gt=bound):
                words.append(f"above {bound}")
            case annotated_types.Le(le=bound):
                words.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                words.append(f"below {bound}")
    return [" and ".join(words)] if words else []


def _flat(metadata: list[Any]) -> list[Any]:
    """Constraints inside an alias arrive wrapped in the FieldInfo that declared them."""
    return [x for item in metadata for x in (item.metadata if isinstance(item, FieldInfo) else [item])]
