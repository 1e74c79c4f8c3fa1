"""Batches -> weights, on one device or as one of several ranks.

In: a causal language model and ``TrainBatch`` objects in order. Out: ``StepResult``, published weights,
checkpoints. Every token of an optimizer step is weighed by one normaliser, counted before the first
backward, so rows may be cut in any way; gradients accumulate over the rows and the optimizer moves once
per minibatch. A step that is not finite is never applied: it raises, or is skipped and says so, and the
version advances either way. ``model`` holds float32 weights, ``policy`` is what is computed and published:
the same model in float32, a copy in bf16. Where several ranks train together, each holds a slice of the
weights, is given its share of every batch, and all take every decision alike. With ``lora`` the weights that
are trained, kept and published are an adapter's alone, and the reference of a KL term is the policy without
it. On a GPU the policy's layers are compiled, and those that do not fit into memory are recomputed in the
backward. Dropout is off, since the policy that is trained must be the one that was sampled from.

Every moment is charged to the ledger: forward-backward, optimizer, publishing, checkpoint, else
waiting-for-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from headrace.algos.aggregation import Aggregation, check_aggregation
from headrace.algos.kl import KLName
from headrace.algos.parameters import of_owner
from headrace.data import masks
from headrace.data.dealing import minibatches
from headrace.data.routing import RouterShape
from headrace.errors import ConfigError, InvariantError, TrainingError
from headrace.models.lora import LoraSpec
from headrace.protocols import WeightSender
from headrace.timekeeping import TimeLedger
from headrace.trainers.adapter_weights import AdapterWeights
from headrace.trainers.balance import ExpertBalance
from headrace.trainers.blocks import DecoderBlocks, bytes_of_a_step
from headrace.trainers.checkpoint import Position, load_state, save_state
from headrace.trainers.guard import Guard, Verdict
from headrace.trainers.metrics import RowRecord, behavior_metrics, starts, step_metrics
from headrace.trainers.objective import Objective, Part, RowOutcome
from headrace.trainers.optim import Schedule, build_adamw, check_schedule, rate_factor, set_learning_rate
from headrace.trainers.placement import Offload, place_weights
from headrace.trainers.ranks import ALONE, Ranks
from headrace.trainers.routes import RouteTally, RoutingName, check_sample_routes, route_replay
from headrace.trainers.rows import TrainRow, train_rows, with_cutoff, without_truncated
from headrace.types import BundleKind, StepResult, TrainBatch, WeightManifest

ComputeDtype = Literal["fp32", "bf16"]
_NOTHING = "no loss tokens"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class TorchTrainer:
    """The synchronous core; ``driver.TrainerDriver`` speaks the trainer protocol for it."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sender: WeightSender | None,
        ledger: TimeLedger,
        ranks: Ranks = ALONE,
        expert_ranks: int = 1,
        offload: Offload = "none",
        tokenizer_dir: Path | None = None,
        loss: str = "ppo",
        aggregation: Aggregation = "token-mean",
        max_tokens: int | None = None,
        clip_low: float | None = None,
        clip_high: float | None = None,
        corrections: Sequence[str] = (),
        options: Mapping[str, Any] = MappingProxyType({}),
        guard: str = "warn",
        parts: Sequence[Part] = (),
        kl: KLName = "none",
        kl_coef: float = 0.0,
        keep_reference: bool = True,
        balance_coef: float = 0.0,
        routing: RoutingName = "keep",
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
    ) -> None:
        """``model`` is taken over: it is moved to float32 and to packed attention. Of several ``ranks`` the
        first has the model's weights and the ``sender``, on the others ``model`` is hollow; groups of
        ``expert_ranks`` divide a mixture's experts. ``offload`` keeps the optimizer's moments in host memory, for
        a process that trains alone, or all float32 weights and optimizer state, for ranks with a process group.
        ``compute_dtype`` is what the model is computed and published in. ``options`` are parameters of the loss, its
        ``corrections`` and the ``guard`` by qualified name (``catalog.PARAMETERS``), ``parts`` further components of
        the loss. ``keep_reference`` False: the reference of a KL term is not kept here, samples bring its
        log-probabilities. ``routing`` ``keep`` routes tokens as the engine recorded it, ``live`` only compares.
        ``max_tokens`` is the constant of aggregation ``seq-mean-token-sum-norm``; ``grad_clip`` None clips nothing. ``share_prefixes`` computes a prompt once for all attempts at it (None: on a GPU);
        ``eager`` compiles nothing, for debugging. ``lora``: train this adapter and leave the model's own weights
        alone."""
        self.objective = Objective(
            loss=loss, corrections=corrections, clip_low=clip_low, clip_high=clip_high, options=options,
            guard=guard, kl=kl, kl_coef=kl_coef, parts=parts,
        )  # fmt: skip
        self._guard = Guard(guard, **of_owner(self.objective.composition.values, "guard"))
        check_aggregation(aggregation, max_tokens=max_tokens)
        check_schedule(schedule, warmup_steps=warmup_steps, total_steps=total_steps)
        _check_numbers(minibatches, row_tokens, learning_rate, grad_clip)
        self._aggregation, self._max_tokens = aggregation, max_tokens
        self._learning_rate, self._warmup_steps = learning_rate, warmup_steps
        self._schedule, self._total_steps = schedule, total_steps
        self._keep_reference = keep_reference
        self._grad_clip, self._row_tokens, self._minibatches = grad_clip, row_tokens, minibatches
        self._on_nonfinite = on_nonfinite
        self._sender, self.ledger, self._tokenizer_dir = sender, ledger, tokenizer_dir
        dtype = _DTYPES[compute_dtype]
        with_reference = self.objective.needs_reference and keep_reference
        self._weights, self._reference = place_weights(
            model, dtype, lora, with_reference, ranks=ranks, expert_ranks=expert_ranks, offload=offload
        )
        self.model, self.policy = self._weights.model, self._weights.policy
        self._ranks, self._device = ranks, self._weights.device
        self._replay = route_replay(self.policy, routing, self._device)
        self._balance, self._balance_coef = ExpertBalance(self.policy) if balance_coef else None, balance_coef
        on_gpu = self._device.type == "cuda"
        self._share_prefixes = on_gpu if share_prefixes is None else share_prefixes
        self.blocks = self._build_blocks(compiled=on_gpu and not eager and expert_ranks == 1)
        self.optimizer = build_adamw(
            self.model,
            learning_rate=learning_rate,
            betas=betas,
            weight_decay=weight_decay,
            host_moments=self._weights.host_moments,
        )
        self.version, self.num_steps, self.num_tokens = 0, 0, 0
        self._tally: RouteTally | None = None
        ledger.switch("waiting-for-batch")

    def _build_blocks(self, *, compiled: bool) -> DecoderBlocks:
        """Experts that exchange tokens and routers that are listened to are left uncompiled: both rely on hooks
        inside the layer, which compiled code does not run."""
        compiled = compiled and self._balance is None
        if self._reference is not None:
            DecoderBlocks(self._reference.policy, compiled=compiled)
        return DecoderBlocks(self.policy, compiled=compiled, ranks=self._ranks, hidden=self._weights.hidden)

    @property
    def num_weights(self) -> int:
        """Numbers this rank trains."""
        return sum(self._weights.local_of(parameter).numel() for parameter in self.model.parameters())

    def bind_thread(self) -> None:
        """To be called by the thread that computes: which GPU is meant is a thread's own setting."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def step(self, batch: TrainBatch) -> StepResult:
        """Train on ``batch``; on a loss or gradient that is not finite, raise TrainingError or skip."""
        return self.step_parts(minibatches(batch, self._minibatches))

    def step_parts(self, parts: Sequence[TrainBatch]) -> StepResult:
        """One step over minibatches that were dealt out; of each, this rank has its share. All ranks return
        the same."""
        vocab_size = self.policy.config.get_text_config().vocab_size
        shape = None if self._replay is None else self._replay.shape
        for part in parts:
            _check_batch(
                part, version=self.version, num_steps=self.num_steps, vocab_size=vocab_size, routers=shape
            )
        step = parts[0].step
        rate = self._learning_rate * rate_factor(
            step, schedule=self._schedule, warmup_steps=self._warmup_steps, total_steps=self._total_steps
        )
        self._tally = None if self._replay is None else RouteTally(self._replay)
        verdict = Verdict()
        records: list[RowRecord] = []
        norms: list[float] = []
        skipped: str | None = None
        with self.ledger.activity("forward-backward"):
            left_out: dict[str, float] = {}
            if self.objective.option("truncated.mode") == "mask":
                parts, left_out["masked_by_truncated"] = without_truncated(parts, self._ranks)
            prepared = self._prepare(parts)
            for index, rows in enumerate(prepared):
                name = f"minibatch {index + 1} of {len(parts)}: " if len(parts) > 1 else ""
                recorded = self.accumulate(rows, before_update=index == 0)
                records += recorded
                if index == 0:
                    verdict = self._judge(recorded, prepared[1:], step=step)
                    set_learning_rate(self.optimizer, rate * verdict.rate_factor)
                norm, reason = self._update(recorded)
                norms.append(norm)
                if reason is not None and self._on_nonfinite == "stop" and reason != _NOTHING:
                    raise TrainingError(
                        f"step {step}: {name}{reason}; lower trainer.learning_rate, "
                        "or set trainer.on_nonfinite to skip"
                    )
                skipped = skipped if reason is None else name + reason
            metrics = step_metrics(records, self.objective, self._ranks) | left_out
            metrics |= {} if self._tally is None else self._tally.metrics(self._ranks)
        num_loss_tokens, num_rows = self._ranks.totals(
            sum(record.policy_logprobs_N.numel() for record in records), len(records)
        )
        self.version, self.num_steps = parts[0].version + 1, step
        return StepResult(
            step=step,
            version=self.version,
            num_loss_tokens=int(num_loss_tokens),
            skipped=skipped,
            warning=verdict.warning,
            metrics=metrics
            | {
                "grad_norm": max(norms),
                "learning_rate": rate * verdict.rate_factor,
                "num_rows": num_rows,
            },
        )

    def _judge(
        self, first: Sequence[RowRecord], later: Sequence[Sequence[TrainRow]], *, step: int
    ) -> Verdict:
        """What the guard says to the batch, as far as it is known before the first update."""
        known = [
            *starts(first),
            *(start for rows in later for row in rows if (start := row.start) is not None),
        ]
        try:
            return self._guard.judge(behavior_metrics(known, self._ranks), step=step)
        except TrainingError:
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def publish(self, version: int) -> WeightManifest:
        """Copy the current weights out through the sender."""
        manifest = self.publish_share(version)
        assert manifest is not None, "only a rank without a sender has nothing to announce"
        return manifest

    def publish_whole(self) -> WeightManifest:
        """Copy all current weights out, whatever form they usually travel in."""
        manifest = self.publish_share(None)
        assert manifest is not None, "only a rank without a sender has nothing to announce"
        return manifest

    def publish_share(self, version: int | None) -> WeightManifest | None:
        """This rank's part in ``publish``, or with None in ``publish_whole``; None on the ranks that have no
        sender."""
        if version not in (None, self.version):
            raise InvariantError(
                f"publish: version {version} was asked for, but the weights are {self.version}"
            )
        adapter = self._weights if isinstance(self._weights, AdapterWeights) else None
        kind: BundleKind | None = "adapter" if adapter else "full" if version is None else None
        with self.ledger.activity("publishing"):
            blobs = self._weights.blobs()
            try:
                if self._sender is None:
                    return None
                manifest = self._sender.send(self.version, blobs, kind=kind)
                return replace(manifest, policy=adapter.policy_name) if adapter else manifest
            finally:
                # The other ranks count on this one for every tensor, also after a sender that failed.
                for _ in blobs:
                    pass

    def retire(self, version: int) -> None:
        if self._sender is not None:
            self._sender.retire(version)

    def save(self, directory: Path) -> None:
        with self.ledger.activity("checkpoint"):
            save_state(
                directory,
                weights=self._weights,
                optimizer=self.optimizer,
                reference=self._reference,
                tokenizer_dir=self._tokenizer_dir,
                position=Position(step=self.num_steps, version=self.version),
            )

    def load(self, directory: Path) -> int:
        with self.ledger.activity("loading"):
            position = load_state(
                directory, weights=self._weights, optimizer=self.optimizer, reference=self._reference
            )
        self.version, self.num_steps = position.version, position.step
        return self.version

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._ranks.close()

    def prepare(self, batch: TrainBatch) -> list[list[TrainRow]]:
        """The rows of each minibatch, with prox and reference log-probabilities where the loss needs them."""
        return self._prepare(minibatches(batch, self._minibatches))

    def _prepare(self, parts: Sequence[TrainBatch]) -> list[list[TrainRow]]:
        rows_of_parts = [
            train_rows(
                part.samples,
                version=part.version,
                aggregation=self._aggregation,
                max_tokens=self._max_tokens,
                row_tokens=self._row_tokens,
                share_prefixes=self._share_prefixes,
                device=self._device,
                ranks=self._ranks,
                parts=self.objective.parts,
            )
            for part in parts
        ]
        if self.objective.needs_reference and not self._keep_reference:
            _check_references(parts)
        elif self.objective.needs_reference:
            with self._weights.off() if isinstance(self._weights, AdapterWeights) else nullcontext():
                rows_of_parts = [self._with_reference(rows) for rows in rows_of_parts]
        # With one minibatch the policy is prox itself, and the extra pass would compute the same numbers.
        if self.objective.needs_batch or (self.objective.needs_prox and len(parts) > 1):
            rows_of_parts = [[self._with_prox(row) for row in rows] for rows in rows_of_parts]
        if self.objective.needs_batch:
            rows_of_parts = with_cutoff(
                rows_of_parts, tau=self.objective.option("m2po.tau"), ranks=self._ranks
            )
        return rows_of_parts

    @torch.no_grad()
    def _with_reference(self, rows: Sequence[TrainRow]) -> list[TrainRow]:
        reference = self._weights if self._reference is None else self._reference
        # A row that any rank must compute is computed by all.
        missing = self._ranks.largest(*(row.inputs.ref_logprobs_N is None for row in rows))
        done = []
        for row, is_missing in zip(rows, missing, strict=True):
            logprobs_N = row.inputs.ref_logprobs_N
            if is_missing:
                # Routed as it would route itself, which is also what an engine that scores for it does.
                computed_N = reference.values(replace(row.tensors, routes=None)).logprobs_N
                logprobs_N = computed_N if logprobs_N is None else logprobs_N
            done.append(replace(row, inputs=replace(row.inputs, ref_logprobs_N=logprobs_N)))
        return done

    @torch.no_grad()
    def _with_prox(self, row: TrainRow) -> TrainRow:
        logprobs_N = self._weights.values(row.tensors).logprobs_N
        return replace(row, inputs=replace(row.inputs, prox_logprobs_N=logprobs_N))

    def accumulate(
        self, rows: Sequence[TrainRow], *, before_update: bool, update_follows: bool = True
    ) -> list[RowRecord]:
        """Add the gradients of every row to the model's. Where no update follows, the memory of the
        optimizer's moments need not be kept free."""
        num_tokens = max((row.tensors.token_ids_T.numel() for row in rows), default=0)
        step_bytes = bytes_of_a_step(
            self.model,
            self.policy.get_output_embeddings().weight,
            self.optimizer if update_follows and not self._weights.host_moments else None,
            num_tokens=num_tokens,
            dtype=self._weights.dtype,
            on_gpu=self._device.type == "cuda",
            own_gradient=self._weights.head_master is None,
        )
        self.blocks.fit(num_tokens, reserved_bytes=self._weights.held_bytes + step_bytes)
        records = []
        for index, row in enumerate(rows):
            self._weights.begin_row(is_last=index == len(rows) - 1)
            with self._balance or nullcontext():
                values = self._weights.values(row.tensors)
            outcome = self._with_balance(self.objective(values.logprobs_N, row.inputs), row)
            outcome.loss.backward()
            if row.is_filler:
                continue
            self.num_tokens += int(row.tensors.token_ids_T.numel())
            if self._tally is not None:
                self._tally.add(row.tensors, before_update=before_update)
            records.append(
                RowRecord(
                    inputs=row.inputs,
                    outcome=outcome,
                    policy_logprobs_N=values.logprobs_N.detach(),
                    entropy_N=values.entropy_N,
                    kept_mass_N=values.kept_mass_N,
                    before_update=before_update,
                )
            )
        return records

    def _with_balance(self, outcome: RowOutcome, row: TrainRow) -> RowOutcome:
        if self._balance is None:
            return outcome
        imbalance = self._balance.loss(row.tensors.sequence_T, row.tensors.num_sequences) * row.sequence_share
        return replace(
            outcome, loss=outcome.loss + self._balance_coef * imbalance, balance=imbalance.detach()
        )

    def _update(self, records: Sequence[RowRecord]) -> tuple[float, str | None]:
        """Move the weights; returns the gradient norm, and why nothing moved (None: it did)."""
        # Waits for a GPU to finish the backward, so that its time is not charged to the optimizer.
        own_loss = float(sum(record.outcome.loss.detach() for record in records))
        loss, num_rows = self._ranks.totals(own_loss, len(records))
        with self.ledger.activity("optimizer"):
            if not num_rows:
                return 0.0, _NOTHING
            norm = self._weights.clip_gradients(math.inf if self._grad_clip is None else self._grad_clip)
            reason = None
            if not math.isfinite(loss):
                reason = f"the loss is not finite ({loss})"
            elif not math.isfinite(norm):
                reason = f"the gradient norm is not finite ({norm})"
            else:
                self.optimizer.step()
                self._weights.refresh()
            self.optimizer.zero_grad(set_to_none=True)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            return norm, reason


def _check_numbers(minibatches: int, row_tokens: int, learning_rate: float, grad_clip: float | None) -> None:
    if minibatches < 1 or row_tokens < 1 or learning_rate < 0 or (grad_clip is not None and grad_clip <= 0):
        raise ConfigError(
            "minibatches and row_tokens must be at least 1, learning_rate at least 0, grad_clip None or "
            f"above 0, not {minibatches}, {row_tokens}, {learning_rate} and {grad_clip}"
        )


def _check_references(parts: Sequence[TrainBatch]) -> None:
    for sample in (sample for part in parts for sample in part.samples):
        if sample.ref_logprobs is None:
            raise TrainingError(
                f"sample {sample.group}/{sample.attempt}: it came without the reference's log-probabilities, which "
                "this trainer does not compute; set algo.reference to trainer"
            )


def _check_batch(
    batch: TrainBatch,
    *,
    version: int,
    num_steps: int,
    vocab_size: int,
    routers: RouterShape | None = None,
) -> None:
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
