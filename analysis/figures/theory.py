"""The papers' identities and theorems, from the record of the study of that name: a table, and four small pictures.

``theory``: every statement in words with its source and verdict, its residual beside the bound it must keep, the table
as a picture. ``theory_epsilon``: how scale invariance is lost as epsilon grows against the variance. ``theory_scale``:
the gradient's norm and the angle of one step against the norm of the weights. ``theory_failure``: what becomes of b and
of the loss where normalization is outside the gradient, over many starts, and whether scaling makes it worse.
``theory_coupling``: the share of a batch's Jacobian across its examples.

A statement *holds* if its worst residual over all cases and seeds keeps its bound. The study fixed beforehand which
should, and of the others whether they are false as printed, false as read, or cut on purpose; one that does otherwise,
or whose residual is not finite, is called a surprise, and said to have failed. The tests plant residuals on either
side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis import style
from analysis.load import Study, StudyError, load_records, load_study

NAME = "theory"
# label, colour, dashes, width: where they lie on each other the wider is beneath, and all can be seen
TREATMENTS = {
    "centred": ("centred only", style.SKY, "solid", 4.2),
    "growing": ("scaled (larger w wanted)", style.ORANGE, "solid", 2.5),
    "shrinking": ("scaled (smaller w wanted)", style.BLACK, "solid", 1.4),
    "epsilon": ("scaled with epsilon 0.1 (smaller w wanted)", style.VERMILION, (0.0, (3.2, 1.6)), 1.4),
    "through": ("scaled (gradient through the statistics)", style.GREEN, (0.0, (1.0, 1.6)), 1.8),
}
_BELOW, _ZERO, _LEAST = -19.6, -18.2, -17.0  # log10 of where residuals below 0 and of 0 are drawn; the axis begins
_LARGEST, _NOT_FINITE = 4, 5.3  # log10 of where larger ones are drawn, and those that are not finite
_TEXT = 7.5  # points
_MOST = 1e100  # what is further out is drawn there


@dataclass(frozen=True)
class _Judged:
    """One statement with what was found."""

    name: str
    source: str
    claim: str
    bound: float
    expected: str
    residual: float
    exceeded: int
    cases: int

    @property
    def verdict(self) -> str:
        """What was expected (``holds``, ``false as printed``, ...), or one of the three surprises."""
        if not math.isfinite(self.residual):
            return "SURPRISE: not finite"  # shows nothing, of a true form or of a false one
        holds = self.residual <= self.bound
        if holds == (self.expected == "holds"):
            return self.expected
        return "SURPRISE: holds" if holds else "SURPRISE: fails"

    @property
    def surprise(self) -> bool:
        return self.verdict.startswith("SURPRISE")


def draw(folder: Path) -> style.Drawn:
    """Draw the study in ``folder`` into the same folder: theory and its four curves, each as .png, .pdf and .csv.

    Raises:
        ValueError: If ``folder`` holds another study, or one that is not finished.
    """
    folder = Path(folder)
    study = load_study(folder)
    if study.name != NAME:
        raise StudyError(f"{NAME} shows the study of that name; {folder} holds {study.name!r}")
    judged = _judge(study)
    with style.look():
        drawn = {
            NAME: (_table_figure(study, judged), pd.DataFrame([_record(one) for one in judged])),
            f"{NAME}_epsilon": _epsilon(study),
            f"{NAME}_scale": _scale(study),
            f"{NAME}_failure": _failure(study),
            f"{NAME}_coupling": _coupling(study),
        }
        paths: tuple[Path, ...] = ()
        for name, (figure, numbers) in drawn.items():
            paths += style.save(figure, folder, name, numbers)
    words = "\n".join(f"{name}: {text}" for name, text in _legend(study).items())
    thrown = _thrown(study)
    title = f"{_title(judged)}{'.' if thrown else ''}{thrown}\n{words}"
    failed = tuple(
        f"{one.name}: {one.verdict.removeprefix('SURPRISE: ')}, expected: {one.expected} (residual {one.residual:.2g},"
        f" bound {one.bound:g})"
        for one in judged
        if one.surprise
    )
    return style.Drawn(paths, _table(judged), title, _caption(study, judged), failed)


# --- reading


def _judge(study: Study) -> list[_Judged]:
    table = load_records(study, probe="statement")
    rows = dict(iter(table.groupby("layer", observed=True)))
    found = []
    for one in study.setting("measures", "statements"):
        if one["name"] not in rows:
            raise StudyError(f"the record of {study.folder} lacks the statement {one['name']!r}")
        row = {name: part["value"].to_numpy() for name, part in rows[one["name"]].groupby("statistic", observed=True)}
        judged = _Judged(
            one["name"],
            one["source"],
            one["claim"],
            float(one["bound"]),
            one["expected"],
            float(np.max(row["residual"]) if np.isfinite(row["residual"]).all() else np.nan),
            int(np.sum(row["exceeded"])),
            int(np.sum(row["cases"])),
        )
        found.append(judged)
    return found


def _curve(study: Study, probe: str) -> pd.DataFrame:
    """One column a statistic, one row an abscissa; the first seed's."""
    table = load_records(study, probe=probe, seed=study.seeds[0])
    return table.pivot(index="unit", columns="statistic", values="value").sort_index().reset_index(drop=True)


