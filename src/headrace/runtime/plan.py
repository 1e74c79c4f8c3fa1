"""What a run is asked to do, as the runtime needs it: plain numbers, no settings file."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from headrace.algos.pivots import PivotRule
from headrace.data.routing import RouterShape
from headrace.data.steps import StepRule
from headrace.runtime.staleness import StalenessPolicy
from headrace.types import InterruptMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """How steps are judged, and what their scores do."""

    rule: StepRule
    form: str = "potential"
    """A name in ``algos.process.FORMS``."""
    weight: float = 1.0
    deadline_s: float = 30.0
    """Seconds after a group's last attempt at which it is trained on its outcome alone."""
    abort_below: float | None = None
    """Attempts with two steps in a row below this are sampled no further; None: all are sampled to their end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    steps: int
    """The run is over when this many steps are trained."""
    group_size: int
    groups_per_step: int
    max_lag: int = 1
    over_provision: float | None = None
    """Batches of groups under way; None: ``max_lag + 1``, the most that can all be trained in time."""
    quorum: float = 1.0
    """Share of a group's attempts with which it is ready; the late ones follow, held against these."""
    staleness: StalenessPolicy = "pace"
    advantage: str = "grpo"
    """A name in ``algos.advantages.ADVANTAGES``."""
    rae_decay: float = 0.95
    """Of the running means that advantage ``rae`` compares with."""
    reward_kl: float = 0.0
    """What a sampled token's divergence from the reference (k1) costs in reward; 0: nothing."""
    reward_weights: tuple[float, ...] | None = None
    drop_zero_variance: bool = False
    overlong_buffer_tokens: int = 0
    overlong_factor: float = 1.0
    truncated_penalty: float = 0.0
    """Return lost by an attempt whose last completion was cut off at its length."""
    max_tokens: int = 256
    """The length at which sampling stops; overlong shaping counts back from it."""
    vocab_size: int | None = None
    """Ids the model knows, which recorded kept sets are held against; None: not known."""
    seed: int = 0
    interrupt: InterruptMode = "never"
    checkpoint_every: int = 50
    """0: only at the start and at the end."""
    keep_checkpoints: int = 2
    attempt_s: float = 600.0
    """Deadline of one attempt; a group that misses it is dropped as failed."""
    sync_s: float = 60.0
    """Deadline for every engine to have new weights."""
    stall_s: float = 600.0
    """A run in which nothing moves for this long is stopped, and says what it waited for."""
    error_budget: float = 0.1
    """Share of admitted groups that may fail before the run stops."""
    process: ProcessPlan | None = None
    """None: attempts are judged by their outcome alone."""
    routers: RouterShape | None = None
    """What recorded routes must fit; None: not known here, and only what a record says of itself is checked."""
    pivots: PivotRule | None = None
    """None: failed attempts are not branched off."""

    @property
    def capacity(self) -> int:
        most = (self.max_lag + 1) * self.groups_per_step
        if self.over_provision is None:
            return most
        # The subtrahend: 1.1 x 10 must be 11, whatever floating point makes of it.
        return min(most, ceil(self.over_provision * self.groups_per_step - 1e-9))

    @property
    def quorum_size(self) -> int:
        return ceil(self.quorum * self.group_size - 1e-9)

    @property
    def branch_capacity(self) -> int:
        """Branch groups under way, at most: all that the other groups under way can give rise to. With fewer, pivots
        would wait for the slots of the last step's, and find their keys and values gone."""
        return self.capacity * self.pivots.per_group if self.pivots is not None else 0

    @property
    def total_groups(self) -> int:
        return self.steps * self.groups_per_step
