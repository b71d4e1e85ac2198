"""Drift: the network's movement alone, on the same examples, at the right point and in the right mode."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import Drift, Recorder, at, every, read_run
from diagnostics.distances import DISTANCES, distance, distances, floor
from diagnostics.probe import ProbeError
from tests.models import awkward, awkward_batches, cross_entropy, seed_everything, train

FIXED = awkward_batches(1, seed=7, size=12)[0]
PROBES = [
    lambda: Drift(["relu", "norm", "out"], FIXED),
    lambda: Drift("*norm*", FIXED, DISTANCES, shape=("energy", "ks"), reference="start", floor_every=2),
    lambda: Drift("conv", FIXED, ("ks",), signal="output", mode="population", floor_every=None, positions=3),
]


class Point(nn.Module):
    """Passes on, or adds noise where it is asked to: a layer whose input is whatever the test says."""

    def forward(self, x):
        return x


def chain(*modules):
    return nn.Sequential(*modules)


def features(n=40, width=3, seed=0):
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


def record(tmp_path, probe, model, updates=(), name="run", **options):
    """A record of one step more than ``updates``, each a function that changes the model in its step."""
    with Recorder(model, tmp_path / name, [probe], **options) as recorder:
        for update in [*updates, lambda: None]:
            with recorder.step(None):
                update()
    return read_run(tmp_path / name)


def cell(table, layer, statistic, unit=-1, step=1):
    rows = table[(table.layer == layer) & (table.statistic == statistic) & (table.unit == unit) & (table.step == step)]
    assert len(rows) == 1, (layer, statistic, unit, step)
    return rows["value"].item()


def per_unit(table, layer, statistic, step=1):
    rows = table[(table.layer == layer) & (table.statistic == statistic) & (table.unit >= 0) & (table.step == step)]
    return rows.sort_values("unit")["value"].to_numpy()


def change(module, by=0.5):
    def update():
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(by * torch.arange(parameter.numel()).reshape(parameter.shape))

    return update


@pytest.mark.parametrize("mode", ["batch", "population"])
@pytest.mark.parametrize("reference", ["previous", "start"])
def test_the_drift_of_a_network_that_stands_still_is_exactly_zero(tmp_path, mode, reference):
    seed_everything()
    model = awkward()
    if mode == "population":
        model.eval()  # running statistics are part of the network: in training they move
    probe = Drift("*", FIXED, DISTANCES, shape=("wasserstein1",), mode=mode, reference=reference, signal="output")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Recorder(model, tmp_path / "run", [probe], loss=cross_entropy) as recorder:
        train(model, optimizer, awkward_batches(3), recorder.step)
    table = read_run(tmp_path / "run")
    for name in (*DISTANCES, "shape_wasserstein1"):
        drift = table[table.statistic == name]
        assert set(drift["step"]) == {1, 2}
        assert set(drift["layer"]) >= {"conv", "norm", "relu", "relu#2", "out"}
        assert (drift["value"] == 0).all()
        assert (table[table.statistic == f"{name}_share_above_floor"]["value"] == 0).all()
        assert (table[(table.statistic == f"{name}_floor95") & (table.layer == "conv")]["value"] > 0).all()


def test_running_statistics_that_move_are_drift_in_population_mode_only(tmp_path):
    found = {}
    for mode in ("batch", "population"):
        seed_everything()
        model = awkward()
        probe = Drift("norm", FIXED, signal="output", mode=mode)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with Recorder(model, tmp_path / mode, [probe], loss=cross_entropy) as recorder:
            train(model, optimizer, awkward_batches(2), recorder.step)
        table = read_run(tmp_path / mode)
        assert set(table["mode"]) == {mode}
        found[mode] = cell(table, "norm", "mean_shift")
    assert found["batch"] == 0
    assert found["population"] > 0


def test_one_bias_moved_by_delta_is_found_on_its_unit_and_nowhere_else(tmp_path):
    torch.manual_seed(0)
    model, x, delta = chain(nn.Linear(3, 4), Point()), features(), 0.375
    with torch.no_grad():
        sd = model[0](x).numpy().astype(np.float64).std(axis=0)

    def move():
        model[0].bias.data[2] += delta

    table = record(tmp_path, Drift("1", x, ("mean_shift", "std_shift", "wasserstein1", "energy")), model, [move])
    for name in ("mean_shift", "wasserstein1"):
        assert per_unit(table, "1", name)[2] == pytest.approx(delta / sd[2], rel=1e-6)
    for name in ("mean_shift", "wasserstein1", "energy"):
        assert (np.delete(per_unit(table, "1", name), 2) == 0).all()
    assert per_unit(table, "1", "std_shift") == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("signal", ["input", "output"])
@pytest.mark.parametrize("reference", ["previous", "start"])
def test_the_numbers_are_those_of_the_distances_between_the_right_steps_at_the_right_point(tmp_path, signal, reference):
    torch.manual_seed(0)
    model, x = chain(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)), features()
    kept = []

    def values():
        with torch.no_grad():
            hidden = model[0](x)
            kept.append((hidden if signal == "input" else model[1](hidden)).numpy().copy())

    def move():
        values()
        change(model[0], 0.1)()

    probe = Drift("1", x, DISTANCES, shape=("ks", "wasserstein1"), signal=signal, reference=reference)
    table = record(tmp_path, probe, model, [move, move])
    values()
    assert set(table["probe"]) == {f"drift.{reference}"}
    assert set(table["mode"]) == {"-"}
    for step, before in (1, 0), (2, 1 if reference == "previous" else 0):
        plain = distances(DISTANCES, kept[before], kept[step]).values
        shaped = distances(("ks", "wasserstein1"), kept[before], kept[step], shape=True).values
        for name, value in (plain | {f"shape_{name}": value for name, value in shaped.items()}).items():
            np.testing.assert_array_equal(per_unit(table, "1", name, step), value)
            assert cell(table, "1", name, step=step) == np.median(value)
    assert not set(DISTANCES) & set(table[table.step == 0]["statistic"])


def test_the_floor_is_that_of_the_current_values_every_so_many_records_and_shares_use_the_latest(tmp_path):
    torch.manual_seed(0)
    model, x = chain(nn.Linear(3, 5), Point()), features()
    kept = []

    def move():
        with torch.no_grad():
            kept.append(model[0](x).numpy().copy())
        change(model[0], 0.3)()

    probe = Drift("1", x, ("ks", "energy"), shape=("energy",), floor_every=2, seed=3, when=every(2))
    table = record(tmp_path, probe, model, [move] * 9)
    assert set(table["step"]) == {0, 2, 4, 6, 8}
    assert set(table[table.statistic == "ks_floor"]["step"]) == {0, 4, 8}
    for step in (2, 4, 6, 8):
        latest = step - step % 4
        for shape in (False, True):
            prefix, names = ("shape_", ("energy",)) if shape else ("", ("ks", "energy"))
            wanted = floor(kept[latest], names, seed=3, shape=shape)
            drift = distances(names, kept[step - 2], kept[step], shape=shape).values
            for name in names:
                share = (drift[name] > wanted.percentile95[name]).mean()
                assert cell(table, "1", f"{prefix}{name}_share_above_floor", step=step) == share
                if step == latest:
                    for end, value in ("_floor", wanted.mean[name]), ("_floor95", wanted.percentile95[name]):
                        np.testing.assert_array_equal(per_unit(table, "1", f"{prefix}{name}{end}", step), value)
                        assert cell(table, "1", f"{prefix}{name}{end}", step=step) == np.median(value)
    shares = table[table.statistic == "energy_share_above_floor"]["value"]
    assert shares.min() < shares.max()  # or the comparison could be anything


def test_without_a_floor_there_are_no_shares(tmp_path):
    model = chain(nn.Linear(3, 2), Point())
    table = record(tmp_path, Drift("1", features(), floor_every=None), model, [change(model[0])])
    assert set(table["statistic"]) == {"nonfinite", "mean_shift", "std_shift", "wasserstein1"}


def test_two_disjoint_batches_exceed_the_95th_percentile_of_the_floor_in_5_percent_of_units(tmp_path):
    # The units of an identity on white noise are independent. 5% of 3,000 with a z-bound of 4: within 1.6 points.
    units = 3000
    x = features(60, units, seed=11)
    table = record(tmp_path, Drift("0", x, ("mean_shift", "std_shift", "wasserstein1", "energy")), chain(Point()))
    for name in ("mean_shift", "std_shift", "wasserstein1", "energy"):
        above = distance(name, x[:30], x[30:], paired=False) > per_unit(table, "0", f"{name}_floor95", step=0)
        assert abs(above.mean() - 0.05) < 4 * math.sqrt(0.05 * 0.95 / units)


def test_after_batch_normalization_moments_stand_still_by_construction_and_shape_does_not(tmp_path):
    torch.manual_seed(0)

    class Bend(nn.Module):
        def __init__(self):
            super().__init__()
            self.power = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            return (x.sigmoid() * 2) ** self.power

    model, x = chain(Bend(), nn.BatchNorm1d(3)), features(200) * 2
    before = nn.init.constant_(model[1].weight, 2.0)
    assert before.shape == (3,)

    def move():
        model[0].power.data.fill_(4.0)

    moments, shape = ("mean_shift", "std_shift"), ("wasserstein1",)
    probes = [
        Drift("1", x, moments, shape=shape, signal=signal, mode=mode, name=f"{signal}.{mode}")
        for signal in ("input", "output")
        for mode in ("batch", "population")
    ]
    with Recorder(model, tmp_path / "run", probes) as recorder:
        for update in (move, lambda: None):
            with recorder.step(None):
                update()
    table = read_run(tmp_path / "run")
    for point in probes:
        pinned = point.name == "output.batch"
        for name in ("mean_shift", "std_shift"):
            found = cell(table[table.probe == point.name], "1", name)
            assert found < 1e-4 if pinned else found > 0.3
        assert cell(table[table.probe == point.name], "1", "shape_wasserstein1") > 0.1


def conv_setting(channels_last=False):
    torch.manual_seed(0)
    model = chain(nn.Conv2d(1, 3, 3, padding=1), Point())
    x = torch.randn(10, 1, 6, 6, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        maps = [model(x)]
        changed = copy.deepcopy(model)
        change(changed[0], 0.05)()
        maps.append(changed(x))
    return model, x, [m.permute(0, 2, 3, 1).reshape(-1, 3).numpy() for m in maps]


def test_a_channel_is_pooled_over_examples_and_positions(tmp_path):
    model, x, (before, after) = conv_setting()
    probe = Drift("1", x, DISTANCES, positions=36)
    table = record(tmp_path, probe, model, [change(model[0], 0.05)])
    for name, value in distances(DISTANCES, before, after).values.items():
        assert per_unit(table, "1", name) == pytest.approx(value, rel=1e-4)
    wanted = floor(before, ("ks",), seed=0, block=36)  # halves of the examples, not of their positions
    assert per_unit(table, "1", "ks_floor95", step=0) == pytest.approx(wanted.percentile95["ks"], rel=1e-4)


def test_no_more_positions_are_kept_than_was_said_and_they_are_the_same_at_every_step(tmp_path):
    model, x, (before, after) = conv_setting()
    probe = Drift("1", x, ("wasserstein1",), positions=5, reference="start")
    table = record(tmp_path, probe, model, [lambda: None, change(model[0], 0.05)])
    assert probe.state()["samples"]["1"].shape == (50, 3)
    kept = probe.state()["samples"]["1"].numpy()
    assert (per_unit(table, "1", "wasserstein1") == 0).all()
    # Each kept row is a position of its own example, with all its channels; no position twice; not the same in each.
    places = []
    for example in range(10):
        rows = before[36 * example : 36 * (example + 1)]
        here = [
            int(np.flatnonzero((np.abs(rows - one) < 1e-6).all(axis=1)).item())
            for one in kept[5 * example : 5 * (example + 1)]
        ]
        assert len(set(here)) == 5
        places.append(here)
    assert len({tuple(here) for here in places}) == 10
    chosen = np.concatenate([36 * example + np.array(here) for example, here in enumerate(places)])
    wanted = distance("wasserstein1", before[chosen], after[chosen])
    assert per_unit(table, "1", "wasserstein1", step=2) == pytest.approx(wanted, rel=1e-4)


def test_the_seed_draws_the_positions_and_the_splits(tmp_path):
    found = []
    for index, seed in enumerate((1, 1, 2)):
        model, x, _ = conv_setting()
        probe = Drift("1", x, ("energy",), positions=5, seed=seed)
        table = record(tmp_path, probe, model, name=str(index))
        found.append((probe.state()["samples"]["1"], per_unit(table, "1", "energy_floor", step=0)))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])
    wide = [record(tmp_path, Drift("0", features(), ("ks",), seed=s), chain(Point()), name=f"s{s}") for s in (1, 2)]
    assert (per_unit(wide[0], "0", "ks_floor", 0) != per_unit(wide[1], "0", "ks_floor", 0)).any()


def test_unit_dim_names_the_units(tmp_path):
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    for unit_dim, wanted in ((-1, x.reshape(30, 4)), (2, x.reshape(30, 4)), (1, x.transpose(1, 2).reshape(24, 5))):
        probe = Drift("0", x, unit_dim=unit_dim)
        record(tmp_path, probe, chain(Point()), name=f"d{unit_dim}")
        assert torch.equal(probe.state()["samples"]["0"], wanted)


def test_values_that_are_not_finite_leave_both_steps_and_are_counted(tmp_path):
    x = features(30)

    class Burst(nn.Module):
        def __init__(self):
            super().__init__()
            self.hot = nn.Parameter(torch.tensor(0.0))

        def forward(self, x):
            x = x.clone()
            if self.hot > 0:
                x[:4, 1] = torch.tensor([math.nan, math.inf, -math.inf, 7.0])
                x[:, 2] = math.nan
            return x

    model = chain(Burst(), Point())

    def heat():
        model[0].hot.data.fill_(1.0)

    def cool():
        model[0].hot.data.fill_(0.0)

    table = record(tmp_path, Drift("1", x, ("wasserstein1",), floor_every=1), model, [heat, cool])
    assert per_unit(table, "1", "nonfinite", 0).tolist() == [0, 0, 0]
    for step in (1, 2):  # the examples missing at step 1 are missing in its pairs with either neighbour
        assert per_unit(table, "1", "nonfinite", step).tolist() == [0, 3, 30]
        drift = per_unit(table, "1", "wasserstein1", step)
        assert drift[0] == 0
        assert drift[1] > 0
        assert math.isnan(drift[2])
        assert cell(table, "1", "wasserstein1", step=step) == np.median(drift[:2])
    assert math.isnan(per_unit(table, "1", "wasserstein1_floor95", 1)[2])
    assert cell(table, "1", "wasserstein1_share_above_floor") == 0


def test_a_layer_without_any_finite_value_is_nan_and_stops_nothing(tmp_path):
    x = torch.full((6, 2), math.nan)
    table = record(tmp_path, Drift("0", x, shape=("ks",)), chain(Point()), [lambda: None])
    assert math.isnan(cell(table, "0", "mean_shift"))
    assert math.isnan(cell(table, "0", "shape_ks_share_above_floor"))
    assert per_unit(table, "0", "nonfinite").tolist() == [6, 6]


def test_a_probe_used_in_another_run_has_forgotten_the_first(tmp_path):
    model = chain(nn.Linear(3, 2), Point())
    probe = Drift("1", features(), reference="start")
    record(tmp_path, probe, model, [change(model[0])], name="first")
    second = record(tmp_path, probe, model, [lambda: None], name="second")
    assert (second[second.statistic == "wasserstein1"]["value"] == 0).all()
    assert (second[second.statistic == "wasserstein1_floor"]["step"] == 0).any()


def test_memory_is_the_reference_and_does_not_grow(tmp_path):
    model = chain(nn.Linear(3, 2), Point())
    probe = Drift("1", features(), floor_every=1)
    record(tmp_path, probe, model, [change(model[0])], name="short")
    short = probe.state()
    record(tmp_path, probe, model, [change(model[0], 1e-3)] * 20, name="long")
    long = probe.state()
    assert {k: v.shape for k, v in long["samples"].items()} == {k: v.shape for k, v in short["samples"].items()}
    assert long["floors"].keys() == short["floors"].keys()


def test_when_and_name_are_kept(tmp_path):
    table = record(tmp_path, Drift("0", features(), when=at(1), name="mine"), chain(Point()), [lambda: None])
    assert set(table["step"]) == {1}
    assert set(table["probe"]) == {"mine"}


def test_a_batch_that_is_too_small_is_refused_with_its_number(tmp_path):
    with pytest.raises(ProbeError, match=r"'drift.previous' failed at step 0.*at least 2 examples, got 1"):
        record(tmp_path, Drift("0", features(1)), chain(Point()), name="one")
    with pytest.raises(ProbeError, match=r"at least 4 examples, two in each half, got 3"):
        record(tmp_path, Drift("0", features(3)), chain(Point()), name="three")
    record(tmp_path, Drift("0", features(3), floor_every=None), chain(Point()), name="fine")


@pytest.mark.parametrize(("shape", "unit_dim"), [((5,), 1), ((5, 2), 0), ((5, 2), 2), ((5, 2), -2)])
def test_a_layer_without_such_units_is_refused_with_its_shape(tmp_path, shape, unit_dim):
    with pytest.raises(ProbeError, match=rf"layer '0': .*unit_dim={unit_dim}, got shape \({shape[0]},"):
        record(tmp_path, Drift("0", torch.zeros(shape), unit_dim=unit_dim), chain(Point()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"distances": ("emd",)}, "unknown distance 'emd'"),
        ({"distances": ()}, "no distance given"),
        ({"shape": "ks"}, "got the string 'ks'"),
        ({"shape": ("ks", "std_shift")}, "shape='std_shift' is 0 by construction"),
        ({"reference": "first"}, "reference must be 'previous' or 'start', got 'first'"),
        ({"signal": "grad_output"}, "signal must be 'input' or 'output', got 'grad_output'"),
        ({"mode": "step"}, "mode must be 'batch' or 'population', got 'step'"),
        ({"floor_every": 0}, "floor_every must be an integer of at least 1, got 0"),
        ({"positions": 0}, "positions must be an integer of at least 1, got 0"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": None}, "seed must be an integer of at least 0, got None"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        Drift("*", features(), **arguments)


def test_a_pattern_that_matches_nothing_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="no layer matches 'nothere'"):
        Recorder(chain(Point()), tmp_path / "run", [Drift("nothere", features())])
    assert not (tmp_path / "run").exists()
