"""Figures on disk: the same bytes from the same numbers, whole or not at all, and no trace in matplotlib's state."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import matplotlib.colors
import matplotlib.font_manager
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg

from analysis import style

ROOT = Path(__file__).parents[2]
CAPTION = (
    "Lines: mean of 3 seeds. Bands: 95% interval of that mean, point by point.\nA second paragraph, " + "word " * 60
)
NUMBERS = pd.DataFrame({"name": ["a", "b"], "value": [0.1, 0.2]})

PROGRAM = """
import pathlib, sys
import pandas as pd
from analysis import style
with style.look():
    figure = style.new_figure(4, 2, "A caption.")
    axes = figure.subplots()
    axes.plot([0, 1, 2], [0.1, 0.5, 0.2], label="one")
    axes.set_title("a title"); axes.legend()
style.save(figure, pathlib.Path(folder), "figure", pd.DataFrame({"x": [0.1]}))
"""


def a_figure():
    with style.look():
        figure = style.new_figure(1.5, 1, "A caption.")
        figure.subplots().plot([0, 1], [0.1, 0.3])
    return figure


def test_files_depend_on_nothing_but_the_numbers(tmp_path):
    here, there, rc = tmp_path / "here", tmp_path / "there", tmp_path / "matplotlibrc"
    exec(PROGRAM, {"folder": str(here)})
    rc.write_text("font.size: 20\nxtick.direction: in\naxes.facecolor: red\nbackend: pdf\n")
    elsewhere = {"PYTHONHASHSEED": "7", "SOURCE_DATE_EPOCH": "86400000", "TZ": "Asia/Tokyo", "MATPLOTLIBRC": str(rc)}
    program = f"folder = {str(there)!r}\n{PROGRAM}\nprint('matplotlib.pyplot' in sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | elsewhere, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["False"], "pyplot, which is global state, was loaded"
    for name in ("figure.png", "figure.pdf", "figure.csv"):
        assert (here / name).read_bytes() == (there / name).read_bytes(), name
    assert b"Date" not in (here / "figure.pdf").read_bytes()


def test_the_look_leaves_no_trace(tmp_path):
    with matplotlib.rc_context({"font.size": 33, "axes.grid": False}):
        before, backend = dict(matplotlib.rcParams), matplotlib.rcParams._get("backend")
        style.save(a_figure(), tmp_path, "figure", NUMBERS)
        with style.look():
            assert matplotlib.rcParams["font.size"] == 9
        with pytest.raises(KeyError), style.look():
            raise KeyError
        assert dict(matplotlib.rcParams) == before
        assert matplotlib.rcParams._get("backend") == backend


def test_the_three_files_are_what_they_are_called(tmp_path):
    paths = style.save(a_figure(), tmp_path / "new" / "folder", "figure", NUMBERS)
    assert [path.name for path in paths] == ["figure.png", "figure.pdf", "figure.csv"]
    assert [path.read_bytes()[:4] for path in paths] == [b"\x89PNG", b"%PDF", b"name"]
    assert sorted(p.name for p in paths[0].parent.iterdir()) == sorted(p.name for p in paths)
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in paths)


def test_every_float_reads_back_as_itself(tmp_path):
    bits = np.random.default_rng(0).integers(
        0, 2**64, size=5000, dtype=np.uint64
    )  # any float64, NaN and inf among them
    values = np.r_[bits.view(np.float64), 0.1 + 0.2, 5e-324, np.inf, -np.inf, np.nan, 1 / 3]
    *_, csv = style.save(a_figure(), tmp_path, "figure", pd.DataFrame({"value": values}))
    back = [float(cell.strip('"') or "nan") for cell in csv.read_text().splitlines()[1:]]
    assert np.array_equal(back, values, equal_nan=True)


def test_what_fails_halfway_leaves_the_old_file(tmp_path):
    first = style.save(a_figure(), tmp_path, "figure", NUMBERS)
    old = {path.name: path.read_bytes() for path in first}

    class Broken:
        def __str__(self):
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        style.save(a_figure(), tmp_path, "figure", pd.DataFrame({"value": ["x" * 100_000, Broken()]}, dtype=object))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


@pytest.mark.parametrize("name", ["", "a/b", "../a", "a b", "a.png"])
def test_a_name_that_is_none_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="letters, digits"):
        style.save(a_figure(), tmp_path, name, NUMBERS)


def test_what_cannot_be_saved_is_refused(tmp_path):
    with pytest.raises(ValueError, match="without its numbers"):
        style.save(a_figure(), tmp_path, "figure", NUMBERS.iloc[:0])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written"):
        style.save(a_figure(), tmp_path / "file", "figure", NUMBERS)
    with style.look():
        for caption in ("", " \n", "cost: 5$"):
            with pytest.raises(ValueError, match="plain text"):
                style.new_figure(5, 2, caption)
        with pytest.raises(ValueError, match=r"positive size, got 0\.1 x 2"):
            style.new_figure(0.1, 2, "fine")


@pytest.mark.parametrize("width", [3.0, 5.0, 9.6])
@pytest.mark.parametrize("height", [2.0, 4.0])
def test_a_caption_lies_under_the_axes_and_inside_the_figure(width, height):
    with style.look():
        figure = style.new_figure(width, height, CAPTION)
        axes = figure.subplots()
        axes.set_xlabel("steps")
        axes.plot([0, 1], [0, 1])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        below = axes.get_tightbbox(renderer).y0
        boxes = [text.get_window_extent(renderer) for text in figure.texts]
    assert min(box.x0 for box in boxes) >= 0
    assert max(box.x1 for box in boxes) <= width * style.DPI
    assert min(box.y0 for box in boxes) >= 0
    assert max(box.y1 for box in boxes) <= below
    assert all(upper.y0 >= lower.y1 for upper, lower in pairwise(boxes))
    assert axes.get_window_extent(renderer).height > 0.6 * height * style.DPI, "the caption must not eat the axes"


def test_wrapping_keeps_the_words_and_fills_the_lines():
    text = "the quick brown fox jumps over a lazy dog " * 12 + "\nsecond " + "w" * 300
    renderer = FigureCanvasAgg(a_figure()).get_renderer()
    font = matplotlib.font_manager.FontProperties(family=style.FONT, size=style.CAPTION_SIZE)
    for width in np.arange(1.5, 6, 0.25):
        lines = style.wrap(text, width)
        assert " ".join(lines).split() == text.split()
        assert lines[-2:] == ["second", "w" * 300], "a new paragraph; a word longer than the line stands alone"
        widths = [renderer.get_text_width_height_descent(line, font, False)[0] / style.DPI for line in lines[:-2]]
        assert max(widths) <= width
        assert min(widths[:-1]) > width - 0.5, "no line is much shorter than it must be"
    assert len(style.wrap(text, 4.0)) < len(style.wrap(text, 4.0, size=12))


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=6), st.floats(0.01, 3))
def test_labels_keep_their_order_and_their_distance(heights, gap):
    placed = style.apart(heights, gap)
    order = np.argsort(heights, kind="stable")
    assert (np.diff(np.array(placed)[order]) >= gap - 1e-9).all()
    assert np.mean(placed) == pytest.approx(np.mean(heights), abs=1e-9)
    if (np.diff(np.sort(heights)) >= gap).all():
        assert placed == pytest.approx(heights)


def test_numbers_as_words():
    assert [style.ordinal(n) for n in (1, 2, 3, 11, 12, 15, 22, 50, 97.5)] == (
        ["1st", "2nd", "3rd", "11th", "12th", "15th", "22nd", "50th", "97.5th"]
    )
    assert [style.thousands(n) for n in (0, 500, 1000, 2500, 50_000)] == ["0", "500", "1K", "2.5K", "50K"]
    assert [style.and_list(list("abc")[:n]) for n in (1, 2, 3)] == ["a", "a and b", "a, b and c"]


def lightness(color):
    """CIE L* of an sRGB colour: what is left of it in a grey print."""
    channels = np.array(matplotlib.colors.to_rgb(color))
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ [0.2126, 0.7152, 0.0722])
    return 116 * luminance ** (1 / 3) - 16


def test_the_two_arms_differ_in_more_than_hue():
    assert style.WITHOUT_BN.dashes != style.WITH_BN.dashes
    assert abs(lightness(style.WITHOUT_BN.color) - lightness(style.WITH_BN.color)) > 20
    assert max(lightness(arm.color) for arm in (style.WITHOUT_BN, style.WITH_BN)) < 65, "dark enough on white"
