"""Taps: names, and what is heard where (traps 10 to 14 and 16 to 18)."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from diagnostics.taps import Listening, Tap, first_tensor, named_modules, named_parameters, resolve
from tests.models import awkward


def listen(model, layers, signal, hear=torch.clone):
    return Listening(model, [Tap(name, module, signal, hear) for name, module in resolve(model, layers).items()])


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


# --- names


def test_a_star_crosses_dots_and_a_leading_star_dot_matches_the_top():
    model = nn.ModuleDict(
        {"relu": nn.ReLU(), "block": nn.ModuleDict({"relu": nn.ReLU(), "inner": nn.ModuleDict({"relu": nn.ReLU()})})}
    )
    assert list(resolve(model, "*.relu")) == ["relu", "block.relu", "block.inner.relu"]
    assert list(resolve(model, "block*relu")) == ["block.relu", "block.inner.relu"]
    assert list(resolve(model, ["block.relu", "relu"])) == ["relu", "block.relu"]  # the model's order
    assert list(resolve(model, lambda name, module: isinstance(module, nn.ReLU) and "inner" in name)) == [
        "block.inner.relu"
    ]


def test_the_root_is_named_by_the_empty_string_only():
    model = net()
    assert resolve(model, "") == {"": model}
    assert "" not in resolve(model, "*")


def test_case_matters():
    with pytest.raises(ValueError, match="no layer matches 'RELU'"):
        resolve(nn.ModuleDict({"relu": nn.ReLU()}), "RELU")


def test_a_miss_lists_the_closest_names():
    with pytest.raises(ValueError, match=r"no layer matches '\*\.norn'; the closest of \d+ names: norm, norm1"):
        resolve(awkward(), "*.norn")
    with pytest.raises(ValueError, match="layers is empty"):
        resolve(awkward(), [])
    with pytest.raises(ValueError, match="predicate"):
        resolve(awkward(), lambda name, module: False)
    with pytest.raises(ValueError, match="no submodules"):
        resolve(nn.ReLU(), "x")


def test_one_missing_pattern_of_several_is_refused():
    with pytest.raises(ValueError, match="nothere"):
        resolve(awkward(), ["norm", "nothere"])


def test_wrappers_leave_no_trace_in_a_name_but_a_child_called_module_keeps_its_own():
    class DistributedDataParallel(nn.Module):  # the real one needs a process group; it is known by its name
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = nn.ModuleDict({"module": net(), "compiled": torch.compile(net(), backend="eager")})
    names = [name for name, _ in named_modules(DistributedDataParallel(model))]
    assert names == [
        "",
        "module",
        "module.0",
        "module.1",
        "module.2",
        "compiled",
        "compiled.0",
        "compiled.1",
        "compiled.2",
    ]
    assert "compiled.0.weight" in named_parameters(DistributedDataParallel(model))
    assert (
        list(named_modules(nn.DataParallel(net()))) and [n for n, _ in named_modules(nn.DataParallel(net()))][1] == "0"
    )


def test_a_shared_module_counts_once_and_tied_parameters_are_named_once():
    relu = nn.ReLU()
    assert list(resolve(nn.Sequential(relu, nn.Linear(2, 2), relu), ["0", "2"])) == ["0"]
    assert list(resolve(nn.Sequential(relu, nn.Linear(2, 2), relu), "2")) == ["2"]
    names = list(named_parameters(awkward()))
    assert "middle.weight" in names
    assert "again.weight" not in names
    assert "again.bias" in names


# --- what is heard


def test_an_in_place_successor_does_not_reach_what_was_heard():
    model, x = net(), torch.randn(16, 3)
    with listen(model, "0", "output") as heard, torch.no_grad():
        model(x)
    wanted = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert torch.equal(heard.heard[0]["0"], wanted)
    assert bool((wanted < 0).any())  # else the test could not fail


def test_the_input_of_an_in_place_module_is_its_input():
    model, x = net(), torch.randn(16, 3)
    with listen(model, "1", "input") as heard, torch.no_grad():
        model(x)
    assert torch.equal(heard.heard[0]["1"], nn.functional.linear(x, model[0].weight, model[0].bias))


def test_the_gradient_at_an_output_is_autograds_even_before_an_in_place_relu():
    model, x = net(), torch.randn(16, 3)
    with listen(model, ["0", "2"], "grad_output") as heard:
        (model(x) ** 2).sum().backward()
    a = nn.functional.linear(x, model[0].weight, model[0].bias).detach().requires_grad_()
    b = model[2](a.relu())
    gradients = torch.autograd.grad((b**2).sum(), (a, b))
    assert torch.allclose(heard.heard[0]["0"], gradients[0], atol=1e-6)
    assert torch.equal(heard.heard[1]["2"], gradients[1])


def test_a_gradient_heard_twice_is_kept_once():
    model, x = net(), torch.randn(4, 3)
    with listen(model, "2", "grad_output") as heard:
        loss = model(x).sum()
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    assert torch.equal(heard.heard[0]["2"], torch.ones(4, 2))


def test_hearing_does_not_replace_the_output():
    model, x = net(), torch.randn(4, 3)
    plain = model(x)
    with (
        listen(model, "*", "output", hear=lambda tensor: tensor * 0),
        listen(model, "*", "input", hear=lambda t: t * 0),
    ):
        assert torch.equal(model(x), plain)


def test_a_module_called_again_has_a_record_of_its_own_and_each_forward_counts_anew():
    relu = nn.ReLU()
    model, x = nn.Sequential(relu, nn.Linear(3, 3), relu), torch.randn(5, 3)
    with listen(model, "0", "input") as heard, torch.no_grad():
        model(x)
    assert list(heard.heard[0]) == ["0", "0#2"]
    assert torch.equal(heard.heard[0]["0#2"], model[1](x.relu()))


def test_only_the_first_forward_counts_and_calls_outside_the_root_are_not_heard():
    model = net()
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with listen(model, "0", "input") as heard, torch.no_grad():
        model[0](y)
        model(x)
        model(y)
        model[0](y)
    assert torch.equal(heard.heard[0]["0"], x)
    assert list(heard.heard[0]) == ["0"]
    assert heard.forwards == 2


def test_a_forward_that_raised_and_was_tried_again_is_heard_once():
    class Fails(nn.Module):
        def forward(self, x):
            if len(x) > 4:
                raise MemoryError
            return x

    model = nn.Sequential(nn.Linear(3, 3), Fails())
    with listen(model, "0", "input") as heard:
        with pytest.raises(MemoryError):
            model(torch.randn(8, 3))
        model(torch.ones(2, 3))
    assert torch.equal(heard.heard[0]["0"], torch.ones(2, 3))
    assert heard.forwards == 1


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_backward_is_not_heard(reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(3, 3)

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=reentrant)

    model = Checkpointed()
    calls = []
    with listen(model, "body", "output", hear=calls.append) as heard:
        model(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert len(calls) == 1
    assert list(heard.heard[0]) == ["body"]


def test_a_whole_model_recomputed_in_backward_is_one_forward():
    model = net()
    with listen(model, "0", "input") as heard:
        checkpoint(model, torch.randn(2, 3, requires_grad=True), use_reentrant=True).sum().backward()
    assert heard.forwards == 1


@dataclass
class Packed:
    ids: torch.Tensor
    body: dict


def test_the_first_floating_tensor_is_found_wherever_it_is():
    x = torch.randn(2)
    assert first_tensor(({"a": None, "b": [torch.arange(3), x]}, torch.zeros(1))) is x
    assert first_tensor(Packed(torch.arange(2), {"x": x})) is x
    assert first_tensor((None, torch.arange(2), "text")) is None


def test_keyword_inputs_and_packed_outputs_are_heard():
    class Inner(nn.Module):
        def forward(self, *, ids, x):
            return Packed(ids, {"x": x * 2})

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            return self.inner(ids=torch.arange(2), x=x).body["x"]

    model, x = Outer(), torch.randn(2, 2)
    with listen(model, "inner", "input") as inputs, listen(model, "inner", "output") as outputs:
        model(x)
    assert torch.equal(inputs.heard[0]["inner"], x)
    assert torch.equal(outputs.heard[0]["inner"], 2 * x)


def test_an_integer_output_is_an_error_kept_for_later_not_raised_in_the_forward():
    class Indices(nn.Module):
        def forward(self, x):
            return x.argmax(1)

    model = nn.Sequential(nn.Linear(3, 3), Indices())
    with listen(model, "1", "output") as heard:
        model(torch.randn(2, 3))
    index, layer, error = heard.error
    assert (index, layer) == (0, "1")
    assert "no floating-point tensor (torch.int64 tensor)" in str(error)


def test_a_listener_that_raises_does_not_reach_the_forward_and_the_first_error_is_kept():
    def hear(tensor):
        raise RuntimeError(f"cannot stand {tuple(tensor.shape)}")

    model = net()
    with listen(model, ["0", "2"], "output", hear=hear) as heard:
        model(torch.randn(2, 3))
    assert heard.error[:2] == (0, "0")
    assert "cannot stand (2, 4)" in str(heard.error[2])


def test_no_hook_is_left_behind_even_when_attaching_fails():
    model, other = net(), net()
    before = hooks(model)

    class Refuses(nn.Module):
        def register_forward_hook(self, *args, **kwargs):
            raise RuntimeError("no hooks here")

    model.append(Refuses())
    with pytest.raises(RuntimeError, match="no hooks here"), listen(model, "*", "output"):
        pass
    assert hooks(model) == before
    with pytest.raises(KeyError), listen(other, "*", "grad_output"):
        other(torch.randn(2, 3))
        raise KeyError
    assert hooks(other) == 0
