"""Figure 1 from planted records: what is drawn, what is written, and what the caption owns up to."""

from __future__ import annotations

import re
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import same_color
from matplotlib.text import Annotation
from scipy import stats

from analysis import style
from analysis.figures.figure1 import draw
from analysis.load import StudyError
from tests.analysis.planted import PlantedRun, realistic, write_study

STEPS = [0, 100, 200, 300, 400]
UNITS = 7
TYPICAL = {"none": 4, "batch": 2}
SEEDS = (0, 1, 2)

# Held-out accuracy of three seeds at five evaluations; without BN the third never reaches 0.90 and none reaches 0.95.
ACCURACY = {
    "none": ([0.10, 0.30, 0.85, 0.91, 0.94], [0.10, 0.20, 0.91, 0.92, 0.93], [0.11, 0.15, 0.60, 0.80, 0.89]),
    "batch": ([0.10, 0.91, 0.94, 0.96, 0.97], [0.12, 0.89, 0.95, 0.96, 0.98], [0.09, 0.90, 0.93, 0.94, 0.96]),
}


def trajectories(arm: str, seed: int, steps: int = len(STEPS)) -> np.ndarray:
    """(U, T, 3): in the first seed every unit but the typical one is off by 1 or more, symmetrically."""
    offsets = np.array([-3.0, -2.0, -1.0, 1.0, 2.0, 3.0])
    offsets = np.insert(offsets, TYPICAL[arm], 0.01) + 10.0 * seed
    widths = np.linspace(1.0, 2.0, steps) if arm == "batch" else np.linspace(0.5, 3.5, steps)
    middle = offsets[:, None] + 0.1 * np.arange(steps)
    return np.stack([middle - widths, middle, middle + widths], axis=-1)


def planted(arm: str, seed: int) -> PlantedRun:
    return PlantedRun(dict(zip(STEPS, ACCURACY[arm][seed], strict=True)), STEPS, trajectories(arm, seed))


