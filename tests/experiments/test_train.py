from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.config import EvaluationConfig, TrainingConfig
from experiments.datasets import Dataset
from experiments.seeds import Order
from experiments.train import Batch, Objective, assess, optimizer_for, train


class Notes:
    """What a recorder is told, in order."""

    def __init__(self) -> None:
        self.t = 0
        self.logged: list[tuple[int, str, float, str]] = []
        self.status = "complete"
        self.batches: list[Batch] = []

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        self.batches.append(batch)
        yield
        self.t += 1

    def log(self, statistic: str, value: float, *, mode: str) -> None:
        self.logged.append((self.t, statistic, value, mode))

    def stop(self, status: str) -> None:
        self.status = status

    def steps(self, statistic: str) -> list[int]:
        return [t for t, name, *_ in self.logged if name == statistic]


def dataset(count: int = 24) -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 6, generator=generator)
    targets = (inputs[:, 0] > 0).long()
    return Dataset("toy", inputs, targets, inputs[:9] + 0.1, targets[:9], 2)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Sigmoid(), nn.Linear(8, 2))


def trained(
    model: nn.Module, training: TrainingConfig, *, start: int = 0, data: Dataset | None = None, normalized: bool = True
) -> tuple[Notes, list[int]]:
    notes, seen = Notes(), []
    notes.t = start
    data = data or dataset()
    train(
        model,
        data,
        Order(len(data.train_inputs), training.batch, torch.Generator().manual_seed(2)),
        objective=Objective(),
        training=training,
        evaluation=EvaluationConfig(every=10, early_every=2, early_until=5),
        optimizer=optimizer_for(model, training),
        recorder=notes,
        start=start,
        normalized=normalized,
        progress=seen.append,
    )
    return notes, seen


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.9, 0.01)])
def test_the_loop_is_sgd_written_out_by_hand(momentum: float, decay: float) -> None:
    training = TrainingConfig(steps=23, batch=5, learning_rate=0.3, momentum=momentum, weight_decay=decay)
    model, data = network(), dataset()
    notes, _ = trained(model, training)

    twin, order = network(), Order(24, 5, torch.Generator().manual_seed(2))
    velocity = [torch.zeros_like(p) for p in twin.parameters()]
    for step in range(23):
        index = order.next()
        loss = F.cross_entropy(twin(data.train_inputs[index]), data.train_targets[index])
        gradients = torch.autograd.grad(loss, list(twin.parameters()))
        with torch.no_grad():
            for p, v, g in zip(twin.parameters(), velocity, gradients, strict=True):
                v.mul_(momentum).add_(g + decay * p)
                p.sub_(0.3 * v)
        if step % 10 == 0:
            logged = [value for t, name, value, _ in notes.logged if (t, name) == (step, "train_loss")]
            assert logged == pytest.approx([loss.item()], rel=1e-5)
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_when_and_in_which_mode_numbers_are_logged() -> None:
    notes, seen = trained(network(), TrainingConfig(steps=25, batch=5))
    assert notes.steps("test_accuracy") == [0, 2, 4, 10, 20, 25]
    assert notes.steps("train_loss") == [0, 2, 4, 10, 20]
    assert {(name, mode) for _, name, _, mode in notes.logged} == {
        ("test_accuracy", "population"),
        ("train_loss", "batch"),
    }
    assert seen == list(range(26))
    plain, _ = trained(nn.Linear(6, 2), TrainingConfig(steps=25, batch=5), normalized=False)
    assert {mode for *_, mode in plain.logged} == {"-"}


def test_the_last_accuracy_is_logged_once_when_it_is_also_due() -> None:
    notes, _ = trained(network(), TrainingConfig(steps=20, batch=5))
    assert notes.steps("test_accuracy") == [0, 2, 4, 10, 20]


@pytest.mark.parametrize("logits", [(math.nan, 0.0), (3e38, -3e38)])  # a loss of NaN, and of infinity
def test_a_loss_that_is_not_finite_ends_training(logits: tuple[float, float]) -> None:
    class Cliff(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6, 2))
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += self.training
            return x @ self.weight + (torch.tensor(logits) if self.calls == 8 else 0)

    notes, seen = trained(Cliff(), TrainingConfig(steps=25, batch=5), normalized=False)
    assert notes.status == "diverged"
    assert seen[-1] == 7
    assert notes.t == 8
    assert 25 not in notes.steps("test_accuracy")


def test_training_goes_on_from_a_later_step() -> None:
    notes, seen = trained(network(), TrainingConfig(steps=14, batch=5), start=10)
    assert seen == [10, 11, 12, 13, 14]
    assert notes.steps("test_accuracy") == [10, 14]


def test_accuracy_uses_population_statistics_and_leaves_every_mode_and_buffer_alone() -> None:
    model, data = network(), dataset()
    trained(model, TrainingConfig(steps=9, batch=5))
    model.train()
    model[1].eval()  # a frozen normalizer
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = assess(model, data.test_inputs, data.test_targets, chunk=4).accuracy
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    assert found == (model(data.test_inputs).argmax(1) == data.test_targets).double().mean().item()
    with pytest.raises(ValueError, match="no examples"):
        assess(model, data.test_inputs[:0], data.test_targets[:0])


