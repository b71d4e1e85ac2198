from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest
import torch

from experiments import assemble, normalizers
from experiments.assemble import make_data, make_network, make_slot, noise_law
from experiments.config import DataConfig, DeepLinearConfig, MLPConfig, NoiseConfig, NormalizerConfig, VGGConfig
from experiments.normalizers import NoiseLaw
from experiments.seeds import Streams


def test_a_network_is_built_as_configured() -> None:
    config = MLPConfig(inputs=6, hidden=(50, 40), outputs=3, activation="tanh", init_std=0.25)
    normalizer = NormalizerConfig(kind="batch", momentum=0.3, epsilon=1e-3)
    plain, normalized = (make_network(config, kind, Streams(0)) for kind in (NormalizerConfig(), normalizer))
    found = dict(normalized.named_modules())
    assert {"hidden2.linear", "hidden2.normalizer", "hidden2.nonlinearity", "output"} <= set(found)
    assert isinstance(found["hidden1.nonlinearity"], torch.nn.Tanh)
    assert (found["hidden1.normalizer"].momentum, found["hidden1.normalizer"].eps) == (0.3, 1e-3)
    assert isinstance(plain.get_submodule("hidden1.normalizer"), torch.nn.Identity)
    assert found["hidden2.linear"].weight.shape == (40, 50)
    assert found["hidden2.linear"].weight.std().item() == pytest.approx(0.25, rel=0.1)
    for name in ("hidden1.linear", "hidden2.linear", "output"):  # common random numbers
        assert torch.equal(plain.get_submodule(name).weight, found[name].weight)


def test_vgg_is_built_as_configured() -> None:
    config = VGGConfig(layout="A", width=0.125, outputs=7, activation="tanh", glorot="normal")
    model = make_network(config, NormalizerConfig(kind="group", groups=2), Streams(3))
    found = dict(model.named_modules())
    assert found["features.1.conv"].weight.shape == (8, 3, 3, 3)
    assert "features.8.conv" in found
    assert "features.9" not in found
    assert isinstance(found["features.1.nonlinearity"], torch.nn.Tanh)
    assert found["features.1.normalizer"].num_groups == 2
    expected = torch.nn.init.xavier_normal_(torch.empty(8, 3, 3, 3), generator=Streams(3).torch("init"))
    assert torch.equal(found["features.1.conv"].weight, expected)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    assert "features.13.conv" in dict(
        make_network(VGGConfig(width=0.125), NormalizerConfig(), Streams(3)).named_modules()
    )


def test_the_deep_linear_network_is_built_as_configured() -> None:
    config = DeepLinearConfig(width=5, depth=3, glorot="uniform", normalize_last=False)
    model = make_network(config, NormalizerConfig(kind="batch"), Streams(3))
    assert model.layer1.linear.weight.shape == (5, 5)
    expected = torch.nn.init.xavier_uniform_(torch.empty(5, 5), generator=Streams(3).torch("init"))
    assert torch.equal(model.layer1.linear.weight, expected)
    assert isinstance(model.layer2.normalizer, normalizers.Batch)
    assert isinstance(model.layer3.normalizer, torch.nn.Identity)
    assert not hasattr(model, "layer4")


@pytest.mark.parametrize(
    ("given", "kind", "expected"),
    [
        (
            {"kind": "population", "momentum": 0.3, "epsilon": 1e-3},
            normalizers.Population,
            {"momentum": 0.3, "eps": 1e-3},
        ),
        (
            {"kind": "ghost", "momentum": 0.3, "epsilon": 1e-3, "ghost": 5},
            normalizers.Ghost,
            {"momentum": 0.3, "eps": 1e-3, "group": 5},
        ),
        (
            {"kind": "lp", "momentum": 0.3, "epsilon": 1e-3, "norm": "linf", "centred": True},
            normalizers.Lp,
            {"momentum": 0.3, "eps": 1e-3, "p": math.inf, "centred": True},
        ),
        ({"kind": "lp", "norm": "l1"}, normalizers.Lp, {"p": 1.0, "centred": False}),
        ({"kind": "layer", "epsilon": 1e-3}, normalizers.Layer, {"eps": 1e-3, "num_groups": 1}),
        ({"kind": "group", "epsilon": 1e-3, "groups": 3}, normalizers.Group, {"eps": 1e-3, "num_groups": 3}),
        (
            {"kind": "noisy", "momentum": 0.3, "epsilon": 1e-3, "noise": {"strength": 2.0}},
            normalizers.NoisyBatch,
            {"momentum": 0.3, "eps": 1e-3, "law": NoiseLaw(strength=2.0)},
        ),
        ({"kind": "noise_only", "noise": {"n_mu": 0.2}}, normalizers.NoiseOnly, {"law": NoiseLaw(n_mu=0.2)}),
    ],
)
def test_each_normalizer_has_the_settings_it_was_given(given: dict[str, Any], kind: type, expected: Any) -> None:
    made = make_slot(NormalizerConfig.model_validate(given), Streams(0))(6)
    assert type(made) is kind
    assert {name: getattr(made, name) for name in expected} == expected


