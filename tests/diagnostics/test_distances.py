import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import optimize, stats

from diagnostics.distances import BINS, DISTANCES, LARGEST, Floor, Sample, distance, distances, floor, random_halves
from tests.reference import distances as slow

MOMENTS = ("mean_shift", "std_shift", "kl_gaussian")
HISTOGRAMS = ("kl_histogram", "jensen_shannon")
ORDERS = ("ks", *HISTOGRAMS)
SIZES = [(40, 40), (41, 17), (17, 41), (2, 2), (3, 50)]
Z = 4.0  # for every statistical bound of this file; sample sizes are fixed where they are used


def samples(kind, n, m, units=6, seed=0):
    generator = np.random.default_rng(seed)
    p, q = generator.standard_normal((n, units)), 1.3 * generator.standard_normal((m, units)) + 0.2
    if kind == "ties":
        p, q = np.round(2 * p) / 2, np.round(2 * q) / 2
        p[:2], q[:2] = [[0.0], [1.0]], [[0.5], [-0.5]]  # never constant
    if kind == "relu":
        p, q = np.maximum(p, 0), np.maximum(q, 0)
        p[:2], q[:2] = [[0.0], [1.0]], [[0.0], [2.0]]
    return p, q


def sd_of(p, q):
    return np.sqrt((p.var(axis=0) + q.var(axis=0)) / 2)


def agree(got, expected, rel=1e-11, absolute=1e-13):
    np.testing.assert_allclose(got, expected, rtol=rel, atol=absolute)


# Against the definitions and other people's code.


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("kind", ["smooth", "ties", "relu"])
@pytest.mark.parametrize("name", DISTANCES)
def test_every_distance_equals_its_definition(name, kind, n, m):
    p, q = samples(kind, n, m)
    expected = [slow.distance(name, list(a), list(b)) for a, b in zip(p.T, q.T, strict=True)]
    agree(distance(name, p, q, paired=False), expected)


@pytest.mark.parametrize(("n", "m"), [(200, 200), (301, 120), (2, 77)])
@pytest.mark.parametrize("kind", ["smooth", "ties", "relu"])
def test_scipy_agrees(kind, n, m):
    p, q = samples(kind, n, m, seed=1)
    got = distances(("wasserstein1", "energy", "ks"), p, q, paired=False).values
    units = list(zip(p.T, q.T, strict=True))
    agree(got["wasserstein1"] * sd_of(p, q), [stats.wasserstein_distance(a, b) for a, b in units])
    agree(got["energy"] * np.sqrt(sd_of(p, q)), [stats.energy_distance(a, b) for a, b in units])
    agree(got["ks"], [stats.ks_2samp(a, b).statistic for a, b in units])


@pytest.mark.parametrize("kind", ["smooth", "ties"])
def test_the_energy_distance_is_also_a_mean_over_pairs(kind):
    p, q = samples(kind, 30, 50)
    expected = [slow.energy_of_pairs(list(a), list(b)) for a, b in zip(p.T, q.T, strict=True)]
    agree(distance("energy", p, q, paired=False) ** 2 * sd_of(p, q), expected, rel=1e-9)


@pytest.mark.parametrize(("n", "m"), [(500, 500), (333, 200)])
def test_the_histogram_distances_are_scipys_entropies_of_pooled_bins(n, m):
    p, q = samples("smooth", n, m)
    got = distances(HISTOGRAMS, p, q, paired=False).values
    for unit in range(p.shape[1]):
        # Without ties, edges are quantiles of the pool in numpy's "inverted_cdf".
        edges = np.quantile(np.concatenate([p, q])[:, unit], np.arange(1, BINS) / BINS, method="inverted_cdf")
        a, b = (np.bincount(np.searchsorted(edges, x[:, unit], side="left"), minlength=BINS) + 0.5 for x in (p, q))
        agree(got["kl_histogram"][unit], (stats.entropy(a, b) + stats.entropy(b, a)) / 2)
        mixed = a / a.sum() + b / b.sum()
        agree(got["jensen_shannon"][unit], (stats.entropy(a, mixed) + stats.entropy(b, mixed)) / 2)


