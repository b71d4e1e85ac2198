"""Networks: names, shapes, initialization from the generator alone, and weights shared between arms."""

import pytest
import torch
from torch import nn

from experiments.networks import deep_linear, mlp, vgg
from experiments.normalizers import Batch, Layer, NoiseOnly, NoisyBatch, none


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def weights(network):
    return [m.weight for m in network.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]


def make_mlp(normalizer=none, seed=0, **changes):
    settings = {"inputs": 12, "hidden": (7, 5), "outputs": 3, "activation": "sigmoid", "init_std": 0.3} | changes
    return mlp(**settings, normalizer=normalizer, generator=generator(seed))


@pytest.mark.parametrize("normalizer", [none, Batch])
def test_an_mlp_has_the_same_points_in_every_arm(normalizer):
    network = make_mlp(normalizer)
    names = [name for name, module in network.named_modules() if not isinstance(module, nn.Sequential)]
    assert names == [
        "flatten",
        *(f"hidden{i}.{part}" for i in (1, 2) for part in ("linear", "normalizer", "nonlinearity")),
        "output",
    ]


def test_an_mlp_computes_what_it_says():
    network = make_mlp(hidden=(7,), activation="tanh")
    x = torch.rand(4, 3, 2, 2, generator=generator(1))
    first, last = weights(network)
    assert torch.allclose(network(x), torch.tanh(x.reshape(4, 12) @ first.T) @ last.T, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "kind"),
    [("sigmoid", nn.Sigmoid), ("tanh", nn.Tanh), ("relu", nn.ReLU), ("linear", nn.Identity)],
)
def test_the_activation_is_used(activation, kind):
    assert type(make_mlp(activation=activation).hidden2.nonlinearity) is kind


def test_a_bias_stands_where_the_normalizer_does_not_shift():
    plain, normalized = make_mlp(none), make_mlp(Batch)
    for layer in (plain.hidden1.linear, plain.hidden2.linear, plain.output, normalized.output):
        assert torch.equal(layer.bias, torch.zeros_like(layer.bias))
    assert normalized.hidden1.linear.bias is None
    assert make_mlp(lambda features: Batch(features, affine=False)).hidden1.linear.bias is None


