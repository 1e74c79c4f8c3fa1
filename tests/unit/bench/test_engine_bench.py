"""The engine bench runs, counts the same tokens on both sides and draws its table."""

from __future__ import annotations

from headrace.bench import engine


def test_lengths_have_the_asked_shape():
    lengths = engine.lognormal_lengths(256, 64.0, 6.0, seed=0)
    assert len(lengths) == 256 and lengths.min() >= 1
    assert abs(lengths.mean() - 64) < 1 and abs(lengths.max() / lengths.mean() - 6) < 0.1


def test_a_small_run_fills_every_case():
    figures = engine.run(
        sizes=("0.13M",), equal_lengths=(3,), num_lognormal=6, lognormal_mean=3.0, batch=4, repeats=1
    )
    assert [(case["size"], case["lengths"]) for case in figures["cases"]] == [
        ("0.13M", "equal 3"),
        ("0.13M", "log-normal"),
    ]
    assert all(case["ratio"] > 0 and case["engine_tokens_per_s"] > 0 for case in figures["cases"])
    assert engine.table(figures).row_count == 2
