"""Layer Jacobians: against autograd, differences and theory, between any two modules, in both modes."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import LayerJacobian, Recorder, WeightSpectrum, at, every, read_run
from diagnostics.guard import guard, set_mode
from diagnostics.jacobian import Jacobian, extreme_values, layer_jacobians, mean_squares, singular_values
from diagnostics.probe import ProbeError
from diagnostics.spectrum import correlation, effective_dimension
from tests.models import awkward, awkward_batches, cross_entropy, seed_everything
from tests.reference import jacobian as slow

FIXED = awkward_batches(1, seed=7, size=12)[0]
PROBES = [
    lambda: LayerJacobian(["norm1", "again", "out"], FIXED, examples=3),
    lambda: LayerJacobian(["norm", "norm1"], FIXED, jacobian="batch", examples=None, form="preactivation"),
    lambda: LayerJacobian(["norm", "norm1"], FIXED, mode="population", method="matrix_free", k=2, examples=2),
    lambda: WeightSpectrum(["conv", "first", "again"]),
]
STATISTICS = ("rank", "spread", "mean_square", "smallest", "largest", "distance")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=rng(seed), dtype=dtype)


def two_layers(seed=0, width=5):
    first, second = randn(width, 4, seed=seed), randn(3, width, seed=seed + 1)
    return lambda x: torch.tanh(torch.sigmoid(x @ first.T) @ second.T)


def coupled(x):
    """Batch normalization, written out."""
    return (x - x.mean(0)) / x.var(0, correction=0).sqrt()


def each(apply, x):
    """(N, P, Q) by autograd, an example at a time."""
    return torch.stack([torch.autograd.functional.jacobian(lambda v: apply(v[None])[0], one) for one in x])


# --- of a function


def test_dense_jacobians_are_autograds_and_those_of_differences():
    apply, x = two_layers(), randn(6, 4, seed=9)
    found = singular_values(apply, x)
    assert found.shape == (3, 4)
    wanted = each(apply, x)
    assert torch.allclose(found.values, torch.linalg.svdvals(wanted), atol=1e-12)
    by_differences = slow.by_differences(apply, x).reshape(6, 3, 6, 4)
    for i in range(6):
        assert np.abs(by_differences[i, :, i] - wanted[i].numpy()).max() < 1e-8


def test_the_batch_jacobian_is_the_whole_derivative():
    x = randn(5, 3)
    found = singular_values(coupled, x, mode="batch")
    assert found.shape == (15, 15)
    wanted = np.linalg.svd(slow.by_differences(coupled, x), compute_uv=False)
    assert found.values[0].numpy() == pytest.approx(wanted, abs=1e-8)
    assert float(found.rank) == 9  # a unit's batch loses two directions, the constant and the normalized vector itself


def test_coupled_examples_are_refused_where_each_is_to_stand_alone():
    with pytest.raises(ValueError, match="examples are coupled"):
        singular_values(coupled, randn(5, 3))


def test_coupled_examples_are_refused_whichever_they_are():
    """A ReLU that is off at one example hides there that the batch's statistics were taken."""
    layer = randn(6, 3, seed=50)
    for seed in range(60):
        x = randn(4, 6, seed=seed, dtype=torch.float32)
        with pytest.raises(ValueError, match="examples are coupled"):
            singular_values(lambda v: torch.relu(coupled(v @ layer.float()) - 0.5), x)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_one_pair_that_is_coupled_is_enough(size):
    def one_pair(i, j):
        def apply(v):
            found = v * 2
            return torch.cat([found[:i], found[i : i + 1] + v[j : j + 1], found[i + 1 :]])

        return apply

    for i in range(size):
        for j in set(range(size)) - {i}:
            with pytest.raises(ValueError, match="examples are coupled"):
                singular_values(one_pair(i, j), randn(size, 2))


