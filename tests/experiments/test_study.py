from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from diagnostics.record import RecordError, RunWriter
from experiments import study as module
from experiments.config import (
    Computation,
    Frozen,
    MachineConfig,
    MeasuresConfig,
    NormalizerConfig,
    Positive,
    RunConfig,
    TrainingConfig,
)
from experiments.study import Arm, Device, Job, Preset, Study, discover, standing


class Fields(Frozen):
    lr: Positive = 0.1


def configure(fields: Fields, arm: Arm, seed: int, device: Device) -> RunConfig:
    return RunConfig(
        seed=seed,
        normalizer=NormalizerConfig(kind="batch" if arm.name == "batch" else "none"),
        training=TrainingConfig(learning_rate=fields.lr),
        machine=MachineConfig(device=device),
    )


def probes(config: object, data: object, streams: object) -> Sequence[object]:
    return ()


STUDY = Study(
    name="toy",
    question="Is it so?",
    arms=(Arm("none", "without"), Arm("batch", "with")),
    measures=("one thing",),
    rule="a rule",
    control="a control",
    fields=Fields,
    presets={"laptop": Preset(3, {})},
    drawing=Frozen,
    figures=(),
    configure=configure,
    probes=probes,  # type: ignore[arg-type]
)


def test_a_run_is_addressed_by_arm_seed_and_configuration(tmp_path: Path) -> None:
    jobs = STUDY.jobs(Fields(), range(2), device="cpu", folder=tmp_path)
    assert [job.name for job in jobs] == ["none-s0", "batch-s0", "none-s1", "batch-s1"]
    for job in jobs:
        assert job.folder == tmp_path / "runs" / f"{job.name}-{job.config.id}"
        assert job.probes is probes
    assert len({job.config.id for job in jobs}) == 4


def test_arms_may_be_made_of_the_fields(tmp_path: Path) -> None:
    grown = replace(STUDY, arms=lambda fields: tuple(Arm(f"lr-{k}", "") for k in range(round(10 * fields.lr))))
    for fields, names in ((Fields(), ["lr-0"]), (Fields(lr=0.3), ["lr-0", "lr-1", "lr-2"])):
        assert [arm.name for arm in grown.conditions(fields)] == names
        jobs = grown.jobs(fields, [4], device="cpu", folder=tmp_path)
        assert [job.name for job in jobs] == [f"{name}-s4" for name in names]
        path = grown.state(tmp_path, preset="laptop", fields=fields, seeds=[4], jobs=jobs)
        assert [arm["name"] for arm in json.loads(path.read_text())["arms"]] == names
    assert STUDY.conditions(Fields()) == STUDY.arms


def test_more_seeds_later_leave_the_first_ones_where_they_are(tmp_path: Path) -> None:
    three, five = (STUDY.jobs(Fields(), range(n), device="cpu", folder=tmp_path) for n in (3, 5))
    assert five[:6] == three
    other = STUDY.jobs(Fields(lr=0.2), range(3), device="cpu", folder=tmp_path)
    assert not {job.folder for job in three} & {job.folder for job in other}


def test_what_a_study_states_before_it_runs(tmp_path: Path) -> None:
    fields = Fields(lr=0.2)
    jobs = STUDY.jobs(fields, range(1), device="cpu", folder=tmp_path / "toy")
    path = STUDY.state(tmp_path / "toy", preset="laptop", fields=fields, seeds=range(1), jobs=jobs)
    assert path == tmp_path / "toy" / "study.json"
    assert json.loads(path.read_text()) == {
        "format": 1,
        "study": "toy",
        "question": "Is it so?",
        "arms": [{"name": "none", "label": "without"}, {"name": "batch", "label": "with"}],
        "measures": ["one thing"],
        "rule": "a rule",
        "control": "a control",
        "preset": "laptop",
        "seeds": [0],
        "config": {"lr": 0.2},
        "runs": [
            {"arm": job.arm, "seed": 0, "id": job.config.id, "path": f"runs/{job.name}-{job.config.id}"} for job in jobs
        ],
    }
    assert [file.name for file in path.parent.iterdir()] == ["study.json"]


def one(folder: Path, seed: int = 0) -> Job:
    return Job("none", RunConfig(seed=seed), probes, folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", ["running", "failed", "complete", "diverged"])
def test_where_a_run_stands(tmp_path: Path, status: str) -> None:
    job = one(tmp_path / "run")
    assert standing(job) == "absent"
    job.folder.mkdir()
    assert standing(job) == "absent"
    with RunWriter(job.folder, config=job.config.canonical(), environment={}) as writer:
        writer.close(status)
    assert standing(job) == status
    with pytest.raises(RecordError, match=f"another configuration than {one(job.folder, 1).config.id}"):
        standing(one(job.folder, 1))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RecordError, match="no record at"):
        standing(one(tmp_path))
    with pytest.raises(RecordError, match="no record at"):
        standing(one(tmp_path / "notes.txt"))


