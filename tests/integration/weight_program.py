"""Ends of a weight transport as processes of their own, for tests that kill them.

    weight_program.py CHECKPOINT END      is one itself, talking through its input and output
    weight_program.py CHECKPOINT          starts ends

Each line of input is then an end to start: the two pipes it talks through, and what it is. The answer is its process
id. Ends are forked, since importing what they need takes a hundred times as long as an update.

    sender WAY BUNDLE PLACE     answers: publish V | whole | retire V
    engine WAY BUNDLE           answers: apply MANIFEST | look

One line is answered by one line: a manifest as hex, or ``error`` and a sentence. An engine samples all the time, so
that updates reach it between two passes. ``look`` tells what it computes with: its version, the digest of its
weights as they lie in memory, and the log-probabilities of some tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
from weight_tools import LORA, WAYS, digest_of, make_engine, publisher_of, request, sender_for

from headrace.errors import WeightSyncError
from headrace.types import WeightManifest
from headrace.wire import decode, encode

PROBE = np.arange(1, 30, dtype=np.int32)


def say(line: str) -> None:
    print(line, flush=True)


async def send(checkpoint: Path, way: str, bundle: str, place: str) -> None:
    sender = sender_for(WAYS[way].transport, bundle, Path(place), deadline_s=3.0)
    publisher = publisher_of(bundle, checkpoint, sender, device=WAYS[way].trainer)
    say("ready")
    for line in sys.stdin:
        order, _, version = line.strip().partition(" ")
        if order == "retire":
            await publisher.retire(int(version))
            say("retired")
        else:
            made = publisher.publish(int(version)) if order == "publish" else publisher.publish_whole()
            say(encode(await made).hex())


async def serve(checkpoint: Path, way: str, bundle: str) -> None:
    lora = LORA if bundle == "adapter" else None
    engine = make_engine(checkpoint, device=WAYS[way].engine, lora=lora)
    policy = lora.policy if lora else "policy"
    sampling: asyncio.Task[None] | None = None

    async def sample() -> None:
        for number in itertools.count():
            await engine.generate(request(f"request-{number}", policy=policy))

    say("ready")
    while line := await asyncio.to_thread(sys.stdin.readline):
        order, _, frame = line.strip().partition(" ")
        if order == "apply":
            manifest: WeightManifest = decode(bytes.fromhex(frame))
            try:
                say(f"applied {await engine.apply(manifest)}")
            except WeightSyncError as error:
                say(f"error {error}")
            else:
                sampling = sampling or asyncio.create_task(sample())
        else:
            (scored,) = await engine.score([PROBE], policy=policy)
            version = (await engine.status()).version
            weights = engine._core.weights(policy=policy if lora else None)
            say(json.dumps([version, digest_of(weights), scored.tolist()]))
    if sampling is not None:
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling
    await engine.close()


def run(checkpoint: Path, role: str, way: str, *rest: str) -> None:
    if role == "sender":
        asyncio.run(send(checkpoint, way, *rest))
        return
    with WAYS[way].entered():
        asyncio.run(serve(checkpoint, way, *rest))


def become(checkpoint: Path, orders: str, answers: str, *what: str) -> None:
    """Turn a freshly forked process into an end; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for path, mode, number in ((orders, os.O_RDONLY, 0), (answers, os.O_WRONLY, 1)):
            os.dup2(os.open(path, mode), number)
        run(checkpoint, *what)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def start_others(checkpoint: Path) -> None:
    # For what they import.
    made = make_engine(checkpoint), publisher_of("adapter", checkpoint, None)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead need no burial
    say("ready")
    while order := os.read(0, 1 << 16):
        pid = os.fork()
        if pid == 0:
            become(checkpoint, *json.loads(order))
        say(str(pid))
    del made


if __name__ == "__main__":
    path, *what = sys.argv[1:]
    if what:
        run(Path(path), *what)
    else:
        start_others(Path(path))
