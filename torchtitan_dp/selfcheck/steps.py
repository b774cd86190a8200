"""Checks of a step and of its parts against the textbook or the plain loop: attention,
estimates of norms, clipped sums, noise, updates, and a checkpoint."""

import contextlib
import hashlib
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_dp.checkpoint.folder import load
from torchtitan_dp.distributed import attention as attn
from torchtitan_dp.distributed.agreement import shared_root_key
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.gradients.norms import RandomizedNorms, first_number
from torchtitan_dp.gradients.operands import Products
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.models.parallelize import build_optimizers
from torchtitan_dp.models.parameters import canonical_name, local_part
from torchtitan_dp.privacy.banded import StepNoise
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.noise import (
    add_gaussian_noise_,
    add_secure_gaussian_noise_,
    standard_normal,
)
from torchtitan_dp.selfcheck import proof
from torchtitan_dp.selfcheck.reference import Gradient, relative_error, rounding
from torchtitan_dp.selfcheck.small import Small, Terms, mesh, poisoned, whole

# `clip` aims at C (1 - 1e-5), so that rounding cannot exceed C.
_SAFETY = 1e-5

# The bound of statistics that are nearly normal, in standard deviations: 6e-7 lies beyond 5, on
# both sides. Keys are fixed and public, so that a machine that passes goes on passing.
DEVIATIONS = 5.0


Measured = dict[str, tuple[float, float]]
"""What a check measured on this rank: by name, the value and its limit."""


