"""``python -m tests.benchmarks``: measure every row of every module here, print one table, write it as JSON.

A topic is one module of this package with ``rows() -> Iterable[Row]``; it is found by walking the package. Rows are
made one after the other, so a topic may be a generator. Exit code 0 when no bar was missed, 1 when one was, 2 for an
unknown ``--only``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tests.benchmarks.harness import Median, Result, Row, measure

HERE = Path(__file__).parent
MACHINERY = ("__main__", "harness")


def topics(folder: Path = HERE, package: str = "tests.benchmarks") -> list[str]:
    """Names of the topic modules in ``folder``."""
    names = sorted(module.name for module in iter_modules([str(folder)]))
    return [f"{package}.{name}" for name in names if name not in MACHINERY and not name.startswith("test_")]


def find(modules: Iterable[str]) -> Iterator[Row]:
    """The rows of ``modules``, in order.

    Raises:
        AttributeError: If a module has no ``rows``.
        ValueError: If two rows have one name.
    """
    seen = set()
    for module in modules:
        for row in import_module(module).rows():
            if row.name in seen:
                raise ValueError(f"two rows are named {row.name!r}")
            seen.add(row.name)
            yield row


def environment() -> dict[str, Any]:
    """The machine and the versions a number depends on."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "load": list(os.getloadavg()),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": np.__version__,
        "numpy_simd": np.show_config(mode="dicts")["SIMD Extensions"],
        "threads_asked_for": {
            name: os.environ[name] for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") if name in os.environ
        },
    }


def table(results: Sequence[Result]) -> Table:
    """All results as one table."""
    shown = Table(title="cost as a ratio, median of paired rounds; A/A is the same code against itself")
    for column in (
        "row",
        "threads",
        "bar",
        "goal",
        "measured",
        "95 %",
        "n",
        "A/A",
        "95 %",
        "verdict",
        "subject",
        "reference",
    ):
        shown.add_column(column, justify="left" if column in ("row", "verdict") else "right", no_wrap=column != "row")
    colours = {"missed": "bold red", "open": "yellow", "met": "green", "goal": "bold green"}
    for result in results:
        sign = ">=" if result.at_least else "<="
        seconds = _seconds if result.control else _plain
        shown.add_row(
            result.name,
            str(result.threads),
            f"{sign} {result.bar:g} {result.unit}",
            "" if result.goal is None else f"{sign} {result.goal:g}",
            f"{result.measured.value:.3g}",
            _interval(result.measured),
            str(result.measured.n),
            f"{result.control.value:.3f}" if result.control else "",
            _interval(result.control),
            f"[{colours[result.verdict]}]{result.verdict}[/]",
            seconds(result.subject),
            seconds(result.reference),
        )
    return shown


def _interval(median: Median | None) -> str:
    return f"{median.low:.3g} .. {median.high:.3g}" if median and median.n > 1 else ""


def _plain(median: Median | None) -> str:
    return f"{median.value:.4g}" if median else ""


def _seconds(median: Median | None) -> str:
    if median is None:
        return ""
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "us")) if median.value * s >= 1 or u == "us")
    return f"{median.value * scale:.3g} {unit}"


def main(arguments: Sequence[str] | None = None, modules: Sequence[str] | None = None) -> int:
    """Command line; ``modules`` stands in for the topics found here."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="What measuring costs, as ratios.")
    parser.add_argument("--only", metavar="NAME", help="rows whose name or topic matches this pattern or contains it")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="where to write the numbers")
    parser.add_argument("--pairs", type=int, help="rounds a timed row, instead of its own number (for a quick look)")
    options = parser.parse_args(arguments)
    if options.pairs is not None and options.pairs < 1:
        parser.error(f"--pairs must be at least 1, got {options.pairs}")
    names, results = [], []
    console = Console()
    before = environment()
    for module in topics() if modules is None else modules:
        for row in find([module]):
            names.append(row.name)
            if options.only and not _matches(options.only, row.name, module.rsplit(".", 1)[-1]):
                continue
            if options.pairs and hasattr(row, "pairs"):
                row = replace(row, pairs=options.pairs)
            with console.status(row.name):
                results.append(measure(row))
    if not results:
        print(f"no row matches {options.only!r}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    if not console.is_terminal:
        console.width = 180  # wide enough for every column; a terminal has its own
    console.print(table(results))
    document = {"environment": {**before, "load_after": list(os.getloadavg())}, "rows": [asdict(r) for r in results]}
    options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {options.json}")
    return int(any(result.verdict == "missed" for result in results))


def _matches(pattern: str, *names: str) -> bool:
    return any(fnmatchcase(name, pattern) or pattern in name for name in names)


if __name__ == "__main__":
    sys.exit(main())