def test_looking_for_coupling_moves_no_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    singular_values(two_layers(), randn(6, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_modules_buffers_are_left_as_they_were():
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    kept = {name: value.clone() for name, value in norm.state_dict().items()}
    x = randn(6, 3) + 5
    found = singular_values(norm, x, mode="batch")
    assert all(torch.equal(value, norm.state_dict()[name]) for name, value in kept.items())
    scale = x.std(0, correction=0) / (x.var(0, correction=0) + norm.eps).sqrt()
    assert float(found.largest) == pytest.approx(float((scale / x.std(0, correction=0)).max()), rel=1e-3)


@pytest.mark.parametrize(
    ("apply", "message"),
    [(lambda v: torch.ones(3, 2), "constant, or was computed under torch.no_grad"),
     (lambda v: v.detach() * 2, "no_grad or from detached values"),
     (torch.no_grad()(lambda v: v * 2), "computed under torch.no_grad"),
     (torch.inference_mode()(lambda v: v * 2), "under torch.inference_mode"),
     (lambda v: torch.ones(3, 2, requires_grad=True) * 2, "does not depend on the first, though on something else")],
)  # fmt: skip
def test_what_has_no_derivative_is_refused_with_the_reason(apply, message):
    with pytest.raises(ValueError, match=message):
        singular_values(apply, randn(3, 2))


def test_inference_mode_and_ends_without_gradients_are_refused():
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode is on"):
        singular_values(two_layers(), randn(3, 4))
    with pytest.raises(ValueError, match="perturbation must require a gradient"):
        Jacobian(torch.zeros(3, 4), torch.zeros(3, 4, requires_grad=True) * 2, "batch")


@pytest.mark.parametrize("mode", ["per_example", "batch"])
@pytest.mark.parametrize("chunk", [1, 2, 64])
def test_the_number_of_rows_at_once_changes_nothing(mode, chunk):
    apply, x = two_layers(), randn(3, 4)
    usual, cut = (singular_values(apply, x, mode=mode, chunk=c).values for c in (64, chunk))
    assert torch.allclose(usual, cut, atol=1e-14)


def test_rows_at_once_are_as_many_as_asked_for():
    apply, x, asked = two_layers(), randn(3, 4), []

    class Spy(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(v):
            return v.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):
            asked.append(grad.shape)
            return grad

    for chunk, calls in ((1, 3), (2, 2), (3, 1)):
        asked.clear()
        singular_values(lambda v: apply(Spy.apply(v)), x, chunk=chunk)
        assert len(asked) == calls + 4, chunk  # and two for each bit of 3 examples' numbers, to see whether any couple


def test_the_jacobian_of_two_maps_is_the_product_of_theirs():
    first, second = randn(4, 4), randn(4, 4, seed=1)
    x = randn(3, 4, seed=2)
    inner, outer = (lambda v: torch.tanh(v @ first.T)), (lambda v: torch.sigmoid(v @ second.T))

    def of(apply, at):
        perturbation = torch.zeros_like(at, requires_grad=True)
        return Jacobian(perturbation, apply(at + perturbation), "per_example").dense()

    product = of(outer, inner(x)) @ of(inner, x)
    assert torch.allclose(of(lambda v: outer(inner(v)), x), product, atol=1e-14)


def test_an_orthogonal_layer_has_nothing_but_ones_and_a_scaled_one_its_scale():
    weight = torch.linalg.qr(randn(20, 20))[0]
    for scale in (1.0, 2.5):
        found = singular_values(lambda v, s=scale: s * v @ weight.T, randn(2, 20))
        assert torch.allclose(found.values, torch.full((2, 20), scale, dtype=torch.float64))
        assert found.spread.tolist() == pytest.approx([0, 0], abs=1e-12)


def test_convolutions_are_matrices_of_their_flattened_ends():
    conv = nn.Conv2d(2, 3, 3, stride=2, dtype=torch.float64)
    x = randn(2, 2, 5, 5)
    with torch.no_grad():
        found = singular_values(conv, x)
    assert found.shape == (3 * 4, 2 * 25)
    wanted = each(conv, x).reshape(2, 12, 50)
    assert torch.allclose(found.values, torch.linalg.svdvals(wanted), atol=1e-12)


def test_memory_is_said_before_it_is_taken():
    x = randn(3, 4)
    perturbation = torch.zeros_like(x, requires_grad=True)
    jacobian = Jacobian(perturbation, two_layers()(x + perturbation), "per_example")
    assert (jacobian.shape, jacobian.matrices) == ((3, 4), 3)
    # the matrices and their values; three rows at work: twice the cotangents, at every node of the way and twice at the
    # largest, twice at the perturbation
    way = 3 * (3 + 3 + 5 + 5 + 4 + 4)  # tanh, product, sigmoid, product, sum, perturbation
    assert jacobian.bytes == (3 * (3 * 4 + 3) + 3 * (2 * 9 + way + 2 * 15 + 2 * 12)) * 8
    assert jacobian.memory(chunk=1) == (3 * (3 * 4 + 3) + (2 * 9 + way + 2 * 15 + 2 * 12)) * 8
    jacobian.dense(limit=jacobian.bytes)
    with pytest.raises(ValueError, match=r"dense Jacobian\(s\) of 3 x 4 take .* MiB.*matrix-free"):
        jacobian.dense(limit=jacobian.bytes - 1)
    with pytest.raises(ValueError, match=r"matrix-free by its extremes\(k, generator=...\) and mean_square"):
        jacobian.dense(limit=1)
    with pytest.raises(
        ValueError, match=r"matrix-free by extreme_values\(apply, x, k, generator=...\) and mean_squares"
    ):
        singular_values(two_layers(), x, limit=100)
    (one, _) = maps(net(), randn(8, 6))
    with pytest.raises(ValueError, match=r"matrix-free by map.jacobian.extremes\(k, generator=...\)"):
        one.jacobian.singular_values(limit=100)


def test_memory_that_is_taken_is_what_was_said(monkeypatch):
    taken = []
    kept = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a: taken.append(a[0]) or kept(self, *a))
    with pytest.raises(ValueError, match="limit"):
        singular_values(lambda v: v, randn(1, 30), limit=1000)
    assert not taken


GROWTH = """
import ctypes, gc, sys
from pathlib import Path
import torch
from diagnostics.jacobian import Jacobian, singular_values

def status(name):
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(name))
    return int(line.split()[1]) * 1024

examples, width, middle, output, count, mode = (eval(one) for one in sys.argv[1:])
torch.set_num_threads(1)
layer = torch.nn.Sequential(torch.nn.Linear(width, middle), torch.nn.Tanh(), torch.nn.Linear(middle, output))
singular_values(layer, torch.randn(3, width))  # what is loaded once
x = torch.randn(examples, width)
perturbation = torch.zeros_like(x, requires_grad=True)
jacobian = Jacobian(perturbation, layer(x + perturbation), mode, count)
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")
held = status("VmRSS")
found = jacobian.singular_values()
print(status("VmHWM") - held, jacobian.bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark of memory is Linux's")
@pytest.mark.parametrize(
    ("examples", "width", "middle", "output", "count", "mode"),
    [(24, 900, 900, 900, None, "per_example"), (500, 200, 200, 200, 8, "per_example"),
     (100, 50, 4000, 50, None, "per_example"), (20, 60, 60, 60, None, "batch")],
)  # fmt: skip
def test_memory_that_is_said_is_as_much_as_is_taken(examples, width, middle, output, count, mode):
    options = [repr(one) for one in (examples, width, middle, output, count, mode)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", GROWTH, *options], capture_output=True, text=True, check=True, env=environment
    )
    grown, said = map(int, ran.stdout.split())
    assert grown < said + 4 * 2**20  # of the allocator's own
    assert grown > said / 4


@pytest.mark.parametrize("mode", ["per_example", "batch"])
def test_the_matrix_free_way_agrees_with_the_dense_one(mode):
    weight, x = randn(12, 15), randn(4, 15, seed=1)
    apply = (lambda v: coupled(torch.tanh(v @ weight.T))) if mode == "batch" else (lambda v: torch.tanh(v @ weight.T))
    dense = singular_values(apply, x, mode=mode)
    options = {"mode": mode, "generator": rng(), "tolerance": 1e-9}
    largest = extreme_values(apply, x, 3, **options)
    assert len(largest) == (1 if mode == "batch" else 4)
    for found, wanted in zip(largest, dense.values, strict=True):
        assert found.converged
        assert found.values.tolist() == pytest.approx(wanted[:3].tolist(), rel=1e-8)
    for found, wanted in zip(extreme_values(apply, x, 2, which="smallest", **options), dense.values, strict=True):
        assert found.values.tolist() == pytest.approx(wanted[-2:].tolist(), abs=1e-7)
    squares = mean_squares(apply, x, mode=mode, samples=400, generator=rng(1))
    for square, wanted in zip(squares, dense.mean_square, strict=True):
        assert square.samples == 400
        assert abs(square.value - float(wanted)) < 4 * square.standard_error
        assert square.standard_error < 0.1 * float(wanted)


def test_zeros_of_a_relu_are_found_matrix_free():
    torch.manual_seed(1)
    layer = nn.Sequential(nn.ReLU(), nn.Linear(100, 100))
    x = torch.randn(2, 100)
    dense = singular_values(layer, x)
    assert ((dense.values < 1e-5).sum(-1) > 40).all()
    for found in extreme_values(layer, x, 3, which="smallest", generator=rng()):
        assert found.values.tolist() == pytest.approx([0, 0, 0], abs=1e-5)
        assert found.converged


def test_values_of_a_convolution_are_found_as_often_as_they_occur():
    """Groups that share their weights have every value as often as there are groups."""
    conv = nn.Conv2d(4, 8, 3, groups=4, bias=False, dtype=torch.float64)
    with torch.no_grad():
        conv.weight.copy_(randn(2, 1, 3, 3).repeat(4, 1, 1, 1))
    x = randn(1, 4, 6, 6)
    dense = singular_values(conv, x).values[0]
    assert dense[3] == pytest.approx(float(dense[0]))
    (found,) = extreme_values(conv, x, 6, generator=rng(), tolerance=1e-6)
    assert found.converged
    assert found.values.tolist() == pytest.approx(dense[:6].tolist(), rel=1e-6)


@pytest.mark.parametrize("mode", ["per_example", "batch"])
def test_products_take_many_vectors_at_once_or_one_at_a_time(mode):
    apply, x = two_layers(), randn(3, 4)
    perturbation = torch.zeros_like(x, requires_grad=True)
    jacobian = Jacobian(perturbation, apply(x + perturbation), mode)
    index = 0 if mode == "batch" else 1
    matrix = jacobian.dense()[index]
    rows, columns = matrix.shape
    v, u = randn(5, columns, seed=1), randn(5, rows, seed=2)
    assert torch.allclose(jacobian.product(index)(v), v @ matrix.T)
    assert torch.allclose(jacobian.transposed_product(index)(u), u @ matrix)
    assert torch.allclose(jacobian.product(index)(v[2]), matrix @ v[2])
    assert torch.allclose(jacobian.transposed_product(index)(u[2]), u[2] @ matrix)


def test_a_network_that_cannot_be_vectorized_is_looped_over():
    class Own(torch.autograd.Function):  # its backward asks for a number, which a vectorized pass has many of
        @staticmethod
        def forward(ctx, v):
            return 2 * v

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad if float(grad.detach().abs().sum()) >= 0 else grad

    apply, x = (lambda v: Own.apply(two_layers()(v))), randn(3, 4)
    wanted = 2 * singular_values(two_layers(), x).values[:, :2]
    found = extreme_values(apply, x, 2, generator=rng(), batched=False)
    for one, values in zip(found, wanted, strict=True):
        assert one.values.tolist() == pytest.approx(values.tolist())
    with pytest.raises(RuntimeError, match="vmap|[Bb]atching"):
        extreme_values(apply, x, 2, generator=rng())


def test_matrix_free_options_are_heeded():
    weight, x = randn(60, 60), randn(1, 60, seed=1)
    ask = {"generator": rng()}
    (loose,) = extreme_values(lambda v: v @ weight.T, x, 2, tolerance=0.3, **ask)
    (tight,) = extreme_values(lambda v: v @ weight.T, x, 2, tolerance=1e-8, **ask)
    (short,) = extreme_values(lambda v: v @ weight.T, x, 2, tolerance=1e-8, max_steps=5, **ask)
    assert loose.steps < tight.steps
    assert (short.steps, short.converged) == (5, False)


def test_ends_that_do_not_belong_together_are_refused():
    x = randn(3, 4)
    perturbation = torch.zeros_like(x, requires_grad=True)
    with pytest.raises(ValueError, match="does not depend on the first"):
        Jacobian(perturbation, (x * x).requires_grad_(), "per_example")
    with pytest.raises(ValueError, match=r"shapes \(3, 4\) and \(2, 4\)"):
        Jacobian(perturbation, perturbation[:2], "batch")
    with pytest.raises(ValueError, match="'per_example' or 'batch', got 'each'"):
        singular_values(two_layers(), x, mode="each")
    with pytest.raises(ValueError, match="examples=2 means nothing"):
        Jacobian(perturbation, perturbation * 2, "batch", 2)


@pytest.mark.parametrize("examples", [0, -1])
def test_examples_are_counted_from_one(examples):
    with pytest.raises(ValueError, match=f"examples must be at least 1, or None for all, got {examples}"):
        maps(net(), randn(12, 6), examples=examples)
    perturbation = torch.zeros(3, 4, requires_grad=True)
    with pytest.raises(ValueError, match=f"examples must be at least 1, or None for all, got {examples}"):
        Jacobian(perturbation, perturbation * 2, "per_example", examples)


def test_more_examples_than_there_are_are_all_with_a_warning():
    with pytest.warns(UserWarning, match="examples=99, but the batch has 12: all are taken") as heard:
        found = maps(net(), randn(12, 6), examples=99)
    assert {one.jacobian.matrices for one in found} == {12}
    assert {Path(one.filename).name for one in heard} == {"test_jacobian.py"}  # who asked, not who noticed
    with pytest.raises(ValueError, match="examples=4 means nothing"):
        with_batch_jacobian(net(), randn(12, 6), examples=4)


# --- of a network


def net(bn=True, width=6, activation=nn.Tanh, depth=3, seed=0, weight=None, affine=True):
    """Linear, normalizer, nonlinearity, over and over; float64."""
    generator = rng(seed)
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width, bias=not bn, dtype=torch.float64)
        with torch.no_grad():
            drawn = torch.randn(width, width, generator=generator, dtype=torch.float64)
            linear.weight.copy_(drawn / math.sqrt(width) if weight is None else weight(drawn))
        norm = nn.BatchNorm1d(width, affine=affine, dtype=torch.float64) if bn else nn.Identity()
        if bn and affine:
            with torch.no_grad():
                norm.weight.copy_(0.5 + torch.rand(width, generator=generator, dtype=torch.float64))
                norm.bias.copy_(torch.randn(width, generator=generator, dtype=torch.float64))
        layers.append(nn.Sequential(linear, norm, activation()))
    return nn.Sequential(*layers)


NORMS = ["0.1", "1.1", "2.1"]


def maps(model, x, layers=NORMS, mode="batch", **options):
    with guard(model):
        set_mode(model, mode)
        return layer_jacobians(model, layers, lambda: model(x), **options)


def with_batch_jacobian(model, x, **options):
    with guard(model):
        set_mode(model, "batch")
        return layer_jacobians(model, NORMS, lambda: model(x), mode="batch", **options)


def by_hand(model, x, k, bn=True):
    """diag(1/s_out) W diag(g') diag(gain) from layer k to the next, with the batch's statistics. (N, P, Q)"""
    with torch.no_grad():
        inner = x
        for index in range(k):
            inner = model[index](inner)
        u = model[k][1](model[k][0](inner))
        gain = model[k][1].weight if bn else u.std(0, correction=0)
        slope = 1 - torch.tanh(u) ** 2
        a = model[k + 1][0](torch.tanh(u))
        s = (a.var(0, correction=0) + (model[k + 1][1].eps if bn else 0)).sqrt()
        return model[k + 1][0].weight[None] * (slope * gain)[:, None, :] / s[None, :, None]


@pytest.mark.parametrize("bn", [True, False])
def test_between_normalized_vectors_it_is_the_map_written_out(bn):
    model, x = net(bn), randn(20, 6, seed=3)
    found = maps(model, x)
    assert [(one.source, one.target) for one in found] == [("0.1", "1.1"), ("1.1", "2.1")]
    with guard(model):
        set_mode(model, "batch")
        for k, one in enumerate(found):
            assert torch.allclose(one.jacobian.dense(), by_hand(model, x, k, bn), atol=1e-12)


def test_the_numbers_of_a_plain_net_do_not_change_when_its_scale_does():
    """Both nets are put into one form: a linear net's map is the same however its weights are scaled."""
    x = randn(50, 6, seed=3)
    small, large = (maps(net(False, activation=nn.Identity, weight=lambda w, c=c: c * w), x) for c in (0.1, 10.0))
    for one, other in zip(small, large, strict=True):
        assert torch.allclose(one.jacobian.dense(), other.jacobian.dense(), rtol=1e-9)


def test_population_statistics_are_taken_where_they_are_asked_for():
    model, x = net(), randn(20, 6, seed=3)
    with torch.no_grad():
        for k in range(3):
            model[k][1].running_var.copy_(torch.arange(1.0, 7.0))
            model[k][1].running_mean.copy_(torch.arange(6.0))
    (found, _) = maps(model, x, mode="population")
    model.eval()
    with torch.no_grad():
        u = model[0][1](model[0][0](x))
        slope = 1 - torch.tanh(u) ** 2
    s = (model[1][1].running_var + model[1][1].eps).sqrt()
    wanted = model[1][0].weight * (slope * model[0][1].weight)[:, None, :] / s[:, None]
    assert torch.allclose(found.jacobian.dense(), wanted, atol=1e-12)


def test_preactivation_maps_go_from_input_to_input_unscaled():
    model, x = net(), randn(20, 6, seed=3)
    (found, _) = maps(model, x, form="preactivation")
    with torch.no_grad():
        a = model[0][0](x)
        s = (a.var(0, correction=0) + model[0][1].eps).sqrt()
        u = model[0][1](a)
        slope = 1 - torch.tanh(u) ** 2
        wanted = model[1][0].weight * (slope * model[0][1].weight / s)[:, None, :]
    assert torch.allclose(found.jacobian.dense(), wanted, atol=1e-10)


@pytest.mark.parametrize("form", ["normalized", "preactivation"])
def test_the_batch_jacobian_of_layers_agrees_with_differences(form):
    model, x = net(), randn(5, 6, seed=3)
    model.train()
    (found, _) = maps(model, x, form=form)
    assert found.jacobian.mode == "per_example"
    with guard(model):
        (whole, _) = layer_jacobians(model, NORMS, lambda: model(x), form=form, mode="batch")
    a = model[0][0](x).detach()
    first, second = model[0][1], model[1][1]

    def normal(v, eps):
        return (v - v.mean(0)) / (v.var(0, correction=0) + eps).sqrt()

    def after(v):
        return model[1][0](torch.tanh(v)).detach()

    if form == "normalized":
        start = normal(a, first.eps).detach()
        wanted = slow.by_differences(lambda v: normal(after(first.weight * v + first.bias), second.eps).detach(), start)
    else:
        wanted = slow.by_differences(lambda v: after(first.weight * normal(v, first.eps) + first.bias), a)
    assert np.abs(whole.jacobian.dense()[0].numpy() - wanted).max() < 1e-7


def test_normalizers_in_between_are_frozen_too():
    """From the first layer to the third: the product of the two maps, where examples are not coupled."""
    model, x = net(), randn(20, 6, seed=3)
    first, second = maps(model, x)
    (whole,) = maps(model, x, layers=["0.1", "2.1"])
    product = second.jacobian.dense() @ (first.jacobian.dense())
    # z-hat's own gamma is the gain of the map that starts there
    assert torch.allclose(whole.jacobian.dense(), product, atol=1e-10)


def test_any_two_modules_will_do_and_examples_are_the_first_ones():
    model, x = net(), randn(20, 6, seed=3)
    (found,) = maps(model, x, layers=["0.0", "2.0"], form="preactivation", examples=4)
    assert found.jacobian.dense().shape == (4, 6, 6)
    with guard(model):
        set_mode(model, "population")
        wanted = each(lambda v: model[1](model[0](v)), x[:4])
    (found,) = maps(model, x, layers=["0.0", "2.0"], form="preactivation", examples=4, mode="population")
    assert torch.allclose(found.jacobian.dense(), wanted, atol=1e-12)


def test_a_map_contains_neither_of_the_modules_it_is_named_by():
    """Between two linear layers it is the nonlinearity; with identities after them, the second one belongs to it."""
    x, first, second = randn(20, 6, seed=3), nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
    model = nn.Sequential(first, nn.Identity(), nn.Tanh(), second, nn.Identity())
    u = first(x).detach()
    slope, gain = 1 - torch.tanh(u) ** 2, u.std(0, correction=0)
    (bare,) = maps(model, x, layers=["0", "3"])
    wanted = torch.diag_embed(slope * gain / torch.tanh(u).std(0, correction=0))
    assert torch.allclose(bare.jacobian.dense(), wanted, atol=1e-10)
    (whole,) = maps(model, x, layers=["1", "4"])
    scale = second(torch.tanh(u)).detach().std(0, correction=0)
    wanted = second.weight[None] * (slope * gain)[:, None, :] / scale[None, :, None]
    assert torch.allclose(whole.jacobian.dense(), wanted, atol=1e-10)


@pytest.mark.parametrize("form", ["normalized", "preactivation"])
def test_maps_and_spectra_are_shown_in_a_line_without_their_tensors(form):
    (one, _) = maps(net(), randn(20, 6, seed=3), examples=4, form=form)
    assert repr(one.jacobian) == "Jacobian(4 of 6 x 6, mode='per_example')"
    assert repr(one) == f"LayerMap('0.1' to '1.1', form='{form}', constant=0, {one.jacobian!r})"
    (one, _) = with_batch_jacobian(net(), randn(5, 6, seed=3))
    assert repr(one.jacobian) == "Jacobian(1 of 30 x 30, mode='batch')"


def test_what_is_overwritten_in_place_is_seen_before_that():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.BatchNorm1d(3),
                          nn.ReLU(inplace=True)).double()  # fmt: skip
    x = randn(30, 4)
    (found,) = maps(model, x, layers=["1", "4"])
    with guard(model), torch.no_grad():
        set_mode(model, "batch")
        u = model[1](model[0](x))
        a = model[3](u.clamp(min=0))
        s = (a.var(0, correction=0) + model[4].eps).sqrt()
    wanted = model[3].weight * (u > 0).double()[:, None, :] / s[:, None]
    assert torch.allclose(found.jacobian.dense(), wanted, atol=1e-12)
    assert torch.allclose(found.outputs, a)
    assert torch.allclose(found.inputs, u)


def test_a_target_that_overwrites_its_input_is_heard_before_it_does():
    weight = randn(3, 4)
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 3, bias=False), nn.ReLU(inplace=True)).double()
    with torch.no_grad():
        model[1].weight.copy_(weight)
    x = randn(6, 4, seed=1)
    (found,) = maps(model, x, layers=["0", "2"])
    a = x @ weight.T
    assert torch.allclose(found.outputs, a)
    wanted = weight * x.std(0, correction=0) / a.std(0, correction=0)[:, None]
    assert torch.allclose(found.jacobian.dense(), wanted.expand(6, 3, 4))


