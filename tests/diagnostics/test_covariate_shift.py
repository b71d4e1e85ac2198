"""Internal covariate shift: two-layer nets by hand, whole copies of networks, and what must be exactly nothing."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from diagnostics import (
    Chunks,
    CovariateShift,
    Gradients,
    Recorder,
    VirtualShift,
    directional_curvature,
    every,
    internal_covariate_shift,
    largest_eigenvalues,
    read_run,
)
from diagnostics._path import find
from diagnostics.covariate_shift import measured, references
from diagnostics.probe import ProbeError
from tests.models import awkward, awkward_batches, cross_entropy, seed_everything
from tests.reference import gradients as twin

FIXED = awkward_batches(1, seed=7, size=12)[0]
WHICH = ("preceding", "following", "own", "all")
PROBES = [
    CovariateShift,
    lambda: CovariateShift(WHICH, "module"),
    lambda: CovariateShift(on=FIXED, chunks=Chunks(5, ghost=True), mode="batch"),
    lambda: VirtualShift((0.5,), iterations=11),
]


def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().sum() / 2


def regression(n=9, inputs=3, outputs=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return make(n, inputs), make(n, outputs)


def labelled(n=12, shape=(4,), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def mlp(norm=nn.BatchNorm1d, dropout=0.0, widths=(5, 6)):
    torch.manual_seed(1)
    blocks, width = [], 4
    for size in widths:
        blocks.append(nn.Sequential(nn.Linear(width, size), norm(size), nn.Tanh(), nn.Dropout(dropout)))
        width = size
    return nn.Sequential(*blocks, nn.Linear(width, 3)).double()


def convolutional():
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 3)),
    ).double()


class Branched(nn.Module):
    """A shortcut, functional nonlinearities, and modules called in another order than they are defined in."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.last = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 5)
        self.first = nn.Linear(4, 5)
        self.double()

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(x + F.relu(self.second(x)))


def record(tmp_path, probe, model, batch, loss=cross_entropy, *, optimizer=None, steps=1):
    """(layer, statistic, unit) -> value at the last step, and (theta before, theta after) of that step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    with Recorder(model, tmp_path / "run", [probe], loss=loss, optimizer=optimizer, overwrite=True) as recorder:
        for _ in range(steps):
            before = copy.deepcopy(model)
            with recorder.step(batch):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
    table = read_run(tmp_path / "run")
    table = table[table.step == steps - 1]
    found = {(row.layer, row.statistic, row.unit): row.value for row in table.itertuples()}
    return found, before, {name: p.detach().clone() for name, p in model.named_parameters()}


def steps_of(tmp_path, model, loss, batches, probe, *, rate=0.5):
    """(layer, statistic, unit) -> value, the model before and theta after, of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    seen = []
    with Recorder(model, tmp_path / "run", [probe], loss=loss, optimizer=optimizer) as recorder:
        for batch in batches:
            before = copy.deepcopy(model)
            with recorder.step(batch):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            seen.append((before, {name: p.detach().clone() for name, p in model.named_parameters()}))
    table = read_run(tmp_path / "run")
    for step, (before, after) in enumerate(seen):
        rows = table[table.step == step].itertuples()
        yield {(row.layer, row.statistic, row.unit): row.value for row in rows}, before, after


def layers_of(found):
    return list(dict.fromkeys(layer for layer, _, _ in found if layer != "-"))


def assert_is_the_twins(found, wanted, names, which, rel=1e-8):
    suffix = "" if which == "preceding" else f"_{which}"
    for name, values in zip(names, wanted, strict=True):
        scale = values["gradient_norm"]
        assert found[name, "gradient_norm", -1] == pytest.approx(scale, rel=1e-10)
        assert found[name, f"l2{suffix}", -1] == pytest.approx(values["l2"], rel=rel, abs=1e-12 * scale), (name, which)
        assert found[name, f"relative{suffix}", -1] == pytest.approx(values["relative"], rel=rel, abs=1e-12)
        assert found[name, f"cosine{suffix}", -1] == pytest.approx(values["cosine"], rel=rel)


# By hand: L = |V W x - y|^2 / 2 summed over examples, so with D = V W X - Y (outputs by examples)
# grad_V = D (W X)', grad_W = V' D X'.


def by_hand(v, w, x, y):
    apart = v @ w @ x - y
    return apart @ (w @ x).T, v.T @ apart @ x.T


def test_a_two_layer_linear_net_is_what_paper_and_pencil_say(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)).double()
    batch = regression()
    x, y = (part.numpy().T for part in batch)
    found, before, after = record(
        tmp_path, CovariateShift(WHICH), model, batch, squares, optimizer=torch.optim.SGD(model.parameters(), lr=0.01)
    )
    w, v = (p.detach().numpy() for p in before.parameters())
    w1, v1 = (after[name].numpy() for name in ("0.weight", "1.weight"))
    (gv, gw) = by_hand(v, w, x, y)
    changed = {
        ("1", "preceding"): by_hand(v, w1, x, y)[0],
        ("1", "following"): gv,
        ("1", "own"): by_hand(v1, w, x, y)[0],
        ("1", "all"): by_hand(v1, w1, x, y)[0],
        ("0", "preceding"): gw,
        ("0", "following"): by_hand(v1, w, x, y)[1],
        ("0", "own"): by_hand(v, w1, x, y)[1],
        ("0", "all"): by_hand(v1, w1, x, y)[1],
    }
    for (layer, which), there in changed.items():
        here = gv if layer == "1" else gw
        suffix = "" if which == "preceding" else f"_{which}"
        distance = np.linalg.norm(there - here)
        assert found[layer, f"l2{suffix}", -1] == pytest.approx(distance, rel=1e-10), (layer, which)
        assert found[layer, f"relative{suffix}", -1] == pytest.approx(distance / np.linalg.norm(here), rel=1e-10)
        cosine = (there * here).sum() / np.linalg.norm(there) / np.linalg.norm(here)
        assert found[layer, f"cosine{suffix}", -1] == pytest.approx(cosine, rel=1e-10)
    assert found["0", "l2", -1] == found["1", "l2_following", -1] == 0
    step = np.sqrt(((w1 - w) ** 2).sum() + ((v1 - v) ** 2).sum())
    assert found["-", "step_norm", -1] == pytest.approx(step, rel=1e-12)
    assert found["-", "total_gradient_norm", -1] == pytest.approx(np.hypot(np.linalg.norm(gv), np.linalg.norm(gw)))


