"""Quantiles against an exact twin, at every type, shape and memory layout, and against answers known in closed form."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from diagnostics import quantiles
from diagnostics.quantiles import Summary, prepare, submit, summarize, summarize_many, summarize_rows
from tests.reference import quantiles as twin

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
Q = (0.15, 0.5, 0.85)
FIELDS = ("count", "nonfinite", "mean", "variance", "minimum", "maximum", "quantiles")


def through_torch(x: torch.Tensor, q: tuple[float, ...], unit_dim: int) -> Summary:
    """The path CUDA tensors take, here on the CPU."""
    return quantiles._reduce_tensor(quantiles._device_rows(x, unit_dim), q)


def through_rows(x: torch.Tensor, q: tuple[float, ...], unit_dim: int) -> Summary:
    return summarize_rows(prepare(x, unit_dim), q)


@contextmanager
def every_row_long(heavy: int) -> Iterator[None]:
    """Send the smallest rows down the path of long ones. A value found ``heavy`` times is a tie to be wary of."""
    with mock.patch.multiple(quantiles, _LONG=1, _BLOCK=3, _CHUNK=6, _TILE=2, _HEAVY=heavy):
        yield


def through_selection(x: torch.Tensor, q: tuple[float, ...], unit_dim: int) -> Summary:
    with every_row_long(heavy=quantiles._SAMPLE + 1):
        return summarize(x, q, unit_dim)


def through_turned_ties(x: torch.Tensor, q: tuple[float, ...], unit_dim: int) -> Summary:
    # Of seven draws two equal ones are heavy: always in the shortest units, in others where they hold ties.
    with mock.patch.object(quantiles, "_SAMPLE", 7), every_row_long(heavy=2):
        return summarize(x, q, unit_dim)


PATHS = [summarize, through_torch, through_rows, through_selection, through_turned_ties]


def assert_same(summary: Summary, expected: list[twin.Unit]) -> None:
    """Order statistics and counts to the bit; moments within a few roundings of the exact ones."""
    for field in ("count", "nonfinite", "minimum", "maximum"):
        np.testing.assert_array_equal(getattr(summary, field), [getattr(unit, field) for unit in expected], field)
    wanted = np.array([unit.quantiles for unit in expected]).reshape(summary.quantiles.shape)
    overflowing = summary.maximum / 2 - summary.minimum / 2 > 2.0**1022  # there the twin's value is the exact one
    np.testing.assert_array_equal(summary.quantiles[~overflowing], wanted[~overflowing])
    np.testing.assert_allclose(summary.quantiles[overflowing], wanted[overflowing], rtol=1e-15, atol=1e294)
    for got_mean, got_variance, unit in zip(summary.mean, summary.variance, expected, strict=True):
        if not unit.count:
            assert math.isnan(got_mean)
            assert math.isnan(got_variance)
            continue
        size = max(abs(unit.minimum), abs(unit.maximum))
        assert abs(got_mean - unit.mean) <= 4 * 2.0**-52 * size + 5e-324
        assert unit.minimum <= got_mean <= unit.maximum
        if unit.variance == math.inf:
            assert got_variance == math.inf
        else:
            assert abs(got_variance - unit.variance) <= 2e-12 * unit.variance + 1e-323
        assert (got_variance == 0) == (unit.variance == 0)


# --- the twin ------------------------------------------------------------------------------------------------------


@st.composite
def tensors(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A tensor of 1 to 5 dimensions in some memory layout, and one of its dimensions."""
    dtype = draw(st.sampled_from(TYPES))
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    width = 64 if dtype == torch.float64 else 32 if dtype == torch.float32 else 16
    kind = draw(st.sampled_from(["any", "any", "near", "few"]))
    if kind == "any":
        number = st.floats(width=width, allow_subnormal=True)
    elif kind == "near":
        number = st.floats(1e4, 1e4 + 8, width=width)
    else:
        number = st.sampled_from([0.0, -0.0, 1.0, -1.5, math.inf, math.nan])
    count = math.prod(shape)
    values = draw(st.lists(number, min_size=1, max_size=count))
    order = draw(st.randoms(use_true_random=False))
    flat = values + [order.choice(values) for _ in range(count - len(values))]
    order.shuffle(flat)
    x = torch.tensor(flat, dtype=torch.float64).to(dtype).reshape(shape)
    layout = draw(st.sampled_from(["contiguous", "permuted", "sliced", "expanded", "channels_last"]))
    if layout == "permuted":
        axes = list(range(x.ndim))
        order.shuffle(axes)
        x = x.permute(axes)
    elif layout == "sliced":
        padded = torch.full([2 * size + 1 for size in x.shape], 77.0, dtype=dtype)
        view = padded[tuple(slice(1, None, 2) for _ in x.shape)]
        view.copy_(x)
        x = view
    elif layout == "expanded":
        x = x.unsqueeze(0).expand(2, *x.shape)
    elif layout == "channels_last" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, draw(st.integers(-x.ndim, x.ndim - 1))


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=80)
@given(case=tensors(), q=st.lists(st.floats(0, 1), max_size=5).map(tuple), grad=st.booleans())
@example(case=(torch.tensor([[1.7e308, -1.7e308], [1e-320, 5e-324]], dtype=torch.float64), 0), q=(0.3, 0.5), grad=False)
@example(case=(torch.tensor([[1e200, 1e200, 1e190], [1e-200, 3e-200, 0.0]], dtype=torch.float64), 0), q=Q, grad=True)
@example(case=(torch.tensor([[math.nan, 1.0], [math.inf, -math.inf], [0.0, -0.0]]), 0), q=Q, grad=False)
def test_every_path_agrees_with_the_twin(
    path: Callable[..., Summary], case: tuple[torch.Tensor, int], q: tuple[float, ...], grad: bool
) -> None:
    x, unit_dim = case
    expected = [twin.summarize(values, q) for values in twin.units(x, unit_dim)]
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]  # NaN equals itself, 0.0 is not -0.0
    before = x.clone().view(bits)
    x.requires_grad_(grad)
    summary = path(x, q, unit_dim)
    assert_same(summary, expected)
    assert torch.equal(x.detach().view(bits), before)
    for field in FIELDS:
        array = getattr(summary, field)
        assert array.dtype == (np.int64 if field in ("count", "nonfinite") else np.float64)
        assert array.shape == ((x.shape[unit_dim], len(q)) if field == "quantiles" else (x.shape[unit_dim],))


