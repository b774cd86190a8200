"""What a model is asked before a run: that groups to clip divide its parameters."""

import pytest

from tests.models.check import mistake
from tests.processes import forks


@pytest.mark.parametrize(
    ("groups", "clipping", "expected"),
    [
        ("*.attention.*,*", "per_layer", ""),
        ("*.attention.*", "per_layer", "fits none of them; '*' as the last one takes the rest"),
        ("*,layers.*", "per_layer", "'layers.*' has no trained parameter"),
        ("*", "flat", "remove it, or set privacy.clipping to 'per_layer'"),
    ],
)
def test_groups_to_clip(tmp_path, groups, clipping, expected):
    options = (f"--privacy.clipping_groups={groups}", f"--privacy.clipping={clipping}")
    said = forks.call(mistake, *options, f"--job.dump_folder={tmp_path}")
    assert expected in said
    assert bool(said) == bool(expected)
    assert said.startswith("privacy.clipping_groups = [") or not said
    assert "\n" not in said
