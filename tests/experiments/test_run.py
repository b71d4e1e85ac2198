from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diagnostics.probe import Probe, Rows
from diagnostics.record import RunWriter, read_run, read_status
from diagnostics.recorder import read_checkpoint
from experiments import run as module
from experiments.config import (
    Computation,
    EvaluationConfig,
    MachineConfig,
    MeasuresConfig,
    MLPConfig,
    NormalizerConfig,
    RunConfig,
    TrainingConfig,
)
from experiments.datasets import Dataset
from experiments.run import run
from experiments.seeds import Streams
from experiments.study import Job, Outcome

CONFIG = RunConfig(
    seed=3,
    network=MLPConfig(inputs=6, hidden=(5,), outputs=2, init_std=0.5),
    normalizer=NormalizerConfig(kind="batch"),
    # momentum, so that the optimizer has something to forget; 6 batches an epoch, so that parts end within one
    training=TrainingConfig(steps=230, batch=6, momentum=0.9),
    evaluation=EvaluationConfig(every=10, early_every=5, early_until=20),
)

LONG = CONFIG.model_copy(update={"training": CONFIG.training.model_copy(update={"steps": 1000})})


def toy() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 6, generator=generator)
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long()
    return Dataset("toy", inputs, targets, inputs[:9] + 0.1, targets[:9], 2)


def nothing(config: RunConfig, data: Dataset, streams: Streams) -> Sequence[Probe]:
    return ()


def ignore(done: int) -> None:
    pass


def until(step: int, error: BaseException) -> Callable[[int], None]:
    def progress(done: int) -> None:
        if done == step:
            raise error

    return progress


def job(folder: Path, config: RunConfig = CONFIG) -> Job:
    return Job("batch", config, nothing, folder)


def content(folder: Path) -> dict[str, bytes]:
    """The bytes that an interruption must not change."""
    files = [folder / "config.json", *sorted((folder / "records").iterdir())]
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_EVERY", 50)
    monkeypatch.setattr(module, "make_data", lambda config, streams: toy())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run that nothing disturbs leaves behind."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PART_EVERY", 50)
        patch.setattr(module, "make_data", lambda config, streams: toy())
        assert run(job(folder), ignore) == Outcome("complete")
    return content(folder)


def test_a_run_leaves_its_configuration_its_environment_and_its_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    seen: list[int] = []
    assert run(job(folder), seen.append) == Outcome("complete")
    assert seen == list(range(231))
    assert json.loads((folder / "config.json").read_text()) == CONFIG.canonical()
    (session,) = json.loads((folder / "environment.json").read_text())
    assert session["device"]["type"] == "cpu"
    assert session["threads"] == 1
    table = read_run(folder)
    assert table.attrs["status"] == "complete"
    accuracy = table[table.statistic == "test_accuracy"]
    assert accuracy.step.tolist() == sorted({*range(0, 21, 5), *range(0, 231, 10)})
    assert accuracy["mode"].unique().tolist() == ["population"]
    assert accuracy.value.iloc[-1] > accuracy.value.iloc[0]