@pytest.mark.parametrize("which", WHICH)
def test_the_function_agrees_on_that_net(which):
    torch.manual_seed(0)
    x, y = (part.T for part in regression())
    theta = [torch.randn(4, 3, dtype=torch.float64), torch.randn(2, 4, dtype=torch.float64)]
    after = [block + 0.1 * torch.randn_like(block) for block in theta]

    def gradient_at(blocks):
        w, v = blocks
        apart = v @ w @ x - y
        return apart.square().sum() / 2, (v.T @ apart @ x.T, apart @ (w @ x).T)

    found = internal_covariate_shift(gradient_at, theta, after, [[0], [1]], which)
    plain = gradient_at(theta)[1]
    for layer in (0, 1):
        mixed = list(theta)
        for other in (0, 1):
            moves = {"preceding": other < layer, "following": other > layer, "own": other == layer, "all": True}
            if moves[which]:
                mixed[other] = after[other]
        wanted = twin.compare(plain[layer].numpy().ravel(), gradient_at(mixed)[1][layer].numpy().ravel())
        assert float(found.l2[layer]) == pytest.approx(wanted["l2"], rel=1e-12)
        assert float(found.relative[layer]) == pytest.approx(wanted["relative"], rel=1e-12)
        assert float(found.cosine[layer]) == pytest.approx(wanted["cosine"], rel=1e-12)
        assert float(found.gradient_norm[layer]) == pytest.approx(wanted["gradient_norm"], rel=1e-12)
    assert found.which == which


MLP_LAYERS = {"0.0": ["0.0.", "0.1."], "1.0": ["1.0.", "1.1."], "2": ["2."]}
CONV_LAYERS = {"0": ["0.", "1."], "4": ["4.", "5."], "8": ["8."]}
BRANCHED = {"first": ["first.", "norm."], "second": ["second."], "last": ["last."]}
NETWORKS = {
    "mlp": (mlp, labelled(), MLP_LAYERS, True),
    "mlp without bn": (lambda: mlp(nn.Identity), labelled(), MLP_LAYERS, True),
    "mlp with dropout": (lambda: mlp(dropout=0.4), labelled(), MLP_LAYERS, True),
    "convolutional": (convolutional, labelled(8, (1, 6, 6)), CONV_LAYERS, True),
    "branched": (Branched, labelled(), BRANCHED, False),
}


def grouped(model, prefixes):
    names = [name for name, _ in model.named_parameters()]
    return [[name for name in names if name.startswith(tuple(starts))] for starts in prefixes.values()]


@pytest.mark.parametrize("network", NETWORKS)
def test_on_networks_it_is_what_copies_of_them_say(network, tmp_path):
    make, batch, layers, chained = NETWORKS[network]
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    probe = CovariateShift(WHICH)
    seed_everything(3)
    found, before, after = record(tmp_path, probe, model, batch, optimizer=optimizer)
    assert layers_of(found) == list(layers)
    assert (probe._path.chain is not None) == chained
    seed_everything(3)
    for which in WHICH:
        wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers), which)
        assert_is_the_twins(found, wanted, layers, which)
        assert all(values["l2"] > 1e-6 for values in wanted[1:-1]), "or the comparison proves nothing"


@pytest.mark.parametrize("network", [name for name in NETWORKS if NETWORKS[name][3]])
@pytest.mark.parametrize("which", WHICH)
def test_the_chain_and_the_long_way_agree_to_the_bit(network, which):
    make, batch, _, _ = NETWORKS[network]
    model = make()
    seed_everything(2)
    with Gradients.of_model(model, cross_entropy, batch) as at:
        path = find(at)
        assert path.chain is not None
        after = tuple(block + 0.05 * torch.cos(7 * block) for block in at.theta)
        plain = references(path, at()[1])
        short = measured(at, path, plain, after, which)
        long = measured(at, type(path)(path.layers, None), plain, after, which)
        twice = internal_covariate_shift(at, at.theta, after, [layer.indices for layer in path.layers], which)
    assert short == long
    for name, field in (("l2", "distance"), ("relative", "relative"), ("cosine", "cosine")):
        values = [getattr(compared, field) for compared in short]
        assert getattr(twice, name).tolist() == pytest.approx(values, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("network", NETWORKS)
def test_without_a_step_there_is_exactly_no_shift_and_that_is_said(network, tmp_path):
    make, batch, layers, _ = NETWORKS[network]
    model = make()
    found, *_ = record(
        tmp_path, CovariateShift(WHICH), model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )
    assert found["-", "step_norm", -1] == 0
    for layer, suffix in itertools.product(layers, ("", "_following", "_own", "_all")):
        assert found[layer, f"l2{suffix}", -1] == 0, (layer, suffix)
        assert found[layer, f"relative{suffix}", -1] == 0
        assert found[layer, f"cosine{suffix}", -1] == pytest.approx(1, abs=1e-12)


def test_the_first_layer_and_a_net_of_one_have_exactly_none(tmp_path):
    found, *_ = record(tmp_path, CovariateShift(), mlp(), labelled())
    assert (found["0.0", "l2", -1], found["0.0", "relative", -1], found["0.0", "cosine", -1]) == (0, 0, 1)
    found, *_ = record(tmp_path, CovariateShift(WHICH), nn.Linear(4, 3).double(), labelled())
    assert layers_of(found) == []  # it is the model itself
    assert found["-", "l2", -1] == found["-", "l2_following", -1] == 0
    assert found["-", "l2_own", -1] == found["-", "l2_all", -1] > 0


def test_running_statistics_and_streams_are_as_the_step_found_them_in_every_evaluation(tmp_path):
    """In evaluation mode running statistics take part; a probe that moved them would measure another function."""
    model = mlp(dropout=0.3)
    model.eval()
    found, before, after = record(tmp_path, CovariateShift(), model, labelled())
    wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, MLP_LAYERS))
    assert_is_the_twins(found, wanted, MLP_LAYERS, "preceding")


