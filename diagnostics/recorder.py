"""The recorder: runs the probes that are due around a user's training step, and writes what they find.

    with Recorder(model, "runs/mine", probes, loss=loss_fn) as recorder:
        for batch in loader:
            with recorder.step(batch):      # one optimizer step happens inside
                ...

Step t is the number of updates done when the block is entered. When nothing is due, entering and leaving the block asks
each schedule once and does nothing else: no hook exists, no copy is made. When the user's block raises, nothing of that
step is recorded and the exception passes.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import nn

from diagnostics.guard import Generator, guard, normalizers
from diagnostics.probe import (
    ActiveProbe,
    Before,
    Loss,
    PassiveProbe,
    Probe,
    ProbeError,
    Rows,
    Site,
    StatefulProbe,
    StepView,
    describe,
)
from diagnostics.record import RecordError, RunWriter, State
from diagnostics.taps import Listening, Tap, named_parameters

__all__ = ["Recorder", "read_checkpoint"]

CHECKPOINT = "checkpoint.pt"


class Recorder:
    """Runs probes around training steps and writes one record.

    Args:
        model: The model that is trained; wrapped (DDP, ``torch.compile``) or not.
        path: The run's folder. An existing one raises unless ``overwrite`` or ``start > 0``.
        probes: Probes with names all different.
        loss: ``loss(model, batch) -> scalar``; active probes need it to differentiate.
        optimizer: The optimizer, for probes that want the learning rate.
        generators: Random generators the forward draws from that are no attribute of a module.
        config: What the run id is made from; by default a description of the probes.
        environment: What is stored beside the numbers, one entry a session.
        start: Updates done before; above 0 the record in ``path`` is continued from there.
        part_every: A part of the record is written every so many steps, and a checkpoint with it.
        overwrite: Replace an existing run.
        checkpoint: Called after each part; what it returns (tensors and plain containers) is kept in ``checkpoint.pt``
            beside the probes' own memory, and handed back as ``restored`` when the run is resumed.

    Attributes:
        restored: What ``checkpoint`` had returned at step ``start``; None for a new run.

    Raises:
        ValueError: If a probe cannot work on this model, two probes share a name, or the folder is in the way.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | os.PathLike[str],
        probes: Sequence[Probe],
        *,
        loss: Loss | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        generators: Sequence[Generator] = (),
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        start: int = 0,
        part_every: int = 1000,
        overwrite: bool = False,
        checkpoint: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        lazy = [name for name, p in named_parameters(model).items() if isinstance(p, nn.UninitializedParameter)]
        if lazy:
            raise ValueError(f"parameter {lazy[0]!r} has no shape yet: run the model once before it is recorded")
        self._site = Site(model, loss, optimizer, tuple(generators))
        self._probes = tuple(probes)
        self._path = Path(os.path.abspath(path))  # the user may change directory
        repeated = [name for name, times in Counter(probe.name for probe in self._probes).items() if times > 1]
        if repeated:
            raise ValueError(f"two probes are called {repeated[0]!r}: give one of them another name=")
        for probe in self._probes:
            if not callable(probe.when):
                raise ValueError(
                    f"when of probe {probe.name!r} is a schedule, a function of the step such as every(100),"
                    f" got {probe.when!r}"
                )
            probe.bind(self._site)
        self._config = dict(config) if config is not None else {"probes": describe(self._probes)}
        self._environment = dict(environment) if environment is not None else {"torch": torch.__version__}
        self._start = start
        self._part_every = part_every
        self._overwrite = overwrite
        self._user_checkpoint = checkpoint
        self.restored: dict[str, Any] | None = self._restore() if start > 0 else None
        self._parameters = named_parameters(model)
        self._normalizers = normalizers(model)
        self._t = start
        self._outcome: State = "complete"
        self._counts: Counter[str] = Counter()
        self._heard_once: set[str] = set()
        self._checked = False
        self._writer: RunWriter | None = None
        self._entered = False
        self._step: _Step | None = None

    @property
    def steps_done(self) -> int:
        """The number of updates done, which is the next step's t."""
        return self._t

    def __enter__(self) -> Recorder:
        if self._entered:
            raise RuntimeError("this recorder was used already: make a new one, with start=... to go on")
        self._entered = True
        self._writer = RunWriter(
            self._path,
            config=self._config,
            environment=self._environment,
            start=self._start,
            part_every=self._part_every,
            overwrite=self._overwrite,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        writer, self._writer = self._open_writer(), None
        if error is None:
            try:
                # The checkpoint comes after what it claims to be the state of, and before the word that all is well.
                writer.flush()
                self._save()
            except BaseException as failure:
                writer.close("failed", error=f"{type(failure).__name__}: {failure}", counts=dict(self._counts))
                raise
            writer.close(self._outcome, counts=dict(self._counts))
        elif isinstance(error, Exception):
            writer.close("failed", error=f"{type(error).__name__}: {error}", counts=dict(self._counts))
        else:  # Ctrl-C and its like: what is there can be resumed
            writer.close("running", counts=dict(self._counts))

    def step(self, batch: Any) -> AbstractContextManager[None]:
        """A block in which exactly one optimizer step happens, on ``batch``."""
        return _Step(self, batch)

    def log(self, statistic: str, value: float, *, mode: str = "-") -> None:
        """Write one number of the user's own: probe ``log``, layer ``-``, at the number of updates done so far.

        Inside a step block it is kept until the block ends, and dropped if the block raises.
        """
        rows = Rows("-", {statistic: float(value)}, mode=mode)
        writer = self._open_writer()
        if self._step is not None:
            self._step.logged.append(rows)
        else:
            self._write(writer, self._t, "log", [rows])

    def stop(self, status: Literal["complete", "diverged"] = "diverged") -> None:
        """Give the record a status other than ``complete`` when the block ends without an exception.

        Raises:
            ValueError: If it is not ``complete`` or ``diverged``.
        """
        if status not in ("complete", "diverged"):
            raise ValueError(f"a run ends 'complete' or 'diverged', got {status!r}")
        self._outcome = status

    def _open_writer(self) -> RunWriter:
        if self._writer is None:
            raise RuntimeError("the recorder is not open: use it in a with block")
        return self._writer

    def _restore(self) -> dict[str, Any] | None:
        saved = read_checkpoint(self._path)
        fits = saved is not None and saved["step"] == self._start
        for probe in self._probes:
            if isinstance(probe, StatefulProbe):
                if saved is None or not fits or probe.name not in saved["probes"]:
                    where = "there is no checkpoint" if saved is None else f"the checkpoint is at step {saved['step']}"
                    raise ValueError(f"probe {probe.name!r} cannot go on from step {self._start}: {where}")
                probe.load(saved["probes"][probe.name])
        return cast("dict[str, Any]", saved["user"]) if saved is not None and fits else None

    def _save(self) -> None:
        saved = {
            "next_part": -(-self._t // self._part_every),
            "step": self._t,
            "probes": {probe.name: self._memory(probe) for probe in self._probes if isinstance(probe, StatefulProbe)},
            "user": dict(self._user_checkpoint()) if self._user_checkpoint is not None else {},
        }
        if not self._checked:
            _refuse_unreadable(saved)
            self._checked = True
        # The same temporary name each time: torch.save stores its stem in the archive.
        temporary = self._path / f"{CHECKPOINT}.tmp"
        try:
            torch.save(saved, temporary)
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(self._path / CHECKPOINT)
        except (OSError, RuntimeError) as error:  # torch says RuntimeError where the disk is full
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise RecordError(f"cannot write {self._path / CHECKPOINT}: {error}") from error

    def _memory(self, probe: StatefulProbe) -> dict[str, Any]:
        try:
            return probe.state()
        except Exception as error:
            raise ProbeError(f"the state of probe {probe.name!r} failed at step {self._t}: {error}") from error

    def _write(self, writer: RunWriter, step: int, probe: str, rows: Iterable[Rows]) -> None:
        for row in rows:
            writer.write(step, probe, row.layer, row.values, units=row.units, mode=row.mode)

    # What a step block does. It is here, and not in _Step, so that the block stays a few attributes.

    def _begin(self, step: _Step) -> None:
        if self._step is not None:
            raise RuntimeError("a step block was entered inside another one")
        self._open_writer()
        t = self._t
        due = [probe for probe in self._probes if self._is_due(probe, t)]
        if due:
            step.passive = [cast("PassiveProbe", probe) for probe in due if not probe.active]
            step.active = [cast("ActiveProbe", probe) for probe in due if probe.active]
            if step.active:
                step.before = Before(self._site, step.batch)
                step.learning_rate = _learning_rate(self._site.optimizer)
            if step.passive:
                step.mode = self._site.mode_name("step", self._normalizers)
                step.taps = [self._taps(probe, t) for probe in step.passive]
                step.listening = Listening(self._site.model, [tap for taps in step.taps for tap in taps])
                step.listening.__enter__()
        self._step = step

    def _is_due(self, probe: Probe, t: int) -> bool:
        try:
            return probe.when(t)
        except Exception as error:
            raise ProbeError(f"the schedule of probe {probe.name!r} failed at step {t}: {error}") from error

    def _taps(self, probe: PassiveProbe, t: int) -> Sequence[Tap]:
        try:
            return probe.taps()
        except Exception as error:
            raise ProbeError(f"probe {probe.name!r} failed at step {t}: {error}") from error

    def _finish(self, step: _Step, kind: type[BaseException] | None) -> None:
        self._step = None
        if step.listening is not None:
            step.listening.__exit__()
        if kind is not None:
            return
        writer, t = self._open_writer(), self._t
        self._t = t + 1
        if step.passive or step.active or step.logged:
            found: list[tuple[str, list[Rows]]] = [("log", step.logged)] if step.logged else []
            found += self._collect(step, t)
            found += self._measure(step, t)
            for name, rows in found:
                self._write(writer, t, name, rows)
        if writer.advance(self._t):
            self._save()

    def _collect(self, step: _Step, t: int) -> Iterable[tuple[str, list[Rows]]]:
        listening = step.listening
        if listening is None:
            return
        self._counts["forwards_beyond_the_first"] += max(listening.forwards - 1, 0)
        if listening.error is not None:
            index, layer, error = listening.error
            owner = [probe.name for probe, taps in zip(step.passive, step.taps, strict=True) for _ in taps][index]
            raise ProbeError(f"probe {owner!r} failed at step {t}, layer {layer!r}: {error}") from error
        first = 0
        for probe, taps in zip(step.passive, step.taps, strict=True):
            heard = listening.heard[first : first + len(taps)]
            first += len(taps)
            if any(heard):
                self._heard_once.add(probe.name)
            elif probe.name not in self._heard_once:
                raise ProbeError(_silence(probe.name, t, listening.forwards))
            else:
                self._counts[f"silent_steps_{probe.name}"] += 1
            try:
                yield probe.name, list(probe.collect(heard, step.mode))
            except Exception as error:
                raise ProbeError(f"probe {probe.name!r} failed at step {t}: {error}") from error

    def _measure(self, step: _Step, t: int) -> Iterable[tuple[str, list[Rows]]]:
        if step.before is None:
            return
        view = StepView(
            step=t,
            batch=step.before.batch,
            site=self._site,
            before=step.before.parameters,
            after={name: parameter.data for name, parameter in self._parameters.items()},
            learning_rate=step.learning_rate,
            _entry=step.before,
            _parameters=self._parameters,
        )
        for probe in step.active:
            try:
                # One guard a probe, so that what one leaves behind does not reach the next. It copies no parameters:
                # `view.at` puts other tensors in their place, and a forward does not write to them.
                with guard(self._site.model, self._site.generators, parameters=False):
                    rows = list(probe.measure(view))
            except Exception as error:
                raise ProbeError(f"probe {probe.name!r} failed at step {t}: {error}") from error
            yield probe.name, rows


class _Step:
    """One step block: what is due in it, and what was seen so far."""

    __slots__ = (
        "active",
        "batch",
        "before",
        "learning_rate",
        "listening",
        "logged",
        "mode",
        "passive",
        "recorder",
        "taps",
    )

    def __init__(self, recorder: Recorder, batch: Any) -> None:
        self.recorder = recorder
        self.batch = batch
        self.passive: Sequence[PassiveProbe] = ()
        self.active: Sequence[ActiveProbe] = ()
        self.taps: Sequence[Sequence[Any]] = ()
        self.listening: Listening | None = None
        self.before: Before | None = None
        self.learning_rate: float | None = None
        self.mode = "-"
        self.logged: list[Rows] = []

    def __enter__(self) -> None:
        self.recorder._begin(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.recorder._finish(self, kind)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The newest checkpoint of the run in ``path``: next_part, step, probes, user; None if there is none.

    Raises:
        RecordError: If it is damaged.
    """
    file = Path(path) / CHECKPOINT
    if not file.exists():
        return None
    try:
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch says it in five ways
        raise RecordError(
            f"{file} is damaged, the run cannot go on from it; remove {file.parent} to start the run over"
        ) from error
    if not isinstance(saved, dict) or not {"step", "next_part", "probes", "user"} <= set(saved):
        raise RecordError(f"{file} is no checkpoint of a recorder; remove {file.parent} to start the run over")
    return cast("dict[str, Any]", saved)


def _refuse_unreadable(saved: Mapping[str, Any]) -> None:
    """Raise now, at the first checkpoint, rather than when somebody needs one."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    try:
        torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"a checkpoint may hold tensors and plain containers only: {error}") from error


def _learning_rate(optimizer: torch.optim.Optimizer | None) -> float | None:
    rates = {float(group["lr"]) for group in optimizer.param_groups} if optimizer is not None else set()
    return rates.pop() if len(rates) == 1 else None


def _silence(name: str, step: int, forwards: int) -> str:
    if forwards == 0:
        return (
            f"probe {name!r} heard nothing at step {step}: the recorded model itself was not called in the step block"
            " (was it compiled before, or is another object called?)."
            " For a compiled model set torch._dynamo.config.skip_nnmodule_hook_guards = False before the first call."
        )
    return (
        f"probe {name!r} heard nothing at step {step} although the model was called: its layers did not run,"
        " their output needs no gradient (for grad_output), or the model was compiled without hook guards:"
        " set torch._dynamo.config.skip_nnmodule_hook_guards = False before the first call."
    )
