"""The recorder: what is recorded when, and what it refuses (traps 15, 18, 20, 33, 34)."""

import json
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics import Activations, Drift, Recorder, at, every, read_run
from diagnostics.probe import ProbeError, Rows
from diagnostics.record import read_status
from diagnostics.recorder import read_checkpoint
from tests.models import assert_same, awkward, awkward_batches, cross_entropy, seed_everything, train


class Watcher:
    """An active probe that keeps what it is shown."""

    def __init__(self, look, when=None, name="watcher"):
        self.name, self.when, self.active, self.look, self.seen = name, when or every(1), True, look, []

    def bind(self, site):
        self.site = site

    def measure(self, view):
        self.seen.append(self.look(view))
        return [Rows("-", {"seen": float(view.step)})]


def setting(optimizer=torch.optim.SGD, **options):
    seed_everything()
    model = awkward()
    return model, optimizer(model.parameters(), **({"lr": 0.1} | options))


def gradients(model, loss):
    return torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])


# --- what an active probe is shown


def test_a_probes_loss_and_gradient_are_the_users_to_the_bit(tmp_path):
    model, optimizer = setting(torch.optim.Adam, lr=0.01)

    def look(view):
        found = []
        for _ in range(2):  # every evaluation starts from the same state
            with view.at() as shown:
                assert shown is model
                loss = view.loss()
                found.append((loss.detach(), gradients(model, loss)))
        return found

    watcher, users = Watcher(look), []
    with Recorder(model, tmp_path / "run", [watcher], loss=cross_entropy) as recorder:
        for batch in awkward_batches(3):
            with recorder.step(batch):
                optimizer.zero_grad()
                loss = cross_entropy(model, batch)
                loss.backward()
                users.append((loss.detach(), tuple(p.grad.clone() for p in model.parameters())))
                optimizer.step()
    for seen, user in zip(watcher.seen, users, strict=True):
        assert_same(seen, [user, user])


def test_before_is_theta_t_and_after_is_what_the_users_optimizer_made(tmp_path):
    model, optimizer = setting(torch.optim.Adam, lr=0.01)
    thetas = []

    def theta():
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    watcher = Watcher(
        lambda view: ({k: v.clone() for k, v in view.before.items()}, {k: v.clone() for k, v in view.after.items()})
    )
    with Recorder(model, tmp_path / "run", [watcher], loss=cross_entropy) as recorder:
        for batch in awkward_batches(3):
            thetas.append(theta())
            train(model, optimizer, [batch], recorder.step)
    thetas.append(theta())
    for t, (before, after) in enumerate(watcher.seen):
        assert_same(before, thetas[t])
        assert_same(after, thetas[t + 1])


def test_at_mixes_parameters_and_leaves_the_rest_at_theta_t(tmp_path):
    model, optimizer = setting()

    def look(view):
        with view.at({"out.bias": torch.full((3,), 7.0)}):
            assert torch.equal(model.out.bias, torch.full((3,), 7.0))
            assert torch.equal(model.first.weight, view.before["first.weight"])
        assert torch.equal(model.out.bias, view.after["out.bias"])
        with pytest.raises(ValueError, match="no parameter 'nothere'"), view.at({"nothere": torch.zeros(1)}):
            pass
        return True

    watcher = Watcher(look)
    with Recorder(model, tmp_path / "run", [watcher], loss=cross_entropy) as recorder:
        train(model, optimizer, awkward_batches(1), recorder.step)
    assert watcher.seen == [True]


