"""Singular values: planted ones come back, three ways agree, and every doubt is true."""

import math

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import svds

from diagnostics.spectrum import correlation, effective_dimension, extremes, mean_square, spectrum
from tests.reference import jacobian as slow


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def planted(values, rows, columns, seed=0, dtype=torch.float64):
    """A matrix with these singular values, between random orthonormal bases."""
    generator = rng(seed)
    left = torch.linalg.qr(torch.randn(rows, rows, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(columns, columns, generator=generator, dtype=torch.float64))[0]
    k = len(values)
    return (left[:, :k] * torch.tensor(values, dtype=torch.float64) @ right[:, :k].T).to(dtype)


def of(matrix, k, **options):
    options.setdefault("generator", rng(5))
    return extremes(lambda v: matrix @ v, lambda u: matrix.T @ u, tuple(matrix.shape), k, **options)


NUMBERS = ("rank", "spread", "mean_square", "largest", "smallest", "distance")


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (5, 9), (9, 5), (1, 4)])
def test_all_numbers_are_those_of_the_definitions(rows, columns):
    matrices = torch.randn(3, rows, columns, generator=rng(), dtype=torch.float64)
    found = spectrum(matrices)
    for index, matrix in enumerate(matrices.numpy()):
        for name, value in slow.numbers(matrix).items():
            assert float(getattr(found, name)[index]) == pytest.approx(value, rel=1e-12), name


def test_planted_values_come_back_with_their_numbers():
    values = [4.0, 2.0, 1.0, 0.5]
    found = spectrum(planted(values, 4, 6))
    assert found.values.tolist() == pytest.approx(values)
    assert float(found.spread) == pytest.approx(math.log(2) * math.sqrt(5) / 2)
    assert float(found.mean_square) == pytest.approx((16 + 4 + 1 + 0.25) / 4)
    assert float(found.distance) == pytest.approx(math.sqrt((15**2 + 3**2 + 0 + 0.75**2) / 4))
    assert (float(found.rank), float(found.largest), float(found.smallest)) == (4, pytest.approx(4), pytest.approx(0.5))


def test_a_rank_is_counted_and_the_spread_is_of_what_it_counts():
    found = spectrum(planted([3.0, 3.0], 5, 5, dtype=torch.float32))
    assert float(found.rank) == 2
    assert float(found.spread) == pytest.approx(0, abs=1e-6)
    assert float(found.smallest) < 1e-6
    assert float(found.distance) == pytest.approx(math.sqrt((2 * 64 + 3) / 5), rel=1e-5)


def test_small_values_keep_their_digits_in_single_precision():
    """By way of J J^T in float32 nothing below 3e-4 of the largest would be left."""
    found = spectrum(planted([1.0, 1e-5], 4, 4, dtype=torch.float32)[..., :])
    assert float(found.values[1]) == pytest.approx(1e-5, rel=0.02)


def test_rows_that_cannot_be_reached_are_a_distance():
    assert float(spectrum(torch.eye(4, 2)).distance) == pytest.approx(math.sqrt(2 / 4))
    assert float(spectrum(torch.eye(2, 4)).distance) == 0
    assert float(spectrum(torch.zeros(3, 3)).distance) == pytest.approx(1)
    assert math.isnan(float(spectrum(torch.zeros(3, 3)).spread))


def test_a_matrix_that_is_not_finite_is_nan_and_its_neighbours_are_not():
    matrices = torch.randn(3, 4, 4, generator=rng())
    matrices[1, 2, 2] = math.inf
    found = spectrum(matrices)
    for name in NUMBERS:
        assert getattr(found, name).isnan().tolist() == [False, True, False], name
    assert found.values[2].tolist() == spectrum(matrices[2]).values.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_rank_is_by_the_rounding_of_the_matrices_own_type(dtype):
    """What rounding of a matrix of rank 1 leaves is no rank, whatever the type it is decomposed in."""
    one = torch.randn(2, 20, 1, generator=rng()) @ torch.randn(2, 1, 20, generator=rng(1))
    found = spectrum(one.to(dtype) if dtype != torch.float64 else one.double())
    assert found.eps == torch.finfo(dtype).eps
    if dtype != torch.float64:
        assert found.rank.tolist() == [1, 1]
    least = found.values[0, 0] * 20 * torch.finfo(dtype).eps
    assert float(found.rank[0]) == int((found.values[0] > least).sum())


