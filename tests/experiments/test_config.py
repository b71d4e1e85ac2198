from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from experiments.config import (
    DataConfig,
    EvaluationConfig,
    MachineConfig,
    MLPConfig,
    NormalizerConfig,
    RunConfig,
    TrainingConfig,
)

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
        return value / 2 if value else 0.5
    if isinstance(value, list):
        return [*value, 7]
    return {"sigmoid": "tanh", "cpu": "cuda", "batch": "none", None: "elsewhere"}.get(value)


def test_every_field_is_part_of_the_address() -> None:
    ids = {BATCH.id}
    tried = set()
    for path, value in leaves(BATCH.canonical()):
        other = changed(value)
        if other is None:  # a kind of which there is one
            assert path[-1] in ("kind", "name")
            continue
        config = copy.deepcopy(BATCH.canonical())
        node = config
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = other
        if path == ("normalizer", "kind"):
            config["normalizer"] = {"kind": other}
        if path == ("data", "binarize"):
            del config["data"]["threshold"]
        ids.add(RunConfig.model_validate(config).id)
        tried.add(path)
    assert len(ids) == len(tried) + 1
    assert {("machine", "threads"), ("machine", "device"), ("seed",), ("training", "learning_rate")} <= tried


def test_the_address_does_not_depend_on_how_the_configuration_was_written() -> None:
    spelled = RunConfig.model_validate(
        {
            "training": {"learning_rate": 1, "steps": 15_000},
            "network": {"hidden": [100, 100, 100]},
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