def _steps(study: Study, treatment: str) -> pd.DataFrame:
    table = load_records(study, probe=f"failure.{treatment}", seed=study.seeds[0])
    return table.pivot(index="step", columns="statistic", values="value").sort_index().reset_index()


# --- drawing


def _table_figure(study: Study, judged: Sequence[_Judged]) -> Figure:
    width, source_width, claim_width, verdict_width = 12.4, 1.3, 5.4, 1.35  # inches
    words_width = source_width + claim_width + verdict_width
    claims = [style.wrap(one.claim, claim_width - 0.25, _TEXT) for one in judged]
    heights = [0.17 + 0.125 * (len(lines) - 1) for lines in claims]
    total = sum(heights)
    figure = style.new_figure(width, total + 1.15, _caption(study, judged))
    words, axes = figure.subplots(1, 2, width_ratios=(words_width, 3.9), sharey=True)
    words.set_axis_off()
    words.set_xlim(0, words_width)
    top = total
    for one, lines, height in zip(judged, claims, heights, strict=True):
        place = top - height / 2
        if judged.index(one) % 2:
            for part in (words, axes):
                part.axhspan(top - height, top, color="#F3F3F3", lw=0)
        weight = "bold" if one.surprise else "normal"
        at = {"size": _TEXT, "va": "center", "weight": weight, "linespacing": 1.15}
        words.text(0.02, place, _short(one.source), **at)
        words.text(source_width, place, "\n".join(lines), **at)
        words.text(source_width + claim_width, place, one.verdict.replace(": ", ":\n"), color=_color(one), **at)
        _mark(axes, one, place, height)
        top -= height
    handles = [
        axes.plot([], [], "o", ms=5, color=style.WITH_BN.color, label="holds, as it should")[0],
        axes.plot(
            [], [], "X", ms=6, color=style.VERMILION, label="false form, shown to be false (the verdict says whose)"
        )[0],
        axes.plot([], [], "*", ms=9, color=style.BLACK, label="SURPRISE: not as expected, or not finite")[0],
        axes.plot([], [], "|", ms=9, mew=1.6, color=style.GREY, label="bound")[0],
    ]
    ticks = list(range(-16, _LARGEST + 1, 4))
    axes.axvline(_LEAST, color=style.GREY, lw=0.7)
    axes.axvline(_LARGEST + 0.3, color=style.GREY, lw=0.7)
    axes.set_xlim(_BELOW - 0.8, _LARGEST + 2.3)
    axes.set_xticks(
        [_BELOW, _ZERO, *ticks, _NOT_FINITE],
        ["below 0", "exactly 0", *(f"1e{tick}" if tick else "1" for tick in ticks), "not finite"],
    )
    for label in (*axes.get_xticklabels()[:2], axes.get_xticklabels()[-1]):
        label.set_rotation(90)
    axes.set_xlabel("worst residual (relative, or in standard errors)")
    axes.set_yticks([])
    axes.set_ylim(0, total)
    axes.grid(visible=False, axis="y")
    figure.legend(handles=handles, loc="outside upper left", ncols=4)
    return figure


def _color(one: _Judged) -> str:
    if one.surprise:
        return style.BLACK
    return style.WITH_BN.color if one.expected == "holds" else style.VERMILION


