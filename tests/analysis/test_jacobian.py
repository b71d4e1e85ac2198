"""The Jacobian figures against planted spectra, and Marchenko and Pastur's law against matrices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.figures import jacobian
from analysis.figures.jacobian import ACTIVATIONS, ARMS, INITS, NUMBERS, draw, marchenko_pastur
from analysis.load import StudyError, load_study
from analysis.style import Drawn
from diagnostics.record import RunWriter, run_id
from tests.analysis.unrendered import unrendered

UNITS, STEPS, SEEDS = 10, (0, 1, 10, 99), 3
# What a net of the planted study has at the end: mean over seeds, and the seeds lie 1% around it.
USUAL = {"effective_dimension": 5.0, "mean_square": 1.5, "spread": 0.8}
Planted = Mapping[str, Mapping[str, float]]  # arm -> what differs from USUAL


def plant(
    folder: Path,
    planted: Planted,
    *,
    name: str = "jacobian",
    status: str = "complete",
    seeds: int = SEEDS,
    hidden: int = 3,
) -> Path:
    entries, arms = [], ["-".join(key) for key in product(ACTIVATIONS, INITS, ARMS)]
    for arm, seed in product([*arms, "init"], range(seeds)):
        config = {
            "seed": seed,
            "arm": arm,
            "network": {"hidden": [UNITS] * hidden},
            "training": {"learning_rate": 0.1, "batch": 60},
            "measures": {"sample": 50, "examples": 4},
        }
        path = f"runs/{arm}-s{seed}-{run_id(config)}"
        with RunWriter(folder / path, config=config, environment={}) as writer:
            if arm == "init":
                untrained(writer, seed)
            else:
                trained(writer, seed, USUAL | planted.get(arm, {}))
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
                writer.write(step, "jacobian", name, numbers)
            writer.write(step, "weights", f"hidden{layer}.linear", {"spread": 0.5 + 0.1 * layer + 0.001 * step})


def untrained(writer: RunWriter, seed: int) -> None:
    for key, width, batch in product(product(ACTIVATIONS, INITS, ARMS), (50, 100), (16, 64)):
        numbers = {"mean_square": width / batch, "spread": float(seed + batch)}
        writer.write(0, ".".join(key), f"w{width}.m{batch}", numbers)


def maps(folder: Path, arm: str) -> list[jacobian._Map]:
    activation, init, normalizer = arm.split("-")
    return jacobian._maps(load_study(folder), (activation, init, normalizer))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drawn]:
    """Drawn once: four pictures take seconds."""
    planted = {
        "linear-orthogonal-batch": {"effective_dimension": 9.5, "mean_square": 1.0, "spread": 0.05},
        "tanh-gaussian-batch": {"spread": 0.4},
        "relu-gaussian-batch": {"spread": 1.6},
    }
    folder = plant(tmp_path_factory.mktemp("jacobian"), planted)
    with unrendered():
        return folder, draw(folder)


def test_the_title_counts_what_holds_and_what_fails(drawn: tuple[Path, Drawn]) -> None:
    """Two maps an arm: one arm's hold in every part, all others fail in every part."""
    _, found = drawn
    for when in ("start", "end"):
        assert f"{when}: premise 2 hold, 14 fail; mean square 2 hold, 14 fail; spread 2 hold, 14 fail" in found.title
    assert "all 2 hold, 14 fail" in found.title
    # orthogonal linear and tanh are smaller with BN, ReLU is larger, the rest are equal to the plain ones
    assert "supported 4, refuted 2, undecided 10" in found.title


def test_the_table_has_a_row_for_every_net(drawn: tuple[Path, Drawn]) -> None:
    _, found = drawn
    assert len(found.table) == 16
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
    [({"effective_dimension": 9.5}, "premise", "holds"), ({"effective_dimension": 9.0}, "premise", "undecided"),
     ({"effective_dimension": 8.5}, "premise", "fails"), ({"mean_square": 1.0}, "mean square", "holds"),
     ({"mean_square": 1.1}, "mean square", "undecided"), ({"mean_square": 0.8}, "mean square", "fails"),
     ({"mean_square": 1.2}, "mean square", "fails"), ({"spread": 0.09}, "spread", "holds"),
     ({"spread": 0.1}, "spread", "undecided"), ({"spread": 0.11}, "spread", "fails")],
)  # fmt: skip
def test_a_part_holds_or_fails_where_its_whole_interval_says_so(
    tmp_path: Path, changed: dict[str, float], part: str, verdict: str
) -> None:
    one = maps(plant(tmp_path, {"tanh-gaussian-batch": changed}), "tanh-gaussian-batch")[0]
    assert jacobian._verdicts(one, -1, UNITS)[part] == verdict


def test_the_whole_holds_where_every_part_does(tmp_path: Path) -> None:
    good = {"effective_dimension": 9.5, "mean_square": 1.0, "spread": 0.05}
    folder = plant(tmp_path, {"tanh-gaussian-batch": good, "relu-gaussian-batch": good | {"spread": 0.1}})
    assert jacobian._verdicts(maps(folder, "tanh-gaussian-batch")[1], 0, UNITS)["all"] == "holds"
    assert jacobian._verdicts(maps(folder, "relu-gaussian-batch")[1], 0, UNITS)["all"] == "undecided"
    assert jacobian._verdicts(maps(folder, "sigmoid-gaussian-batch")[1], 0, UNITS)["all"] == "fails"


def test_one_seed_decides_nothing(tmp_path: Path) -> None:
    folder = plant(tmp_path, {"tanh-gaussian-batch": {"spread": 0.01}}, seeds=1)
    (plain, _), (normalized, _) = maps(folder, "tanh-gaussian-none"), maps(folder, "tanh-gaussian-batch")
    assert set(jacobian._verdicts(normalized, -1, UNITS).values()) == {"undecided"}
    assert jacobian._better(plain, normalized, -1) == "undecided"


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
