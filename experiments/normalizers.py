"""Normalizers behind one interface: a module that takes ``(N, C)`` or ``(N, C, *positions)`` and keeps its shape.

N examples, C units: a unit is a feature, or a channel pooled over the batch and its positions. Every normalizer is made
as ``kind(features, *, ...)``, so a network can be given any of them as a ``Callable[[int], nn.Module]``. Batch variance
is biased (divides by the number of values) in normalization; running variance is unbiased, as in Ioffe & Szegedy
(2015), Algorithm 2. A normalizer with statistics of the batch owns a buffer ``running_mean``, by which it is known.

**Noise** (Santurkar, Tsipras, Ilyas & Madry 2018, Algorithm 1). After a layer's batch normalization, at each training
step, unit j draws a level ``mu_j ~ U(-n_mu, n_mu)`` and a gain ``sigma_j ~ U(1, n_sigma)``; each example i (and each
position, where there are any) draws ``m_ij ~ U(mu_j - r_mu, mu_j + r_mu)`` and ``s_ij ~ N(sigma_j, r_sigma)``; the
activation becomes ``s_ij a_ij + m_ij``. Gradients flow through the product, the noise itself is constant, and in eval
mode there is none. Three identities carry the tests: strength 0 is plain batch normalization bit for bit (the draws
are made all the same), the three forms have one marginal law, and in eval mode a noisy network is the plain one.

Noise comes from a ``torch.Generator`` given at construction and held by the module as ``generator``, one for all layers
of a network or one each. Its state is the only random state there is, and it is part of the module's ``state_dict``
(as extra state), so a run resumed from a checkpoint continues the stream. Activation checkpointing, which computes a
forward again, would draw other noise, and is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from numpy.random import SFC64
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Form = Literal["per_step", "per_sample", "fixed"]
Place = Literal["after_affine", "before_affine"]
Spread = Literal["deviation", "variance"]

# from how many values on a stream of numpy's pays its start, and how many of them stay in a core's cache
_MANY: Final = 2**14
_CHUNK: Final = 2**16
# a 32-bit word in (-1, 1): the largest, rounded to float32, falls on the largest float32 below 1
_UNIT: Final = 2.0**-31 * (1 - 2.0**-24)


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
        _check_shape(input, self.num_features, self.training)

    def _count_batch(self) -> float:
        """Count one more batch; the weight of its statistics in the running ones, as torch chooses it."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1 / float(self.num_batches_tracked)
        return self.momentum or 0.0