class Overwrites(nn.Module):
    """Works in place on its input, as careless models do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x.sub_(1.5).mul_(2))


def test_a_forward_that_works_in_place_on_its_input_changes_neither_the_step_nor_the_probe_batch(tmp_path):
    data, targets = torch.randn(12, 3), torch.randint(2, (4,))
    probe_data = data[8:]  # a view: what overwrote it would overwrite the user's data
    model = Overwrites()
    kept, users = data.clone(), []

    def look(view):
        with view.at(mode="population"):
            on_probe = [float(view.forward((probe_data, targets)).detach()) for _ in range(2)]
        with view.at():
            on_batch = [float(view.loss().detach()) for _ in range(2)]
        return on_probe, on_batch

    watcher = Watcher(look)
    with Recorder(model, tmp_path / "run", [watcher], loss=cross_entropy) as recorder:
        batch = (data[:4], targets)
        with recorder.step(batch):
            users.append(float(cross_entropy(model, batch).detach()))
    (on_probe, on_batch) = watcher.seen[0]
    assert on_batch == [users[0]] * 2
    assert on_probe[0] == on_probe[1] == float(cross_entropy(model, (kept[8:].clone(), targets)).detach())
    assert torch.equal(data[4:], kept[4:])

    plain = Watcher(lambda view: view.forward(probe_data).detach().clone())
    with Recorder(model, tmp_path / "plain", [plain]) as recorder, recorder.step(probe_data):
        pass
    assert torch.equal(data[4:], kept[4:])


def test_at_puts_training_flags_and_gradients_where_the_step_had_them(tmp_path):
    model, _ = setting()
    model.norm.eval()  # a frozen normalizer

    def look(view):
        with torch.no_grad(), view.at() as shown:
            flags = [module.training for module in shown.modules()]
            return flags, view.loss().requires_grad

    watcher = Watcher(look)
    wanted = [module.training for module in model.modules()]
    with Recorder(model, tmp_path / "run", [watcher], loss=cross_entropy) as recorder:
        with recorder.step(awkward_batches(1)[0]):
            model.eval()
    assert watcher.seen == [(wanted, True)]


def test_the_mode_of_a_passive_probe_is_batch_where_any_normalizer_uses_its_batch(tmp_path):
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    for name, frozen, mode in (("none", 0, "batch"), ("one", 1, "batch"), ("both", 2, "population")):
        model.train()
        for index in range(frozen):
            model[index].eval()
        with Recorder(model, tmp_path / name, [Activations("1")]) as recorder, recorder.step(None):
            model(torch.randn(4, 2))
        assert set(read_run(tmp_path / name)["mode"]) == {mode}


def test_a_forward_that_raised_and_was_tried_again_leaves_one_record_of_the_second(tmp_path):
    model = nn.Sequential(OrderedDict(twice=nn.Identity(), last=nn.Linear(2, 2)))
    with Recorder(model, tmp_path / "run", [Activations("twice")]) as recorder, recorder.step(None):
        with suppress(RuntimeError):
            model(torch.full((3, 5), 9.0))  # of the wrong width: `last` raises
        model(torch.ones(3, 2))
    table = read_run(tmp_path / "run")
    assert set(table["layer"]) == {"twice"}
    assert table[table["statistic"] == "mean"]["value"].tolist() == [1.0, 1.0]


class Partial(nn.Module):
    """A frozen parameter, and a layer that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(2, 2), nn.Linear(2, 1), nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        return self.last(self.first(x))


def test_a_gradient_on_a_probe_batch_is_taken_past_what_is_frozen_and_what_is_unused(tmp_path):
    model, x = Partial(), torch.randn(4, 2)
    probe = Activations("first", "grad_output", on=x)
    with Recorder(model, tmp_path / "run", [probe], loss=lambda m, b: m(b).sum()) as recorder, recorder.step(x):
        pass
    means = read_run(tmp_path / "run", statistic="mean")["value"]
    assert means.tolist() == pytest.approx(model.last.weight[0].tolist())
    model.requires_grad_(False)
    with pytest.raises(ProbeError, match="every parameter of the model is frozen"):
        with Recorder(model, tmp_path / "b", [probe], loss=lambda m, b: m(b).sum()) as recorder, recorder.step(x):
            pass


def test_a_model_whose_parameters_are_not_there_yet_is_refused(tmp_path):
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="parameter '0.weight' has no shape yet: run the model once"):
        Recorder(model, tmp_path / "run", [])


