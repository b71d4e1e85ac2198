from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from diagnostics import _parts
from diagnostics.record import (
    FORMAT,
    RecordError,
    RunWriter,
    Status,
    read_config,
    read_run,
    read_status,
    require_finished,
    run_id,
)
from tests.diagnostics import record_scenario as scenario

COLUMNS = ["step", "probe", "layer", "unit", "statistic", "mode", "value"]
NAMES = ["probe", "layer", "statistic", "mode"]
CONFIG = scenario.CONFIG


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows make several row groups, as many do in earnest. Nothing here outlives a power failure: no syncs."""
    monkeypatch.setattr(_parts, "ROWS", 16)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def writer(path: Path, **options: Any) -> RunWriter:
    return RunWriter(path, **{"config": CONFIG, "environment": {"torch": "2.13"}, "part_every": 10} | options)


def promised(path: Path) -> dict[str, bytes]:
    """The files whose bytes are a function of what was written."""
    assert sorted(file.name for file in path.iterdir()) == sorted(
        ["config.json", "environment.json", "lock", "records", "status.json"]
        + (["checkpoint.pt"] if (path / "checkpoint.pt").exists() else [])
    )
    files = [path / "config.json", *(path / "records").iterdir()]
    return {file.name: file.read_bytes() for file in files}


def rows_of(blocks: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The slow twin: the rows of blocks (step, probe, layer, values, units, mode), one by one."""
    rows = []
    for step, probe, layer, values, units, mode in blocks:
        for statistic, array in values.items():
            if np.ndim(array) == 0:
                pairs = [(-1, array)]
            else:
                pairs = list(zip(units if units is not None else range(len(array)), array, strict=True))
            for unit, value in pairs:
                cell = {
                    "step": step,
                    "probe": probe,
                    "layer": layer,
                    "unit": unit,
                    "statistic": statistic,
                    "mode": mode,
                }
                rows.append(cell | {"value": float(value)})
    return rows


def frame_of(rows: list[dict[str, Any]], columns: list[str] = COLUMNS) -> pd.DataFrame:
    """The slow twin's table: categories by first appearance among these rows."""
    frame = pd.DataFrame(rows, columns=COLUMNS).astype({"step": np.int64, "unit": np.int32, "value": np.float64})
    for name in NAMES:
        categories = pd.Index(list(dict.fromkeys(frame[name])), dtype="str")
        frame[name] = pd.Categorical(frame[name].astype("str"), categories=categories)
    return frame[columns]


def same(table: pd.DataFrame, twin: pd.DataFrame) -> None:
    """Equal to the last bit of every value, in order, with the same types and categories."""
    assert_frame_equal(table, twin, check_exact=True)
    if "value" in twin:
        assert (table["value"].to_numpy().view(np.int64) == twin["value"].to_numpy().view(np.int64)).all()


def scenario_rows(stop: int, start: int = 0) -> list[dict[str, Any]]:
    return rows_of([(step, *block) for step in range(start, stop) for block in scenario.blocks(step)])


# ---------------------------------------------------------------- what is written is what is read


def test_values_survive_to_the_last_bit(tmp_path: Path) -> None:
    odd_nan = np.array([0x7FF8_0000_DEAD_BEEF], np.uint64).view(np.float64)[0]
    values = np.array([np.nan, odd_nan, np.inf, -np.inf, -0.0, 0.0, 5e-324, 1.7976931348623157e308, 0.1, 1 / 3])
    with writer(tmp_path / "run") as record:
        record.write(0, "p", "l", {"s": values})
    table = read_run(tmp_path / "run")
    assert (table["value"].to_numpy().view(np.int64) == values.view(np.int64)).all()
    assert [str(table[column].dtype) for column in ("step", "unit", "value")] == ["int64", "int32", "float64"]
    assert all(isinstance(table[name].dtype, pd.CategoricalDtype) for name in NAMES)
    assert list(table.columns) == COLUMNS
    assert table.attrs == {"status": "complete", "config": CONFIG}


