"""The training loop, readable on one screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.config import EvaluationConfig, TrainingConfig
from experiments.datasets import Dataset
from experiments.seeds import Order

__all__ = ["Batch", "Log", "accuracy", "assess", "cross_entropy", "optimizer_for", "train"]

Batch = tuple[Tensor, Tensor]
"""Inputs (N, ...) and class indices (N,)."""


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

    ``test_accuracy`` is logged before the update of each step that is due and once at the end; ``train_loss`` is the
    loss of the step's own batch. On ``fixed`` examples, where there are any, ``fixed_accuracy`` and ``fixed_loss`` are
    logged at every so-manieth step and at the end. ``progress`` is told the updates done, and may raise to interrupt.
    """
    model.train()
    population, batch_mode = ("population", "batch") if normalized else ("-", "-")

    def evaluate(*, held_out: bool, on_fixed: bool) -> None:
        if held_out:
            recorder.log("test_accuracy", accuracy(model, data.test_inputs, data.test_targets), mode=population)
        if on_fixed and fixed is not None:
            share, loss = assess(model, *fixed)
            recorder.log("fixed_accuracy", share, mode=population)
            recorder.log("fixed_loss", loss, mode=population)

    for step in range(start, training.steps):
        progress(step)
        due = evaluation.due(step)
        evaluate(held_out=due, on_fixed=step % evaluation.fixed_every == 0)
        index = order.next().to(data.train_inputs.device)
        batch = data.train_inputs[index], data.train_targets[index]
        with recorder.step(batch):
            optimizer.zero_grad()
            loss = cross_entropy(model, batch)
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


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the batch, in nats; a scalar."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def optimizer_for(model: nn.Module, training: TrainingConfig) -> torch.optim.SGD:
    """Stochastic gradient descent on every parameter."""
    return torch.optim.SGD(
        model.parameters(),
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor, *, chunk: int = 2000) -> float:
    """Share of (N, ...) ``inputs`` whose largest output is the target; arguments as in `assess`."""
    return assess(model, inputs, targets, chunk=chunk)[0]


@torch.no_grad()
def assess(model: nn.Module, inputs: Tensor, targets: Tensor, *, chunk: int = 2000) -> tuple[float, float]:
    """(accuracy, mean cross-entropy in nats) on (N, ...) ``inputs``, normalized by population statistics.

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
        correct += int((outputs.argmax(dim=1) == wanted).sum().item())
        loss += F.cross_entropy(outputs, wanted, reduction="sum").item()  # the last chunk may be smaller
    for module, training in modes:
        module.training = training
    return correct / len(inputs), loss / len(inputs)
