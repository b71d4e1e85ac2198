"""Normalizers: against torch where torch has one, against slow twins where it has none, against the law for noise.

The noise is seen from outside: fed zeros a module shows m, fed ones from the same state of its generator s + m.
Statistical tests have their sample sizes fixed here and bound a z-score at 4, or Kolmogorov's statistic at 1.95
(one in a thousand); seeds are fixed, so they are not flaky: they are right or wrong.
"""

import copy
import io
import math
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

from experiments import normalizers
from experiments.normalizers import (
    Batch,
    Ghost,
    Group,
    Layer,
    Lp,
    NoiseLaw,
    NoiseOnly,
    NoisyBatch,
    Population,
    none,
)
from tests.reference import normalizers as reference

SHAPES = [(6, 4), (6, 4, 5), (6, 4, 3, 2), (6, 4, 3, 2, 2)]
TORCH_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
FORMS = ("per_step", "per_sample", "fixed")
# few values: torch's own draws; many: a stream of numpy's, in more than one piece
SMALL, LARGE = (20, 30), (40, 50, 6, 7)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def with_affine(module, seed=7):
    """The same module with gamma and beta that do not hide a mistake."""
    with torch.no_grad():
        module.weight.copy_(1 + 0.3 * randn(module.weight.shape, seed))
        module.bias.copy_(randn(module.bias.shape, seed + 1))
    return module


def affine_of(module):
    return module.weight.detach().double().numpy(), module.bias.detach().double().numpy()


def assert_same_training(one: nn.Module, other: nn.Module, shape, steps=3):
    """Outputs, gradients and states are equal, bit for bit, over a few training passes and one in eval."""
    for step in range(steps):
        inputs = [(2 * randn(shape, step) + 1).requires_grad_() for _ in range(2)]
        outputs = [module(x) for module, x in zip((one, other), inputs, strict=True)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.backward(randn(shape, 100 + step))
        assert torch.equal(inputs[0].grad, inputs[1].grad)
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
    state, expected = one.state_dict(), other.state_dict()
    for name in expected:
        assert torch.equal(state[name], expected[name]), name
    x = randn(shape, 50)
    assert torch.equal(one.eval()(x), other.eval()(x))
    one.train(), other.train()


# ---------------------------------------------------------------------------------------------- what they all promise

KINDS: dict[str, Callable[[int], nn.Module]] = {
    "none": none,
    "batch": Batch,
    "noisy": lambda features: NoisyBatch(features, generator=generator()),
    "noise only": lambda features: NoiseOnly(features, generator=generator()),
    "population": Population,
    "ghost": lambda features: Ghost(features, group=3),
    "l1": lambda features: Lp(features, p=1),
    "l2": lambda features: Lp(features, p=2),
    "linf": lambda features: Lp(features, p=math.inf),
    "layer": Layer,
    "group": lambda features: Group(features, groups=2),
}
WITH_STATISTICS = {"batch", "noisy", "population", "ghost", "l1", "l2", "linf"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_keeps_shape_passes_gradients_and_leaves_torchs_generator_alone(kind, shape):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    module = KINDS[kind](4)
    x = randn(shape).requires_grad_()
    y = module(x)
    assert y.shape == shape
    y.square().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    module.eval()
    assert torch.equal(module(x), module(x))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_batch_statistics_are_known_by_their_running_mean_and_refuse_a_single_value(kind):
    module = KINDS[kind](4)
    assert ("running_mean" in dict(module.named_buffers())) == (kind in WITH_STATISTICS)
    for shape in ((1, 4), (1, 4, 1, 1)):
        if kind in WITH_STATISTICS:
            before = copy.deepcopy(module.state_dict())
            with pytest.raises(ValueError, match="more than one value a unit"):
                module.train()(randn(shape))
            assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert module.eval()(randn(shape)).shape == shape


@pytest.mark.parametrize("kind", sorted(WITH_STATISTICS | {"noise only"}))
@pytest.mark.parametrize("shape", [(4,), (3, 5)])
def test_another_number_of_units_is_refused(kind, shape):
    with pytest.raises(ValueError, match="expected shape"):
        KINDS[kind](4)(randn(shape))


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_continues_as_the_original(kind):
    module = KINDS[kind](4)
    module(randn((6, 4)))
    twins = [module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for _ in range(2):
        first, *others = (twin(randn((6, 4), 1)) for twin in twins)
        assert all(torch.equal(first, other) for other in others)


def test_none_is_a_module_that_changes_nothing():
    x = randn((3, 4))
    assert none(4)(x) is x


@pytest.mark.parametrize("shape", SHAPES)
def test_batch_is_torchs_batch_normalization(shape):
    for options in ({}, {"eps": 0.1}, {"momentum": 0.5}, {"affine": False}):
        assert_same_training(Batch(4, **options), TORCH_BATCH_NORMS[len(shape)](4, **options), shape)


# --------------------------------------------------------------------------------------------------- the law of noise


def observe(law, shape, steps=1, seed=0, dtype=torch.float64):
    """What one module draws over some steps: gains s and shifts m, each (steps, *shape)."""
    module = NoiseOnly(shape[1], generator=generator(seed), law=law)
    gains, shifts = [], []
    for _ in range(steps):
        state = module.generator.get_state()
        shift = module(torch.zeros(shape, dtype=dtype))
        module.generator.set_state(state)
        gains.append(module(torch.ones(shape, dtype=dtype)) - shift)
        shifts.append(shift)
    return torch.stack(gains).double().numpy(), torch.stack(shifts).double().numpy()


def z_of_variance(sample, variance, kurtosis):
    """z-score of a sample's mean square against a known variance; kurtosis E x^4 / variance^2 of the law (mean 0)."""
    return (np.mean(sample**2) / variance - 1) / math.sqrt((kurtosis - 1) / sample.size)


def z_of_correlation(a, b):
    return np.corrcoef(a.ravel(), b.ravel())[0, 1] * math.sqrt(a.size)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 16_000), (1, 40_000)])  # torch's draws, numpy's
