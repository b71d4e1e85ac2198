"""Listen to named modules for the length of a ``with`` block.

A tap hears one signal of one module: its ``input``, its ``output``, or the gradient of the loss with respect to its
output (``grad_output``). What the listener returns is kept under the layer's name; a module that runs again within the
same forward is ``name#2``. Hooks see a tensor *before* a later in-place operation (an in-place ReLU, say) overwrites
it, and may therefore not keep it: reduce or copy at once.

Only the first forward of the root module counts. Hooks that fire while a backward is running are activation
checkpointing computing the same thing again, and are ignored. A listener that raises is caught here, because the user's
forward must not fail with it; the error is kept in ``Listening.error``.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["Layers", "Listening", "Signal", "Tap", "first_tensor", "named_modules", "named_parameters", "resolve"]

Signal = Literal["input", "output", "grad_output"]
SIGNALS: tuple[str, ...] = get_args(Signal)
Hook = Callable[..., None]
Layers = str | Sequence[str] | Callable[[str, nn.Module], bool]

# Wrappers that only pass calls on: class name -> the attribute that holds the wrapped module. By name, so that neither
# torch.distributed nor the compiler is imported to find out that it is not used.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


def _wrapped_name(module: nn.Module) -> str | None:
    return next((_WRAPPERS[base.__name__] for base in type(module).__mro__ if base.__name__ in _WRAPPERS), None)


def named_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every (name, module) of ``model``, its root as ``""``; names of wrappers (DDP, ``torch.compile``) left out.

    A module reachable under two names is listed under both.
    """
    inner = _wrapped_name(model)
    if inner is not None:
        yield from named_modules(getattr(model, inner), prefix)
        return
    yield prefix, model
    for name, child in model._modules.items():
        if child is not None:
            yield from named_modules(child, f"{prefix}.{name}" if prefix else name)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters by the names of `named_modules`; one that is tied is listed once, under its first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for prefix, module in named_modules(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (f"{prefix}.{name}" if prefix else name, parameter))
    return dict(found.values())


def resolve(model: nn.Module, layers: Layers) -> dict[str, nn.Module]:
    """The modules that ``layers`` names, in the order of the model.

    Args:
        model: Any module.
        layers: A glob on the full name (``*`` crosses dots; a leading ``*.`` also matches the top level; ``""`` is the
            model itself), a list of globs, or a predicate on (name, module). A module under two names counts once.

    What matches and never runs in a forward (a container, an unused head) is no error, as long as something else does.

    Raises:
        ValueError: If a glob, or the predicate, matches nothing; the closest names are listed.
    """
    modules = list(named_modules(model))
    if callable(layers):
        chosen = {name for name, module in modules if layers(name, module)}
        if not chosen:
            raise ValueError(f"the predicate on layers accepts none of the model's {len(modules)} modules")
    else:
        patterns = [layers] if isinstance(layers, str) else list(layers)
        if not patterns:
            raise ValueError("no layer was named: layers is empty")
        chosen = set()
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise ValueError(f"a layer is named by a string, got {pattern!r}")
            matched = {name for name, _ in modules if _matches(name, pattern)}
            if not matched:
                raise ValueError(_nothing_matches(pattern, [name for name, _ in modules if name]))
            chosen |= matched
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in modules:
        if name in chosen:
            found.setdefault(id(module), (name, module))
    return dict(found.values())


def _matches(name: str, pattern: str) -> bool:
    if not name or not pattern:
        return name == pattern
    return fnmatchcase(name, pattern) or (pattern.startswith("*.") and fnmatchcase(name, pattern[2:]))


def _nothing_matches(pattern: str, names: list[str]) -> str:
    if not names:
        return f"no layer matches {pattern!r}: the model has no submodules (layers='' is the model itself)"
    bare = pattern.replace("*", "").replace("?", "").strip(".")
    tails = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
    close = difflib.get_close_matches(bare, names, n=5, cutoff=0.3)
    close += [tails[tail] for tail in difflib.get_close_matches(bare.rsplit(".", 1)[-1], list(tails), n=5, cutoff=0.5)]
    shown = list(dict.fromkeys(close))[:5] or names[:5]
    return f"no layer matches {pattern!r}; the closest of {len(names)} names: {', '.join(shown)}"


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor in nested tuples, lists, mappings and dataclasses, depth first, or None."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, list | tuple):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (getattr(value, f.name) for f in dataclasses.fields(value))
    else:
        return None
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