@dataclass(frozen=True)
class NoiseLaw:
    """The law of the injected noise; the defaults are Algorithm 1's constants and its most literal reading.

    ``strength`` c scales everything: mu ~ U(-c n_mu, c n_mu), sigma ~ U(1, 1 + c (n_sigma - 1)), m within c r_mu of mu,
    s with c times its deviation. The source leaves three things open, which are fields here: ``spread`` says whether
    ``r_sigma`` is the deviation or the variance of s, ``place`` whether the noise comes after gamma and beta or before.

    ``form`` says what is drawn when, at one marginal law for each activation: ``per_step`` draws mu and sigma for each
    unit at each step (the distribution moves, Algorithm 1), ``per_sample`` for each unit and example (the same noise,
    almost no movement), ``fixed`` once for each unit at construction. m and s are drawn at every step in all three.

    Raises:
        ValueError: If a constant is negative or not finite, ``n_sigma`` is below 1, or a choice is unknown.
    """

    n_mu: float = 0.5
    n_sigma: float = 1.25
    r_mu: float = 0.1
    r_sigma: float = 0.1
    strength: float = 1.0
    form: Form = "per_step"
    place: Place = "after_affine"
    spread: Spread = "deviation"

    def __post_init__(self) -> None:
        for name, least in (("n_mu", 0), ("n_sigma", 1), ("r_mu", 0), ("r_sigma", 0), ("strength", 0)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= least):
                raise ValueError(f"{name} must be finite and at least {least}, not {value}")
        for name, choices in (
            ("form", ("per_step", "per_sample", "fixed")),
            ("place", ("after_affine", "before_affine")),
            ("spread", ("deviation", "variance")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is one of {', '.join(choices)}, not {getattr(self, name)!r}")

    @property
    def deviation(self) -> float:
        """Standard deviation of s around sigma, at this strength."""
        return self.strength * (self.r_sigma if self.spread == "deviation" else math.sqrt(self.r_sigma))


class _Noise(nn.Module):
    """What a module needs to inject noise: the law, the generator, and the levels of the fixed form."""

    generator: torch.Generator
    law: NoiseLaw
    fixed_mu: Tensor  # (C,)
    fixed_sigma: Tensor  # (C,)

    def equip(self, features: int, generator: torch.Generator, law: NoiseLaw) -> None:
        """Give a module what noise needs; levels that are fixed are drawn now, onto the CPU."""
        self.generator = generator
        self.law = law
        if law.form == "fixed":
            mu, sigma = self._levels((features,), generator)
            self.register_buffer("fixed_mu", mu.cpu())
            self.register_buffer("fixed_sigma", sigma.cpu())

    def _levels(self, shape: tuple[int, ...], source: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw mu and sigma."""
        law, device = self.law, source.device
        bound, most = law.strength * law.n_mu, 1 + law.strength * (law.n_sigma - 1)
        mu = torch.empty(shape, device=device).uniform_(-bound, bound, generator=source)
        return mu, torch.empty(shape, device=device).uniform_(1, most, generator=source)

    def _draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the gain s and the shift m for every value of ``x`` (N, C, *positions), in float32 at least."""
        _refuse_recomputation("other noise would be drawn than in the forward")
        law, source = self.law, _on(x.device, self.generator)
        if law.form == "fixed":
            mu, sigma = _per_unit(self.fixed_mu, x), _per_unit(self.fixed_sigma, x)
        else:
            examples = len(x) if law.form == "per_sample" else 1
            mu, sigma = self._levels((examples, x.shape[1]) + (1,) * (x.dim() - 2), source)
        gain = torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        shift = torch.empty_like(gain)
        _fill(gain, law.deviation, shift, law.strength * law.r_mu, source)
        return gain.add_(sigma), shift.add_(mu)

    def get_extra_state(self) -> Tensor:
        """The generator's state, for ``state_dict``."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Put the generator where ``get_extra_state`` found it."""
        self.generator.set_state(state.cpu())

    def extra_repr(self) -> str:
        """Settings, for printing."""
        return ", ".join(part for part in (super().extra_repr(), str(self.law)) if part)


class NoisyBatch(_Noise, Batch):
    """Batch normalization followed by noise in training: Santurkar et al., Algorithm 1. In eval, plain normalization.

    With ``place="before_affine"`` the noise falls on the normalized activation: ``gamma (s xhat + m) + beta``.
    """

    def __init__(
        self,
        features: int,
        *,
        generator: torch.Generator,
        law: NoiseLaw = NoiseLaw(),
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(features, eps=eps, momentum=momentum, affine=affine)
        self.equip(features, generator, law)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (N, C, *positions)."""
        y = super().forward(x)
        if not self.training:
            return y
        gain, shift = self._draw(y)
        if self.law.place == "before_affine" and self.affine:
            # gamma (s xhat + m) + beta, written in y = gamma xhat + beta: exact where s = 1 and m = 0
            shift = _per_unit(self.weight, y) * shift + _per_unit(self.bias, y) * (1 - gain)
        return (y * gain).add_(shift).to(y.dtype)


class NoiseOnly(_Noise):
    """The same noise on activations that nothing normalizes; nothing at all in eval.

    Raises:
        ValueError: If the noise is to come before an affine map: there is none.
    """

    differs_in_training = True  # it has no statistics to be known by

    def __init__(self, features: int, *, generator: torch.Generator, law: NoiseLaw = NoiseLaw()) -> None:
        super().__init__()
        if law.place != "after_affine":
            raise ValueError(f"without a normalizer there is no affine map, so place is after_affine, not {law.place}")
        self.features = features
        self.equip(features, generator, law)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (N, C, *positions)."""
        _check_shape(x, self.features, training=False)
        if not self.training:
            return x
        gain, shift = self._draw(x)
        return (x * gain).add_(shift).to(x.dtype)


class Population(Batch):
    """Normalizes by the running statistics as they were before this batch, then lets the batch move them.

    No gradient flows through the statistics: an example's output depends on no other example of its batch. The first
    batch meets mean 0 and variance 1.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (N, C, *positions)."""
        self._check_input_dim(x)
        mean, variance = self.running_mean, self.running_var
        if mean is None or variance is None:
            raise ValueError("population normalization needs running statistics, and this module tracks none")
        if not self.training:
            return F.batch_norm(x, mean, variance, self.weight, self.bias, eps=self.eps)
        _refuse_recomputation("the running statistics have moved since the forward")
        # autograd keeps what it was given, and the buffers are about to move
        y = F.batch_norm(x, mean.clone(), variance.clone(), self.weight, self.bias, eps=self.eps)
        factor = self._count_batch()
        with torch.no_grad():
            batch_variance, batch_mean = torch.var_mean(x, dim=_pooled(x), correction=1)
            mean.lerp_(batch_mean.to(mean.dtype), factor)
            variance.lerp_(batch_variance.to(variance.dtype), factor)
        return y


class Ghost(Batch):
    """Batch normalization with statistics from groups of ``group`` consecutive examples (Hoffer et al. 2017).

    Where ``group`` does not divide the batch, the examples that remain form a smaller group of their own. Running
    statistics move once a batch, to the mean over groups of their means and unbiased variances, weighted by group size.

    Raises:
        ValueError: If ``group`` is not positive, or in training if a group has a single value a unit.
    """

    def __init__(
        self, features: int, *, group: int, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True
    ) -> None:
        super().__init__(features, eps=eps, momentum=momentum, affine=affine)
        self.equip(group)

    def equip(self, group: int) -> None:
        """Give a module its group size."""
        if group < 1:
            raise ValueError(f"group must be at least 1, not {group}")
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (N, C, *positions)."""
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        whole = len(x) - len(x) % self.group
        parts = [part for part in (x[:whole], x[whole:]) if len(part)]
        if min(self.group, len(parts[-1])) * math.prod(x.shape[2:]) == 1:
            raise ValueError(f"a group of {self.group} leaves one value a unit in a batch of shape {tuple(x.shape)}")
        factor = self._count_batch()
        results = [self._normalize(part, min(self.group, len(part)), factor) for part in parts]
        if self.running_mean is not None and self.running_var is not None:
            for k, buffer in enumerate((self.running_mean, self.running_var), start=1):
                shares = (result[k] * (len(part) / len(x)) for part, result in zip(parts, results, strict=True))
                buffer.copy_(sum(shares, start=torch.zeros_like(buffer)))
        outputs = [result[0] for result in results]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _normalize(self, x: Tensor, size: int, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        """Normalize ``x`` in groups of ``size``; beside it the running statistics as these groups would move them."""
        groups = len(x) // size
        folded = x.reshape(groups, size, *x.shape[1:]).transpose(0, 1)  # (size, groups, C, *positions)
        folded = folded.reshape(size, groups * x.shape[1], *x.shape[2:])  # each group a set of units of its own

        def repeat(unit: Tensor | None) -> Tensor | None:
            return None if unit is None else unit.repeat(groups)

        mean, variance = repeat(self.running_mean), repeat(self.running_var)
        y = F.batch_norm(folded, mean, variance, repeat(self.weight), repeat(self.bias), True, factor, self.eps)
        y = y.reshape(size, groups, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        if mean is None or variance is None:
            return y, y.new_empty(0), y.new_empty(0)
        return y, mean.view(groups, -1).mean(0), variance.view(groups, -1).mean(0)


class Lp(nn.Module):
    """Normalizes by an average l_p norm in place of the standard deviation (Santurkar et al., section 3.3).

    ``(x - mean) / sqrt(d^2 + eps)``, with d over the values of a unit: the mean of ``|x|`` for p = 1, its root mean
    square for p = 2, its maximum for p = inf. The source takes the norm "before shifting the mean"; with ``centred`` it
    is that of ``x - mean``, and p = 2 is batch normalization. ``gaussian`` multiplies d by the constants of Hoffer et
    al. (2018): ``sqrt(pi/2)`` for p = 1, which makes d a normal sample's standard deviation, and
    ``0.5 (1 + sqrt(pi ln 4)) / sqrt(2 ln n)`` for p = inf with n values a unit, as published: on normal samples it does
    away with the growth in n, and leaves about 1.5 deviations. Eval uses running means of the mean and of d^2, without
    Bessel's correction.

    Raises:
        ValueError: If ``p`` is not 1, 2 or inf, if ``gaussian`` is asked of an uncentred norm, or in training if a unit
            has a single value.
    """

    running_mean: Tensor  # (C,)
    running_square: Tensor  # (C,) of d
    num_batches_tracked: Tensor

    def __init__(
        self,
        features: int,
        *,
        p: float,
        centred: bool = False,
        gaussian: bool = False,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__()
        if p not in (1, 2, math.inf):
            raise ValueError(f"p is 1, 2 or inf, not {p}")
        if gaussian and not centred:
            raise ValueError("the Gaussian constants belong to the centred norm: ask for centred, or not for gaussian")
        self.features, self.p, self.centred, self.gaussian = features, p, centred, gaussian
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_square", torch.ones(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (N, C, *positions)."""
        _check_shape(x, self.features, self.training)
        mean, square = self.running_mean, self.running_square
        if self.training:
            mean, square = self._statistics(x)
            self.num_batches_tracked.add_(1)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
                self.running_square.lerp_(square.to(self.running_square.dtype), self.momentum)
        y = (x - _per_unit(mean, x)) * _per_unit(torch.rsqrt(square + self.eps), x)
        if self.weight is None or self.bias is None:
            return y
        return torch.addcmul(_per_unit(self.bias, x), _per_unit(self.weight, x), y)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and d^2 of each unit, both (C,)."""
        pooled = _pooled(x)
        mean = x.mean(pooled)
        values = x - _per_unit(mean, x) if self.centred else x
        if self.p == 2:
            return mean, values.square().mean(pooled)
        size = values.abs().mean(pooled) if self.p == 1 else values.abs().amax(pooled)
        return mean, (self._constant(x.numel() // x.shape[1]) * size).square()

    def _constant(self, values: int) -> float:
        if not self.gaussian:
            return 1.0
        if self.p == 1:
            return math.sqrt(math.pi / 2)
        return 0.5 * (1 + math.sqrt(math.pi * math.log(4))) / math.sqrt(2 * math.log(values))

    def extra_repr(self) -> str:
        """Settings, for printing."""
        return f"{self.features}, p={self.p}, centred={self.centred}, gaussian={self.gaussian}"


class Group(nn.GroupNorm):
    """Group normalization: mean and biased variance of each example over each of ``groups`` groups of units, pooled.

    Raises:
        ValueError: If ``groups`` is not positive or does not divide ``features``.
    """

    def __init__(self, features: int, *, groups: int, eps: float = 1e-5, affine: bool = True) -> None:
        if groups < 1 or features % groups:
            raise ValueError(f"groups must divide the {features} features, and {groups} does not")
        super().__init__(groups, features, eps=eps, affine=affine)


class Layer(Group):
    """Layer normalization: mean and biased variance of each example over all its units and positions."""

    def __init__(self, features: int, *, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(features, groups=1, eps=eps, affine=affine)


def _refuse_recomputation(reason: str) -> None:
    """Refuse a forward within a backward: activation checkpointing, whose gradients would be silently wrong here."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(f"activation checkpointing cannot compute this normalizer again in a backward: {reason}")


def _check_shape(x: Tensor, features: int, training: bool) -> None:
    if x.dim() < 2 or x.shape[1] != features:
        raise ValueError(f"expected shape (N, {features}, ...), got {tuple(x.shape)}")
    if training and x.numel() == x.shape[1]:
        raise ValueError(f"batch statistics need more than one value a unit, got shape {tuple(x.shape)}")


def _pooled(x: Tensor) -> tuple[int, ...]:
    """The axes a unit is pooled over: the batch and the positions."""
    return (0, *range(2, x.dim()))


def _per_unit(unit: Tensor, x: Tensor) -> Tensor:
    """``unit`` (C,), shaped to broadcast against ``x`` (N, C, *positions)."""
    return unit.view(-1, *(1,) * (x.dim() - 2))


def _on(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """A generator that can fill tensors on ``device``: the given one, or one seeded from it."""
    if generator.device.type == device.type:
        return generator
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return torch.Generator(device).manual_seed(int(seed))


def _fill(normal: Tensor, deviation: float, uniform: Tensor, bound: float, generator: torch.Generator) -> None:
    """Fill two dense tensors of one shape with independent values of N(0, deviation^2) and U(-bound, bound).

    torch's CPU generator makes one word after another: in a convolutional network, where every position wants two, that
    is as much work as the rest of the step. Large tensors on the CPU take their words from a stream of their own:
    numpy's SFC64, keyed with 192 bits from ``generator``, three times as fast; a normal value is the inverse
    distribution function of a uniform one, which is vectorized. ``generator`` remains the only state.
    """
    if normal.device.type != "cpu" or normal.numel() < _MANY:
        normal.normal_(0, deviation, generator=generator)
        uniform.uniform_(-bound, bound, generator=generator)
        return
    key = torch.empty(3, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    # by way of a list: a tensor made under a torch.func transform has no storage to share
    stream = SFC64(_Key(np.array(key.tolist()).view(np.uint64)))  # type: ignore[arg-type] # any ISeedSequence will do
    flat = [values.as_strided((values.numel(),), (1,)) for values in (normal, uniform)]  # in the order of memory
    for start in range(0, normal.numel(), _CHUNK):
        normal_part, uniform_part = (values[start : start + _CHUNK] for values in flat)
        count = len(normal_part)
        halves = torch.from_numpy(stream.random_raw(count).view(np.int32))
        normal_part.copy_(halves[:count]).mul_(_UNIT).erfinv_().mul_(math.sqrt(2) * deviation)
        uniform_part.copy_(halves[count:]).mul_(_UNIT * bound)


@dataclass(frozen=True)
class _Key(ISeedSequence):
    """A seed used as it is."""

    words: npt.NDArray[np.uint64]

    def generate_state(self, n_words: int, dtype: npt.DTypeLike = np.uint64) -> npt.NDArray[np.uint64]:
        assert (n_words, np.dtype(dtype)) == (len(self.words), self.words.dtype)
        return self.words
