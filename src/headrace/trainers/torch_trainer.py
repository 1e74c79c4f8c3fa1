"""Batches -> weights, on one device.

In: a causal language model and ``TrainBatch`` objects in order. Out: ``StepResult``, published weights,
checkpoints. Every token of an optimizer step is weighed by one normaliser, counted before the first
backward, so rows may be cut in any way; gradients accumulate over the rows and the optimizer moves once
per minibatch. A step that is not finite is never applied: it raises, or is skipped and says so, and the
version advances either way. ``model`` holds float32 weights, ``policy`` is what is computed and published:
the same model in float32, a copy in bf16. With ``lora`` the weights that are trained, kept and published are an
adapter's alone (``adapter_weights``), and the reference of a KL term is the policy without it. On a GPU the
policy's layers are compiled, and those that do not fit into memory are recomputed in the backward. Dropout is
off, since the policy that is trained must be the one that was sampled from.

Every moment is charged to the ledger: forward-backward, optimizer, publishing, checkpoint, else
waiting-for-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from headrace.algos.aggregation import Aggregation, check_aggregation
from headrace.algos.corrections import CorrectionName, LossName
from headrace.algos.kl import KLName
from headrace.errors import ConfigError, InvariantError, TrainingError
from headrace.models.lora import LoraSpec
from headrace.models.tensors import to_blobs
from headrace.protocols import WeightSender
from headrace.timekeeping import TimeLedger
from headrace.trainers.adapter_weights import AdapterModule, AdapterWeights
from headrace.trainers.blocks import DecoderBlocks, bytes_of_a_step
from headrace.trainers.checkpoint import Position, load_state, save_state
from headrace.trainers.forward_check import check_forward
from headrace.trainers.logprobs import token_logprobs
from headrace.trainers.master_weights import MasterWeights, compute_copy
from headrace.trainers.metrics import RowRecord, step_metrics
from headrace.trainers.objective import Objective
from headrace.trainers.optim import Schedule, build_adamw, check_schedule, rate_factor, set_learning_rate
from headrace.trainers.rows import TrainRow, train_rows
from headrace.types import StepResult, TrainBatch, WeightManifest

ComputeDtype = Literal["fp32", "bf16"]
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchTrainer:
    """The synchronous core; ``driver.TrainerDriver`` speaks the trainer protocol for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sender: WeightSender,
        ledger: TimeLedger,
        tokenizer_dir: Path | None = None,
        loss: LossName = "ppo",
        aggregation: Aggregation = "token-mean",
        max_tokens: int | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        dual_clip: float | None = None,
        correction: CorrectionName = "none",
        tis_cap: float = 2.0,
        kl: KLName = "none",
        kl_coef: float = 0.0,
        learning_rate: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        warmup_steps: int = 0,
        schedule: Schedule = "constant",
        total_steps: int | None = None,
        row_tokens: int = 16384,
        minibatches: int = 1,
        on_nonfinite: Literal["stop", "skip"] = "stop",
        compute_dtype: ComputeDtype = "fp32",
        share_prefixes: bool | None = None,
        eager: bool = False,
        lora: LoraSpec | None = None,
        policy: str = "policy",
    ) -> None:
        """``model`` is taken over: it is moved to float32 and to packed attention. ``compute_dtype`` is what
        it is computed and published in. ``lora``: train this adapter and leave the model's own weights alone;
        engines know it as ``policy``. ``max_tokens`` is the constant of aggregation
        ``seq-mean-token-sum-norm``; ``grad_clip`` None clips nothing. ``share_prefixes`` computes a prompt
        once for all attempts at it (None: on a GPU); ``eager`` compiles nothing, for debugging."""
        self.objective = Objective(
            loss=loss,
            correction=correction,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            tis_cap=tis_cap,
            kl=kl,
            kl_coef=kl_coef,
        )
        check_aggregation(aggregation, max_tokens=max_tokens)
        check_schedule(schedule, warmup_steps=warmup_steps, total_steps=total_steps)
        _check_numbers(minibatches, row_tokens, learning_rate, grad_clip)
        self._aggregation, self._max_tokens = aggregation, max_tokens
        self._learning_rate, self._warmup_steps = learning_rate, warmup_steps
        self._schedule, self._total_steps = schedule, total_steps
        self._grad_clip, self._row_tokens, self._minibatches = grad_clip, row_tokens, minibatches
        self._on_nonfinite = on_nonfinite
        self._sender, self.ledger, self._tokenizer_dir = sender, ledger, tokenizer_dir
        self._policy_name = policy
        self._masters, self._reference = _place(
            model.eval(), _DTYPES[compute_dtype], lora, with_reference=self.objective.needs_reference
        )
        self.model: PreTrainedModel | AdapterModule = self._masters.model
        self.policy = self._masters.policy
        on_gpu = self.model.device.type == "cuda"
        self._share_prefixes = on_gpu if share_prefixes is None else share_prefixes
        self.blocks = DecoderBlocks(self.policy, compiled=on_gpu and not eager)
        if self._reference is not None:
            DecoderBlocks(self._reference, compiled=on_gpu and not eager)
        self.optimizer = build_adamw(
            self.model, learning_rate=learning_rate, betas=betas, weight_decay=weight_decay
        )
        self.version, self.num_steps, self.num_tokens = 0, 0, 0
        ledger.switch("waiting-for-batch")

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on ``batch``; on a loss or gradient that is not finite, raise TrainingError or skip."""
        _check_batch(batch, version=self.version, num_steps=self.num_steps)
        rate = self._learning_rate * rate_factor(
            batch.step,
            schedule=self._schedule,
            warmup_steps=self._warmup_steps,
            total_steps=self._total_steps,
        )
        set_learning_rate(self.optimizer, rate)
        records: list[RowRecord] = []
        norms: list[float] = []
        skipped: str | None = None
        with self.ledger.activity("forward-backward"):
            minibatches = self.prepare(batch)
            for index, rows in enumerate(minibatches):
                part = f"minibatch {index + 1} of {len(minibatches)}: " if len(minibatches) > 1 else ""
                recorded = self.accumulate(rows, before_update=index == 0)
                records += recorded
                norm, reason = self._update(recorded)
                norms.append(norm)
                if reason is not None and self._on_nonfinite == "stop" and recorded:
                    raise TrainingError(
                        f"step {batch.step}: {part}{reason}; lower trainer.learning_rate, "
                        "or set trainer.on_nonfinite to skip"
                    )
                skipped = skipped if reason is None else part + reason
            metrics = step_metrics(records)
        self.version, self.num_steps = batch.version + 1, batch.step
        return StepResult(
            step=batch.step,
            version=self.version,
            num_loss_tokens=sum(int(record.policy_logprobs_N.numel()) for record in records),
            skipped=skipped,
            metrics=metrics
            | {"grad_norm": max(norms), "learning_rate": rate, "num_rows": float(len(records))},
        )

    def publish(self, version: int) -> WeightManifest:
        """Copy the current weights out through the sender."""
        if version != self.version:
            raise InvariantError(
                f"publish: version {version} was asked for, but the weights are {self.version}"
            )
        with self.ledger.activity("publishing"):
            if isinstance(self._masters, AdapterWeights):
                manifest = self._sender.send(version, self._masters.blobs())
                return replace(manifest, kind="adapter", policy=self._policy_name)
            return self._sender.send(version, to_blobs(self.policy))

    def retire(self, version: int) -> None:
        self._sender.retire(version)

    def save(self, directory: Path) -> None:
        with self.ledger.activity("checkpoint"):
            save_state(
                directory,
                model=self.model,
                optimizer=self.optimizer,
                reference=self._reference,
                tokenizer_dir=self._tokenizer_dir,
                position=Position(step=self.num_steps, version=self.version),
            )

    def load(self, directory: Path) -> int:
        with self.ledger.activity("loading"):
            position = load_state(
                directory, model=self.model, optimizer=self.optimizer, reference=self._reference
            )
            self._masters.refresh()
        self.version, self.num_steps = position.version, position.step
        return self.version

    def close(self) -> None:
        self._sender.close()

    def prepare(self, batch: TrainBatch) -> list[list[TrainRow]]:
        """The rows of each minibatch, with prox and reference log-probabilities where the loss needs them."""
        num_parts = max(min(self._minibatches, len(batch.samples)), 1)
        parts = [
            train_rows(
                [batch.samples[i] for i in indices],
                version=batch.version,
                aggregation=self._aggregation,
                max_tokens=self._max_tokens,
                row_tokens=self._row_tokens,
                share_prefixes=self._share_prefixes,
                device=self.model.device,
            )
            for indices in np.array_split(np.arange(len(batch.samples)), num_parts)
        ]
        if self.objective.needs_reference:
            with self._masters.off() if isinstance(self._masters, AdapterWeights) else nullcontext():
                parts = [[self._with_reference(row) for row in rows] for rows in parts]
        # With one minibatch the policy is prox itself, and the extra pass would compute the same numbers.
        if self.objective.needs_prox and num_parts > 1:
            parts = [[self._with_prox(row) for row in rows] for rows in parts]
        return parts

    @torch.no_grad()
    def _with_reference(self, row: TrainRow) -> TrainRow:
        if row.inputs.ref_logprobs_N is not None:
            return row
        model = self.policy if self._reference is None else self._reference
        logprobs_N, _ = token_logprobs(model, row.tensors)
        return replace(row, inputs=replace(row.inputs, ref_logprobs_N=logprobs_N))

    @torch.no_grad()
    def _with_prox(self, row: TrainRow) -> TrainRow:
        logprobs_N, _ = token_logprobs(self.policy, row.tensors)
        return replace(row, inputs=replace(row.inputs, prox_logprobs_N=logprobs_N))

    def accumulate(
        self, rows: Sequence[TrainRow], *, before_update: bool, update_follows: bool = True
    ) -> list[RowRecord]:
        """Add the gradients of every row to the model's. Where no update follows, the memory of the
        optimizer's moments need not be kept free."""
        self.blocks.fit(
            max((row.tensors.token_ids_T.numel() for row in rows), default=0),
            reserved_bytes=bytes_of_a_step(
                self.model,
                self.policy.get_output_embeddings().weight,
                self.optimizer if update_follows else None,
            ),
        )
        records = []
        for row in rows:
            logprobs_N, entropy_N = token_logprobs(self.policy, row.tensors)
            outcome = self.objective(logprobs_N, row.inputs)
            outcome.loss.backward()
            self.num_tokens += int(row.tensors.token_ids_T.numel())
            records.append(
                RowRecord(
                    inputs=row.inputs,
                    outcome=outcome,
                    policy_logprobs_N=logprobs_N.detach(),
                    entropy_N=entropy_N,
                    before_update=before_update,
                )
            )
        return records

    def _update(self, records: Sequence[RowRecord]) -> tuple[float, str | None]:
        """Move the weights; returns the gradient norm, and why nothing moved (None: it did)."""
        # Waits for a GPU to finish the backward, so that its time is not charged to the optimizer.
        loss = float(sum(record.outcome.loss.detach() for record in records))
        with self.ledger.activity("optimizer"):
            if not records:
                return 0.0, "no loss tokens"
            limit = math.inf if self._grad_clip is None else self._grad_clip
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
            reason = None
            if not math.isfinite(loss):
                reason = f"the loss is not finite ({loss})"
            elif not math.isfinite(norm):
                reason = f"the gradient norm is not finite ({norm})"
            else:
                self.optimizer.step()
                self._masters.refresh()
            self.optimizer.zero_grad(set_to_none=True)
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            return norm, reason


