"""The guard: whatever is done inside, everything is as it was (traps 4 and 35)."""

import random
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from diagnostics.guard import RandomState, guard, is_normalizer, isolated, normalizers, set_mode
from tests.models import assert_same, awkward, awkward_batches, cross_entropy, everything, seed_everything


def trained():
    seed_everything(3)
    model = awkward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    cross_entropy(model, awkward_batches(1)[0]).backward()
    optimizer.step()
    return model, optimizer


def vandalize(model, batch):
    """Everything a careless measurement has ever done."""
    cross_entropy(model, batch).backward()
    cross_entropy(model.eval(), batch)
    model.drop.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
        model.norm.running_mean.mul_(7)
        model.norm.num_batches_tracked += 5
    model.first.weight.data = torch.zeros(12, 64)
    model.first.weight.requires_grad_(False)
    model.out.bias.grad = torch.ones(3)
    model.norm1.running_var = torch.full((12,), 9.0)
    model.again.bias = nn.Parameter(torch.zeros(12))
    model.norm1.momentum = 1.0
    model.leftover = "x"
    model.history[0].add_(5)
    model.history[2]["seen"].clear()
    torch.rand(3, generator=model.history[1])
    model.history.append("more")
    random.random()
    np.random.rand()
    torch.rand(3)
    torch.rand(3, generator=model.noise.generator)
    model.noise.numpy.normal()


@pytest.mark.parametrize("raises", [False, True])
def test_everything_is_put_back_to_the_bit(raises):
    model, optimizer = trained()
    before = everything(model, optimizer)
    own = torch.Generator().manual_seed(8)
    own_state = own.get_state()
    held = model.history
    inside = [id(part) for part in held]
    memory = {name: p.data_ptr() for name, p in model.named_parameters()}
    objects = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    grads = {name: id(p.grad) for name, p in model.named_parameters()}
    try:
        with guard(model, [own]):
            vandalize(model, awkward_batches(1, seed=9)[0])
            torch.rand(1, generator=own)
            if raises:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert raises
    assert_same(everything(model, optimizer), before)
    assert_same(own.get_state(), own_state)
    assert not hasattr(model, "leftover")
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == memory
    assert {name: id(p.grad) for name, p in model.named_parameters()} == grads
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == objects
    assert model.again.weight is model.middle.weight
    assert model.history is held
    assert [id(part) for part in held] == inside


def test_isolated_copies_what_can_change_and_keeps_what_is_shared():
    tensor, array, graph = torch.ones(2), np.zeros(2), torch.ones(1, requires_grad=True) * 2
    strange = object()
    value = {
        "a": [tensor, (tensor, strange)], "b": deque([array], maxlen=3), "c": defaultdict(list, k=[1]), "d": {1, 2},
        "e": (1, "x"), "f": graph, "g": Counter("aab"), "h": torch.ones(1, requires_grad=True),
    }  # fmt: skip
    copies = {}
    other = isolated(value, copies)
    assert other["a"][0] is other["a"][1][0] is not tensor
    assert other["a"][1][1] is strange
    assert other["e"] is value["e"]
    assert other["f"] is graph
    assert other["h"].requires_grad
    tensor.add_(1)
    array += 1
    value["a"].append(1)
    value["b"].append(2)
    value["c"]["new"].append(2)
    value["c"]["k"].append(2)
    value["d"].add(3)
    value["g"]["a"] += 1
    assert torch.equal(other["a"][0], torch.ones(2))
    assert len(other["a"]) == 2
    assert other["b"].maxlen == 3
    assert len(other["b"]) == 1
    assert other["b"][0].tolist() == [0, 0]
    assert other["c"] == {"k": [1]}
    assert other["c"]["made"] == []
    assert other["d"] == {1, 2}
    assert other["g"]["a"] == 2
    assert isolated(value["a"], copies) is other["a"]


