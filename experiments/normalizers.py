"""Normalizers behind one interface: a module that takes ``(N, C)`` or ``(N, C, *positions)`` and keeps its shape.

N examples, C units: a unit is a feature, or a channel pooled over the batch and its positions. Every normalizer is made
as ``kind(features, *, ...)``, so a network can be given any of them as a ``Callable[[int], nn.Module]``. Batch variance
is biased (divides by the number of values) in normalization; running variance is unbiased, as in Ioffe & Szegedy
(2015), Algorithm 2. A normalizer with statistics of the batch owns a buffer ``running_mean``, by which it is known.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def none(features: int) -> nn.Identity:
    """No normalizer; a module all the same, so that every arm of an experiment has the same points to look at."""
    return nn.Identity()


class Batch(_BatchNorm):
    """Batch normalization as torch does it, whatever the number of positions.

    Raises:
        ValueError: In training, if a unit has a single value: its variance is nothing.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True) -> None:
        super().__init__(features, eps=eps, momentum=momentum, affine=affine)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name for it
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(f"expected shape (N, {self.num_features}, ...), got {tuple(input.shape)}")
        if self.training and input.numel() == input.shape[1]:
            raise ValueError(f"batch statistics need more than one value a unit, got shape {tuple(input.shape)}")
