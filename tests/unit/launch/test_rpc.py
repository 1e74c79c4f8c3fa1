from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import wire
from headrace.errors import DeadlineError, ModelError, RoleError
from headrace.launch.channel import ChannelClosed, Listener, connect, open_channel
from headrace.launch.rpc import Caller, Dispatch, RemoteTraceback, Server


class Pair:
    """A caller and a server joined by a real socket."""

    def __init__(self, dispatch: Dispatch, directory: Path) -> None:
        self._dispatch = dispatch
        self._directory = directory
        self.events: list[tuple[str, Any]] = []

    async def __aenter__(self) -> Pair:
        self.listener = Listener()
        await self.listener.open(self._directory)
        arrival = self.listener.expect("role")
        self.far = await connect(self.listener.address, role="role", token=self.listener.token)
        self.serving = asyncio.create_task(Server(self.far, self._dispatch).run())
        self.caller = Caller(
            "role",
            await arrival,
            on_event=lambda name, value: self.events.append((name, value)),
            explain_end=self._explain,
        )
        return self

    async def _explain(self) -> str:
        return "role ended"

    async def __aexit__(self, *_: object) -> None:
        await self.caller.close()
        await self.serving
        await self.far.close()
        self.listener.close()


def run_pair(tmp_path: Path, dispatch: Dispatch, use: Callable[[Pair], Any]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), Pair(dispatch, tmp_path) as pair:
            await use(pair)

    asyncio.run(main())


async def echo(method: str, args: list[Any], note: Any) -> Any:
    return [method, *args]


def test_values_and_arrays_round_trip(tmp_path):
    async def use(pair: Pair) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        method, text, back = await pair.caller.call("hear", "text", array, deadline_s=10)
        assert (method, text) == ("hear", "text")
        np.testing.assert_array_equal(back, array)

    run_pair(tmp_path, echo, use)


def test_frames_of_many_megabytes_pass_both_ways(tmp_path):
    async def use(pair: Pair) -> None:
        array = np.random.default_rng(0).integers(0, 255, 20 << 20, dtype=np.uint8)
        _, back = await pair.caller.call("big", array, deadline_s=60)
        assert np.array_equal(back, array)

    run_pair(tmp_path, echo, use)


def test_the_other_end_begins_while_more_messages_of_a_turn_are_posted(tmp_path, monkeypatch):
    sizes, take = [], wire.FrameBuilder.take

    def counted(builder: wire.FrameBuilder) -> bytes:
        sizes.append(len(builder))
        return take(builder)

    monkeypatch.setattr(wire.FrameBuilder, "take", counted)

    async def use(pair: Pair) -> None:
        sizes.clear()
        for number in range(200):
            pair.far.post(["event", "number", number])
        assert sizes == [64, 64, 64]
        while len(pair.events) < 200:
            await asyncio.sleep(0)
        assert sizes == [64, 64, 64, 8]
        assert pair.events == [("number", number) for number in range(200)]

    run_pair(tmp_path, echo, use)


def test_long_socket_path_falls_back_to_loopback_tcp(tmp_path):
    directory = tmp_path / ("d" * 120)
    directory.mkdir()

    async def use(pair: Pair) -> None:
        assert pair.listener.address.startswith("tcp:")
        assert await pair.caller.call("hear", 1, deadline_s=10) == ["hear", 1]

    run_pair(directory, echo, use)


def test_calls_run_concurrently_and_may_finish_in_any_order(tmp_path):
    gates = {name: asyncio.Event() for name in "abc"}
    finished = []

    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        await gates[method].wait()
        finished.append(method)
        if method != "a":
            gates["b" if method == "c" else "a"].set()
        return method

    async def use(pair: Pair) -> None:
        calls = [asyncio.create_task(pair.caller.call(name, deadline_s=10)) for name in "abc"]
        gates["c"].set()
        assert await asyncio.gather(*calls) == ["a", "b", "c"]
        assert finished == ["c", "b", "a"]

    run_pair(tmp_path, dispatch, use)


def test_notes_arrive_in_order_before_the_result_and_from_threads_too(tmp_path):
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        note(1)
        worker = threading.Thread(target=note, args=(2,))
        worker.start()
        await asyncio.to_thread(worker.join)
        return "done"

    async def use(pair: Pair) -> None:
        notes: list[int] = []
        assert await pair.caller.call("work", deadline_s=10, on_note=notes.append) == "done"
        assert notes == [1, 2]

    run_pair(tmp_path, dispatch, use)


def test_no_note_function_without_a_listener(tmp_path):
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        return note is None

    async def use(pair: Pair) -> None:
        assert await pair.caller.call("work", deadline_s=10)

    run_pair(tmp_path, dispatch, use)


def test_an_error_in_the_note_listener_fails_the_call(tmp_path):
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        note(1)

    def refuse(value: int) -> None:
        raise KeyError(value)

    async def use(pair: Pair) -> None:
        with pytest.raises(KeyError):
            await pair.caller.call("work", deadline_s=10, on_note=refuse)

    run_pair(tmp_path, dispatch, use)


def test_events_need_no_call(tmp_path):
    async def use(pair: Pair) -> None:
        pair.far.post(["event", "heartbeat", 7])
        await pair.caller.call("sync", deadline_s=10)
        assert pair.events == [("heartbeat", 7)]

    run_pair(tmp_path, echo, use)


def test_known_errors_keep_their_class_and_message(tmp_path):
    class Special(ModelError):
        pass

    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        raise (Special if args else ModelError)("the model has no layers; choose another")

    async def use(pair: Pair) -> None:
        for args in ((), (1,)):
            with pytest.raises(ModelError, match=r"^the model has no layers; choose another$") as caught:
                await pair.caller.call("build", *args, deadline_s=10)
            assert isinstance(caught.value.__cause__, RemoteTraceback)
            assert "in dispatch" in str(caught.value.__cause__)

    run_pair(tmp_path, dispatch, use)


