"""What code of others raised, in words that lead its author to the line.

In: an exception that came out of a reward function, a judge or an environment. Out: one line with the place in the
author's own files, and the whole traceback for the first fault of a kind alone: a function that fails once mostly fails
every time.
"""

from __future__ import annotations

import os
import sysconfig
import traceback

from headrace.errors import HeadraceError

MOST_TRACEBACKS = 8
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def in_words(error: BaseException) -> str:
    """``KeyError: 'answer' (rewards.py:4)``; errors of Headrace are sentences already."""
    if isinstance(error, HeadraceError):
        return str(error)
    error = _first(error)
    named = f"{type(error).__name__}: {error}".removesuffix(": ")
    where = place(error)
    return f"{named} ({where})" if where else named


def place(error: BaseException) -> str:
    """The last line of its author's own files that an error came through, as ``rewards.py:4``; empty: there is none."""
    frames = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(_first(error).__traceback__)]
    own = [frame for frame in frames if _is_own(frame[0])]
    # Of an installed function the line that Headrace called: what it uses in turn is installed too.
    installed = [frame for frame in frames if _is_installed(frame[0])]
    chosen = own[-1:] or installed[:1]
    return "".join(f"{os.path.basename(file)}:{line}" for file, line in chosen)


class FirstFaults:
    """Tracebacks, one for each kind of fault."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def traceback(self, error: BaseException) -> str:
        """Of the error and what caused it; empty: one like it was told, or nobody else's code was under way."""
        origin = _first(error)
        while origin.__cause__ is not None:
            origin = _first(origin.__cause__)
        kind = (type(origin).__name__, place(origin))
        is_told = kind in self._seen or len(self._seen) == MOST_TRACEBACKS
        if is_told or (isinstance(origin, HeadraceError) and not kind[1]):
            return ""
        self._seen.add(kind)
        return "".join(traceback.format_exception(error))


def _first(error: BaseException) -> BaseException:
    """What a group of tasks raised is what the first of them did."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _is_own(file: str) -> bool:
    """Neither ours nor Python's nor installed; what stands in no file has no line to look at."""
    known = _is_under(file, _PACKAGE) or _is_under(file, _STANDARD_LIBRARY) or _is_installed(file)
    return not known and not file.startswith("<")


def _is_installed(file: str) -> bool:
    is_package = "site-packages" in file or "dist-packages" in file
    return is_package and not _is_under(file, _PACKAGE)


def _is_under(file: str, directory: str) -> bool:
    return file.startswith(directory + os.sep)