@pytest.mark.parametrize(
    "law", [NoiseLaw(), NoiseLaw(strength=3), NoiseLaw(0.2, 2.0, 0.4, 0.3), NoiseLaw(r_sigma=0.02, spread="variance")]
)
def test_the_three_forms_have_the_marginal_law(form, shape, law):
    gain, shift = observe(replace(law, form=form), shape, seed=5)
    c = law.strength
    deviation = c * (law.r_sigma if law.spread == "deviation" else math.sqrt(law.r_sigma))
    for sample, cdf in (
        (shift, reference.shift_cdf(c * law.n_mu, c * law.r_mu)),
        (gain, reference.gain_cdf(1 + c * (law.n_sigma - 1), deviation)),
    ):
        assert stats.ks_1samp(sample.ravel(), cdf).statistic * math.sqrt(sample.size) < 1.95


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 6, 5)])
def test_levels_are_shared_by_what_the_form_says(form, shape):
    # without r only the levels remain; an axis is (step, example, unit, *positions)
    shared = {"per_step": {1, 3, 4}, "per_sample": {3, 4}, "fixed": {0, 1, 3, 4}}[form]
    for sample in observe(NoiseLaw(r_mu=0, r_sigma=0, form=form), shape, steps=4):
        for axis in range(sample.ndim):
            spread = np.ptp(sample, axis=axis)
            assert spread.max() < 1e-12 if axis in shared else spread.min() > 0, axis


@pytest.mark.parametrize("shape", [(16, 30), (8, 30, 12, 12)])  # torch's draws, numpy's
def test_within_a_unit_the_noise_is_uniform_and_normal_about_its_level(shape):
    law = NoiseLaw(n_mu=0, n_sigma=1)  # the levels are 0 and 1: only what examples draw remains
    gain, shift = observe(law, shape, steps=20, seed=2)
    assert np.abs(shift).max() <= law.r_mu
    assert abs(z_of_variance(shift, law.r_mu**2 / 3, 9 / 5)) < 4
    assert abs(z_of_variance(gain - 1, law.r_sigma**2, 3)) < 4
    n = shift.size
    assert abs(shift.mean()) * math.sqrt(3 * n) / law.r_mu < 4
    assert abs((gain - 1).mean()) * math.sqrt(n) / law.r_sigma < 4
    for sample, law_ in ((shift, stats.uniform(-0.1, 0.2)), (gain, stats.norm(1, 0.1))):
        assert stats.ks_1samp(sample.ravel(), law_.cdf).statistic * math.sqrt(n) < 1.95
    # the tails: the expected number beyond 3.5 deviations, as a Poisson count
    expected = n * 2 * stats.norm.sf(3.5)
    assert abs(np.sum(np.abs(gain - 1) > 0.35) - expected) < 4 * math.sqrt(expected) + 4


