"""A study as a table: every planted cell comes back, and what cannot be judged is refused by name."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from analysis.load import COLUMNS, StudyError, load_records, load_study, spread_modes
from diagnostics.record import RecordError
from tests.analysis.planted import PlantedRun, write_study

ROOT = Path(__file__).parents[2]


def run_of(offset: float, status="complete", steps=(0, 100, 200)) -> PlantedRun:
    """Percentile q of unit u at the t-th step is offset + 100 t + 10 u + q."""
    values = offset + 100.0 * np.arange(len(steps))[None, :, None] + 10.0 * np.arange(4)[:, None, None] + np.arange(3)
    return PlantedRun({step: offset / 10_000 + step / 1000 for step in steps}, steps, values, status)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    runs = {
        ("none", 3): run_of(1000),
        ("none", 5): run_of(2000, "diverged", steps=(0, 100)),
        ("batch", 3): run_of(3000),
        ("batch", 5): run_of(4000),
    }
    return write_study(tmp_path_factory.mktemp("study") / "figure1", runs)


def changed(folder, **fields):
    file = folder / "study.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_study_is_read_as_it_was_written(folder):
    study = load_study(str(folder))
    assert (study.folder, study.name, study.question) == (folder, "figure1", "Does it train faster?")
    assert [(arm.name, arm.label) for arm in study.arms] == [("none", "without BN"), ("batch", "with BN")]
    assert study.seeds == (3, 5)
    assert [(run.arm, run.seed, run.status) for run in study.runs] == [
        ("none", 3, "complete"),
        ("none", 5, "diverged"),
        ("batch", 3, "complete"),
        ("batch", 5, "complete"),
    ]
    assert [run.diverged for run in study.runs] == [False, True, False, False]
    assert study.run("batch", 5).path.name.startswith("batch-s5-")
    assert study.label("batch") == "with BN"
    assert study.setting("training", "batch") == 60
    assert study.setting("normalizer", arm="batch")["epsilon"] == 1e-5


def test_every_cell_comes_back_with_its_arm_and_seed(folder):
    table = load_records(load_study(folder), probe="activations.input", layer="hidden3.nonlinearity", statistic="p50")
    assert tuple(table.columns) == COLUMNS
    expected = {
        (arm, seed, step, unit): offset + step + 10 * unit + 1
        for arm, seed, offset, steps in (
            ("none", 3, 1000, (0, 100, 200)),
            ("none", 5, 2000, (0, 100)),
            ("batch", 3, 3000, (0, 100, 200)),
            ("batch", 5, 4000, (0, 100, 200)),
        )
        for step in steps
        for unit in range(4)
    }
    found = {(row.arm, row.seed, row.step, row.unit): row.value for row in table.itertuples()}
    assert len(table) == len(expected)
    assert found == expected
    assert set(zip(table["arm"], table["seed"], table["diverged"], strict=True)) == {
        ("none", 3, False),
        ("none", 5, True),
        ("batch", 3, False),
        ("batch", 5, False),
    }
    for column in ("arm", "probe", "layer", "statistic", "mode"):
        assert isinstance(table[column].dtype, pd.CategoricalDtype), column
    assert table["value"].dtype == np.float64
    assert table["step"].dtype == np.int64


@pytest.mark.parametrize(
    ("filters", "column", "left"),
    [
        ({"probe": "log"}, "probe", {"log"}),
        ({"layer": "hidden2.nonlinearity"}, "layer", {"hidden2.nonlinearity"}),
        ({"statistic": "p85"}, "statistic", {"p85"}),
        ({"statistic": ("p15", "count")}, "statistic", {"p15", "count"}),
        ({"unit": 2}, "unit", {2}),
        ({"steps": (100, 200)}, "step", {100}),
        ({"steps": (None, 101)}, "step", {0, 100}),
        ({"arm": "batch"}, "arm", {"batch"}),
        ({"seed": 5}, "seed", {5}),
        ({"mode": "population"}, "mode", {"-", "population"}),
        ({"mode": "batch"}, "mode", {"-", "batch"}),
        ({}, "mode", {"-", "batch", "population"}),
    ],
)
def test_each_filter_filters(folder, filters, column, left):
    table = load_records(load_study(folder), **filters)
    assert set(table[column].unique()) == left
    everything = load_records(load_study(folder))
    assert len(table) == int(everything[column].isin(left).sum())


def test_networks_without_modes_join_each_mode(folder):
    table = load_records(
        load_study(folder), seed=3, unit=1, layer="hidden3.nonlinearity", statistic="p50", steps=(0, 1)
    )
    both = pd.concat([table, table[table["arm"] == "batch"].assign(mode="population", value=7.0)])
    spread = spread_modes(both)
    cells = {(row.arm, row.mode): row.value for row in spread.itertuples()}
    assert cells == {
        ("none", "batch"): 1011.0,
        ("none", "population"): 1011.0,
        ("batch", "batch"): 3011.0,
        ("batch", "population"): 7.0,
    }
    assert len(spread) == 4
    alone = table[table["arm"] == "none"]
    assert spread_modes(alone) is alone


def test_every_unfinished_run_is_named_and_how_to_go_on(tmp_path):
    runs = {
        ("none", 0): run_of(1, "running"),
        ("none", 1): run_of(2),
        ("batch", 0): run_of(3, "failed"),
        ("batch", 1): run_of(4),
    }
    folder = write_study(tmp_path / "out" / "figure1", runs)
    lost = next((folder / "runs").glob("batch-s1-*"))
    lost.rename(tmp_path / "elsewhere")
    with pytest.raises(StudyError) as caught:
        load_study(folder)
    message = str(caught.value)
    assert f"`whybn figure1 --preset laptop --out {tmp_path / 'out'}`" in message
    assert [p.split("-")[0:2] for p in message.split(": ", 1)[1].split("; ")] == [
        ["none", "s0"],
        ["batch", "s0"],
        ["batch", "s1"],
    ]
    assert ": running" in message
    assert ": failed (ValueError: boom)" in message
    assert f": missing (looked in {folder / 'runs'})" in message


def test_a_folder_without_a_study_says_where_it_looked(tmp_path):
    with pytest.raises(StudyError, match="looked for") as caught:
        load_study(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "study.json") in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "format 'list'"),
        ('{"format": 2}', "format 2, this version reads format 1"),
        ("{}", "format None"),
        ('{"format": 1}', "damaged: KeyError 'study'"),
        ('{"format": 1, "study": "x", "preset": "y", "arms": [1]}', "damaged: TypeError"),
    ],
)
def test_a_damaged_study_is_refused(tmp_path, text, message):
    (tmp_path / "study.json").write_text(text)
    with pytest.raises(StudyError, match=message):
        load_study(tmp_path)


def test_arms_and_seeds_must_all_be_there_once(tmp_path):
    folder = write_study(tmp_path / "figure1", {("none", 0): run_of(1), ("batch", 0): run_of(2)})
    runs = json.loads((folder / "study.json").read_text())["runs"]
    changed(folder, runs=runs[:1])
    with pytest.raises(StudyError, match="no run of arm 'batch' with seed 0"):
        load_study(folder)
    changed(folder, runs=[*runs, runs[0]])
    with pytest.raises(StudyError, match="2 runs of arm 'none' with seed 0"):
        load_study(folder)
    changed(folder, runs=runs, seeds=[0, 1])
    with pytest.raises(StudyError, match="no run of arm 'none' with seed 1"):
        load_study(folder)


def test_another_run_than_the_listed_one_is_refused(tmp_path):
    folder = write_study(tmp_path / "figure1", {("none", 0): run_of(1), ("batch", 0): run_of(2)})
    (none,) = (folder / "runs").glob("none-*")
    (batch,) = (folder / "runs").glob("batch-*")
    none.rename(tmp_path / "aside")
    batch.rename(none)
    (tmp_path / "aside").rename(batch)
    with pytest.raises(StudyError, match=r"holds run \w{10}, .* lists \w{10} there"):
        load_study(folder)


def test_a_record_of_another_format_is_refused_by_name(tmp_path):
    folder = write_study(tmp_path / "figure1", {("none", 0): run_of(1)})
    (run,) = (folder / "runs").iterdir()
    status = json.loads((run / "status.json").read_text()) | {"format": 99}
    (run / "status.json").write_text(json.dumps(status))
    with pytest.raises(StudyError, match=rf"run {run.name}: .*format 99"):
        load_study(folder)


def test_a_setting_that_is_not_shared_is_not_one_number(tmp_path):
    folder = write_study(tmp_path / "figure1", {("none", 0): run_of(1), ("batch", 0): run_of(2)})
    study = load_study(folder)
    with pytest.raises(StudyError, match="differ in normalizer"):
        study.setting("normalizer")
    with pytest.raises(StudyError, match=r"has no field training\.speed"):
        study.setting("training", "speed")
    with pytest.raises(StudyError, match=r"has no field seed\.x"):
        study.setting("seed", "x", arm="none")
    with pytest.raises(StudyError, match="no arm 'noisy', it has none, batch"):
        study.setting("training", arm="noisy")


def test_what_was_never_recorded_is_refused(folder):
    study = load_study(folder)
    with pytest.raises(RecordError, match="drift"):
        load_records(study, probe="drift")
    with pytest.raises(RecordError, match="no unit 17"):
        load_records(study, unit=17)
    with pytest.raises(StudyError, match="no row of probe 'log', unit 1"):
        load_records(study, probe="log", unit=1)
    with pytest.raises(StudyError, match=r"no row of steps \(200, None\)"):
        load_records(study, steps=(200, None), seed=5, arm="none")
    with pytest.raises(StudyError, match="no mode 'batch' there, it has population"):
        load_records(study, mode="batch", probe="log", arm="batch")
    for wrong in ({"arm": "noisy"}, {"seed": 4}):
        with pytest.raises(StudyError, match="arms none, batch; seeds"):
            load_records(study, **wrong)
    with pytest.raises(StudyError, match="no arm 'noisy'"):
        study.label("noisy")


def test_values_that_are_not_finite_are_data(tmp_path):
    folder = write_study(
        tmp_path / "figure1", {("none", 0): PlantedRun({0: math.nan, 1: math.inf}, (), np.zeros((1, 0, 3)))}
    )
    values = load_records(load_study(folder), probe="log")["value"]
    assert math.isnan(values[0])
    assert values[1] == math.inf


def test_loading_needs_no_torch_and_no_matplotlib():
    program = "import sys, analysis.load, analysis.statistics; print(*{'torch', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.split() == []
