"""Top-p, top-k and min-p in training: the importance ratio with the kept sets, and without them.

    python examples/keep_sampling_mask.py

A tiny model with random weights samples through the engine and is then trained on what it sampled, with the same
weights. So the ratio pi / mu of every token should be 1. A trainer that normalises over the whole vocabulary gets
Z instead, the probability of the kept set: a bias at every token that no amount of training removes.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace

import numpy as np
import torch

from headrace import build
from headrace.data.samples import build_samples
from headrace.engines.make import torch_engine
from headrace.models.loading import load_model, make_tiny_model
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.metrics import RowRecord
from headrace.trainers.torch_trainer import TorchTrainer
from headrace.types import (
    Episode,
    EpisodeGroup,
    Request,
    Sample,
    Sampling,
    Task,
    TrainBatch,
    Trajectory,
    Turn,
)

CUTS = {
    "top_p = 0.9": {"top_p": 0.9},
    "top_k = 20": {"top_k": 20},
    "min_p = 0.05": {"min_p": 0.05},
    "all three": {"top_p": 0.9, "top_k": 50, "min_p": 0.02},
}
VOCAB_SIZE, NUM_ATTEMPTS, PROMPT = 512, 16, np.arange(8, dtype=np.int32)

torch.set_num_threads(1)
build.quieten()
directory = tempfile.mkdtemp()
make_tiny_model(directory, vocab_size=VOCAB_SIZE, context_tokens=128, init_std=0.15)


def sample(cut: dict[str, float]) -> tuple[Sample, ...]:
    """Attempts at one task, as the engine draws them, each with the sets its tokens were drawn from."""
    engine = torch_engine(load_model(directory), ledger=TimeLedger(ENGINE_ACTIVITIES))
    sampling = Sampling(max_tokens=64, temperature=0.8, **cut)
    for attempt in range(NUM_ATTEMPTS):
        engine.submit(Request(id=str(attempt), prompt_ids=PROMPT, sampling=sampling, seed=attempt))
    done = {}
    while engine.has_work:
        done.update(engine.step())
    task = Task(id="0", prompt="")
    turns = [
        Turn(prompt_ids=PROMPT, completion=done[str(i)], sampling=sampling, seed=i, engine="engine-0")
        for i in range(NUM_ATTEMPTS)
    ]
    episodes = tuple(
        Episode(group=0, attempt=i, task=task, trajectories=(Trajectory(turns=(turn,), text=""),))
        for i, turn in enumerate(turns)
    )
    group = EpisodeGroup(group=0, task=task, episodes=episodes, returns=(0.0,) * NUM_ATTEMPTS)
    return build_samples(group, np.zeros(NUM_ATTEMPTS))


def record(samples: tuple[Sample, ...]) -> RowRecord:
    """What the trainer makes of them, before its first update."""
    trainer = TorchTrainer(load_model(directory), sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES))
    (rows,) = trainer.prepare(TrainBatch(step=1, version=0, samples=samples))
    (row,) = trainer.accumulate(rows, before_update=True)
    return row


def ratio(row: RowRecord) -> torch.Tensor:
    return (row.policy_logprobs_N - row.inputs.behavior_logprobs_N).exp()


print(f"{'':14} {'ids kept':>9} {'mass Z':>8} {'|ratio - 1|':>12} {'ratio without':>14} {'|ratio - Z|':>12}")
print(f"{'':14} {'mean':>9} {'mean':>8} {'largest':>12} {'mean':>14} {'largest':>12}")
worst = 0.0
for name, cut in CUTS.items():
    samples = sample(cut)
    with_mask = record(samples)
    without = record(tuple(replace(one, sampling_mask=None) for one in samples))
    mass = with_mask.kept_mass_N
    kept = np.concatenate([np.diff(s.sampling_mask.offsets)[s.loss_mask] for s in samples])
    gaps = [float((ratio(with_mask) - 1).abs().max()), float((ratio(without) - mass).abs().max())]
    worst = max(worst, *gaps)
    print(
        f"{name:14} {kept.mean():9.1f} {float(mass.mean()):8.4f} {gaps[0]:12.1e} {float(ratio(without).mean()):14.4f} "
        f"{gaps[1]:12.1e}"
    )
assert worst < 1e-5, worst
print("with the recorded sets the ratio is 1 within 1e-5; without them it is the kept mass")
