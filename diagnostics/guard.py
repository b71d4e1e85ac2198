"""Measure without touching: after a guarded block everything is as it was before, also when the block raises.

What is put back, to the bit and to the identity of the objects: parameters, their ``.grad`` and ``requires_grad``,
buffers (running statistics, ``num_batches_tracked``), train/eval flags, plain attributes of modules, and every random
stream: Python's, numpy's, torch's on CPU and on each accelerator, and every generator that a module holds or the caller
names. The originals are never written to: for the length of the block the model's own Parameter and buffer objects hold
*copies* (``tensor.data`` is exchanged, which no autograd graph and no version counter notices).

Not covered: what the user's own forward does to objects outside its modules (a list it appends to, a file it writes).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["RandomState", "guard", "is_normalizer", "normalizers", "set_mode"]

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
# Containers that a module fills through its own methods; guarded by what they hold, not by which object they are.
_CONTAINERS = frozenset({"_parameters", "_buffers", "_modules"})


class RandomState:
    """All random streams at one moment. ``restore`` may be called any number of times."""

    def __init__(self, model: nn.Module | None = None, generators: Iterable[Generator] = ()) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        # Asking an accelerator that was never used for its state would start it up.
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None
        held = list(generators)
        if model is not None:
            for module in model.modules():
                held += [value for value in vars(module).values() if isinstance(value, Generator)]
        self._generators = [(generator, _get(generator)) for generator in {id(g): g for g in held}.values()]

    def restore(self) -> None:
        """Put every stream back where it was."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        if self._mps is not None:
            torch.mps.set_rng_state(self._mps)
        for generator, state in self._generators:
            _set(generator, state)


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
        self._attributes = {name: value for name, value in vars(module).items() if name not in _CONTAINERS}
        self._parameters = dict(module._parameters)
        self._buffers = dict(module._buffers)
        weights = [tensor for tensor in module._parameters.values() if tensor is not None]
        statistics = [tensor for tensor in module._buffers.values() if tensor is not None]
        self._held = [(t, t.data, t.grad, t.requires_grad) for t in (*weights, *statistics)]
        self._copied = [*weights, *statistics] if parameters else statistics

    def isolate(self, done: set[int]) -> None:
        for tensor in self._copied:
            if id(tensor) not in done:  # a tied tensor is copied once, for all its owners
                done.add(id(tensor))
                tensor.data = tensor.data.clone()
        for tensor, _, grad, _ in self._held:
            if grad is not None:
                tensor.grad = None  # a backward inside the block would add to the user's gradient in place

    def restore(self) -> None:
        attributes = vars(self._module)
        for name in [n for n in attributes if n not in self._attributes and n not in _CONTAINERS]:
            del attributes[name]
        attributes.update(self._attributes)
        for ours, theirs in ((self._module._parameters, self._parameters), (self._module._buffers, self._buffers)):
            if list(ours) != list(theirs) or any(ours[name] is not value for name, value in theirs.items()):
                ours.clear()
                ours.update(theirs)
        for tensor, data, grad, requires_grad in self._held:
            tensor.data = data
            if tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not grad:
                tensor.grad = grad


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
        done: set[int] = set()
        for module in modules:
            module.isolate(done)
        yield
    finally:
        for module in modules:
            module.restore()
        streams.restore()


def is_normalizer(module: nn.Module) -> bool:
    """Whether ``module`` computes otherwise on batch statistics than on population statistics.

    That is every torch batch or instance normalization, and any module that owns a buffer ``running_mean``.
    """
    return isinstance(module, nn.modules.batchnorm._NormBase) or "running_mean" in module._buffers


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
