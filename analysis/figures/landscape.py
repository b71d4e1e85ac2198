"""The landscape along the gradient with and without batch normalization, from the records of the study of that name.

Two pictures and one table. ``landscape`` has the layout of Santurkar et al.'s Figure 4 (range of the loss, range of the
gradient's change, effective smoothness, against training steps), a row for each network and learning rate, and beside
it the smoothness at every step of the walk. ``landscape_controls`` has the virtual steps, whose size is equal in each
network's own unit, and the readings the verdict is made of.

A reading is with BN over without, paired by seed; see `analysis.pairs`. The tests plant records whose readings are
known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from analysis import style
from analysis.figures._curves import (
    STYLES,
    count_steps,
    draw_curve,
    draw_ends,
    draw_range,
    log_axis,
    plain_ticks,
)
from analysis.load import Study, load_study
from analysis.pairs import (
    KINDS,
    NAMES,
    WHOLE,
    Floats,
    Key,
    Pair,
    Reading,
    combine,
    compare,
    exploded,
    exponent,
    level,
    lines_of,
    lost,
    medians_of,
    number,
    pairs_of,
    read,
    seeds_of,
    spread,
    stacked,
    typical,
    unconverged,
    warned,
)
from analysis.statistics import Estimate

NAME = "landscape"
DIRECTIONS = ("gradient", "random")
UNITS = {"curvature": "|Hg|/|g|", "sharpness": "eigenvalue"}
EDGE, WIDTH = 2.0, 0.25  # eta x smoothness at the edge of stability, and how near to it counts as there
READINGS = {
    "gradient": "effective smoothness",
    "random": "  along a random direction",
    "loss": "loss on walk, max/min",
    "difference": "|g' - g| on walk, max",
    "curvature": "virtual, by |Hg|/|g|",
    "sharpness": "virtual, by eigenvalue",
}
_SHOWN = {
    "gradient": "along gradient",
    "random": "random",
    "curvature": "equal c, |Hg|/|g|",
    "sharpness": "equal c, eigenv.",
}
_LOST = "last record of a run that diverged"
Row = tuple[str | float, ...]
_COLUMNS = ("network", "lr", "arm", "panel", "x", "low", "middle", "high", "seeds")


@dataclass(frozen=True)
class _Judged:
    """A pair, what was read off it, and what follows."""

    pair: Pair
    readings: Mapping[str, Reading]
    levels: Mapping[str, Estimate]  # eta x smoothness in the second half of training, by kind
    losses: Mapping[str, tuple[float, ...]]  # at the last record, one a seed: arms differ in how far they came

    @property
    def before(self) -> str:
        """The reading before the controls."""
        return self.readings["gradient"].outcome

    @property
    def after(self) -> str:
        """What both virtual readings say together."""
        return combine(self.readings[unit].outcome for unit in UNITS)

    def at_edge(self, kind: str) -> bool:
        """Whether eta x smoothness is within a quarter of 2, interval included."""
        found = self.levels[kind]
        return found.has_interval and found.low >= EDGE * (1 - WIDTH) and found.high <= EDGE * (1 + WIDTH)

    @property
    def verdict(self) -> str:
        """In words, for the table."""
        said = f"before the controls {self.before}, after them {self.after}"
        if len({self.readings[unit].outcome for unit in UNITS}) > 1:
            said += " (" + ", ".join(f"by {name} {self.readings[u].outcome}" for u, name in UNITS.items()) + ")"
        edge = [NAMES[kind] for kind in KINDS if self.at_edge(kind)]
        if edge:
            said += f"; {' and '.join(edge)} the level is the edge's, 2/eta"
        return said


def draw(folder: Path) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: landscape and landscape_controls as .png, .pdf and .csv.

    Raises:
        ValueError: If ``folder`` holds another study, or one that is not finished.
    """
    folder = Path(folder)
    study = load_study(folder)
    pairs = pairs_of(study, NAME)
    names = ("loss", "gradient_difference", "effective_smoothness")
    walks = {direction: read(study, pairs, f"along_gradient.{direction}", names, grid=True) for direction in DIRECTIONS}
    virtual = _virtual(study, pairs)
    starts = read(study, pairs, "along_gradient.gradient", ("start_loss",), grid=False)
    losses = {key: float(frame[WHOLE].iloc[-1]) for key, frame in starts.items()}
    searches = list(read(study, pairs, "virtual_shift", ("converged",), grid=False).values())
    judged = [_judge(study, pair, walks, virtual, losses) for pair in pairs]
    plotted = pd.DataFrame(_walked(study, pairs, walks), columns=_COLUMNS)
    controls = pd.DataFrame(_stepped(study, pairs, virtual), columns=_COLUMNS)
    with style.look():
        figures = {
            NAME: _figure(study, pairs, plotted, _caption(study, pairs, walks)),
            f"{NAME}_controls": _controls_figure(judged, controls, _controls_caption(study, judged, searches)),
        }
    numbers = {NAME: plotted, f"{NAME}_controls": pd.concat([controls, _read_off(judged)], ignore_index=True)}
    paths: tuple[Path, ...] = ()
    for name, figure in figures.items():
        paths += style.save(figure, folder, name, numbers[name])
    return style.Drawn(paths, _table(judged), _title(study, judged, searches), _caption(study, pairs, walks))


