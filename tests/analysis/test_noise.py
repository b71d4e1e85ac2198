"""The noise figures against planted records: known passages, drifts and movements, and the verdicts they must give."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from scipy import stats

from analysis import style
from analysis.figures.noise import draw
from analysis.figures.noise_dose import _ticks
from analysis.figures.noise_effects import (
    band_text,
    manipulation,
    movement,
    read_effects,
    seed_band,
    stability_verdict,
    table,
    verdicts,
)
from analysis.load import StudyError, load_study
from diagnostics.record import RunWriter, run_id
from tests.analysis import unrendered

END, EVERY, CADENCE, UNITS = 1000, 100, 10, 5
LAYERS = ("hidden1.nonlinearity", "hidden2.nonlinearity")
NEVER = math.inf
# Unit k drifts (k + 1) / 3 times as much as the layer's median, which is unit 2.
SHARES = np.array([2.0, 4.0, 3.0, 5.0, 1.0]) / 3
LAW = {"n_mu": 0.5, "n_sigma": 1.25, "r_mu": 0.1, "r_sigma": 0.1, "place": "after_affine", "spread": "deviation"}


@dataclass(frozen=True)
class Planted:
    """One arm: the step at which each seed arrives, and how much it drifts from step to step, in sd."""

    hits: Sequence[float]
    drift: float | Sequence[float] = 0.1
    far: float = 0.2
    low: float = 0.2  # accuracy before the arrival
    trained: float = 0.5  # accuracy with the noise on, all the time
    diverged: Sequence[int] = field(default=())


def arms(**changes: Planted) -> dict[str, Planted]:
    found = {
        "none": Planted((NEVER,) * 3, drift=0.1),
        "batch": Planted((300, 310, 320), drift=1e-5),
        "noisy": Planted((300, 320, 340), drift=0.4),
        "noise-only": Planted((NEVER,) * 3, drift=0.9),
        "per_sample-1": Planted((400, 420, 440), drift=0.02),
    }
    return found | {name.replace("__", "-").replace("dose", ""): planted for name, planted in changes.items()}


def normalizer(arm: str) -> dict[str, Any]:
    if arm in ("none", "batch"):
        return {"kind": arm}
    form, _, dose = arm.partition("-")
    if arm in ("noisy", "noise-only"):
        form, dose = "per_step", "1"
    kind = "noise_only" if arm == "noise-only" else "noisy"
    return {"kind": kind, "noise": LAW | {"form": form, "strength": float(dose)}}


def plant(folder: Path, planted: Mapping[str, Planted], *, name: str = "noise") -> Path:
    entries, seeds = [], range(len(next(iter(planted.values())).hits))
    for arm, one in planted.items():
        for seed in seeds:
            config = {
                "seed": seed, "normalizer": normalizer(arm), "data": {"name": "mnist"},
                "network": {"kind": "mlp", "hidden": [UNITS] * 2, "activation": "sigmoid", "init_std": 0.05},
                "training": {"steps": END, "learning_rate": 0.1, "batch": 60},
                "evaluation": {"fixed": 2000, "fixed_every": CADENCE},
                "measures": {"every": EVERY, "ridge_every": EVERY, "sample": 500, "percentiles": [10.0, 50.0, 90.0]},
            }  # fmt: skip
            path = f"runs/{arm}-s{seed}-{run_id(config)}"
            with RunWriter(folder / path, config=config, environment={}, part_every=10_000) as writer:
                write(writer, arm, one, seed)
                writer.close("diverged" if seed in one.diverged else "complete")
            entries.append({"arm": arm, "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1, "study": name, "question": "?", "preset": "laptop", "seeds": list(seeds), "measures": [],
        "arms": [{"name": arm, "label": arm.upper()} for arm in planted], "rule": "", "control": "", "config": {},
        "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


def write(writer: RunWriter, arm: str, one: Planted, seed: int) -> None:
    shown, population = ("-", "-") if arm == "none" else ("batch", "population")
    last = 500 if seed in one.diverged else END
    drift = one.drift if isinstance(one.drift, float) else one.drift[seed]
    for step in range(last + 1):
        if step % CADENCE == 0:
            value = 0.95 if step >= one.hits[seed] else one.low
            writer.write(step, "log", "-", {"fixed_accuracy": value}, mode=population)
            if step < last:
                writer.write(step, "batch_accuracy", "-", {"accuracy": one.trained}, mode=shown)
        if step in (0, last):
            writer.write(step, "log", "-", {"test_accuracy": 0.6}, mode=population)
        if step < last and step % EVERY in (0, 1):
            for depth, layer in enumerate(LAYERS, start=1):
                record(writer, step, layer, depth, drift, one.far, shown)


def record(writer: RunWriter, step: int, layer: str, depth: int, drift: float, far: float, mode: str) -> None:
    """Layer 1 drifts half as much as said, layer 2 one and a half times."""
    if step:
        size = (drift if step % EVERY == 1 else far) * (depth - 0.5)
        writer.write(step, "drift.previous", layer, {"mean_shift": SHARES * size}, mode=mode)
        writer.write(step, "drift.previous", layer, {"mean_shift": size}, mode=mode)
    if step and step % EVERY == 0:
        writer.write(step, "drift.start", layer, {"mean_shift": step / 1000 * depth}, mode=mode)
    if step == 0:
        writer.write(step, "drift.previous", layer, {"mean_shift_floor95": 0.1 * depth}, mode=mode)
    # The network's mean moves by 0.3 in the second step of a pair; this batch lies 0.05 above the other one.
    level = step // EVERY + 0.3 * (step % EVERY)
    other = {"mean": np.full(UNITS, level), "variance": np.full(UNITS, 2.0 + level)}
    own = {"mean": other["mean"] + np.resize((0.05, -0.05), UNITS), "variance": other["variance"] + 0.2}
    writer.write(step, "activations.batch", layer, own, mode=mode)
    writer.write(step, "activations.other", layer, other, mode=mode)
    if step % EVERY == 0:
        middle = np.arange(UNITS) + level
        spread = {"p10": middle - 1, "p50": middle, "p90": middle + 1}
        writer.write(step, "activations.probe", layer, spread, mode=mode)


def effects_of(folder: Path, target: float = 0.9) -> Any:
    return read_effects(load_study(folder), target)


def judged(folder: Path, target: float = 0.9) -> tuple[pd.DataFrame, str]:
    """The table and the sentences, without the pictures."""
    study, effects = load_study(folder), effects_of(folder, target)
    return table(study, effects, target), verdicts(effects)


def cell(shown: pd.DataFrame, row: str, column: str) -> str:
    return str(shown.set_index("").loc[row, column])


# --- steps and areas


def test_passages_are_intervals_and_what_never_arrives_is_shown_as_such(tmp_path: Path) -> None:
    shown, _ = judged(plant(tmp_path, arms()))
    assert cell(shown, "NOISY", "steps to 0.9") == "310-320 (3 of 3)"
    assert cell(shown, "NONE", "steps to 0.9") == ">1000 (0 of 3)"
    assert cell(shown, "NONE", "held-out") == "0.600 ±0.000"
    assert cell(shown, "NOISY", "from start").startswith("0.75 ±")  # 0.1 to 0.9 in layer 1, twice that in layer 2
    # The network without BN is counted with the length of training, so the truth is a smaller ratio.
    assert cell(shown, "noisy BN - without BN", "steps to 0.9").endswith("(at most) faster")


def test_a_ratio_of_steps_holds_for_every_passage_between_the_evaluations(tmp_path: Path) -> None:
    slower = arms(noisy=Planted((500, 510, 530), drift=0.4))
    found = movement(effects_of(plant(tmp_path, slower)))[0]
    middle = np.log([500, 510, 530]) - np.log([400, 420, 440])
    plain = stats.t.interval(0.95, 2, loc=middle.mean(), scale=stats.sem(middle))
    assert found.steps.estimate == pytest.approx(middle.mean(), abs=0.01)
    assert found.steps.low < plain[0] < plain[1] < found.steps.high
    least, most = np.log([490, 500, 520]) - np.log([400, 420, 440]), np.log([500, 510, 530]) - np.log([390, 410, 430])
    for x in (least, most, np.array([least[0], most[1], most[2]])):
        low, high = stats.t.interval(0.95, 2, loc=x.mean(), scale=stats.sem(x))
        assert found.steps.low <= low + 1e-12
        assert found.steps.high >= high - 1e-12


def test_areas_are_mean_heights_with_noise_off_and_on(tmp_path: Path) -> None:
    planted = arms(noisy=Planted((300, 320, 340), low=0.1, trained=0.7), per_sample__1=Planted((NEVER,) * 3, low=0.1))
    effects = {effect.arm: effect for effect in effects_of(plant(tmp_path, planted))}
    # 0.1 up to one cadence before the arrival, a ramp, 0.95 from there on.
    expected = [(0.1 * (hit - 10) + 0.525 * 10 + 0.95 * (END - hit)) / END for hit in (300, 320, 340)]
    assert effects["noisy"].area == pytest.approx(expected)
    assert effects["noisy"].area_trained == pytest.approx([0.7] * 3)
    found = movement(tuple(effects.values()))[0]
    assert found.area is not None
    assert found.area.estimate == pytest.approx(np.mean(expected) - 0.1)
    assert found.area_trained is not None
    assert found.area_trained.estimate == pytest.approx(0.2)
    assert found.censored == (0, 3)


def test_the_target_is_the_readers(tmp_path: Path) -> None:
    folder = plant(tmp_path, arms(none=Planted((NEVER,) * 3, low=0.5)))
    assert cell(judged(folder, 0.5)[0], "NONE", "steps to 0.5") == "<=0 (3 of 3)"
    assert cell(judged(folder, 0.96)[0], "NOISY", "steps to 0.96") == ">1000 (0 of 3)"
    for wrong in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="target must lie between 0 and 1"):
            draw(folder, target=wrong)


# --- the rules


@pytest.mark.parametrize(
    ("hits", "verdict"),
    [((500, 520, 540), "supported"), ((300, 320, 340), "refuted"), ((300, 420, 600), "undecided"),
     ((400, 430, 440), "undecided")],
)  # fmt: skip
def test_what_movement_does_is_judged_by_an_interval(tmp_path: Path, hits: Sequence[float], verdict: str) -> None:
    """Per sample arrives at 400, 420, 440. In the last case the sign is clear, but not with one cadence's doubt."""
    shown, said = judged(plant(tmp_path, arms(noisy=Planted(hits, drift=0.4))))
    asked = "Movement apart from noise (per step minus per sample, dose 1) slows training:"
    assert said.startswith(f"{asked} {verdict} by steps, x")
    outcome = {"supported": "slower", "refuted": "faster"}.get(verdict, "undecided")
    assert cell(shown, "per step - per sample, dose 1", "steps to 0.9").endswith(outcome)


