"""Normalizers: against torch where torch has one, against slow twins where it has none, against the law for noise."""

import pytest
import torch
from torch import nn

from experiments.normalizers import Batch, none

SHAPES = [(6, 4), (6, 4, 5), (6, 4, 3, 2), (6, 4, 3, 2, 2)]
TORCH_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def randn(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_same_training(one: nn.Module, other: nn.Module, shape, steps=3):
    """Outputs, gradients and states are equal, bit for bit, over a few training passes and one in eval."""
    for step in range(steps):
        inputs = [(2 * randn(shape, step) + 1).requires_grad_() for _ in range(2)]
        outputs = [module(x) for module, x in zip((one, other), inputs, strict=True)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward(randn(shape, 100 + step))
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    state, expected = one.state_dict(), other.state_dict()
    for name in expected:
        assert torch.equal(state[name], expected[name]), name
    x = randn(shape, 50)
    assert torch.equal(one.eval()(x), other.eval()(x))
    one.train(), other.train()


def test_none_is_a_module_that_changes_nothing():
    x = randn((3, 4))
    assert none(4)(x) is x


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_is_torchs_batch_normalization(shape):
    for options in ({}, {"eps": 0.1}, {"momentum": 0.5}, {"affine": False}):
        assert_same_training(Batch(4, **options), TORCH_BATCH_NORMS[len(shape)](4, **options), shape)


def test_a_single_value_a_unit_is_refused_in_training_alone():
    for shape in ((1, 4), (1, 4, 1, 1)):
        with pytest.raises(ValueError, match="more than one value a unit"):
            Batch(4)(randn(shape))
        assert Batch(4).eval()(randn(shape)).shape == shape
    assert Batch(4)(randn((1, 4, 2))).shape == (1, 4, 2)


@pytest.mark.parametrize("shape", [(4,), (3, 5), (3, 4, 4)[:1]])
def test_another_number_of_units_is_refused(shape):
    with pytest.raises(ValueError, match="expected shape"):
        Batch(4)(randn(shape))
