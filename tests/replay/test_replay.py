"""Two neighbours, replayed: all that may be published of either run is equal."""

import dataclasses
from pathlib import Path

import pytest

from tests.data.chats import folder
from tests.replay.case import Case, differences
from tests.replay.job import Job

pytestmark = [pytest.mark.slow]

PAIRS = "--training.local_batch_size=2"
CLOCK = Case(
    "clock",
    ("--training.seq_len=512", "--training.global_batch_size=11"),
    kind="one long",
    jobs=(Job(crash_clock=5000), Job(clock=3000)),
    buckets=True,
)
CASES = (
    Case("microbatch", kind="text"),
    Case("grad_sample", ("--privacy.gradient_method=grad_sample", PAIRS), context_parallel=2),
    Case("ghost", ("--privacy.gradient_method=ghost", PAIRS), seed=1, dp_shard=2),
    Case("randomized", ("--privacy.gradient_method=randomized", PAIRS), seed=2),
    Case("buckets", ("--ema.enable", "--ema.decay=0.9"), seed=3, buckets=True),
    Case("lora", ("--lora.rank=4",), seed=4),
    Case(
        "units",
        ("--data.unit_field=user", "--data.unit_sampling=random", "--data.windows_per_draw=2"),
        kind="units",
    ),
    Case("prompts", ("--data.prompt_field=prompt",), kind="prompts"),
    Case("chats", ("--data.messages_field=chat",), kind="chats"),
    Case("per_layer", ("--privacy.clipping=per_layer",), seed=5),
    Case("stop", jobs=(Job(stop_at=2), Job()), seed=6),
    Case("kill", jobs=(Job(crash_at=4), Job()), seed=7, context_parallel=2),
    Case("damage", jobs=(Job(stop_at=3), Job(damages=True)), seed=8),
    Case("full disk", jobs=(Job(full_at=4), Job()), seed=9),
    CLOCK,
)


def prepared(case: Case, root: Path) -> Case:
    """Give a case of conversations its template."""
    if case.kind != "chats":
        return case
    hf = f"--model.hf_assets_path={folder(root / 'tokenizer')}"
    return dataclasses.replace(case, overrides=(*case.overrides, hf))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_neighbours_cannot_be_told_apart(case, tmp_path):
    assert differences(prepared(case, tmp_path), tmp_path) == []