class Lagging(nn.BatchNorm1d):
    """Normalizes by the running statistics as they were before this batch, which then moves them."""

    def forward(self, x):
        y = F.batch_norm(x, self.running_mean.clone(), self.running_var.clone(), self.weight, self.bias)
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), 0.5)
            self.running_var.lerp_(x.var(0), 0.5)
        return y


@pytest.mark.parametrize("mode", ["step", "population"])
def test_a_normalizer_that_uses_its_running_statistics_sees_the_steps_own(mode, tmp_path):
    model = mlp(Lagging)
    probe = CovariateShift(WHICH, mode=mode)
    found, before, after = record(tmp_path, probe, model, labelled())
    assert probe._path.chain is not None
    for which in WHICH:
        wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, MLP_LAYERS), which)
        assert_is_the_twins(found, wanted, MLP_LAYERS, which)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
)
def test_the_next_theta_is_what_the_users_optimizer_made(make, tmp_path):
    model = mlp()
    found, before, after = record(
        tmp_path, CovariateShift(), model, labelled(), optimizer=make(model.parameters()), steps=3
    )
    wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, MLP_LAYERS))
    assert_is_the_twins(found, wanted, MLP_LAYERS, "preceding")


def test_modules_may_be_layers_of_their_own(tmp_path):
    found, before, after = record(tmp_path, CovariateShift(group="module"), mlp(), labelled())
    names = ["0.0", "0.1", "1.0", "1.1", "2"]
    assert layers_of(found) == names
    wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, {n: [f"{n}."] for n in names}))
    assert_is_the_twins(found, wanted, names, "preceding")


def test_layers_may_be_named_as_blocks_and_in_another_order(tmp_path):
    batch = labelled()
    blocks = {"0": ["0."], "1": ["1."], "2": ["2."]}
    probe = CovariateShift(layers=["0", "1", "2"])
    found, before, after = record(tmp_path, probe, mlp(), batch)
    assert layers_of(found) == list(blocks)
    assert probe._path.chain is not None
    assert_is_the_twins(
        found, twin.shift(before, cross_entropy, batch, after, grouped(before, blocks)), blocks, "preceding"
    )
    turned = {"2": ["2."], "1.0": ["1.0.", "1.1."], "0.*": ["0."]}
    probe = CovariateShift(layers=["2", "1.0", "0"])
    found, before, after = record(tmp_path, probe, mlp(), batch)
    assert layers_of(found) == ["2", "1.0", "0"]
    assert probe._path.chain is None
    wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, turned))
    assert_is_the_twins(found, wanted, ["2", "1.0", "0"], "preceding")


def test_layers_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no layer matches"):
        Recorder(mlp(), tmp_path / "a", [CovariateShift(layers=["nothing"])], loss=cross_entropy)
    with pytest.raises(ProbeError, match="'2.weight' is in no layer.*must cover"):
        record(tmp_path, CovariateShift(layers=["0", "1"]), mlp(), labelled())
    with pytest.raises(ProbeError, match="'0.1.weight' is in no layer"):
        record(tmp_path, CovariateShift(layers=["0.0", "1", "2"], group="module"), mlp(), labelled())

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return F.linear(self.a(x), self.b.weight, self.b.bias)

    for layers in (None, ["a", "b"]):
        found, *_ = record(tmp_path, CovariateShift(layers=layers), Odd().double(), labelled())
        assert layers_of(found) == ["a", "b"]


def test_what_is_frozen_or_unused_is_in_no_layer(tmp_path):
    model = mlp()
    for p in model[0].parameters():
        p.requires_grad_(False)
    model.add_module("unused", nn.Linear(2, 2))
    model.forward = lambda x: model[2](model[1](model[0](x)))
    found, before, after = record(tmp_path, CovariateShift(), model, labelled())
    assert layers_of(found) == ["1.0", "2"]
    assert found["1.0", "l2", -1] == 0
    assert found["2", "l2", -1] > 0
    model = mlp()
    model[1][0].weight.requires_grad_(False)
    found, before, after = record(tmp_path, CovariateShift(), model, labelled())
    prefixes = {**MLP_LAYERS, "1.0": ["1.0.bias", "1.1."]}
    wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, prefixes))
    assert_is_the_twins(found, wanted, MLP_LAYERS, "preceding")