@pytest.mark.parametrize(("low", "verdict"), [(0.1, "supported"), (0.4, "refuted"), (0.2, "undecided")])
def test_areas_give_their_own_verdict(tmp_path: Path, low: float, verdict: str) -> None:
    planted = arms(noisy=Planted((400, 420, 440), low=low), per_sample__1=Planted((410, 420, 430), low=0.2))
    found = movement(effects_of(plant(tmp_path, planted)))[0]
    assert found.verdict("area") == verdict
    assert found.verdict("steps") == "undecided"
    assert found.verdict("area_trained") == "undecided"  # no difference at all


def test_doses_are_judged_together_by_the_mean_of_their_logarithms(tmp_path: Path) -> None:
    planted = arms(per_step__2=Planted((300, 300, 300)), per_sample__2=Planted((600, 660, 720)))
    found = movement(effects_of(plant(tmp_path, planted)))
    assert [one.name.rpartition(" - per sample, ")[2] for one in found] == ["dose 1", "dose 2", "all doses"]
    assert found[2].steps.estimate == pytest.approx((found[0].steps.estimate + found[1].steps.estimate) / 2)
    assert found[2].verdict("steps") == "refuted"


def test_manipulation_passes_where_noise_drifts_more_than_the_plain_network_and_the_floor(tmp_path: Path) -> None:
    planted = arms(noisy=Planted((300, 320, 340), drift=(0.4, 0.42, 0.44)))
    check = manipulation(effects_of(plant(tmp_path, planted)))
    assert check.passed
    assert check.excess.estimate == pytest.approx(0.32)  # layers at half and at one and a half times, on average 1
    assert check.above_floor.estimate == pytest.approx(0.42 - 0.15)
    assert (check.drift, check.floor) == pytest.approx((0.42, 0.15))
    half = stats.t.ppf(0.975, 2) * 0.02 / math.sqrt(3)
    assert (check.excess.low, check.excess.high) == pytest.approx((0.32 - half, 0.32 + half))


