"""Is a recorded turn whole? Everything the contract promises of one model call, checked without the model.

In: a ``Turn`` as any engine, wire, journal or checkpoint hands it on, and what is known of the run. Out: a ``Fault``
for each promise that is broken, in words; none for a sound turn. What is not known (a vocabulary, a seed) is not
checked. Nothing is raised: a checker goes on with the next turn.

Legend: P prompt tokens, L sampled tokens, N recorded rows, M layers, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from headrace.data import masks
from headrace.types import Completion, Routing, Turn

Check = Literal[
    "lengths", "logprobs", "versions", "kv-versions", "vocabulary", "mask", "routes", "finish", "seed"
]
ABOVE_ZERO = 1e-5
"""What rounding may lift a log-probability above 0."""


class Fault(NamedTuple):
    check: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a run's turns are held against; None: not known."""

    vocab_size: int | None = None
    newest_version: int | None = None
    """Of the weights the run has reached."""
    context_tokens: int | None = None
    """Tokens a sequence may have; a completion that reaches them ends early."""
    num_experts: int | None = None
    experts_per_token: int | None = None
    routed_layers: int | None = None
    """Layers whose experts are recorded."""
    may_give_up: bool = False
    """Attempts that look hopeless are ended on the way (``scoring.abort_below``), and stay as they are."""


def turn_faults(turn: Turn, limits: Limits, *, seed: int | None = None) -> list[Fault]:
    """``seed``: what the turn must have been given."""
    done = turn.completion
    wrong = [Fault("lengths", text) for text in _lengths(turn)]
    if wrong:
        # Nothing else can be told about columns that do not belong together.
        return wrong
    found = [
        *(Fault("logprobs", text) for text in _logprobs(turn)),
        *(Fault("versions", text) for text in _versions(done, limits)),
        *(Fault("kv-versions", text) for text in _kv_versions(turn, limits)),
        *(Fault("vocabulary", text) for text in _vocabulary(turn, limits)),
        *(Fault("mask", text) for text in _mask(turn, limits)),
        *(Fault("finish", text) for text in _finish(turn, limits)),
    ]
    if done.routing is not None:
        found += [Fault("routes", text) for text in _routes(turn, done.routing, limits)]
    if seed is not None and turn.seed != seed:
        found.append(Fault("seed", f"the seed is {turn.seed}, but the run's settings give {seed}"))
    return found


def _lengths(turn: Turn) -> Iterator[str]:
    done, num_tokens = turn.completion, turn.completion.num_tokens
    columns = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32}
    for name, dtype in columns.items():
        column = getattr(done, name)
        if column.shape != (num_tokens,):
            yield f"{name} has the shape {column.shape}, for {num_tokens} tokens"
        elif column.dtype != dtype:
            yield f"{name} is {column.dtype}, not {np.dtype(dtype)}"
    if turn.prompt_ids.ndim != 1 or not len(turn.prompt_ids):
        yield f"prompt_ids has the shape {turn.prompt_ids.shape}"
    if done.kv_versions.ndim != 2 or done.kv_versions.shape[1] != 2:
        yield f"kv_versions has the shape {done.kv_versions.shape}, not (runs, 2)"


def _logprobs(turn: Turn) -> Iterator[str]:
    logprobs = turn.completion.logprobs
    unfit = np.flatnonzero(~np.isfinite(logprobs) | (logprobs > ABOVE_ZERO))
    if len(unfit):
        yield f"token {unfit[0]} has the logprob {logprobs[unfit[0]]}"
    if turn.sampling.temperature == 0 and logprobs.any():
        yield "a greedy draw has logprobs other than 0"


def _versions(done: Completion, limits: Limits) -> Iterator[str]:
    versions = done.versions
    falls = np.flatnonzero(np.diff(versions) < 0)
    if len(falls):
        at = int(falls[0]) + 1
        yield f"token {at} is of version {versions[at]}, after one of version {versions[at - 1]}"
    if len(versions) and versions.min() < 0:
        yield f"a token is of version {versions.min()}, before the first weights"
    newest = limits.newest_version
    if newest is not None and len(versions) and versions.max() > newest:
        yield f"a token is of version {versions.max()}, but the run has reached {newest}"


def _kv_versions(turn: Turn, limits: Limits) -> Iterator[str]:
    done, runs = turn.completion, turn.completion.kv_versions
    num_prompt, num_tokens = len(turn.prompt_ids), turn.completion.num_tokens
    wanted = num_prompt + num_tokens - 1 if num_tokens else 0
    if (runs[:, 1] <= 0).any() or int(runs[:, 1].sum()) != wanted:
        yield f"they cover {int(runs[:, 1].sum())} rows of keys and values, not {wanted}"
        return
    if (np.diff(runs[:, 0]) < 0).any():
        yield "a row was written by older weights than a row before it"
    newest = limits.newest_version
    if newest is not None and len(runs) and runs[:, 0].max() > newest:
        yield f"a row was written by version {runs[:, 0].max()}, but the run has reached {newest}"
    if num_tokens:
        # The pass that drew a token wrote the row before it; only a later pass can have written it again.
        written_by = np.repeat(runs[:, 0], runs[:, 1])[num_prompt - 1 :]
        older = np.flatnonzero(written_by < done.versions)
        if len(older):
            at = int(older[0])
            yield f"token {at} is of version {done.versions[at]}, its row before of {written_by[at]}"