def _mark(axes: Axes, one: _Judged, place: float, height: float) -> None:
    """The residual, the bound, and a line from one to the other."""
    bound = math.log10(one.bound)
    if not math.isfinite(one.residual):
        at = _NOT_FINITE
    elif one.residual <= 0:
        at = _ZERO if one.residual == 0 else _BELOW
    else:
        at = min(max(math.log10(one.residual), _LEAST), _LARGEST)
    color = _color(one)
    marker, size = ("*", 9.0) if one.surprise else (("o", 5.0) if one.expected == "holds" else ("X", 6.0))
    axes.plot([bound, at], [place, place], color=color, lw=0.7, alpha=0.6)
    axes.plot([bound, bound], [place - height * 0.38, place + height * 0.38], color=style.GREY, lw=1.6)
    axes.plot(at, place, marker, ms=size, color=color, zorder=3)


def _epsilon(study: Study) -> tuple[Figure, pd.DataFrame]:
    curve, factor = _curve(study, "epsilon"), study.setting("measures", "factor")
    caption = (
        f"How far BN((aW)u) is from BN(Wu), a = {factor:g}, and the same for the two derivatives (the one with respect "
        "to aW times a): largest difference over the largest entry. One unit, a batch of 8. At epsilon 0 all three are "
        "rounding errors."
    )
    figure = style.new_figure(5.0, 3.3, caption)
    axes = figure.subplots()
    axes.plot(curve["ratio"], curve["predicted"], color="#BBBBBB", lw=5, label="output, predicted")
    for name, label, color, dashes in (
        ("output", "output", style.BLACK, "solid"),
        ("du", "d/du", style.BLUE, (0.0, (4.0, 1.5))),
        ("dw", "a d/d(aW)", style.VERMILION, (0.0, (1.0, 1.2))),
    ):
        axes.plot(curve["ratio"], curve[name], color=color, ls=dashes, lw=1.5, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("epsilon / variance of the unit")
    axes.set_ylabel("relative change")
    axes.set_title("scale invariance is lost to epsilon")
    axes.legend()
    return figure, curve


def _scale(study: Study) -> tuple[Figure, pd.DataFrame]:
    curve = _curve(study, "scale")
    caption = (
        "The same weights at other sizes, epsilon 0. With BN the gradient's norm falls as 1/|w| (left) and the angle "
        "that one step of plain gradient descent turns the weights by as 1/|w| squared, until it saturates at a "
        "right angle (right): eta/|w| squared is the rate that counts."
    )
    figure = style.new_figure(7.0, 3.2, caption)
    left, right = figure.subplots(1, 2)
    norm, gradient, turned = (curve[name].to_numpy() for name in ("norm", "gradient", "turned"))
    middle = len(norm) // 2
    left.plot(norm, gradient[middle] * norm[middle] / norm, color="#BBBBBB", lw=5, label="slope -1")
    left.plot(norm, gradient, color=style.WITH_BN.color, label="with BN")
    dashes = style.WITHOUT_BN.dashes
    left.plot(norm, curve["plain_gradient"], color=style.WITHOUT_BN.color, ls=dashes, label="without BN")
    right.plot(norm, turned[-1] * (norm[-1] / norm) ** 2, color="#BBBBBB", lw=5, label="slope -2")
    right.plot(norm, turned, color=style.WITH_BN.color, label="with BN")
    right.set_ylim(turned.min() / 2, np.pi)
    for axes, title, label in (
        (left, "gradient", "|dl/dW|"),
        (right, "one step, eta = 0.1", "angle of the step, radians"),
    ):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("|W|")
        axes.set_ylabel(label)
        axes.set_title(title)
        axes.legend()
    return figure, curve


def _failure(study: Study) -> tuple[Figure, pd.DataFrame]:
    tables = {treatment: _steps(study, treatment) for treatment in TREATMENTS}
    reach = _curve(study, "reach")
    figure = style.new_figure(11.5, 3.7, _failure_caption(study, tables, reach))
    left, middle, right = figure.subplots(1, 3)
    for treatment, (label, color, dashes, width) in TREATMENTS.items():
        table = tables[treatment]
        if treatment == "shrinking":  # elsewhere it is about as wide as the line
            low, high = (_drawable(table[f"b_{part}"]) for part in ("low", "high"))
            left.fill_between(table["step"], low, high, color=color, alpha=0.15, lw=0)
        left.plot(table["step"], _drawable(table["b"]), color=color, ls=dashes, lw=width, label=label)
    left.set_title("b")
    _losses(middle, tables)
    for axes in (left, middle):
        axes.set_xlabel("steps of gradient descent")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
    _worse(right, reach)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    steps = pd.concat([table.assign(treatment=name) for name, table in tables.items()], ignore_index=True)
    return figure, pd.concat([steps, reach.assign(treatment="shrinking over centred")], ignore_index=True)


def _failure_caption(study: Study, tables: dict[str, pd.DataFrame], reach: pd.DataFrame) -> str:
    """What was done, and what came of it at these settings: every number is read from the record."""
    rate, steps, starts = (study.setting("measures", name) for name in ("rate", "steps", "starts"))
    last = {treatment: table.iloc[-1] for treatment, table in tables.items()}
    ends = [f"{TREATMENTS[treatment][0]} {_rounded(row['b'])}" for treatment, row in last.items()]
    losses = [
        f"{style.and_list([TREATMENTS[treatment][0] for treatment in group])}"
        f" {_rounded(tables[group[0]]['loss'].iloc[0])} to {_rounded(last[group[0]]['loss'])}"
        for group in _coinciding(tables)
    ]
    rates = sorted(reach["rate"].unique())
    half = reach[reach["rate"] == rates[len(rates) // 2]].reset_index(drop=True)
    if half["ratio"].notna().any():
        top, end = half.loc[half["ratio"].idxmax()], half.iloc[-1]
        worse = (
            f" At rate {end['rate']:g} the ratio is at most {_rounded(top['ratio'])} (time {top['time']:g}), and"
            f" {_rounded(end['ratio'])} at the end (time {end['time']:g})."
        )
    else:
        worse = ""
    count = "1 step" if steps == 1 else f"{steps} steps"
    scaled, centred = TREATMENTS["shrinking"][0], TREATMENTS["centred"][0]
    many = (
        "1 start"
        if starts == 1
        else f"medians of {starts} starts, each with its own u and w; band: 10th to 90th percentile of {scaled}"
    )
    beyond = any(table[name].abs().max() > _MOST for table in tables.values() for name in ("b", "loss"))
    far = f" What is farther out than {_MOST:g} is drawn there." if beyond else ""
    return (
        "The motivating failure (Ioffe & Szegedy 2015, section 2): x = w u + b is normalized to x-hat, u the input, and"
        " gradient descent on mean (x-hat - 1 - c u) squared / 2 takes for constants the mean (centred only; b alone is"
        " learned) or the mean and the deviation (scaled; w too), so that it moves b, which cannot change x-hat. c = 2"
        " where a larger w is wanted, otherwise 0; through the statistics the gradient is the true one. Learning rate"
        f" {rate:g}, {count}, {many}."
        f"\nb after {count}: {'; '.join(ends)}. The farthest start of {scaled} gets to |b| ="
        f" {_rounded(tables['shrinking']['b_far'].max())}. Loss, from first to last: {'; '.join(losses)}."
        f"{far}{_thrown(study)}"
        f"\nIs scaling worse? Right: b of {scaled} over b of {centred} after the same time; above 1 it is. Rates and"
        f" times are fixed, whatever the options; medians of {reach['finite'].max():g} starts, band: 10th to 90th"
        f" percentile at the middle rate.{worse}"
    )


def _rounded(value: float) -> str:
    """Three digits; what is a rounding error of numbers of size 1 is 0."""
    if not math.isfinite(value):
        return "not finite"
    return "0" if abs(value) < 1e-12 else f"{value:.3g}"


def _drawable(values: pd.Series) -> pd.Series:
    """No farther out than an axis can be laid out for."""
    return values.clip(-_MOST, _MOST)


def _coinciding(tables: dict[str, pd.DataFrame]) -> list[list[str]]:
    """Treatments whose median losses are the same at every step, together; in the order of `TREATMENTS`."""
    groups: list[list[str]] = []
    for treatment, table in tables.items():
        for group in groups:
            if np.allclose(table["loss"], tables[group[0]]["loss"], rtol=1e-6, atol=1e-9, equal_nan=True):
                group.append(treatment)
                break
        else:
            groups.append([treatment])
    return groups


def _losses(axes: Axes, tables: dict[str, pd.DataFrame]) -> None:
    """One line for all losses that coincide, with the names of those it stands for."""
    groups = _coinciding(tables)
    for group in groups:
        table = tables[group[0]]
        _, color, dashes, width = TREATMENTS[group[0]]
        if len(group) > 1:
            color, dashes, width = style.GREY, "solid", 2.2
        axes.plot(table["step"], _drawable(table["loss"]), color=color, ls=dashes, lw=width)
    _no_smaller_than(axes, 0.6)
    for group in groups:
        end = tables[group[0]]["loss"].iloc[-1]
        if len(group) > 1 and math.isfinite(end):
            names = "\n".join(TREATMENTS[treatment][0] for treatment in group)
            at = (1.0, float(np.clip(end, -_MOST, _MOST)))
            axes.annotate(
                f"on one line:\n{names}",
                at,
                (0, 4),
                xycoords=("axes fraction", "data"),
                textcoords="offset points",
                size=_TEXT,
                ha="right",
                va="bottom",
            )
    axes.set_title("loss")


def _worse(axes: Axes, reach: pd.DataFrame) -> None:
    rates = sorted(reach["rate"].unique())
    for k, rate in enumerate(rates):
        one = reach[reach["rate"] == rate]
        dashes = ("solid", (0.0, (4.0, 1.5)), (0.0, (1.0, 1.2)))[k % 3]
        if k == len(rates) // 2:
            axes.fill_between(one["time"], one["low"], one["high"], color=style.BLACK, alpha=0.15, lw=0)
        axes.plot(one["time"], one["ratio"], color=style.BLACK, ls=dashes, lw=1.4, label=f"rate {rate:g}")
    axes.axhline(1, color=style.SKY, lw=2.5, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_yticks([0.25, 0.5, 1, 2, 4, 8], ["1/4", "1/2", "1", "2", "4", "8"])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_title("b of scaled (smaller w wanted) over b of centred")
    axes.set_xlabel("time: rate x steps")
    axes.legend(loc="lower left")


def _thrown(study: Study) -> str:
    """A sentence on starts of the failure that left the numbers there are; nothing where none did."""
    starts, parts = study.setting("measures", "starts"), []
    for treatment, (label, *_) in TREATMENTS.items():
        table = _steps(study, treatment)
        kept = table["finite"].min()
        if kept < starts:
            step = int(table.loc[table["finite"] < starts, "step"].iloc[0])
            parts.append(f"{starts - kept:g} of {starts} starts of {label} are not finite, from step {step}")
    return f" NOT FINITE: {'; '.join(parts)}; what is drawn is of the others." if parts else ""


def _no_smaller_than(axes: Axes, half: float) -> None:
    """Keep 2 ``half`` or more in view: a line that stands still must not be drawn as its rounding errors."""
    low, high = axes.get_ylim()
    middle = (low + high) / 2
    axes.set_ylim(min(low, middle - half), max(high, middle + half))


def _coupling(study: Study) -> tuple[Figure, pd.DataFrame]:
    curve, draws = _curve(study, "coupling"), study.setting("measures", "draws")
    caption = (
        "Share of |J| squared (Frobenius) that lies across examples, J the Jacobian of one normally distributed unit's "
        f"batch normalization, epsilon 0; mean of {draws} batches, bars 2 standard errors. 2/(m+1) is exact. At m = 2 "
        "J is 0, and at m = 1 there is no variance."
    )
    figure = style.new_figure(4.6, 3.2, caption)
    axes = figure.subplots()
    fine = np.geomspace(curve["m"].min(), curve["m"].max(), 200)
    axes.plot(fine, 2 / (fine + 1), color="#BBBBBB", lw=4, label="2 / (m + 1)")
    axes.errorbar(
        curve["m"], curve["share"], 2 * curve["error"], fmt="o", ms=4.5, color=style.WITH_BN.color, label="measured"
    )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5], ["0.02", "0.05", "0.1", "0.2", "0.5"])
    axes.minorticks_off()
    axes.set_xlabel("examples in the batch, m")
    axes.set_ylabel("share across examples")
    axes.set_title("a batch is coupled")
    axes.legend()
    return figure, curve


# --- saying


def _short(source: str) -> str:
    return source.replace("Ioffe & Szegedy 2015", "I&S").replace("Santurkar et al. 2018", "S+")


def _record(one: _Judged) -> dict[str, object]:
    return {
        "statement": one.name,
        "source": one.source,
        "claim": one.claim,
        "residual": one.residual,
        "bound": one.bound,
        "exceeded": one.exceeded,
        "cases": one.cases,
        "expected": one.expected,
        "verdict": one.verdict,
    }


def _table(judged: Sequence[_Judged]) -> pd.DataFrame:
    rows = [
        (
            _short(one.source),
            one.claim,
            f"{one.residual:.1e}" if one.residual else "0",
            f"{one.bound:.0e}" if one.bound < 1 else f"{one.bound:g}",
            f"{one.exceeded}/{one.cases}",
            one.verdict,
        )
        for one in judged
    ]
    return pd.DataFrame(rows, columns=["source", "statement", "residual", "bound", "broken", "verdict"])


def _title(judged: Sequence[_Judged]) -> str:
    surprises = [one.name for one in judged if one.surprise]
    met = [one.expected for one in judged if not one.surprise]
    false = Counter(expected for expected in met if expected != "holds")
    forms = "1 false form is" if sum(false.values()) == 1 else f"{sum(false.values())} false forms are"
    text = f"{met.count('holds')} of {len(judged)} statements hold, {forms} shown to be false"
    if false:
        text += f" ({', '.join(f'{false[kind]} {_kind(kind)}' for kind in sorted(false, key=_kind))})"
    return text if not surprises else f"{text}. NOT AS EXPECTED: {', '.join(surprises)}"


def _kind(expected: str) -> str:
    """``as printed`` of ``false as printed``."""
    return expected.removeprefix("false").lstrip(", ")


def _legend(study: Study) -> dict[str, str]:
    """What the words and symbols of the table mean."""
    cases, seeds = study.setting("measures", "cases"), len(study.seeds)
    each = "" if seeds == 1 else " (again for each seed)"
    random = f"{cases} random one{'' if cases == 1 else 's'}{'' if seeds == 1 else ' a seed'}"
    return {
        "source": "I&S is Ioffe & Szegedy 2015, S+ is Santurkar et al. 2018.",
        "verdict": (
            "a false form is false as printed in the paper, false as read (one reading where the print leaves a"
            " choice), or cut on purpose (printed by nobody; it tries the check)."
        ),
        "residual": (
            "of the worst case: how far the sides of an identity are apart, or by how much an inequality is exceeded"
            " (below 0: kept with room), relative to their size; of a mean, in standard errors; of a yes or no, 0 or 1."
        ),
        "bound": (
            "1e-10, rounding with room; 1e-8 where both sides of an identity hold second derivatives; 4.5 standard"
            " errors, exceeded by chance once in 150,000 times."
        ),
        "cases": (
            f"{random}, and for a false form 1 counterexample fixed beforehand{each}; a mean over thousands of batches"
            " is one case."
        ),
        "broken": "cases that exceed the bound, of all.",
        "symbols": (
            "y is one unit over a batch of m: Wu with inputs u in I&S, XW with inputs X in S+; y-hat is y normalized"
            " with epsilon 0 and biased variance sigma^2 (sd sigma), z = gamma y-hat + beta. L (I&S: l) is the loss,"
            " L-hat the loss as a function of y or W, with BN in it; g and H are gradient and Hessian of L at z unless"
            " said otherwise, mu_g the mean of g, d = dL-hat/dy, kappa = <g,y-hat> |d|^2/(m gamma). lambda bounds the"
            " spectral norm |X|, and maxima (so g_j) are over such X; X = lambda orthogonal means lambda times an"
            " orthogonal matrix. In Lemma 4.5 w are weights, w* the best without BN, k a number. In section 2"
            " x = w u + b, c is a number, eta the learning rate. J is the Jacobian of BN, |J|_F its Frobenius norm;"
            " <,> is the inner product, ' transposes."
        ),
    }


def _caption(study: Study, judged: Sequence[_Judged]) -> str:
    seeds = style.and_list([str(seed) for seed in study.seeds])
    words = "\n".join(f"{name.capitalize()}: {text}" for name, text in _legend(study).items() if name != "broken")
    return (
        f"{len(judged)} statements, computed in float64 with batch normalization from primitives (seed"
        f"{'' if len(study.seeds) == 1 else 's'} {seeds}). What should hold must lie left of its bound (blue dot), a"
        " false form right of it (orange cross). Anything else, and a residual that is not finite, is a failed check"
        f" (black star).\n{words}"
    )
