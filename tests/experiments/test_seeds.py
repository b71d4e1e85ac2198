from __future__ import annotations

import hashlib
import io
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.seeds import STREAMS, Order, Streams, global_state, load_global_state, seed_globals, stream_seed


def through_a_checkpoint(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", STREAMS)
def test_drawing_from_one_stream_shifts_no_other(name: str) -> None:
    busy, quiet = Streams(3), Streams(3)
    for other in STREAMS:
        if other != name:
            torch.rand(100, generator=busy.torch(other))
            busy.numpy(other).random(100)
    assert torch.equal(torch.rand(50, generator=busy.torch(name)), torch.rand(50, generator=quiet.torch(name)))
    assert np.array_equal(busy.numpy(name).random(50), quiet.numpy(name).random(50))


def test_streams_differ_by_name_and_by_seed() -> None:
    drawn = {tuple(torch.rand(4, generator=Streams(s).torch(n)).tolist()) for n in STREAMS for s in range(20)}
    assert len(drawn) == 20 * len(STREAMS)


def test_a_stream_seed_is_a_hash_that_must_not_change_between_versions() -> None:
    expected = int.from_bytes(hashlib.sha256(b"17/order").digest()[:8], "big") >> 1
    assert stream_seed(17, "order") == expected
    assert stream_seed(0, "init") == 1519069808562059438


def test_a_stream_that_does_not_exist_is_refused() -> None:
    for make in (Streams(0).torch, Streams(0).numpy):
        with pytest.raises(ValueError, match="no stream named 'ordr': there are init, order, data, noise"):
            make("ordr")


def test_streams_go_on_from_a_checkpoint() -> None:
    first = Streams(5)
    torch.rand(7, generator=first.torch("noise"))
    second = Streams(5)
    second.load(through_a_checkpoint(first.state()))
    assert torch.equal(torch.rand(9, generator=first.torch("noise")), torch.rand(9, generator=second.torch("noise")))


def order(count: int, batch: int, seed: int = 0) -> Order:
    return Order(count, batch, torch.Generator().manual_seed(seed))


@given(st.integers(1, 40), st.data())
def test_an_epoch_holds_no_example_twice_and_all_that_fill_batches(count: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, count))
    batches = order(count, batch)
    for _ in range(3):
        epoch = torch.cat([batches.next() for _ in range(count // batch)]).tolist()
        assert len(epoch) == len(set(epoch)) == count - count % batch
        assert set(epoch) <= set(range(count))


def test_every_epoch_has_an_order_of_its_own_and_every_seed_too() -> None:
    batches = order(500, 500)
    assert not torch.equal(batches.next(), batches.next())
    assert not torch.equal(order(500, 500, 0).next(), order(500, 500, 1).next())


@pytest.mark.parametrize("taken", range(9))
def test_the_order_goes_on_from_any_point_of_an_epoch(taken: int) -> None:
    whole, part = order(11, 3), order(11, 3)
    for _ in range(taken):
        whole.next()
        part.next()
    resumed = order(11, 3, seed=99)
    resumed.next()
    resumed.load(through_a_checkpoint(part.state()))
    for _ in range(8):
        assert torch.equal(resumed.next(), whole.next())


@pytest.mark.parametrize("batch", [0, -1, 12])
def test_a_batch_larger_than_the_data_is_refused(batch: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 11 examples, as many as there are, got {batch}"):
        order(11, batch)


def draw_globals() -> list[float]:
    # gauss() of both generators keeps a second number for the next call: that is state too
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_global_generators_are_seeded_and_go_on_from_a_checkpoint() -> None:
    seed_globals(4)
    first = draw_globals()
    state = through_a_checkpoint(global_state())
    second = draw_globals()
    assert not set(first) & set(second)
    load_global_state(state)
    assert draw_globals() == second
    seed_globals(4)
    assert draw_globals() == first
    seed_globals(5)
    assert not set(draw_globals()) & set(first)


def test_a_full_batch_is_every_example_in_one_order_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    whole = Order(7, "full", generator)
    assert whole.next().tolist() == whole.next().tolist() == list(range(7))
    other = Order(7, "full", torch.Generator())
    other.load(through_a_checkpoint(whole.state()))
    assert other.next().tolist() == list(range(7))
    assert torch.equal(generator.get_state(), before)