LONG = 40_001  # just long enough to be selected from


def normal(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def ramp(size: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.float64)


SHAPES: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": normal,
    "negative": lambda size: -normal(size).abs() - 1,
    "relu": lambda size: normal(size).relu(),
    "minus relu": lambda size: -normal(size).relu(),
    "leaky": lambda size: torch.where(normal(size) > 0, normal(size), 0.01 * normal(size)),
    "relu6": lambda size: normal(size).mul(8).clamp(0, 6),
    "tanh": lambda size: normal(size).mul(1000).clamp(-1, 1),
    "elu": lambda size: normal(size).mul(9).clamp(min=-1),
    "dropped": lambda size: torch.where(normal(size) > 0.7, normal(size), 0.0),
    "both zeros": lambda size: torch.where(normal(size) > 0, 0.0, -0.0).double(),
    "negative and both zeros": lambda size: torch.where(normal(size) > 1, 0.0, normal(size).clamp(max=-0.0)),
    "step": lambda size: (normal(size) > 0).double(),
    "constant": lambda size: torch.full((size,), -3.7, dtype=torch.float64),
    "zero": lambda size: torch.zeros(size, dtype=torch.float64),
    "one odd one": lambda size: (ramp(size) == 5).double(),
    "levels": lambda size: normal(size).mul(2).round(),
    "rising": lambda size: ramp(size),
    "falling": lambda size: -ramp(size),
    "organ pipe": lambda size: torch.minimum(ramp(size), size - ramp(size)),
    "wide": lambda size: normal(size).mul(20).exp(),
    "holes": lambda size: (
        normal(size).masked_fill(ramp(size) % 70 == 0, torch.nan).masked_fill(ramp(size) % 110 == 0, -torch.inf)
    ),
    "two left": lambda size: normal(size).masked_fill((ramp(size) != 1) & (ramp(size) != size - 1), torch.inf),
    "nothing left": lambda size: torch.full((size,), torch.nan, dtype=torch.float64),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_long_rows_of_every_shape(name: str, dtype: torch.dtype) -> None:
    x = SHAPES[name](LONG).to(dtype)
    q = (0.0, 1.0, 0.15, 0.5, 0.85, 0.5, 1e-5, 0.99999, 0.3333)
    expected = twin.summarize(x.double().tolist(), q)
    assert_same(summarize(x.unsqueeze(1), q), [expected])
    assert_same(through_torch(x.unsqueeze(1), q, 1), [expected])


def test_every_rank_of_a_long_row_and_more_of_them_than_selection_is_used_for() -> None:
    x = normal(LONG).float()
    ordered = np.sort(x.numpy()).astype(np.float64)
    for q in (np.linspace(0, 1, 7), np.linspace(0, 1, 501)):
        np.testing.assert_array_equal(summarize(x[None], q.tolist(), 0).quantiles[0], np.quantile(ordered, q))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "positions_first", "sliced"])
