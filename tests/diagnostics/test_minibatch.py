"""MinibatchShift: an exact split, and its two ends."""

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import MinibatchShift, Recorder, at, read_run
from diagnostics.probe import ProbeError
from tests.models import awkward_batches

POOL = awkward_batches(1, seed=11, size=20)[0]
PROBES = [
    lambda: MinibatchShift(["relu", "norm1"], POOL),
    lambda: MinibatchShift("out", POOL, signal="output", mode="population", name="other"),
]


def pool(n=30, seed=3):
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))


def record(tmp_path, probe, *, lr=0.0, steps=1, size=10, delta=None, batches=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3))
    used = []
    with Recorder(model, tmp_path / "run", [probe]) as recorder:
        for step in range(steps):
            batch = pool(size, seed=100 + step) if batches is None else batches[step]
            used.append((batch, {name: p.detach().clone() for name, p in model.named_parameters()}))
            with recorder.step(batch):
                model(batch)
                if delta is not None:
                    with torch.no_grad():
                        model[0].bias[1] += delta
                if lr:
                    with torch.no_grad():
                        model[0].weight += lr
    return model, used, read_run(tmp_path / "run")


def values(table, statistic, step=0):
    rows = table[(table.statistic == statistic) & (table.step == step)].sort_values("unit")
    return rows["value"].to_numpy()


def test_the_three_numbers_are_those_written_out_by_hand(tmp_path):
    examples = pool(30)
    model, used, table = record(tmp_path, MinibatchShift("0", examples, signal="output"), lr=0.3, steps=3)
    for step, (batch, theta) in enumerate(used):
        after = used[step + 1][1] if step + 1 < len(used) else dict(model.named_parameters())
        other = examples[[(step * 10 + k) % 30 for k in range(10)]].double()

        def mean(x, parameters):
            return (x.double() @ parameters["0.weight"].T.double() + parameters["0.bias"].double()).detach()

        here, there, moved = mean(batch, theta), mean(other, theta), mean(other, after)
        sd = here.std(0, correction=0)
        wanted = {
            "mean_change": moved.mean(0) - here.mean(0),
            "mean_change_sampling": there.mean(0) - here.mean(0),
            "mean_change_parameters": moved.mean(0) - there.mean(0),
        }
        for statistic, change in wanted.items():
            scaled = (change / sd).numpy()
            found = values(table, statistic, step)
            assert found[1:] == pytest.approx(np.abs(scaled), rel=1e-4, abs=1e-6)
            assert found[0] == pytest.approx(np.sqrt((scaled**2).mean()), rel=1e-4, abs=1e-6)


def test_a_network_at_rest_changes_by_sampling_alone(tmp_path):
    _, _, table = record(tmp_path, MinibatchShift("0", pool(), signal="output"))
    assert (values(table, "mean_change_parameters") == 0).all()
    assert (values(table, "mean_change") == values(table, "mean_change_sampling")).all()
    assert (values(table, "mean_change") > 0).all()


def test_a_batch_beside_itself_changes_by_parameters_alone_and_by_the_planted_amount(tmp_path):
    batch = pool(10, seed=5)
    probe = MinibatchShift("0", batch, signal="output")
    _, used, table = record(tmp_path, probe, delta=0.25, batches=[batch])
    assert (values(table, "mean_change_sampling") == 0).all()
    theta = used[0][1]
    sd = (batch @ theta["0.weight"].T + theta["0.bias"]).std(0, correction=0)[1].item()
    found = values(table, "mean_change_parameters")
    assert found[[1, 3]].tolist() == [0, 0]
    assert found[2] == pytest.approx(0.25 / sd, rel=1e-5)


def test_the_signal_the_mode_the_name_and_the_schedule_are_kept(tmp_path):
    norm = nn.BatchNorm1d(2)
    examples = pool(40) + 3
    for mode in ("batch", "population"):
        probe = MinibatchShift("0", examples, signal="output", mode=mode, when=at(1), name="mine")
        with Recorder(nn.Sequential(norm), tmp_path / mode, [probe]) as recorder:
            for _ in range(2):
                with recorder.step(pool(20)):
                    pass
        table = read_run(tmp_path / mode)
        assert set(table["step"]) == {1}
        assert set(table["probe"]) == {"mine"}
        assert set(table["mode"]) == {mode}
        pinned = values(table, "mean_change", 1).max() < 1e-6
        assert pinned == (mode == "batch")


def test_a_unit_without_spread_is_zero_at_rest_and_infinite_when_it_moves(tmp_path):
    model = nn.Sequential(nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)
    with Recorder(model, tmp_path / "run", [MinibatchShift("0", pool(), signal="output")]) as recorder:
        for step in range(2):
            with recorder.step(pool(10)), torch.no_grad():
                model[0].bias += float(step)
    table = read_run(tmp_path / "run")
    assert values(table, "mean_change", 0).tolist() == [0, 0]
    assert values(table, "mean_change", 1).tolist() == [np.inf, np.inf]


def test_nonsense_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="signal must be 'input' or 'output', got 'grad_output'"):
        MinibatchShift("0", pool(), signal="grad_output")
    with pytest.raises(ValueError, match="mode must be 'batch' or 'population', got 'step'"):
        MinibatchShift("0", pool(), mode="step")
    with pytest.raises(ValueError, match="pool holds no examples"):
        MinibatchShift("0", pool()[:0])
    with pytest.raises(ProbeError, match="unit_dim=3, got shape"):
        record(tmp_path, MinibatchShift("0", pool(), unit_dim=3))
