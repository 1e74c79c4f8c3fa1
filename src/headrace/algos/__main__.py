"""``python -m headrace.algos PAGE...``: write the generated tables of these pages anew."""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.algos.tables import fill

if __name__ == "__main__":
    for page in map(Path, sys.argv[1:]):
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")
