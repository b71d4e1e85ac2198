"""What a probe is, and what it is shown.

A *passive* probe hangs taps into the user's own forward and backward and reduces what it hears. An *active* probe
computes forwards and backwards of its own, after the user's update, from the parameters, buffers and random streams as
they were when the step began: the loss it computes on the step's batch is the user's, bit for bit.

Adding a measure is writing one class with the members of `PassiveProbe` or `ActiveProbe`. A probe with memory between
steps has ``state()`` and ``load(state)`` besides (tensors and plain containers), which travel in the checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from diagnostics.guard import Generator, RandomState, guard, isolated, normalizers, own_attributes, set_mode
from diagnostics.schedules import Schedule
from diagnostics.taps import Tap, named_parameters

__all__ = ["ActiveProbe", "Loss", "PassiveProbe", "Probe", "ProbeError", "Rows", "Site", "StatefulProbe", "StepView"]

Loss = Callable[[nn.Module, Any], Tensor]


class ProbeError(RuntimeError):
    """A probe failed. The model, the optimizer and the user's update are as they would be without it."""


@dataclass(frozen=True)
class Rows:
    """What a probe found at one layer: for each statistic one value a unit, or one value for the whole layer.

    Attributes:
        layer: The call name of the layer; ``-`` for the whole network.
        values: statistic -> (U,) values, or a float.
        units: (U,) unit numbers; None stands for 0..U-1, and for -1 where the values are floats.
        mode: ``batch`` or ``population``; ``-`` where the model has no normalizer.
    """

    layer: str
    values: Mapping[str, npt.ArrayLike]
    units: npt.ArrayLike | None = None
    mode: str = "-"


@dataclass(frozen=True)
class Site:
    """Where a probe will work: the model, and what the user handed to the recorder beside it."""

    model: nn.Module
    loss: Loss | None = None
    optimizer: torch.optim.Optimizer | None = None
    generators: tuple[Generator, ...] = ()

    def mode_name(self, mode: str, held: Sequence[nn.Module] | None = None) -> str:
        """The ``mode`` column for a measurement in ``mode``: ``-`` where the model has no normalizer.

        ``held`` are the model's normalizers, for a caller who has looked for them already.
        """
        held = normalizers(self.model) if held is None else held
        if not held:
            return "-"
        if mode == "step":
            return "batch" if any(module.training for module in held) else "population"
        return mode


@runtime_checkable
class Probe(Protocol):
    """What the recorder asks of every probe: a name of its own, a schedule, and whether it is active."""

    name: str
    when: Schedule

    @property
    def active(self) -> bool:
        """Whether it is an `ActiveProbe` (else a `PassiveProbe`)."""

    def bind(self, site: Site) -> None:
        """Resolve names and refuse what cannot work, once, before training starts.

        Raises:
            ValueError: If the probe cannot work at this site.
        """


@runtime_checkable
class PassiveProbe(Probe, Protocol):
    """A probe that listens to the user's own forward and backward."""

    def taps(self) -> Sequence[Tap]:
        """The taps for one due step."""

    def collect(self, heard: Sequence[Mapping[str, Any]], mode: str) -> Iterable[Rows]:
        """Rows from what the taps kept: for each tap, call name -> what its ``hear`` returned."""


@runtime_checkable
class ActiveProbe(Probe, Protocol):
    """A probe that runs forwards and backwards of its own."""

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Measure one step; called under a guard, after the user's update."""


