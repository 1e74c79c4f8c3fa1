"""Settings -> concrete objects: the one place that knows every class.

Heavy imports (torch, transformers) happen inside the functions that need them, because the controller
of a ``local`` run must start without them. Engines and trainers are made in ``roles``, here for an ``inline`` run
and by each process for itself in a ``local`` one.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace import teaching
from headrace.algos.pivots import PivotRule
from headrace.config import EngineSettings, Settings
from headrace.config.parameters import algo_parameters, has_reference_engine, kl_terms, pivot_parameters
from headrace.data import tasks as task_sources
from headrace.data.faults import in_words
from headrace.data.rendering import Renderer
from headrace.data.routing import RouterShape, router_shape
from headrace.data.steps import parse_rule
from headrace.envs.making import made_environment
from headrace.envs.single_turn import SingleTurn
from headrace.errors import ConfigError, ModelError, TaskError
from headrace.launch.inline import InlineCluster
from headrace.launch.local import LocalCluster, LocalLauncher, RoleSpec
from headrace.launch.proxies import deadlines
from headrace.launch.role_methods import RoleKind
from headrace.model_paths import found_model
from headrace.protocols import Environment, Scorer, TaskSource
from headrace.runtime.plan import ProcessPlan, RunPlan
from headrace.scoring.functions import FunctionScorer
from headrace.scoring.merged import MergedScorer
from headrace.scoring.process import build_scorer
from headrace.scoring.resolve import function_name, resolve
from headrace.scoring.unrewarded import Unrewarded
from headrace.types import BLOCK_TOKENS, Sampling
from headrace.weights.segment_directory import create_segment_directory, segment_root
from headrace.weights.transports import Route, choose

Reward = str | Callable[..., Any]

_ROW_TOKENS = {"cpu": 4096, "cuda": 16384}
_SHARE_ALONE = 0.9
_SHARE_BESIDE_TRAINER = 0.4
_JOURNAL_TOKENS = 32
_JOURNAL_REPORTS_PER_S = 500.0
_STEP_TOKENS = 8
_CALL_MARGIN_S = 60.0
SCORED_TOKENS = 1024
"""Tokens a reference scores in one pass, whose logits are held whole."""


def plan(settings: Settings, renderer: Renderer | None = None) -> RunPlan:
    """``renderer`` is the policy's; needed where steps are judged or ``pivots.options`` names delimiters."""
    run, rollout, algo = settings.run, settings.rollout, algo_parameters(settings)
    return RunPlan(
        steps=run.steps,
        group_size=rollout.group_size,
        groups_per_step=rollout.groups_per_step,
        max_lag=rollout.max_lag,
        over_provision=rollout.over_provision,
        quorum=rollout.quorum,
        staleness=rollout.staleness,
        advantage=settings.algo.advantage,
        reward_kl=kl_terms(settings)[2],
        rae_decay=algo.get("rae.decay", 0.95),
        reward_weights=settings.reward.weights,
        drop_zero_variance=rollout.drop_zero_variance,
        overlong_buffer_tokens=algo["overlong.tokens"],
        overlong_factor=algo["overlong.penalty"],
        truncated_penalty=algo["truncated.penalty"] if algo["truncated.mode"] == "penalise" else 0.0,
        max_tokens=rollout.max_tokens,
        vocab_size=_vocab_size(settings),
        seed=run.seed,
        interrupt=settings.weights.mode,
        checkpoint_every=run.checkpoint_every,
        keep_checkpoints=run.keep_checkpoints,
        attempt_s=rollout.attempt_s,
        sync_s=run.update_s,
        stall_s=run.stall_s,
        error_budget=settings.reward.error_budget,
        routers=_routers(settings),
        process=_process_plan(settings, renderer),
        pivots=pivot_rule(settings, renderer),
    )


def pivot_rule(settings: Settings, renderer: Renderer | None = None) -> PivotRule | None:
    """None: failed attempts are not branched off."""
    if settings.pivots.branches == 0:
        return None
    options = pivot_parameters(settings)
    delimiters = options["delimiters"]
    if delimiters and renderer is None:
        raise ConfigError(
            "pivots.options.delimiters needs the model's tokenizer, which this plan is made without"
        )
    named = "pivots.options.delimiters"
    delimiter_ids = single_tokens(renderer, delimiters, named) if renderer is not None else ()
    return PivotRule(
        branches=settings.pivots.branches,
        segment_tokens=options["segment_tokens"],
        delimiter_ids=delimiter_ids,
        num_segments=options["segments"],
        gamma=options["gamma"],
        success=options["success"],
        per_group=options["per_group"],
    )


