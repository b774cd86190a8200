"""A checked configuration from a TOML and the command line, or from a run's folder.

A user's mistake is one `ValueError` line that names the key, the value and the remedy;
`exit_on_mistake` prints it and exits with code 2.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
import typing
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torchtitan_dp.base.process import has_type, printable, write_atomically
from torchtitan_dp.config import JobConfig, hub
from torchtitan_dp.config.checks import Mistakes, check, keys, out_of_range, refusals
from torchtitan_dp.config.derived import AUTO, DEGREES, record_paths, resolve
from torchtitan_dp.data.files import require_folder, require_records

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Kept in a run's folder for later tools. It has the paths of private data: readable by its owner
# only, and never released.
RUN_CONFIG_FILE = "run_config.json"
_CUSTOM_CONFIG = "torchtitan_dp.config"
_FIXED = dict.fromkeys(
    ("model.hf_assets_path", "checkpoint.initial_load_path", "privacy.initial_weights_public"),
    ", which still holds for these weights",
) | {"privacy.target_epsilon": ", which fixed the noise: the same steps spend the same epsilon"}


def load_config(argv: list[str], world_size: int | None) -> JobConfig:
    """Read the command line over a TOML over defaults, and check the result, without PyTorch.

    `world_size` is the number of processes, which degrees of -1 follow; None if it is not known
    yet, and then the mesh is not checked. Raises ValueError: `Mistakes`, one line each.
    """
    mistakes = list[str]()
    return _checked(_read(argv, mistakes), world_size, mistakes, fetches=True)


def _each(change: Callable[[str], Any], value: Any) -> Any:
    """Change a text, or each one of a list, and leave other values."""
    if isinstance(value, list):
        return [change(one) for one in value]
    return change(value) if isinstance(value, str) else value


def _may_be_on_the_hub(path: str | None) -> bool:
    """Whether a path is given, and does not begin with a folder of this machine."""
    return bool(path) and not os.path.exists(str(path).partition("/")[0])


def _fetch(config: JobConfig) -> None:
    """Replace names on the Hugging Face hub by paths in its cache, in place; ValueError."""
    model, checkpoint, training = config.model, config.checkpoint, config.training
    kept = os.path.join(config.job.dump_folder, RUN_CONFIG_FILE)
    loads, key = checkpoint.initial_load_in_hf, "model.hf_assets_path"
    if _may_be_on_the_hub(path := model.hf_assets_path):
        model.hf_assets_path = hub.model_folder(key, path, kept, weights=loads)
    if loads and _may_be_on_the_hub(path := checkpoint.initial_load_path):
        key = "checkpoint.initial_load_path"
        checkpoint.initial_load_path = hub.model_folder(key, path, kept, weights=True)
    training.dataset_path = _each(
        lambda at: hub.records_path(at, kept) if at.startswith("hf://") else at,
        training.dataset_path,
    )


def check_paths(config: JobConfig) -> None:
    """Refuse, by ValueError in one line, records and a model's folder that are not there, and a
    file in the place of the run's folder."""
    for path in record_paths(config):
        require_records(path)
    require_folder(config.model.hf_assets_path)
    folder = config.job.dump_folder
    if not folder or os.path.isfile(folder):
        raise ValueError(f"job.dump_folder = '{folder}': name a folder, or a new one")
    for key, other in (
        ("model.hf_assets_path", config.model.hf_assets_path),
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path),
    ):
        if other and os.path.realpath(other) == os.path.realpath(folder):
            raise ValueError(f"job.dump_folder = '{folder}': {key} is this folder; name another")


def seeks_fewest_ranks(argv: list[str]) -> bool:
    """Return whether a sample is to be shared by the fewest ranks that fit, which `load_config`
    does not predict: it takes all that the other degrees leave."""
    return _read(argv, []).get("parallelism", {}).get("context_parallel_degree", AUTO) == AUTO


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


def _checked(
    values: dict[str, Any], world_size: int | None, mistakes: list[str], *, fetches: bool = False
) -> JobConfig:
    """Return the configuration of checked values, `~`, `auto` and -1 resolved, if it can work;
    `mistakes` are those in their keys and types. It `fetches` what the hub has, or has none."""
    config: JobConfig = from_values(schema(), values)
    for section in filter(dataclasses.is_dataclass, vars(config).values()):
        for key, value in vars(section).items():  # a shell replaces `~` in front of a word alone
            if key.endswith(("path", "folder", "file")):
                setattr(section, key, _each(os.path.expanduser, value))
    if fetches and not mistakes:
        _fetch(config)
    resolve(config, world_size or 1)
    if mistakes := [*mistakes, *refusals(config, out_of_range(config))]:
        raise Mistakes(mistakes)
    check(config, world_size)
    return config


