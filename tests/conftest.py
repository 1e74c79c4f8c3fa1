"""Set before anything is imported: one thread, no network, and property tests that repeat exactly."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Torch asks for the name of every address it connects to; a name server that loses a question costs five seconds else.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

from importlib.metadata import version

from headrace.launch.role_process import torch_defaults

# Read when a process has its first group; tests have several on threads of one process.
os.environ.update({**torch_defaults(version("torch")), **os.environ})

import torch
from hypothesis import HealthCheck, settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if not torch.cuda.is_available():
    # Kernels are then interpreted; Triton asks once, when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomized: a failure seen once is seen again. No deadline: shared machines have slow moments.
settings.register_profile(
    "headrace", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("headrace")
