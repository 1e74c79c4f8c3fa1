from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from headrace.observe.console import ConsoleMode, ConsoleSink, live_view
from headrace.observe.figures import ASCII_BLOCKS, duration, short, sparkline
from headrace.observe.progress import Progress
from headrace.observe.summary import summarise


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **changes: Any) -> dict[str, Any]:
    roles = [
        {
            "role": "engine-0",
            "version": number,
            "progress": 9,
            "seconds": {"decode": 6.0, "idle-no-work": 2.0},
        },
        {
            "role": "trainer",
            "version": number,
            "progress": 9,
            "seconds": {"optimizer": 9.0, "waiting-for-batch": 1.0},
        },
        {"role": "controller", "version": 0, "progress": 0, "seconds": {"working": 1.0, "waiting": 9.0}},
    ]
    return {
        "step": number,
        "version": number,
        "reward": number / 10,
        "lag_mean": 0.5,
        "lag_max": 2,
        "tokens": 640,
        "tokens_per_s": 12345.6,
        "goodput": 99.5,
        "metrics": {"loss": 0.1},
        "roles": roles,
        "attempts": {
            "generating": 8,
            "scoring": 2,
            "buffered": 4,
            "training": 0,
            "trained": 16,
            "dropped:stale": 1,
        },
        "tokens_by_state": {
            "generating": 30,
            "scoring": 9,
            "buffered": 20,
            "trained": 90,
            "dropped:stale": 3,
        },
        **changes,
    }


def console(width: int = 120, terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, record=True)


def feed(sink: Any, num_steps: int = 3) -> None:
    sink.emit("run.start", {"steps": num_steps, "run_dir": "runs/one"})
    for number in range(1, num_steps + 1):
        sink.emit("step", step(number))


def plain_output(events: list[tuple[str, dict[str, Any]]], mode: ConsoleMode = "plain") -> list[str]:
    screen = console()
    sink = ConsoleSink(mode, console=screen, clock=Clock())
    for event, fields in events:
        sink.emit(event, fields)
    sink.close()
    return screen.export_text().splitlines()


def test_plain_lines_align_under_their_header() -> None:
    lines = plain_output(
        [("run.start", {"steps": 300, "run_dir": ""}), ("step", step(7)), ("step", step(123))]
    )
    header, first, second = lines
    assert second.split() == [
        *("0.0", "s", "123/300", "12.300", "0.50/2", "12.3k", "99.5", "10", "4"),
        *("engine-0", "25%", "trainer", "10%"),
    ]
    for name, cell in (("step", "7/300"), ("reward", "0.700"), ("tokens/s", "12.3k"), ("buffer", " 4")):
        assert header.index(name) + len(name) == first.index(cell) + len(cell)
    assert header.index("idle") == first.index("engine-0") == second.index("engine-0")


@pytest.mark.parametrize("mode", ["plain", "live"])
def test_a_skipped_update_is_said_under_its_step(mode: ConsoleMode) -> None:
    lines = plain_output([("step", step(1)), ("step", step(2, skipped="the loss is not finite"))], mode)
    assert sum("warning: step 2 was skipped: the loss is not finite" in line for line in lines) == 1


def test_plain_header_comes_back_every_twenty_steps() -> None:
    lines = plain_output([("step", step(n)) for n in range(1, 42)])
    assert [i for i, line in enumerate(lines) if "reward" in line] == [0, 21, 42]


def test_phases_are_thinned_off_a_terminal() -> None:
    screen, clock = console(), Clock()
    sink = ConsoleSink("plain", console=screen, clock=clock)
    for i in range(12):
        sink.emit("phase", {"text": f"warm start {i}/12"})
        clock.now += 1.0
    sink.emit("phase", {"text": "loading model"})
    assert screen.export_text().splitlines() == [
        "warm start 0/12",
        "warm start 5/12",
        "warm start 10/12",
        "loading model",
    ]