@pytest.mark.parametrize("make", [lambda x: Drift("0", x, floor_every=None), lambda x: Activations("0", on=x)])
def test_a_probe_batch_is_kept_as_it_was_handed_over(tmp_path, make):
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.randn(6, 2)
    with Recorder(model, tmp_path / "run", [make(x)]) as recorder:
        for _ in range(3):
            with recorder.step(None):
                x += 1
    table = read_run(tmp_path / "run")
    moved = table[table["statistic"].isin(["mean_shift", "mean"])].groupby("unit")["value"]
    assert (moved.max() == moved.min()).all()


def test_modes_reach_the_model(tmp_path):
    model, optimizer = setting()

    def look(view):
        flags = []
        for mode in ("step", "batch", "population"):
            with view.at(mode=mode):
                flags.append((model.norm.training, model.drop.training))
        return flags

    watcher = Watcher(look)
    with Recorder(model, tmp_path / "run", [watcher]) as recorder:
        train(model, optimizer, awkward_batches(1), recorder.step)
    assert watcher.seen == [[(True, True), (True, False), (False, False)]]


def test_the_learning_rate_is_the_one_of_this_step_and_none_where_it_is_not_one_number(tmp_path):
    model, optimizer = setting()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    watcher = Watcher(lambda view: view.learning_rate)
    with Recorder(model, tmp_path / "run", [watcher], optimizer=optimizer) as recorder:
        for batch in awkward_batches(3):
            with recorder.step(batch):
                optimizer.zero_grad()
                cross_entropy(model, batch).backward()
                optimizer.step()
                schedule.step()
    assert watcher.seen == [0.1, 0.05, 0.025]
    groups = torch.optim.SGD([{"params": [model.out.weight], "lr": 0.1}, {"params": [model.out.bias], "lr": 0.2}])
    with Recorder(model, tmp_path / "two", [watcher], optimizer=groups) as recorder, recorder.step(None):
        pass
    assert watcher.seen[-1] is None


def test_a_loss_that_is_none_or_no_number_is_refused_with_the_probe_and_step(tmp_path):
    model, optimizer = setting()
    watcher = Watcher(lambda view: view.loss())
    with pytest.raises(ProbeError, match="probe 'watcher' failed at step 0: this probe needs a loss"):
        with Recorder(model, tmp_path / "a", [watcher]) as recorder:
            train(model, optimizer, awkward_batches(1), recorder.step)
    with pytest.raises(ProbeError, match=r"the loss must be one number, loss\(model, batch\) returned \(8, 3\)"):
        with Recorder(model, tmp_path / "b", [watcher], loss=lambda m, b: m(b[0])["logits"]) as recorder:
            train(model, optimizer, awkward_batches(1), recorder.step)


def test_a_generator_that_no_module_holds_is_put_back_when_named(tmp_path):
    own = torch.Generator().manual_seed(1)
    model = nn.Linear(2, 2)

    def loss(model, batch):
        return (model(batch) * torch.rand(2, generator=own)).sum()

    def after(generators, folder):
        own.manual_seed(1)
        watcher = Watcher(lambda view: view.loss())
        with Recorder(model, tmp_path / folder, [watcher], loss=loss, generators=generators) as recorder:
            with recorder.step(torch.ones(2)):
                loss(model, torch.ones(2))
        return own.get_state()

    named, forgotten = after([own], "a"), after([], "b")
    own.manual_seed(1)
    torch.rand(2, generator=own)
    assert torch.equal(named, own.get_state())
    assert not torch.equal(forgotten, own.get_state())


# --- what is recorded, and when