def test_numbers_worked_out_by_hand():
    p, q = np.array([[0.0], [0.0], [1.0], [1.0]]), np.array([[0.0], [1.0], [1.0], [3.0]])
    got = {name: value.item() for name, value in distances(DISTANCES, p, q, paired=False).values.items()}
    var_p, var_q = 0.25, 1.1875
    sd = math.sqrt((var_p + var_q) / 2)
    assert got["mean_shift"] == pytest.approx(0.75 / sd)
    assert got["std_shift"] == pytest.approx(math.log(var_q / var_p) / 2)
    assert got["wasserstein1"] == pytest.approx((0.25 + 0.25 * 2) / sd)
    assert got["energy"] == pytest.approx(math.sqrt(2 * (0.25**2 + 0.25**2 * 2)) / math.sqrt(sd))
    assert got["ks"] == 0.25
    assert got["kl_gaussian"] == pytest.approx(((var_p + 0.5625) / var_q + (var_q + 0.5625) / var_p - 2) / 4)
    # Three distinct values, three bins: (2, 2, 0) and (1, 2, 1), half a count added to each of the three.
    a, b = np.array([2.5, 2.5, 0.5]) / 5.5, np.array([1.5, 2.5, 1.5]) / 5.5
    assert got["kl_histogram"] == pytest.approx(((a - b) * np.log(a / b)).sum() / 2)
    assert got["jensen_shannon"] == pytest.approx((stats.entropy(a, (a + b) / 2) + stats.entropy(b, (a + b) / 2)) / 2)


# Closed forms for Gaussians. One per unit, 100 independent units: a z-score of their mean.


def mean_distance_of_normals(shift, spread):
    """E|X| for X ~ N(shift, spread^2)."""
    return spread * math.sqrt(2 / math.pi) * math.exp(-((shift / spread) ** 2) / 2) + shift * math.erf(
        shift / spread / math.sqrt(2)
    )


def z_score(values, truth):
    return (values.mean() - truth) / (values.std(ddof=1) / math.sqrt(len(values)))


@pytest.fixture(scope="module")
def normals():
    generator = np.random.default_rng(5)
    return generator.standard_normal((3000, 100)), 1.0 + 2.0 * generator.standard_normal((2000, 100))


@pytest.mark.parametrize(
    ("name", "truth"),
    [
        ("mean_shift", 1 / math.sqrt(2.5)),
        ("std_shift", math.log(2)),
        ("kl_gaussian", ((1 + 1) / 4 + (4 + 1) / 1 - 2) / 4),
        ("wasserstein1", mean_distance_of_normals(1, 1) / math.sqrt(2.5)),
    ],
)
def test_gaussians_have_their_closed_forms(normals, name, truth):
    # W1: the quantile functions differ by 1 + (2 - 1) z with z ~ N(0, 1).
    assert abs(z_score(distance(name, *normals, paired=False), truth)) < Z


def test_the_energy_of_gaussians_has_its_closed_form(normals):
    p, q = normals
    squared = distance("energy", p, q, paired=False) ** 2 * sd_of(p, q)
    within_p, within_q = mean_distance_of_normals(0, math.sqrt(2)), mean_distance_of_normals(0, math.sqrt(8))
    limit = 2 * mean_distance_of_normals(1, math.sqrt(5)) - within_p - within_q
    # A sample's pairs with themselves are at distance 0: the expectation at this size is known exactly.
    assert abs(z_score(squared, limit + within_p / len(p) + within_q / len(q))) < Z


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_the_histogram_distances_of_gaussians_are_those_of_equiprobable_bins(name):
    generator = np.random.default_rng(6)
    size, shift = 20_000, 0.7
    p, q = generator.standard_normal((size, 50)), shift + generator.standard_normal((size, 50))

    def edge(share):
        return optimize.brentq(lambda x: (stats.norm.cdf(x) + stats.norm.cdf(x - shift)) / 2 - share, -9, 9)

    edges = np.array([-np.inf, *(edge(k / BINS) for k in range(1, BINS)), np.inf])
    a, b = np.diff(stats.norm.cdf(edges)), np.diff(stats.norm.cdf(edges - shift))
    truth, bias = {
        "kl_histogram": ((stats.entropy(a, b) + stats.entropy(b, a)) / 2, BINS / size),
        "jensen_shannon": ((stats.entropy(a, (a + b) / 2) + stats.entropy(b, (a + b) / 2)) / 2, BINS / size / 4),
    }[name]
    # Sampling adds about (BINS - 1) / size (a chi-square of the bins), or a quarter of it; smoothing takes less away.
    found = distance(name, p, q, paired=False)
    assert bias < 0.01 * truth
    assert z_score(found, truth) > -Z
    assert z_score(found, truth + 2 * bias) < Z


