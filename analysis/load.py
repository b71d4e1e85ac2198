"""A study folder as tidy tables: one row a number, with the arm and the seed it belongs to.

``<folder>/study.json`` names the arms, the seeds and the runs; each run is a record of `diagnostics.record`. What comes
back is long format: ``arm, seed, step, probe, layer, unit, statistic, mode, value, diverged``. Filters are handed down
to the record, so a question about one unit does not read the others.

A judgement needs whole runs. Any run that is still running, was interrupted or failed is refused by name, all of them
at once; so is a study whose arms and seeds are not all there. A run that *diverged* is a result: it is kept, and
marked.

A network without a normalizer has no modes, and its rows carry ``-``. Asking for one mode returns those rows too, and
`spread_modes` copies them to every mode there is, so that arms can be compared within each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from diagnostics.record import RecordError, read_config, read_run, read_status, run_id

FORMAT = 1
COLUMNS = ("arm", "seed", "step", "probe", "layer", "unit", "statistic", "mode", "value", "diverged")
NO_MODE = "-"
_NAMES = ("arm", "probe", "layer", "statistic", "mode")


class StudyError(ValueError):
    """A study folder that cannot be judged, and why."""


@dataclass(frozen=True)
class Arm:
    """One condition of a study: its name in records and its label in pictures."""

    name: str
    label: str


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    id: str
    path: Path
    status: str  # complete | diverged

    @property
    def diverged(self) -> bool:
        """Whether training ended at a loss that was not finite."""
        return self.status == "diverged"


@dataclass(frozen=True)
class Study:
    """A study whose runs are all finished: one for every arm and seed, arms outermost, in the order of study.json."""

    folder: Path
    name: str
    question: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    runs: tuple[Run, ...]

    def label(self, arm: str) -> str:
        """What pictures call an arm.

        Raises:
            StudyError: If the study has no such arm.
        """
        for known in self.arms:
            if known.name == arm:
                return known.label
        raise StudyError(f"{self.folder} has no arm {arm!r}, it has {', '.join(a.name for a in self.arms)}")

    def run(self, arm: str, seed: int) -> Run:
        """The run of one arm and seed.

        Raises:
            StudyError: If the study has no such arm or seed.
        """
        for run in self.runs:
            if (run.arm, run.seed) == (arm, seed):
                return run
        names = ", ".join(a.name for a in self.arms)
        raise StudyError(f"{self.folder} has no run of arm {arm!r}, seed {seed}: arms {names}; seeds {self.seeds}")

    def setting(self, *path: str, arm: str | None = None) -> Any:
        """A configuration field that all runs share (or all of one arm), as ``setting("training", "batch")``.

        Raises:
            StudyError: If a run has no such field, or two runs differ in it.
        """
        name, found = ".".join(path), []
        for run in self.runs:
            if arm not in (None, run.arm):
                continue
            value: Any = read_config(run.path)
            for key in path:
                if not isinstance(value, dict) or key not in value:
                    raise StudyError(f"the configuration of {run.path} has no field {name}")
                value = value[key]
            found.append(value)
            if value != found[0]:
                raise StudyError(
                    f"runs of {self.folder} differ in {name}: {found[0]!r} and {value!r} ({run.path.name})"
                )
        if not found:
            self.label(str(arm))
        return found[0]


def _read_description(folder: Path) -> dict[str, Any]:
    file = folder / "study.json"
    try:
        description = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StudyError(f"no study in {folder}: looked for {file.absolute()}") from None
    except (OSError, ValueError) as error:
        raise StudyError(f"{file} cannot be read: {error}") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        found = description.get("format") if isinstance(description, dict) else type(description).__name__
        raise StudyError(f"{file} has format {found!r}, this version reads format {FORMAT}")
    return description


def load_study(folder: str | Path) -> Study:
    """Read ``folder``/study.json and the status of every run in it.

    Raises:
        StudyError: If there is no study.json (it says where it looked); if it is damaged or of another format; if an
            arm and seed has no run or two; if a run's folder holds another run, or a record of another format; if runs
            are missing or not finished (each is named with its status, and the command that resumes them).
    """
    folder = Path(folder)
    description = _read_description(folder)
    try:
        name, preset = str(description["study"]), str(description["preset"])
        arms = tuple(Arm(str(arm["name"]), str(arm["label"])) for arm in description["arms"])
        seeds = tuple(int(seed) for seed in description["seeds"])
        entries = [(str(r["arm"]), int(r["seed"]), str(r["id"]), folder / str(r["path"])) for r in description["runs"]]
        question = str(description["question"])
    except (KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{folder / 'study.json'} is damaged: {type(error).__name__} {error}") from None

    resume = f"`whybn {name} --preset {preset} --out {folder.parent}` (with the options it was started with)"
    runs, unfinished = [], []
    for arm, seed in ((arm.name, seed) for arm in arms for seed in seeds):
        matching = [entry for entry in entries if entry[:2] == (arm, seed)]
        if len(matching) != 1:
            count = "no run" if not matching else f"{len(matching)} runs"
            raise StudyError(f"{folder / 'study.json'} lists {count} of arm {arm!r} with seed {seed}, it takes one")
        _, _, id_, path = matching[0]
        if not path.is_dir():
            unfinished.append(f"{path.name}: missing (looked in {path.parent})")
            continue
        try:
            status = read_status(path)
        except RecordError as error:
            raise StudyError(f"run {path.name}: {error}") from error
        if status.status not in ("complete", "diverged"):
            detail = f" ({status.error})" if status.status == "failed" and status.error else ""
            unfinished.append(f"{path.name}: {status.status}{detail}")
        elif (found := run_id(read_config(path))) != id_:
            raise StudyError(f"{path} holds run {found}, {folder / 'study.json'} lists {id_} there")
        runs.append(Run(arm, seed, id_, path, status.status))
    if unfinished:
        listed = "; ".join(unfinished)
        raise StudyError(f"study {name} is not finished, resume it with {resume}: {listed}")
    return Study(folder, name, question, arms, seeds, tuple(runs))


def load_records(
    study: Study,
    *,
    probe: str | Sequence[str] | None = None,
    layer: str | Sequence[str] | None = None,
    statistic: str | Sequence[str] | None = None,
    unit: int | None = None,
    mode: str | None = None,
    steps: tuple[int | None, int | None] | None = None,
    arm: str | None = None,
    seed: int | None = None,
) -> pd.DataFrame:
    """The rows of a study that pass every filter given; run by run in the study's order, in each as recorded.

    Columns are those named at the top of this module. Names are categoricals, ``diverged`` says how the row's run
    ended. Asking once for several names reads the records once. ``mode`` also returns the rows of networks that have no
    modes. ``steps`` is (first, stop), the last one left out, None for an open end.

    Raises:
        StudyError: If there is no such arm or seed, or a run has no row that passes.
        RecordError: If a name occurs nowhere in a run.
    """
    runs = [run for run in study.runs if arm in (None, run.arm) and seed in (None, run.seed)]
    if not runs:
        study.run(study.arms[0].name if arm is None else arm, study.seeds[0] if seed is None else seed)
    tables = []
    for run in runs:
        table = read_run(run.path, probe=probe, layer=layer, statistic=statistic, unit=unit, steps=steps)
        if mode is not None and not table.empty:
            # Not left to read_run: it refuses a mode that a record does not have.
            present = ", ".join(sorted(table["mode"].unique()))
            table = table[table["mode"].isin((mode, NO_MODE))]
            if table.empty:
                raise StudyError(f"run {run.path.name} has no mode {mode!r} there, it has {present}")
        if table.empty:
            raise StudyError(f"run {run.path.name} has no row of {_described(probe, layer, statistic, unit, steps)}")
        table.attrs = {}  # a run's configuration is not the study's
        tables.append(table.assign(arm=pd.Categorical([run.arm] * len(table)), seed=run.seed, diverged=run.diverged))
    return _joined(tables)[list(COLUMNS)]


def spread_modes(table: pd.DataFrame) -> pd.DataFrame:
    """``table`` with each row of no mode (``-``) repeated for every mode that occurs in it; as it is if none does.

    Then arms with and without a normalizer can be compared mode by mode.
    """
    modes = sorted(set(table["mode"].unique()) - {NO_MODE})
    if not modes:
        return table
    plain = table[table["mode"] == NO_MODE]
    copies = (plain.assign(mode=pd.Categorical([mode] * len(plain))) for mode in modes)
    return _joined([table[table["mode"] != NO_MODE], *copies])


def _joined(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """One below the other; names stay categoricals, where concat would turn unequal ones into strings."""
    parts = list(tables)
    for column in _NAMES:
        names = [part[column].astype("category").cat.remove_unused_categories() for part in parts]
        known = list(dict.fromkeys(name for one in names for name in one.cat.categories))
        parts = [part.assign(**{column: one.cat.set_categories(known)}) for part, one in zip(parts, names, strict=True)]
    return pd.concat(parts, ignore_index=True)


def _described(*filters: object) -> str:
    names = ("probe", "layer", "statistic", "unit", "steps")
    return ", ".join(f"{name} {value!r}" for name, value in zip(names, filters, strict=True) if value is not None)
