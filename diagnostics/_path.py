"""The layers of a network in order of execution, and the chain they form where one feeds the next and nothing else.

A forward is watched once. An *atom* is a called module that calls no other. Where each atom's input is the output of
the one before, from the model's input to its output, the network is the composition of its atoms and can be run from
any of them on: the gradient by layer i, with the layers before it elsewhere, then needs only what comes from i on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from diagnostics._vectors import Blocks
from diagnostics.gradients import Gradients, differentiate
from diagnostics.guard import RandomState, is_normalizer
from diagnostics.taps import named_modules, resolve

Grouping = Literal["layer", "module"]
Atoms = tuple[nn.Module, ...]
_NORMS: tuple[type, ...] = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
if hasattr(nn, "RMSNorm"):
    _NORMS += (nn.RMSNorm,)


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: Of its first module; ``-`` for the model itself.
        indices: Of its parameters, in the order of `Gradients.names`.
    """

    name: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Path:
    """All layers that the loss depends on, in order of execution.

    Attributes:
        layers: No parameter is in two; in none are those the loss does not depend on.
        chain: For each layer, the atoms from its first to the next layer's (those before the first layer belong to the
            first); None where the network is no chain.
    """

    layers: tuple[Layer, ...]
    chain: tuple[Atoms, ...] | None


@dataclass
class _Call:
    given: Tensor | None
    version: int
    called: bool = False  # whether it has called another module


