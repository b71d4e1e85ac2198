"""The sharpness figure against planted spectra: known ratios, known shares at the line, every outcome of the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.figures import sharpness
from analysis.figures.sharpness import draw
from analysis.load import StudyError
from diagnostics.record import RunWriter
from tests.analysis.planted_pairs import check_plotted, plant_pairs, unpainted

STEPS = [0, 10, 20, 30]
SLOWLY = (1.0, 1.01, 0.99)
INF, NAN = math.inf, math.nan


@pytest.fixture(autouse=True)
def _numbers_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.name.endswith(("in_the_table", "in_the_picture")):
        unpainted(monkeypatch, sharpness, "_figure")


def plant(
    folder: Path,
    *,
    network: str = "linear",
    without: float | Sequence[float] = 0.4,
    with_: float | Sequence[float] = 0.2,
    own: float | None = None,
    momentum: float = 0.0,
    optimizer: str = "sgd",
    seeds: int = 3,
    rates: Sequence[float] = (0.1,),
    stays: bool = False,
    overflow: int = 0,
    rayleigh: float = 0.5,
    converged: float = 1.0,
    ends: dict[tuple[str, int], int] | None = None,
) -> Path:
    """eta x eigenvalue of each arm; ``own``, with BN, of the step's batch where that is not everything.

    A sequence gives the four records of every seed. ``stays``: these are eigenvalues without eta. ``overflow`` seeds
    without BN have no finite eigenvalue after the first record.
    """

    def write(writer: RunWriter, arm: str, kind: str, seed: int, step: int) -> None:
        rate = float(arm.split("-", 1)[1].rpartition("-")[0])
        of = without if kind == "none" else with_
        value = (of if isinstance(of, float) else of[STEPS.index(step)]) * SLOWLY[seed] / (1.0 if stays else rate)
        if kind == "none" and seed < overflow and step:
            value = NAN
        rest = {"loss": 2.0 - step / 100, "converged": converged, "rayleigh": rayleigh * value}
        batch = value if own is None or kind == "none" else own * SLOWLY[seed] / rate
        if network == "mlp":
            writer.write(step, "sharpness.fixed", "-", {"sharpness": value, **rest})
        writer.write(step, "sharpness.batch", "-", {"sharpness": batch, **rest})

    training: dict[str, Any] = {"steps": 40, "batch": "full" if network == "linear" else 60, "optimizer": optimizer}
    if optimizer == "sgd":
        training["momentum"] = momentum
    measures = {"sample": 0 if network == "linear" else 2000}
    configs = {
        f"{network}-{rate:g}": {"training": training | {"learning_rate": rate}, "measures": measures} for rate in rates
    }
    return plant_pairs(folder, "sharpness", configs, seeds, STEPS, write, ends=ends)


EDGE = (0.1, 1.0, 2.1, 1.9)  # at 2 in the second half of training
ONCE = (0.1, 1.0, 1.4, 1.9)  # at 2 in half of it


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({}, "flatter"),
        ({"with_": 0.8}, "sharper"),
        ({"with_": 0.4}, "undecided"),
        ({"seeds": 1}, "undecided"),
        ({"without": EDGE, "with_": EDGE}, "both at the edge: eta set both"),
        ({"without": EDGE, "with_": (0.01, 0.01, 1.9, 1.9)}, "both at the edge: eta set both"),
        ({"without": ONCE, "with_": EDGE}, "sharper; with BN at the edge"),
        ({"without": EDGE}, "flatter; without BN at the edge"),
        ({"without": (0.1, 1.0, 2.6, 2.6), "with_": EDGE}, "flatter; with BN at the edge"),
        (
            {"without": (0.1, 1.0, 3.9, 3.7), "with_": (0.1, 1.0, 3.8, 3.6), "momentum": 0.9},
            "both at the edge: eta set both",
        ),
        ({"without": EDGE, "with_": EDGE, "momentum": 0.9}, "undecided"),
        ({"without": EDGE, "with_": EDGE, "optimizer": "adam"}, "undecided"),
        ({"network": "mlp", "without": EDGE, "with_": EDGE}, "undecided"),
        ({"network": "mlp"}, "flatter"),
        ({"network": "mlp", "own": 0.8}, "flatter on 2000 fixed examples, sharper on the batch"),
        # Two of three seeds are at 2 in all late records and one in half: more than half on average, yet not surely.
        ({"without": (0.1, 1.0, 2.49, 2.0), "with_": EDGE}, "flatter; with BN at the edge"),
        ({"overflow": 3}, "flatter"),
        ({"overflow": 1}, "undecided"),
    ],
)
def test_the_verdict_by_the_studys_rule(tmp_path: Path, planted: dict[str, Any], said: str) -> None:
    drawn = draw(plant(tmp_path, **planted))
    assert drawn.table[drawn.table["measure"] == "VERDICT"]["outcome"].tolist() == [said]
    assert f"lr 0.1: {said}\n" in drawn.title
    assert f"lr 0.1: {said}." in drawn.caption


def csv(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "sharpness.csv")


def test_planted_ratios_curves_and_shares_are_read_back(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, without=ONCE, with_=EDGE))
    table = csv(tmp_path)
    curve = table[(table["panel"] == "all") & (table["arm"] == "batch")].set_index("x")
    assert curve.loc[20, ["low", "middle", "high", "seeds"]].tolist() == pytest.approx([2.1 * 0.99, 2.1, 2.1 * 1.01, 3])
    found = table[table["panel"] == "reading: all"].iloc[0]
    assert found["middle"] == pytest.approx(1.45 / 1.2)
    rayleigh = table[(table["panel"] == "rayleigh") & (table["arm"] == "none")]
    assert rayleigh["middle"].tolist() == pytest.approx([0.05, 0.5, 0.7, 0.95])
    loss = table[(table["panel"] == "loss") & (table["arm"] == "none")]
    assert loss["middle"].tolist() == pytest.approx([2.0, 1.9, 1.8, 1.7])
    share = table[table["panel"] == "share of late records at the line"].set_index("arm")["middle"]
    assert share.to_dict() == {"none": 0.5, "batch": 1.0}
    row = drawn.table[drawn.table["measure"] == "late records at line"].iloc[0]
    assert row["with/without"] == "difference +0.50 [+0.50, +0.50]"
    loss = drawn.table[drawn.table["measure"] == "loss, last record"].iloc[0]
    assert loss[["without BN", "with BN"]].tolist() == ["1.7", "1.7"]
    assert "batch" not in set(table["panel"])  # the batch is all there is


def test_records_beyond_the_line_are_told_from_those_at_it(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, without=(0.1, 1.0, 2.6, 1.9), with_=EDGE, overflow=1))
    measures = drawn.table.set_index("measure")
    assert measures.loc["late records at line", "without BN"].startswith("0.33")
    assert measures.loc["late records beyond", "without BN"].startswith("0.67")
    assert measures.loc["late records beyond", "with BN"].startswith("0.00")


def test_the_line_is_a_full_batch_statement_and_adam_has_none(tmp_path: Path) -> None:
    full = draw(plant(tmp_path / "full")).caption
    assert "full-batch descent is at the edge" in full
    assert "does not apply" not in full
    minibatch = draw(plant(tmp_path / "mini", network="mlp"))
    assert "a statement about full-batch descent that does not apply" in minibatch.caption
    assert "batches of 60, and 2000 fixed examples that stand for all" in minibatch.caption
    assert "all examples" not in minibatch.caption
    assert "eta x eigenvalue, 2000 fixed" in set(minibatch.table["measure"])
    assert "fixed" not in full
    assert minibatch.table.set_index("measure").loc["late records at line", "outcome"] == "decides nothing"
    adam = draw(plant(tmp_path / "adam", optimizer="adam"))
    assert "no line for it" in adam.caption
    assert "edge of stability" not in adam.caption
    assert "late records at line" not in set(adam.table["measure"])
    assert "eigenvalue" in set(adam.table["measure"])  # not times eta
    table = csv(tmp_path / "adam")
    assert table[(table["panel"] == "all") & (table["arm"] == "none")]["middle"].tolist() == pytest.approx([4.0] * 4)


def test_an_eigenvalue_that_follows_the_learning_rate_is_told_from_one_that_stays(tmp_path: Path) -> None:
    for name, stays, power in (("edge", False, "-1.00"), ("own", True, "0.00")):
        table = draw(plant(tmp_path / name, rates=(0.1, 1.0), stays=stays)).table
        row = table[table["measure"].str.startswith("a in")].iloc[0]
        assert row["with BN"].removeprefix("-" if stays else "").startswith(power)


def test_a_curvature_that_is_negative_is_undefined_for_the_rule_and_said(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, rayleigh=-0.5))
    row = drawn.table.set_index("measure").loc["eta x g'Hg/|g|^2"]
    assert row["with/without"] == "undefined or not positive with BN in 3 of 3 seeds"
    assert "was not positive in 24 of 24 records" in drawn.caption


def test_searches_that_did_not_converge_are_counted_once(tmp_path: Path) -> None:
    bad, good = draw(plant(tmp_path / "full", converged=0.0)), draw(plant(tmp_path / "mini", network="mlp"))
    assert "below the tolerance: 24 of 24." in bad.caption
    assert bad.title.endswith("below the tolerance: 24 of 24.")
    assert "below the tolerance: 0 of 48." in good.caption
    assert good.title.endswith("within a quarter of it.")


def test_one_seed_makes_sentences(tmp_path: Path) -> None:
    one, three = draw(plant(tmp_path / "one", seeds=1)), draw(plant(tmp_path / "three"))
    assert "Each run's median record; one seed (0), so there is no interval and nothing is decided; late" in one.title
    assert "Lines: one seed (0), so there are no bands and nothing is decided." in one.caption
    assert "Lines: median over 3 seeds (0 to 2), bands: range over seeds." in three.caption
    said = [drawn.table.set_index("measure").loc["late records at line", "outcome"] for drawn in (one, three)]
    assert said == ["at the edge: undecided", "at the edge: neither"]
    for text in (one.title, one.caption):
        assert "Student" not in text
        assert "over seeds" not in text


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen = []

    def save(figure: Any, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        figure.draw_without_rendering()
        seen.append(figure)
        return ()

    monkeypatch.setattr(sharpness.style, "save", save)
    return seen


def test_panels_without_a_number_say_so_in_the_picture(tmp_path: Path, figures: list[Any]) -> None:
    draw(plant(tmp_path, with_=NAN, without=NAN))
    panels = [axes for axes in figures[0].axes if axes.axison]
    assert [[text.get_text() for text in axes.texts] for axes in panels] == [["no positive finite number"]] * 2 + [[]]
    assert [axes.get_yscale() for axes in panels] == ["linear", "linear", "log"]
    assert [axes.get_xlim() for axes in panels] == [(-1.5, 31.5)] * 3  # steps, though nothing is drawn along them
    assert figures[0].axes[0].get_title(loc="left").endswith("largest eigenvalue, all examples")


def test_titles_name_the_examples_of_their_rows_in_the_picture(tmp_path: Path, figures: list[Any]) -> None:
    draw(plant(tmp_path, network="mlp", rates=(0.1, 0.5)))
    titles = [axes.get_title(loc="left") for axes in figures[0].axes]
    assert "largest eigenvalue, 2000 fixed examples" in titles[0]
    assert "step's batch" in titles[1]
    assert titles[4:] == [""] * 4


def test_a_run_that_diverged_is_shown_compared_where_it_was_and_named(tmp_path: Path) -> None:
    planted = plant(tmp_path, with_=(0.2, 0.2, 9.0, 9.0), ends={("linear-0.1-none", 1): 10})
    drawn = draw(planted)
    assert "linear-0.1-none (seed 1)" in drawn.caption
    table = csv(tmp_path)
    ends = table[table["panel"] == "last record of a run that diverged"]
    assert ends[["arm", "x"]].to_numpy().tolist() == [["none", 10]]
    assert drawn.table.set_index("measure").loc["late records at line", "with/without"] == "a run has no late records"
    # Seed 1 is compared on its first two records, 0.2 and 0.2 with BN; the others on all four.
    found = table[table["panel"] == "reading: all"].iloc[0]
    logs = np.log([4.6 / 0.4, 0.2 / 0.4, 4.6 / 0.4])
    assert found["middle"] == pytest.approx(math.exp(logs.mean()))


def test_every_plotted_number_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plant(tmp_path, network="mlp", rates=(0.1, 0.5), overflow=2, ends={("mlp-0.5-none", 1): 10})
    assert check_plotted(monkeypatch, draw, folder) > 120
    for suffix in ("png", "pdf", "csv"):
        assert (tmp_path / f"sharpness.{suffix}").stat().st_size > 1000
    for planted in ({"seeds": 1, "rayleigh": -0.5, "momentum": 0.9}, {"optimizer": "adam"}):
        assert check_plotted(monkeypatch, draw, plant(tmp_path / str(len(planted)), **planted)) >= 40


def test_another_study_is_refused(tmp_path: Path) -> None:
    folder = plant(tmp_path)
    file = folder / "study.json"
    file.write_text(file.read_text().replace('"study": "sharpness"', '"study": "drift"'))
    with pytest.raises(StudyError, match="sharpness is not what"):
        draw(folder)