def test_warnings_and_the_first_drop_of_each_reason_are_said() -> None:
    drop = {"reason": "failed", "group": 3, "detail": "reward [bold] raised"}
    lines = plain_output(
        [
            ("drop", drop),
            ("drop", {**drop, "group": 4}),
            ("drop", {"reason": "stale", "group": 5, "detail": ""}),
            ("warning", {"text": "careful"}),
            ("eval", {"step": 4, "accuracy": 0.25}),
        ]
    )
    assert lines == [
        "dropped group 3: failed (reward [bold] raised)",
        "dropped group 5: stale",
        "warning: careful",
        "evaluation: step 4, accuracy 0.250",
    ]


def test_off_prints_nothing_and_auto_is_plain_off_a_terminal() -> None:
    events = [("step", step(1)), ("run.end", {})]
    assert plain_output(events, "off") == []
    assert plain_output(events, "auto") == plain_output(events, "plain") != []


def test_live_view_shows_the_whole_state() -> None:
    progress = Progress(clock=Clock())
    feed(progress)
    progress.emit("drop", {"reason": "stale", "group": 1, "detail": ""})
    screen = console(width=80)
    screen.print(live_view(progress, blocks=ASCII_BLOCKS))
    shown = screen.export_text()
    for words in (
        "3/3",
        "0.300  _+@",
        "0.50 mean, 2 max",
        "12.3k tokens/s, goodput 99.5 per device-second",
        "engine-0  25%  trainer  10%",
        "generating 8  scoring 2  buffered 4  training 0",
        "stale 1",
        "dropped group 1: stale",
    ):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_live_mode_draws_while_waiting_and_ends_with_the_summary() -> None:
    screen = console(terminal=True)
    sink = ConsoleSink("live", console=screen, clock=Clock())
    sink.emit("run.start", {"steps": 3, "run_dir": "runs/one"})
    sink.emit("phase", {"text": "loading model"})
    waiting = console()
    waiting.print(live_view(sink.progress))
    assert "loading model" in waiting.export_text()
    feed(sink)
    sink.emit("run.end", {})
    sink.close()
    assert "trainer-bound" in screen.export_text()


def test_summary_tables_add_up_and_line_up() -> None:
    progress = Progress(clock=Clock())
    feed(progress)
    summary = summarise(progress)
    lines = summary.as_text().splitlines()
    state = lines.index(next(line for line in lines if line.startswith("state")))
    table = lines[state : lines.index("", state)]
    assert len({len(line) for line in table}) == 1
    assert table[-1].split() == ["total", "31", "100.0%", "152", "100.0%"]
    assert [line.split()[0] for line in table[2:-1]] == [
        "trained",
        "buffered",
        "scoring",
        "generating",
        "dropped:",
    ]
    assert sum(int(line.split()[-4]) for line in table[2:-1]) == 31
    assert "training " not in "\n".join(table)
    assert any(line.split() == ["engine-0", "decode", "6.0", "75.0%"] for line in lines)
    assert lines[0] == "3 steps in 0.0 s, reward 0.100 -> 0.300 (first and last step)"
    assert lines[-1] == "run      runs/one"
    assert lines[-2].startswith("verdict  trainer-bound: engines idle 25%, trainer idle 10%")


def test_summary_is_the_same_in_rich_and_as_text() -> None:
    progress = Progress(clock=Clock())
    feed(progress, 30)
    screen = console(width=200)
    screen.print(summarise(progress))
    rules = {"-"}
    text = [line.split() for line in summarise(progress).as_text().splitlines() if set(line) != rules]
    assert [line.split() for line in screen.export_text().splitlines()] == text


