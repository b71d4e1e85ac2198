"""Study folders with known answers, written through `RunWriter` as the sweep would."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from diagnostics.record import RunWriter, run_id

LABELS = {"none": "without BN", "batch": "with BN"}
PERCENTILES = (15.0, 50.0, 85.0)


@dataclass(frozen=True)
class PlantedRun:
    """What one run holds: accuracy by evaluation step, and percentiles (U, T, Q) of the last layer at T steps."""

    accuracy: Mapping[int, float]
    steps: Sequence[int]
    percentiles: ArrayLike
    status: Literal["complete", "diverged", "failed", "running"] = "complete"


def configuration(arm: str, seed: int, steps: int, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "seed": seed,
        "network": {"kind": "mlp", "hidden": [100, 100, 100], "activation": "sigmoid", "init_std": 0.05},
        "normalizer": {"kind": "batch", "momentum": 0.1, "epsilon": 1e-5} if arm == "batch" else {"kind": "none"},
        "data": {"name": "mnist", "binarize": True, "threshold": 0.5, "root": None},
        "training": {"steps": steps, "batch": 60, "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        "measures": {"percentiles": list(PERCENTILES), "every": 100, "sample": 1000, "mode": "batch"},
    }
    for name, value in changes.items():
        config[name] = config[name] | value
    return config


def write_study(
    folder: Path,
    runs: Mapping[tuple[str, int], PlantedRun],
    *,
    name: str = "figure1",
    **changes: Any,
) -> Path:
    """A study with a run for each (arm, seed); ``changes`` are made to the runs' configuration, section by section."""
    arms, seeds = list(dict.fromkeys(arm for arm, _ in runs)), list(dict.fromkeys(seed for _, seed in runs))
    entries = []
    last = max(max(run.accuracy, default=0) for run in runs.values())
    for (arm, seed), run in runs.items():
        config = configuration(arm, seed, last, **changes)
        path = f"runs/{arm}-s{seed}-{run_id(config)}"
        write_run(folder / path, run, config)
        entries.append({"arm": arm, "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1,
        "study": name,
        "question": "Does it train faster?",
        "arms": [{"name": arm, "label": LABELS.get(arm, arm)} for arm in arms],
        "measures": [],
        "rule": "",
        "control": "",
        "preset": "laptop",
        "seeds": seeds,
        "config": {},
        "runs": entries,
    }
    (folder / "study.json").write_text(json.dumps(description))
    return folder


def write_run(path: Path, run: PlantedRun, config: dict[str, Any]) -> None:
    normalized = config["normalizer"]["kind"] == "batch"
    values = np.asarray(run.percentiles, dtype=np.float64)
    names = [f"p{q:g}" for q in config["measures"]["percentiles"]]
    units = len(values)
    counts = {"count": np.full(units, 999.0), "nonfinite": np.ones(units)}
    with RunWriter(path, config=config, environment={}) as writer:
        for step in sorted({*run.accuracy, *run.steps}):
            writer.advance(step)
            if step in run.accuracy:
                mode = "population" if normalized else "-"
                writer.write(step, "log", "-", {"test_accuracy": run.accuracy[step]}, mode=mode)
            if step in run.steps:
                block = dict(zip(names, values[:, list(run.steps).index(step)].T, strict=True)) | counts
                for layer, offset in (("hidden1", 100.0), ("hidden2", 50.0), ("hidden3", 0.0)):
                    shifted = {key: value + offset * key.startswith("p") for key, value in block.items()}
                    mode = "batch" if normalized else "-"
                    writer.write(step, "activations.input", f"{layer}.nonlinearity", shifted, mode=mode)
        writer.close(run.status, error="ValueError: boom" if run.status == "failed" else None)


def realistic(
    arm: str,
    seed: int,
    *,
    steps: int = 15_000,
    every: int = 100,
    units: int = 100,
    last: int | None = None,
    status: Literal["complete", "diverged", "failed", "running"] = "complete",
) -> PlantedRun:
    """A run shaped like the real ones.

    Without BN: accuracy at chance for thousands of steps, percentiles that overshoot early and then drift, at an offset
    and a scale of its own each. With BN: a fast rise, and bands around zero that widen from 1 to 2. ``last`` cuts it.
    """
    rng = np.random.default_rng([seed, arm == "batch"])
    evaluations = sorted({*range(0, min(steps, 1000) + 1, every), *range(0, steps + 1, 1000), steps})
    times = np.arange(0, steps, every)
    share = times / steps
    if arm == "batch":
        accuracy = {t: 0.1 if t == 0 else 0.975 - 0.12 * np.exp(-t / 1500) + rng.normal(0, 0.002) for t in evaluations}
        width = 1 + (1 + 0.2 * rng.normal(size=(units, 1))) * np.sqrt(share)
        middle = 0.1 * rng.normal(size=(units, 1)) + np.zeros_like(share)
        noise = 0.04
    else:
        delay = 4500 + 500 * rng.normal()
        accuracy = {t: 0.1 + 0.84 / (1 + np.exp(-(t - delay) / 900)) + rng.normal(0, 0.004) for t in evaluations}
        overshoot = np.exp(-(((share - 0.1) / 0.07) ** 2))
        scale = np.exp(0.5 * rng.normal(size=(units, 1)))
        width = scale * (0.2 + 1.2 * (share > 0.05) * (1 - np.exp(-(share - 0.05) / 0.1)))
        middle = rng.normal(size=(units, 1)) * (0.3 + share) - 0.8 * overshoot + 0.4 * share
        noise = 0.07
    curves = np.stack([middle - width, middle, middle + width], axis=-1) + noise * rng.normal(
        size=(units, times.size, 1)
    )
    if last is not None:
        accuracy = {t: a for t, a in accuracy.items() if t <= last}
        curves, times = curves[:, times <= last], times[times <= last]
    return PlantedRun({t: float(np.clip(a, 0, 1)) for t, a in accuracy.items()}, times.tolist(), curves, status)
