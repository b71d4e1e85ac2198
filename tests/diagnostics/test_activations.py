"""Activations: the right numbers of the right signal in the right mode."""

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import Activations, Recorder, at, every, read_run
from diagnostics.probe import ProbeError
from tests.models import awkward, awkward_batches, cross_entropy, seed_everything, train

PROBES = [
    lambda: Activations(["relu", "norm", "out"], "input"),
    lambda: Activations("*norm*", "output", percentiles=(0, 50), name="outputs"),
    lambda: Activations(["conv", "first"], "grad_output", per="layer"),
    lambda: Activations("*", "output", on=awkward_batches(1, seed=7)[0], name="fixed", when=every(1)),
    lambda: Activations("relu", "input", on=awkward_batches(1, seed=7)[0], mode="population"),
    lambda: Activations(["conv", "out"], "grad_output", on=awkward_batches(1, seed=7)[0]),
]


def record(tmp_path, probe, *, model=None, batches=None, loss=cross_entropy, lr=0.1):
    seed_everything()
    model = awkward() if model is None else model
    batches = awkward_batches(2) if batches is None else batches
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Recorder(model, tmp_path / "run", [probe], loss=loss) as recorder:
        train(model, optimizer, batches, recorder.step)
    return read_run(tmp_path / "run")


def cell(table, layer, statistic, unit=0, step=0):
    rows = table[(table.layer == layer) & (table.statistic == statistic) & (table.unit == unit) & (table.step == step)]
    assert len(rows) == 1
    return rows["value"].item()


def chain(*modules):
    return nn.Sequential(*modules)


def linear_batches(count=2, n=11, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 3, generator=generator), torch.randint(2, (n,), generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("per", ["unit", "layer"])
def test_the_numbers_are_numpys_on_the_users_own_batch(tmp_path, per):
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2))
    batches = linear_batches()
    with torch.no_grad():
        inputs = model[0](batches[0][0]).numpy().astype(np.float64)
    table = record(tmp_path, Activations("1", percentiles=(0, 15, 50, 99.5), per=per), model=model, batches=batches)
    for unit, values in [(-1, inputs.ravel())] if per == "layer" else list(enumerate(inputs.T)):
        for statistic, wanted in {
            "count": values.size, "nonfinite": 0, "mean": values.mean(), "variance": values.var(),
            "min": values.min(), "max": values.max(),
            **{f"p{p:g}": np.percentile(values, p) for p in (0, 15, 50, 99.5)},
        }.items():  # fmt: skip
            assert cell(table, "1", statistic, unit) == pytest.approx(wanted, rel=1e-12, abs=1e-12)
    assert set(table["unit"]) == ({-1} if per == "layer" else {0, 1, 2, 3})
    assert set(table["mode"]) == {"-"}
    assert set(table["probe"]) == {"activations.input"}


def test_a_channel_is_pooled_over_batch_and_positions_and_unit_dim_names_another(tmp_path):
    class Body(nn.Module):
        def forward(self, x):
            return x

    x = torch.arange(2 * 3 * 4, dtype=torch.float32).reshape(2, 3, 4)
    model = chain(Body(), nn.Flatten(), nn.Linear(12, 2))
    batches = [(x, torch.tensor([0, 1]))]
    first = record(tmp_path / "a", Activations("0", "output"), model=model, batches=batches)
    last = record(tmp_path / "b", Activations("0", "output", unit_dim=-1), model=model, batches=batches)
    assert [cell(first, "0", "mean", u) for u in range(3)] == x.mean((0, 2)).tolist()
    assert [cell(last, "0", "mean", u) for u in range(4)] == x.mean((0, 1)).tolist()


def test_a_fixed_batch_in_batch_mode_is_pinned_by_batch_normalization_and_in_population_mode_is_not(tmp_path):
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(3)) * 5 + 2
    torch.manual_seed(1)
    batches = linear_batches(1)
    norm = nn.BatchNorm1d(3, eps=1e-8)
    nn.init.constant_(norm.bias, 0.7)
    nn.init.constant_(norm.weight, 3.0)
    model = chain(norm, nn.Linear(3, 2))
    fixed = (x, torch.zeros(64, dtype=torch.long))
    batch = record(tmp_path / "b", Activations("0", "output", on=fixed), model=model, batches=batches)
    for unit in range(3):
        assert cell(batch, "0", "mean", unit) == pytest.approx(0.7, abs=1e-5)
        assert cell(batch, "0", "variance", unit) == pytest.approx(9.0, rel=1e-5)
    assert set(batch["mode"]) == {"batch"}
    fresh = nn.BatchNorm1d(3)
    fresh.running_mean += 1.0
    population = record(
        tmp_path / "p", Activations("0", "output", on=fixed, mode="population"), model=chain(fresh, nn.Linear(3, 2)),
        batches=batches,
    )  # fmt: skip
    wanted = (x - 1.0).numpy() / np.sqrt(1 + 1e-5)
    assert cell(population, "0", "mean") == pytest.approx(wanted[:, 0].mean(), rel=1e-5)
    assert set(population["mode"]) == {"population"}


def test_a_fixed_batch_is_measured_at_theta_t_and_not_after_the_update(tmp_path):
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 2))
    fixed = linear_batches(1, seed=9)[0]
    with torch.no_grad():
        wanted = model(fixed[0]).mean(0)
    table = record(tmp_path, Activations("0", "output", on=fixed), model=model, batches=linear_batches(3), lr=1.0)
    assert cell(table, "0", "mean") == pytest.approx(wanted[0].item(), rel=1e-6)
    assert cell(table, "0", "mean", step=1) != pytest.approx(wanted[0].item(), rel=1e-3)