class Tied(nn.Module):
    """The second and third layer have one weight; the first layer called is defined last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.third = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.third.weight
        self.first = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.out(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


def test_a_tied_parameter_belongs_to_the_first_layer_that_is_called(tmp_path):
    model = Tied()
    found, before, after = record(tmp_path, CovariateShift(WHICH), model, labelled())
    assert layers_of(found) == ["first", "second", "third", "out"]
    # named_parameters lists the weight under its first name
    groups = [
        ["first.weight", "first.bias"],
        ["third.weight", "second.bias"],
        ["third.bias"],
        ["out.weight", "out.bias"],
    ]
    for which in WHICH:
        wanted = twin.shift(before, cross_entropy, labelled(), after, groups, which)
        assert_is_the_twins(found, wanted, layers_of(found), which)


def test_tied_layers_in_a_chain(tmp_path):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    model[2].weight = model[0].weight
    probe = CovariateShift(WHICH)
    found, before, after = record(tmp_path, probe, model, labelled())
    assert probe._path.chain is not None
    groups = [["0.weight", "0.bias"], ["2.bias"], ["4.weight", "4.bias"]]
    for which in WHICH:
        wanted = twin.shift(before, cross_entropy, labelled(), after, groups, which)
        assert_is_the_twins(found, wanted, ["0", "2", "4"], which)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "forward", lambda x: m[2](torch.tanh(m[1](m[0](x))))),
        lambda m: setattr(m, "forward", lambda x: m[2](m[1](y := m[0](x)) + y.sum(1, keepdim=True))),
        lambda m: setattr(m, "forward", lambda x: m[2](m[1](m[0](x.clone())))),
        lambda m: setattr(m, "forward", lambda x: m[2](m[1](m[0](x).mul_(2)))),
        lambda m: m[0].register_forward_hook(lambda module, args, output: output * 2),
        lambda m: m.__setitem__(1, nn.Sequential(m[1], nn.Linear(6, 6).double(), m[1][1])),
    ],
    ids=["function", "shortcut", "clone", "in place", "hook", "module with buffers twice"],
)
def test_what_is_no_chain_goes_the_long_way(change):
    model = mlp(dropout=0.2)
    change(model)
    with Gradients.of_model(model, cross_entropy, labelled()) as at:
        path = find(at)
        assert path.chain is None
        after = tuple(block + 0.05 for block in at.theta)
        short = measured(at, path, references(path, at()[1]), after, "preceding")
        plain = internal_covariate_shift(at, at.theta, after, [layer.indices for layer in path.layers])
    assert [layer.distance for layer in short] == pytest.approx(plain.l2.tolist(), rel=1e-12, abs=1e-14)


def test_losses_that_do_more_than_call_the_model_are_followed(tmp_path):
    """A penalty on the parameters, noise on the input, and a loss that calls the model twice."""

    def penalized(model, batch):
        x = batch[0] + 0.1 * torch.randn(batch[0].shape, dtype=torch.float64)
        return cross_entropy(model, (x, batch[1])) + 0.1 * sum(p.square().sum() for p in model.parameters())

    def twice(model, batch):
        return cross_entropy(model, batch) + model(batch[0] * 0.5).square().mean()

    for loss, chained in ((penalized, True), (twice, False)):
        probe, model = CovariateShift(WHICH), mlp(dropout=0.3)
        seed_everything(5)
        found, before, after = record(tmp_path, probe, model, labelled(), loss)
        assert (probe._path.chain is not None) == chained
        seed_everything(5)
        for which in WHICH:
            wanted = twin.shift(before, loss, labelled(), after, grouped(before, MLP_LAYERS), which)
            assert_is_the_twins(found, wanted, MLP_LAYERS, which)


class Bias(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x + self.bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_of_rounding_noise_has_no_cosine(dtype, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), Bias(5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    x, y = labelled(32)
    found, *_ = record(tmp_path, CovariateShift(WHICH, group="module"), model, (x.to(dtype), y))
    assert 0 < found["1", "gradient_norm", -1] < 1e-5 * found["0", "gradient_norm", -1]
    for suffix in ("", "_following", "_own", "_all"):
        assert math.isnan(found["1", f"cosine{suffix}", -1]) and math.isnan(found["1", f"relative{suffix}", -1])
        assert found["1", f"l2{suffix}", -1] >= 0
        for layer in ("0", "2", "4"):
            assert not math.isnan(found[layer, f"cosine{suffix}", -1])


class Double(nn.Module):
    def forward(self, x):
        return x.double()


def test_rounding_noise_is_judged_by_the_coarsest_type(tmp_path):
    torch.manual_seed(0)
    single = nn.Sequential(nn.Linear(4, 5, bias=False), Bias(5), nn.BatchNorm1d(5), nn.Tanh())
    x, y = labelled(32)
    model = nn.Sequential(*single, Double(), nn.Linear(5, 3).double())
    found, *_ = record(tmp_path, CovariateShift(group="module"), model, (x.float(), y))
    assert 0 < found["1", "gradient_norm", -1] < 1e-5 * found["0", "gradient_norm", -1]
    assert math.isnan(found["1", "cosine", -1])


def test_a_small_gradient_that_is_no_noise_keeps_its_cosine(tmp_path):
    model = mlp(nn.Identity)
    with torch.no_grad():
        model[1][0].weight.mul_(1e-9)
    found, *_ = record(tmp_path, CovariateShift(), model, labelled())
    assert found["0.0", "gradient_norm", -1] < 1e-8 * found["2", "gradient_norm", -1]
    assert found["0.0", "cosine", -1] == 1


def test_layers_without_a_gradient_are_undefined_and_not_divided_by(tmp_path):
    model = mlp(nn.Identity)
    nn.init.zeros_(model[2].weight)
    found, *_ = record(tmp_path, CovariateShift(WHICH), model, labelled())
    assert found["1.0", "gradient_norm", -1] == 0
    assert math.isnan(found["1.0", "relative", -1]) and math.isnan(found["1.0", "cosine", -1])
    assert found["1.0", "l2", -1] == 0
    assert found["1.0", "l2_following", -1] > 0


def test_gradients_that_are_not_finite_are_recorded_and_stop_nothing(tmp_path):
    model = mlp()
    with torch.no_grad():
        model[1][0].weight[0, 0] = math.inf
    found, *_ = record(tmp_path, CovariateShift(WHICH, predict=True), model, labelled())
    assert math.isnan(found["2", "l2", -1]) and math.isnan(found["2", "cosine", -1])
    model = mlp()  # finite until the optimizer's step
    found, *_ = record(
        tmp_path, CovariateShift(), model, labelled(), optimizer=torch.optim.SGD(model.parameters(), lr=math.nan)
    )
    assert found["0.0", "l2", -1] == 0
    assert found["0.0", "gradient_norm", -1] > 0
    assert math.isnan(found["2", "l2", -1])
    for probe in (VirtualShift((1.0,)),):
        model = mlp()
        with torch.no_grad():
            model[1][0].weight[0, 0] = math.nan
        found, *_ = record(tmp_path, probe, model, labelled())
        assert math.isnan(found["-", "sharpness", -1])
        assert math.isnan(found["2", "relative_by_curvature", 0])


def test_one_example_has_no_batch_statistics(tmp_path):
    with pytest.raises(ProbeError, match="more than 1 value per channel"):
        record(tmp_path, CovariateShift(on=labelled(1)), mlp(), labelled())


def test_a_model_that_is_random_beyond_its_streams_is_caught(tmp_path):
    draws = itertools.count()
    loss = lambda model, batch: cross_entropy(model, batch) * (1 + 0.1 * (next(draws) % 7))  # noqa: E731
    for probe in (CovariateShift(), VirtualShift()):
        with pytest.raises(ProbeError, match="two evaluations at the same parameters differ"):
            record(tmp_path, probe, mlp(), labelled(), loss)


def test_another_batch_and_another_mode(tmp_path):
    other = labelled(15, seed=3)
    for mode in ("step", "batch", "population"):
        model = mlp(dropout=0.0)
        model[0][1].running_mean += 0.5
        found, before, after = record(tmp_path, CovariateShift(on=other, mode=mode), model, labelled())
        before.train(mode != "population")
        wanted = twin.shift(before, cross_entropy, other, after, grouped(before, MLP_LAYERS))
        assert_is_the_twins(found, wanted, MLP_LAYERS, "preceding")


@pytest.mark.parametrize("network", ["mlp without bn", "branched"])
def test_a_batch_in_chunks_is_the_batch(network, tmp_path):
    make, batch, layers, _ = NETWORKS[network]
    model = make()
    if network == "branched":
        model.norm = nn.Identity()
        layers = {"first": ["first."], "second": ["second."], "last": ["last."]}
    found, before, after = record(tmp_path, CovariateShift(WHICH, chunks=Chunks(5)), model, batch)
    for which in WHICH:
        wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers), which)
        assert_is_the_twins(found, wanted, layers, which)
    with pytest.raises(ProbeError, match="ghost"):
        record(tmp_path, CovariateShift(chunks=Chunks(5)), mlp(), batch)


def test_ghost_batches_are_shifted_each_by_itself(tmp_path):
    batch = labelled(8)
    found, before, after = record(tmp_path, CovariateShift(chunks=Chunks(4, ghost=True)), mlp(), batch)

    def ghost(model, batch):
        return sum(cross_entropy(model, (batch[0][part], batch[1][part])) for part in (slice(4), slice(4, 8))) / 2

    wanted = twin.shift(before, ghost, batch, after, grouped(before, MLP_LAYERS))
    assert_is_the_twins(found, wanted, MLP_LAYERS, "preceding")


def test_the_prediction_is_the_formula_and_holds_for_a_small_step(tmp_path):
    """A deep linear net of equal layers, one unit wide, is as symmetric as the formula assumes."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(5))).double()
    for layer in model:
        nn.init.constant_(layer.weight, 1.05)
    batch = torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    found, before, _ = record(tmp_path, CovariateShift(predict=True), model, batch, squares, optimizer=optimizer)
    matrix = twin.hessian(before, squares, batch)
    values = {n: p.detach() for n, p in before.named_parameters()}
    g = twin.vector(twin.gradient(before, squares, batch, values)[1], list(values))
    curvature = np.linalg.norm(matrix @ g) / np.linalg.norm(g)
    for place in range(5):
        assert found[str(place), "predicted", -1] == pytest.approx(1e-4 * curvature * place / 5, rel=1e-6)
        assert found[str(place), "relative", -1] == pytest.approx(1e-4 * curvature * place / 5, rel=0.15)
    assert found["-", "directional_curvature", -1] == pytest.approx(curvature, rel=1e-6)


