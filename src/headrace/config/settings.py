"""Every setting of a run: its name, type, default and meaning.

In: values by section, from a file, the command line or Python. Out: one frozen ``Settings``. What the
types cannot say (combinations that cannot work) is in ``checks`` and runs on every construction, so a
``Settings`` that exists is one that can be built. The string under a field is its documentation;
``docs/settings.md`` is generated from it. ``None`` always means "not set".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    model_validator,
)

from headrace.algos.parameters import flat
from headrace.config.checks import SNAPSHOT, check
from headrace.types import InterruptMode


def _as_tuple(value: Any) -> Any:
    """Files and people write lists, and a single text where a list of one is meant."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _without_none(options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A settings file has no way to write None, so a table may not hold one."""
    pending: list[JsonValue] = [options]
    while pending:
        value = pending.pop()
        if value is None:
            raise ValueError("None cannot be written to a settings file")
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return options


Texts = Annotated[tuple[str, ...], BeforeValidator(_as_tuple)]
Numbers = Annotated[tuple[float, ...], BeforeValidator(_as_tuple)]
Share = Annotated[float, Field(ge=0, lt=1)]
Pair = Annotated[tuple[Share, Share], BeforeValidator(_as_tuple)]
Options = Annotated[dict[str, JsonValue], AfterValidator(_without_none)]
Parameters = Annotated[Options, AfterValidator(flat)]


class Section(BaseModel):
    """Settings that belong together; frozen, strictly typed, unknown names refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class RunSettings(Section):
    """The run itself: where it is recorded, how long it goes on, what starts its workers."""

    dir: str = "runs"
    """Directory that holds one directory per run."""
    name: str | None = None
    """Name of the run's directory; not set: the time the run started."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Seed of everything random: task order, sampling noise, new adapters."""
    steps: int = Field(100, ge=1)
    """Optimizer steps at which the run is complete."""
    launcher: Literal["local", "inline"] = "local"
    """`local` runs controller, engines and trainer as processes on this machine; `inline` runs all of them
    in one process, in a fixed order."""
    checkpoint_every: int = Field(50, ge=0)
    """Steps between checkpoints; 0 writes one only at the end. Ctrl-C always writes one."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints to keep; older ones are deleted."""
    console: Literal["auto", "live", "plain", "off"] = "auto"
    """`live` redraws one view, `plain` prints one line per step; `auto` is live on a terminal."""
    stall_s: float = Field(600.0, gt=0)
    """Seconds any worker may go without progress before the run stops and says what it waited for; an engine has a
    quarter of them to take new weights."""

    @property
    def update_s(self) -> float:
        """Seconds in which an engine has to have new weights: one that hangs is named before the run stalls."""
        return self.stall_s / 4


class ModelSettings(Section):
    """The policy to train."""

    path: str | None = None
    """A directory in Hugging Face format or a hub name. Needed by every run."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type engine and trainer compute in; the trainer's own weights stay float32. `auto` is bfloat16 on a GPU
    and float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    eager: bool = False
    """Compute without compiling or capturing graphs, for debugging; on a CPU it is always so."""


class TaskSettings(Section):
    """What the policy attempts."""

    source: str | None = None
    """A `.jsonl` file, `hf:NAME` (Hugging Face dataset), `gym:NAME` (reasoning-gym generator) or
    `module:function` or `file.py:function` (returns a list of rows)."""
    prompt_column: str = "prompt"
    """Column with the prompt, text or chat messages; all other columns reach the reward functions."""
    limit: int | None = Field(None, ge=1)
    """Use only the first so many tasks; not set: all."""
    shuffle: bool = True
    """Reorder the tasks on every pass, by `run.seed`."""
    system_prompt: str | None = None
    """System message put before every prompt, which makes prompts of text into chat messages; not set: none."""
    options: Options = Field(default_factory=dict)
    """Arguments of the source: `split` (`train` unless given) and `subset` of a Hugging Face dataset, the generator's
    for `gym:`, the function's for `module:function`."""


