"""What ``whybn figure1`` costs beside the training in it: the same workers, imports, data and evaluation, unrecorded.

Whole commands are timed, processes and imports included. A laptop preset takes most of a minute, so a few pairs are all
there are, and the interval is their range.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path

from experiments.study import Job
from experiments.sweep import _pool_sizes, _settle
from tests.benchmarks.harness import Ratio, Row, Work

WORKERS = 2
PAIRS = 3


def rows() -> Iterator[Row]:
    """The laptop preset against its own training."""
    yield Ratio("whybn figure1 --preset laptop vs its bare training", _commands, bar=1.25, pairs=PAIRS, returned=True)


@contextmanager
def _commands() -> Iterator[tuple[Work, Work]]:
    def recorded() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return _seconds("-m", "experiments", "figure1", "--jobs", str(WORKERS), "--out", folder)

    yield recorded, lambda: _seconds("-m", "tests.benchmarks.figure1")


def _seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


class _Unrecorded:
    """Takes a recorder's place in the loop and keeps nothing."""

    def step(self, batch: object) -> AbstractContextManager[None]:
        return nullcontext()

    def log(self, statistic: str, value: float, *, mode: str) -> None:
        pass

    def stop(self, status: object) -> None:
        pass


def bare(job: Job) -> None:
    """What a run does, without its record."""
    import torch

    from experiments.assemble import make_data, make_network
    from experiments.seeds import Order, Streams
    from experiments.train import Objective, optimizer_for, train

    config = job.config
    torch.set_num_threads(config.machine.threads)
    streams = Streams(config.seed)
    data = make_data(config.data, streams)
    model = make_network(config.network, config.normalizer, streams)
    train(
        model,
        data,
        Order(len(data.train_inputs), config.training.batch, streams.torch("order")),
        objective=Objective.of(data, config.training),
        training=config.training,
        evaluation=config.evaluation,
        optimizer=optimizer_for(model, config.training),
        recorder=_Unrecorded(),
        start=0,
        normalized=config.normalizer.has_modes,
        progress=lambda done: None,
    )


def _pool() -> ProcessPoolExecutor:
    # Workers end with their parent, as a sweep's do: a bench that is killed must not leave them behind.
    return ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), initializer=_settle, initargs=(None,))


def main() -> None:
    """Train every run of the laptop preset, as the sweep would."""
    from experiments.studies.figure1 import STUDY

    preset = STUDY.presets["laptop"]
    jobs = STUDY.jobs(STUDY.fields(**preset.fields), range(preset.seeds), device="cpu", folder=Path("unused"))
    with _pool_sizes(1), _pool() as pool:
        list(pool.map(bare, jobs))


if __name__ == "__main__":
    main()
