"""The rows of a record: buffered in columns, encoded into part files (private to `diagnostics.record`).

A *row* is a cell (step, probe, layer, unit, statistic, mode) and its value. A *block* is what one `write` brings: S
statistics over U units, S x U rows, statistic by statistic. A *part* is a file holding all rows of ``part_every``
steps, cut into *row groups* of exactly ``ROWS`` rows, the last one shorter.

The identity the tests lean on: the bytes of a part are a function of its rows in order. Neither the blocks the rows
came in nor the sessions that wrote them show: row groups are cut by counting rows from the start of the part, and
names are numbered by their first appearance in it. That is what makes a resumed run equal an uninterrupted one.

Rows may come at millions a second, so nothing here loops over rows, the key columns of a block met again are kept
ready, and a full row group is encoded (pyarrow, without the interpreter's lock) on one other thread while the next one
fills. There are two buffers and no queue: whoever fills the second before the first is encoded waits, which bounds
the memory to about ``2 * ROWS * 36`` bytes whatever the length of a part.
"""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from diagnostics.record import COLUMNS, RecordError, part_name, sync_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

ROWS = 131_072
KEYS = ("probe", "layer", "statistic", "mode", "unit")  # the order of the code rows in a buffer; all but unit are names
NAMES = KEYS[:-1]


def schema() -> Any:
    """The one pyarrow schema of all parts; no column holds nulls (a missing number is NaN)."""
    name = pa.dictionary(pa.int32(), pa.string())
    types = {"step": pa.int64(), "unit": pa.int32(), "value": pa.float64()} | dict.fromkeys(NAMES, name)
    return pa.schema([pa.field(column, types[column], nullable=False) for column in COLUMNS])


class _Block:
    """The keys of one shape of block: which units each statistic has, and from the first write on its code columns."""

    def __init__(self, probe: str, layer: str, mode: str, units: Mapping[str, NDArray[np.int32]]) -> None:
        self.place = (probe, layer, mode)
        self.units = units
        self.rows = sum(len(units_of) for units_of in units.values())
        self.codes: NDArray[np.int32] | None = None  # (5, rows), in the order of KEYS


class _Buffer:
    """Room for ``rows`` rows, in columns."""

    def __init__(self, rows: int) -> None:
        self.step = np.empty(rows, np.int64)
        self.codes = np.empty((len(KEYS), rows), np.int32)
        self.value = np.empty(rows, np.float64)

    @property
    def nbytes(self) -> int:
        return self.step.nbytes + self.codes.nbytes + self.value.nbytes


