"""The drift figures against planted records: known reductions, known paths."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.figures.drift import DISTANCES, POINTS, draw
from analysis.load import StudyError
from diagnostics.record import RunWriter, run_id
from tests.analysis.unrendered import unrendered

EPOCH, EPOCHS, UNITS, LAYERS = 1000, 5, 4, 2
STEPS = [500 * k for k in range(11)]


def plant(
    folder: Path, reductions: list[float], *, status: str = "complete", last: int = 5000, epochs: int = EPOCHS
) -> Path:
    """Arms whose epoch-wise drift differs by a factor 1 - reduction, one a seed; after the nonlinearity, population."""
    entries = []
    for seed, reduction in enumerate(reductions):
        for arm in ("none", "batch"):
            config = {
                "seed": seed,
                "arm": arm,
                "network": {"hidden": [UNITS] * LAYERS},
                "training": {"learning_rate": 0.1, "batch": 60},
                "measures": {"every": 10, "epoch": EPOCH, "epochs": epochs, "sample": 100, "path_every": 10,
                             "percentiles": [15.0, 50.0, 85.0]},
            }  # fmt: skip
            path = f"runs/{arm}-s{seed}-{run_id(config)}"
            with RunWriter(folder / path, config=config, environment={}, part_every=10_000) as writer:
                factor = 1.0 if arm == "none" else 1 - reduction
                for step in [s for s in STEPS if s <= last]:
                    write(writer, step, arm, factor)
                writer.close(status)
            entries.append({"arm": arm, "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1, "study": "drift", "question": "?", "preset": "laptop", "seeds": list(range(len(reductions))),
        "arms": [{"name": "none", "label": "without BN"}, {"name": "batch", "label": "with BN"}],
        "measures": [], "rule": "", "control": "", "config": {}, "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


def write(writer: RunWriter, step: int, arm: str, factor: float) -> None:
    modes = ("batch",) if arm == "none" else ("batch", "population")
    epoch = step / EPOCH
    for point in POINTS:
        for mode in modes:
            shown = "-" if arm == "none" else mode
            for layer in range(1, LAYERS + 1):
                name = f"hidden{layer}.{'nonlinearity' if point == 'nonlinear' else 'normalizer'}"
                move = factor * epoch * (1 + np.arange(UNITS)) * layer
                values = {"mean": 5 + move, "variance": (2 + 0.1 * move) ** 2}
                values |= {f"p{q}": np.arange(UNITS) + q / 50 for q in (15, 50, 85)}
                writer.write(step, f"activations.{point}.{mode}", name, values, mode=shown)
                medians = dict.fromkeys(DISTANCES, 0.3 * factor) if step else {}
                floors = {f"{d}_{kind}": 0.05 for d in DISTANCES for kind in ("floor", "floor95")}
                writer.write(step, f"drift.previous.{point}.{mode}", name, medians | floors, mode=shown)
        if point != "after":
            for layer in range(1, LAYERS + 1):
                name = f"hidden{layer}.{'nonlinearity' if point == 'nonlinear' else 'normalizer'}"
                shown = "-" if arm == "none" else "batch"
                parts = {"mean_change": 0.5, "mean_change_sampling": 0.4, "mean_change_parameters": 0.2}
                writer.write(step, f"minibatch_shift.{point}", name, parts, mode=shown)
                if step:
                    writer.write(step, f"drift.path.{point}", name, {"mean_shift": 2.0 * factor}, mode=shown)
    # Without BN the loss falls by 0.0002 a step, with BN twice as fast.
    loss = 2.0 - 0.0002 * step * (1 if arm == "none" else 2)
    writer.write(step, "log", "-", {"fixed_loss": loss}, mode="-" if arm == "none" else "population")


@pytest.fixture(autouse=True)
def _unrendered() -> Iterator[None]:
    with unrendered():
        yield


def numbers(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv")


def test_planted_reductions_are_read_back_with_their_interval(tmp_path: Path) -> None:
    planted = [0.5, 0.6, 0.7]
    draw(plant(tmp_path, planted))
    table = numbers(tmp_path, "drift_referee").set_index(["point", "mode", "scale"])
    unscaled = table.loc[("nonlinear", "population", "unscaled")]
    assert unscaled["reduction"] == pytest.approx(0.6)
    half = 4.302652729911275 * 0.1 / np.sqrt(3)  # Student t, two degrees of freedom
    assert unscaled["low"] == pytest.approx(0.6 - half)
    assert unscaled["high"] == pytest.approx(0.6 + half)
    assert unscaled["seeds"] == 3
    assert unscaled["without"] == pytest.approx(np.mean([2.5 * layer * f for layer in (1, 2) for f in (1, 0.1)]))


@pytest.mark.parametrize(
    ("planted", "verdict"),
    [([0.5, 0.51, 0.52], "over 25%"), ([0.1, 0.11, 0.12], "under 25%"), ([0.1, 0.25, 0.4], "undecided"),
     ([-0.5, -0.51, -0.49], "under 25%"), ([0.9], "one seed, undecided")],
)  # fmt: skip
def test_the_verdict_needs_an_interval_that_excludes_the_bar(
    tmp_path: Path, planted: list[float], verdict: str
) -> None:
    drawn = draw(plant(tmp_path, planted))
    table = numbers(tmp_path, "drift_referee")
    free = table[(table.point == "nonlinear") & (table["mode"] == "population") & (table.scale == "unscaled")]
    assert free["verdict"].item() == verdict
    assert verdict in drawn.title
    assert ("no interval" in drawn.caption) == (len(planted) == 1)


def test_what_bn_pins_is_marked_and_what_passes_the_pin_on_too(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, [0.5, 0.6]))
    table = numbers(tmp_path, "drift_referee")
    pinned = table[table["pinned"].notna()]
    assert set(zip(pinned.point, pinned["mode"], strict=True)) == {("after", "batch"), ("nonlinear", "batch")}
    shown = drawn.table[drawn.table["layer"] == "1"].set_index(["point, mode", "drift"])["reduction"]
    assert shown[("after, batch", "mean")].endswith("*")
    assert not shown[("before, batch", "mean")].endswith("*")
    assert not shown[("after, batch", "shape W1")].endswith("*")
    assert not shown[("after, batch", "W1")].endswith("*")  # mean and sd are pinned, the shape is free


def test_another_span_than_the_referees_gives_no_verdict(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, [0.5, 0.51, 0.52], epochs=4))
    assert set(numbers(tmp_path, "drift_referee")["verdict"]) == {
        "no verdict from epochs that end at 1000, 2000, 3000 and 4000"
    }
    assert "no verdict from epochs that end" in drawn.title


def test_a_drift_many_times_larger_is_said_as_a_factor(tmp_path: Path) -> None:
    drawn = draw(plant(tmp_path, [-99.0, -99.0]))
    last = drawn.table[(drawn.table["point, mode"] == "nonlinear, population") & (drawn.table["drift"] == "epoch")]
    assert last["reduction"].item() == "100 [100, 100] times the drift"
    one = draw(plant(tmp_path / "one", [-99.0]))
    assert "100 times the drift" in one.title
    assert "One seed, no intervals" in one.title


def test_the_table_has_every_layer_point_mode_and_distance(tmp_path: Path) -> None:
    table = draw(plant(tmp_path, [0.5, 0.5])).table
    assert len(table) == LAYERS * 3 * 2 * len(DISTANCES) + 12
    row = table[(table["point, mode"] == "before, population") & (table["drift"] == "W1") & (table["layer"] == "2")]
    assert row[["without BN", "with BN", "floor"]].to_numpy().tolist() == [["0.3", "0.15", "0.05"]]
    assert row["reduction"].item().startswith("50%")


def test_paths_end_at_first_passages_of_levels_that_both_arms_reach(tmp_path: Path) -> None:
    draw(plant(tmp_path, [0.5, 0.5]))
    table = numbers(tmp_path, "drift_progress")
    path = table[(table.panel == "path") & (table.point == "before")]
    assert path["level"].max() < 2.0
    assert path["level"].min() == pytest.approx(1.0)  # what the slower arm reaches
    last = path[np.isclose(path["level"], path["level"].min())].set_index(["arm", "seed"])
    assert last.loc[("none", 0), ["after", "by", "value"]].tolist() == [4500, 5000, 20.0]
    assert last.loc[("batch", 0), ["after", "by", "value"]].tolist() == [2000, 2500, 5.0]


def test_runs_too_short_for_the_referee_and_diverged_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"needs records at steps \[0, 1000, .*\]; \[5000\] are missing"):
        draw(plant(tmp_path / "short", [0.5, 0.5], last=4500))
    with pytest.raises(StudyError, match="diverged: none-s0"):
        draw(plant(tmp_path / "lost", [0.5], status="diverged"))
    with pytest.raises(StudyError, match="looked for"):
        draw(tmp_path / "nowhere")
