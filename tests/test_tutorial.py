"""docs/tutorial.md runs as it is written, and prints what it quotes, numbers apart."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import forks
from tests.processes.runs import ROOT, said

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
STEPS = re.findall(r"^```bash\n((?:.*\n)*?)```\n\n((?:    .*\n)*)", PAGE, re.M)


def shape_of(line: str) -> str:
    """A line without its numbers, its beginning and what the page leaves out."""
    return " ".join(re.sub(r"[\d.,]+(e-\d+)?", "#", line).split())


@pytest.mark.thorough
def test_its_commands_print_what_it_quotes(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    forks.need()
    (tmp_path / "bin").mkdir()
    for name, arguments in (("python", ""), ("torchtitan-dp", "-m torchtitan_dp ")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        command.chmod(0o755)
    shutil.copytree(ROOT / "examples" / "tutorial", tmp_path / "examples" / "tutorial")
    place = tmp_path
    environment = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": os.environ["PYTHONPATH"],
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",
    }
    assert len(STEPS) == 8
    for command, quoted in STEPS:
        if command.startswith("cd "):
            place = tmp_path / command.split()[1]
            command = command.partition("\n")[2]
        shell = ("bash", "-euo", "pipefail", "-c", f"exec 2>&1; {command}")
        done = said(*shell, cwd=place, **environment)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        for line in quoted.splitlines():
            for part in line.split("…"):
                assert shape_of(part) in shape_of(done.stdout), f"{command} does not print: {line}"
    card = (place / "my_adapter" / "README.md").read_text(encoding="utf-8")
    assert "base_model: our-hospital/base" in card


def test_it_is_read_as_it_is_written() -> None:
    """Each command has its output, but the one that only changes the folder."""
    assert [command.split()[0] for command, quoted in STEPS if not quoted] == []
