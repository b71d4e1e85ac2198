"""What a second worker brings: the same runs, of ten seconds and more each, with two jobs and with one.

Timed in processes of their own, from the first run's begin to the last one's end; imports of the workers included. Four
runs that take long enough are all there is time for, so a few pairs, and the interval is their range.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.harness import Ratio, Row, Work

STEPS, SEEDS, PAIRS = 10_000, 2, 3


def rows() -> Iterator[Row]:
    """Two jobs against one."""
    yield Ratio("sweep of 4 runs, two jobs vs one", _jobs, bar=1.6, faster=True, pairs=PAIRS, returned=True)


@contextmanager
def _jobs() -> Iterator[tuple[Work, Work]]:
    yield lambda: _seconds(2), lambda: _seconds(1)


def _seconds(workers: int) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.sweep", str(workers)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Sweep the runs with so many workers and print the seconds it took."""
    from experiments.studies.figure1 import STUDY, Figure1Fields
    from experiments.sweep import sweep

    with tempfile.TemporaryDirectory() as folder:
        jobs = STUDY.jobs(Figure1Fields(steps=STEPS), range(SEEDS), device="cpu", folder=Path(folder))
        start = time.perf_counter()
        outcomes = sweep(jobs, workers=int(sys.argv[1]))
        print(time.perf_counter() - start)
    assert all(outcome.status == "complete" for outcome in outcomes), outcomes


if __name__ == "__main__":
    main()
