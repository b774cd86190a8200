"""One command for everything: a command and its configuration by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters.namespaces import need
from tests.processes import forks
from tests.processes.runs import arguments, with_sigma, write_records
from torchtitan_dp import __main__ as command

ROOT = Path(__file__).parents[1]


def test_every_command_is_a_module_and_is_described() -> None:
    for name in command._COMMANDS:
        module = ROOT / "torchtitan_dp" / ("data" if name == "prepare" else name)
        assert module.with_suffix(".py").is_file() or (module / "__main__.py").is_file()
        assert f"  {name} " in command.usage()
    assert "llama3_debug" in command.usage()


def test_a_configuration_is_a_path_or_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "train_configs" / "llama3_debug.toml"
    for name in ("llama3_debug", "llama3_debug.toml"):
        assert command.config_path(name) == shipped
    Path("llama3_debug.toml").touch()
    assert command.config_path("llama3_debug.toml") == Path("llama3_debug.toml")
    with pytest.raises(SystemExit) as stopped:
        command.config_path("mine.toml")
    assert stopped.value.code == 2
    assert "error: 'mine.toml': no such file; --help lists the shipped" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.config_path("lama3_debug.toml")
    assert capsys.readouterr().err.endswith("no such file; did you mean llama3_debug?\n")


@pytest.mark.parametrize(
    "argv, line",
    [
        (["trian"], ""),
        (["train", "no_such_config"], ""),
        (["train", "/tmp"], "'/tmp' is a folder: name the TOML of the run\n"),
        (["release", "RUN"], "the following arguments are required: OUT; torchtitan-dp release"),
        (["train", "--training.steps=3"], "CONFIG is missing"),
        (["ledger", "RUN", "--overlaping"], "--overlaping: no such option; did you mean --overlap"),
        (
            ["plan", "llama3_debug", "--memory", "8"],
            "--memory: no such option; did you mean --memo",
        ),
        (["plan", "llama3_debug", "--job.dump_folder="], "job.dump_folder = '': name a folder"),
        (
            ["plan", "llama3_debug", "--job.dump_folder=docs", "--model.hf_assets_path=docs/"],
            "job.dump_folder = 'docs': model.hf_assets_path is this folder; name another",
        ),
        (
            ["plan", "llama3_debug", "--training.dataset", "jsonl", "--privacy.x"],
            "--privacy.x: unk",
        ),
        (["train", "llama3_debug"], "NGPU = 'two': must be 1 or more, or auto\n"),
    ],
)
def test_mistakes_exit_with_2(argv, line, monkeypatch, capsys) -> None:
    monkeypatch.setenv("NGPU", "two")
    monkeypatch.chdir(ROOT)
    for module in ("release.__main__", "release.ledgers", "plan.__main__"):  # it runs them
        monkeypatch.delitem(sys.modules, f"torchtitan_dp.{module}", raising=False)
    with pytest.raises(SystemExit) as stopped:
        command.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {line}")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_ends_a_command_without_a_traceback(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "torchtitan_dp", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


@pytest.mark.slow
def test_one_machine_needs_no_name_that_resolves(tmp_path: Path) -> None:
    """A host of `lo` alone, whose name nobody knows: torchrun's workers waited for it for ever."""
    need("a host that nobody knows", ("ip", "hostname"), "iproute2 hostname")
    forks.need()
    options = arguments(tmp_path / "out", write_records(tmp_path / "data"), *with_sigma(1))
    train = [sys.executable, "-m", "torchtitan_dp", "train", *options, "--training.steps=1"]
    host = 'ip link set lo up; hostname no-such-host; exec "$@"'
    ended = subprocess.run(
        [
            *("unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", host, ""),
            *train,
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "NGPU": "2"},
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert (tmp_path / "out" / "privacy.json").exists()
