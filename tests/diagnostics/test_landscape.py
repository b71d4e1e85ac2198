"""Along the gradient: quadratics in closed form, the null, a planted cliff, and networks against copies of them."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import AlongGradient, Chunks, Gradients, Recorder, along_gradient, random_direction, read_run
from diagnostics.probe import ProbeError
from tests.models import awkward, awkward_batches, cross_entropy, seed_everything
from tests.reference import gradients as twin

FIXED = awkward_batches(1, seed=7, size=12)[0]
PROBES = [
    lambda: AlongGradient((0.01, 0.1)),
    lambda: AlongGradient((0.05,), "random", on=FIXED, mode="population", learning_rate=0.1),
    lambda: AlongGradient((0.05,), on=FIXED, chunks=Chunks(5, ghost=True)),
]
STEPS = (0.05, 0.2, 1.0)


def quadratic(matrix, offset=0.0):
    def gradient_at(theta):
        (x,) = theta
        return x @ matrix @ x / 2 + offset, (matrix @ x,)

    return gradient_at


def symmetric(n, seed=0):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root + root.T


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("random", [False, True])
def test_a_quadratic_obeys_the_closed_form(n, random):
    matrix = symmetric(n)
    theta = torch.linspace(-1, 2, n, dtype=torch.float64)
    g = matrix @ theta
    d = g
    if random:
        drawn = torch.randn(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        d = drawn * g.norm() / drawn.norm()
    ray = along_gradient(quadratic(matrix, 3.0), theta, STEPS, 7 * drawn if random else None)
    eta = torch.tensor(STEPS, dtype=torch.float64)
    slope = matrix @ d
    torch.testing.assert_close(ray.steps, eta)
    torch.testing.assert_close(ray.gradient_difference, eta * slope.norm())
    torch.testing.assert_close(ray.effective_smoothness, (slope.norm() / d.norm()).expand(3))
    torch.testing.assert_close(ray.loss, 3 + theta @ matrix @ theta / 2 - eta * (g @ d) + eta**2 * (d @ slope) / 2)
    there = g - eta[:, None] * slope
    torch.testing.assert_close(ray.cosine, there @ g / there.norm(dim=1) / g.norm())
    assert ray.start_loss == pytest.approx(float(3 + theta @ matrix @ theta / 2))
    assert ray.gradient_norm == pytest.approx(float(g.norm()))


def test_a_linear_loss_never_changes_its_gradient():
    slope = torch.tensor([1.0, -2.0, 0.5])
    ray = along_gradient(lambda theta: (slope @ theta[0], (slope,)), torch.zeros(3), STEPS)
    assert (ray.gradient_difference == 0).all() and (ray.effective_smoothness == 0).all()
    assert ray.cosine.tolist() == pytest.approx([1, 1, 1])
    assert ray.loss.tolist() == pytest.approx([-eta * 5.25 for eta in STEPS])


def test_a_planted_cliff_is_seen_where_it_stands():
    """Slope 1 above x = 0, -10 below: a walk against the gradient from 0.5 falls off between 0.2 and 1."""

    def gradient_at(theta):
        (x,) = theta
        return torch.where(x > 0, x, -10 * x).sum(), (torch.where(x > 0, 1.0, -10.0),)

    ray = along_gradient(gradient_at, torch.tensor([0.5]), STEPS)
    assert ray.gradient_difference.tolist() == [0, 0, 11]
    assert ray.cosine.tolist() == [1, 1, -1]
    assert ray.effective_smoothness.tolist() == [0, 0, 11]
    assert ray.loss.tolist() == pytest.approx([0.45, 0.3, 5])


def test_theta_may_come_in_blocks_and_is_not_written_to():
    matrix = symmetric(6)

    def gradient_at(theta):
        assert [block.shape for block in theta] == [(2, 2), (2,)]
        x = torch.cat([block.reshape(-1) for block in theta])
        g = matrix @ x
        return x @ g / 2, (g[:4].view(2, 2), g[4:])

    theta = torch.arange(6, dtype=torch.float64)
    blocks = (theta[:4].view(2, 2), theta[4:])
    ray = along_gradient(gradient_at, blocks, STEPS)
    plain = along_gradient(quadratic(matrix), theta.clone(), STEPS)
    torch.testing.assert_close(ray.gradient_difference, plain.gradient_difference)
    torch.testing.assert_close(ray.loss, plain.loss)
    assert theta.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("steps", [(), (0.1, 0.0), (-1.0,), (math.inf,), (math.nan,)])
def test_steps_that_are_none_are_refused(steps):
    with pytest.raises(ValueError, match="steps"):
        along_gradient(quadratic(symmetric(2)), torch.ones(2, dtype=torch.float64), steps)
    with pytest.raises(ValueError, match="steps"):
        AlongGradient(steps)


def test_directions_that_lead_nowhere_are_refused():
    matrix = symmetric(2)
    with pytest.raises(ValueError, match="gradient is zero"):
        along_gradient(quadratic(matrix), torch.zeros(2, dtype=torch.float64), STEPS)
    for direction, message in ((torch.zeros(2), "direction is zero"), (torch.ones(3), "shapes of theta")):
        with pytest.raises(ValueError, match=message):
            along_gradient(quadratic(matrix), torch.ones(2, dtype=torch.float64), STEPS, direction.double())


def test_random_directions_have_no_preference():
    like = (torch.zeros(300, 200), torch.zeros(1000, dtype=torch.float64))
    drawn = random_direction(like, torch.Generator().manual_seed(0))
    assert [(part.shape, part.dtype) for part in drawn] == [(part.shape, part.dtype) for part in like]
    again = random_direction(like, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    for part in drawn:  # z-scores of the mean and of the variance
        assert abs(float(part.mean())) * math.sqrt(part.numel()) < 4
        assert abs(float(part.var()) - 1) * math.sqrt(part.numel() / 2) < 4


def network(dropout=0.0):
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(27, 3)).double()


def data(n=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 1, 4, 4, generator=generator, dtype=torch.float64), torch.randint(
        3, (n,), generator=generator
    )


def record(tmp_path, probe, model=None, batch=None, *, loss=cross_entropy, groups=1, steps=1, optimizer=True):
    model, batch = network() if model is None else model, data() if batch is None else batch
    parameters = list(model.parameters())
    split = [{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.1 * groups}]
    used = torch.optim.SGD(split, momentum=0.9)
    given = used if optimizer else None
    with Recorder(model, tmp_path / "run", [probe], loss=loss, optimizer=given, overwrite=True) as recorder:
        for _ in range(steps):
            with recorder.step(batch):
                used.zero_grad()
                loss(model, batch).backward()
                used.step()
    table = read_run(tmp_path / "run")
    assert set(table["layer"]) == {"-"}
    last = table[table.step == steps - 1]
    return {(row.statistic, row.unit): row.value for row in last.itertuples()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_on_a_network_it_is_what_copies_of_it_say(tmp_path, dropout):
    """With dropout too: one mask for all, the step's own."""
    model, batch = network(dropout), data()
    seed_everything(3)
    wanted = twin.along(copy.deepcopy(model), cross_entropy, batch, STEPS)
    size = twin.gradient(
        copy.deepcopy(model), cross_entropy, batch, {n: p.detach() for n, p in model.named_parameters()}
    )
    probe = AlongGradient(STEPS)
    assert probe.name == "along_gradient.gradient"
    found = record(tmp_path, probe, model, batch)
    for k, (point, eta) in enumerate(zip(wanted, STEPS, strict=True)):
        assert found["eta", k] == eta
        for name, value in point.items():
            assert found[name, k] == pytest.approx(value, rel=1e-9), (name, k)
        assert found["eta_times_smoothness", k] == pytest.approx(0.1 * point["effective_smoothness"], rel=1e-9)
    largest = max(point["effective_smoothness"] for point in wanted)
    assert found["effective_smoothness", -1] == pytest.approx(largest, rel=1e-9)
    assert found["eta_times_smoothness", -1] == pytest.approx(0.1 * largest, rel=1e-9)
    assert found["start_loss", -1] == pytest.approx(size[0], rel=1e-12)
    assert found["gradient_norm", -1] == pytest.approx(np.linalg.norm(twin.vector(size[1], list(size[1]))), rel=1e-12)


