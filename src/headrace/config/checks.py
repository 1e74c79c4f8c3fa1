"""Combinations of settings that cannot work, each refused in one sentence with its remedy.

In: settings whose fields are valid one by one. Out: nothing, or a ConfigError. A check belongs here
only if the run could not do what was asked; a poor choice is the user's. The checks in ``_TRAINING``
are skipped when the policy is only sampled from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.settings import Settings

_STEPS = re.compile(r"delimiter:.+|tokens:[1-9]\d*|entropy:\d*\.?\d+", re.DOTALL)
_COMPARES_ATTEMPTS = ("grpo", "dr-grpo", "rloo")


def check(settings: Settings, *, training: bool) -> None:
    """Raise ConfigError with one line for each combination that cannot work."""
    rules = _ALWAYS + _TRAINING if training else _ALWAYS
    problems = [problem for rule in rules for problem in rule(settings)]
    if problems:
        raise ConfigError("\n".join(problems))


def _sampling(s: Settings) -> Iterator[str]:
    rollout = s.rollout
    cuts = (
        ("top_k", rollout.top_k, rollout.top_k > 0, 0),
        ("top_p", rollout.top_p, rollout.top_p < 1, 1.0),
        ("min_p", rollout.min_p, rollout.min_p > 0, 0.0),
    )
    for name, value, is_on, off in cuts:
        if is_on:
            yield (
                f"rollout.{name} is {value}, but sampling masks are not replayed by the trainer yet, so its "
                f"logprobs would be wrong: set rollout.{name} = {off} to train."
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
            "group: set rollout.group_size to 2 or more, or algo.advantage = reinforce++."
        )
    if s.rollout.drop_zero_variance:
        yield (
            "rollout.drop_zero_variance would drop every group of one attempt: set rollout.group_size to 2 "
            "or more, or rollout.drop_zero_variance = false."
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


def _ranks(s: Settings) -> Iterator[str]:
    if s.trainer.ranks > 1 and s.run.launcher == "inline":
        yield (
            f"trainer.ranks is {s.trainer.ranks}, but run.launcher = inline runs everything in one process: set "
            "run.launcher = local, or trainer.ranks = 1."
        )
    if s.trainer.ranks > 1 and s.trainer.offload == "moments":
        yield (
            f"trainer.offload is moments, which one rank can keep in host memory, but trainer.ranks is "
            f"{s.trainer.ranks}: set trainer.offload = all or none, or trainer.ranks = 1."
        )
    if s.trainer.ranks % s.trainer.expert_ranks:
        yield (
            f"trainer.expert_ranks is {s.trainer.expert_ranks}, which does not divide trainer.ranks = "
            f"{s.trainer.ranks}: set it to a divisor of that, or to 1."
        )


def _loss(s: Settings) -> Iterator[str]:
    algo = s.algo
    if algo.kl_coef > 0 and algo.kl == "none":
        yield (
            f"algo.kl_coef is {algo.kl_coef}, but algo.kl = none computes no divergence: set algo.kl to k2 "
            "or k3, or algo.kl_coef = 0."
        )
    if algo.kl != "none" and algo.kl_coef == 0:
        yield (
            f"algo.kl is {algo.kl}, but algo.kl_coef = 0 gives it no weight: set algo.kl_coef above 0, or "
            "algo.kl = none."
        )
    if algo.kl == "none" and algo.reference == "engine":
        yield (
            "algo.reference is engine, but algo.kl = none needs no reference: set algo.kl to k2 or k3, or "
            "algo.reference = trainer."
        )
    if algo.reference == "engine" and s.warm_start.examples is not None:
        yield (
            "algo.reference is engine, which starts from model.path, but the policy starts from what a warm start "
            "makes of it: write a warm-started model with headrace.warm_start and set model.path to it, or set "
            "algo.reference = trainer."
        )
    if algo.loss == "decoupled" and algo.correction == "tis":
        yield (
            "algo.correction is tis, but algo.loss = decoupled already weights by the ratio to the engine's "
            "policy: set algo.correction = none."
        )
    if algo.loss == "gspo" and algo.correction == "tis":
        yield (
            "algo.correction is tis, which weights tokens, but algo.loss = gspo has one ratio for a sequence: "
            "set algo.correction = none."
        )
    if algo.overlong_buffer >= s.rollout.max_tokens:
        yield (
            f"algo.overlong_buffer is {algo.overlong_buffer}, which leaves no length unpunished: set it "
            f"below rollout.max_tokens = {s.rollout.max_tokens}."
        )


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
    if scoring.process is None and scoring.abort_below is not None:
        yield (
            f"scoring.abort_below is {scoring.abort_below}, but nobody judges steps: set scoring.process to a model or "
            "module:function, or leave scoring.abort_below out."
        )


def _engine(s: Settings) -> Iterator[str]:
    kv_tokens, needed = s.engine.kv_tokens, s.rollout.max_tokens + s.engine.block_size
    if kv_tokens is not None and kv_tokens < needed:
        yield (
            f"engine.kv_tokens is {kv_tokens}, too few for one completion of rollout.max_tokens = "
            f"{s.rollout.max_tokens} after a prompt: set it to {needed} or more, or leave it out."
        )


def _warm_start(s: Settings) -> Iterator[str]:
    if s.warm_start.steps > 0 and s.warm_start.examples is None:
        yield (
            f"warm_start.steps is {s.warm_start.steps}, but there is nothing to imitate: set "
            "warm_start.examples to a .jsonl file, or warm_start.steps = 0."
        )
    if s.warm_start.examples is not None and s.warm_start.steps == 0:
        yield (
            "warm_start.examples is set, but warm_start.steps = 0 never reads it: set warm_start.steps "
            "above 0."
        )


def _lora(s: Settings) -> Iterator[str]:
    if s.lora.rank > 0 and s.warm_start.examples is not None:
        yield (
            f"lora.rank is {s.lora.rank}, but a warm start changes the model that the adapter must find again: write "
            "a warm-started model with headrace.warm_start, set model.path to it and leave warm_start out."
        )
    if s.lora.rank > 0 and (s.trainer.ranks > 1 or s.trainer.offload != "none"):
        yield (
            f"lora.rank is {s.lora.rank}, but an adapter is trained on one rank, without offload: set "
            "trainer.ranks = 1 and trainer.offload = none, or lora.rank = 0."
        )
    if s.lora.rank == 0 and (s.lora.dora or s.lora.alpha is not None or s.lora.targets != ("all-linear",)):
        yield "lora.rank is 0, which trains the whole model, so the other lora settings do nothing: set it above 0."
    if s.lora.rank > 0 and s.algo.reference == "engine":
        yield (
            f"lora.rank is {s.lora.rank}, whose model without the adapter already is the reference at no cost: set "
            "algo.reference = trainer."
        )
    if s.lora.rank > 0 and not s.lora.targets:
        yield 'lora.targets names no layer: set it to "all-linear", or to the last parts of layer names.'


_Rule = Callable[["Settings"], Iterator[str]]
_ALWAYS: tuple[_Rule, ...] = (_reward, _scoring, _engine)
_TRAINING: tuple[_Rule, ...] = (_sampling, _groups, _batch, _ranks, _loss, _lora, _warm_start)
