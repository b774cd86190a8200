"""Windows, sinks and soft caps equal explicit attention in fp64, on any number of ranks, and what
windows send and compute does not grow with the sequence."""

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.processes.ranks import on_ranks
from torchtitan_dp.distributed import windows
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.distributed.windows import attend, check_softcap
from torchtitan_dp.plan.fake_step import fake_world

SCALE = 0.3
CASES = {  # options of attention
    "window 1": {"window": 1},
    "window": {"window": 5},
    "a window longer than a shard": {"window": 13},
    "a window of all": {"window": 24, "sinks": True},
    "a longer window": {"window": 99, "softcap": 2.0},
    "sinks in a window": {"window": 5, "sinks": True},
    "sinks": {"sinks": True},
    "a soft cap": {"softcap": 2.0},
    "a soft cap in a window": {"window": 7, "softcap": 2.0},
    "both": {"window": 7, "softcap": 2.0, "sinks": True},
}
TOKENS, TILE = 24, (4, 8)


def explicit(q, k, v, sinks=None, *, window=None, softcap=None):
    """Attention over the whole sequence, score by score."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * SCALE
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    unseen = (distance < 0) | (distance >= (window or q.shape[2]))
    scores = scores.masked_fill(unseen, -torch.inf)
    if sinks is not None:
        sink = sinks[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    return scores.softmax(-1)[..., : q.shape[2]] @ v


def problem(tokens, heads=(4, 2), batch=2, size=8, dtype=torch.float32, sinks=False):
    """Queries, keys, values, and sinks if asked for; and the output's gradient."""
    torch.manual_seed(0)
    of_tensors = [heads[0], heads[1], heads[1], heads[0]]
    *whole, gradient = (torch.randn(batch, n, tokens, size).to(dtype) for n in of_tensors)
    return [*whole, *([torch.randn(heads[0]).to(dtype)] if sinks else [])], gradient


def own(x, balanced):
    """This rank's part of a tensor, by the definition."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = x.chunk(size * (1 + balanced), dim=2)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=2) if balanced else chunks[rank]


def whole(parts, balanced):
    """The tensor of all ranks' parts."""
    if not balanced:
        return torch.cat(parts, dim=2)
    heads, tails = zip(*(part.chunk(2, dim=2) for part in parts), strict=True)
    return torch.cat([*heads, *reversed(tails)], dim=2)


def attended(inputs, gradient, shard, **options):
    """Output and gradients, as from a model: heads lie within tokens."""
    mine = [x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x for x in inputs]
    mine = [x.detach().requires_grad_() for x in mine]
    sinks = mine[3] if len(mine) > 3 else None
    out = attend(*mine[:3], shard=shard, scale=SCALE, sinks_H=sinks, **options)
    out.backward(gradient)
    return [out.detach(), *(x.grad for x in mine)]


def on_shard(balanced, tokens, terms, options):
    """Output and gradients on this rank."""
    inputs, gradient = problem(tokens, **terms)
    mine = [own(x, balanced) if x.dim() == 4 else x for x in inputs]
    shard = Shard(dist.group.WORLD, balanced)
    with mock.patch.object(windows, "_TILE", TILE):
        return attended(mine, own(gradient, balanced), shard, **options)


