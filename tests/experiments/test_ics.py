from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pydantic import ValidationError

from analysis.figures.ics import draw
from diagnostics.covariate_shift import CovariateShift, VirtualShift
from diagnostics.record import read_run
from experiments.cli import main
from experiments.run import run
from experiments.seeds import Streams
from experiments.studies.ics import STUDY, IcsFields, probes
from experiments.study import Job

TINY: dict[str, Any] = {"network": ("linear",), "linear_lr": (1e-6,), "steps": 5, "depth": 4, "dimension": 5}
TINY |= {"examples": 50, "shift_every": 2, "virtual_every": 4, "sizes": (0.5, 1.0)}


def jobs(folder: Path, seeds: range = range(7, 8), **fields: Any) -> list[Job]:
    return STUDY.jobs(IcsFields(**fields), seeds, device="cpu", folder=folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    found = {}
    for job in jobs(tmp_path_factory.mktemp("tiny"), **TINY):
        assert run(job, lambda done: None).status == "complete"
        found[job.arm] = read_run(job.folder)
    return found


def cells(table: pd.DataFrame, **where: Any) -> np.ndarray:
    for column, value in where.items():
        table = table[table[column] == value]
    return table["value"].to_numpy()


def test_the_networks_train_for_steps_of_their_own(tmp_path: Path) -> None:
    made = jobs(tmp_path, steps=30, mlp_steps=70)
    assert {job.arm.partition("-")[0]: job.steps for job in made} == {"mlp": 70, "linear": 30}
    with pytest.raises(ValidationError, match="mlp_steps=70 means nothing without network mlp"):
        IcsFields(network=("linear",), mlp_steps=70)
    with pytest.raises(ValidationError, match="steps=70 means nothing without network linear or vgg"):
        IcsFields(network=("mlp",), steps=70)


def test_probes_are_what_the_study_says(tmp_path: Path) -> None:
    job = jobs(tmp_path, sizes=(1.0, 3.0), tolerance=0.2, shift_every=3, virtual_every=9)[0]
    shift, virtual = probes(job.config, None, Streams(7))  # type: ignore[arg-type]  # neither reads the data
    assert isinstance(shift, CovariateShift)
    assert isinstance(virtual, VirtualShift)
    assert shift.which == ("preceding", "following", "own", "all")
    assert virtual.which == ("preceding",)
    assert (shift.predict, shift.on, virtual.on, shift.group, virtual.group) == (
        True,
        "batch",
        "batch",
        "layer",
        "layer",
    )
    assert (virtual.sizes, virtual.tolerance, virtual.seed) == ((1.0, 3.0), 0.2, 7)
    assert [s for s in range(10) if shift.when(s)] == [0, 3, 6, 9]
    assert [s for s in range(10) if virtual.when(s)] == [0, 9]


def test_with_momentum_a_step_is_not_eta_times_the_gradient_and_nothing_is_predicted(tmp_path: Path) -> None:
    shift = probes(jobs(tmp_path, momentum=0.5)[0].config, None, Streams(7))[0]  # type: ignore[arg-type]
    assert isinstance(shift, CovariateShift)
    assert not shift.predict


def test_with_momentum_the_rule_is_that_of_the_other_controls(tmp_path: Path) -> None:
    assert "(1) and (2) alone are the controls" in STUDY.rule
    fields = TINY | {"momentum": 0.5}
    made = jobs(tmp_path, range(2), **fields)
    STUDY.state(tmp_path, preset="laptop", fields=IcsFields(**fields), seeds=range(2), jobs=made)
    assert {run(job, lambda done: None).status for job in made} == {"complete"}
    table = draw(tmp_path).table
    assert not table["reading"].str.startswith("(3)").any()
    assert "not measured" not in table["with / without (cosine: -)"].tolist()


def test_every_control_is_recorded_at_its_cadence(tiny: dict[str, pd.DataFrame]) -> None:
    for arm, table in tiny.items():
        shift, virtual = (table[table.probe == name] for name in ("covariate_shift", "virtual_shift"))
        assert sorted(shift.step.unique()) == [0, 2, 4]
        assert sorted(virtual.step.unique()) == [0, 4]
        assert set(shift["mode"]) == {"-" if arm.endswith("none") else "batch"}
        assert {f"{s}{w}" for s in ("l2", "relative", "cosine") for w in ("", "_following", "_own", "_all")} < set(
            shift.statistic
        )
        assert cells(virtual, statistic="c", step=0).tolist() == [0.5, 1.0]
        assert shift[shift.layer != "-"].layer.nunique() == 4  # a normalizer belongs to the layer before it


def test_the_prediction_is_the_rate_times_the_curvature_times_the_share_of_layers(
    tiny: dict[str, pd.DataFrame],
) -> None:
    for table in tiny.values():
        shift = table[(table.probe == "covariate_shift") & (table.step == 0)]
        curvature = cells(shift, statistic="directional_curvature").item()
        predicted = cells(shift, statistic="predicted")
        assert predicted == pytest.approx([1e-6 * curvature * k / 4 for k in range(4)])
        assert cells(shift, statistic="l2")[0] == 0  # nothing precedes the first layer
        assert cells(shift, statistic="l2_following")[-1] == 0


def test_networks_without_a_layer_between_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="depth must be 3 or more.*got 2"):
        jobs(tmp_path, depth=2)
    with pytest.raises(ValueError, match=r"hidden must name 2 layers or more.*got \(9,\)"):
        jobs(tmp_path, hidden=(9,))
    assert jobs(tmp_path, network=("mlp",), hidden=(9, 9))


@pytest.mark.parametrize("sizes", [(0.5, 2.0), (1.0, 1.0)])
def test_the_size_that_is_judged_is_measured(sizes: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="1, which is judged, is one of them"):
        IcsFields(sizes=sizes)


def test_a_training_that_diverges_is_drawn_and_named(tmp_path: Path) -> None:
    fields = TINY | {"steps": 40, "linear_lr": (1e-2,)}
    made = jobs(tmp_path, range(2), **fields)
    STUDY.state(tmp_path, preset="laptop", fields=IcsFields(**fields), seeds=range(2), jobs=made)
    statuses = {job.arm: run(job, lambda done: None).status for job in made}
    assert statuses["linear-0.01-none"] == "diverged"
    drawn = draw(tmp_path)
    assert "no verdict, training diverged (linear-0.01-none seed 0" in drawn.title


def test_networks_whose_numbers_overflow_are_drawn_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["ics", "--preset", "smoke", "--network", "mlp", "--std", "1e30", "--seeds", "1", "--out", str(tmp_path)]
    assert main([*words, "--jobs", "1"]) == 0
    assert "not measured" in capsys.readouterr().out
    assert (tmp_path / "ics" / "ics_controls.png").exists()


def test_the_command_draws_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ics", "--preset", "smoke", "--jobs", "1", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("ics", "ics_controls", "ics_readings"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / "ics" / f"{name}.{suffix}").stat().st_size > 1000
    assert "linear, lr 1e-06: " in said
    assert "VERDICT" in said
