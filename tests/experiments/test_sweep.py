from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children
from pathlib import Path

import pytest
import torch

from diagnostics.probe import Probe, Rows
from diagnostics.record import read_run, read_status
from experiments import run as run_module
from experiments.config import Computation, MeasuresConfig, MLPConfig, NormalizerConfig, RunConfig, TrainingConfig
from experiments.datasets import Dataset
from experiments.seeds import Streams
from experiments.study import Job, Outcome
from experiments.sweep import POOLS, sweep

# Probes are made in the worker, from a function it can import: a way in.


def nothing(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    return ()


def refused(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    raise ValueError(f"{os.getpid()} {torch.get_num_threads()} {' '.join(os.environ[name] for name in POOLS)}")


def broken(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    raise ZeroDivisionError("no luck")


class Deadly:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[object, tuple[int]]:
        return os._exit, (9,)


def job(folder: Path, seed: int, *, steps: int = 30, kind: str = "none", probes: object = nothing) -> Job:
    config = RunConfig(
        seed=seed,
        network=MLPConfig(hidden=(3,)),
        normalizer=NormalizerConfig(kind=kind),
        training=TrainingConfig(steps=steps),
    )
    return Job(kind, config, probes, folder / f"{kind}-s{seed}")  # type: ignore[arg-type]


def content(one: Job) -> list[bytes]:
    return [file.read_bytes() for file in sorted((one.folder / "records").iterdir())]


@pytest.fixture
def interrupt() -> Iterator[None]:
    """Presses Ctrl-C once workers are at work."""

    def press() -> None:
        while not active_children():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


def test_workers_compute_what_one_process_computes_and_a_bad_run_stops_no_other(tmp_path: Path) -> None:
    jobs = [
        job(tmp_path / "many", 0),
        job(tmp_path / "many", 1, probes=broken),
        job(tmp_path / "many", 2, kind="batch"),
        job(tmp_path / "many", 3, probes=refused),
    ]
    before = dict(os.environ)
    outcomes = sweep(jobs, workers=2)
    assert dict(os.environ) == before
    assert outcomes[:3] == [Outcome("complete"), Outcome("failed", "ZeroDivisionError: no luck"), Outcome("complete")]
    assert outcomes[3].status == "refused"
    process, *threads = str(outcomes[3].error).split()
    assert int(process) != os.getpid()
    assert threads == ["1"] * (1 + len(POOLS))

    alone = [job(tmp_path / "alone", 0), job(tmp_path / "alone", 2, kind="batch")]
    assert sweep(alone, workers=1) == [Outcome("complete")] * 2
    assert [content(one) for one in alone] == [content(jobs[0]), content(jobs[2])]
    assert not active_children()


def test_a_worker_that_dies_costs_its_own_run_alone(tmp_path: Path) -> None:
    good, dead = sweep([job(tmp_path, 0), job(tmp_path, 1, probes=Deadly())], workers=2)
    assert good == Outcome("complete")
    assert dead.status == "failed"
    assert "killed, or out of memory" in str(dead.error)


def test_ctrl_c_ends_workers_and_leaves_records_that_go_on(tmp_path: Path, interrupt: None) -> None:
    jobs = [job(tmp_path, seed, steps=10**7) for seed in range(3)]
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        sweep(jobs, workers=2)
    assert time.monotonic() - began < 60  # three times 10^7 steps would take hours
    assert not active_children()
    for one in jobs:
        if one.folder.exists():
            assert read_status(one.folder).status == "running"


def test_ctrl_c_while_workers_start_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ProcessPoolExecutor.submit

    def pressed(pool: ProcessPoolExecutor, *arguments: object) -> object:
        future = submit(pool, *arguments)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGINT)
        return future

    monkeypatch.setattr(ProcessPoolExecutor, "submit", pressed)
    # Short enough to end if the signal were lost: then there would be no KeyboardInterrupt to see.
    with pytest.raises(KeyboardInterrupt):
        sweep([job(tmp_path, seed, steps=300) for seed in range(2)], workers=2)
    assert not active_children()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_one_worker_is_this_process_and_takes_the_longest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []

    def note(one: Job, progress: object) -> Outcome:
        taken.append(f"{one.name} {one.config.training.steps} {os.environ['OMP_NUM_THREADS']}")
        return Outcome("complete")

    monkeypatch.setattr(run_module, "run", note)
    jobs = [
        job(tmp_path, 0),
        job(tmp_path, 1, kind="batch"),
        job(tmp_path, 2, steps=90),
        job(tmp_path, 3, kind="batch"),
    ]
    assert sweep(jobs, workers=1) == [Outcome("complete")] * 4
    assert taken == ["none-s2 90 1", "batch-s1 30 1", "batch-s3 30 1", "none-s0 30 1"]


def test_ctrl_c_passes_through_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(one: Job, progress: object) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run", pressed)
    with pytest.raises(KeyboardInterrupt):
        sweep([job(tmp_path, 0)], workers=4)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_one_bar_for_all_runs_and_only_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")

    def slow(one: Job, progress: object) -> Outcome:
        assert callable(progress)
        for done in range(one.config.training.steps):
            progress(done)
            time.sleep(0.02)
        return Outcome("complete")

    monkeypatch.setattr(run_module, "run", slow)
    sweep([job(tmp_path, 0), job(tmp_path, 1)], workers=1)
    shown = screen.getvalue()
    if not terminal:
        assert shown == ""
        return
    assert "2 runs" in shown
    percentages = [int(number) for number in re.findall(r"(\d+)%", shown)]
    assert percentages == sorted(percentages)
    assert 0 < percentages[len(percentages) // 2] < 100


def test_no_jobs_and_no_workers(tmp_path: Path) -> None:
    assert sweep([], workers=3) == []
    with pytest.raises(ValueError, match="1 worker or more, got 0"):
        sweep([job(tmp_path, 0)], workers=0)


class One(MeasuresConfig):
    pass


def computed(config: Computation) -> Iterator[tuple[int, str, Rows]]:
    yield 0, "one", Rows("-", {"seed": float(config.seed)})


@pytest.mark.parametrize("workers", [1, 2])
def test_what_trains_nothing_is_swept_beside_what_trains(tmp_path: Path, workers: int) -> None:
    config = Computation(seed=4, measures=One())
    jobs = [job(tmp_path, 1), Job("computed", config, None, tmp_path / "computed", computed)]
    assert sweep(jobs, workers=workers) == [Outcome("complete"), Outcome("complete")]
    assert read_run(tmp_path / "computed").value.tolist() == [4.0]
