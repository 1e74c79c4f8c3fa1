"""Names that settings used to have, and what replaces each: whoever writes one is told where to go."""

from __future__ import annotations

_WARM_START = "call headrace.warm_start before the run, and set model.path to what it writes"

MOVED: dict[str, str] = {
    "algo.balance_coef": 'write "balance.coef" in algo.options',
    "algo.correction": "write a list in algo.corrections",
    "algo.kl": 'algo.kl_coef above 0 is enough, and "kl.estimator" in algo.options is k3 or k2',
    "algo.overlong_buffer": 'write "overlong.tokens" in algo.options',
    "algo.overlong_factor": 'write "overlong.penalty" in algo.options',
    "algo.reference": 'write "kl.reference" in algo.options',
    "algo.tis_cap": 'write "tis.cap" in algo.options',
    "distill.snapshot_lag": 'name the policy N versions back in distill.teachers, as NAME = "snapshot:N"',
    "engine.block_size": "it is chosen for you, leave it out",
    "engine.prefill_tokens": "it is chosen for you, leave it out",
    "pivots.segment_tokens": "write segment_tokens in pivots.options",
    "pivots.weight": "write weight in pivots.options",
    "reward.retries": "a call that failed is made once more, leave it out",
    "scoring.deadline_s": "set reward.timeout_s, which bounds step scores too",
    "scoring.form": 'write "process.form" in algo.options',
    "scoring.weight": 'write "process.weight" in algo.options',
    "tasks.split": "write split in tasks.options",
    "warm_start.answer_column": _WARM_START,
    "warm_start.batch_size": _WARM_START,
    "warm_start.examples": _WARM_START,
    "warm_start.learning_rate": _WARM_START,
    "warm_start.steps": _WARM_START,
    "weights.deadline_s": "set run.stall_s, of which an update may take a quarter",
}
"""By old name, the remedy."""
