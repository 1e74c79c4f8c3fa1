"""What moves between the stages: one rollout, from the task that caused it to the weights it changed.

    Task -> Request -> Completion -> Turn -> Trajectory -> Episode -> EpisodeGroup
         -> Sample -> TrainBatch -> StepResult -> WeightManifest

Every carrier is frozen: a stage returns a new object and nothing is filled in later. Token ids are
never rebuilt from text, and behaviour log-probabilities are never recomputed. Only numpy and the
standard library are used here, so that the control plane runs without torch.

Shape legend: P prompt tokens, L sampled tokens, T = P + L tokens of a sample, R runs, N recorded
rows, M mixture-of-experts layers, K experts a token or elements that changed, S kept-token ids over all rows,
C steps of an attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]
"""Why sampling ended. ``abort`` means unfinished: the completion can be resumed from its tokens."""

DropReason = Literal["stale", "failed", "cancelled", "zero-variance", "over-length", "wide-mask"]
"""Why an admitted attempt was never trained."""

InterruptMode = Literal["never", "drain", "abort", "block"]
"""What running requests do while weights arrive (see ``protocols.Engine.begin_update``)."""

BundleKind = Literal["full", "adapter", "delta"]
"""What an update carries: all weights, an adapter's, or what changed since another version."""

TensorForm = Literal["dense", "sparse"]
"""How bytes stand for a tensor: all its elements, or those that changed, as ``weights/delta`` writes them."""


BLOCK_TOKENS = 16
"""Tokens in a block of the key-value cache, as GPU kernels like it; what requests share is whole blocks."""

