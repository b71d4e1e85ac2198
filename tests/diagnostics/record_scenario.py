"""A small training run that can be killed: what `test_record` runs in processes of its own.

As a program it reads one JSON command a line from stdin, does it in a forked child, and answers with the exit code.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diagnostics import _parts
from diagnostics.record import RecordError, RunWriter, write_atomically

CONFIG: dict[str, Any] = {"lr": 0.1, "network": {"widths": [100, 100], "normalizer": "batch"}, "seed": 3}
PART_EVERY = 7
END = 24


def blocks(step: int) -> Iterator[tuple[str, str, dict[str, Any], list[int] | None, str]]:
    """What is measured at ``step``: probe, layer, values, units, mode."""
    rng = np.random.default_rng(step)
    yield "activations.input", "hidden1", {"p50": rng.normal(size=5), "count": np.full(5, 60)}, None, "batch"
    if step % 3 == 0:
        yield "activations.input", "hidden2", {"p50": rng.normal(size=3).astype(np.float32)}, None, "population"
    if step % 4 == 0:
        yield "log", "-", {"train_loss": rng.normal()}, None, "-"
    if step % 5 == 2:
        yield "drift", f"late{step // 5}", {f"ks{step}": rng.normal(size=2), "nan": [np.nan, np.inf]}, [3, -1], "batch"


def train(
    folder: Path,
    end: int = END,
    start: int | None = None,
    config: dict[str, Any] = CONFIG,
    status: str = "complete",
    part_every: int = PART_EVERY,
) -> None:
    """Record steps up to ``end``, from ``start``, or else from where the checkpoint says."""
    checkpoint = folder / "checkpoint.pt"
    if start is None:
        start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    with RunWriter(
        folder, config=config, environment={"pid": 1}, start=start, part_every=part_every, overwrite=start == 0
    ) as writer:
        for step in range(start, end):
            for probe, layer, values, units, mode in blocks(step):
                writer.write(step, probe, layer, values, units=units, mode=mode)
            if writer.advance(step + 1):
                write_atomically(checkpoint, str(step + 1).encode())
        writer.close(status)


def die_at(event: int, folder: str) -> None:
    """Kill this process just before its ``event``-th change in or beside ``folder``."""
    seen = 0
    changes = os.O_WRONLY | os.O_RDWR

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(arguments[0]).startswith(folder):
            if name == "open" and not arguments[2] & changes:
                return
            if seen == event:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def do(command: dict[str, Any]) -> None:
    folder = Path(command["folder"])
    _parts.ROWS = command.get("rows", 16)
    os.fsync = lambda descriptor: None  # a kill does not need it
    if "event" in command:
        die_at(command["event"], str(folder.parent))
    match command["do"]:
        case "train":
            train(folder, **command.get("arguments", {}))
        case "hold":  # the folder's lock, for ever
            with RunWriter(folder, config=CONFIG, environment={}):
                (folder.parent / "held").touch()
                time.sleep(60)
        case "fill the disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            try:
                train(folder, end=10_000, part_every=1000)
            except RecordError as error:
                if "cannot write" not in str(error):
                    raise
            else:
                raise AssertionError("the disk was full and nobody said so")


def serve() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                do(command)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        if "seconds" in command:
            time.sleep(command["seconds"])
            os.kill(child, signal.SIGKILL)
        begin = time.perf_counter()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps([code, time.perf_counter() - begin]), flush=True)


if __name__ == "__main__":
    serve()