@pytest.mark.parametrize(
    ("activation", "theory"),
    [(nn.Identity, 1.0), (nn.Sigmoid, 1.0336), (nn.Tanh, 1.1778), (nn.ReLU, math.pi / (math.pi - 1))],
)
def test_wide_with_bn_the_mean_square_is_the_slopes_over_the_variance(activation, theory):
    """E[g'(x)^2] / Var[g(x)]; linear, sigmoid, tanh and ReLU at random weights."""
    torch.manual_seed(0)
    width = 512
    linear = [nn.Linear(width, width, bias=False) for _ in range(2)]
    for layer in linear:
        nn.init.normal_(layer.weight, 0, width**-0.5)
    model = nn.Sequential(linear[0], nn.BatchNorm1d(width), activation(), linear[1], nn.BatchNorm1d(width))
    x = torch.randn(1024, width)
    (found,) = maps(model, x, layers=["1", "4"], examples=8)
    squares = found.jacobian.mean_square(samples=12, generator=rng())
    values = np.array([one.value for one in squares])
    assert (
        abs(values.mean() - theory) < 4 * values.std(ddof=1) / math.sqrt(8) + 0.01 * theory
    )  # 1%: the width is finite
    assert values.std(ddof=1) / math.sqrt(8) < 0.03


def test_squared_gradients_grow_by_that_factor_a_layer_backwards():
    torch.manual_seed(0)
    width, depth = 512, 6
    layers = []
    for _ in range(depth):
        linear = nn.Linear(width, width, bias=False)
        nn.init.normal_(linear.weight, 0, width**-0.5)
        layers.append(nn.Sequential(linear, nn.BatchNorm1d(width), nn.ReLU()))
    x, seen = torch.randn(512, width), []
    for layer in layers:
        x = layer[0](x)
        x = layer[1](x)
        x.retain_grad()
        seen.append(x)
        x = layer[2](x)
    (x * torch.randn(x.shape)).sum().backward()
    squares = [float(u.grad.square().mean()) for u in seen]
    growth = (squares[0] / squares[-1]) ** (1 / (depth - 1))
    assert growth == pytest.approx(math.pi / (math.pi - 1), rel=0.05)