MAX_KEPT_TOKENS = 8192
"""Ids that training takes in one row of a ``SamplingMask``; trained models keep a few dozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """Where a request leaves an earlier one, to take over its keys and values."""

    request_id: str
    """The earlier request, which asked for its blocks to be held."""
    num_tokens: int
    """Leading tokens of the prompt that the two have in common."""
    version: int
    """Of the weights that wrote the earlier one's rows; -1: of more than one version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pivot:
    """A point inside an earlier attempt at a task, from which the attempts of a branch group go on."""

    prompt_ids: np.ndarray
    """int32 [P], what the earlier attempt was shown."""
    prefix_ids: np.ndarray
    """int32, what it had sampled up to the pivot: shown to the branches, never trained in them."""
    depth: float
    """Share of its tokens that lie before the pivot, above 0 and below 1."""
    fork: ForkPoint
    engine: str
    """Name of the engine that computed it."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32, everything a branch is shown."""
        return np.concatenate([self.prompt_ids, self.prefix_ids]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem to attempt, as a task source yields it."""

    id: str
    """Unique within its source and stable across resumes."""
    prompt: str | tuple[Mapping[str, Any], ...]
    """Plain text, or chat messages (``role``, ``content``) for the model's chat template."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Everything else the source knows (``answer``, ...); reward functions receive it by name."""
    pivot: Pivot | None = None
    """Where its attempts begin; None: at the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. The defaults sample the model's own distribution."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the logprob of every token is then 0, so such tokens cannot be trained on."""
    top_k: int = 0
    """0 keeps every token."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion; the token is part of it."""

    @property
    def truncates(self) -> bool:
        """True when the distribution is cut (top-k, top-p or min-p); greedy draws never are."""
        cuts = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return cuts and self.temperature > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Expert choices of a mixture-of-experts model, recorded while sampling."""

    experts: np.ndarray
    """uint8 or uint16 [N, M, K], in the order of the true entries of ``recorded``."""
    recorded: np.ndarray
    """bool, one for each of the owner's last tokens: of all of them, prompt included, except in a snapshot on
    the way, which has what is new since the one before. The last sampled token never has a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMask:
    """The tokens that could have been drawn at each position, as ragged rows."""

    token_ids: np.ndarray
    """int32 [S]."""
    offsets: np.ndarray
    """int64 [L + 1]; an empty row means the whole vocabulary was kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine sampled for one request."""

    token_ids: np.ndarray
    """int32 [L]."""
    logprobs: np.ndarray
    """float32 [L], of the distribution really sampled from (after temperature and truncation)."""
    versions: np.ndarray
    """int32 [L], the policy version that produced each token."""
    finish_reason: FinishReason
    kv_versions: np.ndarray
    """int32 [R, 2] of (version, rows): which weights wrote the key-value rows that were attended to, in
    order of position, prompt included; the last sampled token has no row."""
    routing: Routing | None = None
    """None: the model routes nothing, or routes were not asked for."""
    sampling_mask: SamplingMask | None = None
    """None: the distribution was not truncated."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Ask an engine for one completion."""

    id: str
    """Unique while the request lives: ``<group>/<attempt>/<turn>``."""
    prompt_ids: np.ndarray
    """int32 [P]."""
    sampling: Sampling
    seed: int
    """Noise is keyed on (seed, position, token id), so a resumed request continues its stream."""
    prefix: Completion | None = None
    """What an interrupted attempt had already sampled; the answer starts with these tokens, unchanged.
    None: start from the prompt."""
    policy: str = "policy"
    """Who samples: the policy whose adapter has this name, or ``base``, the model without any. An engine without
    adapters has one policy, and it is the model."""
    hold_s: float = 0.0
    """Seconds its key-value blocks are held for forks once it is finished, unless memory is needed or the weights
    change; 0: they are not."""
    fork: ForkPoint | None = None
    """None: it is nobody's branch. Requests with one fork point start together, under one version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call inside a trajectory."""

    prompt_ids: np.ndarray
    """int32 [P], everything the model was shown."""
    completion: Completion
    sampling: Sampling
    seed: int
    engine: str
    """Name of the engine that finished the turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One agent's turns, in order."""

    turns: tuple[Turn, ...]
    text: str
    """The last completion decoded, special tokens removed: for rewards and people, never for training."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By reward name; None means not applicable. Empty until scored."""
    policy: str = "policy"
    trainable: bool = True
    own_reward: float = 0.0
    """What it earned beside the return of its attempt, as the environment says: of one agent among several."""
    peers: str = ""
    """Trajectories of a group with one name here are compared with each other alone, such as the solvers of one
    proposed problem. Where no trajectory has a name or a reward of its own, attempts are compared as wholes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of an environment on a task: one attempt."""

    group: int
    attempt: int
    task: Task
    trajectories: tuple[Trajectory, ...]

    @property
    def num_tokens(self) -> int:
        return sum(turn.completion.num_tokens for t in self.trajectories for turn in t.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """What another model thinks of one token sequence; entry t is its distribution given the tokens before t."""

    logprobs: np.ndarray
    """float32 [T], of the sequence's own tokens; entry 0 is 0."""
    top_ids: np.ndarray | None = None
    """int32 [T, K], its likeliest tokens at each position; None: not asked for."""
    top_logprobs: np.ndarray | None = None
    """float32 [T, K]; -inf marks an entry that is none (row 0, a vocabulary of fewer than K tokens)."""
    teacher: str = ""
    """Who it was, by name in the settings."""
    version: int = 0
    """Of its weights. A snapshot of the policy has its own; any other teacher that of the policy when it was given
    them, 0 for those it started with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreColumn:
    """What one source says of one attempt. It is bound late: by group and attempt, and within the attempt by
    step or by token."""

    source: str
    """Name of the source."""
    group: int
    attempt: int
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Of the attempt as a whole, by name; None means not applicable. Empty: the source gives no rewards."""
    step_ends: np.ndarray | None = None
    """int32 [C], where each step ends, counted in sampled tokens of the attempt, one trajectory after the other; the
    process judge, who is asked before there are trajectories, counts all turns as they are sampled until the attempt is
    scored. None: the source knows no steps. A column that ends before the attempt's last token is continued by the next
    one."""
    step_scores: np.ndarray | None = None
    """float32 [C]; higher is better."""
    logprobs: tuple[np.ndarray, ...] | None = None
    """float32 [T] of each of the attempt's samples, in order; None: the source computes none."""
    teacher: tuple[TeacherScores, ...] | None = None
    """Of each of the attempt's samples, in order; None: the source is no teacher, or the task has none."""
    versions: np.ndarray | None = None
    """int32 [C], or [1] where there are no steps: of the judge when it gave each score; None: it never changes. (A
    teacher's scores carry their version themselves.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """What a process-reward model thinks of the steps it was asked about."""

    scores: np.ndarray
    """float32, a score for each step; higher is better."""
    version: int = 0
    """Of the judge that gave them; 0: it never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuestion:
    """Ask a process-reward model about the steps of an attempt, finished or not."""

    attempt: str
    """``<group>/<attempt>``: what was computed for it before is used again as far as the tokens agree."""
    task: Task
    token_ids: np.ndarray
    """int32 [T], the prompt and everything sampled so far."""
    num_prompt: int
    ends: np.ndarray
    """int32 [C], where each step ends in ``token_ids``."""
    num_known: int
    """Steps whose scores are known already; the answer begins with the one after them."""
    last: bool
    """No question about the attempt will follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeGroup:
    """The attempts that are compared with each other, scored."""

    group: int
    task: Task
    episodes: tuple[Episode, ...]
    returns: tuple[float, ...]
    """The weighted sum of each episode's rewards."""
    ref_logprobs: tuple[np.ndarray, ...] | None = None
    """float32 [T] of each of its samples, in order; None: no engine computes the reference."""
    teacher: tuple[TeacherScores, ...] | None = None
    """Of each of its samples, in order; None: the task has no teacher."""
    scores: tuple[ScoreColumn, ...] = ()
    """Everything else that was said of the attempts in time: process rewards, a source of the user's own."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest sampled token (a large number when nothing was sampled)."""
        turns = [turn for e in self.episodes for t in e.trajectories for turn in t.turns]
        versions = [turn.completion.versions for turn in turns]
        return int(np.concatenate(versions).min(initial=2**31 - 1)) if versions else 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One token sequence to train on; unsampled tokens have ``loss_mask`` 0 and zeros elsewhere."""

    group: int
    attempt: int
    token_ids: np.ndarray
    """int32 [T]."""
    loss_mask: np.ndarray
    """bool [T], true on tokens the policy sampled."""
    behavior_logprobs: np.ndarray
    """float32 [T]; entry t is the logprob of token t given the tokens before it."""
    versions: np.ndarray
    """int32 [T]; -1 on tokens that were not sampled."""
    advantages: np.ndarray
    """float32 [T]."""
    temperature: float
    kv_versions: np.ndarray
    """int32 [R, 2], as in ``Completion``."""
    finish_reason: FinishReason = "stop"
    """Of its last completion."""
    ref_logprobs: np.ndarray | None = None
    """float32 [T]; None: no engine computed them."""
    teacher: TeacherScores | None = None
    """None: nobody is imitated here."""
    routing: Routing | None = None
    sampling_mask: SamplingMask | None = None
    component: str = "main"
    """The part of the loss it belongs to, which has its own denominator: ``main``, or ``pivot`` for a branch."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one training step consumes, ordered by (group, attempt)."""

    step: int
    """The step that trains it; the first is 1."""
    version: int
    """The weights the step starts from; the step produces ``version + 1``."""
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a training step did."""

    step: int
    version: int
    """Version of the weights after the step."""
    num_loss_tokens: int
    skipped: str | None = None
    """Why the optimizer was not stepped (non-finite gradient, ...), or not for one of several minibatches; None: it
    was for all."""
    warning: str | None = None
    """What people should hear about the step at once; None: nothing."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """For people. Nothing in the library decides by them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBlob:
    """A named tensor as raw bytes, so that transports need no torch and carry any dtype."""

    name: str
    dtype: str
    """As safetensors spells it: F32, BF16, ..."""
    shape: tuple[int, ...]
    data: Any
    """uint8 [num_bytes], contiguous: a numpy array, or a torch tensor where the bytes are on a GPU."""
    form: TensorForm = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPatch:
    """The elements of a named tensor that an update changes; all others keep their bits."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    places: Any
    """int64 [K], ascending positions in the flattened tensor: numpy, or torch where the tensor is on a GPU."""
    bits: Any
    """[K] of an integer as wide as an element: the new bits, on the same side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Where a tensor lies inside a published bundle."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    form: TensorForm = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The announcement of published weights; an update is applied whole or not at all."""

    version: int
    base_version: int | None
    """The version a delta applies to; None: the bundle is complete."""
    kind: BundleKind
    transport: str
    location: str
    """Where the transport finds the bytes (a path for mapped memory and files)."""
    num_bytes: int
    digest: str
    """Of what travels."""
    slots: tuple[TensorSlot, ...]
    result: str = ""
    """Of all weights once a delta is applied; empty for other kinds."""
    policy: str = "policy"
    """Whose adapter it is; of no meaning for other kinds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """What a worker says of itself with each heartbeat."""

    role: str
    """``engine-0``, ``trainer``, ..."""
    version: int
    progress: int
    """Grows whenever real work is done (tokens computed); liveness alone does not move it."""
    seconds: Mapping[str, float]
    """Wall time by activity since start; the sum is the worker's age."""
    counters: Mapping[str, float] = field(default_factory=dict)


NO_KV = np.zeros((0, 2), dtype=np.int32)
"""``kv_versions`` of something that attended to nothing."""
