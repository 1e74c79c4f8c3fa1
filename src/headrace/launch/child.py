"""A role in a process of its own: ``python -m headrace.launch.child --socket ADDRESS --role engine-0``.

It connects to the controller, is told what to build by the first call (``start``: kind, factory as
``module:function``, settings), then answers that kind's methods and sends heartbeats with its status.

    ends when          the controller hangs up or dies; it is told to (``exit``); SIGTERM; an exception
                       that nobody handles, which goes to the log and to the controller as the last message
    ignores            SIGINT: Ctrl-C is the controller's to coordinate

However it ends, the role object is closed once, and the process is gone within a deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import inspect
import os
import signal
import sys
import threading
import traceback
from typing import Any

from headrace.errors import ConfigError, RoleError
from headrace.launch.channel import TOKEN_VARIABLE, Channel, connect
from headrace.launch.role_methods import METHODS
from headrace.launch.rpc import Note, Server
from headrace.timekeeping import TimeLedger
from headrace.types import RoleStatus

EXIT_DEADLINE_S = 20.0
EXIT_TERMINATED = 128 + signal.SIGTERM
EXIT_UNHANDLED = 70


class RoleHost:
    """Builds the role the controller asks for, and answers for it."""

    def __init__(self, name: str, channel: Channel) -> None:
        self._name = name
        self._channel = channel
        self._role: Any = None
        self._kind = ""
        self._close: asyncio.Task[None] | None = None
        self._heartbeat: asyncio.Task[None] | None = None
        self._calls = CallMeter()
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def dispatch(self, method: str, args: list[Any], note: Note | None) -> Any:
        if method == "start":
            return await self._start(*args)
        if method == "close":
            return await self.close()
        if method == "exit":
            return self.end(0)
        answer = METHODS.get(self._kind, {}).get(method)
        if answer is None:
            raise RoleError(
                f"{self._name} has no method {method!r}; start a {self._kind or 'role'} that has it"
            )
        if self._kind != "scorer":
            return await answer(self._role, args, note)
        with self._calls:
            return await answer(self._role, args, note)

    async def _start(
        self,
        kind: str,
        factory: str,
        settings: dict[str, Any],
        import_path: list[str],
        num_threads: int,
        heartbeat_s: float,
    ) -> None:
        # What the controller can import, the role can: a user's module beside the script that was run.
        sys.path.extend(entry for entry in import_path if entry not in sys.path)
        self._role = await build_role(factory, settings, num_threads=num_threads)
        self._kind = kind
        # What was imported and built lives as long as the process: the collector need not walk it again.
        gc.freeze()
        self._calls.ready()
        self._heartbeat = asyncio.create_task(self._send_heartbeats(heartbeat_s), name="heartbeat")
        self._heartbeat.add_done_callback(self._check_heartbeat)

    async def _send_heartbeats(self, every_s: float) -> None:
        while True:
            self._channel.post(["event", "heartbeat", await self._status()])
            await asyncio.sleep(every_s)

    async def _status(self) -> RoleStatus:
        if self._kind != "scorer":
            return await self._role.status()
        return RoleStatus(
            role=self._name,
            version=0,
            progress=self._calls.num_done,
            seconds=self._calls.ledger.seconds(),
        )

    def _check_heartbeat(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.fail(task.exception())

    def end(self, exit_code: int) -> None:
        if not self.exit_code.done():
            self.exit_code.set_result(exit_code)

    def fail(self, error: BaseException | None) -> None:
        """An exception nobody handles: calls may wait for what will never come, so the process must end."""
        self.report(error)
        self.end(EXIT_UNHANDLED)

    def report(self, error: BaseException | None) -> None:
        text = "".join(traceback.format_exception(error))
        print(text, file=sys.stderr, flush=True)
        self._channel.post(["event", "unhandled", text])

    async def close(self) -> None:
        """Close the role, once, whoever asks first."""
        if self._close is None:
            self._close = asyncio.create_task(self._close_role(), name="close")
        await self._close

    async def _close_role(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._role is not None:
            await self._role.close()


class CallMeter:
    """What a role without a status of its own did with its time."""

    def __init__(self) -> None:
        self.ledger = TimeLedger(("loading", "working", "idle-no-work"))
        self.num_done = 0
        self._num_running = 0

    def ready(self) -> None:
        self.ledger.switch("idle-no-work")

    def __enter__(self) -> None:
        self._num_running += 1
        self.ledger.switch("working")

    def __exit__(self, *_: object) -> None:
        self._num_running -= 1
        self.num_done += 1
        if self._num_running == 0:
            self.ledger.switch("idle-no-work")


async def build_role(factory: str, settings: dict[str, Any], *, num_threads: int) -> Any:
    """The object ``module:function`` makes of ``settings``."""
    module_name, _, function_name = factory.partition(":")
    if not function_name:
        raise ConfigError(f"factory {factory!r} must be written as module:function")
    module = importlib.import_module(module_name)
    _limit_torch(num_threads)
    if function_name not in vars(module):
        raise ConfigError(f"factory {factory!r}: {module_name} has no function {function_name!r}")
    role = vars(module)[function_name](settings)
    if inspect.isawaitable(role):
        role = await role
    _limit_torch(num_threads)
    return role


def _limit_torch(num_threads: int) -> None:
    """Only where the role brought torch along: this process need not have it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(num_threads)


async def serve(address: str, role: str, token: str) -> int:
    """One role's life; returns the exit code."""
    channel = await connect(address, role=role, token=token)
    host = RoleHost(role, channel)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, host.end, EXIT_TERMINATED)
    loop.set_exception_handler(lambda loop, context: _on_unhandled(loop, context, host))
    server = asyncio.create_task(Server(channel, host.dispatch).run(), name="calls")
    ends: set[asyncio.Future[Any]] = {server, host.exit_code}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    _exit_within(EXIT_DEADLINE_S)
    code = host.exit_code.result() if host.exit_code.done() else 0
    try:
        await host.close()
    except Exception as error:
        host.report(error)
        code = EXIT_UNHANDLED
    await channel.close()
    await server
    return code


def _on_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any], host: RoleHost) -> None:
    loop.default_exception_handler(context)
    if isinstance(context.get("exception"), Exception):
        host.fail(context["exception"])


def _exit_within(deadline_s: float) -> None:
    """A thread or a close that hangs must not keep the process."""
    timer = threading.Timer(deadline_s, os._exit, args=(EXIT_UNHANDLED,))
    timer.daemon = True
    timer.start()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one role of a Headrace cluster.")
    parser.add_argument("--socket", required=True, help="where the controller listens")
    parser.add_argument("--role", required=True, help="the role's name")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = asyncio.run(serve(options.socket, options.role, os.environ.pop(TOKEN_VARIABLE)))
    sys.exit(code)


if __name__ == "__main__":
    main()
