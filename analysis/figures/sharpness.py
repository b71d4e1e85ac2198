"""The largest Hessian eigenvalue over training, with and without batch normalization, from the records of that study.

One picture, ``sharpness``, a row for each network and learning rate eta: eta times the largest eigenvalue on all
examples (on minibatches: on a fixed set of them) and on the step's own batch, eta times the curvature along the batch's
gradient, and the loss. Where theory has a line for eta times the eigenvalue it is drawn: 2, and 2 (1 + mu) with
momentum mu. Adam has none, and for it the quantities are shown without eta.

A reading is with BN over without, paired by seed; see `analysis.pairs`. The tests plant records whose readings are
known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from analysis import style
from analysis.figures._curves import STYLES, count_steps, draw_curve, draw_ends, log_axis
from analysis.load import Study, load_study
from analysis.pairs import (
    KINDS,
    NAMES,
    WHOLE,
    Pair,
    Reading,
    compare,
    exploded,
    exponent,
    lines_of,
    lost,
    medians_of,
    number,
    pairs_of,
    read,
    spread,
    stacked,
    typical,
    unconverged,
    warned,
)
from analysis.statistics import Estimate, mean, paired_difference

NAME = "sharpness"
WIDTH = 0.25  # how near to the line counts as there, as a share of it
QUANTITIES = {
    "all": "largest eigenvalue",  # of all examples, or of the fixed ones that stand for them
    "batch": "largest eigenvalue, step's batch",
    "rayleigh": "g'Hg/|g|\N{SUPERSCRIPT TWO}, step's batch",
    "loss": "loss, step's batch",
}
_WORDS = {"smaller": "flatter", "larger": "sharper", "undecided": "undecided"}
_LOST = "last record of a run that diverged"
_COLUMNS = ("network", "lr", "arm", "panel", "x", "low", "middle", "high", "seeds")

Row = tuple[str | float, ...]
Series = Mapping[tuple[str, int, str], pd.Series]


@dataclass(frozen=True)
class _Protocol:
    """How a pair was trained."""

    full: bool
    line: float | None  # of eta x eigenvalue, for full-batch descent; None for Adam
    steps: int
    batch: str
    optimizer: str
    sample: int  # fixed examples that stand for all; 0 where the batch is all there is

    @classmethod
    def of(cls, study: Study, pair: Pair) -> _Protocol:
        training = study.setting("training", arm=pair.arm("none"))
        batch, adam = training["batch"], training["optimizer"] == "adam"
        momentum = 0.0 if adam else training["momentum"]
        words = "Adam" if adam else "gradient descent" if batch == "full" else "SGD"
        if momentum:
            words = f"heavy ball (momentum {momentum:g})"
        size = "full batch" if batch == "full" else f"batches of {batch}"
        sample = study.setting("measures", "sample", arm=pair.arm("none"))
        return cls(batch == "full", None if adam else 2 * (1 + momentum), training["steps"], size, words, sample)

    @property
    def examples(self) -> str:
        """On what the eigenvalue stands that is judged first."""
        return "all examples" if self.full else f"{self.sample} fixed examples"

    @property
    def factor(self) -> str:
        """What a quantity is multiplied with, in words."""
        return "" if self.line is None else "\u03b7 \N{MULTIPLICATION SIGN} "


@dataclass(frozen=True)
class _Judged:
    """A pair, what was read off it, and what follows."""

    pair: Pair
    protocol: _Protocol
    readings: Mapping[str, Reading]
    shares: Mapping[str, tuple[float, ...]]  # of late records at the line, one a seed, by kind; empty without a line
    beyond: Mapping[str, tuple[float, ...]]  # of late records above that
    losses: Mapping[str, tuple[float, ...]]  # at the last record, one a seed: arms differ in how far they came

    def at_edge(self, kind: str) -> bool:
        """Whether more than half of the late records are at the line, interval included, where theory has one."""
        if not self.protocol.full or not self.shares:
            return False
        found = _share(self.shares[kind])
        return found.has_interval and found.low > 0.5

    @property
    def verdict(self) -> str:
        """By the study's rule."""
        if all(self.at_edge(kind) for kind in KINDS):
            return "both at the edge: eta set both"
        found = _WORDS[self.readings["all"].outcome]
        edge = [f"; {NAMES[kind]} at the edge" for kind in KINDS if self.at_edge(kind)]
        if self.protocol.full:
            return found + "".join(edge)
        own = _WORDS[self.readings["batch"].outcome]
        return found if own == found else f"{found} on {self.protocol.examples}, {own} on the batch"