def _vocabulary(turn: Turn, limits: Limits) -> Iterator[str]:
    for name, ids in (("prompt", turn.prompt_ids), ("completion", turn.completion.token_ids)):
        if not len(ids):
            continue
        if ids.min() < 0 or (limits.vocab_size is not None and ids.max() >= limits.vocab_size):
            yield f"the {name} holds ids {ids.min()} to {ids.max()}, the vocabulary has {limits.vocab_size}"


def _mask(turn: Turn, limits: Limits) -> Iterator[str]:
    mask, sampling = turn.completion.sampling_mask, turn.sampling
    if mask is None:
        if sampling.truncates and turn.completion.num_tokens:
            yield "top-k, top-p or min-p cut the distribution, but no kept sets are recorded"
        return
    wrong = masks.fault(mask, turn.completion.token_ids, vocab_size=limits.vocab_size)
    if wrong is not None:
        yield wrong
        return
    if not sampling.truncates:
        yield "kept sets are recorded of a distribution that was not cut"
    row, count = masks.widest_row(mask)
    if sampling.top_k and count > sampling.top_k:
        yield f"row {row} holds {count} ids, top_k is {sampling.top_k}"


def _finish(turn: Turn, limits: Limits) -> Iterator[str]:
    done, sampling, reason = turn.completion, turn.sampling, turn.completion.finish_reason
    num_tokens = done.num_tokens
    stops = np.flatnonzero(np.isin(done.token_ids, np.array(sampling.stop_ids, dtype=np.int64)))
    ends_with_stop = bool(len(stops)) and int(stops[-1]) == num_tokens - 1
    if len(stops) and int(stops[0]) < num_tokens - 1:
        yield f"token {stops[0]} is a stop id, but {num_tokens - 1 - int(stops[0])} tokens follow it"
    if num_tokens > sampling.max_tokens:
        yield f"it has {num_tokens} tokens, max_tokens is {sampling.max_tokens}"
    if reason == "abort" and not limits.may_give_up:
        yield "a finished turn says abort, which means unfinished"
    elif reason == "stop" and not ends_with_stop:
        yield "it says stop, but does not end with a stop id"
    elif reason == "length" and ends_with_stop:
        yield "it says length, but ends with a stop id"
    elif reason == "length" and num_tokens < sampling.max_tokens:
        whole, context = len(turn.prompt_ids) + num_tokens, limits.context_tokens
        if context is not None and whole < context:
            yield (
                f"it says length at {num_tokens} of {sampling.max_tokens} tokens and {whole} of a context of "
                f"{context}"
            )


def _routes(turn: Turn, routing: Routing, limits: Limits) -> Iterator[str]:
    experts_NMK, recorded = routing.experts, routing.recorded
    num_prompt, num_tokens = len(turn.prompt_ids), turn.completion.num_tokens
    if experts_NMK.ndim != 3 or experts_NMK.dtype not in (np.uint8, np.uint16):
        yield f"experts are {experts_NMK.dtype} of shape {experts_NMK.shape}, not uint8 or uint16 [N, M, K]"
        return
    # An engine records the sampled tokens alone, or the prompt before them too.
    if recorded.dtype != bool or recorded.shape not in ((num_tokens,), (num_prompt + num_tokens,)):
        yield f"recorded is {recorded.dtype} of shape {recorded.shape}, for {num_prompt} + {num_tokens} tokens"
        return
    num_rows, num_layers, per_token = experts_NMK.shape
    if int(recorded.sum()) != num_rows:
        yield f"{int(recorded.sum())} tokens are marked as recorded, but there are {num_rows} rows"
    if len(recorded) and recorded[-1]:
        yield "the last sampled token has a row, though it never went through the model"
    if limits.experts_per_token is not None and per_token != limits.experts_per_token:
        yield f"{per_token} experts a token, the model has {limits.experts_per_token}"
    if limits.routed_layers is not None and num_layers != limits.routed_layers:
        yield f"experts of {num_layers} layers, the model has {limits.routed_layers} that route"
    if limits.num_experts is not None and experts_NMK.size and experts_NMK.max() >= limits.num_experts:
        yield f"expert {experts_NMK.max()} is named, the model has {limits.num_experts}"
    doubled = (np.diff(np.sort(experts_NMK, axis=-1), axis=-1) == 0).any(axis=(1, 2))
    if doubled.any():
        yield f"row {int(doubled.argmax())} names an expert twice"
