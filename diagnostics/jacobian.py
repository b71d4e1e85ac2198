"""The Jacobian between two layers, as Ioffe & Szegedy (2015, section 3.3) think of it, and its singular values.

Of two consecutive normalized layers with normalized vectors x-hat and z-hat the paper conjectures that J = d z-hat /
d x-hat has J J^T = I: all singular values 1. N examples run through both; x-hat_i has Q entries, z-hat_i has P. Two
things are called J, named by ``jacobian`` (in functions: ``mode``):

- ``per_example``: N matrices P x Q, with the batch's (or the population's) statistics held fixed. The statistics then
  are constants, and example i's output depends on example i alone.
- ``batch``: one matrix NP x NQ, the derivative of what really is computed. A batch's statistics couple its examples.

With and without batch normalization the same map is measured, ``diag(1/s_out) W diag(g') diag(gain)``, from a layer's
normalized vector to the next one's: s_out is the standard deviation that the next layer's normalizer divides by, or
would; ``gain`` is gamma, or without a normalizer the standard deviation over the batch, which is what a normalizer
would have to give back. With ``form="preactivation"`` it is the map from one normalizer's input to the next one's,
unscaled.

The identities the tests lean on: J of a product of maps is the product; with BN, wide, at random weights, the mean
square of J's singular values is E[g'(x)^2] / Var[g(x)] for standard normal x (linear 1, sigmoid 1.0336, tanh 1.1778,
ReLU pi/(pi-1)); an orthogonal linear layer on white inputs has nothing but ones.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils.hooks import RemovableHandle

from diagnostics import spectrum as of_a_map
from diagnostics.probe import Rows, Site, StepView, default_name
from diagnostics.schedules import Schedule, every
from diagnostics.spectrum import Extremes, MeanSquare, Spectrum, Which
from diagnostics.taps import Layers, resolve

__all__ = [
    "Jacobian",
    "LayerJacobian",
    "LayerMap",
    "WeightSpectrum",
    "constant_units",
    "extreme_values",
    "layer_jacobians",
    "mean_squares",
    "singular_values",
]

Mode = Literal["per_example", "batch"]
Form = Literal["normalized", "preactivation"]
Method = Literal["dense", "matrix_free"]
LIMIT = 2**30  # bytes
CHUNK = 64  # rows of the Jacobian that are computed at once
_OTHERS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _InstanceNorm)


class Jacobian:
    """The derivative of N outputs with respect to N perturbations that are zero, kept as a graph until it is asked.

    Args:
        perturbation: (N, ...) zeros that require a gradient; Q is an example's size.
        output: (N, ...) computed from it; P is an example's size.
        mode: ``per_example`` or ``batch``.
        examples: How many examples have their Jacobian taken, the first ones; None for all. More than there are are
            all, with a warning.

    Raises:
        ValueError: If the output does not depend on the perturbation (says whether it is constant, or was computed
            under no_grad or inference_mode), the numbers of examples differ, in ``per_example`` mode one example's
            output depends on another's input (statistics that are not frozen), or ``examples`` is not positive or
            stands beside mode ``batch``.
    """

    matrix_free = "its extremes(k, generator=...) and mean_square(generator=...)"  # what a refusal to go dense names

    def __init__(self, perturbation: Tensor, output: Tensor, mode: Mode, examples: int | None = None) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be 'per_example' or 'batch', got {mode!r}")
        if perturbation.ndim < 1 or output.ndim < 1 or len(perturbation) != len(output) or not len(output):
            shapes = tuple(perturbation.shape), tuple(output.shape)
            raise ValueError(f"examples are dimension 0 of both ends, got shapes {shapes[0]} and {shapes[1]}")
        if examples is not None and examples < 1:
            raise ValueError(f"examples must be at least 1, or None for all, got {examples}")
        if examples is not None and mode == "batch":
            raise ValueError(
                f"a batch Jacobian is that of the whole batch: examples={examples} means nothing beside it"
            )
        if examples is not None and examples > len(output):
            warnings.warn(f"examples={examples}, but the batch has {len(output)}: all are taken", stacklevel=_outside())
        self.perturbation, self.output, self.mode = perturbation, output, mode
        self.count = len(output) if examples is None else min(examples, len(output))
        self._forward: tuple[Tensor, Tensor] | None = None
        self._path: tuple[int, int] | None = None
        _check_differentiable(perturbation, output)
        self._check_dependence()

    def __repr__(self) -> str:
        return f"Jacobian({self.matrices} of {self.shape[0]} x {self.shape[1]}, mode={self.mode!r})"

    @property
    def shape(self) -> tuple[int, int]:
        """(P, Q) of one example, or (NP, NQ) of the batch."""
        rows, columns = self.output[0].numel(), self.perturbation[0].numel()
        times = len(self.output) if self.mode == "batch" else 1
        return rows * times, columns * times

    @property
    def matrices(self) -> int:
        """How many matrices there are: one an example, or one."""
        return 1 if self.mode == "batch" else self.count

    @property
    def bytes(self) -> int:
        """What `dense` and `singular_values` take at most, see `memory`."""
        return self.memory()

    def memory(self, chunk: int = CHUNK) -> int:
        """Bytes that are taken at most: the matrices, and beside them the rows at work or the decomposition's copies.

        A chunk of rows has the whole batch's cotangents, their gradients at everything that was computed on the way,
        and those at the perturbation; each is counted as if it were kept till the end, and the largest once more for
        what an operation needs in between. All of it is known before any of it is taken.
        """
        rows, columns = self.shape
        size = self.output.element_size()
        every, largest = self._on_the_way()
        wide = 2 * self.output.numel() + every + 2 * largest + 2 * self.perturbation.numel()
        at_work = min(max(1, chunk), rows) * wide * size
        one = rows * columns * max(4, size)
        copied = 2 * max(one, min(of_a_map.WORKSPACE, self.matrices * one))
        return self.matrices * (rows * columns + min(rows, columns)) * size + max(at_work, copied)

    def dense(self, *, limit: int = LIMIT, chunk: int = CHUNK) -> Tensor:
        """All matrices: (n, P, Q), or (1, NP, NQ), on the output's device.

        Args:
            limit: Bytes that may be taken, see `memory`.
            chunk: Rows computed at once, by a vectorized backward. 1 is a plain loop, for a network one of whose
                operations cannot be vectorized.

        Raises:
            ValueError: If it would take more than ``limit``; says how much, and what takes less.
        """
        needed = self.memory(chunk)
        if needed > limit:
            raise ValueError(
                f"{self.matrices} dense Jacobian(s) of {self.shape[0]} x {self.shape[1]} take up to"
                f" {needed / 2**20:.0f} MiB at {min(max(1, chunk), self.shape[0])} rows at once, the limit is"
                f" {limit / 2**20:.0f} MiB: raise limit, take fewer examples, or go matrix-free by"
                f" {self.matrix_free}"
            )
        rows, columns = self.shape
        found = self.output.new_empty((self.matrices, rows, columns))
        for start in range(0, rows, max(1, chunk)):
            stop = min(rows, start + max(1, chunk))
            cotangents = self._cotangents(start, stop)
            if chunk <= 1:
                grads = self._vjp(cotangents[0])[0][None]
            else:
                (grads,) = self._vjp(cotangents, batched=True)
            if self.mode == "batch":
                found[0, start:stop] = grads.reshape(stop - start, columns)
            else:
                found[:, start:stop] = grads[:, : self.count].reshape(stop - start, self.count, columns).transpose(0, 1)
            del cotangents, grads  # before the next ones are made
        return found

    def singular_values(self, *, limit: int = LIMIT, chunk: int = CHUNK) -> Spectrum:
        """Every singular value, (n, K), or (1, K) of the batch Jacobian; arguments as in `dense`."""
        return of_a_map.spectrum(self.dense(limit=limit, chunk=chunk))

    def product(self, index: int = 0) -> Callable[[Tensor], Tensor]:
        """V (Q,) -> J v (P,), or (b, Q) -> (b, P) by a vectorized pass, for the Jacobian number ``index``.

        By differentiating v -> J^T u once more.
        """

        def multiply(vector: Tensor) -> Tensor:
            dummy, pulled = self._transposed()
            (found,) = torch.autograd.grad(
                pulled,
                dummy,
                self._embed(vector, self.perturbation, index),
                retain_graph=True,
                is_grads_batched=vector.ndim > 1,
            )
            return self._extract(found, index, self.output)

        return multiply

    def transposed_product(self, index: int = 0) -> Callable[[Tensor], Tensor]:
        """U (P,) -> J^T u (Q,), or (b, P) -> (b, Q), for the Jacobian number ``index``."""

        def multiply(vector: Tensor) -> Tensor:
            (found,) = self._vjp(self._embed(vector, self.output, index), batched=vector.ndim > 1)
            return self._extract(found, index, self.perturbation)

        return multiply

    def extremes(
        self,
        k: int = 1,
        *,
        which: Which = "largest",
        generator: torch.Generator,
        tolerance: float = 1e-3,
        max_steps: int = 300,
        batched: bool = True,
    ) -> list[Extremes]:
        """The k largest or smallest values of each matrix, see `diagnostics.spectrum.extremes`.

        ``batched`` takes k + 1 products at once by a vectorized pass; False is a plain loop, for a network one of whose
        operations cannot be vectorized.
        """
        return [
            of_a_map.extremes(
                self.product(index),
                self.transposed_product(index),
                self.shape,
                k,
                which=which,
                generator=generator,
                tolerance=tolerance,
                max_steps=max_steps,
                batched=batched,
            )
            for index in range(self.matrices)
        ]

    def mean_square(self, *, samples: int = 32, generator: torch.Generator) -> list[MeanSquare]:
        """An estimate for each matrix, see `diagnostics.spectrum.mean_square`."""
        return [
            of_a_map.mean_square(self.product(index), self.shape, samples=samples, generator=generator)
            for index in range(self.matrices)
        ]

    def _vjp(self, cotangents: Tensor, *, batched: bool = False) -> tuple[Tensor, ...]:
        grads = torch.autograd.grad(
            self.output, self.perturbation, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
        if grads[0] is None:
            raise ValueError(f"{_APART}, though on something else: is their order the network's?")
        return grads

    def _cotangents(self, start: int, stop: int) -> Tensor:
        """(stop - start, N, ...) of rows ``start`` to ``stop``; uncoupled, one row of all examples at a time."""
        size = self.output.numel() if self.mode == "batch" else self.output[0].numel()
        flat = self.output.new_zeros((stop - start, size))
        flat[torch.arange(stop - start), torch.arange(start, stop)] = 1
        if self.mode == "batch":
            return flat.reshape(stop - start, *self.output.shape)
        one = flat.reshape(stop - start, 1, *self.output.shape[1:])
        return one.expand(stop - start, *self.output.shape).contiguous()

    def _transposed(self) -> tuple[Tensor, Tensor]:
        """A cotangent and J^T of it as a graph, made once: linear, so its derivative is J."""
        if self._forward is None:
            dummy = torch.zeros_like(self.output, requires_grad=True)
            (pulled,) = torch.autograd.grad(self.output, self.perturbation, dummy, create_graph=True)
            self._forward = dummy, pulled
        return self._forward

    def _embed(self, vector: Tensor, like: Tensor, index: int) -> Tensor:
        vector, many = vector.to(like), vector.shape[:-1]
        if self.mode == "batch":
            return vector.reshape(*many, *like.shape)
        whole = like.new_zeros((*many, *like.shape))
        whole.select(len(many), index).copy_(vector.reshape(*many, *like.shape[1:]))
        return whole

    def _extract(self, whole: Tensor, index: int, like: Tensor) -> Tensor:
        many = whole.shape[: whole.ndim - like.ndim]
        return (whole if self.mode == "batch" else whole.select(len(many), index)).reshape(*many, -1)

    def _check_dependence(self) -> None:
        """Whether any example's output depends on another's input: each pair of them is parted by a bit of its number.

        Random cotangents of the examples whose bit is set, and then of the others, must leave no gradient at the rest.
        """
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(self.output.shape, generator=generator).to(self.output)
        numbers = torch.arange(len(random), device=random.device)
        if self.mode == "batch" or len(random) == 1:
            self._vjp(random)
            return
        for bit, side in product(range((len(random) - 1).bit_length()), (0, 1)):
            asked = (numbers >> bit) % 2 == side
            (grad,) = self._vjp(random * asked.reshape(-1, *(1,) * (random.ndim - 1)))
            if bool((grad[~asked].nan_to_num(0, 0, 0) != 0).any()):
                raise ValueError(
                    "examples are coupled: an example's output depends on the others' inputs (statistics of the batch"
                    " that are not frozen). Take mode 'batch', or freeze them"
                )

    def _on_the_way(self) -> tuple[int, int]:
        """Entries of the gradients at all that was computed from the perturbation to the output, and at the largest."""
        if self._path is None:
            sizes = [
                sum(math.prod(one.shape) for one in getattr(node, "_input_metadata", ()))
                for node in _between(self.perturbation, self.output)
            ]
            self._path = sum(sizes), max(sizes, default=0)
        return self._path


def _outside() -> int:
    """The stacklevel, for whoever calls this, of the nearest caller outside this module."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__") == __name__:
        frame, level = frame.f_back, level + 1
    return level