def test_dropout_is_off_on_a_fixed_batch_so_a_frozen_network_stands_still(tmp_path):
    fixed = awkward_batches(1, seed=7)[0]
    table = record(tmp_path, Activations("out", "output", on=fixed), lr=0.0, batches=awkward_batches(3))
    for unit in range(3):
        values = {cell(table, "out", "mean", unit, step) for step in range(3)}
        assert len(values) == 1


def test_the_gradient_at_an_output_is_the_losss(tmp_path):
    torch.manual_seed(0)
    model = chain(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))
    batches = linear_batches(1)
    hidden = model[0](batches[0][0])
    gradient = torch.autograd.grad(nn.functional.cross_entropy(model[2](hidden.relu()), batches[0][1]), hidden)[0]
    passive = record(tmp_path / "a", Activations("0", "grad_output"), model=model, batches=batches, lr=0.0)
    active = record(
        tmp_path / "b", Activations("0", "grad_output", on=batches[0]), model=model, batches=batches, lr=0.0
    )
    for table in (passive, active):
        assert [cell(table, "0", "mean", u) for u in range(4)] == pytest.approx(gradient.mean(0).tolist(), abs=1e-7)


def test_calls_are_told_apart(tmp_path):
    table = record(tmp_path, Activations("relu"))
    assert sorted(table["layer"].unique()) == ["relu", "relu#2"]
    assert table[table.layer == "relu"]["unit"].nunique() == 4
    assert table[table.layer == "relu#2"]["unit"].nunique() == 12


def test_the_mode_of_the_users_batch_is_what_the_normalizers_did(tmp_path):
    model = awkward().eval()
    table = record(tmp_path, Activations("relu"), model=model)
    assert set(table["mode"]) == {"population"}


def test_nonfinite_values_are_counted_and_stop_nothing(tmp_path):
    model = chain(nn.Linear(3, 2))
    batches = linear_batches(2)
    batches[0][0][0, 0] = float("nan")
    table = record(tmp_path, Activations("0"), model=model, batches=batches)
    assert cell(table, "0", "nonfinite", 0) == 1
    assert cell(table, "0", "count", 0) == 10
    assert np.isfinite(cell(table, "0", "mean", 0))
    assert cell(table, "0", "nonfinite", 1) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_upcast(tmp_path, dtype):
    class Cast(nn.Module):
        def forward(self, x):
            return x.to(dtype)

    x = torch.full((300, 2), 300.0)
    model = chain(Cast())
    with Recorder(model, tmp_path / "run", [Activations("0", "output")]) as recorder, recorder.step(x):
        model(x)
    table = read_run(tmp_path / "run")
    assert cell(table, "0", "mean") == 300.0  # the sum, 90,000, is infinite in float16


def test_when_and_name_are_kept(tmp_path):
    table = record(tmp_path, Activations("relu", when=at(1), name="mine"))
    assert set(table["step"]) == {1}
    assert set(table["probe"]) == {"mine"}


def test_a_frozen_output_has_no_gradient_and_says_so(tmp_path):
    model = chain(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with pytest.raises(ProbeError, match=r"'activations.grad_output' heard nothing at step 0.*needs no gradient"):
        record(tmp_path, Activations("0", "grad_output"), model=model, batches=linear_batches())


def test_one_dimensional_activations_have_no_unit_dimension(tmp_path):
    class Flat(nn.Module):
        def forward(self, x):
            return x.sum(1)

    model = chain(Flat())
    with pytest.raises(ProbeError, match=r"'activations.output' failed at step 0, layer '0': .*unit_dim"):
        with Recorder(model, tmp_path / "run", [Activations("0", "output")]) as recorder, recorder.step(None):
            model(torch.randn(3, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"percentiles": (15, 101)}, "between 0 and 100, got 101"),
        ({"percentiles": (-1,)}, "between 0 and 100, got -1"),
        ({"percentiles": (float("nan"),)}, "between 0 and 100, got nan"),
        ({"percentiles": ()}, "at least one and differ"),
        ({"percentiles": (50, 50.0)}, "at least one and differ"),
        ({"percentiles": (50, 50.0000001)}, "differ in their first six digits"),
        ({"signal": "weights"}, "signal must be one of input, output, grad_output, got 'weights'"),
        ({"mode": "train"}, "mode must be 'batch' or 'population', got 'train'"),
        ({"per": "channel"}, "per must be 'unit' or 'layer', got 'channel'"),
        ({"on": "train"}, "on must be 'batch' or a probe batch, got 'train'"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Activations("*", **arguments)


def test_gradients_on_a_fixed_batch_need_a_loss(tmp_path):
    with pytest.raises(ValueError, match="needs a loss"):
        Recorder(awkward(), tmp_path / "run", [Activations("conv", "grad_output", on=awkward_batches(1)[0])])


def test_without_a_loss_the_model_itself_is_fed(tmp_path):
    model, x = chain(nn.Linear(3, 2)), torch.randn(5, 3)
    with Recorder(model, tmp_path / "run", [Activations("0", "output", on=x)]) as recorder, recorder.step(None):
        pass
    with torch.no_grad():
        assert cell(read_run(tmp_path / "run"), "0", "mean") == pytest.approx(model(x).mean(0)[0].item(), rel=1e-6)
