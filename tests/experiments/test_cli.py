from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from analysis.style import Drawn
from diagnostics.record import RunWriter, read_status
from experiments import cli
from experiments import sweep as sweep_module
from experiments.cli import explain, main
from experiments.study import Figure, Job, Outcome, Study, discover

SMALL = ("--steps", "20", "--hidden", "3", "--sample", "50", "--percentiles-every", "10")


class Figures:
    """Stands in for `analysis.figures.figure1`, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self.failed: tuple[str, ...] = ()

    def draw(self, folder: Path, *, unit: int | None, grid: bool) -> Drawn:
        self.asked.append({"folder": folder, "unit": unit, "grid": grid})
        table = pd.DataFrame({"arm": ["without BN"], "accuracy": [0.912345], "n": [3]})
        return Drawn((folder / "figure1.png",), table, "Figure 1", failed=self.failed)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    found = Figures()
    stand_in = ModuleType("analysis.figures.figure1")
    stand_in.draw = found.draw  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "analysis.figures.figure1", stand_in)
    return found


class Runs:
    """Stands in for the sweep: every job is complete at once, or ends as told."""

    def __init__(self) -> None:
        self.swept: list[list[Job]] = []
        self.workers: list[int] = []
        self.ends: dict[str, Outcome | BaseException] = {}

    def sweep(self, jobs: list[Job], *, workers: int) -> list[Outcome]:
        self.swept.append(jobs)
        self.workers.append(workers)
        outcomes = []
        for job in jobs:
            end = self.ends.get(job.name, Outcome("complete"))
            if isinstance(end, BaseException):
                raise end
            if end.error is None:
                with RunWriter(job.folder, config=job.config.canonical(), environment={}) as writer:
                    writer.close(end.status)
            outcomes.append(end)
        return outcomes


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    found = Runs()
    monkeypatch.setattr(sweep_module, "sweep", found.sweep)
    return found


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that refuses ``words``."""
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "Traceback" not in err
    return err.strip()


@pytest.mark.parametrize(
    ("words", "given", "allowed"),
    [
        ("", "which study", "figure1"),
        ("figur1", "'figur1'", "did you mean figure1?"),
        ("--versoin", "'--versoin'", "--version"),
        ("list now", "'now'", "after list"),
        ("figure1 --stepz 5", "--stepz", "--steps"),
        ("figure1 --stepz=5", "unknown option --stepz", "--steps"),
        ("figure1 --no-binarise", "--no-binarise", "--no-binarize"),
        ("figure1 --xyzzy 5", "unknown option --xyzzy", "there is --preset, --seeds"),
        ("figure1 more", "'more'", "unexpected argument"),
        ("figure1 --steps", "--steps", "takes a value"),
        ("figure1 --steps --grid", "--steps", "takes a value"),
        ("figure1 --steps many", "'many'", "--steps: must be a valid integer"),
        ("figure1 --steps 2.5", "'2.5'", "--steps: must be a valid integer"),
        ("figure1 --steps 0", "--steps", "greater than or equal to 1, got '0'"),
        ("figure1 --steps -3", "--steps", "greater than or equal to 1, got '-3'"),
        ("figure1 --batch 1", "--batch", "greater than or equal to 2, got '1'"),
        ("figure1 --batch 60001", "--batch", "less than or equal to 60000, got '60001'"),
        ("figure1 --sample 60001", "--sample", "less than or equal to 60000, got '60001'"),
        ("figure1 --seeds 0", "--seeds", "greater than or equal to 1, got '0'"),
        ("figure1 --jobs 0", "--jobs", "greater than or equal to 1, got '0'"),
        ("figure1 --lr -0.1", "--lr", "greater than 0, got '-0.1'"),
        ("figure1 --lr nan", "--lr", "finite number, got 'nan'"),
        ("figure1 --std 0", "--std", "greater than 0, got '0'"),
        ("figure1 --hidden", "--hidden", "at least 1 item"),
        ("figure1 --hidden 3 x", "got 'x'", "--hidden: must be a valid integer"),
        ("figure1 --activation sine", "got 'sine'", "--activation: must be 'sigmoid', 'tanh', 'relu' or 'linear'"),
        ("figure1 --percentiles 15 101", "--percentiles", "between 0 and 100, got 101"),
        ("figure1 --percentiles 15 15", "--percentiles", "once, got 15 15"),
        ("figure1 --no-binarize --threshold 0.3", "threshold=0.3", "means nothing without binarize"),
        ("figure1 --unit 100", "--unit 100", "0 to 99"),
        ("figure1 --unit 7 --hidden 9 7", "--unit 7", "0 to 6"),
        ("figure1 --unit -1", "--unit", "greater than or equal to 0, got '-1'"),
        ("figure1 --preset large", "'large'", "smoke, laptop, paper"),
        ("figure1 --preset=large", "'large'", "smoke, laptop, paper"),
        ("figure1 --preset", "''", "smoke, laptop, paper"),
        ("figure1 --device tpu", "got 'tpu'", "--device: must be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_bad_input_is_refused_in_one_line_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    given: str,
    allowed: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = said(capsys, *words.split())
    assert line.startswith("whybn: ")
    assert given in line
    assert allowed in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_folder_that_cannot_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / place
    assert f"--out {out} cannot be written: " in said(capsys, "figure1", "--out", str(out))


def test_a_run_folder_of_another_format_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Runs, figures: Figures
) -> None:
    words = ("figure1", *SMALL, "--seeds", "1", "--out", str(tmp_path))
    assert main(words) == 0
    capsys.readouterr()
    status = runs.swept[0][1].folder / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"format": 99}))
    assert "format 99" in said(capsys, *words)
    assert len(runs.swept) == 1


