"""Activations: percentiles and moments of what flows through named layers (Ioffe & Szegedy 2015, Figure 1b, c).

Per layer and unit j (a feature, or a channel pooled over batch and positions): ``count`` finite values, ``nonfinite``
others, ``mean``, ``variance`` (biased, divided by the count), ``min``, ``max`` and order statistics ``p15 p50 p85``,
exact, interpolated linearly between neighbours as numpy does. In the units of the activation; variance in its square.

After batch normalization in batch mode a unit's batch mean is beta and its variance gamma^2 (less epsilon's part)
whatever the network does: where a normalizer pins what is measured, its stillness shows nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias

from torch import Tensor, autograd, nn

from diagnostics import quantiles
from diagnostics.guard import isolated
from diagnostics.probe import Rows, Site, StepView, default_name
from diagnostics.quantiles import Summary, prepare, submit, summarize_many
from diagnostics.schedules import Schedule, every
from diagnostics.taps import SIGNALS, Layers, Listening, Signal, Tap, resolve

__all__ = ["Activations"]

_SMALL = 1 << 15  # values up to which handing work to another thread costs more than doing it
_Kept: TypeAlias = "quantiles.UnitRows | Future[Summary]"


class Activations:
    """Percentiles and moments of a signal, on the user's own batch or on a fixed probe batch.

    Args:
        layers: Which modules, see `diagnostics.taps.resolve`.
        signal: A module's ``input``, its ``output``, or ``grad_output``, the gradient of the loss with respect to its
            output (multiplied by the loss scale where the user's backward is).
        percentiles: Between 0 and 100 (`diagnostics.quantiles.summarize` takes fractions between 0 and 1).
        on: ``"batch"`` reduces what the user's own first forward of the step computes. Anything else is a fixed probe
            batch, in the form the recorder's loss (or the model) takes; copied, and run at theta_t under the guard.
        mode: For a probe batch: ``batch`` or ``population`` statistics in the normalizers; dropout is off in both.
        per: ``unit``, or ``layer`` to pool everything (then unit is -1).
        unit_dim: The dimension that numbers the units: 1 for (N, C, ...), -1 for (N, T, D).
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``activations.<signal>`` by default.

    Raises:
        ValueError: For an unknown signal, mode or per, for no percentiles, repeated ones, or one outside 0..100.
    """

    def __init__(
        self,
        layers: Layers,
        signal: Signal = "input",
        *,
        percentiles: Sequence[float] = (15, 50, 85),
        on: Any = "batch",
        mode: Literal["batch", "population"] = "batch",
        per: Literal["unit", "layer"] = "unit",
        unit_dim: int = 1,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        if signal not in SIGNALS:
            raise ValueError(f"signal must be one of {', '.join(SIGNALS)}, got {signal!r}")
        if mode not in ("batch", "population"):
            raise ValueError(f"mode must be 'batch' or 'population', got {mode!r}")
        if per not in ("unit", "layer"):
            raise ValueError(f"per must be 'unit' or 'layer', got {per!r}")
        if isinstance(on, str) and on != "batch":
            raise ValueError(f"on must be 'batch' or a probe batch, got {on!r}")
        self.percentiles = tuple(_percentile(p) for p in percentiles)
        self._statistics = [f"p{p:g}" for p in self.percentiles]
        if not self.percentiles or len(set(self._statistics)) < len(self.percentiles):
            raise ValueError(
                f"percentiles must be at least one and differ in their first six digits, got {tuple(percentiles)}"
            )
        self.layers = layers
        self.signal: Signal = signal
        self.on = isolated(on, {})  # the user may go on to write to it
        self.mode = mode
        self.per = per
        self.unit_dim = unit_dim
        self.when: Schedule = every(1) if when is None else when
        self.name = default_name(self, signal) if name is None else name
        self._modules: dict[str, nn.Module] = {}
        self._fractions = [p / 100 for p in self.percentiles]

    @property
    def active(self) -> bool:
        """Whether it runs forwards of its own."""
        return not isinstance(self.on, str)

    def bind(self, site: Site) -> None:
        """Resolve the layers.

        Raises:
            ValueError: If a pattern matches nothing, or gradients are asked for where there is no loss.
        """
        self._modules = resolve(site.model, self.layers)
        if self.active and self.signal == "grad_output" and site.loss is None:
            raise ValueError(f"{self.name}: the gradient on a probe batch needs a loss: give the recorder loss=loss_fn")

    def taps(self) -> list[Tap]:
        """One tap a layer."""
        return [Tap(name or "-", module, self.signal, self._hear) for name, module in self._modules.items()]

    def collect(self, heard: Sequence[Mapping[str, Any]], mode: str) -> list[Rows]:
        """Rows from what was heard, layer by layer, call by call."""
        names = [name for layer in heard for name in layer]
        kept: list[_Kept] = [rows for layer in heard for rows in layer.values()]
        small = iter(summarize_many([rows for rows in kept if not isinstance(rows, Future)], self._fractions))
        summaries = [rows.result() if isinstance(rows, Future) else next(small) for rows in kept]
        return [self._rows(name, summary, mode) for name, summary in zip(names, summaries, strict=True)]

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Run the probe batch at theta_t and reduce what is heard."""
        with view.at(mode=self.mode) as model, Listening(model, self.taps()) as listening:
            result = view.forward(self.on)
            if self.signal == "grad_output":
                wanted = [p for p in view.parameters.values() if p.requires_grad]
                if not wanted:
                    raise RuntimeError("there is no gradient: every parameter of the model is frozen")
                autograd.grad(result, wanted, allow_unused=True)
        if listening.error is not None:
            _, layer, error = listening.error
            raise RuntimeError(f"layer {layer!r}: {error}") from error
        if not any(listening.heard):
            raise RuntimeError("none of its layers was heard on the probe batch")
        return self.collect(listening.heard, view.site.mode_name(self.mode))

    def _hear(self, tensor: Tensor) -> _Kept:
        # A copy, made at once: what comes next in the network may overwrite the tensor in place. Reducing a large one
        # goes on beside the rest of the forward and the backward; small ones wait for each other.
        rows = prepare(tensor.reshape(1, -1), 0) if self.per == "layer" else prepare(tensor, self.unit_dim)
        return rows if rows.shape[0] * rows.shape[1] < _SMALL else submit(rows, self._fractions)

    def _rows(self, layer: str, summary: Summary, mode: str) -> Rows:
        values: dict[str, Any] = {
            "count": summary.count,
            "nonfinite": summary.nonfinite,
            "mean": summary.mean,
            "variance": summary.variance,
            "min": summary.minimum,
            "max": summary.maximum,
        }
        for column, statistic in enumerate(self._statistics):
            values[statistic] = summary.quantiles[:, column]
        return Rows(layer, values, units=[-1] if self.per == "layer" else None, mode=mode)


def _percentile(value: float) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not 0 <= value <= 100
    ):
        raise ValueError(f"a percentile must be a number between 0 and 100, got {value!r}")
    return float(value)