# --- reading

Walks = Mapping[str, Mapping[Key, pd.DataFrame]]


@dataclass(frozen=True)
class _Virtual:
    """Virtual steps of one run in one unit: records x sizes. NaN where there is no such step, inf where it exploded."""

    change: pd.DataFrame  # |g' - g|/|g|
    loss: pd.DataFrame  # L(theta')/L(theta)


def _virtual(study: Study, pairs: Sequence[Pair]) -> dict[Key, _Virtual]:
    names = [f"{what}_by_{unit}" for unit in UNITS for what in ("eta", "loss_change", "gradient_relative")]
    points = read(study, pairs, "virtual_shift", names, grid=True)
    starts = read(study, pairs, "virtual_shift", ("loss",), grid=False)
    found = {}
    for arm, seed, _ in starts:
        before = starts[arm, seed, "loss"][WHOLE]
        for unit in UNITS:
            there = np.isfinite(points[arm, seed, f"eta_by_{unit}"])
            change = exploded(points[arm, seed, f"gradient_relative_by_{unit}"]).where(there)
            after = exploded(points[arm, seed, f"loss_change_by_{unit}"].add(before, axis=0)).where(there)
            found[arm, seed, unit] = _Virtual(change, after.div(before, axis=0))
    return found


def _sizes(study: Study) -> Floats:
    return np.asarray(study.setting("measures", "sizes"), dtype=np.float64)


def _grid(study: Study, pair: Pair) -> Floats:
    """The walk's steps, in learning rates."""
    return np.asarray(study.setting("measures", "grid", arm=pair.arm("none")), dtype=np.float64) / pair.rate


def _shared(frames: Sequence[pd.DataFrame]) -> list[pd.DataFrame]:
    """The records both runs have: one that diverged has no later ones."""
    common = frames[0].index.intersection(frames[1].index)
    return [frame.loc[common] for frame in frames]


def _judge(
    study: Study, pair: Pair, walks: Walks, virtual: Mapping[Key, _Virtual], losses: Mapping[Key, float]
) -> _Judged:
    half, sizes = study.setting("training", "steps", arm=pair.arm("none")) / 2, _sizes(study)
    sides: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in READINGS}
    late: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def add(name: str, records: Sequence[pd.Series]) -> None:
        for side, series in zip(sides[name], records, strict=True):
            side.append(typical(series))

    for seed in study.seeds:
        keys = [(pair.arm(kind), seed) for kind in KINDS]
        for direction in DIRECTIONS:
            smooth = [exploded(walks[direction][(*key, "effective_smoothness")]).max(axis=1) for key in keys]
            if direction == "gradient":
                for kind, series in zip(KINDS, smooth, strict=True):
                    late[kind].append(pair.rate * typical(series[series.index >= half]))
            add(direction, [frame[0] for frame in _shared([series.to_frame(0) for series in smooth])])
        loss = _shared([exploded(walks["gradient"][(*key, "loss")]) for key in keys])
        add("loss", [(frame.max(axis=1) / frame.min(axis=1)).fillna(math.inf) for frame in loss])  # NaN: inf over inf
        change = _shared([exploded(walks["gradient"][(*key, "gradient_difference")]) for key in keys])
        add("difference", [frame.max(axis=1) for frame in change])
        for unit in UNITS:
            steps = _shared([virtual[(*key, unit)].change for key in keys])
            # A record where some size has no step has none at all: b is undefined for all sizes or for none.
            add(unit, [(frame / sizes).max(axis=1) for frame in steps])
    readings = {name: compare(*side) for name, side in sides.items()}
    levels = {kind: level(values) for kind, values in late.items()}
    ends = {kind: tuple(losses[pair.arm(kind), seed, "start_loss"] for seed in study.seeds) for kind in KINDS}
    return _Judged(pair, readings, levels, ends)