def test_a_study_is_computed_once_and_drawn_each_time(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Runs, figures: Figures
) -> None:
    words = ("figure1", "--steps", "20", "--seeds", "3", "--out", str(tmp_path), "--jobs", "7")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "without BN" in out
    assert "0.9123" in out
    folder = tmp_path / "figure1"
    assert out.splitlines()[-2:] == [str(folder / "study.json"), str(folder / "figure1.png")]
    assert [job.name for job in runs.swept[0]] == ["none-s0", "batch-s0", "none-s1", "batch-s1", "none-s2", "batch-s2"]
    assert runs.workers == [7]
    assert {job.config.training.steps for job in runs.swept[0]} == {20}

    assert main((*words, "--unit", "4", "--grid")) == 0
    assert len(runs.swept) == 1  # how a figure is drawn changes no run
    assert figures.asked == [
        {"folder": folder, "unit": None, "grid": False},
        {"folder": folder, "unit": 4, "grid": True},
    ]

    assert main((*words[:4], "5", *words[5:])) == 0
    assert [job.name for job in runs.swept[1]] == ["none-s3", "batch-s3", "none-s4", "batch-s4"]
    stated = json.loads((folder / "study.json").read_text())
    assert stated["seeds"] == [0, 1, 2, 3, 4]
    assert len(stated["runs"]) == 10


def test_the_bare_command_is_the_laptop_preset_in_the_usual_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: Runs, figures: Figures
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["figure1"]) == 0
    assert len(runs.swept[0]) == 6
    stated = json.loads((tmp_path / "runs" / "figure1" / "study.json").read_text())
    assert (stated["preset"], stated["config"]["steps"]) == ("laptop", 15_000)


def test_presets_give_values_and_options_override_them(tmp_path: Path, runs: Runs, figures: Figures) -> None:
    place = ("--out", str(tmp_path))
    asked = {
        ("figure1", *place): ("laptop", 15_000, 3, 0.1),
        ("figure1", "--preset", "smoke", *place): ("smoke", 200, 2, 0.1),
        ("figure1", "--preset=paper", "--lr", "0.2", *place): ("paper", 50_000, 5, 0.2),
        ("figure1", "--seeds", "1", "--preset", "smoke", "--steps", "9", *place): ("smoke", 9, 1, 0.1),
    }
    for words, (preset, steps, seeds, rate) in asked.items():
        assert main(words) == 0
        jobs = runs.swept[-1]
        assert len(jobs) == 2 * seeds
        assert {(job.config.training.steps, job.config.training.learning_rate) for job in jobs} == {(steps, rate)}
        stated = json.loads((tmp_path / "figure1" / "study.json").read_text())
        assert (stated["preset"], stated["config"]["steps"], stated["config"]["lr"]) == (preset, steps, rate)


