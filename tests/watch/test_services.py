"""What the real W&B writes: public scalars, and nothing about records or the machine. CI, for its
20 packages, is without it: run this where it is installed (`pip install -e '.[wandb]'`)."""

import getpass
import json
import os
import re
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import forks
from tests.processes.runs import ROOT

PUBLIC = {"private_to_publish/lr": 0.0123456789, "private_to_publish/epsilon": 2.3456789}
SECRET = "a name that is in no list"
# In a process of its own, which W&B changes. Times are far apart from each other: an hour a step.
PROGRAM = """
import json, sys, time, logging
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
sys.argv[1:], (folder, jobs) = ["--secret_argument"], sys.argv[1:]
import torchtitan_dp.distributed
from torchtitan_dp.train.outlets import Outlets, PublicLines
real = time.time
for loaded, last in json.loads(jobs):
    outlets = Outlets([PublicLines(folder, loaded)], private=True)
    for step in range(loaded + 1, last + 1):
        time.time = lambda: real() + 3600 * step
        print("not private: a console line with a secret loss")
        logging.info("not private: a log line with a secret loss")
        outlets.log({"lr": 0.0123456789, "epsilon": 2.3456789, "loss": 3.4567891,
                     "a name that is in no list": 4.5678912, "throughput(tps)": 5.6789123}, step)
outlets.send()
time.time = real
outlets.close()
"""
JOBS = ((0, 2), (1, 2), (1, 3))  # the steps that were loaded, and the last: a crash, and another


def written(folder: Path) -> bytes:
    """All bytes of all files that W&B wrote, with their paths."""
    forks.need()
    folder.mkdir(exist_ok=True)
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("WANDB_")},
        "WANDB_MODE": "offline",
        "SECRET_VARIABLE": "secret_value",
    }
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(JOBS)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "sent, after" not in done.stdout + done.stderr
    return b"".join(
        str(path).encode() + path.read_bytes()
        for path in sorted(folder.rglob("*"))
        # W&B's own log of its client stays here: `wandb sync` sends the .wandb file.
        if path.is_file() and "logs" not in path.parts
    )


def assert_nothing_else(content: bytes, folder: Path) -> None:
    """Neither other scalars, nor the console, nor this machine, user or code."""
    for text in (SECRET, "loss", "throughput", "not_private", "3.45678", "4.56789", "5.67891"):
        assert text.encode() not in content, text
    for value in (3.4567891, 4.5678912, 5.6789123):
        assert struct.pack("<d", value) not in content
        assert struct.pack(">d", value) not in content
    for text in ("secret_argument", "secret_value", "console line"):
        assert text.encode() not in content, text
    revision = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    for text in (socket.gethostname(), revision, sys.executable, getpass.getuser()):
        if len(text) > 4:  # shorter ones, as "root", are parts of other words
            assert text.encode() not in content.replace(str(folder).encode(), b""), text


@pytest.mark.slow
def test_wandb_has_public_scalars_alone_no_times_of_steps_no_starts(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    content = written(tmp_path / "run")
    for name, value in PUBLIC.items():
        assert name.encode() in content
        assert repr(value).encode() in content
    assert_nothing_else(content, tmp_path)
    stamps = re.findall(rb"_timestamp[^0-9]{1,4}([0-9.e+]+)", content)
    assert len(stamps) >= 3
    assert len(set(stamps)) == 1
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1
    steps = re.findall(rb"_step[^0-9]{1,4}([0-9]+)", content)
    assert list(dict.fromkeys(steps)) == sorted(steps, key=int)[::2] == [b"1", b"2", b"3"]