def _rows(pair: Pair, kind: str, panel: str, x: Floats, ends: Sequence[Floats], seeds: Sequence[int]) -> Iterator[Row]:
    low, middle, high = ends
    for k in range(len(x)):
        yield pair.network, pair.rate, kind, panel, x[k], low[k], middle[k], high[k], int(seeds[k])


def _walked(study: Study, pairs: Sequence[Pair], walks: Walks) -> Iterator[Row]:
    """Every number of the first figure."""
    for pair in pairs:
        grid = _grid(study, pair)
        for kind in KINDS:
            keys = [(pair.arm(kind), seed) for seed in study.seeds]
            for panel, statistic in (("loss", "loss"), ("difference", "gradient_difference")):
                frames = [exploded(walks["gradient"][(*key, statistic)]) for key in keys]
                steps, lows = stacked([frame.min(axis=1) for frame in frames])
                _, highs = stacked([frame.max(axis=1) for frame in frames])
                ends = spread(lows)[1], np.full(len(steps), math.nan), spread(highs)[1]
                yield from _rows(pair, kind, panel, steps.astype(float), ends, (~np.isnan(lows)).sum(axis=0))
            for direction in DIRECTIONS:
                frames = [exploded(walks[direction][(*key, "effective_smoothness")]) for key in keys]
                steps, tops = stacked([frame.max(axis=1) for frame in frames])
                counts = (~np.isnan(tops)).sum(axis=0)
                yield from _rows(pair, kind, f"smoothness, {direction}", steps.astype(float), spread(tops), counts)
                each = np.array([[pair.rate * typical(frame[k]) for k in frame.columns] for frame in frames])
                count = [len(keys)] * len(grid)
                yield from _rows(pair, kind, f"eta x smoothness, {direction}", grid, spread(each), count)
            for run in study.runs:
                if run.arm == pair.arm(kind) and run.diverged:
                    last = float(walks["gradient"][run.arm, run.seed, "loss"].index.max())
                    yield pair.network, pair.rate, kind, _LOST, last, *[math.nan] * 3, 1


def _stepped(study: Study, pairs: Sequence[Pair], virtual: Mapping[Key, _Virtual]) -> Iterator[Row]:
    """Every number of the second figure but the readings."""
    sizes = _sizes(study)
    for pair in pairs:
        for kind in KINDS:
            for unit in UNITS:
                runs = [virtual[pair.arm(kind), seed, unit] for seed in study.seeds]
                for panel, frames in (("change", [r.change for r in runs]), ("loss", [r.loss for r in runs])):
                    each = np.array([[typical(frame[k]) for k in frame.columns] for frame in frames])
                    counts = (~np.isnan(each)).sum(axis=0)
                    yield from _rows(pair, kind, f"{panel} by {unit}", sizes, spread(each), counts)


def _read_off(judged: Sequence[_Judged]) -> pd.DataFrame:
    rows: list[Row] = [
        (one.pair.network, one.pair.rate, "with/without", f"reading: {name}", r.ratio.low, r.ratio.estimate,
         r.ratio.high, r.ratio.n, r.outcome)
        for one in judged
        for name, r in one.readings.items()
    ]  # fmt: skip
    rows += [
        (one.pair.network, one.pair.rate, kind, "eta x smoothness, late", e.low, e.estimate, e.high, e.n, "")
        for one in judged
        for kind, e in one.levels.items()
    ]
    columns = ["network", "lr", "arm", "panel", "low", "middle", "high", "seeds", "outcome"]
    return pd.DataFrame(rows, columns=columns)


# --- drawing


