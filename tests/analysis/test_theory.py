"""The theory figure against planted residuals, on either side of their bounds."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.figures import theory
from analysis.figures.theory import draw
from analysis.load import Study, StudyError, load_study
from analysis.style import Drawn, look
from diagnostics.record import RunWriter, run_id
from tests.analysis.unrendered import unrendered

STATEMENTS = [
    {"name": "theorem_4_1", "source": "Santurkar et al. 2018, Theorem 4.1", "claim": "so", "bound": 1e-10,
     "expected": "holds"},
    {"name": "unbiased", "source": "Ioffe & Szegedy 2015, Algorithm 2", "claim": "a mean", "bound": 4.5,
     "expected": "holds"},
    {"name": "false_form", "source": "Ioffe & Szegedy 2015, section 3", "claim": "any", "bound": 1e-10,
     "expected": "false as printed"},
]  # fmt: skip
GOOD = {"theorem_4_1": 1e-15, "unbiased": 1.2, "false_form": 2.0}


def plant(
    folder: Path,
    residuals: list[dict[str, float]],
    *,
    name: str = "theory",
    finite: tuple[float, ...] = (9, 9, 9, 9),
    falls: str = "",
    steps: int = 3,
    starts: int = 9,
) -> Path:
    """One run for each seed's residuals, and curves whose numbers are known."""
    entries = []
    for seed, of_seed in enumerate(residuals):
        config = {
            "seed": seed,
            "measures": {
                "statements": STATEMENTS,
                "factor": 2.0,
                "cases": 7,
                "draws": 10,
                "rate": 0.05,
                "steps": steps,
                "starts": starts,
            },
        }
        path = f"runs/float64-s{seed}-{run_id(config)}"
        with RunWriter(folder / path, config=config, environment={}) as writer:
            for layer, residual in of_seed.items():
                broken = float(not residual <= 1e-10)
                writer.write(0, "statement", layer, {"residual": residual, "exceeded": broken, "cases": 7.0})
            curve = [0.1 + seed, 1.0, 10.0]
            writer.write(0, "epsilon", "-", dict.fromkeys(("ratio", "output", "du", "dw", "predicted"), curve))
            writer.write(
                0, "scale", "-", dict.fromkeys(("scale", "norm", "gradient", "turned", "plain_gradient"), curve)
            )
            writer.write(0, "coupling", "-", {"m": [4.0, 8.0], "share": [0.4, 0.2], "error": [0.01, 0.02]})
            rates = {"rate": [0.1, 0.1, 0.2, 0.2], "time": [1.0, 2.0] * 2}
            ratios = {one: [2.0, 0.5, 3.0, 0.6] for one in ("ratio", "low", "high")}
            writer.write(0, "reach", "-", rates | ratios | {"share": [0.5] * 4, "finite": [9.0] * 4})
            for step in range(steps + 1):
                writer.advance(step)
                for k, treatment in enumerate(theory.TREATMENTS):
                    values = {"b": step * k, "w": 1.0, "loss": 0.25 if treatment == falls and step else 1.0}
                    spread = {f"{one}_{part}": v for one, v in values.items() for part in ("low", "high", "far")}
                    kept = min(finite[step] if treatment == "shrinking" else 9.0, starts)
                    writer.write(step, f"failure.{treatment}", "-", values | spread | {"finite": kept})
        entries.append({"arm": "float64", "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1, "study": name, "question": "?", "preset": "laptop", "seeds": list(range(len(residuals))),
        "arms": [{"name": "float64", "label": "checked in float64"}],
        "measures": [], "rule": "", "control": "", "config": {}, "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drawn]:
    """Two seeds, drawn once: five pictures take seconds."""
    folder = plant(tmp_path_factory.mktemp("theory"), [GOOD, GOOD | {"theorem_4_1": 2e-15}])
    return folder, draw(folder)


def test_what_is_as_expected_is_called_so(drawn: tuple[Path, Drawn]) -> None:
    folder, found = drawn
    table = pd.read_csv(folder / "theory.csv")
    assert table.verdict.tolist() == ["holds", "holds", "false as printed"]
    assert table.statement.tolist() == ["theorem_4_1", "unbiased", "false_form"]
    assert found.title.startswith("2 of 3 statements hold, 1 false form is shown to be false (1 as printed)\n")
    assert "NOT AS EXPECTED" not in found.title
    assert found.table["residual"].tolist() == ["2.0e-15", "1.2e+00", "2.0e+00"]
    assert found.table["broken"].tolist() == ["0/14", "2/14", "2/14"]
    assert "2 seeds" not in found.caption
    assert len(found.paths) == 15
    assert all(path.stat().st_size > 20 for path in found.paths)


def test_curves_are_the_first_seeds(drawn: tuple[Path, Drawn]) -> None:
    folder, _ = drawn
    assert pd.read_csv(folder / "theory_epsilon.csv")["ratio"].tolist() == [0.1, 1, 10]
    assert pd.read_csv(folder / "theory_scale.csv")["gradient"].tolist() == [0.1, 1, 10]
    assert pd.read_csv(folder / "theory_coupling.csv")["share"].tolist() == [0.4, 0.2]
    failure = pd.read_csv(folder / "theory_failure.csv")
    assert failure[failure.treatment == "through"]["b"].tolist() == [0, 4, 8, 12]
    assert failure[failure.treatment == "shrinking over centred"]["ratio"].tolist() == [2, 0.5, 3, 0.6]


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [({"theorem_4_1": 1e-9}, "SURPRISE: fails"), ({"theorem_4_1": math.nan}, "SURPRISE: not finite"),
     ({"theorem_4_1": -math.inf}, "SURPRISE: not finite"), ({"false_form": math.nan}, "SURPRISE: not finite"),
     ({"false_form": math.inf}, "SURPRISE: not finite"), ({"unbiased": 4.6}, "SURPRISE: fails"),
     ({"false_form": 1e-11}, "SURPRISE: holds")],
)  # fmt: skip
def test_what_is_not_is_called_a_surprise_by_name(tmp_path: Path, changed: dict[str, float], verdict: str) -> None:
    judged = theory._judge(load_study(plant(tmp_path, [GOOD | changed])))
    (name,) = changed
    assert {one.name: one.verdict for one in judged}[name] == verdict
    assert theory._title(judged).endswith(f"NOT AS EXPECTED: {name}")


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("name", GOOD)
def test_one_seed_that_is_not_finite_is_enough(tmp_path: Path, name: str, order: int) -> None:
    seeds = [GOOD, GOOD | {name: math.nan}][::order]
    judged = {one.name: one for one in theory._judge(load_study(plant(tmp_path, seeds)))}
    assert judged[name].verdict == "SURPRISE: not finite"


def test_what_did_not_pass_is_said_line_by_line(tmp_path: Path, drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    assert found.failed == ()
    planted = plant(tmp_path, [GOOD | {"theorem_4_1": math.nan, "false_form": 1e-11}])
    with unrendered():
        said = draw(planted)
    assert said.failed == (
        "theorem_4_1: not finite, expected: holds (residual nan, bound 1e-10)",
        "false_form: holds, expected: false as printed (residual 1e-11, bound 1e-10)",
    )


def test_starts_that_are_thrown_out_are_said(tmp_path: Path, drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    assert "NOT FINITE" not in found.title
    with unrendered():
        thrown = draw(plant(tmp_path, [GOOD], finite=(9, 9, 4, 3)))
    assert "). NOT FINITE: 6 of 9 starts of scaled (smaller w wanted) are not finite, from step 2" in thrown.title


def marks(judged: list[theory._Judged], study: Study) -> tuple[list[tuple[str, float]], Axes]:
    """Marker and place of every residual in the picture, from above, and its axes."""
    with look():
        axes = theory._table_figure(study, judged).axes[1]
    drawn = [line for line in axes.lines if str(line.get_marker()) in "oX*" and len(line.get_xdata())]
    return [(str(line.get_marker()), float(line.get_xdata()[0])) for line in drawn], axes


def test_every_residual_has_its_place_in_the_picture(tmp_path: Path) -> None:
    study = load_study(plant(tmp_path, [GOOD]))
    one = theory._judge(study)[0]
    residuals = {1e-15: -15, 0.0: theory._ZERO, -0.3: theory._BELOW, 1e-30: theory._LEAST, 1e40: theory._LARGEST}
    judged = [replace(one, residual=residual) for residual in residuals]
    judged += [replace(one, residual=math.nan), replace(one, residual=1e2)]
    judged += [
        replace(one, residual=1e2, expected="false as read"),
        replace(one, residual=math.nan, expected="false as read"),
    ]
    drawn, axes = marks(judged, study)
    assert [x for _, x in drawn[:5]] == pytest.approx(list(residuals.values()))
    assert "".join(marker for marker, _ in drawn) == "oooo***X*"
    edge = drawn[5][1]
    assert edge == drawn[8][1] > drawn[6][1]
    labels = {tick.get_text(): x for x, tick in zip(axes.get_xticks(), axes.get_xticklabels(), strict=True)}
    assert labels["exactly 0"] == theory._ZERO
    assert labels["below 0"] == theory._BELOW
    assert labels["not finite"] == edge
    assert axes.get_xlim()[0] < theory._BELOW < theory._ZERO < theory._LEAST
    assert edge < axes.get_xlim()[1]


def test_the_picture_says_claims_and_sources_and_all_four_marks(tmp_path: Path) -> None:
    study = load_study(plant(tmp_path, [GOOD]))
    with look():
        figure = theory._table_figure(study, theory._judge(study))
    words = [text.get_text() for text in figure.axes[0].texts]
    assert words == [
        "S+, Theorem 4.1", "so", "holds", "I&S, Algorithm 2", "a mean", "holds",
        "I&S, section 3", "any", "false as printed",
    ]  # fmt: skip
    (legend,) = figure.legends
    assert [text.get_text().split(":")[0] for text in legend.get_texts()] == [
        "holds, as it should", "false form, shown to be false (the verdict says whose)", "SURPRISE", "bound",
    ]  # fmt: skip


def test_false_forms_are_counted_by_what_they_are(tmp_path: Path) -> None:
    one = theory._judge(load_study(plant(tmp_path, [GOOD])))[2]
    kinds = ("false, cut on purpose", "false as read", "false as printed", "false as read")
    judged = [replace(one, expected=kind) for kind in kinds]
    wanted = "0 of 4 statements hold, 4 false forms are shown to be false (1 as printed, 2 as read, 1 cut on purpose)"
    assert theory._title(judged) == wanted
    assert [found.verdict for found in judged] == list(kinds)


def test_words_and_symbols_are_explained_in_print_and_beneath_the_picture(drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    for said in (found.title, found.caption):
        assert "cases: 7 random ones a seed, and for a false form 1 counterexample fixed beforehand" in said.lower()
        words = [line.split(":")[0].lower() for line in said.split("\n")[1:]]
        broken = ["broken"] if said is found.title else []  # a column of the printed table alone
        assert words == ["source", "verdict", "residual", "bound", "cases", *broken, "symbols"]
    symbols = found.title.split("symbols: ")[1]
    for one in ("y", "z", "g", "H", "L-hat", "d", "X", "lambda", "g_j", "mu_g", "k", "w*", "u", "c", "kappa", "eta"):
        assert re.search(rf"(?<![\w-]){re.escape(one)}(?![\w-])", symbols), one


def failure(folder: Path) -> tuple[Figure, str]:
    with look():
        figure, _ = theory._failure(load_study(folder))
    return figure, " ".join(text.get_text() for text in figure.texts)


def test_lines_that_coincide_can_all_be_seen(tmp_path: Path) -> None:
    """Where treatments lie on each other the later is drawn thinner, so that the earlier shows beneath."""
    figure, said = failure(plant(tmp_path, [GOOD]))
    assert "gets to |b| = 6." in said  # the third treatment that is planted: 2 a step, 3 steps
    b = [line for line in figure.axes[0].lines if line.get_label() in {one[0] for one in theory.TREATMENTS.values()}]
    solid = [line.get_linewidth() for line in b if line.get_linestyle() == "-"]
    assert len(b) == 5
    assert all(thin < 0.65 * wide for wide, thin in pairwise(solid))
    assert len(solid) == 3
    assert len({line.get_color() for line in b}) == 5


def test_losses_that_coincide_are_one_line_with_all_its_names(tmp_path: Path) -> None:
    labels = [one[0] for one in theory.TREATMENTS.values()]
    figure, _ = failure(plant(tmp_path / "one", [GOOD]))
    assert len(figure.axes[1].lines) == 1
    assert [text.get_text() for text in figure.axes[1].texts] == ["\n".join(["on one line:", *labels])]
    figure, said = failure(plant(tmp_path / "two", [GOOD], falls="epsilon"))
    assert len(figure.axes[1].lines) == 2
    assert [text.get_text().split("\n")[1:] for text in figure.axes[1].texts] == [labels[:3] + labels[4:]]
    assert f"{labels[3]} 1 to 0.25." in said


def test_what_the_caption_tells_of_the_failure_is_what_was_run(tmp_path: Path) -> None:
    _, said = failure(plant(tmp_path / "many", [GOOD]))
    assert "Learning rate 0.05, 3 steps, medians of 9 starts" in said
    assert "b after 3 steps: centred only 0; scaled (larger w wanted) 3;" in said
    assert "medians of 9 starts, band" in said
    assert "At rate 0.2 the ratio is at most 3 (time 1), and 0.6 at the end (time 2)." in said
    _, said = failure(plant(tmp_path / "one", [GOOD], starts=1, steps=1))
    assert "Learning rate 0.05, 1 step, 1 start." in said
    assert "b after 1 step: centred only 0; scaled (larger w wanted) 1;" in said


def test_ticks_of_the_failure_are_plain(tmp_path: Path) -> None:
    figure, _ = failure(plant(tmp_path, [GOOD], steps=1))
    figure.draw_without_rendering()
    ticks = [
        [tick.get_text() for tick in axis.get_ticklabels()] for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
    ]
    assert not [label for labels in ticks for label in labels if "10^" in label or len(label) > 5]
    assert set(ticks[0]) <= {"\N{MINUS SIGN}1", "0", "1", "2"}


def test_other_studies_and_missing_statements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="shows the study of that name"):
        draw(plant(tmp_path / "other", [GOOD], name="drift"))
    with pytest.raises(StudyError, match="lacks the statement 'unbiased'"):
        draw(plant(tmp_path / "less", [{name: value for name, value in GOOD.items() if name != "unbiased"}]))