_APART = "the second point does not depend on the first"


def _check_differentiable(perturbation: Tensor, output: Tensor) -> None:
    """Raises: ValueError that says why there is no derivative, in place of autograd's that says an element has none."""
    if perturbation.is_inference() or output.is_inference():
        raise ValueError("an end was computed under torch.inference_mode, which keeps nothing to differentiate")
    if not perturbation.requires_grad:
        raise ValueError("the perturbation must require a gradient")
    if not output.requires_grad:
        raise ValueError(f"{_APART}: it is constant, or was computed under torch.no_grad or from detached values")


def _between(source: Tensor, output: Tensor) -> list[Any]:
    """The nodes of autograd's graph from which ``source`` can be reached, the ones that a backward pass visits."""
    end = source.grad_fn
    leads: dict[Any, bool] = {}
    todo: list[tuple[Any, bool]] = [(output.grad_fn, False)]
    while todo:
        node, seen = todo.pop()
        following = [one for one, _ in node.next_functions if one is not None]
        if seen:
            mine = node is end or getattr(node, "variable", None) is source
            leads[node] = mine or any(leads.get(one, False) for one in following)
        elif node not in leads:
            leads[node] = False
            todo += [(node, True), *((one, False) for one in following)]
    return [node for node, leading in leads.items() if leading]