def test_the_noise_law_is_the_configured_one_and_the_defaults_agree() -> None:
    assert noise_law(NoiseConfig()) == NoiseLaw()
    other = {"n_mu": 0.1, "n_sigma": 1.5, "r_mu": 0.2, "r_sigma": 0.3, "strength": 4.0}
    other |= {"form": "per_sample", "place": "before_affine", "spread": "variance"}
    assert asdict(noise_law(NoiseConfig.model_validate(other))) == other


def test_all_layers_draw_from_one_noise_stream_that_no_weight_comes_from() -> None:
    streams = Streams(4)
    noisy = make_network(MLPConfig(inputs=6, hidden=(5, 4)), NormalizerConfig(kind="noisy"), streams)
    assert noisy.hidden1.normalizer.generator is noisy.hidden2.normalizer.generator is streams.torch("noise")
    plain = make_network(MLPConfig(inputs=6, hidden=(5, 4)), NormalizerConfig(kind="batch"), Streams(4))
    for (name, a), (_, b) in zip(noisy.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    fixed = {"kind": "noisy", "noise": {"form": "fixed"}}
    drawn = make_network(MLPConfig(inputs=6, hidden=(5, 4)), NormalizerConfig.model_validate(fixed), Streams(4))
    assert torch.equal(drawn.hidden1.linear.weight, plain.hidden1.linear.weight)


def test_pictures_are_those_of_the_configuration_and_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("mnist", "fashion_mnist", "cifar10"):
        monkeypatch.setattr(assemble.datasets, name, lambda *a, name=name, **k: asked.append((name, a, k)) or object())
    assemble._pictures.cache_clear()
    grey = DataConfig(binarize=False)
    assert make_data(grey, Streams(0)) is make_data(grey, Streams(1))
    make_data(DataConfig(name="fashion-mnist", root="there", threshold=0.2), Streams(0))
    make_data(DataConfig(name="cifar10", root="there", standardize=False), Streams(0))
    make_data(DataConfig(name="cifar10"), Streams(0))
    assemble._pictures.cache_clear()
    assert asked == [
        ("mnist", (), {"binarize": False, "threshold": 0.5}),
        ("fashion_mnist", ("there",), {"binarize": True, "threshold": 0.2}),
        ("cifar10", (assemble.Path("there"),), {"download": False, "standardize": False}),
        ("cifar10", (assemble.Path(assemble.CIFAR10_ROOT),), {"download": True, "standardize": True}),
    ]


def test_the_gaussian_task_is_drawn_from_the_seed() -> None:
    config = DataConfig(name="gaussian", dimension=4, examples=50, test_examples=7, scale=3.0, reduce=False)
    first, again, other = (make_data(config, Streams(seed)) for seed in (1, 1, 2))
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert not torch.equal(first.train_inputs, other.train_inputs)
    assert first.train_inputs.shape == (50, 4)
    assert first.test_inputs.shape == (7, 4)
    doubled = make_data(config.model_copy(update={"scale": 6.0}), Streams(1))
    torch.testing.assert_close(doubled.train_targets, 2 * first.train_targets)


@pytest.mark.parametrize("kind", ["none", "batch", "lp"])
def test_the_reduced_set_gives_a_linear_network_the_loss_and_gradients_of_the_whole_one(kind: str) -> None:
    """l2 of uncentred values depends on second moments alone, as BN does; the moments in double precision agree."""
    from experiments.config import TrainingConfig
    from experiments.train import Objective

    data = DataConfig(name="gaussian", dimension=4, examples=60, test_examples=7)
    found = {}
    for reduce in (False, True):
        drawn = make_data(data.model_copy(update={"reduce": reduce}), Streams(5))
        config = DeepLinearConfig(width=4, depth=5)
        model = make_network(config, NormalizerConfig(kind=kind), Streams(5)).double()
        objective = Objective.of(drawn, TrainingConfig(reduction="sum"))
        loss = objective(model, (drawn.train_inputs.double(), drawn.train_targets.double()))
        found[reduce] = (loss.detach(), *torch.autograd.grad(loss, list(model.parameters())))
        assert len(drawn.train_inputs) == (8 if reduce else 60)
        assert torch.equal(drawn.test_inputs, make_data(data, Streams(5)).test_inputs)
    largest = max(float(gradient.abs().max()) for gradient in found[False][1:])
    for whole, few in zip(found[False], found[True], strict=True):
        # points are stored in single precision; what is zero but for rounding is held to the size of the others
        torch.testing.assert_close(few, whole, rtol=2e-6, atol=2e-6 * largest)
