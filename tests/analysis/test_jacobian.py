"""The Jacobian figures against planted spectra, and Marchenko and Pastur's law against matrices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from analysis import style
from analysis.figures import jacobian
from analysis.figures.jacobian import ACTIVATIONS, ARMS, INITS, NUMBERS, draw, marchenko_pastur
from analysis.load import StudyError, load_study
from analysis.style import Drawn
from diagnostics.record import RunWriter, run_id
from diagnostics.spectrum import effective_dimension
from tests.analysis.unrendered import unrendered

UNITS, SAMPLE, STEPS, SEEDS = 10, 50, (0, 1, 10, 99), 3
# What a net of the planted study has at the end: mean over seeds, and the seeds lie 1% around it.
USUAL = {"effective_dimension": 5.0, "rank": 9.0, "mean_square": 1.5, "spread": 0.8}
GOOD = {"effective_dimension": 8.0, "rank": 10.0, "mean_square": 1.0, "spread": 0.05}
Planted = Mapping[str, Mapping[str, float]]  # arm -> what differs from USUAL


def plant(
    folder: Path,
    planted: Planted,
    *,
    name: str = "jacobian",
    status: str = "complete",
    seeds: int = SEEDS,
    hidden: int = 3,
    widths: tuple[int, ...] = (),
    lost: tuple[str, ...] = (),
    apart: str = "",
) -> Path:
    entries, arms = [], ["-".join(key) for key in product(ACTIVATIONS, INITS, ARMS)]
    for arm, seed in product([*arms, "init"], range(seeds)):
        config = {
            "seed": seed,
            "arm": arm,
            "network": {"hidden": list(widths or [UNITS] * hidden)},
            "training": {"learning_rate": 0.1, "batch": 60},
            "measures": {"sample": SAMPLE, "examples": 4},
        }
        path = f"runs/{arm}-s{seed}-{run_id(config)}"
        with RunWriter(folder / path, config=config, environment={}) as writer:
            if arm == "init":
                untrained(writer, seed, lost)
            else:
                changed = planted.get(arm, {}) if arm != apart or seed == 0 else {}
                trained(writer, seed, USUAL | changed)
            writer.close(status)
        entries.append({"arm": arm, "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1, "study": name, "question": "?", "preset": "laptop", "seeds": list(range(seeds)),
        "arms": [{"name": arm, "label": arm} for arm in [*arms, "init"]],
        "measures": [], "rule": "", "control": "", "config": {}, "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


def trained(writer: RunWriter, seed: int, at: Mapping[str, float]) -> None:
    around = 1 + 0.01 * (seed - 1)
    for step in STEPS:
        writer.advance(step)
        for layer in (1, 2, 3):
            name = f"hidden{layer}.normalizer"
            writer.write(step, "jacobian", name, {"effective_dimension": at["effective_dimension"] * around})
            if layer > 1:
                # 1, 2, ... and a zero, which has no logarithm; twice as large at the second map
                values = (layer - 1) * np.array([*range(UNITS - 1, 0, -1), 0.0])
                writer.write(step, "jacobian", name, {"singular_value": values})
                numbers = dict.fromkeys(NUMBERS, 1.0) | {key: at[key] * around for key in ("mean_square", "spread")}
                numbers["rank"] = at["rank"] if at["rank"] == UNITS else float(np.minimum(at["rank"] * around, UNITS))
                numbers["nonfinite"] = at.get("nonfinite", 0.0)
                writer.write(step, "jacobian", name, numbers)
            writer.write(step, "weights", f"hidden{layer}.linear", {"spread": 0.5 + 0.1 * layer + 0.001 * step})


def untrained(writer: RunWriter, seed: int, lost: tuple[str, ...] = ()) -> None:
    for key, width, batch in product(product(ACTIVATIONS, INITS, ARMS), (50, 100), (16, 64)):
        numbers = {"mean_square": width / batch, "spread": math.nan if key == lost else float(seed + batch)}
        writer.write(0, ".".join(key), f"w{width}.m{batch}", numbers)


def maps(folder: Path, arm: str) -> list[jacobian._Map]:
    activation, init, normalizer = arm.split("-")
    return jacobian._maps(load_study(folder), (activation, init, normalizer))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drawn]:
    """Drawn once: four pictures take seconds."""
    planted = {
        "linear-orthogonal-batch": GOOD,
        "linear-orthogonal-none": {"rank": 10.0},
        "tanh-gaussian-batch": {"spread": 0.4},
        "sigmoid-gaussian-batch": {"spread": 0.4, "rank": 5.0},
        "relu-gaussian-batch": {"spread": 1.6},
    }
    folder = plant(tmp_path_factory.mktemp("jacobian"), planted)
    with unrendered():
        return folder, draw(folder)


def test_the_title_counts_what_holds_and_what_fails(drawn: tuple[Path, Drawn]) -> None:
    """Two maps an arm: one arm's hold in every part, all others fail in every part."""
    _, found = drawn
    for when in ("start", "end"):
        counted = "2 hold, 14 fail, 0 undecided"
        assert f"{when}: premise {counted}; rank {counted}; mean square {counted};" in found.title
    assert f"spread {counted}; all {counted}" in found.title
    # orthogonal linear and tanh are smaller with BN, ReLU is larger, sigmoid has fewer values, the rest are equal
    assert "supported 4, refuted 2, undecided 8, ranks differ 2." in found.title