def _graph(apply: Callable[[Tensor], Tensor], x: Tensor, mode: Mode) -> Jacobian:
    """The Jacobian of one call of ``apply``; of a module's, with copies of its buffers."""
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode is on, under which nothing is kept to differentiate")
    perturbation = torch.zeros_like(x, requires_grad=True)
    with torch.enable_grad():
        moved = x.detach() + perturbation
        if isinstance(apply, nn.Module):
            # Looking changes nothing: a normalizer that is training moves its running statistics at every call.
            buffers = {name: buffer.clone() for name, buffer in apply.named_buffers()}
            output = torch.func.functional_call(apply, buffers, (moved,))
        else:
            output = apply(moved)
    found = Jacobian(perturbation, output, mode)
    found.matrix_free = "extreme_values(apply, x, k, generator=...) and mean_squares(apply, x, generator=...)"
    return found


def singular_values(
    apply: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    mode: Mode = "per_example",
    limit: int = LIMIT,
    chunk: int = CHUNK,
) -> Spectrum:
    """Every singular value of the Jacobian of ``apply`` at ``x`` (N, ...), (n, K) by way of dense matrices.

    Args:
        apply: (N, ...) -> (N, ...), called once; in ``per_example`` mode no example's output may depend on another's
            input. A module's buffers are left as they were; what a function moves (a module in a lambda that is
            training, a generator) is moved.
        x: Where.
        mode: ``per_example``: N matrices P x Q, each of one example's output by its own input. ``batch``: one matrix
            NP x NQ, of all outputs by all inputs, for what couples the examples.
        limit: Bytes the matrices may take.
        chunk: Rows at once, see `Jacobian.dense`.

    Raises:
        ValueError: As `Jacobian` and `Jacobian.dense`.
    """
    return _graph(apply, x, mode).singular_values(limit=limit, chunk=chunk)