def test_the_prediction_wants_one_step_size(tmp_path):
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": [*model[1:].parameters()], "lr": 0.2}]
    with pytest.warns(UserWarning, match="predicted out: the optimizer's groups have different rates"):
        found, *_ = record(tmp_path, CovariateShift(predict=True), model, labelled(), optimizer=torch.optim.SGD(groups))
    assert not any(statistic == "predicted" for _, statistic, _ in found)
    model = mlp()
    other = nn.Parameter(torch.zeros(1))
    groups = [{"params": model.parameters(), "lr": 0.7}, {"params": [other], "lr": 0.2}]
    probe = CovariateShift(predict=True, learning_rate=0.7)
    found, *_ = record(tmp_path, probe, model, labelled(), optimizer=torch.optim.SGD(groups))
    wanted = 0.7 * found["-", "directional_curvature", -1] * 2 / 3
    assert found["2", "predicted", -1] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}),
        (lambda p: torch.optim.Adam(p, lr=0.1), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1.0), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, maximize=True), {}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"learning_rate": 0.2}),
        (lambda p: torch.optim.SGD(p, lr=0.1), {"on": labelled(seed=5)}),
    ],
    ids=["momentum", "Adam", "weight decay", "maximize", "another rate", "another batch"],
)
def test_nothing_is_predicted_of_a_step_that_was_not_eta_times_the_gradient(make, fields, tmp_path):
    model = mlp()
    with pytest.warns(UserWarning, match="leaves predicted out where the step was not"):
        found, *_ = record(
            tmp_path,
            CovariateShift(predict=True, **fields),
            model,
            labelled(),
            optimizer=make(model.parameters()),
            steps=3,
        )
    assert not any(statistic == "predicted" for _, statistic, _ in found)


@pytest.mark.parametrize("rate", [1e-9, 0.1])
def test_a_small_step_of_single_precision_is_still_one(rate, tmp_path):
    model = mlp().float()
    x, y = labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found, *_ = record(tmp_path, CovariateShift(predict=True), model, (x.float(), y), optimizer=optimizer, steps=3)
    assert found["2", "predicted", -1] > 0


def test_a_zero_gradient_is_recorded_and_nothing_is_divided_by_it(tmp_path):
    def flat(model, batch):
        return (model(batch[0]) * 0).sum()

    for probe in (CovariateShift(predict=True), VirtualShift((1.0,))):
        found, *_ = record(tmp_path, probe, mlp(), labelled(), flat)
        assert math.isnan(found["-", "directional_curvature", -1])
        statistics = {"predicted"} if isinstance(probe, CovariateShift) else {"predicted_by_curvature"}
        values = [value for (_, statistic, _), value in found.items() if statistic in statistics]
        assert values and all(map(math.isnan, values))


