"""Internal covariate shift, as Santurkar et al. (2018) define it (Definition 2.1), with its controls.

For layer i of L, with all its parameters (its normalizer's gamma and beta among them) as W_i, and the same batch,

    G   gradient of the loss by W_i, all layers at theta_t
    G'  the same with the layers *preceding* i at theta_{t+1}, the others still at theta_t

``l2`` |G - G'|, ``relative`` |G - G'| / |G| and ``cosine`` of the angle between them. theta_{t+1} is what the user's
own optimizer made. Three controls move other layers instead, and their statistics carry a suffix: ``following`` layers
only (which does not change what layer i is given: what ``preceding`` has beyond it is what can be called shift), the
layer's ``own`` parameters only, and ``all``.

On a loss that is locally quadratic, a step eta along the gradient changes the whole gradient by eta |Hg|, and of that
the (i-1) preceding layers bring about their share: `predicted` is eta (|Hg|/|g|) (i-1)/L, an estimate of ``relative``
that knows nothing of normalizers. Arms trained with different step sizes differ in it trivially, hence `VirtualShift`:
the same quantity for a step ``theta - (c/b) g`` whose size c is in the network's own unit b, once |Hg|/|g| and once
the largest eigenvalue of H.

The layer's gradient where only layers before it moved is computed from that layer on, if the network is a chain.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from diagnostics._path import Grouping, Path, find, from_each_layer
from diagnostics._vectors import Blocks, Comparison, GradientAt, Reference, as_blocks, distance, flat, moved, norm
from diagnostics.curvature import directional_curvature
from diagnostics.gradients import Accumulator, Chunks, GradientProbe, Gradients, Rate
from diagnostics.landscape import check_steps
from diagnostics.probe import Rows, Site, StepView, default_name
from diagnostics.schedules import Schedule
from diagnostics.sharpness import Eigenvalues, check_search, largest_eigenvalues, search_start
from diagnostics.taps import resolve

__all__ = ["CovariateShift", "Shift", "VirtualShift", "Which", "internal_covariate_shift"]

Which = Literal["preceding", "following", "own", "all"]


@dataclass(frozen=True)
class Shift:
    """How the gradients of L layers change when others move; tensors are (L,) float64.

    Attributes:
        which: Which layers moved.
        l2: |G - G'|, loss / parameter.
        relative: |G - G'| / |G|; NaN where |G| is 0.
        cosine: Of the angle between G and G'; NaN where one of them is 0.
        gradient_norm: |G|.
    """

    which: Which
    l2: Tensor
    relative: Tensor
    cosine: Tensor
    gradient_norm: Tensor

    @classmethod
    def of(cls, which: Which, compared: Sequence[Comparison]) -> Shift:
        """From the comparison of G' with G, layer by layer."""

        def table(values: Iterable[float]) -> Tensor:
            return torch.tensor(list(values), dtype=torch.float64)

        return cls(
            which,
            l2=table(c.distance for c in compared),
            relative=table(c.relative for c in compared),
            cosine=table(c.cosine for c in compared),
            gradient_norm=table(c.norm for c in compared),
        )


def internal_covariate_shift(
    gradient_at: GradientAt,
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    layers: Sequence[Sequence[int]],
    which: Which = "preceding",
) -> Shift:
    """Definition 2.1 on any function, by L + 1 gradients of it.

    Args:
        gradient_at: Blocks (a tuple of tensors of the shapes of ``before``) -> (loss, gradient in blocks).
        before: theta_t.
        after: theta_{t+1}, in the same shapes.
        layers: For each layer, in order of execution, the places of its tensors in ``before``.
        which: Which layers move.

    Raises:
        ValueError: If ``which`` is unknown, the shapes differ, or a tensor is in two layers.
    """
    _check_which((which,))
    start, end = as_blocks(before), as_blocks(after)
    if [block.shape for block in start] != [block.shape for block in end]:
        raise ValueError("after must have the shapes of before")
    everything = [index for layer in layers for index in layer]
    if len(set(everything)) != len(everything):
        raise ValueError("a tensor is in two layers")
    gradient = gradient_at(start)[1]
    compared = []
    for place, layer in enumerate(layers):
        changed = gradient_at(_placed(start, end, layers, place, which))[1]
        reference = Reference([gradient[index] for index in layer])
        compared.append(reference.compare([changed[index] for index in layer]))
    return Shift.of(which, compared)


