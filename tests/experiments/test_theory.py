from __future__ import annotations

import math
from pathlib import Path

import pytest

from analysis.figures import theory as drawn
from diagnostics.record import read_run
from experiments import identities
from experiments.cli import main
from experiments.identities import check
from experiments.run import run
from experiments.statements import STATEMENTS
from experiments.studies import theory
from experiments.studies.theory import STUDY, TheoryFields
from experiments.study import Job
from tests.analysis.unrendered import unrendered

TINY = {"cases": 2, "draws": 10, "steps": 4, "starts": 3}


def job(folder: Path, seed: int = 3, **fields: float) -> Job:
    (one,) = STUDY.jobs(TheoryFields(**(TINY | fields)), [seed], device="cpu", folder=folder)
    return one


def test_a_record_holds_every_statement_and_curve(tmp_path: Path) -> None:
    one = job(tmp_path)
    assert run(one, lambda done: None).status == "complete"
    table = read_run(one.folder)
    rows = table[table.probe == "statement"].pivot(index="layer", columns="statistic", values="value")
    assert set(rows.index) == {statement.name for statement in STATEMENTS}
    for name in ("theorem_4_1_at_y", "scale_dw"):
        found = check(name, bound=1e-10, cases=2, seed=3)
        assert rows.loc[name, ["residual", "exceeded", "cases"]].tolist() == [
            found.residual, found.exceeded, found.cases,
        ]  # fmt: skip
    assert {"epsilon", "scale", "coupling", "reach"} < set(table.probe)
    assert {f"failure.{treatment}" for treatment in identities.TREATMENTS} < set(table.probe)
    failure = table[(table.probe == "failure.centred") & (table.statistic == "b")]
    assert failure.sort_values("step").value.tolist() == pytest.approx([0.05 * t for t in range(5)])


def test_every_field_and_the_seed_move_the_address(tmp_path: Path) -> None:
    changed = [{}, {"cases": 3}, {"draws": 11}, {"steps": 5}, {"rate": 0.1}, {"starts": 4}]
    ids = {job(tmp_path, **fields).config.id for fields in changed} | {job(tmp_path, seed=4).config.id}
    assert len(ids) == 7


def test_fields_are_what_is_computed_with(tmp_path: Path) -> None:
    one = job(tmp_path, rate=0.2, draws=12)
    run(one, lambda done: None)
    table = read_run(one.folder)
    b = table[(table.probe == "failure.centred") & (table.statistic == "b") & (table.step == 4)]
    assert b.value.item() == pytest.approx(0.8)
    finite = table[(table.probe == "failure.shrinking") & (table.statistic == "finite")]
    assert set(finite.value) == {3}
    other = job(tmp_path, draws=13, starts=5)
    run(other, lambda done: None)
    shares = [
        t[(t.probe == "coupling") & (t.statistic == "share")].value.tolist() for t in (table, read_run(other.folder))
    ]
    assert shares[0] != shares[1]
    other_finite = read_run(other.folder).query("probe == 'failure.shrinking' and statistic == 'finite'")
    assert set(other_finite.value) == {5}


def test_the_treatments_are_those_that_are_computed() -> None:
    assert theory.TREATMENTS == identities.TREATMENTS
    assert set(drawn.TREATMENTS) == set(theory.TREATMENTS)
    assert f"epsilon {identities.EPSILON:g} " in drawn.TREATMENTS["epsilon"][0]


def test_the_command_draws_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["theory", "--preset", "smoke", "--out", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"31 of {len(STATEMENTS)} statements hold, 10 false forms are shown to be false" in said
    assert "(3 as printed, 4 as read, 3 cut on purpose)" in said
    assert "random ones, and for a false form 1 counterexample" in said
    assert "NOT AS EXPECTED" not in said
    for name in ("theory", "theory_epsilon", "theory_scale", "theory_failure", "theory_coupling"):
        for suffix in ("png", "pdf", "csv"):
            assert (tmp_path / "theory" / f"{name}.{suffix}").stat().st_size > 100


@pytest.mark.parametrize("cases", [1, 2, 3])
def test_few_cases_are_no_surprise(cases: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["theory", "--preset", "smoke", "--cases", str(cases), "--steps", "2", "--out", str(tmp_path)]
    with unrendered():
        assert main(words) == 0
    assert "SURPRISE" not in capsys.readouterr().out


def test_a_check_that_fails_is_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computed anew or read from the record."""
    monkeypatch.setitem(identities.CHECKS, "fold", lambda generator: math.nan)
    for _ in range(2):
        with unrendered():
            assert main(["theory", "--preset", "smoke", "--cases", "2", "--steps", "2", "--out", str(tmp_path)]) == 1
        said = capsys.readouterr()
        assert said.err.splitlines()[-1] == "whybn: fold: not finite, expected: holds (residual nan, bound 1e-10)"
        assert "NOT AS EXPECTED: fold" in " ".join(said.out.split())
        assert (tmp_path / "theory" / "theory.csv").exists()
        monkeypatch.undo()


def test_a_run_that_is_not_finite_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["theory", "--preset", "smoke", "--cases", "1", "--steps", "5", "--rate", "1e308", "--out", str(tmp_path)]
    assert main(words) == 0
    assert "NOT FINITE" in " ".join(capsys.readouterr().out.split())
