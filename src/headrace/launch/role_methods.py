"""What may be called on each kind of role from another process: an explicit table, nothing else answers.

In: a role object, the arguments as they came over the wire, and where progress notes go. Out: the
coroutine to await. Paths travel as text. The proxies in ``proxies`` are the other half of this table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from headrace.launch.rpc import Note

RoleKind = Literal["engine", "reference", "teacher", "trainer", "scorer", "process"]
Method = Callable[[Any, list[Any], Note | None], Awaitable[Any]]

ENGINE: Mapping[str, Method] = {
    "generate": lambda engine, args, note: engine.generate(args[0], on_progress=note),
    "abort": lambda engine, args, note: engine.abort(args[0]),
    "release": lambda engine, args, note: engine.release(args[0]),
    "score": lambda engine, args, note: engine.score(
        args[0], temperature=args[1], policy=args[2], **({"masks": args[3]} if len(args) > 3 else {})
    ),
    "score_top": lambda engine, args, note: engine.score_top(
        args[0], top_k=args[1], temperature=args[2], policy=args[3]
    ),
    "begin_update": lambda engine, args, note: engine.begin_update(args[0]),
    "apply": lambda engine, args, note: engine.apply(args[0]),
    "cancel_update": lambda engine, args, note: engine.cancel_update(),
    "status": lambda engine, args, note: engine.status(),
}

TRAINER: Mapping[str, Method] = {
    "step": lambda trainer, args, note: trainer.step(args[0]),
    "publish": lambda trainer, args, note: trainer.publish(args[0]),
    "publish_whole": lambda trainer, args, note: trainer.publish_whole(),
    "step_share": lambda trainer, args, note: trainer.step_share(args[0]),
    "publish_share": lambda trainer, args, note: trainer.publish_share(args[0]),
    "retire": lambda trainer, args, note: trainer.retire(args[0]),
    "save": lambda trainer, args, note: trainer.save(Path(args[0])),
    "load": lambda trainer, args, note: trainer.load(Path(args[0])),
    "status": lambda trainer, args, note: trainer.status(),
}

SCORER: Mapping[str, Method] = {
    "score": lambda scorer, args, note: scorer.score(args[0], args[1]),
}

PROCESS: Mapping[str, Method] = {
    "score_steps": lambda scorer, args, note: scorer.score_steps(args[0]),
    "status": lambda scorer, args, note: scorer.status(),
}

REFERENCE: Mapping[str, Method] = {name: ENGINE[name] for name in ("score", "status")}

TEACHER: Mapping[str, Method] = {name: ENGINE[name] for name in ("score", "score_top", "apply", "status")}

METHODS: Mapping[str, Mapping[str, Method]] = {
    "engine": ENGINE,
    "reference": REFERENCE,
    "teacher": TEACHER,
    "trainer": TRAINER,
    "scorer": SCORER,
    "process": PROCESS,
}