class RolloutSettings(Section):
    """Generation: how many attempts, how they are sampled, how far the policy may run ahead of them."""

    group_size: int = Field(8, ge=1)
    """Attempts at each task; they are compared with each other."""
    groups_per_step: int = Field(8, ge=1)
    """Groups that make one optimizer step's batch."""
    max_tokens: int = Field(256, ge=1)
    """Most tokens of one completion."""
    temperature: float = Field(1.0, ge=0)
    """Divides the logits before sampling; the trainer computes logprobs at the same temperature."""
    top_k: int = Field(0, ge=0)
    """Sample among the so many likeliest tokens; 0 keeps all. The trainer computes logprobs over the same tokens,
    of which 8192 are recorded at most."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample among the likeliest tokens that hold this probability; 1 keeps all. Recorded for training as for
    top_k; a group with a wider set is dropped as wide-mask."""
    min_p: float = Field(0.0, ge=0, lt=1)
    """Sample among tokens with this share of the likeliest one's probability; 0 keeps all. Recorded for training as
    for top_p."""
    stop: Texts = ()
    """Tokens that end a completion besides the model's own end of text; each must be one token."""
    max_lag: int = Field(1, ge=0)
    """Most optimizer steps between a group's oldest token and the step that trains it; 0 is synchronous."""
    over_provision: float | None = Field(None, ge=1)
    """Batches of groups under way; a step takes the first `groups_per_step` to finish, the others go on and are trained
    later, within `max_lag`. Not set: `max_lag` + 1, the most that can be; less keeps samples fresher."""
    quorum: float = Field(1.0, ge=0.75, le=1)
    """Share of a group's attempts with which it may be trained; late ones join a later batch, within `max_lag`, and are
    compared with these. 1 waits for all."""
    staleness: Literal["pace", "drop"] = "pace"
    """At the bound, `pace` makes the trainer wait for the late group; `drop` cancels and replaces it."""
    drop_zero_variance: bool = False
    """Replace groups whose attempts all got the same reward, unless a judge of steps or a teacher tells more."""
    attempt_s: float = Field(600.0, gt=0)
    """Seconds one attempt may take, its interruptions included, before it is dropped as failed."""


class RewardSettings(Section):
    """What an attempt is worth."""

    functions: Texts = ()
    """Reward functions as `module:function` or `file.py:function`, called as TRL calls them (`docs/your_own.md`)."""
    weights: Numbers | None = None
    """One factor per function; not set: 1 each."""
    timeout_s: float = Field(60.0, gt=0)
    """Seconds one call of a reward function may take, and step scores after a group's last attempt, without which it is
    then trained."""
    error_budget: float = Field(0.1, ge=0, le=1)
    """Share of groups that may be dropped as failed before the run stops: an environment raised or took too long, or a
    call raised, returned NaN or took too long, and did so again when it was made once more."""
    workers: int = Field(4, ge=1)
    """Calls that may run at the same time."""


class ScoringSettings(Section):
    """Process rewards: steps are judged while attempts are still sampled (docs/scoring.md)."""

    process: str | None = None
    """Who judges: a model (a directory or hub name, for a causal one with the tokens it is read at,
    `PATH?good=+&bad=-`, for any with `marker=TEXT` to put behind each step) or a `module:function`; not set: nobody."""
    steps: str = "delimiter:\\n"
    """Where a step ends: `delimiter:TEXT`, `tokens:N`, or `entropy:NATS`, before a token more surprising than that."""
    abort_below: float | None = None
    """Attempts with two steps in a row below this are sampled no further; not set: all are sampled to their end."""


