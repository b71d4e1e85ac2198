from __future__ import annotations

import getpass
import json
import socket
import subprocess
from pathlib import Path

import pytest
import torch

from experiments import environment
from experiments.environment import commit, cores, describe, pick_device

NAMELESS = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    (tmp_path / "package").mkdir()
    git(tmp_path, "add", "file")
    git(tmp_path, *NAMELESS, "commit", "-qm", "first")
    return tmp_path


def test_the_commit_of_a_checkout_and_whether_files_differ_from_it(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    assert commit(checkout) == {"hash": head, "dirty": False}
    (checkout / "file").write_text("two")
    assert commit(checkout) == {"hash": head, "dirty": True}
    git(checkout, "checkout", "-q", "file")
    (checkout / "new").write_text("")
    assert commit(checkout) == {"hash": head, "dirty": True}


def test_a_copy_inside_a_checkout_of_something_else_has_no_commit(checkout: Path) -> None:
    assert commit(checkout / "package") is None


def test_without_git_there_is_no_commit_and_no_error(
    checkout: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert commit(tmp_path_factory.mktemp("plain")) is None
    assert commit(checkout / "absent") is None
    monkeypatch.setenv("PATH", "")
    assert commit(checkout) is None


def test_a_description_can_be_stored_and_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h0stname")
    found = describe("cpu", threads=3)
    text = json.dumps(found)
    assert found["threads"] == 3
    assert found["device"]["type"] == "cpu"
    assert found["device"]["name"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["cores"] == cores() >= 1
    for private in ("h0stname", str(Path.home()), f'"{getpass.getuser()}"'):
        assert private not in text


def test_auto_is_cuda_where_torch_finds_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for nodes, available, expected in [((), True, "cpu"), (("/",), True, "cuda"), (("/",), False, "cpu")]:
        monkeypatch.setattr(environment, "_CUDA_NODES", nodes)
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert pick_device("auto") == expected
        assert pick_device("cpu") == "cpu"


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cuda was asked for, but torch finds none"):
        pick_device("cuda")
    with pytest.raises(ValueError, match="auto, cpu or cuda, got 'tpu'"):
        pick_device("tpu")