class _Watch:
    """Hooks on every module of a model, for one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._under_way: list[_Call] = []
        self._last: tuple[object, int] = (None, 0)  # what the next atom must be given, and that tensor's version
        self._outermost = 0
        self.entered: dict[int, int] = {}  # id of a module -> its place in the order of first calls
        self.atoms: list[nn.Module] = []
        self.chained = True

    def __enter__(self) -> _Watch:
        for _, module in named_modules(self._model):
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        single = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        call = _Call(args[0], args[0]._version) if single else _Call(None, 0)
        if self._under_way:
            self._under_way[-1].called = True
        else:
            self._outermost += 1
            # Called twice, or a part of it without the whole: no one chain from its input to its output.
            self.chained &= module is self._model and self._outermost == 1
            self._last = call.given, call.version
        self._under_way.append(call)
        self.entered.setdefault(id(module), len(self.entered))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self._under_way.pop()
        if not call.called:
            awaited, version = self._last
            self.chained &= call.given is not None and call.given is awaited and call.version == version
            self.chained &= isinstance(output, Tensor)
            self.atoms.append(module)
            self._last = output, output._version if isinstance(output, Tensor) else 0
        if not self._under_way:
            self.chained &= output is self._last[0]


def find(at: Gradients, layers: Sequence[str] | None = None, group: Grouping = "layer") -> Path:
    """Watch one forward at theta_t.

    Args:
        at: The model on its batch.
        layers: Globs of modules that are a layer each, with all below them, in order; by default every module that owns
            parameters is one. A parameter under two of them belongs to the first.
        group: ``layer`` merges a normalizer into the layer before it, ``module`` does not.

    Raises:
        ValueError: If a pattern matches nothing, or a parameter that the loss depends on is in no layer.
    """
    model = at.view.model
    at.put(at.theta)
    with _Watch(model) as watch:
        loss = at.loss(at.parts[0][1])
    reached = torch.autograd.grad(loss, at.parameters, allow_unused=True)
    used = {id(p): index for index, (p, g) in enumerate(zip(at.parameters, reached, strict=True)) if g is not None}
    owners = _owners(model, watch.entered, used)
    found = _merged(owners, group) if layers is None else _named(model, layers, owners, used, group)
    placed = {index for layer in found for index in layer.indices}
    missing = [at.names[index] for index in sorted(set(used.values()) - placed)]
    if missing:
        raise ValueError(
            f"parameter {missing[0]!r} is in no layer:"
            + (" its module was not called in the forward; name all layers in order, layers=[...]" * (layers is None))
            + (f" layers={list(layers)!r} must cover all that the loss depends on" if layers is not None else "")
        )
    path = Path(found, _chain(model, watch, found, at))
    return path if path.chain is None or _holds(at, path) else Path(found, None)


@dataclass
class _Owner:
    name: str
    module: nn.Module
    place: int
    indices: list[int]

    @property
    def normalizes(self) -> bool:
        return is_normalizer(self.module) or isinstance(self.module, _NORMS)


def _owners(model: nn.Module, entered: Mapping[int, int], used: Mapping[int, int]) -> list[_Owner]:
    """The called modules that own what the loss depends on, in order of their first call.

    A tied parameter belongs to the first of its modules to be called. The parameters of a module that is never called
    itself belong to the atom above it, which uses them in its stead (as ``MultiheadAttention`` does); a parametrization
    belongs to the module it serves.
    """
    modules = dict(named_modules(model))
    found: dict[str, _Owner] = {}
    claims: dict[int, _Owner] = {}  # index of a parameter -> its owner
    for name, module in modules.items():
        owner_name = _responsible(name, modules, entered)
        if owner_name is None:
            continue
        owner = modules[owner_name]
        mine = found.setdefault(owner_name, _Owner(owner_name, owner, entered[id(owner)], []))
        for parameter in module._parameters.values():
            index = None if parameter is None else used.get(id(parameter))
            if index is not None and (index not in claims or mine.place < claims[index].place):
                claims[index] = mine
    for index in sorted(claims):
        claims[index].indices.append(index)
    return sorted((owner for owner in found.values() if owner.indices), key=lambda owner: owner.place)


def _responsible(name: str, modules: Mapping[str, nn.Module], entered: Mapping[int, int]) -> str | None:
    parts = name.split(".")
    if "parametrizations" in parts:
        name = ".".join(parts[: parts.index("parametrizations")])
    if id(modules[name]) in entered:
        return name
    while name:
        name = name.rpartition(".")[0]
        if id(modules[name]) in entered:
            # Where its other children are called, how it came by this one's parameters cannot be told.
            calls = any(id(below) in entered for below in modules[name].modules() if below is not modules[name])
            return None if calls else name
    return None


def _merged(owners: Sequence[_Owner], group: Grouping) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for owner in owners:
        if group == "layer" and layers and owner.normalizes:
            layers[-1] = Layer(layers[-1].name, (*layers[-1].indices, *owner.indices))
        else:
            layers.append(Layer(owner.name or "-", tuple(owner.indices)))
    return tuple(layers)


def _named(
    model: nn.Module, patterns: Sequence[str], owners: Sequence[_Owner], used: Mapping[int, int], group: Grouping
) -> tuple[Layer, ...]:
    chosen = {name: module for pattern in patterns for name, module in resolve(model, pattern).items()}
    held: dict[int, str] = {}  # index of a parameter -> its layer
    for name, module in chosen.items():
        for parameter in module.parameters():
            if id(parameter) in used:
                held.setdefault(used[id(parameter)], name)
    before: str | None = None
    for owner in owners:
        for index in owner.indices:
            if index not in held and group == "layer" and owner.normalizes and before is not None:
                held[index] = before
            before = held.get(index, before)
    indices = {name: tuple(sorted(index for index, layer in held.items() if layer == name)) for name in chosen}
    return tuple(Layer(name or "-", mine) for name, mine in indices.items() if mine)


def _chain(model: nn.Module, watch: _Watch, layers: Sequence[Layer], at: Gradients) -> tuple[Atoms, ...] | None:
    """The atoms of each layer, if they are all there is to the network and come in the layers' order."""
    wrapped = next(named_modules(model))[1] is not model
    compiled = any(module._compiled_call_impl is not None for module in model.modules())
    if not watch.chained or wrapped or compiled or watch.atoms == [model]:
        return None
    layer_of = {index: place for place, layer in enumerate(layers) for index in layer.indices}
    numbers = {id(parameter): index for index, parameter in enumerate(at.parameters)}
    segments: list[list[nn.Module]] = [[]]
    current, seen = -1, set[int]()
    for place, atom in enumerate(watch.atoms):
        if any(atom is other for other in watch.atoms[:place]) and (*atom.parameters(), *atom.buffers()):
            return None  # a second call would find what the first one left in its buffers
        new = {numbers[id(p)] for p in atom.parameters() if id(p) in numbers} & layer_of.keys() - seen
        seen |= new
        for index in sorted({layer_of[index] for index in new}):
            if index not in (current, current + 1):
                return None
            if index == current + 1:
                if new & {other for other in layer_of if layer_of[other] == current}:
                    return None  # one atom with parameters of two layers
                current = index
                if index > 0:
                    segments.append([])
        segments[-1].append(atom)
    complete = current == len(layers) - 1 and seen == layer_of.keys()
    return tuple(map(tuple, segments)) if complete else None