def test_any_tool_reads_the_parts_by_themselves(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    for step in range(15):  # the second part is being written: no tool must stumble over it
        record.write(step, "p", "l", {"s": np.arange(4.0), "t": np.float32(0.1)})
        record.advance(step + 1)
    table = pd.read_parquet(tmp_path / "run" / "records")
    assert len(table) == 10 * 5
    assert table["layer"].dtype == "category"
    kept = pq.ParquetFile(tmp_path / "run" / "records" / "part-00000.parquet")
    assert kept.schema_arrow.metadata is None  # no versions of other libraries
    assert [kept.metadata.row_group(i).num_rows for i in range(kept.num_row_groups)] == [16, 16, 16, 2]
    record.close("complete")


def test_values_are_copied_and_taken_from_any_real_type(tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32)
    with writer(tmp_path / "run") as record:
        record.write(0, "p", "strided", {"s": array[::2]})
        array[:] = 99
        record.write(0, "p", "others", {"list": [1, 2], "bool": np.array([True, False]), "half": np.float16([0.5, 1])})
        record.write(0, "p", "scalars", {"python": 3, "numpy": np.float32(0.1), "array": [7.0]})
        record.write(0, "p", "none", {"s": []}, units=[])
        record.write(0, "p", "none", {})
    table = read_run(tmp_path / "run")
    assert table["value"].tolist() == [0, 2, 4, 1, 2, 1, 0, 0.5, 1, 3, float(np.float32(0.1)), 7]
    assert table["unit"].tolist() == [0, 1, 2, 0, 1, 0, 1, 0, 1, -1, -1, 0]
    assert list(table["layer"].cat.categories) == ["strided", "others", "scalars"]


names = st.sampled_from(["a", "b", "hidden1.linear", "norm#2", "-", "β"])
finite_or_not = st.floats(width=64)


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Blocks at steps that do not go back, no cell twice."""
    written, blocks, step = set(), [], 0
    for _ in range(draw(st.integers(0, 12))):
        step += draw(st.integers(0, 4))
        place = (draw(names), draw(names), draw(st.sampled_from(["-", "batch"])))
        units = draw(st.none() | st.lists(st.integers(-1, 40), unique=True, max_size=6))
        size = draw(st.integers(0, 40)) if units is None else len(units)
        values: dict[str, Any] = {}
        for statistic in draw(st.lists(names, unique=True, max_size=3)):
            if units is None and draw(st.booleans()):
                values[statistic] = draw(finite_or_not)
            else:
                values[statistic] = draw(st.lists(finite_or_not, min_size=size, max_size=size))
        block = (step, place[0], place[1], values, units, place[2])
        cells = {tuple(row[name] for name in COLUMNS[:-1]) for row in rows_of([block])}
        if not cells & written:
            written |= cells
            blocks.append(block)
    return blocks


def play(path: Path, blocks: list[tuple[Any, ...]], end: int, start: int = 0, part_every: int = 10) -> None:
    """Record the blocks from ``start`` on as far as step ``end``, exclusive."""
    record = writer(path, start=start, part_every=part_every)
    for step, probe, layer, values, units, mode in blocks:
        if start <= step < end:
            record.advance(step)
            record.write(step, probe, layer, values, units=units, mode=mode)
    record.advance(end)
    record.close("running")


@given(runs(), st.integers(1, 30), st.lists(st.integers(1, 50), max_size=3), st.data())
@settings(max_examples=30)
def test_a_run_in_pieces_is_the_twin_and_the_bytes_of_one_in_one(
    tmp_path_factory: pytest.TempPathFactory,
    blocks: list[tuple[Any, ...]],
    part_every: int,
    stops: list[int],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    play(folder / "one", blocks, 50, part_every=part_every)
    start = 0
    for stop in stops:  # stop there, go on from anywhere before
        play(folder / "pieces", blocks, max(stop, start), start, part_every)
        start = data.draw(st.integers(1, max(stop, start)))
    play(folder / "pieces", blocks, 50, start, part_every)
    same(read_run(folder / "one"), frame_of(rows_of(blocks)))
    assert promised(folder / "pieces") == promised(folder / "one")


@given(runs(), st.data())
@settings(max_examples=30)
def test_filters_are_what_pandas_would_keep(
    tmp_path_factory: pytest.TempPathFactory, blocks: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("filters")
    play(folder / "run", blocks, 50)
    rows = rows_of(blocks)
    filters: dict[str, Any] = {}
    for name in [*NAMES, "unit"]:
        there = sorted({row[name] for row in rows})
        one = st.sampled_from(there) if there else st.nothing()
        filters[name] = data.draw(st.none() | one | st.lists(one, min_size=1, unique=True))
    first, stop = data.draw(st.none() | st.integers(0, 30)), data.draw(st.none() | st.integers(0, 50))
    columns = data.draw(st.lists(st.sampled_from(COLUMNS), min_size=1, unique=True))

    twin = frame_of(rows)
    for name, wanted in filters.items():
        if wanted is not None:
            twin = twin[twin[name].isin(wanted if isinstance(wanted, list) else [wanted])]
    twin = twin[(twin["step"] >= (first or 0)) & (twin["step"] < (50 if stop is None else stop))]
    for name in NAMES:
        twin[name] = twin[name].cat.remove_unused_categories()
    same(
        read_run(folder / "run", steps=(first, stop), columns=columns, **filters), twin[columns].reset_index(drop=True)
    )


def test_the_blocks_that_rows_come_in_do_not_show(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, 50))
    with writer(tmp_path / "whole") as record:
        record.write(0, "p", "l", {"a": values[0], "b": values[1]})
    with writer(tmp_path / "pieces") as record:
        for row, statistic in enumerate("ab"):
            for units in (np.arange(0, 17), np.arange(17, 18), np.arange(18, 50)):
                record.write(0, "p", "l", {statistic: values[row][units]}, units=units)
    assert promised(tmp_path / "pieces") == promised(tmp_path / "whole")


def test_filters_do_not_read_parts_of_other_steps(tmp_path: Path) -> None:
    play(tmp_path / "run", [(step, "p", "l", {"s": [1.0]}, None, "-") for step in range(40)], 40)
    for number in (0, 3):
        (tmp_path / "run" / "records" / f"part-0000{number}.parquet").write_bytes(b"damaged")
    assert read_run(tmp_path / "run", steps=(10, 30))["step"].tolist() == list(range(10, 30))
    assert read_run(tmp_path / "run", steps=(15, 25))["step"].tolist() == list(range(15, 25))
    for steps in ((9, 30), (10, 31), None):
        with pytest.raises(RecordError, match=r"cannot be read.*damaged"):
            read_run(tmp_path / "run", steps=steps)


def test_a_name_that_occurs_nowhere_is_refused_with_the_close_ones(tmp_path: Path) -> None:
    blocks = [(step, "activations.input", f"hidden{step}.linear", {"p50": [1.0]}, None, "-") for step in range(8)]
    play(tmp_path / "run", blocks, 8)
    with pytest.raises(RecordError, match=r"no layer is named 'hiden1.linear'.*hidden1.linear, .*\(and 3 more\)"):
        read_run(tmp_path / "run", layer="hiden1.linear")
    with pytest.raises(RecordError, match=r"no statistic is named 'median'.*there is p50$"):
        read_run(tmp_path / "run", statistic=["p50", "median"])  # one that exists does not hide one that does not
    with pytest.raises(RecordError, match="no probe"):
        read_run(tmp_path / "run", probe="activations", columns=["value"])
    with pytest.raises(RecordError, match="no mode is named 'batch'"):
        read_run(tmp_path / "run", mode="batch")
    assert read_run(tmp_path / "run", layer="hidden1.linear", steps=(5, None)).empty  # exists, but not there


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ["step", "size"]}, "columns are chosen among step, probe"),
        ({"columns": ["step", "step"]}, "each once"),
        ({"layer": 3}, "layer is a string or a list of strings, not 3"),
        ({"layer": [3]}, "string or a list of strings"),
        ({"unit": "all"}, "unit is a whole number"),
        ({"unit": [-2]}, "at least -1"),
        ({"steps": (1, 2, 3)}, "pair"),
        ({"steps": 3}, "pair"),
        ({"steps": "12"}, "pair"),
        ({"steps": (-1, None)}, "an end of steps is a whole number"),
        ({"unit": 7}, "no unit 7 in .*units there are 0 to 0"),
        ({"unit": []}, "unit names no unit"),
        ({"probe": []}, "probe names none"),
    ],
)
def test_reading_refuses_what_it_does_not_know(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    play(tmp_path / "run", [(0, "p", "l", {"s": [1.0]}, None, "-")], 1)
    with pytest.raises(RecordError, match=message):
        read_run(tmp_path / "run", **options)


def test_a_record_without_parts_is_an_empty_table_of_the_same_types(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    record.write(0, "p", "l", {"s": 1.0})
    table = read_run(tmp_path / "run", layer="any", columns=["unit", "layer", "value"])
    assert table.empty
    assert table.attrs["status"] == "running"
    assert [str(kind) for kind in table.dtypes] == ["int32", "category", "float64"]
    record.close("complete")
    assert len(read_run(tmp_path / "run")) == 1


def test_a_running_record_shows_the_parts_so_far(tmp_path: Path) -> None:
    with writer(tmp_path / "run", part_every=7) as record:
        assert record.next_part == 0
        for step in range(scenario.END):
            for probe, layer, values, units, mode in scenario.blocks(step):
                record.write(step, probe, layer, values, units=units, mode=mode)
            assert record.advance(step + 1) == ((step + 1) % 7 == 0)
            parts = (step + 1) // 7
            assert record.next_part == parts
            if step % 5 == 0:
                same(read_run(tmp_path / "run"), frame_of(scenario_rows(parts * 7)))
                assert read_status(tmp_path / "run") == Status("running", parts * 7, 7, {}, None, parts)
    same(read_run(tmp_path / "run"), frame_of(scenario_rows(scenario.END)))


def test_a_resumed_record_shows_nothing_from_its_start_on(tmp_path: Path) -> None:
    scenario.train(tmp_path / "run")
    for start in (23, 14, 10):
        with writer(tmp_path / "run", start=start, part_every=7) as record:
            same(read_run(tmp_path / "run"), frame_of(scenario_rows(start)))
            assert read_status(tmp_path / "run") == Status("running", start, 7, {}, None, start // 7)
            record.close("running")
        same(read_run(tmp_path / "run"), frame_of(scenario_rows(start)))


# ---------------------------------------------------------------- a cell is written once, in order


def test_a_cell_is_written_once(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as record:
        record.write(3, "p", "l", {"a": [1.0, 2.0], "b": 5.0})
        cell = r"written twice: step 3, probe 'p', layer 'l', statistic 'a', unit 1, mode '-'"
        with pytest.raises(RecordError, match=cell):
            record.write(3, "p", "l", {"new": [1.0, 1.0], "a": [7.0, 7.0]}, units=[1, 4])
        with pytest.raises(RecordError, match="statistic 'b', unit -1"):
            record.write(3, "p", "l", {"b": [1.0]}, units=[-1])
        with pytest.raises(RecordError, match="statistic 'a', unit 0"):
            record.write(3, "p", "l", {"a": [1.0, 2.0], "b": 5.0})
        # Each of these differs in one key.
        record.write(3, "p", "l", {"a": [1.0]}, units=[4])
        record.write(3, "p", "l", {"new": 1.0})
        record.write(3, "p", "l", {"a": [1.0, 2.0], "b": 5.0}, mode="batch")
        record.write(3, "p", "other", {"a": [1.0, 2.0], "b": 5.0})
        record.write(3, "q", "l", {"a": [1.0, 2.0], "b": 5.0})
        record.write(4, "p", "l", {"a": [1.0, 2.0], "b": 5.0})
        record.advance(5)
        record.write(5, "p", "l", {"a": [1.0, 2.0], "b": 5.0})
        with pytest.raises(RecordError, match="written twice: step 5"):
            record.write(5, "p", "l", {"a": [1.0, 2.0], "b": 5.0})
    table = read_run(tmp_path / "run")
    assert len(table) == 3 + 2 + 5 * 3
    assert not table.duplicated(COLUMNS[:-1]).any()


def test_a_refused_block_leaves_no_trace(tmp_path: Path) -> None:
    good = [(step, "p", "l", {"a": np.arange(10.0) + step}, None, "-") for step in range(9)]
    play(tmp_path / "good", good, 9)
    record = writer(tmp_path / "bad")
    for step, probe, layer, values, _, _ in good:
        record.write(step, probe, layer, values)
        for refused in (
            {"a": [1.0]},
            {"z": 1j},
            {"y": 1.0, "z": "text"},
            {"y": np.ones(20), "z": np.array([None] * 20)},
        ):
            with pytest.raises(RecordError):
                record.write(step, probe, layer if "a" in refused else "another", refused)
    record.advance(9)
    record.close("running")
    assert promised(tmp_path / "bad") == promised(tmp_path / "good")


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda record: record.write(3, "p", "l", {"s": 1.0}), "must not go backwards: 3 after 5"),
        (lambda record: record.advance(4), "must not go backwards: 4 after 5"),
        (lambda record: record.write(10, "p", "l", {"s": 1.0}), r"step 10 is beyond part 0: advance\(10\) comes first"),
        (lambda record: record.write(5.5, "p", "l", {"s": 1.0}), "step is a whole number, not 5.5"),
        (lambda record: record.advance("6"), "step is a whole number, not '6'"),
        (lambda record: record.write(6, "", "l", {"s": 1.0}), "a probe is named by a string"),
        (lambda record: record.write(6, "p", None, {"s": 1.0}), "a layer is named by a string.*None"),
        (lambda record: record.write(6, "p", ["l"], {"s": 1.0}), "a layer is named by a string"),
        (lambda record: record.write(6, "p", "l\ud800", {"s": 1.0}), "cannot be printed"),
        (lambda record: record.write(6, "p", "l", {3: 1.0}), "a statistic is named by a string"),
        (lambda record: record.write(6, "p", "l", {"s": 1.0}, mode=""), "a mode is named by a string"),
        (lambda record: record.write(6, "p", "l", {"s": [[1.0]]}), r"layer 'l', statistic 's'.*not shape \(1, 1\)"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0, 2.0], "t": [1.0]}), "'t': 1 values, but 's'.* has 2"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0]}, units=[1, 2]), r"2 units need.*\(2,\), not \(1,\)"),
        (lambda record: record.write(6, "p", "l", {"s": 1.0}, units=[1]), r"1 units need.*\(1,\), not \(\)"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0, 2.0]}, units=[1, 1]), "unit 1 is named twice"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0]}, units=[-2]), "units run from -1 to 2147483647"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0]}, units=[2**31]), "not from 2147483648"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0]}, units=[0.0]), "whole numbers in one dimension"),
        (lambda record: record.write(6, "p", "l", {"s": [1.0]}, units=[[0]]), "whole numbers in one dimension"),
        (lambda record: record.write(6, "p", "l", {"s": np.complex64(1)}), "statistic 's': complex64 is not a real"),
        (lambda record: record.write(6, "p", "l", {"t": [1.0], "s": ["1"]}), "statistic 's': <U1 is not a real"),
        (lambda record: record.close("done"), "one of running, complete, diverged, failed, not 'done'"),
        (lambda record: record.close("complete", counts={"skipped": 1.5}), r"counts\['skipped'\] is a whole"),
    ],
)
def test_a_writer_refuses_and_goes_on(tmp_path: Path, write: Callable[[RunWriter], None], message: str) -> None:
    record = writer(tmp_path / "run")
    record.write(5, "p", "l", {"s": [1.0]})
    with pytest.raises(RecordError, match=message):
        write(record)
    record.write(6, "p", "l", {"s": [1.0]})
    record.close("complete")
    assert read_run(tmp_path / "run")["step"].tolist() == [5, 6]
    for again in (
        record.close,
        lambda status: record.write(6, "p", "m", {"s": 1.0}),
        lambda status: record.advance(70),
    ):
        with pytest.raises(RecordError, match="closed"):
            again("complete")


def test_a_shape_met_before_does_not_vouch_for_another(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as record:
        for step, units in enumerate([[0, 1], np.array([0, 1], np.int8), [1, 0], [0, 2], None]):
            record.write(step, "p", "l", {"s": [5.0, 6.0]}, units=units)
        with pytest.raises(RecordError, match="one dimension"):
            record.write(5, "p", "l", {"s": [5.0, 6.0]}, units=[[0, 1]])
        with pytest.raises(RecordError, match="whole numbers"):
            record.write(5, "p", "l", {"s": [5.0, 6.0]}, units=np.array([0, 1], np.int64).view(np.float64))
    assert read_run(tmp_path / "run")["unit"].tolist() == [0, 1, 0, 1, 1, 0, 0, 2, 0, 1]


def test_a_boundary_may_be_jumped_over(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as record:
        record.write(2, "p", "l", {"s": [1.0]})
        assert record.advance(35)
        assert record.next_part == 3
    assert sorted(promised(tmp_path / "run"))[1:] == [f"part-0000{number}.parquet" for number in range(4)]
    assert read_status(tmp_path / "run").steps == 35


def test_content_is_on_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power failure could leave a file that has its name and no content. What a disk does is not seen here."""
    synced: set[int] = set()
    renamed: list[str] = []
    replace = Path.replace

    def checked(self: Path, target: Path) -> Path:
        if self.is_file():
            assert self.stat().st_ino in synced, self
            renamed.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.add(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(Path, "replace", checked)
    play(tmp_path / "run", [(0, "p", "l", {"s": [1.0]}, None, "-")], 10)
    start = ["environment.json", "config.json", "status.json"]
    assert renamed == [*start, "part-00000.parquet", "status.json", "status.json"]
    assert {(tmp_path / name).stat().st_ino for name in (".", "run/records")} <= synced


# ---------------------------------------------------------------- how a run ends


def test_leaving_the_block_says_how_it_ended(tmp_path: Path) -> None:
    for name, error in {
        "complete": None,
        "failed": ZeroDivisionError("by zero"),
        "running": KeyboardInterrupt(),
    }.items():
        with suppress(ZeroDivisionError, KeyboardInterrupt), writer(tmp_path / name) as record:
            record.write(3, "p", "l", {"s": [1.0]})
            record.advance(4)
            if error is not None:
                raise error
        status = read_status(tmp_path / name)
        text = "ZeroDivisionError: by zero" if name == "failed" else None
        assert status == Status(name, 4, 10, {}, text, 1, FORMAT)  # type: ignore[arg-type]  # the names are states
        table = read_run(tmp_path / name)
        assert table.attrs["status"] == name
        assert len(table) == 1


def test_only_a_finished_record_is_accepted(tmp_path: Path) -> None:
    for status in ("complete", "diverged", "failed", "running"):
        with writer(tmp_path / status) as record:
            record.advance(3)
            record.close(status, error="no luck" if status == "failed" else None, counts={"ignored forwards": 2})
        assert read_status(tmp_path / status).counts == {"ignored forwards": 2}
    require_finished(tmp_path / "complete")
    require_finished(tmp_path / "diverged")
    with pytest.raises(RecordError, match="failed after 3 steps: no luck"):
        require_finished(tmp_path / "failed")
    with pytest.raises(RecordError, match=r"not finished \(running, 3 steps so far\)"):
        require_finished(tmp_path / "running")
    with pytest.raises(RecordError, match="no such folder"):
        require_finished(tmp_path / "nowhere")


def test_an_interrupt_inside_write_costs_the_part_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any, key: Any, block: Any) -> None:
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), writer(tmp_path / "run", part_every=7) as record:
        for step in range(20):
            if step == 17:
                monkeypatch.setattr(_parts.Parts, "_keep", interrupted)
            for probe, layer, values, units, mode in scenario.blocks(step):
                record.write(step, probe, layer, values, units=units, mode=mode)
            record.advance(step + 1)
    monkeypatch.undo()
    assert read_status(tmp_path / "run") == Status("running", 14, 7, {}, None, 2)
    same(read_run(tmp_path / "run"), frame_of(scenario_rows(14)))
    assert len(promised(tmp_path / "run")) == 3  # and no temporary file


