"""Combinations of settings that cannot work, each refused in one sentence with its remedy.

In: settings whose fields are valid one by one. Out: nothing, or a ConfigError. A check belongs here
only if the run could not do what was asked; a poor choice is the user's. The checks in ``_TRAINING``
are skipped when the policy is only sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from headrace.algos.composition import Composition, compose
from headrace.algos.parameters import flat
from headrace.config.parameters import pivot_parameters, used_beside_the_loss
from headrace.errors import ConfigError
from headrace.types import BLOCK_TOKENS, MAX_KEPT_TOKENS

if TYPE_CHECKING:
    from headrace.config.settings import AlgoSettings, Settings

_STEPS = re.compile(r"delimiter:.+|tokens:[1-9]\d*|entropy:\d*\.?\d+", re.DOTALL)
_NOBODY = "none"
"""The name of a teacher that no teacher may have."""
SNAPSHOT = "snapshot:"
"""How the text of a teacher begins that is the policy itself, some versions back."""
_DATASET_OPTIONS = ("split", "subset")
_MOMENTS = ("first_moments", "moments")
"""Of `trainer.offload`, what leaves the weights where they are."""
_COMPARES_ATTEMPTS = ("grpo", "dr-grpo", "rloo", "maxrl", "lite-ppo", "vcpo")


def check(settings: Settings, *, training: bool) -> None:
    """Raise ConfigError with one line for each combination that cannot work."""
    rules = _ALWAYS + _TRAINING if training else _ALWAYS
    problems = [problem for rule in rules for problem in rule(settings)]
    if problems:
        raise ConfigError("\n".join(problems))


def _changed(s: Settings, section: str, *names: str) -> str:
    """Those of a section's settings that are not at their defaults, in words; empty: all are."""
    given = getattr(s, section)
    default = type(given)()
    return " and ".join(
        f"{section}.{name}" for name in names if getattr(given, name) != getattr(default, name)
    )


def _tasks(s: Settings) -> Iterator[str]:
    source, options = s.tasks.source or "", s.tasks.options
    if options and source.endswith((".jsonl", ".json")):
        yield (
            f"tasks.options has {', '.join(options)}, but a file ({source}) takes no arguments: leave tasks.options "
            "out."
        )
    if source.startswith("hf:"):
        for name, value in options.items():
            if name not in _DATASET_OPTIONS or not isinstance(value, str):
                yield (
                    f"tasks.options has {name} = {value!r}, but a Hugging Face dataset takes "
                    f"{' and '.join(_DATASET_OPTIONS)}, each a text: write one of these, or leave it out."
                )


def _sampling(s: Settings) -> Iterator[str]:
    rollout = s.rollout
    if rollout.top_k > MAX_KEPT_TOKENS:
        yield (
            f"rollout.top_k is {rollout.top_k}, but at most {MAX_KEPT_TOKENS} kept ids are recorded for a token that "
            f"is trained on: set rollout.top_k = {MAX_KEPT_TOKENS} or less, or 0 to keep every token."
        )
    if rollout.temperature == 0:
        yield (
            "rollout.temperature is 0, which is greedy and leaves nothing to learn from: set it above 0 "
            "to train."
        )


def _groups(s: Settings) -> Iterator[str]:
    if s.rollout.group_size > 1:
        return
    if s.algo.advantage in _COMPARES_ATTEMPTS:
        yield (
            f"rollout.group_size is 1, but algo.advantage = {s.algo.advantage} compares the attempts of a "
            "group: set rollout.group_size to 2 or more, or algo.advantage = reinforce++ or rae."
        )
    if s.rollout.drop_zero_variance:
        yield (
            "rollout.drop_zero_variance would drop every group of one attempt: set rollout.group_size to 2 "
            "or more, or rollout.drop_zero_variance = false."
        )


def _running_mean(s: Settings) -> Iterator[str]:
    if s.algo.advantage != "rae":
        return
    if s.rollout.drop_zero_variance:
        yield (
            "rollout.drop_zero_variance would do nothing: algo.advantage = rae compares with earlier steps, so "
            "attempts that ended alike still count; leave it out."
        )
    if s.pivots.branches:
        yield (
            f"pivots.branches is {s.pivots.branches}, but algo.advantage = rae compares with what whole attempts "
            "earned, not those that go on from a pivot: set pivots.branches = 0, or another algo.advantage."
        )