def test_the_seed_decides_every_number_also_those_drawn_from_global_generators(
    tmp_path: Path, whole: dict[str, bytes]
) -> None:
    drawn = []

    def draw(done: int) -> None:
        if done == 5:
            drawn.append((random.random(), np.random.rand(), torch.rand(1).item()))

    for name, seed in (("one", 3), ("again", 3), ("other", 4)):
        assert run(job(tmp_path / name, CONFIG.model_copy(update={"seed": seed})), draw) == Outcome("complete")
    assert content(tmp_path / "one") == content(tmp_path / "again") == whole
    assert content(tmp_path / "other")["part-00000.parquet"] != whole["part-00000.parquet"]
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_progress_is_assessed_on_the_same_training_examples_in_every_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assessed = []
    monkeypatch.setattr(module, "train", lambda *_, fixed, **__: assessed.append(fixed))
    for name, seed, kind in (("a", 3, "batch"), ("b", 3, "none"), ("c", 4, "none")):
        evaluation = EvaluationConfig(fixed=25, fixed_every=7)
        changes = {"evaluation": evaluation, "normalizer": NormalizerConfig(kind=kind), "seed": seed}
        assert run(job(tmp_path / name, CONFIG.model_copy(update=changes)), ignore) == Outcome("complete")
    inputs, targets = assessed[0]
    data = toy()
    places = [int((data.train_inputs == row).all(dim=1).nonzero()) for row in inputs]
    assert len(set(places)) == 25
    assert torch.equal(targets, data.train_targets[places])
    assert torch.equal(assessed[1][0], inputs)
    assert not torch.equal(assessed[2][0], inputs)

    beyond = CONFIG.model_copy(update={"evaluation": EvaluationConfig(fixed=41)})
    assert "at most 40, the training set, got 41" in refusal(tmp_path / "beyond" / "run", beyond)


@pytest.mark.parametrize("status", ["complete", "diverged"])
def test_a_result_is_never_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str) -> None:
    with RunWriter(tmp_path / "run", config=CONFIG.canonical(), environment={}) as writer:
        writer.close(status)
    monkeypatch.setattr(module, "make_data", lambda *_: pytest.fail("data was loaded"))
    assert run(job(tmp_path / "run"), ignore) == Outcome(status)


@pytest.mark.parametrize("steps", [(0,), (7,), (50,), (51,), (120, 130), (99, 230)])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, whole: dict[str, bytes], steps: tuple[int, ...]
) -> None:
    folder = tmp_path / "run"
    for step in steps:
        with pytest.raises(KeyboardInterrupt):
            run(job(folder), until(step, KeyboardInterrupt()))
        assert read_status(folder).status == "running"
        torch.rand(3)  # what happens in between is no part of it
    seen: list[int] = []
    assert run(job(folder), seen.append) == Outcome("complete")
    assert seen[0] == max(steps) // 50 * 50
    assert content(folder) == whole


def test_a_run_killed_between_its_last_checkpoint_and_its_last_word_goes_on(
    tmp_path: Path, whole: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(self: RunWriter, *args: object, **kwargs: object) -> None:
        self._parts.discard()  # type: ignore[union-attr]
        os.close(self._lock)  # all that a killed process does
        raise Killed

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "close", killed)
        with pytest.raises(Killed):
            run(job(folder), ignore)
    assert read_status(folder).status == "running"
    checkpoint = read_checkpoint(folder)
    assert checkpoint is not None
    assert checkpoint["step"] == read_status(folder).steps == 230
    assert run(job(folder), ignore) == Outcome("complete")
    assert content(folder) == whole


def test_a_failed_run_says_why_and_is_started_over(tmp_path: Path, whole: dict[str, bytes]) -> None:
    folder = tmp_path / "run"
    outcome = run(job(folder), until(120, RuntimeError("out of luck")))
    assert outcome == Outcome("failed", "RuntimeError: out of luck")
    assert read_status(folder).status == "failed"
    # interrupted before its own first checkpoint, it must not go on from the one of the run that failed
    with pytest.raises(KeyboardInterrupt):
        run(job(folder), until(30, KeyboardInterrupt()))
    seen: list[int] = []
    assert run(job(folder), seen.append) == Outcome("complete")
    assert seen[0] == 0
    assert content(folder) == whole


def test_a_value_error_in_training_is_a_failure_and_not_a_refusal(tmp_path: Path) -> None:
    outcome = run(job(tmp_path / "run"), until(3, ValueError("late")))
    assert outcome == Outcome("failed", "ValueError: late")