@pytest.mark.parametrize("shape", [(16, 30), (8, 30, 12, 12), (40, 64, 8, 8)])  # torch; numpy; in two pieces
def test_noise_is_independent_over_units_examples_steps_and_kinds(shape):
    gain, shift = observe(NoiseLaw(n_mu=0, n_sigma=1), shape, steps=6, seed=4)
    assert abs(z_of_correlation(gain, shift)) < 4
    flat = {name: sample.reshape(6, -1) for name, sample in (("gain", gain), ("shift", shift))}
    for name, sample in (("gain", gain), ("shift", shift)):
        for axis in range(sample.ndim):
            one, other = np.split(np.moveaxis(sample, axis, 0), 2)
            assert abs(z_of_correlation(one, other)) < 4, (name, axis)
            neighbours = np.moveaxis(sample, axis, 0)
            assert abs(z_of_correlation(neighbours[:-1:2], neighbours[1::2])) < 4, (name, axis)
        # dependence that leaves no correlation shows in the squares
        squares = sample.reshape(6, -1) ** 2
        assert abs(z_of_correlation(squares[:, :-1:2], squares[:, 1::2])) < 4
        assert abs(z_of_correlation(squares[:-1:2], squares[1::2])) < 4
    assert abs(z_of_correlation(flat["gain"] ** 2, flat["shift"] ** 2)) < 4
    assert abs(z_of_correlation(flat["gain"][:, 1:], flat["shift"][:, :-1])) < 4


@pytest.mark.parametrize("form", ["per_step", "per_sample"])
def test_levels_are_independent_over_units_steps_and_kinds(form):
    law = NoiseLaw(r_mu=0, r_sigma=0, form=form)  # only the levels remain
    gain, shift = observe(law, (8, 400), steps=60, seed=6)
    if form == "per_step":
        gain, shift = gain[:, :1], shift[:, :1]
    assert abs(shift).max() <= 0.5
    assert gain.min() >= 1 - 1e-12
    assert gain.max() <= 1.25 + 1e-12
    assert abs(z_of_variance(shift, 0.5**2 / 3, 9 / 5)) < 4
    assert abs(z_of_variance(gain - 1.125, 0.25**2 / 12, 9 / 5)) < 4
    assert abs(z_of_correlation(gain, shift)) < 4
    for sample in (gain, shift):
        for axis in (0, 2) if form == "per_step" else (0, 1, 2):
            neighbours = np.moveaxis(sample, axis, 0)
            assert abs(z_of_correlation(neighbours[:-1:2], neighbours[1::2])) < 4, axis


def test_layers_with_one_generator_draw_independently():
    stream = generator(1)
    one, other = (NoiseOnly(60, generator=stream, law=NoiseLaw(n_mu=0)) for _ in range(2))
    for shape in ((100, 60), (100, 60, 3, 3)):
        assert abs(z_of_correlation(*(m(torch.zeros(shape)).numpy() for m in (one, other)))) < 4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("dose", [0.5, 2, 8])
def test_strength_scales_all_of_the_noise(form, shape, dose):
    gain, shift = observe(NoiseLaw(form=form), shape, steps=2)
    more_gain, more_shift = observe(NoiseLaw(form=form, strength=dose), shape, steps=2)
    np.testing.assert_allclose(more_shift, dose * shift, atol=1e-5)
    np.testing.assert_allclose(more_gain - 1, dose * (gain - 1), atol=1e-5)


class ExtremeWords:
    """In the place of numpy's bit generator: the least and the greatest 32-bit word, by turns."""

    def __init__(self, key):
        pass

    def random_raw(self, count):
        return np.full(count, 0x80000000_7FFFFFFF, dtype=np.uint64)