def test_foreign_errors_become_role_errors_with_the_remote_traceback(tmp_path):
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        return {}["missing"]

    async def use(pair: Pair) -> None:
        with pytest.raises(RoleError, match=r"role\.look raised KeyError: 'missing'") as caught:
            await pair.caller.call("look", deadline_s=10)
        assert 'return {}["missing"]' in str(caught.value.__cause__)

    run_pair(tmp_path, dispatch, use)


def test_a_result_the_wire_cannot_carry_is_an_error_of_the_call(tmp_path):
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        return object()

    async def use(pair: Pair) -> None:
        with pytest.raises(RoleError, match="object cannot cross a process boundary"):
            await pair.caller.call("odd", deadline_s=10)
        with pytest.raises(TypeError, match="object cannot cross a process boundary"):
            await pair.caller.call("odd", object(), deadline_s=10)

    run_pair(tmp_path, dispatch, use)


def stuck(cancelled: asyncio.Event) -> Dispatch:
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        if method == "hello":
            return "hello"
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    return dispatch


def test_deadline_names_role_method_and_time_and_cancels_the_work(tmp_path):
    cancelled = asyncio.Event()

    async def use(pair: Pair) -> None:
        with pytest.raises(DeadlineError, match=r"role did not answer 'stall' within 0\.05 s"):
            await pair.caller.call("stall", deadline_s=0.05)
        await cancelled.wait()
        assert await pair.caller.call("hello", deadline_s=10) == "hello"

    run_pair(tmp_path, stuck(cancelled), use)


def test_every_call_has_its_own_deadline_whatever_the_order(tmp_path):
    async def use(pair: Pair) -> None:
        times = {"slow": 0.06, "fast": 0.02, "middle": 0.04}
        calls = {name: asyncio.create_task(pair.caller.call(name, deadline_s=s)) for name, s in times.items()}
        patient = asyncio.create_task(pair.caller.call("patient", deadline_s=30))
        await asyncio.wait(calls.values())
        for name, call in calls.items():
            with pytest.raises(DeadlineError, match=f"{name!r} within {times[name]:g} s"):
                call.result()
        assert not patient.done()
        patient.cancel()

    run_pair(tmp_path, stuck(asyncio.Event()), use)


def test_cancelling_a_call_cancels_the_work(tmp_path):
    cancelled = asyncio.Event()

    async def use(pair: Pair) -> None:
        call = asyncio.create_task(pair.caller.call("stall", deadline_s=30))
        assert await pair.caller.call("hello", deadline_s=10) == "hello"
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await cancelled.wait()

    run_pair(tmp_path, stuck(cancelled), use)


def test_work_cancelled_by_the_role_itself_fails_the_call(tmp_path):
    async def dispatch(method: str, args: list[Any], note: Any) -> Any:
        raise asyncio.CancelledError

    async def use(pair: Pair) -> None:
        with pytest.raises(RoleError, match="CancelledError"):
            await pair.caller.call("work", deadline_s=10)

    run_pair(tmp_path, dispatch, use)


def test_end_of_the_channel_fails_every_pending_call_and_later_ones(tmp_path):
    cancelled = asyncio.Event()

    async def use(pair: Pair) -> None:
        calls = [asyncio.create_task(pair.caller.call("stall", deadline_s=30)) for _ in range(3)]
        assert await pair.caller.call("hello", deadline_s=10) == "hello"
        pair.far.abandon()
        for call in calls:
            with pytest.raises(RoleError, match=r"role ended \('stall' was under way\)"):
                await call
        with pytest.raises(RoleError, match="role ended"):
            await pair.caller.call("hello", deadline_s=10)
        assert cancelled.is_set()

    run_pair(tmp_path, stuck(cancelled), use)


@pytest.mark.parametrize("hello", [["hello", "role", "wrong"], ["hello", "stranger", ""], "x" * 10_000])
def test_a_stranger_is_hung_up_on(tmp_path, hello):
    async def main() -> None:
        listener = Listener()
        await listener.open(tmp_path)
        arrival = listener.expect("role")
        stranger = await open_channel(listener.address)
        stranger.post(hello)
        async with asyncio.timeout(10):
            with pytest.raises(ChannelClosed):
                await stranger.receive()
        assert not arrival.done()
        await stranger.close()
        listener.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "frame",
    [b"", b"x" * 100, wire.encode([["hello", "role", "\u00e9"]]), wire.encode(7)],
    ids=["nothing", "noise", "not-ascii", "no-list"],
)
def test_a_stranger_whose_bytes_mean_nothing_is_hung_up_on(tmp_path, frame):
    async def main() -> None:
        listener = Listener()
        await listener.open(tmp_path)
        reader, writer = await asyncio.open_unix_connection(listener.address.partition(":")[2])
        writer.write(len(frame).to_bytes(8, "little") + frame)
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()
        listener.close()

    asyncio.run(main())


def test_no_controller_at_the_address(tmp_path):
    with pytest.raises(RoleError, match="engine-0 found no controller at unix:"):
        asyncio.run(connect(f"unix:{tmp_path}/none", role="engine-0", token="x"))


def test_a_listener_that_closes_hangs_up_on_everyone_nobody_took_over(tmp_path):
    async def main() -> None:
        listener = Listener()
        await listener.open(tmp_path)
        arrival = listener.expect("engine-0")
        channel = await connect(listener.address, role="engine-0", token=listener.token)
        await asyncio.wait_for(arrival, 10)
        listener.close()
        with pytest.raises(ChannelClosed):
            await asyncio.wait_for(channel.receive(), 10)
        await channel.close()

    asyncio.run(main())
