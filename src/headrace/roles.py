"""Engine and trainer from settings, by the same code in whatever process they run.

In: a plain mapping, since it crossed a process boundary: settings, where the model lies, which role this is. Out: an
object that speaks its protocol. The weights a role starts with are decided here. Heavy imports happen
inside the functions that need them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from headrace import build, teaching
from headrace.config import Settings, from_dict
from headrace.config.parameters import algo_parameters, kl_terms, loss_options, pivot_parameters
from headrace.data.rendering import Renderer
from headrace.errors import ConfigError, ModelError
from headrace.model_paths import found_model
from headrace.protocols import Engine, StepScorer, Trainer, WeightSender
from headrace.runtime import linked_weights
from headrace.scoring.resolve import function_name, resolve
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.weights.bundle import aligned
from headrace.weights.transports import TransportReceiver, weight_sender

_PROCESS_KV_BYTES = {"cpu": 2**30, "cuda": 2**33}
"""Memory for the keys and values of a process-reward model; what does not fit is computed again."""


def engine_role(told: Mapping[str, Any]) -> Engine:
    """An engine. ``version`` is that of the weights on disk; -1: nothing is served before an update. One that only
    ``scores`` is small, and without an adapter unless it is to ``follow`` the policy."""
    build.quieten()
    from headrace.engines.checkpoint_reader import CheckpointReader
    from headrace.engines.checks import context_tokens
    from headrace.engines.driver import EngineDriver
    from headrace.engines.make import torch_engine
    from headrace.models.loading import load_model

    ledger, name = TimeLedger(ENGINE_ACTIVITIES), told.get("name", "engine-0")
    settings = from_dict(told["settings"], training=False)
    place = build.device(settings.model.device)
    model = load_model(told["model"], dtype=build.dtype(settings), device=place)
    e = settings.engine
    scores, follows = told.get("scores", False), told.get("follows", False)
    if scores:
        e = build.reference_settings(settings, context_tokens(model.config.get_text_config()))
    core = torch_engine(
        model,
        ledger=ledger,
        version=told["version"],
        max_running=e.max_running,
        block_size=build.block_tokens(settings, place),
        kv_tokens=e.kv_tokens,
        prefill_tokens=build.SCORED_TOKENS if scores else None,
        compiled=not settings.model.eager,
        memory_share=build.memory_share(settings, beside_trainer="segments" in told),
        lora=build.lora(settings) if "segments" in told and (follows or not scores) else None,
        record_routes=settings.algo.routing == "keep" and "segments" in told and not scores,
        progress=lambda line: print(f"{name}: {line}", file=sys.stderr, flush=True),
    )
    threaded = told.get("threaded", False)
    return EngineDriver(
        core,
        name=name,
        receiver=TransportReceiver(
            {linked_weights.TRANSPORT: CheckpointReader(build.dtype(settings))}, place=model.device
        ),
        ledger=ledger,
        progress_tokens=build.progress_tokens(settings),
        # In one process nothing is queued, and what is told must not depend on the clock.
        reports_per_s=build.reports_per_s(settings) if threaded else math.inf,
        threaded=threaded,
    )


def trainer_role(told: Mapping[str, Any]) -> Trainer:
    """A trainer with the model's own weights; ``rank``, where it is told, makes it one of ``trainer.ranks``."""
    build.quieten()
    from headrace.trainers.driver import TrainerDriver
    from headrace.trainers.ranks import ALONE
    from headrace.trainers.torch_trainer import TorchTrainer
    from headrace.weights.gpu_segments import grow_segments

    ledger = TimeLedger(TRAINER_ACTIVITIES)
    settings = from_dict(told["settings"])
    t, a, place = settings.trainer, settings.algo, build.device(settings.model.device)
    parameters, (kl, kl_coef, _) = algo_parameters(settings), kl_terms(settings)
    if _grows(told, settings):
        grow_segments()
    ranks = ALONE if t.ranks == 1 and t.offload != "all" else _join_ranks(told, settings, place)
    model = _trained_model(told, settings, first=ranks.is_first, device="cpu" if ranks.device else place)
    core = TorchTrainer(
        model,
        sender=_sender(settings, told, model) if ranks.is_first else None,
        ledger=ledger,
        ranks=ranks,
        expert_ranks=t.expert_ranks,
        offload=t.offload,
        tokenizer_dir=Path(told["model"]),
        loss=a.loss,
        aggregation=a.aggregation,
        max_tokens=settings.rollout.max_tokens,
        clip_low=a.clip_low,
        clip_high=a.clip_high,
        corrections=a.corrections,
        options=loss_options(settings),
        guard=a.guard,
        kl=kl,
        kl_coef=kl_coef,
        keep_reference=parameters.get("kl.reference") != "engine",
        balance_coef=parameters["balance.coef"],
        echo_coef=parameters["echo.coef"],
        optimal_baseline=a.advantage == "vcpo",
        routing=a.routing,
        pivot_weight=pivot_parameters(settings)["weight"],
        learning_rate=t.learning_rate,
        betas=t.betas,
        weight_decay=t.weight_decay,
        grad_clip=t.grad_clip,
        warmup_steps=t.warmup_steps,
        schedule=t.schedule,
        total_steps=settings.run.steps,
        row_tokens=build.row_tokens(settings, place),
        minibatches=t.minibatches,
        on_nonfinite=t.on_nonfinite,
        compute_dtype="bf16" if build.dtype(settings) == "bfloat16" else "fp32",
        eager=settings.model.eager,
        lora=build.lora(settings),
        distillation=teaching.distillation(settings),
    )
    return TrainerDriver(core, threaded=told["threaded"], role=told.get("name", "trainer"))


