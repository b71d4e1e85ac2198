from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from diagnostics.guard import set_mode
from diagnostics.jacobian import layer_jacobians
from diagnostics.record import read_run
from diagnostics.spectrum import effective_dimension
from experiments.assemble import make_data, make_network
from experiments.cli import main
from experiments.config import Computation, MLPConfig, NormalizerConfig, RunConfig
from experiments.protocols import probe_examples
from experiments.run import run
from experiments.seeds import Streams
from experiments.studies.jacobian import AT_INIT, STUDY, JacobianFields, _untrained
from experiments.study import Job

TINY: dict[str, Any] = {"steps": 4, "hidden": (6, 7, 8), "records": 2, "sample": 30, "examples": 3}
TINY |= {"widths": (5, 6), "batches": (8, 16), "init_examples": 2}


def jobs(folder: Path, seed: int = 3, **fields: Any) -> dict[str, Job]:
    return {job.arm: job for job in STUDY.jobs(JacobianFields(**(TINY | fields)), [seed], device="cpu", folder=folder)}


def test_arms_are_every_nonlinearity_law_and_normalizer_and_one_that_trains_nothing(tmp_path: Path) -> None:
    found = jobs(tmp_path)
    assert len(found) == 4 * 2 * 2 + 1
    config = found["tanh-orthogonal-batch"].config
    assert isinstance(config, RunConfig)
    assert (config.network.activation, config.network.init, config.normalizer.kind) == ("tanh", "orthogonal", "batch")
    plain, normalized = (found[f"relu-gaussian-{kind}"].config.canonical() for kind in ("none", "batch"))
    assert plain.pop("normalizer") == {"kind": "none"}
    assert normalized.pop("normalizer")["kind"] == "batch"
    assert plain == normalized
    assert isinstance(found[AT_INIT].config, Computation)
    assert len({job.config.id for job in found.values()}) == 17


@pytest.mark.parametrize("name", ["linear-gaussian-none", "relu-orthogonal-batch"])
def test_maps_and_weights_are_measured_when_due(tmp_path: Path, name: str) -> None:
    job = jobs(tmp_path)[name]
    assert run(job, lambda done: None).status == "complete"
    table = read_run(job.folder)
    maps = table[table.probe == "jacobian"]
    assert sorted(maps.step.unique()) == [0, 1, 3]
    values = maps[(maps.statistic == "singular_value") & (maps.step == 0)]
    assert values.groupby("layer", observed=True).size().to_dict() == {"hidden2.normalizer": 6, "hidden3.normalizer": 7}
    assert set(maps[maps.statistic == "effective_dimension"].layer) == {f"hidden{k}.normalizer" for k in (1, 2, 3)}
    weights = table[(table.probe == "weights") & (table.step == 0) & (table.statistic == "distance")]
    if "orthogonal" in name:
        assert weights[weights.layer == "hidden1.linear"]["value"].item() < 1e-5
    assert len(weights) == 3


def test_examples_and_sample_are_heeded(tmp_path: Path) -> None:
    found = []
    for k, fields in enumerate(({}, {"examples": 5}, {"sample": 40})):
        job = jobs(tmp_path / str(k), **fields)["tanh-gaussian-batch"]
        run(job, lambda done: None)
        table = read_run(job.folder)
        rows = table[(table.probe == "jacobian") & (table.step == 0) & (table.unit == -1)]
        found.append(rows.pivot(index="layer", columns="statistic", values="value"))
    one, more, larger = found
    assert one["effective_dimension"].equals(more["effective_dimension"])
    assert not one["effective_dimension"].equals(larger["effective_dimension"])
    assert one.loc["hidden3.normalizer", "mean_square"] != more.loc["hidden3.normalizer", "mean_square"]


