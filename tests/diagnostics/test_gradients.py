"""The loss as a function of the parameters: the user's own numbers, and the same surroundings each time."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diagnostics import Chunks, Gradients
from diagnostics._vectors import Reference, dot, flat, norm, pieces, unflat
from tests.models import (
    assert_same,
    awkward,
    awkward_batches,
    cross_entropy,
    everything,
    seed_everything,
)
from tests.reference import gradients as twin


def plain(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def data(n=11):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def summed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def test_the_gradient_is_the_users_own_to_the_bit_and_nothing_is_left_behind():
    model, batch = awkward(), awkward_batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seed_everything(4)
    state = everything(model, optimizer)
    with Gradients.of_model(model, cross_entropy, batch) as at:
        evaluations = [at() for _ in range(3)]
        at.hessian()
    assert_same(everything(model, optimizer), state)
    loss = cross_entropy(model, batch)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    for value, gradient in evaluations:
        assert torch.equal(value, loss)
        assert all(torch.equal(a, b) for a, b in zip(gradient, wanted, strict=True))


def test_at_other_parameters_it_is_what_a_copy_of_the_model_computes():
    model, batch = plain(), data()
    with Gradients.of_model(model, cross_entropy, batch) as at:
        elsewhere = tuple(block + 0.5 for block in at.theta)
        value, gradient = at(elsewhere)
        assert at.names == tuple(name for name, _ in model.named_parameters())
        assert float(at()[0]) == pytest.approx(cross_entropy(model, batch).item())
    wanted = twin.gradient(model, cross_entropy, batch, dict(zip(at.names, elsewhere, strict=True)))
    assert float(value) == wanted[0]
    for name, block in zip(at.names, gradient, strict=True):
        assert torch.equal(block, wanted[1][name])


def test_frozen_parameters_are_not_differentiated_by():
    model = plain()
    model[0].weight.requires_grad_(False)
    with Gradients.of_model(model, cross_entropy, data()) as at:
        assert at.names == ("0.bias", "2.weight", "2.bias")
        assert len(at()[1]) == 3
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to differentiate"):
        with Gradients.of_model(model, cross_entropy, data()):
            pass


@pytest.mark.parametrize("mode", ["step", "batch", "population"])
def test_the_mode_is_the_one_asked_for(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    model[1].running_mean += 0.5
    with Gradients.of_model(model, cross_entropy, data(), mode=mode) as at:
        found = float(at()[0])
    torch.manual_seed(9)
    with Gradients.of_model(model, cross_entropy, data(), mode=mode) as at:
        another_mask = float(at()[0])
    model.train(mode != "population")
    if mode == "batch":
        model[2].eval()
    torch.manual_seed(9)
    assert another_mask == cross_entropy(model, data()).item()
    assert (found == another_mask) == (mode != "step")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("size", [1, 4, 11, 50])
def test_chunks_change_neither_loss_nor_gradient_nor_hessian(reduction, size):
    model, batch = plain(), data()
    loss = cross_entropy if reduction == "mean" else summed
    v = torch.linspace(-1, 1, 43, dtype=torch.float64)
    with Gradients.of_model(model, loss, batch) as at:
        wanted, product = at(), at.hessian()(v)
    with Gradients.of_model(model, loss, batch, chunks=Chunks(size, reduction)) as at:
        at.check()
        found, hessian = at(), at.hessian()
        assert len(at.parts) == -(-11 // size)
        torch.testing.assert_close(hessian(v), product, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(hessian.gradient, wanted[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_batches_of_other_forms_are_cut_alike():
    x, y = data()
    for batch, read in (
        (x, lambda part: part),
        ([x, y], lambda part: part[0]),
        ({"x": x, "y": y}, lambda part: part["x"]),
    ):
        parts = Chunks(4).split(batch)
        assert torch.equal(torch.cat([read(part) for _, part in parts]), x)
        assert sum(weight for weight, _ in parts) == pytest.approx(1)
        assert type(parts[0][1]) is type(batch)
    for wrong in ((x, 3), (x, y[:5]), "text", (x, torch.tensor(1.0))):
        with pytest.raises(ValueError, match="examples in dimension 0"):
            Chunks(4).split(wrong)


def test_a_wrong_reduction_is_noticed():
    for loss, reduction in ((summed, "mean"), (cross_entropy, "sum")):
        with Gradients.of_model(plain(), loss, data(), chunks=Chunks(6, reduction)) as at:
            with pytest.raises(ValueError, match=f"not the {reduction} over examples"):
                at.check()


@pytest.mark.parametrize(
    ("middle", "chunks"),
    [
        (nn.Identity, {"size": 1}),
        (lambda: nn.BatchNorm1d(5), {"size": 4, "ghost": True}),
        (lambda: nn.Dropout(0.2), {"size": 4}),
        (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.2)), {"size": 4, "ghost": True}),
    ],
    ids=["size 1", "ghost", "masks", "ghost and masks"],
)
@pytest.mark.parametrize("kind", [tuple, list, lambda pair: dict(zip("xy", pair, strict=True))])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_wrong_reduction_is_noticed_whatever_keeps_parts_apart(reduction, kind, middle, chunks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), middle(), nn.Tanh(), nn.Linear(5, 3))
    batch = kind((torch.randn(24, 4), torch.arange(24) % 3))

    def loss(model, batch):
        x, y = batch.values() if isinstance(batch, dict) else batch
        return F.cross_entropy(model(x), y, reduction=reduction)

    other = {"mean": "sum", "sum": "mean"}[reduction]
    with Gradients.of_model(model, loss, batch, chunks=Chunks(reduction=reduction, **chunks)) as at:
        at.check()
    with Gradients.of_model(model, loss, batch, chunks=Chunks(reduction=other, **chunks)) as at:
        with pytest.raises(ValueError, match=f"not the {other} over examples"):
            at.check()


def test_chunks_through_batch_statistics_are_refused_unless_ghost_batches_are_meant():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    batch = data(8)
    with pytest.raises(ValueError, match="BatchNorm1d .*ghost=True"):
        with Gradients.of_model(model, cross_entropy, batch, chunks=Chunks(4)):
            pass
    untracked = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).double()
    with pytest.raises(ValueError, match="BatchNorm1d .*ghost=True"):
        with Gradients.of_model(untracked.eval(), cross_entropy, batch, chunks=Chunks(4)):
            pass
    with Gradients.of_model(model, cross_entropy, batch, chunks=Chunks(4), mode="population") as at:
        population = at()[0]
    with Gradients.of_model(model, cross_entropy, batch, chunks=Chunks(4, ghost=True)) as at:
        at.check()
        ghost = at()[0]
    halves = [cross_entropy(model, (batch[0][part], batch[1][part])) for part in (slice(4), slice(4, 8))]
    assert float(ghost) == pytest.approx(sum(halves).item() / 2, rel=1e-12)
    assert float(population) != pytest.approx(float(ghost), rel=1e-3)


class Unruly(nn.Module):
    """Multiplies by something that no stream of the step's determines."""

    def __init__(self, source):
        super().__init__()
        self.source = source

    def forward(self, x):
        return x * (1 + self.source())


