"""Who may be plugged in. The runtime knows every worker only through these seams.

All calls that may wait are coroutines, and whoever awaits them puts a deadline on the wait. The same
protocol is spoken by an object in this process and by a proxy for one in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headrace.types import (
    BundleKind,
    Completion,
    Episode,
    InterruptMode,
    Request,
    RoleStatus,
    Sampling,
    SamplingMask,
    ScoreColumn,
    StepQuestion,
    StepResult,
    StepScores,
    Task,
    TeacherScores,
    TensorBlob,
    TensorPatch,
    TrainBatch,
    Trajectory,
    Turn,
    WeightManifest,
)


class Engine(Protocol):
    """Samples tokens, and swaps its weights between two forward passes."""

    name: str

    async def generate(
        self, request: Request, on_progress: Callable[[Completion], None] | None = None
    ) -> Completion:
        """The whole completion, prefix included. ``on_progress`` now and then receives everything
        sampled so far (finish reason ``abort``), so that the caller can resume elsewhere.

        A request with a ``fork`` takes over what the earlier one computed, if that is still held and its weights
        are still the current ones. Otherwise its tokens are computed again under the current weights, never with a
        mixture, and the case is counted (``forks_freed``, ``forks_stale``). Raises ForkError when the prompt is no
        continuation of the earlier request."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their ``generate`` returns what was sampled, finish reason ``abort``.
        Unknown ids are ignored: a request may finish while the abort travels."""
        ...

    async def release(self, request_ids: Sequence[str]) -> None:
        """Hold the key-value blocks of these finished requests (``Request.hold_s``) no longer. Unknown ids are
        ignored: a hold may have ended by itself."""
        ...

    async def score(
        self,
        token_ids: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        policy: str = "policy",
        masks: Sequence[SamplingMask | None] | None = None,
    ) -> list[np.ndarray]:
        """float32 [T] logprobs of given tokens under the policy's current weights; entry 0 is 0. ``masks``: the
        tokens each sequence's were chosen among, a row for each of its tokens; None: the whole vocabulary."""
        ...

    async def score_top(
        self, token_ids: Sequence[np.ndarray], *, top_k: int, temperature: float = 1.0, policy: str = "policy"
    ) -> list[TeacherScores]:
        """As ``score``, with the ``top_k`` likeliest tokens of every position."""
        ...

    async def begin_update(self, mode: InterruptMode) -> None:
        """Prepare for new weights. ``never``: nothing. ``block``: freeze at the next step boundary and
        keep the KV cache. ``drain``: start nothing new, return when what runs has finished. ``abort``:
        end running requests as ``abort`` does. In the last three, requests that arrive wait until
        ``apply`` or ``cancel_update``."""
        ...

    async def apply(self, manifest: WeightManifest) -> int:
        """Swap the weights, or one policy's adapter, between two forward passes; returns the version now computed
        with. Raises WeightSyncError and keeps the old weights if the bundle is not whole."""
        ...

    async def cancel_update(self) -> None:
        """Go on with the weights there are: the publication failed."""
        ...

    async def status(self) -> RoleStatus: ...

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Turns batches into weights."""

    async def step(self, batch: TrainBatch) -> StepResult: ...

    async def publish(self, version: int) -> WeightManifest:
        """Copy the current weights out; the bytes stay valid until ``retire``."""
        ...

    async def publish_whole(self) -> WeightManifest:
        """A complete bundle of the weights as they are, for engines that could not take the last one. Its
        version may be newer than the last that was published."""
        ...

    async def retire(self, version: int) -> None:
        """No engine reads this version's bytes any more."""
        ...

    async def save(self, directory: Path) -> None:
        """Weights (Hugging Face format), optimizer and RNG into an existing empty directory."""
        ...

    async def load(self, directory: Path) -> int:
        """Restore what ``save`` wrote; returns the version."""
        ...

    async def status(self) -> RoleStatus: ...

    async def close(self) -> None: ...