def _figure(study: Study, pairs: Sequence[Pair], plotted: pd.DataFrame, caption: str) -> Figure:
    figure = style.new_figure(11.4, 2.15 * len(pairs) + 0.4, caption)
    grid = figure.subplots(len(pairs), 4, squeeze=False)
    for pair, row in zip(pairs, grid, strict=True):
        here = plotted[(plotted["network"] == pair.network) & (plotted["lr"] == pair.rate)]
        for axes, panel in zip(row[:2], ("loss", "difference"), strict=True):
            tables = {kind: _part(here, kind, panel) for kind in KINDS}
            log_axis(axes, tables.values())
            for kind, table in tables.items():
                draw_range(axes, table, STYLES[kind])
        first = float(_grid(study, pair)[0])
        for axes, panel, edge in ((row[2], "smoothness", EDGE / pair.rate), (row[3], "eta x smoothness", EDGE)):
            if not _draw_both(axes, here, panel, edge):
                continue
            axes.axhline(edge, color="black", lw=0.9, ls="-.", label="2/\u03b7")
            if axes is row[2] and not math.isclose(first, 1 / EDGE):
                label = "1/(first step of the walk)"
                axes.axhline(1 / (first * pair.rate), color=style.GREY, lw=0.9, ls=(0, (1, 1)), label=label)
        plain_ticks(row[3], _grid(study, pair))
        for axes in row[:3]:
            count_steps(axes, max(_part(here, kind, "loss")["x"].max() for kind in KINDS))
            for kind in KINDS:
                draw_ends(axes, _part(here, kind, _LOST)["x"], STYLES[kind])
        row[0].set_ylabel(f"{pair.title}\n" + ("loss, summed squares" if pair.network == "linear" else "loss, nats"))
        row[1].set_ylabel("|g' - g|, loss/parameter")
        row[2].set_ylabel("loss/parameter\N{SUPERSCRIPT TWO}")
        row[3].set_ylabel("dimensionless")
    times = "\N{MULTIPLICATION SIGN}"
    titles = (
        "loss on the walk",
        "change of the gradient",
        "effective smoothness",
        f"\u03b7 {times} smoothness, by step",
    )
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    for axes in grid[-1][:3]:
        axes.set_xlabel("training steps")
    grid[-1][3].set_xlabel("step of the walk, in \u03b7")
    handles, labels = grid[0][2].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _part(numbers: pd.DataFrame, kind: str, panel: str) -> pd.DataFrame:
    return numbers[(numbers["arm"] == kind) & (numbers["panel"] == panel)]


def _draw_both(axes: Axes, here: pd.DataFrame, panel: str, line: float) -> bool:
    """Along the gradient, and thinly along the random direction; whether there was a number to draw."""
    tables = {key: _part(here, key[0], f"{panel}, {key[1]}") for key in product(KINDS, DIRECTIONS)}
    found = log_axis(axes, tables.values(), line)
    for (kind, direction), table in tables.items():
        aside = direction == "random"
        label = NAMES[kind] + (", random direction" if aside else "")
        draw_curve(axes, table, STYLES[kind], label=label, aside=aside)
    return found


def _controls_figure(judged: Sequence[_Judged], controls: pd.DataFrame, caption: str) -> Figure:
    figure = style.new_figure(11.4, 2.15 * len(judged) + 0.4, caption)
    grid = figure.subplots(len(judged), 4, squeeze=False, width_ratios=(1, 1, 1, 1.15))
    for one, row in zip(judged, grid, strict=True):
        here = controls[(controls["network"] == one.pair.network) & (controls["lr"] == one.pair.rate)]
        for axes, unit in zip(row[:2], UNITS, strict=True):
            tables = {kind: _part(here, kind, f"change by {unit}") for kind in KINDS}
            found = log_axis(axes, tables.values())
            for kind, table in tables.items():
                draw_curve(axes, table, STYLES[kind], label=NAMES[kind], marker="o")
            sizes = tables["none"]["x"]
            if found:
                axes.plot(sizes, sizes, color="black", lw=0.9, ls="-.", zorder=1, label="|g' - g|/|g| = c")
            axes.set_ylabel("|g' - g|/|g|")
        losses = {key: _part(here, key[0], f"loss by {key[1]}") for key in product(KINDS, UNITS)}
        if log_axis(row[2], losses.values()):
            row[2].axhline(1, color="black", lw=0.7)
        for (kind, unit), table in losses.items():
            draw_curve(row[2], table, STYLES[kind], marker="o" if unit == "curvature" else "^")
        row[2].set_ylabel("loss after/before")
        row[0].set_ylabel(f"{one.pair.title}\n|g' - g|/|g|")
        for axes in row[:3]:
            plain_ticks(axes, sizes)
        _draw_readings(row[3], one)
    titles = (
        "b = |Hg|/|g|",
        "b = largest eigenvalue",
        "loss (\u25cf |Hg|/|g|, \u25b2 eigenvalue)",
        "with BN / without",
    )
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title)
    for axes in grid[-1][:3]:
        axes.set_xlabel("size c of the virtual step (c/b) g")
    grid[-1][3].set_xlabel("ratio; below 1: smoother with BN")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels))
    return figure


