from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from experiments.assemble import make_slot
from experiments.config import (
    DataConfig,
    DeepLinearConfig,
    EvaluationConfig,
    MachineConfig,
    MLPConfig,
    NoiseConfig,
    NormalizerConfig,
    RunConfig,
    TrainingConfig,
    VGGConfig,
)
from experiments.seeds import Streams
from experiments.studies.figure1 import Figure1Fields

BATCH = RunConfig(seed=0, normalizer=NormalizerConfig(kind="batch"), evaluation=EvaluationConfig(fixed=5))


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def changed(value: Any) -> Any:
    """Another valid value for a leaf of the configuration."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return {0.0: 0.5, 1.25: 1.5}.get(value, value / 2)
    if isinstance(value, list):
        return [*value, 7]
    return {
        "sigmoid": "tanh", "relu": "tanh", "cpu": "cuda", "sgd": "adam", "mean": "sum", "D": "A", "uniform": "normal",
        "gaussian": "orthogonal",
        "per_step": "fixed", "after_affine": "before_affine", "deviation": "variance", "l2": "linf", None: "elsewhere",
    }.get(value)  # fmt: skip


LINEAR: Any = {"data": DataConfig(name="gaussian"), "training": TrainingConfig(batch="full")}
# Between them they use every field there is.
EXAMPLES = (
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="batch"), evaluation=EvaluationConfig(fixed=5)),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="noisy"), data=DataConfig(name="fashion-mnist")),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="noise_only")),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="population")),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="ghost")),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="lp")),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="layer")),
    RunConfig(seed=0, normalizer=NormalizerConfig(kind="group")),
    RunConfig(seed=0, network=VGGConfig(), data=DataConfig(name="cifar10")),
    RunConfig(seed=0, network=DeepLinearConfig(), **LINEAR),
)


def address(config: dict[str, Any]) -> str:
    return RunConfig.model_validate(config).id


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"{e.normalizer.kind}-{e.network.kind}-{e.data.name}")
def test_every_field_is_part_of_the_address(example: RunConfig) -> None:
    ids, tried = {example.id}, set()
    for path, value in leaves(example.canonical()):
        other = changed(value)
        # A kind is changed in other examples; a picture's shape belongs to the data.
        if path[-1] in ("kind", "name") or value == "full" or path in (("network", "channels"), ("network", "size")):
            continue
        assert other is not None, path
        if (path == ("network", "width") and example.network.kind == "deep_linear") or path == ("data", "dimension"):
            continue  # they are one number
        config = copy.deepcopy(example.canonical())
        node = config
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = other
        if path == ("data", "binarize"):
            del config["data"]["threshold"]
        if path == ("training", "optimizer"):
            del config["training"]["momentum"]
        ids.add(address(config))
        tried.add(path)
    assert len(ids) == len(tried) + 1
    assert {("machine", "threads"), ("machine", "device"), ("seed",), ("training", "learning_rate")} <= tried


def test_the_examples_use_every_field_and_differ() -> None:
    used = {(path[0], path[-1]) for example in EXAMPLES for path, _ in leaves(example.canonical())}
    models = {"network": (MLPConfig, VGGConfig, DeepLinearConfig), "normalizer": (NormalizerConfig, NoiseConfig)}
    models |= {"data": (DataConfig,), "training": (TrainingConfig,), "evaluation": (EvaluationConfig,)}
    for part, kinds in models.items():
        for kind in kinds:
            assert {(part, name) for name in kind.model_fields if name != "noise"} <= used
    assert len({example.id for example in EXAMPLES}) == len(EXAMPLES)


@pytest.mark.parametrize(
    ("network", "data", "complaint"),
    [
        (DeepLinearConfig(), DataConfig(), "deep_linear does not learn mnist"),
        (MLPConfig(), DataConfig(name="gaussian"), "mlp does not learn gaussian"),
        (DeepLinearConfig(width=9), DataConfig(name="gaussian"), "width is 9 and the data's dimension 10"),
        (VGGConfig(), DataConfig(), "3x32x32, not those of mnist"),
        (VGGConfig(size=64), DataConfig(name="cifar10"), "3x32x32"),
    ],
)
def test_a_network_that_does_not_fit_the_data_is_refused(network: Any, data: DataConfig, complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        RunConfig(seed=0, network=network, data=data)


def test_what_has_modes_and_what_needs_a_batch() -> None:
    kinds = {kind: NormalizerConfig(kind=kind) for kind in NormalizerConfig.USED}
    assert {kind for kind, one in kinds.items() if not one.has_modes} == {"none", "layer", "group"}
    for kind, one in kinds.items():
        model, batch = make_slot(one, Streams(0))(8), torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
        needs = False
        try:
            model.train()(batch)
        except ValueError:
            needs = True
        assert one.needs_two == needs, kind
        several = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        differs = not torch.allclose(model.train()(several), model.eval()(several), rtol=1e-3)
        assert differs == one.has_modes, kind


def test_the_address_does_not_depend_on_how_the_configuration_was_written() -> None:
    spelled = RunConfig.model_validate(
        {
            "training": {"learning_rate": 1, "steps": 15_000},
            "network": {"kind": "mlp", "hidden": [100, 100, 100]},
            "seed": 0,
        }
    )
    assert spelled.id == RunConfig(seed=0, training=TrainingConfig(learning_rate=1.0)).id


def test_the_canonical_form_holds_defaults_and_can_be_read_back() -> None:
    canonical = BATCH.canonical()
    assert canonical["normalizer"] == {"kind": "batch", "momentum": 0.1, "epsilon": 1e-5}
    assert canonical["network"]["hidden"] == [100, 100, 100]
    assert RunConfig.model_validate(canonical) == BATCH


def test_what_a_kind_ignores_is_refused_and_left_out() -> None:
    assert RunConfig(seed=0).canonical()["normalizer"] == {"kind": "none"}
    with pytest.raises(ValidationError, match=r"momentum=0\.3 means nothing with normalizer 'none'"):
        NormalizerConfig(momentum=0.3)
    assert "threshold" not in DataConfig(binarize=False).model_dump()
    with pytest.raises(ValidationError, match=r"threshold=0\.3 means nothing without binarize"):
        DataConfig(binarize=False, threshold=0.3)
    with pytest.raises(ValidationError, match="root=elsewhere means nothing with mnist"):
        DataConfig(root="elsewhere")
    with pytest.raises(ValidationError, match=r"momentum=0\.9 means nothing with adam"):
        TrainingConfig(optimizer="adam", momentum=0.9)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize(
    ("model", "name"),
    [(TrainingConfig, "steps"), (TrainingConfig, "batch"), (EvaluationConfig, "every"), (MachineConfig, "threads")],
)
def test_counts_are_positive(model: type[TrainingConfig], name: str, value: int) -> None:
    with pytest.raises(ValidationError, match=name):
        model(**{name: value})


@pytest.mark.parametrize("value", [0.0, -0.1, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("model", "name"), [(TrainingConfig, "learning_rate"), (MLPConfig, "init_std"), (NormalizerConfig, "epsilon")]
)
def test_scales_are_positive_and_finite(model: type[TrainingConfig], name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        model(**{name: value})


@pytest.mark.parametrize(
    "given",
    [{"hidden": ()}, {"hidden": (10, 0)}, {"activation": "sine"}, {"width": 3}, {"outputs": 0}],
)
def test_an_impossible_network_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(given))):
        MLPConfig(**given)


def test_a_batch_of_one_cannot_be_normalized() -> None:
    one = TrainingConfig(batch=1)
    with pytest.raises(ValidationError, match="a batch of 1 has no variance"):
        RunConfig(seed=0, normalizer=NormalizerConfig(kind="batch"), training=one)
    assert RunConfig(seed=0, training=one).training.batch == 1


@pytest.mark.parametrize("given", [(50, 50.0), (50, 50.0000001), (-1,), (101,), (float("nan"),), ()])
def test_percentiles_are_told_apart_as_records_name_them(given: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError):
        Figure1Fields(percentiles=given)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_is_a_natural_number(seed: int) -> None:
    with pytest.raises(ValidationError, match="seed"):
        RunConfig(seed=seed)


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        BATCH.training.steps = 3  # type: ignore[misc]


def test_evaluation_is_finer_at_the_start() -> None:
    due = EvaluationConfig(every=1000, early_every=100, early_until=300).due
    assert [step for step in range(3001) if due(step)] == [0, 100, 200, 300, 1000, 2000, 3000]