def changes(config: JobConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys that the last start in `job.dump_folder` had otherwise, with both values;
    ValueError or AttributeError if that cannot be read."""
    path = os.path.join(config.job.dump_folder, RUN_CONFIG_FILE)
    earlier = json.loads(Path(path).read_text("utf-8")) if os.path.isfile(path) else {}
    before, now = dict(_flat(earlier)), _flat(json.loads(json.dumps(_kept(config))))
    different = ((key, (value, before.get(key, value))) for key, value in now)
    return {k: both for k, both in different if both[0] != both[1] and not k.startswith("job.")}


def write_config(config: JobConfig) -> list[str]:
    """Keep `config` in its `job.dump_folder`, with absolute paths of public inputs. Return a line
    for each key that the last start there had otherwise; they are in force from now on."""
    path = os.path.join(config.job.dump_folder, RUN_CONFIG_FILE)
    try:
        lines = [
            f"{key} = {now!r} from here on: {then!r} at the last start{_FIXED.get(key, '')}"
            for key, (now, then) in changes(config).items()
        ]
    except (ValueError, AttributeError) as error:
        lines = [f"{path} cannot be read ({error!r}): which keys changed is not known"]
    write_atomically(path, json.dumps(_kept(config), indent=2).encode() + b"\n")
    return lines


def _kept(config: JobConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    for section, key in (("model", "hf_assets_path"), ("checkpoint", "initial_load_path")):
        if path := values[section][key]:
            values[section][key] = os.path.abspath(path)
    return values


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_config(folder: str) -> JobConfig:
    """Return the configuration of the run in `folder`, for one process; ValueError, one line.
    `job.dump_folder` becomes `folder`: a run may have been moved."""
    path = os.path.join(folder, RUN_CONFIG_FILE)
    if not os.path.isfile(path):
        raise ValueError(
            f"RUN = '{folder}': {RUN_CONFIG_FILE}, which describes its model, is missing; restore "
            "it, or give the training command again, which writes it"
        )
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
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
    except ValueError as error:
        fail(*(error.lines if isinstance(error, Mistakes) else [str(error)]))


def fail(*mistakes: str) -> NoReturn:
    """Print a user's mistakes, one line each, and exit with code 2."""
    for mistake in mistakes:
        print("error: " + printable(" ".join(mistake.split())), file=sys.stderr)
    raise SystemExit(2)


def results(json_file: str | None) -> TextIO:
    """Return where a tool prints its result: stdout, unless its JSON goes there (`-`)."""
    return sys.stderr if json_file == "-" else sys.stdout


def write_json(path: str, content: dict[str, Any]) -> None:
    """Write a tool's JSON output; `-` is stdout. Shells leave the `~` of `--json=~/FILE` alone."""
    text = json.dumps(content, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).expanduser().write_text(text, encoding="utf-8")


def _read_toml(path: str) -> dict[str, Any]:
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise ValueError(f"job.config_file = '{path}': no such file")
    try:  # Windows' editors begin with a mark
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:
        remedy = "give each key once, text in quotes, and save it as UTF-8"
        raise ValueError(f"job.config_file = '{path}': no valid TOML: {error}; {remedy}") from error


# The schema.


def _theirs() -> Any:
    """Return TorchTitan's `JobConfig`, of its file alone. Of what that imports it uses the root
    logger, and `torch.distributed` once a configuration is logged."""
    package = importlib.util.find_spec("torchtitan")
    assert package is not None, "it is a dependency"
    path = os.path.join(os.path.dirname(str(package.origin)), "config", "job_config.py")
    loader = importlib.machinery.SourceFileLoader("torchtitan.config.job_config", path)
    module, names = types.ModuleType(loader.name), ("torchtitan", "torchtitan.tools")
    stand_ins: dict[str, Any] = {name: types.ModuleType(name) for name in (*names, "torch")}
    stand_ins["torch"].__getattr__ = lambda name: getattr(importlib.import_module("torch"), name)
    log = types.SimpleNamespace(logger=logging.getLogger())
    stand_ins |= {"torchtitan.tools.logging": log, loader.name: module}
    kept = {name: sys.modules.pop(name) for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(kept)
    return module.JobConfig


def _merged(theirs: Any, ours: Any, bases: tuple[type, ...] = ()) -> Any:
    """Return a dataclass of the fields of both, sections merged; those of `ours` come first.

    Sections have no bases: assertions of TorchTitan's would be tracebacks, and `checks` refuses
    the same values by their keys.
    """
    mine = {field.name: field for field in dataclasses.fields(ours)}
    rows: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(theirs):
        kind, given = field.type, mine.pop(field.name, None)
        if dataclasses.is_dataclass(kind):
            kind = _merged(kind, given.type if given else kind)
            given = dataclasses.field(default_factory=kind)  # type: ignore[arg-type]
        elif given is not None:
            kind = given.type
        rows.append((field.name, kind, given or field))
    rows += [(name, field.type, field) for name, field in mine.items()]
    return dataclasses.make_dataclass(f"Merged{theirs.__name__}", rows, bases=bases)


@functools.cache
def schema() -> Any:
    """Return the dataclass of all sections."""
    theirs = _theirs()
    return _merged(theirs, JobConfig, bases=(theirs,))


def from_values(kind: Any, values: dict[str, Any]) -> Any:
    """Return a section, or all of them, of checked values, others as by default."""
    found = dict(values)
    for field in dataclasses.fields(kind):
        if field.name in values and dataclasses.is_dataclass(field.type):
            found[field.name] = from_values(field.type, values[field.name])
    return kind(**found)


# Values by the schema's keys and types. TorchTitan's own parser prints boxes, and Python's names of
# types; a mistake here is one plain line.

Keys = dict[str, Any]
"""Values of a configuration's keys, by `section.key`."""


def known_values(
    values: dict[str, Any], schema: Any, path: str, mistakes: list[str], prefix: str = ""
) -> dict[str, Any]:
    """Return the values of a TOML whose keys are known, which else would silently keep their
    defaults, and whose types are their keys'; enter one line for each other. `path` is for them."""
    fields, found = {field.name: field.type for field in dataclasses.fields(schema)}, {}
    for name, value in values.items():
        key = prefix + name
        if name not in fields:
            hint = _proposal(key, [prefix + known for known in fields])
            mistakes.append(f"{key}: unknown key in {path}; {hint}")
        elif dataclasses.is_dataclass(fields[name]):
            if isinstance(value, dict):
                found[name] = known_values(value, fields[name], path, mistakes, f"{key}.")
            else:
                mistakes.append(f"{key} = {value!r} in {path}: must be a [{key}] section")
        elif has_type(value, fields[name]):
            found[name] = value
        else:
            mistakes.append(f"{key} = {value!r} in {path}: must be {_describe(fields[name])}")
    return found


def read_command_line(argv: list[str], schema: Any, mistakes: list[str]) -> Keys:
    """Return the values of the command line by key; of a key that is given twice, the last.

    Of `--section.key value` or `--section.key=value`, a switch alone; `-` equals `_`. Enter one
    line for each unknown option, value of another type, and word of no option.
    """
    known, values, words = dict(keys(schema)), Keys(), deque(argv)
    while words:
        word = words.popleft()
        option, equals, text = word.partition("=")
        key = option.removeprefix("--").replace("-", "_")
        section, dot, name = key.rpartition(".")
        switched = f"{section}{dot}{name.removeprefix('no_')}"
        is_alone = not words or words[0].startswith("--")
        if not word.startswith("--"):
            mistakes.append(
                f"{word!r}: neither an option (--section.key) nor the value of one; a switch has "
                "none (--section.key, --section.no-key), and a list is one word with commas (a,b)"
            )
        elif known.get(switched) is bool:
            values[switched] = switched == key
            if equals or not is_alone:
                text = text if equals else words.popleft()
                mistakes.append(
                    f"--{key} = {text!r}: it is a switch without a value; write --{switched} or "
                    f"--{section}.no-{name.removeprefix('no_')}"
                )
        elif key not in known:
            mistakes.append(f"--{key}: unknown option; {_proposal(key, known, '--')}")
            if not equals and not is_alone:
                words.popleft()
        elif not equals and is_alone:
            mistakes.append(f"--{key}: its value is missing; give {_describe(known[key])}")
        else:
            given = text if equals else words.popleft()
            try:
                values[key] = _parsed(given, known[key])
            except ValueError:
                mistakes.append(f"{key} = {given!r}: must be {_describe(known[key])}")
    return values


def _parsed(text: str, annotation: Any) -> Any:
    """Return the value of an annotated type that a text spells, or raise ValueError."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return arguments[[str(argument) for argument in arguments].index(text)]
    if origin is list:
        return text.split(",")
    if "," in text and any(typing.get_origin(one) is list for one in arguments):  # X | list[X]
        return text.split(",")
    if types.NoneType in arguments and text == "None":
        return None
    for argument in arguments:  # X | Y
        if argument is not types.NoneType:
            with contextlib.suppress(ValueError):
                return _parsed(text, argument)
    if arguments:
        raise ValueError
    return annotation(text)


def _describe(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string"}
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (list, tuple):
        return "a list"
    if arguments:
        return " or ".join(_describe(a) for a in arguments if a is not types.NoneType)
    return names.get(annotation, str(annotation))


def _proposal(key: str, known: Collection[str], dashes: str = "") -> str:
    """Propose a remedy for a key (`section.name`) or a section that is not among `known`."""
    section, _, name = key.rpartition(".")
    name = {"learning_rate": "lr", "max_steps": "steps"}.get(name, name)  # Hugging Face's
    found = [one for one in known if one.endswith(f".{name}")]
    found = [one for one in found if one.startswith("training.")] or found
    if len(found) != 1:
        found = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    if found:
        return f"did you mean {dashes}{found[0]}?"
    if section:
        return f"see the keys of [{section}]"
    return f"see --help; sections are {', '.join(sorted({one.partition('.')[0] for one in known}))}"


def command_line(keys: Keys) -> list[str]:
    """Write a setting as the command line's overrides."""
    switches = {True: ".", False: ".no-"}
    return [
        "--" + (key.replace(".", switches[v], 1) if isinstance(v, bool) else f"{key}={v}")
        for key, v in keys.items()
    ]
