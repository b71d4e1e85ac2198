"""What networks learn from: pictures read from their publishers' own binary files, and a linear teacher.

N examples; pictures are ``(N, channels, height, width)`` float32, their classes ``(N,)`` int64. A regression set has
``(N, D)`` float32 targets and ``classes == 0``. MNIST (LeCun, Cortes, Burges) comes with the package as gzipped IDX:
two zero bytes, a type byte (8: unsigned byte), the number of axes, one big-endian uint32 an axis, then the values,
last axis fastest. CIFAR-10 (Krizhevsky 2009) in its binary layout is records of 3073 bytes: a class, then 1024 red,
1024 green and 1024 blue values, row by row. Nothing is unpickled, and what has a published checksum is checked against
it before a single value is used: MNIST's files and Fashion-MNIST's have the same names, so a wrong folder would
otherwise train without a word.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import http.client
import math
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
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
FASHION_MNIST_SHA256: Final[Mapping[str, str]] = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
FASHION_MNIST_DEBIAN: Final = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist

CIFAR10_URL: Final = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256: Final = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"  # of the archive
CIFAR10_TRAIN: Final = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
CIFAR10_TEST: Final = "test_batch.bin"
_CIFAR10_FOLDER: Final = "cifar-10-batches-bin"
_RECORD: Final = 1 + 3 * 32 * 32


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
    weight: float = 1.0  # for how many training examples one stands


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


def fashion_mnist(root: Path | str | None = None, *, binarize: bool = False, threshold: float = 0.5) -> Dataset:
    """Articles of clothing in MNIST's format (Xiao, Rasul & Vollgraf 2017); the arguments are those of ``mnist``.

    Args:
        root: Where to look first: this folder, its ``fashion-mnist`` or its ``FashionMNIST/raw``. Then, or where it is
            None, the folder of Debian's package.
        binarize: As in ``mnist``.
        threshold: As in ``mnist``.

    Raises:
        DatasetError: If the files are in none of these places, or are not Fashion-MNIST's.
        ValueError: If ``threshold`` is outside [0, 1).
    """
    places = [FASHION_MNIST_DEBIAN]
    if root is not None:
        places = [Path(root), Path(root) / "fashion-mnist", Path(root) / "FashionMNIST" / "raw", *places]
    first = next(iter(FASHION_MNIST_SHA256))
    for place in places:
        if (place / first).is_file() or (place / f"{first}.gz").is_file():
            return _digits("fashion-mnist", place, FASHION_MNIST_SHA256, binarize, threshold)
    raise DatasetError(
        f"Fashion-MNIST is not in {_listed(places)}; install Debian's package dataset-fashion-mnist, or put the four "
        "files from https://github.com/zalandoresearch/fashion-mnist into one of these folders"
    )


def cifar10(root: Path | str, *, download: bool = False, standardize: bool = True) -> Dataset:
    """Pictures of ten kinds of things (3, 32, 32), from the binary version of CIFAR-10.

    The files themselves are checked for their layout, not for a checksum, so that a recompressed copy can stand in.

    Args:
        root: A folder with ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, in it or in its
            ``cifar-10-batches-bin``.
        download: Whether to fetch the archive from its home page into ``root`` where the files are absent.
        standardize: Whether each channel has the mean 0 and deviation 1 over the training pictures; else values in
            [0, 1].

    Raises:
        DatasetError: If the files are absent and cannot be fetched, or are not in the binary layout.
    """
    root = Path(root)
    places = [root, root / _CIFAR10_FOLDER]
    folder = next((place for place in places if (place / CIFAR10_TEST).is_file()), None)
    if folder is None and download:
        folder = root / _CIFAR10_FOLDER
        with _alone(root):  # the runs of a study ask at the same time
            if not (folder / CIFAR10_TEST).is_file():
                _download_cifar10(root)
    if folder is None:
        raise DatasetError(
            f"CIFAR-10 is not in {_listed(places)}: neither holds {CIFAR10_TEST}. Name the folder that does (root, "
            f"--root); or get {CIFAR10_URL} and unpack it there (tar xzf cifar-10-binary.tar.gz -C {root}); or have it "
            "downloaded (whybn: leave --root out; in Python: download=True)"
        )
    train = [_read_cifar10(folder / name) for name in CIFAR10_TRAIN]
    if len({len(records) for records in train}) > 1:
        counts = ", ".join(f"{name} {len(records)}" for name, records in zip(CIFAR10_TRAIN, train, strict=True))
        raise DatasetError(f"the training files in {folder} hold different numbers of pictures: {counts}")
    train_records, test_records = np.concatenate(train), _read_cifar10(folder / CIFAR10_TEST)
    train_inputs, test_inputs = _cifar10_pictures(train_records), _cifar10_pictures(test_records)
    if standardize:
        mean, deviation = _channel_moments(train_inputs)
        for inputs in (train_inputs, test_inputs):
            inputs.sub_(mean).div_(deviation)
    return Dataset(
        name="cifar10",
        train_inputs=train_inputs,
        train_targets=torch.tensor(train_records[:, 0], dtype=torch.int64),
        test_inputs=test_inputs,
        test_targets=torch.tensor(test_records[:, 0], dtype=torch.int64),
        classes=10,
    )


def gaussian(*, dimension: int, examples: int, test_examples: int, scale: float, generator: torch.Generator) -> Dataset:
    """A linear teacher: x ~ N(0, I) and the target A x, with one A of independent N(0, scale^2) entries.

    Santurkar et al. (2018, appendix A.1) have 10 dimensions and 1000 examples in one batch, and do not give the scale.

    Args:
        dimension: Of the inputs and of the targets, D: A is (D, D).
        examples: For training.
        test_examples: Further ones, with the same A.
        scale: Standard deviation of the entries of A.
        generator: Where A, the training inputs and the test inputs come from, in this order.

    Raises:
        ValueError: If a size is not positive or ``scale`` is negative or not finite.
    """
    for name, size in (("dimension", dimension), ("examples", examples), ("test_examples", test_examples)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
    if not 0 <= scale < float("inf"):
        raise ValueError(f"scale is a standard deviation, not {scale}")
    teacher = scale * torch.randn(dimension, dimension, generator=generator)
    train, test = (torch.randn(count, dimension, generator=generator) for count in (examples, test_examples))
    return Dataset("gaussian", train, train @ teacher.T, test, test @ teacher.T, classes=0)


def reduced(data: Dataset) -> Dataset:
    """A linear teacher's set with its N training examples replaced by 2 D points that no linear network can tell apart.

    A linear network's loss, and every gradient of it, depends on the inputs only through their mean and their biased
    covariance, with batch normalization too. The points ``mean +- sqrt(D) l_j``, with ``l_j`` the columns of the
    covariance's Cholesky factor, have both; each stands for ``N / (2 D)`` examples.

    Raises:
        ValueError: If it is no regression set, or its targets are no linear function of its inputs.
    """
    if data.classes:
        raise ValueError(f"{data.name} has classes: only a linear teacher's set can be reduced")
    inputs, targets = data.train_inputs.double(), data.train_targets.double()
    teacher = torch.linalg.lstsq(inputs, targets).solution
    if not torch.allclose(inputs @ teacher, targets, rtol=1e-4, atol=1e-4 * float(targets.abs().max())):
        raise ValueError(f"the targets of {data.name} are no linear function of its inputs")
    count, dimension = inputs.shape
    mean = inputs.mean(0)
    factor = torch.linalg.cholesky((inputs - mean).T @ (inputs - mean) / count) * math.sqrt(dimension)
    points = torch.cat([mean + factor.T, mean - factor.T])
    kind = data.train_inputs.dtype
    return replace(
        data,
        train_inputs=points.to(kind),
        train_targets=(points @ teacher).to(kind),
        weight=data.weight * count / len(points),
    )


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
    if content[:3] != b"\x00\x00\x08" or len(content) < 4 or len(content) < 4 + 4 * content[3]:
        raise DatasetError(f"{file} is not an IDX file of unsigned bytes: it begins with {content[:8].hex(' ')}")
    start = 4 + 4 * content[3]
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != math.prod(shape):
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


def _listed(places: list[Path]) -> str:
    return ", ".join(str(place) for place in places)


def _read_cifar10(file: Path) -> npt.NDArray[np.uint8]:
    """One file's records, (N, 3073)."""
    if not file.is_file():
        raise DatasetError(f"{file} is missing")
    content = np.fromfile(file, dtype=np.uint8)
    if content.size == 0 or content.size % _RECORD:
        raise DatasetError(f"{file} is damaged: {content.size} bytes are no whole number of {_RECORD}-byte records")
    records = content.reshape(-1, _RECORD)
    if records[:, 0].max() > 9:
        raise DatasetError(f"{file} is damaged or of another set: it has a class {records[:, 0].max()}, above 9")
    return records


