"""Conversion: on a residual network in plain torch, everything but the normalization stays what and where it was."""

import copy
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from experiments.convert import convert, converted, restore
from experiments.networks import mlp
from experiments.normalizers import Batch, Ghost, NoiseLaw, NoisyBatch, Population

SILENT = NoiseLaw(strength=0)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


class Block(nn.Module):
    def __init__(self, incoming: int, outgoing: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(incoming, outgoing, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outgoing)
        self.conv2 = nn.Conv2d(outgoing, outgoing, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outgoing, momentum=0.2)
        self.shortcut = nn.Identity()
        if stride != 1 or incoming != outgoing:
            self.shortcut = nn.Sequential(nn.Conv2d(incoming, outgoing, 1, stride), nn.BatchNorm2d(outgoing, eps=1e-3))

    def forward(self, x):
        hidden = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x), inplace=True)


class Residual(nn.Module):
    """A small residual network: nothing of ours, batch norms of several kinds, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([Block(4, 4, 1), Block(4, 8, 2)])
        self.first = self.second = nn.BatchNorm1d(8, momentum=None)
        self.instance = nn.InstanceNorm1d(8, affine=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.instance(x.flatten(2)).mean(2) + x.mean((2, 3))
        return self.head(self.second(torch.tanh(self.first(x))))


NORMS = ["stem.1", "blocks.0.bn1", "blocks.0.bn2", "blocks.1.bn1", "blocks.1.bn2", "blocks.1.shortcut.1", "first"]


def residual() -> Residual:
    torch.manual_seed(0)
    return Residual()


def train(model, optimizer, steps=3, start=0):
    for step in range(start, start + steps):
        batch = torch.randn(6, 3, 8, 8, generator=generator(step))
        loss = F.cross_entropy(model(batch), torch.arange(6) % 5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def assert_same_state(model, other):
    state, expected = model.state_dict(), other.state_dict()
    assert [name for name in state if "_extra_state" not in name] == list(expected)
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


TARGETS = {
    "noisy": {"generator": generator(), "law": SILENT},
    "ghost": {"group": 6},
    "population": {},
}


@pytest.mark.parametrize(("to", "kind"), [("noisy", NoisyBatch), ("ghost", Ghost), ("population", Population)])
def test_every_batch_norm_becomes_the_target_and_nothing_else_changes(to, kind):
    model = residual()
    modules = dict(model.named_modules())
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    model.blocks[1].eval()
    model.stem[1].weight.requires_grad_(False)
    flags = {name: module.training for name, module in modules.items()}
    assert convert(model, to, **TARGETS[to]) is model
    assert [name for name, module in model.named_modules() if type(module) is kind] == NORMS
    for name, module in model.named_modules():
        assert module is modules[name]
        assert module.training == flags[name]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
    assert model.first is model.second
    assert not model.stem[1].weight.requires_grad


@pytest.mark.parametrize("to", ["noisy", "ghost"])
def test_what_equals_batch_normalization_trains_as_before_with_an_optimizer_made_before(to):
    model, twin = residual(), residual()
    optimizer, twin_optimizer = optimizer_of(model), optimizer_of(twin)
    train(model, optimizer), train(twin, twin_optimizer)
    for start in (3, 6):
        convert(model, to, **TARGETS[to])
        train(model, optimizer, start=start), train(twin, twin_optimizer, start=start)
        assert_same_state(model, twin)
        restore(model)
    train(model, optimizer, start=9), train(twin, twin_optimizer, start=9)
    assert_same_state(model, twin)
    assert list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize(
    "options", [{"affine": False}, {"track_running_stats": False}, {"momentum": None}, {"eps": 0.1}]
)
@pytest.mark.parametrize("to", ["noisy", "ghost"])
@pytest.mark.parametrize(("kind", "shape"), [(nn.BatchNorm1d, (6, 4)), (nn.BatchNorm3d, (6, 4, 2, 3, 2))])
def test_a_batch_norm_itself_keeps_its_settings(options, to, kind, shape):
    model, twin = kind(4, **options), kind(4, **options)
    assert convert(model, to, **TARGETS[to]) is model
    for step in range(3):
        x = torch.randn(shape, generator=generator(step))
        assert torch.equal(model(x), twin(x))
    x = torch.randn(shape, generator=generator(9))
    assert torch.equal(model.eval()(x), twin.eval()(x))
    assert type(restore(model)) is kind
    assert torch.equal(model(x), twin(x))
    assert vars(model).keys() == vars(twin).keys()


def test_noise_is_on_in_training_off_in_eval_and_comes_from_the_generator():
    model, twin, again = residual(), residual(), residual()
    convert(model, generator=generator(4))
    convert(again, generator=generator(4))
    x = torch.randn(6, 3, 8, 8, generator=generator(1))
    noisy = model(x)
    assert not torch.allclose(noisy, twin(x))
    assert torch.equal(noisy, again(x))
    assert torch.equal(model.eval()(x), twin.eval()(x)) is False  # later layers saw noisy inputs: other statistics
    twin.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(model(x), twin(x))


def test_the_law_and_the_group_are_the_ones_given():
    x = torch.randn(6, 4, generator=generator(1))
    law = NoiseLaw(n_mu=0, n_sigma=1, r_sigma=0, r_mu=0.01)
    shift = convert(nn.BatchNorm1d(4), generator=generator(), law=law)(x) - nn.BatchNorm1d(4)(x)
    assert 0.005 < shift.abs().max() < 0.01 + 1e-6
    ghost = convert(nn.BatchNorm1d(4), "ghost", group=3)
    expected = torch.cat([nn.BatchNorm1d(4)(part) for part in x.split(3)])
    torch.testing.assert_close(ghost(x), expected)


def test_population_normalizes_by_what_was_known():
    model = residual()
    train(model, optimizer_of(model))
    model.second = copy.deepcopy(model.first)  # used twice, a module would know more the second time
    x = torch.randn(6, 3, 8, 8, generator=generator(1))
    expected = model.eval()(x)
    convert(model.train(), "population")
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert not torch.allclose(model(x), expected, atol=1e-6)


def test_fixed_levels_live_in_the_converted_model_alone():
    model, twin = residual(), residual()
    with converted(model, generator=generator(), law=NoiseLaw(form="fixed")):
        assert model.stem[1].fixed_mu.shape == (4,)
        assert not torch.equal(model.stem[1].fixed_mu, model.blocks[0].bn1.fixed_mu)
    assert_same_state(model, twin)


def test_hooks_and_handles_stay_on_their_modules():
    model, seen = residual(), []
    handle = model.stem[1].register_forward_hook(lambda module, _, output: seen.append(type(module)))
    x = torch.randn(6, 3, 8, 8)
    model(x)
    with converted(model, generator=generator()):
        model(x)
        handle.remove()
        model(x)
        model.stem[1].register_forward_hook(lambda module, _, output: seen.append(type(module)))
    model(x)
    assert seen == [nn.BatchNorm2d, NoisyBatch, nn.BatchNorm2d]


def test_the_context_restores_when_its_block_raises():
    model, twin = residual(), residual()
    with pytest.raises(RuntimeError), converted(model, "ghost", group=2) as inside:
        inside(torch.zeros(6))
    assert [type(m) for m in model.modules()] == [type(m) for m in twin.modules()]
    assert [vars(m).keys() for m in model.modules()] == [vars(m).keys() for m in twin.modules()]


def test_a_copy_is_restored_by_itself():
    model = convert(residual(), generator=generator(), law=NoiseLaw(form="fixed"))
    twin = restore(copy.deepcopy(model))
    assert type(twin.stem[1]) is nn.BatchNorm2d
    assert type(model.stem[1]) is NoisyBatch
    assert twin.first is twin.second


def test_a_part_of_a_model_can_be_converted_and_restored_alone():
    model = residual()
    convert(model.blocks, generator=generator())
    assert type(model.stem[1]) is nn.BatchNorm2d
    with pytest.raises(ValueError, match=r"blocks\.0\.bn1 \(NoisyBatch\) cannot be converted: it is converted already"):
        convert(model, generator=generator())
    assert type(model.stem[1]) is nn.BatchNorm2d
    restore(model)
    assert type(model.blocks[0].bn1) is nn.BatchNorm2d


def test_our_own_batch_can_be_converted():
    network = mlp(
        inputs=4,
        hidden=(3,),
        outputs=2,
        activation="tanh",
        init_std=1,
        normalizer=Batch,
        generator=generator(),
    )
    assert type(convert(network, "population").hidden1.normalizer) is Population
    assert type(restore(network).hidden1.normalizer) is Batch


def test_synchronized_batch_norms_are_converted_in_one_process_and_refused_in_several(monkeypatch):
    model = nn.Sequential(nn.SyncBatchNorm(4), nn.BatchNorm1d(4))
    convert(model, generator=generator())
    assert model(torch.randn(6, 4)).shape == (6, 4)
    assert type(restore(model)[0]) is nn.SyncBatchNorm
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"0 \(SyncBatchNorm\) cannot be converted: .* between 2 processes"):
        convert(model, generator=generator())
    assert type(convert(model[1], generator=generator())) is NoisyBatch


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return F.relu(super().forward(x))


class Renamed(nn.BatchNorm2d):
    pass


def patched() -> nn.Module:
    module = nn.BatchNorm2d(4)
    module.forward = lambda x: x
    return module


def normed() -> nn.Module:
    module = nn.BatchNorm2d(4)
    module.weight = nn.Parameter(torch.ones(4, 1))
    return weight_norm(module)


class OwnCall(nn.BatchNorm2d):
    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x).relu()


class OwnMethod(nn.BatchNorm2d):
    def loss(self) -> Tensor:
        return self.weight.abs().sum()


class OwnMomentum(nn.BatchNorm2d):
    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.count = 0

    @property
    def momentum(self) -> float:
        return 0.1

    @momentum.setter
    def momentum(self, value: float) -> None:
        pass


class Chosen(nn.BatchNorm2d):
    """Defines nothing that a conversion would lose."""

    def __init__(self, features: int) -> None:
        super().__init__(features, eps=1e-3)


def test_a_subclass_that_only_chooses_settings_is_converted() -> None:
    module = convert(Chosen(4), "ghost", group=3)
    assert type(module) is Ghost
    assert type(restore(module)) is Chosen


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (OwnCall(4), "its class defines __call__, which"),
        (OwnMethod(4), "its class defines loss, which"),
        (OwnMomentum(4), "its class defines momentum, which"),
        (WithActivation(4), r"bad \(WithActivation\) cannot be converted: it has a forward of its own"),
        (patched(), "forward of its own"),
        (Ghost(4, group=2), "forward of its own"),
        (nn.LazyBatchNorm2d(), "it has seen no batch yet"),
        (normed(), "parametrized"),
    ],
)
def test_what_cannot_be_converted_is_named_and_nothing_is_converted(module, reason):
    model = nn.Sequential()
    model.add_module("good", nn.BatchNorm2d(4))
    model.add_module("bad", module)
    with pytest.raises(ValueError, match=reason):
        convert(model, generator=generator())
    assert type(model.good) is nn.BatchNorm2d


def test_a_subclass_that_changes_no_forward_is_converted_and_comes_back():
    model = convert(Renamed(4), "ghost", group=2)
    assert type(model) is Ghost
    assert type(restore(model)) is Renamed


def test_population_needs_running_statistics():
    with pytest.raises(ValueError, match=r"the model itself .* it keeps no running statistics"):
        convert(nn.BatchNorm1d(4, track_running_stats=False), "population")


def test_a_model_without_batch_normalization_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.InstanceNorm1d(3), nn.LayerNorm(3))
    with pytest.raises(ValueError, match="Sequential has no batch normalization to convert"):
        convert(model, generator=generator())
    with pytest.raises(ValueError, match="Sequential has nothing to restore"):
        restore(model)


@pytest.mark.parametrize(
    ("to", "arguments", "complaint"),
    [
        ("noisy", {}, r"to=\"noisy\" needs a generator .*generator=torch.Generator\(\)\.manual_seed\(0\)\)"),
        ("ghost", {"group": 2, "generator": generator()}, 'to="ghost" draws no noise: leave generator out'),
        ("ghost", {}, r"to=\"ghost\" needs a group, .*convert\(model, to=\"ghost\", group=16\)"),
        ("ghost", {"group": 0}, "group must be at least 1, not 0"),
        ("noisy", {"generator": generator(), "group": 2}, 'to="noisy" has no groups: leave group=2 out'),
        ("population", {"law": NoiseLaw()}, 'to="population" draws no noise: leave law out'),
        ("layer", {}, "to is noisy, population or ghost, not 'layer'"),
    ],
)
def test_arguments_that_are_missing_or_belong_to_another_target_are_refused(to, arguments, complaint):
    model = residual()
    with pytest.raises(ValueError, match=complaint):
        convert(model, to, **arguments)
    assert type(model.first) is nn.BatchNorm1d


def test_the_example_in_the_help_is_one_that_runs() -> None:
    example = textwrap.dedent(str(convert.__doc__).split("::\n")[1].split("Args:")[0])
    names = {"convert": convert, "converted": converted, "restore": restore, "torch": torch, "model": residual()}
    exec(example, names)
    assert isinstance(names["model"], nn.Module)
    assert type(names["model"].first) is nn.BatchNorm1d


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"generator": 123}, "generator is a torch.Generator, not 123"),
        (
            {"generator": torch.Generator(), "law": {"strength": 2}},
            r"law is a NoiseLaw \(of experiments.normalizers\), not",
        ),
        ({"to": "ghost", "group": 2.0}, "group is a number of examples, not 2.0"),
        ({"to": "ghost", "group": True}, "group is a number of examples, not True"),
    ],
)
def test_arguments_of_a_wrong_type_convert_nothing(options: dict[str, Any], complaint: str) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match=complaint):
        convert(model, **options)
    assert [type(module) for module in model] == [nn.BatchNorm1d] * 2


@pytest.mark.parametrize("to", ["noisy", "population"])
def test_recomputation_in_a_backward_is_refused(to: str) -> None:
    """Activation checkpointing draws (or has moved) what the forward used: the gradients would be wrong, silently."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    options = {"generator": torch.Generator().manual_seed(0)} if to == "noisy" else {}
    convert(model, to, **options)
    loss = checkpoint(model, torch.randn(6, 3), use_reentrant=False).sum()
    with pytest.raises(RuntimeError, match="activation checkpointing cannot compute this normalizer again"):
        loss.backward()
    model(torch.randn(6, 3)).sum().backward()


def test_a_block_may_restore_by_itself() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(KeyError), converted(model, "population"):
        restore(model)
        raise KeyError
    assert type(model[0]) is nn.BatchNorm1d