def test_ks_of_gaussians_stays_within_the_bound_of_dvoretzky_kiefer_and_wolfowitz(normals):
    p, q = normals
    grid = np.linspace(-10, 10, 100_001)
    truth = np.abs(stats.norm.cdf(grid) - stats.norm.cdf((grid - 1) / 2)).max()
    tail = 1e-6
    bound = sum(math.sqrt(math.log(2 / tail) / (2 * len(x))) for x in (p, q))
    assert np.abs(distance("ks", p, q, paired=False) - truth).max() < bound


# Axioms.

tied = st.integers(-40, 40).map(lambda k: k / 8)
wild = st.floats(-1e6, 1e6, width=32)


@st.composite
def two_samples(draw, elements=tied | wild, third=False):
    units = draw(st.integers(1, 3))
    sizes = [draw(st.integers(2, 12)) for _ in range(3 if third else 2)]
    return [draw(arrays(np.float64, (size, units), elements=elements)) for size in sizes]


@given(two_samples())
def test_nothing_lies_between_a_sample_and_itself(pair):
    x, _ = pair
    shuffled = x[::-1]
    for other in (x, shuffled):
        for name, value in distances(DISTANCES, x, other).values.items():
            assert (value == 0).all(), name


@given(two_samples())
def test_distances_are_symmetric_to_the_last_bit_and_never_negative_nor_nan(pair):
    p, q = pair
    there, back = (distances(DISTANCES, *order, paired=False).values for order in ((p, q), (q, p)))
    for name in DISTANCES:
        np.testing.assert_array_equal(there[name], back[name], err_msg=name)
        assert (there[name] >= 0).all(), name
    assert (there["ks"] <= 1).all()
    assert (there["jensen_shannon"] <= math.log(2)).all()
    for name in ORDERS:
        assert np.isfinite(there[name]).all(), name


@given(two_samples(tied), st.integers(-3, 3), st.booleans(), st.integers(-1000, 1000))
def test_distances_do_not_see_the_unit_of_measurement(pair, power, mirrored, shift):
    p, q = pair
    scale = (-1 if mirrored else 1) * 2.0**power  # exact, so that ties stay ties
    before = distances(DISTANCES, p, q, paired=False).values
    after = distances(DISTANCES, scale * p + shift, scale * q + shift, paired=False).values
    for name in DISTANCES:
        if name in ORDERS and not (mirrored and name in HISTOGRAMS):
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)
        elif name not in HISTOGRAMS:
            agree(after[name], before[name], rel=1e-9, absolute=1e-9)


@given(two_samples())
def test_order_distances_see_the_order_alone(pair):
    p, q = pair
    ranks = stats.rankdata(np.concatenate([p, q]), method="dense", axis=0)
    for name in ORDERS:
        np.testing.assert_array_equal(
            distance(name, p, q, paired=False), distance(name, ranks[: len(p)], ranks[len(p) :], paired=False)
        )