@runtime_checkable
class StatefulProbe(Probe, Protocol):
    """A probe that remembers something from one due step to the next."""

    def state(self) -> dict[str, Any]:
        """Tensors and plain containers that `load` needs to go on as if never interrupted."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""


class Before:
    """Parameters (copied), buffers, plain attributes, flags, random streams and the batch, as a step found them."""

    def __init__(self, site: Site, batch: Any = None) -> None:
        self.batch = isolated(batch, {})  # the user's forward may work in place
        self.parameters = {name: p.detach().clone() for name, p in named_parameters(site.model).items()}
        self.places: list[tuple[nn.Module, str, int]] = []
        self.buffers: dict[int, Tensor] = {}  # by id, so that what is shared stays shared
        for module in site.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self.places.append((module, name, id(buffer)))
                    if id(buffer) not in self.buffers:
                        self.buffers[id(buffer)] = buffer.detach().clone()
        # What a forward makes later is not the step's.
        self.attribute_names = [(module, set(vars(module))) for module in site.model.modules()]
        self._filled = {
            module: {name for name, buffer in module._buffers.items() if buffer is not None}
            for module in site.model.modules()
        }
        self._empty = {module: module._buffers.keys() - filled for module, filled in self._filled.items()}
        copies: dict[int, Any] = {}
        self.attributes: list[tuple[nn.Module, dict[str, Any]]] = []
        self.mutable: list[tuple[nn.Module, str, Any]] = []  # those of them that may change and stay the same object
        for module in site.model.modules():
            held = own_attributes(module)
            for name, value in held.items():
                copied = isolated(value, copies)
                if copied is not value:
                    held[name] = copied
                    self.mutable.append((module, name, copied))
            self.attributes.append((module, held))
        self.training = [(module, module.training) for module in site.model.modules()]
        self.streams = RandomState(site.model, site.generators)

    def renew_mutable(self) -> None:
        """Give each attribute that may change in place a fresh copy of what it was."""
        copies: dict[int, Any] = {}
        for module, name, held in self.mutable:
            vars(module)[name] = isolated(held, copies)

    def with_new_buffers(self) -> list[nn.Module]:
        """The modules that have buffers now which they had not."""
        return [
            module
            for module, filled in self._filled.items()
            if module._buffers
            and any(held is not None and name not in filled for name, held in module._buffers.items())
        ]

    def drop_new_buffers(self, module: nn.Module) -> None:
        """Take from ``module`` the buffers that it had not."""
        for name in module._buffers.keys() - self._filled[module]:
            if name in self._empty[module]:
                module._buffers[name] = None
            else:
                del module._buffers[name]


@dataclass(frozen=True)
class StepView:
    """One finished step, as an active probe sees it.

    Attributes:
        step: t, the number of updates done when the step began.
        batch: What the user handed to ``recorder.step``, as it was then; do not write to it.
        before: theta_t by parameter name; do not write to it.
        after: theta_{t+1}, likewise.
        learning_rate: The rate of the optimizer handed to the recorder, as the step began; None where there is no
            optimizer or its groups have different ones.
    """

    step: int
    batch: Any
    site: Site
    before: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    learning_rate: float | None
    _entry: Before = field(repr=False)
    _parameters: Mapping[str, nn.Parameter] = field(repr=False)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.site.model

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The model's own Parameter objects by name: differentiate with respect to these inside `at`."""
        return self._parameters

    @contextmanager
    def at(
        self, parameters: Mapping[str, Tensor] | None = None, *, mode: str = "step", undo: bool = True
    ) -> Iterator[nn.Module]:
        """The model at other parameters, everything else as the step found it.

        Args:
            parameters: name -> tensor; theta_t where a name is missing. Not copied, and not written to by a forward.
            mode: ``step`` (flags as the user had them), ``batch`` or ``population``, see `diagnostics.guard.set_mode`.
            undo: False leaves everything as the block leaves it, until the guard around the probe's `measure` puts it
                back: for a probe that does all it does in one block.

        Yields:
            The model. Buffers and what plain attributes hold are fresh copies and all random streams start anew, each
            time.
        """
        values = self.before if parameters is None else {**self.before, **parameters}
        unknown = [name for name in values if name not in self._parameters]
        if unknown:
            raise ValueError(f"the model has no parameter {unknown[0]!r}")
        with guard(self.model, self.site.generators, parameters=False) if undo else nullcontext():
            for name, value in values.items():
                self._parameters[name].data = value
            fresh = {key: value.clone() for key, value in self._entry.buffers.items()}
            for owner, name, key in self._entry.places:
                owner._buffers[name] = fresh[key]
            for module, attributes in self._entry.attribute_names:
                if vars(module).keys() != attributes:
                    for name in vars(module).keys() - attributes:
                        del vars(module)[name]
            for module in self._entry.with_new_buffers():
                self._entry.drop_new_buffers(module)
            for module, held in self._entry.attributes:
                vars(module).update(held)
            self._entry.renew_mutable()
            for module, training in self._entry.training:
                if module.training != training:
                    module.training = training
            self._entry.streams.restore()
            set_mode(self.model, mode)
            with torch.enable_grad():
                yield self.model

    def loss(self, batch: Any = None, *, lent: bool = False) -> Tensor:
        """The user's loss on ``batch`` (the step's own by default); call it inside `at`.

        With ``lent`` the batch is a copy already, see `lend`.

        Raises:
            ValueError: If the recorder was given no loss, or it does not return one number.
        """
        if self.site.loss is None:
            raise ValueError("this probe needs a loss: give the recorder loss=loss_fn, loss_fn(model, batch) -> scalar")
        value = self.site.loss(self.model, batch if lent else self.lend(batch))
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the loss must be one number, loss(model, batch) returned {shape}")
        return value

    def forward(self, batch: Any) -> Any:
        """Feed ``batch`` as the recorder was told to: to the loss where there is one, else to the model."""
        return self.loss(batch) if self.site.loss is not None else self.model(self.lend(batch))

    def lend(self, batch: Any = None) -> Any:
        """A copy of ``batch`` (the step's own by default) that a forward which works in place may overwrite."""
        return isolated(self.batch if batch is None else batch, {})


def default_name(probe: object, part: str | None = None) -> str:
    """``snake_case`` of the class, with what tells two of its kind apart: ``activations.input``."""
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(probe).__name__).lstrip("_")
    return f"{name}.{part}" if part else name


def describe(value: Any) -> Any:
    """A JSON-able description of a probe's settings, for the record of a run that has no configuration of its own."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__}{tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping):
        return {str(key): describe(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [describe(part) for part in value]
    if isinstance(value, Probe):
        settings = {key: part for key, part in vars(value).items() if not key.startswith("_")}
        return {"kind": type(value).__name__} | describe(settings)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return repr(value)
    # A default repr holds an address, which would make two equal runs differ.
    return str(getattr(value, "__qualname__", type(value).__qualname__))