def _process_plan(settings: Settings, renderer: Renderer | None) -> ProcessPlan | None:
    s = settings.scoring
    if s.process is None:
        return None
    assert renderer is not None, "steps are found in tokens, which the renderer knows"
    algo = algo_parameters(settings)
    return ProcessPlan(
        rule=parse_rule(s.steps, renderer.ids_containing),
        form=algo["process.form"],
        weight=algo["process.weight"],
        deadline_s=settings.reward.timeout_s,
        abort_below=s.abort_below,
    )


def _vocab_size(settings: Settings) -> int | None:
    """As the model's configuration has it; None: nobody says."""
    if settings.model.path is None:
        return None
    file = model_directory(settings) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    return config.get("text_config", config).get("vocab_size")


def _routers(settings: Settings) -> RouterShape | None:
    if settings.model.path is None or settings.algo.routing == "live":
        return None
    config = model_directory(settings) / "config.json"
    return router_shape(config) if config.is_file() else None


def model_directory(settings: Settings) -> Path:
    """Where the model lies; a hub name is fetched once."""
    if settings.model.path is None:
        raise ConfigError("model.path is not set: give a directory in Hugging Face format or a hub name")
    return found_model(settings.model.path, "model.path")


def policy_renderer(settings: Settings) -> Renderer:
    """Of ``model.path``."""
    directory = model_directory(settings)
    try:
        return Renderer.from_directory(directory)
    except ModelError as e:
        raise ModelError(f"model.path: {e}") from e


def sampling(settings: Settings, renderer: Renderer) -> Sampling:
    r = settings.rollout
    return Sampling(
        max_tokens=r.max_tokens,
        temperature=r.temperature,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop_ids=(*renderer.stop_ids, *single_tokens(renderer, r.stop, "rollout.stop")),
    )


def single_tokens(renderer: Renderer, texts: Sequence[str], field: str) -> tuple[int, ...]:
    """The id of each text that setting ``field`` names."""
    try:
        return renderer.single_token_ids(texts)
    except ModelError as e:
        raise ConfigError(f"{field}: {e}") from e


def environment(
    settings: Settings, renderer: Renderer, make: Callable[[Renderer, Sampling], Environment] = SingleTurn
) -> Environment:
    return made_environment(make, renderer, sampling(settings, renderer))


def task_source(settings: Settings, given: Any = None) -> TaskSource:
    """From a Python value (a list, a dataset, a source) or from ``tasks.source``."""
    t = settings.tasks
    shared: dict[str, Any] = {
        "prompt_column": t.prompt_column,
        "limit": t.limit,
        "shuffle": t.shuffle,
        "seed": settings.run.seed,
        "system_prompt": t.system_prompt,
    }
    if given is not None:
        return _naming("tasks", lambda: _given_source(given, shared))
    if t.source is None:
        raise ConfigError("tasks.source is not set: name a .jsonl file, hf:NAME, gym:NAME or module:function")
    return _naming("tasks.source", lambda: _named_source(settings, shared))


def _naming(field: str, read: Callable[[], TaskSource]) -> TaskSource:
    """Whatever is wrong with the rows, the error says which setting brought them."""
    try:
        return read()
    except TaskError as e:
        raise TaskError(f"{field}: {e}") from e


def _named_source(settings: Settings, shared: dict[str, Any]) -> TaskSource:
    t = settings.tasks
    assert t.source is not None
    if t.source.startswith("hf:"):
        return task_sources.from_hf(t.source[3:], **{**shared, **t.options})
    if t.source.startswith("gym:"):
        del shared["prompt_column"]
        return task_sources.from_reasoning_gym(t.source[4:], options=t.options, **shared)
    if t.source.endswith((".jsonl", ".json")):
        return task_sources.from_jsonl(t.source, **shared)
    if ":" in t.source:
        rows = _rows(resolve(t.source, what="tasks.source"), t.source, t.options)
        return task_sources.from_list(rows, name=function_name(t.source), **shared)
    raise ConfigError(
        f"tasks.source: {t.source!r} is not understood; "
        "name a .jsonl file, hf:NAME, gym:NAME or module:function"
    )


