"""The largest eigenvalue: planted spectra, ARPACK, dense Hessians; and the probe on networks with and without BN."""

import math

import numpy as np
import pytest
import torch
from hessian_eigenthings import HessianOperator, lanczos
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import nn

from diagnostics import Chunks, Gradients, Recorder, Sharpness, largest_eigenvalues, read_run
from diagnostics.probe import ProbeError
from diagnostics.sharpness import search_start
from tests.models import PrimitiveBatchNorm, awkward_batches, cross_entropy
from tests.reference import gradients as twin

FIXED = awkward_batches(1, seed=7, size=12)[0]
PROBES = [
    lambda: Sharpness(iterations=12),
    lambda: Sharpness(2, FIXED, iterations=12, mode="population"),
    lambda: Sharpness(1, FIXED, iterations=11, chunks=Chunks(5, ghost=True)),
]


def planted(values, seed=0, dtype=torch.float64):
    """A symmetric matrix with these eigenvalues, and their vectors as columns."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.linalg.qr(torch.randn(len(values), len(values), generator=generator, dtype=torch.float64))[0]
    spectrum = torch.tensor(values, dtype=torch.float64)
    return (vectors * spectrum @ vectors.T).to(dtype), vectors.to(dtype)


def start_of(n, seed=1, dtype=torch.float64):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def spread(n, top):
    return [*np.linspace(-1, 1, n - len(top)).tolist(), *top]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [1, 3])
def test_a_planted_spectrum_is_found_with_its_vectors(k, dtype):
    matrix, vectors = planted(spread(120, [2.0, 3.5, 5.0]), dtype=dtype)
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(120, dtype=dtype), k, tolerance=1e-4)
    assert found.converged
    assert found.values.tolist() == pytest.approx([5.0, 3.5, 2.0][:k], rel=1e-4)
    for place, vector in enumerate(found.vectors):
        assert abs(float(vector @ vectors[:, -1 - place])) == pytest.approx(1, abs=1e-4)
    wanted = [(matrix @ v - value.to(dtype) * v).norm() for v, value in zip(found.vectors, found.values, strict=True)]
    assert found.residuals.tolist() == pytest.approx([float(r) for r in wanted], rel=1e-2, abs=1e-6)


def test_the_largest_is_the_algebraic_one():
    matrix, _ = planted([*np.linspace(-100, -50, 40).tolist(), 0.5, 1.0])
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(42), tolerance=1e-3)
    assert found.converged and float(found.values[0]) == pytest.approx(1.0, rel=1e-5)
    negative, _ = planted(np.linspace(-9, -2, 30).tolist())
    found = largest_eigenvalues(lambda v: negative @ v, start_of(30), tolerance=1e-3)
    assert float(found.values[0]) == pytest.approx(-2.0, rel=1e-5)


@pytest.mark.parametrize("basis", [5, 8, 200])
def test_a_small_basis_restarts_and_agrees_with_arpack(basis):
    n, k = 300, 3
    generator = np.random.default_rng(0)
    root = generator.normal(size=(n, n))
    matrix = torch.tensor(root + root.T)
    calls = []

    def matvec(v):
        calls.append(v.clone())
        return matrix @ v

    found = largest_eigenvalues(matvec, start_of(n), k, tolerance=1e-6, iterations=2000, basis=basis)
    assert found.converged
    assert found.iterations == len(calls)
    wanted = eigsh(LinearOperator((n, n), lambda v: matrix.numpy() @ v, dtype=float), k, which="LA", tol=1e-12)[0]
    assert found.values.tolist() == pytest.approx(sorted(wanted, reverse=True), rel=1e-9)
    if basis < 200:
        assert len(calls) > 2 * basis
    gram = found.vectors @ found.vectors.T
    torch.testing.assert_close(gram, torch.eye(k, dtype=torch.float64), atol=1e-8, rtol=0)


def test_a_restart_of_long_vectors_combines_all_their_columns():
    n = 150_000  # more than are combined at a time
    diagonal = torch.linspace(0, 0.9, n, dtype=torch.float64)
    diagonal[70_000], diagonal[-1] = 2.0, 1.5
    found = largest_eigenvalues(
        lambda v: diagonal * v, torch.ones(n, dtype=torch.float64), 2, basis=6, iterations=200, tolerance=1e-3
    )
    assert found.converged and found.iterations > 12
    assert found.values.tolist() == pytest.approx([2.0, 1.5], rel=1e-5)
    assert abs(float(found.vectors[0, 70_000])) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("tolerance", [0.5, 0.01, 1e-5])
def test_the_tolerance_decides_when_to_stop(tolerance):
    matrix, _ = planted(spread(200, [1.2]))
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(200), tolerance=tolerance, least=1)
    assert found.converged and float(found.residuals[0]) <= tolerance * float(found.values[0])
    if tolerance < 0.5:
        assert float(found.residuals[0]) > tolerance**2
    needed = [
        largest_eigenvalues(lambda v: matrix @ v, start_of(200), tolerance=t, least=1).iterations
        for t in (0.5, 0.01, 1e-5)
    ]
    assert needed[0] < needed[1] < needed[2]


def test_too_few_iterations_are_reported_not_hidden():
    matrix, _ = planted(spread(200, [1.01]))
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(200), iterations=5, tolerance=1e-6)
    assert not found.converged
    assert found.iterations == 6
    assert float(found.residuals[0]) > 1e-6


def test_a_start_that_lacks_the_top_finds_it_nevertheless():
    """An eigenvector to start from: the Krylov space is exhausted at once, and the search goes on outside it."""
    matrix, vectors = planted(spread(60, [4.0, 9.0]))
    start = vectors[:, -2].clone()
    found = largest_eigenvalues(lambda v: matrix @ v, start, tolerance=1e-3)
    assert found.converged
    assert float(found.values[0]) == pytest.approx(9, rel=1e-4)
    early = [float(largest_eigenvalues(lambda v: matrix @ v, start, iterations=4, seed=s).values[0]) for s in (0, 0, 1)]
    assert early[0] == early[1] != early[2]
    hasty = largest_eigenvalues(lambda v: matrix @ v, start, least=1)
    assert float(hasty.values[0]) == pytest.approx(4)  # what `least` is there for


def test_a_nearly_blind_start_is_why_a_random_part_belongs_in_it():
    matrix, vectors = planted(spread(700, [4.0, 9.0]))
    found = largest_eigenvalues(lambda v: matrix @ v, search_start(vectors[:, -2], 0))
    assert float(found.values[0]) == pytest.approx(9, rel=1e-3)


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_few_dimensions_are_solved_exactly(n):
    matrix, _ = planted(list(range(1, n + 1)))
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(n), n)
    assert found.converged
    assert found.values.tolist() == pytest.approx(list(range(n, 0, -1)), rel=1e-10)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_the_zero_matrix_and_the_identity(value):
    found = largest_eigenvalues(lambda v: value * v, start_of(20), 2)
    assert found.converged
    assert found.values.tolist() == pytest.approx([value, value], abs=1e-12)


def test_products_that_are_not_finite_end_the_search():
    calls = []

    def matvec(v):
        calls.append(0)
        return v * (math.inf if len(calls) == 3 else 1 + torch.arange(30.0))

    found = largest_eigenvalues(matvec, torch.ones(30))
    assert not found.converged
    assert math.isnan(float(found.values[0])) and math.isnan(float(found.residuals[0]))
    assert found.iterations == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": torch.zeros(4)}, "not zero"),
        ({"start": torch.tensor([1.0, math.nan])}, "finite"),
        ({"start": torch.ones(2, 2)}, "one vector"),
        ({"k": 0}, "k must be"),
        ({"k": 5}, "4 eigenvalues"),
        ({"tolerance": 0}, "tolerance"),
        ({"iterations": 0}, "iterations"),
        ({"basis": 2}, "basis"),
        ({"least": 0}, "least"),
    ],
)
def test_what_cannot_be_searched_is_refused(change, message):
    options = {"start": torch.ones(4), "k": 1, **change}
    with pytest.raises(ValueError, match=message):
        largest_eigenvalues(lambda v: v, options.pop("start"), options.pop("k"), **options)


def network(norm=nn.BatchNorm1d, dropout=0.0):
    torch.manual_seed(1)
    layers = [nn.Linear(4, 5), norm(5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def data(n=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.randint(3, (n,), generator=generator)


def record(tmp_path, probe, model=None, batch=None, loss=cross_entropy):
    model, batch = network() if model is None else model, data() if batch is None else batch
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, tmp_path / "run", [probe], loss=loss, optimizer=optimizer, overwrite=True) as recorder:
        with recorder.step(batch):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
    table = read_run(tmp_path / "run")
    assert set(table["layer"]) == {"-"}
    return {(row.statistic, row.unit): row.value for row in table.itertuples()}, set(table["mode"])


def dense(model, batch):
    """Eigenvalues (largest first), |Hg|/|g| and g'Hg/|g|^2 from a dense Hessian of a BN from primitives."""
    other = network(PrimitiveBatchNorm)
    other.load_state_dict(model.state_dict(), strict=False)
    matrix = twin.hessian(other, cross_entropy, batch)
    before = {name: p.detach() for name, p in other.named_parameters()}
    g = twin.vector(twin.gradient(other, cross_entropy, batch, before)[1], list(before))
    values = np.linalg.eigvalsh((matrix + matrix.T) / 2)[::-1]
    return values, np.linalg.norm(matrix @ g) / np.linalg.norm(g), g @ matrix @ g / (g @ g), np.linalg.norm(g)