@given(two_samples(third=True))
def test_unscaled_wasserstein_energy_and_ks_obey_the_triangle_inequality(three):
    def unscaled(a, b):
        sd = sd_of(a, b)
        found = distances(("wasserstein1", "energy", "ks"), a, b, paired=False).values
        moved = np.abs(a[0] - b[0])  # what an infinite distance between two constants was made of
        constant = (a == a[0]).all(axis=0) & (b == b[0]).all(axis=0)
        with np.errstate(invalid="ignore"):
            return np.stack(
                [
                    np.where(constant, moved, found["wasserstein1"] * sd),
                    np.where(constant, np.sqrt(2 * moved), found["energy"] * np.sqrt(sd)),
                    found["ks"],
                ]
            )

    p, q, r = three
    assert (unscaled(p, r) <= (unscaled(p, q) + unscaled(q, r)) * (1 + 1e-9) + 1e-12).all()


def test_a_constant_added_to_one_unit_is_found_there_and_nowhere_else():
    p = np.random.default_rng(0).standard_normal((100, 5)).astype(np.float32).astype(np.float64)
    q = p.copy()
    q[:, 3] += 0.25
    got = distances(DISTANCES, p, q).values
    for name, value in got.items():
        assert (np.delete(value, 3) == 0).all(), name
    agree(got["mean_shift"][3], 0.25 / p[:, 3].std())
    agree(got["wasserstein1"][3], 0.25 / p[:, 3].std())
    agree(got["kl_gaussian"][3], (0.25 / p[:, 3].std()) ** 2 / 2)
    assert got["std_shift"][3] < 1e-14


# Constant units.


def test_constant_units_have_the_values_that_were_defined():
    p = np.tile([2.0, 2.0, 2.0, 2.0], (30, 1))
    q = p.copy()
    q[:, 1] = 2.5  # another constant
    q[:, 2] = np.linspace(0, 3, 30)
    p[:, 3], q[:, 3] = q[:, 2], 2.0  # the same the other way round
    got = distances(DISTANCES, p, q).values
    spread = q[:, 2].std()
    sd = spread / math.sqrt(2)
    for name in DISTANCES:
        assert got[name][0] == 0, name
        assert got[name][2] == got[name][3], name
    for name in ("mean_shift", "std_shift", "wasserstein1", "kl_gaussian", "energy"):
        assert got[name][1] == np.inf, name
    assert got["ks"][1] == 1
    a, b = 30.5 / 31, 0.5 / 31  # two bins, one for each constant
    agree(got["kl_histogram"][1], (a - b) * math.log(a / b))
    agree(got["jensen_shannon"][1], math.log(2) + a * math.log(a) + b * math.log(b))
    agree(got["mean_shift"][2], 0.5 / sd)
    assert got["std_shift"][2] == got["kl_gaussian"][2] == np.inf
    agree(got["wasserstein1"][2], stats.wasserstein_distance(p[:, 2], q[:, 2]) / sd)
    agree(got["energy"][2], stats.energy_distance(p[:, 2], q[:, 2]) / math.sqrt(sd))
    agree(got["ks"][2], stats.ks_2samp(p[:, 2], q[:, 2]).statistic)


def test_equal_constants_are_equal_also_in_samples_of_different_size():
    for value in distances(DISTANCES, np.full((5, 1), 0.1), np.full((8, 1), 0.1), paired=False).values.values():
        assert value == 0


# Types and magnitudes.


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.int64, np.bool_])
def test_types_are_upcast_before_anything_is_summed(dtype):
    p, q = (np.round(40 * x).astype(dtype) for x in samples("smooth", 60, 60))
    expected = distances(DISTANCES, p.astype(np.float64), q.astype(np.float64)).values
    for name, value in distances(DISTANCES, p, q).values.items():
        np.testing.assert_array_equal(value, expected[name])


def test_half_precision_does_not_overflow():
    x = np.linspace(40_000, 60_000, 50, dtype=np.float16)[:, None]
    agree(Sample.of(x).variance, x.astype(np.float64).var(axis=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tensors_are_as_good_as_arrays_and_are_left_alone(dtype):
    p, q = (torch.from_numpy(x).to(dtype).requires_grad_() for x in samples("smooth", 60, 60))
    before = p.detach().clone()
    expected = distances(DISTANCES, p.detach().double().numpy(), q.detach().double().numpy()).values
    for name, value in distances(DISTANCES, p, q).values.items():
        np.testing.assert_array_equal(value, expected[name])
    assert torch.equal(p, before)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2]])
