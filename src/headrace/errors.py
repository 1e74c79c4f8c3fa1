"""Every exception Headrace raises on purpose.

    HeadraceError
    |-- ConfigError         a setting, file or combination that cannot work; exit code 2
    |-- ModelError          a model or tokenizer that cannot be loaded or would be computed wrongly
    |-- TaskError           a task source or column that is missing, empty or malformed
    |   |-- PromptTooLongError   one task whose prompt leaves no room in the model's context
    |   `-- ForkError            a branch that does not continue the request it is said to leave
    |-- RolloutError        attempts that failed, mostly in their environment, more often than the error budget allows
    |-- RewardError         a reward function that failed more often than the error budget allows
    |   `-- ScoreError           an answer that is not a score: of the wrong length, not finite, of another attempt
    |-- RecordError         a recorded rollout that contradicts itself or the model; ends its group alone
    |-- TrainingError       a step that must not be applied (non-finite loss or gradient)
    |-- WeightSyncError     an update that did not land: torn, corrupt, wrong base, not acknowledged
    |-- RoleError           a worker that died or stopped answering; carries its traceback
    |-- DeadlineError       a wait that ran out; says what it waited for
    |-- CheckpointError     a checkpoint or journal that cannot be written or restored
    `-- InvariantError      one of the two laws would have been broken: a bug in Headrace

The message is one sentence that names the field and the remedy. The command line prints it without a
traceback (``--traceback`` shows one) and exits with ``exit_code``.
"""

from __future__ import annotations


class HeadraceError(Exception):
    exit_code = 1


class ConfigError(HeadraceError):
    exit_code = 2


class ModelError(HeadraceError):
    exit_code = 2


class TaskError(HeadraceError):
    exit_code = 2


class PromptTooLongError(TaskError):
    pass


class ForkError(TaskError):
    pass


class RolloutError(HeadraceError):
    pass


class RewardError(HeadraceError):
    pass


class ScoreError(RewardError):
    pass


class RecordError(HeadraceError):
    pass


class TrainingError(HeadraceError):
    pass


class WeightSyncError(HeadraceError):
    pass


class RoleError(HeadraceError):
    pass


class DeadlineError(HeadraceError):
    pass


class CheckpointError(HeadraceError):
    pass


class InvariantError(HeadraceError):
    pass