def _placed(before: Blocks, after: Blocks, layers: Sequence[Sequence[int]], place: int, which: Which) -> Blocks:
    """theta_t, with the layers that ``which`` means for layer ``place`` at theta_{t+1}."""
    chosen = {
        "preceding": layers[:place],
        "following": layers[place + 1 :],
        "own": layers[place : place + 1],
        "all": layers,
    }[which]
    theta = list(before)
    for layer in chosen:
        for index in layer:
            theta[index] = after[index]
    return tuple(theta)


def _check_which(which: Sequence[Which]) -> tuple[Which, ...]:
    unknown = [name for name in which if name not in get_args(Which)]
    if unknown or not which or isinstance(which, str) or len(set(which)) != len(which):
        raise ValueError(f"which must hold some of {', '.join(get_args(Which))}, each once, got {which!r}")
    return tuple(which)


def _changed(at: Gradients, path: Path, after: Blocks, which: Which) -> list[Blocks]:
    """G' of every layer; an empty tuple where nothing that it depends on moved."""
    totals = [Accumulator() for _ in path.layers]
    for weight, batch in at.parts:
        for total, blocks in zip(totals, _changed_on(at, path, batch, after, which), strict=True):
            if len(at.parts) == 1:
                total.blocks = blocks
            elif blocks:
                total.add(weight, blocks)
    return [total.blocks for total in totals]


def _changed_on(at: Gradients, path: Path, batch: Any, after: Blocks, which: Which) -> Iterable[Blocks]:
    theta = at.theta
    layers = [layer.indices for layer in path.layers]
    if which == "all":
        at.put(_placed(theta, after, layers, 0, "all"))
        whole = at.gradient_on(batch)[1]
        return [tuple(whole[index] for index in indices) for indices in layers]
    # One forward can tell of most layers moved, and of each layer by itself only as many as there are.
    found = None if path.chain is None or which == "own" else _along_chain(at, path, batch, after, which)
    if found is not None:
        return found
    return _one_by_one(at, layers, batch, after, which)


def _one_by_one(
    at: Gradients, layers: Sequence[Sequence[int]], batch: Any, after: Blocks, which: Which
) -> Iterator[Blocks]:
    for place, indices in enumerate(layers):
        if place == _still(which, len(layers)):
            yield ()
            continue
        at.put(_placed(at.theta, after, layers, place, which))
        yield at.gradient_on(batch, indices)[1]


def _along_chain(at: Gradients, path: Path, batch: Any, after: Blocks, which: Which) -> list[Blocks] | None:
    """G' of every layer by the chain; None where the network takes another way by now, or at these numbers.

    That is told by one more forward, of the whole network where most layers are elsewhere.
    """
    theta = at.theta
    numbers = (after, theta, theta) if which == "preceding" else (theta, theta, after)
    try:
        found = list(from_each_layer(at, path, batch, *numbers, skip=_still(which, len(path.layers))))
    except Exception:  # the user's own code, run in parts, may fail in any way where the whole does not
        return None
    place = len(found) - 1 if which == "preceding" else 0
    loss = found[place][0]
    if loss is not None:
        at.put(_placed(theta, after, [layer.indices for layer in path.layers], place, which))
        whole = at.loss(batch).detach()
        if not torch.equal(whole, loss) and not (whole.isnan() and loss.isnan()):
            return None
    return [blocks for _, blocks in found]


