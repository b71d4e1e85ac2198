"""Drift: how far a layer's values move between two steps, on one fixed probe batch.

The same N examples are run through the network at theta_s and at theta_t, so that only the network moved: what differs
between the two samples of a unit (N values, or N times P for a channel with P of its positions kept) is drift, measured
by the distances of `diagnostics.distances`. This is the internal covariate shift that Ioffe & Szegedy (2015, section 1)
speak of and did not measure, as a number.

Two things such a number can hide are measured beside it.

- *Sampling.* Seen on different examples at the two steps, a network that stands still would seem to move. Every
  ``floor_every`` records the distance between random halves of the probe batch is written too: ``<distance>_floor``,
  its mean over 20 splits, and ``<distance>_floor95``, which one more split exceeds once in 20 times. It is what an
  unpaired measurement of half the size could not tell from nothing. The drift itself is paired: at rest, exactly 0.
- *The tautology.* After a normalizer in batch mode the mean is beta and the variance gamma^2 whatever the network does:
  ``mean_shift`` and ``std_shift`` there say nothing about stability. Measure before the normalizer, in population mode,
  or the *shape*: ``shape_<distance>`` is the distance after standardizing either sample.

In population mode a normalizer's running statistics are part of the network, and their movement is part of its drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from diagnostics.distances import Sample, check_distances, distances, floor
from diagnostics.guard import isolated
from diagnostics.probe import Rows, Site, StepView, default_name
from diagnostics.schedules import Schedule, every
from diagnostics.taps import Layers, Listening, Tap, resolve

__all__ = ["Drift"]

Floats = NDArray[np.float64]
Point = Literal["input", "output"]
Reference = Literal["previous", "start"]
SPLITS = 20
# What standardizing makes 0, whatever the samples.
_MOMENTS = frozenset({"mean_shift", "std_shift", "kl_gaussian"})


class Drift:
    """Distances between a layer's values now and at a reference step, on a fixed probe batch.

    Per layer it writes, at every record, ``nonfinite`` (values left out of a unit's samples because they are not
    finite in one of them) and, once there is a reference, each distance per unit, its median over units as unit -1, and
    the share of units above their latest ``<distance>_floor95`` as ``<distance>_share_above_floor``. Medians and shares
    are over the units where the distance is defined.

    Args:
        layers: Which modules, see `diagnostics.taps.resolve`.
        probe_batch: The examples, in the form the recorder's loss (or the model) takes; copied. At least 2, and 4 for a
            floor.
        distances: Of `diagnostics.distances.DISTANCES`.
        shape: Distances to measure of the standardized samples too, as ``shape_<distance>``.
        reference: ``previous``, the record before; or ``start``, the first record.
        signal: A module's ``input`` or its ``output``.
        mode: ``batch`` or ``population`` statistics in the normalizers; dropout is off in both. ``batch`` is the
            probe batch's also where a normalizer is frozen in training and never uses it.
        floor_every: A floor at the first and then at every so-manieth record; None for none, and no shares.
        positions: For a layer with more than one value per unit and example (a convolution, a sequence): how many of
            them are kept, at most. Drawn once for each example, from ``seed``, and the same at every step.
        unit_dim: The dimension that numbers the units: 1 for (N, C, ...), -1 for (N, T, D). Examples are dimension 0.
        seed: Of the positions and of the splits, which are the same at every record.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``drift.<reference>`` by default.

    Memory: the reference sample of each layer, at 12 to 16 bytes a value, whatever the length of the run.

    Raises:
        ValueError: For an unknown distance, reference, signal or mode; a distance in ``shape`` that is 0 by
            construction; a count that is not positive; or a negative seed.
    """

    def __init__(
        self,
        layers: Layers,
        probe_batch: Any,
        distances: Sequence[str] = ("mean_shift", "std_shift", "wasserstein1"),
        *,
        shape: Sequence[str] = (),
        reference: Reference = "previous",
        signal: Point = "input",
        mode: Literal["batch", "population"] = "batch",
        floor_every: int | None = 10,
        positions: int = 16,
        unit_dim: int = 1,
        seed: int = 0,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        self.distances = check_distances(distances)
        self.shape = check_distances(shape) if len(shape) else ()
        pinned = sorted(_MOMENTS.intersection(self.shape))
        if pinned:
            raise ValueError(f"shape={pinned[0]!r} is 0 by construction: standardizing takes the moments away")
        if reference not in get_args(Reference):
            raise ValueError(f"reference must be 'previous' or 'start', got {reference!r}")
        if signal not in get_args(Point):
            raise ValueError(f"signal must be 'input' or 'output', got {signal!r}")
        if mode not in ("batch", "population"):
            raise ValueError(f"mode must be 'batch' or 'population', got {mode!r}")
        self.layers = layers
        self.probe_batch = isolated(probe_batch, {})  # the user may go on to write to it
        self.reference: Reference = reference
        self.signal: Point = signal
        self.mode = mode
        self.floor_every = None if floor_every is None else _integer("floor_every", floor_every, least=1)
        self.positions = _integer("positions", positions, least=1)
        self.unit_dim = unit_dim
        self.seed = _integer("seed", seed, least=0)
        self.when: Schedule = every(1) if when is None else when
        self.name = default_name(self, reference) if name is None else name
        self._modules: dict[str, nn.Module] = {}
        self._places: dict[tuple[int, int], Tensor] = {}
        self._forget()

    def _forget(self) -> None:
        self._records = 0
        self._samples: dict[str, Sample] = {}
        self._floors: dict[str, dict[str, Floats]] = {}

    @property
    def active(self) -> bool:
        """It runs forwards of its own."""
        return True

    def bind(self, site: Site) -> None:
        """Resolve the layers, and begin anew.

        Raises:
            ValueError: If a pattern matches nothing.
        """
        self._modules = resolve(site.model, self.layers)
        self._forget()

    def state(self) -> dict[str, Any]:
        """The reference samples and the latest floors, as tensors."""
        return {
            "records": self._records,
            "samples": {layer: torch.tensor(sample.values) for layer, sample in self._samples.items()},
            "floors": {
                layer: {name: torch.tensor(value) for name, value in floors.items()}
                for layer, floors in self._floors.items()
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self._records = state["records"]
        self._samples = {layer: Sample.of(values) for layer, values in state["samples"].items()}
        self._floors = {
            layer: {name: value.numpy() for name, value in floors.items()} for layer, floors in state["floors"].items()
        }

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Run the probe batch at theta_t and compare what is heard with the reference."""
        taps = [Tap(name or "-", module, self.signal, self._hear) for name, module in self._modules.items()]
        with view.at(mode=self.mode) as model, Listening(model, taps) as listening:
            view.forward(self.probe_batch)
        if listening.error is not None:
            _, layer, error = listening.error
            raise RuntimeError(f"layer {layer!r}: {error}") from error
        if not any(listening.heard):
            raise RuntimeError("none of its layers was heard on the probe batch")
        mode = view.site.mode_name(self.mode)
        rows = []
        for calls in listening.heard:
            for layer, (sample, block) in calls.items():
                rows += self._compare(layer, sample, block, mode)
        self._records += 1
        return rows

    def _compare(self, layer: str, sample: Sample, block: int, mode: str) -> list[Rows]:
        """The rows of one layer; ``block`` values of a unit belong to each example."""
        reference = self._samples.get(layer)
        per_unit: dict[str, Any] = {"nonfinite": sample.size - sample.count}
        whole: dict[str, float] = {}
        if self.floor_every is not None and self._records % self.floor_every == 0:
            self._floors[layer] = {}
            for prefix, names, shape in self._kinds():
                found = floor(sample, names, SPLITS, seed=self.seed, block=block, shape=shape)
                for name in names:
                    per_unit[f"{prefix}{name}_floor"] = found.mean[name]
                    per_unit[f"{prefix}{name}_floor95"] = found.percentile95[name]
                    self._floors[layer][f"{prefix}{name}"] = found.percentile95[name]
            whole |= {name: _median(value) for name, value in per_unit.items() if name != "nonfinite"}
        if reference is not None:
            floors = self._floors.get(layer, {})
            for prefix, names, shape in self._kinds():
                compared = distances(names, reference, sample, shape=shape)
                per_unit["nonfinite"] = compared.nonfinite
                for name, value in compared.values.items():
                    per_unit[f"{prefix}{name}"] = value
                    whole[f"{prefix}{name}"] = _median(value)
                    if f"{prefix}{name}" in floors:
                        whole[f"{prefix}{name}_share_above_floor"] = _share_above(value, floors[f"{prefix}{name}"])
        if reference is None or self.reference == "previous":
            self._samples[layer] = sample
        return [Rows(layer, per_unit, mode=mode), *([Rows(layer, whole, mode=mode)] if whole else [])]

    def _kinds(self) -> list[tuple[str, tuple[str, ...], bool]]:
        """(prefix of the statistic, distances, whether of the standardized samples)."""
        return [("", self.distances, False), *([("shape_", self.shape, True)] if self.shape else [])]

    def _hear(self, tensor: Tensor) -> tuple[Sample, int]:
        # Sorted and summed at once, which copies: what comes next in the network may overwrite the tensor in place.
        if tensor.ndim < 2 or not -tensor.ndim < self.unit_dim < tensor.ndim or self.unit_dim == 0:
            shape = tuple(tensor.shape)
            raise ValueError(f"examples are dimension 0, units dimension unit_dim={self.unit_dim}, got shape {shape}")
        values = tensor.movedim(self.unit_dim, 1).flatten(2) if tensor.ndim > 2 else tensor
        if values.ndim == 2:
            return Sample.of(values), 1
        examples, units, size = values.shape
        kept = min(self.positions, size)
        if kept < size:
            place = self._place(examples, size).to(values.device)
            values = values.gather(2, place[:, None, :].expand(examples, units, kept))
        return Sample.of(values.transpose(1, 2).reshape(examples * kept, units)), kept

    def _place(self, examples: int, size: int) -> Tensor:
        """(examples, positions) of ``size`` places, other ones for each example; drawn anew after a resume."""
        if (examples, size) not in self._places:
            generator = np.random.default_rng(self.seed)
            drawn = [generator.choice(size, self.positions, replace=False) for _ in range(examples)]
            self._places[examples, size] = torch.from_numpy(np.stack(drawn))
        return self._places[examples, size]


def _median(values: Floats) -> float:
    """Over the units where it is defined; NaN if there is none. numpy's own takes ten times as long for 100 units."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return math.nan
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _share_above(values: Floats, floors: Floats) -> float:
    """The share of units above their floor, of those where both are defined; NaN if there is none."""
    defined = ~(np.isnan(values) | np.isnan(floors))
    return float((values > floors)[defined].mean()) if defined.any() else math.nan


def _integer(name: str, value: int, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value
