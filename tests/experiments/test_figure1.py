from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from diagnostics.record import read_run
from experiments.assemble import make_data
from experiments.config import DataConfig
from experiments.run import run
from experiments.seeds import Streams
from experiments.studies.figure1 import STUDY, Figure1Fields
from experiments.study import Job
from experiments.sweep import sweep


def jobs(folder: Path, seeds: range, **fields: Any) -> list[Job]:
    return STUDY.jobs(Figure1Fields(**fields), seeds, device="cpu", folder=folder)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """The two arms of seed 7, for a few steps."""
    fields = {"steps": 4, "hidden": (12, 11), "sample": 200, "percentiles_every": 2, "percentiles": (2.5, 50)}
    arms = {}
    for job in jobs(tmp_path_factory.mktemp("short"), range(7, 8), **fields):
        assert run(job, lambda done: None).status == "complete"
        arms[job.arm] = read_run(job.folder)
    return arms


def test_arms_differ_in_the_normalizer_alone(tmp_path: Path) -> None:
    none, batch = (job.config.canonical() for job in jobs(tmp_path, range(1), bn_momentum=0.2, bn_epsilon=1e-3))
    assert none.pop("normalizer") == {"kind": "none"}
    assert batch.pop("normalizer") == {"kind": "batch", "momentum": 0.2, "epsilon": 1e-3}
    assert none == batch


def test_the_defaults_are_the_protocol(tmp_path: Path) -> None:
    config = jobs(tmp_path, range(1))[0].config
    assert config.network.hidden == (100, 100, 100)
    assert (config.network.inputs, config.network.outputs, config.network.activation) == (784, 10, "sigmoid")
    assert (config.training.batch, config.training.learning_rate, config.network.init_std) == (60, 0.1, 0.05)
    assert (config.training.momentum, config.training.weight_decay) == (0, 0)
    assert (config.data.binarize, config.data.threshold) == (True, 0.5)
    sizes = {name: (preset.fields.get("steps", 15_000), preset.seeds) for name, preset in STUDY.presets.items()}
    assert sizes == {"smoke": (200, 2), "laptop": (15_000, 3), "paper": (50_000, 5)}


def test_what_is_in_the_record(short: dict[str, pd.DataFrame]) -> None:
    for arm, modes in {"none": ("-", "-"), "batch": ("batch", "population")}.items():
        table = short[arm]
        probe = table[table.probe == "activations.input"]
        assert set(probe.layer) == {"hidden1.nonlinearity", "hidden2.nonlinearity"}
        assert set(probe.statistic) == {"count", "nonfinite", "mean", "variance", "min", "max", "p2.5", "p50"}
        assert sorted(set(probe.step)) == [0, 2]
        assert set(probe["mode"]) == {modes[0]}
        assert set(probe[probe.layer == "hidden2.nonlinearity"].unit) == set(range(11))
        assert (probe[probe.statistic == "count"].value == 200).all()
        log = table[table.probe == "log"]
        assert set(log[log.statistic == "test_accuracy"]["mode"]) == {modes[1]}
        assert set(log[log.statistic == "train_loss"]["mode"]) == {modes[0]}


def test_the_first_percentiles_are_those_of_a_network_written_by_hand(short: dict[str, pd.DataFrame]) -> None:
    """Weights, examples and statistics at step 0, from the definitions and the named streams of the seed.

    Both arms are held to the same weights and examples: common random numbers.
    """
    streams = Streams(7)
    weights = []
    for shape in ((12, 784), (11, 12)):
        weights.append(torch.empty(shape).normal_(0, 0.05, generator=streams.torch("init")).double().numpy())
    data = make_data(DataConfig(), Streams(0))
    chosen = torch.randperm(60_000, generator=streams.torch("probe"))[:200]
    pixels = data.train_inputs[chosen].flatten(1).double().numpy()
    assert set(np.unique(pixels)) == {0.0, 1.0}
    for arm in ("none", "batch"):
        value = pixels
        for layer, weight in enumerate(weights, start=1):
            z = value @ weight.T
            if arm == "batch":
                z = (z - z.mean(axis=0)) / np.sqrt(z.var(axis=0) + 1e-5)
            table = short[arm]
            rows = table[(table.step == 0) & (table.layer == f"hidden{layer}.nonlinearity")]
            for statistic, expected in [
                ("p2.5", np.quantile(z, 0.025, axis=0)),
                ("p50", np.quantile(z, 0.5, axis=0)),
                ("variance", z.var(axis=0)),
            ]:
                found = rows[rows.statistic == statistic].sort_values("unit").value
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
            value = 1 / (1 + np.exp(-z))


