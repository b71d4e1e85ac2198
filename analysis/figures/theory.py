"""The papers' identities and theorems, from the record of the study of that name: a table, and five small pictures.

``theory``: the residual of every statement beside the bound it must keep, the table as a picture.
``theory_epsilon``: how scale invariance is lost as epsilon grows against the variance. ``theory_scale``: the gradient's
norm and the angle of one step against the norm of the weights. ``theory_failure``: what becomes of b and of the loss
where normalization is outside the gradient. ``theory_coupling``: the share of a batch's Jacobian across its examples.

A statement *holds* if its worst residual over all cases and seeds keeps its bound. The study fixed beforehand which
should; one that does otherwise is called a surprise. The tests plant residuals on either side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.load import Study, StudyError, load_records, load_study

NAME = "theory"
TREATMENTS = {
    "centred": ("centred, outside the gradient", style.VERMILION, (0.0, (3.2, 1.6))),
    "scaled": ("centred and scaled, outside", style.BLACK, (0.0, (1.0, 1.2))),
    "through": ("gradient through the statistics", style.WITH_BN.color, "solid"),
}
_LEAST = 1e-17  # where a residual of 0 is drawn


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
        """``holds``, ``fails as printed``, or the two surprises."""
        holds = self.residual <= self.bound
        if holds == (self.expected == "holds"):
            return "holds" if holds else "fails"
        return "SURPRISE: holds" if holds else "SURPRISE: fails"


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
    return style.Drawn(paths, _table(judged), _title(judged), _caption(study, judged))


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
            float(np.max(row["residual"])),  # NaN, a statement that could not be computed, is no pass
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
    figure = style.new_figure(9.0, 0.2 * len(judged) + 0.9, _caption(study, judged))
    axes = figure.subplots()
    places = range(len(judged), 0, -1)
    for place, one in zip(places, judged, strict=True):
        color = style.WITH_BN.color if one.expected == "holds" else style.VERMILION
        marker = "o" if one.expected == "holds" else "X"
        surprise = one.verdict.startswith("SURPRISE")
        axes.plot(max(one.residual, _LEAST), place, marker, ms=5.5, color=style.BLACK if surprise else color, zorder=3)
        axes.plot([one.bound, one.bound], [place - 0.35, place + 0.35], color=style.GREY, lw=1.4)
    handles = [
        axes.plot([], [], "o", color=style.WITH_BN.color, label="should hold")[0],
        axes.plot([], [], "X", color=style.VERMILION, label="false form: should not")[0],
        axes.plot([], [], "|", ms=9, mew=1.4, color=style.GREY, label="bound")[0],
    ]
    axes.set_xscale("log")
    axes.set_xlabel("residual, the worst case (relative; standard errors where so said)")
    axes.set_yticks(list(places), [_label(one.name) for one in judged], fontsize=7.5)
    axes.set_ylim(0.3, len(judged) + 0.7)
    axes.grid(visible=False, axis="y")
    figure.legend(handles=handles, loc="outside upper left", ncols=3)
    return figure


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
        "right angle (right): eta/|w| squared is the rate that counts. Straight grey lines have slopes -1 and -2."
    )
    figure = style.new_figure(7.0, 3.2, caption)
    left, right = figure.subplots(1, 2)
    norm, gradient, turned = (curve[name].to_numpy() for name in ("norm", "gradient", "turned"))
    middle = len(norm) // 2
    left.plot(norm, gradient[middle] * norm[middle] / norm, color="#BBBBBB", lw=5)
    left.plot(norm, gradient, color=style.WITH_BN.color, label="with BN")
    dashes = style.WITHOUT_BN.dashes
    left.plot(norm, curve["plain_gradient"], color=style.WITHOUT_BN.color, ls=dashes, label="without BN")
    right.plot(norm, turned[-1] * (norm[-1] / norm) ** 2, color="#BBBBBB", lw=5)
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
    left.legend()
    return figure, curve


def _failure(study: Study) -> tuple[Figure, pd.DataFrame]:
    rate = study.setting("measures", "rate")
    caption = (
        "The motivating failure: x = w u + b is normalized, and the gradient takes the mean (and the deviation) for "
        "constants. It keeps asking for a larger b, which the normalization takes out again: b grows and the loss "
        "stands still. With scaling it also asks for a smaller w, the deviation it divides by shrinks, steps grow, "
        "and both are thrown far. Where the gradient goes through the statistics it is 0, and nothing moves. Plain "
        f"gradient descent, learning rate {rate:g}; loss mean (x-hat - 1) squared / 2, which no b and no w can change."
    )
    figure = style.new_figure(8.6, 3.1, caption)
    panels = figure.subplots(1, 3)
    tables = []
    for treatment, (label, color, dashes) in TREATMENTS.items():
        table = _steps(study, treatment)
        tables.append(table.assign(treatment=treatment))
        for axes, name in zip(panels, ("b", "w", "loss"), strict=True):
            axes.plot(table["step"], table[name], color=color, ls=dashes, lw=1.5, label=label)
    for axes, title in zip(panels, ("b", "w", "loss, the same in all three"), strict=True):
        axes.set_title(title)
        axes.set_xlabel("steps of gradient descent")
    _no_smaller_than(panels[2], 0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=3)
    return figure, pd.concat(tables, ignore_index=True)


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


def _label(name: str) -> str:
    """``theorem 4.1 at y`` for theorem_4_1_at_y."""
    return re.sub(r"(\d) (\d)", r"\1.\2", name.replace("_", " ")).replace(" c1", " C.1")


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
            one.source.replace("Ioffe & Szegedy 2015", "I&S").replace("Santurkar et al. 2018", "S+"),
            one.claim,
            f"{one.residual:.1e}",
            f"{one.bound:.0e}" if one.bound < 1 else f"{one.bound:g}",
            f"{one.exceeded}/{one.cases}",
            one.verdict,
        )
        for one in judged
    ]
    return pd.DataFrame(rows, columns=["source", "statement", "residual", "bound", "broken", "verdict"])


def _title(judged: Sequence[_Judged]) -> str:
    surprises = [one.name for one in judged if one.verdict.startswith("SURPRISE")]
    held = sum(one.verdict == "holds" for one in judged)
    failed = sum(one.verdict == "fails" for one in judged)
    text = (
        f"{held} of {len(judged)} statements hold, {failed} false forms are shown to be false (I&S: Ioffe & Szegedy"
        " 2015; S+: Santurkar et al. 2018; broken: cases that exceed the bound)"
    )
    return text if not surprises else f"{text}. NOT AS EXPECTED: {', '.join(surprises)}"


def _caption(study: Study, judged: Sequence[_Judged]) -> str:
    cases, seeds = max(one.cases for one in judged), style.and_list([str(seed) for seed in study.seeds])
    return (
        f"Residuals of {len(judged)} statements in float64 with batch normalization from primitives, the worst of up "
        f"to {cases} random cases (seed {seeds}). An identity's residual is the difference of its sides over their "
        "size, an inequality's the relative excess of its smaller side; a statement about a mean has standard errors. "
        "Residuals of 0 and below are drawn at the left edge. A blue dot must lie left of its bar, a red cross right "
        "of it."
    )
