"""The record: what a run measured, as a folder that any tool can read.

::

    <run>/config.json              every field of the configuration; its hash is the run's id
    <run>/environment.json         where it ran, one entry a session
    <run>/records/part-*.parquet   rows of (step, probe, layer, unit, statistic, mode, value)
    <run>/status.json              running | complete | diverged | failed, format version, steps done, counts, error
    <run>/checkpoint.pt            the recorder's, only removed here when a record is overwritten
    <run>/lock                     held (flock) by the one writer; a killed writer lets go of it

Part i holds steps [i * part_every, (i + 1) * part_every), whatever was measured in them. The identity the tests lean
on: ``records/`` and ``config.json`` are functions of what was written and of the configuration. A run that was killed
and resumed, however often, leaves the same bytes there as one that was not. Files appear whole or not at all
(temporary file, fsync, rename), and a folder appears with all its files, so a kill at any moment leaves a record that
`read_run` reads and that a writer resumes.

Importing this module loads neither torch nor numpy, pandas or pyarrow: the command line reads a status with it.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import json
import math
import operator
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, TypeAlias

if TYPE_CHECKING:
    from types import TracebackType

    import pandas as pd
    from numpy.typing import ArrayLike

    from diagnostics._parts import Parts

FORMAT = 1
__all__ = [
    "RecordError",
    "RunWriter",
    "State",
    "Status",
    "read_config",
    "read_run",
    "read_status",
    "require_finished",
    "run_id",
]

State: TypeAlias = Literal["running", "complete", "diverged", "failed"]
_STATES = ("running", "complete", "diverged", "failed")
_FINISHED = ("complete", "diverged")
COLUMNS = ("step", "probe", "layer", "unit", "statistic", "mode", "value")
_FILES = ("config.json", "environment.json", "records", "status.json", "lock")  # in a run that has just begun
_PART = re.compile(r"part-(\d{5,})\.parquet")


class RecordError(ValueError):
    """A record cannot be written, read or resumed as asked; the message says what was given and what is allowed."""


@dataclass(frozen=True)
class Status:
    """Where a run stands.

    ``running`` is also what an interrupted run says: it can be resumed. While a run goes on, each part renews this.
    """

    status: State
    steps: int  # updates done, as far as the parts on disk know
    part_every: int  # steps in a part
    counts: dict[str, int]  # events worth knowing, by name; what they are is the recorder's business
    error: str | None  # why the run failed
    parts: int = 0  # files in records/ that hold those steps
    format: int = FORMAT


def run_id(config: Mapping[str, Any]) -> str:
    """The run's address: the first 10 hex digits of the SHA-256 of ``config`` as JSON with sorted keys.

    The order of keys does not matter, at any depth. Types do: 1, 1.0 and true give three ids, because they are three
    JSON texts. A tuple is a list.

    Raises:
        RecordError: If ``config`` holds what JSON cannot say: NaN, an infinity, a key that is not a string, an object.
    """
    return hashlib.sha256(_compact(_plain(config, "config")).encode()).hexdigest()[:10]


def read_status(path: str | os.PathLike[str]) -> Status:
    """The status of the record at ``path``.

    Raises:
        RecordError: If there is no record, one of another format, or one that has lost parts.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise RecordError(f"no record at {folder}: {'it is a file' if folder.exists() else 'there is no such folder'}")
    status = _load_status(folder)
    if status is None:
        raise RecordError(f"no record at {folder}: it has no config.json and status.json of a run")
    missing = set(range(status.parts)) - {number for number, _ in _parts(folder)}
    if missing and status.status in _FINISHED:  # one that is being resumed loses parts for a moment
        raise RecordError(
            f"the record at {folder} is damaged: records/{part_name(min(missing))} is missing"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; remove the folder to compute it again"
        )
    return status


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of the record at ``path``.

    Raises:
        RecordError: If there is no record, or one of another format.
    """
    read_status(path)
    config = _load(Path(path) / "config.json")
    if not isinstance(config, dict):
        raise RecordError(f"{Path(path) / 'config.json'} is damaged: it is not a JSON object")
    return config


def require_finished(path: str | os.PathLike[str]) -> None:
    """Refuse a record that figures and verdicts must not be drawn from.

    Raises:
        RecordError: Unless the status is complete or diverged.
    """
    status = read_status(path)
    if status.status == "failed":
        raise RecordError(
            f"the record at {path} failed after {status.steps} steps: {status.error or 'no reason given'}"
        )
    if status.status not in _FINISHED:
        steps = f"{status.status}, {status.steps} steps so far"
        raise RecordError(f"the record at {path} is not finished ({steps}): it is being written, or can be resumed")


def read_run(
    path: str | os.PathLike[str],
    *,
    probe: str | Sequence[str] | None = None,
    layer: str | Sequence[str] | None = None,
    statistic: str | Sequence[str] | None = None,
    unit: int | Iterable[int] | None = None,
    mode: str | Sequence[str] | None = None,
    steps: tuple[int | None, int | None] | None = None,
    columns: Sequence[str] | None = None,
) -> pd.DataFrame:
    """The record at ``path`` as a table, whatever its status, in the order in which it was written.

    A row is a cell: ``step`` (int64), ``probe``, ``layer``, ``unit`` (int32; -1 is the whole layer), ``statistic``,
    ``mode`` and its ``value`` (float64, non-finite values included). The four names are categoricals, their categories
    those that occur, by first appearance. ``.attrs["status"]`` is the status, as a string; ``.attrs["config"]`` the
    configuration. Of a run that goes on this holds the parts done so far.

    Args:
        path: The run's folder.
        probe: Only this probe or these; likewise ``layer``, ``statistic``, ``unit`` and ``mode``. The filters work on
            the files, so that what they leave out costs no memory.
        layer: See ``probe``.
        statistic: See ``probe``.
        unit: See ``probe``.
        mode: See ``probe``.
        steps: ``(first, stop)``, only steps with first <= step < stop; None leaves an end open.
        columns: Only these columns, in this order.

    Raises:
        RecordError: If there is no record or one of another format, if a name occurs nowhere in it, if a column does
            not exist, or if a file is damaged.
    """
    import pandas as pd
    import pyarrow as pa
    import pyarrow.dataset as ds

    from diagnostics._parts import schema

    folder = Path(path)
    status = read_status(folder)  # before the parts: a record must not look complete without its last one
    config = read_config(folder)
    wanted = COLUMNS if columns is None else tuple(columns)
    for column in wanted:
        if column not in COLUMNS or wanted.count(column) > 1:
            raise RecordError(f"columns are chosen among {', '.join(COLUMNS)}, each once, not {list(wanted)}")
    first, stop = _bounds(steps)

    names: dict[str, list[str]] = {}
    keep: list[Any] = []
    for column, given in {"probe": probe, "layer": layer, "statistic": statistic, "mode": mode}.items():
        if given is not None:
            several = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [given]
            if not all(isinstance(name, str) for name in several):
                raise RecordError(f"{column} is a string or a list of strings, not {given!r}")
            if not several:
                raise RecordError(f"{column} names none: give one or several, or leave it out for all")
            names[column] = several
            keep.append(ds.field(column).isin(pa.array(names[column], pa.string())))
    units: list[int] = []
    if unit is not None:
        units = [_whole(one, "unit", -1) for one in (unit if isinstance(unit, Iterable) else [unit])]
        if not units:
            raise RecordError("unit names no unit: give one or several, or leave it out for all")
        keep.append(ds.field("unit").isin(pa.array(units, pa.int64())))
    if first is not None:
        keep.append(ds.field("step") >= first)
    if stop is not None:
        keep.append(ds.field("step") < stop)
    condition = None
    for one in keep:
        condition = one if condition is None else condition & one

    files = []
    for number, file in _parts(folder):
        begins = number * status.part_every
        if (first is None or begins + status.part_every > first) and (stop is None or begins < stop):
            files.append(str(file))
    asked = [*wanted, *(column for column in names if column not in wanted)]
    try:
        if files:
            table = ds.dataset(files, schema=schema(), format="parquet").to_table(columns=asked, filter=condition)
        else:
            table = schema().empty_table().select(asked)
        table = table.unify_dictionaries()
        for column, given_names in names.items():
            found = set(table.column(column).unique().to_pylist())
            _refuse_unknown(folder, column, [name for name in given_names if name not in found])
        if units and not table.num_rows:
            _refuse_unknown_units(folder, units)
        frame: pd.DataFrame = table.select(list(wanted)).to_pandas()
    except (OSError, pa.ArrowException) as error:
        raise RecordError(f"the parts of {folder} cannot be read (damaged, or replaced meanwhile): {error}") from error
    nothing = pd.Index([""])[:0]  # pyarrow gives no categories another type than some
    for column in set(wanted) & {"probe", "layer", "statistic", "mode"}:
        names_there = frame[column].cat.remove_unused_categories()
        frame[column] = names_there if len(frame) else names_there.cat.set_categories(nothing)
    frame.attrs["status"] = status.status
    frame.attrs["config"] = config
    return frame


class RunWriter:
    """Writes the record of one run; a context manager.

    Leaving the block sets the status if `close` has not: complete; failed, with the error, after an exception; running,
    that is interrupted and resumable, after Ctrl-C or another exit that is no `Exception`.

    Args:
        path: The run's folder. Parents are created.
        config: Every field that can change a number; stored as it is. Must be JSON (see `run_id`).
        environment: What is stored of this session beside the numbers; must be JSON too.
        start: The step to go on from. Above 0 this resumes: the configuration must be the stored one, all earlier parts
            must be there, and everything recorded from ``start`` on is deleted.
        part_every: Steps in a part: a killed run loses at most so many.
        overwrite: Whether an existing record at ``path`` may be replaced. Only files that belong to a record are
            removed, and only from a folder that is one.

    Attributes:
        next_part: The number of the part begun, that is the first one a checkpoint taken now would not find on disk.

    Raises:
        RecordError: If a value is out of range; if ``path`` holds a record and neither ``start`` nor ``overwrite`` says
            what to do with it, or holds anything else; if another writer has it; if it cannot be resumed at ``start``;
            if it cannot be written. Nothing is left behind by a refusal.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        config: Mapping[str, Any],
        environment: Mapping[str, Any],
        start: int = 0,
        part_every: int = 1000,
        overwrite: bool = False,
    ) -> None:
        self._folder = Path(os.path.abspath(path))  # the user may change directory
        self._start = _whole(start, "start", 0)
        self._part_every = _whole(part_every, "part_every", 1)
        if overwrite and start:
            raise RecordError(f"start={start} resumes the record and overwrite=True starts it over: choose one")
        if not isinstance(config, Mapping) or not isinstance(environment, Mapping):
            raise RecordError("config and environment are mappings of names to values")
        fields, session = _plain(config, "config"), _plain(environment, "environment")

        self.next_part = self._start // self._part_every
        self._step = self._saved = self._start
        self._parts: Parts | None = None
        try:
            self._lock = self._open(fields, session, overwrite)
        except OSError as error:
            raise RecordError(f"cannot write a record at {self._folder}: {error.strerror or error}") from error
        self._limit = (self.next_part + 1) * self._part_every

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._parts is None:
            return
        if error is None:
            self.close("complete")
        elif isinstance(error, Exception):
            try:
                self.close("failed", error=f"{type(error).__name__}: {error}")
            except RecordError as second:  # the first one is what the user must see
                error.add_note(f"and then: {second}")
        else:
            self.close("running")

    def write(
        self,
        step: int,
        probe: str,
        layer: str,
        values: Mapping[str, ArrayLike],
        *,
        units: ArrayLike | None = None,
        mode: str = "-",
    ) -> None:
        """Record one block: for each statistic in ``values`` its value for U units of ``layer``, at ``step``.

        Values are copied. Arrays of shape (U,) belong to the units 0..U-1, or to ``units`` (U,) where given; a scalar
        belongs to unit -1, the whole layer. What is stored is the float64 of the value.

        Raises:
            RecordError: If ``step`` is less than that of an earlier call, or belongs to a part that has not begun; if
                a shape, a unit or a name is wrong, or a value is no real number; if a cell was written before; if the
                disk failed, now or in an earlier call. On all but the last nothing of the block is recorded.
        """
        if step != self._step or self._parts is None:
            self._go_to(step)
        assert self._parts is not None
        self._parts.append(self._step, probe, layer, mode, values, units)

    def advance(self, step: int) -> bool:
        """Say that ``step`` updates are done, so that all rows of earlier steps are written.

        Returns:
            Whether a part was completed and is on disk, and with it all rows of steps before ``step``; a checkpoint
            taken now may name `next_part`.

        Raises:
            RecordError: If ``step`` is less than in an earlier call, or if the disk failed.
        """
        step = _whole(step, "step", 0)
        if step < self._limit or self._parts is None:
            self._go_to(step)
            return False
        while self._limit <= step:
            self._finish_part()
            self._step = self._saved = self._limit
            self._limit += self._part_every
        self._step = step
        self._put_status("running")
        return True

    def flush(self) -> None:
        """Write all rows so far, so that a checkpoint taken now is of a state that is on disk; only `close` may follow.

        Raises:
            RecordError: If this writer is closed, or the disk failed, now or in an earlier call.
        """
        if self._parts is None:
            raise RecordError(f"the writer of {self._folder} is closed")
        begins = self.next_part * self._part_every
        if self._parts.torn:
            raise RecordError(f"{self._folder} cannot be completed: rows from step {begins} on were lost to an error")
        if self._step > begins or not self._parts.empty:
            self._finish_part()
            self._saved = self._step
            self._put_status("running")  # a checkpoint of this step must find that the record holds it

    def close(self, status: State, *, error: str | None = None, counts: Mapping[str, int] | None = None) -> None:
        """Write what is left and the final status, and let go of the folder.

        Args:
            status: ``complete``, ``diverged``, ``failed``, or ``running`` for one that was interrupted.
            error: Why it failed.
            counts: Numbers of events, by name.

        Raises:
            RecordError: If ``status`` or ``counts`` is wrong; if this writer is closed already; if the disk failed, now
                or in an earlier call that did not stop the caller from saying ``complete`` or ``diverged`` (then the
                folder is let go of, and its status says failed if that much could be written).
        """
        if self._parts is None:
            raise RecordError(f"the writer of {self._folder} is closed")
        if status not in _STATES:
            raise RecordError(f"a status is one of {', '.join(_STATES)}, not {status!r}")
        counted = {name: _whole(count, f"counts[{name!r}]", 0) for name, count in (counts or {}).items()}
        try:
            begins = self.next_part * self._part_every
            if self._parts.torn:  # by an interrupt or an error: what the part had is lost, as it is to a kill
                if status in _FINISHED:
                    raise RecordError(
                        f"{self._folder} is not {status}: rows from step {begins} on were lost to an error"
                    )
            elif self._step > begins or not self._parts.empty:
                self._finish_part()
                self._saved = self._step
            self._put_status(status, error, counted)
        except RecordError as failure:
            with suppress(RecordError):
                self._put_status("failed", str(failure), counted)
            raise
        finally:
            self._parts.discard()
            self._parts = None
            _unlock(self._lock)

    def _go_to(self, step: int) -> None:
        """Begin ``step``, if a row may be written there."""
        if self._parts is None:
            raise RecordError(f"the writer of {self._folder} is closed")
        step = _whole(step, "step", 0)
        if step < self._step:
            raise RecordError(f"steps must not go backwards: {step} after {self._step}")
        if step >= self._limit:
            raise RecordError(f"step {step} is beyond part {self.next_part}: advance({self._limit}) comes first")
        if step > self._step:
            self._step = step
            self._parts.next_step()

    def _finish_part(self) -> None:
        assert self._parts is not None
        self._parts.finish()
        self.next_part = self._parts.number

    def _put_status(self, status: State, error: str | None = None, counts: Mapping[str, int] | None = None) -> None:
        try:
            state = Status(status, self._saved, self._part_every, dict(counts or {}), error, self.next_part)
            _save_status(self._folder, state)
        except OSError as failure:
            raise RecordError(f"cannot write the status of {self._folder}: {failure.strerror or failure}") from failure

    def _open(self, config: dict[str, Any], session: dict[str, Any], overwrite: bool) -> int:
        """Create, resume or replace the record; return the lock, with ``_parts`` set."""
        folder = self._folder
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            if self._start:
                raise RecordError(f"start={self._start}, but there is no record at {folder} to resume")
            return self._create(config, session)
        if not folder.is_dir():
            raise RecordError(f"{folder} is not a folder")
        if not _is_run(folder):
            raise RecordError(f"{folder} is neither empty nor the folder of a run: nothing there is touched")
        lock = _lock(folder)
        try:
            status = _load_status(folder)  # under the lock: it may have changed
            if status is None:
                raise RecordError(f"{folder} is not the folder of a run any more")
            if self._start:
                self._resume(status, config, session)
            elif overwrite:
                self._replace(config, session)
            else:
                raise RecordError(
                    f"{folder} holds a record already ({status.status}, {status.steps} steps): "
                    "resume it with start=..., replace it with overwrite=True, or choose another folder"
                )
        except BaseException:
            if self._parts is not None:
                self._parts.discard()
            _unlock(lock)
            raise
        return lock

    def _create(self, config: dict[str, Any], session: dict[str, Any]) -> int:
        """Make the whole folder under a hidden name beside its own, and rename it (over an empty one, if need be)."""
        folder = self._folder
        if folder.exists() and folder.samefile(os.curdir):
            raise RecordError(f"{folder} is the working directory: a run needs a folder of its own")
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = folder.with_name(f".{folder.name}.whybn-new")
        staging.mkdir(exist_ok=True)  # one left by a killed process is filled again
        strange = [file.name for file in staging.iterdir() if file.name.strip(".").removesuffix(".tmp") not in _FILES]
        if strange:
            raise RecordError(f"{staging} is needed to make the record, but holds {strange[0]}")
        lock = _lock(staging)
        try:
            (staging / "records").mkdir(exist_ok=True)
            self._describe_run(staging, config, [session])
            _save_status(staging, Status("running", 0, self._part_every, {}, None))
            self._parts = self._begin_parts()
            staging.replace(folder)
            sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            _unlock(lock)
            raise
        return lock

    def _replace(self, config: dict[str, Any], session: dict[str, Any]) -> None:
        """Turn the record into an empty one; killed at any point it stays a record, of fewer parts."""
        (self._folder / "checkpoint.pt").unlink(missing_ok=True)
        _save_status(self._folder, Status("running", 0, self._part_every, {}, None))
        self._drop_parts(0)
        self._describe_run(self._folder, config, [session])
        self._parts = self._begin_parts()

    def _resume(self, status: Status, config: dict[str, Any], session: dict[str, Any]) -> None:
        """Go back to ``start``; all checks come before the first change."""
        folder, start = self._folder, self._start
        _refuse_difference(folder, read_config(folder), config)
        if status.part_every != self._part_every:
            raise RecordError(f"{folder} was recorded with part_every={status.part_every}, not {self._part_every}")
        sessions = _load(folder / "environment.json")
        if not isinstance(sessions, list):
            raise RecordError(f"{folder / 'environment.json'} is damaged: it is not a JSON list")
        there = {number for number, _ in _parts(folder)}
        needed = self.next_part + bool(start % self._part_every)
        missing = [part_name(number) for number in range(needed) if number not in there]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise RecordError(f"{folder} cannot be resumed at step {start}: {shown} not there")
        if start > status.steps:
            raise RecordError(f"{folder} cannot be resumed at step {start}: it holds {status.steps} steps")

        _save_status(folder, Status("running", start, self._part_every, {}, None, self.next_part))
        _save(folder / "environment.json", [*sessions, session])
        self._drop_parts(needed)
        self._parts = self._begin_parts()
        if needed > self.next_part:
            # The part that `start` lies in is cut at `start` on disk, and begun again from what was kept.
            file = folder / "records" / part_name(self.next_part)
            self._parts.replay(file, start)
            self._parts.finish()
            self._parts.number = self.next_part
            self._parts.replay(file, start)

    def _describe_run(self, folder: Path, config: dict[str, Any], sessions: list[Any]) -> None:
        _save(folder / "environment.json", sessions)
        _save(folder / "config.json", config)

    def _begin_parts(self) -> Parts:
        from diagnostics._parts import Parts

        return Parts(self._folder / "records", self.next_part)

    def _drop_parts(self, first: int) -> None:
        """Delete the parts from number ``first`` on, the last one first so that no gap appears, and what was begun."""
        records = self._folder / "records"
        records.mkdir(exist_ok=True)
        for number, file in reversed(list(_parts(self._folder))):
            if number >= first:
                file.unlink()
        for file in records.glob(".part-*.parquet.tmp"):
            file.unlink()
        sync_folder(records)