def test_a_forward_that_is_random_beyond_the_streams_is_caught():
    hidden = [random.Random(1)]
    model = nn.Sequential(plain(), Unruly(lambda: hidden[0].random()))
    with Gradients.of_model(model, cross_entropy, data()) as at:
        with pytest.raises(ValueError, match="two evaluations at the same parameters differ"):
            at.check()
    with Gradients.of_model(model, cross_entropy, data(), generators=hidden) as at:
        at.check()
    for source in (random.random, np.random.rand, lambda: float(torch.rand(()))):
        with Gradients.of_model(nn.Sequential(plain(), Unruly(source)), cross_entropy, data()) as at:
            at.check()


class Fickle(nn.Module):
    """Draws, or writes to its buffer, only where its parameter is above 1."""

    def __init__(self, what):
        super().__init__()
        self.gain = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))
        self.what = what

    def forward(self, x):
        if self.gain > 1:
            if self.what == "buffer":
                self.seen.add_(1)
            else:
                torch.rand(())
        return x * self.gain


@pytest.mark.parametrize("what", ["buffer", "random"])
def test_surroundings_that_some_evaluations_alone_move_are_refused(what):
    with pytest.raises(ValueError, match="by some forwards|at some parameters"):
        with Gradients.of_model(nn.Sequential(plain(), Fickle(what)), cross_entropy, data()) as at:
            at(), at()
            at(tuple(block + 1 for block in at.theta))