def _optimal_baseline(s: Settings) -> Iterator[str]:
    if s.algo.advantage != "vcpo":
        return
    if s.trainer.ranks > 1:
        yield (
            f"algo.advantage is vcpo, which needs the gradient of every attempt by itself, but trainer.ranks is "
            f"{s.trainer.ranks} and ranks add theirs up: set trainer.ranks = 1, or another algo.advantage."
        )
    if s.rollout.quorum < 1:
        yield (
            f"algo.advantage is vcpo, whose baseline is of all attempts of a group at once, but rollout.quorum is "
            f"{s.rollout.quorum:g}: set rollout.quorum = 1, or another algo.advantage."
        )
    if s.scoring.process is not None:
        yield (
            "algo.advantage is vcpo, whose baseline is that of whole attempts, but scoring.process tells their steps "
            "apart: leave scoring.process out, or set another algo.advantage."
        )


def _stragglers(s: Settings) -> Iterator[str]:
    rollout = s.rollout
    most = rollout.max_lag + 1
    if rollout.over_provision is not None and rollout.over_provision > most:
        yield (
            f"rollout.over_provision is {rollout.over_provision:g}, but with rollout.max_lag = {rollout.max_lag} only "
            f"{most} batches of groups can all be trained in time: set it to at most {most}, or rollout.max_lag to "
            f"{ceil(rollout.over_provision) - 1}."
        )
    if rollout.quorum < 1 and rollout.max_lag == 0:
        yield (
            f"rollout.quorum is {rollout.quorum:g}, but with rollout.max_lag = 0 late attempts cannot be trained in a "
            "later step: set rollout.max_lag to 1 or more, or rollout.quorum = 1."
        )
    if rollout.quorum < 1 and (s.scoring.process is not None or s.pivots.branches):
        other = "scoring.process" if s.scoring.process is not None else "pivots.branches"
        yield (
            f"rollout.quorum is {rollout.quorum:g}, but {other} compares the attempts of a whole group: set "
            f"rollout.quorum = 1, or leave {other} out."
        )


def _batch(s: Settings) -> Iterator[str]:
    attempts = s.rollout.groups_per_step * s.rollout.group_size
    if s.trainer.minibatches > attempts:
        yield (
            f"trainer.minibatches is {s.trainer.minibatches}, but a batch has {attempts} attempts "
            f"(rollout.groups_per_step x rollout.group_size): set it to at most {attempts}."
        )
    if s.trainer.warmup_steps > s.run.steps:
        yield (
            f"trainer.warmup_steps is {s.trainer.warmup_steps}, longer than the whole run: set it to at most "
            f"run.steps = {s.run.steps}."
        )
    elif s.trainer.schedule != "constant" and s.trainer.warmup_steps == s.run.steps:
        yield (
            f"trainer.warmup_steps is the whole run, which leaves nothing for trainer.schedule = {s.trainer.schedule}: "
            f"set it below run.steps = {s.run.steps}, or the schedule to constant."
        )


def _ranks(s: Settings) -> Iterator[str]:
    if s.trainer.ranks > 1 and s.run.launcher == "inline":
        yield (
            f"trainer.ranks is {s.trainer.ranks}, but run.launcher = inline runs everything in one process: set "
            "run.launcher = local, or trainer.ranks = 1."
        )
    if s.trainer.ranks > 1 and s.trainer.offload in _MOMENTS:
        yield (
            f"trainer.offload is {s.trainer.offload}, which one rank can keep in host memory, but trainer.ranks is "
            f"{s.trainer.ranks}: set trainer.offload = all or none, or trainer.ranks = 1."
        )
    if s.trainer.ranks % s.trainer.expert_ranks:
        yield (
            f"trainer.expert_ranks is {s.trainer.expert_ranks}, which does not divide trainer.ranks = "
            f"{s.trainer.ranks}: set it to a divisor of that, or to 1."
        )


def _composition(s: Settings) -> Iterator[str]:
    algo = s.algo
    try:
        composition = compose(
            algo.loss, algo.corrections, clip_low=algo.clip_low, clip_high=algo.clip_high, options=algo.options,
            guard=algo.guard, others=used_beside_the_loss(s),
        )  # fmt: skip
    except ConfigError as error:
        yield str(error)
        return
    idle = _idle_bounds(algo, composition) if s.trainer.minibatches == 1 else []
    if idle:
        yield (
            f"{' and '.join(idle)} would do nothing: with algo.{_weigher(composition)} the loss compares the policy "
            "with the one at the start of the step, and with trainer.minibatches = 1 these are the same; set "
            "trainer.minibatches to 2 or more, or leave it out."
        )
    if algo.routing == "live" and "guard.route_flips" in flat(algo.options):
        yield (
            'algo.options has "guard.route_flips", but with algo.routing = live no experts are recorded: '
            "set algo.routing = keep, or leave it out."
        )
    values = composition.values
    num_overlong = int(values["overlong.tokens"])  # type: ignore[arg-type]
    if num_overlong >= s.rollout.max_tokens:
        yield (
            f'algo.options has "overlong.tokens" = {num_overlong}, which leaves no length unpunished: set it below '
            f"rollout.max_tokens = {s.rollout.max_tokens}."
        )
    if algo.advantage == "maxrl" and (values["truncated.mode"] == "penalise" or num_overlong):
        yield (
            "algo.advantage is maxrl, which needs returns of at least 0, but long completions are to lose reward: set "
            '"overlong.tokens" = 0 and "truncated.mode" to keep or mask in algo.options, or another algo.advantage.'
        )


