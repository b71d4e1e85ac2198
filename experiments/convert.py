"""Put another normalizer where somebody else's model has batch normalization, and take it out again.

``convert`` changes what a model's ``BatchNorm1d``, ``BatchNorm2d``, ``BatchNorm3d`` and ``SyncBatchNorm`` modules (and
our ``Batch``) are, and leaves every one of these objects in its place: its class is exchanged, as torch's own
parametrizations do it. So parameters, running statistics, names, training flags, an optimizer made before, a module
used in two places and references held elsewhere stay what they were, and a model that is itself a batch normalization
is no special case. Hooks stay on their modules and go on firing.

Two identities carry the tests: noise of strength 0, and one ghost group as large as the batch, train bit for bit as the
model did before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeVar

import torch
from torch import distributed, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from experiments.normalizers import Batch, Ghost, NoiseLaw, NoisyBatch, Population

Target = Literal["noisy", "population", "ghost"]
Model = TypeVar("Model", bound=nn.Module)

# where a converted module keeps the class it had: on the instance, so that a copy of the model can be restored too
_FORMER: Final = "_converted_from"
_ADDED: Final = ("generator", "law", "fixed_mu", "fixed_sigma", "group", _FORMER)


def convert(
    model: Model,
    to: Target = "noisy",
    *,
    generator: torch.Generator | None = None,
    law: NoiseLaw | None = None,
    group: int | None = None,
) -> Model:
    """Make every batch normalization in ``model`` one of another kind, in place, and return the model.

    While it is noisy, the model's ``state_dict`` has one entry more for each such module: the state of the noise. A
    checkpoint of the plain model is loaded before the conversion, or with ``strict=False``.

    ::

        from experiments.convert import convert, converted, restore
        from experiments.normalizers import NoiseLaw

        convert(model, generator=torch.Generator().manual_seed(0), law=NoiseLaw(strength=2.0))  # train; then
        restore(model)
        with converted(model, to="ghost", group=16): ...  # train in the block: restored at its end

    Args:
        model: Any module that holds batch normalizations, or is one.
        to: What they become.
        generator: Where noise comes from, such as ``torch.Generator().manual_seed(0)``; needed by ``noisy``, and its
            alone.
        law: The law of the noise, an `experiments.normalizers.NoiseLaw`, by default Algorithm 1's; for ``noisy`` alone.
        group: Examples in a group; needed by ``ghost``, and its alone.

    Raises:
        ValueError: If the model has no batch normalization, if one of them cannot be converted (it is already, it has
            a forward of its own or parametrized parameters, it has seen no batch yet, it is synchronized between
            processes, or it keeps no running statistics where ``population`` needs them), or if an argument is missing
            or belongs to another target. Nothing has been converted then.
    """
    _check_arguments(to, generator, law, group)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    if not found:
        raise ValueError(f"{type(model).__name__} has no batch normalization to convert")
    for name, module in found:
        if reason := _obstacle(module, to):
            raise ValueError(f"{name or 'the model itself'} ({type(module).__name__}) cannot be converted: {reason}")
    for _, module in found:
        setattr(module, _FORMER, type(module))
        device = next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
        if generator is not None:
            module.__class__ = NoisyBatch
            assert isinstance(module, NoisyBatch)
            module.equip(module.num_features, generator, law or NoiseLaw())
            module.to(device)
        elif group is not None:
            module.__class__ = Ghost
            assert isinstance(module, Ghost)
            module.equip(group)
        else:
            module.__class__ = Population
    return model


def restore(model: Model) -> Model:
    """Undo ``convert``, in place, and return the model: parameters and statistics are as training left them.

    Raises:
        ValueError: If nothing in ``model`` is converted.
    """
    found = [module for module in model.modules() if hasattr(module, _FORMER)]
    if not found:
        raise ValueError(f"{type(model).__name__} has nothing to restore")
    for module in found:
        module.__class__ = getattr(module, _FORMER)
        for name in _ADDED:
            if hasattr(module, name):
                delattr(module, name)
    return model


@contextmanager
def converted(
    model: Model,
    to: Target = "noisy",
    *,
    generator: torch.Generator | None = None,
    law: NoiseLaw | None = None,
    group: int | None = None,
) -> Iterator[Model]:
    """``convert`` for the length of a with block, whatever happens in it."""
    convert(model, to, generator=generator, law=law, group=group)
    try:
        yield model
    finally:
        if any(hasattr(module, _FORMER) for module in model.modules()):  # the block may have restored it already
            restore(model)


def _check_arguments(to: Target, generator: torch.Generator | None, law: NoiseLaw | None, group: int | None) -> None:
    if to not in ("noisy", "population", "ghost"):
        raise ValueError(f"to is noisy, population or ghost, not {to!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ValueError(f"generator is a torch.Generator, not {generator!r}")
    if law is not None and not isinstance(law, NoiseLaw):
        raise ValueError(f"law is a NoiseLaw (of experiments.normalizers), not {law!r}")
    if group is not None and (isinstance(group, bool) or not isinstance(group, int)):
        raise ValueError(f"group is a number of examples, not {group!r}")
    if to == "noisy" and generator is None:
        raise ValueError(
            'to="noisy" needs a generator that the noise is drawn from: '
            'convert(model, to="noisy", generator=torch.Generator().manual_seed(0))'
        )
    if to != "noisy" and generator is not None:
        raise ValueError(f'to="{to}" draws no noise: leave generator out, which is for to="noisy"')
    if law is not None and to != "noisy":
        raise ValueError(f'to="{to}" draws no noise: leave law out, which is for to="noisy"')
    if to == "ghost" and group is None:
        raise ValueError(
            'to="ghost" needs a group, the number of examples that share statistics: '
            'convert(model, to="ghost", group=16)'
        )
    if to != "ghost" and group is not None:
        raise ValueError(f'to="{to}" has no groups: leave group={group} out, which is for to="ghost"')
    if group is not None and group < 1:
        raise ValueError(f"group must be at least 1, not {group}")


def _own_names(kind: type) -> set[str]:
    """What a class of somebody else's defines that its instances would miss in another class."""
    if kind.__module__.partition(".")[0] in ("torch", "builtins", "typing") or kind is Batch:
        return set()
    harmless = {"__init__", "__module__", "__doc__", "__annotations__", "__qualname__", "__dict__", "__weakref__"}
    harmless |= {"__firstlineno__", "__static_attributes__", "__parameters__", "extra_repr", "_check_input_dim"}
    return set(vars(kind)) - harmless


def _obstacle(module: _BatchNorm, to: Target) -> str | None:
    """Why this module cannot be converted; None if it can."""
    if hasattr(module, _FORMER):
        return "it is converted already"
    if isinstance(module, LazyModuleMixin):
        return "it has seen no batch yet, so the number of its features is unknown"
    own = type(module).forward not in (_BatchNorm.forward, SyncBatchNorm.forward) or "forward" in vars(module)
    if own:
        return "it has a forward of its own, which the conversion would lose"
    lost = sorted({name for kind in type(module).__mro__ for name in _own_names(kind)})
    if lost:
        return f"its class defines {', '.join(lost)}, which the conversion would lose"
    if is_parametrized(module):
        return "its parameters are parametrized"
    processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
    if isinstance(module, SyncBatchNorm) and processes > 1:
        return f"it shares its statistics between {processes} processes, and no converted module does"
    if to == "population" and module.running_mean is None:
        return "it keeps no running statistics"
    return None
