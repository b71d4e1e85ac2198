"""Exact order statistics and moments of every unit of a signal.

A signal has U units along one dimension (features, or channels pooled over batch and positions) and M values a unit.
Of a unit's *finite* values, n of them, sorted in their own type as ``v[0] <= ... <= v[n-1]``, the quantile at ``q``
in [0, 1] is ``v[h]`` at the real-valued rank ``h = q * (n - 1)``, interpolated in float64 between the two neighbours
(Hyndman and Fan 1996, definition 7; numpy's ``linear``, bit for bit). Mean and biased variance are float64 sums about
a shift c: ``mean = c + E[v - c]``, ``variance = E[(v - c)^2] - E[v - c]^2``. The first c is 0; where that subtraction
would cost more than ten bits it is one of the values at the centre. NaN and infinities are counted and left out.
Two identities the tests lean on: permuting a unit's values changes no order statistic, and ``v -> -v`` sends the
quantile at q to minus the one at 1 - q. ``-0.0`` and ``0.0`` are one value: the sign of a zero is not part of the
answer.

How it is fast on a CPU. Up to ``_LONG`` values a unit, rows are sorted together by numpy's SIMD sort. Beyond, the
bits of floats of one sign, read as integers, sort as the floats do, and numpy's *integer* SIMD selection takes a
fraction of a sort's time (its float selection looks for NaN first and takes three times as long). It has one hole,
seen in numpy 2.4: many copies of a segment's smallest value, such as the zeros behind a ReLU, make it a hundred times
slower. So a sample looks for heavy values first: zeros at the bottom are turned to the top, and other heavy values go
to the sort, which likes ties. That chooses between exact ways, never the result. No unit is shared by two threads, so
the number of threads changes no number either.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Summary", "prepare", "submit", "summarize", "summarize_many", "summarize_rows"]

Floats: TypeAlias = NDArray[np.float64]
UnitRows: TypeAlias = "NDArray[Any] | torch.Tensor"
"""What :func:`prepare` returns: (U, M) float32 or float64, on the CPU a numpy array, on CUDA a tensor still there."""

_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LONG = 1 << 15  # values a unit from which selecting beats sorting
_CHUNK = 1 << 17  # values one thread works on at a time: with the float64 copy 1.5 MB, a core's own cache
_BLOCK = 4096  # values summed by one BLAS call; OpenBLAS calls its own threads from 10,000 up
_TILE = 128  # positions transposed at a time when the unit dimension lies innermost in memory
_SAMPLE, _HEAVY = 1024, 8  # a value found 8 times in 1024 draws holds near 1 % of its row
_MANY_RANKS = 64  # from about so many order statistics a full sort is the cheaper way to have them
# A variance that is so small a part of the mean square lost ten bits: sum again about a value of the unit's own, the
# median or the one nearest to the mean. Both lie within a standard deviation of the mean, and differences to them are
# as good as exact, where the mean itself, being rounded, may lie many standard deviations from the values.
_CANCELLED = 2.0**-10
_SAFE = (2.0**-800, 2.0**800)  # mean squares in this range came from sums that neither overflowed nor underflowed


@dataclass(frozen=True)
class Summary:
    """Order statistics and moments of U units; all in the unit of the signal (variance: squared) but the counts.

    A unit without a finite value has ``count`` 0 and NaN for everything but the counts.
    """

    count: NDArray[np.int64]  # (U,) finite values
    nonfinite: NDArray[np.int64]  # (U,) NaN and infinite values
    mean: Floats  # (U,)
    variance: Floats  # (U,) biased: divided by count
    minimum: Floats  # (U,)
    maximum: Floats  # (U,)
    quantiles: Floats  # (U, Q) in the order of q


def summarize(x: torch.Tensor, q: Sequence[float], unit_dim: int = 1, *, threads: int | None = None) -> Summary:
    """Summarize each unit of ``x`` along ``unit_dim`` over all other dimensions.

    Args:
        x: float16, bfloat16, float32 or float64 of one to any number of dimensions, any strides, on any device, with or
            without gradient. It is read, never changed. On CUDA the work is done there by torch.
        q: Q quantiles in [0, 1], in any order, repeated or not; may be empty. (Where this library takes
            ``percentiles=`` they run from 0 to 100; a ``q`` never does.)
        unit_dim: The dimension of the units; negative counts from the end.
        threads: Python threads to share the units among, the calling one included; None means
            ``torch.get_num_threads()``, so that a training loop's one setting governs this too. Inputs of fewer than
            2^17 values stay on the calling thread. The numbers do not depend on it.

    Raises:
        ValueError: If ``x`` is empty, has no such dimension, or is not a dense floating-point tensor; if a ``q`` lies
            outside [0, 1]; if ``threads`` is not positive.
    """
    if x.device.type == "cuda":
        return summarize_rows(_device_rows(x, unit_dim), q)
    return _reduce(_units_first(x, unit_dim), _checked(q), _count_threads(threads))


def prepare(x: torch.Tensor, unit_dim: int = 1, *, threads: int | None = None) -> UnitRows:
    """Copy ``x`` to contiguous rows (U, M), so that whatever later overwrites ``x`` in place does not matter.

    The half of :func:`summarize` that must happen at once, in a hook; :func:`summarize_rows` or :func:`submit` is the
    half that can wait. Half types are widened to float32 (exact). Arguments and ``Raises`` as in :func:`summarize`.
    """
    if x.device.type == "cuda":
        return _device_rows(x, unit_dim)
    source = _units_first(x, unit_dim)
    rows = np.empty((len(source), source[0].size), source.dtype)
    _gather(source, rows, _count_threads(threads))
    return rows


def summarize_rows(rows: UnitRows, q: Sequence[float], *, threads: int | None = None) -> Summary:
    """Summarize rows (U, M) made by :func:`prepare`. They are not changed; arguments as in :func:`summarize`.

    The copies, sorts, selections and sums release the interpreter lock, on rows of thousands of values nearly all of
    the time, so this can run beside a training thread. On (60, 100) it is some 30 microseconds mostly *with* the lock.

    Raises:
        ValueError: As :func:`summarize`, or if ``rows`` is not two-dimensional float32 or float64.
    """
    if rows.ndim != 2 or 0 in rows.shape:
        raise ValueError(f"rows must have shape (units, values), both positive; got {tuple(rows.shape)}")
    if isinstance(rows, torch.Tensor):
        return _reduce_tensor(rows, _checked(q))
    if rows.dtype not in (np.float32, np.float64):
        raise ValueError(f"rows must be float32 or float64, as prepare() makes them; got {rows.dtype}")
    return _reduce(rows, _checked(q), _count_threads(threads))


def summarize_many(rows: Sequence[UnitRows], q: Sequence[float], *, threads: int | None = None) -> list[Summary]:
    """Summarize several prepared signals; those of one small shape go through together, for the price of one call.

    A batch of 60 through three layers of 100 units is three (100, 60) arrays: stacked, half the time of three calls.
    Same numbers as :func:`summarize_rows` on each, same arguments.

    Raises:
        ValueError: As :func:`summarize_rows`.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, each in enumerate(rows):
        small = isinstance(each, np.ndarray) and each.ndim == 2 and each.shape[1] < _LONG
        groups.setdefault((each.shape[1], each.dtype) if small else (place,), []).append(place)
    summaries: dict[int, Summary] = {}
    for places in groups.values():
        if len(places) == 1:
            summaries[places[0]] = summarize_rows(rows[places[0]], q, threads=threads)
            continue
        together = summarize_rows(np.concatenate([rows[place] for place in places]), q, threads=threads)
        start = 0
        for place in places:
            stop = start + len(rows[place])
            summaries[place] = Summary(*(getattr(together, field.name)[start:stop] for field in fields(Summary)))
            start = stop
    return [summaries[place] for place in range(len(rows))]


