"""What a low-rank adapter is, told to trainer and engine alike.

In: settings in plain values and a model. Out: the linear layers and the fused experts' weights an adapter changes, by
name. Trainer and engine ask the same functions, so they cannot disagree about which those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from headrace.errors import ConfigError
from headrace.models.grouped_experts import EXPERT_WEIGHTS, fused_experts
from headrace.models.joined_linear import JoinedLinear

ALL_LINEAR = "all-linear"
"""As a target: every linear layer but the output head. Experts that are fused are no linear layers."""

_NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""In a model with fused experts, peft takes layers of these names for the experts they once were, dense and shared
ones too; an adapter that changed those could not be loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """An adapter: weight + scaling * B @ A in every target, with A [rank, in] and B [out, rank]; every expert has
    its own."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Last parts of layer names (``q_proj``), or ``all-linear``; ``experts`` for both weights of fused experts, or the
    last part of one's name (``down_proj``)."""
    dora: bool = False
    """Each row of the changed weight is scaled to a length that is trained too."""
    seed: int = 0
    """Of A's first values; B begins as zero."""
    policy: str = "policy"
    """The name engines know it by."""

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


def target_linears(model: PreTrainedModel, targets: Sequence[str]) -> list[str]:
    """Names of the layers these targets mean, in the model's order. Raises ConfigError for a target that is
    nowhere. The head is no target: it is computed in chunks of the vocabulary, apart from the layers."""
    linears = _linears(model)
    _check_known(model, targets, linears, _expert_weights(model))
    if ALL_LINEAR in targets:
        return linears
    return [name for name in linears if any(_means(target, name) for target in targets)]


def target_experts(model: PreTrainedModel, targets: Sequence[str], *, dora: bool) -> list[str]:
    """Names of the fused experts' weights these targets mean, in the model's order. Raises ConfigError for a target
    that is nowhere, and for experts with DoRA."""
    weights = _expert_weights(model)
    _check_known(model, targets, _linears(model), weights)
    found = [name for name in weights if any(_means_expert(target, name) for target in targets)]
    if found and dora:
        raise ConfigError(
            f"lora.dora: the lengths of experts' rows cannot be trained, and lora.targets means {found[0]}; set "
            "lora.dora = false, or name targets without experts"
        )
    return found


def _linears(model: PreTrainedModel) -> list[str]:
    head, taken = model.get_output_embeddings(), _NAMES_OF_EXPERTS if fused_experts(model) else ()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, JoinedLinear))
        and module is not head
        and name.rpartition(".")[2] not in taken
    ]


def _expert_weights(model: PreTrainedModel) -> list[str]:
    return [f"{name}.{weight}" for name in fused_experts(model) for weight in EXPERT_WEIGHTS]


def _check_known(
    model: PreTrainedModel, targets: Sequence[str], linears: Sequence[str], experts: Sequence[str]
) -> None:
    missing = [
        target
        for target in targets
        if target != ALL_LINEAR
        and not any(_means(target, name) for name in linears)
        and not any(_means_expert(target, name) for name in experts)
    ]
    if missing or not targets:
        known = sorted({name.rpartition(".")[2] for name in linears})
        known += ["experts", *EXPERT_WEIGHTS] if experts else []
        raise ConfigError(
            f"lora.targets: {type(model).__name__} has no linear layer {', '.join(map(repr, missing))} that an "
            f"adapter can change; name some of {', '.join(known)}, or {ALL_LINEAR}"
        )


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _means_expert(target: str, name: str) -> bool:
    """The weight itself, or all that its module has."""
    return _means(target, name) or _means(target, name.rpartition(".")[0])