def test_an_error_of_the_encoding_thread_reaches_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = _parts.Parts._encode, 0

    def failing(self: Any, table: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(28, "No space left on device")
        encode(self, table)

    monkeypatch.setattr(_parts.Parts, "_encode", failing)
    reached = 0

    def run() -> None:
        nonlocal reached
        with writer(tmp_path / "run") as record:
            for step in range(10):
                record.write(step, "p", "l", {"s": np.arange(16.0)})
                reached = step

    with pytest.raises(RecordError, match=r"cannot write .*part-00000.parquet: .*No space left") as caught:
        run()
    assert calls == 3
    assert reached == 3  # groups 0 and 1 are encoded, 2 fails while 3 fills, which needs its buffer
    assert caught.type is RecordError
    assert read_status(tmp_path / "run").status == "failed"
    assert "No space left" in str(read_status(tmp_path / "run").error)
    assert read_run(tmp_path / "run").empty


def test_a_torn_part_takes_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, table: Any) -> None:
        raise OSError(5, "Input/output error")

    record = writer(tmp_path / "run")
    record.write(0, "p", "l", {"s": np.arange(4.0)})
    monkeypatch.setattr(_parts.Parts, "_encode", failing)
    with pytest.raises(RecordError, match="cannot write"):
        record.advance(10)
    monkeypatch.undo()
    for use in (lambda: record.write(5, "p", "l", {"s": 1.0}), lambda: record.advance(10)):
        with pytest.raises(RecordError, match="lost to an earlier error"):
            use()
    with pytest.raises(RecordError, match="is not complete: rows from step 0 on were lost"):
        record.close("complete")
    assert read_status(tmp_path / "run").status == "failed"
    assert promised(tmp_path / "run").keys() == {"config.json"}
    writer(tmp_path / "run", overwrite=True).close("complete")


