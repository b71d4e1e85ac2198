"""The contract that every probe keeps, whoever wrote it.

Probes are found by walking the package. A module that defines one has a test module of its own with ``PROBES``:
functions that make fresh probes able to work on `tests.models.Awkward`. So a new measure joins by being written.
"""

from __future__ import annotations

import pkgutil
from contextlib import nullcontext, suppress
from importlib import import_module

import pytest
import torch

import diagnostics
from diagnostics.probe import ProbeError, StatefulProbe
from diagnostics.record import read_run
from diagnostics.recorder import Recorder
from tests.models import (
    Awkward,
    assert_same,
    awkward,
    awkward_batches,
    cross_entropy,
    everything,
    seed_everything,
    train,
)

STEPS = 5


def probe_modules():
    for info in pkgutil.iter_modules(diagnostics.__path__):
        module = import_module(f"diagnostics.{info.name}")
        defined = [
            value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__
        ]
        # What probes have in common may be a class that measures nothing itself.
        whole = [c for c in defined if hasattr(c, "bind") and (hasattr(c, "measure") or hasattr(c, "taps"))]
        classes = [c for c in whole if not getattr(c, "_is_protocol", False)]
        if classes:
            yield info.name, classes


def examples():
    for name, classes in probe_modules():
        makers = import_module(f"tests.diagnostics.test_{name}").PROBES
        made = {type(make()) for make in makers}
        assert made == set(classes), (
            f"tests/diagnostics/test_{name}.py: PROBES must make every probe of diagnostics/{name}.py"
        )
        for index, make in enumerate(makers):
            yield pytest.param(make, id=f"{name}-{index}")


every_probe = pytest.mark.parametrize("make", list(examples()))


def setting(seed: int = 0):
    seed_everything(seed)
    model = awkward(seed)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3), awkward_batches(STEPS)


def bare(stop: int = STEPS):
    model, optimizer, batches = setting()
    losses = train(model, optimizer, batches[:stop], lambda batch: nullcontext())
    return everything(model, optimizer), losses


def recorder(model, optimizer, folder, probes, **options):
    return Recorder(model, folder, probes, loss=cross_entropy, optimizer=optimizer, **options)


@every_probe
def test_training_is_bit_identical(make, tmp_path):
    wanted, wanted_losses = bare()
    model, optimizer, batches = setting()
    with recorder(model, optimizer, tmp_path / "run", [make()]) as r:
        losses = train(model, optimizer, batches, r.step)
    assert losses == wanted_losses
    assert_same(everything(model, optimizer), wanted)


@every_probe
def test_training_is_bit_identical_when_the_users_block_raises(make, tmp_path):
    wanted, _ = bare(2)
    model, optimizer, batches = setting()
    probe = make()
    with recorder(model, optimizer, tmp_path / "run", [probe]) as r:
        train(model, optimizer, batches[:2], r.step)
        before = everything(model, optimizer)
        with pytest.raises(ZeroDivisionError), r.step(batches[2]):
            raise ZeroDivisionError
        assert_same(everything(model, optimizer), before)
        assert r.steps_done == 2
    assert_same(everything(model, optimizer), wanted)
    table = read_run(tmp_path / "run")
    assert table["step"].max() < 2


@every_probe
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_probe_that_raises_leaves_the_model_as_the_users_update_made_it(make, error, tmp_path, monkeypatch):
    wanted, _ = bare(1)
    model, optimizer, batches = setting()
    probe = make()
    kept = probe.measure if probe.active else probe.collect

    def fails(*args):
        list(kept(*args))  # raise as late as can be, with everything moved that it moves
        raise error("on purpose")

    monkeypatch.setattr(probe, "measure" if probe.active else "collect", fails)
    wrapped = ProbeError if error is RuntimeError else error
    with pytest.raises(wrapped) as caught, recorder(model, optimizer, tmp_path / "run", [probe]) as r:
        train(model, optimizer, batches[:1], r.step)
    if error is RuntimeError:
        assert repr(probe.name) in str(caught.value)
        assert "step 0" in str(caught.value)
    assert_same(everything(model, optimizer), wanted)
    table = read_run(tmp_path / "run")
    assert table.empty
    assert table.attrs["status"] == ("failed" if error is RuntimeError else "running")


