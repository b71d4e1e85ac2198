from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from diagnostics.record import read_run
from experiments.cli import main
from experiments.run import run
from experiments.studies.drift import POINTS, STUDY, DriftFields
from experiments.study import Job

TINY = {"steps": 5, "hidden": (9, 8), "sample": 50, "pool": 90, "fixed": 40, "fixed_every": 2}
TINY |= {"drift_every": 2, "path_every": 1, "floor_every": 2, "epoch_records": 1, "epochs": 2}


def jobs(folder: Path, **fields: Any) -> list[Job]:
    return STUDY.jobs(DriftFields(**fields), range(7, 8), device="cpu", folder=folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    arms = {}
    for job in jobs(tmp_path_factory.mktemp("tiny"), **TINY):
        assert run(job, lambda done: None).status == "complete"
        arms[job.arm] = read_run(job.folder)
    return arms


def test_arms_differ_in_the_normalizer_alone(tmp_path: Path) -> None:
    none, batch = (job.config.canonical() for job in jobs(tmp_path))
    assert none.pop("normalizer") == {"kind": "none"}
    assert batch.pop("normalizer")["kind"] == "batch"
    assert none == batch


def test_every_point_and_mode_is_measured_at_its_cadence(tiny: dict[str, pd.DataFrame]) -> None:
    for arm, modes in {"none": ("batch",), "batch": ("batch", "population")}.items():
        table = tiny[arm]
        for point in POINTS:
            for mode in modes:
                for probe in (f"drift.previous.{point}.{mode}", f"activations.{point}.{mode}"):
                    rows = table[table.probe == probe]
                    assert sorted(rows.step.unique()) == [0, 2, 4]
                    assert rows["mode"].unique().tolist() == ["-" if arm == "none" else mode]
                    assert rows.layer.nunique() == 2
        assert set(table[table.probe == "drift.path.before"].step) == set(range(5))
        losses = table[(table.probe == "log") & (table.statistic == "fixed_loss")]
        assert losses.step.tolist() == [0, 2, 4, 5]
        first = table[(table.probe == "drift.previous.before.batch") & (table.statistic == "mean_shift_floor")]
        assert sorted(first.step.unique()) == [0, 4]


def test_points_are_where_they_say(tiny: dict[str, pd.DataFrame]) -> None:
    """After BN in batch mode the mean is beta, here 0, and the variance gamma^2, here 1, less epsilon's part."""

    def cells(arm: str, probe: str, statistic: str) -> np.ndarray:
        table = tiny[arm]
        rows = table[(table.probe == probe) & (table.statistic == statistic) & (table.step == 0)]
        return rows.sort_values(["layer", "unit"])["value"].to_numpy()

    assert np.abs(cells("batch", "activations.after.batch", "mean")).max() < 1e-6
    before = cells("batch", "activations.before.batch", "variance")
    after = cells("batch", "activations.after.batch", "variance")
    assert after == pytest.approx(before / (before + 1e-5), rel=1e-4)
    # Without a normalizer its input is its output.
    same = cells("none", "activations.after.batch", "mean")
    assert (cells("none", "activations.before.batch", "mean") == same).all()
    assert (cells("none", "activations.nonlinear.batch", "min") > 0).all()


def test_an_epoch_is_a_thousand_steps_and_ends_at_a_record(tmp_path: Path) -> None:
    measures = jobs(tmp_path)[0].config.canonical()["measures"]
    assert (measures["epoch"], measures["epochs"]) == (1000, 5)
    assert jobs(tmp_path, drift_every=50)[0].config.canonical()["measures"]["epoch"] == 500


def test_a_training_that_ends_before_the_last_epoch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="steps must be more than 5 epochs of 1000, got 5000"):
        jobs(tmp_path, steps=5000)


def test_a_pool_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ValueError, match="less than or equal to 60000"):
        DriftFields(pool=60_001)


def test_the_command_draws_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "--preset", "smoke", "--seeds", "2", "--jobs", "1", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("drift", "drift_referee", "drift_progress"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / "drift" / f"{name}.{suffix}").stat().st_size > 1000
    assert "Referee's 25% test" in " ".join(said.split())
