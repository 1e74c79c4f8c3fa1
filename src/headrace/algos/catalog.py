"""Every loss and correction by name: what it computes, where it is from, what it takes, and its parameters.

Three policies meet in a loss: ``policy`` (the weights being trained), ``prox`` (the same weights when the batch
was taken) and ``behavior`` (what the engine really sampled from, never recomputed). What may be combined is said
in ``composition``. No torch here, so that settings can be checked without it; ``docs/losses.md`` is generated from
these tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headrace.algos.parameters import Parameter


@dataclass(frozen=True, slots=True)
class LossEntry:
    formula: str
    source: str
    takes: Literal["any weight", "sequence weights", "no weight"]
    refusal: str = ""
    """Why weights it does not take would be wrong."""
    clips: tuple[float, float] | None = None
    """Default (low, high) as its authors or their successors use it; None: it has no clip."""
    parameters: tuple[Parameter, ...] = ()


@dataclass(frozen=True, slots=True)
class CorrectionEntry:
    formula: str
    source: str
    kind: Literal["token weight", "sequence weight", "filter"]
    needs: Literal["prox", "policy", "batch"]
    """What it looks at: prox / behavior of its own tokens, the policy as it is now, or prox / behavior of the whole
    batch, which costs a forward pass before the first backward."""
    parameters: tuple[Parameter, ...] = ()


_SEQUENCES = "it compares whole sequences, which token weights would undo"
_TWICE = "it already weighs by the ratio to the behaviour policy, which would be counted twice"

LOSSES: dict[str, LossEntry] = {
    "ppo": LossEntry(
        "-min(u A, clip(u, 1-low, 1+high) A); dual clip c: at most -c A where A < 0",
        "arXiv 1707.06347; two clips: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729",
        "any weight",
        clips=(0.2, 0.28),
        parameters=(
            Parameter("ppo.dual_clip", 0.0, "c of the dual clip, above 1 + clip_high; 0 is off", at_least=0),
        ),
    ),
    "gspo": LossEntry(
        "PPO's clip on s = exp(mean_t log u_t), token form sg(s) policy / sg(policy)",
        "arXiv 2507.18071",
        "sequence weights",
        _SEQUENCES,
        clips=(3e-4, 4e-4),
    ),
    "gmpo": LossEntry(
        "-A exp(mean_t c_t), c_t = min(log u_t, high) where A > 0, max(log u_t, -low) where A < 0",
        "arXiv 2507.20673",
        "sequence weights",
        _SEQUENCES,
        clips=(0.4, 0.4),
    ),
    "cispo": LossEntry(
        "-sg(clip(u, 1-low, 1+high)) A log policy", "arXiv 2506.13585", "any weight", clips=(1.0, 5.0)
    ),
    "sapo": LossEntry(
        "-A (4/tau) sigmoid(tau (u - 1)), tau by the sign of A",
        "arXiv 2511.20347",
        "any weight",
        parameters=(
            Parameter("sapo.tau_pos", 1.0, "tau where A > 0", above=0),
            Parameter("sapo.tau_neg", 1.05, "tau where A <= 0", above=0),
        ),
    ),
    "gipo": LossEntry(
        "-sg(exp(-(log u)^2 / (2 sigma^2))) u A",
        "arXiv 2603.03955",
        "any weight",
        parameters=(Parameter("gipo.sigma", 1.0, "width of the weight in the log of the ratio", above=0),),
    ),
    "aspo": LossEntry(
        "-sg(min(w, cap)) A log policy, w = 1/u where A > 0, else u; PPO's clip leaves tokens out",
        "arXiv 2510.06062",
        "any weight",
        clips=(0.2, 0.28),
        parameters=(Parameter("aspo.cap", 3.0, "largest weight of a token; it keeps its gradient", above=1),),
    ),
    "decoupled": LossEntry(
        "sg(min(prox / behavior, cap)) times ppo anchored at prox",
        "arXiv 2110.00641; AReaL, arXiv 2505.24298; interpolated prox: A-3PO",
        "no weight",
        _TWICE,
        clips=(0.2, 0.28),
        parameters=(
            Parameter("decoupled.cap", 5.0, "largest weight prox / behavior", above=0),
            Parameter(
                "decoupled.prox",
                "computed",
                "`interpolated`: log prox = log behavior + lag/(lag+1) (log policy - log behavior), without a pass",
                choices=("computed", "interpolated"),
            ),
            Parameter("decoupled.dual_clip", 0.0, "as ppo.dual_clip", at_least=0),
        ),
    ),
    "aipo": LossEntry(
        "-sg(min(r, cap)) A log policy",
        "LlamaRL, arXiv 2505.24034",
        "no weight",
        _TWICE,
        parameters=(Parameter("aipo.cap", 5.0, "largest weight of a token", above=0),),
    ),
    "dppo-tv": LossEntry(
        "-sg(min(r, cap)) A log policy + penalty (log r)^2; the first term not where A > 0 and p - q > delta, or "
        "A < 0 and q - p > delta (p, q: the token's probability under policy, behavior)",
        "arXiv 2602.04879",
        "no weight",
        _TWICE,
        parameters=(
            Parameter("dppo-tv.delta", 0.2, "largest move of a probability", above=0),
            Parameter("dppo-tv.cap", 20.0, "largest weight of a token", above=0),
            Parameter(
                "dppo-tv.penalty", 0.0, "weight of the squared log ratio, 1e-3 in prime-rl", at_least=0
            ),
        ),
    ),
    "vespo": LossEntry(
        "-sg(phi) A log policy, phi = e^l w^k e^(-l w), w = prod_t r_t, (k, l) by the sign of A",
        "arXiv 2602.10693",
        "no weight",
        _TWICE,
        parameters=(
            Parameter("vespo.k_pos", 2.0, "k where A >= 0", at_least=0),
            Parameter("vespo.lambda_pos", 3.0, "l where A >= 0", above=0),
            Parameter("vespo.k_neg", 3.0, "k where A < 0", at_least=0),
            Parameter("vespo.lambda_neg", 2.0, "l where A < 0", above=0),
        ),
    ),
    "dro": LossEntry(
        "-(A log policy - beta/2 (log r)^2)",
        "arXiv 2405.19107; the squared log ratio of Kimi k1.5, arXiv 2501.12599",
        "no weight",
        "its squared log ratio already holds the policy at the behaviour policy without any weight",
        parameters=(Parameter("dro.beta", 0.05, "strength of the squared log ratio", above=0),),
    ),
}
"""u = policy / anchor, r = policy / behavior, A the advantage, sg: no gradient."""

CORRECTIONS: dict[str, CorrectionEntry] = {
    "tis": CorrectionEntry(
        "weight min(rho, cap)",
        "fengyao.notion.site/off-policy-rl (2025)",
        "token weight",
        "prox",
        (Parameter("tis.cap", 2.0, "largest weight of a token", above=0),),
    ),
    "icepop": CorrectionEntry(
        "weight rho where low <= rho <= high, else 0",
        "arXiv 2510.18855",
        "token weight",
        "prox",
        (
            Parameter("icepop.low", 0.5, "lower end of the band", at_least=0),
            Parameter("icepop.high", 5.0, "upper end of the band", above=0),
        ),
    ),
    "mis": CorrectionEntry(
        "weight rho where rho <= cap, else 0",
        "richardli.xyz/rl-collapse (2025)",
        "token weight",
        "prox",
        (Parameter("mis.cap", 2.0, "largest ratio that is kept", above=0),),
    ),
    "seq-tis": CorrectionEntry(
        "weight min(prod_t rho_t, cap)",
        "richardli.xyz/rl-collapse (2025)",
        "sequence weight",
        "prox",
        (Parameter("seq-tis.cap", 2.0, "largest weight of a sequence", above=0),),
    ),
    "seq-mis": CorrectionEntry(
        "weight prod_t rho_t where it is <= cap, else 0",
        "richardli.xyz/rl-collapse (2025)",
        "sequence weight",
        "prox",
        (Parameter("seq-mis.cap", 2.0, "largest ratio that is kept", above=0),),
    ),
    "geo-filter": CorrectionEntry(
        "keeps sequences with low <= exp(mean_t log rho_t) <= high",
        "verl, rollout correction",
        "filter",
        "prox",
        (
            Parameter("geo-filter.low", 0.999, "lower end of the band", above=0),
            Parameter("geo-filter.high", 1.001, "upper end of the band", above=0),
        ),
    ),
    "k3-filter": CorrectionEntry(
        "keeps sequences with mean_t(rho_t - 1 - log rho_t) <= limit",
        "verl, rollout correction",
        "filter",
        "prox",
        (Parameter("k3-filter.limit", 0.01, "largest mean divergence", above=0),),
    ),
    "max-k2-filter": CorrectionEntry(
        "keeps sequences with max_t (log rho_t)^2 / 2 <= limit",
        "verl, rollout correction",
        "filter",
        "prox",
        (Parameter("max-k2-filter.limit", 2.0, "largest divergence of a single token", above=0),),
    ),
    "opsm": CorrectionEntry(
        "leaves out tokens with A < 0 of sequences with mean_t(log behavior_t - log policy_t) > delta",
        "DeepSeek-V3.2, arXiv 2512.02556",
        "filter",
        "policy",
        (Parameter("opsm.delta", 0.01, "largest mean gap; look at the figures before choosing", at_least=0),),
    ),
    "m2po": CorrectionEntry(
        "leaves out the largest (log rho)^2 of the batch until the mean of the rest is below tau",
        "arXiv 2510.01161",
        "filter",
        "batch",
        (Parameter("m2po.tau", 0.04, "bound of the second moment", above=0),),
    ),
}
"""rho = prox / behavior."""

OTHER_PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "rae.decay", 0.95, "share of the running mean that each attempt's return leaves; below 1", at_least=0
    ),
    Parameter(
        "truncated.mode",
        "keep",
        "samples whose last completion was cut off at the length limit: `keep` them, `mask` them (not trained on, not "
        "counted), or `penalise` them",
        choices=("keep", "mask", "penalise"),
    ),
    Parameter("truncated.penalty", 1.0, "reward they lose under `penalise`", above=0),
    Parameter(
        "overlong.tokens",
        0,
        "the last so many tokens before `rollout.max_tokens` cost reward, linearly more, for the longest of an "
        "attempt's completions; 0 is off",
        at_least=0,
    ),
    Parameter(
        "overlong.penalty", 1.0, "reward lost by a completion that fills all of `rollout.max_tokens`", above=0
    ),
    Parameter(
        "guard.effective_samples",
        0.1,
        "share of effective samples below which the guard acts",
        at_least=0,
        at_most=1,
    ),
    Parameter(
        "guard.mismatch", 0.1, "mean |log prox - log behavior| of fresh tokens above which it acts", above=0
    ),
    Parameter(
        "guard.route_flips",
        1.0,
        "share of recorded tokens whose experts would now be others, in a mixture's worst layer, above which it acts; "
        "1: never",
        at_least=0,
        at_most=1,
    ),
    Parameter(
        "kl.estimator",
        "k3",
        "of the divergence that `algo.kl_coef` weighs, see above; `k1` is inside the reward",
        choices=("k2", "k3", "k1"),
    ),
    Parameter(
        "kl.reference",
        "trainer",
        "who computes the starting model's log-probabilities for it: the `trainer`, which keeps a copy of that model, "
        "or one more `engine`, which never gets new weights and works beside generation and training",
        choices=("trainer", "engine"),
    ),
    Parameter(
        "balance.coef",
        0.0,
        "weight of a mixture's load-balancing loss, computed for each sequence by itself; 0 is off",
        at_least=0,
    ),
    Parameter(
        "echo.coef",
        0.0,
        "weight of the cross-entropy on what an environment answered, 0.1 is usual; 0 is off",
        at_least=0,
    ),
    Parameter(
        "process.form",
        "potential",
        "what the scores of steps (`scoring.process`) become: the normalised `sum` of those to come, close to the "
        "`min` of them (PURE), or how much each step raised the estimate",
        choices=("sum", "min", "potential"),
    ),
    Parameter(
        "process.weight", 1.0, "factor of the steps' advantages, which are added to the outcome's", at_least=0
    ),
)
OF_A_RUN: tuple[str, ...] = ("rae", "overlong", "kl", "balance", "echo", "process")
"""Owners of parameters that are no part of a loss with its corrections: who builds a run reads them."""

PARAMETERS: tuple[Parameter, ...] = (
    *(p for loss in LOSSES.values() for p in loss.parameters),
    *(p for correction in CORRECTIONS.values() for p in correction.parameters),
    *OTHER_PARAMETERS,
)
