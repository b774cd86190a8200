"""A checked configuration from a TOML and the command line, or from a run's folder.

A user's mistake is one `ValueError` line that names the key, the value and the remedy;
`exit_on_mistake` prints it and exits with code 2.
"""

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import logging
import os
import re
import sys
import typing
from collections.abc import Iterator
from typing import Any, NoReturn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.config import ConfigManager
from torchtitan.config import JobConfig as TorchTitanJobConfig

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import check, resolve_degrees, resolve_gradient_method
from torchtitan_dp.config.command_line import (
    REMOVED_KEYS,
    check_command_line,
    describe,
    other_section,
    refuse_removed,
)
from torchtitan_dp.config.derived import resolve_sampling
from torchtitan_dp.process import write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CUSTOM_CONFIG = "torchtitan_dp.config"
# Kept in a run's folder for later tools. It has the paths of private data: readable by its owner
# only, and never released.
RUN_CONFIG_FILE = "run_config.json"
_ONE_PROCESS = (
    "data_parallel_replicate_degree",
    "data_parallel_shard_degree",
    "context_parallel_degree",
)


def load_config(argv: list[str], world_size: int) -> JobConfig:
    """Parse as TorchTitan does (command line over TOML over defaults), and check the result.

    Args:
        argv: `--job.config_file FILE` and any `--section.key value`.
        world_size: number of processes, which degrees of -1 follow.

    Raises:
        ValueError: one line for the user.
        SystemExit: code 0 after `--help`.
    """
    schema: Any = ConfigManager._merge_configs(TorchTitanJobConfig, JobConfig)
    path, values = _option(argv, "job.config_file"), {}
    if path is not None:
        values = _read_toml(path)
        _check_keys(values, schema, path)
    check_command_line(argv, schema)
    config = _parse([*argv, f"--job.custom_config_module={_CUSTOM_CONFIG}"], values)
    return _checked(config, world_size)


def config_from_values(values: dict[str, Any], source: str, world_size: int) -> JobConfig:
    """Return a configuration from the values of all its sections, checked as `load_config` does.

    Args:
        values: those of an earlier version may have `REMOVED_KEYS`, which are left out.
        source: the file that they come from, for messages.

    Raises:
        ValueError: one line for the user.
    """
    schema: Any = ConfigManager._merge_configs(TorchTitanJobConfig, JobConfig)
    kept = {
        name: {key: value for key, value in section.items() if f"{name}.{key}" not in REMOVED_KEYS}
        if isinstance(section, dict)
        else section
        for name, section in values.items()
    }
    _check_keys(kept, schema, source)
    return _checked(ConfigManager()._dict_to_dataclass(schema, kept), world_size)


def write_config(config: JobConfig) -> list[str]:
    """Keep `config` in its `job.dump_folder`; the paths of public inputs are made absolute.

    Returns:
        a line for each key that the last start there had otherwise; they are in force from now on.
    """
    values = dataclasses.asdict(config)
    for section, key in (("model", "hf_assets_path"), ("checkpoint", "initial_load_path")):
        if path := values[section][key]:
            values[section][key] = os.path.abspath(path)
    path, text = os.path.join(config.job.dump_folder, RUN_CONFIG_FILE), json.dumps(values, indent=2)
    lines = []
    if os.path.isfile(path):
        try:
            with open(path, encoding="utf-8") as file:
                earlier = dict(_flat(json.load(file)))
        except (ValueError, AttributeError) as error:
            lines.append(f"{path} cannot be read ({error!r}): which keys changed is not known")
        else:
            lines = [
                f"{key} = {value!r} from here on: {earlier[key]!r} at the last start"
                for key, value in _flat(json.loads(text))
                if value != earlier.get(key, value) and not key.startswith("job.")
            ]
    write_atomically(path, text.encode() + b"\n")
    return lines


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a configuration, as `section.key`, with its value."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_config(folder: str) -> JobConfig:
    """Return the configuration of the run in `folder` for one process, on any mesh.

    `job.dump_folder` becomes `folder`: a run may have been moved.

    Raises:
        ValueError: one line for the user.
    """
    path = os.path.join(folder, RUN_CONFIG_FILE)
    if not os.path.isfile(path):
        raise ValueError(
            f"RUN = '{folder}': {RUN_CONFIG_FILE}, which describes its model, is missing; give the "
            "training command again, which writes it (a finished run is not trained further)"
        )
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
        values["job"]["dump_folder"] = folder
        values["parallelism"].update(dict.fromkeys(_ONE_PROCESS, 1))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): restore it") from error
    return config_from_values(values, path, world_size=1)