def test_the_extreme_words_give_finite_noise_within_its_bounds(monkeypatch):
    monkeypatch.setattr(normalizers, "SFC64", ExtremeWords)
    law = NoiseLaw(n_mu=0, n_sigma=1)
    for dtype in (torch.float32, torch.float64):
        (gain,), (shift,) = observe(law, LARGE, dtype=dtype)
        assert np.unique(np.sign(gain - 1)).tolist() == [-1, 1]
        assert np.isfinite(gain).all()
        assert np.abs(shift).max() <= 0.1 + 1e-8


def test_r_sigma_may_be_read_as_the_variance():
    gain, _ = observe(NoiseLaw(n_sigma=1, r_sigma=0.01), SMALL)
    wide, _ = observe(NoiseLaw(n_sigma=1, r_sigma=0.01, spread="variance"), SMALL)
    np.testing.assert_allclose(wide - 1, 10 * (gain - 1), atol=1e-12)


# ---------------------------------------------------------------------------------------------- noisy batch, the module


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["after_affine", "before_affine"])
@pytest.mark.parametrize("shape", [*SHAPES, LARGE])
def test_at_strength_zero_noisy_is_plain_and_draws_all_the_same(form, place, shape):
    law = NoiseLaw(form=form, place=place)
    features = shape[1]
    silent = with_affine(NoisyBatch(features, generator=generator(), law=replace(law, strength=0)))
    loud = NoisyBatch(features, generator=generator(), law=law)
    assert_same_training(silent, with_affine(Batch(features)), shape)
    for step in range(3):
        loud(randn(shape, step))
    assert torch.equal(silent.generator.get_state(), loud.generator.get_state())
    assert not torch.equal(silent.generator.get_state(), generator().get_state())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_eval_is_plain_bit_for_bit_with_the_statistics_of_plain(form, shape):
    features = shape[1]
    noisy = with_affine(NoisyBatch(features, generator=generator(), law=NoiseLaw(form=form)))
    plain = with_affine(Batch(features))
    for step in range(3):
        assert not torch.equal(noisy(randn(shape, step)), plain(randn(shape, step)))
    state = noisy.generator.get_state()
    assert torch.equal(noisy.eval()(randn(shape, 9)), plain.eval()(randn(shape, 9)))
    assert torch.equal(noisy.generator.get_state(), state)
    for name, value in plain.state_dict().items():
        assert torch.equal(noisy.state_dict()[name], value)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_the_noise_falls_after_the_affine_map_or_before_it(affine, shape):
    features = shape[1]
    x = randn(shape, 3, torch.float64)
    gain, shift = (draw[0] for draw in observe(NoiseLaw(), shape, seed=2))
    for place in ("after_affine", "before_affine"):
        law = NoiseLaw(place=place)
        noisy = NoisyBatch(features, generator=generator(2), law=law, eps=0.01, affine=affine).double()
        gamma, beta = np.ones(features), np.zeros(features)
        if affine:
            gamma, beta = affine_of(with_affine(noisy))
        if place == "after_affine":
            expected = gain * reference.batch(x.numpy(), gamma, beta, 0.01) + shift
        else:
            unit = (-1, *(1 for _ in shape[2:]))
            plain = reference.batch(x.numpy(), np.ones(features), np.zeros(features), 0.01)
            expected = gamma.reshape(unit) * (gain * plain + shift) + beta.reshape(unit)
        np.testing.assert_allclose(noisy(x).detach().numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("place", ["after_affine", "before_affine"])
def test_gradients_flow_through_the_product_and_the_noise_is_constant(place):
    module = with_affine(NoisyBatch(3, generator=generator(), law=NoiseLaw(place=place)).double())
    state = module.generator.get_state()

    def forward(x, weight, bias):
        module.generator.set_state(state)
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, x)

    inputs = (randn((5, 3, 2), dtype=torch.float64), module.weight.detach(), module.bias.detach())
    assert torch.autograd.gradcheck(forward, [value.clone().requires_grad_() for value in inputs])
    assert torch.autograd.gradgradcheck(forward, [value.clone().requires_grad_() for value in inputs])


