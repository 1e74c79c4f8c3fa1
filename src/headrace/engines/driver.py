"""The built-in engine on an event loop: ``protocols.Engine`` over the synchronous core.

In: coroutine calls from any number of clients. Out: a future a request, progress callbacks, and the
four ways of taking new weights. One task runs the steps and yields to the loop between two of them, so
calls always land between two forward passes.

waits for                      unblocked by
run loop: work                 generate, apply, cancel_update, close
generate: its completion       run loop, abort, begin_update("abort"), a failed step
begin_update("drain"): none    run loop finishing the last started request, abort, a cancelled generate, close
started
close: an update being read    its receiver, whose own deadline ends it

If a step raises, every pending call gets that exception and so does every later one; if a progress callback raises,
its own request does. Nothing here has a deadline of its own: whoever awaits puts one on the wait.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from headrace.engines.policies import POLICY
from headrace.engines.torch_engine import TorchEngine
from headrace.errors import RoleError, WeightSyncError
from headrace.protocols import WeightReceiver
from headrace.timekeeping import TimeLedger
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

T = TypeVar("T")
ProgressCallback = Callable[[Completion], None]

_QUIET_S = 0.1
"""Without work for so long, an engine has time for what nobody waits for."""


class Pace:
    """So many in a second, evenly."""

    def __init__(self, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._then, self._left = clock(), 0.0

    def allowed(self) -> int | None:
        """How many may follow now; None: any number. What is not used within a second is lost."""
        if math.isinf(self._per_s):
            return None
        now = self._clock()
        self._left = min(self._left + (now - self._then) * self._per_s, self._per_s)
        self._then = now
        return int(self._left)

    def spend(self, count: int) -> None:
        self._left -= count


class EngineDriver:
    """Serves one ``TorchEngine`` to the event loop it was first used on."""

    def __init__(
        self,
        core: TorchEngine,
        receiver: WeightReceiver,
        *,
        ledger: TimeLedger,
        name: str = "engine-0",
        progress_tokens: int = 32,
        reports_per_s: float = math.inf,
        threaded: bool = False,
    ) -> None:
        """``ledger`` is the one the core was given. A request with a callback is reported every
        ``progress_tokens`` sampled tokens, and all together no more than ``reports_per_s`` times: whoever hears
        them must be able to keep up, or completions wait behind them. ``threaded`` reads updates beside the
        passes; without it an update lands at once, after the same pass in every run."""
        self.name = name
        self._core = core
        self._receiver = receiver
        self._ledger = ledger
        self._progress_tokens = progress_tokens
        self._pace = Pace(reports_per_s)
        self._threaded = threaded
        self._futures: dict[str, asyncio.Future[Completion]] = {}
        self._callbacks: dict[str, ProgressCallback] = {}
        self._applying = asyncio.Lock()
        self._frozen = False
        self._closed = False
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        ledger.switch("idle-no-work")

    async def generate(self, request: Request, on_progress: ProgressCallback | None = None) -> Completion:
        self._ensure_alive()
        self._core.submit(request)
        future = asyncio.get_running_loop().create_future()
        self._futures[request.id] = future
        if on_progress is not None:
            self._callbacks[request.id] = on_progress
        self._start()
        try:
            return await future
        finally:
            # A cancelled caller leaves no request behind; after any other end there is none to abort.
            if self._futures.get(request.id) is future:
                self._forget(request.id)
                self._core.abort([request.id])
                self._notice_drained()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._resolve(self._core.abort(request_ids))
        self._notice_drained()

    async def release(self, request_ids: Sequence[str]) -> None:
        self._core.release(request_ids)

    async def score(
        self,
        token_ids: Sequence[np.ndarray],
        *,
        temperature: float = 1.0,
        policy: str = POLICY,
        masks: Sequence[SamplingMask | None] | None = None,
    ) -> list[np.ndarray]:
        self._ensure_alive()
        return self._core.score(token_ids, temperature, policy, masks)

    async def score_top(
        self, token_ids: Sequence[np.ndarray], *, top_k: int, temperature: float = 1.0, policy: str = POLICY
    ) -> list[TeacherScores]:
        self._ensure_alive()
        return self._core.score_top(token_ids, top_k, temperature, policy)

    async def begin_update(self, mode: InterruptMode) -> None:
        self._ensure_alive()
        if mode == "never":
            return
        self._core.hold(True)
        if mode == "abort":
            self._resolve(self._core.abort(self._core.started_ids()))
        elif mode == "drain":
            await self._drain()
        self._frozen = True
        self._ledger.switch("paused-for-weights")

    async def apply(self, manifest: WeightManifest) -> int:
        # One at a time: a call that its caller gave up on holds the lock until it has ended reading.
        async with self._applying:
            self._ensure_alive()
            if self._is_there(manifest):
                self._resume()
                return manifest.version
            if self._threaded:
                # Reading and verifying takes long and changes nothing: the engine goes on stepping, if it may.
                updates = await _in_thread(self._read, manifest)
                self._ensure_alive()
            else:
                updates = self._read(manifest)
            with self._ledger.activity("paused-for-weights"):
                if manifest.kind == "adapter":
                    self._core.apply_adapter(manifest.policy, manifest.version, updates)
                else:
                    self._core.apply(manifest.version, updates)
            self._resume()
            if self._threaded:
                # An answer lets the sender write over the bytes. In its own process one stream keeps the order.
                await _in_thread(self._core.wait_until_copied)
            return manifest.version

    async def cancel_update(self) -> None:
        self._resume()

    async def status(self) -> RoleStatus:
        counters = self._core.counters()
        return RoleStatus(
            role=self.name,
            version=self._core.version,
            progress=int(counters["generated_tokens"] + counters["prefill_tokens"]),
            seconds=self._ledger.seconds(),
            counters=counters,
        )

    async def close(self) -> None:
        """End the loop and every pending request, which gets what it has sampled."""
        if self._closed:
            return
        self._closed = True
        self._resolve(self._core.abort(list(self._futures)))
        self._wake.set()
        self._drained.set()
        if self._loop_task is not None:
            await self._loop_task
        async with self._applying:
            self._receiver.close()

    def _is_there(self, manifest: WeightManifest) -> bool:
        """Whether the update has landed already. Raises WeightSyncError when it cannot land here."""
        version = self._core.version
        if manifest.kind == "adapter":
            if not self._core.num_adapters:
                raise WeightSyncError(f"{self.name} serves no adapters; send it all weights")
            version = self._core.version_of(manifest.policy)
        if manifest.version < version:
            raise WeightSyncError(f"{self.name} has version {version}; {manifest.version} is older")
        if manifest.kind == "delta" and manifest.version != version != manifest.base_version:
            raise WeightSyncError(
                f"{self.name} has version {version} and the delta to {manifest.version} builds on "
                f"{manifest.base_version}; send a full bundle"
            )
        return manifest.kind == "delta" and manifest.version == version

    def _read(self, manifest: WeightManifest) -> list[TensorBlob | TensorPatch]:
        is_delta = manifest.kind == "delta"
        base = self._core.weights(slot.name for slot in manifest.slots) if is_delta else ()
        return list(self._receiver.receive(manifest, base))

    def _start(self) -> None:
        if self._loop_task is None:
            self._loop_task = asyncio.get_running_loop().create_task(self._run(), name=f"{self.name} steps")
        self._wake.set()

    def _resume(self) -> None:
        self._core.hold(False)
        self._frozen = False
        if self._ledger.current == "paused-for-weights":
            self._ledger.switch("idle-no-work")
        self._wake.set()

    async def _drain(self) -> None:
        self._drained.clear()
        self._wake.set()
        if self._core.num_started and not self._frozen:
            await self._drained.wait()
            self._ensure_alive()

    async def _run(self) -> None:
        try:
            while not self._closed:
                if self._frozen or not self._core.has_work:
                    self._wake.clear()
                    await self._rest()
                    continue
                self._resolve(self._core.step())
                self._report()
                self._notice_drained()
                await asyncio.sleep(0)
        except Exception as error:
            self._fail(error)

    async def _rest(self) -> None:
        """Until there is work; what was sampled last is on its way before anything is tidied."""
        try:
            async with asyncio.timeout(_QUIET_S):
                await self._wake.wait()
        except TimeoutError:
            self._core.tidy()
            await self._wake.wait()

    def _report(self) -> None:
        if self._callbacks:
            reports = self._core.progress(self._progress_tokens, most=self._pace.allowed())
            self._pace.spend(len(reports))
            for request_id, snapshot in reports:
                callback = self._callbacks.get(request_id)
                if callback is not None:
                    self._tell(callback, request_id, snapshot)

    def _tell(self, callback: ProgressCallback, request_id: str, snapshot: Completion) -> None:
        try:
            callback(snapshot)
        except Exception as error:
            future = self._forget(request_id)
            self._core.abort([request_id])
            if future is not None and not future.done():
                future.set_exception(error)

    def _resolve(self, finished: Sequence[tuple[str, Completion]]) -> None:
        for request_id, completion in finished:
            future = self._forget(request_id)
            if future is not None and not future.done():
                future.set_result(completion)

    def _forget(self, request_id: str) -> asyncio.Future[Completion] | None:
        self._callbacks.pop(request_id, None)
        return self._futures.pop(request_id, None)

    def _notice_drained(self) -> None:
        if not self._core.num_started:
            self._drained.set()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        for request_id in list(self._futures):
            future = self._forget(request_id)
            if future is not None and not future.done():
                future.set_exception(error)
        self._drained.set()

    def _ensure_alive(self) -> None:
        if self._failure is not None:
            raise RoleError(f"engine {self.name!r} stopped: {self._failure}.") from self._failure
        if self._closed:
            raise RoleError(f"engine {self.name!r} is closed; build a new one.")


async def _in_thread(work: Callable[..., T], *given: Any) -> T:
    """``work`` beside the loop. Whoever gives up on it leaves when it has ended: what it reads is not for two."""
    working = asyncio.ensure_future(asyncio.to_thread(work, *given))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        if not working.cancelled():
            # Looked at: nobody is left to be told.
            working.exception()
        raise