def test_divergence_is_a_result(tmp_path: Path) -> None:
    wild = CONFIG.model_copy(
        update={
            "normalizer": NormalizerConfig(),
            "network": MLPConfig(inputs=6, hidden=(5,), outputs=2, activation="linear", init_std=2.0),
            "training": TrainingConfig(steps=230, batch=7, learning_rate=1e18),
        }
    )
    folder = tmp_path / "run"
    assert run(job(folder, wild), ignore) == Outcome("diverged")
    assert read_status(folder).status == "diverged"
    assert read_run(folder).step.max() < 230
    assert run(job(folder, wild), lambda done: pytest.fail("computed again")) == Outcome("diverged")


def refusal(folder: Path, config: RunConfig = CONFIG) -> str:
    """Why the job is refused; nothing in or beside its folder changes."""
    before = {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()}
    outcome = run(job(folder, config), lambda done: pytest.fail("it trained"))
    assert outcome.status == "refused"
    assert {path: path.read_bytes() for path in folder.parent.rglob("*") if path.is_file()} == before
    assert outcome.error is not None
    return outcome.error


def test_a_record_that_is_being_written_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(job(folder), until(120, KeyboardInterrupt()))
    here = {"device": {"type": "cpu"}}
    with RunWriter(folder, config=CONFIG.canonical(), environment=here, start=100, part_every=50) as other:
        assert "is being written" in refusal(folder)
        other.close("running")


def test_a_run_that_somebody_else_finished_meanwhile_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: dict[str, bytes]
) -> None:
    folder = tmp_path / "run"
    run(job(folder), ignore)
    monkeypatch.setattr(module, "standing", lambda job: "absent")  # as it was when we looked
    assert "holds a record already" in refusal(folder)
    assert content(folder) == whole


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(job(folder), ignore)
    other = CONFIG.model_copy(update={"seed": 9})
    assert f"another configuration than {other.id}" in refusal(folder, other)

    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps(status | {"format": 99}))
    assert "format 99" in refusal(folder)

    (tmp_path / "file").write_text("")
    assert "it is a file" in refusal(tmp_path / "file")

    stray = tmp_path / "stray"
    stray.mkdir()
    (stray / "notes.txt").write_text("mine")
    assert "no record at" in refusal(stray)


def test_going_on_on_another_device_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(job(folder), until(120, KeyboardInterrupt()))
    file = folder / "environment.json"
    file.write_text(file.read_text().replace('"type": "cpu"', '"type": "cuda"'))
    assert "was begun on cuda and cannot go on on cpu" in refusal(folder)


def test_what_is_wrong_before_the_first_step_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = CONFIG.model_copy(update={"training": TrainingConfig(batch=41)})
    assert "a batch holds 1 to 40 examples" in refusal(tmp_path / "run", large)

    def absent(config: object, streams: object) -> Dataset:
        raise FileNotFoundError("no such data; looked in nowhere")

    monkeypatch.setattr(module, "make_data", absent)
    assert refusal(tmp_path / "run") == "no such data; looked in nowhere"
    assert not (tmp_path / "run").exists()


def test_a_run_has_the_threads_it_was_configured_with(tmp_path: Path) -> None:
    two = CONFIG.model_copy(update={"machine": MachineConfig(threads=2), "training": TrainingConfig(steps=3, batch=7)})
    seen = set()
    run(job(tmp_path / "run", two), lambda done: seen.add(torch.get_num_threads()))
    assert seen == {2}
    assert torch.get_num_threads() == 1
    (session,) = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert session["threads"] == 2