@pytest.mark.parametrize(
    ("noisy", "none"),
    [((0.1, 0.1, 0.1), 0.05), ((0.4, 0.4, 0.4), 0.5), ((0.2, 0.5, 0.8), 0.05), ((0.5, 0.2, 0.8), 0.01)],
    ids=["under the floor", "under the plain network", "too uncertain", "too uncertain beside the floor"],
)
def test_manipulation_fails_on_records_where_noisy_bn_does_not_drift(
    tmp_path: Path, noisy: Sequence[float], none: float
) -> None:
    planted = arms(noisy=Planted((300, 320, 340), drift=noisy), none=Planted((NEVER,) * 3, drift=none))
    _, said = judged(plant(tmp_path, planted))
    asked, needed, checked = said.split("\n")
    assert checked.startswith("Manipulation FAILED")
    assert "its own floor of 0.150 sd" in checked
    assert "(noisy BN - without BN, by steps): nothing follows: the manipulation check did not pass" in needed
    assert asked.endswith("But the manipulation check did not pass.")


@pytest.mark.parametrize(
    ("none", "verdict"),
    [((NEVER,) * 3, "refuted"), ((100, 110, 120), "supported"), ((200, 330, 460), "undecided")],
)
def test_stability_is_refuted_where_the_less_stable_network_is_the_faster_one(
    tmp_path: Path, none: Sequence[float], verdict: str
) -> None:
    _, said = judged(plant(tmp_path, arms(none=Planted(none, drift=0.1))))
    assert "Manipulation passed: " in said
    assert f"\nStability is needed for speed (noisy BN - without BN, by steps): {verdict}, x" in said