class AlgoSettings(Section):
    """From rewards to a loss."""

    advantage: Literal["grpo", "dr-grpo", "rloo", "reinforce++", "maxrl", "lite-ppo", "rae", "vcpo"] = "grpo"
    """Baseline and scale: group mean and deviation, group mean only, mean of the others, whole batch, group mean and
    itself, group mean and the batch's deviation, a running mean of the agent's own rewards, what leaves stale attempts
    the least variance."""
    loss: Literal[
        "ppo", "gspo", "gmpo", "cispo", "sapo", "gipo", "aspo", "decoupled", "aipo", "dppo-tv", "vespo", "dro"
    ] = "ppo"
    """`ppo` with the two clips below is also DAPO's; `decoupled` clips against the policy at the start of
    the step; `docs/losses.md` has the formulas."""
    clip_low: float | None = Field(None, ge=0)
    """Clips the probability ratio at 1 minus this; not set: 0.2, for `gspo` 3e-4, for `gmpo` 0.4 (of the log), for
    `cispo` 1 (no clip)."""
    clip_high: float | None = Field(None, ge=0)
    """Clips the probability ratio at 1 plus this; not set: 0.28, for `gspo` 4e-4, for `gmpo` 0.4, for `cispo` 5."""
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = "token-mean"
    """How the losses of a batch's tokens become one number."""
    corrections: Texts = ()
    """What is done about the gap between the trainer's policy and the engine's: at most one weight (`tis`, `icepop`,
    `mis`, `seq-tis`, `seq-mis`) and any filters (`geo-filter`, `k3-filter`, `max-k2-filter`, `opsm`, `m2po`); see
    `docs/losses.md`."""
    options: Parameters = Field(default_factory=dict)
    """Parameters of the loss, its corrections, the guard, long completions, the KL term, the balance of experts, an
    environment's answers, running means and process rewards, by qualified name (`"tis.cap"`); see `docs/losses.md`."""
    guard: Literal["off", "warn", "scale", "stop"] = "warn"
    """What a batch too far from the policy does: `warn`, also `scale` the learning rate by the root of the share of
    effective samples, or `stop` the run."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the divergence from the starting model in the loss, or in the reward; 0 is off. `"kl.estimator"` and
    `"kl.reference"` in `algo.options` say how it is computed and by whom."""
    routing: Literal["live", "keep"] = "keep"
    """In a mixture of experts, `keep` has the engine record which experts computed each token, and the trainer computes
    it with the same ones; `live` lets the trainer's routers choose anew. Dense models record nothing."""


class DistillSettings(Section):
    """Pull the policy towards a teacher on what it samples itself, alone or beside a reward."""

    teachers: dict[str, str] = Field(default_factory=dict)
    """Table of names and models (directories or hub names) to imitate; `snapshot:N` is the policy itself N versions
    back. A task's column `teacher` chooses one by name, the first where it has none; `none` imitates nobody."""
    divergence: Literal["sampled", "forward", "reverse"] = "sampled"
    """`sampled` is KL(policy || teacher) as a policy gradient on the sampled tokens; `reverse` computes the same and
    `forward` KL(teacher || policy) over the teacher's likeliest tokens and one bucket for the rest."""
    coef: float = Field(1.0, gt=0)
    """Weight of the divergence in the loss; it is averaged over the tokens that have a teacher."""
    top_k: int = Field(16, ge=1, le=1024)
    """Likeliest tokens the teacher tells of each position, for `forward` and `reverse`."""

    @property
    def snapshots(self) -> dict[str, int]:
        """Teachers that are the policy itself, and how many versions back."""
        return {
            name: int(text.removeprefix(SNAPSHOT))
            for name, text in self.teachers.items()
            if text.startswith(SNAPSHOT)
        }

    @property
    def models(self) -> dict[str, str]:
        """Teachers that are models of their own, and where these lie."""
        return {name: text for name, text in self.teachers.items() if not text.startswith(SNAPSHOT)}


class PivotSettings(Section):
    """Branch off failed attempts from a point inside them (DEEP-GRPO), beside the ordinary groups."""

    branches: int = Field(0, ge=0)
    """Attempts that go on from one pivot and are compared with each other; 0 turns it off."""
    options: Options = Field(default_factory=dict)
    """Weight of the branches in the loss, how many attempts are branched off, where pivots lie; `docs/pivots.md` lists
    them."""