def submit(rows: UnitRows, q: Sequence[float], *, threads: int = 1) -> Future[Summary]:
    """Start :func:`summarize_rows` on the shared pool and return at once; ``.result()`` is the summary or its error.

    On CUDA the work is queued on the stream that is current here and now. Arguments as in :func:`summarize`.
    """
    if isinstance(rows, torch.Tensor) and rows.is_cuda:
        stream = torch.cuda.current_stream(rows.device)

        def on_stream() -> Summary:
            with torch.cuda.stream(stream):
                return summarize_rows(rows, q)

        return _pool(os.getpid()).submit(on_stream)
    return _pool(os.getpid()).submit(summarize_rows, rows, q, threads=threads)


# --- input ---------------------------------------------------------------------------------------------------------


def _checked(q: Sequence[float]) -> tuple[float, ...]:
    values = tuple(float(each) for each in q)
    for each in values:
        if not 0.0 <= each <= 1.0:
            raise ValueError(f"quantile {each!r} is outside [0, 1]")
    return values


def _count_threads(threads: int | None) -> int:
    if threads is None:
        return torch.get_num_threads()
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    return threads


def _check(x: torch.Tensor, unit_dim: int) -> None:
    if x.dtype not in _TYPES:
        raise ValueError(f"cannot summarize {x.dtype}; allowed: {', '.join(map(str, _TYPES))}")
    if x.layout != torch.strided or x.is_meta:
        raise ValueError(f"cannot summarize a tensor of layout {x.layout} on {x.device}; it must be dense")
    if not -x.ndim <= unit_dim < x.ndim:
        allowed = f"allowed: {-x.ndim} to {x.ndim - 1}" if x.ndim else "it has none"
        raise ValueError(f"unit_dim {unit_dim} is not a dimension of a tensor of shape {tuple(x.shape)}; {allowed}")
    if not x.numel():
        raise ValueError(f"cannot summarize an empty tensor, shape {tuple(x.shape)}")