@pytest.mark.parametrize(
    ("layers", "message"),
    [(["0.1"], "name 2 layers or more, got 0.1"), (["2.1", "0.9"], "no layer matches '0.9'")],
)
def test_layers_that_make_no_map_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        maps(net(), randn(5, 6), layers=layers)


def test_a_layer_that_is_not_run_or_comes_first_is_refused():
    model = net()
    with pytest.raises(ValueError, match=r"'2.1' was not run"), guard(model):
        layer_jacobians(model, ["0.1", "2.1"], lambda: model[0](randn(5, 6)))

    def backwards():
        model[2](randn(5, 6))
        model[0](randn(5, 6))

    with pytest.raises(ValueError, match="does not depend on the first"), guard(model):
        layer_jacobians(model, ["0.1", "2.1"], backwards)
    with pytest.raises(ValueError, match="'normalized' or 'preactivation', got 'raw'"):
        maps(model, randn(5, 6), form="raw")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_layers_that_are_run_without_gradients_are_refused_by_name():
    model, x = net(), randn(9, 6)

    def halves():
        with torch.no_grad():
            inner = model[0](x)
        model[1](inner)

    for forward, message in (
        (torch.no_grad()(lambda: model(x)), r"'0.1' was run under torch.no_grad"),
        (torch.inference_mode()(lambda: model(x)), r"'0.1' was run under torch.inference_mode"),
        (halves, r"'0.1' was run under torch.no_grad"),
        (lambda: model[1](model[0](x).detach()), r"from '0.1' to '1.1': .* does not depend on the first"),
    ):
        with guard(model), pytest.raises(ValueError, match=message):
            layer_jacobians(model, ["0.1", "1.1"], forward)
    with guard(model), torch.inference_mode(), pytest.raises(ValueError, match="inference_mode is on"):
        layer_jacobians(model, ["0.1", "1.1"], lambda: model(x))
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # then nothing that comes before the perturbation requires a gradient

    def backwards():
        model[1](x)
        model[0](x)

    with guard(model), pytest.raises(ValueError, match="from '0.1' to '1.1': .* does not depend on the first"):
        layer_jacobians(model, ["0.1", "1.1"], backwards)


