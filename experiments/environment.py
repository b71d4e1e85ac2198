"""What stood around a run: stored beside its numbers, never part of its address.

Versions, processor, device, threads and the commit of the code; no host, user or path names, so that a record can be
given away. Nothing here loads torch unless a device or torch itself is asked about.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

__all__ = ["commit", "cores", "describe", "pick_device"]

_PACKAGES = ("whybn", "torch", "numpy", "scipy", "pandas", "pyarrow", "pydantic")
_CUDA_NODES = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")  # NVIDIA, Jetson, WSL, ROCm


def describe(device: Literal["cpu", "cuda"], threads: int) -> dict[str, Any]:
    """One session's entry for environment.json."""
    import torch

    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in _PACKAGES},
        "commit": commit(Path(__file__).resolve().parent.parent),
        "device": {"type": device, "name": torch.cuda.get_device_name() if device == "cuda" else _cpu_name()},
        "cpu": {"name": _cpu_name(), "capability": torch.backends.cpu.get_cpu_capability(), "cores": cores()},
        "cuda": torch.version.cuda,
        "threads": threads,
    }


def pick_device(wanted: str) -> Literal["cpu", "cuda"]:
    """The device type for ``auto`` (CUDA if there is one), ``cpu`` or ``cuda``.

    Raises:
        ValueError: If ``cuda`` is asked for and torch has none, or for any other name.
    """
    if wanted == "cpu":
        return "cpu"
    if wanted not in ("auto", "cuda"):
        raise ValueError(f"a device is auto, cpu or cuda, got {wanted!r}")
    if _cuda_available():
        return "cuda"
    if wanted == "cuda":
        raise ValueError("device cuda was asked for, but torch finds none here: use cpu or auto")
    return "cpu"


def cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def commit(root: Path) -> Mapping[str, Any] | None:
    """``{"hash", "dirty"}`` of the git checkout whose top folder is ``root``; None if it is not one, or git is absent.

    ``dirty`` says that files differ from the commit or are not in it.
    """
    if (top := _git(root, "rev-parse", "--show-toplevel")) is None or Path(top).resolve() != root.resolve():
        return None  # not in git, or installed somewhere inside a checkout of something else
    head, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    if head is None or status is None:
        return None
    return {"hash": head, "dirty": bool(status)}


def _cuda_available() -> bool:
    # Loading torch takes seconds. Where the system shows no device node there is no need to ask it.
    if sys.platform == "darwin" or (sys.platform == "linux" and not any(map(os.path.exists, _CUDA_NODES))):
        return False
    import torch

    return torch.cuda.is_available()


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", os.fspath(root), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