def test_fixed_examples_are_assessed_at_their_own_cadence_and_at_the_end() -> None:
    notes, data, model = Notes(), dataset(), network()
    fixed = data.train_inputs[:7], data.train_targets[:7]
    training = TrainingConfig(steps=11, batch=5)
    train(
        model,
        data,
        Order(24, 5, torch.Generator().manual_seed(2)),
        objective=Objective(),
        training=training,
        evaluation=EvaluationConfig(every=10, early_every=10, fixed=7, fixed_every=4),
        optimizer=optimizer_for(model, training),
        recorder=notes,
        start=0,
        normalized=True,
        progress=lambda done: None,
        fixed=fixed,
    )
    assert notes.steps("fixed_accuracy") == notes.steps("fixed_loss") == [0, 4, 8, 11]
    at_end = {name: (value, mode) for t, name, value, mode in notes.logged if t == 11}
    found = assess(model, *fixed)
    assert at_end["fixed_accuracy"] == (found.accuracy, "population")
    assert at_end["fixed_loss"] == (found.loss, "population")


def test_a_mean_over_chunks_weighs_examples_and_not_chunks() -> None:
    data, model = dataset(), network()
    whole = assess(model, data.train_inputs, data.train_targets)
    ragged = assess(model, data.train_inputs, data.train_targets, chunk=7)
    assert ragged.accuracy == whole.accuracy
    assert ragged.loss == pytest.approx(whole.loss, rel=1e-6)
    model.eval()
    with torch.no_grad():
        outputs = model(data.train_inputs)
    assert whole.loss == pytest.approx(F.cross_entropy(outputs, data.train_targets).item(), rel=1e-6)
    assert whole.accuracy == (outputs.argmax(1) == data.train_targets).float().mean().item()


def test_adam_is_adam() -> None:
    training = TrainingConfig(steps=9, batch=5, optimizer="adam", learning_rate=0.01, weight_decay=0.1)
    model, twin, data = network(), network(), dataset()
    trained(model, training)
    optimizer = torch.optim.Adam(twin.parameters(), lr=0.01, weight_decay=0.1)
    torch.manual_seed(1)
    network()  # where the dropout of `trained` begins
    order = Order(24, 5, torch.Generator().manual_seed(2))
    for _ in range(9):
        index = order.next()
        optimizer.zero_grad()
        F.cross_entropy(twin(data.train_inputs[index]), data.train_targets[index]).backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def teacher() -> Dataset:
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    return Dataset("teacher", inputs, 2 * inputs, inputs[:5], 3 * inputs[:5], classes=0, weight=2.5)


@pytest.mark.parametrize(
    ("reduction", "factor"),
    [("sum", 2.5), ("mean", 1 / 12)],  # an example's weight counts in a sum and cancels in a mean
)
def test_a_regression_loss_is_the_squared_distance_to_the_targets(reduction: str, factor: float) -> None:
    data, model = teacher(), nn.Linear(3, 3)
    objective = Objective.of(data, TrainingConfig(reduction=reduction))
    residual = model(data.train_inputs) - data.train_targets
    loss = objective(model, (data.train_inputs, data.train_targets))
    torch.testing.assert_close(loss, factor * residual.square().sum())


def test_classes_are_summed_too() -> None:
    data, model = dataset(), network().eval()
    total = Objective.of(data, TrainingConfig(reduction="sum"))(model, (data.train_inputs, data.train_targets))
    mean = Objective.of(data, TrainingConfig())(model, (data.train_inputs, data.train_targets))
    torch.testing.assert_close(total, 24 * mean)


def test_regression_is_followed_by_its_loss() -> None:
    notes, data, model = Notes(), teacher(), nn.Linear(3, 3)
    training = TrainingConfig(steps=4, batch="full", learning_rate=0.01)
    train(
        model,
        data,
        Order(12, "full", torch.Generator()),
        objective=Objective.of(data, training),
        training=training,
        evaluation=EvaluationConfig(every=2, early_every=2, fixed=5, fixed_every=4),
        optimizer=optimizer_for(model, training),
        recorder=notes,
        start=0,
        normalized=False,
        progress=lambda done: None,
        fixed=(data.test_inputs, data.test_targets),
    )
    assert notes.steps("test_loss") == [0, 2, 4]
    assert notes.steps("fixed_loss") == [0, 4]
    assert not notes.steps("test_accuracy") + notes.steps("fixed_accuracy")
    (value,) = [value for t, name, value, _ in notes.logged if (t, name) == (4, "test_loss")]
    expected = (model(data.test_inputs) - data.test_targets).square().sum(1).mean().item()
    assert value == pytest.approx(expected, rel=1e-5)
    assert math.isnan(assess(model, data.test_inputs, data.test_targets, Objective(classes=False)).accuracy)