def _draw_readings(axes: Axes, one: _Judged) -> None:
    bounds = [1.0]
    for place, name in enumerate(reversed(_SHOWN)):
        found, face = one.readings[name], "black" if name in UNITS else "white"
        if found.doubt:
            text = f"{found.outcome} (not finite or undefined)"
            axes.annotate(text, (1, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)
            continue
        ratio = found.ratio
        bounds += [end for end in (ratio.low, ratio.estimate, ratio.high) if 0 < end < math.inf]
        if ratio.has_interval:
            axes.plot([ratio.low, ratio.high], [place, place], color="black", lw=1.6, solid_capstyle="butt")
        axes.plot(ratio.estimate, place, marker="o" if name in UNITS else "s", ms=5, color="black", mfc=face)
    axes.axvline(1, color=style.GREY, lw=0.9, ls="--")
    axes.set_xscale("log")
    axes.set_xlim(min(bounds) / 1.6, max(bounds) * 1.6)
    axes.set_ylim(-0.6, len(_SHOWN) + 0.1)
    axes.set_yticks(range(len(_SHOWN)), [_SHOWN[name] for name in reversed(_SHOWN)])
    if max(bounds) < 30 * min(bounds):
        ticks = [0.1, 0.2, 0.5, 1, 2, 5, 10]
        shown = [tick for tick in ticks if min(bounds) / 1.6 < tick < max(bounds) * 1.6]
        axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.xaxis.set_minor_formatter(NullFormatter())
    said = f"{one.before} \N{RIGHTWARDS ARROW} {one.after}"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.annotate(said, (0.98, 0.99), xycoords="axes fraction", ha="right", va="top", fontsize=8, bbox=box)


# --- saying


def _table(judged: Sequence[_Judged]) -> pd.DataFrame:
    rows: list[tuple[str, ...]] = []
    for one in judged:
        for name, label in READINGS.items():
            r = one.readings[name]
            rows.append((one.pair.title, label, number(r.without), number(r.with_), r.text, r.outcome))
        text = [one.levels[kind].text(".3g") for kind in KINDS]
        edges = " and ".join(NAMES[kind] for kind in KINDS if one.at_edge(kind))
        neither = "not at 2" if all(found.has_interval for found in one.levels.values()) else "undecided"
        rows.append((one.pair.title, "eta x smoothness, late", *text, "", f"at 2: {edges}" if edges else neither))
        rows.append((one.pair.title, "loss, last record", *(number(one.losses[kind]) for kind in KINDS), "", ""))
        rows.append((one.pair.title, "VERDICT", "", "", "", f"{one.before} -> {one.after}"))
    rows += _exponents(judged)
    return pd.DataFrame(rows, columns=["network", "measure", "without BN", "with BN", "with/without", "outcome"])


def _exponents(judged: Sequence[_Judged]) -> list[tuple[str, ...]]:
    """How the smoothness follows the learning rate, for networks that have two."""
    rows = []
    for network in dict.fromkeys(one.pair.network for one in judged):
        mine = [one for one in judged if one.pair.network == network]
        if len(mine) < 2:
            continue
        rates, smooth = [one.pair.rate for one in mine], [one.readings["gradient"] for one in mine]
        found = [exponent(rates, [r.without for r in smooth]), exponent(rates, [r.with_ for r in smooth])]
        texts = [e.text(".2f") if math.isfinite(e.estimate) else "-" for e in found]
        rows.append((network, "a in smoothness ~ lr^a", *texts, "", "-1: set by the rate"))
    return rows


def _title(study: Study, judged: Sequence[_Judged], searches: Sequence[pd.DataFrame]) -> str:
    said = "\n".join(f"{one.pair.title}: {one.before} -> {one.after}" for one in judged)
    return (
        f"Effective smoothness, with BN over without, before -> after the controls:\n{said}\nSmoothness: largest on the"
        " walk; virtual: largest |g' - g|/(c|g|) over steps of equal size c in the network's own unit. "
        f"{medians_of(study)}; late: second half of training; at 2: within a quarter of it, the edge of stability."
        f" {warned(searches)}"
    ).strip()


def _count(pairs: Sequence[Pair], walks: Walks, seeds: Sequence[int]) -> str:
    """How many points of the walks were not finite, arm by arm."""
    said = []
    for pair in pairs:
        for kind in KINDS:
            tables = [walks["gradient"][pair.arm(kind), seed, "gradient_difference"].to_numpy() for seed in seeds]
            points, bad = sum(table.size for table in tables), sum(int((~np.isfinite(t)).sum()) for t in tables)
            if bad:
                said.append(f"{pair.title} {NAMES[kind]} {bad} of {points}")
    return "Points of walks where the gradient was not finite: " + (", ".join(said) if said else "none") + "."


def _protocol(study: Study, pairs: Sequence[Pair]) -> str:
    parts = []
    for network in dict.fromkeys(pair.network for pair in pairs):
        first = next(pair for pair in pairs if pair.network == network)
        grid = _grid(study, first)
        batch = study.setting("training", "batch", arm=first.arm("none"))
        what = {"mlp": "MNIST", "vgg": "CIFAR-10", "linear": "Gaussian teacher"}[network]
        walked = f"walks of {len(grid)} steps from {grid[0]:g} to {grid[-1]:g} \u03b7"
        parts.append(f"{network}: {what}, {'full batch' if batch == 'full' else f'batches of {batch}'}, {walked}")
    return "; ".join(parts)


def _caption(study: Study, pairs: Sequence[Pair], walks: Walks) -> str:
    same = [pair.title for pair in pairs if math.isclose(_grid(study, pair)[0], 1 / EDGE)]
    least = "Grey dots: 1/(first step of the walk), which a gradient lost entirely within the first step gives. "
    if same:
        least = (
            f"For {style.and_list(same)} the walk's first step is \u03b7/2, so 1/(first step), which a gradient lost "
            "entirely within that step gives, is the same number as 2/\u03b7: a level there could be either. "
        )
    gone = f"{found} Crosses: their ends." if (found := lost(study)) else ""
    bands = f"Of {seeds_of(study)}: bands, first two columns: from the smallest to the largest value on a walk"
    if len(study.seeds) > 1:
        bands += ", each the median over seeds; last two: the range over seeds, around their median."
    else:
        bands += "; last two: lines without a band, nothing is decided."
    return (
        "After Santurkar et al. (2018), Figure 4. At training step t, from the parameters against the gradient g of "
        f"the step's own batch ({_protocol(study, pairs)}; \u03b7: the training's learning rate). Left to right: the "
        "loss on the walk; |g' - g|, g' being the gradient there; the effective smoothness |g' - g|/(step |g|), its "
        "largest value on the walk (thin dots: along a random direction of the same length); \u03b7 times it at each "
        f"step of the walk, median over records. {bands}\n"
        "Dash-dotted: 2/\u03b7, the edge of stability, to which full-batch training itself brings the curvature of any "
        f"network; on minibatches it is no theorem. {least}{_count(pairs, walks, study.seeds)} Such a value counts as "
        f"larger than any number and is drawn as a triangle at the top. {gone}"
    )


def _controls_caption(study: Study, judged: Sequence[_Judged], searches: Sequence[pd.DataFrame]) -> str:
    verdicts = " ".join(f"{one.pair.title}: {one.verdict}." for one in judged)
    every = study.setting("measures", "virtual_every")
    how = f"geometric mean and 95% Student t interval over {seeds_of(study)}, paired"
    if len(study.seeds) == 1:
        how = f"{seeds_of(study)}, so there is no interval and nothing is decided"
    return (
        f"Virtual steps \u03b8 - (c/b) g that are never taken, every {every} training steps: b is the network's own "
        "curvature along its gradient, |Hg|/|g| (first column), or its largest Hessian eigenvalue (second); H and g of "
        "the step's batch, batch statistics. Each run's median over records. "
        f"{lines_of(study)} On a quadratic loss the first column is the dash-dotted line, c; and as c goes to 0 it "
        "comes to that line in every network, by construction, so that its reading tells only how far beyond its own "
        "quadratic a network is at these c. On a quadratic the second column is c (|Hg|/|g|)/(largest eigenvalue): it "
        "lies above the line where |Hg|/|g| is above the largest eigenvalue (the algebraically largest), which takes "
        "a negative eigenvalue of greater size: negative curvature. Third: the loss after over "
        f"before. Fourth: with BN over without, {how}; hollow squares: effective smoothness (largest on the walk), "
        "before the controls; discs: the largest |g' - g|/(c|g|) over c, after them. "
        f"{unconverged(searches)}\nVerdicts. {verdicts} {lost(study)}"
    )
