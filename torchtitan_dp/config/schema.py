"""The dataclass of all sections, TorchTitan's with those of this project, without PyTorch.

TorchTitan's own way to it, `ConfigManager`, imports PyTorch and the whole of TorchTitan: seconds
before a wrong key could be named. Its schema is one file of dataclasses, which is read here alone;
`tests/test_seams.py` compares it with that of the package.
"""

import dataclasses
import functools
import importlib
import importlib.util
import logging
import os
import sys
import types
from typing import Any

from torchtitan_dp.config import JobConfig


class _Later(types.ModuleType):
    """A module that is imported when an attribute of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def _theirs() -> Any:
    """Return TorchTitan's `JobConfig`, of its file alone. Of what that imports it uses the root
    logger, and `torch.distributed` once a configuration is logged."""
    package = importlib.util.find_spec("torchtitan")
    assert package is not None, "it is a dependency"
    assert package.submodule_search_locations is not None, "it is a package"
    path = os.path.join(package.submodule_search_locations[0], "config", "job_config.py")
    spec = importlib.util.spec_from_file_location("torchtitan.config.job_config", path)
    assert spec is not None
    assert spec.loader is not None
    module, log = importlib.util.module_from_spec(spec), types.ModuleType("logging")
    log.logger = logging.getLogger()  # type: ignore[attr-defined]
    stand_ins = {name: types.ModuleType(name) for name in ("torchtitan", "torchtitan.tools")}
    stand_ins |= {"torchtitan.tools.logging": log, "torch": _Later("torch"), spec.name: module}
    kept = {name: sys.modules.pop(name) for name in stand_ins if name in sys.modules}
    sys.modules.update(stand_ins)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(kept)
    return module.JobConfig


def _merged(theirs: Any, ours: Any, bases: tuple[type, ...] = ()) -> Any:
    """Return a dataclass of the fields of both, sections merged; those of `ours` come first.

    Sections have no bases: assertions of TorchTitan's would be tracebacks, and `supported` refuses
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
    types_of = {field.name: field.type for field in dataclasses.fields(kind)}
    return kind(
        **{
            name: from_values(types_of[name], value)
            if dataclasses.is_dataclass(types_of[name])
            else value
            for name, value in values.items()
        }
    )