def _rows(function: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
    try:
        return function(**options)
    except Exception as e:
        raise TaskError(f"{name} raised {in_words(e)}; mend it, or change tasks.options") from e


def _given_source(given: Any, shared: Mapping[str, Any]) -> TaskSource:
    if isinstance(given, task_sources.TaskStream):
        return given
    if type(given).__module__.partition(".")[0] == "datasets":
        return task_sources.from_hf(given, **shared)
    if isinstance(given, str):
        raise TaskError(f"give rows, not the text {given!r}; a file or dataset name is tasks.source")
    return task_sources.from_list(given, **shared)


def reward_names(rewards: Sequence[Reward]) -> list[str]:
    names = [
        function_name(r) if isinstance(r, str) else getattr(r, "__name__", type(r).__name__) for r in rewards
    ]
    doubled = {name for name in names if names.count(name) > 1}
    return [f"{name}-{i}" if name in doubled else name for i, name in enumerate(names)]


def scorer(settings: Settings, rewards: Sequence[Reward], remote: Sequence[Scorer]) -> Scorer:
    """``remote`` scores the rewards given as text; functions run on threads of this process."""
    r = settings.reward
    names = reward_names(rewards)
    here = {n: f for n, f in zip(names, rewards, strict=True) if not isinstance(f, str)}
    parts = list(remote)
    if not rewards:
        return Unrewarded()
    if here:
        parts.append(FunctionScorer(here, timeout_s=r.timeout_s, workers=r.workers))
    return parts[0] if len(parts) == 1 else MergedScorer(parts, names)


def scorer_settings(settings: Settings, rewards: Sequence[Reward]) -> dict[str, Any] | None:
    """What a scorer process is told; None: no reward is given as text."""
    r = settings.reward
    named = {n: f for n, f in zip(reward_names(rewards), rewards, strict=True) if isinstance(f, str)}
    if not named:
        return None
    return {"functions": named, "timeout_s": r.timeout_s, "workers": r.workers}


def device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda was asked for but torch sees no GPU; set model.device to cpu")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def dtype(settings: Settings, place: str | None = None) -> str:
    """What the model is computed in on ``place`` (None: the device of the settings)."""
    if settings.model.dtype == "auto":
        return "bfloat16" if (place or device(settings.model.device)) == "cuda" else "float32"
    return settings.model.dtype


def row_tokens(settings: Settings, place: str) -> int:
    return settings.trainer.row_tokens or _ROW_TOKENS[place]


def memory_share(settings: Settings, *, beside_trainer: bool) -> float:
    """Of a GPU's memory, what an engine may take."""
    return settings.engine.memory_share or (_SHARE_BESIDE_TRAINER if beside_trainer else _SHARE_ALONE)


def versions_held(settings: Settings) -> int:
    """How many versions lie published at once: one that engines still read, the next, and those that a teacher which
    follows late has yet to take."""
    return 2 + sum(settings.distill.snapshots.values())


def route(settings: Settings, place: str | None = None, *, version_bytes: int = 0) -> Route:
    """How weights reach the engines. All roles are on this machine and its one device, ``place`` (None: that of
    the settings). ``version_bytes``: of what is published each time; 0: little, or not known."""
    w, rank = settings.weights, settings.lora.rank
    followed = bool(settings.distill.snapshots) and w.bundle == "auto"
    chosen = choose(
        w.transport,
        "full" if followed else w.bundle,
        device=place or device(settings.model.device),
        item_bytes=2 if dtype(settings, place) == "bfloat16" else 4,
        needed_bytes=versions_held(settings) * version_bytes,
        shared_bytes=shutil.disk_usage(segment_root()).free,
    )
    if rank:
        return replace(chosen, bundle="adapter", why_bundle=f"lora.rank is {rank}: only the adapter changes")
    why = "a teacher that follows late (distill.teachers) takes versions each by itself"
    return replace(chosen, why_bundle=why) if followed else chosen


def check_packages(settings: Settings) -> None:
    """Raise for an optional package that the run will need and that is not there."""
    if settings.lora.rank and importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "lora.rank: adapters are trained through peft, which is not installed: install Headrace's extra lora, or "
            "set lora.rank = 0"
        )


def lora(settings: Settings) -> Any:
    """The adapter to train and serve; None: the whole model is trained."""
    from headrace.models.lora import LoraSpec

    s = settings.lora
    if s.rank == 0:
        return None
    alpha = 2.0 * s.rank if s.alpha is None else s.alpha
    return LoraSpec(rank=s.rank, alpha=alpha, targets=s.targets, dora=s.dora, seed=settings.run.seed)


def reference_settings(settings: Settings, context_tokens: int) -> EngineSettings:
    """Of an engine that only scores, one sequence at a time."""
    return settings.engine.model_copy(update={"max_running": 1, "kv_tokens": context_tokens})


