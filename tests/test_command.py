"""One command for everything: a command and its configuration by name."""

from pathlib import Path

import pytest

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
    assert (
        command.config_path("llama3_debug") == command.config_path("llama3_debug.toml") == shipped
    )
    Path("llama3_debug.toml").touch()
    assert command.config_path("llama3_debug.toml") == Path("llama3_debug.toml")
    with pytest.raises(SystemExit) as stopped:
        command.config_path("mine.toml")
    assert stopped.value.code == 2
    assert "error: 'mine.toml': no such file; shipped configurations: " in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["trian"], ["train", "no_such_config"]])
def test_mistakes_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_train_refuses_a_wrong_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NGPU", "two")
    with pytest.raises(SystemExit) as stopped:
        command.main(["train", "llama3_debug"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: NGPU = 'two': must be 1 or more, or auto\n"