@pytest.mark.parametrize("mode", ["per_example", "batch"])
def test_a_unit_that_does_not_vary_has_a_row_of_zeros_and_is_counted(tmp_path, mode):
    model, x = net(False), randn(9, 6, seed=3)
    with torch.no_grad():
        model[1][0].weight[2] = 0
        model[1][0].weight[4] = 0
        model[1][0].bias[2] = 1 / 3
    before, after = maps(model, x) if mode == "per_example" else maps_of_the_batch(model, x)
    assert (before.constant, after.constant) == (2, 0)
    dense = before.jacobian.dense()
    assert dense.isfinite().all()
    rows = dense.abs().sum((0, 2)).reshape(-1, 6).sum(0)
    assert (rows == 0).tolist() == [unit in (2, 4) for unit in range(6)]
    assert after.jacobian.dense().isfinite().all()
    if mode == "per_example":
        assert (after.jacobian.dense()[:, :, [2, 4]] == 0).all()  # nothing to give back
        kept = [0, 1, 3, 5]
        assert torch.allclose(dense[:, kept], by_hand(model, x, 0, bn=False)[:, kept], atol=1e-12)
        table = record(tmp_path, LayerJacobian(NORMS, x), model)
        assert (cells(table, "1.1")["constant"], cells(table, "2.1")["constant"]) == (2, 0)
        assert cells(table, "1.1")["rank"] == 4
        table = record(tmp_path / "raw", LayerJacobian(NORMS, x, form="preactivation"), model)
        assert "constant" not in cells(table, "1.1")


