"""Datasets: what is read is what was written, and what is damaged, absent or somebody else's is refused by name."""

import gzip
import hashlib
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments import datasets
from experiments.datasets import Dataset, DatasetError, cifar10, fashion_mnist, gaussian, mnist, read_idx, reduced

DEBIAN = datasets.FASHION_MNIST_DEBIAN
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
        (b"\x00\x00\x08\x01\x00\x00\x00\x01\x07\x07", "announces shape"),
        (b"\x00\x00\x08", "not an IDX file"),
        (b"\x00\x00\x08\x02\x00\x00\x00\x01\x07", "not an IDX file"),
    ],
)
def test_what_is_no_idx_file_of_bytes_is_refused(tmp_path, content, complaint):
    file = tmp_path / "odd"
    file.write_bytes(content)
    with pytest.raises(DatasetError, match=complaint):
        read_idx(file, sha256(content))


# ------------------------------------------------------------------------------------------------------- Fashion-MNIST


@pytest.fixture
def no_debian(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "FASHION_MNIST_DEBIAN", tmp_path / "debian")
    return tmp_path / "debian"


@pytest.mark.parametrize("place", ["", "fashion-mnist", "FashionMNIST/raw"])
@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_is_found_under_its_root(tmp_path, monkeypatch, no_debian, place, packed):
    arrays, sums = write_digits(tmp_path / "root" / place, packed=packed)
    monkeypatch.setattr(datasets, "FASHION_MNIST_SHA256", sums)
    found = fashion_mnist(tmp_path / "root")
    assert (found.name, found.classes) == ("fashion-mnist", 10)
    np.testing.assert_array_equal(found.train_inputs.numpy()[:, 0], arrays[STEMS[0]] / np.float32(255))
    np.testing.assert_array_equal(found.train_targets.numpy(), arrays[STEMS[1]])
    np.testing.assert_array_equal(found.test_inputs.numpy()[:, 0], arrays[STEMS[2]] / np.float32(255))
    np.testing.assert_array_equal(found.test_targets.numpy(), arrays[STEMS[3]])
    cut = fashion_mnist(tmp_path / "root", binarize=True, threshold=0.25)
    assert torch.equal(cut.train_inputs, (found.train_inputs > 0.25).float())


def test_fashion_mnist_is_found_where_debian_puts_it_and_the_root_comes_first(tmp_path, monkeypatch, no_debian):
    assert Path("/usr/share/datasets/fashion-mnist") == DEBIAN
    arrays, sums = write_digits(no_debian, packed=True)
    monkeypatch.setattr(datasets, "FASHION_MNIST_SHA256", sums)
    for root in (None, tmp_path / "nothing"):
        np.testing.assert_array_equal(fashion_mnist(root).train_targets.numpy(), arrays[STEMS[1]])
    write_digits(tmp_path / "root", packed=True, seed=1)
    with pytest.raises(
        DatasetError, match="root"
    ):  # other files there, so another checksum: not passed over in silence
        fashion_mnist(tmp_path / "root")


def test_digits_in_the_place_of_clothes_are_refused(no_debian):
    folder = Path(datasets.__file__).parent / "data" / "mnist"
    with pytest.raises(DatasetError, match="sha256"):
        fashion_mnist(folder)


def test_fashion_mnist_that_is_nowhere_says_where_it_was_looked_for_and_how_to_get_it(tmp_path, no_debian):
    with pytest.raises(DatasetError) as raised:
        fashion_mnist(tmp_path)
    for part in (str(tmp_path), "FashionMNIST/raw", str(no_debian), "dataset-fashion-mnist", "https://"):
        assert part in str(raised.value)


# ------------------------------------------------------------------------------------------------------------- CIFAR-10