@dataclass(frozen=True)
class Tap:
    """One signal of one module, and who listens.

    ``hear`` gets the detached tensor and returns what to keep. It runs inside the user's forward (or backward): it must
    not keep the tensor itself, nor change it.
    """

    layer: str
    module: nn.Module
    signal: Signal
    hear: Callable[[Tensor], Any]


class Listening:
    """The taps' hooks, attached from ``__enter__`` to ``__exit__``, and what was heard.

    Attributes:
        heard: For each tap, in the order given: call name (``layer`` or ``layer#k``) -> what ``hear`` returned.
        forwards: How often the root module was called, recomputation left out.
        error: The first exception a listener raised: (index of the tap, call name, exception); None if all went well.
    """

    def __init__(self, root: nn.Module, taps: Sequence[Tap]) -> None:
        self._root = root
        self._taps = tuple(taps)
        self._handles: list[RemovableHandle] = []
        self._calls: dict[int, int] = {}
        self._open = False
        self.heard: tuple[dict[str, Any], ...] = tuple({} for _ in self._taps)
        self.forwards = 0
        self.error: tuple[int, str, Exception] | None = None

    def __enter__(self) -> Listening:
        shield = _opaque if _compiled(self._root) else _as_it_is
        try:
            # prepend: the root may be tapped itself, and must be open before its own tap asks.
            self._handles.append(self._root.register_forward_pre_hook(shield(self._begin), prepend=True))
            for index, tap in enumerate(self._taps):
                self._handles.append(self._attach(index, tap, shield))
            self._handles.append(self._root.register_forward_hook(shield(self._end)))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._open = False

    def _begin(self, *_: object) -> None:
        if _in_backward():
            return
        if self._open:  # the forward before this one never returned: it raised, and the user tried again
            for heard in self.heard:
                heard.clear()
        else:
            self.forwards += 1
        self._open = self.forwards == 1
        self._calls.clear()

    def _end(self, *_: object) -> None:
        if not _in_backward():
            self._open = False

    def _attach(self, index: int, tap: Tap, shield: Callable[[Hook], Hook]) -> RemovableHandle:
        if tap.signal == "input":

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if self._open and not _in_backward():
                    self._listen(index, tap, args[0] if len(args) == 1 and not kwargs else (args, kwargs))

            return tap.module.register_forward_pre_hook(shield(before), with_kwargs=True)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self._open and not _in_backward():
                self._listen(index, tap, output)

        return tap.module.register_forward_hook(shield(after))

    def _listen(self, index: int, tap: Tap, value: Any) -> None:
        call = self._calls[index] = self._calls.get(index, 0) + 1
        name = tap.layer if call == 1 else f"{tap.layer}#{call}"
        tensor = first_tensor(value)
        if tensor is None:
            self._fail(index, name, TypeError(f"its {tap.signal} holds no floating-point tensor ({_describe(value)})"))
        elif tap.signal != "grad_output":
            self._keep(index, tap, name, tensor)
        elif tensor.requires_grad:
            # A tensor hook, not a module's backward hook: those refuse in-place activations and miss dict outputs.
            heard = self.heard[index]

            def keep(grad: Tensor) -> None:
                if name not in heard:
                    self._keep(index, tap, name, grad)

            self._handles.append(tensor.register_hook(keep))  # type: ignore[no-untyped-call]  # torch types it not

    def _keep(self, index: int, tap: Tap, name: str, tensor: Tensor) -> None:
        try:
            self.heard[index][name] = tap.hear(tensor.detach())
        except Exception as error:
            self._fail(index, name, error)

    def _fail(self, index: int, name: str, error: Exception) -> None:
        if self.error is None:
            self.error = (index, name, error)


def _compiled(root: nn.Module) -> bool:
    # Where the compiler was never loaded nothing is compiled. Optimizers load it, though, and wrapping hooks for
    # nothing would cost a small network as much as all that is measured.
    return "torch._dynamo" in sys.modules and any(
        module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
        for module in root.modules()
    )


def _as_it_is(hook: Hook) -> Hook:
    return hook


def _opaque(hook: Hook) -> Hook:
    """Keep the compiler from tracing into a hook."""
    return cast("Hook", torch.compiler.disable(hook))  # type: ignore[no-untyped-call]  # torch types it not


def _in_backward() -> bool:
    # What torch.utils.checkpoint itself asks to tell a recomputation from a forward.
    return bool(torch._C._current_graph_task_id() != -1)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} tensor"
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict) and not value[1]:
        return _describe(value[0][0] if len(value[0]) == 1 else value[0])
    return type(value).__name__
