"""Networks: names, shapes, initialization from the generator alone, and weights shared between arms."""

import pytest
import torch
from torch import nn

from experiments.networks import mlp
from experiments.normalizers import Batch, none


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


def test_arms_share_the_weights_of_a_seed_and_seeds_differ():
    for a, b, c in zip(*map(weights, (make_mlp(none), make_mlp(Batch), make_mlp(none, seed=1))), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_initialization_draws_from_the_given_generator_alone():
    torch.manual_seed(4)
    before = torch.get_rng_state()
    stream = generator()
    state = stream.get_state()
    mlp(inputs=12, hidden=(7,), outputs=3, activation="relu", init_std=1, normalizer=Batch, generator=stream)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(stream.get_state(), state)


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
        ({"init_std": -0.1}, "init_std is a standard deviation, not -0.1"),
        ({"init_std": float("nan")}, "init_std is a standard deviation, not nan"),
        ({"activation": "gelu"}, "not 'gelu'"),
    ],
)
def test_bad_settings_are_refused_by_name(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_mlp(**change)