def maps_of_the_batch(model, x):
    with guard(model):
        set_mode(model, "batch")
        return layer_jacobians(model, NORMS, lambda: model(x), mode="batch")


def test_a_layer_whose_units_are_all_constant_is_a_map_of_zeros():
    model, x = net(False), randn(9, 6, seed=3).float()
    model.float()
    with torch.no_grad():
        model[1][0].weight.zero_()
        model[1][0].bias.copy_(torch.rand(6))
    before, _ = maps(model, x)
    assert before.constant == 6
    assert (before.jacobian.dense() == 0).all()


def test_a_unit_of_small_variance_is_not_constant():
    model, x = net(False), randn(9, 6, seed=3)
    with torch.no_grad():
        model[1][0].weight.mul_(1e-12)
    (before, _) = maps(model, x)
    assert before.constant == 0
    assert torch.linalg.svdvals(before.jacobian.dense())[:, 0].min() > 0.1


def test_a_batch_of_one_has_no_standard_deviation():
    model = net(False)
    with pytest.raises(ValueError, match=r"layer '0.1': one value a unit .* got shape \(1, 6\)"):
        maps(model, randn(1, 6))
    assert maps(model, randn(1, 6), form="preactivation")[0].jacobian.dense().isfinite().all()
    assert maps(net(), randn(1, 6), mode="population")[0].jacobian.dense().isfinite().all()


class Centred(nn.BatchNorm1d):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("other", [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6), Centred(6)])
def test_normalizers_whose_statistics_are_not_the_batchs_are_refused_as_ends(other):
    model = net(False)
    model[1][1] = other.double()
    for layers in (["0.1", "1.1"], ["1.1", "2.1"]):
        with pytest.raises(ValueError, match=f"layer '1.1' is a {type(other).__name__}, whose statistics"):
            maps(model, randn(9, 6), layers=layers)
    if not isinstance(other, Centred):
        assert len(maps(model, randn(9, 6), layers=["0.1", "2.1"])) == 1
        assert len(maps(model, randn(9, 6), layers=["0.1", "1.1"], form="preactivation")) == 1