def test_a_check_that_did_not_pass_is_said_and_ends_with_1(
    tmp_path: Path, figures: Figures, runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    figures.failed = ("one did not hold", "nor did another")
    assert main(["figure1", *SMALL, "--seeds", "1", "--out", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert err == "whybn: one did not hold\nwhybn: nor did another\n"
    assert "figure1.png" in out


def test_failed_runs_are_named_and_nothing_is_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Runs, figures: Figures
) -> None:
    words = ("figure1", "--seeds", "1", "--out", str(tmp_path))
    runs.ends = {"batch-s0": Outcome("failed", "ProbeError: probe 'p' failed\n at step 3")}
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "whybn: batch-s0 failed: ProbeError: probe 'p' failed at step 3\n"
    runs.ends = {"batch-s0": Outcome("refused", "it is being written")}
    assert main(words) == 2
    assert capsys.readouterr().err == "whybn: batch-s0 refused: it is being written\n"
    assert not figures.asked
    runs.ends = {}
    assert main(words) == 0
    assert [job.name for job in runs.swept[-1]] == ["batch-s0"]


def test_what_stops_every_run_is_said_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Runs, figures: Figures
) -> None:
    runs.ends = {name: Outcome("refused", "no data") for name in ("none-s0", "batch-s0")}
    assert "none-s0, batch-s0 refused: no data" in said(capsys, "figure1", "--seeds", "1", "--out", str(tmp_path))
    runs.ends |= {name: Outcome("refused", "no data") for name in ("none-s1", "batch-s1", "none-s2", "batch-s2")}
    found = said(capsys, "figure1", "--seeds", "3", "--out", str(tmp_path))
    assert "none-s0, batch-s0, none-s1 and 3 more refused: no data" in found


def test_divergence_is_a_result(tmp_path: Path, runs: Runs, figures: Figures) -> None:
    runs.ends = {"none-s0": Outcome("diverged")}
    assert main(("figure1", "--seeds", "1", "--out", str(tmp_path))) == 0
    assert len(figures.asked) == 1


def test_ctrl_c_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, runs: Runs, figures: Figures
) -> None:
    runs.ends = {"none-s0": KeyboardInterrupt()}
    assert main(("figure1", "--out", str(tmp_path))) == 130
    assert capsys.readouterr().err == "whybn: interrupted; the same command goes on from where it stopped\n"


