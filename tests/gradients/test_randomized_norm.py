"""Estimated norms (rows 1, 11, 28, 59): a reference with the same projections, their mean, and
whose they are. At 32 tokens and 8 projections WIDE has estimates of most of its matrices."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.gradients.ghost import GhostGradients
from torchtitan_dp.gradients.norms import RandomizedNorms, first_number, project
from torchtitan_dp.gradients.operands import Products, Rows
from torchtitan_dp.privacy.losses import largest_ratio
from torchtitan_dp.privacy.noise import standard_normal

METHOD = "--privacy.gradient_method=randomized"
ACCOUNTED = "--privacy.underestimates=accounted"
CAPPED = "--privacy.underestimates=capped"
WIDE = {"hidden_size": 128, "vocab_size": 131, "max_position_embeddings": 64}
TIED = {"tie_word_embeddings": True}
K = 8


def randomized(samples=2, passes="one", estimator="hutchinson", k=K, errors=ACCOUNTED):
    return [
        *(METHOD, errors, f"--privacy.projections={k}", f"--privacy.norm_estimator={estimator}"),
        *(f"--privacy.ghost_passes={passes}", f"--training.local_batch_size={samples}"),
        "--training.seq_len=64",
    ]


def built_for(degrees, method, changes=(), C=1.0):
    """The step, and as many samples of 64 tokens as asked for."""
    return build.build(degrees, *method, args=build.llama(**WIDE, **dict(changes)), max_grad_norm=C)


def reference_squares(norms, gradient, layers, tokens, position, key):
    """One sample's estimate, by whole matrices in fp64: the total, and of each matrix that was
    estimated its estimate over the true square."""
    k, total, estimated = norms.k, 0.0, {}
    for name, g_PD in gradient.items():
        exact = g_PD.double().square().sum().item()
        if g_PD.dim() == 1 or not norms.estimates(tokens * layers[name], g_PD.shape):
            total += exact
            continue
        rows = g_PD.shape[0]

        def drawn(purpose, rows=rows, name=name):
            start = first_number(position, rows * k)
            flat = standard_normal(key, f"{name}/{purpose}", start, rows * k)
            return flat.view(rows, k).double() / math.sqrt(k)

        y_DK = g_PD.double().T @ drawn("tail")
        square = y_DK.square().sum().item()
        if norms.estimator == "hutch++":
            basis_DK, _ = torch.linalg.qr(g_PD.double().T @ drawn("sketch"))
            rest_DK = y_DK - basis_DK @ (basis_DK.T @ y_DK)
            head_PK = g_PD.double() @ basis_DK
            square = head_PK.square().sum().item() + rest_DK.square().sum().item()
        total += square
        estimated[name] = square / exact if exact else 1.0
    return total, estimated


def errors(degrees, method, changes, C=1.0):
    """(error of the sum, error of the norms, matrices estimated) against the loop."""
    built, key = built_for(degrees, method, changes, C), bytes(range(32))
    tokens_NT, labels_NT = build.data(5, args=built.terms.args)  # the last microbatches are padded
    actual, found = build.clipped_sum(built, tokens_NT, labels_NT, key=key)
    model = build.reference_model(built.terms.args)
    expected, off, seen = {}, 0.0, {}
    for sample, gradient in enumerate(build.reference_gradients(model, tokens_NT, labels_NT)):
        square, seen = reference_squares(
            built.gradients.norms, gradient, built.gradients._layers, 64, sample, key
        )
        norm = math.sqrt(square)
        off = max(off, abs(found.get(sample, norm) - norm) / max(norm, 1e-9))
        factor = C / max(norm, C)
        for name, g in gradient.items():
            cap = math.sqrt(min(seen.get(name, 1.0), 1.0)) if CAPPED in method else 1.0
            expected[name] = expected.get(name, 0.0) + cap * factor * g.double()
    return build.relative_error(actual, expected), off, len(seen)


CASES = [
    ((1, 1, 1), 4, TIED),
    ((1, 2, 1), 2, TIED),
    ((1, 1, 2), 2, {}),
    ((2, 1, 1), 2, {}),
    ((1, 2, 2), 2, TIED),
    ((2, 1, 2), 2, TIED),
    ((1, 1, 4), 3, {}),
]


@pytest.mark.thorough_cases(
    "*-hutch++-one-accounted", "*-hutch++-two-capped", "*-hutchinson-two-*", "(2, 1, *"
)
@pytest.mark.parametrize("cap", [ACCOUNTED, CAPPED], ids=["accounted", "capped"])
@pytest.mark.parametrize("passes", ["one", "two"])
@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("degrees, samples, changes", CASES, ids=[str(case[0]) for case in CASES])
def test_every_mesh(degrees, samples, changes, estimator, passes, cap):
    """What is longer than its estimate is scaled down to it if capped, and nothing else is."""
    method = randomized(samples, passes, estimator, errors=cap)
    for error, off, estimated in on_ranks(math.prod(degrees), errors, degrees, method, changes):
        assert estimated >= 6
        assert off < 1e-5
        assert error < 2e-5  # clip() aims at C (1 - 1e-5)


def of_draws(degrees, batch_size, draws, estimator, empty=()):
    """For each draw from the same data set, the sum, and the norms of this rank's samples."""
    built = built_for(degrees, randomized(batch_size, "one", estimator, errors=CAPPED), C=0.5)
    tokens_NT, labels_NT = build.data(4, args=built.terms.args)
    labels_NT[list(empty)] = -100
    found = [build.clipped_sum(built, tokens_NT, labels_NT, drawn=np.array(draw)) for draw in draws]
    assert len(built.gradients.norms._estimated) >= 6
    return found


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
def test_row49_and_67_an_empty_record_in_front_changes_no_bit(estimator):
    """Nor does one that is not empty change the others' norms."""
    draws = [[2, 3], [0, 2, 3], [1, 2, 3], [1], np.empty(0, dtype=np.int64)]
    ((without, empty, full, alone, none),) = on_ranks(
        1, of_draws, (1, 1, 1), 4, draws, estimator, (0,)
    )
    assert empty[1] == {0: 0.0, **without[1]}
    assert full[1] == alone[1] | without[1]
    assert min(without[1].values()) > 0.5  # all are clipped
    assert none[1] == {}
    for name, value in without[0].items():
        assert torch.equal(empty[0][name], value), name
        torch.testing.assert_close(full[0][name], value + alone[0][name], rtol=1e-4, atol=1e-6)
        assert not none[0][name].any()


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
def test_row12_and_67_estimates_are_the_same_on_every_mesh_and_in_every_microbatch(estimator):
    draws = [[0, 1, 3]]
    (((_, alone),),) = on_ranks(1, of_draws, (1, 1, 1), 4, draws, estimator)
    for degrees, batch_size in [((1, 1, 1), 2), ((1, 2, 1), 4), ((1, 1, 2), 2)]:
        norms = {}
        for ((_, found),) in on_ranks(
            math.prod(degrees), of_draws, degrees, batch_size, draws, estimator
        ):
            norms |= found
        assert norms == pytest.approx(alone, rel=1e-6), degrees


