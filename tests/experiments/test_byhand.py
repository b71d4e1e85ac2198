"""Batch normalization by hand against torch: the transform, its gradient on three paths, populations and folding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments import byhand
from experiments.byhand import PATHS, backward, fold, forward, normalize, population, population_of


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


SHAPES = [(7, 3), (4, 3, 5), (3, 3, 2, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
def test_the_transform_is_torchs(shape: tuple[int, ...], epsilon: float) -> None:
    x, gamma, beta = 3 * randn(*shape) + 1, randn(3, seed=1), randn(3, seed=2)
    found = forward(x, gamma, beta, epsilon=epsilon)
    assert torch.allclose(found.y, F.batch_norm(x, None, None, gamma, beta, training=True, eps=epsilon), atol=1e-12)
    axes = (0, *range(2, len(shape)))
    assert torch.allclose(found.mean, x.mean(axes))
    assert torch.allclose(found.variance, x.var(axes, correction=0))
    assert torch.allclose(found.xhat.mean(axes), torch.zeros(3, dtype=x.dtype), atol=1e-14)


def test_a_map_has_one_gamma_and_beta_for_all_its_positions() -> None:
    x = randn(4, 3, 5, 5)
    gamma, beta = torch.tensor([1.0, 2.0, -1.0]).double(), torch.tensor([0.0, 5.0, 1.0]).double()
    y = forward(x, gamma, beta, epsilon=0.0).y
    for unit in range(3):
        assert float(y[:, unit].mean()) == pytest.approx(float(beta[unit]))
        assert float(y[:, unit].var(correction=0)) == pytest.approx(float(gamma[unit]) ** 2)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_printed_gradient_passes_gradcheck(shape: tuple[int, ...]) -> None:
    inputs = tuple(part.requires_grad_() for part in (randn(*shape), randn(3, seed=1), randn(3, seed=2)))
    assert torch.autograd.gradcheck(lambda *args: normalize(*args, epsilon=0.01), inputs)


@pytest.mark.parametrize("shape", SHAPES)
def test_its_second_derivatives_pass_too(shape: tuple[int, ...]) -> None:
    inputs = tuple(part.requires_grad_() for part in (randn(*shape), randn(3, seed=1), randn(3, seed=2)))
    assert torch.autograd.gradgradcheck(lambda *args: normalize(*args, epsilon=0.01), inputs)


def test_the_second_derivative_of_a_cut_gradient_is_that_gradients() -> None:
    x, gamma, grad = randn(5, 2), randn(2, seed=1), randn(5, 2, seed=2)
    probe = randn(5, 2, seed=3)

    def first(at: Tensor) -> Tensor:
        """The direct path alone, in closed form."""
        return (probe * grad * gamma / (at.var(0, correction=0) + 0.01).sqrt()).sum()

    leaf = x.clone().requires_grad_()
    y = normalize(leaf, gamma, torch.zeros(2, dtype=x.dtype), epsilon=0.01, cut=("variance", "mean"))
    (once,) = torch.autograd.grad(y, leaf, grad, create_graph=True)
    (found,) = torch.autograd.grad((probe * once).sum(), leaf)
    assert torch.allclose(found, torch.autograd.functional.jacobian(first, x), atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_without_one_path_gradcheck_fails(path: str) -> None:
    inputs = tuple(part.requires_grad_() for part in (randn(7, 3), randn(3, seed=1), randn(3, seed=2)))
    assert not torch.autograd.gradcheck(
        lambda *args: normalize(*args, epsilon=0.01, cut=(path,)), inputs, raise_exception=False
    )


def test_paths_add_up_and_each_is_what_it_is_called() -> None:
    x, gamma, grad = randn(7, 3), randn(3, seed=1), randn(7, 3, seed=2)
    done = forward(x, gamma, torch.zeros(3), epsilon=0.01)
    only = {path: backward(grad, x, gamma, done, epsilon=0.01, cut=[p for p in PATHS if p != path]).x for path in PATHS}
    whole = backward(grad, x, gamma, done, epsilon=0.01)
    assert torch.allclose(sum(only.values()), whole.x)
    # detached statistics leave the direct path, one detached leaves two
    for frozen, paths in ((("mean", "variance"), ("direct",)), (("variance",), ("direct", "mean"))):
        leaf = x.clone().requires_grad_()
        mean, variance = leaf.mean(0), (leaf - leaf.mean(0)).square().mean(0)
        mean = mean.detach() if "mean" in frozen else mean
        y = gamma * (leaf - mean) / (variance.detach() + 0.01).sqrt()
        (wanted,) = torch.autograd.grad(y, leaf, grad)
        assert torch.allclose(sum(only[path] for path in paths), wanted), paths


def test_a_path_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="direct, variance, mean, not 'sideways'"):
        normalize(randn(4, 3), torch.ones(3), torch.zeros(3), epsilon=0.0, cut=("sideways",))
    with pytest.raises(ValueError, match="not 'sideways'"):
        done = forward(randn(4, 3), torch.ones(3), torch.zeros(3), epsilon=0.0)
        backward(randn(4, 3), randn(4, 3), torch.ones(3), done, epsilon=0.0, cut=("sideways",))


@pytest.mark.parametrize("shape", [(1, 3), (5,)])
def test_one_value_a_unit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="more than one value a unit"):
        forward(torch.zeros(shape), torch.ones(3), torch.zeros(3), epsilon=0.0)


def test_one_picture_has_positions_enough() -> None:
    assert forward(randn(1, 3, 2, 2), torch.ones(3), torch.zeros(3), epsilon=0.0).y.shape == (1, 3, 2, 2)


# --- Algorithm 2


def test_a_population_is_the_average_of_its_batches() -> None:
    batches = [randn(6, 3, seed=k) for k in range(4)]
    found = population(batches)
    assert found.batches == 4
    assert torch.allclose(found.mean, torch.stack([b.mean(0) for b in batches]).mean(0))
    biased = torch.stack([b.var(0, correction=0) for b in batches]).mean(0)
    assert torch.allclose(found.variance, 6 / 5 * biased)


def test_a_ragged_last_batch_weighs_what_it_has() -> None:
    batches = [randn(6, 3), randn(2, 3, seed=1)]
    found = population(batches)
    assert torch.allclose(found.mean, torch.cat(batches).mean(0))
    assert torch.allclose(found.variance, (6 * batches[0].var(0) + 2 * batches[1].var(0)) / 8)


def test_positions_count_as_values_of_a_population() -> None:
    found = population([randn(2, 3, 4, 4)])
    assert torch.allclose(found.variance, randn(2, 3, 4, 4).var((0, 2, 3), correction=1))


def test_no_batch_and_batches_of_one_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        population([])
    with pytest.raises(ValueError, match="more than one value a unit"):
        population([randn(1, 3)])


def test_exact_statistics_are_not_moving_averages_and_looking_moves_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    batches = [randn(8, 5, seed=k) for k in range(10)]
    model.train()
    for batch in batches:
        model(batch)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    found = population_of(model, batches, model)
    assert list(found) == ["1", "4"]
    first = [model[0](batch).detach() for batch in batches]
    assert torch.allclose(found["1"].mean, torch.stack(first).mean((0, 1)))
    moving = torch.zeros(4, dtype=torch.float64)
    for one in first:
        moving = 0.9 * moving + 0.1 * one.mean(0)
    assert torch.allclose(model[1].running_mean, moving)
    assert not torch.allclose(found["1"].mean, moving, atol=1e-3)
    second = []
    model.train()
    for batch in batches:
        second.append(model[:4](batch).detach())
    assert torch.allclose(found["4"].mean, torch.stack(second).mean((0, 1)))
    model.load_state_dict(before)
    model.eval()
    population_of(model, batches, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module.training or module._forward_pre_hooks for module in model.modules())


def test_a_model_without_bn_has_no_population() -> None:
    with pytest.raises(ValueError, match="no batch normalization"):
        population_of(nn.Linear(2, 2), [randn(3, 2)], lambda x: x)


def two_layers(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(5, 4), nn.BatchNorm1d(4)).double()


def test_dropout_has_no_part_in_a_population() -> None:
    batches = [randn(8, 5, seed=k) for k in range(3)]
    with_dropout, without = two_layers(0.5), two_layers()
    found, wanted = (population_of(one, batches, one)["2"] for one in (with_dropout, without))
    assert torch.equal(found.mean, wanted.mean)
    assert torch.equal(found.variance, wanted.variance)


def test_a_normalizer_that_hears_nothing_is_named() -> None:
    model = two_layers()
    with pytest.raises(ValueError, match="at least one batch"):
        population_of(model, [], model)
    with pytest.raises(ValueError, match="reaches the normalizer '2'"):
        population_of(model, [randn(8, 5)], model[:2])
    assert not model[2]._forward_pre_hooks


def test_a_normalizer_called_by_keyword_is_heard() -> None:
    model, batch = two_layers(), randn(8, 5)
    found = population_of(model, [batch], lambda x: model[2](input=model[1](x)))
    assert torch.equal(found["2"].mean, population_of(model, [batch], model)["2"].mean)


def test_a_population_keeps_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept between batches does not grow with their number or size."""
    kept = []

    def remembering(self: byhand._Sums, x: Tensor) -> None:
        add(self, x)
        kept.append({name: value.shape for name, value in vars(self).items() if isinstance(value, Tensor)})

    add = byhand._Sums.add
    monkeypatch.setattr(byhand._Sums, "add", remembering)
    model = two_layers()
    population_of(model, [randn(8, 5), randn(64, 5)], model)
    assert kept == [{"mean": (4,), "variance": (4,)}] * 2
    assert set(vars(byhand._Sums())) == {"weight", "batches", "mean", "variance"}


