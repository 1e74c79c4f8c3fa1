"""Policy-gradient losses, per token, by name; aggregation and corrections are separate and named elsewhere.

In: ``LossTokens``, whose anchor ``composition.ratio_plan`` has chosen, and the loss's own parameters. Out: [T] losses
to minimise, and which tokens the loss's bounds touched. Nothing here averages over a batch, so a step may be cut
into rows in any way. Formulas, defaults and sources are in ``catalog.LOSSES``.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.algos.clipped_losses import gmpo, gspo, ppo
from headrace.algos.ratios import TokenLoss
from headrace.algos.weighted_losses import aipo, aspo, cispo, dppo_tv, dro, gipo, sapo, vespo

PolicyLoss = Callable[..., TokenLoss]
"""Takes ``LossTokens``, and its parameters by their own names."""

LOSSES: dict[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "gipo": gipo,
    "aspo": aspo,
    # The weight and the anchor that make it decoupled are the plan's.
    "decoupled": ppo,
    "aipo": aipo,
    "dppo-tv": dppo_tv,
    "vespo": vespo,
    "dro": dro,
}
