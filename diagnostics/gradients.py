"""The loss, its gradient and its Hessian as functions of the parameters: the one place that knows networks.

    with Gradients.of_model(model, loss, batch) as at:   # loss(model, batch) -> scalar
        ray = along_gradient(at, at.theta, steps=(0.1, 0.2))
        top = largest_eigenvalues(at.hessian(), start)

``at(theta) -> (loss, gradient)`` on vectors of parameters as blocks (a tuple of tensors, one for each parameter that
requires a gradient). Every evaluation starts from the same buffers, random streams and attributes of modules, so that
two evaluations differ by the parameters alone: dropout draws one mask for all of them. All happens under one guard; the
first evaluation shows what a forward of this model moves, and only that is put back before each later one.

A batch too large for one forward is streamed in `Chunks`. That changes the function where examples are coupled, as by
batch normalization, and is refused there unless it is asked for as ghost batches.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from diagnostics._vectors import Blocks, Reference, unflat
from diagnostics.curvature import hessian_vector_product
from diagnostics.guard import Generator, guard, is_normalizer, isolated, normalizers
from diagnostics.probe import Before, Loss, Site, StepView
from diagnostics.schedules import Schedule, every
from diagnostics.taps import named_parameters

__all__ = ["Chunks", "Gradients", "Hessian"]


@dataclass(frozen=True)
class Chunks:
    """How a batch is streamed: so many examples at a time, each chunk from the same random streams.

    Attributes:
        size: Examples a chunk, the last one may be smaller.
        reduction: Whether the loss is the ``mean`` over examples or their ``sum``; checked on the first chunk, with
            ghost batches or random masks as far as one can be told from the other. A mean whose weights depend on the
            examples (classes, tokens that do not count) is no mean over examples.
        ghost: Allow chunks through normalizers that use the statistics of the batch. Each chunk is then normalized by
            its own (ghost batches), which is another function of the parameters than the whole batch's loss.

    Raises:
        ValueError: If the size is not positive or the reduction is unknown.
    """

    size: int
    reduction: Literal["mean", "sum"] = "mean"
    ghost: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"a chunk has at least one example, got size={self.size!r}")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction must be 'mean' or 'sum', got {self.reduction!r}")

    def split(self, batch: Any) -> list[tuple[float, Any]]:
        """(weight, chunk) of each: the loss of the batch is the weighted sum of theirs.

        Raises:
            ValueError: If the batch is not made of tensors with as many examples each.
        """
        tensors = _tensors(batch)
        sizes = {len(tensor) for tensor in tensors if tensor.ndim}
        if len(sizes) != 1 or len(tensors) != sum(1 for tensor in tensors if tensor.ndim):
            raise ValueError(
                "to be streamed in chunks a batch must be a tensor, or a tuple, list or mapping of tensors,"
                f" all with the examples in dimension 0, got {type(batch).__name__}"
            )
        examples = sizes.pop()
        found = []
        for start in range(0, examples, self.size):
            stop = min(start + self.size, examples)
            weight = (stop - start) / examples if self.reduction == "mean" else 1.0
            found.append((weight, _cut(batch, start, stop)))
        return found


def _couples(module: nn.Module) -> bool:
    """Whether it computes an example's output from the others of the batch too."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
        return True
    return is_normalizer(module) and module.training


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, Tensor):
        return [batch]
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, list | tuple) or not all(isinstance(part, Tensor) for part in parts):
        return []
    return list(parts)


def _twice(batch: Any) -> Any:
    """Every example two times."""
    if isinstance(batch, Tensor):
        return torch.cat((batch, batch))
    if isinstance(batch, Mapping):
        return {name: torch.cat((part, part)) for name, part in batch.items()}
    parts = [torch.cat((part, part)) for part in batch]
    return parts if isinstance(batch, list) else tuple(parts)


def _cut(batch: Any, start: int, stop: int) -> Any:
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {name: part[start:stop] for name, part in batch.items()}
    return [part[start:stop] for part in batch] if isinstance(batch, list) else tuple(p[start:stop] for p in batch)


