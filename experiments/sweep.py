"""Many runs beside each other: spawned processes, one progress bar for all, an end that leaves nothing broken.

Workers are spawned, never forked, because a forked copy of torch's thread pool hangs; and each keeps to the thread
count of its configuration, set before torch is loaded, because two pools on the same cores fight. One worker means no
process at all: the runs happen here.

Workers note the updates done on a `Board`, a small file in memory, which feeds the bar. Only the parent hears Ctrl-C.
It ends the workers there and then, because a record outlives that at any moment and goes on from its last checkpoint. A
worker whose parent is gone ends by itself.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import active_children, connection, get_context, parent_process, resource_tracker
from pathlib import Path
from types import TracebackType

from experiments.study import Job, Outcome

__all__ = ["sweep"]

POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS")
TICK = 0.1  # seconds between two looks at the board
_NOT_BEGUN = (-1).to_bytes(8, sys.byteorder, signed=True)


def sweep(jobs: Sequence[Job], *, workers: int) -> list[Outcome]:
    """Run every job, at most ``workers`` at a time, the longest first; their outcomes in the order of ``jobs``.

    A job that fails does not stop the others. Progress is shown on standard error if that is a terminal.

    Raises:
        KeyboardInterrupt: After Ctrl-C, once every worker has ended; all unfinished records can be resumed.
        ValueError: If ``workers`` is below 1.
    """
    if workers < 1:
        raise ValueError(f"a sweep takes 1 worker or more, got {workers}")
    if not jobs:
        return []
    queue = sorted(range(len(jobs)), key=lambda index: jobs[index].length, reverse=True)
    threads = max(job.config.machine.threads for job in jobs)
    workers = min(workers, len(jobs))
    with ExitStack() as stack:
        place = None
        if workers > 1:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whybn-"))) / "board"
        board = stack.enter_context(Board.create(place, jobs))
        stack.enter_context(_pool_sizes(threads))
        stack.enter_context(_bar(board))
        return _in_process(jobs, queue, board) if workers == 1 else _in_workers(jobs, queue, board, workers)


class Board:
    """Where every run stands, in memory that parent and workers share: updates done, -1 before it began.

    The memory is that of a file; where there is no other process, of none.
    """

    def __init__(self, path: Path | None, steps: Sequence[int]) -> None:
        self.path, self.steps = path, steps
        if path is None:
            self._map = mmap.mmap(-1, 8 * len(steps))
            self._map.write(_NOT_BEGUN * len(steps))
        else:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        self._cells = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, path: Path | None, jobs: Sequence[Job]) -> Board:
        """A new board for these jobs."""
        if path is not None:
            path.write_bytes(_NOT_BEGUN * len(jobs))
        return cls(path, [job.steps for job in jobs])

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._cells.release()
        self._map.close()

    def note(self, index: int, done: int) -> None:
        """Run ``index`` has done so many updates."""
        self._cells[index] = done

    def began(self, index: int) -> bool:
        """Whether a worker took up run ``index``."""
        return self._cells[index] >= 0

    def done(self) -> int:
        """Updates done, over all runs."""
        return sum(max(0, count) for count in self._cells.tolist())


def _in_process(jobs: Sequence[Job], queue: Sequence[int], board: Board) -> list[Outcome]:
    from experiments.run import run  # loads torch

    outcomes = {}
    for index in queue:
        outcomes[index] = run(jobs[index], partial(board.note, index))
        board.note(index, board.steps[index])
    return [outcomes[index] for index in range(len(jobs))]


def _in_workers(jobs: Sequence[Job], queue: Sequence[int], board: Board, workers: int) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    left = list(queue)
    while left:
        outcomes |= _pool(jobs, left, board, workers)
        left = [index for index in left if index not in outcomes]
        # A worker that dies takes the pool with it, and so the runs beside its own. Each goes on alone, from its
        # checkpoint: the one that breaks its pool again is the one that kills.
        suspects = [index for index in left if board.began(index)] or left[:1]
        for index in suspects:
            died = Outcome("failed", "its process ended without a word: killed, or out of memory")
            outcomes[index] = _pool(jobs, [index], board, 1).get(index, died)
        left = [index for index in left if index not in outcomes]
    return [outcomes[index] for index in range(len(jobs))]


def _pool(jobs: Sequence[Job], queue: Sequence[int], board: Board, workers: int) -> dict[int, Outcome]:
    """Outcomes of the runs in ``queue``; of fewer, if a worker died."""
    found: dict[int, Outcome] = {}
    futures: dict[Future[Outcome], int] = {}
    others = set(active_children())
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_settle, initargs=(board.path,))
    try:
        # What this process ignores, the processes it spawns ignore from their first instruction.
        with _deaf_to_interrupts(), suppress(BrokenProcessPool):
            for index in queue:
                futures[pool.submit(_work, board.path, index, jobs[index])] = index
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=TICK, return_when=FIRST_COMPLETED)
            for future in done:
                with suppress(BrokenProcessPool):
                    found[futures[future]] = future.result()
    except BaseException:
        for process in set(active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return found


def _work(path: Path | None, index: int, job: Job) -> Outcome:
    """One run, in a worker."""
    with Board(path, ()) as board:
        board.note(index, 0)
        from experiments.run import run  # loads torch, once a worker, after its thread count was set

        outcome = run(job, partial(board.note, index))
        board.note(index, job.steps)
        return outcome


def _settle(board: Path | None) -> None:
    """Make this worker deaf to Ctrl-C, which is the parent's to hear, and mortal with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel, board), daemon=True).start()


def _end_with(sentinel: int, board: Path | None) -> None:
    connection.wait([sentinel])
    if board is not None:  # nobody else is left to remove it
        shutil.rmtree(board.parent, ignore_errors=True)
    os._exit(1)  # as abruptly as the parent ended: records outlive that


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Ctrl-C within waits until the end of the block. What is spawned inherits the deafness, and keeps it.

    The signal is held back and not ignored: one that comes while workers start, which takes seconds on a busy machine,
    would otherwise be lost, and the sweep go on for hours.
    """
    # Starting the tracker later would lift the block: it starts on its own terms.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _pool_sizes(threads: int) -> Iterator[None]:
    """Thread pools that are made within, here or in a spawned process, have so many threads."""
    before = {name: os.environ.get(name) for name in POOLS}
    os.environ.update({name: str(threads) for name in POOLS})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _bar(board: Board) -> Iterator[None]:
    """One bar for all runs, fed from the board by a thread; nothing where standard error is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    end = threading.Event()
    with Progress(*columns, TextColumn("left"), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{len(board.steps)} runs", total=sum(board.steps))

        def follow() -> None:
            while not end.wait(TICK):
                progress.update(task, completed=board.done())

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()