@every_probe
def test_not_due_means_no_hook_and_no_copy(make, tmp_path):
    model, optimizer, batches = setting()
    probe = make()
    probe.when = lambda step: step == 2
    with recorder(model, optimizer, tmp_path / "run", [probe]) as r:
        for t, batch in enumerate(batches):
            with r.step(batch):
                hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
                assert hooked == (t == 2 and not probe.active)
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
    assert set(read_run(tmp_path / "run")["step"]) == {2}


@every_probe
def test_two_runs_write_the_same_bytes(make, tmp_path):
    for folder in ("a", "b"):
        model, optimizer, batches = setting()
        with recorder(model, optimizer, tmp_path / folder, [make()]) as r:
            train(model, optimizer, batches, r.step)
    names = sorted(path.name for path in (tmp_path / "a" / "records").iterdir())
    assert names
    for name in names:
        assert (tmp_path / "a/records" / name).read_bytes() == (tmp_path / "b/records" / name).read_bytes()


@every_probe
def test_interrupted_and_resumed_writes_the_same_bytes(make, tmp_path):
    model, optimizer, batches = setting()
    with recorder(model, optimizer, tmp_path / "whole", [make()], part_every=2) as r:
        train(model, optimizer, batches, r.step)

    model, optimizer, batches = setting()
    saved = {}

    def keep():  # the training's own state, kept by the test as a user would keep it
        saved[r.steps_done] = everything(model, optimizer)
        states[r.steps_done] = (model.state_dict(), optimizer.state_dict(), torch.get_rng_state())
        return {"random": torch.get_rng_state()}

    states: dict = {}
    with (
        suppress(KeyboardInterrupt),
        recorder(model, optimizer, tmp_path / "cut", [make()], part_every=2, checkpoint=keep) as r,
    ):
        train(model, optimizer, batches[:3], r.step)
        raise KeyboardInterrupt
    model, optimizer, batches = setting()
    train(model, optimizer, batches[:2], lambda batch: nullcontext())  # the same two updates again: bit-identical
    assert_same(everything(model, optimizer), saved[2])
    with recorder(model, optimizer, tmp_path / "cut", [make()], part_every=2, start=2, checkpoint=keep) as r:
        assert_same(r.restored["random"], torch.get_rng_state())
        train(model, optimizer, batches[2:], r.step)
    for path in sorted((tmp_path / "whole" / "records").iterdir()):
        assert (tmp_path / "cut" / "records" / path.name).read_bytes() == path.read_bytes()


@every_probe
def test_a_record_is_made_of_the_schemas_rows(make, tmp_path):
    model, optimizer, batches = setting()
    probe = make()
    with recorder(model, optimizer, tmp_path / "run", [probe]) as r:
        train(model, optimizer, batches, r.step)
    table = read_run(tmp_path / "run")
    assert set(table["probe"]) == {probe.name}
    assert set(table["mode"]) <= {"batch", "population"}  # this model has normalizers
    assert set(table["step"]) == set(range(STEPS))
    assert (table["unit"] >= -1).all()
    assert not table.duplicated(["step", "probe", "layer", "unit", "statistic", "mode"]).any()
    names = {name for name, _ in model.named_modules() if name} | {"-"}
    assert {layer.split("#")[0] for layer in table["layer"].unique()} <= names


@every_probe
def test_what_remembers_says_so(make):
    probe = make()
    assert isinstance(probe, StatefulProbe) == hasattr(probe, "state")


def test_the_model_of_these_tests_is_awkward():
    """If it were not random in each way, bit-identity would prove little."""
    model, optimizer, batches = setting()
    before = everything(model, optimizer)
    train(model, optimizer, batches[:1], lambda batch: nullcontext())
    after = everything(model, optimizer)
    for key in ("python", "numpy", "torch", "noise.generator", "noise.numpy", "buffer norm.running_mean", "calls"):
        with pytest.raises(AssertionError):
            assert_same(after.get(key, after.get(f".{key}")), before.get(key, before.get(f".{key}")))
    assert isinstance(model, Awkward)
