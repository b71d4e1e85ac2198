"""Measure without touching: after a guarded block everything is as it was before, also when the block raises.

What is put back, to the bit and to the identity of the objects: parameters, their ``.grad`` and ``requires_grad``,
buffers (running statistics, ``num_batches_tracked``), train/eval flags, plain attributes of modules with the tensors,
arrays, lists, dicts and sets in them, and every random stream: Python's, numpy's, torch's on CPU and on each
accelerator, and every generator that a module holds or the caller names. The originals are never written to: for the
length of the block the model's own Parameter objects hold *copies* (``parameter.data`` is exchanged, so an optimizer's,
a tied or a recurrent layer's reference stays valid) and copies stand in for buffers and for what attributes hold. A
graph the user has not yet gone backward through notices neither.

Not covered: what the user's own forward does to objects outside its modules (a list it appends to, a file it writes),
and to objects of classes that nobody here knows, inside them.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["RandomState", "guard", "is_normalizer", "isolated", "normalizers", "set_mode"]

T = TypeVar("T")
Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
# torch's own bookkeeping: hooks and flags, which no forward changes.
_TORCHS = frozenset(vars(nn.Module())) | {"training"}
_TWISTER_BYTES = 4 * (624 + 1)  # numpy's struct of a Mersenne twister: its key and its place in it
_SEQUENCES = (list, tuple, set, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)


def isolated(value: Any, copies: dict[int, Any]) -> Any:
    """``value`` with a copy of every tensor, array, list, dict, set and deque in it, however deep; the rest as it is.

    Args:
        value: Anything. What is immutable down to its leaves comes back as the same object.
        copies: What was copied already, by id; the shared stay shared. It must not outlive the originals.
    """
    kind = type(value)
    if kind is Tensor or kind is np.ndarray:
        if id(value) not in copies:
            # A tensor in somebody's graph is theirs: a copy would cut the graph.
            theirs = kind is Tensor and value.grad_fn is not None
            copies[id(value)] = value if theirs else _duplicate(value)
        return copies[id(value)]
    if kind not in _SEQUENCES and kind not in _MAPPINGS:
        return value
    if id(value) in copies:
        return copies[id(value)]
    if kind is tuple:
        parts = [isolated(part, copies) for part in value]
        same = all(a is b for a, b in zip(parts, value, strict=True))
        return value if same else tuple(parts)
    if kind is set:
        copies[id(value)] = set(value)  # what can be in one is not changed in place
    elif kind in _MAPPINGS:
        held = copies[id(value)] = copy(value)
        for key, part in value.items():
            held[key] = isolated(part, copies)
    else:
        row = copies[id(value)] = [] if kind is list else deque(maxlen=value.maxlen)
        row.extend(isolated(part, copies) for part in value)
    return copies[id(value)]


def _duplicate(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.copy()


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The plain attributes that a module's class or its user gave it; torch's own bookkeeping left out."""
    return {name: value for name, value in vars(module).items() if name not in _TORCHS}