def _still(which: Which, layers: int) -> int | None:
    """The layer that nothing moves for: the first has none before it, the last none behind."""
    return {"preceding": 0, "following": layers - 1}.get(which)


def references(path: Path, gradient: Blocks) -> list[Reference]:
    """G of each layer."""
    return [Reference([gradient[index] for index in layer.indices]) for layer in path.layers]


def measured(
    at: Gradients,
    path: Path,
    plain: Sequence[Reference],
    after: Blocks,
    which: Which,
    noise: frozenset[int] = frozenset(),
) -> list[Comparison]:
    """Definition 2.1 for each layer of a model, ``plain`` being `references`; layers in ``noise`` are undefined."""
    compared = []
    for place, (reference, blocks) in enumerate(zip(plain, _changed(at, path, after, which), strict=True)):
        found = reference.compare(blocks) if blocks else _same(reference.norm)
        compared.append(Comparison(found.norm, found.distance, math.nan, math.nan) if place in noise else found)
    return compared


def _same(norm: float) -> Comparison:
    """The comparison of a vector of this length with itself."""
    defined = norm != 0 and not math.isnan(norm)
    return Comparison(norm, norm - norm, 0.0 if defined else math.nan, 1.0 if defined else math.nan)


def rounding_noise(at: Gradients, path: Path, plain: Sequence[Reference]) -> frozenset[int]:
    """The layers whose gradient is what rounding leaves of zero, such as a bias before batch normalization.

    Moving every parameter by about the last place changes a gradient hardly, and rounding noise entirely. Only layers
    with a gradient far below the largest are put to that test, which costs one evaluation.
    """
    largest = max(reference.norm for reference in plain)
    eps = max(torch.finfo(block.dtype).eps for block in at.theta)
    suspects = [place for place, g in enumerate(plain) if 0 < g.norm <= math.sqrt(eps) * largest]
    if not suspects or not math.isfinite(largest):
        return frozenset()
    at.put(tuple(block * (1 + 2 * eps) for block in at.theta))
    again = at.gradient()[1]

    def apart(place: int) -> Comparison:
        return plain[place].compare([again[index] for index in path.layers[place].indices])

    return frozenset(place for place in suspects if apart(place).relative > 0.1)


class _OfLayers(GradientProbe):
    """A probe of every layer's gradient: which layers move, and how the parameters are grouped to layers."""

    def __init__(
        self,
        which: Sequence[Which],
        group: Grouping,
        layers: Sequence[str] | None,
        *,
        on: Any,
        mode: str,
        chunks: Chunks | None,
        when: Schedule | None,
        name: str | None,
    ) -> None:
        named = default_name(self) if name is None else name
        super().__init__(on=on, mode=mode, chunks=chunks, when=when, name=named)
        if group not in get_args(Grouping):
            raise ValueError(f"group must be 'layer' or 'module', got {group!r}")
        if layers is not None and (isinstance(layers, str) or not layers):
            raise ValueError(f"layers is a list of names in order of execution, got {layers!r}")
        self.which = _check_which(which)
        self.group = group
        self.layers = None if layers is None else tuple(layers)
        self._path = Path((), None)
        self._found_for: tuple[object, ...] = ()

    def bind(self, site: Site) -> None:
        """Forget the layers found.

        Raises:
            ValueError: If a name in ``layers`` matches nothing, or the recorder was given no loss.
        """
        super().bind(site)
        if self.layers is not None:
            resolve(site.model, self.layers)

    def look(self, at: Gradients) -> None:
        """Forget the layers found.

        Raises:
            ValueError: If two evaluations in one place differ.
        """
        super().look(at)
        self._found_for = ()

    def start(self, at: Gradients) -> tuple[Path, Tensor, Blocks]:
        """The layers, loss and gradient at theta_t.

        The layers are found anew where others are trained or reached than last time: parameters are frozen and thawed,
        parts are dropped or chosen by the batch.
        """
        loss, gradient = at()
        if self._found_for != (at.names, at.reached):
            self._path = find(at, self.layers, self.group)
            self._found_for = at.names, at.reached
        return self._path, loss, gradient


