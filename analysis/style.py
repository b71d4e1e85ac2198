"""One look for all figures, and the way they are put on disk.

Colours are Okabe and Ito's, which survive the common colour blindnesses. They are never alone: two things that must be
told apart also differ in line style and in lightness, so that a grey print keeps them apart.

Nothing here touches matplotlib's global state: figures are `matplotlib.figure.Figure` objects without pyplot, drawn and
saved inside `look`, which starts from matplotlib's own defaults (not the user's matplotlibrc) and puts everything back.
Files depend on the numbers and the library versions alone. They carry no date, and appear under their names whole or
not at all.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import matplotlib
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine

BLACK: Final = "#000000"
GREY: Final = "#7A7A7A"
ORANGE: Final = "#E69F00"
SKY: Final = "#56B4E9"
GREEN: Final = "#009E73"
YELLOW: Final = "#F0E442"
BLUE: Final = "#0072B2"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"

FONT: Final = "DejaVu Sans"  # comes with matplotlib: the same on every machine
DPI: Final = 200
CAPTION_SIZE: Final = 8.0  # points
_LEADING: Final = 1.32  # line height of the caption, in font sizes
_MARGIN: Final = 0.12  # inches left and right of the caption


@dataclass(frozen=True)
class LineStyle:
    """How one arm is drawn wherever it appears: colour, dash pattern, and which of two lies on top."""

    color: str
    dashes: str | tuple[float, tuple[float, ...]]
    order: float


WITHOUT_BN: Final = LineStyle(VERMILION, (0.0, (3.2, 1.6)), 3.0)
WITH_BN: Final = LineStyle("#00466E", "solid", 4.0)  # Okabe and Ito's blue, darkened: 25 points of L* below vermilion


@dataclass(frozen=True)
class Drawn:
    """What a figure leaves behind: its files, the short table to print, its title and its caption.

    ``failed`` has a line for each check that did not pass, of a figure that also checks.
    """

    paths: tuple[Path, ...]
    table: pd.DataFrame
    title: str
    caption: str = ""
    failed: tuple[str, ...] = ()


@contextmanager
def look() -> Iterator[None]:
    """The style, for the length of a with block; the caller's settings are as before afterwards, backend included."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.family": FONT,
                "font.size": 9.0,
                "axes.titlesize": 9.5,
                "axes.titlelocation": "left",
                "axes.labelsize": 9.0,
                "xtick.labelsize": 8.5,
                "ytick.labelsize": 8.5,
                "legend.fontsize": 8.5,
                "legend.frameon": False,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.linewidth": 0.7,
                "axes.grid": True,
                "axes.axisbelow": True,
                "grid.color": "#E4E4E4",
                "grid.linewidth": 0.6,
                "xtick.major.width": 0.7,
                "ytick.major.width": 0.7,
                "lines.linewidth": 1.7,
                "pdf.fonttype": 42,  # letters stay letters: searchable, editable
            }
        )
        yield


def new_figure(width: float, height: float, caption: str) -> Figure:
    """An empty figure of ``width`` x ``height`` inches for the axes, grown downwards to hold ``caption`` beneath them.

    The caption is wrapped to the width by the font's own measure; a newline in it starts a new paragraph. Axes added
    later are laid out (constrained) above it. Call it inside `look`.

    Raises:
        ValueError: If a size is not positive, or ``caption`` is empty or holds a ``$`` (it would be read as
        mathematics).
    """
    if not (width > 2 * _MARGIN and height > 0):
        raise ValueError(f"a figure needs a positive size, got {width} x {height} inches")
    if not caption.strip() or "$" in caption:
        raise ValueError(f"a caption is plain text that is not empty, got {caption!r}")
    lines = wrap(caption, width - 2 * _MARGIN)
    leading = CAPTION_SIZE * _LEADING / 72
    below = leading * len(lines) + 0.16
    total = height + below
    figure = Figure(figsize=(width, total), layout="constrained", dpi=DPI)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0.0, below / total, 1.0, height / total))
    for k, line in enumerate(lines):
        y = (below - 0.08 - leading * (k + 0.2)) / total
        figure.text(_MARGIN / width, y, line, fontsize=CAPTION_SIZE, color="#222222", va="top", ha="left")
    return figure


