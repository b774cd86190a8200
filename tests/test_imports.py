"""The import rule: a module takes from its own room and from floors below, and there is no circle.

The floors are those of docs/architecture.md. Imports within functions and under `TYPE_CHECKING`
count too: a name that is needed from above is a sign that something lies in the wrong room.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import forks
from tests.processes.runs import said

PACKAGE = Path(__file__).parents[1] / "torchtitan_dp"
FLOORS = [
    {"base", "privacy"},
    {"distributed", "data", "gradients", "ledger", "process"},
    {"config"},
    {"models"},
    {"checkpoint"},
    {f"selfcheck.{module}" for module in ("__init__", "reference", "small", "proof")},
    {"train"},
    {"plan", "audit", "release", "tune", "selfcheck"},
    {"report", "launch", "__main__"},
]
WITHOUT_TORCHTITAN = {"privacy", "base.process", "data", "gradients", "ledger"}
WITHOUT_COLLECTIVES = {"privacy", "base.process", "config", "ledger"}


def modules() -> dict[str, Path]:
    """Dotted names below the package -> files; a package's face is `room.__init__`."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {".".join(f.relative_to(PACKAGE).with_suffix("").parts): f for f in files}


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def imported(path: Path) -> Iterator[str]:
    """Return the dotted names that a file imports, wherever in it; names of modules are whole."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, known: dict[str, Path]) -> str | None:
    """Return the module of this package that an imported name lies in, if it is one."""
    if not name.startswith("torchtitan_dp."):
        return None
    parts = name.split(".")[1:]
    while parts:
        for found in (".".join(parts), ".".join([*parts, "__init__"])):
            if found in known:
                return found
        parts.pop()
    return "__init__"


def floor(module: str) -> int:
    """Return the floor of a module, from 0; its own entry goes before its room's."""
    for name in (module, module.split(".")[0]):
        for number, rooms in enumerate(FLOORS):
            if name in rooms:
                return number
    raise AssertionError(f"torchtitan_dp/{module}: it lies in no room of FLOORS")


def edges() -> dict[str, set[str]]:
    """Return which modules of the package each imports, itself left out."""
    known = modules()
    found = {
        module: {target for name in imported(path) if (target := within(name, known))} - {module}
        for module, path in known.items()
    }
    del found["__init__"]
    return found


def test_nothing_imports_upward() -> None:
    wrong = []
    for module, targets in edges().items():
        for target in targets - {"__init__"}:
            same_room = module.split(".")[0] == target.split(".")[0]
            if floor(target) > floor(module) or (floor(target) == floor(module) and not same_room):
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_there_is_no_circle() -> None:
    left = edges()
    while free := {m for m, targets in left.items() if not targets & left.keys()}:
        left = {m: targets for m, targets in left.items() if m not in free}
    assert left == {}


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        (WITHOUT_TORCHTITAN, "torchtitan"),
        (WITHOUT_COLLECTIVES, "torch.distributed"),
        (WITHOUT_COLLECTIVES, "torchtitan_dp.base.torch_private"),  # which imports it
    ],
)
def test_rooms_are_free_of(rooms: set[str], forbidden: str) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in modules().items()
        if rooms & {module, module.split(".")[0]}
        for name in imported(path)
        if f"{name}.".startswith(f"{forbidden}.")
    ]
    assert wrong == []


def test_privacy_data_and_config_load_no_torchtitan() -> None:
    forks.need()
    rooms = ("privacy.", "data.")
    found = (m for m in modules() if m.startswith(rooms) and m != "data.__main__")
    names = [*(f"torchtitan_dp.{module}" for module in found), "torchtitan_dp.config"]
    script = "import importlib, sys\n"
    script += f"[importlib.import_module(name) for name in {names!r}]\n"
    script += "print([name for name in sys.modules if name.split('.')[0] == 'torchtitan'])"
    assert said(sys.executable, "-c", script).stdout.strip() == "[]"


def test_torchtitan_is_imported_where_it_works_without_a_gpu() -> None:
    """Whichever module comes first: it, or its room's face, begins with `distributed`."""
    shim, wrong = "import torchtitan_dp.distributed  #", []
    for module, path in modules().items():
        source, room = path.read_text(), PACKAGE / module.split(".")[0] / "__init__.py"
        face = room.read_text() if room.exists() else ""
        first = re.search(r"^(from|import) torchtitan[. ]", source, re.M)
        if first and not module.startswith("distributed."):
            wrong += [module] * (shim not in source[: first.start()] and shim not in face)
    assert wrong == []


@pytest.mark.parametrize("folder", ["scripts", "tests"])
def test_every_name_that_is_imported_from_the_package_exists(folder):
    """Scripts import within functions, which no fast test calls."""
    files = {"torchtitan_dp." + name.removesuffix(".__init__"): f for name, f in modules().items()}
    missing = []
    for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and f"{node.module}".startswith("torchtitan_dp."):
                file = files.get(f"{node.module}")
                has = names_in(file) if file else set()
                missing += [
                    f"{path.name}: {name}"
                    for name in (f"{node.module}.{alias.name}" for alias in node.names)
                    if name.rpartition(".")[2] not in has and name not in files
                ]
    assert missing == []


def names_in(path: Path) -> set[str]:
    """Return the names that a module defines, or imports, at its top."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return found