@pytest.mark.parametrize("side", [8, 48])
@pytest.mark.parametrize("threads", [1, 3])
def test_images_in_every_layout(layout: str, side: int, threads: int) -> None:
    x = torch.randn(33, 7, side, side, generator=torch.Generator().manual_seed(1)) + torch.arange(7.0).view(7, 1, 1)
    expected = [np.sort(x[:, unit].double().flatten().numpy()) for unit in range(7)]
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "positions_first":
        x = x.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    elif layout == "sliced":
        x = torch.cat([x, x], dim=3)[..., :side]
    for summary in (summarize(x, Q, threads=threads), summarize_rows(prepare(x, threads=threads), Q, threads=threads)):
        np.testing.assert_array_equal(summary.quantiles, [np.quantile(unit, Q) for unit in expected])
        np.testing.assert_allclose(summary.mean, [unit.mean() for unit in expected], rtol=1e-13)
        np.testing.assert_allclose(summary.variance, [unit.var() for unit in expected], rtol=1e-12)


# --- answers known without a twin -----------------------------------------------------------------------------------


def test_the_median_is_interpolated_and_the_variance_biased() -> None:
    summary = summarize(torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]]), (0.5, 0.25, 0.9))
    np.testing.assert_allclose(summary.quantiles, [[3.0, 1.75, 6.8], [30.0, 17.5, 68.0]], rtol=1e-15)
    np.testing.assert_allclose(summary.mean, [3.75, 37.5])
    np.testing.assert_allclose(summary.variance, [7.1875, 718.75])


@given(
    values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), q=st.floats(0, 1), seed=st.integers(0, 9)
)
def test_order_does_not_matter_and_a_mirror_mirrors(values: list[float], q: float, seed: int) -> None:
    x = torch.tensor(values)
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))]
    for there, back in ((summarize(x[:, None], (q,)), summarize(shuffled[:, None], (q,))),):
        np.testing.assert_array_equal(there.quantiles, back.quantiles)
    mirrored = summarize(-x[:, None], (0.0, 0.25, 0.5, 1.0)).quantiles[0]
    np.testing.assert_allclose(mirrored, -summarize(x[:, None], (1.0, 0.75, 0.5, 0.0)).quantiles[0], rtol=1e-12)


def test_more_values_than_a_float32_can_count() -> None:
    n = (1 << 24) + 2
    # Odd multiples modulo 2^24 visit every residue once; two more values stand at the ends.
    x = torch.arange(1 << 24).mul_(0x9E3779B1).bitwise_and_((1 << 24) - 1).float()
    x = torch.cat([torch.tensor([-1.0]), x, torch.tensor([float(1 << 24)])])
    summary = summarize(x.view(2, -1).T.reshape(1, n), (0.0, 0.25, 0.5, 1.0), unit_dim=0)
    assert summary.count.tolist() == [n]
    np.testing.assert_array_equal(summary.quantiles[0], np.array([0.0, 0.25, 0.5, 1.0]) * (n - 1) - 1)
    np.testing.assert_allclose(summary.mean, (n - 3) / 2, rtol=1e-15)
    np.testing.assert_allclose(summary.variance, (n * n - 1) / 12, rtol=1e-13)


def test_a_half_precision_sum_would_overflow() -> None:
    x = torch.full((4000, 2), 60000.0, dtype=torch.float16)
    x[::2, 1] = -60000.0
    summary = summarize(x, (0.5,))
    assert summary.mean.tolist() == [60000.0, 0.0]
    assert summary.variance.tolist() == [0.0, 3.6e9]
    assert summary.quantiles.tolist() == [[60000.0], [0.0]]


@pytest.mark.parametrize("size", [500, 40_000])
@pytest.mark.parametrize(
    ("offset", "spread", "dtype"),
    [
        (1e4, 1e-2, torch.float32),
        (-1e4, 1e-2, torch.float32),
        (3e7, 1e-2, torch.float32),
        (1e4, 1e-12, torch.float64),  # the values are a few neighbouring floats, none of them the mean
        (-1e200, 1e185, torch.float64),
        (1e-200, 1e-215, torch.float64),
    ],
)
def test_a_small_spread_far_from_zero(size: int, offset: float, spread: float, dtype: torch.dtype) -> None:
    x = (offset + spread * normal(size)).to(dtype)
    mean, variance = twin.moments(x.double().tolist())
    for summary in (summarize(x[:, None], Q), through_torch(x[:, None], Q, 1)):
        np.testing.assert_allclose(summary.variance, variance, rtol=1e-12)
        assert abs(summary.mean[0] - mean) <= 2 * math.ulp(mean)


