"""The arithmetic and the bookkeeping of the comparison; the runs themselves are `headrace bench trl`."""

from __future__ import annotations

import pytest
from rich.console import Console

from headrace.bench import against_trl as bench
from headrace.errors import ConfigError, InvariantError


def record(times: list[float], *, num_samples: int = bench.SAMPLES_PER_STEP) -> bench.Record:
    return bench.Record(
        times=times,
        num_samples=[num_samples] * len(times),
        num_tokens=[num_samples * (step + 1) for step in range(len(times))],
        rewards=[step / 10 for step in range(len(times))],
    )


def runs(*rates: float) -> dict[str, list[dict[str, float]]]:
    """Three runs of every case around the given rate, one of them far off."""
    return {
        case.name: [
            {"samples_per_s": rate * factor, "tokens_per_sample": 16.0, "reward": 0.5}
            for factor in (1.0, 0.1, 1.01)
        ]
        for case, rate in zip(bench.CASES, rates, strict=True)
    }


def test_a_rate_counts_only_what_lies_between_its_two_steps() -> None:
    figures = bench.rate(record([0.0, 100.0, 101.0, 103.0, 1000.0]), first=2, last=4)
    assert figures["samples_per_s"] == pytest.approx(2 * bench.SAMPLES_PER_STEP / 3.0)
    assert figures["tokens_per_sample"] == pytest.approx((3 + 4) / 2)
    assert figures["reward"] == pytest.approx((0.2 + 0.3) / 2)


def test_a_step_of_another_size_is_refused() -> None:
    with pytest.raises(InvariantError, match="trained 7 samples"):
        bench.rate(record([0.0, 1.0], num_samples=7), first=1, last=2)


@pytest.mark.parametrize(("first", "last"), [(1, 4), (0, 2), (2, 2)])
def test_a_window_without_its_steps_is_refused(first: int, last: int) -> None:
    with pytest.raises(InvariantError, match="were noted"):
        bench.rate(record([0.0, 1.0, 2.0]), first=first, last=last)


@pytest.mark.parametrize(("one", "two", "best"), [(100.0, 80.0, "1 thread"), (100.0, 160.0, "2 threads")])
def test_headrace_is_compared_with_the_better_of_trl(one: float, two: float, best: str) -> None:
    figures = bench.compare(runs(one, two, 320.0, 200.0))
    assert figures["best_trl"] == f"trl, {best}"
    assert figures["ratio"] == pytest.approx(320.0 / max(one, two))
    assert figures["ratio_synchronous"] == pytest.approx(200.0 / max(one, two))


def test_medians_keep_a_disturbed_run_out_and_show_it() -> None:
    case = bench.compare(runs(100.0, 50.0, 300.0, 200.0))["cases"][0]
    assert case["samples_per_s"] == pytest.approx(100.0)
    assert (case["lowest"], case["highest"]) == (pytest.approx(10.0), pytest.approx(101.0))


def test_every_case_takes_every_place_in_turn() -> None:
    orders = [bench.turns(bench.CASES, repeat) for repeat in range(len(bench.CASES))]
    assert all(sorted(order, key=bench.CASES.index) == list(bench.CASES) for order in orders)
    assert {order[0] for order in orders} == set(bench.CASES)
    assert bench.turns(bench.CASES, len(bench.CASES)) == list(bench.CASES)


def test_the_last_measured_step_ends_before_admission_does() -> None:
    assert max(bench.MAX_LAGS) < bench.COOL_DOWN_STEPS


@pytest.mark.parametrize("workload", bench.WORKLOADS.values(), ids=bench.WORKLOADS)
def test_tasks_are_words_with_their_reverse_that_fit(workload: bench.Workload) -> None:
    made = bench.tasks(2000, workload, seed=3)
    assert made == bench.tasks(2000, workload, seed=3) != bench.tasks(2000, workload, seed=4)
    assert all(row["prompt"] == row["answer"][::-1] + ">" for row in made)
    lengths = [len(row["answer"]) for row in made]
    assert (min(lengths), max(lengths)) == (workload.shortest, workload.longest)
    assert max(lengths) + 1 < workload.max_tokens


@pytest.mark.parametrize(
    ("completion", "reward"), [("abcd", 1.0), ("abxd", 0.75), ("abcdefgh", 0.5), ("ab", 0.5), ("", 0.0)]
)
def test_the_reward_is_the_share_of_letters_in_place(completion: str, reward: float) -> None:
    assert bench.share_right(completion, "abcd") == reward


def test_a_missing_package_names_the_extra() -> None:
    with pytest.raises(ConfigError, match=r"no_such_peer.*Headrace's extra bench"):
        bench.require(("rich", "no_such_peer"))
    bench.require(("rich",))


def test_the_table_shows_every_case_and_the_ratio() -> None:
    figures = {
        **bench.compare(runs(100.0, 80.0, 250.0, 150.0)),
        "workload": "even",
        "samples_per_step": bench.SAMPLES_PER_STEP,
        "num_cores": 2,
        "repeats": 3,
    }
    console = Console(width=120)
    with console.capture() as capture:
        console.print(bench.table(figures))
    text = capture.get()
    assert all(case.name in text for case in bench.CASES)
    assert "2.50 times" in text and "1.50 times" in text
