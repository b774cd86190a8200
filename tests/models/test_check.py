"""What a model is asked before a run: that groups to clip divide its parameters."""

import pytest

from tests import forks
from tests.launch import CONFIG


def mistake(*options: str) -> str:
    """What `check_model` says of a start with these options; "" if nothing."""
    from torchtitan_dp.checkpoint.start import decide_start
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models.check import check_model

    try:
        config = load_config(["--job.config_file", str(CONFIG), *options], 1)
        check_model(config, decide_start(config))
    except ValueError as error:
        return str(error)
    return ""


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