class Counting(nn.Module):
    """Its buffer and its attribute take part in what it computes, and move."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.held = [torch.zeros(()), {"times": []}]

    def forward(self, x):
        self.seen.add_(1)
        self.calls += 1
        self.latest = x
        self.held[0].add_(1)
        self.held[1]["times"].append(1)
        return x * (self.seen + self.calls + self.held[0] + len(self.held[1]["times"]))


def test_buffers_and_attributes_start_anew_with_each_evaluation():
    model = nn.Sequential(plain(), Counting())
    with Gradients.of_model(model, cross_entropy, data()) as at:
        first, second, third = (float(at()[0]) for _ in range(3))
        assert first == second == third
        assert float(model[1].seen) == 1
    assert (float(model[1].seen), model[1].calls, hasattr(model[1], "latest")) == (0, 0, False)
    assert (float(model[1].held[0]), model[1].held[1]["times"]) == (0, [])


def test_a_loss_that_cannot_be_differentiated_is_refused():
    for loss, message in (
        (lambda model, batch: model(batch[0]), "must be one number"),
        (lambda model, batch: cross_entropy(model, batch).detach(), "has no graph"),
        (lambda model, batch: 3.0, "must be one number"),
    ):
        with Gradients.of_model(plain(), loss, data()) as at:
            with pytest.raises(ValueError, match=message):
                at()
    with Gradients.of_model(plain(), lambda m, b: cross_entropy(m, b)[None], data()) as at:
        assert at()[0].shape == ()


def test_nonfinite_losses_pass_the_check_of_two_evaluations():
    model = plain()
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    with Gradients.of_model(model, cross_entropy, data()) as at:
        at.check()


@pytest.mark.parametrize(("size", "reduction"), [(0, "mean"), (True, "mean"), (1.5, "mean"), (2, "none")])
def test_chunks_that_make_no_sense(size, reduction):
    with pytest.raises(ValueError, match="size=|reduction"):
        Chunks(size, reduction)


def test_vectors_in_blocks_are_vectors():
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (20000,), (), (7,), (150, 150), (2, 1)]
    a, b = ([torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes] for _ in range(2))
    x, y = flat(a).numpy(), flat(b).numpy()
    assert torch.equal(torch.cat(pieces(a)), flat(a))
    assert len(pieces(a)) == 5  # small neighbours together
    assert all(torch.equal(p, q) for p, q in zip(unflat(flat(a), a), a, strict=True))
    assert dot(a, b) == pytest.approx(x @ y, rel=1e-12)
    assert norm(a) == pytest.approx(np.linalg.norm(x), rel=1e-12)
    found, wanted = Reference(a).compare(b), twin.compare(x, y)
    assert found.distance == pytest.approx(wanted["l2"], rel=1e-12)
    assert found.relative == pytest.approx(wanted["relative"], rel=1e-12)
    assert found.cosine == pytest.approx(wanted["cosine"], rel=1e-10)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_vectors_beyond_the_squares_of_their_type_still_have_a_length(scale):
    a = [torch.full((5,), scale), torch.full((3, 2), scale)]
    found = Reference(a).compare([2 * block for block in a])
    assert found.norm == pytest.approx(scale * np.sqrt(11), rel=1e-6)
    assert found.relative == pytest.approx(1, rel=1e-6)
    assert found.cosine == pytest.approx(1, rel=1e-6)
    assert norm([torch.ones(4, dtype=torch.float16) * 300]) == 600


@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0, 1e6])
@pytest.mark.parametrize("sign", [0, -1, 1])
def test_vectors_of_very_different_lengths_keep_their_angle(scale, sign):
    generator = torch.Generator().manual_seed(0)
    a, other = (torch.randn(1000, generator=generator) for _ in range(2))
    b = scale * (other + sign * a)
    found = Reference([a]).compare([b])
    wanted = twin.compare(a.double().numpy(), b.double().numpy())
    assert found.cosine == pytest.approx(wanted["cosine"], abs=2e-6)
    assert found.distance == pytest.approx(wanted["l2"], rel=2e-6)


def test_vectors_that_hardly_differ_keep_their_distance():
    a = torch.linspace(1, 2, 1000)
    b = a.clone()
    b[::10] *= 1 + 1e-5
    found, wanted = Reference([a]).compare([b]), twin.compare(a.double().numpy(), b.double().numpy())
    assert found.distance == pytest.approx(wanted["l2"], rel=1e-5)
    assert found.cosine == pytest.approx(1, abs=1e-7)


@pytest.mark.parametrize("form", [tuple, list])
@pytest.mark.parametrize("model", [plain(), nn.Sequential(nn.ReLU(inplace=True), plain())])
def test_a_forward_that_works_in_place_finds_the_batch_as_it_was(model, form):
    def loss(model, batch):
        batch[0].add_(1)
        return cross_entropy(model, batch)

    x, y = data()
    with Gradients.of_model(model, loss, form((x, y))) as at:
        values = [float(at()[0]) for _ in range(3)]
        batches = [at._lend(at.parts[0][1]) for _ in range(2)]
    assert values[0] == values[1] == values[2] == pytest.approx(cross_entropy(model, (x + 1, y)).item())
    assert torch.equal(y, data()[1]) and torch.equal(x, data()[0])
    assert (batches[0] is batches[1]) == (form is tuple)  # nothing was written to it in between


def test_vectors_that_are_infinite_or_overflow_are_no_errors():
    a = [torch.ones(20_000), torch.ones(20_000)]
    b = [block.clone() for block in a]
    b[0][0], b[1][0] = math.inf, -math.inf
    found = Reference(a).compare(b)
    assert found.distance == math.inf and math.isnan(found.cosine)
    large = [torch.full((20_000,), 1e152, dtype=torch.float64)] * 2
    assert norm(large) == math.inf


def test_attention_has_a_hessian():
    """torch's fused attention has no second derivative."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inputs, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x):
            q, k, v = self.inputs(x)[:, None].chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q, k, v)[:, 0].mean(1))

    torch.manual_seed(0)
    model = Attention().double()
    batch = torch.randn(6, 5, 4, dtype=torch.float64), torch.arange(6) % 3
    for chunks in (None, Chunks(4)):
        with Gradients.of_model(model, cross_entropy, batch, chunks=chunks) as at:
            v = torch.cos(torch.arange(sum(block.numel() for block in at.theta), dtype=torch.float64))
            product, h = at.hessian()(v), 1e-5
            ends = [at(tuple(x + s * h * d for x, d in zip(at.theta, unflat(v, at.theta), strict=True)))[1]
                    for s in (1, -1)]  # fmt: skip
        wanted = (flat(ends[0]) - flat(ends[1])) / (2 * h)
        assert torch.allclose(product, wanted, atol=1e-7)