def test_every_study_found_is_whole() -> None:
    studies = discover()
    assert list(studies) == sorted(studies)
    assert "figure1" in studies
    for name, study in studies.items():
        assert study.name == name
        assert {"smoke", "laptop", "paper"} <= set(study.presets)
        assert all((study.question, study.measures, study.rule, study.control))
        options = {option for figure in study.figures for option in figure.options}
        assert options == set(study.drawing.model_fields)
        for preset in study.presets.values():
            fields = study.fields(**preset.fields)
            jobs = study.jobs(fields, range(preset.seeds), device="cpu", folder=Path("x"))
            arms = study.conditions(fields)
            assert len(arms) >= 1
            assert len({job.folder for job in jobs}) == preset.seeds * len(arms)
        for field in (*study.fields.model_fields.values(), *study.drawing.model_fields.values()):
            assert field.description
            assert not field.is_required()


def test_every_field_of_every_study_moves_a_run() -> None:
    """A setting that is accepted and ignored would be an option that does nothing.

    Each must move a run from at least one preset; from every other it does too, is refused, or is unused (VGG's width
    with another network), which the fields then refuse themselves.
    """
    for study in discover().values():
        bases = [study.fields(**preset.fields) for preset in study.presets.values()]
        for name, field in study.fields.model_fields.items():
            moves = 0
            for usual in (base for base in bases if name not in base.unused()):
                fields = usual.model_copy(update={name: _other(getattr(usual, name), field.annotation)})
                try:
                    moved = study.jobs(fields, [0], device="cpu", folder=Path())
                except ValueError:
                    continue
                jobs = study.jobs(usual, [0], device="cpu", folder=Path())
                assert [job.folder for job in moved] != [job.folder for job in jobs], f"{study.name}: {name}"
                moves += 1
            assert moves, f"{study.name}: {name}"


def _other(value: object, kind: object) -> object:
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case float():
            return value * 1.5 or 0.5
        case tuple():
            return value[:-1]
    choices = [choice for choice in _choices(kind) if choice != value]
    return choices[-1] if choices else {int: 7, str: "elsewhere"}[_plain(kind)]


def _choices(kind: object) -> list[object]:
    """The values of the literals in an annotation."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [choice for part in get_args(kind) for choice in _choices(part)]


def _plain(kind: object) -> type:
    """The type in ``X | None``, whatever constrains it."""
    while get_args(kind):
        kind = get_args(kind)[0]
    assert isinstance(kind, type)
    return kind


def test_a_module_without_a_study_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import studies

    (tmp_path / "stray_study.py").write_text("")
    monkeypatch.setattr(studies, "__path__", [str(tmp_path)])
    with pytest.raises(TypeError, match=r"stray_study.py must hold a Study named STUDY, found None"):
        module.discover()
    del sys.modules["experiments.studies.stray_study"]


def test_studies_are_found_without_loading_what_is_heavy() -> None:
    code = "import sys, experiments.study as s; s.discover(); print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pandas", "pyarrow", "matplotlib", "tyro", "rich"} & set(loaded)


class Numbers(MeasuresConfig):
    howmany: int


def configure_numbers(fields: Fields, arm: Arm, seed: int, device: Device) -> Computation:
    return Computation(seed=seed, measures=Numbers(howmany=int(10 * fields.lr)))


def test_a_study_that_trains_nothing_has_jobs_that_compute(tmp_path: Path) -> None:
    def compute(config: object) -> Sequence[object]:
        return ()

    study = replace(STUDY, configure=configure_numbers, probes=None, compute=compute)
    one, other = study.jobs(Fields(), range(2), device="cpu", folder=tmp_path)[::2]
    assert (one.compute, one.probes, one.steps) == (compute, None, 1)
    assert one.folder.name == f"none-s0-{one.config.id}"
    assert one.config.id != other.config.id
    assert standing(one) == "absent"
    assert one.config.canonical()["measures"] == {"howmany": 1}


def test_longer_jobs_go_first_and_training_counts_its_steps(tmp_path: Path) -> None:
    none, batch = STUDY.jobs(Fields(), range(1), device="cpu", folder=tmp_path)
    assert none.steps == none.config.training.steps
    assert (
        batch.length > none.length > replace(none, config=configure_numbers(Fields(), STUDY.arms[0], 0, "cpu")).length
    )