def wrap(text: str, width: float, size: float = CAPTION_SIZE) -> list[str]:
    """``text`` as lines that fit ``width`` inches at ``size`` points; a word longer than a line stands alone."""
    measure = _measure(size)
    space = measure("n n") - measure("nn")
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line, used = "", 0.0
        for word in paragraph.split():
            length = measure(word)
            if line and used + space + length > width:
                lines.append(line)
                line, used = word, length
            else:
                used += length + (space if line else 0.0)
                line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def save(figure: Figure, folder: Path, name: str, numbers: pd.DataFrame) -> tuple[Path, ...]:
    """Write ``name``.png, ``name``.pdf and ``name``.csv into ``folder`` (made if absent); the paths, in this order.

    ``numbers`` are all plotted numbers; each float is written with the fewest digits that read back to the same float.

    Raises:
        ValueError: If ``name`` is not letters, digits, ``-`` and ``_``, ``numbers`` is empty, or the folder cannot be
        made.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"a figure's name is made of letters, digits, - and _, got {name!r}")
    if numbers.empty:
        raise ValueError(f"figure {name} comes without its numbers")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"figures cannot be written to {folder}: {error.strerror}") from None

    def csv(path: Path) -> None:
        numbers.to_csv(path, index=False, lineterminator="\n", encoding="utf-8")

    def png(path: Path) -> None:
        figure.savefig(path, format="png", dpi=DPI)

    def pdf(path: Path) -> None:
        figure.savefig(path, format="pdf", metadata={"CreationDate": None})

    with look():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # laid out once, so that both files show the same
        return tuple(
            _atomically(folder / f"{name}.{suffix}", write)
            for suffix, write in (("png", png), ("pdf", pdf), ("csv", csv))
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """``heights`` moved as little as keeps their order and puts neighbours ``gap`` apart: places for labels."""
    order = sorted(range(len(heights)), key=lambda k: heights[k])
    blocks: list[list[float]] = []  # [centre of the free positions, how many labels]
    for k in order:
        blocks.append([heights[k], 1])
        while len(blocks) > 1 and blocks[-1][0] - blocks[-2][0] < gap * (blocks[-1][1] + blocks[-2][1]) / 2:
            above, below = blocks.pop(), blocks.pop()
            count = above[1] + below[1]
            blocks.append([(above[0] * above[1] + below[0] * below[1]) / count, count])
    placed = [centre + gap * (i - (count - 1) / 2) for centre, count in blocks for i in range(int(count))]
    found = [0.0] * len(heights)
    for k, height in zip(order, placed, strict=True):
        found[k] = height
    return found


def thousands(value: float, _position: int | None = None) -> str:
    """A step count as a tick label, as the paper writes it: 0, 500, 10K, 2.5K."""
    return f"{value:g}" if abs(value) < 1000 else f"{value / 1000:g}K"


def ordinal(number: float) -> str:
    """1st, 2nd, 3rd, 15th, 22nd, 97.5th."""
    teen = 10 <= number % 100 <= 20
    suffix = "th" if teen or number % 1 else {1: "st", 2: "nd", 3: "rd"}.get(int(number) % 10, "th")
    return f"{number:g}{suffix}"


def and_list(words: Sequence[str]) -> str:
    """``a``; ``a and b``; ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _atomically(path: Path, write: Callable[[Path], None]) -> Path:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        write(Path(temporary))
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep others from reading the figure
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def _measure(size: float) -> Callable[[str], float]:
    """Width of a string in inches at ``size`` points in the figures' font."""
    font = FontProperties(family=FONT, size=size)
    renderer = FigureCanvasAgg(Figure(figsize=(1, 1), dpi=720)).get_renderer()  # type: ignore[no-untyped-call]  # matplotlib's is not annotated

    def width(text: str) -> float:
        return float(renderer.get_text_width_height_descent(text, font, ismath=False)[0]) / 720

    return width