def test_the_untrained_arm_covers_widths_and_batches(tmp_path: Path) -> None:
    job = jobs(tmp_path)[AT_INIT]
    assert run(job, lambda done: None).status == "complete"
    table = read_run(job.folder)
    assert table.probe.nunique() == 16
    assert set(table.layer) == {f"w{width}.m{batch}" for width in (5, 6) for batch in (8, 16)}
    data = make_data(job.config.measures.data, Streams(3))
    inputs, _ = probe_examples(data, 16, Streams(3))
    network = MLPConfig(hidden=(6, 6, 6), activation="tanh", init="orthogonal", init_std=0.05)
    wanted = _untrained(network, NormalizerConfig(kind="batch"), 3, inputs[:8], 2)
    rows = table[(table.probe == "tanh.orthogonal.batch") & (table.layer == "w6.m8")]
    assert dict(zip(rows.statistic, rows.value, strict=True)) == wanted


@pytest.mark.parametrize("kind", ["none", "batch"])
@pytest.mark.parametrize("activation", ["sigmoid", "relu"])
def test_what_is_said_of_untrained_networks_is_what_the_probe_would_say(kind: str, activation: str) -> None:
    network = MLPConfig(inputs=10, hidden=(6, 7, 8), activation=activation, init_std=0.5)
    normalizer = NormalizerConfig(kind=kind)
    inputs = torch.randn(20, 10, generator=torch.Generator().manual_seed(0))
    found = _untrained(network, normalizer, 5, inputs, 4)
    model = make_network(network, normalizer, Streams(5))
    set_mode(model, "batch")
    maps = layer_jacobians(model, "hidden*.normalizer", lambda: model(inputs), examples=4)
    for name in ("mean_square", "spread", "rank", "largest", "smallest", "distance"):
        values = [float(getattr(one.jacobian.singular_values(), name).nanmean()) for one in maps]
        assert found[name] == pytest.approx(sum(values) / 2, rel=1e-4, abs=1e-6), name
        assert math.isfinite(found[name])
    dimensions = [effective_dimension(one.inputs) for one in maps]
    assert found["effective_dimension"] == pytest.approx(sum(dimensions) / 2)


def test_untrained_nets_that_die_are_maps_of_zeros_with_no_spread() -> None:
    """Of a few ReLU units, none may be on at any example: the next layer's units do not vary."""
    found = []
    for seed in range(40):
        network = MLPConfig(inputs=4, hidden=(1, 1, 1), activation="relu", init_std=0.5)
        inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
        for kind in ("none", "batch"):
            found.append(_untrained(network, NormalizerConfig(kind=kind), seed, inputs, 2))
    zero = [one for one in found if one["mean_square"] == 0]
    assert zero
    for one in zero:
        assert (one["rank"], one["largest"], one["distance"]) == (0, 0, 1)
    assert all(math.isnan(one["spread"]) for one in zero)
    assert all(math.isfinite(one[name]) for one in found for name in ("mean_square", "rank", "distance"))
    assert {0.0} == {one["spread"] for one in found if not math.isnan(one["spread"])}  # of a single value
    assert any(one["rank"] == 0.25 for one in found)  # three of the four maps (2 layers, 2 examples) are zero


def test_one_layer_is_too_few_and_samples_have_their_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 layers or more, the ends of a map, got 1"):
        jobs(tmp_path, hidden=(5,))
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        JacobianFields(batches=(1, 8))
    huge = jobs(tmp_path, batches=(8, 60_001))[AT_INIT]
    assert run(huge, lambda done: None).status == "refused"


def test_the_command_draws_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "smoke", "--seeds", "1", "--jobs", "1", "--steps", "5", "--widths", "8", "--batches", "8"]
    assert main(["jacobian", *options, "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Conjecture (all 1) for 16 maps with BN" in said
    assert "One seed, no intervals." in said
    for name in ("jacobian", "jacobian_orthogonal", "jacobian_parts", "jacobian_init"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / "jacobian" / f"{name}.{suffix}").stat().st_size > 1000


@pytest.mark.filterwarnings("error")
def test_nets_so_small_that_numbers_are_undefined_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--preset", "smoke", "--jobs", "1", "--steps", "4", "--batches", "8"]
    options += ["--hidden", "2", "2", "--widths", "1", "4", "--init-examples", "1"]
    assert main(["jacobian", *options, "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "relu-gaussian-none width 1, batch 8 (spread)" in said
    assert (tmp_path / "jacobian" / "jacobian_init.png").stat().st_size > 1000