class PolicyClient(Protocol):
    """What an environment may ask of the policy. Interruptions, retries and journalling happen behind it."""

    @property
    def seed(self) -> int:
        """For the environment's own randomness: differs between attempts, the same when one is replayed."""
        ...

    async def sample(self, prompt_ids: np.ndarray | Sequence[int], sampling: Sampling) -> Turn:
        """The attempt's next turn, behind these token ids; one at a time. A call that failed, or that was given up on,
        may be made again, with the same prompt where anything was sampled."""
        ...


class Environment(Protocol):
    """Runs one attempt at a task."""

    async def run(self, task: Task, policy: PolicyClient) -> tuple[Trajectory, ...]: ...


class Scorer(Protocol):
    """Rewards for the attempts of one group."""

    async def score(self, task: Task, episodes: Sequence[Episode]) -> list[Mapping[str, float | None]]:
        """For each episode, a value by reward name. Raises when no answer could be had."""
        ...

    async def close(self) -> None: ...


class ScoreSource(Protocol):
    """Says something of finished attempts, beside generation and training: rewards, process rewards, the
    log-probabilities of a reference or a teacher. ``runtime.scoring_stage`` asks, waits and counts."""

    name: str
    """Names its columns, and its line in the ledger."""
    required: bool
    """What happens to a group without its scores. True: the group is dropped as failed. False: it is trained without
    them, and they are counted as missing."""
    per_attempt: bool
    """True: asked about each attempt as it ends. False: about all of a group, once all have ended."""
    concurrency: int
    """Questions under way at a time; the others wait in its queue."""
    deadline_s: float | None
    """Seconds after a group's last attempt at which answers that are not there are given up; None: the source ends
    every wait itself."""

    async def score(self, task: Task, episodes: Sequence[Episode]) -> Sequence[ScoreColumn]:
        """One column for each episode, in their order. Raises when no answer can be had; a RoleError of a required
        source ends the run."""
        ...


class StepScorer(Protocol):
    """A process-reward model: judges the steps of an attempt, also while the next ones are sampled."""

    async def score_steps(self, question: StepQuestion) -> StepScores:
        """Of all steps but those that are known. A call costs the tokens that no call about the attempt had before."""
        ...

    async def status(self) -> RoleStatus: ...

    async def close(self) -> None: ...


class TaskSource(Protocol):
    """An endless, resumable stream of tasks: the n-th task depends only on n."""

    def task(self, index: int) -> Task: ...

    def __len__(self) -> int:
        """Tasks in one pass; the stream wraps around, reshuffled."""
        ...


class WeightSender(Protocol):
    """The trainer's end of a weight transport."""

    def send(
        self, version: int, blobs: Iterable[TensorBlob], *, kind: BundleKind | None = None
    ) -> WeightManifest:
        """Copy the tensors out for engines to read until ``retire``. ``kind`` None: as the sender finds best."""
        ...

    def retire(self, version: int) -> None: ...

    def close(self) -> None: ...


class WeightReceiver(Protocol):
    """An engine's end of a weight transport."""

    def receive(
        self, manifest: WeightManifest, base: Iterable[TensorBlob] = ()
    ) -> Iterator[TensorBlob | TensorPatch]:
        """The bundle's tensors, already verified whole against the digest before the first is yielded.
        ``base`` is what the engine computes with, which a delta builds on; other bundles do not look at it."""
        ...

    def close(self) -> None: ...


class Cluster(Protocol):
    """The workers of a run, as a launcher started them."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    @property
    def trainer(self) -> Trainer: ...

    async def wait_failure(self) -> Exception:
        """Returns the death of a worker; waits as long as all live."""
        ...

    async def close(self) -> None:
        """Ends every worker; nothing is left running."""
        ...


class Launcher(Protocol):
    async def spawn(self) -> Cluster: ...


class Sink(Protocol):
    """Receives events for people: files, the console, trackers."""

    def emit(self, event: str, fields: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...
