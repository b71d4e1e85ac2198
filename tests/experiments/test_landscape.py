from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from diagnostics.covariate_shift import VirtualShift
from diagnostics.landscape import AlongGradient
from diagnostics.record import read_run
from experiments.assemble import make_data
from experiments.cli import main
from experiments.run import run
from experiments.seeds import Streams
from experiments.studies.landscape import STUDY, LandscapeFields, probes
from experiments.study import Job

TINY: dict[str, Any] = {
    "network": ("mlp", "linear"), "steps": 5, "mlp_lr": (0.1,), "linear_lr": (1e-6,), "hidden": (9,), "depth": 3,
    "dimension": 4, "examples": 30, "points": 3, "walk_every": 2, "virtual_every": 4, "sizes": (0.5, 1.0),
}  # fmt: skip


def jobs(folder: Path, **fields: Any) -> dict[str, Job]:
    return {job.arm: job for job in STUDY.jobs(LandscapeFields(**fields), [7], device="cpu", folder=folder)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    found = {}
    for arm, job in jobs(tmp_path_factory.mktemp("tiny"), **TINY).items():
        assert run(job, lambda done: None).status == "complete"
        found[arm] = read_run(job.folder)
    return found


def test_the_grid_is_each_networks_own_and_log_spaced() -> None:
    fields = LandscapeFields()
    mlp, linear = fields.grid("mlp", 0.1), fields.grid("linear", 1e-6)
    assert (mlp[0], mlp[-1]) == (pytest.approx(0.025), pytest.approx(0.4))
    assert (linear[0], linear[-1]) == (pytest.approx(1e-8), pytest.approx(3e-5))
    for grid in (mlp, linear):
        assert len(grid) == 8
        assert np.diff(np.log(grid)) == pytest.approx(math.log(grid[-1] / grid[0]) / 7)
    assert LandscapeFields(points=2).grid("vgg", 0.1) == (pytest.approx(0.025), pytest.approx(0.4))


def test_only_the_papers_own_grid_starts_at_half_the_rate(tmp_path: Path) -> None:
    """There 1/(first step) is 2/eta, the level at which training ends."""
    for name, preset in STUDY.presets.items():
        fields = LandscapeFields(**preset.fields)
        for arm in STUDY.conditions(fields):
            measures = STUDY.configure(fields, arm, 0, "cpu").model_dump()["measures"]
            first = measures["grid"][0] / float(arm.name.split("-", 1)[1].rpartition("-")[0])
            assert math.isclose(first, 0.5) == (name == "paper-vgg")


def test_the_rule_combines_readings_as_the_other_studies_do_and_says_what_one_cannot_tell() -> None:
    for words in ("if one says smaller and the other larger it is inconclusive; else undecided", "by construction"):
        assert words in STUDY.rule


def test_what_is_measured_is_what_the_study_says(tmp_path: Path) -> None:
    config = jobs(tmp_path, walk_every=3, virtual_every=7, sizes=(0.3, 0.6))["linear-1e-06-batch"].config
    streams = Streams(7)
    gradient, random, virtual = probes(config, make_data(config.data, streams), streams)  # type: ignore[arg-type]
    assert isinstance(gradient, AlongGradient)
    assert isinstance(random, AlongGradient)
    assert isinstance(virtual, VirtualShift)
    assert (gradient.direction, random.direction, random.seed) == ("gradient", "random", 7)
    assert gradient.steps == random.steps == LandscapeFields().grid("linear", 1e-6)
    assert (virtual.sizes, virtual.which, virtual.on) == ((0.3, 0.6), ("all",), "batch")
    assert [step for step in range(15) if gradient.when(step)] == [0, 3, 6, 9, 12]
    assert [step for step in range(15) if random.when(step)] == [0, 3, 6, 9, 12]
    assert [step for step in range(15) if virtual.when(step)] == [0, 7, 14]


def test_every_arm_records_both_walks_and_the_virtual_steps(tiny: dict[str, pd.DataFrame]) -> None:
    assert len(tiny) == 4
    for arm, table in tiny.items():
        grid = [(0.25, 1, 4), (0.01, 0.01 * math.sqrt(3000), 30)][arm.startswith("linear")]
        rate = 1e-6 if arm.startswith("linear") else 0.1
        for direction in ("gradient", "random"):
            walk = table[(table.probe == f"along_gradient.{direction}") & (table.statistic == "eta")]
            assert sorted(walk.step.unique()) == [0, 2, 4]
            assert walk[walk.step == 0]["value"].tolist() == pytest.approx([rate * share for share in grid])
        virtual = table[(table.probe == "virtual_shift") & (table.layer == "-")]
        assert sorted(virtual.step.unique()) == [0, 4]
        first = virtual[virtual.step == 0]
        steps = first[first.unit >= 0].pivot(index="statistic", columns="unit", values="value")
        assert steps.loc["c"].tolist() == [0.5, 1.0]
        units = first[first.unit == -1].set_index("statistic")["value"]
        for unit, name in (("curvature", "directional_curvature"), ("sharpness", "sharpness")):
            assert (steps.loc[f"eta_by_{unit}"] * units[name]).tolist() == pytest.approx([0.5, 1.0])
        # Both walks start from one point: theta_t on the step's own batch.
        starts = table[table.statistic == "start_loss"].pivot(index="step", columns="probe", values="value")
        assert (starts["along_gradient.gradient"] == starts["along_gradient.random"]).all()


def test_a_grid_that_does_not_rise_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="highest must be more than lowest, 4, got 4"):
        jobs(tmp_path, lowest=4.0)
    with pytest.raises(ValueError, match="linear_highest must be more than linear_lowest, 50, got 30"):
        jobs(tmp_path, linear_lowest=50.0)
    with pytest.raises(ValueError, match=r"linear_lowest=0\.1 means nothing without network linear"):
        LandscapeFields(network=("mlp",), linear_lowest=0.1)
    with pytest.raises(ValueError, match=r"highest=2\.0 means nothing without network mlp or vgg"):
        LandscapeFields(network=("linear",), highest=2.0)


def test_the_command_draws_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["landscape", "--preset", "smoke", "--jobs", "1", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "before -> after the controls: mlp, lr 0.1:" in said
    for name in ("landscape", "landscape_controls"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / "landscape" / f"{name}.{suffix}").stat().st_size > 1000
