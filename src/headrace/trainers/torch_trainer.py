"""Batches -> weights, on one device or as one of several ranks.

In: a causal language model and ``TrainBatch`` objects in order. Out: ``StepResult``, published weights,
checkpoints. Every token of an optimizer step is weighed by one normaliser, counted before the first
backward, so rows may be cut in any way; gradients accumulate over the rows and the optimizer moves once
per minibatch. A minibatch that is not finite is never applied: it raises, those before it having been applied, or is
skipped and says so, and the version advances. ``model`` holds float32 weights, ``policy`` is what is computed and
published: the same model in float32, a copy in bf16. Where several ranks train together, each holds a slice of the
weights, is given its share of every batch, and all take every decision alike. With ``lora`` the weights that
are trained, kept and published are an adapter's alone, and the reference of a KL term is the policy without
it. On a GPU the policy's layers are compiled, and those that do not fit into memory are recomputed in the
backward. Dropout is off, since the policy that is trained must be the one that was sampled from.

Every moment is charged to the ledger: forward-backward, optimizer, publishing, checkpoint, else
waiting-for-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from headrace.algos.parameters import of_owner
from headrace.data.dealing import minibatches
from headrace.errors import ConfigError, InvariantError, TrainingError
from headrace.kernels.kept_code import keep_compiled
from headrace.protocols import WeightSender
from headrace.timekeeping import TimeLedger
from headrace.trainers.balance import ExpertBalance
from headrace.trainers.batch_checks import check_batch, check_references
from headrace.trainers.blocks import DecoderBlocks, bytes_of_a_step
from headrace.trainers.checkpoint import Position, load_state, save_state
from headrace.trainers.device_rows import TrainRow, known_starts, most_tokens
from headrace.trainers.distilling import row_logprobs
from headrace.trainers.echo import Echo
from headrace.trainers.guard import Guard, Verdict
from headrace.trainers.logprobs import kept_slope_bytes
from headrace.trainers.metrics import RowRecord, behavior_metrics, starts, step_metrics, total_of
from headrace.trainers.objective import RowOutcome
from headrace.trainers.optim import build_adamw, rate_factor, set_learning_rate
from headrace.trainers.optimal_baseline import over_optimal_baselines
from headrace.trainers.options import TrainOptions
from headrace.trainers.placement import Adapters, place_weights
from headrace.trainers.ranks import ALONE, Ranks
from headrace.trainers.routes import RouteTally, route_replay
from headrace.trainers.rows import train_rows, with_cutoff, without_truncated
from headrace.trainers.streamed_adamw import StreamedAdamW
from headrace.types import BundleKind, Sample, StepResult, TrainBatch, WeightManifest

_NOTHING = "no loss tokens"
_NO_BATCH = TrainBatch(step=0, version=0, samples=())
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
        tokenizer_dir: Path | None = None,
        **chosen: Any,
    ) -> None:
        """``model`` is taken over: it is moved to float32 and to packed attention. Of several ``ranks`` the
        first has the model's weights and the ``sender``, on the others ``model`` is hollow. ``chosen`` are
        ``TrainOptions`` by name."""
        keep_compiled()
        self._options = options = TrainOptions(**chosen)
        self.objective = options.objective()
        if options.optimal_baseline and ranks.size > 1:
            raise ConfigError(
                f"the optimal baseline needs the gradient of every attempt by itself, but {ranks.size} ranks add "
                "theirs up: train on one rank, or use another advantage"
            )
        self._guard = Guard(options.guard, **of_owner(self.objective.composition.values, "guard"))
        self._sender, self.ledger, self._tokenizer_dir = sender, ledger, tokenizer_dir
        self._weights, self._reference = place_weights(
            model,
            _DTYPES[options.compute_dtype],
            options.lora,
            self.objective.needs_reference and options.keep_reference,
            ranks=ranks,
            expert_ranks=options.expert_ranks,
            offload=options.offload,
        )
        self.model, self.policy = self._weights.model, self._weights.policy
        self._ranks, self._device = ranks, self._weights.device
        self._replay = route_replay(self.policy, options.routing, self._device)
        self._balance = ExpertBalance(self.policy) if options.balance_coef else None
        self._echo = Echo(options.echo_coef) if options.echo_coef else None
        on_gpu = self._device.type == "cuda"
        self._share_prefixes = on_gpu if options.share_prefixes is None else options.share_prefixes
        self.blocks = self._build_blocks(compiled=on_gpu and not options.eager and options.expert_ranks == 1)
        self.optimizer = build_adamw(
            self.model,
            learning_rate=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            host_moments=self._weights.host_moments,
            host_memory=self._weights.host_memory,
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
        return self.step_parts(minibatches(batch, self._options.minibatches))

    def step_parts(self, parts: Sequence[TrainBatch]) -> StepResult:
        """One step over minibatches that were dealt out; of each, this rank has its share. All ranks return
        the same."""
        vocab_size = self.policy.config.get_text_config().vocab_size
        shape = None if self._replay is None else self._replay.shape
        for part in parts:
            check_batch(
                part, version=self.version, num_steps=self.num_steps, vocab_size=vocab_size, routers=shape
            )
        step = parts[0].step
        options = self._options
        rate = options.learning_rate * rate_factor(
            step,
            schedule=options.schedule,
            warmup_steps=options.warmup_steps,
            total_steps=options.total_steps,
        )
        self._tally = None if self._replay is None else RouteTally(self._replay)
        verdict, behavior = Verdict(), dict[str, float]()
        records: list[RowRecord] = []
        norms: list[float] = []
        faults: list[str] = []
        num_updates = num_trained = 0
        with self.ledger.activity("forward-backward"):
            left_out: dict[str, float] = {}
            if self.objective.option("truncated.mode") == "mask":
                parts, left_out["masked_by_truncated"] = without_truncated(parts, self._ranks)
            if options.optimal_baseline:
                parts, shift = over_optimal_baselines(parts, self._measure)
                left_out |= shift
            prepared = self._prepare(parts)
            for index, rows in enumerate(prepared):
                name = f"minibatch {index + 1} of {len(parts)}: " if len(parts) > 1 else ""
                recorded = self.accumulate(rows, before_update=num_updates == 0)
                records += recorded
                if index == 0:
                    verdict, behavior = self._judge(recorded, prepared[1:], step=step)
                    set_learning_rate(self.optimizer, rate * verdict.rate_factor)
                norm, reason = self._update(recorded)
                norms.append(norm)
                if reason is not None and self._options.on_nonfinite == "stop" and reason != _NOTHING:
                    raise TrainingError(
                        f"step {step}: {name}{reason}; lower trainer.learning_rate, "
                        "or set trainer.on_nonfinite to skip"
                    )
                num_updates += reason is None
                num_trained += reason != _NOTHING
                if reason is not None and reason != _NOTHING:
                    faults.append(name + reason)
            if len(prepared) > 1:
                # Of the rows behind the first minibatch more is known than when that was judged.
                behavior = behavior_metrics(starts(records), self._ranks)
            each = {"num_updates": max(num_trained, 1)}
            metrics = step_metrics(records, self.objective, self._ranks, behavior=behavior, **each) | left_out
            metrics |= {} if self._tally is None else self._tally.metrics(self._ranks)
            metrics |= {} if self._echo is None else self._echo.metrics(records, self._ranks, **each)
        num_loss_tokens, num_rows = self._ranks.totals(
            sum(record.policy_logprobs_N.numel() for record in records), len(records)
        )
        self.version, self.num_steps = parts[0].version + 1, step
        return StepResult(
            step=step,
            version=self.version,
            num_loss_tokens=int(num_loss_tokens),
            # A minibatch whose completions were all cut off, and are not trained on, is no fault of the others.
            skipped=faults[-1] if faults else None if num_updates else _NOTHING,
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
    ) -> tuple[Verdict, dict[str, float]]:
        """What the guard says to the batch, as far as it is known before the first update, and how far the batch is
        from the policy by that."""
        known = [*starts(first), *(start for rows in later for start in known_starts(rows))]
        behavior = figures = behavior_metrics(known, self._ranks)
        if self._tally is not None and self._guard.action != "off":
            figures = figures | self._tally.metrics(self._ranks)
        try:
            return self._guard.judge(figures, step=step), behavior
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
        adapter = self._weights if isinstance(self._weights, Adapters) else None
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
                if isinstance(self.optimizer, StreamedAdamW):
                    # Not before: the digest would come to the host behind one of their pieces.
                    self.optimizer.send_back()

    def retire(self, version: int) -> None:
        if self._sender is not None:
            self._sender.retire(version)

    def save(self, directory: Path) -> None:
        with self.ledger.activity("checkpoint"):
            self._settle()
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
            # Of a step that failed nothing may reach what is loaded.
            self.optimizer.zero_grad(set_to_none=True)
            self._settle()
            position = load_state(
                directory, weights=self._weights, optimizer=self.optimizer, reference=self._reference
            )
        self.version, self.num_steps = position.version, position.step
        return self.version

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._ranks.close()

    def prepare(self, batch: TrainBatch) -> list[Sequence[TrainRow]]:
        """The rows of each minibatch, with prox and reference log-probabilities where the loss needs them."""
        return self._prepare(minibatches(batch, self._options.minibatches))

    def _prepare(self, parts: Sequence[TrainBatch]) -> list[Sequence[TrainRow]]:
        rows_of_parts: list[Sequence[TrainRow]] = [self._rows(part) for part in parts]
        # What these passes need may still be held by moments on their way out.
        self._settle()
        if self._options.distillation is not None:
            self._options.distillation.check(parts)
        if self.objective.needs_reference and not self._options.keep_reference:
            check_references(parts)
        elif self.objective.needs_reference:
            with self._weights.off() if isinstance(self._weights, Adapters) else nullcontext():
                rows_of_parts = [self._with_reference(rows) for rows in rows_of_parts]
        # With one minibatch the policy is prox itself, and the extra pass would compute the same numbers.
        if self.objective.needs_batch or (self.objective.needs_prox and len(parts) > 1):
            rows_of_parts = [[self._with_prox(row) for row in rows] for rows in rows_of_parts]
        if self.objective.needs_batch:
            tau = self.objective.option("m2po.tau")
            rows_of_parts = [*with_cutoff(rows_of_parts, tau=tau, ranks=self._ranks)]
        return rows_of_parts

    def _rows(self, part: TrainBatch) -> Sequence[TrainRow]:
        return train_rows(
            part.samples,
            version=part.version,
            aggregation=self._options.aggregation,
            max_tokens=self._options.max_tokens,
            row_tokens=self._options.row_tokens,
            share_prefixes=self._share_prefixes,
            device=self._device,
            ranks=self._ranks,
            parts=self.objective.parts,
            with_teachers=self._options.distillation is not None,
            with_environment=self._echo is not None,
            pivot_weight=self._options.pivot_weight,
        )

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
                computed_N = reference.values(replace(row.tensors, routes=None, environment=None)).logprobs_N
                logprobs_N = computed_N if logprobs_N is None else logprobs_N
            done.append(replace(row, inputs=replace(row.inputs, ref_logprobs_N=logprobs_N)))
        return done

    @torch.no_grad()
    def _with_prox(self, row: TrainRow) -> TrainRow:
        logprobs_N = self._weights.values(replace(row.tensors, environment=None)).logprobs_N
        return replace(row, inputs=replace(row.inputs, prox_logprobs_N=logprobs_N))

    def _measure(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """The log of an attempt's ratio to the behaviour policy, and the squared norm of the gradient of its
        log-probability."""
        attempt = replace(_NO_BATCH, samples=tuple(samples))
        rows = self._rows(attempt)
        self._fit(rows)
        log_weight = 0.0
        for index, row in enumerate(rows):
            self._weights.begin_row(is_last=index == len(rows) - 1)
            logprobs_N = self._weights.values(replace(row.tensors, environment=None)).logprobs_N
            log_weight += float((logprobs_N.detach() - row.inputs.behavior_logprobs_N).double().sum())
            logprobs_N.sum().backward()
            self.num_tokens += int(row.tensors.token_ids_T.numel())
        norm = self._weights.clip_gradients(math.inf)
        self.optimizer.zero_grad(set_to_none=True)
        return log_weight, norm**2

    def accumulate(
        self, rows: Sequence[TrainRow], *, before_update: bool, update_follows: bool = True
    ) -> list[RowRecord]:
        """Add the gradients of every row to the model's, or of none where one raises. Where no update follows, the
        memory of the optimizer's moments need not be kept free."""
        try:
            return self._accumulate(rows, before_update=before_update, update_follows=update_follows)
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            raise

    def _accumulate(
        self, rows: Sequence[TrainRow], *, before_update: bool, update_follows: bool
    ) -> list[RowRecord]:
        self._fit(rows, update_follows=update_follows)
        distillation = self._options.distillation
        compared = distillation is not None and distillation.compares
        records = []
        for index, row in enumerate(self._keeping_slopes(rows)):
            self._weights.begin_row(is_last=index == len(rows) - 1)
            bringing: AbstractContextManager[None] = nullcontext()
            if update_follows and index == len(rows) - 1:
                bringing = self._bringing_moments(row, keeps_slopes=not compared)
            with self._balance or nullcontext(), bringing:
                policy = row_logprobs(self._weights, row, compared=compared)
            outcome = self._with_balance(self.objective(policy.sampled_N, row.inputs), row)
            if distillation is not None:
                outcome = distillation.added_to(outcome, policy, row)
            if self._echo is not None:
                outcome = self._echo.added_to(outcome, policy.environment_E, row)
            outcome.loss.backward()
            if row.is_filler:
                continue
            self.num_tokens += int(row.tensors.token_ids_T.numel())
            if self._tally is not None:
                self._tally.add(row.tensors, before_update=before_update)
            records.append(
                RowRecord(
                    inputs=row.inputs,
                    # A graph is let go while the GPU computes the next row: all together they would be, at the end of
                    # the step, before anybody hears of it.
                    outcome=replace(outcome, loss=outcome.loss.detach()),
                    policy_logprobs_N=policy.sampled_N.detach(),
                    entropy_N=policy.entropy_N,
                    kept_mass_N=policy.kept_mass_N,
                    before_update=before_update,
                )
            )
        return records

    def _fit(self, rows: Sequence[TrainRow], *, update_follows: bool = True) -> None:
        """Choose which layers are recomputed in the backward, so that these rows fit into memory, and what is
        kept besides."""
        self._settle()
        num_tokens = most_tokens(rows)
        head_VH = self.policy.get_output_embeddings().weight
        step_bytes = bytes_of_a_step(
            self.model,
            head_VH,
            self.optimizer if update_follows else None,
            num_tokens=num_tokens,
            dtype=self._weights.dtype,
            on_gpu=self._device.type == "cuda",
            own_gradient=self._weights.head_master is None,
            host_moments=self._weights.host_moments,
        )
        self.blocks.fit(
            num_tokens,
            reserved_bytes=self._weights.held_bytes + step_bytes,
            slope_bytes=self._weights.dtype.itemsize * head_VH.shape[0],
        )

    def _keeping_slopes(self, rows: Sequence[TrainRow]) -> Iterator[TrainRow]:
        """As far as ``blocks.fit`` found memory for them; one at a time, since asking for a row may mean making it."""
        kept = self.blocks.slope_tokens
        for row in rows:
            yield replace(row, tensors=replace(row.tensors, slope_tokens=kept))

    def _bringing_moments(self, row: TrainRow, *, keeps_slopes: bool) -> AbstractContextManager[None]:
        """Around the forward of the last row before an update, in whose backward moments come from the host to where
        activations were, and slopes of logits, if the head keeps these."""
        if not isinstance(self.optimizer, StreamedAdamW):
            return nullcontext()
        head_VH = self.policy.get_output_embeddings().weight
        to_come = (p for p in self.model.parameters() if p.requires_grad and p.grad is None)
        return self.blocks.telling_room(
            self.optimizer.bring,
            num_tokens=row.tensors.token_ids_T.numel(),
            slope_bytes=kept_slope_bytes(row.tensors, head_VH) if keeps_slopes else 0,
            gradient_bytes=sum(parameter.nbytes for parameter in to_come),
        )

    def _settle(self) -> None:
        """Moments of the last update are where they belong, and what they left is free memory."""
        if isinstance(self.optimizer, StreamedAdamW):
            self.optimizer.settle()

    def _with_balance(self, outcome: RowOutcome, row: TrainRow) -> RowOutcome:
        if self._balance is None:
            return outcome
        imbalance = self._balance.loss(row.tensors.segment_T, row.tensors.prefix_S) * row.sequence_share
        return replace(
            outcome, loss=outcome.loss + self._options.balance_coef * imbalance, balance=imbalance.detach()
        )

    def _update(self, records: Sequence[RowRecord]) -> tuple[float, str | None]:
        """Move the weights; returns the gradient norm, and why nothing moved (None: it did)."""
        # Waits for a GPU to finish the backward, so that its time is not charged to the optimizer.
        own_loss = total_of(record.outcome.loss.detach() for record in records)
        loss, num_rows = self._ranks.totals(own_loss, len(records))
        with self.ledger.activity("optimizer"):
            if not num_rows:
                return 0.0, _NOTHING
            limit = self._options.grad_clip
            norm = self._weights.clip_gradients(math.inf if limit is None else limit)
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
                # Not the device: moments are on their way back to the host, and nobody needs them yet.
                torch.cuda.current_stream(self._device).synchronize()
            return norm, reason