def test_strides_do_not_matter_and_nothing_is_shared_with_the_caller(layout):
    x, y = samples("smooth", 50, 50)
    x[3, 0] = np.nan
    given_x = layout(x)
    sample = Sample.of(given_x)
    expected = distances(DISTANCES, x, y).values
    given_x[:] = 7.0
    for name, value in distances(DISTANCES, sample, y).values.items():
        np.testing.assert_array_equal(value, expected[name])


def test_a_sample_holds_what_it_says_and_cannot_be_written_to():
    x = samples("smooth", 50, 50)[0]
    sample = Sample.of(x)
    np.testing.assert_array_equal(sample.values, x)
    np.testing.assert_array_equal(sample.sorted, np.sort(x, axis=0).T)
    agree(sample.mean, x.mean(axis=0))
    agree(sample.variance, x.var(axis=0))
    assert sample.size == 50
    assert (sample.count == 50).all()
    with pytest.raises(ValueError, match="read-only"):
        sample.sorted[0, 0] = 1.0
    with pytest.raises(ValueError, match="read-only"):
        sample.values[0, 0] = 1.0


def test_a_huge_offset_costs_no_digits():
    generator = np.random.default_rng(0)
    p, q = generator.integers(-500, 500, (200, 4)) / 2.0**20, generator.integers(-500, 700, (200, 4)) / 2.0**20
    expected = distances(DISTANCES, p, q).values
    for name, value in distances(DISTANCES, p + 1e6, q + 1e6).values.items():
        agree(value, expected[name], rel=1e-12)


@pytest.mark.parametrize("power", [-1000, -500, 500, 880])
def test_magnitudes_whose_squares_leave_float64_are_no_different(power):
    p, q = samples("smooth", 50, 30)
    p[0] = 100.0
    expected, expected_floor = distances(DISTANCES, p, q, paired=False).values, floor(p, DISTANCES, seed=0)
    p, q = np.ldexp(p, power), np.ldexp(q, power)
    got_floor = floor(p, DISTANCES, seed=0)
    for name, value in distances(DISTANCES, p, q, paired=False).values.items():
        agree(value, expected[name], rel=1e-12)
        agree(got_floor.percentile95[name], expected_floor.percentile95[name], rel=1e-12)


def test_one_unit_of_another_magnitude_leaves_the_others_bits_alone():
    p, q = samples("smooth", 50, 50)
    expected = distances(DISTANCES, p, q).values
    p[:, 2] *= 1e200
    q[:, 2] *= 1e-200
    for name, value in distances(DISTANCES, p, q).values.items():
        np.testing.assert_array_equal(np.delete(value, 2), np.delete(expected[name], 2))
        assert not np.isnan(value).any()


def test_a_small_change_of_spread_keeps_its_digits():
    x = 2.0**600 * np.random.default_rng(0).standard_normal((50, 3))
    agree(distance("std_shift", x, x * (1 + 1.3e-12)), 1.3e-12, rel=1e-3, absolute=0)


def test_two_examples_are_enough():
    got = distances(DISTANCES, np.array([[0.0], [2.0]]), np.array([[1.0], [3.0]])).values
    assert got["mean_shift"] == got["wasserstein1"] == 1
    assert got["ks"] == 0.5
    agree(got["energy"], math.sqrt(2 * (0.25 + 0.25)))


# Non-finite values.


def without(x, y, unit, paired):
    a, b = x[:, unit], y[:, unit]
    keep_a, keep_b = np.isfinite(a), np.isfinite(b)
    if paired:
        keep_a = keep_b = keep_a & keep_b
    return a[keep_a][:, None], b[keep_b][:, None]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("paired", "m"), [(True, 60), (False, 60), (False, 47)])