def test_what_never_arrived_is_neither_compared_by_steps_nor_called_faster(tmp_path: Path) -> None:
    planted = {arm: Planted((NEVER,) * 3, one.drift) for arm, one in arms().items()}
    planted["noisy"] = Planted((NEVER,) * 3, drift=(0.4, 0.42, 0.44), low=0.4)
    shown, said = judged(plant(tmp_path, planted))
    assert set(shown.loc[5:, "steps to 0.9"]) == {"no run arrived"}
    assert cell(shown, "per step - per sample, dose 1", "area").endswith(" higher")
    assert "refuted by area, +0.2" in said
    assert said.count("undecided by steps, no run arrived") == 1
    assert "by steps): undecided, no run arrived." in said
    assert "faster" not in said + shown.to_string()
    shown, _ = judged(plant(tmp_path / "one", planted | {"noisy": Planted((NEVER, NEVER, 900), drift=0.4)}))
    assert cell(shown, "per step - per sample, dose 1", "steps to 0.9").startswith("x0.9")


def test_one_seed_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "save", lambda *_: ())  # rendering is what takes long
    one = {arm: Planted(p.hits[:1], p.drift) for arm, p in arms().items()}
    drawn = draw(plant(tmp_path, one))
    assert "Manipulation undecided, no interval" in drawn.title
    assert "undecided by steps" in drawn.title
    assert "there is no interval" in drawn.caption
    check = manipulation(effects_of(tmp_path))
    assert not check.passed
    assert stability_verdict(check, movement(effects_of(tmp_path))[0]) == "nothing follows"


def test_the_sources_arms_alone_say_nothing_of_movement(tmp_path: Path) -> None:
    planted = arms()
    del planted["per_sample-1"]
    shown, said = judged(plant(tmp_path, planted))
    assert "Movement apart from noise: not asked" in said
    assert len(shown) == 4 + 3