def draw(folder: Path) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: sharpness as .png, .pdf and .csv.

    Raises:
        ValueError: If ``folder`` holds another study, or one that is not finished.
    """
    folder = Path(folder)
    study = load_study(folder)
    pairs = pairs_of(study, NAME)
    protocols = {pair: _Protocol.of(study, pair) for pair in pairs}
    series, searches = _series(study, protocols)
    judged = [_judge(study, pair, protocols[pair], series) for pair in pairs]
    plotted = pd.DataFrame(_plotted(study, pairs, series), columns=_COLUMNS)
    caption = _caption(study, judged, series, searches)
    with style.look():
        figure = _figure(judged, plotted, caption)
    numbers = pd.concat([plotted, _read_off(judged)], ignore_index=True)
    return style.Drawn(
        style.save(figure, folder, NAME, numbers), _table(judged), _title(study, judged, searches), caption
    )


# --- reading


def _series(study: Study, protocols: Mapping[Pair, _Protocol]) -> tuple[Series, list[pd.DataFrame]]:
    """(arm, seed, quantity) -> values by step, times eta where there is a line; and how each search ended, once.

    An eigenvalue that is not finite is infinite: the products overflowed. g'Hg/|g|^2 is NaN where g is zero.
    """
    found: dict[tuple[str, int, str], pd.Series] = {}
    searches: list[pd.DataFrame] = []
    for pair, protocol in protocols.items():
        factor = 1.0 if protocol.line is None else pair.rate
        names = ("sharpness", "rayleigh", "loss", "converged")
        own = read(study, [pair], "sharpness.batch", names, grid=False)
        fixed = own if protocol.full else read(study, [pair], "sharpness.fixed", ("sharpness", "converged"), grid=False)
        for kind in KINDS:
            for seed in study.seeds:
                key = pair.arm(kind), seed
                found[(*key, "all")] = factor * exploded(fixed[(*key, "sharpness")])[WHOLE]
                if not protocol.full:
                    found[(*key, "batch")] = factor * exploded(own[(*key, "sharpness")])[WHOLE]
                found[(*key, "rayleigh")] = factor * own[(*key, "rayleigh")][WHOLE]
                found[(*key, "loss")] = exploded(own[(*key, "loss")])[WHOLE]
                searches += [table[(*key, "converged")] for table in ([own] if protocol.full else [own, fixed])]
    return found, searches


def _judge(study: Study, pair: Pair, protocol: _Protocol, series: Series) -> _Judged:
    readings, shares, beyond = {}, {}, {}
    for quantity in QUANTITIES:
        if (pair.arm("none"), study.seeds[0], quantity) not in series:
            continue
        sides: tuple[list[float], list[float]] = ([], [])
        for seed in study.seeds:
            curves = [series[pair.arm(kind), seed, quantity] for kind in KINDS]
            common = curves[0].index.intersection(curves[1].index)  # a run that diverged has no later ones
            for side, curve in zip(sides, curves, strict=True):
                side.append(typical(curve[common]))
        readings[quantity] = compare(*sides)
    if protocol.line is not None:
        for kind in KINDS:
            curves = [series[pair.arm(kind), seed, "all"] for seed in study.seeds]
            late = [curve[curve.index >= protocol.steps / 2].to_numpy() / protocol.line for curve in curves]
            shares[kind] = tuple(_mean(np.abs(values - 1) <= WIDTH) for values in late)
            beyond[kind] = tuple(_mean(values > 1 + WIDTH) for values in late)
    ends = {kind: tuple(float(series[pair.arm(kind), seed, "loss"].iloc[-1]) for seed in study.seeds) for kind in KINDS}
    return _Judged(pair, protocol, readings, shares, beyond, ends)


def _mean(values: NDArray[np.bool_]) -> float:
    """A share; NaN of nothing: the run had diverged."""
    return float(values.mean()) if len(values) else math.nan


def _share(values: Sequence[float]) -> Estimate:
    """Mean share over seeds with its interval; NaN where a run had diverged before."""
    if any(math.isnan(value) for value in values):
        return Estimate(math.nan, math.nan, math.nan, len(values), "a run has no late records")
    return mean(values, within=(0.0, 1.0))


def _plotted(study: Study, pairs: Sequence[Pair], series: Series) -> Iterator[Row]:
    for pair in pairs:
        for kind in KINDS:
            arm = pair.arm(kind)
            for quantity in QUANTITIES:
                if (arm, study.seeds[0], quantity) not in series:
                    continue
                steps, values = stacked([series[arm, seed, quantity] for seed in study.seeds])
                low, middle, high = spread(values)
                counts = (~np.isnan(values)).sum(axis=0)
                for k, step in enumerate(steps):
                    yield pair.network, pair.rate, kind, quantity, step, low[k], middle[k], high[k], int(counts[k])
            for run in study.runs:
                if run.arm == arm and run.diverged:
                    last = int(series[arm, run.seed, "loss"].index.max())
                    yield pair.network, pair.rate, kind, _LOST, last, math.nan, math.nan, math.nan, 1


def _read_off(judged: Sequence[_Judged]) -> pd.DataFrame:
    rows: list[Row] = []
    for one in judged:
        place = one.pair.network, one.pair.rate
        for quantity, r in one.readings.items():
            ratio = r.ratio
            rows.append(
                (
                    *place,
                    "with/without",
                    f"reading: {quantity}",
                    ratio.low,
                    ratio.estimate,
                    ratio.high,
                    ratio.n,
                    r.outcome,
                )
            )
        for words, shares in (("at the line", one.shares), ("beyond it", one.beyond)):
            for kind, values in shares.items():
                e = _share(values)
                rows.append((*place, kind, f"share of late records {words}", e.low, e.estimate, e.high, e.n, ""))
    columns = ["network", "lr", "arm", "panel", "low", "middle", "high", "seeds", "outcome"]
    return pd.DataFrame(rows, columns=columns)


# --- drawing


def _figure(judged: Sequence[_Judged], plotted: pd.DataFrame, caption: str) -> Figure:
    figure = style.new_figure(11.4, 2.15 * len(judged) + 0.4, caption)
    grid = figure.subplots(len(judged), 4, squeeze=False)
    for one, row in zip(judged, grid, strict=True):
        pair, protocol = one.pair, one.protocol
        here = plotted[(plotted["network"] == pair.network) & (plotted["lr"] == pair.rate)]
        for axes, quantity in zip(row, QUANTITIES, strict=True):
            if quantity not in one.readings:
                axes.set_axis_off()
                text = "full batch: the step's batch\nis all examples"
                axes.annotate(text, (0.5, 0.5), xycoords="axes fraction", ha="center", va="center", color=style.GREY)
                continue
            line = None if quantity == "loss" else protocol.line
            if _draw_quantity(axes, here, quantity, line) and line is not None:
                _draw_line(axes, protocol, line)
            axes.set_ylabel("dimensionless" if protocol.line is not None else "loss/parameter\N{SUPERSCRIPT TWO}")
        row[0].set_ylabel(f"{pair.title}\n{row[0].get_ylabel()}")
        row[3].set_ylabel("loss, summed squares" if pair.network == "linear" else "loss, nats")
    for index, (one, row) in enumerate(zip(judged, grid, strict=True)):
        changed = index == 0 or one.protocol.examples != judged[index - 1].protocol.examples
        for axes, (quantity, words) in zip(row, QUANTITIES.items(), strict=True):
            title = (one.protocol.factor if quantity != "loss" else "") + words
            title += f", {one.protocol.examples}" if quantity == "all" else ""
            if index == 0 or (quantity == "all" and changed):
                axes.set_title(title, fontsize=8.0)
    for column in range(4):
        drawn = [row[column] for row in grid if row[column].axison]
        if drawn:
            drawn[-1].set_xlabel("training steps")
    handles, labels = grid[0][0].get_legend_handles_labels()
    more = [pair for row in grid[1:] for pair in zip(*row[0].get_legend_handles_labels(), strict=True)]
    for handle, label in more:
        if label not in labels:
            handles.append(handle)
            labels.append(label)
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _draw_quantity(axes: Axes, here: pd.DataFrame, quantity: str, line: float | None) -> bool:
    """Whether there was a number to draw."""
    tables = {kind: here[(here["arm"] == kind) & (here["panel"] == quantity)] for kind in KINDS}
    found = log_axis(axes, tables.values(), line)
    for kind, table in tables.items():
        draw_curve(axes, table, STYLES[kind], label=NAMES[kind])
        draw_ends(axes, here.loc[(here["arm"] == kind) & (here["panel"] == _LOST), "x"], STYLES[kind])
    count_steps(axes, max(table["x"].max() for table in tables.values()))
    return found


def _draw_line(axes: Axes, protocol: _Protocol, line: float) -> None:
    words = "2/\u03b7" if line == 2 else "2 (1 + \u03bc)/\u03b7"
    if protocol.full:
        axes.axhline(line, color="black", lw=1.0, ls="-.", label=words)
    else:
        axes.axhline(line, color=style.GREY, lw=1.0, ls=(0, (1, 1)), label=f"{words} (a full-batch statement)")


# --- saying


def _table(judged: Sequence[_Judged]) -> pd.DataFrame:
    rows: list[tuple[str, ...]] = []
    for one in judged:
        eta = "eta x " if one.protocol.line is not None else ""
        whole = "eigenvalue" if one.protocol.full else f"eigenvalue, {one.protocol.sample} fixed"
        for quantity, label in {"all": whole, "batch": "batch's eigenvalue", "rayleigh": "g'Hg/|g|^2"}.items():
            if quantity in one.readings:
                r = one.readings[quantity]
                numbers = number(r.without), number(r.with_), r.text
                rows.append((one.pair.title, eta + label, *numbers, _WORDS[r.outcome]))
        if one.shares:
            rows.append((one.pair.title, "late records at line", *_share_texts(one)))
            above = [_share(one.beyond[kind]) for kind in KINDS]
            rows.append((one.pair.title, "late records beyond", *(e.text(".2f") for e in above), "", ""))
        rows.append((one.pair.title, "loss, last record", *(number(one.losses[kind]) for kind in KINDS), "", ""))
        rows.append((one.pair.title, "VERDICT", "", "", "", one.verdict))
    rows += _exponents(judged)
    return pd.DataFrame(rows, columns=["network", "measure", "without BN", "with BN", "with/without", "outcome"])


def _share_texts(one: _Judged) -> tuple[str, str, str, str]:
    texts = [_share(one.shares[kind]).text(".2f") for kind in KINDS]
    sides = one.shares["batch"], one.shares["none"]
    known = not any(math.isnan(value) for side in sides for value in side)
    difference = f"difference {paired_difference(*sides).text('+.2f')}" if known else "a run has no late records"
    edge = [NAMES[kind] for kind in KINDS if one.at_edge(kind)]
    neither = "neither" if all(_share(side).has_interval for side in sides) else "undecided"
    said = "decides nothing" if not one.protocol.full else f"at the edge: {' and '.join(edge) or neither}"
    return texts[0], texts[1], difference, said


def _exponents(judged: Sequence[_Judged]) -> list[tuple[str, ...]]:
    """How the eigenvalue follows the learning rate, for networks that have two."""
    rows = []
    for network in dict.fromkeys(one.pair.network for one in judged):
        mine = [one for one in judged if one.pair.network == network]
        if len(mine) < 2:
            continue
        rates, texts = [one.pair.rate for one in mine], []
        for side in ("without", "with_"):
            values = []
            for one in mine:
                factor = 1.0 if one.protocol.line is None else one.pair.rate
                values.append([value / factor for value in getattr(one.readings["all"], side)])
            found = exponent(rates, values)
            texts.append(found.text(".2f") if math.isfinite(found.estimate) else "-")
        rows.append((network, "a in eigenvalue ~ lr^a", *texts, "", "-1: set by the rate"))
    return rows


def _title(study: Study, judged: Sequence[_Judged], searches: Sequence[pd.DataFrame]) -> str:
    said = "\n".join(f"{one.pair.title}: {one.verdict}" for one in judged)
    return (
        f"Sharpness with BN over without:\n{said}\n{medians_of(study)}; late: second half of training; at line: within"
        f" a quarter of it. {warned(searches)}"
    ).strip()


def _negative(series: Series) -> str:
    """How many curvatures along the gradient a logarithmic axis cannot show."""
    every = np.concatenate([curve.to_numpy() for (*_, quantity), curve in series.items() if quantity == "rayleigh"])
    bad = int((every <= 0).sum())
    return f"g'Hg/|g|\N{SUPERSCRIPT TWO} was not positive in {bad} of {len(every)} records."


def _caption(study: Study, judged: Sequence[_Judged], series: Series, searches: Sequence[pd.DataFrame]) -> str:
    parts, lines = [], []
    for network in dict.fromkeys(one.pair.network for one in judged):
        one = next(other for other in judged if other.pair.network == network)
        what = {"mlp": "MNIST", "vgg": "CIFAR-10", "linear": "Gaussian teacher"}[network]
        fixed = "" if one.protocol.full else f", and {one.protocol.examples} that stand for all"
        parts.append(f"{network}: {what}, {one.protocol.optimizer}, {one.protocol.batch}{fixed}")
    protocols = [one.protocol for one in judged]
    if any(p.line is None for p in protocols):
        lines.append("Adam rescales every parameter: theory has no line for it in these units, and none is drawn.")
    if any(p.full and p.line is not None for p in protocols):
        lines.append("Dash-dotted: where full-batch descent is at the edge of stability.")
    if any(not p.full and p.line is not None for p in protocols):
        lines.append(
            "Grey dots: the same number for minibatch training, where it is a statement about full-batch descent that "
            "does not apply; what is reported to settle there under SGD is g'Hg/|g|\N{SUPERSCRIPT TWO} of the step's "
            "batch (Andreyev & Beneventano 2024), here of one batch a record."
        )
    middle = "the median over seeds" if len(study.seeds) > 1 else "a value"
    gone = f"{found} Crosses: their ends." if (found := lost(study)) else ""
    return (
        f"The largest eigenvalue of the loss's Hessian H, batch statistics in BN ({'; '.join(parts)}; \u03b7: the "
        "learning rate; g: the gradient of the step's batch). "
        f"{lines_of(study)} {' '.join(lines)} {unconverged(searches)} {_negative(series)} Where {middle} is not "
        f"positive its line has a gap: a logarithmic axis has no place for it. Infinite values are triangles at the "
        f"top. {gone}\n"
        f"Verdicts. {' '.join(f'{one.pair.title}: {one.verdict}.' for one in judged)}"
    )