@pytest.mark.parametrize("own", [True, False])
def test_on_a_network_with_bn_it_is_the_dense_hessians(tmp_path, own):
    batch, other = data(), data(20, seed=5)
    probe = Sharpness(3, "batch" if own else other, tolerance=1e-6)
    assert probe.name == ("sharpness.batch" if own else "sharpness.fixed")
    model = network(dropout=0.5)
    values, directional, rayleigh, size = dense(model, batch if own else other)
    found, modes = record(tmp_path, probe, model, batch)
    assert modes == {"batch"}
    assert found["sharpness", -1] == pytest.approx(values[0], rel=1e-6)
    assert [found["eigenvalue", place] for place in range(3)] == pytest.approx(values[:3], rel=1e-6)
    assert found["ratio", -1] == pytest.approx(values[0] / values[2], rel=1e-6)
    assert found["directional_curvature", -1] == pytest.approx(directional, rel=1e-6)
    assert found["rayleigh", -1] == pytest.approx(rayleigh, rel=1e-6)
    assert found["gradient_norm", -1] == pytest.approx(size, rel=1e-8)
    assert found["converged", -1] == 1
    assert found["residual", -1] <= 1e-6 * values[0]
    assert found["residual", -1] == found["eigenvalue_residual", 0]


def test_population_statistics_are_another_function(tmp_path):
    found = {mode: record(tmp_path, Sharpness(mode=mode)) for mode in ("batch", "population", "step")}
    assert found["population"][1] == {"population"}
    assert found["population"][0]["sharpness", -1] != pytest.approx(found["batch"][0]["sharpness", -1], rel=0.01)
    assert found["step"][0] == found["batch"][0]  # no dropout here, and the model trains