class Parts:
    """Writes part after part into ``folder``, beginning with number ``number``.

    Rows go to a hidden temporary file until `finish` renames it. After an error or an interrupt in the middle of any
    call, ``torn`` is true: the part begun cannot be trusted and only `discard` is allowed.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self.torn = False
        self._folder = folder
        self._rows = ROWS
        self._buffer, self._spare = _Buffer(ROWS), _Buffer(ROWS)
        self._pool: ThreadPoolExecutor | None = None
        self._encoding: Future[None] | None = None
        self._schema = schema()
        self._sink: Any = None
        self._writer: Any = None
        self._begin()

    @property
    def empty(self) -> bool:
        """Whether the part begun has no row yet."""
        return self._fill == 0 and self._writer is None

    @property
    def buffered_bytes(self) -> int:
        """Bytes held in buffers, the kept key columns of blocks included."""
        kept = sum(block.codes.nbytes for block in self._blocks.values() if block.codes is not None)
        return self._buffer.nbytes + self._spare.nbytes + kept

    def _begin(self) -> None:
        self._fill = 0
        self._names: dict[str, dict[str, int]] = {column: {} for column in NAMES}
        self._blocks: dict[Any, _Block] = {}
        self._kept_rows = 0
        self._written: dict[tuple[str, str, str], list[_Block]] = {}

    def next_step(self) -> None:
        """Forget which cells were written: those of another step cannot collide with them."""
        self._written.clear()

    def append(
        self,
        step: int,
        probe: str,
        layer: str,
        mode: str,
        values: Mapping[str, ArrayLike],
        units: ArrayLike | None,
    ) -> None:
        """Add one block, or on a `RecordError` none of it.

        Raises:
            RecordError: If a name, a shape or a type is wrong, if a cell of this step was written before, or if the
                disk failed (then ``torn`` is true).
        """
        self._refuse_torn()
        arrays = [np.asarray(value) for value in values.values()]
        shapes = tuple([array.shape for array in arrays])
        unit_key = None
        if units is not None:
            units = np.asarray(units) if np.size(units) else np.zeros(0, np.int32)
            unit_key = (units.dtype.str, units.shape, units.tobytes())
        key = (probe, layer, mode, tuple(values), shapes, unit_key)
        try:
            block = self._blocks.get(key)
        except TypeError:  # an unhashable name; _describe says which
            block = None
        if block is None:
            block = _describe(probe, layer, mode, tuple(values), shapes, units)
        before = self._written.get(block.place)
        if before is not None:
            _refuse_overlap(step, block, before)
        if () in shapes:
            arrays = [array.reshape(-1) for array in arrays]

        rows, fill = block.rows, self._fill
        if rows == 0:
            return
        try:
            if fill + rows <= self._rows:
                value = None
                np.concatenate(arrays, out=self._buffer.value[fill : fill + rows])
            else:
                value = np.concatenate(arrays, dtype=np.float64)
        except TypeError:
            for name, array in zip(values, arrays, strict=True):
                if not np.can_cast(array.dtype, np.float64, "same_kind"):
                    raise RecordError(f"{_cell(probe, layer, name)}: {array.dtype} is not a real number") from None
            raise

        # From here on the block counts; whatever stops us before the end leaves the part torn.
        self.torn = True
        if block.codes is None:
            self._keep(key, block)
        assert block.codes is not None
        if value is None:
            self._buffer.step[fill : fill + rows] = step
            self._buffer.codes[:, fill : fill + rows] = block.codes
            self._fill = fill + rows
        else:
            self._spill(np.full(rows, step, np.int64), block.codes, value)
        if before is None:
            self._written[block.place] = [block]
        else:
            before.append(block)
        self.torn = False

    def replay(self, file: Path, stop: int) -> None:
        """Add again the rows of ``file`` whose step is less than ``stop``, as if they had just been written."""
        self._refuse_torn()
        self.torn = True
        try:
            with pq.ParquetFile(file) as part:
                for batch in part.iter_batches(batch_size=self._rows):
                    if not self._replay(batch, stop):
                        break
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"{file} cannot be read: {error}") from error
        self.torn = False

    def _replay(self, batch: Any, stop: int) -> bool:
        """Add the rows of a batch before ``stop``; whether that is all of them."""
        step = batch.column("step").to_numpy()
        keep = int(np.searchsorted(step, stop))
        codes = np.empty((len(KEYS), keep), np.int32)
        for row, column in enumerate(NAMES):
            coded = batch.column(column)
            indices, names = coded.indices.to_numpy()[:keep], coded.dictionary.to_pylist()
            used, first = np.unique(indices, return_index=True)
            to_code = np.zeros(len(names), np.int32)
            for index in used[np.argsort(first)]:  # numbered by first appearance, as `append` does
                to_code[index] = self._code(column, names[index])
            codes[row] = to_code[indices]
        codes[KEYS.index("unit")] = batch.column("unit").to_numpy()[:keep]
        self._spill(step[:keep], codes, batch.column("value").to_numpy()[:keep])
        return keep == len(step)

    def finish(self) -> None:
        """Encode what is left, make the part durable under its name, and begin the next one.

        Raises:
            RecordError: If the disk failed.
        """
        self._refuse_torn()
        self.torn = True
        self._wait()
        final = self._folder / part_name(self.number)
        temporary = self._temporary()
        try:
            if self._fill or self._writer is None:
                self._encode(self._table())
            self._writer.close()
            self._sink.close()
            descriptor = os.open(temporary, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.replace(final)
            sync_folder(self._folder)
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"cannot write {final}: {error}") from error
        self._writer = self._sink = None
        self.number += 1
        self._begin()
        self.torn = False

    def discard(self) -> None:
        """Drop the part begun and stop the other thread; nothing is raised, nothing can be added afterwards."""
        self.torn = True
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool = self._encoding = None
        if self._writer is not None:
            self._writer.is_open = False  # or it writes a footer when it is collected
        if self._sink is not None:
            with suppress(OSError):
                self._sink.close()
        self._writer = self._sink = None
        self._temporary().unlink(missing_ok=True)

    def _refuse_torn(self) -> None:
        if self.torn:
            raise RecordError("the part begun was lost to an earlier error or interrupt: nothing can be added to it")

    def _temporary(self) -> Path:
        # The leading dot hides it from tools that read the whole folder.
        return self._folder / f".{part_name(self.number)}.tmp"

    def _code(self, column: str, name: str) -> int:
        codes = self._names[column]
        return codes.setdefault(name, len(codes))

    def _keep(self, key: Any, block: _Block) -> None:
        """Lay out the key columns of a block, and keep it for the next time."""
        codes = np.empty((len(KEYS), block.rows), np.int32)
        for column, name in zip(("probe", "layer", "mode"), block.place, strict=True):
            codes[KEYS.index(column)] = self._code(column, name)
        at = 0
        for statistic, units in block.units.items():
            if len(units):  # a statistic without rows must not take a number
                codes[KEYS.index("statistic"), at : at + len(units)] = self._code("statistic", statistic)
                codes[KEYS.index("unit"), at : at + len(units)] = units
                at += len(units)
        block.codes = codes
        if self._kept_rows + block.rows > 4 * self._rows or len(self._blocks) >= 4096:
            self._blocks.clear()
            self._kept_rows = 0
        if block.rows <= self._rows:
            self._blocks[key] = block
            self._kept_rows += block.rows

    def _spill(self, step: NDArray[np.int64], codes: NDArray[np.int32], value: NDArray[np.float64]) -> None:
        """Copy rows into the buffer, handing it over each time it is full and more is to come."""
        at, rows = 0, len(value)
        while at < rows:
            if self._fill == self._rows:
                self._hand_over()
            fill, count = self._fill, min(rows - at, self._rows - self._fill)
            self._buffer.step[fill : fill + count] = step[at : at + count]
            self._buffer.codes[:, fill : fill + count] = codes[:, at : at + count]
            self._buffer.value[fill : fill + count] = value[at : at + count]
            self._fill += count
            at += count

    def _hand_over(self) -> None:
        """Give the full buffer to the other thread, once that has finished with the one before."""
        self._wait()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="whybn-record")
        self._encoding = self._pool.submit(self._encode, self._table())
        self._buffer, self._spare = self._spare, self._buffer
        self._fill = 0

    def _wait(self) -> None:
        """Wait for the row group being encoded; its error is ours."""
        if self._encoding is None:
            return
        try:
            self._encoding.result()
        except (OSError, pa.ArrowException) as error:
            raise RecordError(f"cannot write {self._folder / part_name(self.number)}: {error}") from error
        self._encoding = None

    def _table(self) -> Any:
        """The filled rows of the buffer as a pyarrow table that shares its memory."""
        rows, buffer = self._fill, self._buffer

        def column(kind: Any, array: NDArray[Any]) -> Any:
            return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(array[:rows])])

        columns = {
            "step": column(pa.int64(), buffer.step),
            "unit": column(pa.int32(), buffer.codes[KEYS.index("unit")]),
            "value": column(pa.float64(), buffer.value),
        }
        for row, name in enumerate(NAMES):
            codes = buffer.codes[row]
            # Only names met up to this row group, or the bytes would depend on the block that overflowed it.
            met = list(self._names[name])[: int(codes[:rows].max(initial=-1)) + 1]
            columns[name] = pa.DictionaryArray.from_arrays(column(pa.int32(), codes), _strings(met), safe=False)
        return pa.Table.from_arrays([columns[name] for name in COLUMNS], schema=self._schema)

    def _encode(self, table: Any) -> None:
        if self._writer is None:
            self._sink = pa.OSFile(str(self._temporary()), "wb")
            # Names are run lengths of small codes already; runs of steps and cycles of units fall to LZ4 for less time
            # than a dictionary costs. Splitting the bytes of doubles puts the zeros of upcast float32 side by side.
            # Only steps are sorted, so only their minima and maxima let a reader skip a row group.
            self._writer = pq.ParquetWriter(
                self._sink,
                self._schema,
                compression="lz4",
                use_dictionary=list(NAMES),
                column_encoding={"value": "BYTE_STREAM_SPLIT"},
                write_statistics=["step"],
            )
        self._writer.write_table(table, row_group_size=self._rows)


def _strings(names: Sequence[str]) -> Any:
    """A pyarrow array of strings; ``pa.array`` would import pandas, a third of a second in the training process."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(names), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))])


