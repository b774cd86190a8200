"""Two neighbours, replayed: all that may be published of either run is equal."""

import dataclasses
import random
import re
from pathlib import Path

import pytest

from tests.data.chats import folder
from tests.replay.allowed import is_private
from tests.replay.case import Case, differences
from tests.replay.job import Job

DOCUMENT = Path(__file__).parents[2] / "docs" / "privacy.md"
PAIRS = "--training.local_batch_size=2"
CLOCK = Case(
    "clock",
    ("--training.seq_len=512",),
    kind="one long",
    jobs=(Job(crash_clock=400), Job(clock=700)),
    batch=11,
    buckets=True,
)
LOSSES = ("--validation.enable", "--validation.freq=1", "--validation.publish_epsilon=8")
HELD_OUT = ("--data.heldout_fraction=0.4", *LOSSES)  # the unit in which neighbours differ, too
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
    Case("owners", ("--data.unit_field=from,to",), kind="letters", dp_shard=2, seed=7),
    Case("prompts", ("--data.prompt_field=prompt",), kind="prompts"),
    Case("chats", ("--data.messages_field=chat",), kind="chats"),
    Case("per_layer", ("--privacy.clipping=per_layer",), seed=5),
    Case("stop", jobs=(Job(stop_at=2), Job()), seed=6),
    Case("kill", jobs=(Job(crash_at=4), Job()), seed=7, context_parallel=2),
    Case("damage", jobs=(Job(stop_at=3), Job(damages=True)), seed=8),
    Case(
        "bands",
        ("--privacy.noise=banded", "--privacy.bands=3"),
        jobs=(Job(crash_at=5), Job()),
        seed=10,
        dp_shard=2,
    ),
    Case(
        "allocation",
        ("--privacy.sampling=allocation", "--privacy.accountant=pld"),
        jobs=(Job(crash_at=4), Job(stop_at=3), Job()),
        seed=11,
    ),
    Case("full disk", jobs=(Job(full_at=4), Job()), seed=9),
    CLOCK,
    Case("held out", HELD_OUT, dp_shard=2),
    Case("held out, killed", HELD_OUT, jobs=(Job(crash_at=4), Job()), seed=1),
    Case("losses of others", ("--data.heldout_fraction=0.3", *LOSSES), seed=2),
)


def prepared(case: Case, root: Path) -> Case:
    """Give a case of conversations its template."""
    if case.kind != "chats":
        return case
    hf = f"--model.hf_assets_path={folder(root / 'tokenizer')}"
    return dataclasses.replace(case, overrides=(*case.overrides, hf))


@pytest.mark.slow
@pytest.mark.thorough_cases("per_layer", "prompts", "full disk", "lora", "damage", "buckets")
@pytest.mark.thorough_cases("ghost", "held out, killed", "clock")  # test_clocks.py has clocks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_neighbours_cannot_be_told_apart(case, tmp_path):
    assert differences(prepared(case, tmp_path), tmp_path) == []


RUNS = 200  # of the fuzzer
METHODS = (
    *(("--privacy.gradient_method=" + name, PAIRS) for name in ("grad_sample", "ghost")),
    ("--privacy.gradient_method=randomized", PAIRS),
    *((), ("--lora.rank=4",), ("--privacy.clipping=per_layer",)),
)
OPTIONS = (
    *((), ("--ema.enable", "--ema.decay=0.9"), ("--privacy.clip_function=automatic",)),
    *(("--privacy.secure_noise",), ("--data.long_records=window",)),
)
OF_KIND = {
    "text": ((),),
    "units": tuple(
        ("--data.unit_field=user", f"--data.unit_sampling={how}", *windows)
        for how in ("random", "concat")
        for windows in ((), ("--data.windows_per_draw=2",))
    ),
    "prompts": (("--data.prompt_field=prompt",),),
    "chats": (("--data.messages_field=chat",),),
}
JOBS = (
    *((Job(),), (Job(stop_at=2), Job()), (Job(crash_at=3), Job())),
    *((Job(stop_at=3), Job(damages=True)), (Job(full_at=2), Job())),
)


def drawn_case(seed: int) -> Case:
    """A case by chance: method, options, kind and contents of records, interruptions, mesh."""
    chance = random.Random(seed)
    kind = chance.choice(list(OF_KIND))
    overrides = (*chance.choice(METHODS), *chance.choice(OPTIONS), *chance.choice(OF_KIND[kind]))
    context_parallel, dp_shard = chance.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    jobs, buckets = chance.choice(JOBS), chance.random() < 0.3
    return Case("", overrides, kind, seed, context_parallel, dp_shard, jobs, buckets=buckets)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(RUNS))
def test_neighbours_by_chance_cannot_be_told_apart(seed, tmp_path):
    case = drawn_case(seed)
    assert differences(prepared(case, tmp_path), tmp_path) == [], case


def test_the_files_left_out_are_those_not_to_be_published():
    section = DOCUMENT.read_text().partition("## What is published\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| .+ \| (.+) \|$", section, re.MULTILINE)
    names = {n: not row[1].startswith("no") for row in rows for n in re.findall("`(.+?)`", row[0])}
    assert len(names) > 12
    for name, published in names.items():
        path = f"{name}x" if name.endswith("/") else name
        assert is_private(path) == (not published or name == "report.html"), name