def test_matrices_are_decomposed_few_at_a_time(monkeypatch):
    matrices = torch.randn(5, 3, 30, 20, generator=rng(), dtype=torch.float64)
    matrices[2, 1, 0, 0] = math.inf
    usual = spectrum(matrices)
    groups, kept = [], torch.linalg.svdvals
    monkeypatch.setattr(torch.linalg, "svdvals", lambda a: groups.append(len(a)) or kept(a))
    monkeypatch.setattr("diagnostics.spectrum.WORKSPACE", 4 * 30 * 20 * 8)
    cut = spectrum(matrices)
    assert groups == [4, 4, 4, 3]
    assert cut.values.shape == (5, 3, 20)
    assert torch.equal(usual.values.nan_to_num(-1), cut.values.nan_to_num(-1))
    assert spectrum(matrices[:0]).values.shape == (0, 3, 20)


def test_gaussian_weights_fill_the_interval_of_marchenko_and_pastur():
    rows, columns = 400, 900
    matrix = torch.randn(rows, columns, generator=rng(), dtype=torch.float64) / math.sqrt(columns)
    found = spectrum(matrix)
    edge = math.sqrt(rows / columns)
    assert float(found.largest) == pytest.approx(1 + edge, abs=3 * columns ** (-2 / 3))
    assert float(found.smallest) == pytest.approx(1 - edge, abs=3 * columns ** (-2 / 3))
    z = (float(found.mean_square) - 1) / math.sqrt(2 / (rows * columns))
    assert abs(z) < 4


def test_shapes_without_values_are_refused():
    for shape in ((3,), (0, 3), (2, 3, 0)):
        with pytest.raises(ValueError, match="singular values need matrices"):
            spectrum(torch.zeros(shape))


# --- the extremes


@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (30, 70), (70, 30)])
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_extremes_are_those_of_the_dense_way_and_within_their_residuals(rows, columns, which):
    matrix = torch.randn(rows, columns, generator=rng(), dtype=torch.float64)
    found = of(matrix, 4, which=which, tolerance=1e-9)
    dense = torch.linalg.svdvals(matrix)
    wanted = dense[:4] if which == "largest" else dense[-4:]
    assert found.converged
    assert found.values.tolist() == pytest.approx(wanted.tolist(), abs=1e-8)
    assert (found.residuals <= 1e-9 * dense[0]).all()


def test_the_largest_agree_with_arpack():
    matrix = torch.randn(200, 300, generator=rng(), dtype=torch.float64)
    found = of(matrix, 5, tolerance=1e-10)
    wanted = np.sort(svds(matrix.numpy(), k=5, return_singular_vectors=False, rng=0))[::-1]
    assert found.values.numpy() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3, 1e-6])
def test_a_true_value_lies_within_each_residual_whatever_the_tolerance(tolerance):
    matrix = torch.randn(150, 150, generator=rng(3), dtype=torch.float64)
    found = of(matrix, 5, tolerance=tolerance)
    dense = torch.linalg.svdvals(matrix)
    assert found.converged
    assert (found.residuals <= tolerance * dense[0]).all()
    for value, residual in zip(found.values, found.residuals, strict=True):
        assert (dense - value).abs().min() <= residual + 1e-12


def test_a_tighter_tolerance_takes_more_steps():
    matrix = torch.randn(200, 200, generator=rng(), dtype=torch.float64)
    steps = [of(matrix, 3, tolerance=tolerance).steps for tolerance in (1e-1, 1e-3, 1e-9)]
    assert steps == sorted(set(steps))


def test_what_has_not_converged_says_so():
    matrix = torch.randn(100, 100, generator=rng(), dtype=torch.float64)
    found = of(matrix, 2, which="smallest", max_steps=20)
    assert (found.steps, found.converged) == (20, False)
    assert (found.residuals > 1e-3 * torch.linalg.svdvals(matrix)[0]).any()
    assert found.products == 40 + 2 * 2


def test_an_orthogonal_map_has_its_one_value_many_times():
    matrix = torch.linalg.qr(torch.randn(30, 30, generator=rng(), dtype=torch.float64))[0]
    for which in ("largest", "smallest"):
        found = of(matrix, 5, which=which)
        assert found.values.tolist() == pytest.approx([1] * 5)
        assert found.converged


def test_zeros_are_found_at_the_end():
    matrix = planted([3.0, 2.0, 1.0], 12, 9)
    found = of(matrix, 5, which="smallest", max_steps=9)
    assert found.values.tolist() == pytest.approx([0] * 5, abs=1e-9)
    assert of(torch.zeros(4, 4, dtype=torch.float64), 2).values.tolist() == [0, 0]


