"""The covariate-shift figures against planted cells: known ratios, known verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import style
from analysis.figures import ics
from analysis.figures.ics import draw
from analysis.load import StudyError
from diagnostics.record import RunWriter, run_id

LAYERS = ("first", "second", "third", "fourth")
STEPS, SIZES = (0, 10, 20), (0.5, 1.0)
JITTER = (-0.1, 0.0, 0.1)  # of logarithms, one a seed: the interval is a known one
HALF = 4.302652729911275 * 0.1 / np.sqrt(3)  # Student t, two degrees of freedom


@dataclass(frozen=True)
class Cells:
    """What one arm holds at its second layer; deeper ones have multiples, the same in both arms."""

    relative: float = 0.1
    cosine: float = 0.5
    following: float = 0.05  # preceding / following is then 2
    curvature: float = 0.2
    sharpness: float = 0.3
    predicted: float | None = 0.1  # None: trained with momentum
    converged: float = 1.0
    finite: bool = True


NONE = Cells()
LESS = Cells(relative=0.05, cosine=0.6, following=0.04, curvature=0.1, sharpness=0.15)
MORE = Cells(relative=0.2, cosine=0.4, following=0.05, curvature=0.4, sharpness=0.6)


def plant(
    folder: Path,
    batch: Cells,
    *,
    none: Cells = NONE,
    jitter: Sequence[float] = JITTER,
    ends: Mapping[int, int] | None = None,
    name: str = "ics",
    zero: bool = False,
) -> Path:
    """A pair of arms; ``ends`` gives seeds at which the run with BN diverges after that step."""
    entries = []
    arms = {"linear-0.1-none": none, "linear-0.1-batch": batch}
    for seed, offset in enumerate(jitter):
        for arm, cells in arms.items():
            config: dict[str, Any] = {
                "seed": seed, "arm": arm,
                "training": {"learning_rate": 0.1, "batch": "full", "momentum": 0.9 * (cells.predicted is None)},
                "measures": {"shift_every": 10, "virtual_every": 10},
            }  # fmt: skip
            path = f"runs/{arm}-s{seed}-{run_id(config)}"
            normalized = arm.endswith("batch")
            end = (ends or {}).get(seed, 1000) if normalized else 1000
            with RunWriter(folder / path, config=config, environment={}, part_every=10_000) as writer:
                for step in [s for s in STEPS if s <= end]:
                    write(writer, step, cells, offset if normalized else 0.0, "batch" if normalized else "-", zero)
                writer.close("diverged" if end < 1000 else "complete")
            entries.append({"arm": arm, "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1, "study": name, "question": "?", "preset": "laptop", "seeds": list(range(len(jitter))),
        "arms": [{"name": arm, "label": f"linear, lr 0.1, with{'' if 'batch' in arm else 'out'} BN"} for arm in arms],
        "measures": [], "rule": "", "control": "", "config": {}, "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


def write(writer: RunWriter, step: int, cells: Cells, offset: float, mode: str, zero: bool) -> None:
    """Relative sizes carry the seed's ``offset``; the ones of ``following`` do not, nor does the prediction."""
    factor = float(np.exp(offset))
    whole = {"loss": 5.0 if mode == "-" else 5.0 / (1 + step), "step_norm": 1.0}
    if cells.predicted is not None:
        whole["directional_curvature"] = 3.0
    writer.write(step, "covariate_shift", "-", whole, mode=mode)
    for place, layer in enumerate(LAYERS):
        depth = (1 + step) * place
        values = {
            "l2": 7 * cells.relative * factor * depth,
            "relative": cells.relative * factor * depth,
            "cosine": 1.0 if place == 0 else cells.cosine + offset / 10,
            "relative_following": cells.following * (1 + step) * place * (place < 3) if place else 0.02,
            "relative_own": 0.03,
            "relative_all": 0.04,
        }
        if zero and place == 2 and step == 10 and mode == "batch":
            values["relative"] = 0.0
        if cells.predicted is not None:
            values["predicted"] = cells.predicted * depth
        if not cells.finite:
            values = dict.fromkeys(values, np.nan)
        writer.write(step, "covariate_shift", layer, values, mode=mode)
    writer.write(step, "virtual_shift", "-", {"sharpness": 4.0, "converged": cells.converged}, mode=mode)
    writer.write(step, "virtual_shift", "-", {"c": list(SIZES)}, mode=mode)
    for place, layer in enumerate(LAYERS):
        sizes = {
            f"relative_by_{unit}": [
                (getattr(cells, unit) if c == 1 else 0.2) * factor * place if cells.finite else np.nan for c in SIZES
            ]
            for unit in ("curvature", "sharpness")
        }
        writer.write(step, "virtual_shift", layer, sizes, mode=mode)