def block_tokens(settings: Settings, place: str) -> int:
    """Tokens in one block of a key-value cache. Branches share whole blocks with the attempt they leave, so on a CPU
    blocks are small where attempts are short."""
    if settings.pivots.branches == 0 or place == "cuda":
        return BLOCK_TOKENS
    quarter = max(1, settings.rollout.max_tokens // 4)
    return min(BLOCK_TOKENS, 1 << (quarter.bit_length() - 1))


def progress_tokens(settings: Settings) -> int:
    """Sampled tokens between two reports of a request: often enough for a step to be judged while the next is sampled,
    otherwise for the journal alone."""
    if settings.scoring.process is None:
        return _JOURNAL_TOKENS
    kind, _, value = settings.scoring.steps.partition(":")
    return min(_JOURNAL_TOKENS, int(value)) if kind == "tokens" else _STEP_TOKENS


def reports_per_s(settings: Settings) -> float:
    """Reports of all requests of an engine in a second. With hundreds of requests on a GPU the journal would be told
    thousands of times a second otherwise, all of which the controller reads before what comes behind it."""
    return _JOURNAL_REPORTS_PER_S if settings.scoring.process is None else math.inf


def quieten() -> None:
    """Loading bars of every role would run through each other on the terminal."""
    from transformers.utils import logging

    logging.disable_progress_bar()


async def cluster(
    settings: Settings, rewards: Sequence[Reward], *, run_dir: Path
) -> LocalCluster | InlineCluster:
    """Engines, trainer and scorer, started as the launcher setting says."""
    directory = create_segment_directory()
    try:
        return await _start(settings, rewards, directory, run_dir=run_dir)
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


async def _start(
    settings: Settings, rewards: Sequence[Reward], directory: Path, *, run_dir: Path
) -> LocalCluster | InlineCluster:
    told: dict[str, Any] = {
        "settings": settings.model_dump(mode="json", exclude_none=True),
        "model": str(model_directory(settings)),
        "segments": str(directory / "weights"),
        "folder": str(run_dir / "weights"),
    }
    engines = [{**told, "name": f"engine-{i}", "version": -1} for i in range(settings.engine.count)]
    reference = {**told, "name": "reference", "version": 0, "scores": True}
    with_reference = has_reference_engine(settings)
    teachers = teaching.told_teachers(settings, told)
    scoring = scorer_settings(settings, rewards)
    process = {**told, "name": "process"} if settings.scoring.process is not None else None
    if settings.run.launcher == "inline":
        from headrace.roles import engine_role, process_role, trainer_role

        return InlineCluster(
            [engine_role(e) for e in engines],
            trainer_role({**told, "threaded": False}),
            [build_scorer(scoring)] if scoring else [],
            reference=engine_role(reference) if with_reference else None,
            step_scorer=process_role({**process, "threaded": False}) if process else None,
            teachers={name: engine_role(teacher) for name, teacher in teachers.items()},
            directory=directory,
        )
    kinds: list[tuple[RoleKind, dict[str, Any]]] = [("engine", engine) for engine in engines]
    kinds += [("reference", reference)] if with_reference else []
    kinds += [("teacher", teacher) for teacher in teachers.values()]
    roles = [
        RoleSpec(
            name=e["name"], kind=kind, factory="headrace.roles:engine_role", settings={**e, "threaded": True}
        )
        for kind, e in kinds
    ]
    roles += _trainer_roles(settings, told)
    if scoring:
        factory = "headrace.scoring.process:scorer_role"
        roles.append(RoleSpec(name="scorer", kind="scorer", factory=factory, settings=scoring))
    if process:
        factory = "headrace.roles:process_role"
        told_process = {**process, "threaded": True}
        roles.append(RoleSpec(name="process", kind="process", factory=factory, settings=told_process))
    launcher = LocalLauncher(
        roles,
        log_dir=run_dir / "logs",
        start_deadline_s=settings.run.stall_s,
        deadlines_s=deadlines(_longest_wait_s(settings)),
        directory=directory,
        num_minibatches=settings.trainer.minibatches,
    )
    return await launcher.spawn()


def _longest_wait_s(settings: Settings) -> float:
    """More than any deadline that is set for a call to a role; a reward may be asked for twice."""
    longest = max(settings.run.stall_s, settings.rollout.attempt_s, 2 * settings.reward.timeout_s)
    return longest + _CALL_MARGIN_S


def _trainer_roles(settings: Settings, told: Mapping[str, Any]) -> list[RoleSpec]:
    """One process, or one for each rank. Ranks meet over this machine's own network interface."""
    count = settings.trainer.ranks
    names = ["trainer"] if count == 1 else [f"trainer-{rank}" for rank in range(count)]
    return [
        RoleSpec(
            name=name,
            kind="trainer",
            factory="headrace.roles:trainer_role",
            settings={**told, "name": name, "rank": rank, "threaded": True},
            env={"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")},
        )
        for rank, name in enumerate(names)
    ]
