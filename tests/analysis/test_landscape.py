"""The landscape's figures against planted walks: known bands, known ratios, every outcome of the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.figures import landscape
from analysis.figures.landscape import draw
from analysis.load import StudyError
from diagnostics.record import RunWriter
from tests.analysis.planted_pairs import check_plotted, plant_pairs, unpainted


@pytest.fixture(autouse=True)
def _numbers_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.name.endswith(("in_the_table", "painted_too", "in_the_picture")):
        unpainted(monkeypatch, landscape, "_figure", "_controls_figure")


STEPS = [0, 10, 20, 30]
SHARES = np.array([0.25, 1.0, 4.0])
SIZES = np.array([0.5, 1.0, 2.0])
SLOWLY = (1.0, 1.01, 0.99)  # what seeds differ by, so that intervals are not points
INF, NAN = math.inf, math.nan


def config(rate: float, shares: np.ndarray = SHARES, batch: object = 60) -> dict[str, Any]:
    return {
        "training": {"steps": 40, "batch": batch, "learning_rate": rate},
        "measures": {"grid": [rate * share for share in shares], "sizes": SIZES.tolist(), "virtual_every": 10},
    }


def plant(
    folder: Path,
    *,
    with_: float | Sequence[float] = 0.5,
    curvature: float | Sequence[float] = 0.5,
    sharpness: float | Sequence[float] = 0.5,
    scale: float = 1.0,
    seeds: int = 3,
    exploded: int = 0,
    undefined: bool = False,
    rates: Sequence[float] = (0.1,),
    follows: bool = False,
    shares: np.ndarray = SHARES,
    ends: dict[tuple[str, int], int] | None = None,
    converged: float = 1.0,
    finite: bool = True,
) -> Path:
    """Smoothness ``scale`` at the last step of a walk without BN and ``with_`` times it with; and so on.

    ``exploded`` seeds without BN see no finite gradient at the last step of most walks; ``follows``: smoothness is
    ``scale``/rate. The least change of the gradient on a walk is the same in both arms.
    Without ``finite`` no number is.
    """

    def factor(of: float | Sequence[float], kind: str, seed: int) -> float:
        if kind == "none":
            return 1.0
        return of * SLOWLY[seed] if isinstance(of, float) else of[seed]

    def write(writer: RunWriter, arm: str, kind: str, seed: int, step: int) -> None:
        rate = float(arm.split("-", 1)[1].rpartition("-")[0])
        top = scale * factor(with_, kind, seed) / (rate if follows else 1.0)
        smooth = top * np.linspace(0.5, 1, len(shares))
        eta = rate * shares
        points = {
            "eta": eta,
            "loss": 2.0 + step / 10 + np.arange(len(shares)),
            "gradient_difference": smooth * eta * 3.0,
        }
        points["gradient_difference"][0] = 0.5 * scale / (rate if follows else 1.0) * eta[0] * 3.0
        points["effective_smoothness"] = smooth.copy()
        if kind == "none" and seed < exploded and step >= 10:
            for name in ("loss", "gradient_difference", "effective_smoothness"):
                points[name][-1] = NAN if step == 20 else INF
        if not finite:
            points = {name: np.full(len(shares), INF) for name in points}
        writer.write(step, "along_gradient.gradient", "-", points)
        writer.write(step, "along_gradient.gradient", "-", {"effective_smoothness": top, "start_loss": 2.0 - step / 20})
        other = points | {"effective_smoothness": smooth / 10, "loss": np.full(len(shares), 2.0)}
        other["gradient_difference"] = np.ones(len(shares))
        if not finite:
            other = points
        writer.write(step, "along_gradient.random", "-", other)
        values: dict[str, np.ndarray] = {"c": SIZES}
        for unit, of in (("curvature", curvature), ("sharpness", sharpness)):
            bad = undefined and kind == "none"
            values[f"eta_by_{unit}"] = np.full(3, NAN) if bad else SIZES / 10
            values[f"gradient_relative_by_{unit}"] = (
                np.full(3, NAN) if bad else factor(of, kind, seed) * SIZES * [0.5, 1, 0.8]
            )
            values[f"loss_change_by_{unit}"] = np.full(3, NAN) if bad else -0.2 * SIZES
        if not finite:
            values = {name: np.full(3, NAN) for name in values}
        writer.write(step, "virtual_shift", "-", values)
        writer.write(step, "virtual_shift", "-", {"loss": 2.0, "converged": converged})

    configs = {f"mlp-{rate:g}": config(rate, shares) for rate in rates}
    return plant_pairs(folder, "landscape", configs, seeds, STEPS, write, ends=ends)


def csv(folder: Path, name: str = "landscape") -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv")


def reading(folder: Path, name: str) -> pd.Series:
    table = csv(folder, "landscape_controls")
    return table[table["panel"] == f"reading: {name}"].iloc[0]


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({}, "smaller -> smaller"),
        ({"with_": 2.0, "curvature": 2.0, "sharpness": 2.0}, "larger -> larger"),
        ({"curvature": 2.0}, "smaller -> inconclusive"),
        ({"sharpness": [0.5, 2.0, 1.0]}, "smaller -> undecided"),
        ({"curvature": [0.5, 2.0, 1.0], "sharpness": 2.0}, "smaller -> undecided"),
        ({"curvature": 2.0, "sharpness": 2.0}, "smaller -> larger"),
        ({"curvature": [0.5, 2.0, 1.0], "sharpness": [0.5, 2.0, 1.0]}, "smaller -> undecided"),
        ({"with_": [0.5, 2.0, 1.0]}, "undecided -> smaller"),
        ({"seeds": 1}, "undecided -> undecided"),
        ({"exploded": 3, "with_": 8.0}, "smaller -> smaller"),
        ({"exploded": 1}, "undecided -> smaller"),
        ({"undefined": True}, "smaller -> undecided"),
    ],
)
def test_the_verdict_before_and_after_the_controls(tmp_path: Path, planted: dict[str, Any], said: str) -> None:
    drawn = draw(plant(tmp_path, **planted))
    assert f"\nmlp, lr 0.1: {said}\nSmoothness" in drawn.title
    verdict = drawn.table[drawn.table["measure"] == "VERDICT"]
    assert verdict["outcome"].tolist() == [said]


def test_readings_that_differ_are_named_in_the_caption_of_the_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {
        "contradict": ({"curvature": 2.0}, "inconclusive (by |Hg|/|g| larger, by eigenvalue smaller)"),
        "one": ({"curvature": [0.5, 2.0, 1.0]}, "undecided (by |Hg|/|g| undecided, by eigenvalue smaller)"),
    }
    captions: list[str] = []
    monkeypatch.setattr(landscape, "_controls_figure", lambda judged, controls, caption: captions.append(caption))
    for name, (planted, words) in said.items():
        draw(plant(tmp_path / name, **planted))
        assert f"after them {words}." in captions[-1]
    draw(plant(tmp_path / "both"))
    assert "after them smaller." in captions[-1]


def test_what_the_controls_can_tell_and_rest_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []
    monkeypatch.setattr(landscape, "_controls_figure", lambda judged, controls, caption: captions.append(caption))
    title = draw(plant(tmp_path / "good")).title
    assert title.endswith("within a quarter of it, the edge of stability.")
    for words in ("by construction", "negative curvature", "did not come below the tolerance: 0 of 24."):
        assert words in captions[-1]
    drawn = draw(plant(tmp_path / "bad", converged=0.0, ends={("mlp-0.1-none", 1): 10}))
    assert drawn.title.endswith("the edge of stability. " + "Eigenvalues whose residual did not come below the "
                                "tolerance: 22 of 22.")  # fmt: skip
    assert "tolerance" not in drawn.caption  # there no eigenvalue is


def test_one_seed_makes_sentences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list[str] = []
    monkeypatch.setattr(landscape, "_controls_figure", lambda judged, controls, caption: captions.append(caption))
    one, three = draw(plant(tmp_path / "one", seeds=1)), draw(plant(tmp_path / "three"))
    assert "Each run's median record; one seed (0), so there is no interval and nothing is decided; late" in one.title
    assert "brackets: 95% Student t over 3 seeds (0 to 2), paired; late" in three.title
    assert (
        "Of one seed (0): bands, first two columns: from the smallest to the largest value on a walk; " in one.caption
    )
    assert "Of 3 seeds (0 to 2): bands" in three.caption
    assert "geometric mean and 95% Student t interval over 3 seeds (0 to 2), paired;" in captions[1]
    said = [drawn.table.set_index("measure").loc["eta x smoothness, late", "outcome"] for drawn in (one, three)]
    assert said == ["undecided", "not at 2"]
    for text in (one.title, one.caption, captions[0]):
        assert "Student" not in text
        assert "over seeds" not in text


def words_in(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_panels_without_a_number_say_so_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def save(figure: Any, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        figure.draw_without_rendering()
        seen[name] = figure
        return ()

    monkeypatch.setattr(landscape.style, "save", save)
    draw(plant(tmp_path / "some"))
    assert "no positive finite number" not in words_in(seen["landscape"]) + words_in(seen["landscape_controls"])
    draw(plant(tmp_path / "none", finite=False))
    assert words_in(seen["landscape"]) == ["no positive finite number"] * 4
    assert words_in(seen["landscape_controls"])[:3] == ["no positive finite number"] * 3
    for figure in seen.values():
        assert [axes.get_yscale() for axes in figure.axes] == ["linear"] * 4
    infinite = [line for line in seen["landscape"].axes[2].get_lines() if line.get_marker() == "^"]
    assert sorted(len(line.get_xdata()) for line in infinite) == [4, 4]  # where every record is, in either arm


def test_a_grid_is_labelled_with_few_digits_in_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def save(figure: Any, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        seen[name] = [label.get_text() for label in figure.axes[3].get_xticklabels()]
        return ()

    monkeypatch.setattr(landscape.style, "save", save)
    draw(plant(tmp_path / "few", shares=np.array([0.01, 0.01 * math.sqrt(3000), 30])))
    assert seen["landscape"] == ["0.01", "0.55", "30"]
    draw(plant(tmp_path / "many", shares=np.linspace(1.1, 1.9, 6)))
    assert seen["landscape"] == ["1.1", "1.9"]  # no power of 2 lies between


def test_planted_ratios_are_read_back(tmp_path: Path) -> None:
    table = draw(plant(tmp_path, with_=0.5, curvature=0.4, sharpness=0.3)).table.set_index("measure")
    assert table.loc["effective smoothness", ["without BN", "with BN"]].tolist() == ["1", "0.5"]
    # The largest of |g' - g|/(c|g|), which is 0.5, 1 and 0.8 at the three sizes.
    assert table.loc["virtual, by |Hg|/|g|", ["without BN", "with BN"]].tolist() == ["1", "0.4"]
    for name, ratio in {"gradient": 0.5, "random": 0.5, "difference": 0.5, "curvature": 0.4, "sharpness": 0.3}.items():
        found = reading(tmp_path, name)
        logs = np.log(np.array(SLOWLY) * ratio)
        assert found["middle"] == pytest.approx(math.exp(logs.mean()))
        assert found["high"] == pytest.approx(
            math.exp(logs.mean() + 4.302652729911275 * logs.std(ddof=1) / math.sqrt(3))
        )
    assert reading(tmp_path, "loss")["middle"] == pytest.approx(1)


def test_bands_and_curves_are_those_of_the_walks(tmp_path: Path) -> None:
    draw(plant(tmp_path, scale=3.0))
    table = csv(tmp_path)
    loss = table[(table["panel"] == "loss") & (table["arm"] == "batch")].set_index("x")
    assert loss.loc[20, ["low", "high", "seeds"]].tolist() == [4.0, 6.0, 3]
    change = table[(table["panel"] == "difference") & (table["arm"] == "none")].set_index("x")
    assert change.loc[0, ["low", "high"]].tolist() == pytest.approx([1.5 * 0.025 * 3, 3.0 * 0.4 * 3])
    smooth = table[(table["panel"] == "smoothness, gradient") & (table["arm"] == "batch")].set_index("x")
    assert smooth.loc[10, ["low", "middle", "high"]].tolist() == pytest.approx([1.5 * 0.99, 1.5, 1.5 * 1.01])
    random = table[(table["panel"] == "smoothness, random") & (table["arm"] == "none")]
    assert random["middle"].tolist() == pytest.approx([0.3] * 4)
    each = table[(table["panel"] == "eta x smoothness, gradient") & (table["arm"] == "none")]
    assert each["x"].tolist() == pytest.approx(SHARES.tolist())
    assert each["middle"].tolist() == pytest.approx([0.15, 0.225, 0.3])
    controls = csv(tmp_path, "landscape_controls")
    steps = controls[(controls["panel"] == "change by curvature") & (controls["arm"] == "none")]
    assert steps["x"].tolist() == SIZES.tolist()
    assert steps["middle"].tolist() == pytest.approx([0.25, 1.0, 1.6])
    after = controls[(controls["panel"] == "loss by sharpness") & (controls["arm"] == "none")]
    assert after["middle"].tolist() == pytest.approx([0.95, 0.9, 0.8])


def test_walks_that_explode_are_counted_and_drawn_at_the_top(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, exploded=2))
    assert "not finite: mlp, lr 0.1 without BN 6 of 36." in drawn.caption
    table = csv(tmp_path)
    high = table[(table["panel"] == "difference") & (table["arm"] == "none")].set_index("x")["high"]
    assert np.isinf(high.loc[[10, 20, 30]]).all()
    assert np.isfinite(high.loc[0])
    row = drawn.table[drawn.table["measure"] == "effective smoothness"].iloc[0]
    assert row["with/without"] == "not finite in 2 of 3 seeds without BN, 0 of 3 with"


def test_a_run_that_diverged_is_shown_compared_where_it_was_and_named(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, ends={("mlp-0.1-none", 1): 10}))
    assert "mlp-0.1-none (seed 1)" in drawn.caption
    table = csv(tmp_path)
    ends = table[table["panel"] == "last record of a run that diverged"]
    assert ends[["arm", "x"]].to_numpy().tolist() == [["none", 10]]
    smooth = table[(table["panel"] == "smoothness, gradient") & (table["arm"] == "none")].set_index("x")
    assert smooth.loc[[10, 20], "seeds"].tolist() == [3, 2]
    assert reading(tmp_path, "gradient")["outcome"] == "smaller"
    late = drawn.table[drawn.table["measure"] == "eta x smoothness, late"].iloc[0]
    assert late["without BN"] == "nan"
    loss = drawn.table[drawn.table["measure"] == "loss, last record"].iloc[0]
    assert loss[["without BN", "with BN"]].tolist() == [f"{(0.5 * 0.5 * 1.5) ** (1 / 3):.3g}", "0.5"]


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"scale": 2.0, "with_": 1.0, "follows": True}, "at 2: without BN and with BN"),
        ({"scale": 4.0, "with_": 0.5, "follows": True}, "at 2: with BN"),
        ({"scale": 2.0, "with_": [1.0, 1.3, 0.8], "follows": True}, "at 2: without BN"),
        ({"scale": 1.4, "with_": 1.0, "follows": True}, "not at 2"),
    ],
)
def test_a_level_at_the_edge_of_stability_is_the_edges(tmp_path: Path, planted: dict[str, Any], said: str) -> None:
    drawn = draw(plant(tmp_path, **planted))
    assert drawn.table[drawn.table["measure"] == "eta x smoothness, late"]["outcome"].tolist() == [said]


def test_a_smoothness_that_follows_the_learning_rate_is_told_from_one_that_stays(tmp_path: Path) -> None:
    for name, follows, power in (("edge", True, "-1.00"), ("stays", False, "0.00")):
        table = draw(plant(tmp_path / name, rates=(0.1, 1.0), follows=follows)).table
        row = table[table["measure"].str.startswith("a in")].iloc[0]
        assert row["without BN"].lstrip("-").startswith(power.lstrip("-"))


def test_a_grid_whose_first_step_is_half_the_rate_is_warned_of(tmp_path: Path) -> None:
    half = draw(plant(tmp_path / "half", shares=np.array([0.5, 1, 4])))
    assert "is the same number as 2/\u03b7" in half.caption
    quarter = draw(plant(tmp_path / "quarter"))
    assert "is the same number" not in quarter.caption
    assert "walks of 3 steps from 0.25 to 4 \u03b7" in quarter.caption


def test_another_study_is_refused(tmp_path: Path) -> None:
    folder = plant(tmp_path)
    file = folder / "study.json"
    file.write_text(file.read_text().replace('"study": "landscape"', '"study": "drift"'))
    with pytest.raises(StudyError, match="landscape is not what"):
        draw(folder)


def test_every_plotted_number_is_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plant(tmp_path / "lost", rates=(0.1, 0.5), exploded=2, ends={("mlp-0.5-none", 1): 10})
    assert check_plotted(monkeypatch, draw, folder) > 200


def test_one_seed_and_steps_that_are_undefined_are_painted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = plant(tmp_path, seeds=1, undefined=True)
    assert check_plotted(monkeypatch, draw, folder) > 50
    for name in ("landscape", "landscape_controls"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / f"{name}.{suffix}").stat().st_size > 1000
