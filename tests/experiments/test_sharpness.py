from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from diagnostics.record import read_run
from diagnostics.sharpness import Sharpness
from experiments.assemble import make_data
from experiments.cli import main
from experiments.protocols import probe_examples
from experiments.run import run
from experiments.seeds import Streams
from experiments.studies.sharpness import STUDY, SharpnessFields, probes
from experiments.study import Job

TINY: dict[str, Any] = {
    "network": ("mlp", "linear"), "steps": 5, "mlp_lr": (0.1,), "linear_lr": (1e-6,), "hidden": (9,), "depth": 3,
    "dimension": 4, "examples": 30, "sharpness_every": 2, "fixed_every": 4, "sample": 50,
}  # fmt: skip


def jobs(folder: Path, **fields: Any) -> dict[str, Job]:
    return {job.arm: job for job in STUDY.jobs(SharpnessFields(**fields), [7], device="cpu", folder=folder)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    found = {}
    for arm, job in jobs(tmp_path_factory.mktemp("tiny"), **TINY).items():
        assert run(job, lambda done: None).status == "complete"
        found[arm] = read_run(job.folder)
    return found


def made(config: Any, seed: int = 7) -> tuple[list[Sharpness], Any]:
    streams = Streams(seed)
    data = make_data(config.data, streams)
    found = list(probes(config, data, Streams(seed)))
    return found, data  # type: ignore[return-value]


def test_what_is_measured_is_what_the_study_says(tmp_path: Path) -> None:
    found = jobs(tmp_path, sharpness_every=3, fixed_every=7, sample=90, tolerance=0.05)
    (batch, fixed), data = made(found["mlp-0.1-batch"].config)
    assert (batch.name, batch.on, fixed.name) == ("sharpness.batch", "batch", "sharpness.fixed")
    assert {probe.mode for probe in (batch, fixed)} == {"batch"}
    assert {probe.tolerance for probe in (batch, fixed)} == {0.05}
    assert {probe.seed for probe in (batch, fixed)} == {7}
    assert [step for step in range(15) if batch.when(step)] == [0, 3, 6, 9, 12]
    assert [step for step in range(15) if fixed.when(step)] == [0, 7, 14]
    assert len(fixed.on[0]) == 90
    assert all((a == b).all() for a, b in zip(fixed.on, probe_examples(data, 90, Streams(7)), strict=True))
    alone, _ = made(found["linear-1e-06-none"].config)
    assert [probe.name for probe in alone] == ["sharpness.batch"]


def test_the_rule_judges_what_is_not_finite_and_what_diverged() -> None:
    for words in ("not finite counts as larger than every other", "A run that diverged and its partner are compared"):
        assert words in STUDY.rule


def test_both_arms_are_looked_at_on_the_same_examples(tmp_path: Path) -> None:
    found = jobs(tmp_path, sample=40)
    none, batch = (made(found[f"mlp-0.1-{kind}"].config)[0][1].on for kind in ("none", "batch"))
    assert all((a == b).all() for a, b in zip(none, batch, strict=True))


def test_every_arm_is_recorded_at_its_cadence(tiny: dict[str, pd.DataFrame]) -> None:
    for arm, table in tiny.items():
        own = table[(table.probe == "sharpness.batch") & (table.statistic == "sharpness")]
        assert own.step.tolist() == [0, 2, 4]
        fixed = table[(table.probe == "sharpness.fixed") & (table.statistic == "sharpness")]
        assert fixed.step.tolist() == ([] if arm.startswith("linear") else [0, 4])
        kept = {"rayleigh", "directional_curvature", "loss", "converged", "residual"}
        assert kept <= set(table[table.probe == "sharpness.batch"].statistic)


def test_the_optimizer_is_the_runs(tmp_path: Path) -> None:
    usual, adam = jobs(tmp_path, momentum=0.9), jobs(tmp_path, optimizer="adam")
    assert usual["linear-1e-06-none"].config.canonical()["training"]["momentum"] == 0.9
    for arm, job in adam.items():
        training = job.config.canonical()["training"]
        assert training["optimizer"] == "adam"
        assert "momentum" not in training
        assert job.config.id != usual[arm].config.id
    with pytest.raises(ValueError, match=r"momentum=0\.9 means nothing with adam"):
        SharpnessFields(optimizer="adam", momentum=0.9)


def test_a_run_on_the_full_batch_knows_no_fixed_examples(tmp_path: Path) -> None:
    few, many = (jobs(tmp_path, sample=sample, fixed_every=every) for sample, every in ((50, 100), (60, 300)))
    assert few["linear-1e-06-none"].config.id == many["linear-1e-06-none"].config.id
    assert few["mlp-0.1-none"].config.id != many["mlp-0.1-none"].config.id
    with pytest.raises(ValueError, match="sample=60 means nothing without network mlp or vgg"):
        SharpnessFields(network=("linear",), sample=60)


@pytest.mark.parametrize("extra", [[], ["--optimizer", "adam", "--seeds", "1"]])
def test_the_command_draws_what_it_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    assert main(["sharpness", "--preset", "smoke", "--jobs", "1", "--out", str(tmp_path), *extra]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Sharpness with BN over without: mlp, lr 0.1:" in said
    for suffix in ("png", "pdf", "csv"):
        assert (tmp_path / "sharpness" / f"sharpness.{suffix}").stat().st_size > 1000
