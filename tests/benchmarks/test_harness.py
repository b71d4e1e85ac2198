"""The harness finds planted ratios with a clock of our own making, and its verdicts can fail."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import stats

from tests.benchmarks import __main__ as command
from tests.benchmarks.harness import Median, Number, Ratio, Row, Work, judge, measure, median


class World:
    """A clock that only the work moves, and a log of who worked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def clock(self) -> float:
        return self.now

    def work(self, name: str, seconds: Callable[[], float]) -> Work:
        def call() -> None:
            self.log.append(name)
            self.now += seconds()

        return call

    def row(
        self, subject: Callable[[], float], reference: Callable[[], float], bar: float = 1.0, **fields: object
    ) -> Ratio:
        @contextmanager
        def setup() -> Iterator[tuple[Work, Work]]:
            self.log.clear()
            yield self.work("subject", subject), self.work("reference", reference)
            self.log.append("closed")

        return replace(Ratio("planted", setup, bar=1.0), **fields)  # type: ignore[arg-type]  # a test's own spelling


def test_a_planted_ratio_is_found_under_noise() -> None:
    world, random = World(), np.random.default_rng(0)
    row = world.row(lambda: 0.003 * random.lognormal(0, 0.2), lambda: 0.001 * random.lognormal(0, 0.2), bar=2.5)
    result = measure(row, world.clock)
    assert result.measured.low < 3 < result.measured.high
    assert result.measured.high / result.measured.low < 1.2
    assert result.control is not None
    assert result.control.low < 1 < result.control.high
    assert result.verdict == "missed"
    assert result.subject is not None
    assert result.reference is not None
    assert result.subject.value == pytest.approx(0.00306, rel=0.1)  # the mean of exp(0.2 z) is 1.02
    assert result.reference.value == pytest.approx(0.00102, rel=0.1)
    assert len(result.values) == result.measured.n == 30
    assert measure(replace(row, bar=3.5), world.clock).verdict == "met"
    faster = measure(replace(row, faster=True, bar=0.3, goal=0.32), world.clock)
    assert faster.measured.value == pytest.approx(1 / 3, rel=0.1)
    assert faster.verdict == "goal"
    assert measure(replace(row, faster=True, bar=0.4), world.clock).verdict == "missed"


def test_a_machine_that_slows_down_or_starts_cold_favours_neither_side() -> None:
    world = World()

    def slower(seconds: float) -> Callable[[], float]:
        return lambda: seconds * (1 + world.now / 10)

    result = measure(world.row(slower(0.002), slower(0.001), block=0.01), world.clock)
    assert result.measured.value == pytest.approx(2, rel=1e-3)
    assert result.control is not None
    assert result.control.value == pytest.approx(1, rel=1e-3)


def test_rounds_alternate_and_blocks_fill_their_time() -> None:
    world = World()
    measure(world.row(lambda: 0.004, lambda: 0.001, pairs=4, block=0.02), world.clock)
    assert world.log[:4] == ["subject", "subject", "reference", "reference"]  # warm up, calibrate
    rounds = world.log[4:-1]
    assert rounds == (["subject"] * 5 + ["reference"] * 20 + ["subject"] * 5) * 4
    assert world.log[-1] == "closed"


def test_both_orders_count_the_same() -> None:
    """A subject dear on every second call: of its two blocks the cheap one counts in one round, the dear one next."""
    world, calls = World(), iter(range(10_000))
    row = world.row(lambda: 1.0 + 0.01 * (next(calls) % 2), lambda: 1.0, pairs=8, block=1e-3)
    result = measure(row, world.clock)
    assert sorted(result.values) == pytest.approx([1.0] * 4 + [1.01] * 4)
    assert result.values[0] != result.values[1]


def test_the_timed_block_is_undisturbed_and_all_is_put_back() -> None:
    seen: list[tuple[bool, int]] = []
    torch.set_num_threads(1)

    @contextmanager
    def setup() -> Iterator[tuple[Work, Work]]:
        yield lambda: seen.append((gc.isenabled(), torch.get_num_threads())), lambda: sum(range(100))

    measure(Ratio("quiet", setup, bar=1.0, threads=2, pairs=2, block=1e-4))
    assert set(seen) == {(False, 2)}
    assert gc.isenabled()
    assert torch.get_num_threads() == 1

    @contextmanager
    def broken() -> Iterator[tuple[Work, Work]]:
        yield lambda: 1 / 0, lambda: None

    with pytest.raises(ZeroDivisionError):
        measure(Ratio("broken", broken, bar=1.0, threads=2))
    assert gc.isenabled()
    assert torch.get_num_threads() == 1


def test_counts_and_plain_numbers() -> None:
    counts = iter(range(100, 200))

    @contextmanager
    def two() -> Iterator[tuple[Work, Work]]:
        yield lambda: 3 * next(counts) ** 0, lambda: 2

    result = measure(Ratio("forwards", two, bar=1.4, returned=True, pairs=1))
    assert (result.measured, result.verdict, result.control) == (Median(1.5, 1.5, 1.5, 0.0, 1), "missed", None)

    @contextmanager
    def growth() -> Iterator[Callable[[], float]]:
        yield lambda: 12.5

    memory = Number("memory", growth, "MiB", bar=16.0, goal=8.0)
    assert measure(memory).verdict == "met"
    assert measure(replace(memory, bar=12.0)).verdict == "missed"
    assert measure(replace(memory, goal=13.0)).verdict == "goal"
    assert measure(replace(memory, at_least=True, bar=13.0)).verdict == "missed"
    assert measure(replace(memory, repeats=3)).values == [12.5] * 3