def test_summary_as_dict_is_json_and_counts_goodput_of_this_run_only() -> None:
    progress = Progress(clock=Clock())
    progress.emit("run.start", {"steps": 30, "run_dir": "runs/one", "tokens_by_state": {"trained": 54}})
    for number in range(1, 31):
        progress.emit("step", step(number))
    summary = json.loads(json.dumps(summarise(progress).as_dict()))
    assert summary["goodput"] == pytest.approx((90 - 54) / 18)
    assert summary["attempts_total"] == 31 and summary["tokens_total"] == 152 - 54
    assert sum(summary["run_tokens"].values()) == 152
    assert summary["reward_window"] == 3
    assert (summary["reward_first"], summary["reward_last"]) == (pytest.approx(0.2), pytest.approx(2.9))
    assert summary["shares"]["engine-0"] == {"decode": 75.0, "idle-no-work": 25.0}
    assert summary["verdict"]["bottleneck"] == "trainer"


def resumed(*steps: int) -> Progress:
    """A run that goes on from step 42, and then takes ``steps``."""
    progress = Progress(clock=Clock())
    ended = {"trained": 10, "dropped:stale": 1}
    books = {"attempts": {"generating": 5, **ended}, "tokens_by_state": {"generating": 7, "trained": 40}}
    counts = {"missing_scores": {"process: late": 2}, "asked_again": {"process: dead": 1}, "given_up": 3}
    progress.emit("run.start", {"steps": 45, "run_dir": "runs/one", "step": 42, **books, **counts})
    later = {"missing_scores": {"process: late": 2, "process: dead": 4}, "asked_again": {"process: dead": 1}}
    for number in steps:
        progress.emit("step", step(number, **later, given_up=5, length_bias=0.9))
    return progress


def test_summary_of_a_resumed_run_is_of_the_call_alone() -> None:
    summary = summarise(resumed(43, 44, 45))
    assert summary.headline().startswith("3 steps (43 to 45) in 0.0 s")
    assert (summary.num_steps, summary.step) == (3, 45)
    # Live attempts are those there are; of the ended ones, what had ended before is left out.
    attempts = {state: n for state, n in summary.attempts.items() if n}
    assert attempts == {"trained": 6, "buffered": 4, "scoring": 2, "generating": 8}
    assert summary.tokens["trained"] == 90 - 40
    assert summary.run_attempts["trained"] == 16 and summary.run_attempts["dropped:stale"] == 1
    assert (summary.missing_scores, summary.asked_again) == ({"process: dead": 4}, {})
    assert summary.num_given_up == 2
    lines = summary.as_text().splitlines()
    assert "overall  45 steps; 31 attempts, of which 16 were trained" in lines
    assert any(line.startswith("lengths") and line.endswith("ended, in the whole run") for line in lines)


def test_summary_of_a_run_that_was_not_resumed_has_nothing_overall() -> None:
    progress = Progress(clock=Clock())
    feed(progress)
    assert "overall" not in summarise(progress).as_text()


@pytest.mark.parametrize(
    ("steps", "text"), [((43,), "1 step (43) in 0.0 s"), ((), "0 steps (at step 42) in 0.0 s")]
)
def test_headline_of_a_resumed_run_that_took_few_steps(steps: tuple[int, ...], text: str) -> None:
    assert summarise(resumed(*steps)).headline().startswith(text)


def test_the_verdict_of_a_resumed_run_is_not_about_what_was_dropped_before() -> None:
    progress = Progress(clock=Clock())
    progress.emit("run.start", {"step": 42, "tokens_by_state": {"trained": 50, "dropped:stale": 50}})
    progress.emit("step", step(43, tokens_by_state={"trained": 90, "dropped:stale": 50}))
    assert "dropped" not in summarise(progress).verdict.text


def test_steps_trained_again_from_the_journal_are_counted_where_no_other_follows() -> None:
    progress = resumed()
    progress.emit("run.end", {"step": 44})
    assert summarise(progress).headline() == "2 steps (43 to 44) in 0.0 s"


def test_live_view_of_a_resumed_run_shows_its_step_before_the_first_new_one() -> None:
    screen = console(width=80)
    screen.print(live_view(resumed(), blocks=ASCII_BLOCKS))
    shown = screen.export_text()
    assert "42/45" in shown and "lag" not in shown


