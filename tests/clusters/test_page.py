"""What docs/clusters.md names is there: keys, variables, options, and lines of the job script."""

import re

import pytest
from torch.distributed.run import get_args_parser

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.config import JobConfig as TorchTitanJobConfig

from tests.processes.runs import ROOT
from torchtitan_dp.config import JobConfig

PAGE = (ROOT / "docs/clusters.md").read_text()
SCRIPTS = "".join(
    (ROOT / name).read_text()
    for name in ("run_train.sh", "scripts/setup.sh", "scripts/slurm/train.sbatch")
)
BLOCKS = re.findall(r"^```\w*\n(.*?)^```", PAGE, re.M | re.S)


def test_keys_are_those_of_the_configuration() -> None:
    keys = set(re.findall(r"`([a-z_]+\.[a-z_]+)`", PAGE)) - {"train.sbatch"}
    keys |= set(re.findall(r"--([a-z_]+\.[a-z_]+)", PAGE))
    assert keys
    for section, _, name in (key.partition(".") for key in keys):
        assert any(
            hasattr(getattr(config, section, None), name)
            for config in (TorchTitanJobConfig(), JobConfig())
        ), f"{section}.{name}"


@pytest.mark.parametrize("name", ["NGPU", "CONFIG_FILE", "LOG_RANK", "SELFCHECK", "MAX_REQUEUES"])
def test_variables_are_those_of_the_scripts(name: str) -> None:
    assert name in PAGE
    assert re.search(rf"\$\{{{name}:-", SCRIPTS)


def test_options_of_the_launcher_are_those_of_torchrun() -> None:
    known = get_args_parser().format_help()
    commands = re.findall(r"-m torchtitan_dp\.launch(.*?) -m torchtitan_dp\.train", PAGE, re.S)
    assert len(commands) == 2
    for option in set(re.findall(r"(?<=\s)--\w+", "".join(commands))):
        assert re.search(rf"{option}\b|{option.replace('_', '-')}\b", known), option
