"""Datasets: what is read is what was written, and what is damaged, absent or somebody else's is refused by name."""

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import datasets
from experiments.datasets import Dataset, DatasetError, mnist, read_idx

STEMS = tuple(datasets.MNIST_SHA256)


def idx_bytes(values: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_digits(folder: Path, *, packed: bool, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Four tiny IDX files; their arrays and checksums by stem."""
    random = np.random.default_rng(seed)
    sizes = {STEMS[0]: (7, 4, 5), STEMS[1]: (7,), STEMS[2]: (3, 4, 5), STEMS[3]: (3,)}
    arrays, sums = {}, {}
    folder.mkdir(parents=True, exist_ok=True)
    for stem, size in sizes.items():
        arrays[stem] = random.integers(0, 256 if len(size) == 3 else 10, size, dtype=np.uint8)
        content = idx_bytes(arrays[stem])
        sums[stem] = sha256(content)
        (folder / f"{stem}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)
    return arrays, sums


@pytest.fixture(scope="module")
def binary() -> Dataset:
    return mnist()


@pytest.fixture(scope="module")
def grey() -> Dataset:
    return mnist(binarize=False)


def test_the_embedded_mnist_is_mnist(grey):
    assert grey.name == "mnist"
    assert grey.classes == 10
    assert grey.train_inputs.shape == (60_000, 1, 28, 28)
    assert grey.test_inputs.shape == (10_000, 1, 28, 28)
    assert grey.train_targets[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert grey.test_targets[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    # the class counts LeCun's files are known for
    assert torch.bincount(grey.train_targets).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert grey.train_inputs.dtype == torch.float32
    assert grey.train_targets.dtype == torch.int64
    # the mean grey value everybody normalizes by
    assert grey.train_inputs.double().mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert grey.train_inputs.min() == 0
    assert grey.train_inputs.max() == 1


def test_binary_pictures_are_grey_ones_cut_at_the_threshold(binary, grey):
    assert torch.equal(binary.train_inputs, (grey.train_inputs > 0.5).float())
    assert torch.equal(binary.test_inputs, (grey.test_inputs > 0.5).float())
    assert torch.equal(binary.train_targets, grey.train_targets)


def test_the_threshold_is_used_and_compared_strictly(grey):
    cut = 51 / 255  # a grey value that occurs: a byte equal to the threshold does not exceed it
    assert (grey.test_inputs == torch.tensor(cut)).any()
    assert torch.equal(mnist(threshold=cut).test_inputs, (grey.test_inputs > torch.tensor(cut)).float())


@pytest.mark.parametrize("threshold", [-0.1, 1.0, float("nan")])
def test_a_threshold_that_is_no_grey_value_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold"):
        mnist(threshold=threshold)


@pytest.mark.parametrize("packed", [False, True])
def test_an_idx_file_gives_back_what_was_written(tmp_path, packed):
    arrays, sums = write_digits(tmp_path, packed=packed)
    for stem in STEMS:
        read = read_idx(tmp_path / f"{stem}{'.gz' * packed}", sums[stem])
        assert read.dtype == np.uint8
        np.testing.assert_array_equal(read, arrays[stem])


def damage_nothing_but_a_bit(content: bytes) -> bytes:
    return gzip.compress(gzip.decompress(content)[:-1] + b"\xff")


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: c[:-40],
        lambda c: c[:9],
        lambda c: b"<html>" + c,
        damage_nothing_but_a_bit,
        lambda c: c[:60] + b"?" + c[61:],
    ],
)
@pytest.mark.parametrize("stem", STEMS)
def test_a_damaged_mnist_file_is_named_with_its_checksum(tmp_path, monkeypatch, damage, stem):
    folder = tmp_path / "data" / "mnist"
    _, sums = write_digits(folder, packed=True, seed=3)
    monkeypatch.setattr(datasets, "MNIST_SHA256", sums)
    monkeypatch.setattr(datasets.resources, "files", lambda package: tmp_path)
    assert mnist().train_inputs.shape == (7, 1, 4, 5)
    file = folder / f"{stem}.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DatasetError) as raised:
        mnist()
    assert str(file) in str(raised.value)
    assert sums[stem] in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere\.gz is missing"):
        read_idx(tmp_path / "nowhere.gz", "0" * 64)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01\x07", "not an IDX file"),
        (b"", "not an IDX file"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x02\x07", "announces shape"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01", "announces shape"),
    ],
)
def test_what_is_no_idx_file_of_bytes_is_refused(tmp_path, content, complaint):
    file = tmp_path / "odd"
    file.write_bytes(content)
    with pytest.raises(DatasetError, match=complaint):
        read_idx(file, sha256(content))