@pytest.mark.parametrize("copies", [2, 5])
@pytest.mark.parametrize("which", ["largest", "smallest"])
@pytest.mark.parametrize("max_steps", [120, 300])
def test_a_value_is_found_as_often_as_it_occurs(copies, which, max_steps):
    """From one starting vector each would be found once."""
    values = np.sort(np.repeat([9.0, 7.0, *np.linspace(3, 5, 30), 1.5, 1.0], copies))[::-1].tolist()
    matrix = planted(values, len(values) + 9, len(values))
    for k in range(1, 6):
        found = of(matrix, k, which=which, max_steps=max_steps, tolerance=1e-6)
        wanted = values[:k] if which == "largest" else values[-k:]
        assert found.converged or len(values) > max_steps
        if found.converged:
            assert found.values.tolist() == pytest.approx(wanted, rel=1e-5), k


@pytest.mark.parametrize("start", range(5))
def test_what_two_zeros_hide_in_is_searched_to_the_end(start):
    matrix = planted([*np.linspace(1, 0.5, 98), 0.0, 0.0], 100, 100)
    found = of(matrix, 3, which="smallest", generator=rng(start))
    assert found.values.tolist() == pytest.approx([0.5, 0, 0], abs=1e-9)
    assert (found.converged, found.steps) == (True, 100)


def test_small_values_are_found_to_their_own_digits_or_not_said_to_be():
    """Residuals that vanish beside the largest value say nothing of values that are a millionth of it."""
    values = np.logspace(0, -6, 200).tolist()
    matrix = planted(values, 200, 200)
    whole = of(matrix, 5, which="smallest")
    assert whole.converged
    assert whole.values.tolist() == pytest.approx(values[-5:], rel=1e-6)
    part = of(matrix, 5, which="smallest", max_steps=100)
    assert not part.converged
    assert part.values[-1] > 2 * values[-1]
    assert (part.residuals <= 1e-3).any()  # beside the largest they would have been enough


def test_the_smallest_of_a_larger_map_are_found_where_they_stand_apart():
    values = [*np.linspace(2, 1, 200), 0.01, 0.0, 0.0]
    matrix = planted(values, 203, 203)
    found = of(matrix, 3, which="smallest", max_steps=120)
    assert found.converged
    assert found.steps < 203
    assert found.values.tolist() == pytest.approx([0.01, 0, 0], abs=1e-5)


@pytest.mark.parametrize("scale", [1e-200, 1e160])
@pytest.mark.parametrize("which", ["largest", "smallest"])
def test_values_near_the_ends_of_the_floating_point_range_keep_their_digits(scale, which):
    matrix = torch.randn(30, 20, generator=rng(), dtype=torch.float64)
    found, usual = of(matrix * scale, 3, which=which), of(matrix, 3, which=which)
    assert (found.values / scale).tolist() == pytest.approx(usual.values.tolist(), rel=1e-9)
    assert (found.residuals <= 1e-3 * found.values[0]).all()
    assert found.converged


def test_a_residual_is_judged_beside_what_the_products_can_tell():
    """In single precision a value of a ten millionth of the largest is zero."""
    matrix = planted([*np.linspace(2, 1, 60), 0.0], 61, 61, dtype=torch.float32)
    found = extremes(lambda v: matrix @ v.float(), lambda u: matrix.T @ u.float(), (61, 61), 2, which="smallest",
                     generator=rng())  # fmt: skip
    assert found.converged
    assert found.values.tolist() == pytest.approx([1, 0], abs=1e-5)


@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_products_with_many_vectors_at_once_change_nothing(shape):
    matrix = torch.randn(*shape, generator=rng(), dtype=torch.float64)
    asked = []

    def product(vectors):
        asked.append(tuple(vectors.shape))
        return vectors @ matrix.T

    many = extremes(product, lambda u: u @ matrix, shape, 3, generator=rng(5), batched=True)
    one = of(matrix, 3)
    assert many.values.tolist() == pytest.approx(one.values.tolist(), rel=1e-12)
    assert (many.products, many.steps) == (one.products, one.steps)
    assert asked[0] == (4, shape[1])


def test_the_generator_is_where_the_start_comes_from():
    matrix = torch.randn(60, 60, generator=rng(), dtype=torch.float64)
    ask = {"tolerance": 1.0, "max_steps": 3}
    one, same, other = (of(matrix, 1, generator=rng(seed), **ask).values for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"k": 0}, "asked for k=0"), ({"k": 5}, "has 4 singular values, asked for k=5"), ({"which": "middle"}, "'middle'"),
     ({"tolerance": 0}, "must be positive, got 0"), ({"max_steps": 0}, "must be positive")],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        of(torch.eye(4, dtype=torch.float64), options.pop("k", 1), **options)