@dataclass(frozen=True)
class Ranks:
    """This rank's device, and the group of all that check together."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    """On gloo, for measurements alone: a check that hangs does not block it. None: the default."""

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective over the world."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def differing(self, mine: object) -> int:
        """Count the ranks that have another value than rank 0. Collective over the world."""
        found = self.gather(mine)
        return sum(one != found[0] for one in found)


def worst(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any is: Python's `max` would depend on their order."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def root_key(ranks: Ranks) -> Measured:
    """Draw and broadcast one as for a run; compare a hash of a key derived from it."""
    key = shared_root_key(ranks.device, None).stream("coin").take(1)
    return {"ranks that differ": (ranks.differing(hashlib.sha256(key).digest()), 0)}


def attention(
    ranks: Ranks, terms: Terms, balancer: str | None, rotate: str, apart: bool
) -> Measured:
    """Compare output and gradients with those of attention over the whole sequence in fp64."""
    holder = nn.ModuleList([ScaledDotProductAttentionWrapper()])
    cp_mesh = mesh(ranks.device.type, terms.degrees)[0].get_optional_mesh("cp")
    shard = Shard()
    if cp_mesh is not None:
        shard = Shard(cp_mesh.get_group(), balancer == "headtail", rotate == "allgather")
    elif apart:
        cp_mesh = attn.mesh_of_this_rank(ranks.device.type, "cp")
    if cp_mesh is not None:
        attn.configure_ring(replace(shard, heads_apart_from=1) if apart else shard)
        attn.apply_ring_attention([*holder], cp_mesh, cudnn=terms.cudnn)
    elif ranks.device.type != "cpu":  # as in training
        attn.use_efficient_attention(holder)

    def local(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(shard.of(x.to(ranks.device), dim=2) for x in tensors)

    of_each = (_attention_errors(holder[0], local, terms, length) for length in terms.lengths)
    errors = [error for errors in of_each for error in errors]
    lengths = " to ".join(map(str, dict.fromkeys((terms.lengths[0], terms.lengths[-1]))))
    # Four times a whole tensor's: it is the worst row's, and ranks' partial results are rounded.
    return {f"{lengths} tokens": (worst(errors), 4 * rounding(terms.dtype))}


def _attention_errors(
    kernel: nn.Module, local: Callable[..., tuple[Tensor, ...]], terms: Terms, length: int
) -> list[float]:
    """Return the largest error of any row of the output, and of each gradient, on this rank, as a
    share of the row's norm plus rows' mean: early rows are larger than late ones."""
    heads, kv_heads = terms.heads
    generator = torch.Generator().manual_seed(length)
    # q, k, v and the gradient of the output, rounded to the dtype before either side computes
    *inputs, g = (
        torch.randn(2, n, length, terms.args.head_dim, generator=generator).to(terms.dtype)
        for n in (heads, kv_heads, kv_heads, heads)
    )
    true = [x.double().requires_grad_() for x in inputs]
    q, k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in true)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
    true_out = F.softmax(scores, dim=-1) @ v
    true_grads = torch.autograd.grad(true_out, true, g.double())

    def heads_last(x: Tensor) -> Tensor:  # in memory, as the layers around have them
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)

    mine = [heads_last(x).requires_grad_() for x in local(*inputs)]
    out = kernel(*mine, enable_gqa=kv_heads < heads)
    actual = out.detach(), *torch.autograd.grad(out, mine, heads_last(local(g)[0]))
    errors = []
    for a, e in zip(actual, local(true_out.detach(), *true_grads), strict=True):
        off, size = (a.double() - e).norm(dim=-1), e.norm(dim=-1)
        errors.append((off / (size + size.mean())).max().item())
    return errors


def norm_estimates(ranks: Ranks, terms: Terms) -> Measured:
    """Compare Hutchinson's estimates with the norms of whole gradients times the same random
    matrices, and with the true norms on average. Collective over the world."""
    samples, apart = 64, 1_000_003  # the distance of two units' positions in a large data set
    key, generator = bytes(range(32)), torch.Generator().manual_seed(0)
    small = Small(terms.but(norm_estimator="hutchinson"), ranks.device, max_grad_norm=1.0)
    groups, norms = small.groups, small.gradients.norms  # type: ignore[attr-defined]
    assert isinstance(norms, RandomizedNorms)
    k, rank = norms.k, dist.get_rank(groups.cp) if groups.cp else 0
    size = 4 * k
    T, shape = -(-size // groups.cp_size) * groups.cp_size, torch.Size((size, size))
    left_BTP, right_BTD = sides = [
        torch.randn(samples, T, size, generator=generator).to(ranks.device) for _ in range(2)
    ]
    positions = range(0, samples * apart, apart)
    norms.start_step(key)
    norms.start_microbatch(positions)
    assert norms.estimates(T, shape)
    mine = (side.chunk(groups.cp_size, dim=1)[rank].contiguous() for side in sides)
    found_B = norms.squared_norms("selfcheck", shape, [Products(*mine)])
    if groups.cp is not None:
        dist.all_reduce(found_B, group=groups.cp)
    starts = (first_number(position, size * k) for position in positions)
    drawn = (standard_normal(key, "selfcheck/tail", at, size * k, ranks.device) for at in starts)
    drawn_BPK = torch.stack([*drawn]).view(samples, size, k).double() / math.sqrt(k)
    gradient_BPD = left_BTP.double().mT @ right_BTD.double()
    expected_B = (gradient_BPD.mT @ drawn_BPK).flatten(1).square().sum(1)
    true_B = gradient_BPD.flatten(1).square().sum(1)
    # The variance of each is 2 |G^T G|^2 / (k |G|^4).
    spread_B = (gradient_BPD.mT @ gradient_BPD).flatten(1).norm(dim=1) / true_B * (2 / k) ** 0.5
    off = (found_B / true_B - 1).sum() / spread_B.square().sum().sqrt()
    return {
        "the estimates": (worst((found_B / expected_B - 1).abs().tolist()), 1e-5),
        "their mean, in standard errors": (abs(off.item()), DEVIATIONS),
    }


def model_proof(ranks: Ranks, terms: Terms) -> Measured:
    """Compare gradients as each start does, of samples of more lengths."""
    with proof.undisturbed(ranks.device):
        error = proof.worst_error(terms, ranks.device, eighths=(8, 7, 5, 3, 2, 1, 0))
    return {"per-sample gradients, and transformers' own": (error, proof.BOUND)}


def clipped_sum(ranks: Ranks, terms: Terms) -> Measured:
    """Compare the sum of clipped gradients, and their norms, with the loop's; twice, the second
    time in memory that is NaN until it is written."""
    reference = terms.reference()
    small = Small(terms, ranks.device, max_grad_norm=reference.max_grad_norm)
    sums, norms, bound = [], [], rounding(terms.dtype)
    for memory in (contextlib.nullcontext(), poisoned()):
        with memory:
            found_norms, total = small.accumulate(*reference.samples), small.total()
        sums.append(relative_error(total, reference.total))
        for sample, found in found_norms.items():
            true = reference.norms[sample]
            error = abs(found - true) / (true or 1.0)
            # Where the loss is NaN, the norm must be, too.
            norms.append(float(math.isfinite(found)) if math.isnan(true) else error)
    return {"the sum": (worst(sums), bound + _SAFETY), "the norms": (worst(norms), bound)}


class Trained(Small):
    """A small model that the run's optimizer updates, with noise of sigma C over `batch`."""

    def __init__(self, terms: Terms, ranks: Ranks, C: float, sigma: float, batch: float) -> None:
        super().__init__(terms, ranks.device, max_grad_norm=C)
        self.sum_std, self.batch = sigma * C, batch
        self.optimizers = build_optimizers([self.model], terms.config.optimizer, self.dims)
        self._dp_optimizer = self.step.optimizer(
            self.optimizers, noise_multiplier=sigma, expected_batch_size=batch
        )

    def update(self, key: bytes) -> Gradient:
        """Take a step on the sum; return the whole gradient that the optimizer got, on the CPU."""
        taken = self.step.clipped_sum.take()
        self._dp_optimizer.step(taken, StepNoise(key))  # overwrites `taken`
        return self.total(taken)

    def noise(self, name: str, key: bytes) -> Tensor:
        """Draw one parameter's noise as a single rank with all of it would; to the CPU."""
        shape = self.parameters[name].shape
        noise = torch.zeros(shape.numel(), device=self.device)
        add = add_secure_gaussian_noise_ if self.step.secure_noise else add_gaussian_noise_
        add(noise, std=self.sum_std, key=key, name=name, start=0)
        return noise.div_(self.batch).view(shape).cpu()

    def weights(self) -> Gradient:
        """Copy all whole weights to the CPU. Collective: an all-gather over dp_shard x cp."""
        return {canonical_name(n): whole(p) for n, p in self.model.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's shards of the weights and of the optimizer's state, by name."""
        (inner,) = self.optimizers
        return {
            f"{name}/{key}": local_part(value.detach())
            for name, parameter in self.parameters.items()
            for key, value in {"weight": parameter, **inner.state[parameter]}.items()
        }


def noise(ranks: Ranks, terms: Terms) -> Measured:
    """Measure two steps of noise alone: moments, tails, repeats, and its values on other meshes."""
    trained = Trained(terms, ranks, C=0.5, sigma=1.5, batch=4.0)
    differ, values = 0, []
    for key in map(RootKey.from_debug_seed(2).stream("noise").take, range(2)):
        for name, drawn in trained.update(key).items():
            differ += int((drawn != trained.noise(name, key)).sum())
            values.append(drawn.flatten())
    z = torch.cat(values).double() / (trained.sum_std / trained.batch)
    powers = ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0))  # k; of z^k, of N(0, 1)
    moments = [_off(z**k, mean, variance) for k, mean, variance in powers]
    beyond = {edge: math.erfc(edge / 2**0.5) for edge in (1.0, 2.0, 3.0, 4.0)}
    tails = [_off((z.abs() > edge).double(), p, p * (1 - p)) for edge, p in beyond.items()]
    return {
        "moments": (worst(moments), DEVIATIONS),
        "tails": (worst(tails), DEVIATIONS),
        "repeated stretches": (_repeats(torch.cat(values)), 0),
        "values that differ from another mesh": (differ, 0),
    }


def _off(values: Tensor, mean: float, variance: float) -> float:
    """Return how far the mean of independent values is from `mean`, in its standard deviations."""
    return abs(values.mean().item() - mean) / (variance / values.numel()) ** 0.5


def _repeats(values: Tensor) -> int:
    """Count the runs of 4 consecutive fp32 values that occur elsewhere too."""
    runs = values.view(torch.int32).unfold(0, 4, 1)
    return len(runs) - len(torch.unique(runs, dim=0))


def updates(ranks: Ranks, terms: Terms) -> Measured:
    """Compare noisy steps with the loop's, with noise as large as the sum: either's fault shows."""
    reference, batch = terms.reference(), 5  # the divisor is no number of samples here
    sigma = sum(g.numel() for g in reference.total.values()) ** -0.5
    trained = Trained(terms, ranks, reference.max_grad_norm, sigma, batch)
    keys = [*map(RootKey.from_debug_seed(1).stream("noise").take, range(3))]
    before, handed = trained.weights(), []
    for key in keys:
        trained.accumulate(*reference.samples)
        handed.append(trained.update(key))
    # Of the first step: later ones begin with other weights.
    expected = {n: g / batch + trained.noise(n, keys[0]) for n, g in reference.total.items()}
    weights, by_hand = trained.weights(), _stepped(before, handed, trained)
    moved = {name: weights[name].double() - before[name].double() for name in expected}
    should = {name: by_hand[name] - before[name].double() for name in expected}
    content = b"".join(weights[name].contiguous().numpy().tobytes() for name in sorted(weights))
    changed = sum(not torch.equal(weights[n], before[n]) for n in weights.keys() - expected.keys())
    return {
        "sum + noise": (relative_error(handed[0], expected), 1e-5 + _SAFETY),
        # The weights are rounded to fp32: 6e-8 of 1, over a change of 1e-2.
        "updated weights": (relative_error(moved, should), 1e-4),
        "ranks whose weights differ": (ranks.differing(hashlib.sha256(content).digest()), 0),
        "frozen weights that changed": (changed, 0),
    }


def _stepped(weights: Gradient, gradients: list[Gradient], trained: Trained) -> Gradient:
    by_hand = {name: weights[name].double().requires_grad_() for name in gradients[0]}
    config = trained.terms.config.optimizer
    make, own = getattr(torch.optim, config.name, MomentumSGD), {"eps": config.eps}
    if make is MomentumSGD:
        own = {"noise_std": trained.sum_std / trained.batch}
    betas, decay = (config.beta1, config.beta2), config.weight_decay
    inner = make(by_hand.values(), lr=config.lr, betas=betas, weight_decay=decay, **own)
    for gradient in gradients:
        for name, weight in by_hand.items():
            weight.grad = gradient[name].double()
        inner.step()
    return {name: weight.detach() for name, weight in by_hand.items()}


def checkpoint(ranks: Ranks, terms: Terms, parent: str) -> Measured:
    """Save weights and optimizer state in `parent`, overwrite and load them; count what differs."""
    trained = Trained(terms, ranks, C=1.0, sigma=1.0, batch=1.0)
    trained.accumulate(*terms.reference().samples)
    trained.update(RootKey.from_debug_seed(3).stream("noise").take(1))
    kept = {name: tensor.clone() for name, tensor in trained.state().items()}
    states = {**trained.model.state_dict(), "optimizer": trained.optimizers}
    made = tempfile.mkdtemp(prefix="selfcheck-", dir=parent) if dist.get_rank() == 0 else ""
    folder = ranks.gather(made)[0]
    try:
        dcp.save(states, checkpoint_id=folder)
        for tensor in trained.state().values():
            tensor.fill_(-1)
        load(states, folder)
        ranks.gather(None)  # all have read it
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    loaded = trained.state()
    lost = sum(not torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    return {"tensors that changed": (lost, 0)}
