"""Planted studies whose arms are pairs, and a look at what a figure plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.ticker import FixedLocator

from analysis import style
from diagnostics.record import RunWriter, run_id

Write = Callable[[RunWriter, str, str, int, int], None]
"""(writer, arm, kind, seed, step): what the run holds at this step."""


def plant_pairs(
    folder: Path,
    study: str,
    configs: Mapping[str, dict[str, Any]],
    seeds: int,
    steps: Sequence[int],
    write: Write,
    *,
    ends: Mapping[tuple[str, int], int] | None = None,
) -> Path:
    """``configs`` by ``<network>-<rate>``; a run in ``ends``, (arm, seed), diverged after that step."""
    entries, arms = [], []
    for pair, config in configs.items():
        for kind in ("none", "batch"):
            arm = f"{pair}-{kind}"
            arms.append({"name": arm, "label": arm})
            for seed in range(seeds):
                whole = {"seed": seed, "arm": arm, **config}
                path, last = f"runs/{arm}-s{seed}-{run_id(whole)}", (ends or {}).get((arm, seed))
                with RunWriter(folder / path, config=whole, environment={}, part_every=10_000) as writer:
                    for step in steps:
                        if last is None or step <= last:
                            write(writer, arm, kind, seed, step)
                    writer.close("complete" if last is None else "diverged")
                entries.append({"arm": arm, "seed": seed, "id": run_id(whole), "path": path})
    description = {
        "format": 1, "study": study, "question": "?", "preset": "laptop", "seeds": list(range(seeds)), "arms": arms,
        "measures": [], "rule": "", "control": "", "config": {}, "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


def check_plotted(monkeypatch: pytest.MonkeyPatch, draw: Callable[[Path], object], folder: Path) -> int:
    """Every finite number on a line of data is in the table saved beside the figure; how many there were."""
    seen = 0
    save = style.save

    def look(figure: Any, place: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        nonlocal seen
        known = numbers.select_dtypes("number").to_numpy(dtype=np.float64).ravel()
        known = np.unique(known[np.isfinite(known)])
        for axes in figure.axes:
            named = isinstance(axes.yaxis.get_major_locator(), FixedLocator)  # heights are places, not numbers
            for line in axes.get_lines():
                x, y = (np.atleast_1d(np.asarray(part, dtype=np.float64)) for part in line.get_data(orig=True))
                if line.get_transform() == axes.transData:
                    values = x if named else np.concatenate([x, y[y < axes.get_ylim()[1]]])  # infinity: at the top
                elif line.get_transform() == axes.get_xaxis_transform() and line.get_linestyle() == "None":
                    values = x  # marks along an edge
                else:
                    continue  # a level across the axes
                values = values[np.isfinite(values)]
                apart = np.abs(values[:, None] - known).min(axis=1, initial=np.inf)
                assert (apart <= 1e-12 * np.abs(values)).all(), (name, axes.get_title(), values[apart > 0])
                seen += len(values)
        return save(figure, place, name, numbers)

    monkeypatch.setattr(style, "save", look)
    draw(folder)
    return seen


def unpainted(monkeypatch: pytest.MonkeyPatch, figure: ModuleType, *painters: str) -> None:
    """Let a figure's numbers be written without its pictures, which take most of the time."""

    def write(_: Any, place: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
        numbers.to_csv(place / f"{name}.csv", index=False)
        return (place / f"{name}.csv",)

    monkeypatch.setattr(style, "save", write)
    for painter in painters:
        monkeypatch.setattr(figure, painter, lambda *_: None)