def write_cifar10(folder: Path, per_file: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The six files of the binary layout; the classes and pictures of all of them, the test file last."""
    random = np.random.default_rng(5)
    classes = random.integers(0, 10, 6 * per_file, dtype=np.uint8)
    pictures = random.integers(0, 256, (6 * per_file, 3, 32, 32), dtype=np.uint8)
    folder.mkdir(parents=True)
    for i, name in enumerate((*datasets.CIFAR10_TRAIN, datasets.CIFAR10_TEST)):
        part = slice(i * per_file, (i + 1) * per_file)
        records = [bytes([c]) + p.tobytes() for c, p in zip(classes[part], pictures[part], strict=True)]
        (folder / name).write_bytes(b"".join(records))
    return classes, pictures


@pytest.mark.parametrize("place", ["", "cifar-10-batches-bin"])
def test_cifar10_gives_back_what_was_written(tmp_path, place):
    classes, pictures = write_cifar10(tmp_path / "root" / place)
    found = cifar10(tmp_path / "root", standardize=False)
    assert (found.name, found.classes) == ("cifar10", 10)
    np.testing.assert_array_equal(found.train_inputs.numpy(), pictures[:20] / np.float32(255))
    np.testing.assert_array_equal(found.test_inputs.numpy(), pictures[20:] / np.float32(255))
    np.testing.assert_array_equal(found.train_targets.numpy(), classes[:20])
    np.testing.assert_array_equal(found.test_targets.numpy(), classes[20:])


def test_channels_are_standardized_by_the_training_pictures(tmp_path):
    _, pictures = write_cifar10(tmp_path / "root")
    found = cifar10(str(tmp_path / "root"))
    train = pictures[:20].astype(np.float64)
    mean, deviation = train.mean((0, 2, 3), keepdims=True), train.std((0, 2, 3), keepdims=True)
    np.testing.assert_allclose(found.train_inputs.numpy(), (train - mean) / deviation, atol=1e-5)
    np.testing.assert_allclose(found.test_inputs.numpy(), (pictures[20:] - mean) / deviation, atol=1e-5)


def truncate(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("name", "damage", "complaint"),
    [
        ("data_batch_3.bin", lambda f: truncate(f, 5000), "data_batch_3.bin is damaged: 5000 bytes"),
        ("test_batch.bin", lambda f: truncate(f, 0), "test_batch.bin is damaged: 0 bytes"),
        ("data_batch_2.bin", lambda f: truncate(f, 3073), "different numbers of pictures: .*data_batch_2.bin 1"),
        ("data_batch_4.bin", lambda f: f.write_bytes(b"\x0a" * 4 * 3073), "data_batch_4.bin .*class 10, above 9"),
        ("data_batch_5.bin", lambda f: f.unlink(), "data_batch_5.bin is missing"),
    ],
)
def test_a_damaged_cifar10_file_is_named(tmp_path, name, damage, complaint):
    write_cifar10(tmp_path / "root")
    damage(tmp_path / "root" / name)
    with pytest.raises(DatasetError, match=complaint):
        cifar10(tmp_path / "root")


def test_cifar10_that_is_absent_says_where_it_was_looked_for_and_how_to_get_it(tmp_path):
    with pytest.raises(DatasetError) as raised:
        cifar10(tmp_path / "root")
    for part in (str(tmp_path / "root"), "cifar-10-batches-bin", datasets.CIFAR10_URL, "--root", "download=True"):
        assert part in str(raised.value)
    assert not (tmp_path / "root").exists()


@pytest.fixture
def home_page(tmp_path, monkeypatch):
    """An archive in the layout of the official one, at an address that needs no network."""
    write_cifar10(tmp_path / "away" / "cifar-10-batches-bin")
    archive = tmp_path / "away" / "cifar.tar.gz"
    with tarfile.open(archive, "w:gz") as files:
        files.add(tmp_path / "away" / "cifar-10-batches-bin", "cifar-10-batches-bin")
    monkeypatch.setattr(datasets, "CIFAR10_URL", archive.as_uri())
    monkeypatch.setattr(datasets, "CIFAR10_SHA256", sha256(archive.read_bytes()))
    return archive


def test_the_download_is_checked_unpacked_and_made_once(tmp_path, home_page):
    root = tmp_path / "new" / "root"
    downloaded = cifar10(root, download=True)
    assert torch.equal(downloaded.train_inputs, cifar10(home_page.parent).train_inputs)
    assert [path.name for path in root.iterdir()] == ["cifar-10-batches-bin"]
    home_page.unlink()
    assert torch.equal(cifar10(root, download=True).test_inputs, downloaded.test_inputs)


def test_a_download_with_another_checksum_leaves_nothing(tmp_path, home_page):
    home_page.write_bytes(home_page.read_bytes() + b"\0")
    with pytest.raises(DatasetError, match=f"should have {datasets.CIFAR10_SHA256}"):
        cifar10(tmp_path / "new" / "root", download=True)
    assert not (tmp_path / "new").exists()


def test_without_a_network_the_error_says_what_to_do(tmp_path, home_page):
    home_page.unlink()
    with pytest.raises(DatasetError, match=r"could not be fetched.* --root.* copy its folder cifar-10-batches-bin"):
        cifar10(tmp_path / "new" / "root", download=True)
    assert not (tmp_path / "new").exists()
    (tmp_path / "kept").mkdir()  # a folder that was there before is not ours to remove
    with pytest.raises(DatasetError, match="could not be fetched"):
        cifar10(tmp_path / "kept", download=True)
    assert list((tmp_path / "kept").iterdir()) == []


# ------------------------------------------------------------------------------------------------------ linear teacher


def make_gaussian(seed=0, **changes):
    settings = {"dimension": 4, "examples": 2000, "test_examples": 500, "scale": 0.7} | changes
    return gaussian(**settings, generator=torch.Generator().manual_seed(seed))


def test_gaussian_targets_are_one_matrix_times_normal_inputs():
    found = make_gaussian()
    assert (found.name, found.classes) == ("gaussian", 0)
    assert found.train_inputs.shape == found.train_targets.shape == (2000, 4)
    teacher = torch.linalg.lstsq(found.train_inputs, found.train_targets).solution
    torch.testing.assert_close(found.test_inputs @ teacher, found.test_targets, rtol=1e-4, atol=1e-4)
    covariance = torch.cov(found.train_inputs.T)
    assert (covariance - torch.eye(4)).abs().max() < 4 * (2 / 2000) ** 0.5
    assert not torch.equal(found.train_inputs[:500], found.test_inputs)


def test_the_scale_and_the_seed_of_the_teacher_are_used():
    one, double, other = make_gaussian(), make_gaussian(scale=1.4), make_gaussian(seed=1)
    assert torch.equal(one.train_inputs, double.train_inputs)
    torch.testing.assert_close(2 * one.train_targets, double.train_targets)
    assert not torch.equal(one.train_inputs, other.train_inputs)
    found = make_gaussian(dimension=60, scale=0.3, examples=400)
    teacher = torch.linalg.lstsq(found.train_inputs.double(), found.train_targets.double()).solution
    assert abs(teacher.square().mean().item() / 0.09 - 1) < 4 * (2 / 3600) ** 0.5


@pytest.mark.parametrize(
    "change", [{"dimension": 0}, {"examples": 0}, {"test_examples": -1}, {"scale": -1.0}, {"scale": float("nan")}]
)
def test_a_teacher_that_is_none_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        make_gaussian(**change)


def test_reduced_keeps_mean_covariance_and_teacher(tmp_path):
    whole = gaussian(dimension=4, examples=60, test_examples=3, scale=2.0, generator=torch.Generator().manual_seed(0))
    few = reduced(whole)
    assert few.train_inputs.shape == (8, 4)
    assert few.weight == 60 / 8
    for a, b in ((whole.train_inputs, few.train_inputs), (whole.train_targets, few.train_targets)):
        torch.testing.assert_close(b.mean(0), a.mean(0), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(b.T.cov(correction=0), a.T.cov(correction=0), atol=1e-5, rtol=1e-5)
    assert reduced(few).weight == 60 / 8  # it is its own reduction


def test_only_a_linear_teachers_set_is_reduced(tmp_path):
    whole = gaussian(dimension=4, examples=60, test_examples=3, scale=2.0, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="has classes"):
        reduced(replace(whole, classes=2))
    with pytest.raises(ValueError, match="no linear function"):
        reduced(replace(whole, train_targets=whole.train_targets.square()))