# The estimator alone.


def factors_of(samples):
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(1, 48, n, generator=generator) for n in (40, 56))
    return Products(left.expand(samples, -1, -1), right.expand(samples, -1, -1))


def always(estimator):
    class Always(RandomizedNorms):
        def estimates(self, tokens, shape):
            return True

    norms = Always(K, estimator, None, capped=True)
    norms.start_step(bytes(32))
    return norms


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
def test_row75_estimates_are_unbiased(estimator):
    """And spread as they should: 2 |G^T G|^2 / k, which Hutch++ is below."""
    samples = 3_000
    factors, norms = factors_of(samples), always(estimator)
    norms.start_microbatch(range(samples))
    found = norms.squared_norms("w", torch.Size((40, 56)), [factors])
    gradient = factors.left[0].double().T @ factors.right[0].double()
    assert (found.mean() - gradient.square().sum()).abs() < 3 * found.std() / math.sqrt(samples)
    variance = 2 * (gradient @ gradient.T).square().sum() / K
    if estimator == "hutchinson":
        assert found.var().item() == pytest.approx(variance.item(), rel=0.1)
    else:
        assert found.var().item() < 0.9 * variance.item()


def test_a_rank_one_gradients_estimate_is_chi_squared():
    """The worst of the envelope is attained: by the Kolmogorov-Smirnov statistic."""
    samples, norms = 4_000, always("hutchinson")
    left = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(1))
    factors = Products(left.expand(samples, -1, -1), torch.ones(samples, 1, 3))
    norms.start_microbatch(range(samples))
    found = norms.squared_norms("w", torch.Size((24, 3)), [factors])
    true = left.double().square().sum() * 3
    assert stats.kstest((K * found / true).numpy(), stats.chi2(K).cdf).pvalue > 1e-3


