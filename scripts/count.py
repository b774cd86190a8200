"""Count the package: its files, lines, lines of code, floors of a room, and files that know a word.

    python scripts/count.py [--room data] [--word projections --word max_grad_norm]

A line of code has a token other than a comment, and is part of neither a docstring nor an import;
imports have a column of their own. A room has as many floors as the longest chain of imports among
its own modules is long.
"""

import argparse
import ast
import functools
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "torchtitan_dp"
BLANK = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines of code and of imports."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines(source)


def docstring_lines(source: str) -> set[int]:
    """Return the numbers of the lines of all strings that are statements by themselves."""
    return {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def imports(source: str) -> dict[str, int]:
    """Return the modules that are imported anywhere, each with the lines that its imports take."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        size = (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 0) + 1
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for number, name in enumerate(names):
            found[name] = found.get(name, 0) + (size if number == 0 else 0)
    return found


def floors(room: Path) -> list[list[str]]:
    """Return a room's modules by floor: each imports modules of the floors before it alone."""
    sources = {path.stem: path.read_text() for path in room.glob("*.py") if path.stem != "__init__"}
    prefix = f"{PACKAGE}.{room.name}."
    below = {
        name: {m for m in sources if f"{prefix}{m}" in imports(source)} - {name}
        for name, source in sources.items()
    }

    @functools.cache
    def floor(name: str) -> int:
        return max((floor(other) + 1 for other in below[name]), default=0)

    return [
        sorted(name for name in sources if floor(name) == number)
        for number in range(max(map(floor, sources), default=-1) + 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", action="append", help="rooms to draw by floors (default: data)")
    parser.add_argument("--word", action="append", help="words to look for")
    arguments = parser.parse_args()
    package = ROOT / PACKAGE
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    rooms: dict[str, list[int]] = {}
    for path, source in sources.items():
        room = path.relative_to(package).parts[0] if path.parent != package else "(top)"
        imported = sum(imports(source).values())
        counted = (1, source.count("\n"), len(code_lines(source)) - imported, imported)
        rooms[room] = [a + b for a, b in zip(rooms.get(room, (0,) * 4), counted, strict=True)]
    rooms["all"] = [sum(column) for column in zip(*rooms.values(), strict=True)]
    print(f"{'room':14}{'files':>7}{'lines':>8}{'code':>8}{'imports':>9}")
    for room, numbers in sorted(rooms.items(), key=lambda item: item[1][1], reverse=True):
        print(f"{room:14}{numbers[0]:7}{numbers[1]:8}{numbers[2]:8}{numbers[3]:9}")
    for room in arguments.room or ["data"]:
        levels = floors(package / room)
        print(f"\n{room}/: {sum(map(len, levels))} modules on {len(levels)} floors")
        for number, names in enumerate(levels):
            print(f"  {number}: {', '.join(names)}")
    print()
    for word in arguments.word or ["projections", "max_grad_norm"]:
        found = [source for source in sources.values() if re.search(rf"\b{word}\b", source)]
        times = sum(len(re.findall(rf"\b{word}\b", source)) for source in found)
        print(f"{word}: {len(found)} files, {times} times")


if __name__ == "__main__":
    main()