def _cifar10_pictures(records: npt.NDArray[np.uint8]) -> Tensor:
    values = np.empty((len(records), _RECORD - 1), dtype=np.float32)
    np.divide(records[:, 1:], np.float32(255), out=values)
    return torch.from_numpy(values.reshape(-1, 3, 32, 32))


def _channel_moments(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased deviation of each channel, shaped to broadcast; ten times as fast as std_mean."""
    channels = pictures.flatten(2)
    mean = channels.mean(2, keepdim=True).double().mean(0)
    square = torch.linalg.vector_norm(channels, dim=2, keepdim=True).double().square().mean(0) / channels.shape[2]
    deviation = (square - mean.square()).sqrt()
    return mean.float().unsqueeze(2), deviation.float().unsqueeze(2)


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time within, for this folder; where that fails, none is left that was made for it."""
    made = _absent(root)
    try:
        descriptor = _opened(root)
    except OSError as error:
        _remove_empty(made)
        raise DatasetError(
            f"CIFAR-10 cannot be put into {root}: {error.strerror}; name another folder that holds it (root, --root)"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    except BaseException:
        _remove_empty(made)
        raise
    finally:
        os.close(descriptor)


def _opened(folder: Path) -> int:
    """A descriptor of the folder, made if absent; again where another run has just removed it, having failed."""
    for _ in range(100):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
    raise FileNotFoundError(errno.ENOENT, "it is removed again and again", str(folder))


def _absent(folder: Path) -> list[Path]:
    """The folder and those above it that do not exist, innermost first."""
    return [place for place in (folder, *folder.parents) if not place.exists()]


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove these, innermost first, up to the first that holds something or is gone already."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _download_cifar10(root: Path) -> None:
    """Fetch the archive, check it, and unpack its files; nothing half-written is left or seen by another process."""
    folder, temporary = root / _CIFAR10_FOLDER, root / f"{_CIFAR10_FOLDER}.{os.getpid()}"
    digest, made = hashlib.sha256(), _absent(folder)
    try:
        with urllib.request.urlopen(CIFAR10_URL, timeout=30) as source:
            folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as target:
                while block := source.read(2**20):
                    digest.update(block)
                    target.write(block)
        if digest.hexdigest() != CIFAR10_SHA256:
            raise DatasetError(f"{CIFAR10_URL} has sha256 {digest.hexdigest()} and should have {CIFAR10_SHA256}")
        with tarfile.open(temporary) as archive:
            content = {name: _member(archive, name) for name in (*CIFAR10_TRAIN, CIFAR10_TEST)}
        for name, values in content.items():
            temporary.write_bytes(values)
            temporary.replace(folder / name)
    except (OSError, http.client.HTTPException) as error:
        raise DatasetError(
            f"CIFAR-10 is not in {root} and could not be fetched: {error}. If you have it, name its folder (root, "
            f"--root); else, where there is a network, unpack {CIFAR10_URL} and copy its folder {_CIFAR10_FOLDER} into "
            f"{root}"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
        _remove_empty(made)  # holds the files, or nothing because they could not be had


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(f"{_CIFAR10_FOLDER}/{name}")
    if file is None:
        raise DatasetError(f"{name} in the archive is no file")
    return file.read()