# ---------------------------------------------------------------- the folder


def test_the_files_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    with writer(tmp_path / "a" / "b" / "run", environment={"torch": "2.13", "threads": 1}) as record:
        record.advance(12)
    folder = tmp_path / "a" / "b" / "run"
    assert (folder / "config.json").read_text() == json.dumps(CONFIG, indent=2, sort_keys=True) + "\n"
    assert json.loads((folder / "environment.json").read_text()) == [{"torch": "2.13", "threads": 1}]
    assert json.loads((folder / "status.json").read_text()) == {
        "format": 1, "status": "complete", "steps": 12, "part_every": 10, "counts": {}, "error": None, "parts": 2,
    }  # fmt: skip
    with writer(folder, start=5, environment={"torch": "2.14"}):
        pass
    assert json.loads((folder / "environment.json").read_text()) == [{"torch": "2.13", "threads": 1}, {"torch": "2.14"}]
    with writer(folder, overwrite=True, environment={"torch": "2.15"}):
        pass
    assert json.loads((folder / "environment.json").read_text()) == [{"torch": "2.15"}]
    assert sorted(os.listdir(tmp_path / "a" / "b")) == ["run"]


def test_a_finished_record_that_lost_a_part_is_refused(tmp_path: Path) -> None:
    """Parts are files like others: one that a copy forgot must not make a shorter record."""
    scenario.train(tmp_path / "run")
    parts = sorted((tmp_path / "run" / "records").iterdir())
    assert read_status(tmp_path / "run").parts == len(parts) > 3
    whole = parts[-1].read_bytes()
    parts[-1].unlink()
    parts[1].unlink()
    for read in (read_status, read_run, read_config, require_finished):
        with pytest.raises(RecordError, match=r"part-00001.parquet is missing and 1 more; remove the folder"):
            read(tmp_path / "run")
    parts[-1].write_bytes(whole)
    with pytest.raises(RecordError, match=r"part-00001.parquet is missing; remove"):
        read_status(tmp_path / "run")
    with writer(tmp_path / "run", overwrite=True):
        pass
    assert read_status(tmp_path / "run").parts == 0