def test_only_the_first_forward_of_a_step_is_recorded_and_the_others_are_counted(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    with Recorder(model, tmp_path / "run", [Activations("0")]) as recorder, recorder.step(x):
        model(x)  # gradient accumulation: two forwards, one step
        model(y)
    table = read_run(tmp_path / "run", statistic="mean")
    assert table["value"].tolist() == pytest.approx(x.double().mean(0).tolist())
    assert read_status(tmp_path / "run").counts["forwards_beyond_the_first"] == 1


def test_log_writes_at_the_number_of_updates_done_and_is_dropped_with_a_step_that_raises(tmp_path):
    model = nn.Linear(2, 2)
    with Recorder(model, tmp_path / "run", []) as recorder:
        recorder.log("accuracy", 0.1, mode="population")
        with recorder.step(None):
            recorder.log("loss", 3.0)
        recorder.log("accuracy", float("inf"), mode="population")
        with suppress(KeyError), recorder.step(None):
            recorder.log("loss", 2.0)
            raise KeyError
        with recorder.step(None):
            recorder.log("loss", 1.0)
    table = read_run(tmp_path / "run")
    rows = [(r.step, r.probe, r.layer, r.unit, r.statistic, r.mode, r.value) for r in table.itertuples()]
    assert sorted(rows) == [
        (0, "log", "-", -1, "accuracy", "population", 0.1),
        (0, "log", "-", -1, "loss", "-", 3.0),
        (1, "log", "-", -1, "accuracy", "population", float("inf")),
        (1, "log", "-", -1, "loss", "-", 1.0),
    ]


def test_the_same_number_cannot_be_logged_twice(tmp_path):
    with pytest.raises(ValueError, match="accuracy"), Recorder(nn.Linear(2, 2), tmp_path / "run", []) as recorder:
        recorder.log("accuracy", 0.1)
        recorder.log("accuracy", 0.2)


@pytest.mark.parametrize(
    ("error", "status"), [(None, "complete"), (ValueError("no"), "failed"), (KeyboardInterrupt(), "running")]
)
def test_the_status_says_how_it_ended(tmp_path, error, status):
    with suppress(ValueError, KeyboardInterrupt), Recorder(nn.Linear(2, 2), tmp_path / "run", []) as recorder:
        recorder.log("x", 1.0)
        if error is not None:
            raise error
    found = read_status(tmp_path / "run")
    assert found.status == status
    if status == "failed":
        assert "ValueError: no" in found.error


def test_a_diverged_run_has_a_status_of_its_own(tmp_path):
    with Recorder(nn.Linear(2, 2), tmp_path / "run", []) as recorder:
        recorder.stop("diverged")
        with pytest.raises(ValueError, match="'complete' or 'diverged', got 'bored'"):
            recorder.stop("bored")
    assert read_status(tmp_path / "run").status == "diverged"


def test_a_probe_that_fails_in_a_hook_is_raised_after_the_users_update(tmp_path, monkeypatch):
    model, optimizer = setting()
    probe = Activations("relu")
    monkeypatch.setattr(probe, "_hear", lambda tensor: 1 / 0)
    before = model.out.bias.detach().clone()
    reached = False
    with pytest.raises(ProbeError, match="probe 'activations.input' failed at step 0, layer 'relu': division by zero"):
        with Recorder(model, tmp_path / "run", [probe], loss=cross_entropy) as recorder, recorder.step(None):
            optimizer.zero_grad()
            cross_entropy(model, awkward_batches(1)[0]).backward()
            optimizer.step()
            reached = True
    assert reached
    assert not torch.equal(model.out.bias, before)
    assert read_status(tmp_path / "run").status == "failed"
    assert "activations.input" in read_status(tmp_path / "run").error


def test_of_two_probes_on_one_layer_the_one_that_failed_is_named(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2))
    good, bad = Activations("0", name="good"), Activations("0", name="bad")
    monkeypatch.setattr(bad, "_hear", lambda tensor: 1 / 0)
    with pytest.raises(ProbeError, match="probe 'bad'"), Recorder(model, tmp_path / "run", [good, bad]) as recorder:
        with recorder.step(None):
            model(torch.randn(3, 2))
    assert read_run(tmp_path / "run").empty  # nothing of that step, the good probe's part included


def test_silence_is_an_error_on_the_first_due_step_and_counted_later(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ProbeError, match="the recorded model itself was not called"):
        with Recorder(model, tmp_path / "a", [Activations("0")]) as recorder, recorder.step(None):
            model[0](torch.randn(3, 2))
    with Recorder(model, tmp_path / "b", [Activations("0")]) as recorder:
        for quiet in (False, True, True):
            with recorder.step(None):
                if not quiet:
                    model(torch.randn(3, 2))
    assert read_status(tmp_path / "b").counts["silent_steps_activations.input"] == 2


