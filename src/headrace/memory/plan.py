"""Memory of a whole run before it is started: every process, by purpose and by device.

In: the settings of a run, a model's sizes and the memory of a device. Out: a ``MemoryPlan``, which says whether it
fits and, where it does not, which single setting to change. Engines take their share first, as they do in a run;
the trainer gets what is left, and recomputes layers where that is little.

Engines and the first rank share the first GPU; every further rank has one of its own. On a CPU everything is
in the host's memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import torch

from headrace import build
from headrace.config import EngineSettings, Settings
from headrace.config.parameters import has_reference_engine
from headrace.engines.make import usual_sizes
from headrace.errors import ConfigError
from headrace.memory.architecture import Architecture, examine
from headrace.memory.engine import EnginePlan, engine_bytes
from headrace.memory.trainer import TrainerPlan, trainer_bytes
from headrace.memory.uses import Purpose, Use, total
from headrace.model_paths import found_model
from headrace.models.loading import load_config
from headrace.trainers.placement import Offload

CONTEXT_BYTES = 600_000_000
"""An allowance for what CUDA and its libraries take for each process on a GPU besides tensors."""
PROCESS_BYTES = 400_000_000
"""An allowance for Python and torch in a process that computes on the host."""
HOST = "host"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    model: str
    num_weights: int
    device_bytes: int
    """Of each GPU, or of the host where that is what computes."""
    uses: tuple[Use, ...]
    row_tokens: int
    kv_tokens: int
    """Of each engine."""
    layers_recomputed: int
    num_layers: int
    on_gpu: bool

    @property
    def places(self) -> list[str]:
        return list(dict.fromkeys(use.place for use in self.uses))

    @property
    def processes(self) -> list[str]:
        return list(dict.fromkeys(use.process for use in self.uses))

    @property
    def crowded(self) -> list[str]:
        """Devices that would need more than they have. Of a host beside GPUs nothing is known."""
        return [
            place
            for place in self.places
            if (place != HOST or not self.on_gpu) and total(self.uses, place=place) > self.device_bytes
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "num_weights": self.num_weights,
            "device_bytes": self.device_bytes,
            "row_tokens": self.row_tokens,
            "kv_tokens": self.kv_tokens,
            "layers_recomputed": self.layers_recomputed,
            "processes": [
                {
                    "name": process,
                    "place": place,
                    "bytes": {
                        use.purpose: use.num_bytes
                        for use in self.uses
                        if (use.process, use.place) == (process, place)
                    },
                    "total": total(self.uses, place=place, process=process),
                }
                for process in self.processes
                for place in self.places
                if total(self.uses, place=place, process=process)
            ],
            "devices": {place: total(self.uses, place=place) for place in self.places},
            "fits": not self.crowded,
        }


def plan_memory(settings: Settings, model: Architecture, *, kind: str, device_bytes: int) -> MemoryPlan:
    """``model`` was examined in the dtype that ``build.dtype`` names for this ``kind`` of device."""
    on_gpu, dtype = kind == "cuda", _DTYPES[build.dtype(settings, kind)]
    first = "GPU 0" if on_gpu else HOST
    process = CONTEXT_BYTES if on_gpu else PROCESS_BYTES
    engine = engine_bytes(model, _engine_plan(settings, settings.engine, kind), device_bytes=device_bytes)
    engines = {f"engine-{i}": engine for i in range(settings.engine.count)}
    for name, scores in _scoring(settings, model, dtype).items():
        scoring = _engine_plan(settings, build.reference_settings(settings, scores.context_tokens), kind)
        scoring = replace(scoring, prefill_tokens=build.SCORED_TOKENS, scored_tokens=build.SCORED_TOKENS)
        engines[name] = engine_bytes(scores, scoring, device_bytes=device_bytes)
    uses = [
        Use(name, first, purpose, num_bytes)
        for name, taken in engines.items()
        for purpose, num_bytes in {**taken.device, "process": process}.items()
    ]
    row_tokens = max(build.row_tokens(settings, kind), settings.rollout.max_tokens)
    asked = TrainerPlan(
        dtype=dtype,
        on_gpu=on_gpu,
        compiled=not settings.model.eager and settings.trainer.expert_ranks == 1,
        ranks=settings.trainer.ranks,
        offload=settings.trainer.offload,
        row_tokens=row_tokens,
        with_reference=settings.algo.kl_coef > 0 and not has_reference_engine(settings),
    )
    recomputed = 0
    for rank in range(asked.ranks):
        name = "trainer" if asked.ranks == 1 else f"trainer-{rank}"
        place = f"GPU {rank}" if on_gpu else HOST
        uses.append(Use(name, place, "process", process))
        uses += _published(settings, model, kind, name, place, dtype) if rank == 0 else []
        taken = trainer_bytes(
            model, asked, room=device_bytes - total(uses, place=place), device_bytes=device_bytes
        )
        recomputed = max(recomputed, taken.num_recomputed)
        uses += [Use(name, place, purpose, num_bytes) for purpose, num_bytes in taken.device.items()]
        uses += [Use(name, HOST, purpose, num_bytes) for purpose, num_bytes in taken.host.items()]
    return MemoryPlan(
        model=model.name,
        num_weights=model.num_weights,
        device_bytes=device_bytes,
        uses=tuple(uses),
        row_tokens=row_tokens,
        kv_tokens=engine.kv_tokens,
        # Ranks that exchange something inside a layer all recompute as many.
        layers_recomputed=recomputed,
        num_layers=model.num_layers,
        on_gpu=on_gpu,
    )


def _scoring(settings: Settings, model: Architecture, dtype: torch.dtype) -> dict[str, Architecture]:
    """The models of engines that only score, by process."""
    models = {"reference": model} if has_reference_engine(settings) else {}
    for name, path in settings.distill.models.items():
        models[f"teacher-{name}"] = _examined(str(found_model(path, f"distill.teachers.{name}")), dtype)
    return models | {f"teacher-{name}": model for name in settings.distill.snapshots}


@cache
def _examined(directory: str, dtype: torch.dtype) -> Architecture:
    return examine(load_config(directory), dtype)


def longest_sequence(settings: Settings, model: Architecture, *, kind: str, device_bytes: int) -> int:
    """Tokens of the longest sequence that can be trained with these settings, at most the model's context. A
    sequence is computed by one device: more ranks leave each more room, but never divide one."""

    def fits(num_tokens: int) -> bool:
        trainer = settings.trainer.model_copy(update={"row_tokens": num_tokens})
        rollout = settings.rollout.model_copy(
            update={"max_tokens": min(settings.rollout.max_tokens, num_tokens)}
        )
        changed = settings.model_copy(update={"trainer": trainer, "rollout": rollout})
        try:
            return not plan_memory(changed, model, kind=kind, device_bytes=device_bytes).crowded
        except ConfigError:
            return False

    lowest, highest = 0, model.context_tokens
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        lowest, highest = (middle, highest) if fits(middle) else (lowest, middle - 1)
    return lowest


def memory_of(kind: str) -> int:
    """Bytes of this machine's device of that kind."""
    if kind == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not torch.cuda.is_available():
        raise ConfigError(
            "model.device is cuda and torch sees no GPU: say how large it is with --device-memory"
        )
    return int(torch.cuda.get_device_properties(0).total_memory)


