"""What networks learn from: pictures read from their publishers' own binary files, and a linear teacher.

N examples; pictures are ``(N, channels, height, width)`` float32, their classes ``(N,)`` int64. A regression set has
``(N, D)`` float32 targets and ``classes == 0``. MNIST (LeCun, Cortes, Burges) comes with the package as gzipped IDX:
two zero bytes, a type byte (8: unsigned byte), the number of axes, one big-endian uint32 an axis, then the values,
last axis fastest. Nothing is unpickled, and what has a published checksum is checked against it before a single value
is used: MNIST's files and Fashion-MNIST's have the same names, so a wrong folder would otherwise train without a word.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# sha256 of the unpacked files
MNIST_SHA256: Final[Mapping[str, str]] = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


class DatasetError(ValueError):
    """A dataset is absent, damaged or not what its name says."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples, whole and in memory, in the order of the files they came from."""

    name: str
    train_inputs: Tensor  # (N, ...) float32
    train_targets: Tensor  # (N,) int64 class, or (N, D) float32 where classes is 0
    test_inputs: Tensor
    test_targets: Tensor
    classes: int  # 0 for regression


def mnist(binarize: bool = True, threshold: float = 0.5) -> Dataset:
    """Handwritten digits: 60,000 training and 10,000 test pictures (1, 28, 28) in 10 classes; embedded, no download.

    Args:
        binarize: Whether a pixel is 1 where its grey value exceeds ``threshold`` and 0 elsewhere; else grey in [0, 1].
        threshold: Grey value in [0, 1); has no part in grey pictures.

    Raises:
        DatasetError: If an embedded file is absent or damaged.
        ValueError: If ``threshold`` is outside [0, 1).
    """
    folder = resources.files("experiments") / "data" / "mnist"
    return _digits("mnist", folder, MNIST_SHA256, binarize, threshold)


def read_idx(file: Traversable, sha256: str) -> npt.NDArray[np.uint8]:
    """The array of unsigned bytes in one IDX file, gzipped where its name ends in ``.gz``.

    Args:
        file: What to read.
        sha256: Checksum of the unpacked file, in hexadecimal.

    Raises:
        DatasetError: If the file is absent, cannot be unpacked, has another checksum, or is no IDX file of bytes.
    """
    try:
        content = file.read_bytes()
        if file.name.endswith(".gz"):
            content = gzip.decompress(content)
    except FileNotFoundError as error:
        raise DatasetError(f"{file} is missing") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DatasetError(f"{file} is damaged: {error}; its sha256, unpacked, should be {sha256}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DatasetError(f"{file} is damaged: its sha256, unpacked, is {found} and should be {sha256}")
    if content[:3] != b"\x00\x00\x08":
        raise DatasetError(f"{file} is not an IDX file of unsigned bytes: it begins with {content[:4].hex(' ')}")
    axes = content[3]
    start = 4 + 4 * axes
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(shape) != axes or len(content) - start != int(np.prod(shape)):
        raise DatasetError(f"{file} announces shape {shape} but holds {len(content) - start} values")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _digits(name: str, folder: Traversable, sums: Mapping[str, str], binarize: bool, threshold: float) -> Dataset:
    """The four IDX files of the MNIST family, from a folder that holds them with or without ``.gz``."""
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold is a grey value in [0, 1), not {threshold}")

    def read(stem: str) -> npt.NDArray[np.uint8]:
        plain = folder / stem
        return read_idx(plain if plain.is_file() else folder / f"{stem}.gz", sums[stem])

    def pictures(stem: str) -> Tensor:
        grey = read(stem)[:, np.newaxis]
        # numpy asks for huge pages and converts while it compares: 0.1 s where the same two steps in torch took 0.8
        values = np.empty(grey.shape, dtype=np.float32)
        if binarize:
            np.greater(grey, np.uint8(255 * threshold), out=values, casting="unsafe")
        else:
            np.divide(grey, np.float32(255), out=values)
        return torch.from_numpy(values)

    def labels(stem: str) -> Tensor:
        return torch.tensor(read(stem), dtype=torch.int64)

    return Dataset(
        name=name,
        train_inputs=pictures("train-images-idx3-ubyte"),
        train_targets=labels("train-labels-idx1-ubyte"),
        test_inputs=pictures("t10k-images-idx3-ubyte"),
        test_targets=labels("t10k-labels-idx1-ubyte"),
        classes=10,
    )