SCRIPT = """
import sys
from pathlib import Path
from tests.experiments import test_run
from experiments import run
run.PART_EVERY = 50
run.make_data = lambda config, streams: test_run.toy()
print(run.run(test_run.job(Path(sys.argv[1]), test_run.LONG), lambda done: None), flush=True)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """SIGKILL leaves no time to tidy up: whatever is on disk then must be enough, and nothing of it wrong."""
    assert run(job(tmp_path / "whole", LONG), ignore) == Outcome("complete")
    folder, pause = tmp_path / "run", random.Random(0)
    for parts in (3, 11):
        with started(folder) as process:
            while len(list(folder.glob("records/part-*.parquet"))) < parts:
                assert process.poll() is None
                time.sleep(0.001)
            time.sleep(pause.uniform(0, 0.03))
            process.kill()
    with started(folder) as process:
        assert process.stdout is not None
        assert "complete" in process.stdout.read()
    assert len(json.loads((folder / "environment.json").read_text())) == 3
    assert content(folder) == content(tmp_path / "whole")


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, folder], stdout=subprocess.PIPE, text=True)


# --- what trains nothing


class Squares(MeasuresConfig):
    count: int


def squares(config: Computation) -> Iterator[tuple[int, str, Rows]]:
    assert isinstance(config.measures, Squares)
    if config.measures.count == 0:
        raise ValueError("no squares to compute")
    for k in range(config.measures.count):
        if k == 7:
            raise ZeroDivisionError("seven")
        yield (
            k,
            "square",
            Rows("layer", {"value": [k**2, config.seed], "threads": torch.get_num_threads()}, mode="batch"),
        )


def computation(folder: Path, count: int = 3, **changes: object) -> Job:
    config = Computation(seed=5, measures=Squares(count=count), machine=MachineConfig(threads=2))
    return Job("all", config, None, folder, changes.get("compute", squares))  # type: ignore[arg-type]


def test_a_computation_is_recorded_once_and_left_alone(tmp_path: Path) -> None:
    one = computation(tmp_path / "run")
    assert run(one, ignore) == Outcome("complete")
    before = content(one.folder)
    table = read_run(one.folder)
    assert table.attrs["status"] == "complete"
    values = table[table.statistic == "value"]
    assert list(zip(values.step, values.unit, values.value, strict=True)) == [
        (k, unit, value) for k in range(3) for unit, value in ((0, k**2), (1, 5))
    ]
    assert set(table[table.statistic == "threads"].value) == {2}
    assert set(table["mode"]) == {"batch"}
    assert json.loads((one.folder / "config.json").read_text()) == one.config.canonical()
    assert run(replace(one, compute=None), ignore) == Outcome("complete")
    assert content(one.folder) == before


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_computation_that_did_not_end_is_done_anew(tmp_path: Path, status: str) -> None:
    one = computation(tmp_path / "run")
    with RunWriter(one.folder, config=one.config.canonical(), environment={}) as writer:
        writer.write(0, "square", "layer", {"value": -1.0})
        writer.close(status, error="boom" if status == "failed" else None)  # type: ignore[arg-type]
    assert run(one, ignore) == Outcome("complete")
    whole = computation(tmp_path / "whole")
    run(whole, ignore)
    assert content(one.folder) == content(whole.folder)


def test_a_computation_that_fails_says_so_and_one_that_cannot_begin_is_refused(tmp_path: Path) -> None:
    assert run(computation(tmp_path / "fails", 9), ignore) == Outcome("failed", "ZeroDivisionError: seven")
    assert read_status(tmp_path / "fails").status == "failed"
    assert run(computation(tmp_path / "none", 0), ignore) == Outcome("refused", "no squares to compute")
    assert not (tmp_path / "none").exists()
    empty = computation(tmp_path / "empty", compute=lambda config: ())
    assert run(empty, ignore) == Outcome("refused", "all-s5 computed nothing")
    assert run(computation(tmp_path / "by-none", compute=None), ignore).status == "refused"


def test_an_interrupted_computation_can_be_resumed(tmp_path: Path) -> None:
    def interrupted(config: Computation) -> Iterator[tuple[int, str, Rows]]:
        yield 0, "square", Rows("layer", {"value": 0.0})
        raise KeyboardInterrupt

    one = computation(tmp_path / "run", compute=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(one, ignore)
    assert read_status(one.folder).status == "running"
    assert run(replace(one, compute=squares), ignore) == Outcome("complete")


def test_a_run_without_probes_of_its_study_is_refused(tmp_path: Path) -> None:
    found = run(replace(job(tmp_path / "run"), probes=None), ignore)
    assert found == Outcome("refused", "batch-s3 is to be trained, and its study has no probes")
