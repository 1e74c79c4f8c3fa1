"""Where compiled code is kept from one process to the next.

In: nothing. Out: variables of the environment that torch's compiler and Triton read, unless the user has set them.
Without them torch keeps its code where a restart of the machine clears it away, and Triton's is kept in one place by a
process that compiles layers and looked for in another by the next, whose layers come from the cache: it would compile
every kernel once more.
"""

from __future__ import annotations

import os
from pathlib import Path


def folder(name: str) -> str:
    """For what one compiler or library keeps."""
    return str(Path.home() / ".cache" / "headrace" / name)


def keep_compiled() -> None:
    """Before a process uses its first kernel."""
    compiled = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder("compiled"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(compiled) / "triton"))