@pytest.mark.parametrize("shape", [True, False])
@pytest.mark.parametrize("kind", ["smooth", "relu"])
def test_examples_that_are_not_finite_are_left_out_and_counted(kind, shape, paired, m, dtype):
    p, q = (x.astype(dtype) for x in samples(kind, 60, m))
    p[[3, 9, 11, 40], [1, 1, 1, 2]] = [np.nan, np.inf, -np.inf, np.nan]
    q[[3, 5, 20, 21], [1, 1, 4, 4]] = [np.nan, -np.inf, np.inf, np.nan]
    got = distances(DISTANCES, p, q, paired=paired, shape=shape)
    np.testing.assert_array_equal(got.nonfinite, [0, 4, 1, 0, 2, 0] if paired else [0, 5, 1, 0, 2, 0])
    for unit in range(6):
        alone = distances(DISTANCES, *without(p, q, unit, paired), paired=False, shape=shape).values
        for name in DISTANCES:
            agree(got.values[name][unit], alone[name][0], rel=1e-12)


def test_units_without_missing_values_keep_their_bits_when_another_loses_some():
    p, q = samples("smooth", 60, 60)
    expected = distances(DISTANCES, p, q).values
    q[7, 2] = np.nan
    for name, value in distances(DISTANCES, p, q).values.items():
        np.testing.assert_array_equal(np.delete(value, 2), np.delete(expected[name], 2), err_msg=name)
        assert value[2] != expected[name][2]


@pytest.mark.parametrize("shape", [True, False])
def test_a_unit_with_fewer_than_two_values_left_is_nan_and_says_so(shape):
    p, q = samples("smooth", 10, 10)
    p[:, 0] = np.nan
    p[1:, 1] = np.inf
    p[2:, 2] = np.nan
    p[:5, 3], q[5:, 3] = np.nan, np.nan
    got = distances(DISTANCES, p, q, shape=shape)
    np.testing.assert_array_equal(got.nonfinite, [10, 9, 8, 10, 0, 0])
    for value in got.values.values():
        np.testing.assert_array_equal(np.isnan(value), [True, True, False, True, False, False])


def test_values_too_large_to_be_summed_count_as_not_finite():
    p, q = samples("smooth", 10, 10)
    p[0, 0], p[1, 0] = 2 * LARGEST, LARGEST
    assert Sample.of(p).count[0] == 9
    assert not np.isnan(distance("energy", p, q)).any()
    float32 = np.full((4, 1), np.finfo(np.float32).max)
    float32[0] = 0
    assert Sample.of(float32).count == 4


def test_moments_without_any_value_are_nan():
    sample = Sample.of(np.full((3, 1), np.nan))
    assert np.isnan(sample.mean)
    assert np.isnan(sample.variance)
    assert sample.count == 0


# Shape drift.


def test_shape_drift_does_not_see_moments():
    p, _ = samples("smooth", 200, 200)
    got = distances(DISTANCES, p, 3 * p + 7, shape=True).values
    for name in MOMENTS:
        assert (got[name] == 0).all()
    assert got["wasserstein1"].max() < 1e-14
    assert got["energy"].max() < 1e-7  # the square root of rounding


def test_shape_drift_is_the_distance_between_standardized_samples():
    p, q = samples("relu", 80, 50)
    scaled = [(x - x.mean(axis=0)) / x.std(axis=0) for x in (p, q)]
    got = distances(DISTANCES, p, q, paired=False, shape=True).values
    assert got["wasserstein1"].min() > 0.01
    for unit in range(p.shape[1]):
        for name in ("wasserstein1", "energy"):
            expected = slow.distance(name, list(scaled[0][:, unit]), list(scaled[1][:, unit]))
            agree(got[name][unit], expected, rel=1e-9)
        # The order distances may see the last bit of a standardized value where atoms meet: these do not.
        expected = slow.distance("ks", list(scaled[0][:, unit]), list(scaled[1][:, unit]))
        agree(got["ks"][unit], expected)