def readings(folder: Path) -> pd.DataFrame:
    return pd.read_csv(folder / "ics_readings.csv").set_index("reading")


def verdicts(folder: Path) -> dict[str, str]:
    table = readings(folder)
    return table[table["part"] == "verdict"]["says"].to_dict()


def test_planted_ratios_are_read_back_with_their_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    title = draw(plant(tmp_path, LESS)).title
    table = readings(tmp_path)
    for name, ratio in (("relative", 0.5), ("beyond_following", 1.25 / 2), ("virtual_curvature_1", 0.5),
                        ("virtual_sharpness_1", 0.5), ("virtual_sharpness_0.5", 1.0), ("over_predicted", 0.5),
                        ("l2", 0.5)):  # fmt: skip
        row = table.loc[name]
        assert row["estimate"] == pytest.approx(ratio), name
        assert (row["low"], row["high"]) == pytest.approx((ratio * np.exp(-HALF), ratio * np.exp(HALF))), name
        assert (row["seeds"], row["cells_left_out"]) == (3, 0)
    cosine = table.loc["cosine"]
    assert (cosine["estimate"], cosine["low"]) == pytest.approx((0.1, 0.1 - HALF / 10))
    assert (cosine["without"], cosine["with"]) == pytest.approx((0.5, 0.6))
    # The mean of logarithms over layers 2 to 4 and three records, of relative x depth.
    depths = np.log([[(1 + step) * place for place in (1, 2, 3)] for step in STEPS]).mean()
    assert table.loc["relative", "without"] == pytest.approx(0.1 * np.exp(depths))
    late = np.log([[(1 + step) * place for place in (1, 2, 3)] for step in STEPS[1:]]).mean()
    assert table.loc["relative_late", ["without", "with"]].tolist() == pytest.approx(
        np.exp(late) * np.array([0.1, 0.05])
    )
    assert table.loc["beyond_following", ["without", "with"]].tolist() == pytest.approx([2.0, 1.25])
    assert table.loc["loss", ["without", "with"]].tolist() == pytest.approx([1, 1 / 21])
    assert "the loss fell to 1 of its start without and 0.048 with BN" in title
    assert table.loc["eta_curvature", "without"] == pytest.approx(0.3)
    assert table.loc["eta_sharpness", "with"] == pytest.approx(0.4)


