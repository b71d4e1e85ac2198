"""The theory figure against planted residuals, on either side of their bounds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest

from analysis.figures import theory
from analysis.figures.theory import draw
from analysis.load import StudyError, load_study
from analysis.style import Drawn
from diagnostics.record import RunWriter, run_id

STATEMENTS = [
    {"name": "theorem_4_1", "source": "Santurkar et al. 2018, Theorem 4.1", "claim": "so", "bound": 1e-10,
     "expected": "holds"},
    {"name": "unbiased", "source": "Ioffe & Szegedy 2015, Algorithm 2", "claim": "a mean", "bound": 4.5,
     "expected": "holds"},
    {"name": "false_form", "source": "Ioffe & Szegedy 2015, section 3", "claim": "any", "bound": 1e-10,
     "expected": "fails"},
]  # fmt: skip
GOOD = {"theorem_4_1": 1e-15, "unbiased": 1.2, "false_form": 2.0}


def plant(folder: Path, residuals: list[dict[str, float]], *, name: str = "theory") -> Path:
    """One run for each seed's residuals, and curves whose numbers are known."""
    entries = []
    for seed, of_seed in enumerate(residuals):
        config = {
            "seed": seed,
            "measures": {"statements": STATEMENTS, "factor": 2.0, "draws": 10, "rate": 0.05, "steps": 3},
        }
        path = f"runs/float64-s{seed}-{run_id(config)}"
        with RunWriter(folder / path, config=config, environment={}) as writer:
            for layer, residual in of_seed.items():
                broken = float(residual > 1e-10)
                writer.write(0, "statement", layer, {"residual": residual, "exceeded": broken, "cases": 7.0})
            curve = [0.1 + seed, 1.0, 10.0]
            writer.write(0, "epsilon", "-", dict.fromkeys(("ratio", "output", "du", "dw", "predicted"), curve))
            writer.write(
                0, "scale", "-", dict.fromkeys(("scale", "norm", "gradient", "turned", "plain_gradient"), curve)
            )
            writer.write(0, "coupling", "-", {"m": [4.0, 8.0], "share": [0.4, 0.2], "error": [0.01, 0.02]})
            for step in range(4):
                writer.advance(step)
                for k, treatment in enumerate(("centred", "scaled", "through")):
                    writer.write(step, f"failure.{treatment}", "-", {"b": step * k, "w": 1.0, "loss": 1.0})
        entries.append({"arm": "float64", "seed": seed, "id": run_id(config), "path": path})
    description = {
        "format": 1, "study": name, "question": "?", "preset": "laptop", "seeds": list(range(len(residuals))),
        "arms": [{"name": "float64", "label": "checked in float64"}],
        "measures": [], "rule": "", "control": "", "config": {}, "runs": entries,
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(description))
    return folder


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Drawn]:
    """Two seeds, drawn once: five pictures take seconds."""
    folder = plant(tmp_path_factory.mktemp("theory"), [GOOD, GOOD | {"theorem_4_1": 2e-15}])
    return folder, draw(folder)


def test_what_is_as_expected_is_called_so(drawn: tuple[Path, Drawn]) -> None:
    folder, found = drawn
    table = pd.read_csv(folder / "theory.csv")
    assert table.verdict.tolist() == ["holds", "holds", "fails"]
    assert table.statement.tolist() == ["theorem_4_1", "unbiased", "false_form"]
    assert found.title.startswith("2 of 3 statements hold, 1 false forms")
    assert "NOT AS EXPECTED" not in found.title
    assert found.table["residual"].tolist() == ["2.0e-15", "1.2e+00", "2.0e+00"]
    assert found.table["broken"].tolist() == ["0/14", "2/14", "2/14"]
    assert "2 seeds" not in found.caption
    assert len(found.paths) == 15
    assert all(path.stat().st_size > 20 for path in found.paths)


def test_curves_are_the_first_seeds(drawn: tuple[Path, Drawn]) -> None:
    folder, _ = drawn
    assert pd.read_csv(folder / "theory_epsilon.csv")["ratio"].tolist() == [0.1, 1, 10]
    assert pd.read_csv(folder / "theory_scale.csv")["gradient"].tolist() == [0.1, 1, 10]
    assert pd.read_csv(folder / "theory_coupling.csv")["share"].tolist() == [0.4, 0.2]
    failure = pd.read_csv(folder / "theory_failure.csv")
    assert failure[failure.treatment == "through"]["b"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [({"theorem_4_1": 1e-9}, "SURPRISE: fails"), ({"theorem_4_1": math.nan}, "SURPRISE: fails"),
     ({"unbiased": 4.6}, "SURPRISE: fails"), ({"false_form": 1e-11}, "SURPRISE: holds")],
)  # fmt: skip
def test_what_is_not_is_called_a_surprise_by_name(tmp_path: Path, changed: dict[str, float], verdict: str) -> None:
    judged = theory._judge(load_study(plant(tmp_path, [GOOD | changed])))
    (name,) = changed
    assert {one.name: one.verdict for one in judged}[name] == verdict
    assert theory._title(judged).endswith(f"NOT AS EXPECTED: {name}")


def test_other_studies_and_missing_statements_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="shows the study of that name"):
        draw(plant(tmp_path / "other", [GOOD], name="drift"))
    with pytest.raises(StudyError, match="lacks the statement 'unbiased'"):
        draw(plant(tmp_path / "less", [{name: value for name, value in GOOD.items() if name != "unbiased"}]))