def extreme_values(
    apply: Callable[[Tensor], Tensor],
    x: Tensor,
    k: int = 1,
    *,
    mode: Mode = "per_example",
    which: Which = "largest",
    generator: torch.Generator,
    tolerance: float = 1e-3,
    max_steps: int = 300,
    batched: bool = True,
) -> list[Extremes]:
    """The ``k`` largest or smallest singular values at ``x`` (N, ...), without the matrix: one result an example.

    In mode ``batch`` one result, of the derivative of all outputs by all inputs (see `singular_values`). ``batched`` as
    in `Jacobian.extremes`.

    Raises:
        ValueError: As `Jacobian` and `diagnostics.spectrum.extremes`.
    """
    found = _graph(apply, x, mode)
    return found.extremes(
        k, which=which, generator=generator, tolerance=tolerance, max_steps=max_steps, batched=batched
    )


def mean_squares(
    apply: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    mode: Mode = "per_example",
    samples: int = 32,
    generator: torch.Generator,
) -> list[MeanSquare]:
    """|J|_F^2 / K at ``x`` (N, ...) with its standard error, without the matrix: one result an example.

    K = min(P, Q) is the number of singular values. In mode ``batch`` one result, see `singular_values`.

    Raises:
        ValueError: As `Jacobian` and `diagnostics.spectrum.mean_square`.
    """
    return _graph(apply, x, mode).mean_square(samples=samples, generator=generator)


@dataclass(frozen=True, repr=False)
class LayerMap:
    """The map from what one module puts out to what the next one is given, at the examples that were run.

    Attributes:
        source: Name of the module that sends.
        target: Name of the module that receives.
        jacobian: The derivative: ``singular_values()``, ``extremes(k, generator=...)``, ``mean_square(generator=...)``
            or ``dense()`` of it, see `Jacobian`.
        inputs: (N, C, ...) where the map begins: the source's output, or its input in form ``preactivation``.
        outputs: (N, C, ...) where it ends: the target's input, not yet normalized.
        constant: Units of the target that do not vary over the batch, and have a row of zeros in form ``normalized``.
        form: ``normalized`` or ``preactivation``, see `layer_jacobians`.
    """

    source: str
    target: str
    jacobian: Jacobian
    inputs: Tensor
    outputs: Tensor
    constant: int
    form: Form = "normalized"

    def __repr__(self) -> str:
        ends = f"{self.source!r} to {self.target!r}"
        return f"LayerMap({ends}, form={self.form!r}, constant={self.constant}, {self.jacobian})"