@pytest.mark.parametrize(("inputs", "hidden"), [(12, (7, 5)), (4, (9, 9))])
def test_orthogonal_weights_are_orthogonal_and_as_large_as_gaussian_ones(inputs, hidden):
    for weight in weights(make_mlp(inputs=inputs, hidden=hidden, init="orthogonal")):
        values = torch.linalg.svdvals(weight)
        assert torch.allclose(values, torch.full_like(values, 0.3 * max(weight.shape) ** 0.5), rtol=1e-5)
        assert float(weight.detach().square().mean()) == pytest.approx(0.09, rel=1e-5)
    one, same, other = (weights(make_mlp(init="orthogonal", seed=seed))[0] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def make_vgg(normalizer=none, seed=0, **changes):
    settings = {"layout": "A", "width": 0.125, "channels": 3, "size": 32, "outputs": 10, "activation": "relu"} | changes
    return vgg(**{"glorot": "uniform"} | settings, normalizer=normalizer, generator=generator(seed))


def make_deep_linear(normalizer=none, seed=0, **changes):
    settings = {"width": 10, "depth": 5, "glorot": "normal", "normalize_last": True} | changes
    return deep_linear(**settings, normalizer=normalizer, generator=generator(seed))


MAKERS = [make_mlp, make_vgg, make_deep_linear]


@pytest.mark.parametrize("make", MAKERS)
def test_arms_share_the_weights_of_a_seed_and_seeds_differ(make):
    noise = generator(9)
    arms = [
        none,
        Batch,
        Layer,
        lambda features: NoisyBatch(features, generator=noise),
        lambda features: NoiseOnly(features, generator=noise),
    ]
    expected, other = weights(make()), weights(make(seed=1))
    for arm in arms:
        for weight, same, different in zip(weights(make(arm)), expected, other, strict=True):
            assert torch.equal(weight, same)
            assert not torch.equal(weight, different)


@pytest.mark.parametrize("make", MAKERS)
def test_initialization_draws_from_the_given_generator_alone(make):
    torch.manual_seed(4)
    before = torch.get_rng_state()
    make(Batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_moves_the_generator_it_was_given():
    stream = generator()
    arguments = {"width": 3, "depth": 2, "glorot": "normal", "normalizer": none, "normalize_last": True}
    first, second = (deep_linear(**arguments, generator=stream) for _ in range(2))
    assert not torch.equal(first.layer1.linear.weight, second.layer1.linear.weight)


@pytest.mark.parametrize(("layout", "stages"), [("A", (1, 1, 2, 2, 2)), ("D", (2, 2, 3, 3, 3))])
@pytest.mark.parametrize("normalizer", [none, Batch])
def test_a_vgg_has_the_layers_of_its_layout(layout, stages, normalizer):
    network = make_vgg(normalizer, layout=layout)
    names, i = [], 0
    for stage in stages:
        for _ in range(stage):
            i += 1
            names += [f"features.{i}.{part}" for part in ("conv", "normalizer", "nonlinearity")]
        names.append(f"features.{i}.pool")
    assert [n for n, m in network.named_modules() if not isinstance(m, nn.Sequential)] == [*names, "flatten", "output"]
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("layout", "parameters"), [("A", 9_220_480), ("D", 14_714_688)])
def test_a_vgg_of_full_width_has_the_known_number_of_parameters(layout, parameters):
    assert sum(p.numel() for p in make_vgg(layout=layout, width=1).features.parameters()) == parameters


def test_a_vgg_takes_other_pictures_widths_and_activations():
    network = make_vgg(channels=1, size=64, width=0.25, outputs=7, activation="tanh")
    assert network(torch.zeros(2, 1, 64, 64)).shape == (2, 7)
    assert network.features[0].conv.out_channels == 16
    assert network.output.in_features == 128 * 4
    assert isinstance(network.features[3].nonlinearity, nn.Tanh)


def test_a_deep_linear_net_is_the_product_of_its_matrices():
    network = make_deep_linear()
    x = torch.rand(4, 10, generator=generator(1))
    expected = x.double()
    for weight in weights(network):
        expected = expected @ weight.double().T
    torch.testing.assert_close(network(x).double(), expected, rtol=1e-4, atol=1e-5)
    assert [n for n, m in network.named_modules() if not isinstance(m, nn.Sequential)] == [
        f"layer{i}.{part}" for i in range(1, 6) for part in ("linear", "normalizer")
    ]
    assert len(list(network.parameters())) == 5


def test_the_last_linear_layer_is_normalized_where_asked():
    kinds = [[type(layer.normalizer) for layer in make_deep_linear(Batch, normalize_last=n)] for n in (True, False)]
    assert kinds == [5 * [Batch], 4 * [Batch] + [nn.Identity]]


@pytest.mark.parametrize("glorot", ["uniform", "normal"])
@pytest.mark.parametrize("make", [make_vgg, make_deep_linear])
def test_glorot_weights_have_the_variance_of_their_fans(make, glorot):
    sizes = {"width": 0.25} if make is make_vgg else {"width": 100, "depth": 2}
    for weight in weights(make(glorot=glorot, **sizes)):
        receptive = weight[0, 0].numel()
        variance = 2 / (receptive * (weight.shape[0] + weight.shape[1]))
        values, n = weight.double().flatten(), weight.numel()
        kurtosis = 9 / 5 if glorot == "uniform" else 3
        assert abs((values.square().mean().item() / variance - 1) * (n / (kurtosis - 1)) ** 0.5) < 4
        assert abs(values.mean().item()) < 4 * (variance / n) ** 0.5
        bound = (3 * variance) ** 0.5
        assert (values.abs().max().item() <= bound * (1 + 1e-6)) == (glorot == "uniform")


def test_weights_have_the_asked_deviation():
    # the mean of n normals has deviation std / sqrt(n), their deviation std / sqrt(2 n)
    for layer in weights(make_mlp(inputs=400, hidden=(300, 300), outputs=100, init_std=0.2)):
        n = layer.numel()
        assert abs(layer.double().mean().item()) < 4 * 0.2 / n**0.5
        assert abs(layer.double().std().item() - 0.2) < 4 * 0.2 / (2 * n) ** 0.5


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"inputs": 0}, "inputs must be at least 1, not 0"),
        ({"outputs": 0}, "outputs must be at least 1, not 0"),
        ({"hidden": (3, -1)}, r"hidden\[1\] must be at least 1, not -1"),
        ({"init": "uniform"}, "init is gaussian or orthogonal, not 'uniform'"),
        ({"init_std": -0.1}, "init_std is a standard deviation, not -0.1"),
        ({"init_std": float("nan")}, "init_std is a standard deviation, not nan"),
        ({"activation": "gelu"}, "not 'gelu'"),
    ],
)
def test_bad_settings_are_refused_by_name(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_mlp(**change)


@pytest.mark.parametrize(
    ("make", "change", "complaint"),
    [
        (make_vgg, {"layout": "E"}, "layout is A or D, not 'E'"),
        (make_vgg, {"width": 0.3}, "whole number of the 64 channels of a stage, and 0.3 does not"),
        (make_vgg, {"width": 0}, "whole number"),
        (make_vgg, {"size": 28}, "multiple of 32 for five stages of pooling, not 28"),
        (make_vgg, {"size": 0}, "size must be at least 1"),
        (make_vgg, {"channels": 0}, "channels must be at least 1"),
        (make_vgg, {"outputs": 0}, "outputs must be at least 1"),
        (make_vgg, {"glorot": "he"}, "glorot is uniform or normal, not 'he'"),
        (make_vgg, {"activation": "gelu"}, "not 'gelu'"),
        (make_deep_linear, {"width": 0}, "width must be at least 1"),
        (make_deep_linear, {"depth": 0}, "depth must be at least 1"),
        (make_deep_linear, {"glorot": "he"}, "glorot is uniform or normal, not 'he'"),
    ],
)
def test_settings_that_make_no_network_are_refused(make, change, complaint):
    with pytest.raises(ValueError, match=complaint):
        make(**change)


def test_biases_are_zero_and_only_where_nothing_shifts():
    for make, normalizer, biases in (
        (make_vgg, none, 9),
        (make_vgg, Batch, 1),
        (make_deep_linear, none, 0),
        (make_deep_linear, Batch, 0),
    ):
        layers = [m for m in make(normalizer).modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
        found = [layer.bias for layer in layers if layer.bias is not None]
        assert len(found) == biases
        assert all(torch.equal(bias, torch.zeros_like(bias)) for bias in found)