def test_a_normalizer_without_a_shift_is_frozen():
    model, x = net(), randn(20, 6, seed=3)
    with torch.no_grad():
        model[1][1].bias.zero_()
    (wanted,) = maps(model, x, layers=["0.1", "2.1"])
    model[1][1].bias = None
    (found,) = maps(model, x, layers=["0.1", "2.1"])
    assert torch.allclose(found.jacobian.dense(), wanted.jacobian.dense())


def test_statistics_that_cannot_be_frozen_are_refused():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(6))

        def forward(self, x):
            return coupled(x) if self.training else x

    model = net(False)
    model[1][1] = Own()
    with pytest.raises(ValueError, match="examples are coupled"):
        maps(model, randn(5, 6), layers=["0.1", "2.1"])


def test_a_layer_without_a_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.end = Pair(), nn.Identity()

        def forward(self, x):
            return self.end(self.pair(x)[0])

    with pytest.raises(TypeError, match=r"'pair': its output is no floating-point tensor .* tuple"):
        maps(Net(), randn(5, 6), layers=["pair", "end"])


# --- the probe


def record(tmp_path, probe, model, batch=None, **options):
    with Recorder(model, tmp_path / "run", [probe], **options) as recorder, recorder.step(batch):
        pass
    return read_run(tmp_path / "run")


def cells(table, layer):
    rows = table[(table.layer == layer) & (table.unit == -1)]
    return dict(zip(rows.statistic, rows.value, strict=True))


def values(table, layer):
    rows = table[(table.layer == layer) & (table.statistic == "singular_value")].sort_values("unit")
    assert rows.unit.tolist() == list(range(len(rows)))
    return rows.value.to_numpy()


@pytest.mark.parametrize("form", ["normalized", "preactivation"])
@pytest.mark.parametrize("mode", ["batch", "population"])
def test_the_probe_writes_what_the_maps_say(tmp_path, form, mode):
    model, x = net(), randn(30, 6, seed=3)
    table = record(tmp_path, LayerJacobian(NORMS, x, form=form, mode=mode, examples=7), model)
    assert set(table["mode"]) == {mode}
    for one in maps(model, x, mode=mode, form=form, examples=7):
        found, cell = one.jacobian.singular_values(), cells(table, one.target)
        assert values(table, one.target) == pytest.approx(found.values.median(0).values.numpy())
        for name in STATISTICS:
            assert cell[name] == pytest.approx(float(getattr(found, name).mean())), name
        assert cell["nonfinite"] == 0
        assert cells(table, one.source)["correlation"] == pytest.approx(correlation(one.inputs))
        assert cell["effective_dimension"] == pytest.approx(effective_dimension(one.outputs))
    assert set(cells(table, "0.1")) == {"effective_dimension", "correlation"}


def test_the_probe_takes_the_batch_jacobian_where_it_is_asked_to(tmp_path):
    model, x = net(), randn(6, 6, seed=3)
    probe = LayerJacobian(NORMS, x, jacobian="batch")  # of all examples: no number of them was asked for
    assert probe.name == "layer_jacobian.batch"
    table = record(tmp_path, probe, model)
    with guard(model):
        set_mode(model, "batch")
        first = layer_jacobians(model, NORMS, lambda: model(x), mode="batch")[0].jacobian.singular_values()
    assert values(table, "1.1") == pytest.approx(first.values[0].numpy())
    assert len(values(table, "1.1")) == 36


def test_the_probe_goes_matrix_free(tmp_path):
    model, x = net(), randn(30, 6, seed=3)
    probe = LayerJacobian(NORMS, x, method="matrix_free", k=3, examples=4, limit=1, seed=1)
    table = record(tmp_path, probe, model)
    (found, _) = (one.jacobian.singular_values() for one in maps(model, x, examples=4))
    cell = cells(table, "1.1")
    assert values(table, "1.1") == pytest.approx(found.values[:, :3].median(0).values.numpy(), rel=1e-2)
    assert cell["converged"] == 1
    assert cell["residual"] < 2e-3 * cell["largest"]
    assert abs(cell["mean_square"] - float(found.mean_square.mean())) < 4 * cell["mean_square_error"]
    other = record(tmp_path / "other", LayerJacobian(NORMS, x, method="matrix_free", k=3, examples=4, seed=2), model)
    assert cells(other, "1.1")["mean_square"] != cell["mean_square"]


def test_the_probe_takes_32_examples_and_5_values_where_nothing_is_asked(tmp_path, monkeypatch):
    taken = []
    dense = Jacobian.dense
    monkeypatch.setattr(
        Jacobian, "dense", lambda self, **options: taken.append(self.matrices) or dense(self, **options)
    )
    for count, wanted in ((40, 32), (8, 8)):
        record(tmp_path / str(count), LayerJacobian(NORMS, randn(count, 6)), net())
        assert set(taken) == {wanted}
        taken.clear()
    record(tmp_path / "all", LayerJacobian(NORMS, randn(40, 6), examples=None), net())
    assert set(taken) == {40}
    for width, wanted in ((6, 5), (3, 3)):
        probe = LayerJacobian(NORMS, randn(8, width), method="matrix_free", examples=1)
        assert len(values(record(tmp_path / f"w{width}", probe, net(width=width)), "1.1")) == wanted


def test_more_values_than_there_are_are_all_with_a_warning(tmp_path):
    probe = LayerJacobian(NORMS[:2], randn(8, 6), method="matrix_free", k=9, examples=2)
    with pytest.warns(UserWarning, match="k=9, but the map from '0.1' to '1.1' has K=6 singular values"):
        table = record(tmp_path, probe, net())
    assert len(values(table, "1.1")) == 6