def layer_jacobians(
    model: nn.Module,
    layers: Layers,
    forward: Callable[[], Any],
    *,
    form: Form = "normalized",
    mode: Mode = "per_example",
    examples: int | None = None,
) -> list[LayerMap]:
    """The maps between consecutive ``layers`` of ``model``, from one call of ``forward``, which must run the model.

    A map goes from what the first module puts out to what the next one is given, and contains neither module (form
    ``preactivation``: from what the first one is given, so it contains that one). Name the normalizers or, without BN,
    what stands in their place (`nn.Identity` after each linear layer): from one linear layer to the next the map would
    be the nonlinearity alone. Any two modules will do.

    The model is in whatever mode it is in: batch normalizations that are training give the batch's statistics, frozen
    in ``per_example`` mode. It should be guarded (`diagnostics.guard.guard`), or its running statistics move.

    In form ``normalized`` a unit that does not vary over the batch has no normalized value where nothing (no epsilon)
    is added to its variance: its row is zero, as if its value were, and it is counted in ``constant``. Where it sends,
    its standard deviation, the gain, is zero and so is its column. What is no batch normalization is no normalizer
    here; one that takes statistics of another kind (layer, group or instance normalization, or a batch normalization
    with a forward of its own, in training) is refused.

    Args:
        model: Any module.
        layers: Two modules or more, see `diagnostics.taps.resolve`; in the order in which the model holds them.
        forward: Runs the model once on the batch.
        form: ``normalized``: from the first one's normalized vector (what it puts out, in units of gamma, or of its
            standard deviation where it is no batch normalization) to the next one's (what that is given, normalized).
            ``preactivation``: from what the first one is given to what the next one is given, unscaled, which
            contains the first module.
        mode: ``per_example``: a matrix an example, with the batch's statistics as constants. ``batch``: one matrix, the
            derivative of all outputs by all inputs, statistics included.
        examples: How many examples have their Jacobian taken, the first ones, in ``per_example`` mode; statistics come
            from all. None for all, and for mode ``batch`` nothing else; more than there are are all, with a warning.

    Raises:
        ValueError: If ``examples`` is not positive or stands beside mode ``batch``, fewer than two layers are named,
            one is not run, is run without gradients or before the one that sends, a map is undefined (see `Jacobian`),
            or in form ``normalized`` one value has to do for a standard deviation (a batch of one) or a layer's
            statistics are of another kind.
        TypeError: If the input or output of a layer is not one floating-point tensor.
    """
    if form not in get_args(Form):
        raise ValueError(f"form must be 'normalized' or 'preactivation', got {form!r}")
    if examples is not None and examples < 1:
        raise ValueError(f"examples must be at least 1, or None for all, got {examples}")
    modules = resolve(model, layers)
    if len(modules) < 2:
        raise ValueError(f"a map has two ends: name 2 layers or more, got {', '.join(modules)}")
    if torch.is_inference_mode_enabled():
        raise ValueError("torch.inference_mode is on, under which nothing is kept to differentiate")
    points = [_Point(name, module, form) for name, module in modules.items()]
    with _hooked(model, points, frozen=mode == "per_example"), torch.enable_grad():
        forward()
    for point in points:
        if point.heard is None:
            raise ValueError(f"layer {point.name!r} was not run on the batch")
        if point.without:
            raise ValueError(
                f"layer {point.name!r} was run under torch.{point.without}, which keeps nothing to differentiate"
            )
    found = []
    for source, target in pairwise(points):
        assert source.perturbation is not None
        assert source.inputs is not None
        assert target.heard is not None
        output = target.heard if form == "preactivation" else target.normalized(frozen=mode == "per_example")
        try:
            jacobian = Jacobian(source.perturbation, output, mode, examples)
        except ValueError as error:
            raise ValueError(f"from {source.name!r} to {target.name!r}: {error}") from error
        jacobian.matrix_free = "map.jacobian.extremes(k, generator=...) and map.jacobian.mean_square(generator=...)"
        inputs, outputs = source.inputs.detach(), target.heard.detach()
        found.append(LayerMap(source.name, target.name, jacobian, inputs, outputs, target.constant, form))
    return found