def draw(norms, positions, name="a", purpose="tail", rows=40):
    norms.start_microbatch(positions)
    return norms._draw(name, purpose, [factors_of(len(positions))], rows).flatten(1)


@pytest.mark.parametrize("rows", [40, 5_000])  # less than a block of the generator, and more
def test_row11_and_40_no_two_units_parameters_or_steps_share_projections(rows):
    norms, drawn = always("hutch++"), []
    for key in (bytes(32), bytes([1] * 32)):
        for name in ("a", "b"):
            for purpose in ("tail", "sketch"):
                norms.start_step(key)
                for positions in ((-1, 0, 1), (7, 2, 10**8)):
                    drawn += list(draw(norms, positions, name, purpose, rows))
    whole = torch.stack(drawn)
    assert len(torch.unique(whole[:, :4], dim=0)) == len(whole) == 2 * 2 * 2 * 6
    assert torch.corrcoef(whole).fill_diagonal_(0).abs().max() < 6 / math.sqrt(rows * K)
    assert whole.var().item() == pytest.approx(1 / K, rel=0.02)


def test_row75_a_units_projections_do_not_depend_on_who_else_is_drawn():
    """Nor on the microbatch, or the place in it, that it is dealt to."""
    found = []
    for microbatches in ([(3, 5)], [(5, -1)], [(1, 2), (4, 5)]):
        norms = always("hutchinson")
        for positions in microbatches:
            drawn = dict(zip(positions, draw(norms, positions), strict=True))
        found.append(drawn[5])
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_row75_no_unit_comes_twice_in_a_step_and_none_without_its_position():
    norms = always("hutchinson")
    norms.start_microbatch((3, -1, -1))
    norms.start_microbatch((4, -1))
    for positions in ((5, 3), (6, 6)):
        with pytest.raises(AssertionError, match="twice"):
            norms.start_microbatch(positions)
    norms.start_step(bytes([1] * 32))
    norms.start_microbatch((3, 6))
    norms.start_microbatch(None)
    with pytest.raises(AssertionError, match="whose samples"):
        norms._draw("a", "tail", [factors_of(2)], 40)


@pytest.mark.parametrize("k", [8, 4096])
def test_row75_units_places_are_apart_and_within_what_generators_count_to(k):
    for rows in (1, 131, 128_256):
        starts = [first_number(position, rows * k) for position in (-1, 0, 1, 10**8, 2**32 - 2)]
        assert starts[0] == 0
        assert starts[2] - starts[1] == starts[1] >= rows * k
        assert all(start % starts[1] == 0 for start in starts)
        assert starts[-1] + rows * k < 2**63


@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_row22_a_bad_sample_is_seen_and_its_neighbour_is_not_touched(bad, estimator):
    found = []
    for value in (0.5, bad):
        factors, norms = factors_of(2), always(estimator)
        left = factors.left.clone()
        left[1, 3, 2] = value
        norms.start_microbatch(range(2))
        one = dataclasses.replace(factors, left=left, right=factors.right.contiguous())
        found.append(norms.squared_norms("w", torch.Size((40, 56)), [one]))
    assert found[0][0] == found[1][0]
    assert not torch.isfinite(found[1][1])


def test_tied_layers_blocks_and_factors(monkeypatch):
    """Tokens of an embedding and of a product, in blocks, equal whole matrices."""
    generator = torch.Generator().manual_seed(0)
    products = factors_of(2)
    scaled = Products(products.left, products.right, torch.tensor([0.5, 2.0]))
    tokens = torch.randint(0, 40, (2, 9), generator=generator)
    rows = Rows(tokens, torch.randn(2, 9, 56, generator=generator))
    whole = products.left.mT @ products.right * torch.tensor([0.5, 2.0])[:, None, None]
    for sample in range(2):
        whole[sample].index_add_(0, tokens[sample], rows.right[sample])
    by = torch.randn(2, 40, K, generator=generator)
    back = torch.randn(2, 56, K, generator=generator)
    for block in (1, 1_000, 2**24):
        monkeypatch.setattr("torchtitan_dp.gradients.norms.BLOCK_ELEMENTS", block)
        found = project([scaled, rows], by, 56)
        torch.testing.assert_close(found, whole.mT @ by, rtol=1e-4, atol=1e-3)
        found = project([scaled, rows], back, 40, back=True)
        torch.testing.assert_close(found, whole @ back, rtol=1e-4, atol=1e-3)


