"""What must be true of a batch before it is trained on.

In: minibatches of a step. Out: nothing, or an error that names the sample and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.data import masks
from headrace.data.routing import RouterShape
from headrace.errors import InvariantError, TrainingError
from headrace.trainers.routes import check_sample_routes
from headrace.types import TrainBatch


def check_batch(
    batch: TrainBatch,
    *,
    version: int,
    num_steps: int,
    vocab_size: int,
    routers: RouterShape | None = None,
) -> None:
    """Raise unless the batch is the next one and the model can be trained on its samples."""
    if (batch.version, batch.step) != (version, num_steps + 1):
        raise InvariantError(
            f"step: batch {batch.step} starts from version {batch.version}, but {num_steps} steps are done "
            f"and the weights are version {version}"
        )
    for sample in batch.samples:
        name = f"sample {sample.group}/{sample.attempt}"
        mask = sample.sampling_mask
        wrong = None if mask is None else masks.fault(mask, sample.token_ids, vocab_size=vocab_size)
        if wrong is not None:
            raise TrainingError(
                f"{name}: its sampling mask is not that of its tokens: {wrong}; give engine and trainer the same model"
            )
        if sample.temperature <= 0:
            raise TrainingError(f"{name}: temperature 0 leaves nothing to train on; set temperature above 0")
        check_sample_routes(sample, routers)


def check_references(parts: Sequence[TrainBatch]) -> None:
    """Raise unless every sample brings what a trainer without a reference cannot compute."""
    for sample in (sample for part in parts for sample in part.samples):
        if sample.ref_logprobs is None:
            raise TrainingError(
                f"sample {sample.group}/{sample.attempt}: it came without the reference's log-probabilities, which "
                'this trainer does not compute; set "kl.reference" in algo.options to trainer'
            )
