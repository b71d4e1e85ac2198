"""Pairs of arms: the rule on numbers whose outcome is known, and infinities that must not vanish."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis.load import StudyError, load_study
from analysis.pairs import (
    Pair,
    combine,
    compare,
    exploded,
    exponent,
    level,
    lines_of,
    lost,
    medians_of,
    pairs_of,
    read,
    seeds_of,
    spread,
    stacked,
    typical,
    unconverged,
    warned,
)
from diagnostics.record import RunWriter
from tests.analysis.planted_pairs import plant_pairs

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("without", "with_", "outcome"),
    [
        ([2.0, 2.1, 1.9], [1.0, 1.0, 1.0], "smaller"),
        ([1.0, 1.0, 1.0], [2.0, 2.1, 1.9], "larger"),
        ([1.0, 2.0, 0.5], [1.1, 1.0, 1.0], "undecided"),
        ([2.0], [1.0], "undecided"),
    ],
)
def test_the_interval_of_the_ratio_decides(without: list[float], with_: list[float], outcome: str) -> None:
    found = compare(without, with_)
    assert (found.outcome, found.doubt) == (outcome, "")
    logs = np.log(np.divide(with_, without))
    assert found.ratio.estimate == pytest.approx(math.exp(logs.mean()))
    if len(logs) > 1:
        half = stats.t.ppf(0.975, len(logs) - 1) * stats.sem(logs)
        assert found.ratio.low == pytest.approx(math.exp(logs.mean() - half))
        assert found.ratio.high == pytest.approx(math.exp(logs.mean() + half))


@pytest.mark.parametrize(
    ("without", "with_", "outcome", "said"),
    [
        ([INF, INF], [1.0, 2.0], "smaller", "not finite in 2 of 2 seeds without BN, 0 of 2 with"),
        ([1.0, 2.0], [INF, INF], "larger", "not finite in 0 of 2 seeds without BN, 2 of 2 with"),
        ([INF, 1.0], [1.0, 1.0], "undecided", "not finite in 1 of 2"),
        ([INF, INF], [INF, 1.0], "undecided", "1 of 2 with"),
        ([INF, INF], [INF, INF], "undecided", "2 of 2 with"),
        ([INF], [1.0], "undecided", "1 of 1"),
        ([NAN, 1.0], [1.0, 1.0], "undecided", "undefined or not positive without BN in 1 of 2 seeds"),
        ([1.0, 1.0], [1.0, -1.0], "undecided", "undefined or not positive with BN in 1 of 2 seeds"),
    ],
)
def test_what_is_not_finite_is_said_and_decides_only_where_all_seeds_agree(
    without: list[float], with_: list[float], outcome: str, said: str
) -> None:
    found = compare(without, with_)
    assert found.outcome == outcome
    assert said in found.text
    assert math.isnan(found.ratio.estimate)


def test_a_median_takes_infinities_and_gives_up_where_half_is_undefined() -> None:
    assert typical([1.0, INF, 2.0]) == 2.0
    assert typical([1.0, INF, INF]) == INF
    assert typical([1.0, 3.0, NAN]) == 2.0
    assert math.isnan(typical([1.0, NAN]))
    assert math.isnan(typical([]))
    frame = pd.DataFrame([[1.0, NAN], [-INF, 2.0]])
    assert exploded(frame).to_numpy().tolist() == [[1.0, INF], [INF, 2.0]]


def test_the_exponent_of_a_power_law_and_of_what_does_not_move() -> None:
    rates = [1e-6, 1e-7, 1e-5]
    found = exponent(rates, [[2 / rate * seed for seed in (1.0, 1.1, 0.9)] for rate in rates])
    assert (found.estimate, found.low, found.high) == (pytest.approx(-1), pytest.approx(-1), pytest.approx(-1))
    assert exponent(rates, [[3.0, 4.0]] * 3).estimate == pytest.approx(0)
    noisy = exponent([0.1, 1.0], [[1.0, 1.0, 1.0], [0.1, 0.2, 0.05]])
    logs = np.log10([0.1, 0.2, 0.05])
    assert noisy.estimate == pytest.approx(logs.mean())
    assert noisy.high == pytest.approx(logs.mean() + stats.t.ppf(0.975, 2) * stats.sem(logs))
    assert math.isnan(exponent([0.1, 1.0], [[1.0], [INF]]).estimate)
    assert math.isnan(exponent([0.1], [[1.0]]).estimate)


@pytest.mark.parametrize(
    ("said", "together"),
    [
        (["smaller", "smaller"], "smaller"),
        (["more"], "more"),
        (["less", "undecided"], "undecided"),
        (["undecided", "undecided"], "undecided"),
        (["larger", "undecided", "smaller"], "inconclusive"),
        (["inconclusive", "less"], "inconclusive"),
        (["inconclusive", "undecided"], "inconclusive"),
        (["inconclusive"], "inconclusive"),
        ([], "undecided"),
    ],
)
def test_outcomes_combine_in_any_words(said: list[str], together: str) -> None:
    assert combine(said) == combine(reversed(said)) == together


def test_searches_are_counted_and_warned_of_where_one_did_not_converge() -> None:
    counted = "Eigenvalues whose residual did not come below the tolerance: 1 of 4."
    assert unconverged([[1.0, 0.0], [[1.0, NAN], [1.0, NAN]]]) == warned([[1.0, 0.0, 1.0, 1.0]]) == counted
    assert unconverged([[1.0], [1.0]]).endswith("0 of 2.")
    assert warned([[1.0], [1.0]]) == unconverged([]) == unconverged([[NAN]]) == ""


def test_one_seed_and_several_make_sentences(tmp_path: Path) -> None:
    one, three = (
        load_study(plant_pairs(tmp_path / str(seeds), "toy", {"mlp-0.1": {}}, seeds, [0], write)) for seeds in (1, 3)
    )
    assert (seeds_of(one), seeds_of(three)) == ("one seed (0)", "3 seeds (0 to 2)")
    assert medians_of(one) == "Each run's median record; one seed (0), so there is no interval and nothing is decided"
    assert medians_of(three).endswith("brackets: 95% Student t over 3 seeds (0 to 2), paired")
    assert lines_of(one) == "Lines: one seed (0), so there are no bands and nothing is decided."
    assert lines_of(three) == "Lines: median over 3 seeds (0 to 2), bands: range over seeds."


def test_levels_are_geometric_and_undefined_with_an_infinity() -> None:
    assert level([1.0, 4.0]).estimate == pytest.approx(2)
    assert math.isnan(level([1.0, INF]).estimate)


def test_curves_of_runs_that_end_early_are_stacked_with_gaps_and_spread_without() -> None:
    steps, values = stacked([pd.Series([1.0, 2.0, 3.0], [0, 5, 10]), pd.Series([3.0, INF], [0, 5])])
    assert steps.tolist() == [0, 5, 10]
    assert np.isnan(values[1, 2])
    low, middle, high = spread(values)
    assert low.tolist() == [1, 2, 3]
    assert middle.tolist() == [2, INF, 3]
    assert high.tolist() == [3, INF, 3]


def write(writer: RunWriter, arm: str, kind: str, seed: int, step: int) -> None:
    value = 10.0 * seed + step
    writer.write(step, "probe", "-", {"size": value + np.arange(3), "other": 1.0})
    writer.write(step, "probe", "-", {"size": value - 1})
    writer.write(step, "probe", "hidden1", {"size": 7.0})


def test_pairs_are_read_for_the_whole_network_by_unit_or_as_one(tmp_path: Path) -> None:
    folder = plant_pairs(
        tmp_path, "toy", {"mlp-0.1": {}, "linear-1e-06": {}}, 2, [0, 4], write, ends={("mlp-0.1-none", 1): 0}
    )
    study = load_study(folder)
    pairs = pairs_of(study, "toy")
    assert pairs == (Pair("mlp", 0.1), Pair("linear", 1e-6))
    assert (pairs[1].title, pairs[1].arm("batch")) == ("linear, lr 1e-06", "linear-1e-06-batch")
    grid = read(study, pairs, "probe", ("size",), grid=True)
    assert grid["mlp-0.1-batch", 1, "size"].loc[4].tolist() == [14, 15, 16]
    assert grid["mlp-0.1-none", 1, "size"].index.tolist() == [0]
    whole = read(study, pairs[:1], "probe", ("size", "other"), grid=False)
    assert whole["mlp-0.1-none", 0, "size"][-1].tolist() == [-1, 3]
    assert ("linear-1e-06-none", 0, "size") not in whole
    assert "mlp-0.1-none (seed 1)" in lost(study)
    with pytest.raises(StudyError, match="other is not what"):
        pairs_of(study, "other")


def test_an_arm_without_its_partner_is_refused(tmp_path: Path) -> None:
    folder = plant_pairs(tmp_path, "toy", {"mlp-0.1": {}}, 1, [0], write)
    file = folder / "study.json"
    file.write_text(file.read_text().replace("mlp-0.1-none", "mlp-0.2-none"))
    for run in (folder / "runs").glob("mlp-0.1-none*"):
        run.rename(run.with_name(run.name.replace("0.1", "0.2")))
    with pytest.raises(StudyError, match=r"arm mlp-0\.2-none has no partner"):
        pairs_of(load_study(folder), "toy")