def test_a_cost_of_nothing_gives_no_ratio() -> None:
    world = World()
    with pytest.raises(ValueError, match=r"planted.*costs"):
        measure(world.row(lambda: 0.0, lambda: 1.0, block=1e-6), world.clock)


@pytest.mark.parametrize("n", [6, 7, 29, 30, 31, 100])
def test_the_interval_is_the_binomial_one(n: int) -> None:
    values = np.random.default_rng(n).permutation(n) + 1.0
    found = median(values.tolist())
    k = int(found.low)
    assert (found.value, found.high, found.n) == (np.median(values), n + 1 - k, n)
    assert found.coverage == pytest.approx(1 - 2 * stats.binom.cdf(k - 1, n, 0.5))
    assert found.coverage >= 0.95
    assert 1 - 2 * stats.binom.cdf(k, n, 0.5) < 0.95 or k == n // 2


def test_few_values_promise_little() -> None:
    assert median([3.0]) == Median(3.0, 3.0, 3.0, 0.0, 1)
    assert median([3.0, 1.0, 2.0]) == Median(2.0, 1.0, 3.0, 0.75, 3)
    with pytest.raises(ValueError, match="finite"):
        median([])
    with pytest.raises(ValueError, match="nan"):
        median([1.0, float("nan")])


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(5)
    draws = 2000
    inside = sum(m.low < 1 < m.high for m in (median(random.lognormal(0, 1, 30).tolist()) for _ in range(draws)))
    coverage = 1 - 2 * stats.binom.cdf(9, 30, 0.5)
    z = (inside - draws * coverage) / (draws * coverage * (1 - coverage)) ** 0.5
    assert abs(z) < 3.5


@pytest.mark.parametrize(
    ("low", "value", "high", "verdict"),
    [(1.1, 1.2, 1.3, "missed"), (0.9, 1.2, 1.3, "open"), (0.8, 0.9, 0.95, "met"), (0.3, 0.4, 0.9, "goal")],
)
def test_verdicts_in_both_directions(low: float, value: float, high: float, verdict: str) -> None:
    assert judge(Median(value, low, high, 0.95, 30), 1.0, 0.5, at_least=False) == verdict
    assert judge(Median(-value, -high, -low, 0.95, 30), -1.0, -0.5, at_least=True) == verdict
    assert judge(Median(value, low, high, 0.95, 30), 1.0, None, at_least=False) in (verdict, "met")


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    @contextmanager
    def growth() -> Iterator[Callable[[], float]]:
        yield lambda: 5.0

    @contextmanager
    def pair() -> Iterator[tuple[Work, Work]]:
        yield lambda: sum(range(500)), lambda: sum(range(5000))

    def topic(*rows: Row) -> Callable[[], Iterable[Row]]:
        return lambda: rows

    fine, heavy = ModuleType("planted_fine"), ModuleType("planted_heavy")
    fine.rows = topic(Ratio("small sum vs large", pair, bar=0.9, pairs=6, block=1e-4))  # type: ignore[attr-defined]
    heavy.rows = topic(Number("memory [MiB]", growth, "MiB", bar=4.0))  # type: ignore[attr-defined]
    for module in (fine, heavy):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return ["planted_fine", "planted_heavy"]


def test_the_command_prints_writes_and_fails_on_a_missed_bar(
    planted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert command.main(["--json", str(path)], planted) == 1
    shown = capsys.readouterr().out
    assert "small sum vs large" in shown
    assert "missed" in shown
    written = json.loads(path.read_text())
    assert [row["verdict"] for row in written["rows"]] == ["met", "missed"]
    assert len(written["rows"][0]["values"]) == 6
    assert {"cpu", "cores", "torch", "numpy", "torch_threads", "load"} <= written["environment"].keys()


def test_only_picks_rows_by_name_or_topic(
    planted: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert command.main(["--json", str(path), "--only", "small", "--pairs", "7"], planted) == 0
    assert [row["measured"]["n"] for row in json.loads(path.read_text())["rows"]] == [7]
    assert command.main(["--json", str(path), "--only", "*_heavy"], planted) == 1
    path.unlink()
    assert command.main(["--json", str(path), "--only", "nothing"], planted) == 2
    assert "memory [MiB]" in capsys.readouterr().err
    assert not path.exists()


def test_two_rows_of_one_name_are_refused(planted: list[str]) -> None:
    with pytest.raises(ValueError, match="small sum vs large"):
        list(command.find([planted[0], planted[0]]))


def test_topics_are_found_by_walking_the_package() -> None:
    found = command.topics()
    assert "tests.benchmarks.quantiles" in found
    assert not {name.rsplit(".", 1)[-1] for name in found} & {"harness", "__main__", "test_harness"}
    for row in command.find(found):
        assert row.bar > 0