class TrainerSettings(Section):
    """From a loss to new weights (AdamW)."""

    learning_rate: float = Field(1e-6, gt=0)
    """Suits pretrained models of a billion parameters or more; tiny models want 1e-4 to 1e-3, adapters about
    ten times what the whole model does."""
    betas: Pair = (0.9, 0.999)
    """AdamW's decay of the first and second moment."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of a step's gradient; longer ones are scaled down."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, down to 0 at `run.steps` unless constant."""
    row_tokens: int | None = Field(None, ge=1)
    """Tokens packed into one row of a forward pass, a longer sample having a row of its own; not set: 4096 on
    a CPU, 16384 on a GPU."""
    ranks: int = Field(1, ge=1)
    """Processes that train together, each with its slice of the weights and its share of every batch (FSDP2); on
    GPUs one for each."""
    expert_ranks: int = Field(1, ge=1)
    """Ranks that divide the experts of a mixture among themselves and exchange tokens, instead of gathering every
    expert on every rank; divides `trainer.ranks` and the number of experts."""
    offload: Literal["none", "first_moments", "moments", "all"] = "none"
    """What the trainer keeps in host memory: the first of AdamW's two moments or both, which pass through the GPU in
    every update (one rank), or also the float32 weights, whose update then runs on the CPU."""
    minibatches: int = Field(1, ge=1)
    """Optimizer updates each batch is split into."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do about a loss or gradient that is not finite: stop the run, or skip the update and say so."""


class LoraSettings(Section):
    """Train a low-rank adapter instead of the whole model (needs peft: the extra `lora`)."""

    rank: int = Field(0, ge=0)
    """Rank of the adapter in every layer it changes; 0 trains the whole model."""
    alpha: float | None = Field(None, gt=0)
    """The adapter's part is scaled by `alpha / rank`; not set: twice the rank."""
    targets: Texts = ("all-linear",)
    """Layers it changes, by the last part of their names (`q_proj`); `all-linear` is every linear layer but the
    output head, and `experts` those of a mixture, which `all-linear` leaves out."""
    dora: bool = False
    """Also train the length of each weight row (DoRA)."""


class EngineSettings(Section):
    """The built-in engine."""

    count: int = Field(1, ge=1)
    """Engines to run."""
    max_running: int | None = Field(None, ge=1)
    """Requests an engine computes at the same time; not set: 64 on a CPU, 512 on a GPU."""
    kv_tokens: int | None = Field(None, ge=1)
    """Tokens the key-value cache holds; not set: derived from the model and the memory there is."""
    memory_share: float | None = Field(None, gt=0, le=1)
    """Share of the GPU's memory the engine may take; not set: 0.4 beside a trainer on the same GPU, else 0.9."""


class WeightSettings(Section):
    """How new weights reach the engines."""

    mode: InterruptMode = "never"
    """What running requests do: `never` stop, `drain` (finish first), `abort` (stop and resume on the new
    weights) or `block` (freeze until applied)."""
    transport: Literal["auto", "shared_memory", "cuda_ipc", "files", "collective"] = "auto"
    """How the bytes travel: `shared_memory` (one machine), `cuda_ipc` (one GPU), `files` (in the run directory,
    which all machines must share), `collective` (broadcast by gloo or NCCL); `auto` takes the shortest way
    there is, and never broadcasts."""
    bundle: Literal["auto", "full", "delta"] = "auto"
    """What travels: `full`, all weights; `delta`, those that changed (the trainer then keeps a copy of what it
    sent last); `auto` sends deltas of bfloat16 weights where the way is slow, and with `lora.rank` the adapter."""


class Settings(BaseModel):
    """All settings of a run, by section."""

    # Strict only within the sections: here a plain table has to be accepted as a section.
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    tasks: TaskSettings = TaskSettings()
    rollout: RolloutSettings = RolloutSettings()
    reward: RewardSettings = RewardSettings()
    scoring: ScoringSettings = ScoringSettings()
    algo: AlgoSettings = AlgoSettings()
    distill: DistillSettings = DistillSettings()
    pivots: PivotSettings = PivotSettings()
    trainer: TrainerSettings = TrainerSettings()
    lora: LoraSettings = LoraSettings()
    engine: EngineSettings = EngineSettings()
    weights: WeightSettings = WeightSettings()

    @model_validator(mode="after")
    def _combinations(self, info: ValidationInfo) -> Settings:
        check(self, training=(info.context or {}).get("training", True))
        return self