class Surroundings:
    """What an evaluation may move besides parameters: buffers, random streams, plain attributes of modules."""

    def __init__(self, view: StepView) -> None:
        self._entry = view._entry
        self._buffers = [(*place, place[0]._buffers[place[1]]) for place in self._entry.places]
        self._versions = [_version(buffer) for *_, buffer in self._buffers]
        self._attributes = [(module, dict(vars(module))) for module, _ in self._entry.training]
        self._kept = dict(self._attributes)
        self._moved: tuple[list[int], list[int]] | None = None
        self._made: list[nn.Module] = []
        self._ran = False
        self.random = False

    def reset(self) -> None:
        """As the step found them; call it before each evaluation."""
        if not self._ran:
            self._ran = True
            return
        if self._moved is None:
            self._moved = self._moved_buffers(), self._moved_attributes()
            self._made = self._entry.with_new_buffers()
            self.random = self._entry.streams.moved()
        buffers, attributes = self._moved
        fresh: dict[int, Tensor] = {}
        for index in buffers:
            owner, name, key, _ = self._buffers[index]
            if key not in fresh:
                fresh[key] = self._entry.buffers[key].clone()
            owner._buffers[name] = fresh[key]
        for index in attributes:
            module, kept = self._attributes[index]
            for name in vars(module).keys() - kept.keys():
                del vars(module)[name]
            vars(module).update(kept)
        for module in self._made:
            self._entry.drop_new_buffers(module)
        # What may be changed without becoming another object is given anew each time, whether it moved or not.
        self._entry.renew_mutable()
        for module, name, _ in self._entry.mutable:
            self._kept[module][name] = vars(module)[name]
        if self.random:
            self._entry.streams.restore()

    def verify(self) -> None:
        """Whether only that has moved which the first evaluation moved.

        Raises:
            ValueError: If not: later evaluations did not start from where the first did.
        """
        if self._moved is None:
            return
        known = set(self._moved[0])
        late = [index for index in self._moved_buffers() if index not in known]
        if late:
            raise ValueError(f"buffer {self._buffers[late[0]][1]!r} is moved by some forwards and not by others")
        attributes = set(self._moved_attributes()) - set(self._moved[1])
        made = [module for module in self._entry.with_new_buffers() if module not in self._made]
        modules = [self._attributes[index][0] for index in sorted(attributes)] + made
        if modules:
            name = type(modules[0]).__name__
            raise ValueError(f"an attribute or buffer of a {name} is changed by some forwards and not by others")
        if not self.random and self._entry.streams.moved():
            raise ValueError("the forward draws random numbers at some parameters and not at others")

    def _moved_buffers(self) -> list[int]:
        return [
            index
            for index, ((owner, name, _, buffer), version) in enumerate(zip(self._buffers, self._versions, strict=True))
            if owner._buffers.get(name) is not buffer or _version(buffer) != version
        ]

    def _moved_attributes(self) -> list[int]:
        return [index for index, (module, kept) in enumerate(self._attributes) if not _same(vars(module), kept)]


