"""The README's examples are run, one after the other, as somebody would type them."""

import re
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from diagnostics import read_run

README = Path(__file__).parent.parent / "README.md"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.block1 = nn.Sequential()
        self.block1.add_module("linear", nn.Linear(4, 6))
        self.block1.add_module("normalizer", nn.BatchNorm1d(6))
        self.block1.add_module("relu", nn.ReLU())
        self.block2 = nn.Sequential()
        self.block2.add_module("linear", nn.Linear(6, 6))
        self.block2.add_module("normalizer", nn.BatchNorm1d(6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.block2(self.block1(x)))


def test_every_python_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Network()
    given = {
        "torch": torch,
        "model": model,
        "loader": [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    }
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 6
    for block in blocks:
        exec(block, given)
    assert list(given["shift"]["layer"].unique()) == ["block1.linear", "block2.linear", "head"]
    assert given["curves"].shape == (1, 18)  # one record, six units, three percentiles
    assert given["top"].converged
    assert type(model.block1.normalizer) is nn.BatchNorm1d
    spectrum, first = given["spectrum"], given["first"]
    assert (first.source, first.target, spectrum.values.shape) == ("block1.normalizer", "block2.normalizer", (4, 6))
    largest = torch.stack([one.values for one in given["two"]]).float()
    assert torch.allclose(largest, spectrum.values[:, :2], rtol=1e-2, atol=1e-5)
    assert set(read_run("runs/gradients")["probe"]) == {"covariate_shift", "along_gradient.gradient", "sharpness.batch"}