def _cell(probe: str, layer: str, statistic: str) -> str:
    return f"probe {probe!r}, layer {layer!r}, statistic {statistic!r}"


def _describe(
    probe: str,
    layer: str,
    mode: str,
    statistics: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    units: NDArray[Any] | None,
) -> _Block:
    """Check the names, shapes and units of a block and lay out which unit each row has."""
    names = [
        ("probe", probe),
        ("layer", layer),
        ("mode", mode),
        *(("statistic", statistic) for statistic in statistics),
    ]
    for what, name in names:
        if not isinstance(name, str) or not name:
            raise RecordError(f"a {what} is named by a string that is not empty, not by {name!r}")
        if not name.isprintable():  # also what utf-8 cannot say
            raise RecordError(f"the {what} {name!r} has characters that cannot be printed")
    if units is not None:
        if units.ndim != 1 or units.dtype.kind not in "iu":
            raise RecordError(f"units are whole numbers in one dimension, not {units.dtype} of shape {units.shape}")
        if len(units) and not (units.min() >= -1 and units.max() < 2**31):
            raise RecordError(f"units run from -1 to {2**31 - 1}, not from {units.min()} to {units.max()}")
        distinct, counts = np.unique(units, return_counts=True)
        if len(distinct) < len(units):
            raise RecordError(f"unit {distinct[counts > 1][0]} is named twice")
    whole = np.full(1, -1, np.int32)
    given = None if units is None else units.astype(np.int32)
    of: dict[str, NDArray[np.int32]] = {}
    for statistic, shape in zip(statistics, shapes, strict=True):
        if given is not None:
            if shape != given.shape:
                message = f"{len(given)} units need values of shape ({len(given)},), not {shape}"
                raise RecordError(f"{_cell(probe, layer, statistic)}: {message}")
            of[statistic] = given
        elif shape == ():
            of[statistic] = whole
        elif len(shape) == 1:
            given_by = next((name for name, one in of.items() if one is not whole), statistic)
            units_of = of.get(given_by, np.arange(shape[0], dtype=np.int32))
            if len(units_of) != shape[0]:
                message = f"{shape[0]} values, but {given_by!r} of the same layer has {len(units_of)}"
                raise RecordError(f"{_cell(probe, layer, statistic)}: {message}")
            of[statistic] = units_of
        else:
            raise RecordError(f"{_cell(probe, layer, statistic)}: a scalar or one value a unit, not shape {shape}")
    return _Block(probe, layer, mode, of)


def _refuse_overlap(step: int, block: _Block, before: Sequence[_Block]) -> None:
    for other in before:
        for statistic in (name for name in block.units if name in other.units):
            twice = np.intersect1d(block.units[statistic], other.units[statistic])
            if len(twice):
                probe, layer, mode = block.place
                cell = f"step {step}, {_cell(probe, layer, statistic)}, unit {twice[0]}, mode {mode!r}"
                raise RecordError(f"written twice: {cell}")
