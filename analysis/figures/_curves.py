"""Curves of two arms on logarithmic axes, where a value may be infinite and a run may end early.

A table here has a row a point: ``x``, ``low``, ``middle``, ``high``. Infinity is drawn as a triangle at the top. A
panel without one number that a logarithm can show says so in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Transform
from numpy.typing import ArrayLike, NDArray

from analysis import style
from analysis.pairs import KINDS

STYLES = dict(zip(KINDS, (style.WITHOUT_BN, style.WITH_BN), strict=True))


TINY, HUGE = 1e-300, 1e300  # an axis does not reach beyond, whatever was measured
NOTHING = "no positive finite number"


def log_axis(axes: Axes, tables: Iterable[pd.DataFrame], line: float | None = None) -> bool:
    """A logarithmic vertical axis over all that is finite and positive in ``tables``, and ``line``.

    Where nothing is, the panel says so and has no such axis, and no place for ``line``: False.
    """
    parts = [table[["low", "middle", "high"]].to_numpy(dtype=np.float64).ravel() for table in tables]
    values = loggable(np.concatenate([np.empty(0), *parts]))
    if not len(values):
        in_words(axes, across=True)
        return False
    axes.set_yscale("log")
    if line is not None:
        values = np.append(values, [line / 1.2, line * 1.2])
    low, high = float(values.min()), float(values.max())
    room = max(math.exp(0.08 * (math.log(high) - math.log(low))), 1.12)
    axes.set_ylim(max(low / room, TINY), min(high * room * room, HUGE))
    if high < 300 * low:  # too few powers of ten: write numbers out
        narrow = high < 8 * low
        axes.yaxis.set_major_locator(MaxNLocator(4) if narrow else LogLocator(subs=(1, 2, 5), numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.minorticks_off()
    return True


def loggable(values: ArrayLike) -> NDArray[np.float64]:
    """Those of ``values`` that a logarithmic axis can show: positive and finite."""
    every = np.asarray(values, dtype=np.float64).ravel()
    return every[np.isfinite(every) & (every > 0)]


def in_words(axes: Axes, text: str = NOTHING, *, across: bool = False) -> None:
    """``text`` in place of numbers; ``across`` keeps the horizontal ones, for what is marked along an edge."""
    axes.set_ylim(0, 1)
    axes.tick_params(left=False, labelleft=False, bottom=across, labelbottom=across)
    axes.grid(visible=False)
    write(axes, text, 0.5, axes.transAxes, color=style.GREY, fontsize=8)


def write(axes: Axes, text: str, height: float, place: Transform, *, color: str, fontsize: float) -> None:
    """``text`` in the middle of a panel, legible above lines."""
    axes.text(
        0.5, height, text, transform=place, ha="center", va="center", color=color, fontsize=fontsize, zorder=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


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

    `log_axis` comes first: it decides where infinity is, and where it found no numbers there is nothing but infinity.
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
        end = np.where(end > 0, end, np.nan)
        axes.plot(table["x"], end, color=look.color, ls=look.dashes, lw=0.9, zorder=look.order + 0.1)
    _triangles(axes, table["x"], table["high"], look)


def draw_ends(axes: Axes, x: ArrayLike, look: style.LineStyle) -> None:
    """A cross at the last record of each run that diverged."""
    _along_edge(axes, np.asarray(x, dtype=np.float64), 0.04, "x", look)


def count_steps(axes: Axes, last: float) -> None:
    """Training steps along the horizontal axis, from 0 to the ``last`` record, whatever there is to draw."""
    room = 0.05 * last or 0.5
    axes.set_xlim(-room, last + room)
    axes.xaxis.set_major_formatter(FuncFormatter(style.thousands))
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))


def plain_ticks(axes: Axes, x: Iterable[float]) -> None:
    """A logarithmic horizontal axis with a few numbers written out."""
    chosen = sorted(float(value) for value in x)
    if len(chosen) > 5:
        low, high = chosen[0], chosen[-1]
        powers = [10.0**k for k in range(-4, 5)] if high > 100 * low else [2.0**k for k in range(-6, 7)]
        chosen = [tick for tick in powers if low * 0.99 <= tick <= high * 1.01] or [low, high]
    axes.set_xscale("log")
    axes.set_xticks(chosen, [plain(tick) for tick in chosen])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.minorticks_off()


def plain(value: float) -> str:
    """A number with two significant digits at most: ``0.55``, ``30``, ``0.0002``."""
    return f"{float(f'{value:.2g}'):g}"


def _up_to(values: pd.Series, top: float) -> NDArray[np.float64]:
    return np.minimum(np.asarray(values, dtype=np.float64), top)


def _triangles(axes: Axes, x: pd.Series, values: pd.Series, look: style.LineStyle) -> None:
    infinite = np.isinf(values.to_numpy(dtype=np.float64))
    _along_edge(axes, x.to_numpy(dtype=np.float64)[infinite], 0.97, "^", look)


def _along_edge(axes: Axes, x: NDArray[np.float64], height: float, marker: str, look: style.LineStyle) -> None:
    place = axes.get_xaxis_transform()
    axes.plot(x, np.full(len(x), height), transform=place, ls="", marker=marker, ms=5, color=look.color, zorder=9)
