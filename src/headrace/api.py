"""The ways in from Python: ``train``, ``evaluate`` and ``warm_start``.

In: a model, tasks, a reward. Out: a ``RunResult`` that names the run directory. Everything else is
settings with defaults. A run started here and one started by the command line are the same run.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.console import Console

from headrace import build, evaluation, teaching
from headrace.config import Settings, from_dict, laid_over, load
from headrace.config.parameters import algo_parameters
from headrace.errors import ConfigError, HeadraceError, TaskError
from headrace.launch import own_loop
from headrace.launch.controller_loop import ControllerLoop
from headrace.observe import verdict
from headrace.observe.console import ConsoleSink
from headrace.observe.events import Fanout
from headrace.observe.jsonl import JsonlSink
from headrace.observe.progress import Progress
from headrace.observe.summary import Summary, summarise
from headrace.observe.tracebacks import TracebackSink
from headrace.protocols import Cluster, Environment, Sink, TaskSource
from headrace.run_directory import RunDirectory, latest_checkpoint
from headrace.runtime.checkpoint import CheckpointStore, step_reached
from headrace.runtime.pipeline import Pipeline
from headrace.runtime.plan import RunPlan
from headrace.types import Sampling, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run left behind."""

    run_dir: Path
    num_steps: int
    interrupted: bool
    """True: stopped by Ctrl-C; ``resume`` goes on."""
    rewards: tuple[float, ...]
    """Mean reward of every step taken by this call."""
    summary: Summary

    @property
    def model_dir(self) -> Path:
        """The newest checkpoint, loadable with ``from_pretrained``."""
        found = latest_checkpoint(self.run_dir)
        assert found is not None, "a run writes a checkpoint before anything else"
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What a run is given beside its settings, read and checked once."""

    renderer: build.Renderer
    tasks: TaskSource
    rewards: Sequence[build.Reward]
    environment: Environment
    plan: RunPlan


def train(
    *,
    model: str | Path | None = None,
    tasks: Any = None,
    reward: build.Reward | Sequence[build.Reward] | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    environment: Callable[[build.Renderer, Sampling], Environment] | None = None,
    resume: str | Path | None = None,
) -> RunResult:
    """Train ``model`` on ``tasks`` so that ``reward`` rises.

    ``tasks``: dicts with a ``prompt``, (prompt, answer) pairs, or a dataset. ``reward``: one function in
    TRL's signature or several, each a callable or ``module:function``. ``settings``: a mapping such as
    ``{"run.steps": 200}``. What is not given here is read from ``settings``. ``environment``: makes the one that runs
    attempts, from the model's renderer and how tokens are drawn; None: attempts are one turn each. ``resume`` is
    the directory of a run to go on with, under the settings it was started with but for those that are given; what was
    given from Python (tasks, reward, environment) is given again. One that is complete is left as it is.
    """
    name = _environment_name(environment)
    asked = _settings(settings, model) if resume is None else _changes(Path(resume), settings, model)
    with ExitStack() as held:
        if resume is not None:
            directory, chosen = RunDirectory.reopen(Path(resume), asked, environment=name)
            held.callback(directory.close)
            if _is_complete(directory, chosen, changed=asked is not None):
                return _complete(directory, chosen)
            if tasks is None and chosen.tasks.source is None:
                raise ConfigError(
                    f"resume: the run in {resume} was given its tasks from Python: give tasks again, and reward where "
                    "that was given too"
                )
            inputs = _inputs(chosen, tasks, reward, environment)
            if asked is not None:
                directory.keep(chosen)
        else:
            assert asked is not None
            # Everything that can be checked is checked before a directory is made.
            chosen, inputs = asked, _inputs(asked, tasks, reward, environment)
            directory = RunDirectory.create(chosen, environment=name)
            held.callback(directory.close)
        try:
            return own_loop.run(lambda: _train(chosen, inputs, directory), ControllerLoop)
        except KeyboardInterrupt as stop:
            stop.add_note(_how_to_go_on(directory))
            raise


def evaluate(
    *,
    model: str | Path | None = None,
    tasks: Any = None,
    reward: build.Reward | Sequence[build.Reward] | None = None,
    settings: Settings | Mapping[str, Any] | None = None,
    environment: Callable[[build.Renderer, Sampling], Environment] | None = None,
    num_tasks: int = 256,
    num_samples: int = 1,
) -> evaluation.Evaluation:
    """How well ``model`` does on its first ``num_tasks`` tasks, ``num_samples`` attempts each, in the ``environment``
    that ``train`` takes too."""
    chosen = _settings(settings, model, training=False)
    rewards = _rewards(reward, chosen)
    _environment_name(environment)
    return own_loop.run(
        lambda: evaluation.run(
            chosen,
            tasks,
            rewards,
            make=environment or build.SingleTurn,
            num_tasks=num_tasks,
            num_samples=num_samples,
        )
    )


def warm_start(
    *,
    model: str | Path,
    examples: Any,
    output: str | Path,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    answer_column: str = "answer",
    seed: int = 0,
    device: str = "auto",
) -> list[float]:
    """Supervised steps on example answers, before reinforcement. Writes the model to ``output`` and returns
    the loss of every step. ``examples``: what ``train`` takes as tasks, with the answers in a column."""
    from headrace.models.loading import load_model
    from headrace.trainers.checkpoint import copy_tokenizer
    from headrace.trainers.warm_start import warm_start as run_steps

    build.quieten()
    chosen = _settings({"run": {"seed": seed}, "tasks": {"shuffle": False}}, model)
    directory = build.model_directory(chosen)
    source = build.task_source(chosen, examples)
    renderer = build.policy_renderer(chosen)
    pairs = [_answer_pair(renderer, source.task(i), answer_column) for i in range(len(source))]
    trained = load_model(directory, device=build.device(device))
    losses = run_steps(
        trained, pairs, steps=steps, batch_size=batch_size, learning_rate=learning_rate, seed=seed
    )
    trained.save_pretrained(str(output))
    copy_tokenizer(directory, Path(output))
    return losses


def _answer_pair(renderer: build.Renderer, task: Task, column: str) -> tuple[Any, Any]:
    """Prompt ids, and answer ids with the end token."""
    if column not in task.columns:
        raise TaskError(
            f"answer_column: task {task.id} has no column {column!r} "
            f"(it has: {', '.join(task.columns) or 'none'})"
        )
    answer = renderer.encode(str(task.columns[column]))
    return renderer.prompt_ids(task), [*answer.tolist(), renderer.stop_ids[0]]


def _settings(
    given: Settings | Mapping[str, Any] | None, model: str | Path | None, *, training: bool = True
) -> Settings:
    values = given.model_dump(mode="json", exclude_none=True) if isinstance(given, Settings) else given or {}
    return from_dict({**values, **_named(model)}, training=training)


def _named(model: str | Path | None) -> dict[str, str]:
    return {} if model is None else {"model.path": str(model)}


def _changes(
    run_dir: Path, given: Settings | Mapping[str, Any] | None, model: str | Path | None
) -> Settings | None:
    """The settings of a run with what is given laid over them; None: nothing is, or there is no run."""
    if isinstance(given, Settings):
        return _settings(given, model)
    values, file = {**(given or {}), **_named(model)}, run_dir / "settings.toml"
    return laid_over(load(file), values) if values and file.exists() else None


def _how_to_go_on(directory: RunDirectory) -> str:
    if directory.latest_checkpoint() is None:
        return f"ended at once, before anything was trained; {directory.path} may be used again"
    return f"ended at once; go on from the last checkpoint with: headrace train --resume {directory.path}"


def _rewards(given: Any, settings: Settings, *, needed: bool = True) -> list[build.Reward]:
    rewards = list(settings.reward.functions) if given is None else given
    if isinstance(rewards, str) or callable(rewards):
        rewards = [rewards]
    if not isinstance(rewards, Sequence) or not all(isinstance(r, str) or callable(r) for r in rewards):
        raise ConfigError(f"reward is {rewards!r}: give a function, module:function, or a list of those")
    if not rewards and needed:
        raise ConfigError("reward.functions is not set: name at least one reward function")
    if not rewards and settings.rollout.drop_zero_variance:
        raise ConfigError(
            "rollout.drop_zero_variance would drop every group, since there is no reward: set it to false"
        )
    if not rewards and settings.rollout.quorum < 1:
        raise ConfigError(
            "rollout.quorum would release no group early: attempts without a reward all earn the same; set it to 1"
        )
    if not rewards and settings.pivots.branches:
        raise ConfigError(
            "pivots.branches would branch off every attempt, since without a reward none succeeds: set it to 0"
        )
    weights = settings.reward.weights
    if weights is not None and len(weights) != len(rewards):
        raise ConfigError(f"reward.weights has {len(weights)} entries for {len(rewards)} reward functions")
    return list(rewards)


def _environment_name(make: Any) -> str | None:
    if make is None:
        return None
    if not callable(make):
        raise ConfigError(
            f"environment is a {type(make).__name__}, but it is made here, from the model's renderer and how tokens "
            "are drawn: give its class, or a function of these two"
        )
    return str(getattr(make, "__qualname__", type(make).__name__))


def _inputs(settings: Settings, tasks: Any, reward: Any, make: Any) -> _Inputs:
    echo = algo_parameters(settings)["echo.coef"]
    if echo and make is None:
        raise ConfigError(
            f'algo.options has "echo.coef" = {echo:g}, but attempts of one turn hold nothing that an environment '
            "answered: give train an environment of several turns, or leave it out"
        )
    build.check_packages(settings)
    teaching.check_tokenizers(settings)
    renderer = build.policy_renderer(settings)
    source = build.task_source(settings, tasks)
    # What the first task cannot do, a missing chat template for instance, most likely none can.
    renderer.prompt_ids(source.task(0))
    rewards = _rewards(reward, settings, needed=not teaching.names(settings))
    return _Inputs(
        renderer=renderer,
        tasks=source,
        rewards=rewards,
        environment=build.environment(settings, renderer, make or build.SingleTurn),
        plan=build.plan(settings, renderer),
    )


def _is_complete(directory: RunDirectory, settings: Settings, *, changed: bool) -> bool:
    """Whether every step is taken and saved. Raises where more are; only under ``changed`` settings can the journal
    hold such steps beyond the newest checkpoint, so only then it is read."""
    store = CheckpointStore(directory.path, keep=settings.run.keep_checkpoints)
    saved = max(store.steps(), default=0)
    step, steps = step_reached(store) if changed else saved, settings.run.steps
    if step > steps:
        raise ConfigError(
            f"run.steps is {steps}, but the run in {directory.path} is at step {step} already: set run.steps to more "
            f"than {step} to go on with it, or start a new run"
        )
    return saved == steps


def _complete(directory: RunDirectory, settings: Settings) -> RunResult:
    """Of a run that has nothing left to do: nothing is started, and nothing written."""
    step, progress = settings.run.steps, Progress()
    if settings.run.console != "off":
        text = f"the run in {directory.path} is complete at step {step}; raise run.steps to go on with it"
        Console().print(text, soft_wrap=True, markup=False, highlight=False)
    progress.emit("run.start", {"steps": step, "step": step, "run_dir": str(directory.path)})
    progress.emit("run.end", {})
    summary = summarise(progress)
    return RunResult(run_dir=directory.path, num_steps=step, interrupted=False, rewards=(), summary=summary)


async def _train(settings: Settings, inputs: _Inputs, directory: RunDirectory) -> RunResult:
    console = ConsoleSink(settings.run.console)
    sink = Fanout([JsonlSink(directory.events), TracebackSink(directory.logs / "controller.log"), console])
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ControllerLoop)
    try:
        sink.emit("phase", {"text": f"starting {settings.engine.count} engine(s) and the trainer"})
        cluster = await build.cluster(settings, inputs.rewards, run_dir=directory.path)
        loop.loaded()
        async with _closing(cluster, sink):
            scorer = build.scorer(settings, inputs.rewards, cluster.scorers)
            pipeline = Pipeline(
                inputs.plan,
                cluster=cluster,
                environment=inputs.environment,
                scorer=scorer,
                tasks=inputs.tasks,
                run_dir=directory.path,
                sink=sink,
                reference=cluster.reference,
                process=cluster.step_scorer,
                teachers=teaching.teachers(settings, cluster.teachers, sink),
                # Inline, the engine and the trainer run on this loop too: its time is theirs.
                own_status=loop.status if settings.run.launcher == "local" else None,
            )
            start = {
                "steps": settings.run.steps,
                "run_dir": str(directory.path),
                "settings": {name: attrgetter(name)(settings) for name in verdict.SETTINGS},
            }
            sink.emit("run.start", {**start, **pipeline.books()})
            with _stop_on_signal(pipeline, sink):
                state = await pipeline.run()
            sink.emit("run.end", await pipeline.closing())
            await scorer.close()
    finally:
        sink.close()
    summary = summarise(console.progress)
    directory.write_summary(summary.as_dict())
    return RunResult(
        run_dir=directory.path,
        num_steps=state.step,
        interrupted=state.step < settings.run.steps,
        rewards=tuple(console.progress.rewards),
        summary=summary,
    )


@asynccontextmanager
async def _closing(cluster: Cluster, sink: Sink) -> AsyncIterator[None]:
    """Closes it afterwards. A role that cannot close does not hide why the run ended."""
    try:
        yield
    except BaseException:
        try:
            await cluster.close()
        except HeadraceError as error:
            sink.emit("warning", {"text": f"while the run was ended: {error}"})
        raise
    await cluster.close()


@contextmanager
def _stop_on_signal(pipeline: Pipeline, sink: Sink) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask for an orderly stop; a second one ends at once."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        text = f"{signal.Signals(number).name}: saving a checkpoint (again to end at once)"
        loop.call_soon_threadsafe(sink.emit, "phase", {"text": text})
        loop.call_soon_threadsafe(pipeline.request_stop)

    if threading.current_thread() is not threading.main_thread():
        # Signals are the main thread's to handle.
        yield
        return
    before = [signal.signal(number, stop) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
