"""A tiny run, planned in this process."""

import json
from collections.abc import Callable
from typing import Any

import pytest

import torchtitan_dp.plan.__main__ as plan
from tests.processes.runs import arguments, write_records


@pytest.fixture
def plan_tiny(tmp_path, capsys) -> Callable[..., tuple[str, dict[str, Any]]]:
    """Plans it without memory: what it says, and its JSON."""
    data = write_records(tmp_path / "data")

    def run(world_size: int, *overrides: str) -> tuple[str, dict[str, Any]]:
        capsys.readouterr()
        command = arguments(tmp_path / "out", data, *overrides)
        plan.main([*command, f"--world_size={world_size}", "--json=-", "--no_memory"])
        said = capsys.readouterr()
        return said.err, json.loads(said.out)

    return run
