"""A small controller for tests that kill it: ``controller_program.py LOG_DIR``.

Starts two engines, a trainer and a scorer, publishes weights, keeps a request running, prints what it made
as one JSON line and waits for its end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from headrace.launch.local import LocalLauncher, RoleSpec
from headrace.types import Request, Sampling
from headrace.weights.shared_memory import create_segment_directory


async def main(log_dir: Path) -> None:
    directory = create_segment_directory()
    roles = [
        *(
            RoleSpec(name=f"engine-{i}", kind="engine", factory="toy_roles:engine", settings={"name": str(i)})
            for i in range(2)
        ),
        RoleSpec(
            name="trainer",
            kind="trainer",
            factory="toy_roles:trainer",
            settings={"directory": str(directory / "weights")},
        ),
        RoleSpec(name="scorer-0", kind="scorer", factory="toy_roles:scorer", settings={"scale": 1.0}),
    ]
    cluster = await LocalLauncher(roles, log_dir=log_dir, directory=directory, start_deadline_s=60).spawn()
    manifest = await cluster.trainer.publish(1)
    await cluster.engines[0].apply(manifest)
    request = Request(
        id="0/0/0",
        prompt_ids=np.array([0], dtype=np.int32),
        sampling=Sampling(max_tokens=10),
        seed=0,
    )
    running = asyncio.create_task(cluster.engines[0].generate(request))
    made = {"pids": dict(cluster.pids), "directory": str(directory), "segment": manifest.location}
    print(json.dumps(made), flush=True)
    await running


asyncio.run(main(Path(sys.argv[1])))