def study_of(folder, runs=None, **changes):
    return write_study(folder, runs or {(a, s): planted(a, s) for s in SEEDS for a in ("none", "batch")}, **changes)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """The planted study, drawn once for real with its grid: folder, what `draw` returned, the figures by name."""
    folder = study_of(tmp_path_factory.mktemp("out") / "figure1")
    figures, save = {}, style.save

    def keep(figure, folder, name, numbers):
        figures[name] = figure
        return save(figure, folder, name, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", keep)
        return folder, draw(folder, grid=True), figures


@pytest.fixture
def figures(monkeypatch):
    """The figures by name; only their numbers are written, which takes a tenth of the time."""
    found = {}

    def keep(figure, folder, name, numbers):
        found[name] = figure
        numbers.to_csv(folder / f"{name}.csv", index=False)
        return tuple(folder / f"{name}.{suffix}" for suffix in ("png", "pdf", "csv"))

    monkeypatch.setattr(style, "save", keep)
    return found


def csv(folder, name="figure1"):
    return pd.read_csv(folder / f"{name}.csv", dtype={"seed": str})


def curve(figure, axis, label):
    (line,) = [line for line in figure.axes[axis].lines if line.get_label() == label]
    return line


def test_the_files_lie_beside_the_runs(drawn):
    folder, result, _ = drawn
    names = [f"{name}.{suffix}" for name in ("figure1", "figure1_grid") for suffix in ("png", "pdf", "csv")]
    assert [path.name for path in result.paths] == names
    assert all(path.parent == folder and path.stat().st_size > 0 for path in result.paths)
    assert "Ioffe & Szegedy" in result.title


def test_panel_a_shows_the_mean_and_its_interval(drawn):
    _, _, figures = drawn
    for arm, label, dashed in (("none", "without BN", True), ("batch", "with BN", False)):
        line = curve(figures["figure1"], 0, label)
        assert line.get_xdata() == pytest.approx(STEPS)
        assert line.get_ydata() == pytest.approx(np.mean(ACCURACY[arm], axis=0))
        assert (line.get_linestyle() == "--") == dashed
    bands = [band for band in figures["figure1"].axes[0].collections if isinstance(band, PolyCollection)]
    assert len(bands) == 2
    for arm, band in zip(("none", "batch"), bands, strict=True):
        low, high = stats.t.interval(0.95, 2, np.mean(ACCURACY[arm], axis=0), stats.sem(ACCURACY[arm], axis=0))
        vertices = band.get_paths()[0].vertices
        for step, *interval in zip(STEPS, np.clip(low, 0, 1), np.clip(high, 0, 1), strict=True):
            at = vertices[vertices[:, 0] == step, 1]
            assert [at.min(), at.max()] == pytest.approx(interval, abs=1e-12)
    assert figures["figure1"].axes[0].get_title(loc="left") == "(a) accuracy, 3 seeds"


def test_panels_b_and_c_show_the_typical_unit_before_the_others(drawn):
    _, result, figures = drawn
    _, left, right = figures["figure1"].axes
    for axes, arm, letter in ((left, "none", "b"), (right, "batch", "c")):
        unit, values = TYPICAL[arm], trajectories(arm, 0)
        assert axes.get_title(loc="left").startswith(f"({letter})")
        assert axes.get_title(loc="left").endswith(f"unit {unit}")
        shown = [line.get_ydata() for line in axes.lines]
        assert shown == [pytest.approx(values[unit, :, q]) for q in range(3)]
        faint = [s for c in axes.collections if isinstance(c, LineCollection) for s in c.get_segments()]
        assert len(faint) == 3 * (UNITS - 1)
        others = np.delete(values, unit, axis=0)
        assert sorted(map(tuple, np.array(faint)[:, :, 1])) == sorted(
            map(tuple, others.transpose(0, 2, 1).reshape(-1, 5))
        )
        names = {t.get_text(): t.xy for t in axes.texts if isinstance(t, Annotation)}
        assert list(names) == ["15th", "50th", "85th"]
        assert [y for _, y in names.values()] == pytest.approx(values[unit, -1])
    assert left.get_ylim() == right.get_ylim()
    assert "4 without BN and 2 with BN" in result.caption


def test_the_csv_holds_every_plotted_number(drawn):
    folder, _, figures = drawn
    table = csv(folder)
    for name, numbers in (("figure1", table), ("figure1_grid", csv(folder, "figure1_grid"))):
        known = set(zip(numbers["step"], numbers["value"], strict=True))
        if name == "figure1":
            drawn_points = {
                (x, y)
                for axes in figures[name].axes
                for xy in (
                    *(line.get_xydata() for line in axes.lines),
                    *(s for c in axes.collections if isinstance(c, LineCollection) for s in c.get_segments()),
                    *(p.vertices for c in axes.collections if isinstance(c, PolyCollection) for p in c.get_paths()),
                )
                for x, y in map(tuple, xy)
            }
            assert drawn_points <= known
        for arm, panel in (("none", "b"), ("batch", "c")):
            rows = numbers[(numbers["panel"] == (panel if name == "figure1" else "grid")) & (numbers["arm"] == arm)]
            wide = rows.pivot(index=["unit", "step"], columns="statistic", values="value")[["p15", "p50", "p85"]]
            assert np.array_equal(wide.to_numpy().reshape(UNITS, len(STEPS), 3), trajectories(arm, 0))
            assert set(rows[rows["series"] == "shown unit"]["unit"]) == {TYPICAL[arm]}
            assert set(rows["seed"]) == {"0"}
    for arm in ("none", "batch"):
        rows = table[(table["panel"] == "a") & (table["arm"] == arm)]
        assert rows[rows["series"] == "mean over seeds"]["value"].to_numpy() == pytest.approx(
            np.mean(ACCURACY[arm], axis=0)
        )
        for seed in SEEDS:
            one = rows[(rows["series"] == "one seed") & (rows["seed"] == str(seed))]
            assert one["value"].tolist() == ACCURACY[arm][seed]
        assert set(rows[rows["series"] == "interval low"]["seed"]) == {"0 1 2"}


def test_the_table_says_the_same_in_numbers(drawn):
    _, result, _ = drawn
    table = result.table.set_index("")
    assert list(table.columns) == ["without BN", "with BN", "with BN minus without BN"]
    low, high = stats.t.interval(0.95, 2, np.mean([0.94, 0.93, 0.89]), stats.sem([0.94, 0.93, 0.89]))
    assert table.loc["accuracy at 400", "without BN"] == f"0.920 [{low:.3f}, {high:.3f}]"
    paired = stats.ttest_rel([0.97, 0.98, 0.96], [0.94, 0.93, 0.89]).confidence_interval(0.95)
    assert table.loc["accuracy at 400"].iloc[2] == f"+0.050 [{paired.low:+.3f}, {paired.high:+.3f}]"
    assert [name for name in table.index if name.startswith("accuracy")] == [
        "accuracy at 100",
        "accuracy at 200",
        "accuracy at 400",
    ]
    assert table.loc["steps to 0.90, median"].tolist()[:2] == ["200-300 (2 of 3)", "0-100 (3 of 3)"]
    assert table.loc["steps to 0.95, median"].tolist()[:2] == [">400 (0 of 3)", "200-300 (3 of 3)"]
    assert table.loc["85th - 15th percentile at 0"].tolist()[:2] == ["1.00 [1.00, 1.00]", "2.00 [2.00, 2.00]"]
    assert table.loc["85th - 15th percentile at 400"].tolist() == [
        "7.00 [7.00, 7.00]",
        "4.00 [4.00, 4.00]",
        "-3.00 [-3.00, -3.00]",
    ]


def test_the_caption_names_every_open_choice(drawn):
    _, result, figures = drawn
    for words in (
        "mean of 3 seeds (0, 1 and 2)",
        "95% Student t interval",
        "clipped to [0, 1]",
        "seed 0",
        "1000 training images",
        "in (c) normalized by their own statistics (batch mode)",
        "of 7 units",
        "plain SGD with learning rate 0.1",
        "weights N(0, 0.05²)",
        "BN momentum 0.1 and epsilon 1e-05",
        "binary pixels (white above 0.5)",
        "3 x 100 sigmoid units",
        "batches of 60",
        "400 steps (there 50000)",
        "begins at 0.7 as in the paper; lower means, without BN until step 100 and with BN at step 0",
    ):
        assert words in result.caption, words
    under = " ".join(text.get_text() for text in figures["figure1"].texts)
    assert under.split() == result.caption.split()


def test_the_caption_follows_the_configuration(tmp_path):
    folder = study_of(
        tmp_path / "figure1",
        data={"binarize": False},
        training={"batch": 600, "learning_rate": 0.3, "momentum": 0.9, "steps": 50_000},
        network={"hidden": [30, 20, 10], "init_std": 0.2},
    )
    caption = draw(folder).caption
    for words in (
        "SGD with learning rate 0.3, momentum 0.9, weight decay 0;",
        "N(0, 0.2²)",
        "Unlike it: grey pixels (there binary), 30 + 20 + 10 sigmoid units (there 3 x 100 sigmoid units)",
        "and batches of 600 (there 60).",
        "As in the paper: MNIST, 50000 steps.",
    ):
        assert words in caption, words


def test_one_seed_has_no_band_and_says_so(tmp_path, figures):
    folder = study_of(tmp_path / "figure1", {(a, 0): planted(a, 0) for a in ("none", "batch")})
    result = draw(folder)
    assert "One run a curve (seed 0), so there is no interval." in result.caption
    assert "95%" not in result.caption
    assert not set(csv(folder)["series"]) & {"interval low", "interval high"}
    assert "[" not in "".join(result.table.to_numpy().ravel())
    bands = [c for c in figures["figure1"].axes[0].collections if isinstance(c, PolyCollection)]
    assert all(np.isnan(path.vertices[:, 1]).all() for band in bands for path in band.get_paths())


def test_a_unit_that_is_asked_for_is_shown(tmp_path, figures):
    folder = study_of(tmp_path / "figure1")
    result = draw(folder, unit=6)
    assert [path.name for path in result.paths] == [f"figure1_unit6.{s}" for s in ("png", "pdf", "csv")]
    for axes, arm in zip(figures["figure1_unit6"].axes[1:], ("none", "batch"), strict=True):
        assert axes.get_title(loc="left").endswith("unit 6")
        assert axes.lines[1].get_ydata() == pytest.approx(trajectories(arm, 0)[6, :, 1])
    assert "unit 6, as asked for" in result.caption
    assert "4 without BN and 2 with BN" in result.caption
    for wrong in (-1, UNITS):
        with pytest.raises(ValueError, match=rf"0\.\.6, the units of hidden3\.nonlinearity, got {wrong}"):
            draw(folder, unit=wrong)


def test_a_run_that_diverged_is_kept_and_marked(tmp_path, figures):
    """Without BN, seed 0 ends after step 200: the mean ends there, the other two seeds go on."""
    values = trajectories("none", 0, steps=3)
    values[:, 2] = np.nan
    runs = {(a, s): planted(a, s) for s in SEEDS for a in ("none", "batch")}
    runs["none", 0] = PlantedRun(
        dict(zip(STEPS[:3], ACCURACY["none"][0][:3], strict=True)), STEPS[:3], values, "diverged"
    )
    folder = study_of(tmp_path / "figure1", runs)
    result = draw(folder, grid=True)
    axes = figures["figure1"].axes
    assert curve(figures["figure1"], 0, "without BN").get_xdata() == pytest.approx([0, 100, 200])
    assert curve(figures["figure1"], 0, "with BN").get_xdata() == pytest.approx(STEPS)
    cross = curve(figures["figure1"], 0, "diverged: seed 0")
    assert [tuple(xy) for xy in cross.get_xydata()] == [(200, pytest.approx(0.85))]
    thin = [line for line in axes[0].lines if line.get_linewidth() < 1 and len(line.get_xdata()) > 1]
    without = [line for line in thin if same_color(line.get_color(), style.WITHOUT_BN.color)]
    assert sorted(tuple(line.get_ydata()) for line in without) == [(0.60, 0.80, 0.89), (0.91, 0.92, 0.93)]
    assert "diverged" in [text.get_text() for text in axes[1].texts]
    assert "diverged" not in [text.get_text() for text in axes[2].texts]
    assert "Training without BN diverged (crosses: the last evaluation): seed 0 after step 200." in result.caption
    assert "unit 4" in axes[1].get_title(loc="left"), "the typical unit is judged where its percentiles exist"
    table = result.table.set_index("")
    assert table.loc["accuracy at 400"].tolist()[0] == "1 of 3 diverged"
    assert table.loc["accuracy at 400"].tolist()[2] == ""
    assert table.loc["steps to 0.90, median", "without BN"] == ">400 (1 of 3)"
    assert table.loc["85th - 15th percentile at 200", "without BN"] == "not finite"
    rows = csv(folder)
    assert rows[(rows["panel"] == "b") & (rows["step"] == 200)]["value"].isna().all()


def test_an_arm_that_never_trains_gets_the_whole_axis(tmp_path, figures):
    runs = {(a, s): planted(a, s) for s in SEEDS for a in ("none", "batch")}
    for seed in SEEDS:
        runs["none", seed] = PlantedRun(dict.fromkeys(STEPS, 0.1), STEPS, trajectories("none", seed))
    result = draw(study_of(tmp_path / "figure1", runs))
    assert figures["figure1"].axes[0].get_ylim() == (0, 1)
    assert "shows all of 0 to 1; the paper's begins at 0.7" in result.caption


def test_outlying_units_do_not_squash_the_typical_one(tmp_path, figures):
    runs = {(a, 0): realistic(a, 0, units=20, steps=2000) for a in ("none", "batch")}
    wild = np.array(runs["none", 0].percentiles)
    wild[:8] *= 1000  # two units in five, so that no mild quantile leaves them out
    runs["none", 0] = PlantedRun(runs["none", 0].accuracy, runs["none", 0].steps, wild)
    result = draw(study_of(tmp_path / "figure1", runs))
    low, high = figures["figure1"].axes[1].get_ylim()
    shown = np.concatenate([line.get_ydata() for axes in figures["figure1"].axes[1:] for line in axes.lines])
    assert low < shown.min() < shown.max() < high
    assert np.ptp(shown) > 0.45 * (high - low)
    assert "leave the axis for a time or for good" in result.caption


def test_other_percentiles_than_the_papers_are_drawn(tmp_path, figures):
    """Five of them, and one: named after the record, not after the paper."""
    five = trajectories("none", 0)[:, :, [0, 0, 1, 2, 2]] + np.array([-1, 0, 0, 0, 1])
    runs = {(a, 0): PlantedRun(dict.fromkeys(STEPS, 0.9), STEPS, five) for a in ("none", "batch")}
    folder = study_of(tmp_path / "five" / "figure1", runs, measures={"percentiles": [2.5, 15, 50, 85, 97.5]})
    result = draw(folder, grid=True)
    assert len(figures["figure1"].axes[1].lines) == 5
    assert "2.5th, 15th, 50th, 85th and 97.5th percentiles" in result.caption
    assert "97.5th - 2.5th percentile at 0" in result.table[""].tolist()
    runs = {key: PlantedRun(run.accuracy, STEPS, five[:, :, 2:3]) for key, run in runs.items()}
    result = draw(study_of(tmp_path / "one" / "figure1", runs, measures={"percentiles": [50]}), grid=True)
    assert not any("percentile" in name for name in result.table[""])


def test_the_grid_shows_each_unit_in_its_cell(drawn):
    _, _, figures = drawn
    for axes, arm in zip(figures["figure1_grid"].axes, ("none", "batch"), strict=True):
        assert [t.get_text() for t in axes.texts[:UNITS]] == [str(u) for u in range(UNITS)]
        heavy = [k for k, patch in enumerate(axes.patches) if patch.get_linewidth() > 1]
        assert heavy == [TYPICAL[arm]]
        (bands,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
        zeros, medians = [c for c in axes.collections if isinstance(c, LineCollection)]
        for u in range(UNITS):
            x, y = axes.patches[u].get_xy()
            cell = axes.patches[u].get_width()
            for xy in (bands.get_paths()[u].vertices, medians.get_segments()[u]):
                assert xy[:, 0].min() == pytest.approx(x)
                assert xy[:, 0].max() == pytest.approx(x + cell)
                assert y - 1e-9 <= xy[:, 1].min() <= xy[:, 1].max() <= y + cell + 1e-9
        # undo the cell's scale on two points: heights are linear in the value, and zero lies on the zero line
        middle = trajectories(arm, 0)[TYPICAL[arm], :, 1]
        x, y = axes.patches[TYPICAL[arm]].get_xy()
        drawn_line = medians.get_segments()[TYPICAL[arm]][:, 1]
        slope = np.diff(drawn_line) / np.diff(middle)
        assert slope == pytest.approx(slope[0])
        assert drawn_line[0] - slope[0] * middle[0] == pytest.approx(zeros.get_segments()[TYPICAL[arm]][0, 1])


def test_drawing_twice_gives_the_same_bytes(drawn):
    folder, result, _ = drawn
    first = {path.name: path.read_bytes() for path in result.paths[:3]}
    assert {path.name: path.read_bytes() for path in draw(folder).paths} == first


def test_only_a_finished_figure1_is_drawn(tmp_path):
    other = study_of(tmp_path / "drift", name="drift")
    with pytest.raises(StudyError, match="holds 'drift'"):
        draw(other)
    alone = study_of(tmp_path / "alone", {("none", 0): planted("none", 0)})
    with pytest.raises(StudyError, match="arms none and batch"):
        draw(alone)
    running = planted("batch", 0)
    runs = {("none", 0): planted("none", 0)}
    runs["batch", 0] = PlantedRun(running.accuracy, running.steps, running.percentiles, "running")
    unfinished = study_of(tmp_path / "unfinished", runs)
    with pytest.raises(StudyError, match=r"batch-s0-.*running"):
        draw(unfinished)
    assert not list(unfinished.glob("figure1*"))


@pytest.mark.parametrize("case", ["usual", "diverged early", "smoke", "plateau"])
def test_no_two_texts_overlap(tmp_path, figures, case):
    early = {"last": 250, "status": "diverged"} if case == "diverged early" else {}
    size = {"steps": 200, "every": 20} if case == "smoke" else {"steps": 15_000}
    runs = {
        (arm, seed): realistic(arm, seed, units=12, **size, **(early if arm == "none" else {}))
        for seed in (0, 1)
        for arm in ("none", "batch")
    }
    if case == "plateau":  # the percentiles coincide, so must not their names
        for key, run in runs.items():
            runs[key] = PlantedRun(run.accuracy, run.steps, np.repeat(np.array(run.percentiles)[..., 1:2], 3, axis=2))
    draw(study_of(tmp_path / "figure1", runs), grid=case in ("usual", "diverged early"))
    for name, figure in figures.items():
        boxes = text_boxes(figure)
        assert len(boxes) > 20
        for text, box in boxes:
            inside = min(box.x0, box.y0, figure.bbox.x1 - box.x1, figure.bbox.y1 - box.y1) >= 0
            assert inside, f"{name}: {text!r} leaves the figure"
        for (one, a), (two, b) in combinations(boxes, 2):
            width, height = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            assert min(width, height) <= 1, f"{name}: {one!r} overlaps {two!r}"


def text_boxes(figure):
    """Every text that is seen, with its place in pixels."""
    canvas = FigureCanvasAgg(figure)
    with style.look():
        canvas.draw()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.texts, axes._left_title]
        if axes.get_legend():
            texts += axes.get_legend().get_texts()
        if axes.axison:
            texts += [axes.xaxis.label, axes.yaxis.label]
            texts += [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]
    renderer = canvas.get_renderer()
    return [(t.get_text(), t.get_window_extent(renderer)) for t in texts if t.get_visible() and t.get_text().strip()]


def flat(level, *, until=2000, status="complete"):
    steps = [step for step in (0, 500, 1000, 1500, 2000) if step <= until]
    percentiles = np.zeros((2, 2, 3)) + np.arange(3)
    return PlantedRun(dict.fromkeys(steps, level), [0, 500], percentiles, status)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({("none", 0): flat(0.5), ("batch", 0): flat(0.9)}, r"BN trains faster is supported: .* \(3 of 3\)"),
        ({("none", 0): flat(0.9), ("batch", 0): flat(0.5)}, r"BN trains faster is refuted: without it, .* \(3 of 3\)"),
        (
            {("none", 0): flat(0.5), ("batch", 0): flat(0.9), ("none", 1): flat(0.9), ("batch", 1): flat(0.5)},
            "Undecided whether BN trains faster: with BN higher accuracy at 3 of 6",
        ),
        ({("none", 0): flat(0.5), ("batch", 0): flat(0.5)}, "Undecided .* at 0 of 3"),
        ({("none", 0): flat(0.5, until=500), ("batch", 0): flat(0.9, until=500)}, "No verdict: training ended before"),
        # what diverged is behind from there on
        ({("none", 0): flat(0.95, until=500, status="diverged"), ("batch", 0): flat(0.9)}, "supported: .* \\(3 of 3"),
        ({("none", 0): flat(0.95, until=1000, status="diverged"), ("batch", 0): flat(0.9)}, "Undecided .* at 2 of 3"),
    ],
)
def test_the_verdict_follows_the_rule(tmp_path, runs, said):
    result = draw(write_study(tmp_path, runs))
    assert re.search(said, result.title)
