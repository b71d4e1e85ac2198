"""One seed, several independent named streams.

Every random draw of a run comes from a stream named for its purpose: ``init`` (weights), ``order`` (which examples, in
which order), ``data`` (examples that are drawn and not read), ``noise`` (what a normalizer injects), ``probe`` (the
examples that probes look at), ``fixed`` (the training examples that progress is assessed on) and ``dropout`` (also
everything that draws from the process's global generators). A stream's own seed is a hash of the run's
seed and its name, so that drawing more from one never shifts another: arms of a study that share a seed share weights,
batches and examples, whatever else differs (common random numbers).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

__all__ = ["STREAMS", "Order", "Streams", "global_state", "load_global_state", "seed_globals"]

STREAMS = ("init", "order", "data", "noise", "probe", "fixed", "dropout")


def stream_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the stream ``name`` of the run's ``seed``.

    Raises:
        ValueError: If there is no stream of that name.
    """
    if name not in STREAMS:
        raise ValueError(f"no stream named {name!r}: there are {', '.join(STREAMS)}")
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Streams:
    """The named generators of one run; asking twice for a name gives the same generator, where it stands."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._torch: dict[str, torch.Generator] = {}

    def torch(self, name: str) -> torch.Generator:
        """The stream as a CPU generator of torch.

        Raises:
            ValueError: If there is no stream of that name.
        """
        if name not in self._torch:
            self._torch[name] = torch.Generator().manual_seed(stream_seed(self.seed, name))
        return self._torch[name]

    def numpy(self, name: str) -> np.random.Generator:
        """A new numpy generator at the start of the stream; numpy's and torch's draws of one name are unrelated.

        Raises:
            ValueError: If there is no stream of that name.
        """
        return np.random.default_rng(stream_seed(self.seed, name))

    def state(self) -> dict[str, Tensor]:
        """Where every torch stream that was asked for stands."""
        return {name: generator.get_state() for name, generator in self._torch.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put the torch streams back to where :meth:`state` found them."""
        for name, value in state.items():
            self.torch(name).set_state(value)


class Order:
    """Batches of example indices: every epoch a fresh permutation, no example twice in it.

    An epoch's last ``count % batch`` examples, too few for a batch, sit that epoch out. A ``full`` batch is all
    examples, always in the same order: then nothing is random, not even how sums are rounded.

    Raises:
        ValueError: If ``batch`` is not within 1..``count``.
    """

    def __init__(self, count: int, batch: int | Literal["full"], generator: torch.Generator) -> None:
        self._whole = torch.arange(count) if batch == "full" else None
        batch = count if batch == "full" else batch
        if not 1 <= batch <= count:
            raise ValueError(f"a batch holds 1 to {count} examples, as many as there are, got {batch}")
        self._count, self._batch, self._generator = count, batch, generator
        self._epoch_start = generator.get_state()
        self._epoch: Tensor | None = None
        self._position = 0

    def next(self) -> Tensor:
        """Indices of the next batch, (batch,) int64."""
        if self._whole is not None:
            return self._whole
        if self._epoch is None or self._position + self._batch > self._count:
            self._epoch_start = self._generator.get_state()
            self._epoch = torch.randperm(self._count, generator=self._generator)
            self._position = 0
        start = self._position
        self._position += self._batch
        return self._epoch[start : self._position]

    def state(self) -> dict[str, Any]:
        """The generator as it was before the epoch's permutation was drawn, and how much of that is used up."""
        return {"epoch_start": self._epoch_start, "position": self._position}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where :meth:`state` was taken: the epoch is drawn again rather than stored."""
        self._generator.set_state(state["epoch_start"])
        self._epoch, self._position = None, 0
        if state["position"]:
            self.next()
            self._position = state["position"]


def seed_globals(seed: int) -> None:
    """Seed python's, numpy's and torch's global generators from the ``dropout`` stream.

    Whatever draws without naming a stream (``nn.Dropout`` does) then repeats from run to run.
    """
    value = stream_seed(seed, "dropout")
    random.seed(value)
    np.random.seed(value % 2**32)  # noqa: NPY002 - the legacy generator is the global one that others draw from
    torch.manual_seed(value)


def global_state() -> dict[str, Any]:
    """The global generators' states in containers that ``torch.load(weights_only=True)`` accepts."""
    legacy = np.random.get_state(legacy=False)  # noqa: NPY002 - as above
    assert isinstance(legacy, dict)
    keys = torch.from_numpy(legacy["state"]["key"].astype(np.int64))
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch leaves it untyped
    return {
        "python": random.getstate(),
        "numpy": legacy | {"state": legacy["state"] | {"key": keys}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
    }


def load_global_state(state: Mapping[str, Any]) -> None:
    """Put the global generators back to where :func:`global_state` found them."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    legacy = state["numpy"]
    keys = legacy["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(legacy | {"state": legacy["state"] | {"key": keys}})  # noqa: NPY002 - as above
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