@pytest.mark.parametrize("shape", [(8, 3), LARGE])
def test_torch_func_sees_the_same_derivatives(shape):
    module = NoisyBatch(shape[1], generator=generator()).train()
    state = module.generator.get_state()

    def loss(x):
        module.generator.set_state(state)
        buffers = {name: value.clone() for name, value in module.named_buffers()}
        return torch.func.functional_call(module, (dict(module.named_parameters()), buffers), x).square().sum()

    x = randn(shape).requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    assert torch.equal(torch.func.grad(loss)(x.detach()), expected)


def test_noise_only_adds_the_same_noise_to_what_nothing_normalizes():
    gain, shift = (draw[0] for draw in observe(NoiseLaw(), LARGE, seed=1))
    module = NoiseOnly(LARGE[1], generator=generator(1))
    x = randn(LARGE, 5, torch.float64)
    kept = x.clone()
    np.testing.assert_allclose(module(x).numpy(), gain * x.numpy() + shift, atol=1e-12)
    assert torch.equal(x, kept)
    assert module.eval()(x) is x


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_continues_the_stream(form):
    def build(seed):
        stream = generator(seed)
        law = NoiseLaw(form=form)
        return nn.Sequential(NoisyBatch(4, generator=stream, law=law), NoiseOnly(4, generator=stream, law=law))

    model = build(0)
    model(randn((6, 4)))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    resumed = build(1)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    for step in range(2):
        assert torch.equal(model(randn((6, 4), step)), resumed(randn((6, 4), step)))
    assert resumed[0].generator is resumed[1].generator


@pytest.mark.parametrize("shape", [(8, 16, 4, 4), LARGE])
def test_memory_format_and_half_types_are_kept(shape):
    module = NoisyBatch(shape[1], generator=generator())
    x = randn(shape).to(memory_format=torch.channels_last)
    assert module(x).is_contiguous(memory_format=torch.channels_last)
    half = NoiseOnly(shape[1], generator=generator())(randn(shape).bfloat16())
    assert half.dtype == torch.bfloat16
    full = NoiseOnly(shape[1], generator=generator())(randn(shape).bfloat16().float())
    assert torch.equal(half, full.bfloat16())


def test_a_transposed_input_gets_noise_everywhere():
    module = NoiseOnly(300, generator=generator(), law=NoiseLaw(n_mu=0))
    for x in (torch.zeros(300, 200).T, torch.zeros(300, 1).expand(300, 200).T):
        assert abs(z_of_variance(module(x).double().numpy(), 0.1**2 / 3, 9 / 5)) < 4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"n_mu": -0.1}, "n_mu must be finite and at least 0, not -0.1"),
        ({"n_sigma": 0.9}, "n_sigma must be finite and at least 1, not 0.9"),
        ({"r_mu": math.nan}, "r_mu must be finite"),
        ({"r_sigma": math.inf}, "r_sigma must be finite"),
        ({"strength": -1}, "strength must be finite and at least 0, not -1"),
        ({"form": "per_epoch"}, "form is one of per_step, per_sample, fixed, not 'per_epoch'"),
        ({"place": "within"}, "place is one of"),
        ({"spread": "iqr"}, "spread is one of"),
    ],
)
def test_a_law_that_is_none_is_refused(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        NoiseLaw(**change)


def test_noise_before_an_affine_map_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="no affine map"):
        NoiseOnly(4, generator=generator(), law=NoiseLaw(place="before_affine"))


# ------------------------------------------------------------------------------------------------------ the other kinds


@pytest.mark.parametrize("shape", SHAPES)
def test_population_normalizes_by_what_it_knew_before(shape):
    module, batch = with_affine(Population(4, momentum=0.3, eps=0.01)), Batch(4, momentum=0.3)
    for step in range(3):
        x = 3 * randn(shape, step) + 2
        known = copy.deepcopy(module).eval()
        assert torch.equal(module(x), known(x))
        batch(x)  # plain batch normalization moves its running statistics alike
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            torch.testing.assert_close(getattr(module, name), getattr(batch, name), rtol=1e-5, atol=1e-6)
    x = randn(shape, 9)
    gamma, beta = affine_of(module)
    unit = (-1, *(1 for _ in shape[2:]))
    mean, variance = (b.double().numpy().reshape(unit) for b in (module.running_mean, module.running_var))
    expected = gamma.reshape(unit) * (x.numpy() - mean) / np.sqrt(variance + 0.01) + beta.reshape(unit)
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=1e-5)