# --- folding


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_folded_layer_computes_what_the_two_did(kind: str, bias: bool, affine: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias) if kind == "linear" else nn.Conv2d(3, 4, 3, bias=bias, padding=1, stride=2)
    norm = nn.BatchNorm1d(4, affine=affine) if kind == "linear" else nn.BatchNorm2d(4, affine=affine)
    x = torch.randn(9, 6) if kind == "linear" else torch.randn(5, 3, 8, 8)
    both = nn.Sequential(layer, norm)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    for _ in range(20):
        both(x)
    both.eval()
    kept = copy.deepcopy(both.state_dict())
    folded = fold(layer, norm)
    assert type(folded) is type(layer)
    with torch.no_grad():
        assert float((folded(x) - both(x)).abs().max()) < 1e-6 * max(1.0, float(both(x).abs().max()))
    assert all(torch.equal(value, kept[name]) for name, value in both.state_dict().items())


def test_what_does_not_fold_is_refused() -> None:
    with pytest.raises(TypeError, match="not into ReLU"):
        fold(nn.ReLU(), nn.BatchNorm1d(3))
    with pytest.raises(TypeError, match="not into ConvTranspose2d"):
        fold(nn.ConvTranspose2d(3, 3, 2), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="nothing to fold"):
        fold(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False))
    with pytest.raises(ValueError, match="4 outputs, the normalizer 3"):
        fold(nn.Linear(3, 4), nn.BatchNorm1d(3))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Shifted(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_class_that_may_compute_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="Doubled may compute something else"):
        fold(Doubled(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(TypeError, match="Shifted may compute something else"):
        fold(nn.Linear(3, 3), Shifted(3))
    with pytest.raises(TypeError, match="remove_parametrizations"):
        fold(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.BatchNorm1d(3))
    for of_layer in (True, False):
        layer, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        owner = layer if of_layer else norm
        owner.forward = lambda x: x  # type: ignore[method-assign]
        with pytest.raises(TypeError, match=f"{type(owner).__name__} may compute something else"):
            fold(layer, norm)


@pytest.mark.parametrize("of_layer", [True, False])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_are_refused(of_layer: bool, before: bool) -> None:
    layer, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    owner = layer if of_layer else norm
    if before:
        owner.register_forward_pre_hook(lambda module, args: None)
    else:
        owner.register_forward_hook(lambda module, args, output: None)
    with pytest.raises(ValueError, match=f"{type(owner).__name__} has forward hooks"):
        fold(layer, norm)


@pytest.mark.parametrize(
    ("layer", "norm"),
    [(nn.Linear(3, 3), nn.BatchNorm2d(3)), (nn.Conv2d(3, 3, 1), nn.BatchNorm1d(3)),
     (nn.Conv1d(3, 3, 1), nn.BatchNorm3d(3)), (nn.Conv3d(3, 3, 1), nn.BatchNorm2d(3))],
)  # fmt: skip
def test_a_normalizer_of_other_dimensions_is_refused(layer: nn.Module, norm: nn.BatchNorm1d) -> None:
    with pytest.raises(ValueError, match=f"{type(norm).__name__} does not take what {type(layer).__name__} gives"):
        fold(layer, norm)