class RandomState:
    """All random streams at one moment. ``restore`` may be called any number of times."""

    def __init__(self, model: nn.Module | None = None, generators: Iterable[Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self._words = _numpy_words()
        self._torch = torch.get_rng_state()
        # Asking an accelerator that was never used for its state would start it up.
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch types it not
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        held = list(generators)
        if model is not None:
            for module in model.modules():
                for value in own_attributes(module).values():
                    _find_generators(value, held)
        self._generators = [(generator, _get(generator)) for generator in {id(g): g for g in held}.values()]

    def restore(self) -> None:
        """Put every stream back where it was."""
        random.setstate(self._python)
        if self._numpy_moved():
            np.random.set_state(self._numpy)  # noqa: NPY002 - the global stream is what must be put back
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        for generator, state in self._generators:
            _set(generator, state)

    def moved(self) -> bool:
        """Whether any stream has moved since."""
        if not torch.equal(torch.get_rng_state(), self._torch) or random.getstate() != self._python:
            return True
        if self._numpy_moved():
            return True
        if torch.cuda.is_initialized() and not _alike(torch.cuda.get_rng_state_all(), self._cuda):  # type: ignore[no-untyped-call]  # as above
            return True
        if self._mps is not None and not _alike(torch.mps.get_rng_state(), self._mps):
            return True
        return any(not _alike(_get(generator), state) for generator, state in self._generators)

    def _numpy_moved(self) -> bool:
        # To ask numpy for the state, or to set it, takes as long as a small layer. The words themselves can be compared
        # in a microsecond, and tell all unless a normal number was in store, whose use they do not show.
        if self._words is not None and not self._numpy["has_gauss"] and self._words == _numpy_words():
            return False
        return not _alike(_numpy_state(), self._numpy)


def _numpy_state() -> dict[str, Any]:
    return np.random.get_state(legacy=False)  # noqa: NPY002 - as above


def _numpy_words() -> bytes | None:
    """The words of numpy's global Mersenne twister; None where another bit generator stands in for it."""
    bits = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public, and missing in numpy's list
    if type(bits) is not np.random.MT19937:
        return None
    return ctypes.string_at(bits.ctypes.state_address, _TWISTER_BYTES)


def _alike(found: Any, kept: Any) -> bool:
    """Whether two states of a generator are equal, through the containers that libraries wrap them in."""
    if isinstance(found, Tensor):
        return isinstance(kept, Tensor) and torch.equal(found, kept)
    if isinstance(found, np.ndarray):
        return np.array_equal(found, kept)
    if isinstance(found, dict):
        return isinstance(kept, dict) and all(_alike(value, kept[key]) for key, value in found.items())
    if isinstance(found, list | tuple) and isinstance(kept, list | tuple):
        return len(found) == len(kept) and all(map(_alike, found, kept))
    return bool(found == kept)


def _find_generators(value: Any, found: list[Generator], depth: int = 4) -> None:
    """Append every generator in ``value``, looking into lists and the like."""
    kind = type(value)
    if _generates(kind):  # type: ignore[arg-type]  # every class is hashable
        found.append(value)
    elif depth and kind in _MAPPINGS:
        for part in value.values():
            _find_generators(part, found, depth - 1)
    elif depth and kind in _SEQUENCES:
        for part in value:
            _find_generators(part, found, depth - 1)


@cache
def _generates(kind: type) -> bool:
    # Asked of types, and once each: of every attribute of every module it would be most of a small record's cost.
    return issubclass(kind, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


def _get(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)


class _Module:
    """One module's own state: which objects it holds, and for its tensors which memory they show."""

    def __init__(self, module: nn.Module, *, parameters: bool) -> None:
        self._module = module
        self._attributes = dict(vars(module))  # the containers with it: which objects they are is no matter
        self._parameters = dict(module._parameters)
        self._buffers = dict(module._buffers)
        weights = [tensor for tensor in self._parameters.values() if tensor is not None]
        self._held = [(weight, weight.data, weight.grad, weight.requires_grad) for weight in weights]
        self._copy_parameters = parameters

    def isolate(self, copies: dict[int, Any]) -> None:
        """Put copies in place; ``copies`` maps the id of what was copied already, so that the tied stay tied."""
        for weight, data, grad, _ in self._held:
            if self._copy_parameters and id(weight) not in copies:
                copies[id(weight)] = weight.data = data.clone()
            if grad is not None:
                weight.grad = None  # a backward inside the block would add to the user's gradient in place
        for name, buffer in self._buffers.items():
            if buffer is not None:
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                self._module._buffers[name] = copies[id(buffer)]
        for name, value in own_attributes(self._module).items():
            substitute = isolated(value, copies)
            if substitute is not value:
                vars(self._module)[name] = substitute

    def restore(self) -> None:
        attributes = vars(self._module)
        attributes.update(self._attributes)
        if len(attributes) != len(self._attributes):
            for name in attributes.keys() - self._attributes.keys():
                del attributes[name]
        _put_back(self._module._parameters, self._parameters)
        _put_back(self._module._buffers, self._buffers)
        for weight, data, grad, requires_grad in self._held:
            weight.data = data
            if weight.requires_grad != requires_grad:
                weight.requires_grad_(requires_grad)
            if weight.grad is not grad:
                weight.grad = grad


def _put_back(held: dict[str, T], wanted: dict[str, T]) -> None:
    if not held and not wanted:
        return
    if list(held) != list(wanted) or any(held[name] is not value for name, value in wanted.items()):
        held.clear()
        held.update(wanted)


@contextmanager
def guard(model: nn.Module, generators: Iterable[Generator] = (), *, parameters: bool = True) -> Iterator[None]:
    """Whatever happens to ``model`` or to a random stream inside the block is undone at its end.

    Args:
        model: Any module, its lazy parameters initialized.
        generators: Random generators that no module of the model holds.
        parameters: Copy the parameters too. False saves that memory where the block only ever exchanges their
            ``.data`` and never writes to it; the exchange is undone all the same.
    """
    streams = RandomState(model, generators)
    modules = [_Module(module, parameters=parameters) for module in model.modules()]
    try:
        copies: dict[int, Any] = {}
        for module in modules:
            module.isolate(copies)
        yield
    finally:
        for module in modules:
            module.restore()
        streams.restore()


def is_normalizer(module: nn.Module) -> bool:
    """Whether ``module`` computes otherwise on batch statistics than on population statistics.

    That is any module with a buffer ``running_mean`` (torch's batch normalization, and instance normalization that
    tracks), and any that says so by a true attribute ``differs_in_training``. A batch normalization that tracks nothing
    is none: it has no population statistics, and uses the batch's in evaluation too.
    """
    return module._buffers.get("running_mean") is not None or bool(getattr(module, "differs_in_training", False))


def normalizers(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` for which `is_normalizer` holds."""
    return [module for module in model.modules() if is_normalizer(module)]


def set_mode(model: nn.Module, mode: str) -> None:
    """Put the model in a named measuring mode; call it under a `guard`.

    ``population``: everything evaluates. ``batch``: the same, but normalizers use the statistics of the batch they are
    given. Dropout is off in both, so that two measurements differ by the parameters alone. ``step``: left as it is.

    Raises:
        ValueError: If the mode is none of these.
    """
    if mode not in ("step", "batch", "population"):
        raise ValueError(f"mode must be 'batch', 'population' or 'step', got {mode!r}")
    if mode == "step":
        return
    model.eval()
    if mode == "batch":
        for module in normalizers(model):
            module.training = True
            for part in module.modules():
                part.training = True
