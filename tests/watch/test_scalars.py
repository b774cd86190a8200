"""The table of scalars, and docs/watching.md, which shows it."""

from pathlib import Path

import pytest

from torchtitan_dp.watch.scalars import SCALARS, find, is_public, tag

DOCUMENT = Path(__file__).parents[2] / "docs" / "watching.md"


def test_the_public_ones_are_these_alone() -> None:
    public = {scalar.name for scalar in SCALARS if scalar.public}
    of_the_ledger = {"epsilon", "epsilon_planned", "noise_multiplier", "heldout_loss_noised"}
    assert public == {"lr", *of_the_ledger}


@pytest.mark.parametrize("name", ["grad_norm_of_mrs_miller", "epsilon/", "LR", "lr_of_record"])
def test_an_unknown_scalar_is_not_private(name: str) -> None:
    assert find(name) is None
    assert not is_public(name)
    assert tag(name, private=True) == f"not_private/{name}"


def test_sections() -> None:
    assert tag("lr", private=True) == "private_to_publish/lr"
    assert tag("loss", private=True) == "not_private/loss"
    assert tag("heldout_loss_at/0-127", private=True) == "not_private/heldout_loss_at/0-127"


def test_nothing_of_a_run_that_is_not_private_is_in_the_public_section() -> None:
    tags = {tag(scalar.name, private=False) for scalar in SCALARS}
    assert tags == {f"not_private/{scalar.name}" for scalar in SCALARS}


def test_the_document_has_the_table() -> None:
    rows = [f"| `{s.name}` | {s.words} | {'yes' if s.public else 'no'} |" for s in SCALARS]
    assert "\n".join(rows) in DOCUMENT.read_text(encoding="utf-8")
