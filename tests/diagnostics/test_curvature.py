"""Hessian-vector products and what the gradient sees of the curvature: closed forms, differences, another BN."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from diagnostics import Gradients, directional_curvature, hessian_vector_product
from tests.models import PrimitiveBatchNorm, cross_entropy
from tests.reference import gradients as twin


def batch(n=12, inputs=4, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (n,), generator=generator)


def normalized(norm=nn.BatchNorm1d):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), norm(5), nn.Tanh(), nn.Linear(5, 4), norm(4), nn.Linear(4, 3)).double()
    with torch.no_grad():  # gamma and beta that are not 1 and 0
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(p.numel())))
    return model


def dense(at):
    hessian = at.hessian()
    size = sum(p.numel() for p in at.theta)
    return torch.stack([hessian(column) for column in torch.eye(size, dtype=torch.float64)], dim=1)


def test_a_quadratic_obeys_the_closed_form():
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    matrix = root + root.T
    theta = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    v = torch.randn(6, generator=generator, dtype=torch.float64)
    (g,) = torch.autograd.grad(theta @ matrix @ theta / 2, theta, create_graph=True)
    (product,) = hessian_vector_product([g], [theta], [v])
    torch.testing.assert_close(product, matrix @ v, rtol=1e-12, atol=1e-12)
    found = directional_curvature(lambda u: matrix @ u, g.detach())
    d = (matrix @ theta).detach()
    assert found.directional == pytest.approx(float((matrix @ d).norm() / d.norm()), rel=1e-12)
    assert found.rayleigh == pytest.approx(float(d @ matrix @ d / (d @ d)), rel=1e-12)


def test_a_direction_counts_whatever_its_length():
    matrix = torch.diag(torch.tensor([3.0, -1.0]))
    for length in (1e-30, 1.0, 1e30):
        found = directional_curvature(lambda u: matrix @ u, length * torch.tensor([0.0, 1.0]))
        assert found.directional == pytest.approx(1)
        assert found.rayleigh == pytest.approx(-1)


def test_a_linear_loss_has_no_curvature_and_unused_parameters_none_either():
    theta, other = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True)
    loss = (torch.arange(3.0) * theta).sum()
    g = torch.autograd.grad(loss, [theta, other], create_graph=True, allow_unused=True, materialize_grads=True)
    products = hessian_vector_product(g, [theta, other], [torch.ones(3), torch.ones(2)])
    assert [p.tolist() for p in products] == [[0, 0, 0], [0, 0]]
    mixed = (theta**2).sum() + other.sum()
    g = torch.autograd.grad(mixed, [theta, other], create_graph=True)
    products = hessian_vector_product(g, [theta, other], [torch.ones(3), torch.ones(2)])
    assert [p.tolist() for p in products] == [[2, 2, 2], [0, 0]]


@pytest.mark.parametrize("conv", [False, True])
def test_through_batch_normalization_it_is_what_differences_and_primitives_say(conv):
    if conv:
        torch.manual_seed(0)
        make = lambda norm: nn.Sequential(  # noqa: E731
            nn.Conv2d(1, 2, 2, bias=False), norm(2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 2)
        ).double()
        model, primitive = make(nn.BatchNorm2d), make(PrimitiveBatchNorm)
        generator = torch.Generator().manual_seed(2)
        data = torch.randn(5, 1, 3, 3, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    else:
        model, primitive, data = normalized(), normalized(PrimitiveBatchNorm), batch()
    primitive.load_state_dict(model.state_dict(), strict=False)
    with Gradients.of_model(model, cross_entropy, data) as at:
        found = dense(at)
    with Gradients.of_model(primitive, cross_entropy, data) as at:
        wanted = dense(at)
    scale = float(wanted.abs().max())
    assert float((found - wanted).abs().max()) < 1e-10 * scale
    assert float((found - found.T).abs().max()) < 1e-12 * scale
    differences = twin.hessian(model, cross_entropy, data)
    assert np.abs(found.numpy() - differences).max() < 1e-6 * scale


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it loads torch.func
def test_in_eval_mode_torch_func_agrees():
    model, data = normalized().eval(), batch()
    model[1].running_mean += 0.3
    names = [name for name, _ in model.named_parameters()]
    theta = [p.detach() for p in model.parameters()]

    def loss(*parts):
        values = dict(zip(names, parts, strict=True))
        return nn.functional.cross_entropy(functional_call(model, values, (data[0],)), data[1])

    blocks = torch.func.hessian(loss, argnums=tuple(range(len(theta))))(*theta)
    wanted = torch.cat(
        [
            torch.cat([b.reshape(r.numel(), c.numel()) for b, c in zip(row, theta, strict=True)], 1)
            for row, r in zip(blocks, theta, strict=True)
        ]
    )
    with Gradients.of_model(model, cross_entropy, data) as at:
        torch.testing.assert_close(dense(at), wanted, rtol=1e-10, atol=1e-12)


def test_the_product_is_the_slope_of_the_gradient():
    model, data = normalized(), batch()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = list(before)
    g = twin.gradient(model, cross_entropy, data, before)[1]
    ends = [
        twin.vector(
            twin.gradient(model, cross_entropy, data, {n: before[n] + s * 1e-5 * g[n] for n in names})[1], names
        )
        for s in (1, -1)
    ]
    wanted = (ends[0] - ends[1]) / 2e-5
    d = twin.vector(g, names)
    with Gradients.of_model(model, cross_entropy, data) as at:
        hessian = at.hessian()
        flat = torch.cat([block.reshape(-1) for block in hessian.gradient])
        found = directional_curvature(hessian, flat)
    assert found.directional == pytest.approx(np.linalg.norm(wanted) / np.linalg.norm(d), rel=1e-6)
    assert found.rayleigh == pytest.approx(d @ wanted / (d @ d), rel=1e-6)


def test_a_hessian_stays_at_its_theta_while_others_move_the_parameters():
    model, data = normalized(), batch()
    v = torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    with Gradients.of_model(model, cross_entropy, data) as at:
        hessian = at.hessian()
        first = hessian(v)
        elsewhere = tuple(block + 1 for block in at.theta)
        at(elsewhere)
        assert torch.equal(hessian(v), first)
        moved = at.hessian(elsewhere)(v)
        assert not torch.allclose(moved, first)
        assert torch.equal(hessian(v), first)
    there = copy.deepcopy(model)
    with torch.no_grad():
        for p in there.parameters():
            p.add_(1)
    with Gradients.of_model(there, cross_entropy, data) as at:
        torch.testing.assert_close(at.hessian()(v), moved, rtol=1e-12, atol=1e-12)


def test_what_is_undefined_or_does_not_fit():
    with pytest.raises(ValueError, match="zero gradient"):
        directional_curvature(lambda u: u, torch.zeros(3))
    assert math.isnan(directional_curvature(lambda u: u, torch.tensor([1.0, math.inf])).directional)
    theta = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="1 gradients, 1 parameters and 2 parts"):
        hessian_vector_product([theta * 2], [theta], [theta, theta])