@pytest.mark.parametrize("size", [20_000, 40_000])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 12345.6, -7e5])
def test_one_value_is_one_unit_in_the_last_place_off(size: int, value: float) -> None:
    """The mean, rounded, is then many standard deviations from every value: no shift by it would do."""
    x = torch.full((size, 1), value, dtype=torch.float64)
    x[5] = math.nextafter(value, math.inf)
    expected = math.ulp(value) ** 2 * (size - 1) / size**2
    np.testing.assert_allclose(summarize(x, Q).variance, expected, rtol=1e-12)
    np.testing.assert_allclose(through_torch(x, Q, 1).variance, expected, rtol=1e-12)


def test_a_unit_without_finite_values_stands_alone() -> None:
    x = torch.randn(90, 3, generator=torch.Generator().manual_seed(2))
    alone = summarize(x, Q)
    x[:, 1] = torch.tensor([math.nan, math.inf, -math.inf]).repeat(30)
    summary = summarize(x, Q)
    assert summary.count.tolist() == [90, 0, 90]
    assert summary.nonfinite.tolist() == [0, 90, 0]
    for field in FIELDS[2:]:
        assert np.isnan(getattr(summary, field)[1]).all()
        np.testing.assert_array_equal(getattr(summary, field)[[0, 2]], getattr(alone, field)[[0, 2]])


def test_signalling_nan_warns_nobody() -> None:
    bits = torch.tensor([0x7F800001, 0x3F800000, -0x7FFFFF], dtype=torch.int32)
    assert summarize(bits.view(torch.float32)[:, None], Q).count.tolist() == [1]


# --- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "q", "unit_dim", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), Q, 1, "int64.*allowed.*float16"),
        (torch.zeros(3, 2, dtype=torch.bool), Q, 1, "bool.*allowed"),
        (torch.zeros(3, 2, dtype=torch.complex64), Q, 1, "complex64.*allowed"),
        (torch.zeros(3, 0), Q, 0, r"empty.*\(3, 0\)"),
        (torch.zeros(0, 3), Q, 1, r"empty.*\(0, 3\)"),
        (torch.zeros(3, 2), (0.5, 1.5), 1, r"1\.5.*\[0, 1\]"),
        (torch.zeros(3, 2), (-0.1,), 1, r"-0\.1.*\[0, 1\]"),
        (torch.zeros(3, 2), (math.nan,), 1, r"nan.*\[0, 1\]"),
        (torch.zeros(3, 2), Q, 2, "unit_dim 2.*-2 to 1"),
        (torch.zeros(3, 2), Q, -3, "unit_dim -3.*-2 to 1"),
        (torch.zeros(3), Q, 1, "unit_dim 1.*-1 to 0"),
        (torch.zeros(()), Q, 0, "unit_dim 0.*it has none"),
        (torch.zeros(3, 2).to_sparse(), Q, 1, "sparse"),
        (torch.zeros(3, 2, device="meta"), Q, 1, "meta"),
    ],
)
def test_bad_input_is_named(x: torch.Tensor, q: tuple[float, ...], unit_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        summarize(x, q, unit_dim)
    if "0, 1" not in message:
        with pytest.raises(ValueError, match=message):
            prepare(x, unit_dim)
        with pytest.raises(ValueError, match=message):
            quantiles._device_rows(x, unit_dim)


def test_bad_rows_and_threads_are_named() -> None:
    with pytest.raises(ValueError, match=r"two|\(units, values\).*\(3,\)"):
        summarize_rows(np.zeros(3), Q)
    with pytest.raises(ValueError, match=r"positive.*\(3, 0\)"):
        summarize_rows(np.zeros((3, 0)), Q)
    with pytest.raises(ValueError, match="float16"):
        summarize_rows(np.zeros((3, 2), np.float16), Q)
    with pytest.raises(ValueError, match=r"threads.*0"):
        summarize(torch.zeros(3, 2), Q, threads=0)
    with pytest.raises(ValueError, match=r"2\.0.*\[0, 1\]"):
        submit(np.zeros((3, 2)), (2.0,)).result()


# --- threads and time ----------------------------------------------------------------------------------------------


def test_threads_change_who_works_and_no_number() -> None:
    x = torch.randn(40, 12, 64, 64, generator=torch.Generator().manual_seed(3))
    seen: dict[int, set[str]] = {}
    summaries = {}
    original = quantiles._long_rows

    def spy(*arguments: object) -> None:
        seen[threads].add(threading.current_thread().name)
        time.sleep(0.002)  # long enough for a helper to wake up
        original(*arguments)  # type: ignore[arg-type]  # passed through as they came

    with mock.patch.object(quantiles, "_long_rows", spy):
        for threads in (1, 3):
            seen[threads] = set()
            summaries[threads] = summarize(x, Q, threads=threads)
    assert seen[1] == {threading.current_thread().name}
    assert len(seen[3]) > 1
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(summaries[1], field), getattr(summaries[3], field))


