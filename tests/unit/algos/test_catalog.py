"""What may be combined with what, and the page that says so."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from headrace.algos import losses
from headrace.algos.advantages import ADVANTAGES
from headrace.algos.catalog import CORRECTIONS, LOSSES, OF_A_RUN, PARAMETERS
from headrace.algos.composition import RatioPlan, compose, ratio_plan
from headrace.algos.corrections import FILTERS, WEIGHTS
from headrace.algos.kl import KL_ESTIMATORS
from headrace.algos.process import FORMS
from headrace.algos.tables import TABLES, fill
from headrace.config import load
from headrace.config.settings import AlgoSettings
from headrace.errors import ConfigError

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "losses.md"
PAGES = {name: DOCS / "pivots.md" if name == "pivots" else PAGE for name in TABLES}


def test_every_pairing_names_its_anchor() -> None:
    assert ratio_plan("ppo") == RatioPlan("behavior", None)
    assert ratio_plan("ppo", ["tis"]) == RatioPlan("prox", "tis")
    assert ratio_plan("decoupled") == RatioPlan("prox", "decoupled")
    assert ratio_plan("cispo", ["geo-filter", "tis"]) == RatioPlan("prox", "tis", ("geo-filter",))
    assert ratio_plan("gspo", ["seq-mis"]) == RatioPlan("prox", "seq-mis")
    assert ratio_plan("dppo-tv", ["opsm", "m2po"]) == RatioPlan("behavior", None, ("opsm", "m2po"))


@pytest.mark.parametrize(
    ("loss", "corrections", "message"),
    [
        ("decoupled", ["tis"], "twice"),
        ("aipo", ["tis"], "twice"),
        ("vespo", ["seq-tis"], "twice"),
        ("gspo", ["tis"], "sequences"),
        ("gmpo", ["icepop"], "seq-tis or seq-mis"),
        ("dro", ["mis"], "squared"),
        ("ppo", ["tis", "seq-tis"], "keep one"),
        ("ppo", ["imaginary"], "unknown"),
        ("trpo", [], "ppo"),
    ],
)
def test_pairings_that_would_be_wrong_are_refused(loss: str, corrections: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ratio_plan(loss, corrections)


def test_the_catalogue_the_functions_and_the_settings_name_the_same() -> None:
    assert LOSSES.keys() == losses.LOSSES.keys()
    assert CORRECTIONS.keys() == WEIGHTS.keys() | FILTERS.keys()
    fields = AlgoSettings.model_fields
    assert get_args(fields["loss"].annotation) == tuple(LOSSES)
    assert get_args(fields["advantage"].annotation) == tuple(ADVANTAGES)
    choices = {parameter.name: parameter.choices for parameter in PARAMETERS}
    # k1 is no loss; it is right inside a reward.
    assert choices["kl.estimator"] == (*KL_ESTIMATORS, "k1")
    assert choices["process.form"] == tuple(FORMS)


def test_parameters_are_unique_belong_to_someone_and_accept_their_defaults() -> None:
    names = [parameter.name for parameter in PARAMETERS]
    assert len(set(names)) == len(names)
    for parameter in PARAMETERS:
        assert parameter.owner in LOSSES.keys() | CORRECTIONS.keys() | {"guard", "truncated", *OF_A_RUN}
        assert parameter.accepts(parameter.default)


@pytest.mark.parametrize("name", ["guard.effective_samples", "guard.route_flips"])
def test_a_share_is_at_most_one(name: str) -> None:
    (share,) = [parameter for parameter in PARAMETERS if parameter.name == name]
    assert [share.accepts(value) for value in (-0.1, 0, 0.5, 1, 1.1)] == [False, True, True, True, False]
    assert share.takes == "a number from 0 to 1"


def test_values_are_the_given_ones_and_else_the_defaults() -> None:
    values = compose("sapo", ["tis", "opsm"], options={"sapo": {"tau_neg": 2}, "opsm.delta": 0.5}).values
    expected = {"sapo.tau_pos": 1.0, "sapo.tau_neg": 2.0, "tis.cap": 2.0, "opsm.delta": 0.5}
    assert {name: values[name] for name in expected} == expected
    assert not any(name.startswith("guard.") for name in values)


def test_every_problem_of_the_options_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        compose("ppo", options={"tis.cap": 2.0, "ppo.dual_clip": "big", "nonsense": 1})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_the_generated_tables(name: str) -> None:
    page = PAGES[name]
    assert TABLES[name]() in page.read_text(encoding="utf-8"), f"{page} is out of date: run `make docs`"


def test_the_example_is_a_composition_that_can_be_built() -> None:
    algo = load(PAGE.parents[1] / "examples" / "composed_loss.toml").algo
    assert compose(algo.loss, algo.corrections, options=algo.options, guard=algo.guard).plan == RatioPlan(
        "prox", "tis", ("k3-filter",)
    )


def test_filling_a_page_twice_changes_nothing() -> None:
    for path in PAGES.values():
        page = path.read_text(encoding="utf-8")
        assert fill(page) == page