def test_a_product_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="not finite"):
        of(torch.full((3, 3), math.nan, dtype=torch.float64), 1)


# --- the mean square


def test_the_mean_square_is_unbiased_and_its_standard_error_true():
    matrix = torch.randn(20, 30, generator=rng(), dtype=torch.float64)
    true = float(matrix.square().sum()) / 20
    found = [mean_square(lambda v: matrix @ v, (20, 30), samples=16, generator=rng(seed)) for seed in range(300)]
    values = np.array([one.value for one in found])
    assert abs((values.mean() - true) / (values.std(ddof=1) / math.sqrt(300))) < 4
    errors = np.array([one.standard_error for one in found])
    assert math.sqrt((errors**2).mean()) == pytest.approx(values.std(ddof=1), rel=0.15)
    # of signs, the variance is 2 (|A|_F^2 - sum A_ii^2) with A = J^T J
    gram = matrix.T @ matrix
    law = math.sqrt(2 * float(gram.square().sum() - gram.diagonal().square().sum()) / 16) / 20
    assert values.std(ddof=1) == pytest.approx(law, rel=0.15)


def test_at_rank_one_the_error_of_few_samples_is_as_skewed_as_is_said():
    row = torch.randn(1, 200, generator=rng(), dtype=torch.float64)
    true = float(row.square().sum())
    found = [mean_square(lambda v: row @ v, (1, 200), samples=32, generator=rng(seed)) for seed in range(400)]
    z = np.array([(one.value - true) / one.standard_error for one in found])
    assert 1.1 < z.std() < 1.6
    assert np.median(z) < 0


def test_more_samples_leave_less_doubt():
    matrix = torch.randn(20, 30, generator=rng(), dtype=torch.float64)
    few, many = (mean_square(lambda v: matrix @ v, (20, 30), samples=n, generator=rng()) for n in (8, 800))
    assert (few.samples, many.samples) == (8, 800)
    assert many.standard_error == pytest.approx(few.standard_error / 10, rel=0.6)


def test_a_diagonal_map_is_known_after_two_signs():
    found = mean_square(lambda v: 3 * v, (5, 5), samples=2, generator=rng())
    assert (found.value, found.standard_error) == (9, 0)


def test_too_few_samples_and_empty_maps_are_refused():
    with pytest.raises(ValueError, match="2 samples or more, got 1"):
        mean_square(lambda v: v, (5, 5), samples=1, generator=rng())
    with pytest.raises(ValueError, match="empty map"):
        mean_square(lambda v: v, (0, 5), generator=rng())


# --- the premise


def test_correlations_are_those_pair_by_pair():
    values = torch.randn(50, 6, generator=rng(), dtype=torch.float64) @ torch.randn(6, 6, generator=rng(1)).double() + 5
    matrix = slow.correlations(values.numpy())
    assert effective_dimension(values) == pytest.approx(36 / (matrix**2).sum())
    off = matrix[~np.eye(6, dtype=bool)]
    assert correlation(values) == pytest.approx(math.sqrt((off**2).mean()))


def test_copies_of_one_unit_have_one_dimension_and_constants_none():
    one = torch.randn(50, 1, generator=rng())
    copies = torch.cat([one, -2 * one, one + 3, torch.ones(50, 1)], dim=1)
    assert effective_dimension(copies) == pytest.approx(1, rel=1e-6)
    assert correlation(copies) == pytest.approx(1, rel=1e-6)
    assert math.isnan(effective_dimension(torch.ones(5, 3)))
    assert math.isnan(correlation(torch.cat([one, torch.ones(50, 1)], dim=1)))


def test_independent_units_show_as_many_dimensions_as_the_sample_allows():
    for examples in (50, 5000):
        values = torch.randn(examples, 100, generator=rng())
        assert effective_dimension(values) == pytest.approx(1 / (1 / 100 + 1 / examples), rel=0.03)
        assert correlation(values) == pytest.approx(examples**-0.5, rel=0.03)


def test_one_example_has_no_correlations():
    for values in (torch.zeros(1, 3), torch.zeros(4)):
        with pytest.raises(ValueError, match="2 examples or more"):
            effective_dimension(values)


def test_a_spectrum_is_shown_in_a_line_without_its_values():
    assert repr(spectrum(torch.ones(7, 4, 3))) == "Spectrum(7 of 4 x 3, values (7, 3))"
    assert repr(spectrum(torch.ones(2, 5))) == "Spectrum(one of 2 x 5, values (2,))"