def part_name(number: int) -> str:
    """The name of a part's file in ``records/``."""
    return f"part-{number:05d}.parquet"


def write_atomically(file: Path, data: bytes) -> None:
    """Give ``file`` the content ``data``, so that at any moment it has all of the old or all of the new one.

    After a power failure it may be the old one; the content is on disk before the name is.
    """
    temporary = file.with_name(f".{file.name}.tmp")
    with temporary.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(file)


def sync_folder(folder: Path) -> None:
    """Make renames and deletions in ``folder`` durable, where the file system knows how to; all else holds without."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _lock(folder: Path) -> int:
    """Become the only writer of ``folder``; the system ends this with the process at the latest."""
    file, descriptor, free = folder / "lock", -1, False
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held, named = os.fstat(descriptor), file.stat()
        free = (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino)
    except (BlockingIOError, FileNotFoundError):  # or the folder got another name, or vanished, meanwhile
        pass
    finally:
        if descriptor >= 0 and not free:
            os.close(descriptor)
    if not free:
        raise RecordError(f"{folder} is being written, by another process or by a writer here that was not closed")
    return descriptor


def _unlock(descriptor: int) -> None:
    # Not left to close(): a forked process may still hold a copy of the descriptor.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _parts(folder: Path) -> Iterator[tuple[int, Path]]:
    """The number and file of each part, in order."""
    found = []
    for file in (folder / "records").glob("part-*.parquet"):
        match = _PART.fullmatch(file.name)
        if match is not None and file.name == part_name(int(match[1])):
            found.append((int(match[1]), file))
    yield from sorted(found)


def _is_run(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    try:
        status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(status, dict) and isinstance(status.get("format"), int) and status.get("status") in _STATES


def _load_status(folder: Path) -> Status | None:
    """The status of a record, None where there is no record."""
    if not _is_run(folder):
        return None
    fields = _load(folder / "status.json")
    if fields["format"] != FORMAT:
        raise RecordError(f"the record at {folder} has format {fields['format']}; this version of whybn knows {FORMAT}")
    try:
        return Status(**fields)
    except TypeError as error:
        raise RecordError(f"{folder / 'status.json'} is damaged: {error}") from error


def _save_status(folder: Path, status: Status) -> None:
    _save(folder / "status.json", vars(status))


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read: {error}") from error


def _save(file: Path, value: Any) -> None:
    write_atomically(file, (json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _plain(value: Any, where: str) -> Any:
    """``value`` as what a JSON file would give back, subclasses of the plain types reduced to those."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecordError(f"{where} is {value}, which JSON cannot say")
        return float(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise RecordError(f"{where} has the key {key!r}; JSON knows only strings")
        return {str.__str__(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise RecordError(f"{where} is of type {type(value).__name__}, which JSON does not know: {value!r}")


def _whole(value: SupportsIndex, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise RecordError(f"{name} is a whole number, not {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise RecordError(f"{name} is a whole number of at least {least}, not {value!r}")
    return number


def _refuse_difference(folder: Path, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    def leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
        if isinstance(value, Mapping) and (value or not name):
            for key, item in value.items():
                yield from leaves(item, f"{name}.{key}" if name else key)
        else:
            yield name, _compact(value)

    old, new = dict(leaves(stored)), dict(leaves(given))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            there, here = old.get(key, "absent"), new.get(key, "absent")
            raise RecordError(
                f"{folder} was recorded with another configuration: {key} is {there} there and {here} here"
            )


def _bounds(steps: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if steps is None:
        return None, None
    if isinstance(steps, str) or not isinstance(steps, Sequence) or len(steps) != 2:
        raise RecordError(f"steps is a pair (first, stop), not {steps!r}")
    first, stop = (None if end is None else _whole(end, "an end of steps", 0) for end in steps)
    return first, stop


def _refuse_unknown_units(folder: Path, units: Sequence[int]) -> None:
    """Raise if none of ``units`` occurs in the record, if it has rows."""
    import pyarrow.dataset as ds

    from diagnostics._parts import schema

    files = [str(file) for _, file in _parts(folder)]
    known: set[int] = set()
    for batch in ds.dataset(files, schema=schema(), format="parquet").to_batches(columns=["unit"]) if files else ():
        known.update(batch.column("unit").unique().to_pylist())
    if known and not known & set(units):
        raise RecordError(f"no unit {units[0]} in {folder}; units there are {min(known)} to {max(known)}")


def _refuse_unknown(folder: Path, column: str, names: Sequence[str]) -> None:
    """Raise for the first of ``names`` that occurs in no row of the record, if it has rows."""
    import pyarrow.dataset as ds

    from diagnostics._parts import schema

    files = [str(file) for _, file in _parts(folder)]
    if not names or not files:
        return
    known: dict[str, None] = {}
    for batch in ds.dataset(files, schema=schema(), format="parquet").to_batches(columns=[column]):
        known.update(dict.fromkeys(batch.column(column).unique().to_pylist()))
    for name in names:
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=5, cutoff=0.5) or list(known)[:5]
            more = "" if len(near) == len(known) else f" (and {len(known) - len(near)} more)"
            raise RecordError(f"no {column} is named {name!r} in {folder}; there is {', '.join(near)}{more}")
