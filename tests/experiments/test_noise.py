from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from diagnostics.drift import Drift
from diagnostics.record import read_run
from experiments.assemble import make_data, make_network
from experiments.cli import main
from experiments.run import run
from experiments.seeds import Order, Streams
from experiments.studies.noise import STUDY, BatchAccuracy, NoiseFields
from experiments.study import Job
from tests.experiments.test_datasets import write_cifar10

SOURCE = ["none", "batch", "noisy", "noise-only"]
TINY = {"steps": 13, "hidden": (9, 8), "sample": 40, "batch": 20, "fixed": 60, "fixed_every": 4, "drift_every": 4}
TINY |= {"floor_every": 4, "ridge_every": 6, "percentiles": (10, 50, 90), "evaluate_every": 6, "doses": (1.0, 2.0)}


def jobs(folder: Path, **fields: Any) -> dict[str, Job]:
    found = STUDY.jobs(NoiseFields(**fields), range(7, 8), device="cpu", folder=folder)
    return {job.arm: job for job in found}


def records(folder: Path, *arms: str, **fields: Any) -> dict[str, pd.DataFrame]:
    tables = {}
    for arm, job in jobs(folder, **fields).items():
        if not arms or arm in arms:
            outcome = run(job, lambda done: None)
            assert outcome.status == "complete", outcome
            tables[arm] = read_run(job.folder)
    return tables


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    return records(tmp_path_factory.mktemp("tiny"), **TINY)


def cells(table: pd.DataFrame, probe: str, statistic: str, **where: Any) -> np.ndarray:
    rows = table[(table.probe == probe) & (table.statistic == statistic)]
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows.sort_values(["step", "layer", "unit"])["value"].to_numpy()


def test_each_dose_comes_in_three_forms_and_the_sources_own_runs_once(tmp_path: Path) -> None:
    assert [arm.name for arm in STUDY.conditions(NoiseFields(doses=(1.0, 2.5)))] == [
        *SOURCE, "per_step-2.5", "per_sample-1", "per_sample-2.5", "fixed-1", "fixed-2.5",
    ]  # fmt: skip
    assert [arm.name for arm in STUDY.conditions(NoiseFields(doses=()))] == SOURCE
    noises = {
        arm: job.config.canonical()["normalizer"].get("noise") for arm, job in jobs(tmp_path, doses=(1.0, 2.0)).items()
    }
    assert noises["none"] is noises["batch"] is None
    assert (noises["noisy"]["form"], noises["noisy"]["strength"]) == ("per_step", 1)
    assert (noises["per_step-2"]["form"], noises["per_step-2"]["strength"]) == ("per_step", 2)
    assert (noises["per_sample-1"]["form"], noises["per_sample-1"]["strength"]) == ("per_sample", 1)
    assert (noises["fixed-2"]["form"], noises["fixed-2"]["strength"]) == ("fixed", 2)
    assert noises["noise-only"] == noises["noisy"]
    with pytest.raises(ValueError, match=r"each dose is run once, got 1 2 1"):
        NoiseFields(doses=(1.0, 2.0, 1.0))


def test_arms_differ_in_the_normalizer_alone(tmp_path: Path) -> None:
    planned = [job.config.canonical() for job in jobs(tmp_path).values()]
    kinds = {config.pop("normalizer")["kind"] for config in planned}
    assert kinds == {"none", "batch", "noisy", "noise_only"}
    assert all(config == planned[0] for config in planned)


def test_the_law_of_the_noise_is_the_sources_and_every_constant_can_be_set(tmp_path: Path) -> None:
    law = jobs(tmp_path)["noisy"].config.normalizer.noise
    assert (law.n_mu, law.n_sigma, law.r_mu, law.r_sigma) == (0.5, 1.25, 0.1, 0.1)
    assert (law.spread, law.place) == ("deviation", "after_affine")
    other = {"n_mu": 0.7, "n_sigma": 1.5, "r_mu": 0.2, "r_sigma": 0.3, "spread": "variance", "place": "before_affine"}
    changed = jobs(tmp_path, **other)
    for name, value in other.items():
        assert getattr(changed["fixed-2"].config.normalizer.noise, name) == value
    # Without BN there is nothing to be before.
    assert changed["noise-only"].config.normalizer.noise.place == "after_affine"
    assert changed["noise-only"].config.normalizer.noise.n_mu == 0.7