@pytest.mark.parametrize("network", ["mlp", "branched"])
def test_a_virtual_step_is_that_step_taken_by_a_copy(network, tmp_path):
    make, batch, layers, _ = NETWORKS[network]
    sizes = (0.1, 2.0)
    probe = VirtualShift(sizes, ("preceding", "following"), tolerance=1e-7)
    found, before, _ = record(tmp_path, probe, make(), batch)
    assert layers_of(found) == list(layers)
    values = {n: p.detach().clone() for n, p in before.named_parameters()}
    loss, g = twin.gradient(before, cross_entropy, batch, values)
    matrix, vector = twin.hessian(before, cross_entropy, batch), twin.vector(g, list(g))
    curvature = np.linalg.norm(matrix @ vector) / np.linalg.norm(vector)
    top = np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1]
    assert found["-", "directional_curvature", -1] == pytest.approx(curvature, rel=1e-6)
    assert found["-", "sharpness", -1] == pytest.approx(top, rel=1e-6)
    assert found["-", "converged", -1] == 1
    assert found["-", "residual", -1] <= 1e-7 * top
    assert found["-", "gradient_norm", -1] == pytest.approx(np.linalg.norm(vector))
    assert found["-", "loss", -1] == pytest.approx(loss)
    for (unit, b), (k, c) in itertools.product((("curvature", curvature), ("sharpness", top)), enumerate(sizes)):
        eta = c / b
        assert found["-", "c", k] == c
        assert found["-", f"eta_by_{unit}", k] == pytest.approx(eta, rel=1e-6)
        after = {n: values[n] - eta * g[n] for n in values}
        end, there = twin.gradient(before, cross_entropy, batch, after)
        apart = twin.compare(vector, twin.vector(there, list(g)))
        assert found["-", f"loss_change_by_{unit}", k] == pytest.approx(end - loss, rel=1e-5)
        assert found["-", f"gradient_difference_by_{unit}", k] == pytest.approx(apart["l2"], rel=1e-5)
        assert found["-", f"gradient_relative_by_{unit}", k] == pytest.approx(apart["relative"], rel=1e-5)
        assert found["-", f"gradient_cosine_by_{unit}", k] == pytest.approx(apart["cosine"], rel=1e-5)
        for which, suffix in (("preceding", ""), ("following", "_following")):
            wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers), which)
            for name, shift in zip(layers, wanted, strict=True):
                for statistic in ("l2", "relative", "cosine"):
                    value = found[name, f"{statistic}{suffix}_by_{unit}", k]
                    assert value == pytest.approx(shift[statistic], rel=1e-5, abs=1e-12)
        for place, name in enumerate(layers):
            share = eta * curvature * place / len(layers)
            assert found[name, f"predicted_by_{unit}", k] == pytest.approx(share, rel=1e-6)


def test_a_virtual_step_needs_a_positive_unit(tmp_path):
    """Where the largest eigenvalue is negative there is no step of c / lambda_max, and it is not made up."""
    model = nn.Linear(4, 1, bias=False).double()
    found, *_ = record(tmp_path, VirtualShift(), model, labelled()[0], lambda m, x: -m(x).square().sum())
    assert found["-", "sharpness", -1] < 0
    for statistic in ("eta_by_sharpness", "loss_change_by_sharpness", "l2_by_sharpness"):
        assert math.isnan(found["-", statistic, 0])
    assert found["-", "eta_by_curvature", 0] > 0


def test_the_settings_of_a_virtual_step_reach_it(tmp_path):
    plain, *_ = record(tmp_path, VirtualShift((1.0,)), mlp(), labelled())
    other = labelled(20, seed=9)
    for change in ({"mode": "population"}, {"on": other}, {"seed": 3}, {"tolerance": 1e-9}, {"iterations": 4}):
        changed, *_ = record(tmp_path, VirtualShift((1.0,), **change), mlp(), labelled())
        assert changed["-", "sharpness", -1] != plain["-", "sharpness", -1], change
    tight, *_ = record(tmp_path, VirtualShift((1.0,), tolerance=1e-7, basis=4), mlp(), labelled())
    loose, *_ = record(tmp_path, VirtualShift((1.0,), tolerance=1e-7), mlp(), labelled())
    assert tight["-", "iterations", -1] > loose["-", "iterations", -1]
    found, *_ = record(tmp_path, VirtualShift((1.0,), group="module"), mlp(), labelled())
    assert layers_of(found) == ["0.0", "0.1", "1.0", "1.1", "2"]
    found, *_ = record(tmp_path, VirtualShift((1.0,), layers=["0", "1", "2"]), mlp(), labelled())
    assert layers_of(found) == ["0", "1", "2"]
    found, *_ = record(tmp_path, VirtualShift((1.0,), chunks=Chunks(5)), mlp(nn.Identity), labelled())
    whole, *_ = record(tmp_path, VirtualShift((1.0,)), mlp(nn.Identity), labelled())
    assert found["2", "l2_by_curvature", 0] == pytest.approx(whole["2", "l2_by_curvature", 0], rel=1e-8)


def test_bad_settings_and_sites_are_refused_early():
    for kind in (CovariateShift, VirtualShift):
        for change, message in (
            ({"which": ()}, "which"),
            ({"which": "preceding"}, "which"),
            ({"which": ("own", "own")}, "which"),
            ({"which": ("others",)}, "which"),
            ({"group": "block"}, "group"),
            ({"layers": []}, "layers"),
            ({"layers": "0"}, "layers"),
            ({"on": "full"}, "on must"),
            ({"mode": "eval"}, "mode"),
        ):
            with pytest.raises(ValueError, match=message):
                kind(**change)
        with pytest.raises(ValueError, match="give the recorder loss"):
            Recorder(mlp(), "nowhere", [kind()])
        assert kind(name="mine").name == "mine"
        assert kind(when=every(7)).when(7) and not kind(when=every(7)).when(6)
    for change, message in (({"sizes": ()}, "steps"), ({"sizes": (0.0,)}, "steps"), ({"tolerance": 0}, "tolerance")):
        with pytest.raises(ValueError, match=message):
            VirtualShift(**change)
    with pytest.raises(ValueError, match="learning_rate"):
        CovariateShift(learning_rate=-1)
    theta = [torch.ones(2)]
    for layers, after, which, message in (
        ([[0], [0]], theta, "own", "two layers"),
        ([[0]], [torch.ones(3)], "own", "shapes"),
        ([[0]], theta, "none", "which"),
    ):
        with pytest.raises(ValueError, match=message):
            internal_covariate_shift(lambda blocks: (blocks[0].sum(), blocks), theta, after, layers, which)


def test_the_functions_behind_it_serve_without_a_recorder():
    model, batch = awkward().double(), awkward_batches(1)[0]
    batch = batch[0].double(), batch[1]
    with Gradients.of_model(model, cross_entropy, batch) as at:
        path = find(at)
        assert [layer.name for layer in path.layers] == ["conv", "first", "middle", "again", "out"]
        _, g = at()
        hessian = at.hessian()
        vector = torch.cat([block.reshape(-1) for block in g])
        unit = directional_curvature(hessian, vector)
        top = largest_eigenvalues(hessian, vector)
        after = tuple(block - 0.01 * slope for block, slope in zip(at.theta, g, strict=True))
        shift = internal_covariate_shift(at, at.theta, after, [layer.indices for layer in path.layers])
    assert abs(unit.rayleigh) <= unit.directional
    assert unit.rayleigh <= float(top.values[0]) * 1.01
    assert float(shift.l2[0]) == 0 and (shift.l2[1:] > 0).all()