def test_looking_does_not_change_what_is_learned(tmp_path: Path) -> None:
    """Common random numbers also between a run that is measured often and one that is measured rarely."""
    losses = []
    for every in (1, 1000):
        job = jobs(tmp_path, range(1), steps=11, hidden=(8,), sample=60, percentiles_every=every, early_every=1)[1]
        assert run(job, lambda done: None).status == "complete"
        log = read_run(job.folder, probe="log")
        losses.append(log[["step", "statistic", "value"]].to_dict("list"))
    assert losses[0] == losses[1]


def test_a_sample_beyond_the_data_is_refused(tmp_path: Path) -> None:
    job = jobs(tmp_path, range(1), hidden=(3,))[0]
    measures = job.config.measures.model_copy(update={"sample": 60_001})
    config = job.config.model_copy(update={"measures": measures})
    outcome = run(Job(job.arm, config, job.probes, tmp_path / "run"), lambda done: None)
    assert outcome.status == "refused"
    assert "sample must be at most 60000, the training set, got 60001" in str(outcome.error)


AGAIN = """
import sys
from experiments.cli import main
code = main(sys.argv[1:])
sys.exit(code or 3 * ("torch" in sys.modules))
"""


@pytest.mark.slow
def test_one_command_computes_and_draws_and_a_second_one_only_draws(tmp_path: Path) -> None:
    words = ["figure1", "--preset", "smoke", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "experiments", *words]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert first.stderr == ""
    folder = tmp_path / "figure1"
    for name in ("study.json", "figure1.png", "figure1.pdf", "figure1.csv"):
        assert str(folder / name) in first.stdout.splitlines()
        assert (folder / name).stat().st_size > 0
    records = {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/*")}
    again = subprocess.run([sys.executable, "-c", AGAIN, *words, "--grid"], capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert {file: file.stat().st_mtime_ns for file in folder.glob("runs/*/*")} == records


@pytest.mark.slow
def test_accuracies_are_the_expected_ones(tmp_path: Path) -> None:
    """Means over three seeds (of one at 50,000 steps), bounds fixed beforehand.

    They cannot tell a network that is a little off from a right one; the tests above can, at step 0.
    """
    long = jobs(tmp_path, range(1), steps=50_000)[1:]
    plans = {
        ("none", True): jobs(tmp_path, range(3), steps=10_000)[::2],
        ("none", False): jobs(tmp_path, range(3), steps=10_000, binarize=False)[::2],
        ("batch", True): long + jobs(tmp_path, range(1, 3), steps=5_000)[1::2],
        ("batch", False): jobs(tmp_path, range(3), steps=5_000, binarize=False)[1::2],
    }
    planned = [job for plan in plans.values() for job in plan]
    assert {outcome.status for outcome in sweep(planned, workers=2)} == {"complete"}

    def accuracy(arm: str, binarize: bool, step: int, seeds: int = 3) -> float:
        tables = [read_run(job.folder, statistic="test_accuracy") for job in plans[arm, binarize][:seeds]]
        return float(np.mean([table[table.step == step].value.item() for table in tables]))

    assert 0.60 <= accuracy("none", True, 5_000) <= 0.90
    assert 0.55 <= accuracy("none", False, 5_000) <= 0.90
    assert accuracy("none", True, 10_000) == pytest.approx(0.916, abs=0.015)
    assert accuracy("none", False, 10_000) == pytest.approx(0.917, abs=0.015)
    assert accuracy("batch", True, 5_000) >= 0.93
    assert accuracy("batch", False, 5_000) >= 0.93
    assert accuracy("batch", True, 50_000, seeds=1) == pytest.approx(0.98, abs=0.006)
