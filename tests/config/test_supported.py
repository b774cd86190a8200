"""With privacy, a key of TorchTitan that nobody thought of is refused once it is changed."""

import copy
import dataclasses
from pathlib import Path

import pytest

from torchtitan_dp.config.conflicts import check_conflicts
from torchtitan_dp.config.load import load_config
from torchtitan_dp.config.supported import _values, check_supported, supported_keys

ROOT = Path(__file__).parents[2]
TOMLS = sorted([*ROOT.glob("train_configs/*.toml"), *ROOT.glob("examples/**/*.toml")])
DEBUG = str(ROOT / "train_configs/llama3_debug.toml")


@pytest.fixture(scope="module")
def shipped():
    return load_config(["--job.config_file", DEBUG], 1)


def _keys():
    config = load_config(["--job.config_file", DEBUG], 1)
    return [key for key, _, _ in _values(config, type(config)())]


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    load_config(["--job.config_file", str(path)], 1)


def test_every_key_is_supported_or_refused_when_changed(shipped):
    keys = _keys()
    assert supported_keys() <= set(keys), supported_keys() - set(keys)
    for key in set(keys) - supported_keys():
        config = copy.deepcopy(shipped)
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, name, "changed")
        with pytest.raises(ValueError, match="^" + key.replace(".", r"\.") + " = 'changed': "):
            check_supported(config)


def test_unknown_keys_and_sections_are_refused(shipped):
    @dataclasses.dataclass
    class Teleport:
        enable: bool = False

    @dataclasses.dataclass
    class Later(type(shipped)):
        teleport: Teleport = dataclasses.field(default_factory=Teleport)

    config = Later(**{f.name: getattr(shipped, f.name) for f in dataclasses.fields(shipped)})
    check_conflicts(config)
    check_supported(config)
    config.teleport.enable = True
    check_conflicts(config)
    with pytest.raises(ValueError, match=r"^teleport\.enable = true: .* default is false"):
        check_supported(config)
