"""Curves of two arms on logarithmic axes, where a value may be infinite and a run may end early.

A table here has a row a point: ``x``, ``low``, ``middle``, ``high``. Infinity is drawn as a triangle at the top.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from analysis import style
from analysis.pairs import KINDS

STYLES = dict(zip(KINDS, (style.WITHOUT_BN, style.WITH_BN), strict=True))


def log_axis(axes: Axes, tables: Iterable[pd.DataFrame], line: float | None = None) -> None:
    """A logarithmic vertical axis over all that is finite and positive in ``tables``, and ``line``."""
    axes.set_yscale("log")
    parts = [table[["low", "middle", "high"]].to_numpy(dtype=np.float64).ravel() for table in tables]
    values = np.concatenate([*parts, [] if line is None else [line / 1.2, line * 1.2]])
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return
    low, high = float(values.min()), float(values.max())
    room = max((high / low) ** 0.08, 1.12)
    axes.set_ylim(low / room, high * room * room)
    if high < 300 * low:  # too few powers of ten: write numbers out
        narrow = high < 8 * low
        axes.yaxis.set_major_locator(MaxNLocator(4) if narrow else LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()


def draw_curve(
    axes: Axes,
    table: pd.DataFrame,
    look: style.LineStyle,
    *,
    label: str | None = None,
    marker: str = "",
    aside: bool = False,
) -> None:
    """The middle with its band, as far as they are positive; ``aside`` makes it a thin dotted line without one.

    `log_axis` comes first: it decides where infinity is.
    """
    bottom, top = axes.get_ylim()
    dashes, width = (":", 1.0) if aside else (look.dashes, 1.4)
    middle = _up_to(table["middle"], top)
    middle = np.where(middle > 0, middle, np.nan)  # a logarithm has no place for it: a gap
    axes.plot(
        table["x"], middle, color=look.color, ls=dashes, lw=width, marker=marker, ms=3.5, zorder=look.order, label=label
    )
    if not aside:
        low, high = _up_to(table["low"], top), _up_to(table["high"], top)
        reached = np.maximum(low, bottom)
        axes.fill_between(table["x"], reached, high, where=high > reached, color=look.color, alpha=0.16, lw=0)
        _triangles(axes, table["x"], table["middle"], look)


def draw_range(axes: Axes, table: pd.DataFrame, look: style.LineStyle) -> None:
    """A band that is the finding itself: its two ends are drawn."""
    low, high = (_up_to(table[end], axes.get_ylim()[1]) for end in ("low", "high"))
    axes.fill_between(table["x"], low, high, color=look.color, alpha=0.35, lw=0, zorder=look.order)
    for end in (low, high):
        axes.plot(table["x"], end, color=look.color, ls=look.dashes, lw=0.9, zorder=look.order + 0.1)
    _triangles(axes, table["x"], table["high"], look)


def draw_ends(axes: Axes, x: ArrayLike, look: style.LineStyle) -> None:
    """A cross at the last record of each run that diverged."""
    _along_edge(axes, np.asarray(x, dtype=np.float64), 0.04, "x", look)


def count_steps(axes: Axes) -> None:
    """Training steps along the horizontal axis."""
    axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def plain_ticks(axes: Axes, x: Iterable[float]) -> None:
    """A logarithmic horizontal axis with a few numbers written out."""
    chosen = [float(value) for value in x]
    if len(chosen) > 5:
        powers = [10.0**k for k in range(-4, 5)] if chosen[-1] > 100 * chosen[0] else [2.0**k for k in range(-6, 7)]
        chosen = [tick for tick in powers if chosen[0] * 0.99 <= tick <= chosen[-1] * 1.01]
    axes.set_xscale("log")
    axes.set_xticks(chosen, [f"{tick:g}" for tick in chosen])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def _up_to(values: pd.Series, top: float) -> NDArray[np.float64]:
    return np.minimum(np.asarray(values, dtype=np.float64), top)


def _triangles(axes: Axes, x: pd.Series, values: pd.Series, look: style.LineStyle) -> None:
    infinite = np.isinf(values.to_numpy(dtype=np.float64))
    _along_edge(axes, x.to_numpy(dtype=np.float64)[infinite], 0.97, "^", look)


def _along_edge(axes: Axes, x: NDArray[np.float64], height: float, marker: str, look: style.LineStyle) -> None:
    place = axes.get_xaxis_transform()
    axes.plot(x, np.full(len(x), height), transform=place, ls="", marker=marker, ms=5, color=look.color, zorder=9)