def test_changing_directory_does_not_move_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with writer(Path("run")) as record:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        record.write(0, "p", "l", {"s": 1.0})
    assert len(read_run(tmp_path / "run")) == 1
    assert os.listdir(tmp_path / "elsewhere") == []


def test_an_empty_folder_may_become_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    with writer(tmp_path / "run") as record:
        record.write(0, "p", "l", {"s": 1.0})
    assert len(read_run(tmp_path / "run")) == 1
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(RecordError, match="working directory"):
        writer(Path())


def test_a_creation_that_was_killed_is_made_again(tmp_path: Path) -> None:
    left = tmp_path / ".run.whybn-new"
    (left / "records").mkdir(parents=True)
    (left / "config.json").write_text("{")
    (left / ".status.json.tmp").write_text("{")
    with writer(tmp_path / "run") as record:
        record.write(0, "p", "l", {"s": 1.0})
    assert len(promised(tmp_path / "run")) == 2
    assert os.listdir(tmp_path) == ["run"]


def snapshot(folder: Path) -> dict[str, bytes | None]:
    return {str(file.relative_to(folder)): None if file.is_dir() else file.read_bytes() for file in folder.rglob("*")}


def refusals() -> Iterator[Any]:
    def case(name: str, prepare: Callable[[Path], Any], message: str, **options: Any) -> Any:
        return pytest.param(prepare, options, message, id=name)

    def recorded(path: Path) -> None:
        play(path, [(step, "p", "l", {"s": [1.0]}, None, "-") for step in range(45)], 45)
        (path / "checkpoint.pt").write_bytes(b"tensors")

    def altered(**status: Any) -> Callable[[Path], None]:
        def prepare(path: Path) -> None:
            recorded(path)
            fields = json.loads((path / "status.json").read_text()) | status
            (path / "status.json").write_text(json.dumps(fields))

        return prepare

    def without(*parts: int) -> Callable[[Path], None]:
        def prepare(path: Path) -> None:
            recorded(path)
            for number in parts:
                (path / "records" / f"part-{number:05d}.parquet").unlink()

        return prepare

    def damaged(path: Path) -> None:
        recorded(path)
        (path / "environment.json").write_text("[")

    def stranger(path: Path) -> None:
        path.mkdir()
        (path / "thesis.tex").write_text("all of it")

    def model(path: Path) -> None:  # what other libraries leave beside a model
        path.mkdir()
        (path / "config.json").write_text("{}")
        (path / "status.json").write_text('{"status": "fine"}')

    def nothing(path: Path) -> None:
        pass

    def in_the_way(path: Path) -> None:
        (path.parent / f".{path.name}.whybn-new").mkdir()
        (path.parent / f".{path.name}.whybn-new" / "thesis.tex").write_text("all of it")

    other = {"lr": 0.1, "network": {"normalizer": "none", "widths": [100]}, "seed": 3}
    yield case("exists", recorded, r"holds a record already \(running, 45 steps\)")
    yield case("both ways", recorded, "start=20 resumes .* choose one", start=20, overwrite=True)
    yield case("stranger", stranger, "neither empty nor the folder of a run")
    yield case("stranger kept", stranger, "neither empty nor the folder of a run", overwrite=True)
    yield case("stranger resumed", stranger, "neither empty nor the folder of a run", start=3)
    yield case("like a run", model, "neither empty nor the folder of a run", overwrite=True)
    yield case("a file", lambda path: path.write_text("text"), "is not a folder", overwrite=True)
    yield case("below a file", lambda path: path.parent.rmdir() or path.parent.write_text(""), "cannot write a record")
    yield case("nothing to resume", nothing, "no record at .* to resume", start=3)
    yield case("staging taken", in_the_way, "holds thesis.tex")
    yield case("start", nothing, "start is a whole number of at least 0, not -1", start=-1)
    yield case("start is bool", nothing, "start is a whole number", start=True)
    yield case("part_every", nothing, "part_every is a whole number of at least 1, not 0", part_every=0)
    yield case("config", nothing, "config.lr is nan", config={"lr": math.nan})
    yield case("no config", nothing, "config and environment are mappings", config=None)
    yield case("environment", nothing, "environment.device is of type object", environment={"device": object()})
    message = r'another configuration: network.normalizer is "batch" there and "none" here'
    yield case("configuration", recorded, message, start=20, config=other)
    more = CONFIG | {"decay": 0.0}
    yield case("new key", recorded, "decay is absent there and 0.0 here", start=20, config=more)
    yield case("type", recorded, "seed is 3 there and 3.0 here", start=20, config=CONFIG | {"seed": 3.0})
    yield case("parts", recorded, "recorded with part_every=10, not 5", start=20, part_every=5)
    yield case("format", altered(format=2), "has format 2; this version of whybn knows 1", start=20)
    yield case("format kept", altered(format=2), "has format 2; this version of whybn knows 1", overwrite=True)
    yield case("status", altered(colour="red"), "damaged: .*colour", start=20)
    yield case("environment damaged", damaged, "environment.json cannot be read", start=20)
    yield case("missing", without(1, 2), "part-00001.parquet, part-00002.parquet not there", start=30)
    yield case("missing middle", without(2), "step 25: part-00002.parquet not there", start=25)
    yield case("too late", recorded, "cannot be resumed at step 46: it holds 45 steps", start=46)


