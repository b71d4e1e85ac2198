"""The protocols that studies of the gradient share: which runs they make, and that every field moves one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from experiments.assemble import make_data, make_network
from experiments.config import MeasuresConfig, RunConfig
from experiments.protocols import GradientFields, gradient_arms, gradient_run
from experiments.seeds import Streams
from experiments.study import Study, discover
from experiments.train import Objective

ALL = ("mlp", "linear", "vgg")


def runs(fields: GradientFields, seed: int = 0) -> dict[str, RunConfig]:
    return {
        arm.name: gradient_run(fields, arm, seed, "cpu", measures=MeasuresConfig(), evaluate_every=500)
        for arm in gradient_arms(fields)
    }


STUDIES = [study for study in discover().values() if issubclass(study.fields, GradientFields)]


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_arms_of_every_study_differ_in_the_normalizer_alone(study: Study[Any], tmp_path: Path) -> None:
    fields = study.fields()
    made = {job.arm: job.config.canonical() for job in study.jobs(fields, [7], device="cpu", folder=tmp_path)}
    pairs = [f"{network}-{rate:g}" for network in fields.network for rate in fields.rates(network)]
    assert sorted(made) == sorted(f"{pair}-{kind}" for pair in pairs for kind in ("none", "batch"))
    for pair in pairs:
        none, batch = (made[f"{pair}-{kind}"] for kind in ("none", "batch"))
        assert (none.pop("normalizer")["kind"], batch.pop("normalizer")["kind"]) == ("none", "batch")
        assert none == batch
        assert none["seed"] == 7


def test_the_studies_of_the_gradient_are_found() -> None:
    assert {"ics", "landscape", "sharpness"} <= {study.name for study in STUDIES}


def test_each_network_runs_at_each_of_its_rates_without_and_with_bn() -> None:
    found = runs(GradientFields())
    assert list(found) == [
        "mlp-0.1-none", "mlp-0.1-batch", "linear-1e-06-none", "linear-1e-06-batch", "linear-1e-07-none",
        "linear-1e-07-batch",
    ]  # fmt: skip
    linear = found["linear-1e-07-batch"]
    assert linear.training.learning_rate == 1e-7
    assert (linear.training.batch, linear.training.reduction) == ("full", "sum")
    assert found["mlp-0.1-none"].normalizer.kind == "none"
    assert [arm.label for arm in gradient_arms(GradientFields(network=("vgg",)))] == [
        "vgg, lr 0.1, without BN", "vgg, lr 0.1, with BN",
    ]  # fmt: skip


def test_the_two_arms_of_a_network_and_rate_differ_in_the_normalizer_alone() -> None:
    found = runs(GradientFields(network=ALL))
    for name in ("mlp-0.1", "linear-1e-06", "vgg-0.1"):
        none, batch = found[f"{name}-none"].canonical(), found[f"{name}-batch"].canonical()
        assert none.pop("normalizer") != batch.pop("normalizer")
        assert none == batch


OTHER: dict[str, Any] = {
    "network": ("linear", "mlp"), "steps": 7, "mlp_lr": (0.3,), "linear_lr": (1e-8,), "vgg_lr": (0.3,), "momentum": 0.9,
    "mlp_batch": 7, "vgg_batch": 7, "hidden": (7,), "activation": "tanh", "std": 0.3, "binarize": False, "depth": 7,
    "dimension": 7, "examples": 70, "scale": 0.3, "reduce": False, "normalize_last": False, "layout": "D",
    "width": 0.5, "root": "there", "glorot": "normal", "bn_momentum": 0.3, "bn_epsilon": 0.3, "threads": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", GradientFields.model_fields)
def test_every_field_moves_a_run(name: str) -> None:
    usual = GradientFields(network=ALL)
    changed = GradientFields(**{"network": ALL, name: OTHER[name]})
    assert {run.id for run in runs(usual).values()} != {run.id for run in runs(changed).values()}
    if name in ("bn_momentum", "bn_epsilon", "normalize_last"):
        return
    # what is not BN's moves both arms
    before, after = runs(usual), runs(changed)
    moved = {arm.rpartition("-")[0] for arm in before if arm not in after or before[arm].id != after[arm].id}
    for arm in moved:
        for kind in ("none", "batch"):
            assert f"{arm}-{kind}" not in after or before[f"{arm}-{kind}"].id != after[f"{arm}-{kind}"].id


def test_what_an_absent_network_would_ignore_is_refused() -> None:
    with pytest.raises(ValidationError, match="depth=3 means nothing without network linear"):
        GradientFields(network=("mlp",), depth=3)
    with pytest.raises(ValidationError, match="glorot=normal means nothing without network linear or vgg"):
        GradientFields(network=("mlp",), glorot="normal")
    with pytest.raises(ValidationError, match="each is run once, got mlp mlp"):
        GradientFields(network=("mlp", "mlp"))
    with pytest.raises(ValidationError, match=r"each is run once, got 0\.1 0\.1"):
        GradientFields(mlp_lr=(0.1, 0.1))


def test_the_summed_loss_trains_the_deep_linear_network_from_about_1e5() -> None:
    """The mean over examples would not move at these rates."""
    config = runs(GradientFields())["linear-1e-06-none"]
    streams = Streams(0)
    data = make_data(config.data, streams)
    model = make_network(config.network, config.normalizer, streams)
    objective = Objective.of(data, config.training)
    batch = data.train_inputs, data.train_targets
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    losses = []
    for _ in range(300):
        optimizer.zero_grad()
        loss = objective(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 3e4 < losses[0] < 3e5
    assert losses[-1] < 0.9 * losses[0]
