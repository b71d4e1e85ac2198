"""What other papers plot as drift: the change from one minibatch to the next, split into its two parts.

At step t the network theta_t sees minibatch B, at t+1 the network theta_{t+1} sees another, B'. With ``m(B, theta)``
the mean of one unit's values over B, what changed is

    m(B', theta_{t+1}) - m(B, theta_t)  =  [m(B', theta_t) - m(B, theta_t)]  +  [m(B', theta_{t+1}) - m(B', theta_t)]
                total                   =            sampling                +              parameters

exactly. Only the second part is the network's own movement. All three are divided by the unit's standard deviation over
B at theta_t. Per unit their sizes are written (``mean_change``, ``mean_change_sampling``, ``mean_change_parameters``);
for the layer, unit -1, their root mean squares over units under the same names.

The tests lean on the identity, and on its ends: a network at rest has no second part, a batch beside itself no first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diagnostics.guard import isolated
from diagnostics.probe import Rows, Site, StepView, default_name
from diagnostics.schedules import Schedule, every
from diagnostics.taps import Layers, Listening, Tap, resolve

__all__ = ["MinibatchShift"]

Floats = NDArray[np.float64]
_PARTS = ("mean_change", "mean_change_sampling", "mean_change_parameters")


class MinibatchShift:
    """The change of a layer's batch mean from the step's batch to another one, at the next parameters.

    Args:
        layers: Which modules, see `diagnostics.taps.resolve`.
        pool: Examples that the other batches are taken from: a tensor or a sequence of tensors with the examples in
            dimension 0, in the form of the step's batch. At step t the other batch is the m examples from t*m on,
            round and round, m being the size of the step's batch: it depends on the step alone.
        signal: A module's ``input`` or its ``output``.
        mode: ``batch`` or ``population`` statistics in the normalizers; dropout is off in both.
        unit_dim: The dimension that numbers the units.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``minibatch_shift.<signal>`` by default.

    Raises:
        ValueError: For an unknown signal or mode, or a pool without examples.
    """

    def __init__(
        self,
        layers: Layers,
        pool: Tensor | Sequence[Tensor],
        *,
        signal: Literal["input", "output"] = "input",
        mode: Literal["batch", "population"] = "batch",
        unit_dim: int = 1,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        if signal not in ("input", "output"):
            raise ValueError(f"signal must be 'input' or 'output', got {signal!r}")
        if mode not in ("batch", "population"):
            raise ValueError(f"mode must be 'batch' or 'population', got {mode!r}")
        if not len(_tensors(pool)) or not len(_tensors(pool)[0]):
            raise ValueError("pool holds no examples")
        self.layers = layers
        self.pool = isolated(pool, {})  # the user may go on to write to it
        self.signal: Literal["input", "output"] = signal
        self.mode = mode
        self.unit_dim = unit_dim
        self.when: Schedule = every(1) if when is None else when
        self.name = default_name(self, signal) if name is None else name
        self._modules: dict[str, nn.Module] = {}

    @property
    def active(self) -> bool:
        """It runs forwards of its own."""
        return True

    def bind(self, site: Site) -> None:
        """Resolve the layers.

        Raises:
            ValueError: If a pattern matches nothing.
        """
        self._modules = resolve(site.model, self.layers)

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Three forwards: the step's batch and the other one at theta_t, the other one at theta_{t+1}."""
        other = self._other(view)
        here = self._hear(view, view.batch, None)
        there = self._hear(view, other, None)
        moved = self._hear(view, other, view.after)
        mode = view.site.mode_name(self.mode)
        rows = []
        for layer, (mean, sd) in here.items():
            if layer not in there or layer not in moved:
                raise RuntimeError(f"layer {layer!r} ran on one batch and not on the other")
            total = _in_sd(moved[layer][0] - mean, sd)
            sampling = _in_sd(there[layer][0] - mean, sd)
            parameters = _in_sd(moved[layer][0] - there[layer][0], sd)
            parts = dict(zip(_PARTS, (total, sampling, parameters), strict=True))
            rows.append(Rows(layer, {name: np.abs(part) for name, part in parts.items()}, mode=mode))
            rows.append(Rows(layer, {name: _root_mean_square(part) for name, part in parts.items()}, mode=mode))
        return rows

    def _other(self, view: StepView) -> Any:
        pool = _tensors(self.pool)
        size = len(_tensors(view.batch)[0])
        index = torch.arange(view.step * size, (view.step + 1) * size) % len(pool[0])
        taken = tuple(tensor[index.to(tensor.device)] for tensor in pool)
        return taken[0] if isinstance(self.pool, Tensor) else taken

    def _hear(self, view: StepView, batch: Any, parameters: Any) -> dict[str, tuple[Floats, Floats]]:
        """Call name -> (mean, standard deviation), each (U,)."""
        taps = [Tap(name or "-", module, self.signal, self._reduce) for name, module in self._modules.items()]
        with view.at(parameters, mode=self.mode) as model, Listening(model, taps) as listening, torch.no_grad():
            view.forward(batch)
        if listening.error is not None:
            _, layer, error = listening.error
            raise RuntimeError(f"layer {layer!r}: {error}") from error
        if not any(listening.heard):
            raise RuntimeError("none of its layers was heard")
        return {layer: moments for calls in listening.heard for layer, moments in calls.items()}

    def _reduce(self, tensor: Tensor) -> tuple[Floats, Floats]:
        if tensor.ndim < 2 or not -tensor.ndim < self.unit_dim < tensor.ndim or self.unit_dim == 0:
            shape = tuple(tensor.shape)
            raise ValueError(f"examples are dimension 0, units dimension unit_dim={self.unit_dim}, got shape {shape}")
        values = tensor.movedim(self.unit_dim, 0).flatten(1).double()
        return values.mean(1).cpu().numpy(), values.std(1, correction=0).cpu().numpy()


def _tensors(batch: Any) -> Sequence[Tensor]:
    return (batch,) if isinstance(batch, Tensor) else tuple(batch)


def _in_sd(change: Floats, sd: Floats) -> Floats:
    """``change`` / ``sd``; 0 where both are 0, infinite where only the sd is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((change == 0) & (sd == 0), 0.0, change / sd)


def _root_mean_square(values: Floats) -> float:
    return math.sqrt(float(np.mean(values**2)))