class _Point:
    """One end of a map: perturbs what leaves it (or what enters it) and hears what enters it, at its first call."""

    def __init__(self, name: str, module: nn.Module, form: Form) -> None:
        self.name, self.module, self.form = name, module, form
        self.heard: Tensor | None = None
        self.inputs: Tensor | None = None
        self.perturbation: Tensor | None = None
        self.without = ""  # what kept autograd from following
        self.constant = 0
        if form == "normalized":
            self._check_statistics()

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.heard is not None:
            return None
        value = self._checked(args[0] if args else None, "input")
        if not torch.is_grad_enabled():
            self.without = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        # A copy: what comes next may overwrite the tensor in place, and autograd would follow.
        self.heard = value.clone()
        return (self._perturb(value, 1.0), *args[1:]) if self.form == "preactivation" else None

    def after(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Tensor | None:
        if self.form == "preactivation" or self.perturbation is not None:
            return None
        value = self._checked(output, "output")
        return self._perturb(value, self._gain(value))

    def normalized(self, *, frozen: bool) -> Tensor:
        """What was heard, by the mean and standard deviation that this point's normalizer takes, or would."""
        assert self.heard is not None
        value, module = self.heard, self.module
        if isinstance(module, _BatchNorm) and not module.training and module.running_var is not None:
            mean, variance = module.running_mean, module.running_var
            assert mean is not None
        else:
            self._check_size(value)
            variance, mean = torch.var_mean(value, dim=_pooled(value), correction=0)
        if frozen:
            mean, variance = mean.detach(), variance.detach()
        epsilon = module.eps if isinstance(module, _BatchNorm) else 0.0
        constant = constant_units(value) if epsilon == 0 else torch.zeros_like(variance, dtype=torch.bool)
        self.constant = int(constant.sum())
        scale = torch.where(constant, 1.0, variance + epsilon).sqrt()
        normalized = (value - _per_unit(mean, value)) / _per_unit(scale, value)
        return torch.where(_per_unit(constant, value), 0.0, normalized)

    def _perturb(self, value: Tensor, gain: Tensor | float) -> Tensor:
        self.inputs = value
        self.perturbation = torch.zeros_like(value, requires_grad=True)
        return value + gain * self.perturbation

    def _gain(self, output: Tensor) -> Tensor | float:
        if isinstance(self.module, _BatchNorm):
            return 1.0 if self.module.weight is None else _per_unit(self.module.weight.detach(), output)
        self._check_size(output)
        value = output.detach()
        return _per_unit(
            torch.where(constant_units(value), 0.0, value.var(dim=_pooled(value), correction=0).sqrt()), value
        )

    def _check_size(self, value: Tensor) -> None:
        if value.numel() <= value.shape[1]:
            raise ValueError(
                f"layer {self.name!r}: one value a unit has no standard deviation, got shape {tuple(value.shape)};"
                " take more examples, or form 'preactivation'"
            )

    def _check_statistics(self) -> None:
        module = self.module
        own = isinstance(module, _BatchNorm) and module.training and not _known(module)
        if own or isinstance(module, _OTHERS):
            raise ValueError(
                f"layer {self.name!r} is a {type(module).__name__}, whose statistics are not those of the batch; take"
                " form 'preactivation'"
            )

    def _checked(self, value: Any, signal: str) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim < 2:
            described = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"layer {self.name!r}: its {signal} is no floating-point tensor (N, C, ...), but {described}"
            )
        return value


@contextmanager
def _hooked(model: nn.Module, points: Sequence[_Point], *, frozen: bool) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        if frozen:
            handles += [module.register_forward_hook(_freeze) for module in model.modules() if _known(module)]
        for point in points:
            handles.append(point.module.register_forward_pre_hook(point.before))
            handles.append(point.module.register_forward_hook(point.after))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _known(module: nn.Module) -> bool:
    # Its forward, not a subclass's: what another one computes is not ours to write down.
    return isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward


def _freeze(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
    """Batch normalization again, with the statistics of its batch as constants."""
    assert isinstance(module, _BatchNorm)
    if not module.training and module.running_var is not None:
        return None
    value: Tensor = args[0]
    variance, mean = torch.var_mean(value.detach(), dim=_pooled(value), correction=0)
    scale = torch.rsqrt(variance + module.eps)
    normalized = (value - _per_unit(mean, value)) * _per_unit(scale, value)
    if module.weight is None:
        return normalized
    scaled = normalized * _per_unit(module.weight, value)
    return scaled if module.bias is None else scaled + _per_unit(module.bias, value)


def constant_units(values: Tensor) -> Tensor:
    """(C,) which units of ``values`` (N, C, ...) do not vary, but for rounding; what is not finite varies."""
    flat = values.detach().movedim(1, 0).flatten(1)
    low, high = flat.aminmax(dim=1)
    least = 4 * torch.finfo(values.dtype).eps * torch.maximum(low.abs(), high.abs())
    return ((high - low) <= least) & (high - low).isfinite()


def _pooled(value: Tensor) -> tuple[int, ...]:
    return (0, *range(2, value.ndim))


def _per_unit(unit: Tensor, value: Tensor) -> Tensor:
    return unit.reshape(-1, *(1,) * (value.ndim - 2))


class LayerJacobian:
    """Singular values of the maps between consecutive layers, on a fixed probe batch.

    A map goes from what the first module puts out to what the next one is given, and contains neither module (form
    ``preactivation``: from what the first one is given, so it contains that one). Name the normalizers or, without BN,
    what stands in their place (`nn.Identity` after each linear layer): from one linear layer to the next the map would
    be the nonlinearity alone.

    Per map, under the name of the layer that receives: ``singular_value``, unit k the k-th largest (from 0), the median
    over examples; and as unit -1 the means over examples of ``rank``, ``spread``, ``mean_square``, ``smallest``,
    ``largest``, ``distance`` (see `diagnostics.spectrum.Spectrum`), and ``nonfinite``, examples whose Jacobian is not
    finite and is left out. Matrix-free: the ``k`` largest values and as unit -1 ``largest``, ``residual`` (the worst),
    ``converged`` (the share of examples), ``mean_square`` and ``mean_square_error``, its standard error. In form
    ``normalized`` also ``constant``, units that receive but do not vary, whose rows are zero (see `layer_jacobians`).

    Per layer besides, the conjecture's premise: ``effective_dimension`` and ``correlation`` of its vectors over the
    whole probe batch (`diagnostics.spectrum.effective_dimension`), positions counting as examples.

    Args:
        layers: Two modules or more, in the model's order, see above.
        probe_batch: The examples, in the form the recorder's loss (or the model) takes.
        form: ``normalized``: from one normalized vector to the next. ``preactivation``: from what one module is given
            to what the next one is given, unscaled, which contains the first. See `layer_jacobians`.
        jacobian: ``per_example``: a matrix an example, with the batch's statistics as constants. ``batch``: one matrix,
            the derivative of all outputs by all inputs, statistics included.
        mode: ``batch`` or ``population`` statistics in the normalizers; dropout is off in both.
        examples: How many examples have their Jacobian taken (the first ones); statistics come from the whole batch.
            None for all, and for jacobian ``batch`` nothing else. By default the first 32, or all where there are
            fewer or ``jacobian`` is ``batch``. More than there are are all, with a warning.
        method: ``dense`` or ``matrix_free``.
        k: Values that are sought matrix-free, 1 to K = min(P, Q). None for 5, or K where that is less; a larger one is
            K, with a warning. Nothing beside ``dense``, which gives all.
        limit: Bytes that dense matrices may take.
        seed: Of the random directions of the matrix-free way.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``layer_jacobian.<jacobian>`` by default.

    Raises:
        ValueError: For an unknown form, jacobian, mode or method; a count that is not positive; ``examples`` beside a
            batch Jacobian; or a batch Jacobian with population statistics, which couple nothing.
    """

    def __init__(
        self,
        layers: Layers,
        probe_batch: Any,
        *,
        form: Form = "normalized",
        jacobian: Mode = "per_example",
        mode: Literal["batch", "population"] = "batch",
        examples: int | Literal["first 32"] | None = "first 32",
        method: Method = "dense",
        k: int | None = None,
        limit: int = LIMIT,
        seed: int = 0,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        for field, value, choices in (
            ("form", form, get_args(Form)),
            ("jacobian", jacobian, get_args(Mode)),
            ("mode", mode, ("batch", "population")),
            ("method", method, get_args(Method)),
        ):
            if value not in choices:
                raise ValueError(f"{field} must be {' or '.join(map(repr, choices))}, got {value!r}")
        if jacobian == "batch" and mode == "population":
            raise ValueError("population statistics couple no examples: take jacobian 'per_example', or mode 'batch'")
        usual = isinstance(examples, str)
        if usual and examples != "first 32":
            raise ValueError(f"examples must be a number, or None for all, got {examples!r}")
        asked = None if isinstance(examples, str) else examples
        if jacobian == "batch" and asked is not None:
            raise ValueError(f"a batch Jacobian is that of the whole batch: examples={asked} means nothing beside it")
        for field, count in (("examples", asked), ("k", k), ("limit", limit)):
            if count is not None and count < 1:
                raise ValueError(f"{field} must be at least 1, got {count}")
        self.layers, self.probe_batch = layers, probe_batch
        self.form: Form = form
        self.jacobian: Mode = jacobian
        self.mode, self.examples, self.k, self.limit, self.seed = mode, asked, k, limit, seed
        self._most = 32 if usual and jacobian == "per_example" else None
        self.method: Method = method
        self.when: Schedule = every(1) if when is None else when
        self.name = default_name(self, jacobian) if name is None else name

    @property
    def active(self) -> bool:
        """It runs forwards of its own."""
        return True

    def bind(self, site: Site) -> None:
        """Check that the layers exist.

        Raises:
            ValueError: If a pattern matches nothing, or there are fewer than two layers.
        """
        found = resolve(site.model, self.layers)
        if len(found) < 2:
            raise ValueError(f"a map has two ends: name 2 layers or more, got {', '.join(found)}")

    def measure(self, view: StepView) -> Iterable[Rows]:
        """The maps at theta_t."""
        mode = view.site.mode_name(self.mode)
        rows = []
        with view.at(mode=self.mode) as model:
            maps = layer_jacobians(
                model,
                self.layers,
                lambda: view.forward(self.probe_batch),
                form=self.form,
                mode=self.jacobian,
                examples=self.examples,
            )
            for one in maps:
                one.jacobian.matrix_free = "method='matrix_free'"
                if self._most is not None:
                    one.jacobian.count = min(self._most, one.jacobian.count)
            points = {one.source: one.inputs for one in maps} | {maps[-1].target: maps[-1].outputs}
            for layer, values in points.items():
                rows.append(Rows(layer, _premise(values), mode=mode))
            for one in maps:
                rows += self._dense(one, mode) if self.method == "dense" else self._matrix_free(one, mode)
                if self.form == "normalized":
                    rows.append(Rows(one.target, {"constant": float(one.constant)}, mode=mode))
        return rows

    def _dense(self, one: LayerMap, mode: str) -> list[Rows]:
        found = one.jacobian.singular_values(limit=self.limit)
        finite = ~found.values[:, 0].isnan()
        kept = Spectrum(found.values[finite].cpu(), found.shape, found.eps)
        names = ("rank", "spread", "mean_square", "smallest", "largest", "distance")
        whole = (
            {name: _mean(getattr(kept, name)) for name in names} if len(kept.values) else dict.fromkeys(names, math.nan)
        )
        whole["nonfinite"] = float((~finite).sum())
        unknown = torch.full(found.values.shape[1:], math.nan)
        middle = kept.values.double().median(dim=0).values if len(kept.values) else unknown
        return [Rows(one.target, {"singular_value": middle.numpy()}, mode=mode), Rows(one.target, whole, mode=mode)]

    def _matrix_free(self, one: LayerMap, mode: str) -> list[Rows]:
        generator = torch.Generator().manual_seed(self.seed)
        k = min(5 if self.k is None else self.k, *one.jacobian.shape)
        if self.k is not None and k < self.k:
            warnings.warn(
                f"{self.name}: k={self.k}, but the map from {one.source!r} to {one.target!r} has K={k} singular values:"
                " all are taken",
                stacklevel=_outside(),
            )
        found = one.jacobian.extremes(k, generator=generator)
        squares = one.jacobian.mean_square(generator=generator)
        values = torch.stack([result.values for result in found])
        errors = torch.tensor([square.standard_error for square in squares], dtype=torch.float64)
        whole = {
            "largest": _mean(values[:, 0]),
            "residual": float(max(result.residuals.max() for result in found)),
            "converged": _mean(torch.tensor([float(result.converged) for result in found])),
            "mean_square": _mean(torch.tensor([square.value for square in squares], dtype=torch.float64)),
            "mean_square_error": float(errors.square().sum().sqrt() / len(errors)),
        }
        middle = values.median(dim=0).values
        return [Rows(one.target, {"singular_value": middle.numpy()}, mode=mode), Rows(one.target, whole, mode=mode)]


class WeightSpectrum:
    """Singular values of weight matrices alone, scaled to a mean square of 1: what no nonlinearity has a part in.

    Per layer ``singular_value``, unit k the k-th largest, and as unit -1 ``rank``, ``spread``, ``smallest``,
    ``largest`` and ``distance`` (see `diagnostics.spectrum.Spectrum`), and ``norm``, the Frobenius norm before scaling.
    A matrix P x Q is scaled by ``sqrt(min(P, Q)) / norm``: orthogonal weights have nothing but ones, and independent
    normal ones of any size, where P = Q, the quarter circle law on 0 to 2. Convolutions are matrices of (outputs, all
    else).

    Args:
        layers: Modules that own a parameter ``weight`` of two dimensions or more.
        when: A schedule, step -> bool.
        name: The probe's name in the record.
    """

    def __init__(self, layers: Layers, *, when: Schedule | None = None, name: str | None = None) -> None:
        self.layers = layers
        self.when: Schedule = every(1) if when is None else when
        self.name = default_name(self) if name is None else name
        self._weights: dict[str, nn.Parameter] = {}

    @property
    def active(self) -> bool:
        """It looks at parameters alone, as they were when the step began."""
        return True

    def bind(self, site: Site) -> None:
        """Find the matrices.

        Raises:
            ValueError: If a pattern matches nothing, or a module has no weight matrix.
        """
        self._weights = {}
        for name, module in resolve(site.model, self.layers).items():
            weight = module._parameters.get("weight")
            if weight is None or weight.ndim < 2:
                raise ValueError(f"layer {name!r} has no weight matrix, it is a {type(module).__name__}")
            self._weights[name] = weight

    def measure(self, view: StepView) -> Iterable[Rows]:
        """The matrices at theta_t."""
        names = {id(parameter): name for name, parameter in view.parameters.items()}
        mode = view.site.mode_name("step")  # the weights are the same in either
        rows = []
        for layer, weight in self._weights.items():
            matrix = view.before[names[id(weight)]].flatten(1)
            norm = float(torch.linalg.matrix_norm(matrix.double()))
            found = of_a_map.spectrum(matrix * (math.sqrt(min(matrix.shape)) / norm if norm else 1.0))
            whole = {
                name: _mean(getattr(found, name)) for name in ("rank", "spread", "smallest", "largest", "distance")
            }
            rows += [
                Rows(layer, {"singular_value": found.values.cpu().numpy()}, mode=mode),
                Rows(layer, whole | {"norm": norm}, mode=mode),
            ]
        return rows


def _premise(values: Tensor) -> dict[str, float]:
    flat = values.movedim(1, -1).reshape(-1, values.shape[1]).cpu()
    return {
        "effective_dimension": of_a_map.effective_dimension(flat),
        "correlation": of_a_map.correlation(flat),
    }


def _mean(values: Tensor) -> float:
    """Over the examples where it is defined: a matrix of zeros has no spread."""
    return float(values.double().nanmean())
