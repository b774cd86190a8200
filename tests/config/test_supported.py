"""With privacy, a key of TorchTitan that nobody thought of is refused once it is changed."""

import copy
import dataclasses
import re
import typing
from pathlib import Path

import pytest

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split

from torchtitan_dp.config.checks import keys, refusals, supported_keys, unsupported, values
from torchtitan_dp.config.load import load_config, schema

ROOT = Path(__file__).parents[2]
TOMLS = sorted([*ROOT.glob("train_configs/*.toml"), *ROOT.glob("examples/**/*.toml")])
DEBUG = str(ROOT / "train_configs/llama3_debug.toml")


def refuse(config):
    """Raise the first key that privacy does not support."""
    for line in refusals(config, unsupported(config)):
        raise ValueError(line)


@pytest.fixture(scope="module")
def shipped():
    return load_config(["--job.config_file", DEBUG], 1)


@pytest.mark.parametrize("path", TOMLS, ids=lambda path: path.stem)
def test_shipped_configurations_load(path):
    load_config(["--job.config_file", str(path)], 1)


def test_every_key_is_supported_or_refused_when_changed(shipped):
    keys = {key for key, _, _ in values(shipped)}
    assert supported_keys() <= keys, supported_keys() - keys
    for key in keys - supported_keys():
        config = copy.deepcopy(shipped)
        *sections, name = key.split(".")
        section = config
        for part in sections:
            section = getattr(section, part)
        setattr(section, name, "changed")
        with pytest.raises(ValueError, match="^" + key.replace(".", r"\.") + " = 'changed': "):
            refuse(config)


def test_unknown_keys_and_sections_are_refused(shipped):
    @dataclasses.dataclass
    class Teleport:
        enable: bool = False

    @dataclasses.dataclass
    class Later(type(shipped)):
        teleport: Teleport = dataclasses.field(default_factory=Teleport)

    config = Later(**{f.name: getattr(shipped, f.name) for f in dataclasses.fields(shipped)})
    refuse(config)
    config.teleport.enable = True
    with pytest.raises(ValueError, match=r"^teleport\.enable = true: .* default is false"):
        refuse(config)


OUT_OF_RANGE = """
optimizer.name='SGD' optimizer.beta1=1.0 optimizer.beta2=-0.1 optimizer.eps=-1e-08
optimizer.weight_decay=-0.1 lr_scheduler.warmup_steps=-1 lr_scheduler.decay_ratio=1.5
lr_scheduler.min_lr_factor=-0.5 ema.decay=1.0 lora.alpha=0.0 training.gc_freq=0
comm.init_timeout_seconds=0 comm.train_timeout_seconds=-1
checkpoint.keep_latest_k=1 checkpoint.keep_latest_k=-7
activation_checkpoint.selective_ac_option='ops' activation_checkpoint.memory_budget=2.0
activation_checkpoint.determinism_check='strict'
"""


@pytest.mark.parametrize("private", [True, False])
@pytest.mark.parametrize("given", OUT_OF_RANGE.split())
def test_values_that_torchtitan_would_fail_on_later_are_refused_at_once(given, private):
    options = [] if private else ["--privacy.no-enable"]
    line = re.escape(given.replace("=", " = "))
    option = "--" + given.replace("'", "")
    with pytest.raises(ValueError, match=f"^{line}: must be"):
        load_config(["--job.config_file", DEBUG, option, *options], 1)


# Every key, TorchTitan's and ours, whose value may be a number with a fraction, or a whole one.
BEYOND = {float: ["nan", "inf", "-inf", "-1", "1" + "0" * 400], int: [str(2**64), str(-(2**64))]}
NUMBERS = [
    pytest.param(key, value, ".*" if number is float else value, id=f"{key}={value[:22]}")
    for key, kind in keys(schema())
    for number, beyond in BEYOND.items()
    if number in (kind, *typing.get_args(kind))
    for value in beyond
]


@pytest.mark.parametrize("key, value, shown", NUMBERS)
def test_no_number_is_not_finite_negative_or_beyond_its_bounds(key, value, shown):
    """A worker would end with a traceback, or train to the end on what no step can mend."""
    with pytest.raises(ValueError, match=f"^{re.escape(key)} = {shown}: must be ") as refused:
        load_config(["--job.config_file", DEBUG, f"--{key}={value}"], 1)
    assert "\n" not in str(refused.value)