def _same(found: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Whether the very objects are there: what is equal here may be another elsewhere, and must be put back."""
    return len(found) == len(kept) and all(map(operator.is_, found.values(), kept.values()))


def _is_tuple_of_tensors(batch: Any) -> bool:
    return type(batch) is tuple and all(type(part) is Tensor for part in batch)


def _version(tensor: Tensor | None) -> int:
    return tensor._version if tensor is not None else 0


class Gradients:
    """``at(theta) -> (loss, gradient)`` of one model on one batch; made by `of_model` or `of_view`.

    Attributes:
        theta: theta_t, one tensor for each parameter that requires a gradient; do not write to it.
        names: Their names.
        parameters: The model's own Parameter objects, in the same order.
        parts: (weight, batch) of each chunk; one of weight 1 for a batch that is not streamed.
        reached: For each parameter whether the loss depended on it when its whole gradient was last taken.
    """

    def __init__(self, view: StepView, batch: Any, *, chunks: Chunks | None) -> None:
        chosen = {name: p for name, p in view.parameters.items() if p.requires_grad}
        if not chosen:
            raise ValueError("there is nothing to differentiate by: no parameter of the model requires a gradient")
        self.view = view
        self.names = tuple(chosen)
        self.parameters = tuple(chosen.values())
        self.theta: Blocks = tuple(view.before[name] for name in chosen)
        self.surroundings = Surroundings(view)
        self.serial = 0
        self.reached: tuple[bool, ...] = ()
        self._chunks = chunks
        self._lent: tuple[Any, Any, list[int], list[Tensor]] | None = None  # whose copy, the copy, its state, its parts
        self.parts: list[tuple[float, Any]] = [(1.0, batch)]
        if chunks is not None:
            coupling = [type(module).__name__ for module in view.model.modules() if _couples(module)]
            if coupling and not chunks.ghost:
                raise ValueError(
                    f"chunks change what {coupling[0]} computes from the statistics of its batch:"
                    " ask for them as ghost batches (Chunks(..., ghost=True)), or for mode='population'"
                )
            self.parts = chunks.split(batch)

    @classmethod
    @contextmanager
    def of_model(
        cls,
        model: nn.Module,
        loss: Loss,
        batch: Any,
        *,
        mode: str = "step",
        chunks: Chunks | None = None,
        generators: Iterable[Generator] = (),
    ) -> Iterator[Gradients]:
        """The model as it is now, for the length of a block; afterwards it is as before.

        Args:
            model: Any module.
            loss: ``loss(model, batch) -> scalar``.
            batch: What the loss takes.
            mode: ``step`` (flags as they are), ``batch`` or ``population``, see `diagnostics.guard.set_mode`.
            chunks: Stream the batch.
            generators: Random generators the forward draws from that are no attribute of a module.

        Raises:
            ValueError: If no parameter requires a gradient, or chunks would change the function.
        """
        site = Site(model, loss, None, tuple(generators))
        before = Before(site, batch)
        view = StepView(
            step=0,
            batch=before.batch,
            site=site,
            before=before.parameters,
            after=before.parameters,
            learning_rate=None,
            _entry=before,
            _parameters=named_parameters(model),
        )
        with guard(model, generators, parameters=False), cls.of_view(view, batch, mode=mode, chunks=chunks) as at:
            yield at

    @classmethod
    @contextmanager
    def of_view(
        cls, view: StepView, batch: Any, *, mode: str = "step", chunks: Chunks | None = None
    ) -> Iterator[Gradients]:
        """The model as the step found it, on any batch; arguments as in `of_model`.

        For a probe's `measure`: the guard around that, and not the end of the block, puts the model back.
        """
        with view.at(mode=mode, undo=False):
            at = cls(view, batch, chunks=chunks)
            yield at
            at.surroundings.verify()

    def put(self, theta: Sequence[Tensor], which: Iterable[int] | None = None) -> None:
        """Let the model's parameters (all, or those numbered ``which``) show the numbers of ``theta``, no copies."""
        self.serial += 1
        if which is None:
            for parameter, value in zip(self.parameters, theta, strict=True):
                parameter.data = value
        else:
            for index in which:
                self.parameters[index].data = theta[index]

    def loss(self, batch: Any, forward: Callable[..., Any] | None = None) -> Tensor:
        """The loss on one part of the batch, with its graph, where `put` left the parameters.

        ``forward`` stands in for the model's own.

        Raises:
            ValueError: If it is not one number, or has no graph.
        """
        self.surroundings.reset()
        with _replaced(self.view.model, forward):
            value = self.view.loss(self._lend(batch), lent=True)
        if not value.requires_grad:
            raise ValueError(
                "the loss has no graph: it depends on no parameter that requires a gradient,"
                " or was computed under no_grad or detached"
            )
        return value if value.ndim == 0 else value.reshape(())

    def _lend(self, batch: Any) -> Any:
        """A copy of the batch for the loss to work on; the last one again, where nothing was written to it."""
        if len(self.parts) > 1 or not (isinstance(batch, Tensor) or _is_tuple_of_tensors(batch)):
            return self.view.lend(batch)
        if self._lent is None or self._lent[0] is not batch or self._lent[2] != [t._version for t in self._lent[3]]:
            copied = self.view.lend(batch)
            tensors = [copied] if isinstance(copied, Tensor) else list(copied)
            self._lent = batch, copied, [t._version for t in tensors], tensors
        return self._lent[1]

    def gradient(self, which: Sequence[int] | None = None) -> tuple[Tensor, Blocks]:
        """(loss, gradient by the parameters numbered ``which``) where `put` left the parameters.

        Raises:
            ValueError: If the loss depends on none of them all.
        """
        if len(self.parts) == 1:
            return self.gradient_on(self.parts[0][1], which)
        total = Accumulator()
        losses = []
        reached = []
        for weight, batch in self.parts:
            loss, blocks = self.gradient_on(batch, which)
            losses.append(weight * loss)
            total.add(weight, blocks)
            reached.append(self.reached)
        self.reached = tuple(map(any, zip(*reached, strict=True)))
        return torch.stack(losses).sum(), total.blocks

    def gradient_on(self, batch: Any, which: Sequence[int] | None = None) -> tuple[Tensor, Blocks]:
        """The same on one part of the batch."""
        loss = self.loss(batch)
        if which is not None:
            return loss.detach(), differentiate(loss, [self.parameters[index] for index in which])
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        self.reached = tuple(block is not None for block in found)
        if not any(self.reached):
            raise ValueError("the loss depends on no parameter of the model that requires a gradient")
        if all(self.reached):
            return loss.detach(), found
        pairs = zip(found, self.parameters, strict=True)
        return loss.detach(), tuple(torch.zeros_like(p) if block is None else block for block, p in pairs)

    def __call__(self, theta: Blocks | None = None) -> tuple[Tensor, Blocks]:
        """(loss, gradient) at ``theta``, by default theta_t; the gradient has the shapes of ``theta``."""
        self.put(self.theta if theta is None else theta)
        return self.gradient()

    def hessian(self, theta: Blocks | None = None) -> Hessian:
        """The Hessian at ``theta``, by default theta_t, as a function v (D,) -> H v (D,)."""
        return Hessian(self, self.theta if theta is None else theta)

    def check(self) -> None:
        """Evaluate twice at theta_t.

        Raises:
            ValueError: If the two differ by more than rounding, so that the forward is random beyond the streams that
                are put back; or if the loss of a chunk is not the sum, or mean, over its examples.
        """
        (first, gradient), (second, again) = self(), self()
        apart = Reference(gradient).compare(again)
        allowed = math.sqrt(torch.finfo(gradient[0].dtype).eps)
        differs = abs(float(second - first)) > allowed * max(abs(float(first)), abs(float(second)))
        if differs or apart.distance > allowed * apart.norm:
            raise ValueError(
                "two evaluations at the same parameters differ: the forward depends on something other than"
                " parameters, buffers and the random streams (name its generator in generators=)"
            )
        if self._chunks is not None:
            self._check_reduction(self._chunks, allowed)

    def _check_reduction(self, chunks: Chunks, allowed: float) -> None:
        whole = self.parts[0][1]
        examples = len(_tensors(whole)[0])
        loss = float(self.loss(whole).detach())
        if chunks.ghost or self.surroundings.random or examples < 2:
            # Two parts have statistics and masks of their own; but each example twice has the statistics of each once.
            count, parts = 2 * examples, f"{loss:g} on {examples} of them"
            wanted = loss if chunks.reduction == "mean" else 2 * loss
            found = float(self.loss(_twice(whole)).detach())
            allowed = 0.25 if self.surroundings.random else 10 * allowed  # of masks only about the same comes out
        else:
            count = examples
            halves = dataclasses.replace(chunks, size=max(1, 2 * examples // 3)).split(whole)
            wanted = sum(weight * float(self.loss(part).detach()) for weight, part in halves)
            found, allowed = loss, 10 * allowed
            parts = f"{wanted:g} from two parts"
        if abs(found - wanted) > allowed * max(abs(found), abs(wanted)):
            raise ValueError(
                f"the loss is not the {chunks.reduction} over examples: {found:g} on {count} of them, {parts};"
                " say the other reduction, or do without chunks if examples are coupled"
            )


@contextmanager
def _replaced(model: nn.Module, forward: Callable[..., Any] | None) -> Iterator[None]:
    if forward is None:
        yield
        return
    attributes = vars(model)
    held = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if held is None:
            del attributes["forward"]
        else:
            attributes["forward"] = held


class Accumulator:
    """A weighted sum of vectors, in blocks of its own."""

    def __init__(self) -> None:
        self.blocks: Blocks = ()

    def add(self, weight: float, blocks: Sequence[Tensor]) -> None:
        """Add ``weight`` times ``blocks``."""
        if not self.blocks:
            self.blocks = tuple(weight * block for block in blocks)
        else:
            for total, block in zip(self.blocks, blocks, strict=True):
                total.add_(block, alpha=weight)


def differentiate(loss: Tensor, parameters: Sequence[Tensor], *, again: bool = False) -> Blocks:
    """The gradient; zero by a parameter that was not used. ``again``: keep a graph to differentiate it once more."""
    return torch.autograd.grad(loss, list(parameters), create_graph=again, allow_unused=True, materialize_grads=True)


def _twice_differentiable() -> AbstractContextManager[None]:
    """Attention by the formula for the length of a block: the fused kernels have no second derivative."""
    return cast("AbstractContextManager[None]", sdpa_kernel(SDPBackend.MATH))


class Hessian:
    """The Hessian of a loss at one theta: v (D,) -> H v (D,).

    The graph of the gradient is kept from one product to the next, which is the memory of two to three forwards; of a
    batch in chunks it is built anew for each chunk and product.

    Attributes:
        loss: At theta.
        gradient: At theta, in blocks.
    """

    def __init__(self, at: Gradients, theta: Blocks) -> None:
        self._at = at
        self._theta = theta
        self._serial = -1
        self._graph: Blocks = ()
        self.loss, self.gradient = self._differentiate()

    def _differentiate(self) -> tuple[Tensor, Blocks]:
        self._at.put(self._theta)
        if len(self._at.parts) > 1:
            return self._at.gradient()
        with _twice_differentiable():
            loss = self._at.loss(self._at.parts[0][1])
            self._graph = differentiate(loss, self._at.parameters, again=True)
        self._serial = self._at.serial
        return loss.detach(), tuple(block.detach() for block in self._graph)

    def __call__(self, vector: Tensor) -> Tensor:
        """H v of ``vector`` (D,), (D,)."""
        blocks = unflat(vector, self._theta)
        if len(self._at.parts) > 1:
            return self._in_chunks(blocks)
        if self._serial != self._at.serial:
            # Others have put the parameters elsewhere since, and a graph looks its parameters up when it is walked.
            self._differentiate()
        product = hessian_vector_product(self._graph, self._at.parameters, blocks)
        return torch.cat([block.reshape(-1) for block in product])

    def _in_chunks(self, vector: Blocks) -> Tensor:
        self._at.put(self._theta)
        total = Accumulator()
        for weight, batch in self._at.parts:
            with _twice_differentiable():
                graph = differentiate(self._at.loss(batch), self._at.parameters, again=True)
            total.add(weight, hessian_vector_product(graph, self._at.parameters, vector))
        return torch.cat([block.reshape(-1) for block in total.blocks])


def check_mode(mode: str) -> str:
    """``mode`` of a probe.

    Raises:
        ValueError: If it is unknown.
    """
    if mode not in ("step", "batch", "population"):
        raise ValueError(f"mode must be 'step', 'batch' or 'population', got {mode!r}")
    return mode


def check_on(on: Any) -> Any:
    """``on`` of a probe: ``"batch"``, or a batch of which this is a copy.

    Raises:
        ValueError: If it is another string.
    """
    if isinstance(on, str) and on != "batch":
        raise ValueError(f"on must be 'batch', for the step's own, or a batch, got {on!r}")
    return isolated(on, {})  # the user may go on to write to it


class GradientProbe:
    """What the probes have in common that differentiate the loss: a batch, a mode, and a first look at the model.

    Args:
        on: ``"batch"``, the step's own; or a fixed batch, in the form the recorder's loss takes.
        mode: ``step`` (flags as they are), ``batch`` or ``population``.
        chunks: Stream the examples.
        when: A schedule, step -> bool; every step by default.
        name: The probe's name in the record.

    Raises:
        ValueError: If ``mode`` or ``on`` is unknown.
    """

    def __init__(self, *, on: Any, mode: str, chunks: Chunks | None, when: Schedule | None, name: str) -> None:
        self.on = check_on(on)
        self.mode = check_mode(mode)
        self.chunks = chunks
        self.when: Schedule = every(1) if when is None else when
        self.name = name
        self._looked = False
        self._held: list[nn.Module] | None = None

    @property
    def active(self) -> bool:
        """It runs forwards and backwards of its own."""
        return True

    def bind(self, site: Site) -> None:
        """Forget what was found out about another model.

        Raises:
            ValueError: If the recorder was given no loss.
        """
        if site.loss is None:
            raise ValueError(f"{self.name} differentiates the loss: give the recorder loss=loss_fn")
        self._looked = False
        self._held = normalizers(site.model)

    def mode_name(self, view: StepView) -> str:
        """The ``mode`` column of its rows."""
        return view.site.mode_name(self.mode, self._held)

    @contextmanager
    def gradients(self, view: StepView) -> Iterator[Gradients]:
        """Loss and gradient at theta_t; the first time it is made sure that they are a function of the parameters."""
        batch = view.batch if isinstance(self.on, str) else self.on
        with Gradients.of_view(view, batch, mode=self.mode, chunks=self.chunks) as at:
            if not self._looked:
                self.look(at)
                self._looked = True
            yield at

    def look(self, at: Gradients) -> None:
        """The first look.

        Raises:
            ValueError: If two evaluations in one place differ.
        """
        at.check()


class Rate:
    """The training's step size for a probe that wants one: as given, or the optimizer's; missing, it says so once."""

    def __init__(self, given: float | None) -> None:
        if given is not None and not 0 <= given < math.inf:
            raise ValueError(f"learning_rate must be finite and not negative, got {given}")
        self._given = given
        self._warned = False

    def at(self, view: StepView, probe: str, wanting: str) -> float | None:
        """The rate at this step; None, with a warning the first time, where it is not one number."""
        rate = view.learning_rate if self._given is None else self._given
        if rate is None and not self._warned:
            self._warned = True
            why = (
                "the recorder was given no optimizer"
                if view.site.optimizer is None
                else "the optimizer's groups have different rates"
            )
            warnings.warn(
                f"{probe} leaves {wanting} out: {why}, and the probe no learning_rate=", UserWarning, stacklevel=2
            )
        return rate
