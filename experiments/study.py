"""What a study is: a question, arms that differ in one thing, and the rule that will judge them, fixed before it runs.

A study module in `experiments.studies` holds one ``STUDY``; modules are found by walking the package. They are loaded
to answer ``whybn --help``, so neither they nor this module load torch, numpy or pandas.

A run is one arm with one seed. Its folder is ``<out>/<study>/runs/<arm>-s<seed>-<id>/``; the study itself is stated in
``<out>/<study>/study.json`` before the first run begins.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from experiments.config import Computation, Frozen, RunConfig

if TYPE_CHECKING:
    from diagnostics.probe import Probe, Rows
    from experiments.datasets import Dataset
    from experiments.seeds import Streams

__all__ = [
    "Arm",
    "Compute",
    "Device",
    "Figure",
    "Job",
    "Outcome",
    "Preset",
    "ProbesFor",
    "Study",
    "discover",
    "standing",
]

FORMAT = 1

Device = Literal["cpu", "cuda"]

ProbesFor = Callable[[RunConfig, "Dataset", "Streams"], Sequence["Probe"]]
"""What a run measures, made once data and streams are there. A function at a module's top level: workers import it."""

Compute = Callable[[Computation], Iterable[tuple[int, str, "Rows"]]]
"""What is recorded where nothing is trained: (step, probe, rows), steps in order. Also at a module's top level."""

Fields = TypeVar("Fields", bound=Frozen)


@dataclass(frozen=True)
class Arm:
    """One condition: its name in folders and tables, its label in pictures."""

    name: str
    label: str


@dataclass(frozen=True)
class Preset:
    """A size of the study: how many seeds, and the fields that differ from the study's defaults."""

    seeds: int
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class Figure:
    """A picture: the module in `analysis.figures` that draws it, and the drawing options it takes."""

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """A run to be: one arm with one seed, what makes its probes (or its numbers), and the folder of its record."""

    arm: str
    config: RunConfig | Computation
    probes: ProbesFor | None
    folder: Path
    compute: Compute | None = None

    @property
    def name(self) -> str:
        """Arm and seed, as people speak of it."""
        return f"{self.arm}-s{self.config.seed}"

    @property
    def steps(self) -> int:
        """What its progress is counted in: updates, or 1 where nothing is trained."""
        return self.config.training.steps if isinstance(self.config, RunConfig) else 1

    @property
    def length(self) -> float:
        """How long it takes, up to a factor that all share: normalizing costs about half as much again."""
        if isinstance(self.config, Computation):
            return 1.0
        return self.steps * (1.0 if self.config.normalizer.kind == "none" else 1.5)


@dataclass(frozen=True)
class Outcome:
    """How a job ended. ``refused``: it could not begin as it was asked for."""

    status: Literal["complete", "diverged", "failed", "refused"]
    error: str | None = None


@dataclass(frozen=True)
class Study(Generic[Fields]):
    """A question and everything that is decided about it before it runs.

    Attributes:
        name: What is typed after ``whybn``, and the study's folder.
        question: One sentence.
        arms: The conditions, or what makes them of the fields' values (doses, say); they share a seed's weights,
            batches and probe examples.
        measures: What is recorded, in words.
        rule: What outcome would support the claim and what would refute it.
        control: The observation that could embarrass the experiment.
        fields: The settings people may change, flat, each with a default (the laptop's) and a description.
        presets: Sizes by name; ``laptop`` is the default one.
        drawing: How figures may be drawn; not part of any run.
        figures: What is drawn from the records.
        configure: The configuration of one arm with one seed, from the fields' values: a `Computation` where that arm
            trains nothing.
        probes: What measures training.
        compute: What an arm that trains nothing records.
        refuse: Raises ValueError for a drawing that the fields' runs cannot give: before they are made.
    """

    name: str
    question: str
    arms: tuple[Arm, ...] | Callable[[Fields], tuple[Arm, ...]]
    measures: tuple[str, ...]
    rule: str
    control: str
    fields: type[Fields]
    presets: Mapping[str, Preset]
    drawing: type[Frozen]
    figures: tuple[Figure, ...]
    configure: Callable[[Fields, Arm, int, Device], RunConfig | Computation]
    probes: ProbesFor | None = None
    compute: Compute | None = None
    refuse: Callable[[Fields, Any], None] = lambda fields, drawing: None

    def conditions(self, fields: Fields) -> tuple[Arm, ...]:
        """The arms at these fields' values."""
        return self.arms(fields) if callable(self.arms) else self.arms

    def jobs(self, fields: Fields, seeds: Sequence[int], *, device: Device, folder: Path) -> list[Job]:
        """One job for every seed and arm, in folders under ``folder``/runs.

        Raises:
            ValueError: If the fields' values make no run.
        """
        found = []
        for seed in seeds:
            for arm in self.conditions(fields):
                config = self.configure(fields, arm, seed, device)
                place = folder / "runs" / f"{arm.name}-s{seed}-{config.id}"
                found.append(Job(arm.name, config, self.probes, place, self.compute))
        return found

    def state(self, folder: Path, *, preset: str, fields: Fields, seeds: Sequence[int], jobs: Sequence[Job]) -> Path:
        """Write ``folder``/study.json, whole or not at all; the path written."""
        statement = {
            "format": FORMAT,
            "study": self.name,
            "question": self.question,
            "arms": [{"name": arm.name, "label": arm.label} for arm in self.conditions(fields)],
            "measures": list(self.measures),
            "rule": self.rule,
            "control": self.control,
            "preset": preset,
            "seeds": list(seeds),
            "config": fields.model_dump(mode="json"),
            "runs": [
                {
                    "arm": job.arm,
                    "seed": job.config.seed,
                    "id": job.config.id,
                    "path": job.folder.relative_to(folder).as_posix(),
                }
                for job in jobs
            ],
        }
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "study.json"
        # A name of its own: the same study may be asked for twice at a time.
        descriptor, temporary = tempfile.mkstemp(prefix=".study.json.", dir=folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(statement, indent=2, ensure_ascii=False) + "\n")
                file.flush()
                os.fchmod(descriptor, 0o644)
                os.fsync(descriptor)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path


def discover() -> dict[str, Study[Any]]:
    """Every study there is, by name, in alphabetical order.

    Raises:
        TypeError: If a module of `experiments.studies` has no ``STUDY``, or it is not one.
    """
    from experiments import studies

    found = {}
    for module in sorted(pkgutil.iter_modules(studies.__path__), key=lambda module: module.name):
        study = getattr(importlib.import_module(f"experiments.studies.{module.name}"), "STUDY", None)
        if not isinstance(study, Study):
            raise TypeError(f"experiments/studies/{module.name}.py must hold a Study named STUDY, found {study!r}")
        found[study.name] = study
    return found


def standing(job: Job) -> Literal["absent", "running", "failed", "complete", "diverged"]:
    """What is in the job's folder. ``complete`` and ``diverged`` are results: there is nothing to compute.

    Raises:
        RecordError: If the folder holds anything but a record of this very configuration in a format we read.
    """
    from diagnostics.record import RecordError, read_config, read_status

    if not job.folder.exists() or (job.folder.is_dir() and not any(job.folder.iterdir())):
        return "absent"
    status = read_status(job.folder).status
    if read_config(job.folder) != job.config.canonical():
        raise RecordError(f"{job.folder} holds the record of another configuration than {job.config.id}")
    return status
