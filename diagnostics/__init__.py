"""Measuring what happens inside a network while it trains.

Every name in the ``__all__`` of a module of this package can be imported from the package itself, save one that is also
a module's name (``from diagnostics.guard import guard``). It is found without importing anything else, and loaded on
first use: ``import diagnostics.record`` must not load torch.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def _homes() -> dict[str, str]:
    """Public name -> module, read off the sources, so that a new measure is one new file."""
    found: dict[str, str] = {}
    paths = sorted(Path(__file__).parent.glob("[!_]*.py"))
    for path in paths:
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Assign) and [getattr(t, "id", "") for t in statement.targets] == ["__all__"]:
                found.update(dict.fromkeys(ast.literal_eval(statement.value), path.stem))
    # An imported submodule becomes an attribute of its package, so such a name would mean one thing or the other.
    return {name: home for name, home in found.items() if name not in {path.stem for path in paths}}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    home = None if name.startswith("_") else _homes().get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_homes())