@pytest.mark.parametrize(("prepare", "options", "message"), list(refusals()))
def test_a_refused_writer_changes_nothing(
    tmp_path: Path, prepare: Callable[[Path], Any], options: dict[str, Any], message: str
) -> None:
    folder = tmp_path / "runs" / "run"
    folder.parent.mkdir()
    prepare(folder)
    before = snapshot(tmp_path)
    with pytest.raises(RecordError, match=message):
        writer(folder, **options)
    assert snapshot(tmp_path) == before


def test_a_failed_creation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diagnostics.record._save_status", full)
    with pytest.raises(RecordError, match=r"cannot write a record at .*: No space left on device"):
        writer(tmp_path / "run")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []
    writer(tmp_path / "run").close("complete")  # the lock was let go of


def test_overwriting_removes_the_record_and_nothing_else(tmp_path: Path) -> None:
    scenario.train(tmp_path / "run")
    (tmp_path / "run" / "records" / ".part-00009.parquet.tmp").write_text("begun")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "records" / "part-7.parquet").write_text("mine too")
    with writer(tmp_path / "run", overwrite=True, config={"lr": 1}, part_every=4):
        assert read_config(tmp_path / "run") == {"lr": 1}
        assert read_run(tmp_path / "run").empty
        assert read_status(tmp_path / "run") == Status("running", 0, 4, {}, None)
    assert sorted(file for file in snapshot(tmp_path / "run")) == sorted(
        ["config.json", "environment.json", "lock", "notes.txt", "records", "records/part-7.parquet", "status.json"]
    )