def with_wrong_norms(scale, underestimates):
    """One sample's part of the sum, over C, where the estimates are wrong by a factor."""
    built = built_for((1, 1, 1), randomized(errors=underestimates), C=0.1)
    norms = built.gradients.norms
    exact = norms.squared_norms
    norms.squared_norms = lambda *a: exact(*a) * scale
    tokens_NT, labels_NT = build.data(2, args=built.terms.args)
    return build.norm(build.clipped_sum(built, tokens_NT[1:], labels_NT[1:])[0]) / 0.1


@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0])
@pytest.mark.parametrize("underestimates, k", [(CAPPED, 0), (ACCOUNTED, K)])
def test_row13_no_error_of_an_estimate_moves_the_sum_by_more_than_is_accounted_for(
    underestimates, k, scale
):
    (share,) = on_ranks(1, with_wrong_norms, scale, underestimates)
    assert share <= (largest_ratio(k) if k else 1.0)
    if scale == 1.0:
        assert share > 0.5


def test_row13_a_part_whose_capped_factor_is_no_normal_number_is_left_out():
    """Rounding it would take more than the room that `clip` leaves."""
    added = []
    squares_B = torch.tensor([3.6e29, 3.6e29], dtype=torch.float64)
    ghost = SimpleNamespace(
        norms=SimpleNamespace(cap=lambda name: 1.0),
        clipped_sum=SimpleNamespace(add_part=lambda *terms: added.append(terms)),
        _cp=None,
        _slices_of=lambda name, samples: [slice(0, samples)],
        _form_some=lambda *_: torch.full((2, 1, 4), 1e18),
        _of_group=lambda *_: (torch.tensor([3e-38, 1.0]), torch.tensor([False, False])),
    )
    to = SimpleNamespace(samples=2, squares={"w": squares_B}, clip=None, left={"w"})
    GhostGradients._add_capped(ghost, to, "w", [])
    ((_, _, factor_B, rejected_B),) = added
    assert rejected_B.tolist() == [True, False]
    assert factor_B[1] == pytest.approx(3e-4)


def shrunk(k, estimator):
    """Of eight samples: the length of what is added over C, and its cosine with the gradient."""
    args = build.llama(256, vocab_size=512, max_position_embeddings=256)
    tokens_NT = torch.randint(0, 512, (8, 256), generator=torch.Generator().manual_seed(0))
    ghost = ["--privacy.gradient_method=ghost", "--training.local_batch_size=1"]
    capped = randomized(1, "one", estimator, k, CAPPED)
    added, true = [], []
    for found, options in ((added, capped), (true, ghost)):
        options = [*options, "--training.seq_len=256"]
        built = build.build((1, 1, 1), *options, args=args, max_grad_norm=1e-3)
        for sample in range(8):
            one = tokens_NT[sample : sample + 1]
            total, _ = build.clipped_sum(built, one, one.roll(-1, 1), key=bytes([sample]) * 32)
            found.append(torch.cat([g.flatten().double() for g in total.values()]))
    lengths = [one.norm().item() / 1e-3 for one in added]
    cosines = [
        torch.nn.functional.cosine_similarity(*pair, dim=0).item()
        for pair in zip(added, true, strict=True)
    ]
    return lengths, cosines


@pytest.mark.thorough
@pytest.mark.parametrize("k, least, hutch", [(8, 0.96, 0.84), (32, 0.99, 0.94)])
@pytest.mark.parametrize("estimator", ["hutchinson", "hutch++"])
def test_a_cap_takes_next_to_nothing(k, least, hutch, estimator):
    """`docs/methods.md` has the figures that this prints."""
    ((lengths, cosines),) = on_ranks(1, shrunk, k, estimator)
    mean = sum(lengths) / len(lengths)
    print(f"{estimator}, k = {k}: {min(lengths):.4f}, mean {mean:.4f}; cosine {min(cosines):.5f}")
    is_default = estimator == "hutch++"
    assert (least if is_default else hutch) < min(lengths) <= max(lengths) <= 1
    assert min(cosines) > (0.999 if is_default else 0.993)
