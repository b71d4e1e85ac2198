"""The layers of a network in order of execution, and the chain they form where one feeds the next and nothing else.

A forward is watched once. A module that is called and calls no other is a layer with all its parameters, and its place
is that of its first call. A parameter that a module with called children uses itself (a scale, a token, a weight of a
module that is never called) is a layer of its own; its place is that of the first operation on it, which the graph
tells: operations are numbered as they are run.

An *atom* is a called module that calls no other. Where each atom's input is the output of
the one before, from the model's input to its output, the network is the composition of its atoms and can be run from
any of them on: the gradient by layer i, with the layers before it elsewhere, then needs only what comes from i on.
"""

from __future__ import annotations

import math
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
_MAKER = "parametrizations"  # the part of a name below which torch keeps the modules that make a weight
Atoms = tuple[nn.Module, ...]
_NORMS: tuple[type, ...] = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
if hasattr(nn, "RMSNorm"):
    _NORMS += (nn.RMSNorm,)


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        name: Of its first module, or of the parameter; ``-`` for the model itself.
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
    called: bool = False  # whether it has called another module
    delegated: bool = False  # whether it has called one that is not there to make its own parameters


class _Watch:
    """Hooks on every module of a model, for one forward."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(named_modules(model))
        self._makers = {id(module) for name, module in self._modules.items() if _MAKER in name.split(".")}
        self._handles: list[RemovableHandle] = []
        self._under_way: list[_Call] = []
        self._last: object = None  # what the next atom must be given
        self._outermost = 0
        self.began: int | None = None  # the operation before which the model was first called
        self.ended = 0
        self.entered: dict[int, float] = {}  # id of a module -> the number of the operation before its first call
        self.uses: dict[int, float] = {}  # index of a parameter that the loss depends on -> its first operation
        self.delegating: set[int] = set()  # ids of modules that called others
        self.atoms: list[nn.Module] = []
        self.chained = True

    def __enter__(self) -> _Watch:
        for module in {id(module): module for module in self._modules.values()}.values():  # once, whatever its names
            self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        single = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        call = _Call(args[0] if single else None)
        now = _operations()
        if self._under_way:
            self._under_way[-1].called = True
            self._under_way[-1].delegated |= id(module) not in self._makers
        else:
            self._outermost += 1
            # Called twice, or a part of it without the whole: no one chain from its input to its output.
            self.chained &= module is self._model and self._outermost == 1
            self._last = call.given
            self.began = now if self.began is None else self.began
        self._under_way.append(call)
        self.entered.setdefault(id(module), now)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = self._under_way.pop()
        if call.delegated:
            self.delegating.add(id(module))
        if not call.called:
            self.chained &= call.given is not None and call.given is self._last and isinstance(output, Tensor)
            self.atoms.append(module)
            self._last = output
        if not self._under_way:
            self.chained &= output is self._last
            self.ended = _operations()

    def join(self, other: _Watch) -> None:
        """Know what another forward showed too; what is new there stands before what followed it there."""
        self.chained &= other.chained and list(map(id, other.atoms)) == list(map(id, self.atoms))
        self.delegating |= other.delegating
        theirs = [(number, 0, key) for key, number in other.entered.items()]
        theirs += [(number, 1, key) for key, number in other.uses.items()]
        place = float(self.ended)
        for _, kind, key in sorted(theirs, reverse=True):
            mine = self.uses if kind else self.entered
            place = mine.get(key, place - 2.0**-20)
            mine[key] = place


def _operations() -> int:
    """The number of the next operation that a graph will hold."""
    with torch.inference_mode(False), torch.enable_grad():
        made = torch.zeros((), requires_grad=True).clone()
    assert made.grad_fn is not None
    return made.grad_fn._sequence_nr()


def _first_uses(loss: Tensor, parameters: Sequence[Tensor], watch: _Watch) -> dict[int, int]:
    """Index of a parameter -> the number of the first operation on it.

    One outside the model's forward, in a penalty say, counts only for a parameter that has none within.
    """
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    found: dict[int, tuple[bool, int]] = {}
    first, last = watch.began or 0, watch.ended
    waiting = [node for node in (loss.grad_fn,) if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        for before, _ in node.next_functions:
            if before is None:
                continue
            index = indices.get(id(getattr(before, "variable", None)))
            if index is not None:
                number = node._sequence_nr()
                use = not first <= number <= last, number
                found[index] = min(found.get(index, use), use)
            elif before not in seen:
                seen.add(before)
                waiting.append(before)
    return {index: number for index, (_, number) in found.items()}


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
    watch = _watched(at, at.parts[0][1])
    for _, batch in at.parts[1:]:  # a part of the batch may reach what another does not
        watch.join(_watched(at, batch))
    uses = watch.uses
    used = {id(at.parameters[index]): index for index in sorted(uses)}
    owners = _owners(model, watch, used, uses)
    found = _merged(owners, group) if layers is None else _named(model, layers, owners, used, uses, group)
    placed = {index for layer in found for index in layer.indices}
    missing = [at.names[index] for index in sorted(set(used.values()) - placed)]
    if missing:
        raise ValueError(
            f"parameter {missing[0]!r} is in no layer: layers={list(layers or ())!r} must cover all that the loss"
            " depends on"
        )
    path = Path(found, _chain(model, watch, found, at))
    return path if path.chain is None or _holds(at, path) else Path(found, None)


def _watched(at: Gradients, batch: Any) -> _Watch:
    """One forward, and what it uses."""
    with _Watch(at.view.model) as watch:
        loss = at.loss(batch)
    first = _first_uses(loss, at.parameters, watch)
    reached = torch.autograd.grad(loss, at.parameters, allow_unused=True)
    watch.uses = {index: first.get(index, watch.ended) for index, g in enumerate(reached) if g is not None}
    return watch


@dataclass
class _Owner:
    name: str
    module: nn.Module | None  # None for a parameter by itself
    place: float  # in the order of operations
    indices: list[int]

    @property
    def normalizes(self) -> bool:
        return self.module is not None and (is_normalizer(self.module) or isinstance(self.module, _NORMS))


def _owners(model: nn.Module, watch: _Watch, used: Mapping[int, int], uses: Mapping[int, float]) -> list[_Owner]:
    """The layers, one for each module or parameter, in order of execution.

    A tied parameter belongs to the first of its modules to be called. The parameters of a module that is never called
    itself belong to the atom above it, which uses them in its stead (as ``MultiheadAttention`` does); a parametrization
    belongs to the module it serves.
    """
    modules = dict(named_modules(model))
    found: dict[str, _Owner] = {}
    claims: dict[int, tuple[float, str]] = {}  # index of a parameter -> when the module that claims it is called, owner
    for name, module in modules.items():
        for tensor, parameter in module._parameters.items():
            index = None if parameter is None else used.get(id(parameter))
            if index is None:
                continue
            owner_name, owner = _responsible(name, tensor, modules, watch)
            called = math.inf if owner is None else watch.entered[id(owner)]
            found.setdefault(owner_name, _Owner(owner_name, owner, called, []))
            if index not in claims or called < claims[index][0]:
                claims[index] = called, owner_name
    for index, (_, owner_name) in sorted(claims.items()):
        mine = found[owner_name]
        mine.indices.append(index)
        if mine.module is None:
            mine.place = min(mine.place, uses.get(index, math.inf))
    return sorted((owner for owner in found.values() if owner.indices), key=lambda one: (one.place, one.indices[0]))


def _responsible(
    name: str, tensor: str, modules: Mapping[str, nn.Module], watch: _Watch
) -> tuple[str, nn.Module | None]:
    """Name and module of the layer that holds parameter ``tensor`` of module ``name``; no module for one by itself."""
    parts = name.split(".")
    if _MAKER in parts:
        place = parts.index(_MAKER)
        name, tensor = ".".join(parts[:place]), (parts[place + 1 :] or [tensor])[0]
    user = name
    while id(modules[user]) not in watch.entered and user:
        user = user.rpartition(".")[0]
    if id(modules[user]) in watch.entered and id(modules[user]) not in watch.delegating:
        return user, modules[user]
    if id(modules[name]) in watch.entered:
        return f"{name}.{tensor}" if name else tensor, None
    return name or tensor, None  # its module is never called: all it holds is used together


def _merged(owners: Sequence[_Owner], group: Grouping) -> tuple[Layer, ...]:
    layers: list[Layer] = []
    for owner in owners:
        if group == "layer" and layers and owner.normalizes:
            layers[-1] = Layer(layers[-1].name, (*layers[-1].indices, *owner.indices))
        else:
            layers.append(Layer(owner.name or "-", tuple(owner.indices)))
    return tuple(layers)


def _named(
    model: nn.Module,
    patterns: Sequence[str],
    owners: Sequence[_Owner],
    used: Mapping[int, int],
    uses: Mapping[int, float],
    group: Grouping,
) -> tuple[Layer, ...]:
    places = {index: (owner.place, uses.get(index, math.inf)) for owner in owners for index in owner.indices}

    def first(module: nn.Module) -> tuple[float, float]:
        mine = [places[used[id(p)]] for p in module.parameters() if id(p) in used]
        return min(mine, default=(math.inf, math.inf))

    # Patterns stand in the order of execution, and what one of them matches is put into it.
    chosen = {
        name: module
        for pattern in patterns
        for name, module in sorted(resolve(model, pattern).items(), key=lambda item: first(item[1]))
    }
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
    """Whether the chain gives the network's own gradient, layer by layer and to the bit.

    At theta_t, and with the layers before each one elsewhere: a loss may read what a forward left in an attribute, of
    which a part of the chain leaves less, or what was there before.
    """
    batch = at.parts[0][1]
    moved = tuple(block + 0.01 * (block.abs() + block.square().mean().sqrt()) for block in at.theta)
    try:
        for before in (at.theta, moved):
            short = list(from_each_layer(at, path, batch, before, at.theta, at.theta))
            at.put(at.theta)
            for layer, (_, found) in zip(path.layers, short, strict=True):
                wanted = differentiate(at.loss(batch), [at.parameters[index] for index in layer.indices])
                if not all(map(torch.equal, wanted, found)):
                    return False
                at.put(before, layer.indices)
    except Exception:  # the user's own code, run in parts, may fail in any way
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
) -> Iterator[tuple[Tensor | None, Blocks]]:
    """Loss and gradient by each layer's parameters; the layers before it, itself and those behind at these numbers.

    One forward of what is before a layer is carried along from layer to layer. Each gradient runs only from its layer
    on, and the backward ends there; for the layer ``skip`` None and an empty tuple are given instead. Memory: one
    layer's input, and the graph of one forward.
    """
    if path.chain is None:
        raise ValueError("the network is no chain of its layers")
    x, streams = _given(at, batch)
    at.put(behind)
    for place, layer in enumerate(path.layers):
        at.put(own, layer.indices)
        if place == skip:
            yield None, ()
        else:
            rest = [atom for segment in path.chain[place:] for atom in segment]
            loss = at.loss(batch, _from(x, rest, streams))
            yield loss.detach(), differentiate(loss, [at.parameters[index] for index in layer.indices])
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
