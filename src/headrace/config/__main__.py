"""``python -m headrace.config`` prints the reference of all settings (``docs/settings.md``)."""

from __future__ import annotations

from headrace.config.reference import render

if __name__ == "__main__":
    print(render(), end="")
