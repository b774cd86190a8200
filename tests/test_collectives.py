"""Hazard row 67: no tensor that an asynchronous collective still writes is in reach.

`tests.processes.late` makes the collectives of every test of ranks late on purpose, so that a
result which is read too early is seen. Here it is seen to be late, the asynchronous
collectives are listed, and every gradient method is compared with the loop where results of
several kinds wait for each other.
"""

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gradients.loop import error_on_this_rank
from tests.processes.ranks import on_ranks
from torchtitan_dp.models.lora import LoRA

PACKAGE = Path(__file__).parents[1] / "torchtitan_dp"
ASYNCHRONOUS = {"async_op", "isend", "irecv", "batch_isend_irecv", "_functional_collectives"}


def names_in(path: Path) -> set[str]:
    """Return every name, attribute, keyword and imported name of a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {part for alias in node.names for part in alias.name.split(".")}
        for field in ("id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                found.add(name)
    return found


def test_row67_every_asynchronous_collective_is_begun_in_one_file():
    using = {
        str(path.relative_to(PACKAGE)): sorted(names_in(path) & ASYNCHRONOUS)
        for path in PACKAGE.rglob("*.py")
        if names_in(path) & ASYNCHRONOUS
    }
    assert using == {
        "collectives.py": ["_functional_collectives", "async_op"],
        "gradients/fsdp.py": ["async_op"],  # FSDP2's own, which must be False
        "plan/fake_step.py": ["_functional_collectives"],  # whose wait a fake step replaces
    }


def test_row67_their_results_are_waited_for_where_they_are_listed():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if names_in(path) & {"Pending", "pass_on"}
    }
    assert users == {
        "collectives.py",
        "distributed/ring.py",
        "gradients/ghost.py",  # complete ones
        "gradients/grad_sample.py",
        "gradients/layers.py",  # the type of what a layer forms
    }
    reached = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if path.name != "collectives.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "_unfinished"
    ]
    assert reached == []


def late_results():
    """What a rank sees of an asynchronous sum before and after its wait, and of a freed input."""
    from torchtitan_dp import collectives

    group = dist.group.WORLD
    shard = collectives.Pending(torch.zeros(1, 4))
    memory = torch.empty(0).set_(shard.storage)
    whole = torch.ones(8)
    shard.reduce_scatter(slice(0, 1), whole, group)
    before = memory.isnan().all().item()
    whole.fill_(2)  # too early: what is sent is read when the sum is waited for
    after = shard.wait().flatten().tolist()
    buffer = torch.full((2,), float(dist.get_rank()))
    passed = collectives.pass_on(buffer, group)
    buffer.add_(10)
    freed = collectives._reduce_scatter(torch.empty(1), torch.ones(2), group=group, async_op=True)
    try:
        freed.wait()
        kept = True
    except AssertionError:
        kept = False
    return before, after, passed.wait().tolist(), kept


def test_collectives_of_ranks_are_late():
    for rank, (before, after, passed, kept) in enumerate(on_ranks(2, late_results)):
        assert before
        assert after == [4.0] * 4
        assert passed == [10.0 + 1 - rank] * 2
        assert not kept


METHODS = {
    "microbatch": ("--privacy.gradient_method=microbatch",),
    "V1": ("--privacy.gradient_method=grad_sample", "--privacy.no-shard_grad_samples"),
    "V2": ("--privacy.gradient_method=grad_sample",),
    "V2_per_layer": ("--privacy.gradient_method=grad_sample", "--privacy.clipping=per_layer"),
    "ghost": ("--privacy.gradient_method=ghost",),
    "ghost_two": ("--privacy.gradient_method=ghost", "--privacy.ghost_passes=two"),
}
HEADS = {"whole": "--training.loss_chunk_tokens=0", "chunks": "--training.loss_chunk_tokens=5"}
MODELS = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "lora": {"lora": LoRA(rank=3, alpha=5.0, targets=("wq", "wv", "w2"))},
}
CHECKPOINTING = {
    "none": (),
    "full": ("--activation_checkpoint.mode=full",),
    "tiles": ("--activation_checkpoint.mode=full", "--training.feed_forward_chunk=7"),
}
DEGREES = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 1, 4)]


def errors_of_each(degrees, method):
    """The errors of a method's sums and norms on this rank, by model, head and checkpointing."""
    group_of = (lambda name: name.rpartition(".")[0]) if method == "V2_per_layer" else None
    found = {}
    for model, head, mode in itertools.product(MODELS, HEADS, CHECKPOINTING):
        samples = 1 if method == "microbatch" else 4
        if mode == "tiles" and method != "microbatch":
            continue  # its layers are not in tiles
        options = [*METHODS[method], HEADS[head], *CHECKPOINTING[mode]]
        options.append(f"--training.local_batch_size={samples}")
        found[model, head, mode] = error_on_this_rank(
            degrees, options, MODELS[model], 1.0, 5, group_of
        )
    return found


@pytest.mark.thorough_cases("*-(2, 1, 2)", "*-(1, 1, 4)")
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_row67_every_method_waits_for_what_it_reads(method, degrees):
    for found in on_ranks(math.prod(degrees), errors_of_each, degrees, method):
        wrong = {case: errors for case, errors in found.items() if not max(errors) < 2e-5}
        assert wrong == {}