def test_the_defaults_are_the_protocols(tmp_path: Path) -> None:
    config = jobs(tmp_path)["batch"].config
    assert (config.network.kind, config.network.hidden, config.network.activation) == (
        "mlp",
        (100, 100, 100),
        "sigmoid",
    )
    assert (config.training.batch, config.training.learning_rate, config.training.momentum) == (60, 0.1, 0)
    assert (config.evaluation.fixed, config.evaluation.fixed_every) == (2000, 50)
    vgg = jobs(tmp_path, network="vgg", dataset="cifar10", root="x")["batch"].config
    assert (vgg.network.kind, vgg.network.activation, vgg.network.glorot) == ("vgg", "relu", "uniform")
    assert (vgg.training.batch, vgg.training.learning_rate, vgg.data.root) == (128, 0.1, "x")
    assert jobs(tmp_path, batch=32, activation="tanh")["none"].config.network.activation == "tanh"
    assert jobs(tmp_path, dataset="cifar10")["none"].config.network.inputs == 3072
    paper = NoiseFields(**STUDY.presets["paper"].fields)
    assert (paper.network, paper.layout, paper.width, paper.steps, paper.doses) == ("vgg", "D", 1, 15_000, (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "D"}, "layout=D means nothing with network mlp"),
        ({"network": "vgg", "dataset": "cifar10", "std": 0.1}, "std=0.1 means nothing with network vgg"),
        ({"dataset": "cifar10", "threshold": 0.2}, "threshold=0.2 means nothing with cifar10"),
        ({"root": "x"}, "root=x means nothing with mnist"),
        ({"binarize": False, "threshold": 0.2}, "threshold=0.2 means nothing without binarize"),
        ({"standardize": False}, "standardize=False means nothing with mnist"),
        ({"network": "vgg"}, "vgg takes cifar10's pictures"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jobs(tmp_path, **fields)


def test_arms_share_a_seeds_weights_batches_and_probe_examples(tmp_path: Path) -> None:
    seen = []
    for job in jobs(tmp_path, **TINY).values():
        streams = Streams(job.config.seed)
        data = make_data(job.config.data, streams)
        model = make_network(job.config.network, job.config.normalizer, streams)
        order = Order(len(data.train_inputs), 20, streams.torch("order"))
        probes = job.probes(job.config, data, streams)
        drift, other = probes[0], probes[3]
        assert isinstance(drift, Drift)
        weights = {name: value for name, value in model.state_dict().items() if name.endswith("linear.weight")}
        seen.append([*weights.values(), order.next(), order.next(), *drift.probe_batch, *other.on])
        assert isinstance(probes[-1], BatchAccuracy)
        assert torch.equal(probes[-1].examples[0], drift.probe_batch[0])
    assert len(seen) == 9
    for arm in seen[1:]:
        assert len(arm) == len(seen[0])
        assert all(torch.equal(a, b) for a, b in zip(arm, seen[0], strict=True))


def test_evaluation_has_no_noise(tmp_path: Path) -> None:
    """At step 0 arms with the same normalizer are the same network; under enormous noise only evaluation shows it."""
    loud = records(tmp_path, **(TINY | {"steps": 6, "n_mu": 1e4, "lr": 1e-9}))
    for quiet, noisy in [("none", ["noise-only"]), ("batch", ["noisy", "per_step-2", "per_sample-1", "fixed-1"])]:
        for arm in noisy:
            for statistic in ("fixed_loss", "test_accuracy"):
                assert cells(loud[arm], "log", statistic, step=0) == cells(loud[quiet], "log", statistic, step=0)
            assert cells(loud[arm], "activations.probe", "max").max() > 1e3
            assert cells(loud[quiet], "activations.probe", "max").max() < 100


def test_what_is_measured_when(tiny: dict[str, pd.DataFrame]) -> None:
    modes = {arm: "-" if arm == "none" else "batch" for arm in tiny}
    pairs = [0, 1, 4, 5, 8, 9, 12]
    expected = {
        "drift.previous": pairs, "drift.start": [0, 4, 8, 12], "activations.batch": pairs, "activations.other": pairs,
        "activations.probe": [0, 6, 12], "batch_accuracy": [0, 4, 8, 12],
    }  # fmt: skip
    for arm, table in tiny.items():
        for probe, steps in expected.items():
            rows = table[(table.probe == probe) & (table.statistic != "nonfinite")]
            found = sorted(rows.step.unique())
            assert found == (steps[1:] if probe == "drift.start" else steps), (arm, probe)
            assert rows["mode"].unique().tolist() == [modes[arm]]
            layers = ["-"] if probe == "batch_accuracy" else ["hidden1.nonlinearity", "hidden2.nonlinearity"]
            assert sorted(rows.layer.unique()) == layers
        floors = table[table.statistic == "mean_shift_floor95"]
        assert sorted(floors.step.unique()) == [0, 8]
        assert table[table.statistic == "fixed_accuracy"].step.tolist() == [0, 4, 8, 12, 13]
        assert table[table.statistic == "test_accuracy"].step.tolist() == [0, 6, 12, 13]
        assert {"p10", "p50", "p90"} <= set(table[table.probe == "activations.probe"].statistic)
        assert set(cells(table, "activations.probe", "count")) == {40}
        assert set(cells(table, "activations.other", "count")) == {20}


def test_noise_per_step_moves_and_the_other_forms_hardly(tiny: dict[str, pd.DataFrame]) -> None:
    def drift(arm: str) -> float:
        return float(np.mean([cells(tiny[arm], "drift.previous", "mean_shift", unit=-1, step=t) for t in (1, 5, 9)]))

    # |mu' - mu| of two uniforms on (-c/2, c/2) has mean c/3, in sd of about 1.13.
    assert drift("noisy") == pytest.approx(1 / 3 / 1.13, rel=0.35)
    assert drift("per_step-2") > 1.4 * drift("noisy")
    for still in ("batch", "fixed-1", "per_sample-1"):
        assert drift(still) < drift("noisy") / 2.5
    # The same draws without BN, in the raw unit: deeper layers of a plain network have a tiny sd.
    assert drift("noise-only") > drift("noisy")


def test_both_batches_of_a_step_meet_the_same_noise(tmp_path: Path) -> None:
    """Then what two batches differ by is sampling: without the samples' own noise, what it is without any."""
    quiet = {"r_mu": 0.0, "r_sigma": 0.0, "n_sigma": 1.0, "steps": 6}
    tables = records(tmp_path, "none", "noise-only", **(TINY | quiet))
    first = {"layer": "hidden1.nonlinearity", "step": 0}
    between = {}
    for arm, table in tables.items():
        own, other = (cells(table, f"activations.{on}", "mean", **first) for on in ("batch", "other"))
        between[arm] = own - other
        if arm == "noise-only":
            assert np.abs(own - cells(tables["none"], "activations.batch", "mean", **first)).max() > 0.2
    np.testing.assert_allclose(between["noise-only"], between["none"], atol=1e-6)
    assert np.abs(between["none"]).max() > 0.01


def test_accuracy_as_trained_is_that_of_a_forward_by_hand(tiny: dict[str, pd.DataFrame], tmp_path: Path) -> None:
    for arm in ("none", "batch", "noisy"):
        job = jobs(tmp_path, **TINY)[arm]
        streams = Streams(job.config.seed)
        data = make_data(job.config.data, streams)
        model = make_network(job.config.network, job.config.normalizer, streams)
        inputs, targets = job.probes(job.config, data, streams)[-1].examples
        right = (model(inputs).argmax(1) == targets).double().mean().item()  # a new model trains
        assert cells(tiny[arm], "batch_accuracy", "accuracy", step=0).tolist() == [right]


def test_vgg_is_measured_at_its_convolutions(tmp_path: Path) -> None:
    write_cifar10(tmp_path / "data", per_file=20)
    fields = {"network": "vgg", "dataset": "cifar10", "root": str(tmp_path / "data"), "width": 1 / 64, "batch": 8}
    fields |= {"steps": 6, "sample": 12, "fixed": 10, "fixed_every": 3, "drift_every": 3, "ridge_every": 3, "doses": ()}
    tables = records(tmp_path, "noisy", **fields)
    for probe in ("drift.previous", "activations.batch", "activations.other", "activations.probe"):
        layers = tables["noisy"][tables["noisy"].probe == probe].layer
        assert set(layers) == {f"features.{k}.nonlinearity" for k in range(1, 9)}
    assert set(cells(tables["noisy"], "activations.other", "count", layer="features.1.nonlinearity")) == {8 * 32 * 32}


def test_the_command_draws_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["noise", "--preset", "smoke", "--doses", "1", "--jobs", "1", "--out", str(tmp_path)]
    assert main([*words, "--target", "0.3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for name in ("noise", "noise_stability", "noise_dose"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / "noise" / f"{name}.{suffix}").stat().st_size > 1000
    assert "Manipulation passed" in said  # the smallest preset can show what the study is about
    assert "steps to" in said
    assert len(list((tmp_path / "noise" / "runs").iterdir())) == 12


@pytest.mark.parametrize(
    ("fields", "least"),
    [({"steps": 1}, 102), ({"steps": 50, "drift_every": 100}, 102), ({"steps": 150, "fixed_every": 1000}, 1001)],
)
def test_a_training_too_short_for_its_figures_is_refused_before_it_runs(
    tmp_path: Path, fields: dict[str, Any], least: int
) -> None:
    with pytest.raises(ValueError, match=f"steps must be at least {least}"):
        jobs(tmp_path, **fields)


def test_a_dose_that_its_name_could_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"at most six digits, got 1\.23456789"):
        NoiseFields(doses=(1.23456789,))


@pytest.mark.slow
def test_arms_that_diverge_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "noise --preset smoke --seeds 2 --doses --steps 40 --hidden 8 8 --sample 50 --fixed 100 --jobs 1"
    assert main([*words.split(), "--activation", "relu", "--lr", "1e30", "--out", str(tmp_path)]) == 0
    assert "diverged" in capsys.readouterr().out
    assert (tmp_path / "noise" / "noise_dose.png").exists()


def test_a_presets_settings_that_another_network_ignores_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []
    monkeypatch.setattr("experiments.cli._compute", lambda jobs, workers: asked.append(jobs) or 1)
    words = ["noise", "--preset", "smoke", "--network", "vgg", "--dataset", "cifar10", "--out", str(tmp_path)]
    assert main(words) == 1
    assert {job.config.network.kind for job in asked[0]} == {"vgg"}
    assert main([*words, "--hidden", "5"]) == 2
    assert "means nothing with network vgg" in capsys.readouterr().err
