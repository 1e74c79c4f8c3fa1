"""``max_lag = 0`` is synchronous training: the runtime adds nothing to, and takes nothing from, a plain loop."""

from __future__ import annotations

import numpy as np
import torch
from safetensors.torch import load_file

from headrace import api, build, demo, roles
from headrace.algos.advantages import ADVANTAGES
from headrace.config import from_dict
from headrace.data.samples import build_samples
from headrace.engines.make import torch_engine
from headrace.models.loading import load_model
from headrace.models.tensors import to_blobs
from headrace.runtime.rollout import turn_seed
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import Episode, EpisodeGroup, Request, TrainBatch, Trajectory, Turn

STEPS = 20
CHANGES = {
    "run.steps": STEPS,
    "run.launcher": "inline",
    "run.console": "off",
    "run.checkpoint_every": 7,
    "rollout.max_lag": 0,
    "rollout.group_size": 4,
    "rollout.groups_per_step": 4,
}


def plain_loop(settings) -> dict[str, torch.Tensor]:
    """The same engine, advantage, packing and optimizer functions, called directly."""
    directory = build.model_directory(settings)
    renderer = build.Renderer.from_directory(directory)
    sampling = build.sampling(settings, renderer)
    tasks = build.task_source(settings, demo.tasks(64))
    told = {"settings": settings.model_dump(mode="json", exclude_none=True), "model": str(directory)}
    trainer = roles.trainer_role({**told, "segments": f"{directory}/none", "threaded": False})
    core = trainer._core
    engine = torch_engine(
        load_model(directory),
        ledger=TimeLedger(ENGINE_ACTIVITIES),
        version=-1,
        max_running=settings.engine.max_running,
    )
    engine.apply(0, to_blobs(core.model))
    size, per_step = settings.rollout.group_size, settings.rollout.groups_per_step
    for step in range(STEPS):
        samples = []
        for group in range(step * per_step, (step + 1) * per_step):
            task = tasks.task(group)
            prompt_ids = renderer.prompt_ids(task)
            turns = {}
            for attempt in range(size):
                seed = turn_seed(settings.run.seed, group, attempt, 0)
                name = f"{group}/{attempt}/0"
                engine.submit(Request(id=name, prompt_ids=prompt_ids, sampling=sampling, seed=seed))
                turns[name] = (attempt, seed)
            episodes = []
            while turns:
                for name, completion in engine.step():
                    attempt, seed = turns.pop(name)
                    turn = Turn(
                        prompt_ids=prompt_ids,
                        completion=completion,
                        sampling=sampling,
                        seed=seed,
                        engine="plain",
                    )
                    text = renderer.decode(completion.token_ids)
                    trajectory = Trajectory(turns=(turn,), text=text)
                    episodes.append(
                        Episode(group=group, attempt=attempt, task=task, trajectories=(trajectory,))
                    )
            episodes.sort(key=lambda episode: episode.attempt)
            texts = [episode.trajectories[0].text for episode in episodes]
            returns = demo.exact(texts, [task.columns["answer"]] * size)
            scored = EpisodeGroup(group=group, task=task, episodes=tuple(episodes), returns=tuple(returns))
            samples += build_samples(scored, ADVANTAGES["grpo"](np.array(returns)))
        core.step(TrainBatch(step=step + 1, version=step, samples=tuple(samples)))
        engine.apply(step + 1, to_blobs(core.model))
    return {name: tensor.clone() for name, tensor in core.model.state_dict().items()}


def test_weights_after_20_steps_are_bit_equal_to_a_plain_loop(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = from_dict({**demo.prepare(tmp_path, warm_steps=20), **CHANGES})
    expected = plain_loop(settings)
    result = api.train(tasks=demo.tasks(64), reward=demo.exact, settings=settings)
    assert result.num_steps == STEPS
    saved = load_file(result.model_dir / "model.safetensors")
    assert saved
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[name]), name
    start = load_model(tmp_path / "model").state_dict()
    assert any(not torch.equal(saved[name], start[name]) for name in saved)
