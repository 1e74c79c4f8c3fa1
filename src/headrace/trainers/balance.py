"""How evenly a mixture's experts are used, as a loss.

In: the routers' logits and choices for a row. Out: for each sequence the sum over experts of (share of the
tokens that chose it) x (mean probability it was given), times the number of experts, and the mean over layers:
1 when every expert is used alike, E / K when the same ones always are. Each sequence stands for itself
(arXiv 2412.19437, eq. 17), so rows and ranks may cut a batch in any way. A shared prompt is computed once and counts
for every sequence that it begins.

Legend: T tokens of the row that are computed, G its segments, S its sequences, E experts, K chosen for each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headrace.errors import ModelError
from headrace.models.routers import routers


class ExpertBalance:
    """Listens to the routers of ``model`` while it computes a row with gradients."""

    def __init__(self, model: nn.Module) -> None:
        self._heard: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
        self._listening = False
        found = routers(model)
        if not found:
            raise ModelError(
                f"model: {type(model).__name__} routes nothing, so there is nothing to balance; set "
                '"balance.coef" in algo.options to 0'
            )
        for router in found.values():
            router.register_forward_hook(self._hear)

    def __enter__(self) -> None:
        self._heard.clear()
        self._listening = True

    def __exit__(self, *_: object) -> None:
        # A layer that is recomputed in the backward would be heard twice.
        self._listening = False

    def _hear(
        self, router: nn.Module, _: Any, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> None:
        if self._listening:
            # Nothing is computed here: a layer that is recomputed must do the same twice.
            logits_TE, _, experts_TK = output
            self._heard.append((router, logits_TE, experts_TK))

    def loss(self, segment_T: torch.Tensor, prefix_S: torch.Tensor) -> torch.Tensor:
        """The sum over the row's sequences; segments are numbered as in ``logprobs.RowTensors``."""
        layers = [
            imbalance(_probabilities(router, logits_TE.float()), experts_TK, segment_T, prefix_S)
            for router, logits_TE, experts_TK in self._heard
        ]
        self._heard.clear()
        return torch.stack(layers).mean()


def imbalance(
    probs_TE: torch.Tensor, experts_TK: torch.Tensor, segment_T: torch.Tensor, prefix_S: torch.Tensor
) -> torch.Tensor:
    """One layer's."""
    num_experts = probs_TE.shape[1]
    chosen_TE = torch.zeros_like(probs_TE).scatter_(1, experts_TK, 1.0 / experts_TK.shape[1]).detach()
    lengths_S1 = _over_sequences(torch.ones_like(probs_TE[:, :1]), segment_T, prefix_S).clamp(min=1)
    shares_SE, means_SE = (
        _over_sequences(part_TE, segment_T, prefix_S) / lengths_S1 for part_TE in (chosen_TE, probs_TE)
    )
    return num_experts * (shares_SE * means_SE).sum()


def _over_sequences(values_TE: torch.Tensor, segment_T: torch.Tensor, prefix_S: torch.Tensor) -> torch.Tensor:
    """[S, E], summed over the tokens of each sequence, those it shares with others included."""
    num_sequences = prefix_S.shape[0]
    zeros_GE = values_TE.new_zeros(2 * num_sequences + 1, values_TE.shape[1])
    sums_GE = zeros_GE.index_add(0, segment_T, values_TE)
    return sums_GE[:num_sequences] + sums_GE[prefix_S]


def _probabilities(router: nn.Module, logits_TE: torch.Tensor) -> torch.Tensor:
    """A router with a correction of its scores (DeepSeek) scores each expert by itself."""
    if "e_score_correction_bias" not in router._buffers:
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True)
