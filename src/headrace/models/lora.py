"""What a low-rank adapter is, told to trainer and engine alike.

In: settings in plain values and a model. Out: the linear layers an adapter changes, by name. Trainer and
engine ask the same function, so they cannot disagree about which layers those are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from headrace.errors import ConfigError
from headrace.models.joined_linear import JoinedLinear

ALL_LINEAR = "all-linear"
"""As the only target: every linear layer but the output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """An adapter: weight + scaling * B @ A in every target, with A [rank, in] and B [out, rank]."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Last parts of layer names (``q_proj``), or ``all-linear``."""
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
    head = model.get_output_embeddings()
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, JoinedLinear)) and module is not head
    ]
    if tuple(targets) == (ALL_LINEAR,):
        return linears
    missing = [target for target in targets if not any(_means(target, name) for name in linears)]
    if missing or not targets:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(
            f"lora.targets: {type(model).__name__} has no linear layer {', '.join(map(repr, missing))} that an "
            f"adapter can change; name some of {', '.join(known)}, or {ALL_LINEAR} alone"
        )
    return [name for name in linears if any(_means(target, name) for target in targets)]


def _means(target: str, name: str) -> bool:
    return name == target or name.endswith(f".{target}")