class Half(nn.Module):
    def forward(self, x):
        return x / 2


class Headed(nn.Module):
    """Its own weight is used last, another before all, and a penalty on all of them is taken before the forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.head = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Linear(5, 5)
        self.a = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(4))
        self.never = nn.Linear(5, 5)
        nn.utils.parametrizations.weight_norm(self.a)
        nn.utils.parametrize.register_parametrization(self, "head", Half())
        self.double()

    def forward(self, x):
        x = torch.tanh(self.b(torch.tanh(self.a(x * self.scale))))
        return torch.tanh(F.linear(x, self.never.weight)) @ self.head


class Scaled(nn.Module):
    """A residual block with a scale of its own, as in vision transformers."""

    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((4,), 0.5))
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.gamma * torch.tanh(self.inner(x))


def scaled():
    torch.manual_seed(1)
    return nn.Sequential(Scaled(), Scaled(), nn.Linear(4, 3)).double()


def penalized_before(model, batch):
    penalty = sum(p.square().sum() for p in model.parameters())
    return 0.01 * penalty + cross_entropy(model, batch)


@pytest.mark.parametrize(
    ("make", "loss", "layers"),
    [
        (
            Headed,
            cross_entropy,
            {
                "scale": ["scale"],
                "a": ["a."],
                "b": ["b."],
                "never": ["never.weight"],
                "head": ["parametrizations.head."],
            },
        ),
        (
            scaled,
            penalized_before,
            {
                "0.inner": ["0.inner"],
                "0.gamma": ["0.gamma"],
                "1.inner": ["1.inner"],
                "1.gamma": ["1.gamma"],
                "2": ["2."],
            },
        ),
    ],
    ids=["headed", "scaled"],
)
def test_what_a_module_with_children_uses_itself_stands_where_it_is_used(make, loss, layers, tmp_path):
    found, before, after = record(tmp_path, CovariateShift(WHICH), make(), labelled(), loss)
    assert layers_of(found) == [name.rstrip(".") for name in layers]
    for which in WHICH:
        wanted = twin.shift(before, loss, labelled(), after, grouped(before, layers), which)
        assert_is_the_twins(found, wanted, layers_of(found), which)


def test_one_glob_names_layers_in_the_order_they_are_run_in(tmp_path):
    layers = {"first": ["first."], "second": ["second."], "last": ["last."]}
    model = Branched()
    model.norm = nn.Identity()
    found, before, after = record(tmp_path, CovariateShift(layers=["*"]), model, labelled())
    assert layers_of(found) == list(layers)
    wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, layers))
    assert_is_the_twins(found, wanted, layers, "preceding")


@pytest.mark.parametrize("thaw", [True, False])
@pytest.mark.parametrize("make", [CovariateShift, lambda: VirtualShift((1.0,))])
def test_layers_are_found_anew_when_parameters_are_frozen_or_thawed(make, thaw, tmp_path):
    model, probe, batch = mlp(nn.Identity), make(), labelled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].requires_grad_(not thaw)
    with Recorder(model, tmp_path / "run", [probe], loss=cross_entropy, optimizer=optimizer) as recorder:
        for _ in range(2):
            before = copy.deepcopy(model)
            with recorder.step(batch):
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
            model[0].requires_grad_(thaw)
    table = read_run(tmp_path / "run")
    layers = MLP_LAYERS if thaw else {name: MLP_LAYERS[name] for name in ("1.0", "2")}
    later = {(row.layer, row.statistic, row.unit): row.value for row in table[table.step == 1].itertuples()}
    assert layers_of(later) == list(layers)
    before.requires_grad_(True)
    if isinstance(probe, CovariateShift):
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
        wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers))
        assert_is_the_twins(later, wanted, layers, "preceding")


class Chosen(nn.Module):
    """A mixture of which the batch chooses the expert."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.out(torch.tanh(self.experts[int(x[0, 0] > 0)](x)))


def test_layers_are_found_anew_when_the_batch_takes_another_way(tmp_path):
    x, y = labelled()
    batches = [(torch.cat((torch.full((1, 4), sign), x[1:])), y) for sign in (-1.0, 1.0)]
    found = steps_of(tmp_path, Chosen(), cross_entropy, batches, CovariateShift(WHICH))
    for batch, expert, (values, before, after) in zip(batches, ("experts.0", "experts.1"), found, strict=True):
        layers = {expert: [f"{expert}."], "out": ["out."]}
        assert layers_of(values) == list(layers)
        for which in WHICH:
            wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers), which)
            assert_is_the_twins(values, wanted, layers, which)


class Leaving(nn.Sequential):
    """A part of the network that leaves a number for the loss to read."""

    def __init__(self, *parts, leave):
        super().__init__(*parts)
        self.leave, self.left = leave, None

    def forward(self, x):
        x = super().forward(x)
        self.left = self.leave(x)
        return x