class CovariateShift(_OfLayers):
    """Definition 2.1 for every layer, between theta_t and what the user's optimizer made of it.

    For layer i of L, counted in order of execution, G is the gradient of the loss by the layer's parameters at theta_t,
    and G' the same, on the same batch, with the layers before it at theta_{t+1}: ``l2`` is |G - G'|, ``relative`` that
    over |G|, and ``cosine`` that of the angle between them. The first layer has none before it: exactly 0 and 1.

    For each layer, under the name of its first module: ``l2``, ``relative`` and ``cosine``, of the controls with a
    suffix (``l2_following``), and ``gradient_norm`` |G|. Where |G| is zero, or only what rounding leaves of zero,
    ``relative`` and ``cosine`` are NaN: undefined. For the whole network (layer ``-``): ``loss``,
    ``total_gradient_norm``, and ``step_norm`` |theta_{t+1} - theta_t|, which is 0 where the optimizer's step did not
    happen.

    The layers and their order are found from a forward at the first due step, and again whenever other parameters are
    trained, or the loss depends on others, than the last time. A parameter that is frozen, or that the loss does not
    depend on, is in no layer; a tied one belongs to the first layer that is called. What a module with called children
    uses itself (a scale, a token) is a layer of its own under the parameter's name.

    Args:
        which: Which layers move: ``preceding`` (Definition 2.1), ``following``, ``own``, ``all``.
        group: ``layer`` counts a normalizer to the layer it follows; ``module`` makes each module that owns parameters
            a layer of its own.
        layers: Names (globs) of the modules that are a layer each, with all below them, in order of execution. They
            must cover what the loss depends on. With ``group="layer"`` a normalizer that is not named is merged.
        predict: Also write ``predicted``, the training's step size times |Hg|/|g| times (i-1)/L; left out, with a
            warning, where that step size is not one number, or the step was not that times this gradient (momentum,
            an adaptive optimizer, clipping that clipped). It costs about three gradients.
        on: ``"batch"``, the step's own; or a fixed batch, in the form the recorder's loss takes.
        learning_rate: The training's step size; by default that of the optimizer handed to the recorder.
        mode: ``step`` (flags as they are), ``batch`` or ``population``.
        chunks: Stream the examples.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``covariate_shift`` by default.

    Raises:
        ValueError: If ``which``, ``group``, ``layers``, ``mode`` or ``on`` is not one of these.
    """

    def __init__(
        self,
        which: Sequence[Which] = ("preceding",),
        group: Grouping = "layer",
        layers: Sequence[str] | None = None,
        *,
        predict: bool = False,
        on: Any = "batch",
        learning_rate: float | None = None,
        mode: str = "step",
        chunks: Chunks | None = None,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(which, group, layers, on=on, mode=mode, chunks=chunks, when=when, name=name)
        self.predict = predict
        self.learning_rate = learning_rate
        self._rate = Rate(learning_rate)
        self._other_steps = False

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Every layer's gradient at theta_t and with others at theta_{t+1}."""
        mode = self.mode_name(view)
        with self.gradients(view) as at:
            path, loss, gradient = self.start(at)
            after = tuple(view.after[name] for name in at.names)
            plain = references(path, gradient)
            whole = {"loss": float(loss), "total_gradient_norm": math.hypot(*(g.norm for g in plain))}
            whole["step_norm"] = distance(at.theta, after)
            noise = rounding_noise(at, path, plain)
            found = {which: measured(at, path, plain, after, which, noise) for which in self.which}
            rate = self._step_size(view, at, gradient, after, whole) if self.predict else None
            if rate is not None:
                vector = flat(gradient)
                bent = whole["total_gradient_norm"] != 0
                curvature = directional_curvature(at.hessian(), vector).directional if bent else math.nan
                whole["directional_curvature"] = curvature
        rows = [Rows("-", whole, mode=mode)]
        for place, layer in enumerate(path.layers):
            values = {"gradient_norm": plain[place].norm}
            for which, shift in found.items():
                values |= {f"{name}{_suffix(which)}": value for name, value in _statistics(shift[place])}
            if rate is not None:
                values["predicted"] = predicted(rate * whole["directional_curvature"], place, len(path.layers))
            rows.append(Rows(layer.name, values, mode=mode))
        return rows

    def _step_size(
        self, view: StepView, at: Gradients, gradient: Blocks, after: Blocks, whole: Mapping[str, float]
    ) -> float | None:
        """The training's step size, if the step was that times this gradient; else None, with a warning once."""
        rate = self._rate.at(view, self.name, "predicted")
        if rate is None:
            return None
        apart = distance(moved(at.theta, gradient, -rate), after)
        # A sum with a small step is off by half of the last place; what is not finite is off by no number.
        last = math.hypot(*(torch.finfo(block.dtype).eps * norm([block]) for block in at.theta))
        if apart > 0.01 * rate * whole["total_gradient_norm"] + 2 * last:
            if not self._other_steps:
                warnings.warn(
                    f"{self.name} leaves predicted out where the step was not the learning rate times the gradient:"
                    " momentum, an adaptive optimizer, weight decay, clipping, or another batch",
                    UserWarning,
                    stacklevel=2,
                )
            self._other_steps = True
            return None
        return rate


_UNITS = ("curvature", "sharpness")


def predicted(relative: float, place: int, layers: int) -> float:
    """``relative`` (i-1)/L, with i - 1 = ``place``: what the layers before it contribute to a change of all L."""
    return relative * place / layers


class VirtualShift(_OfLayers):
    """Definition 2.1 for steps of equal size in the network's own unit: ``theta' = theta_t - (c/b) g``, never taken.

    b is once |Hg|/|g| (statistics ``*_by_curvature``) and once the largest eigenvalue of H (``*_by_sharpness``). With
    unit k for the k-th c: for each layer ``l2_by_*``, ``relative_by_*`` and ``cosine_by_*``, of the controls as
    ``l2_following_by_*``, and ``predicted_by_*``, (c/b) |Hg|/|g| (i-1)/L; for the whole network (layer ``-``) ``c``,
    ``eta_by_*`` c/b, ``loss_change_by_*`` L(theta') - L(theta_t), ``gradient_difference_by_*`` |g' - g|,
    ``gradient_relative_by_*`` the same over |g|, and ``gradient_cosine_by_*``.
    With unit -1: ``loss``, ``gradient_norm``, ``directional_curvature``, ``sharpness``, ``residual``, ``iterations``
    and ``converged``. Where b is not positive and finite there is no such step, and what depends on it is NaN.

    Args:
        sizes: c, positive.
        which: As of `CovariateShift`, and so are ``group`` and ``layers``.
        group: See there.
        layers: See there.
        on: ``"batch"``, the step's own; or a fixed batch, in the form the recorder's loss takes.
        mode: ``step`` (flags as they are), ``batch`` or ``population``; of the Hessian too.
        tolerance: Of the largest eigenvalue, see `diagnostics.sharpness.largest_eigenvalues`.
        iterations: See there.
        basis: See there.
        chunks: Stream the examples.
        seed: Of the search for the eigenvalue.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``virtual_shift`` by default.

    Raises:
        ValueError: If a size is not positive, or a choice is unknown.
    """

    def __init__(
        self,
        sizes: Sequence[float] = (0.1, 0.5, 1.0, 2.0),
        which: Sequence[Which] = ("preceding",),
        group: Grouping = "layer",
        layers: Sequence[str] | None = None,
        *,
        on: Any = "batch",
        mode: str = "step",
        tolerance: float = 0.01,
        iterations: int = 200,
        basis: int = 32,
        chunks: Chunks | None = None,
        seed: int = 0,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(which, group, layers, on=on, mode=mode, chunks=chunks, when=when, name=name)
        self.sizes = check_steps(sizes)
        check_search(1, tolerance=tolerance, iterations=iterations, basis=basis)
        self.tolerance = tolerance
        self.iterations = iterations
        self.basis = basis
        self.seed = seed

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Every step size in either unit, from theta_t."""
        mode = self.mode_name(view)
        with self.gradients(view) as at:
            path, loss, gradient = self.start(at)
            curvature, top = self._units(at, flat(gradient))
            plain = references(path, gradient)
            noise = rounding_noise(at, path, plain)
            points: dict[str, list[float]] = {}
            of_layers: list[dict[str, list[float]]] = [{} for _ in path.layers]
            for unit, size in zip(_UNITS, (curvature, float(top.values[0])), strict=True):
                for c in self.sizes:
                    eta = c / size if 0 < size < math.inf else math.nan
                    there = self._walk(at, (loss, gradient), eta, unit, points)
                    for which in self.which:
                        shift = measured(at, path, plain, there, which, noise)
                        _append(of_layers, shift, f"{_suffix(which)}_by_{unit}", defined=math.isfinite(eta))
                    for place, values in enumerate(of_layers):
                        share = predicted(eta * curvature, place, len(path.layers))
                        values.setdefault(f"predicted_by_{unit}", []).append(share)
        whole = {
            "loss": float(loss),
            "gradient_norm": norm(gradient),
            "directional_curvature": curvature,
            "sharpness": float(top.values[0]),
            "residual": float(top.residuals[0]),
            "iterations": float(top.iterations),
            "converged": float(top.converged),
        }
        rows = [Rows("-", whole, mode=mode), Rows("-", {"c": self.sizes, **points}, mode=mode)]
        named = zip(path.layers, of_layers, strict=True)
        return rows + [Rows(layer.name, values, mode=mode) for layer, values in named]

    def _units(self, at: Gradients, gradient: Tensor) -> tuple[float, Eigenvalues]:
        hessian = at.hessian()
        if not bool(torch.isfinite(gradient).all()):
            return math.nan, Eigenvalues.unknown(1, len(gradient), self.tolerance)
        top = largest_eigenvalues(
            hessian,
            search_start(gradient, self.seed),
            tolerance=self.tolerance,
            iterations=self.iterations,
            basis=self.basis,
        )
        bent = bool(gradient.any())
        return directional_curvature(hessian, gradient).directional if bent else math.nan, top

    def _walk(
        self, at: Gradients, here: tuple[Tensor, Blocks], eta: float, unit: str, points: dict[str, list[float]]
    ) -> Blocks:
        """theta', where a step of ``eta`` (it may be NaN) leads; what the whole network finds there is appended."""
        loss, gradient = here
        there = moved(at.theta, gradient, -eta)
        end, changed = at(there)
        apart = Reference(gradient).compare(changed)
        for name, value in (
            ("eta", eta),
            ("loss_change", float(end) - float(loss)),
            ("gradient_difference", apart.distance),
            ("gradient_relative", apart.relative),
            ("gradient_cosine", apart.cosine),
        ):
            points.setdefault(f"{name}_by_{unit}", []).append(value)
        return there


def _append(
    of_layers: Sequence[dict[str, list[float]]], shift: Sequence[Comparison], suffix: str, *, defined: bool
) -> None:
    for values, compared in zip(of_layers, shift, strict=True):
        for name, value in _statistics(compared):
            values.setdefault(f"{name}{suffix}", []).append(value if defined else math.nan)


def _statistics(compared: Comparison) -> tuple[tuple[str, float], ...]:
    return ("l2", compared.distance), ("relative", compared.relative), ("cosine", compared.cosine)


def _suffix(which: Which) -> str:
    return "" if which == "preceding" else f"_{which}"
