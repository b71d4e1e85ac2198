"""Imports run one way, light modules stay light, and every part of the house is where design says."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("diagnostics", "experiments", "analysis")


def sources(package):
    return sorted((ROOT / package).rglob("*.py"))


def imported(path):
    """Every module a file imports anywhere, with the line; relative imports are not used in this house."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def allowed(package, path, module):
    owner = module.split(".")[0]
    if owner not in (*PACKAGES, "tests", "torch"):
        return True
    if owner == package:
        return True
    if package == "diagnostics":
        return owner == "torch"
    if package == "analysis":
        return module == "diagnostics.record" or module.startswith("diagnostics.record.")
    return owner in ("diagnostics", "torch") or (owner == "analysis" and path.name == "cli.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in sources(package)
        for module, line in imported(path)
        if not allowed(package, path, module)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_bites():
    somewhere = ROOT / "analysis" / "x.py"
    assert not allowed("diagnostics", somewhere, "experiments.config")
    assert not allowed("analysis", somewhere, "torch")
    assert not allowed("analysis", somewhere, "diagnostics.recorder")
    assert not allowed("experiments", ROOT / "experiments" / "run.py", "analysis.load")
    assert allowed("experiments", ROOT / "experiments" / "cli.py", "analysis.load")
    assert allowed("analysis", somewhere, "diagnostics.record.read_run")


def loaded_by(statement, *names):
    code = f"import sys; {statement}; print(*[n for n in {names!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import diagnostics.record", ("torch", "matplotlib")),
        ("import diagnostics", ("torch", "numpy", "pandas")),
        ("import experiments.cli", ("torch", "numpy", "pandas", "matplotlib", "scipy")),
        ("import analysis", ("torch", "pandas", "matplotlib")),
    ],
)
def test_what_must_start_fast_loads_nothing_heavy(statement, heavy):
    assert loaded_by(statement, *heavy) == []


def test_study_modules_load_neither_torch_nor_numpy_nor_pandas():
    names = [path.stem for path in sorted((ROOT / "experiments" / "studies").glob("[!_]*.py"))]
    assert names
    statement = "; ".join(f"import experiments.studies.{name}" for name in names)
    assert loaded_by(statement, "torch", "numpy", "pandas") == []


def test_every_public_name_of_diagnostics_can_be_imported_from_the_package():
    import diagnostics

    for name in dir(diagnostics):
        if not name.startswith("_") and name[0].isupper():
            assert getattr(diagnostics, name) is not None
    assert diagnostics.Recorder.__module__ == "diagnostics.recorder"
    assert "Activations" in dir(diagnostics)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        diagnostics.Nonsense  # noqa: B018


def test_every_module_says_what_it_is():
    silent = [
        str(p.relative_to(ROOT))
        for package in PACKAGES
        for p in sources(package)
        if not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert not silent