def test_summary_says_how_far_scoring_stayed_out_of_the_way() -> None:
    progress = Progress(clock=Clock())
    feed(progress)
    assert "hidden behind" not in summarise(progress).as_text()
    seconds = {"scoring-hidden": 9.5, "scoring-exposed": 0.5, "idle-no-work": 10.0}
    role = {"role": "scoring", "version": 0, "progress": 0, "seconds": seconds, "counters": {}}
    progress.emit(
        "run.end",
        {
            "roles": [role],
            "missing_scores": {"process: late": 3},
            "asked_again": {"process: dead": 4},
            "given_up": 2,
        },
    )
    lines = summarise(progress).as_text().splitlines()
    assert (
        "scoring  95.0% of 10.0 s hidden behind generation; 2 attempts given up early; "
        "4 questions put again (process: dead); 3 scores missing (process: late)"
    ) in lines


def test_summary_says_whether_branches_found_what_they_left() -> None:
    progress = Progress(clock=Clock())
    feed(progress)
    assert "branches" not in summarise(progress).as_text()
    counters = {"forks": 8, "forked_tokens": 1200, "forks_stale": 4, "forks_freed": 1}
    role = {"version": 0, "progress": 0, "seconds": {"decode": 1.0}, "counters": counters}
    progress.emit("run.end", {"roles": [{"role": "engine-0", **role}, {"role": "engine-1", **role}]})
    assert (
        "branches 16 from live blocks, 2,400 tokens not prefilled; 8 prefilled, weights had changed; "
        "2 prefilled, blocks were freed"
    ) in summarise(progress).as_text().splitlines()


def test_summary_of_a_run_that_never_stepped() -> None:
    text = summarise(Progress(clock=Clock())).as_text()
    assert text.splitlines()[0] == "0 steps in 0.0 s"
    assert "verdict  no verdict: no new step was taken" in text


def test_roles_that_only_waited_for_a_first_step_are_not_judged() -> None:
    progress = Progress(clock=Clock())
    progress.emit("run.end", {"roles": step(1)["roles"]})
    assert summarise(progress).verdict.bottleneck == "unknown"


def test_last_books_replace_those_of_the_last_step() -> None:
    clock = Clock()
    progress = Progress(clock=clock)
    feed(progress)
    clock.now = 5.0
    progress.emit("run.end", {"attempts": {"trained": 20}, "tokens_by_state": {"trained": 100}})
    clock.now = 50.0
    summary = summarise(progress)
    assert (summary.attempts, summary.tokens, summary.elapsed_s) == ({"trained": 20}, {"trained": 100}, 5.0)


def test_steps_without_a_reward_keep_the_last_one() -> None:
    lines = plain_output([("step", step(1, reward=None)), ("step", step(2)), ("step", step(3, reward=None))])
    assert [line.split()[3] for line in lines[1:]] == ["-", "0.200", "0.200"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.2"),
        (99.94, "99.9"),
        (999, "999"),
        (999.9, "1.0k"),
        (12345, "12.3k"),
        (123456, "123k"),
        (999_999, "1.0M"),
        (2.5e9, "2.5G"),
        (3e12, "3000G"),
    ],
)
def test_short_numbers(number: float, text: str) -> None:
    assert short(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(4.52, "4.5 s"), (62, "1:02"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([5.0, 5.0], blocks="abc") == "aa"
    assert sparkline([0.0, 1.0, 2.0], blocks="abc") == "abc"
    assert sparkline([float(i) for i in range(100)], width=4, blocks="abcd") == "abcd"


@pytest.mark.parametrize(("bias", "is_shown"), [(None, False), (1.0, False), (0.858, True)])
def test_length_bias_is_shown_where_there_is_one(bias, is_shown):
    progress = Progress()
    progress.emit("run.end", {"length_bias": bias})
    summary = summarise(progress)
    assert summary.as_dict()["length_bias"] == bias
    assert ("0.858 times the tokens" in summary.as_text()) == is_shown