def test_reading_needs_a_record_of_this_format(tmp_path: Path) -> None:
    for read in (read_run, read_status, read_config, require_finished):
        with pytest.raises(RecordError, match="no such folder"):
            read(tmp_path / "nowhere")
        with pytest.raises(RecordError, match=r"has no config.json and status.json"):
            read(tmp_path)
    writer(tmp_path / "run").close("complete")
    (tmp_path / "run" / "config.json").write_text("[]")
    with pytest.raises(RecordError, match="damaged"):
        read_config(tmp_path / "run")
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    (tmp_path / "run" / "status.json").write_text(json.dumps(status | {"format": 99}))
    for read in (read_run, read_status, read_config, require_finished):
        with pytest.raises(RecordError, match="format 99"):
            read(tmp_path / "run")


# ---------------------------------------------------------------- one writer, killed at any moment


class Server:
    """Does what `record_scenario.do` can, in a fresh child each time."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.diagnostics.record_scenario"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[int, float]:
        """The child's exit code (-9: killed) and for how many seconds it was waited for."""
        assert self.process.stdout is not None
        code, seconds = json.loads(self.process.stdout.readline())
        return code, seconds

    def do(self, **command: Any) -> tuple[int, float]:
        self.send(**command)
        return self.answer()

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def plain(arguments: dict[str, Any], folder: Path) -> dict[str, bytes]:
    scenario.train(folder, **arguments)
    return promised(folder)


def readable(folder: Path, rows: list[dict[str, Any]]) -> None:
    """After a kill: no folder yet, or one that reads as a beginning of the run, in whole parts."""
    if folder.exists():
        table = read_run(folder)
        steps = read_status(folder).steps
        assert table.attrs["status"] in ("running", "complete")
        if table.attrs["status"] == "running":
            assert steps <= (table["step"].max() + 1 if len(table) else 0)
        same(table, frame_of(rows[: len(table)]))


def test_killed_before_any_change_of_the_disk_it_resumes_to_the_same_bytes(tmp_path: Path, server: Server) -> None:
    whole = plain({}, tmp_path / "whole")
    rows = scenario_rows(scenario.END)
    event, code = 0, -9
    while code:
        folder = tmp_path / f"killed{event}" / "run"
        folder.parent.mkdir()
        code, _ = server.do(do="train", folder=str(folder), event=event)
        assert code in (0, -9)
        readable(folder, rows)
        assert plain({}, folder) == whole, event
        assert os.listdir(folder.parent) == ["run"]
        event += 1
    assert event > 25  # the hook saw what it should


def test_killed_while_it_goes_back_into_a_part_it_resumes_to_the_same_bytes(tmp_path: Path, server: Server) -> None:
    whole = plain({}, tmp_path / "whole")
    rows = scenario_rows(scenario.END)
    scenario.train(tmp_path / "before", end=19, status="running")
    (tmp_path / "before" / "checkpoint.pt").unlink()
    event, code = 0, -9
    while code:
        folder = tmp_path / f"killed{event}" / "run"
        shutil.copytree(tmp_path / "before", folder)
        code, _ = server.do(do="train", folder=str(folder), event=event, arguments={"start": 10})
        assert code in (0, -9)
        readable(folder, rows)
        finished = plain({"start": 10}, folder)
        assert finished == whole, event
        event += 1
    assert event > 18


def test_killed_while_it_overwrites_it_stays_a_record(tmp_path: Path, server: Server) -> None:
    config = {"lr": 1}
    whole = plain({"config": config, "end": 3}, tmp_path / "whole")
    scenario.train(tmp_path / "before")
    (tmp_path / "before" / "checkpoint.pt").unlink()
    event, code = 0, -9
    while code:
        folder = tmp_path / f"killed{event}" / "run"
        shutil.copytree(tmp_path / "before", folder)
        code, _ = server.do(do="train", folder=str(folder), event=event, arguments={"config": config, "end": 3})
        assert code in (0, -9)
        table = read_run(folder)
        old = scenario_rows(scenario.END) if table.attrs["config"] == CONFIG else scenario_rows(3)
        same(table, frame_of(old[: len(table)]))
        assert plain({"config": config, "end": 3}, folder) == whole, event
        event += 1
    assert event > 14