@pytest.mark.parametrize(
    "leave",
    [
        lambda h: h.square().mean(),
        lambda h: h.detach().square().mean(),
        lambda h: [h.square().mean()],
    ],
    ids=["a term of the loss", "a weight", "a list"],
)
@pytest.mark.parametrize("outside", [True, False])
def test_a_loss_that_reads_what_the_forward_left_is_followed(leave, outside, tmp_path):
    torch.manual_seed(1)
    inner = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    head = nn.Linear(6, 3)
    model = Leaving(*inner, head, leave=leave) if outside else nn.Sequential(Leaving(*inner, leave=leave), head)
    model = model.double()
    leaving = model if outside else model[0]

    def loss(model, batch):
        value = cross_entropy(model, batch)
        here = model if outside else model[0]
        left = here.left[0] if isinstance(here.left, list) else here.left
        return value * (1 + left)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probes = [CovariateShift(WHICH)]
    with Recorder(model, tmp_path / "run", probes, loss=loss, optimizer=optimizer) as recorder:
        for _ in range(2):
            leaving.left = None
            before = copy.deepcopy(model)
            model(labelled()[0])  # leaves what is right where the step begins, and nowhere else
            with recorder.step(labelled()):
                optimizer.zero_grad()
                loss(model, labelled()).backward()
                optimizer.step()
    table = read_run(tmp_path / "run")
    found = {(row.layer, row.statistic, row.unit): row.value for row in table[table.step == 1].itertuples()}
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    prefix = "" if outside else "0."
    layers = {f"{prefix}0": [f"{prefix}0."], f"{prefix}2": [f"{prefix}2."]}
    layers |= {"4": ["4."]} if outside else {"1": ["1."]}
    for which in WHICH:
        wanted = twin.shift(before, loss, labelled(), after, grouped(before, layers), which)
        assert_is_the_twins(found, wanted, layers, which)


class Way(nn.Sequential):
    """A chain that takes another way after two calls, with the same parameters."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
        self.double()
        self.shortcut = False

    def forward(self, x):
        h = self[1](self[0](x))
        y = self[2](h)
        return self[3](y + h if self.shortcut else y)


class Clipped(nn.Sequential):
    """Shrinks what is long, between two layers: where the step leads it is, where it began it is not."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        self.double()

    def forward(self, x):
        h = self[0](x)
        length = h.detach().norm()
        if length > 12:
            h = h * (12 / length)
        return self[2](self[1](h))


def test_a_network_that_takes_another_way_by_now_is_followed_there(tmp_path):
    model = Way()
    layers = {"0": ["0."], "2": ["2."], "3": ["3."]}

    def batches():
        yield labelled()
        model.shortcut = True
        yield labelled()

    found = list(steps_of(tmp_path, model, cross_entropy, batches(), CovariateShift(WHICH)))
    assert [before.shortcut for _, before, _ in found] == [False, True]
    for values, before, after in found:
        for which in WHICH:
            wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, layers), which)
            assert_is_the_twins(values, wanted, layers, which)


def test_a_branch_that_acts_only_where_the_step_leads_is_followed(tmp_path):
    layers = {"0": ["0."], "1": ["1."], "2": ["2."]}
    found = list(steps_of(tmp_path, Clipped(), cross_entropy, [labelled()], CovariateShift(WHICH), rate=30.0))
    for values, before, after in found:
        moved = copy.deepcopy(before)
        moved.load_state_dict(after, strict=False)
        lengths = [float(net[0](labelled()[0]).detach().norm()) for net in (before, moved)]
        assert lengths[0] < 12 < lengths[1]
        for which in WHICH:
            wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, layers), which)
            assert_is_the_twins(values, wanted, layers, which)


class Pooled(nn.Module):
    """Halves its input until it is short enough, so that the way depends on the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.pool, self.first, self.last = nn.AvgPool1d(2), nn.Linear(4, 5), nn.Linear(5, 3)
        self.double()

    def forward(self, x):
        while x.shape[-1] > 4:
            x = self.pool(x)
        return self.last(self.first(x))


def test_a_way_that_depends_on_the_batch_is_followed(tmp_path):
    layers = {"first": ["first."], "last": ["last."]}
    batches = [labelled(shape=(8,)), labelled(shape=(16,))]
    for (values, before, after), batch in zip(
        steps_of(tmp_path, Pooled(), cross_entropy, batches, CovariateShift(WHICH)), batches, strict=True
    ):
        for which in WHICH:
            wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers), which)
            assert_is_the_twins(values, wanted, layers, which)


class Routed(nn.Module):
    """Each example goes to one of two experts; a chunk may hold examples of one alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.out = nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        chosen = (x[:, 0] > 0).long()
        h = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                h = h.index_put((mine.nonzero()[:, 0],), expert(x[mine]))
        return self.out(torch.tanh(h))


@pytest.mark.parametrize("named", [None, ["experts.0", "experts.1", "out"]])
def test_every_chunk_is_asked_which_layers_it_reaches(named, tmp_path):
    x, y = labelled(12)
    x = x[x[:, 0].argsort()]
    batch = x, y
    probe = CovariateShift(layers=named, chunks=Chunks(4))
    layers = {"experts.0": ["experts.0."], "experts.1": ["experts.1."], "out": ["out."]}
    (values, before, after), = steps_of(tmp_path, Routed(), cross_entropy, [batch], probe)  # fmt: skip
    assert layers_of(values) == list(layers)
    wanted = twin.shift(before, cross_entropy, batch, after, grouped(before, layers))
    assert_is_the_twins(values, wanted, layers, "preceding")


def test_a_module_with_two_names_is_one_layer(tmp_path):
    torch.manual_seed(1)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(4, 3)).double()
    probe = CovariateShift(WHICH)
    (values, before, after), = steps_of(tmp_path, model, cross_entropy, [labelled()], probe)  # fmt: skip
    layers = {"0": ["0."], "4": ["4."]}
    assert layers_of(values) == list(layers)
    for which in WHICH:
        wanted = twin.shift(before, cross_entropy, labelled(), after, grouped(before, layers), which)
        assert_is_the_twins(values, wanted, layers, which)


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        with torch.inference_mode():
            hint = self.teacher(x)
        return self.student(x + hint.clone())


def test_a_part_that_only_infers_is_no_layer(tmp_path):
    (values, _, _), = steps_of(tmp_path, Teacher(), cross_entropy, [labelled()], CovariateShift())  # fmt: skip
    assert layers_of(values) == ["student"]


def test_the_place_a_step_is_rounded_at_is_each_blocks_own(tmp_path):
    class Mixed(nn.Sequential):
        def forward(self, x):
            return self[1](torch.tanh(self[0](x)).bfloat16()).float()

    torch.manual_seed(1)
    model = Mixed(nn.Linear(4, 64), nn.Linear(64, 3).bfloat16())
    x, y = labelled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with pytest.warns(UserWarning, match="leaves predicted out where the step was not"):
        found, *_ = record(tmp_path, CovariateShift(predict=True), model, (x.float(), y), optimizer=optimizer, steps=2)
    assert not any(statistic == "predicted" for _, statistic, _ in found)
