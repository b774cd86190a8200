"""Count the package by rooms: files, lines, lines of code, lines of imports.

A line of code has a token other than a comment, and is part of neither a docstring nor an import.
"""

import ast
import io
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


def import_lines(source: str) -> int:
    """Return the number of lines that imports take."""
    found = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Import | ast.ImportFrom))
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in found)


def main() -> None:
    package = ROOT / PACKAGE
    sources = {path: path.read_text() for path in sorted(package.rglob("*.py"))}
    rooms: dict[str, list[int]] = {}
    for path, source in sources.items():
        room = path.relative_to(package).parts[0] if path.parent != package else "(top)"
        imported = import_lines(source)
        counted = (1, source.count("\n"), len(code_lines(source)) - imported, imported)
        rooms[room] = [a + b for a, b in zip(rooms.get(room, (0,) * 4), counted, strict=True)]
    rooms["all"] = [sum(column) for column in zip(*rooms.values(), strict=True)]
    print(f"{'room':14}{'files':>7}{'lines':>8}{'code':>8}{'imports':>9}")
    for room, numbers in sorted(rooms.items(), key=lambda item: item[1][1], reverse=True):
        print(f"{room:14}{numbers[0]:7}{numbers[1]:8}{numbers[2]:8}{numbers[3]:9}")


if __name__ == "__main__":
    main()