def test_an_earlier_graph_can_still_go_backward():
    model, _ = trained()
    model.eval()  # in evaluation the graph holds the running statistics
    loss = cross_entropy(model, awkward_batches(1)[0])
    wanted = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, allow_unused=True)
    with guard(model):
        cross_entropy(model.train(), awkward_batches(1, seed=9)[0]).backward()
        model.first.weight.data = torch.zeros(12, 64)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)  # raises if a version had moved
    for a, b in zip(found, wanted, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_without_the_copy_exchanged_parameters_are_still_put_back():
    model, optimizer = trained()
    before = everything(model, optimizer)
    with guard(model, parameters=False):
        model.first.weight.data = torch.zeros(12, 64)
        cross_entropy(model, awkward_batches(1)[0]).backward()
    assert_same(everything(model, optimizer), before)


def test_the_copy_is_taken_only_where_asked():
    model, _ = trained()
    where = model.first.weight.data_ptr()
    with guard(model, parameters=False):
        assert model.first.weight.data_ptr() == where
    with guard(model):
        assert model.first.weight.data_ptr() != where
        assert model.again.weight.data_ptr() == model.middle.weight.data_ptr()


def test_every_stream_starts_again_where_it_was():
    model, _ = trained()
    own = (torch.Generator().manual_seed(1), np.random.default_rng(1), np.random.RandomState(1), random.Random(1))
    streams = RandomState(model, own)

    def draw():
        return [
            random.random(), float(np.random.rand()), torch.rand(2).tolist(),
            torch.rand(2, generator=model.noise.generator).tolist(), float(model.noise.numpy.normal()),
            torch.rand(2, generator=own[0]).tolist(), own[1].random(), own[2].rand(), own[3].random(),
        ]  # fmt: skip

    first = draw()
    streams.restore()
    second = draw()
    streams.restore()
    assert first == second == draw()


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda: np.random.rand(), id="one number"),
        pytest.param(lambda: np.random.randn(), id="one normal number, or the one in store"),
        pytest.param(lambda: np.random.randn(2), id="a pair of normal numbers"),
        pytest.param(lambda: np.random.rand(1248), id="twice round the twister"),
        pytest.param(lambda: np.random.seed(5), id="a new seed"),
        pytest.param(lambda: np.random.shuffle(np.arange(3)), id="a shuffle"),
    ],
)
def test_any_draw_from_numpys_stream_is_noticed_and_undone(draw, stored):
    np.random.seed(0)
    if stored:
        np.random.randn()  # normal numbers come in pairs: the second is in store
    streams = RandomState()
    assert not streams.moved()
    draw()
    assert streams.moved()
    streams.restore()
    assert not streams.moved()
    found = np.random.randn(3)
    np.random.seed(0)
    assert found.tolist() == np.random.randn(3 + stored)[stored:].tolist()


def test_another_generator_behind_numpys_stream_is_put_back_too():
    own = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        streams = RandomState()
        first = np.random.rand()
        assert streams.moved()
        streams.restore()
        assert not streams.moved()
        assert np.random.rand() == first
    finally:
        np.random.set_bit_generator(own)


def test_a_normalizer_is_what_keeps_running_statistics():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("running_mean", torch.zeros(2))

    class Says(nn.Module):
        differs_in_training = True

    assert is_normalizer(nn.BatchNorm1d(2))
    assert is_normalizer(nn.InstanceNorm1d(2, track_running_stats=True))
    # without population statistics there are no two modes to tell apart
    assert not is_normalizer(nn.BatchNorm1d(2, track_running_stats=False))
    assert not is_normalizer(nn.InstanceNorm1d(2))
    assert is_normalizer(Says())
    assert is_normalizer(nn.SyncBatchNorm(2))
    assert is_normalizer(Own())
    assert not is_normalizer(nn.LayerNorm(2))
    assert [type(m) for m in normalizers(awkward())] == [nn.BatchNorm2d, nn.BatchNorm1d]


def test_modes_set_normalizers_and_leave_dropout_off():
    model = awkward()
    set_mode(model, "batch")
    assert model.norm.training
    assert model.norm1.training
    assert not model.drop.training
    assert not model.noise.training
    set_mode(model, "population")
    assert not any(module.training for module in model.modules())
    model.train()
    set_mode(model, "step")
    assert all(module.training for module in model.modules())
    with pytest.raises(ValueError, match="mode must be 'batch', 'population' or 'step', got 'train'"):
        set_mode(model, "train")