def test_the_title_says_the_bars_and_what_the_words_mean(drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    assert "above 0.9 of 1/(1/C + 1/N), here 7.5. Rank: all K = min(P, Q) singular values" in found.title
    assert "nonzero, here 10. Mean square (square) of all K: 0.9 to 1.1." in found.title
    assert "Spread, the standard deviation of the logarithm of the nonzero ones: below 0.1." in found.title
    assert "distance |J J^T - I|_F / sqrt(P)" in found.title
    assert "a letter a map: h holds, f fails, u undecided, n undefined" in found.title


def test_every_net_has_its_maps_verdicts_beneath_its_numbers(drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    arrow = "\N{RIGHTWARDS ARROW}"
    nets = found.table["net"].tolist()
    for net, letters in (("linear orthogonal BN", f"hh{arrow}hh"), ("tanh Gaussian BN", f"ff{arrow}ff")):
        row = found.table.iloc[nets.index(net) + 1]
        assert row["net"] == f"  verdicts; all {letters}"
        assert {row[name] for name in ("dim.", "square", "spread", "rank")} == {letters}
    row = found.table.iloc[nets.index("linear orthogonal") + 1]
    assert (row["rank"], row["spread"]) == (f"hh{arrow}hh", f"ff{arrow}ff")


def test_letters_are_of_each_map_and_end(tmp_path: Path) -> None:
    found = maps(plant(tmp_path, {"tanh-gaussian-batch": GOOD}), "tanh-gaussian-batch")
    for one, seeds, at, changed in ((0, 0, -1, math.nan), (1, slice(None), 0, (0.09, 0.1, 0.11))):
        spread = found[one].values["spread"].copy()
        spread[seeds, at] = changed
        found[one] = replace(found[one], values={**found[one].values, "spread": spread})
    planted = [replace(one, key=key) for key in product(ACTIVATIONS, INITS, ARMS) for one in found]
    table = jacobian._table(planted, dict.fromkeys(product(ACTIVATIONS, INITS, ARMS), (1.0, 1.0)))
    assert table.iloc[1]["spread"] == "hu\N{RIGHTWARDS ARROW}nh"
    assert table.iloc[1]["net"] == "  verdicts; all hu\N{RIGHTWARDS ARROW}nh"
    assert table.iloc[1]["rank"] == "hh\N{RIGHTWARDS ARROW}hh"
    assert jacobian._count(["holds", "undecided", "undefined", "undecided"]) == (
        "1 hold, 0 fail, 2 undecided, 1 undefined"
    )


def test_verdicts_are_a_table_with_intervals_and_bars(drawn: tuple[Path, Drawn]) -> None:
    folder, found = drawn
    assert folder / "jacobian_verdicts.csv" in found.paths
    table = pd.read_csv(folder / "jacobian_verdicts.csv")
    assert len(table) == 16 * 2 * 2 * 5  # nets, maps, ends, parts and all
    assert set(table["step"]) == {0, 99}
    good = (table.activation == "linear") & (table.init == "orthogonal") & (table.arm == "batch")
    assert set(table[good]["verdict"]) == {"holds"}
    rows = table[(table.activation == "relu") & (table.arm == "batch") & (table.init == "gaussian")]
    spread = rows[(rows.part == "spread") & (rows.layer == 3) & (rows.when == "end")].iloc[0]
    half = 4.302653 * 0.016 / math.sqrt(3)  # Student's t of 2 degrees of freedom
    assert (spread["verdict"], spread["at_most"]) == ("fails", 0.1)
    assert math.isnan(spread["at_least"])
    assert tuple(spread[["estimate", "low", "high"]]) == pytest.approx((1.6, 1.6 - half, 1.6 + half))
    bars = table.groupby("part")["at_least"].unique()
    assert (bars["premise"].tolist(), bars["rank"].tolist()) == (pytest.approx([7.5]), [10])


def test_the_table_has_two_rows_for_every_net(drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    assert len(found.table) == 32
    row = found.table.set_index("net").loc["tanh Gaussian BN"]
    assert row["spread"] == "0.40\N{RIGHTWARDS ARROW}0.40"
    assert row["dim."] == "5\N{RIGHTWARDS ARROW}5"
    assert row["W's"] == "0.75\N{RIGHTWARDS ARROW}0.85"


def test_quantiles_are_of_what_is_not_zero(drawn: tuple[Path, Drawn]) -> None:
    folder, _ = drawn
    table = pd.read_csv(folder / "jacobian.csv")
    rows = table[(table.activation == "tanh") & (table.arm == "batch") & (table.step == 10)]
    assert set(rows.init) == {"gaussian"}
    for layer in (2, 3):
        mine = rows[rows.layer == layer]
        assert len(mine) == SEEDS
        assert mine["q50"].tolist() == pytest.approx([5.0 * (layer - 1)] * SEEDS)
        assert mine["q5"].tolist() == pytest.approx([1.4 * (layer - 1)] * SEEDS)
    law = table[table.activation == "Marchenko-Pastur"]
    assert law["q50"].item() == pytest.approx(np.median(marchenko_pastur(1.0)))
    assert set(pd.read_csv(folder / "jacobian_orthogonal.csv").init) == {"orthogonal"}


def test_parts_and_untrained_numbers_are_those_recorded(drawn: tuple[Path, Drawn]) -> None:
    folder, _ = drawn
    parts = pd.read_csv(folder / "jacobian_parts.csv")
    mine = parts[(parts.activation == "relu") & (parts.arm == "batch") & (parts.init == "gaussian")]
    spread = mine[(mine.statistic == "spread") & (mine.step == 99) & (mine.layer == 3)]
    assert spread["value"].tolist() == pytest.approx([1.6 * 0.99, 1.6, 1.6 * 1.01])
    init = pd.read_csv(folder / "jacobian_init.csv")
    assert len(init) == 16 * 4 * 2 * SEEDS
    cell = init[(init.width == 100) & (init.batch == 16) & (init.statistic == "mean_square")]
    assert set(cell["value"]) == {100 / 16}


@pytest.mark.parametrize(
    ("changed", "part", "verdict"),
    [({"effective_dimension": 8.0}, "premise", "holds"), ({"effective_dimension": 7.5}, "premise", "undecided"),
     ({"effective_dimension": 7.0}, "premise", "fails"), ({"mean_square": 1.0}, "mean square", "holds"),
     ({"mean_square": 1.1}, "mean square", "undecided"), ({"mean_square": 0.8}, "mean square", "fails"),
     ({"mean_square": 1.2}, "mean square", "fails"), ({"spread": 0.09}, "spread", "holds"),
     ({"spread": 0.1}, "spread", "undecided"), ({"spread": 0.11}, "spread", "fails"),
     ({"rank": 10.0}, "rank", "holds"), ({"rank": 9.95}, "rank", "undecided"), ({"rank": 5.0}, "rank", "fails"),
     ({"spread": math.nan}, "spread", "undefined"), ({"effective_dimension": math.inf}, "premise", "undefined"),
     ({"mean_square": math.nan}, "mean square", "undefined"), ({"rank": math.nan}, "rank", "undefined")],
)  # fmt: skip
def test_a_part_holds_or_fails_where_its_whole_interval_says_so(
    tmp_path: Path, changed: dict[str, float], part: str, verdict: str
) -> None:
    one = maps(plant(tmp_path, {"tanh-gaussian-batch": changed}), "tanh-gaussian-batch")[0]
    assert jacobian._verdicts(one, -1)[part] == verdict


def test_the_whole_holds_where_every_part_does(tmp_path: Path) -> None:
    planted = {
        "tanh-gaussian-batch": GOOD,
        "relu-gaussian-batch": GOOD | {"spread": 0.1},
        # half of its values are zero, and those that are not are all 1
        "relu-orthogonal-batch": GOOD | {"rank": 5.0},
        "linear-gaussian-batch": GOOD | {"spread": math.nan},
    }
    folder = plant(tmp_path, planted)
    for arm, wanted in (
        ("tanh-gaussian", "holds"), ("relu-gaussian", "undecided"), ("sigmoid-gaussian", "fails"),
        ("relu-orthogonal", "fails"), ("linear-gaussian", "undefined"),
    ):  # fmt: skip
        assert jacobian._verdicts(maps(folder, f"{arm}-batch")[1], 0)["all"] == wanted, arm


@pytest.mark.parametrize(("units", "examples"), [(100, 500), (100, 60), (16, 100), (1000, 500)])
def test_independent_units_reach_the_premise_and_half_as_many_do_not(units: int, examples: int) -> None:
    """The bar is for the ideal to pass: N examples of C independent units never show C dimensions."""
    values = torch.randn(examples, units, generator=torch.Generator().manual_seed(1))
    ideal = jacobian.independent_dimension(units, examples)
    seen = effective_dimension(values)
    assert seen == pytest.approx(ideal, rel=0.03)
    assert seen > jacobian.DIMENSION * ideal
    twice = torch.cat([values[:, : units // 2], values[:, : units // 2]], dim=1)
    assert effective_dimension(twice) < jacobian.DIMENSION * ideal
    if (units, examples) == (100, 500):
        assert seen < 0.9 * units


def test_examples_that_are_not_finite_leave_nothing_to_judge(tmp_path: Path) -> None:
    one = maps(plant(tmp_path, {"tanh-gaussian-batch": GOOD | {"nonfinite": 1.0}}), "tanh-gaussian-batch")[0]
    found = jacobian._verdicts(one, -1)
    assert found.pop("premise") == "holds"  # of the vectors, which are there
    assert set(found.values()) == {"undefined"}


def test_maps_know_their_size_and_what_independent_units_would_show(tmp_path: Path) -> None:
    for one in maps(plant(tmp_path, {}, seeds=1, widths=(10, 12, 10)), "tanh-gaussian-batch"):
        assert one.count == 10
        assert one.ideal == pytest.approx({2: 1 / (1 / 10 + 1 / 50), 3: 1 / (1 / 12 + 1 / 50)}[one.layer])


def test_spreads_over_different_numbers_of_values_are_not_compared(tmp_path: Path) -> None:
    folder = plant(
        tmp_path,
        {"tanh-gaussian-batch": {"spread": 0.2, "rank": 8.0}, "relu-gaussian-batch": {"spread": 0.2},
         "linear-gaussian-none": {"spread": math.nan}},
    )  # fmt: skip
    for activation, wanted in (("tanh", "ranks differ"), ("relu", "supported"), ("linear", "undefined")):
        (plain, _), (normalized, _) = (maps(folder, f"{activation}-gaussian-{arm}") for arm in ARMS)
        assert jacobian._better(plain, normalized, -1) == wanted


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    folder = plant(tmp_path, {"tanh-gaussian-batch": {"spread": 0.01}}, seeds=1)
    (plain, _), (normalized, _) = maps(folder, "tanh-gaussian-none"), maps(folder, "tanh-gaussian-batch")
    assert set(jacobian._verdicts(normalized, -1).values()) == {"undecided"}
    assert jacobian._better(plain, normalized, -1) == "undecided"


@pytest.mark.filterwarnings("error")
def test_what_is_undefined_is_named_and_the_rest_is_drawn(tmp_path: Path) -> None:
    """A map of zeros has no spread, one of a single value has spread 0, two seeds may be worlds apart."""
    planted = {
        "relu-gaussian-batch": {"spread": math.nan},
        "tanh-gaussian-none": {"spread": 0.0},
        "linear-gaussian-none": {"spread": 1e-290},
        "sigmoid-orthogonal-none": dict.fromkeys(USUAL, math.nan),
    }
    folder = plant(tmp_path, planted, lost=("relu", "gaussian", "none"), apart="linear-gaussian-none")
    with unrendered():
        found = draw(folder)
    named = "relu-gaussian-batch 1 to 2 (spread); relu-gaussian-batch 2 to 3 (spread)"
    assert named in found.title
    assert "sigmoid-orthogonal-none 1 to 2 (premise, rank, mean square, spread)" in found.title
    assert "relu-gaussian-none width 50, batch 16 (spread)" in found.title
    assert "spread 0 hold, 14 fail, 0 undecided, 2 undefined" in found.title
    study = load_study(folder)
    every = [one for key in product(ACTIVATIONS, INITS, ARMS) for one in jacobian._maps(study, key)]
    assert named in jacobian._parts_caption(study, every)
    assert "the grey band, 0.9 to 1.1" in jacobian._parts_caption(study, every)
    assert "the rule judges each map on its own" in jacobian._parts_caption(study, every)
    assert "A spread or square of 0 has no logarithm" in jacobian._parts_caption(study, every)
    caption = jacobian._init_caption(study, jacobian._untrained(study), 100, 64)
    assert "relu-gaussian-none width 50, batch 16 (spread)" in caption
    table = found.table.set_index("net")
    assert table.loc["ReLU Gaussian BN", "spread"] == "undefined\N{RIGHTWARDS ARROW}undefined"
    assert table.loc["ReLU Gaussian", "spread"] == "0.80\N{RIGHTWARDS ARROW}0.80"


@pytest.mark.filterwarnings("error")
def test_bands_skip_what_has_no_value_and_never_overflow() -> None:
    values = np.array([[1.0, math.nan, 0.0, 1e-300], [4.0, 1.0, 1.0, 1.0]])
    centre, low, high = jacobian._band(values, logarithmic=True)
    assert centre[[0, 3]] == pytest.approx([2.0, 1e-150])
    assert np.isnan(centre[1:3]).all()
    assert np.isnan(low[1:3]).all()
    assert np.isfinite(high[[0, 3]]).all()
    centre, _, _ = jacobian._band(values, logarithmic=False)
    assert centre[[0, 2]].tolist() == [2.5, 0.5]
    assert math.isnan(centre[1])


@pytest.mark.filterwarnings("error")
def test_intervals_of_untrained_nets_stay_where_their_numbers_can_be(drawn: tuple[Path, Drawn]) -> None:
    """Squares and spreads are positive: an interval of their mean could reach below 0, that of the logarithm cannot."""
    folder, _ = drawn
    study = load_study(folder)
    with style.look():
        figure = jacobian._at_init(study, jacobian._untrained(study))
    for axes in figure.axes:
        assert axes.get_yscale() == "log"
        curves = [line for line in axes.lines if line.get_label() and not str(line.get_label()).startswith("_")]
        assert {line.get_marker() for line in curves} == {".", "o"}  # a value between undefined ones is seen
        for band in axes.collections:
            assert (band.get_paths()[0].vertices[:, 1] > 0).all()


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_line_and_box_is_in_a_legend_and_zeros_are_counted(drawn: tuple[Path, Drawn]) -> None:
    folder, _ = drawn
    study = load_study(folder)
    every = [one for key in product(ACTIVATIONS, INITS, ARMS) for one in jacobian._maps(study, key)]
    with style.look():
        distributions = jacobian._distributions(study, every, "gaussian")
        parts = jacobian._parts(study, every)
        init = jacobian._at_init(study, jacobian._untrained(study))
    assert {"with BN: median", "largest", "conjecture", "Gaussian matrices alone"} <= set(texts(distributions))
    wanted = {"bar of the conjecture", "mean square it asks for", "theory, with BN at the start"}
    assert wanted | {"Gaussian matrices alone"} <= set(texts(parts))
    assert "theory, with BN" in texts(init)
    said = [text.get_text() for axes in distributions.axes for text in axes.texts]
    assert said.count("nonzero 50% to 50%") == 2  # both maps of the one arm whose rank is half of K
    assert said.count("nonzero 90% to 90%") == 14
    (bar,) = (line for line in parts.axes[0].lines if line.get_linestyle() == ":")
    assert bar.get_ydata()[0] == pytest.approx(0.9 / (1 / 10 + 1 / 50))  # type: ignore[index]  # an array


def test_other_studies_and_diverged_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="shows the study of that name"):
        draw(plant(tmp_path / "other", {}, name="drift", seeds=1))
    with pytest.raises(StudyError, match="diverged: linear-gaussian-none-s0"):
        draw(plant(tmp_path / "lost", {}, status="diverged", seeds=1))


# --- Marchenko and Pastur


def test_square_matrices_have_the_quarter_circle_law() -> None:
    values = marchenko_pastur(1.0)
    assert (values**2).mean() == pytest.approx(1, abs=1e-4)
    assert values.mean() == pytest.approx(8 / (3 * math.pi), abs=1e-4)
    assert values.max() == pytest.approx(2, abs=1e-2)
    # the distribution function of the quarter circle at 1
    wanted = (math.sqrt(3) / 2 + math.pi / 3) / math.pi
    assert (values <= 1).mean() == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_gaussian_matrices_have_this_law(ratio: float) -> None:
    rng = np.random.default_rng(0)
    columns = 400
    rows = int(ratio * columns)
    found = np.concatenate(
        [np.linalg.svd(rng.normal(size=(rows, columns)) / math.sqrt(columns), compute_uv=False) for _ in range(4)]
    )
    law = marchenko_pastur(ratio)
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert np.quantile(found, q) == pytest.approx(np.quantile(law, q), abs=0.02)
    assert law.min() == pytest.approx(1 - math.sqrt(ratio), abs=0.02)
    assert law.max() == pytest.approx(1 + math.sqrt(ratio), abs=0.02)
    assert np.log(found).std() == pytest.approx(np.log(law).std(), abs=0.03)


def test_two_hidden_layers_have_one_map(tmp_path: Path) -> None:
    folder = plant(tmp_path, {}, seeds=1, hidden=2)
    (one,) = maps(folder, "tanh-gaussian-batch")
    assert one.layer == 2
    assert jacobian._weights(load_study(folder))["tanh", "gaussian", "batch"] == pytest.approx((0.7, 0.799))