def _checked(config: Any, world_size: int) -> JobConfig:
    """Return a configuration of the right types, `~`, `auto` and -1 resolved, if it can work."""
    _resolve_home(config)
    resolve_degrees(config, world_size)
    resolve_gradient_method(config)
    resolve_sampling(config)
    check(config, world_size)
    return config


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Turn a user's mistake into one line on stderr and exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """Print a user's mistake in one line, and exit with code 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def parse_known(
    parser: argparse.ArgumentParser, argv: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Return a tool's own options, and the configuration's command line for `load_config`."""
    parser.add_argument("--job.config_file", dest="config_file", metavar="FILE", help="the TOML")
    known, overrides = parser.parse_known_args(argv)
    if known.config_file is not None:
        overrides = ["--job.config_file", known.config_file, *overrides]
    if _option(overrides, "job.config_file") is None:
        fail("--job.config_file is missing: name the TOML of the run")
    return known, overrides


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a tool's JSON output; `-` is stdout."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


def _option(argv: list[str], name: str) -> str | None:
    """Return the value of `--name value` or `--name=value`; `-` and `_` are the same."""
    for i, argument in enumerate(argv):
        key, equals, value = argument.partition("=")
        if key.replace("-", "_") == f"__{name}":
            return value if equals else argv[i + 1] if i + 1 < len(argv) else None
    return None


def _resolve_home(config: Any) -> None:
    """Replace `~` in front of a path, in place: a shell does so in front of a word alone."""
    for section in vars(config).values():
        for key, value in vars(section).items() if dataclasses.is_dataclass(section) else ():
            if isinstance(value, str) and key.endswith(("path", "folder", "file")):
                setattr(section, key, os.path.expanduser(value))


def _read_toml(path: str) -> dict[str, Any]:
    """Return the content of a TOML file, or raise ValueError in one line."""
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ValueError(f"job.config_file = '{path}': no such file")
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows' editors begin with a mark
            return tomllib.loads(file.read())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"job.config_file = '{path}': not valid TOML: {error}") from error


def _check_keys(values: dict[str, Any], schema: Any, path: str, prefix: str = "") -> None:
    """Refuse unknown keys, and values of another type than their key's.

    A misspelt key would silently keep its default. Values on the command line need no such check:
    they are parsed as their key's type.
    """
    fields = {f.name: f for f in dataclasses.fields(schema)}
    for name, value in values.items():
        key = prefix + name
        refuse_removed(key, value, path)
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean {prefix}{close[0]}?" if close else "remove it"
            if not prefix and isinstance(value, dict):
                section = other_section(name, fields)
                if section:
                    hint = f"did you mean the section [{section}]?"
                elif not close:
                    hint = f"the sections are {', '.join(sorted(fields))}"
            raise ValueError(f"{key}: unknown key in {path}; {hint}")
        if dataclasses.is_dataclass(fields[name].type):
            if not isinstance(value, dict):
                raise ValueError(f"{key} = {value!r} in {path}: must be a [{key}] section")
            _check_keys(value, fields[name].type, path, f"{key}.")
        elif not _has_type(value, fields[name].type):
            raise ValueError(f"{key} = {value!r} in {path}: must be {describe(fields[name].type)}")


class _ConfigManager(ConfigManager):
    """TorchTitan's, with the values of a TOML that was read already."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        self._values = values

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any]:
        return self._values


def _parse(argv: list[str], values: dict[str, Any]) -> Any:
    """Parse with TorchTitan's own parser, whose boxed messages are turned into one line."""
    messages = io.StringIO()
    titan_logger = logging.getLogger("root")
    level = titan_logger.level
    titan_logger.setLevel(logging.ERROR)  # it warns of a missing tokenizer folder
    try:
        with contextlib.redirect_stderr(messages):
            return _ConfigManager(values).parse_args(argv)
    except SystemExit as stop:
        if stop.code != 2:  # help was asked for, or a signal ends the process
            raise
        words = re.sub(r"[\u2500-\u257f]+", " ", messages.getvalue())
        words = re.sub(r"\x1b\[[0-9;]*m", "", words)
        # Not its helptext: that names the running program, which need not be ours.
        message = " ".join(re.split(r"Argument helptext:|For full helptext", words)[0].split())
        raise ValueError(re.sub(r"^[-\s]+|[-\s]+$", "", message)) from None
    finally:
        titan_logger.setLevel(level)


def _has_type(value: Any, annotation: Any) -> bool:
    """Return whether a value is of an annotated type."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if origin is typing.Literal:
        return any(value == a and type(value) is type(a) for a in arguments)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and all(_has_type(v, arguments[0]) for v in value)
    if arguments:  # X | Y
        return any(_has_type(value, a) for a in arguments)
    if annotation is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation) if isinstance(annotation, type) else True