def test_the_probe_refuses_what_does_not_fit_and_names_the_other_way(tmp_path):
    with pytest.raises(ProbeError, match="method='matrix_free'"):
        record(tmp_path, LayerJacobian(NORMS, randn(8, 6), limit=100), net())


def test_a_network_that_is_not_finite_is_recorded(tmp_path):
    model, x = net(False), randn(8, 6)
    x[0, 0] = math.inf
    table = record(tmp_path, LayerJacobian(NORMS, x, mode="population"), model)
    cell = cells(table, "1.1")
    assert cell["nonfinite"] == 8  # the scale is that of all examples
    assert math.isnan(cell["mean_square"])
    assert np.isnan(values(table, "1.1")).all()


def test_an_example_whose_map_is_zero_has_no_spread_and_takes_none_away(tmp_path):
    class Gate(nn.Module):
        def forward(self, x):
            return x * (x[:, :1] > 0)

    model = nn.Sequential(nn.Identity(), Gate(), nn.Linear(6, 6, bias=False), nn.Identity()).double()
    x = randn(8, 6, seed=1)
    table = record(tmp_path, LayerJacobian(["0", "3"], x), model)
    (found,) = maps(model, x, layers=["0", "3"])
    spread = found.jacobian.singular_values().spread
    assert spread.isnan().sum() == (x[:, 0] <= 0).sum() > 0
    assert cells(table, "3")["spread"] == pytest.approx(float(spread.nanmean()))


def test_positions_count_as_examples_for_the_premise(tmp_path):
    seed_everything()
    model = awkward()
    table = record(tmp_path, LayerJacobian(["norm", "norm1"], FIXED, examples=2), model, FIXED, loss=cross_entropy)
    with guard(model), torch.no_grad():
        set_mode(model, "batch")
        u = model.norm(model.conv(FIXED[0]))
    flat = u.permute(0, 2, 3, 1).reshape(-1, 4)
    assert cells(table, "norm")["effective_dimension"] == pytest.approx(effective_dimension(flat), rel=1e-5)


def test_when_it_is_due(tmp_path):
    model, x = net(), randn(8, 6)
    with Recorder(model, tmp_path / "run", [LayerJacobian(NORMS, x, when=every(2), name="mine")]) as recorder:
        for _ in range(3):
            with recorder.step(None):
                pass
    table = read_run(tmp_path / "run")
    assert (set(table.step), set(table.probe)) == ({0, 2}, {"mine"})


@pytest.mark.parametrize(
    ("options", "message"),
    [({"form": "raw"}, "form must be"), ({"jacobian": "each"}, "jacobian must be"), ({"mode": "step"}, "mode must be"),
     ({"method": "svds"}, "method must be"), ({"jacobian": "batch", "examples": 32}, "examples=32 means nothing"),
     ({"jacobian": "batch", "examples": None, "mode": "population"}, "couple no examples"),
     ({"examples": "all"}, "a number, or None for all, got 'all'"),
     ({"examples": 0}, "examples must be at least 1, got 0"), ({"k": 0}, "k must be"), ({"limit": 0}, "limit must be")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LayerJacobian(NORMS, randn(8, 6), **options)


def test_one_layer_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match="name 2 layers or more"):
        Recorder(net(), tmp_path / "run", [LayerJacobian("0.1", randn(8, 6))])


# --- the weights alone


def test_weights_are_scaled_to_a_mean_square_of_one(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30, bias=False), nn.Linear(30, 12))
    nn.init.orthogonal_(model[0].weight, 7.0)
    table = record(tmp_path, WeightSpectrum("*"), model)
    assert values(table, "0") == pytest.approx(np.ones(30), rel=1e-5)
    assert cells(table, "0")["norm"] == pytest.approx(7 * math.sqrt(30), rel=1e-5)
    assert cells(table, "0")["distance"] == pytest.approx(0, abs=1e-5)
    matrix = model[1].weight.detach().numpy().astype(np.float64)
    wanted = np.linalg.svd(matrix, compute_uv=False)
    wanted *= math.sqrt(12 / (wanted**2).sum())
    assert values(table, "1") == pytest.approx(wanted, rel=1e-5)
    numbers = slow.numbers((matrix * math.sqrt(12) / np.linalg.norm(matrix)).astype(np.float32))
    for name in ("rank", "spread", "smallest", "largest", "distance"):
        assert cells(table, "1")[name] == pytest.approx(numbers[name], rel=1e-4), name
    assert set(table["mode"]) == {"-"}


def test_weights_are_those_the_step_began_with_and_as_often_as_asked(tmp_path):
    model = nn.Sequential(nn.Linear(5, 5))
    probe = WeightSpectrum("0", when=at(1), name="mine")
    with Recorder(model, tmp_path / "run", [probe]) as recorder:
        for _ in range(2):
            with recorder.step(None), torch.no_grad():
                model[0].weight.mul_(2)
                size = float(model[0].weight.norm()) / 2
    table = read_run(tmp_path / "run")
    assert (set(table.step), set(table.probe)) == ({1}, {"mine"})
    assert cells(table, "0")["norm"] == pytest.approx(size, rel=1e-6)


def test_convolutions_are_matrices_and_zero_weights_have_no_spread(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(3, 3))
    nn.init.zeros_(model[1].weight)
    table = record(tmp_path, WeightSpectrum("*"), model)
    assert len(values(table, "0")) == 3
    assert cells(table, "1")["norm"] == 0
    assert math.isnan(cells(table, "1")["spread"])


def test_a_layer_without_a_matrix_is_refused(tmp_path):
    for layer in (nn.ReLU(), nn.BatchNorm1d(3)):
        with pytest.raises(ValueError, match=f"'0' has no weight matrix, it is a {type(layer).__name__}"):
            Recorder(nn.Sequential(layer), tmp_path / "run", [WeightSpectrum("0")])
