from __future__ import annotations

import asyncio
import json
import sysconfig

import pytest

from headrace.data.faults import MOST_TRACEBACKS, FirstFaults, in_words, place
from headrace.errors import RewardError


def caught(function, *args):
    with pytest.raises(BaseException) as info:
        function(*args)
    return info.value


def line_of(function, offset=1):
    return f"test_faults.py:{function.__code__.co_firstlineno + offset}"


def divides(text=""):
    return 1 / len(text)


def reads(text):
    return json.loads(text)


def calls(function):
    return function("a")


async def in_tasks():
    async def fails():
        raise KeyError("answer")

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())


def installed(source, name):
    """A function as it would be in a package that was installed."""
    names = {}
    file = f"{sysconfig.get_path('purelib')}/{name}.py"
    exec(compile(source, file, "exec"), names)
    return names["function"]


def test_an_error_is_told_with_the_line_it_was_raised_in():
    error = caught(divides)
    assert in_words(error) == f"ZeroDivisionError: division by zero ({line_of(divides)})"


def test_the_line_is_the_authors_own_where_a_library_raised():
    assert place(caught(reads, "no json")) == line_of(reads)
    broken = installed("def function(text):\n    return text / 0\n", "broken")
    assert place(caught(calls, broken)) == line_of(calls)


def test_an_installed_function_is_named_where_it_was_called():
    function = installed("import json\n\n\ndef function():\n    return json.loads('x')\n", "scores")
    error = caught(function)
    error.__traceback__ = error.__traceback__.tb_next
    assert place(error) == "scores.py:5"


def test_a_group_of_tasks_is_told_as_its_first_fault():
    said = in_words(caught(asyncio.run, in_tasks()))
    assert said == f"KeyError: 'answer' ({line_of(in_tasks, 2)})"


def test_sentences_stay_as_they_are_and_nothing_is_made_up():
    assert in_words(RewardError("reward 'exact' failed")) == "reward 'exact' failed"
    assert in_words(KeyError("x")) == "KeyError: 'x'"
    assert in_words(ValueError()) == "ValueError"


def test_the_first_fault_of_a_kind_is_told_whole():
    faults, outer = FirstFaults(), RewardError("reward 'divides' failed")
    outer.__cause__ = caught(divides)
    text = faults.traceback(outer)
    assert "return 1 / len(text)" in text and text.endswith("RewardError: reward 'divides' failed\n")
    assert faults.traceback(caught(divides)) == ""
    assert "return json.loads(text)" in faults.traceback(caught(reads, "no json"))


def test_what_headrace_found_by_itself_needs_no_traceback():
    assert FirstFaults().traceback(RewardError("returned 1 values for 2 completions")) == ""


def test_tracebacks_are_bounded():
    faults = FirstFaults()
    kinds = [type(f"Fault{i}", (Exception,), {}) for i in range(3 * MOST_TRACEBACKS)]
    assert sum(faults.traceback(kind()) != "" for kind in kinds) == MOST_TRACEBACKS
