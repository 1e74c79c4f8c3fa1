"""A process-reward model that reads an attempt while it grows, and never the same token twice.

In: the tokens of an attempt so far and where its steps end. Out: a score for each step, read at the step's last token
(or at the marker put behind it). The keys and values of what was read stay here, an attempt at a time, so a new step
costs its new tokens. They are only a memory: without them (evicted, restarted, tokens that differ) everything is
read again, counted, with the same result. Incremental and whole readings agree to rounding, which is checked on the
model at the start: one that looks ahead cannot score steps before the text is finished, and is refused.

    causal model           p(good) - p(bad) of two tokens, among those two
    classifier, two        p(last label) - p(the others); sequence and token classifiers are read alike
      labels or more
    classifier, one label  its output as it is

Shape legend: F tokens that are read (markers included), N new ones among them, C steps, H hidden size, V labels or
vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    PreTrainedModel,
)

from headrace.errors import ModelError, TaskError
from headrace.types import Task

CHUNK_TOKENS = 1024
"""Tokens read in one pass."""
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


@dataclass(slots=True)
class _Reading:
    """What is remembered of one attempt."""

    cache: DynamicCache
    token_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32 [F], what the cache holds."""
    scores: list[float] = field(default_factory=list)
    """Of the steps read so far."""


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
        self._readings: OrderedDict[str, _Reading] = OrderedDict()
        self._counters = {"read_tokens": 0, "reused_tokens": 0, "recomputed_tokens": 0, "evictions": 0}
        self._refuse_looking_ahead()

    def counters(self) -> dict[str, float]:
        return {**self._counters, "held_tokens": self._num_held, "held_attempts": len(self._readings)}

    @property
    def _num_held(self) -> int:
        return sum(len(reading.token_ids) for reading in list(self._readings.values()))

    @torch.inference_mode()
    def score(
        self,
        attempt: str,
        task: Task,
        token_ids: np.ndarray,
        ends: np.ndarray,
        *,
        num_prompt: int = 0,
        num_known: int = 0,
        last: bool = False,
    ) -> np.ndarray:
        """float32 [C - num_known]. ``ends``: int [C], where the steps end in ``token_ids``. The task and where its
        prompt ends make no difference to a model, which reads tokens."""
        read, rows = self._with_markers(np.asarray(token_ids, dtype=np.int32), ends)
        reading = self._readings.pop(attempt, None)
        if reading is None or not self._continues(reading, read, len(rows)):
            if num_known or reading is not None:
                self._counters["recomputed_tokens"] += (
                    int(rows[num_known - 1]) + 1 if num_known else len(read)
                )
            reading = _Reading(DynamicCache(config=self._model.config))
        self._counters["reused_tokens"] += len(reading.token_ids)
        self._read(reading, read, rows)
        if not last:
            self._readings[attempt] = reading
            self._evict()
        return np.array(reading.scores[num_known:], dtype=np.float32)

    def _with_markers(self, token_ids: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What is read up to the last step's end, int32 [F], and the rows at which steps are, int64 [C]."""
        ends = np.asarray(ends, dtype=np.int64)
        end = int(ends[-1]) if len(ends) else 0
        if end and int(token_ids[:end].max()) >= self._vocab_size:
            raise TaskError(
                f"scoring.process: token {int(token_ids[:end].max())} is beyond the model's vocabulary of "
                f"{self._vocab_size}; use a process-reward model with the policy's tokenizer"
            )
        places = np.repeat(ends, len(self._marker))
        read = np.insert(token_ids[:end], places, np.tile(self._marker, len(ends)))
        return read.astype(np.int32), ends + np.arange(1, len(ends) + 1) * len(self._marker) - 1

    @staticmethod
    def _continues(reading: _Reading, read: np.ndarray, num_steps: int) -> bool:
        known = len(reading.token_ids)
        same = known <= len(read) and np.array_equal(reading.token_ids, read[:known])
        return same and len(reading.scores) <= num_steps

    def _read(self, reading: _Reading, read: np.ndarray, rows: np.ndarray) -> None:
        """Bring a reading up to the last step's end."""
        for start in range(len(reading.token_ids), len(read), CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(read))
            hidden_NH = self._forward(read[start:stop], start, reading.cache)
            steps = rows[len(reading.scores) :]
            here = steps[steps < stop] - start
            if len(here):
                reading.scores += self._values(hidden_NH[torch.from_numpy(here).to(hidden_NH.device)])
        self._counters["read_tokens"] += len(read) - len(reading.token_ids)
        reading.token_ids = read

    def _forward(self, token_ids: np.ndarray, start: int, cache: DynamicCache) -> torch.Tensor:
        device = self._model.device
        ids_1N = torch.from_numpy(token_ids.astype(np.int64)).to(device)[None]
        places_1N = torch.arange(start, start + len(token_ids), device=device)[None]
        output = self._backbone(
            input_ids=ids_1N, position_ids=places_1N, past_key_values=cache, use_cache=True
        )
        hidden_NH: torch.Tensor = output.last_hidden_state[0]
        return hidden_NH

    def _values(self, hidden_CH: torch.Tensor) -> list[float]:
        logits_CV = self._head(hidden_CH).float()
        if self._pair is not None:
            cap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
            logits_CV = logits_CV if cap is None else cap * torch.tanh(logits_CV / cap)
            logits_CV = logits_CV[:, [self._pair[1], self._pair[0]]]
        elif logits_CV.shape[-1] == 1:
            return logits_CV[:, 0].tolist()
        return (2.0 * torch.softmax(logits_CV, dim=-1)[:, -1] - 1.0).tolist()

    def _evict(self) -> None:
        """The attempts that were read longest ago make room."""
        while self._num_held > self._kv_tokens and self._readings:
            self._readings.popitem(last=False)
            self._counters["evictions"] += 1

    @torch.inference_mode()
    def _refuse_looking_ahead(self) -> None:
        probe = np.arange(12, dtype=np.int32) % self._vocab_size
        whole = self._forward(probe, 0, DynamicCache(config=self._model.config))
        cache = DynamicCache(config=self._model.config)
        parts = torch.cat([self._forward(probe[:5], 0, cache), self._forward(probe[5:], 5, cache)])
        gap = float((whole - parts).float().abs().max() / whole.float().abs().max().clamp(min=1.0))
        if not gap <= _PROBE_TOLERANCE:
            raise ModelError(
                f"scoring.process: {type(self._model).__name__} reads a text in two parts differently from the whole "
                f"(by {gap:.2g}), so it cannot score steps while they are sampled; give a model with causal attention"
            )


def _head(model: PreTrainedModel, pair: tuple[int, int] | None) -> Any:
    vocabulary = model.get_output_embeddings()
    is_causal = vocabulary is not None
    if is_causal != (pair is not None):
        name = type(model).__name__
        wants = "needs the two tokens that mean good and bad: write PATH?good=+&bad=-"
        has = "has labels of its own: leave good and bad out"
        raise ModelError(f"scoring.process: {name} {wants if is_causal else has}")
    if is_causal:
        return vocabulary
    head = getattr(model, "score", None) or getattr(model, "classifier", None)
    if head is None:
        raise ModelError(
            f"scoring.process: {type(model).__name__} has neither a score nor a classifier layer; give a function of "
            "your own (module:function)"
        )
    return head