def test_a_run_that_diverged_never_arrives_and_has_no_area(tmp_path: Path) -> None:
    planted = arms(per_sample__1=Planted((400, 420, NEVER), diverged=(2,)))
    shown, _ = judged(plant(tmp_path, planted))
    effect = {one.arm: one for one in effects_of(tmp_path)}["per_sample-1"]
    assert effect.restricted[0].tolist() == [390, 410, END]
    assert effect.restricted[1].tolist() == [400, 420, END]
    assert np.isnan(effect.area).tolist() == [False, False, True]
    assert cell(shown, "PER_SAMPLE-1", "area") == "1 of 3 diverged"
    assert cell(shown, "per step - per sample, dose 1", "area") == "a run diverged"


def test_other_studies_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="holds 'drift'"):
        draw(plant(tmp_path / "other", arms(), name="drift"))
    planted = arms()
    del planted["noise-only"]
    with pytest.raises(StudyError, match="which lacks noise-only"):
        draw(plant(tmp_path / "less", planted))


# --- what is drawn


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Figure], dict[str, pd.DataFrame]]:
    """All three figures and their numbers, read back from disk."""
    folder = plant(tmp_path_factory.mktemp("drawing"), arms(fixed__1=Planted((500, NEVER, NEVER), 0.01)))
    figures, save = {}, unrendered.save

    def keep(figure: Figure, place: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        figures[name] = figure
        return save(figure, place, name, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", keep)
        drawn = draw(folder)
    assert [path.name for path in drawn.paths if path.suffix == ".csv"] == [f"{name}.csv" for name in figures]
    return figures, {name: pd.read_csv(folder / f"{name}.csv", keep_default_na=False) for name in figures}


def numbers_in(table: pd.DataFrame) -> np.ndarray:
    floats = pd.to_numeric(table.stack().astype(str), errors="coerce").to_numpy(dtype=np.float64)
    return np.unique(floats[~np.isnan(floats)])


@pytest.mark.parametrize("name", ["noise", "noise_stability", "noise_dose"])
def test_every_plotted_number_is_in_the_csv(
    drawing: tuple[dict[str, Figure], dict[str, pd.DataFrame]], name: str
) -> None:
    figures, tables = drawing
    known = numbers_in(tables[name])
    seen = 0
    for axes in figures[name].axes:
        ridges = name == "noise" and axes.get_ylabel() != "training accuracy" and "layer" in axes.get_title(loc="left")
        for line in axes.get_lines():
            drawn = np.asarray(line.get_xdata(), dtype=np.float64)
            if not ridges:  # a ridge's height is its density times a factor, on top of its step
                drawn = np.concatenate([drawn, np.asarray(line.get_ydata(), dtype=np.float64)])
            for value in drawn[
                np.isfinite(drawn) & (drawn != 1e-4)
            ]:  # where what hardly moves is drawn, as the caption says
                nearest = known[np.abs(known - value).argmin()]
                assert nearest == pytest.approx(value, rel=1e-12, abs=1e-15)
                seen += 1
    assert seen > 40


def test_the_unit_shown_moves_as_much_as_the_median_one(
    drawing: tuple[dict[str, Figure], dict[str, pd.DataFrame]],
) -> None:
    ridges = drawing[1]["noise"]
    ridges = ridges[ridges["panel"] == "ridge"]
    assert set(ridges["unit"].astype(float)) == {2.0}
    assert set(ridges["layer"]) == set(LAYERS)
    one = ridges[(ridges["arm"] == "noisy") & (ridges["layer"] == LAYERS[0]) & (ridges["step"].astype(float) == 300)]
    at, density = (one[column].astype(float).to_numpy() for column in ("at", "value"))
    assert np.trapezoid(density, at) == pytest.approx(1, abs=0.01)
    assert np.trapezoid(density * at, at) == pytest.approx(2 + 3, abs=0.02)  # unit 2's middle at the fourth record


def test_planted_movement_and_sampling_come_apart(drawing: tuple[dict[str, Figure], dict[str, pd.DataFrame]]) -> None:
    table = drawing[1]["noise_stability"]
    means = table[(table["series"] == "mean") & (table["arm"] == "noisy") & (table["layer"] == LAYERS[1])]
    found = means.set_index(["moment", "reference", "part"])["value"]
    assert found.loc[("mean", "step", "total")].to_numpy() == pytest.approx(0.3)
    assert found.loc[("mean", "step", "movement")].to_numpy() == pytest.approx(0.3)
    assert found.loc[("mean", "step", "sampling")].to_numpy() == pytest.approx(0.05)
    assert found.loc[("variance", "step", "sampling")].to_numpy() == pytest.approx(0.2)
    assert found.loc[("mean", "start", "total")].to_numpy() == pytest.approx(np.arange(1, 10))
    assert found.loc[("variance", "start", "movement")].to_numpy() == pytest.approx(np.arange(1, 10))
    assert {"min", "max", "one seed"} < set(table["series"])


def test_bands_of_few_seeds_are_their_range_and_of_more_an_interval() -> None:
    values = np.array([[1.0, 4.0], [2.0, 5.0], [6.0, 0.0], [3.0, 3.0]])
    few = seed_band(values[:3])
    assert (few["min"].tolist(), few["max"].tolist()) == ([1, 0], [6, 5])
    assert few["mean"] == pytest.approx([3, 3])
    more = seed_band(values)
    low, high = stats.t.interval(0.95, 3, loc=values.mean(0), scale=stats.sem(values))
    assert more["low"] == pytest.approx(low)
    assert more["high"] == pytest.approx(high)
    assert np.isnan(seed_band(values[:1])["low"]).all()
    assert "lowest to the highest" in band_text((0, 1, 2))
    assert "Student" in band_text((0, 1, 2, 3))


@pytest.mark.parametrize(("low", "high"), [(0.75, 0.9), (0.0101, 0.0109), (8, 120), (1e-4, 1e5)])
def test_an_axis_has_at_least_three_ticks(low: float, high: float) -> None:
    found = _ticks(low, high)
    assert len(found) >= 3
    assert all(low <= tick <= high for tick in found)


def test_captions_say_only_what_was_run_and_what_answers_the_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("analysis.style.save", unrendered.save)
    captions: list[str] = []
    new_figure = style.new_figure
    monkeypatch.setattr("analysis.style.new_figure", lambda *a: captions.append(a[2]) or new_figure(*a))
    planted = arms(fixed__1=Planted((500, NEVER, NEVER), 0.01))
    draw(plant(tmp_path / "all", planted))
    del planted["per_sample-1"], planted["fixed-1"]
    draw(plant(tmp_path / "few", planted))
    main, stability, dose, *_, alone = captions
    assert "noise_dose" in main
    assert "noise_dose" in stability
    assert "compare the square with the circle" in dose
    assert "0.150 sd" in dose
    assert "a fixed shift" in dose
    assert not [word for word in ("circle", "fixed shift", "diamond") if word in alone]


def test_doses_stand_at_their_median_steps_and_censored_ones_at_the_end(
    drawing: tuple[dict[str, Figure], dict[str, pd.DataFrame]],
) -> None:
    table = drawing[1]["noise_dose"]
    middle = table[table["seed"] == "all"].set_index("arm")
    assert middle.loc["noisy", ["steps", "drift"]].astype(float).tolist() == pytest.approx([320, 0.4])
    assert middle.loc["fixed-1", "steps"] == END
    assert (middle.loc["fixed-1", "form"], float(middle.loc["fixed-1", "dose"])) == ("fixed", 1)
    assert len(table) == 6 * 4
    runs = table[(table["arm"] == "noisy") & (table["seed"] != "all")]
    assert runs[["far", "from_start", "floor"]].astype(float).to_numpy() == pytest.approx(
        np.array([[0.2, 0.75, 0.15]] * 3)
    )
    # what the check judges by is drawn: in every panel, at the mean floor of noisy BN
    for axes in drawing[0]["noise_dose"].axes:
        lines = [line for line in axes.get_lines() if line.get_label() == "floor of the check"]
        assert [float(np.asarray(line.get_xdata())[0]) for line in lines] == pytest.approx([0.15])
