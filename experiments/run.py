"""One configuration, one record: computed once, resumed where it stopped, never written by two.

A record's status says what to do with it. ``complete`` and ``diverged`` are results and are left alone. ``running`` was
interrupted, and goes on from its checkpoint: model, optimizer, order and random states are put back, so that the
finished record has the bytes of one that was never interrupted. ``failed`` is started over, and so is a `Computation`,
which trains nothing and has no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from diagnostics.record import RunWriter, read_status
from diagnostics.recorder import Recorder, read_checkpoint
from experiments.assemble import make_data, make_network
from experiments.config import Computation, MachineConfig, RunConfig
from experiments.datasets import Dataset
from experiments.environment import describe
from experiments.seeds import Order, Streams, global_state, load_global_state, seed_globals
from experiments.study import Job, Outcome, standing
from experiments.train import Batch, Objective, optimizer_for, train

__all__ = ["run"]

PART_EVERY = 1000  # steps a part of the record, and from one checkpoint to the next


def run(job: Job, progress: Callable[[int], None]) -> Outcome:
    """Bring the record of ``job`` to its end, from wherever it stands.

    ``progress`` is told the updates done, before each; what it raises that is no ``Exception`` (KeyboardInterrupt)
    passes through and leaves a record that can be resumed. The process's global random generators are seeded.
    """
    began = False
    try:
        status = standing(job)
        if status == "complete" or status == "diverged":
            return Outcome(status)
        with _machine(job.config.machine):
            if isinstance(job.config, Computation):
                for _ in _compute(job, status):
                    began = True
                return Outcome("complete")
            session = _Session(job, status)
            with session.recorder:
                began = True
                session.train(progress)
        return Outcome("diverged" if read_status(job.folder).status == "diverged" else "complete")
    except Exception as error:
        if not began and isinstance(error, ValueError | OSError):
            return Outcome("refused", str(error))
        return Outcome("failed", f"{type(error).__name__}: {error}")


def _compute(job: Job, status: str) -> Iterator[None]:
    """Record what a job that trains nothing computes, anew where it was interrupted; yields once it has begun."""
    assert isinstance(job.config, Computation)
    if job.compute is None:
        raise ValueError(f"{job.name} trains nothing, and its study computes nothing")
    seed_globals(job.config.seed)
    machine = job.config.machine
    blocks = iter(job.compute(job.config))
    first = next(blocks, None)  # before there is a record: what cannot begin as it was asked for is refused
    if first is None:
        raise ValueError(f"{job.name} computed nothing")
    environment = describe(machine.device, machine.threads)
    with RunWriter(
        job.folder, config=job.config.canonical(), environment=environment, overwrite=status != "absent"
    ) as writer:
        yield
        for step, probe, rows in chain([first], blocks):
            writer.advance(step)
            writer.write(step, probe, rows.layer, rows.values, units=rows.units, mode=rows.mode)


class _Session:
    """Everything a run needs, made from its configuration alone and, to resume, put back to where it stood."""

    def __init__(self, job: Job, status: str) -> None:
        assert isinstance(job.config, RunConfig)
        if job.probes is None:
            raise ValueError(f"{job.name} is to be trained, and its study has no probes")
        config, device = job.config, job.config.machine.device
        checkpoint = read_checkpoint(job.folder) if status == "running" else None
        if checkpoint is not None:
            _refuse_another_device(job.folder, device)
        self.start: int = checkpoint["step"] if checkpoint is not None else 0
        seed_globals(config.seed)
        self.config = config
        self.streams = Streams(config.seed)
        self.data = _on(device, make_data(config.data, self.streams))
        self.model = make_network(config.network, config.normalizer, self.streams).to(device)
        self.objective = Objective.of(self.data, config.training)
        self.optimizer = optimizer_for(self.model, config.training)
        self.order = Order(len(self.data.train_inputs), config.training.batch, self.streams.torch("order"))
        self.fixed = _fixed_examples(self.data, config.evaluation.fixed, self.streams)
        self.recorder = Recorder(
            self.model,
            job.folder,
            job.probes(config, self.data, self.streams),
            loss=self.objective,
            optimizer=self.optimizer,
            config=config.canonical(),
            environment=describe(device, config.machine.threads),
            start=self.start,
            part_every=PART_EVERY,
            overwrite=status != "absent" and self.start == 0,
            checkpoint=self.state,
        )
        if self.recorder.restored is not None:
            self.load(self.recorder.restored)

    def train(self, progress: Callable[[int], None]) -> None:
        train(
            self.model,
            self.data,
            self.order,
            objective=self.objective,
            training=self.config.training,
            evaluation=self.config.evaluation,
            optimizer=self.optimizer,
            recorder=self.recorder,
            start=self.start,
            normalized=self.config.normalizer.has_modes,
            progress=progress,
            fixed=self.fixed,
        )

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.state(),
            "streams": self.streams.state(),
            "global": global_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.load(state["order"])
        self.streams.load(state["streams"])
        load_global_state(state["global"])


def _fixed_examples(data: Dataset, count: int, streams: Streams) -> Batch | None:
    """``count`` training examples, the same for every arm of a seed; None for none.

    Raises:
        ValueError: If the training set has fewer.
    """
    if not count:
        return None
    if count > len(data.train_inputs):
        raise ValueError(f"fixed examples must be at most {len(data.train_inputs)}, the training set, got {count}")
    chosen = torch.randperm(len(data.train_inputs), generator=streams.torch("fixed"))[:count]
    chosen = chosen.to(data.train_inputs.device)
    return data.train_inputs[chosen], data.train_targets[chosen]


def _on(device: str, data: Dataset) -> Dataset:
    return replace(
        data,
        train_inputs=data.train_inputs.to(device),
        train_targets=data.train_targets.to(device),
        test_inputs=data.test_inputs.to(device),
        test_targets=data.test_targets.to(device),
    )


@contextmanager
def _machine(machine: MachineConfig) -> Iterator[None]:
    """The thread count and kernels the configuration names, for the length of a with block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(machine.threads)
    with ExitStack() as stack:
        if machine.device == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True))
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _refuse_another_device(folder: Path, device: str) -> None:
    # The device is in the configuration, and so in the folder's name; environment.json says where it really ran.
    sessions = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    for session in sessions:
        if (before := session["device"]["type"]) != device:
            raise ValueError(f"{folder} was begun on {before} and cannot go on on {device}: the digits would differ")