def _units_first(x: torch.Tensor, unit_dim: int) -> NDArray[Any]:
    """``x`` as float32 or float64 (U, ...), on the CPU a view of its memory unless it was of a half type."""
    _check(x, unit_dim)
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.detach().float()
    values: NDArray[Any] = x.numpy(force=True)
    axes = list(range(x.ndim))
    axes.insert(0, axes.pop(unit_dim))
    return values.transpose(axes)


def _device_rows(x: torch.Tensor, unit_dim: int) -> torch.Tensor:
    """``x`` copied to contiguous rows (U, M) where it is."""
    _check(x, unit_dim)
    x = x.detach().movedim(unit_dim, 0)
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format).reshape(len(x), -1)


def _innermost(source: NDArray[Any]) -> bool:
    """Whether the units of ``source`` (U, ...) lie closer together in memory than the values of one unit."""
    others = [abs(stride) for stride, size in zip(source.strides[1:], source.shape[1:], strict=True) if size > 1]
    return len(source) > 1 and bool(others) and abs(source.strides[0]) < min(others)


def _gather(source: NDArray[Any], rows: NDArray[Any], threads: int) -> None:
    """Copy ``source`` (U, ...) into contiguous ``rows`` (U, M), in tiles where units lie innermost."""
    if rows.size < _CHUNK:
        rows.reshape(source.shape)[...] = source
        return
    if not _innermost(source):
        units = max(1, _CHUNK // rows.shape[1])
        parts = [slice(at, at + units) for at in range(0, len(rows), units)]
        target = rows.reshape(source.shape)
        _share([partial(np.copyto, target[part], source[part]) for part in parts], threads)
        return
    flat = np.moveaxis(source, 0, -1).reshape(-1, len(source))  # a view for channels-last and for (N, U)

    def copy(start: int, stop: int) -> None:
        for tile in range(start, stop, _TILE):
            end = min(tile + _TILE, stop)
            rows[:, tile:end] = flat[tile:end].T

    step = max(_TILE, _CHUNK // len(source))
    _share([partial(copy, at, min(at + step, len(flat))) for at in range(0, len(flat), step)], threads)


# --- threads -------------------------------------------------------------------------------------------------------


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The one pool of process ``pid``. Threads do not survive a fork, so a forked child must not find its parent's."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix=f"quantiles-{pid}")


def _share(jobs: Iterable[Callable[[], object]], threads: int) -> None:
    """Run ``jobs`` on up to ``threads`` threads; the calling one takes its part, so a busy pool only makes it slower.

    That also is why a job on the pool may call this: a helper that never got a thread is cancelled, not waited for.
    """
    queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
    for job in jobs:
        queue.put(job)

    def drain() -> None:
        while True:
            try:
                job = queue.get_nowait()
            except Empty:
                return
            job()

    helpers = [_pool(os.getpid()).submit(drain) for _ in range(min(threads, queue.qsize()) - 1)]
    try:
        drain()
    finally:
        running = [helper for helper in helpers if not helper.cancel()]
    for helper in running:
        helper.result()


# --- numpy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ranks:
    """Where in n sorted values the extremes and the Q quantiles are found.

    ``picks`` holds 2 + 3Q ranks: the lowest, the highest, then Q each of ``base``, ``below`` and ``above``. A quantile
    is ``v[base] + (v[above] - v[below]) * slope``: numpy's interpolation, which starts from the nearer neighbour, with
    the choice made here once and not per unit.
    """

    picks: list[int]
    slope: list[float]

    @classmethod
    def of(cls, q: Sequence[float], n: int) -> _Ranks:
        base, below, above, slope = [], [], [], []
        for each in q:
            rank = (n - 1) * each
            low = int(rank)
            high = min(low + 1, n - 1)
            weight = rank - low
            nearer_low = weight < 0.5
            base.append(low if nearer_low else high)
            below.append(low)
            above.append(high)
            slope.append(weight if nearer_low else weight - 1.0)
        return cls([0, n - 1, *base, *below, *above], slope)


class _Table:
    """What the workers fill in for U units; a worker writes its own units' rows only."""

    def __init__(self, units: int, size: int, dtype: np.dtype[Any], q: tuple[float, ...]) -> None:
        self.size, self.dtype, self.q = size, dtype, q
        self.ranks = _Ranks.of(q, size)
        self.count = np.empty(units, np.int64)
        self.count.fill(size)
        self.mean = np.empty(units)
        self.variance = np.empty(units)
        self.picked = np.empty((units, len(self.ranks.picks)))  # values at _Ranks.picks
        self.slope = np.empty((units, len(q)))
        self.slope[...] = self.ranks.slope

    def summary(self) -> Summary:
        q = len(self.q)
        low, high = self.picked[:, :2].T.copy()
        base, below, above = (self.picked[:, 2 + i * q : 2 + (i + 1) * q] for i in range(3))
        if self.dtype == np.float32:
            quantiles = above - below
            quantiles *= self.slope
            quantiles += base
        else:
            quantiles = _interpolate_any(base, below, above, self.slope)
        return Summary(self.count, self.size - self.count, self.mean, self.variance, low, high, quantiles)


def _interpolate_any(base: Floats, below: Floats, above: Floats, slope: Floats) -> Floats:
    """Quantiles (U, Q), finite between finite neighbours even where their difference overflows (numpy: inf)."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = base + (above - below) * slope
        weight = np.where(slope < 0.0, slope + 1.0, slope)
        return np.where(np.isfinite(value), value, below * (1.0 - weight) + above * weight)


def _reduce(source: NDArray[Any], q: tuple[float, ...], threads: int) -> Summary:
    """Summarize ``source`` (U, ...), float32 or float64 of any strides."""
    units, size = len(source), source[0].size
    table = _Table(units, size, source.dtype, q)
    if source.size >= _CHUNK and _innermost(source):
        rows = np.empty((units, size), source.dtype)
        _gather(source, rows, threads)
        source = rows
    if size < _LONG:
        step, work = max(1, _CHUNK // size), _short_rows
    else:
        step, work = -(-units // (4 * threads)), _long_rows
    if step >= units:
        work(source, table, 0)
    else:
        _share([partial(work, source[at : at + step], table, at) for at in range(0, units, step)], threads)
    return table.summary()


def _short_rows(source: NDArray[Any], table: _Table, at: int) -> None:
    """Fill ``table`` from row ``at`` on, sorting all units of ``source`` (u, ...) together."""
    units, size = len(source), table.size
    rows = np.empty((units, size), source.dtype)
    rows.reshape(source.shape)[...] = source
    rows.sort(axis=1)
    here = slice(at, at + units)
    strange: Sequence[int] = ()
    with np.errstate(over="ignore", invalid="ignore"):
        table.picked[here] = rows.take(table.ranks.picks, axis=1)
        # About each row's middle value, which lies within one standard deviation of its mean: nothing cancels, and no
        # unit's last bit depends on its company.
        wide = rows.astype(np.float64)
        centre = wide[:, size // 2].copy()
        wide -= centre[:, None]
        rest, second = _row_sums(wide)
        # Also true where a NaN or an infinity went into the sums.
        odd = ~(second < _SAFE[1]) | (~(second > _SAFE[0]) & (rows[:, 0] != rows[:, -1]))
        if odd.any():
            strange = np.flatnonzero(odd).tolist()
        mean, variance = centre + rest, np.maximum(second - rest * rest, 0.0)
    table.mean[here] = mean
    table.variance[here] = variance
    if strange:
        desk = _Desk(size, table.dtype)
        for unit in strange:
            _one_row(rows[unit], table, at + unit, desk)


def _row_sums(wide: Floats) -> tuple[Floats, Floats]:
    """Means of ``d`` and of ``d * d`` for each row d of ``wide`` (u, M), by calls of BLAS too small for its threads."""
    size = wide.shape[1]
    ones = np.ones(min(size, _BLOCK))
    if size <= _BLOCK:
        return np.vecdot(wide, ones) / size, np.vecdot(wide, wide) / size
    first = second = np.zeros(len(wide))
    for start in range(0, size, _BLOCK):
        part = wide[:, start : start + _BLOCK]
        first = first + np.vecdot(part, ones[: part.shape[1]])
        second = second + np.vecdot(part, part)
    return first / size, second / size


def _long_rows(source: NDArray[Any], table: _Table, at: int) -> None:
    """Fill ``table`` from row ``at`` on, one unit of ``source`` (u, ...) at a time."""
    desk = _Desk(table.size, table.dtype)
    for unit, values in enumerate(source):
        desk.row.reshape(values.shape)[...] = values
        _one_row(desk.row, table, at + unit, desk)


class _Desk:
    """What one thread needs to work on rows of up to ``size`` values, made once."""

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self.row = np.empty(size, dtype)
        self.wide = np.empty(-(-min(size, _CHUNK) // _BLOCK) * _BLOCK)
        self.ones = np.ones(_BLOCK)
        # Golden-ratio positions fall in step with no layout of the values.
        self.draws = (np.arange(_SAMPLE) * 0.6180339887498949 % 1.0 * size).astype(np.intp)


def _one_row(row: NDArray[Any], table: _Table, at: int, desk: _Desk) -> None:
    """Fill row ``at`` of ``table`` from ``row`` (M,), which is reordered. Serves any size and any values."""
    ranks = table.ranks
    mean, variance = _moments(row, desk)
    if not math.isfinite(mean):
        row = row[np.isfinite(row)]
        table.count[at] = len(row)
        if not len(row):
            table.mean[at] = table.variance[at] = table.picked[at] = math.nan
            return
        mean, variance = _moments(row, desk)
        ranks = _Ranks.of(table.q, len(row))
        table.slope[at] = ranks.slope
    table.picked[at] = _order_statistics(row, ranks.picks, desk)
    table.mean[at] = mean
    table.variance[at] = variance


def _moments(row: NDArray[Any], desk: _Desk) -> tuple[float, float]:
    """Mean and variance of ``row``; the mean is not finite if a value is not."""
    scale = 1.0
    mean, second = _sums(row, desk, 0.0, scale)
    if not _SAFE[0] < second < _SAFE[1]:
        peak = max(abs(float(row.min())), abs(float(row.max())))
        if not 0.0 < peak < math.inf:
            return peak, peak  # all zero, or a value that is not finite
        scale = math.ldexp(1.0, -max(math.frexp(peak)[1], -1000))
        mean, second = _sums(row, desk, 0.0, scale)
    variance = second - mean * mean
    if variance < second * _CANCELLED:
        centre = float(row[np.abs(row - row.dtype.type(mean / scale)).argmin()]) * scale
        rest, second = _sums(row, desk, centre, scale)
        mean, variance = centre + rest, max(second - rest * rest, 0.0)
    return mean / scale, variance / scale / scale


def _sums(row: NDArray[Any], desk: _Desk, shift: float, scale: float) -> tuple[float, float]:
    """Means of ``d`` and of ``d * d``, d = row * scale - shift in float64, in pieces that stay in a core's cache."""
    total = squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(row), len(desk.wide)):
            piece = row[start : start + len(desk.wide)]
            whole = -(-len(piece) // _BLOCK) * _BLOCK
            wide = desk.wide[: len(piece)]
            wide[...] = piece
            if scale != 1.0:
                wide *= scale
            if shift:
                wide -= shift
            desk.wide[len(piece) : whole] = 0.0
            blocks = desk.wide[:whole].reshape(-1, _BLOCK)
            total += float(np.vecdot(blocks, desk.ones).sum())
            squares += float(np.vecdot(blocks, blocks).sum())
    return total / len(row), squares / len(row)


def _order_statistics(row: NDArray[Any], ranks: list[int], desk: _Desk) -> NDArray[Any]:
    """``v[r]`` for each rank r, v = ``row`` sorted; ``row`` must be finite and is reordered."""
    size = len(row)
    if size < _LONG or len(ranks) > _MANY_RANKS:
        row.sort()
        return row[ranks]
    keys = row.view(np.int32 if row.dtype == np.float32 else np.int64)
    low = row.min()
    # -0.0 counts among the negative, if there are any; with none it sorts right as it is.
    negative = int(np.count_nonzero(np.signbit(row))) if low < 0 else 0
    sample = keys[desk.draws % size if size < len(desk.row) else desk.draws]
    sample.sort()
    heavy = sample[: 1 - _HEAVY] == sample[_HEAVY - 1 :]
    turned = False
    if heavy.any():
        turned = not negative and not heavy[np.searchsorted(sample, sample[0], "right") :].any()
        if not turned:
            row.sort()
            return row[ranks]
        np.invert(keys, out=keys)
    # The integers of negative floats are the small ones, and run backwards.
    if turned:
        places = [size - 1 - rank for rank in ranks]
    else:
        places = [negative - 1 - rank if rank < negative else rank for rank in ranks]
    # In a row of both signs the lowest float is the last of those: known already, and dear to select.
    found = {negative - 1: int(low.view(keys.dtype))} if 0 < negative < size else {}
    _select(keys, sorted(set(places) - found.keys()), 0, size, found)
    values = np.array([found[place] for place in places], keys.dtype)
    return (~values if turned else values).view(row.dtype)


def _select(keys: NDArray[Any], places: list[int], start: int, stop: int, found: dict[int, int]) -> None:
    """Put into ``found`` what stands at ``places`` of sorted ``keys``, of which [start:stop] holds its own ranks."""
    part = keys[start:stop]
    inner = [place for place in places if start < place < stop - 1]
    if inner:
        cut = inner[len(inner) // 2]
        part.partition(cut - start)
        found[cut] = int(keys[cut])
        _select(keys, [place for place in places if place < cut], start, cut, found)
        _select(keys, [place for place in places if place > cut], cut + 1, stop, found)
    else:
        for place in places:
            found[place] = int(part.min() if place == start else part.max())


# --- torch ---------------------------------------------------------------------------------------------------------


def _reduce_tensor(rows: torch.Tensor, q: tuple[float, ...]) -> Summary:
    """Summarize ``rows`` (U, M) where they are, in as many pieces as keep the sort's index tensors small."""
    step = max(1, (1 << 26) // rows.shape[1])
    parts = [_table(rows[at : at + step], q) for at in range(0, len(rows), step)]
    table = torch.cat(parts).cpu().numpy()
    count = table[:, 0].astype(np.int64)
    mean, variance, minimum, maximum = table[:, 1:5].T.copy()
    return Summary(count, rows.shape[1] - count, mean, variance, minimum, maximum, table[:, 5:].copy())


def _table(rows: torch.Tensor, q: tuple[float, ...]) -> torch.Tensor:
    """(U, 5 + Q) float64: count, mean, variance, minimum, maximum, quantiles."""
    nan = torch.tensor(torch.nan, dtype=torch.float64, device=rows.device)
    rows = torch.sort(rows, dim=1).values.double()  # -inf first, inf and NaN last
    finite = rows.isfinite()
    count = finite.sum(1, keepdim=True)
    first = (rows == -torch.inf).sum(1, keepdim=True)
    last = first + count - 1
    last_safe = last.clamp(min=0)

    def at(rank: torch.Tensor) -> torch.Tensor:
        return torch.where(count > 0, rows.gather(1, (first + rank).clamp(min=0).minimum(last_safe)), nan)

    rank = torch.tensor(q, dtype=torch.float64, device=rows.device) * (count - 1)
    below = rank.floor()
    weight = rank - below
    low, high = at(below.long()), at(below.long() + 1)
    near = low + (high - low) * weight
    quantile = torch.where(weight < 0.5, near, high - (high - low) * (1 - weight))
    quantile = torch.where(quantile.isfinite(), quantile, low * (1 - weight) + high * weight)
    minimum, maximum, centre = at(0 * count), at(count - 1), at(count // 2)
    # One power of two a row keeps the squares of float64 in range, and is exact.
    peak = torch.maximum(minimum.abs(), maximum.abs())
    scale = torch.ones_like(peak).masked_fill(peak > 2.0**400, 2.0**-600).masked_fill(peak < 2.0**-400, 2.0**400)
    d = torch.where(finite, rows * scale - centre * scale, 0.0)
    shift = d.sum(1, keepdim=True) / count
    variance = (d * d).sum(1, keepdim=True) / count - shift * shift
    mean = centre + shift / scale
    return torch.cat([count.double(), mean, variance / scale / scale, minimum, maximum, quantile], dim=1)
