"""The training loop, readable on one screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.config import EvaluationConfig, TrainingConfig
from experiments.datasets import Dataset
from experiments.seeds import Order

__all__ = ["Assessment", "Batch", "Log", "Objective", "assess", "optimizer_for", "train"]

Batch = tuple[Tensor, Tensor]
"""Inputs (N, ...), and class indices (N,) or values (N, D)."""


@dataclass(frozen=True)
class Objective:
    """The loss that is minimized: cross-entropy in nats where there are classes, else the squared distance to targets.

    Attributes:
        classes: Whether targets are class indices.
        reduction: ``mean`` or ``sum`` over examples.
        weight: For how many examples one stands; it counts in a sum only.
    """

    classes: bool = True
    reduction: Literal["mean", "sum"] = "mean"
    weight: float = 1.0

    @classmethod
    def of(cls, data: Dataset, training: TrainingConfig) -> Objective:
        """The loss of these data, reduced as configured."""
        return cls(data.classes > 0, training.reduction, data.weight)

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of ``model`` on ``batch``, a scalar."""
        inputs, targets = batch
        outputs = model(inputs)
        if self.reduction == "sum":
            return self.total(outputs, targets) * self.weight
        return F.cross_entropy(outputs, targets) if self.classes else self.total(outputs, targets) / len(inputs)

    def total(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over examples, each counted once."""
        if self.classes:
            return F.cross_entropy(outputs, targets, reduction="sum")
        return (outputs - targets).square().sum()


@dataclass(frozen=True)
class Assessment:
    """A network's mean loss on some examples, and the share it classifies rightly; NaN where there are no classes."""

    accuracy: float
    loss: float


class Log(Protocol):
    """The part of a Recorder that the loop needs."""

    def step(self, batch: Batch) -> AbstractContextManager[object]:
        """One optimizer step happens inside."""

    def log(self, statistic: str, value: float, *, mode: str) -> None:
        """Write a number at the number of updates done so far."""

    def stop(self, status: Literal["diverged"]) -> None:
        """End the record with this status."""


def train(
    model: nn.Module,
    data: Dataset,
    order: Order,
    *,
    objective: Objective,
    training: TrainingConfig,
    evaluation: EvaluationConfig,
    optimizer: torch.optim.Optimizer,
    recorder: Log,
    start: int,
    normalized: bool,
    progress: Callable[[int], None],
    fixed: Batch | None = None,
) -> None:
    """Take updates ``start`` to ``training.steps``; stop as diverged at the first loss that is not finite.

    ``test_accuracy`` (without classes, ``test_loss``) is logged before the update of each step that is due and once at
    the end; ``train_loss`` is the loss of the step's own batch. On ``fixed`` examples, where there are any,
    ``fixed_accuracy`` and ``fixed_loss`` are logged at every so-manieth step and at the end. ``normalized`` says
    whether training and evaluation differ, and so whether these have a mode. ``progress`` is told the updates done, and
    may raise to interrupt.
    """
    model.train()
    population, batch_mode = ("population", "batch") if normalized else ("-", "-")

    def evaluate(*, held_out: bool, on_fixed: bool) -> None:
        if held_out:
            found = assess(model, data.test_inputs, data.test_targets, objective)
            if objective.classes:
                recorder.log("test_accuracy", found.accuracy, mode=population)
            else:
                recorder.log("test_loss", found.loss, mode=population)
        if on_fixed and fixed is not None:
            found = assess(model, *fixed, objective)
            if objective.classes:
                recorder.log("fixed_accuracy", found.accuracy, mode=population)
            recorder.log("fixed_loss", found.loss, mode=population)

    for step in range(start, training.steps):
        progress(step)
        due = evaluation.due(step)
        evaluate(held_out=due, on_fixed=step % evaluation.fixed_every == 0)
        index = order.next().to(data.train_inputs.device)
        batch = data.train_inputs[index], data.train_targets[index]
        with recorder.step(batch):
            optimizer.zero_grad()
            loss = objective(model, batch)
            loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            optimizer.step()
            value = loss.item()
            if due:
                recorder.log("train_loss", value, mode=batch_mode)
        if not math.isfinite(value):
            recorder.stop("diverged")
            return
    progress(training.steps)
    evaluate(held_out=True, on_fixed=True)


def optimizer_for(model: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Stochastic gradient descent, or Adam, on every parameter."""
    rate, decay = training.learning_rate, training.weight_decay
    if training.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, weight_decay=decay)
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=training.momentum, weight_decay=decay)


@torch.no_grad()
def assess(
    model: nn.Module, inputs: Tensor, targets: Tensor, objective: Objective = Objective(), *, chunk: int = 2000
) -> Assessment:
    """Mean loss and accuracy on (N, ...) ``inputs``, normalized by population statistics.

    ``chunk`` examples are run at a time. Every module is left in the mode it was found in.

    Raises:
        ValueError: If there are no examples.
    """
    if not len(inputs):
        raise ValueError("the accuracy on no examples is undefined")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    correct, loss = 0, 0.0
    for part, wanted in zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True):
        outputs = model(part)
        if objective.classes:
            correct += int((outputs.argmax(dim=1) == wanted).sum().item())
        loss += objective.total(outputs, wanted).item()  # the last chunk may be smaller
    for module, training in modes:
        module.training = training
    return Assessment(correct / len(inputs) if objective.classes else math.nan, loss / len(inputs))