def test_a_random_walk_is_as_long_and_leads_elsewhere(tmp_path):
    model, batch = network(), data()
    probe = AlongGradient(STEPS, "random", seed=5)
    assert probe.name == "along_gradient.random"
    entropy = np.random.SeedSequence((5, 0)).generate_state(1, np.uint32)[0]
    names = [name for name, _ in model.named_parameters()]
    drawn = random_direction(tuple(model.parameters()), torch.Generator().manual_seed(int(entropy)))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    g = twin.gradient(model, cross_entropy, batch, before)[1]
    stretch = np.linalg.norm(twin.vector(g, names)) / np.linalg.norm(
        np.concatenate([part.numpy().ravel() for part in drawn])
    )
    wanted = twin.along(
        model, cross_entropy, batch, STEPS, {n: part * stretch for n, part in zip(names, drawn, strict=True)}
    )
    found = record(tmp_path, probe, copy.deepcopy(model), batch)
    for k, point in enumerate(wanted):
        for name, value in point.items():
            assert found[name, k] == pytest.approx(value, rel=1e-8), (name, k)
    other = record(tmp_path, AlongGradient(STEPS, "random", seed=6), copy.deepcopy(model), batch)
    assert other["loss", 0] != found["loss", 0]
    still = lambda m, b: cross_entropy(m, b) * 1.0  # noqa: E731
    frozen = AlongGradient(STEPS, "random", seed=5, when=lambda step: True)
    with Recorder(model, tmp_path / "two", [frozen], loss=still) as recorder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with recorder.step(batch):
                pass
    table = read_run(tmp_path / "two", statistic=["loss"])
    assert table[table.unit == 0]["value"].nunique() == 2  # another direction at each step