def process_role(told: Mapping[str, Any]) -> StepScorer:
    """What judges steps: a model, or a function of the user's."""
    from headrace.scoring.calls import to_role_log
    from headrace.scoring.process_scorer import PROCESS_ACTIVITIES, ProcessScorer, StepCore, StepFunction

    ledger = TimeLedger(PROCESS_ACTIVITIES)
    settings = from_dict(told["settings"])
    policy, asked = Renderer.from_directory(told["model"]), str(settings.scoring.process)
    core: StepCore
    if ":" in asked.partition("?")[0] and not Path(asked).is_dir():
        function = resolve(asked, what="scoring.process")
        core = StepFunction(function, name=function_name(asked), decode=policy.decode)
    else:
        core = _process_model(asked, settings, policy)
    # Not threaded is in the controller's process, whose standard error is the user's terminal.
    log = to_role_log if told["threaded"] else None
    return ProcessScorer(core, name=told["name"], threaded=told["threaded"], ledger=ledger, log=log)


def _process_model(asked: str, settings: Settings, policy: Renderer) -> Any:
    """``asked``: where the model lies, and behind a question mark the tokens it is read at."""
    build.quieten()
    from headrace.scoring.process_model import ProcessModel, kv_tokens_in, load_process_model

    path, _, query = asked.partition("?")
    directory = found_model(path, "scoring.process")
    words = {
        name: unquote(value) for name, _, value in (part.partition("=") for part in query.split("&") if part)
    }
    unknown = sorted(set(words) - {"good", "bad", "marker"})
    if unknown or ("good" in words) != ("bad" in words):
        raise ConfigError(
            f"scoring.process: {asked!r} is not understood; write PATH?good=TOKEN&bad=TOKEN&marker=TEXT"
        )
    if not policy.same_ids_as(Renderer.from_directory(directory)):
        raise ModelError(
            f"scoring.process: {path} has another tokenizer than model.path, so it would read other words than were "
            "sampled; use a model with the same tokenizer, or a function (module:function) that reads text"
        )
    place = build.device(settings.model.device)
    model = load_process_model(str(directory), dtype=build.dtype(settings), device=place)
    pair = (
        build.single_tokens(policy, [words["good"], words["bad"]], "scoring.process")
        if "good" in words
        else None
    )
    return ProcessModel(
        model,
        kv_tokens=kv_tokens_in(model, _PROCESS_KV_BYTES[place]),
        pair=None if pair is None else (pair[0], pair[1]),
        marker=tuple(policy.encode(words.get("marker", "")).tolist()),
    )


def _join_ranks(told: Mapping[str, Any], settings: Settings, place: str) -> Any:
    import torch

    from headrace.trainers.ranks import join_ranks

    size = settings.trainer.ranks
    if place == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"trainer.ranks is {size}, but there are {torch.cuda.device_count()} GPUs: set it to at most that"
        )
    return join_ranks(
        told.get("rank", 0),
        size,
        device=place,
        meeting_point=Path(told["segments"]).parent / "ranks",
        deadline_s=settings.run.stall_s,
    )


def _trained_model(told: Mapping[str, Any], settings: Settings, *, first: bool, device: str) -> Any:
    """Ranks after the first are sent their weights by it."""
    from headrace.models.loading import hollow_model, load_model

    # What an adapter leaves alone is never trained, so it needs no float32 copy.
    dtype = build.dtype(settings) if settings.lora.rank else "float32"
    if not first:
        return hollow_model(told["model"], dtype=dtype)
    model = load_model(told["model"], device=device, dtype=dtype)
    # What an adapter's checkpoint says it belongs to: a path that holds from anywhere, or the hub's name.
    named = str(settings.model.path)
    model.name_or_path = str(Path(named).absolute()) if Path(named).is_dir() else named
    return model


def _grows(told: Mapping[str, Any], settings: Settings) -> bool:
    """Whether a trainer takes its memory in segments that grow: in a process of its own, which no engine shares."""
    return bool(told["threaded"]) and build.device(settings.model.device) == "cuda"


def _sender(settings: Settings, told: Mapping[str, Any], model: Any) -> WeightSender:
    import torch

    from headrace.memory.architecture import count_adapter_weights
    from headrace.models.checkpoint_names import CheckpointNamed
    from headrace.models.tensors import tensor_bytes

    dtype, spec = build.dtype(settings), build.lora(settings)
    full_bytes = 0 if spec else sum(map(aligned, tensor_bytes(model, dtype)))
    adapter_bytes = count_adapter_weights(model, spec) * getattr(torch, dtype).itemsize if spec else 0
    way = build.route(settings, version_bytes=full_bytes or adapter_bytes)
    sender = weight_sender(
        way,
        segments=Path(told["segments"]),
        folder=Path(told.get("folder", told["segments"])),
        num_receivers=settings.engine.count,
        # Before the engines' own deadline, which ends the run: a broadcast that failed can be made good.
        deadline_s=settings.run.update_s / 2,
        growing_segments=_grows(told, settings),
        full_bytes=full_bytes,
    )
    return CheckpointNamed(sender, model) if way.transport == "files" else sender
