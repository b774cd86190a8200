"""Hazard row 67: no tensor that an asynchronous collective still writes is in reach.

`tests.processes.late` makes the collectives of every test of ranks late on purpose, so that a
result which is read too early is seen: by tests/gradients/test_exactness.py, where results of
several kinds wait for each other. Here it is seen to be late, and the asynchronous collectives are
listed.
"""

import ast
from pathlib import Path

import torch
import torch.distributed as dist

from tests.processes.ranks import on_ranks

PACKAGE = Path(__file__).parents[1] / "torchtitan_dp"
ASYNCHRONOUS = {"async_op", "isend", "irecv", "batch_isend_irecv", "functional_collectives"}


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
    assert using.pop("base/torch_private.py") == ["functional_collectives"]  # which names them
    assert using == {
        "base/collectives.py": ["async_op", "functional_collectives"],
        "gradients/fsdp.py": ["async_op"],  # FSDP2's own, which must be False
        "plan/fake_step.py": ["functional_collectives"],  # whose wait a fake step replaces
    }


def test_row67_their_results_are_waited_for_where_they_are_listed():
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if names_in(path) & {"Pending", "pass_on", "exchange"}
    }
    assert users == {
        "base/collectives.py",
        "distributed/ring.py",
        "distributed/windows.py",
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
    from torchtitan_dp.base import collectives

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