def test_figures_get_the_options_they_take_and_no_others(
    tmp_path: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    for name in ("first", "second"):
        module = ModuleType(f"analysis.figures.{name}")

        def draw(folder: Path, name: str = name, **options: object) -> Drawn:
            asked.append((name, options))
            return Drawn((), pd.DataFrame(), "")

        module.draw = draw  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    study: Study[object] = replace(
        discover()["figure1"], figures=(Figure("first", ("unit",)), Figure("second", ("grid",)))
    )
    monkeypatch.setattr(cli, "discover", lambda: {"figure1": study})
    assert main(("figure1", "--seeds", "1", "--unit", "2", "--out", str(tmp_path))) == 0
    assert asked == [("first", {"unit": 2}), ("second", {"grid": False})]


def test_help_lists_studies_and_a_studys_help_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["list"]):
        assert main(words) == 0
        shown = capsys.readouterr().out
        for name, study in discover().items():
            assert name in shown
            assert study.question in shown
    assert "paper (5 seeds)" in shown
    for name, study in discover().items():
        assert main([name, "--help", "--preset", "smoke"]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for field in (*study.fields.model_fields, *study.drawing.model_fields, "seeds", "out", "jobs", "device"):
            assert f"--{field.replace('_', '-')}" in shown
        assert f"(default: {study.presets['smoke'].seeds})" in shown


def test_explanations_are_one_line() -> None:
    assert explain(FileNotFoundError(2, "No such file or directory", "x")) == "No such file or directory: x"
    assert explain(OSError("odd\nthing")) == "odd thing"
    assert explain(ValueError("two\n  lines")) == "two lines"
    box = "╭─ Missing argument ──╮\n│ Missing value for    │\n│ argument '--steps'.  │\n╰──────────────────────╯"
    assert explain(box) == "Missing argument Missing value for argument '--steps'."
    assert explain("+-- Title -----+\n| text         |\n+--------------+") == "-- Title text"


FOR_HELP = """
import sys, time
from experiments.cli import main
code = main(sys.argv[1:])
print(time.process_time(), *sys.modules, sep="\\n", file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("words", [("--help",), ("figure1", "--help"), ("list",), ("--version",)])
def test_help_answers_in_under_a_second_because_it_loads_little(words: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", FOR_HELP, *words], capture_output=True, text=True, check=True)
    seconds, *loaded = done.stderr.split()
    assert not {"torch", "numpy", "pandas", "pyarrow", "matplotlib", "multiprocessing"} & set(loaded)
    assert float(seconds) < 1  # of processor time: the wall clock is not ours alone


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    command = f"'{sys.executable}' -m experiments list; echo $? >&2"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(["sh", "-c", command], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert done.stderr == "0\n"


INTERRUPTED = """
import sys, importlib.abc
WANTED = sys.argv[1]
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == WANTED:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from experiments.__main__ import entry
sys.argv[1:] = ["list"]
sys.exit(entry())
"""


@pytest.mark.parametrize("module", ["experiments.cli", "experiments.config", "experiments.studies.figure1"])
def test_ctrl_c_while_starting_is_no_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("whybn: interrupted")
    assert done.stderr.count("\n") == 1


def test_both_doors_lead_to_the_same_house() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments", "nosuch"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("whybn: 'nosuch' is no study or command")
    assert done.stdout == ""


# Killed and interrupted, in processes of its own.

RUNS = ("figure1", "--steps", "2500", "--hidden", "4", "--sample", "60", "--seeds", "1", "--out")


def started(out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "experiments", *RUNS, str(out), "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(out.parent / "tmp")},  # whose content is ours alone to judge
    )


def parts(out: Path) -> dict[str, bytes]:
    return {str(file.relative_to(out)): file.read_bytes() for file in sorted(out.glob("figure1/runs/*/records/*"))}


def wait_for_parts(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    while len(list(out.glob("figure1/runs/*/records/part-*"))) < count:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.slow
def test_killed_and_interrupted_the_same_command_ends_with_the_same_bytes(tmp_path: Path, figures: Figures) -> None:
    out = tmp_path / "out"
    (tmp_path / "tmp").mkdir()
    with started(out) as process:  # SIGKILL to the parent alone: its workers must follow it
        wait_for_parts(out, 2, process)
        process.kill()
        process.communicate()  # the pipes close when the last worker is gone
    assert {read_status(run).status for run in out.glob("figure1/runs/*")} == {"running"}

    assert not list((tmp_path / "tmp").glob("whybn-*"))  # the workers removed what the parent had put there

    with started(out) as process:  # Ctrl-C to everyone, as a terminal does, and again by somebody impatient
        wait_for_parts(out, 4, process)
        for _ in range(3):
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.03)
        said_so = process.communicate()
        assert said_so[0] == ""
        assert said_so[1].startswith("whybn: interrupted")
        assert said_so[1].count("\n") == 1
        assert process.returncode == 130

    assert main([*RUNS, str(out), "--jobs", "1"]) == 0
    assert main([*RUNS, str(tmp_path / "whole"), "--jobs", "1"]) == 0
    assert len(parts(out)) == 6
    assert parts(out) == parts(tmp_path / "whole")