def test_a_standardized_sample_agrees_with_itself():
    x = samples("relu", 80, 50)[0]
    x[2, 1] = np.nan
    x[:, 2] = 4.0
    x[:, 3] = np.nan
    sample = Sample.of(x).standardized()
    again = Sample.of(sample.values)
    np.testing.assert_array_equal(sample.sorted, again.sorted)
    np.testing.assert_array_equal(sample.count, again.count)
    np.testing.assert_array_equal(sample.mean, [0, 0, 0, np.nan, 0, 0])
    np.testing.assert_array_equal(sample.variance, [1, 1, 0, np.nan, 1, 1])
    agree(again.mean, sample.mean)
    agree(again.variance, sample.variance)


def test_the_shapes_of_two_constants_are_the_same():
    for value in distances(DISTANCES, np.full((4, 1), 1.0), np.full((4, 1), 2.0), shape=True).values.values():
        assert value == 0


# The floor.


@pytest.mark.parametrize("examples", [40, 41, 4])
@pytest.mark.parametrize("shape", [True, False])
@pytest.mark.parametrize("splits", [20, 5])
def test_the_floor_is_the_distance_between_random_halves(examples, shape, splits):
    x = samples("relu", examples, 2)[0]
    if examples > 4:
        x[[0, 1, 5], [1, 1, 2]] = [np.nan, np.inf, np.nan]
    got = floor(x, DISTANCES, splits, seed=3, shape=shape)
    found = [
        distances(DISTANCES, x[half], x[~half], paired=False, shape=shape).values
        for half in random_halves(examples, splits, seed=3)
    ]
    assert got.splits == splits
    for name in DISTANCES:
        values = np.stack([one[name] for one in found])
        agree(got.mean[name], values.mean(axis=0), rel=1e-10, absolute=1e-10)
        finite = np.isfinite(values).all(axis=0)
        expected = np.quantile(values[:, finite], 0.95, axis=0, method="weibull")
        agree(got.percentile95[name][finite], expected, rel=1e-10, absolute=1e-10)
        assert (got.percentile95[name][~finite] == np.inf).all()


def test_half_a_unit_far_from_its_median_keeps_its_digits():
    # A half without the sample's median is far from it, for its spread: values close together, or the same.
    x = np.array([[0.0, 1.1], [0.7, 1.1], [1e9, 3e8], [1e9, 3e8 + 1]])
    got = floor(x, DISTANCES, 50, seed=0)
    found = [distances(DISTANCES, x[h], x[~h], paired=False).values for h in random_halves(4, 50, seed=0)]
    for name in DISTANCES:
        agree(got.mean[name], np.stack([one[name] for one in found]).mean(axis=0), rel=1e-9)


def test_a_constant_half_has_no_spread_at_all():
    # About the sample's median, 1.3, the constant half's variance comes out as -3e-17.
    x = np.array([[0.9], [0.9], [0.9], [1.3], [2.3], [3.3]])
    apart = [half for half in random_halves(6, 50, seed=0) if len(set(half[:3])) == 1]
    assert apart
    assert floor(x, ("std_shift",), 50, seed=0).mean["std_shift"] == np.inf


def test_the_values_of_one_example_stay_in_one_half():
    x = np.repeat(np.random.default_rng(0).standard_normal((20, 3)), 4, axis=0)
    agree(floor(x, ("ks",), seed=2, block=4).mean["ks"], floor(x[::4], ("ks",), seed=2).mean["ks"])
    assert (floor(x, ("ks",), seed=2).mean["ks"] < floor(x, ("ks",), seed=2, block=4).mean["ks"]).all()


@pytest.mark.parametrize("splits", [1, 18, 20, 39])
def test_an_infinite_distance_between_halves_is_inf_and_not_nan(splits):
    x = np.tile([[0.0], [0.0], [1.0], [1.0]], (1, 3))
    got = floor(x, DISTANCES, splits, seed=1)
    for name in DISTANCES:
        assert not np.isnan(got.mean[name]).any()
        assert not np.isnan(got.percentile95[name]).any()


@pytest.mark.parametrize("name", [name for name in DISTANCES if name not in ORDERS])
def test_two_disjoint_batches_exceed_the_95th_percentile_of_the_floor_in_5_percent_of_units(name):
    units = 4000
    x = np.random.default_rng(8).standard_normal((60, units))
    above = distance(name, x[:30], x[30:], paired=False) > floor(x, (name,), seed=9).percentile95[name]
    assert abs(above.mean() - 0.05) < Z * math.sqrt(0.05 * 0.95 / units)