def test_the_settings_reach_the_search(tmp_path):
    plain, _ = record(tmp_path, Sharpness())
    assert plain["iterations", -1] == 11
    assert record(tmp_path, Sharpness(least=13))[0]["iterations", -1] == 14
    exact, _ = record(tmp_path, Sharpness(tolerance=1e-9))
    assert exact["iterations", -1] > 11 and exact["residual", -1] < plain["residual", -1]
    cut, _ = record(tmp_path, Sharpness(iterations=3))
    assert (cut["iterations", -1], cut["converged", -1]) == (4, 0)
    assert record(tmp_path, Sharpness(seed=1))[0]["sharpness", -1] != plain["sharpness", -1]
    assert record(tmp_path, Sharpness(basis=4, tolerance=1e-3))[0]["iterations", -1] > exact["iterations", -1] / 2
    assert Sharpness(name="mine").name == "mine"


def test_examples_in_chunks_are_the_same_examples(tmp_path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    whole, _ = record(tmp_path, Sharpness(tolerance=1e-6), model)
    model.load_state_dict(state)
    parts, _ = record(tmp_path, Sharpness(tolerance=1e-6, chunks=Chunks(5)), model)
    for key in (("sharpness", -1), ("rayleigh", -1), ("loss", -1), ("gradient_norm", -1)):
        assert parts[key] == pytest.approx(whole[key], rel=1e-9)
    with pytest.raises(ProbeError, match="ghost"):
        record(tmp_path, Sharpness(chunks=Chunks(5)), network())


def test_where_the_gradient_is_zero_the_sharpness_still_is_something(tmp_path):
    model = nn.Linear(4, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    batch = data()[0]
    found, _ = record(tmp_path, Sharpness(tolerance=1e-9), model, batch, lambda m, x: m(x).square().sum())
    assert math.isnan(found["directional_curvature", -1]) and math.isnan(found["rayleigh", -1])
    assert found["sharpness", -1] == pytest.approx(float(torch.linalg.eigvalsh(2 * batch.T @ batch)[-1]), rel=1e-9)


def test_a_gradient_that_is_not_finite_is_recorded_and_stops_nothing(tmp_path):
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    found, _ = record(tmp_path, Sharpness(2), model)
    assert math.isnan(found["sharpness", -1]) and math.isnan(found["eigenvalue", 1])
    assert (found["converged", -1], found["iterations", -1]) == (0, 0)


def test_bad_settings_and_sites_are_refused_early():
    for change in ({"k": 0}, {"on": "full"}, {"mode": "eval"}, {"tolerance": -1}, {"basis": 2}, {"iterations": 0}):
        with pytest.raises(ValueError, match=next(iter(change))):
            Sharpness(**change)
    with pytest.raises(ValueError, match="give the recorder loss"):
        Recorder(network(), "nowhere", [Sharpness()])


def test_one_example_has_no_batch_statistics(tmp_path):
    with pytest.raises(ProbeError, match="more than 1 value per channel"):
        record(tmp_path, Sharpness(1, data(1)), network())


def test_the_start_is_mostly_the_gradient():
    g = torch.zeros(1000)
    g[3] = 1e-3
    start = search_start(g, 0)
    assert float(start[3]) == pytest.approx(1, abs=0.02)
    start[3] = 0
    assert float(start.norm()) == pytest.approx(0.1, rel=0.02)
    assert not torch.equal(search_start(g, 1), search_start(g, 0))
    assert float(search_start(torch.zeros(5), 0).norm()) == pytest.approx(1)


def test_a_matvec_of_a_real_network_is_symmetric_enough_for_lanczos():
    model, batch = network(), data()
    with Gradients.of_model(model, cross_entropy, batch) as at:
        hessian = at.hessian()
        start = torch.cat([block.reshape(-1) for block in hessian.gradient])
        found = largest_eigenvalues(hessian, start, 2, tolerance=1e-8)
        for vector, value in zip(found.vectors, found.values, strict=True):
            assert float((hessian(vector) - value * vector).norm()) <= 2e-8 * float(value)


@pytest.mark.parametrize("method", ["autograd", "finite_difference"])
@pytest.mark.parametrize("normalizer", [nn.Identity, lambda: nn.BatchNorm2d(4)], ids=["without BN", "BN evaluating"])
def test_an_independent_library_finds_the_same_spectrum(normalizer, method):
    # hessian-eigenthings knows nothing of batch statistics (with them it would move the running ones): evaluation only.
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), normalizer(), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 5)).double()
    for _ in range(3):
        model(2 + torch.randn(16, 3, 8, 8, dtype=torch.float64))  # running statistics other than 0 and 1
    model.eval()
    batch = torch.randn(16, 3, 8, 8, dtype=torch.float64), torch.randint(5, (16,))
    theirs = lanczos(HessianOperator(model, [batch], cross_entropy, method=method), k=3, max_iter=80,
                     reorthogonalize=True, which="LA", tol=1e-6, seed=1)  # fmt: skip
    with Gradients.of_model(model, cross_entropy, batch, mode="population") as at:
        hessian = at.hessian()
        start = search_start(torch.cat([block.reshape(-1) for block in hessian.gradient]), 0)
        ours = largest_eigenvalues(hessian, start, 3, tolerance=1e-6)
    assert ours.converged and bool(theirs.converged.all())
    assert ours.values.tolist() == pytest.approx(sorted(theirs.eigenvalues.tolist(), reverse=True), rel=1e-5)


