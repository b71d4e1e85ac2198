import pytest

from diagnostics.schedules import at, every, log_spaced


def due(schedule, last):
    return [step for step in range(last + 1) if schedule(step)]


def test_every_counts_zero():
    assert due(every(3), 7) == [0, 3, 6]


def test_at_is_due_nowhere_else():
    assert due(at(5, 2), 9) == [2, 5]


def test_log_spaced_has_zero_and_both_ends_and_even_ratios():
    steps = due(log_spaced(1000, 4), 1000)
    assert steps == [0, 1, 10, 100, 1000]
    assert len(due(log_spaced(10, 100), 20)) == 11  # 0..10, each once


@pytest.mark.parametrize(
    "bad",
    [
        lambda: every(0),
        lambda: every(1.5),
        lambda: every(True),
        lambda: at(),
        lambda: at(-1),
        lambda: log_spaced(0, 3),
        lambda: log_spaced(10, 1),
    ],
)
def test_nonsense_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="must be an integer of at least|needs at least one"):
        bad()


def test_a_schedule_says_what_it_is():
    assert [repr(every(100)), repr(at(0, 7)), repr(log_spaced(10, 3))] == [
        "every(100)",
        "at(0, 7)",
        "log_spaced(10, 3)",
    ]
