"""Log-probabilities of several given tokens at each loss token's place, for distillation over a teacher's likeliest.

In: a model, a row and the ids to be evaluated at each place. Out: float32 log-probabilities of all of them with
gradients, and the entropies; computed in chunks of tokens, as in ``logprobs``.

Legend: N loss tokens, A ids at each.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from headrace.trainers.logprobs import RowTensors, chunk_tokens, decoder_output, linear_head
from headrace.trainers.whole_head import HeadLogprobs


def logprobs_at(
    model: PreTrainedModel,
    row: RowTensors,
    ids_NA: torch.Tensor,
    *,
    head_master: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [N, A] log-probabilities of ``ids_NA`` where the loss tokens stand, and the entropies [N] (without
    gradient) beside them. ``head_master`` as for ``logprobs.head_values``."""
    hidden_TH, head = decoder_output(model, row), linear_head(model)
    return HeadLogprobs.apply(
        hidden_TH.index_select(0, row.predictors_N),
        head.weight,
        head.bias,
        ids_NA,
        row.temperatures_N,
        getattr(model.config, "final_logit_softcapping", None),
        chunk_tokens(head.weight),
        head_master,
    )