def test_population_lets_no_gradient_through_its_statistics():
    module = with_affine(Population(3).double())
    buffers = {name: value.clone() for name, value in module.named_buffers()}

    def forward(x, weight, bias):
        for name, value in module.named_buffers():
            value.copy_(buffers[name])
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, x)

    inputs = [randn((5, 3, 2), dtype=torch.float64), module.weight.detach(), module.bias.detach()]
    assert torch.autograd.gradcheck(forward, [value.clone().requires_grad_() for value in inputs])
    jacobian = torch.autograd.functional.jacobian(lambda x: forward(x, *inputs[1:]), inputs[0])
    pairs = jacobian.abs().sum(dim=(1, 2, 4, 5))  # (output example, input example)
    assert torch.equal(pairs, pairs.diag().diag())
    # the same question put to batch normalization sees the coupling
    coupled = torch.autograd.functional.jacobian(Batch(3).double(), inputs[0]).abs().sum(dim=(1, 2, 4, 5))
    assert (coupled > 0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"eps": 0.1}, {"momentum": 0.5}, {"affine": False}])
def test_one_ghost_group_is_batch_normalization(shape, options):
    for group in (shape[0], 100):
        assert_same_training(Ghost(4, group=group, **options), Batch(4, **options), shape)


@pytest.mark.parametrize("shape", [(12, 4), (14, 4), (11, 4, 3), (5, 4, 2, 2)])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
def test_ghost_groups_are_normalized_one_by_one(shape, group):
    if len(shape) == 2 and (group == 1 or shape[0] % group == 1):
        module = Ghost(4, group=group)
        with pytest.raises(ValueError, match=f"a group of {group} leaves one value a unit"):
            module(randn(shape))
        assert module.num_batches_tracked == 0
        return
    module = with_affine(Ghost(4, group=group, momentum=0.3, eps=0.02))
    x = 2 * randn(shape, 3) + 1
    expected = reference.ghost(x.double().numpy(), *affine_of(module), 0.02, group)
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=2e-5)
    mean, variance = reference.ghost_running(x.double().numpy(), np.zeros(4), np.ones(4), group, 0.3)
    np.testing.assert_allclose(module.running_mean.numpy(), mean, atol=1e-6)
    np.testing.assert_allclose(module.running_var.numpy(), variance, atol=1e-5)
    assert module.num_batches_tracked == 1


def test_ghost_gradients_are_right_where_a_group_is_ragged():
    module = with_affine(Ghost(3, group=2).double())

    def forward(x, weight, bias):
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, x)

    inputs = (randn((5, 3, 2), dtype=torch.float64), module.weight.detach(), module.bias.detach())
    assert torch.autograd.gradcheck(forward, [value.clone().requires_grad_() for value in inputs])


@pytest.mark.parametrize("group", [0, -2])
def test_a_ghost_group_without_examples_is_refused(group):
    with pytest.raises(ValueError, match=f"group must be at least 1, not {group}"):
        Ghost(4, group=group)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_centred_l2_norm_is_batch_normalization(shape):
    lp, batch = with_affine(Lp(4, p=2, centred=True).double()), with_affine(Batch(4).double())
    inputs = [(2 * randn(shape, 1, torch.float64) + 3).requires_grad_() for _ in range(2)]
    outputs = [module(x) for module, x in zip((lp, batch), inputs, strict=True)]
    torch.testing.assert_close(*outputs, rtol=1e-12, atol=1e-12)
    for output in outputs:
        output.backward(randn(shape, 2, torch.float64))
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lp.weight.grad, batch.weight.grad)
    torch.testing.assert_close(lp.running_mean, batch.running_mean)


LP = [(p, centred, gaussian) for p in (1, 2, math.inf) for centred, gaussian in ((0, 0), (1, 0), (1, 1))]