def _engine_plan(settings: Settings, engine: EngineSettings, kind: str) -> EnginePlan:
    max_running, prefill_tokens = usual_sizes(kind, engine.max_running, None)
    return EnginePlan(
        dtype=_DTYPES[build.dtype(settings, kind)],
        on_gpu=kind == "cuda",
        max_running=max_running,
        prefill_tokens=prefill_tokens,
        block_size=build.block_tokens(settings, kind),
        kv_tokens=engine.kv_tokens,
        memory_share=build.memory_share(settings, beside_trainer=True),
    )


def _published(
    settings: Settings, model: Architecture, kind: str, name: str, place: str, dtype: torch.dtype
) -> list[Use]:
    """The version that engines read from, those a teacher has yet to take, and what the next difference is taken
    against."""
    published: Purpose = "published weights"
    size = (model.num_adapter_weights or model.num_weights) * dtype.itemsize
    route = build.route(settings, kind, version_bytes=size)
    where = HOST if route.transport == "shared_memory" else place
    kept = size * (1 + sum(settings.distill.snapshots.values()))
    uses = [] if route.transport == "files" else [Use(name, where, published, kept)]
    return [*uses, Use(name, place, published, size)] if route.bundle == "delta" else uses


def remedies(settings: Settings, model: Architecture, plan: MemoryPlan, *, kind: str) -> list[str]:
    """Changes of one setting that would make it fit, the gentlest first, as arguments of ``--set``."""
    found = []
    for name, values in _candidates(settings, plan, kind):
        for value in values:
            section, field = name.split(".")
            part = getattr(settings, section).model_copy(update={field: value})
            changed = settings.model_copy(update={section: part})
            try:
                other = plan_memory(changed, model, kind=kind, device_bytes=plan.device_bytes)
            except ConfigError:
                continue
            if not other.crowded:
                found.append(f"{name}={str(value).lower()}")
                break
    return found


def _candidates(settings: Settings, plan: MemoryPlan, kind: str) -> Iterator[tuple[str, list[Any]]]:
    if kind == "cuda" and settings.engine.kv_tokens is None:
        share = build.memory_share(settings, beside_trainer=True)
        yield "engine.memory_share", [round(share * part, 2) for part in (0.75, 0.5, 0.25)]
    else:
        yield "engine.kv_tokens", [plan.kv_tokens // part for part in (2, 4, 8)]
    yield "trainer.row_tokens", [plan.row_tokens // part for part in (2, 4, 8, 16)]
    if kind == "cuda":
        more = list(get_args(Offload)) if settings.trainer.ranks == 1 else ["none", "all"]
        yield "trainer.offload", more[more.index(settings.trainer.offload) + 1 :]
        yield "trainer.ranks", [settings.trainer.ranks * factor for factor in (2, 4, 8)]