def _holds(at: Gradients, path: Path) -> bool:
    """Whether the chain gives the network's own gradient, layer by layer and to the bit."""
    batch = at.parts[0][1]
    at.put(at.theta)
    whole = differentiate(at.loss(batch), at.parameters)
    for layer, found in zip(path.layers, from_each_layer(at, path, batch, at.theta, at.theta, at.theta), strict=True):
        if not all(torch.equal(whole[index], block) for index, block in zip(layer.indices, found, strict=True)):
            return False
    return True


class _Enough(BaseException):
    """Ends a forward whose input was all that was wanted; no `Exception`, which a loss might catch."""


def from_each_layer(
    at: Gradients,
    path: Path,
    batch: Any,
    before: Sequence[Tensor],
    own: Sequence[Tensor],
    behind: Sequence[Tensor],
    *,
    skip: int | None = None,
) -> Iterator[Blocks]:
    """The gradient by each layer's parameters, with the layers before it, itself and those behind at these numbers.

    One forward of what is before a layer is carried along from layer to layer. Each gradient runs only from its layer
    on, and the backward ends there; for the layer ``skip`` an empty tuple is given instead. Memory: one layer's input,
    and the graph of one forward.
    """
    if path.chain is None:
        raise ValueError("the network is no chain of its layers")
    x, streams = _given(at, batch)
    at.put(behind)
    for place, layer in enumerate(path.layers):
        at.put(own, layer.indices)
        if place == skip:
            yield ()
        else:
            rest = [atom for segment in path.chain[place:] for atom in segment]
            loss = at.loss(batch, _from(x, rest, streams))
            yield differentiate(loss, [at.parameters[index] for index in layer.indices])
            del loss
        if place + 1 == len(path.layers):
            return
        at.put(before, layer.indices)
        at.surroundings.reset()
        if streams is not None:
            streams.restore()
        with torch.no_grad():
            for atom in path.chain[place]:
                x = atom(x)
        streams = _streams(at)


def _given(at: Gradients, batch: Any) -> tuple[Tensor, RandomState | None]:
    """What the loss gives the model, and the random streams as they are then, if the forward moves any."""
    found: list[tuple[Tensor, RandomState | None]] = []

    def stop(x: Tensor) -> Tensor:
        found.append((x.detach(), _streams(at)))
        raise _Enough

    with suppress(_Enough):
        at.loss(batch, stop)
    return found[0]


def _streams(at: Gradients) -> RandomState | None:
    return RandomState(at.view.model, at.view.site.generators) if at.surroundings.random else None


def _from(x: Tensor, atoms: Sequence[nn.Module], streams: RandomState | None) -> Callable[[Tensor], Tensor]:
    """A forward that is ``atoms`` on ``x``, whatever it is given."""

    def forward(_: Tensor) -> Tensor:
        if streams is not None:
            streams.restore()
        value = x
        for atom in atoms:
            value = atom(value)
        return value

    return forward