@pytest.mark.parametrize(("p", "centred", "gaussian"), LP)
@pytest.mark.parametrize("shape", SHAPES)
def test_lp_norms_against_the_slow_twin(p, centred, gaussian, shape):
    options = {"p": p, "centred": bool(centred), "gaussian": bool(gaussian)}
    module = with_affine(Lp(4, **options, eps=0.03, momentum=0.3).double())
    x = 2 * randn(shape, 4, torch.float64) + 1
    expected = reference.lp(x.numpy(), *affine_of(module), 0.03, p, bool(centred), bool(gaussian))
    np.testing.assert_allclose(module(x).detach().numpy(), expected, atol=1e-12)
    sizes = np.array([reference.lp_size(x.numpy()[:, j], p, bool(centred), bool(gaussian)) for j in range(4)])
    np.testing.assert_allclose(module.running_square.numpy(), 0.7 + 0.3 * sizes**2, atol=1e-12)
    np.testing.assert_allclose(module.running_mean.numpy(), 0.3 * x.transpose(0, 1).flatten(1).mean(1).numpy())
    assert module.num_batches_tracked == 1
    # eval: the same map with the running statistics, which stay
    gamma, beta = affine_of(module)
    unit = (-1, *(1 for _ in shape[2:]))
    mean, square = module.running_mean.numpy().reshape(unit), module.running_square.numpy().reshape(unit)
    expected = gamma.reshape(unit) * (x.numpy() - mean) / np.sqrt(square + 0.03) + beta.reshape(unit)
    np.testing.assert_allclose(module.eval()(x).detach().numpy(), expected, atol=1e-12)
    assert module.num_batches_tracked == 1


@pytest.mark.parametrize(("p", "centred", "gaussian"), LP)
def test_lp_gradients_flow_through_the_statistics(p, centred, gaussian):
    module = Lp(3, p=p, centred=bool(centred), gaussian=bool(gaussian), affine=False).double()
    assert torch.autograd.gradcheck(module, randn((6, 3, 2), 1, torch.float64).requires_grad_())


@pytest.mark.parametrize("p", [1, 2])
def test_gaussian_constants_make_a_mean_norm_a_deviation(p):
    module = Lp(4, p=p, centred=True, gaussian=True, affine=False, momentum=1.0)
    module(3 * randn((40_000, 4), 2) + 5)
    torch.testing.assert_close(module.running_square.sqrt(), torch.full((4,), 3.0), rtol=0.015, atol=0)


@pytest.mark.parametrize("p", [0, 3, -1, math.nan])
def test_another_norm_is_refused(p):
    with pytest.raises(ValueError, match="p is 1, 2 or inf, not"):
        Lp(4, p=p)
    with pytest.raises(ValueError, match="centred"):
        Lp(4, p=1, gaussian=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_layer_and_group_are_torchs(shape):
    x = 2 * randn(shape, 4) + 1
    layer = with_affine(Layer(4, eps=0.02))
    expected = nn.functional.layer_norm(x, shape[1:], eps=0.02)
    unit = (-1, *(1 for _ in shape[2:]))
    expected = expected * layer.weight.view(unit) + layer.bias.view(unit)
    torch.testing.assert_close(layer(x), expected)
    for groups in (1, 2, 4):
        if groups == 4 and len(shape) == 2:
            continue  # one value a group
        module = with_affine(Group(4, groups=groups, eps=0.02))
        twin = reference.group(x.double().numpy(), *affine_of(module), 0.02, groups)
        np.testing.assert_allclose(module(x).detach().numpy(), twin, atol=1e-5)


@pytest.mark.parametrize("groups", [0, 3, -2])
def test_groups_that_do_not_divide_the_features_are_refused(groups):
    with pytest.raises(ValueError, match=f"groups must divide the 4 features, and {groups} does not"):
        Group(4, groups=groups)


@pytest.mark.parametrize("kind", [Layer, Lp, Group])
def test_affine_may_be_left_out(kind):
    options = {Lp: {"p": 2}, Group: {"groups": 2}}.get(kind, {})
    assert not list(kind(4, affine=False, **options).parameters())
    assert len(list(kind(4, **options).parameters())) == 2