def test_by_default_torch_says_how_many_threads() -> None:
    torch.set_num_threads(2)
    assert quantiles._count_threads(None) == 2
    torch.set_num_threads(1)
    assert quantiles._count_threads(None) == 1


@pytest.mark.parametrize("dtype", TYPES)
def test_prepared_rows_do_not_see_what_happens_next(dtype: torch.dtype) -> None:
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(4)).to(dtype).T
    for unit_dim in (0, 1):
        expected = summarize(x, Q, unit_dim)
        rows, device_rows = prepare(x, unit_dim), quantiles._device_rows(x, unit_dim)
        kept = rows.copy()
        later = x.clone()
        x.zero_()
        for summary in (summarize_rows(rows, Q), submit(rows, Q).result(), summarize_rows(device_rows, Q)):
            np.testing.assert_array_equal(summary.quantiles, expected.quantiles)
        np.testing.assert_array_equal(rows, kept)
        x.copy_(later)


def test_many_signals_give_what_each_gives_alone() -> None:
    shapes = [(100, 60), (100, 60), (7, 60), (100, 61), (3, 40_000), (3, 40_000), (100, 60)]
    rows = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(shapes)]
    rows.append(rows[0].astype(np.float64))
    everything: list[quantiles.UnitRows] = [*rows, torch.from_numpy(rows[0])]
    for summary, each in zip(summarize_many(everything, Q), everything, strict=True):
        alone = summarize_rows(each, Q)
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(summary, field), getattr(alone, field))
    assert summarize_many([], Q) == []


def test_jobs_on_a_full_pool_may_share_their_own_work() -> None:
    rows = np.random.default_rng(0).standard_normal((8, 40_000)).astype(np.float32)
    expected = summarize_rows(rows, Q).quantiles
    for future in [submit(rows, Q, threads=4) for _ in range(24)]:
        np.testing.assert_array_equal(future.result(timeout=60).quantiles, expected)


def test_an_error_on_another_thread_is_raised_here() -> None:
    def fail() -> None:
        time.sleep(0.01)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        quantiles._share([fail] * 4, threads=4)


def test_a_forked_child_has_threads_of_its_own() -> None:
    program = """
        import os, sys, warnings
        import numpy as np
        from diagnostics.quantiles import submit, summarize_rows
        warnings.simplefilter("ignore")  # that a forked process had threads is the point
        rows = np.random.default_rng(0).standard_normal((16, 40_000)).astype(np.float32)
        before = summarize_rows(rows, (0.5,), threads=3).quantiles
        for job in [submit(rows, (0.5,)) for _ in range(4 * os.cpu_count())]:
            job.result()  # by now the pool has all its threads
        child = os.fork()
        after = submit(rows, (0.5,), threads=3).result(timeout=60).quantiles
        if child == 0:
            os._exit(0 if (after == before).all() else 3)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], timeout=600, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "name", ["relu", "minus relu", "relu6", "step", "tanh", "dropped", "levels", "both zeros", "one odd one"]
)
def test_ties_do_not_cost_a_multiple(name: str) -> None:
    """numpy's selection alone takes 20 to 100 times longer on these than on distinct values."""
    rows = {kind: SHAPES[kind](200_000).float()[None].numpy() for kind in (name, "normal")}
    spent = dict.fromkeys(rows, math.inf)
    for _ in range(15):
        for kind, each in rows.items():
            start = time.perf_counter()
            summarize_rows(each, Q)
            spent[kind] = min(spent[kind], time.perf_counter() - start)
    assert spent[name] < 2.5 * spent["normal"]
