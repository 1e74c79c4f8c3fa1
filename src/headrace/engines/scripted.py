"""An engine that follows a script: no model, no torch, time only as told. The public fake.

In: the same requests as any engine. Out: tokens that a ``Script`` chooses from (request, position), so
they do not depend on interruptions; versions, partial completions, the four interrupt modes and
weight updates behave as the protocol says. ``token_s`` is spent per token on the event loop's
clock: nothing on a real loop, simulated time on the virtual one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from headrace.data.completions import EMPTY, join
from headrace.errors import WeightSyncError
from headrace.protocols import WeightReceiver
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger
from headrace.types import (
    Completion,
    InterruptMode,
    Request,
    RoleStatus,
    SamplingMask,
    TeacherScores,
    TensorBlob,
    TensorPatch,
    WeightManifest,
)

Script = Callable[[Request], np.ndarray]
"""The whole completion (int32 [L]) that a request will be given."""


def hashed_script(*, mean_tokens: int = 8, vocab_size: int = 100) -> Script:
    """Tokens and a length that depend only on the request's seed."""

    def script(request: Request) -> np.ndarray:
        draw = np.random.default_rng(request.seed)
        length = min(1 + draw.geometric(1.0 / mean_tokens), request.sampling.max_tokens)
        return draw.integers(0, vocab_size, length).astype(np.int32)

    return script


class ScriptedEngine:
    def __init__(
        self,
        name: str = "engine-0",
        *,
        script: Script | None = None,
        receiver: WeightReceiver | None = None,
        token_s: float = 0.01,
        chunk_tokens: int = 4,
    ) -> None:
        """``receiver`` None: an update is only its version. Progress is reported every ``chunk_tokens``."""
        self.name = name
        self._script = script or hashed_script()
        self._receiver = receiver
        self._token_s = token_s
        self._chunk_tokens = chunk_tokens
        self._clock = asyncio.get_running_loop().time
        self._ledger = TimeLedger(ENGINE_ACTIVITIES, start="idle-no-work", clock=self._clock)
        self._version = -1
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._frozen = False
        self._weights: dict[str, TensorBlob] = {}
        self.digest = ""
        """Digest of the weights applied last."""
        self.num_tokens = 0

    async def generate(
        self, request: Request, on_progress: Callable[[Completion], None] | None = None
    ) -> Completion:
        await self._open.wait()
        self._enter(request.id)
        try:
            return await self._sample(request, on_progress)
        finally:
            self._leave(request.id)

    async def _sample(self, request: Request, on_progress: Callable[[Completion], None] | None) -> Completion:
        tokens = self._script(request)
        done = EMPTY if request.prefix is None else request.prefix
        while done.num_tokens < len(tokens):
            if request.id in self._aborted:
                return done
            chunk = tokens[done.num_tokens : done.num_tokens + self._chunk_tokens]
            await asyncio.sleep(self._token_s * len(chunk))
            if self._frozen:
                await self._open.wait()
            done = join(done, self._sampled(request, done, chunk))
            if on_progress is not None and done.num_tokens < len(tokens):
                on_progress(done)
        cut = done.num_tokens >= request.sampling.max_tokens
        return replace(done, finish_reason="length" if cut else "stop")

    def _sampled(self, request: Request, done: Completion, chunk: np.ndarray) -> Completion:
        self.num_tokens += len(chunk)
        rows = len(request.prompt_ids) + done.num_tokens + len(chunk) - 1
        return Completion(
            token_ids=chunk,
            logprobs=np.full(len(chunk), -1.0, np.float32),
            versions=np.full(len(chunk), self._version, np.int32),
            finish_reason="abort",
            kv_versions=np.array([[self._version, rows]], np.int32),
        )

    def _enter(self, request_id: str) -> None:
        self._running.add(request_id)
        self._quiet.clear()
        self._ledger.switch("decode")

    def _leave(self, request_id: str) -> None:
        self._running.discard(request_id)
        self._aborted.discard(request_id)
        if not self._running:
            self._quiet.set()
            if not self._frozen:
                self._ledger.switch("idle-no-work")

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted |= self._running.intersection(request_ids)

    async def score(
        self,
        token_ids: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        policy: str = "policy",
        masks: Sequence[SamplingMask | None] | None = None,
    ) -> list[np.ndarray]:
        return [np.where(np.arange(len(ids)) == 0, 0.0, -1.0).astype(np.float32) for ids in token_ids]

    async def score_top(
        self, token_ids: Sequence[np.ndarray], *, top_k: int, temperature: float = 1.0, policy: str = "policy"
    ) -> list[TeacherScores]:
        """The token itself with half of the probability, the ids after it with half of the rest each."""
        return [_halved(np.asarray(ids, dtype=np.int32), top_k) for ids in token_ids]

    async def begin_update(self, mode: InterruptMode) -> None:
        if mode == "never":
            return
        self._open.clear()
        if mode == "block":
            self._frozen = True
            self._ledger.switch("paused-for-weights")
        if mode == "abort":
            self._aborted |= self._running
        if mode in ("drain", "abort"):
            await self._quiet.wait()

    async def apply(self, manifest: WeightManifest) -> int:
        if manifest.version < self._version:
            raise WeightSyncError(f"{self.name} has version {self._version}; {manifest.version} is older")
        if self._receiver is not None:
            updates = list(self._receiver.receive(manifest, self._weights.values()))
            self._weights = {update.name: self._changed(update) for update in updates}
            digest = hashlib.blake2b(digest_size=16)
            for blob in self._weights.values():
                digest.update(blob.data.tobytes())
            self.digest = digest.hexdigest()
        self._version = manifest.version
        await self.cancel_update()
        return self._version

    def _changed(self, update: TensorBlob | TensorPatch) -> TensorBlob:
        """The tensor as the update leaves it."""
        if isinstance(update, TensorBlob):
            return replace(update, data=update.data.copy())
        data = self._weights[update.name].data.copy()
        data.view(update.bits.dtype)[update.places] = update.bits
        return replace(self._weights[update.name], data=data)

    async def cancel_update(self) -> None:
        self._frozen = False
        self._ledger.switch("decode" if self._running else "idle-no-work")
        self._open.set()

    async def status(self) -> RoleStatus:
        return RoleStatus(
            role=self.name,
            version=self._version,
            progress=self.num_tokens,
            seconds=self._ledger.seconds(),
            counters={"running": len(self._running), "generated_tokens": self.num_tokens},
        )

    async def close(self) -> None:
        self._open.set()


def _halved(token_ids: np.ndarray, top_k: int) -> TeacherScores:
    ranks = np.arange(top_k, dtype=np.int32)
    top_logprobs = np.tile(np.log(0.5) * (1 + ranks).astype(np.float32), (len(token_ids), 1))
    top_logprobs[:1] = -np.inf
    logprobs = np.where(np.arange(len(token_ids)) == 0, 0.0, np.log(0.5)).astype(np.float32)
    return TeacherScores(
        logprobs=logprobs, top_ids=token_ids[:, None] + ranks, top_logprobs=top_logprobs.astype(np.float32)
    )