def test_the_mean_of_the_floor_is_the_expected_distance_of_disjoint_batches():
    x = np.random.default_rng(8).standard_normal((60, 2000))
    difference = distance("wasserstein1", x[:30], x[30:]) - floor(x, ("wasserstein1",), seed=9).mean["wasserstein1"]
    assert abs(z_score(difference, 0.0)) < Z


def test_the_splits_come_from_the_seed_and_are_the_same_for_every_unit():
    column = np.random.default_rng(0).standard_normal((30, 1))
    x = np.repeat(column, 3, axis=1)
    x[0, 2] = np.nan
    first, again, other = (floor(x, ("ks", "energy"), seed=seed) for seed in (1, 1, 2))
    assert isinstance(first, Floor)
    for name in ("ks", "energy"):
        np.testing.assert_array_equal(first.mean[name], again.mean[name])
        assert first.mean[name][0] == first.mean[name][1]
        assert (first.mean[name] != other.mean[name]).all()


def test_halves_are_halves_and_every_example_is_as_often_in_either():
    halves = random_halves(21, 4000, seed=0)
    assert (halves.sum(axis=1) == 10).all()
    share = 10 / 21
    assert np.abs(halves.mean(axis=0) - share).max() < Z * math.sqrt(share * (1 - share) / 4000)
    assert abs((halves[:, 0] & halves[:, 1]).mean() - share * 9 / 20) < Z * math.sqrt(share * 9 / 20 / 4000)


# What is refused.


def test_bad_input_is_refused_by_name():
    x = np.zeros((4, 2))
    with pytest.raises(ValueError, match=r"unknown distance 'wasserstein'; there are mean_shift, std_shift"):
        distance("wasserstein", x, x)
    with pytest.raises(ValueError, match=r"got the string 'ks'"):
        distances("ks", x, x)
    with pytest.raises(ValueError, match="no distance given"):
        distances((), x, x)
    with pytest.raises(ValueError, match="given twice: ks, ks"):
        floor(x, ("ks", "ks"), seed=0)
    with pytest.raises(ValueError, match=r"got shape \(4,\)"):
        Sample.of(x[:, 0])
    with pytest.raises(ValueError, match="at least 2 examples, got 1"):
        Sample.of(x[:1])
    with pytest.raises(ValueError, match="at least one unit"):
        Sample.of(x[:, :0])
    with pytest.raises(ValueError, match="got complex128"):
        Sample.of(x.astype(np.complex128))
    with pytest.raises(ValueError, match="same examples, got 4 and 3"):
        distance("ks", x, x[:3])
    with pytest.raises(ValueError, match="same units, got 2 and 1"):
        distance("ks", x, x[:, :1])
    with pytest.raises(ValueError, match="at least 4 examples, two in each half, got 3"):
        floor(x[:3], ("ks",), seed=0)
    for block in (0, 3):
        with pytest.raises(ValueError, match=f"blocks of {block} do not divide a sample of 4"):
            floor(x, ("ks",), seed=0, block=block)
    with pytest.raises(ValueError, match="splits=0"):
        floor(x, ("ks",), 0, seed=0)
    with pytest.raises(ValueError, match="not negative, got -1"):
        floor(x, ("ks",), seed=-1)


@pytest.mark.parametrize("examples", [1000, 8191, 40_001, 70_000])
def test_the_walks_of_all_splits_count_far_enough(examples):
    """Equal halves step by one, unequal ones by their sizes: sums that a short integer would not hold."""
    x = np.random.default_rng(0).normal(size=(examples, 2)).astype(np.float32)
    found = floor(x, ("wasserstein1",), 2, seed=3)
    twin = floor(x, ("wasserstein1", "ks"), 2, seed=3)  # with ks every split is merged for itself
    np.testing.assert_allclose(found.mean["wasserstein1"], twin.mean["wasserstein1"], rtol=1e-10)