def test_a_model_compiled_before_fails_loudly_and_with_hook_guards_it_is_heard(tmp_path):
    def compiled():
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        return model, torch.compile(model, backend="eager")

    x = torch.randn(3, 2)
    _, fast = compiled()
    fast(x)
    with pytest.raises(ProbeError, match="skip_nnmodule_hook_guards = False"):
        with Recorder(fast, tmp_path / "a", [Activations("0", "output")]) as recorder, recorder.step(x):
            fast(x)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        model, fast = compiled()
        fast(x)
        with Recorder(fast, tmp_path / "b", [Activations("0", "output", when=at(1))]) as recorder:
            for _ in range(3):
                with recorder.step(x):
                    fast(x)
    table = read_run(tmp_path / "b", statistic="mean")
    assert set(table["step"]) == {1}
    assert set(table["layer"]) == {"0"}
    with torch.no_grad():
        assert table["value"].tolist() == pytest.approx(model[0](x).double().mean(0).tolist(), abs=1e-6)
    torch._dynamo.reset()


# --- folders, checkpoints, resuming


def test_an_existing_folder_is_refused_and_overwritten_only_when_asked(tmp_path):
    model = nn.Linear(2, 2)
    with Recorder(model, tmp_path / "run", []) as recorder:
        recorder.log("x", 1.0)
    with pytest.raises(ValueError, match="exist"), Recorder(model, tmp_path / "run", []):
        pass
    assert read_run(tmp_path / "run")["value"].tolist() == [1.0]
    with Recorder(model, tmp_path / "run", [], overwrite=True) as recorder:
        recorder.log("x", 2.0)
    assert read_run(tmp_path / "run")["value"].tolist() == [2.0]


def test_two_probes_of_one_name_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"two probes are called 'activations.input'"):
        Recorder(awkward(), tmp_path / "run", [Activations("relu"), Activations("norm")])
    with pytest.raises(ValueError, match="no layer matches"):
        Recorder(awkward(), tmp_path / "run", [Activations("nothere")])
    assert not (tmp_path / "run").exists()


def test_the_checkpoint_comes_with_each_part_and_names_the_next(tmp_path):
    model, optimizer = setting()
    seen = []

    def keep():
        seen.append(recorder.steps_done)
        return {"theta": {k: v.clone() for k, v in model.state_dict().items()}, "note": [1, "two"]}

    with Recorder(model, tmp_path / "run", [], part_every=2, checkpoint=keep) as recorder:
        train(model, optimizer, awkward_batches(5), recorder.step)
    assert seen == [2, 4, 5]
    saved = read_checkpoint(tmp_path / "run")
    assert (saved["step"], saved["next_part"], saved["user"]["note"]) == (5, 3, [1, "two"])
    assert_same(saved["user"]["theta"], dict(model.state_dict()))


def test_equal_checkpoints_are_equal_files(tmp_path):
    for name in ("a", "b"):
        with Recorder(nn.Linear(2, 2), tmp_path / name, [], checkpoint=lambda: {"x": torch.ones(2)}) as recorder:
            recorder.log("x", 1.0)
    assert (tmp_path / "a/checkpoint.pt").read_bytes() == (tmp_path / "b/checkpoint.pt").read_bytes()


def test_a_checkpoint_that_could_not_be_read_back_is_refused_at_once(tmp_path):
    with (
        pytest.raises(ValueError, match="tensors and plain containers only"),
        Recorder(nn.Linear(2, 2), tmp_path / "run", [], part_every=1, checkpoint=lambda: {"x": np.ones(2)}) as recorder,
        recorder.step(None),
    ):
        pass


class Remembers(Watcher):
    """Writes how often it was asked, which a resume must not forget."""

    def __init__(self):
        super().__init__(lambda view: None)
        self.count = 0

    def measure(self, view):
        self.count += 1
        return [Rows("-", {"asked": float(self.count)})]

    def state(self):
        return {"count": self.count}

    def load(self, state):
        self.count = state["count"]