def _place(
    model: PreTrainedModel, dtype: torch.dtype, lora: LoraSpec | None, *, with_reference: bool
) -> tuple[MasterWeights | AdapterWeights, PreTrainedModel | None]:
    """The weights to train, checked to be computed right, and a frozen copy of them where one is needed."""
    if lora is not None:
        adapter = AdapterWeights(model, dtype, lora)
        check_forward(adapter.policy)
        return adapter, None
    check_forward(model.to(torch.float32))
    masters = MasterWeights(model, dtype)
    if masters.policy is not model:
        check_forward(masters.policy)
    return masters, compute_copy(masters.policy, dtype) if with_reference else None


def _check_numbers(minibatches: int, row_tokens: int, learning_rate: float, grad_clip: float | None) -> None:
    if minibatches < 1 or row_tokens < 1 or learning_rate < 0 or (grad_clip is not None and grad_clip <= 0):
        raise ConfigError(
            "minibatches and row_tokens must be at least 1, learning_rate at least 0, grad_clip None or "
            f"above 0, not {minibatches}, {row_tokens}, {learning_rate} and {grad_clip}"
        )


def _check_batch(batch: TrainBatch, *, version: int, num_steps: int) -> None:
    if (batch.version, batch.step) != (version, num_steps + 1):
        raise InvariantError(
            f"step: batch {batch.step} starts from version {batch.version}, but {num_steps} steps are done "
            f"and the weights are version {version}"
        )
    for sample in batch.samples:
        name = f"sample {sample.group}/{sample.attempt}"
        if sample.sampling_mask is not None:
            raise TrainingError(
                f"{name}: its distribution was truncated, which the trainer does not repeat; set top_k to 0, "
                "top_p to 1 and min_p to 0"
            )
        if sample.temperature <= 0:
            raise TrainingError(f"{name}: temperature 0 leaves nothing to train on; set temperature above 0")
