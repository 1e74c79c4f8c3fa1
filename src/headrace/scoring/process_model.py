"""A process-reward model that reads attempts while they grow, many at a time, and never the same token twice.

In: questions about the steps of attempts. Out: a score for each step, read at the step's last token (or at the marker
put behind it). The keys and values of what was read stay here (``remembered_kv``), so a new step costs its new
tokens. They are only a memory: without them (evicted, restarted, tokens that differ) everything is read again, counted,
with the same result. Reading in pieces and reading the whole agree to rounding, which is checked on the model at the
start: one that looks ahead cannot score steps before the text is finished, and is refused.

    causal model           p(good) - p(bad) of two tokens, among those two
    classifier, two        p(last label) - p(the others); sequence and token classifiers are read alike
      labels or more
    classifier, one label  its output as it is

Shape legend: C steps, H hidden size, V labels or vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from headrace.errors import ModelError, TaskError
from headrace.scoring.remembered_kv import Reading, read_on
from headrace.types import StepQuestion, StepScores

CHUNK_TOKENS = 1024
"""New tokens of an attempt that are read in one pass."""
PASS_TOKENS = 2**16
"""Tokens of all attempts of a pass, their memories and padding included."""
_PROBE_TOLERANCE = 1e-2
"""Between two ways of reading the same tokens: rounding in bfloat16 is far below, looking ahead is far above."""
_LOADERS: dict[str, Any] = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForCausalLM": AutoModelForCausalLM,
    "LMHeadModel": AutoModelForCausalLM,
}


def load_process_model(path: str, *, dtype: str, device: str) -> PreTrainedModel:
    """The classifier or causal model saved under ``path``."""
    names = AutoConfig.from_pretrained(path).architectures or []
    loaders = [loader for name in names for kind, loader in _LOADERS.items() if name.endswith(kind)]
    if not loaders:
        raise ModelError(
            f"scoring.process: {path} names the architecture {', '.join(names) or 'none'}; give a causal model, a "
            "sequence or token classifier, or a function of your own (module:function)"
        )
    model: PreTrainedModel = loaders[0].from_pretrained(path, dtype=getattr(torch, dtype))
    return model.to(device).eval()


def kv_tokens_in(model: PreTrainedModel, num_bytes: int) -> int:
    """Tokens whose keys and values fit into so many bytes."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    item_bytes = next(model.parameters()).element_size()
    return max(1, num_bytes // (2 * config.num_hidden_layers * num_heads * width * item_bytes))


class ProcessModel:
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_tokens: int,
        pair: tuple[int, int] | None = None,
        marker: tuple[int, ...] = (),
    ) -> None:
        """``kv_tokens``: tokens whose keys and values are kept, over all attempts. ``pair``: the ids that mean good and
        bad, needed by a causal model and by no other. ``marker``: tokens put behind each step before it is read."""
        self._model = model.eval()
        self._backbone = getattr(model, model.base_model_prefix)
        self._head = _head(model, pair)
        self._pair = pair
        self._kv_tokens = kv_tokens
        self._marker = np.array(marker, dtype=np.int32)
        self._vocab_size = model.get_input_embeddings().weight.shape[0]
        self._readings: OrderedDict[str, Reading] = OrderedDict()
        self._counters = {"read_tokens": 0, "reused_tokens": 0, "recomputed_tokens": 0, "evictions": 0}
        self._refuse_looking_ahead()

    def counters(self) -> dict[str, float]:
        return {**self._counters, "held_tokens": self._num_held, "held_attempts": len(self._readings)}

    @torch.inference_mode()
    def score(self, questions: Sequence[StepQuestion]) -> list[StepScores | Exception]:
        """For each question its scores, or why it has none."""
        readings: dict[int, Reading] = {}
        faults: dict[int, Exception] = {}
        for i, question in enumerate(questions):
            try:
                readings[i] = self._opened(question)
            except TaskError as error:
                faults[i] = error
        pending = [reading for reading in readings.values() if reading.num_new]
        while pending:
            self._read(_fitting(pending))
            pending = [reading for reading in pending if reading.num_new]
        for i, reading in readings.items():
            if not questions[i].last:
                self._readings[questions[i].attempt] = reading
        self._evict()
        return [
            faults[i] if i in faults else _scores_at(readings[i], q.num_known)
            for i, q in enumerate(questions)
        ]

    def _opened(self, question: StepQuestion) -> Reading:
        """What is remembered of the attempt, or a fresh start, with what is to be read."""
        text, rows = self._with_markers(question.token_ids, question.ends)
        reading = self._readings.pop(question.attempt, None)
        if reading is None or not reading.is_start_of(text, rows[question.num_known :]):
            if question.num_known or reading is not None:
                known = int(rows[question.num_known - 1]) + 1 if question.num_known else len(text)
                self._counters["recomputed_tokens"] += known
            reading = Reading()
        self._counters["reused_tokens"] += reading.num_read
        self._counters["read_tokens"] += len(text) - reading.num_read
        reading.text, reading.rows = text, rows
        return reading

    def _with_markers(self, token_ids: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is read up to the last step's end (int32), and the rows at which steps are judged (int64 [C])."""
        ends = np.asarray(ends, dtype=np.int64)
        token_ids = np.asarray(token_ids, dtype=np.int32)[: int(ends[-1]) if len(ends) else 0]
        if len(token_ids) and int(token_ids.max()) >= self._vocab_size:
            raise TaskError(
                f"scoring.process: token {int(token_ids.max())} is beyond the model's vocabulary of "
                f"{self._vocab_size}; use a process-reward model with the policy's tokenizer"
            )
        markers = np.tile(self._marker, len(ends))
        text = np.insert(token_ids, np.repeat(ends, len(self._marker)), markers).astype(np.int32)
        return text, ends + np.arange(1, len(ends) + 1) * len(self._marker) - 1

    def _read(self, readings: Sequence[Reading]) -> None:
        """One pass over the next tokens of every reading."""
        starts = [reading.num_read for reading in readings]
        hidden = read_on(self._backbone, readings, CHUNK_TOKENS)
        judged_CH, places = [], []
        for reading, start, hidden_NH in zip(readings, starts, hidden, strict=True):
            here = reading.rows[(start <= reading.rows) & (reading.rows < reading.num_read)]
            judged_CH.append(hidden_NH[torch.from_numpy(here - start).to(hidden_NH.device)])
            places += [(reading, row) for row in here.tolist()]
        if places:
            for (reading, row), value in zip(places, self._values(torch.cat(judged_CH)), strict=True):
                reading.scores[row] = value

    def _values(self, hidden_CH: torch.Tensor) -> list[float]:
        logits_CV = self._head(hidden_CH).float()
        if self._pair is not None:
            cap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
            logits_CV = logits_CV if cap is None else cap * torch.tanh(logits_CV / cap)
            logits_CV = logits_CV[:, [self._pair[1], self._pair[0]]]
        elif logits_CV.shape[-1] == 1:
            return logits_CV[:, 0].tolist()
        return (2.0 * torch.softmax(logits_CV, dim=-1)[:, -1] - 1.0).tolist()

    @property
    def _num_held(self) -> int:
        return sum(reading.num_read for reading in list(self._readings.values()))

    def _evict(self) -> None:
        """The attempts that were read longest ago make room."""
        while self._readings and self._num_held > self._kv_tokens:
            self._readings.popitem(last=False)
            self._counters["evictions"] += 1

    @torch.inference_mode()
    def _refuse_looking_ahead(self) -> None:
        """Also reads two texts of different lengths side by side, as passes do."""
        probe = np.arange(1, 13, dtype=np.int32) % self._vocab_size
        (whole,) = read_on(self._backbone, [Reading(text=probe)], len(probe))
        pieces, other = Reading(text=probe), Reading(text=probe[:3])
        first, _ = read_on(self._backbone, [pieces, other], 5)
        (second,) = read_on(self._backbone, [pieces], len(probe))
        gap = float((whole - torch.cat([first, second])).float().abs().max())
        if not gap <= _PROBE_TOLERANCE * max(1.0, float(whole.float().abs().max())):
            raise ModelError(
                f"scoring.process: {type(self._model).__name__} reads a text in two parts differently from the whole "
                f"(by {gap:.2g}), so it cannot score steps while they are sampled; give a model with causal attention"
            )


def _scores_at(reading: Reading, num_known: int) -> StepScores:
    """Of the steps after the known ones."""
    scores = [reading.scores[row] for row in reading.rows[num_known:].tolist()]
    return StepScores(scores=np.array(scores, dtype=np.float32))


def _fitting(readings: Sequence[Reading]) -> list[Reading]:
    """As many of the shortest memories as fit into a pass; like lengths side by side need little padding."""
    ordered = sorted(readings, key=lambda reading: reading.num_read)
    chosen: list[Reading] = []
    width = 0
    for reading in ordered:
        width = max(width, reading.num_read + min(reading.num_new, CHUNK_TOKENS))
        if chosen and width * (len(chosen) + 1) > PASS_TOKENS:
            break
        chosen.append(reading)
    return chosen


def _head(model: PreTrainedModel, pair: tuple[int, int] | None) -> Any:
    vocabulary = model.get_output_embeddings()
    is_causal, name = vocabulary is not None, type(model).__name__
    if is_causal != (pair is not None):
        wants = "needs the two tokens that mean good and bad: write PATH?good=+&bad=-"
        has = "has labels of its own: leave good and bad out"
        raise ModelError(f"scoring.process: {name} {wants if is_causal else has}")
    if is_causal:
        return vocabulary
    head = getattr(model, "score", None) or getattr(model, "classifier", None)
    if head is None:
        raise ModelError(
            f"scoring.process: {name} has neither a score nor a classifier layer; give a function of your own "
            "(module:function)"
        )
    return head