def test_the_mode_and_the_batch_are_those_asked_for(tmp_path):
    own, other = data(), data(12, seed=4)
    found = {mode: record(tmp_path, AlongGradient(STEPS, mode=mode), batch=own) for mode in ("step", "population")}
    assert found["step"]["loss", 0] != found["population"]["loss", 0]
    fixed = record(tmp_path, AlongGradient(STEPS, on=other), batch=own)
    wanted = twin.along(network(), cross_entropy, other, STEPS)
    assert fixed["loss", 1] == pytest.approx(wanted[1]["loss"], rel=1e-10)


def test_ghost_batches_are_another_walk(tmp_path):
    batch = data(8)
    found = record(tmp_path, AlongGradient(STEPS, chunks=Chunks(4, ghost=True)), batch=batch)
    halves = [(batch[0][part], batch[1][part]) for part in (slice(4), slice(4, 8))]
    losses = [twin.gradient(network(), cross_entropy, half, {})[0] for half in halves]
    assert found["start_loss", -1] == pytest.approx(sum(losses) / 2, rel=1e-12)


def test_without_one_step_size_what_needs_it_is_left_out_and_said(tmp_path):
    for options, why in (({"groups": 2}, "different rates"), ({"optimizer": False}, "no optimizer")):
        probe = AlongGradient(STEPS)
        with pytest.warns(UserWarning, match=f"eta_times_smoothness out.*{why}") as caught:
            found = record(tmp_path, probe, steps=2, **options)
        assert len(caught) == 1
        assert ("effective_smoothness", -1) in found
        assert not any(name == "eta_times_smoothness" for name, _ in found)
    found = record(tmp_path, AlongGradient(STEPS, learning_rate=3.0), groups=2)
    assert found["eta_times_smoothness", -1] == pytest.approx(3 * found["effective_smoothness", -1], rel=1e-12)