def _kl(s: Settings) -> Iterator[str]:
    options = flat(s.algo.options)
    if options.get("kl.estimator") != "k1" or not s.algo.kl_coef:
        return
    if s.lora.rank > 0:
        yield (
            'algo.options has "kl.estimator" = k1, for which another engine must have been asked before a batch is '
            f"made, but lora.rank is {s.lora.rank}, whose reference is the trainer's model without the adapter: set "
            '"kl.estimator" to one of k2, k3, or lora.rank = 0.'
        )
        return
    missing = [
        remedy
        for remedy, is_there in (
            ("algo.advantage = reinforce++", s.algo.advantage == "reinforce++"),
            ('"kl.reference" = engine', options.get("kl.reference") == "engine"),
        )
        if not is_there
    ]
    if missing:
        yield (
            'algo.options has "kl.estimator" = k1, which as a loss has no gradient in expectation and belongs inside '
            "the reward, where REINFORCE++ has it and where the reference must have been asked before a batch is made: "
            f"set {' and '.join(missing)} with it, or set it to one of k2, k3."
        )


def _idle_bounds(algo: AlgoSettings, composition: Composition) -> list[str]:
    """Settings that bound the ratio of policy and prox, where these are never apart in a step of one update."""
    if composition.plan.anchor == "behavior" or composition.values.get("decoupled.prox") == "interpolated":
        return []
    clips = [name for name in ("clip_low", "clip_high") if getattr(algo, name) is not None]
    weights = ("decoupled.cap", "decoupled.prox")
    bounds = [name for name in algo.options if name.startswith(f"{algo.loss}.") and name not in weights]
    return [f"algo.{name}" for name in clips] + [f'algo.options "{name}"' for name in bounds]


def _weigher(composition: Composition) -> str:
    weight = composition.plan.weight
    return "loss = decoupled" if weight == "decoupled" else f"corrections = {weight}"


def _pivots(s: Settings) -> Iterator[str]:
    branches = s.pivots.branches
    if branches == 1 and s.algo.advantage in _COMPARES_ATTEMPTS:
        yield (
            f"pivots.branches is 1, but algo.advantage = {s.algo.advantage} compares the branches of a pivot: set "
            "pivots.branches to 2 or more, or to 0."
        )
    if branches == 0 and s.pivots.options:
        yield "pivots.options does nothing while pivots.branches = 0: set pivots.branches to 2 or more."
    try:
        pivot_parameters(s)
    except ConfigError as error:
        yield str(error)


def _reward(s: Settings) -> Iterator[str]:
    functions, weights = s.reward.functions, s.reward.weights
    # Functions given in Python are not listed here; whoever receives them compares the lengths.
    if functions and weights is not None and len(weights) != len(functions):
        yield (
            f"reward.weights has {len(weights)} entries for {len(functions)} reward.functions: give one "
            "weight per function, or leave reward.weights out."
        )
    for function in functions:
        module, _, name = function.partition(":")
        if not module or not name:
            yield (
                f'reward.functions holds "{function}": write each function as module:function, for example '
                "rewards:exact_match."
            )


def _scoring(s: Settings) -> Iterator[str]:
    scoring = s.scoring
    if not _STEPS.fullmatch(scoring.steps):
        yield (
            f'scoring.steps is "{scoring.steps}": write delimiter:TEXT, tokens:N or entropy:NATS, for example '
            "delimiter:\\n."
        )
    idle = _changed(s, "scoring", "steps", "abort_below")
    if scoring.process is None and idle:
        yield (
            f"{idle} would do nothing, since nobody judges steps: set scoring.process to a model or module:function, "
            "or leave it out."
        )
    if scoring.process is not None and s.algo.advantage == "lite-ppo":
        yield (
            "algo.advantage is lite-ppo, which divides by the deviation of the batch's rewards, also what "
            "scoring.process adds: where all rewards are equal that would be 10,000 times as large; set another "
            "algo.advantage."
        )