def errors(ranks, balanced, tokens, options, *, device="cpu", **terms):
    """The largest differences of output and gradients from fp64, over the largest value or 1."""
    options = dict(options)
    terms["sinks"] = options.pop("sinks", False)
    inputs, gradient = problem(tokens, **terms)
    if ranks is None:
        there = [x.to(device) for x in (*inputs, gradient)]
        with mock.patch.object(windows, "_TILE", TILE):
            found = attended(there[:-1], there[-1], Shard(None, balanced), **options)
        found = [x.cpu() for x in found]
    else:
        by_rank = on_ranks(ranks, on_shard, balanced, tokens, terms, options)
        found = [
            whole(parts, balanced) if parts[0].dim() == 4 else sum(parts)
            for parts in zip(*by_rank, strict=True)
        ]
    exact = [x.double().requires_grad_() for x in inputs]
    out = explicit(*exact, **options)
    out.backward(gradient.double())
    expected = [out.detach(), *(x.grad for x in exact)]
    assert [x.dtype for x in found] == [inputs[0].dtype] * len(found)
    return [
        ((a - e).abs().max() / e.abs().max().clamp(min=1)).item()
        for a, e in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("ranks", [None, 1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_exact(case, ranks, balanced):
    assert max(errors(ranks, balanced, TOKENS, CASES[case])) < 2e-6


@pytest.mark.parametrize("bound, dtype", [(1e-4, torch.float32), (0.02, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("case", CASES)
def test_on_a_device(case, device, bound, dtype):
    """Lengths that no kernel's alignment divides, and 200 tokens in tiles."""
    for tokens in (TOKENS, 200):
        assert max(errors(None, True, tokens, CASES[case], device=device, dtype=dtype)) < bound


@pytest.mark.parametrize("case", CASES)
def test_16_bits_round_no_sum(case):
    """Key gradients are rounded once, whichever tiles and ranks they come from."""
    alone = errors(None, False, 64, CASES[case], dtype=torch.bfloat16)
    shared = errors(4, True, 64, CASES[case], dtype=torch.bfloat16)
    assert max(alone) < 0.02
    # Each rank's part of a sink's gradient is rounded, to be reduced in fp32.
    for one, of_ranks in zip(alone[:4], shared[:4], strict=True):
        assert of_ranks < 1.5 * one + 1e-3


class Calls(TorchDispatchMode):
    """Counts the products of a kernel's calls: queries times keys."""

    def __init__(self):
        super().__init__()
        self.scores, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.name():
            names = [one.name for one in func._schema.arguments]
            named = dict(zip(names, args, strict=False)) | (kwargs or {})
            scores = named["query"].shape[2] * named["key"].shape[2]
            self.scores += scores
            self.largest = max(self.largest, scores)
        return func(*args, **(kwargs or {}))


def work(balanced, tokens, window):
    """What this rank sends to others, in bytes, and the scores that it computes for a query."""
    sent = []

    def looked_at(buffer, to_each, from_each, group):
        others = sum(to_each) - to_each[dist.get_rank()]
        sent.append(others * buffer.element_size())
        return exchange(buffer, to_each, from_each, group)

    exchange = windows.exchange
    calls = Calls()
    with mock.patch.object(windows, "exchange", looked_at), calls:
        on_shard(balanced, tokens, {"batch": 1}, {"window": window})
    assert len(sent) == 2
    return sum(sent), calls.scores / (tokens // dist.get_world_size()), calls.largest


@pytest.mark.parametrize("balanced", [True, False])
def test_neither_bytes_nor_work_for_a_query_grow(balanced):
    window, ranks = 8, 4
    (short, middle, long) = (
        on_ranks(ranks, work, balanced, n * window, window) for n in (8, 16, 32)
    )
    for first, *others in zip(short, middle, long, strict=True):
        for sent, scores, largest in others:
            assert sent <= first[0]
            assert largest == first[2] == window * (2 * window - 1)
            # Forward and backward, (2 window - 1) keys for each query, but for the first.
            assert scores <= 2 * (2 * window - 1)
    rows = (1 + balanced) * (window - 1)
    assert long[1][0] == rows * 2 * 2 * 8 * (4 + 4)  # of keys and values; there and back


def test_soft_caps_are_refused_above_a_length():
    longest = windows.CAPPED_KEYS
    check_softcap(longest, None)
    check_softcap(4 * longest, 4096)
    with pytest.raises(ValueError, match=r"at most 32,768 keys, not 32,769"):
        check_softcap(longest + 1, None)
    with pytest.raises(ValueError, match=r"not 32,769"):
        check_softcap(4 * longest, longest + 1)
    q = torch.zeros(1, 1, longest + 1, 1)
    with pytest.raises(ValueError, match="soft cap"):
        attend(q, q, q, shard=Shard(None, False), scale=1.0, softcap=1.0)


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_runs_it_without_values_or_ranks(case, balanced):
    options = dict(CASES[case])
    sinks = options.pop("sinks", False)
    with fake_world(4), mock.patch.object(windows, "_TILE", (2, 2)):
        inputs, gradient = problem(TOKENS, sinks=sinks)
        found = attended(inputs, gradient, Shard(dist.group.WORLD, balanced), **options)
    assert [x.shape for x in found] == [x.shape for x in (inputs[0], *inputs)]


# What CUDA's kernel is given. It does not run on a CPU.


def imitate_efficient_kernels():
    """Offer CUDA's memory-efficient kernels on CPU, with their demands; hold the result."""
    forward_op, backward_op = windows._cpu_op, windows._cpu_backward_op

    def check(query, key, value, bias):
        assert key.shape[1] == value.shape[1] == query.shape[1], "no grouped queries"
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        if bias is not None:
            assert bias.shape == (*query.shape[:3], key.shape[2])
            assert bias.dtype == query.dtype
            assert bias.stride(-1) == 1
            assert all(stride % 16 == 0 for stride in bias.stride()[:-1])
            assert bias.storage_offset() == 0

    def forward(q, k, v, bias, needs_logsumexp, dropout=0.0, causal=False, *, scale=None):
        check(q, k, v, bias)
        assert needs_logsumexp
        out, logsumexp = forward_op(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
        rows = -logsumexp.shape[2] % 32
        padded = torch.nn.functional.pad(logsumexp, (0, rows), value=torch.inf)
        return out, padded, torch.tensor(1), torch.tensor(2)

    def backward(grad, q, k, v, bias, out, logsumexp, *rest, scale=None):
        seed, offset, dropout, mask, causal = (*rest, False)[:5]
        check(q, k, v, bias)
        assert (seed, offset, list(mask)) == (1, 2, [True, True, True, False])
        assert logsumexp.shape[2] % 32 == 0
        assert logsumexp.is_contiguous()
        logsumexp = logsumexp[..., : q.shape[2]].contiguous()
        terms = {"attn_mask": bias, "scale": scale}
        grads = backward_op(grad, q, k, v, out, logsumexp, dropout, causal, **terms)
        return *grads, q.new_empty(0)

    library = torch.library.Library("aten", "IMPL", "CPU")
    library.impl("_scaled_dot_product_efficient_attention", forward)
    library.impl("_scaled_dot_product_efficient_attention_backward", backward)
    return library


def imitated(balanced, options, terms):
    library = imitate_efficient_kernels()
    try:
        with mock.patch.object(windows, "_CPU", windows._CUDA):
            return on_shard(balanced, TOKENS, terms, options)
    finally:
        library._destroy()


@pytest.mark.parametrize("case", ["window", "sinks in a window", "sinks"])
def test_cudas_kernel_is_called_as_it_demands(case):
    options = dict(CASES[case])
    terms = {"sinks": options.pop("sinks", False)}
    here = on_ranks(2, on_shard, True, TOKENS, terms, options)
    there = on_ranks(2, imitated, True, options, terms)
    for of_cpu, of_cuda in itertools.chain(*map(zip, here, there)):
        torch.testing.assert_close(of_cpu, of_cuda, atol=2e-6, rtol=1e-5)
