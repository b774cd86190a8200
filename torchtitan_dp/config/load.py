"""A checked configuration from a TOML and the command line, or from a run's folder.

A user's mistake is one `ValueError` line that names the key, the value and the remedy;
`exit_on_mistake` prints it and exits with code 2.
"""

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import check
from torchtitan_dp.config.derived import AUTO, DEGREES, resolve
from torchtitan_dp.config.keys import Mistakes, known_values, read_command_line
from torchtitan_dp.config.schema import from_values, schema
from torchtitan_dp.config.supported import out_of_range, refusals
from torchtitan_dp.process import write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Kept in a run's folder for later tools. It has the paths of private data: readable by its owner
# only, and never released.
RUN_CONFIG_FILE = "run_config.json"
_CUSTOM_CONFIG = "torchtitan_dp.config"


def load_config(argv: list[str], world_size: int | None) -> JobConfig:
    """Read the command line over a TOML over defaults, and check the result, without PyTorch.

    `world_size` is the number of processes, which degrees of -1 follow; None if it is not known
    yet, and then the mesh is not checked. Raises ValueError: `Mistakes`, one line each.
    """
    mistakes = list[str]()
    return _checked(_read(argv, mistakes), world_size, mistakes)


def seeks_fewest_ranks(argv: list[str]) -> bool:
    """Return whether a sample is to be shared by the fewest ranks that fit, which `load_config`
    does not predict: it takes all that the other degrees leave."""
    given = _read(argv, []).get("parallelism", {})
    return given.get("context_parallel_degree", AUTO) == AUTO


def _read(argv: list[str], mistakes: list[str]) -> dict[str, Any]:
    """Return the values, by section, that a command line and its TOML give; enter `mistakes`."""
    given = read_command_line(argv, schema(), mistakes)
    given["job.custom_config_module"] = _CUSTOM_CONFIG
    path = given.get("job.config_file")
    values = {} if path is None else _read_toml(path)
    values = known_values(values, schema(), str(path), mistakes)
    for key, value in given.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return values


def _checked(values: dict[str, Any], world_size: int | None, mistakes: list[str]) -> JobConfig:
    """Return the configuration of checked values, `~`, `auto` and -1 resolved, if it can work;
    `mistakes` are those in their keys and types."""
    config: JobConfig = from_values(schema(), values)
    _resolve_home(config)
    resolve(config, world_size or 1)
    if mistakes := [*mistakes, *refusals(config, out_of_range(config))]:
        raise Mistakes(mistakes)
    check(config, world_size)
    return config


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
    """Return the configuration of the run in `folder`, for one process.

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
        values["parallelism"].update(dict.fromkeys(DEGREES, 1))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): restore it") from error
    mistakes = list[str]()
    return _checked(known_values(values, schema(), path, mistakes), 1, mistakes)


@contextlib.contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Turn each of a user's mistakes into one line on stderr, and exit with code 2."""
    try:
        yield
    except Mistakes as error:
        fail(*error.lines)
    except ValueError as error:
        fail(str(error))


def fail(*mistakes: str) -> NoReturn:
    """Print a user's mistakes, one line each, and exit with code 2."""
    for mistake in mistakes:
        print("error: " + " ".join(mistake.split()), file=sys.stderr)
    raise SystemExit(2)


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a tool's JSON output; `-` is stdout. Shells leave the `~` of `--json=~/FILE` alone."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        with open(os.path.expanduser(path), "w", encoding="utf-8") as file:
            file.write(text)


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