WIDE = (-3.0, 0.0, 3.0)
OUTCOMES = {
    "less": (LESS, NONE, JITTER, ("less", "less", "less")),
    "more": (MORE, NONE, JITTER, ("more", "more", "more")),
    "undecided": (MORE, NONE, WIDE, ("undecided", "undecided", "undecided")),
    "one seed": (LESS, NONE, (0.0,), ("undecided", "undecided", "undecided")),
    "the units disagree": (replace(LESS, sharpness=0.6), NONE, JITTER, ("less", "inconclusive", "inconclusive")),
    "size and cosine disagree": (replace(LESS, cosine=0.4), NONE, JITTER, ("inconclusive", "less", "inconclusive")),
    "controls turn it": (replace(LESS, relative=0.2, cosine=0.4, following=0.16, predicted=0.5), NONE, JITTER,
                         ("more", "less", "inconclusive")),
    "the prediction disagrees": (replace(LESS, predicted=0.02), NONE, JITTER, ("less", "inconclusive", "inconclusive")),
    "nothing predicted": (replace(LESS, predicted=None), replace(NONE, predicted=None), JITTER,
                          ("less", "less", "less")),
    "nothing predicted, the units disagree": (replace(LESS, predicted=None, sharpness=0.6),
                                              replace(NONE, predicted=None), JITTER,
                                              ("less", "inconclusive", "inconclusive")),
    "nothing beyond following": (replace(LESS, following=0.2), replace(NONE, following=0.2), JITTER,
                                 ("less", "undecided", "undecided")),
    "perhaps something beyond following": (replace(MORE, following=0.2), replace(NONE, following=0.2), JITTER,
                                           ("more", "undecided", "undecided")),
}  # fmt: skip


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_planted_cells_give_the_stated_verdicts(outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, none, jitter, expected = OUTCOMES[outcome]
    quick(monkeypatch)
    drawn = draw(plant(tmp_path, batch, none=none, jitter=jitter))
    assert tuple(verdicts(tmp_path).values()) == expected
    both = {"less": "less shift with BN", "more": "more shift with BN", "undecided": "undecided",
            "inconclusive": "inconclusive, the readings disagree"}[expected[2]]  # fmt: skip
    assert f"linear, lr 0.1: {both}." in drawn.title
    assert drawn.table.iloc[-1].tolist()[1:] == ["VERDICT on both", "", "", "", both]


def quick(monkeypatch: pytest.MonkeyPatch, *, pictures: bool = False) -> None:
    """Write the numbers alone; ``pictures`` are made, but not written: that takes seconds and has tests of its own."""

    def save(figure: object, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        numbers.to_csv(folder / f"{name}.csv", index=False)
        return (folder / f"{name}.csv",)

    monkeypatch.setattr(style, "save", save)
    for name in () if pictures else ("_figure", "_controls_figure", "_readings_figure"):
        monkeypatch.setattr(ics, name, lambda *_: None)


def test_what_neither_arm_shows_beyond_following_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    drawn = draw(plant(tmp_path, replace(LESS, following=0.2), none=replace(NONE, following=0.2)))
    row = drawn.table[drawn.table["reading"] == "(1) preceding / following"]
    assert row["says"].item() == "undecided (not above 1 in either arm)"
    assert readings(tmp_path).loc["beyond_following", "estimate"] == pytest.approx(0.5)


def pictures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """What `draw` makes, by name, instead of files."""
    seen: dict[str, Figure] = {}

    def save(figure: Figure, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        numbers.to_csv(folder / f"{name}.csv", index=False)
        figure.draw_without_rendering()  # where ticks are found: an axis that cannot be drawn raises here
        seen[name] = figure
        return ()

    monkeypatch.setattr(style, "save", save)
    return seen


def caption_of(figure: Figure) -> str:
    return " ".join(text.get_text() for text in figure.texts)


def words_in(figure: Figure) -> list[str]:
    return [text.get_text().replace("\n", " ") for axes in figure.axes for text in axes.texts]


def test_with_momentum_nothing_is_predicted_shown_or_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = pictures(monkeypatch)
    drawn = draw(plant(tmp_path, replace(LESS, predicted=None), none=replace(NONE, predicted=None)))
    assert not {"over_predicted", "eta_curvature"} & set(readings(tmp_path).index)
    assert "not measured" not in drawn.table["with / without (cosine: -)"].tolist()
    assert "(3)" not in drawn.title
    assert words_in(seen["ics_controls"]) == [
        "nothing is predicted: with momentum a step is not eta times the gradient"
    ]
    assert words_in(seen["ics"]) == words_in(seen["ics_readings"]) == []
    for figure in seen.values():
        caption = caption_of(figure)
        assert "with momentum a step is not eta times the gradient" in caption
        for words in ("Dashed", "(3)", "as measured over", "measured over predicted"):
            assert words not in caption
    legend = seen["ics"].axes[2].get_legend()
    assert legend is not None
    assert "predicted" not in [text.get_text() for text in legend.get_texts()]


def test_a_reading_that_does_not_count_says_why_beside_its_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pictures(monkeypatch)
    draw(plant(tmp_path, replace(LESS, following=0.2), none=replace(NONE, following=0.2)))
    left = seen["ics_readings"].axes[0]
    labels = [label.get_text() for label in left.get_yticklabels()]
    assert "(1) preceding / following: undecided (not above 1 in either arm)" in labels
    assert "relative size: less" in labels
    markers = [line.get_marker() for line in left.get_lines() if line.get_marker() != "None"]
    assert markers == ["<", "o", "<", "<", "<"]


def test_panels_without_a_number_say_so_instead_of_a_logarithmic_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pictures(monkeypatch)
    nothing = replace(NONE, finite=False)
    draw(plant(tmp_path, nothing, none=nothing))
    assert words_in(seen["ics_controls"]) == ["no positive finite number"] * 4
    assert words_in(seen["ics"]) == [*["no positive finite number"] * 2, "no finite number"] * 2
    assert words_in(seen["ics_readings"]) == ["not measured"] * 6
    assert all(axes.get_yscale() == "linear" for name in ("ics", "ics_controls") for axes in seen[name].axes)
    assert "Dashed" not in caption_of(seen["ics"])
    assert "Dotted" not in caption_of(seen["ics_controls"])


def test_one_arm_without_a_number_leaves_the_other_its_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = pictures(monkeypatch)
    draw(plant(tmp_path, replace(NONE, finite=False)))
    assert words_in(seen["ics_controls"]) == ["no positive finite number"]
    assert [axes.get_yscale() for axes in seen["ics_controls"].axes] == ["log", "linear", "log", "log"]


def test_searches_that_did_not_converge_are_counted_where_they_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pictures(monkeypatch)
    title = draw(plant(tmp_path / "good", LESS, ends={1: 10})).title
    assert "tolerance" not in title
    assert "tolerance" not in caption_of(seen["ics"])
    for name in ("ics_controls", "ics_readings"):
        assert "did not come below the tolerance: 0 of 17." in caption_of(seen[name])
    title = draw(plant(tmp_path / "bad", replace(LESS, converged=0.0))).title
    assert title.endswith("did not come below the tolerance: 9 of 18.")


def test_a_cell_that_is_zero_is_left_out_of_both_arms_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    draw(plant(tmp_path, LESS, zero=True))
    row = readings(tmp_path).loc["relative"]
    assert row["cells_left_out"] == 3  # one a seed
    assert row["estimate"] == pytest.approx(0.5)


def test_a_diverged_run_is_drawn_named_and_gives_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch, pictures=True)
    drawn = draw(plant(tmp_path, LESS, ends={1: 10}))
    assert set(verdicts(tmp_path).values()) == {"diverged"}
    assert "no verdict, training diverged (linear-0.1-batch seed 1)" in drawn.title
    assert "Diverged: linear-0.1-batch seed 1; dotted: the last record" in drawn.caption
    assert "none came to the end" not in drawn.caption
    assert readings(tmp_path).loc["relative", "seeds"] == 2
    table = pd.read_csv(tmp_path / "ics.csv")
    mine = table[(table["arm"] == "linear-0.1-batch") & (table["layer"] == 2) & (table["statistic"] == "relative")]
    assert mine["n"].tolist() == [3, 3, 2]


def test_when_all_runs_of_an_arm_diverged_at_once_there_is_still_a_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, pictures=True)
    drawn = draw(plant(tmp_path, LESS, ends={0: 0, 1: 0, 2: 0}))
    assert set(verdicts(tmp_path).values()) == {"diverged"}
    assert "not measured" in drawn.table["with / without (cosine: -)"].tolist()
    assert "of linear-0.1-batch none came to the end" in drawn.caption


def test_captions_of_diverged_runs_say_what_their_figure_does_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = pictures(monkeypatch)
    draw(plant(tmp_path / "one", LESS, ends={1: 10}))
    dotted = [line for line in seen["ics"].axes[3].get_lines() if line.get_transform() != seen["ics"].axes[3].transData]
    assert [list(line.get_xdata()) for line in dotted] == [[10, 10]]
    assert "dotted: the last record" not in caption_of(seen["ics_controls"]) + caption_of(seen["ics_readings"])
    assert "their records up to there are in the means" in caption_of(seen["ics_controls"])
    controls = pd.read_csv(tmp_path / "one" / "ics_controls.csv")
    assert (controls[(controls["panel"] == "which") & (controls["series"] == "own")]["n"] == 3).all()
    assert "in no reading of their pair, with or without BN. Their" in caption_of(seen["ics_readings"])
    draw(plant(tmp_path / "all", LESS, ends={0: 0, 1: 0, 2: 10}))
    assert "which leaves none of linear, lr 0.1." in caption_of(seen["ics_readings"])


def test_every_plotted_number_is_in_the_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def save(figure: Any, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        seen[name] = (figure, numbers)
        return ()

    monkeypatch.setattr(style, "save", save)
    draw(plant(tmp_path, LESS))
    assert set(seen) == {"ics", "ics_controls", "ics_readings"}
    for name, (figure, numbers) in seen.items():
        kept = {
            float(v) for column in ("value", "low", "high", "estimate") if column in numbers for v in numbers[column]
        }
        count = 0
        for axes in figure.axes:
            across = name == "ics_readings"  # there numbers run along x
            for line in axes.get_lines():
                if line.get_transform() == axes.transData:
                    drawn = np.asarray(line.get_xdata() if across else line.get_ydata(), dtype=np.float64)
                    assert {v for v in drawn.tolist() if np.isfinite(v)} <= kept, name
                    count += 1
            for band in axes.collections:
                for path in band.get_paths():
                    assert {float(y) for y in path.vertices[:, 1] if np.isfinite(y)} <= kept, name
        assert count > 5
    curves = seen["ics"][1]
    shown = curves[(curves["arm"] == "linear-0.1-none") & (curves["statistic"] == "relative")]
    assert shown["value"].tolist() == pytest.approx([0.1 * (1 + s) * p for p in (1, 2, 3) for s in STEPS])
    controls = seen["ics_controls"][1].set_index(["panel", "arm", "series", "x"])["value"]
    assert controls["which", "linear-0.1-none", "own", 1] == pytest.approx(0.03)
    share = (1 / 4 * 2 / 4 * 3 / 4) ** (1 / 3)
    assert controls["virtual", "linear-0.1-none", "predicted", 0.5] == pytest.approx(0.5 * share)
    assert controls["predicted", "linear-0.1-none", "ratio", 3] == pytest.approx(1.0)


def test_captions_say_n_units_and_what_bands_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)
    caption = draw(plant(tmp_path, LESS)).caption
    for words in ("n = 3 seeds (0, 1 and 2)", "95% Student t interval over seeds", "every 10 steps", "Dashed"):
        assert words in caption
    one = draw(plant(tmp_path / "one", LESS, jitter=(0.0,))).caption
    assert "One seed (0), so there is no interval and nothing is decided. Dashed" in one
    for words in ("Lines are means", "Student"):
        assert words in caption
        assert words not in one


def test_another_study_and_an_arm_without_its_pair_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds: 'landscape'"):
        draw(plant(tmp_path / "a", LESS, name="landscape"))
    plant(tmp_path / "b", LESS)
    file = tmp_path / "b" / "study.json"
    statement = json.loads(file.read_text())
    statement["arms"] = statement["arms"][:1]
    file.write_text(json.dumps(statement))
    with pytest.raises(StudyError, match="arm linear-0.1-none has no partner"):
        draw(tmp_path / "b")