def test_bad_settings_and_sites_are_refused_early():
    for change in ({"direction": "up"}, {"on": "full"}, {"mode": "eval"}, {"learning_rate": -1.0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            AlongGradient(STEPS, **change)
    with pytest.raises(ValueError, match="give the recorder loss"):
        Recorder(network(), "nowhere", [AlongGradient(STEPS)])
    assert AlongGradient(STEPS, name="mine").name == "mine"


@pytest.mark.parametrize("direction", ["gradient", "random"])
def test_a_gradient_that_is_zero_or_not_finite_is_recorded(direction, tmp_path):
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    probe = AlongGradient(STEPS, direction)
    found = record(tmp_path, probe, model, torch.ones(3, 2), loss=lambda m, x: 1 + m(x).square().sum())
    assert (found["gradient_norm", -1], found["loss", 0], found["gradient_difference", 0]) == (0, 1, 0)
    for name in ("cosine", "effective_smoothness", "eta_times_smoothness"):
        assert math.isnan(found[name, 0])
    model.weight.data.fill_(math.nan)
    found = record(tmp_path, AlongGradient(STEPS), model, torch.ones(3, 2), loss=lambda m, x: m(x).square().sum())
    for name in ("loss", "gradient_difference", "cosine", "effective_smoothness"):
        assert math.isnan(found[name, 0])
    assert math.isnan(found["effective_smoothness", -1])


def test_a_model_that_is_random_beyond_its_streams_is_caught(tmp_path):
    draws = iter(range(10**6))
    loss = lambda model, batch: cross_entropy(model, batch) * (1 + 0.1 * (next(draws) % 7))  # noqa: E731
    with pytest.raises(ProbeError, match="two evaluations at the same parameters differ"):
        record(tmp_path, AlongGradient(STEPS), loss=loss)


def test_the_functions_on_a_model_are_what_the_probe_records(tmp_path):
    model, batch = awkward(), awkward_batches(1)[0]
    seed_everything(2)
    with Gradients.of_model(model, cross_entropy, batch) as at:
        ray = along_gradient(at, at.theta, STEPS)
    found = record(tmp_path, AlongGradient(STEPS), model, batch)
    assert [found["loss", k] for k in range(3)] == ray.loss.tolist()
    assert [found["gradient_difference", k] for k in range(3)] == ray.gradient_difference.tolist()


def test_half_precision_walks_in_its_own_type():
    matrix = symmetric(5).float()

    def gradient_at(theta):
        assert [block.dtype for block in theta] == [torch.bfloat16, torch.float32]
        x = torch.cat([block.float() for block in theta])
        g = matrix @ x
        return x @ g / 2, (g[:3].bfloat16(), g[3:])

    theta = (torch.tensor([1.0, -0.5, 0.25]).bfloat16(), torch.tensor([2.0, 0.5]))
    ray = along_gradient(gradient_at, theta, (0.5,))
    x = torch.cat([block.float() for block in theta])
    assert float(ray.effective_smoothness[0]) == pytest.approx(
        float((matrix @ matrix @ x).norm() / (matrix @ x).norm()), rel=0.02
    )


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda a, b: ((a * a + b * b).sum() / 2, (a, b)), id="where it stands"),
        pytest.param(lambda a, b: ((a * b).sum(), (b, a)), id="the other block"),
        pytest.param(lambda a, b: (a[0], (torch.eye(1, a.numel(), dtype=a.dtype)[0], 0 * b)), id="a number of its own"),
    ],
)
@pytest.mark.parametrize("n", [3, 1 << 15])  # put together with others, or a piece by itself
def test_what_lies_in_the_memory_of_the_point_is_read_before_that_is_written_over(answer, n):
    theta = torch.linspace(1, 2, n, dtype=torch.float64), torch.linspace(3, 1, n, dtype=torch.float64)
    steps = (0.5, 0.999, 1.5)  # at the second, next to nothing is left of the first kind's gradient
    found = along_gradient(lambda blocks: answer(*blocks), theta, steps)
    _, g = answer(*theta)
    flat = torch.cat(g)
    for k, step in enumerate(steps):
        loss, there = answer(*(block - step * part for block, part in zip(theta, g, strict=True)))
        there = torch.cat(there)
        assert found.loss[k] == pytest.approx(float(loss))
        assert found.gradient_difference[k] == pytest.approx(float((there - flat).norm()))
        assert found.cosine[k] == pytest.approx(float(there @ flat / there.norm() / flat.norm()))


class Late(nn.Module):
    """What it computes depends on an attribute and on buffers that its own first forward makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("filled", None)

    def forward(self, x):
        x = self.linear(x)
        if not hasattr(self, "seen"):
            self.seen = 0
        if "total" not in self._buffers:
            self.register_buffer("total", torch.zeros(3))
        self.filled = torch.ones(3) if self.filled is None else self.filled + 1
        self.seen += 1
        self.total = self.total + x.detach().mean(0)
        return x * self.seen + self.total * self.filled


def test_what_the_users_forward_makes_is_not_there_when_a_step_begins(tmp_path):
    model, losses = Late(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 3
    probes = [AlongGradient((0.1,), learning_rate=0.1)]
    with Recorder(model, tmp_path / "run", probes, loss=cross_entropy) as recorder:
        for _ in range(3):
            with recorder.step(batch):
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    table = read_run(tmp_path / "run")
    assert table[table.statistic == "start_loss"].value.tolist() == losses
    assert model.seen == 3
    assert model.filled.tolist() == [3] * 3
    assert list(model._buffers) == ["filled", "total"]


def test_one_number_is_no_grid_and_that_is_said():
    with pytest.raises(ValueError, match=r"steps is a sequence of step sizes, got 0\.1: say steps=\(0\.1,\)"):
        AlongGradient(0.1)
