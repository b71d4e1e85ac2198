"""The loss landscape along one direction: how far a gradient may be trusted (Santurkar et al. 2018, section 3.2).

At theta with gradient ``g`` of the step's own batch, P points ``theta - eta_k d``, with d = g or a random direction of
the same length, and at each, all on that batch and with all parameters moved together:

    loss                  L(theta - eta_k d)                                     loss
    gradient_difference   |grad L(theta - eta_k d) - g|                          loss / parameter
    cosine                of the angle between that gradient and g
    effective_smoothness  gradient_difference / (eta_k |d|), and its maximum     loss / parameter^2

On a quadratic loss with Hessian A the difference is eta |A d| whatever the step, and the smoothness |A d| / |d|: the
tests lean on that. The level of the smoothness alone proves little: full-batch training brings it to about 2/eta with
any network (the edge of stability), so eta times smoothness is recorded beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from diagnostics._vectors import Blocks, GradientAt, Reference, as_blocks, norm
from diagnostics.gradients import Chunks, GradientProbe, Rate
from diagnostics.probe import Rows, StepView, default_name
from diagnostics.schedules import Schedule

__all__ = ["AlongGradient", "Ray", "along_gradient", "random_direction"]


@dataclass(frozen=True)
class Ray:
    """What was met along one direction, at P step sizes; tensors are (P,) float64.

    Attributes:
        start_loss: L(theta).
        gradient_norm: |g| at theta.
        steps: eta_k.
        loss: L(theta - eta_k d).
        gradient_difference: |grad L(theta - eta_k d) - g|.
        cosine: Between the two gradients; NaN where one is zero.
        effective_smoothness: gradient_difference / (eta_k |d|).
    """

    start_loss: float
    gradient_norm: float
    steps: Tensor
    loss: Tensor
    gradient_difference: Tensor
    cosine: Tensor
    effective_smoothness: Tensor


def along_gradient(
    gradient_at: GradientAt,
    theta: Tensor | Sequence[Tensor],
    steps: Sequence[float],
    direction: Tensor | Sequence[Tensor] | None = None,
) -> Ray:
    """Walk from ``theta`` against its gradient, or against ``direction``, and look around at each of ``steps``.

    Memory: three copies of the parameters, and what ``gradient_at`` needs.

    Args:
        gradient_at: Blocks (a tuple of tensors of the shapes of ``theta``) -> (loss, gradient in blocks). The tensors
            it is given are written over for the next step.
        theta: One tensor or a sequence of them; not written to.
        steps: eta_k, positive and finite.
        direction: In the form of ``theta``, walked at the gradient's length whatever its own; by default the gradient.

    Raises:
        ValueError: If ``steps`` is empty or one is not positive and finite, if the shapes of ``direction`` differ, or
            if the gradient, or the direction, is zero.
    """
    grid = check_steps(steps)
    blocks = as_blocks(theta)
    loss, gradient = gradient_at(blocks)
    if norm(gradient) == 0:
        raise ValueError("the gradient is zero: there is no direction to walk along")
    return _walk(gradient_at, blocks, grid, direction, float(loss), Reference(gradient))


def _walk(
    gradient_at: GradientAt,
    blocks: Blocks,
    grid: Sequence[float],
    direction: Tensor | Sequence[Tensor] | None,
    loss: float,
    reference: Reference,
) -> Ray:
    """`along_gradient` from a known loss and gradient; where that is zero, smoothness and cosine are NaN."""
    along, stretch = reference.pieces, 1.0
    if direction is not None:
        other = as_blocks(direction)
        if [part.shape for part in other] != [part.shape for part in blocks]:
            raise ValueError("direction must have the shapes of theta")
        along, length = reference.layout.pieces(other), norm(other)
        if length == 0:
            raise ValueError("the direction is zero")
        stretch = reference.norm / length
    start = reference.layout.pieces(blocks)
    losses, differences, cosines = [], [], []
    for step in grid:
        there, seen = gradient_at(reference.layout.moved(blocks, start, -step * stretch, along))
        losses.append(float(there))
        apart = reference.compare(seen)
        del seen
        differences.append(apart.distance)
        cosines.append(apart.cosine)

    def table(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return Ray(
        start_loss=loss,
        gradient_norm=reference.norm,
        steps=table(grid),
        loss=table(losses),
        gradient_difference=table(differences),
        cosine=table(cosines),
        effective_smoothness=table(differences) / (table(grid) * reference.norm),
    )


def random_direction(like: Sequence[Tensor], generator: torch.Generator) -> Blocks:
    """A direction of the shapes of ``like``, uniform over all, drawn on the CPU; its length is no matter."""
    return tuple(torch.randn(part.shape, generator=generator, dtype=part.dtype).to(part.device) for part in like)


def check_steps(steps: Sequence[float]) -> tuple[float, ...]:
    """Step sizes as floats.

    Raises:
        ValueError: If there are none or one is not positive and finite.
    """
    if isinstance(steps, int | float):
        raise ValueError(f"steps is a sequence of step sizes, got {steps!r}: say steps=({steps!r},)")
    grid = tuple(float(step) for step in steps)
    if not grid:
        raise ValueError("steps is empty: there is no point to look at")
    wrong = [step for step in grid if not 0 < step < math.inf]
    if wrong:
        raise ValueError(f"steps must be positive and finite, got {wrong[0]}")
    return grid


class AlongGradient(GradientProbe):
    """The landscape along the gradient g of the step's batch, from theta_t.

    At each theta_t - eta_k g it takes the loss and the gradient g' of the same batch: ``gradient_difference`` is
    |g' - g| (how far g can be trusted to predict it), ``cosine`` that of the angle between them, and
    ``effective_smoothness`` |g' - g| / (eta_k |g|). With piecewise linear activations (ReLU) that is largest where the
    first kinks are crossed, often at small steps and far above the curvature |Hg|/|g|: look at it step by step, and not
    at the maximum alone.

    For the whole network (layer ``-``) it writes, with unit k for the k-th step, ``eta``, ``loss``,
    ``gradient_difference``, ``cosine``, ``effective_smoothness`` and ``eta_times_smoothness``; with unit -1 the maxima
    over the steps of the last two, ``start_loss`` L(theta_t) and ``gradient_norm``. Where that is zero there is no step
    to take: cosine and smoothness are NaN. ``eta_times_smoothness`` is the *training's* learning rate times the
    smoothness; where that is not one number it is left out, with a warning. Only for plain gradient descent does theory
    say what to expect of it: an adaptive optimizer's steps are not the rate times the gradient.

    Args:
        steps: The grid eta_k. Choose one whose smallest is not half the training's step size: 1/eta_min and 2/eta, the
            level at which training ends, would be one number.
        direction: ``gradient``, or ``random``: of the gradient's length, drawn from ``seed`` and the step.
        on: ``"batch"``, the step's own; or a fixed batch, in the form the recorder's loss takes.
        learning_rate: The training's step size; by default that of the optimizer handed to the recorder.
        mode: ``step`` (flags as they are), ``batch`` or ``population``.
        chunks: Stream the examples.
        seed: Of the random direction.
        when: A schedule, step -> bool.
        name: The probe's name in the record; ``along_gradient.<direction>`` by default.

    Raises:
        ValueError: If ``steps`` is empty or one is not positive and finite, the learning rate is negative, or
            ``direction``, ``mode`` or ``on`` is unknown.
    """

    def __init__(
        self,
        steps: Sequence[float],
        direction: Literal["gradient", "random"] = "gradient",
        *,
        on: Any = "batch",
        learning_rate: float | None = None,
        mode: str = "step",
        chunks: Chunks | None = None,
        seed: int = 0,
        when: Schedule | None = None,
        name: str | None = None,
    ) -> None:
        if direction not in ("gradient", "random"):
            raise ValueError(f"direction must be 'gradient' or 'random', got {direction!r}")
        super().__init__(
            on=on, mode=mode, chunks=chunks, when=when, name=default_name(self, direction) if name is None else name
        )
        self.steps = check_steps(steps)
        self.direction = direction
        self.learning_rate = learning_rate
        self.seed = seed
        self._rate = Rate(learning_rate)

    def measure(self, view: StepView) -> Iterable[Rows]:
        """Walk from theta_t."""
        with self.gradients(view) as at:
            direction = None
            if self.direction == "random":
                entropy = np.random.SeedSequence((self.seed, view.step)).generate_state(1, np.uint32)
                direction = random_direction(at.theta, torch.Generator().manual_seed(int(entropy[0])))
            loss, gradient = at()
            ray = _walk(at, at.theta, self.steps, direction, float(loss), Reference(gradient))
        points = {
            "eta": ray.steps,
            "loss": ray.loss,
            "gradient_difference": ray.gradient_difference,
            "cosine": ray.cosine,
            "effective_smoothness": ray.effective_smoothness,
        }
        whole = {"start_loss": ray.start_loss, "gradient_norm": ray.gradient_norm}
        whole["effective_smoothness"] = float(ray.effective_smoothness.max())
        rate = self._rate.at(view, self.name, "eta_times_smoothness")
        if rate is not None:
            points["eta_times_smoothness"] = rate * ray.effective_smoothness
            whole["eta_times_smoothness"] = rate * whole["effective_smoothness"]
        mode = self.mode_name(view)
        return [
            Rows("-", {name: value.numpy() for name, value in points.items()}, mode=mode),
            Rows("-", whole, mode=mode),
        ]