def test_a_probe_with_memory_goes_on_where_it_was_and_refuses_to_guess(tmp_path):
    model = nn.Linear(2, 2)

    def run(start, stop, **options):
        with Recorder(model, tmp_path / "run", [Remembers()], start=start, part_every=2, **options) as recorder:
            for _ in range(start, stop):
                with recorder.step(None):
                    pass
            if stop < 6:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(0, 5)
    with pytest.raises(ValueError, match=r"'watcher' cannot go on from step 3: the checkpoint is at step 4"):
        run(3, 6)
    run(4, 6)
    assert read_run(tmp_path / "run", statistic="asked")["value"].tolist() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="there is no checkpoint"):
        Recorder(model, tmp_path / "other", [Remembers()], start=2)


def test_the_configuration_of_a_bare_recorder_describes_its_probes(tmp_path):
    probes = [Activations("relu", on=awkward_batches(1)[0], when=every(7))]
    with Recorder(awkward(), tmp_path / "run", probes) as recorder:
        recorder.log("x", 1.0)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    described = config["probes"][0]
    assert described["when"] == "every(7)"
    assert described["on"] == ["Tensor(8, 1, 6, 6) torch.float32", "Tensor(8,) torch.int64"]
    assert " at 0x" not in json.dumps(config)


def test_changing_directory_does_not_move_the_record(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with Recorder(nn.Linear(2, 2), "run", [], part_every=1) as recorder:
        monkeypatch.chdir(tmp_path / "elsewhere")
        with recorder.step(None):
            pass
    assert read_checkpoint(tmp_path / "run")["step"] == 1
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_checkpoint_is_named_with_what_to_do(tmp_path, damage):
    model = nn.Linear(2, 2)
    with suppress(KeyboardInterrupt), Recorder(model, tmp_path / "run", [], part_every=1) as recorder:
        with recorder.step(None):
            pass
        raise KeyboardInterrupt
    file = tmp_path / "run" / "checkpoint.pt"
    if damage is None:
        torch.save({"something": "else"}, file)
    else:
        file.write_bytes(damage)
    with pytest.raises(ValueError, match=r"checkpoint.pt is (damaged|no checkpoint).*remove .*run to start"):
        Recorder(model, tmp_path / "run", [], start=1)


def test_a_checkpoint_that_cannot_be_written_fails_the_run(tmp_path, monkeypatch):
    def full(saved, file):
        if isinstance(file, Path):
            file.write_bytes(b"half")
            raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")
        return kept(saved, file)

    kept = torch.save
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ValueError, match=r"cannot write .*checkpoint.pt: .*No space left"):
        with Recorder(nn.Linear(2, 2), tmp_path / "run", []) as recorder:
            recorder.log("x", 1.0)
    status = read_status(tmp_path / "run")
    assert status.status == "failed"
    assert "No space left" in status.error
    assert not list((tmp_path / "run").glob("*.tmp"))


@pytest.mark.parametrize("part", ["when", "taps", "state"])
def test_whatever_of_a_probe_fails_the_error_names_it_and_the_step(tmp_path, part):
    class Bad(Activations):
        def fail(self, *_):
            raise KeyError("oops")

        def state(self):
            return self.fail() if part == "state" else {}

        def load(self, state):
            pass

    model = nn.Sequential(nn.Linear(2, 2))
    probe = Bad("0")
    if part != "state":
        setattr(probe, part, probe.fail)
    with pytest.raises(ProbeError, match=r"probe 'bad.input' failed at step [01]: 'oops'"):
        with Recorder(model, tmp_path / "run", [probe], part_every=1) as recorder, recorder.step(None):
            model(torch.ones(3, 2))
    assert read_status(tmp_path / "run").status == "failed"


def test_misuse_is_named(tmp_path):
    recorder = Recorder(nn.Linear(2, 2), tmp_path / "run", [])
    with pytest.raises(RuntimeError, match="not open"), recorder.step(None):
        pass
    with recorder, pytest.raises(RuntimeError, match="inside another"), recorder.step(None), recorder.step(None):
        pass
    with pytest.raises(RuntimeError, match="used already"), recorder:
        pass


def test_a_number_is_no_schedule_and_that_is_said_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"when of probe 'activations.input' is a schedule.*every\(100\), got 5"):
        Recorder(nn.Linear(4, 3), tmp_path / "run", [Activations("", when=5)])
