"""Keep Routing: the trainer computes every token with the experts that sampled it.

    python examples/keep_routing.py

Three tiny mixtures (16 experts, 4 a token, random weights) are sampled by an engine in bfloat16 and trained in
float32, from the same checkpoint. Routers near a tie choose differently on the two sides. The table shows how often the
trainer computed a recorded token with other experts than the engine did, in the mean over layers and in the worst one,
how far its log-probabilities are from those the tokens were sampled with (the gap), and the least gradient norm of
any router.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from headrace.build import quieten
from headrace.data.samples import build_samples
from headrace.engines.make import torch_engine
from headrace.models.loading import Family, load_model, make_tiny_model
from headrace.models.routers import routers
from headrace.timekeeping import ENGINE_ACTIVITIES, TRAINER_ACTIVITIES, TimeLedger
from headrace.trainers.expert_parallel import expert_modules
from headrace.trainers.routes import RoutingName
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

VOCAB_SIZE = 256
GROUPS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = 6, 6, 40, 96


def sample(model: Path) -> tuple[Sample, ...]:
    """What an engine in bfloat16 draws, with the experts of every token; advantages are made up."""
    engine = torch_engine(
        load_model(model, dtype="bfloat16"), ledger=TimeLedger(ENGINE_ACTIVITIES), record_routes=True
    )
    rng, sampling = np.random.default_rng(0), Sampling(max_tokens=MAX_TOKENS)
    prompts = rng.integers(0, VOCAB_SIZE, (GROUPS, PROMPT_TOKENS)).astype(np.int32)
    for i in range(GROUPS * GROUP_SIZE):
        engine.submit(Request(id=str(i), prompt_ids=prompts[i // GROUP_SIZE], sampling=sampling, seed=i))
    done = {}
    while engine.has_work:
        done.update(engine.step())
    samples: list[Sample] = []
    for group, prompt in enumerate(prompts):
        task = Task(id=str(group), prompt="")
        turns = [
            Turn(prompt_ids=prompt, completion=done[str(i)], sampling=sampling, seed=i, engine="engine-0")
            for i in range(group * GROUP_SIZE, (group + 1) * GROUP_SIZE)
        ]
        episodes = tuple(
            Episode(group=group, attempt=n, task=task, trajectories=(Trajectory(turns=(turn,), text=""),))
            for n, turn in enumerate(turns)
        )
        whole = EpisodeGroup(group=group, task=task, episodes=episodes, returns=(0.0,) * GROUP_SIZE)
        samples += build_samples(whole, rng.normal(size=GROUP_SIZE))
    return tuple(samples)


def train(model: Path, samples: tuple[Sample, ...], routing: RoutingName) -> str:
    trainer = TorchTrainer(
        load_model(model), sender=None, ledger=TimeLedger(TRAINER_ACTIVITIES), routing=routing, row_tokens=1
    )
    computed: list[np.ndarray] = []
    for module in expert_modules(trainer.policy).values():
        module.register_forward_pre_hook(lambda _, given: computed.append(given[1].numpy()))
    rows = trainer.prepare(TrainBatch(step=1, version=0, samples=samples))[0]
    records = trainer.accumulate(rows, before_update=True)
    gaps = torch.cat([(r.policy_logprobs_N - r.inputs.behavior_logprobs_N).abs() for r in records])
    gradients = [float(router.weight.grad.norm()) for router in routers(trainer.policy).values()]
    flips = flips_by_layer(samples, np.array_split(np.array(computed, dtype=object), len(samples)))
    return (
        f"{routing:7}  {flips.mean():10.2%}  {flips.max():11.2%}  {gaps.mean():10.5f}  "
        f"{gaps.quantile(0.99):9.5f}  {min(gradients):15.1e}"
    )


def flips_by_layer(samples: tuple[Sample, ...], computed: list[np.ndarray]) -> np.ndarray:
    """Share of recorded tokens that each layer computed with another set of experts."""
    flips, num_tokens = 0, 0
    for one, layers in zip(samples, computed, strict=True):
        assert one.routing is not None
        used = np.sort(np.stack(list(layers), axis=1)[one.routing.recorded], axis=-1)
        flips = flips + (used != np.sort(one.routing.experts, axis=-1)).any(axis=-1).sum(axis=0)
        num_tokens += len(used)
    return np.asarray(flips) / num_tokens


def main() -> None:
    quieten()
    torch.set_num_threads(1)
    families: tuple[Family, ...] = ("qwen3_moe", "olmoe", "deepseek_v3")
    print("model        routing  flips mean  worst layer  mean |gap|  p99 |gap|  router gradient")
    for family in families:
        with tempfile.TemporaryDirectory() as made:
            make_tiny_model(
                made, family=family, vocab_size=VOCAB_SIZE, hidden_size=64, num_layers=4, num_experts=16,
                experts_per_token=4, init_std=0.1,
            )  # fmt: skip
            samples = sample(Path(made))
            for routing in ("live", "keep"):
                print(f"{family:12}", train(Path(made), samples, routing), flush=True)


if __name__ == "__main__":
    main()