def test_a_loss_of_other_parameters_is_refused():
    other = nn.Linear(4, 3).double()
    for which in (lambda at: at(), lambda at: at.check()):
        with Gradients.of_model(plain(), lambda model, batch: cross_entropy(other, batch), data()) as at:
            with pytest.raises(ValueError, match="depends on no parameter of the model"):
                which(at)


class Keeping(nn.Module):
    """Holds a list that no forward touches, and remembers what it saw in the way it is told."""

    def __init__(self, remember):
        super().__init__()
        torch.manual_seed(0)
        self.sizes = [4, 3]
        self.linear = nn.Linear(*self.sizes).double()
        self.high, self.remember = 0.0, remember

    def forward(self, x):
        x = self.linear(x)
        self.remember(self, float(x.detach().abs().max()))
        return x / (1 + self.high)


def highest(module, value):
    module.high = max(module.high, value)


def only_beyond(module, value):
    if value > 10:
        module.register_buffer("seen", torch.ones(1))
        module.high = 1.0


def test_what_a_forward_remembers_is_gone_in_the_next_evaluation():
    model = Keeping(highest)
    with Gradients.of_model(model, cross_entropy, data()) as at:
        first = at()[0]
        at(tuple(10 * block for block in at.theta))
        assert at()[0] == first


def test_what_only_some_forwards_remember_is_refused():
    with pytest.raises(ValueError, match="of a Keeping is changed by some forwards and not by others"):
        with Gradients.of_model(Keeping(only_beyond), cross_entropy, data()) as at:
            at()
            at(tuple(100 * block for block in at.theta))
            at()
