"""Figures made, laid out never: what a test of their numbers needs, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import style


def save(figure: Figure, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
    """Write the numbers as `analysis.style.save` does, and no picture."""
    path = folder / f"{name}.csv"
    numbers.to_csv(path, index=False, lineterminator="\n", encoding="utf-8")
    return (path,)


@contextmanager
def unrendered() -> Iterator[None]:
    """No pictures within; the studies' own end-to-end tests render theirs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", save)
        yield