@pytest.mark.parametrize(
    "spectrum",
    [
        [5.0] * 3 + [4.0] * 2 + [1.0] * 30,
        [3.0, 2.0, 2.0, 2.0, *np.linspace(-1, 1, 40).tolist()],
        [0.0] * 20 + [-1.0] * 20,
        [7.0] * 40,
    ],
)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_an_eigenvalue_is_found_as_often_as_it_is_there(spectrum, k):
    matrix, _ = planted(spectrum)
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(len(spectrum)), k, tolerance=1e-6)
    assert found.values.tolist() == pytest.approx(sorted(spectrum, reverse=True)[:k], abs=1e-6)
    vectors = found.vectors
    assert torch.allclose(vectors @ vectors.T, torch.eye(k, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(matrix @ vectors.T, vectors.T * found.values, atol=1e-5)


def test_where_products_run_out_before_that_is_sure_it_is_said():
    matrix, _ = planted([5.0, 5.0, 1.0, *np.linspace(0, 0.5, 40).tolist()])
    full = largest_eigenvalues(lambda v: matrix @ v, start_of(43), 2, tolerance=1e-6)
    assert full.converged and full.values.tolist() == pytest.approx([5, 5])
    short = largest_eigenvalues(lambda v: matrix @ v, start_of(43), 2, tolerance=1e-6, iterations=full.iterations // 2)
    assert not short.converged


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n", [3, 4, 33, 36, 60])
@pytest.mark.parametrize("k", [2, 3])
def test_indefinite_spectra_of_few_dimensions_are_found(n, k, dtype):
    for seed in range(6):
        spectrum = np.random.default_rng((seed, n)).normal(size=n).tolist()
        matrix, _ = planted(spectrum, seed, dtype)
        found = largest_eigenvalues(
            lambda v, a=matrix: a @ v, start_of(n, dtype=dtype), k, tolerance=1e-3, iterations=400
        )
        assert found.converged
        assert found.values.tolist() == pytest.approx(sorted(spectrum, reverse=True)[:k], abs=2e-3)


def test_a_rest_that_is_not_positive_is_no_reason_to_search_on():
    matrix, _ = planted([5.0, 4.0, *(-np.abs(np.random.default_rng(0).normal(size=300))).tolist()])
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(302), 2)
    assert found.converged and found.values.tolist() == pytest.approx([5, 4], rel=1e-3)
    assert found.iterations <= 60


def test_a_rest_of_one_value_is_searched_outside_what_was_found():
    matrix, _ = planted([-1.0, -2.0, *[-3.0] * 58])
    found = largest_eigenvalues(lambda v: matrix @ v, start_of(60), 2, tolerance=1e-3)
    assert found.converged and found.values.tolist() == pytest.approx([-1, -2], rel=1e-6)


@pytest.mark.parametrize("n", [6, 7, 8, 9, 12])
def test_a_rest_of_fewer_dimensions_than_the_basis_is_searched_whole(n):
    for seed in range(20):
        spectrum = (-1 - np.random.default_rng((seed, n)).random(n)).tolist()
        matrix, _ = planted(spectrum, seed)
        found = largest_eigenvalues(lambda v, a=matrix: a @ v, start_of(n), 3, tolerance=1e-7, basis=5, iterations=2000)
        # Two values that lie close may not be told apart by five vectors; then it is their residual that says so.
        assert found.converged == bool((found.residuals <= 1e-7 * found.values.abs()).all())
        assert found.values.tolist() == pytest.approx(sorted(spectrum, reverse=True)[:3], rel=1e-6)