def test_killed_at_any_time_again_and_again(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike the kills above these may fall inside pyarrow, and between the two threads."""
    monkeypatch.setattr(_parts, "ROWS", 256)
    arguments = {"end": 600, "part_every": 40}
    whole = plain(arguments, tmp_path / "whole")
    code, seconds = server.do(do="train", folder=str(tmp_path / "timed"), rows=256, arguments=arguments)
    assert code == 0
    rng = np.random.default_rng(0)
    rows = scenario_rows(600)
    kills = 0
    for number in range(8):  # two kills a folder
        folder = tmp_path / f"killed{number // 2}"
        delay = float(rng.uniform(0.02, 0.35) * seconds)
        code, _ = server.do(do="train", folder=str(folder), rows=256, arguments=arguments, seconds=delay)
        kills += code == -9
        readable(folder, rows)
    for folder in tmp_path.glob("killed*"):
        assert plain(arguments, folder) == whole
    assert kills > 0


def test_a_second_writer_is_refused_until_the_first_is_gone(tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "run"
    first = writer(folder)
    first.advance(12)
    for options in ({}, {"overwrite": True}, {"start": 3}):
        before = snapshot(tmp_path)
        with pytest.raises(RecordError, match="is being written, by another process or by a writer here"):
            writer(folder, **options)
        assert snapshot(tmp_path) == before
    first.close("running")
    writer(folder, start=12).close("complete")

    other = tmp_path / "other"
    server.send(do="hold", folder=str(other), seconds=1.0)
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with pytest.raises(RecordError, match="is being written"):
        writer(other, overwrite=True)
    assert server.answer()[0] == -9
    writer(other, overwrite=True).close("complete")


def test_a_lock_is_let_go_of_even_if_a_forked_process_lives_on(tmp_path: Path) -> None:
    record = writer(tmp_path / "run")
    copy = os.dup(record._lock)  # what a data loader's worker inherits
    record.close("running")
    writer(tmp_path / "run", overwrite=True).close("complete")
    os.close(copy)


def test_a_full_disk_fails_the_run_and_can_be_resumed(tmp_path: Path, server: Server) -> None:
    code, _ = server.do(do="fill the disk", folder=str(tmp_path / "run"))
    assert code == 0
    status = read_status(tmp_path / "run")
    assert status.status == "failed"
    assert "cannot write" in str(status.error)


# ---------------------------------------------------------------- cost


def test_memory_is_bounded_whatever_the_length_of_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # row groups as in earnest
    rng = np.random.default_rng(0)
    values = {name: rng.normal(size=100) for name in "abcdefghi"}
    with writer(tmp_path / "run", part_every=10**6) as record:
        tracemalloc.start()
        base, arrow = tracemalloc.get_traced_memory()[0], 0
        for step in range(300):
            for layer in ("h1", "h2", "h3"):
                record.write(step, "p", layer, values)
            record.write(step, "p", "h4", values, units=rng.choice(10**6, 100, replace=False))
            record.advance(step + 1)
            arrow = max(arrow, pa.total_allocated_bytes())
        peak = tracemalloc.get_traced_memory()[1] - base
        tracemalloc.stop()
        streamed = (tmp_path / "run" / "records" / ".part-00000.parquet.tmp").stat().st_size
        assert record._parts is not None
        assert record._parts.buffered_bytes < 24 * 2**20
    assert streamed > 100_000
    assert peak < 24 * 2**20
    assert arrow < 24 * 2**20
    assert len(read_run(tmp_path / "run", columns=["value"])) == 300 * 3600


def test_shapes_that_never_come_back_are_let_go_of(tmp_path: Path) -> None:
    with writer(tmp_path / "run") as record:
        assert record._parts is not None
        buffers = record._parts.buffered_bytes
        assert buffers == 2 * 16 * (8 + 5 * 4 + 8)
        for number in range(100):
            record.write(0, "p", "l", {"s": np.ones(10)}, units=np.arange(10) + 10 * number)
            assert record._parts.buffered_bytes <= buffers + 4 * 16 * 5 * 4
    assert len(read_run(tmp_path / "run")) == 1000


def test_importing_the_module_loads_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'pandas', 'pyarrow', 'scipy', 'matplotlib'}"
    code = (
        f"import sys, diagnostics.record; loaded = {heavy} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_writing_loads_neither_torch_nor_pandas(tmp_path: Path) -> None:
    code = (
        "import sys; from diagnostics.record import RunWriter\n"
        f"with RunWriter({str(tmp_path / 'run')!r}, config={{}}, environment={{}}) as record:\n"
        "    record.write(0, 'p', 'l', {'s': [1.0]})\n"
        "loaded = {'torch', 'pandas'} & set(sys.modules); sys.exit(str(loaded) if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# ---------------------------------------------------------------- the run id


def test_the_run_id_is_pinned() -> None:
    # sha256 of '{"a":[1,2.5,null,true],"b":{"c":"x"}}', by coreutils
    assert run_id({"b": {"c": "x"}, "a": [1, 2.5, None, True]}) == "de7e5bdcd3"
    assert run_id({"a": (1, np.float64(2.5), None, True), "b": {"c": "x"}}) == "de7e5bdcd3"


def test_the_run_id_hears_every_value_and_every_type() -> None:
    configs: list[dict[str, Any]] = [
        {}, {"a": 1}, {"a": 1.0}, {"a": True}, {"a": "1"}, {"a": None}, {"a": [1]}, {"a": {"b": 1}}, {"b": 1},
        {"a": 1 + 2**-52}, {"a": 1, "b": None}, {"a": []}, {"a": {}},
    ]  # fmt: skip
    assert len({run_id(config) for config in configs}) == len(configs)


def test_the_id_of_a_record_is_that_of_its_configuration(tmp_path: Path) -> None:
    config = {"z": 0.1 + 0.2, "text": "β\n\ud800", "nested": {"b": (1, 2), "a": 1e-300}}
    writer(tmp_path / "run", config=config).close("complete")
    assert run_id(read_config(tmp_path / "run")) == run_id(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"lr": math.nan}}, "config.optimizer.lr is nan"),
        ({"widths": [1, math.inf]}, r"config.widths\[1\] is inf"),
        ({"layers": {3: "x"}}, "config.layers has the key 3"),
        ({"path": Path()}, "config.path is of type PosixPath"),
        ({"n": np.int64(3)}, "config.n is of type int64"),
        ({"s": {1, 2}}, "config.s is of type set"),
    ],
)
def test_the_run_id_refuses_what_json_cannot_say(config: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        run_id(config)