def _distill(s: Settings) -> Iterator[str]:
    d, cuts = s.distill, s.rollout
    for name, path in d.teachers.items():
        # Processes and log files are named after them.
        if not re.fullmatch(r"[A-Za-z0-9_]+", name) or name == _NOBODY or not path:
            yield (
                f'distill.teachers names "{name}" for "{path}": give each model a name of letters, digits and '
                f"underscores other than {_NOBODY}."
            )
    snapshots = [path for path in d.teachers.values() if path.startswith(SNAPSHOT)]
    if len(snapshots) > 1 or not all(re.fullmatch(rf"{SNAPSHOT}[1-9]\d*", path) for path in snapshots):
        yield (
            f"distill.teachers has {' and '.join(snapshots)}: write snapshot:N, with N of at least 1, for the policy N "
            "versions back, and once at most."
        )
        return
    truncated = cuts.top_k > 0 or cuts.top_p < 1 or cuts.min_p > 0
    if d.teachers and d.divergence != "sampled" and truncated:
        yield (
            f"distill.divergence is {d.divergence}, which compares whole distributions, but sampling is truncated: set "
            "distill.divergence = sampled, or rollout.top_k = 0, rollout.top_p = 1.0 and rollout.min_p = 0.0."
        )
    if not d.teachers and d != type(d)():
        yield "distill names nobody to imitate, so its other settings do nothing: set distill.teachers."
    elif d.divergence == "sampled" and (idle := _changed(s, "distill", "top_k")):
        yield (
            f"{idle} is {d.top_k}, but distill.divergence = sampled asks teachers about the sampled token alone: set "
            "distill.divergence to forward or reverse, or leave distill.top_k out."
        )
    echo = flat(s.algo.options).get("echo.coef", 0)
    if d.teachers and d.divergence != "sampled" and echo:
        yield (
            f'algo.options has "echo.coef" = {echo}, but distill.divergence = {d.divergence} reads the head in a pass '
            "that values no other tokens: set distill.divergence = sampled, or leave it out."
        )
    if d.snapshots and s.weights.bundle == "delta":
        yield (
            f"distill.teachers has {snapshots[0]}, but a teacher that follows late needs whole bundles: set "
            "weights.bundle = full."
        )
    if d.snapshots and s.weights.transport == "collective":
        yield (
            f"distill.teachers has {snapshots[0]}, but a broadcast cannot be received later: set "
            "weights.transport = auto."
        )


def _engine(s: Settings) -> Iterator[str]:
    kv_tokens, needed = s.engine.kv_tokens, s.rollout.max_tokens + BLOCK_TOKENS
    if kv_tokens is not None and kv_tokens < needed:
        yield (
            f"engine.kv_tokens is {kv_tokens}, too few for one completion of rollout.max_tokens = "
            f"{s.rollout.max_tokens} after a prompt: set it to {needed} or more, or leave it out."
        )


def _lora(s: Settings) -> Iterator[str]:
    if s.lora.rank > 0 and s.trainer.offload in _MOMENTS:
        yield (
            f"trainer.offload is {s.trainer.offload}, but lora.rank is {s.lora.rank} and an adapter's moments are "
            "small: set trainer.offload = none, or all to keep the model's weights in host memory too."
        )
    if s.lora.rank == 0 and (s.lora.dora or s.lora.alpha is not None or s.lora.targets != ("all-linear",)):
        yield "lora.rank is 0, which trains the whole model, so the other lora settings do nothing: set it above 0."
    in_reward = s.algo.options.get("kl.estimator") == "k1"
    if s.lora.rank > 0 and s.algo.options.get("kl.reference") == "engine" and not in_reward:
        yield (
            f"lora.rank is {s.lora.rank}, whose model without the adapter already is the reference at no cost: set "
            '"kl.reference" in algo.options to trainer, or leave it out.'
        )
    if s.lora.rank > 0 and s.weights.bundle != "auto":
        yield (
            f"weights.bundle is {s.weights.bundle}, but lora.rank is {s.lora.rank} and only the adapter is sent: set "
            "weights.bundle = auto."
        )
    if s.lora.rank > 0 and not s.lora.targets:
        yield 'lora.targets names no layer: set it to "all-linear", or to the last parts of layer names.'


_Rule = Callable[["Settings"], Iterator[str]]
_ALWAYS: tuple[_Rule, ...] = (_tasks, _reward, _scoring, _engine)
_TRAINING: tuple[_Rule, ...] = (
    _sampling, _groups, _running_mean, _optimal_baseline, _stragglers, _batch, _ranks, _composition, _kl, _distill,
    _pivots, _lora,
)  # fmt: skip
