"""Test this checkout with another torch and Python; a row of docs/install.md gets the result.

    python scripts/versions.py TORCH PYTHON [pytest arguments]
    python scripts/versions.py 2.15.0 3.13                # the quick tests, and the kernels
    python scripts/versions.py 2.15.0 /usr/bin/python3.14 tests/distributed tests/gradients

uv (https://docs.astral.sh/uv/) makes the environment, which is removed afterwards: constraints.txt,
but for torch and what comes with it. PyPI's torch is built for CUDA; UV_INDEX or UV_FIND_LINKS lead
to another build. A second result of the same tests replaces the first. A new release enters
`torchtitan_dp.base.process.RELEASES` once its row has no failure.
"""

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "install.md"
TABLE = re.compile(r"(?<=<!-- made by scripts/versions.py -->\n)(.*\n.*\n)((?:\|.*\n)*)")
KERNELS = ("tests/kernels",)
WITH_TORCH = re.compile(r"(torch|triton|nvidia-.*|cuda-.*|setuptools)==")
VERSIONS = """
import platform, torch
from importlib.metadata import version
print(torch.__version__, platform.python_version(), version("transformers"), sep=" | ")
"""


def main(torch: str, python: str, *arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = make_environment(Path(folder), torch, python)
        versions = subprocess.check_output([path, "-c", VERSIONS], text=True).strip()
        for tests in (arguments,) if arguments else ((), KERNELS):
            counts = run_tests(path, tests)
            failed = counts["failed"] + counts["error"] + counts["errors"]
            named = " ".join(tests) or "quick"
            row = f"| {versions} | {named} | {counts['passed']:,} | {failed} |\n"
            PAGE.write_text(with_row(PAGE.read_text(), row))
            print(row, end="")


def make_environment(folder: Path, torch: str, python: str) -> Path:
    """Make an environment in a folder; return its Python."""
    pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(pin for pin in pins if not WITH_TORCH.match(pin)))
    path = folder / "bin" / "python"
    subprocess.check_call(["uv", "venv", "-q", "--seed", "--allow-existing", "-p", python, folder])
    install = ["uv", "pip", "install", "-q", "--python", path, "-c", constraints]
    subprocess.check_call([*install, f"torch=={torch}", "-e", f"{ROOT}[test]"])
    return path


def run_tests(python: Path, arguments: Sequence[str]) -> Counter[str]:
    """Run the tests; return how many passed, failed and so on, by pytest's last line."""
    script = ROOT / "scripts" / "run_tests.sh"
    command = ["env", f"TORCHTITAN_DP_PYTHON={python}", script, *arguments]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line
    counts = Counter({word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)})
    assert counts["passed"], f"nothing passed: {last}"
    return counts


def with_row(page: str, row: str) -> str:
    """Return the page with one more row in its table, in the place of one of the same tests."""
    found = TABLE.search(page)
    assert found, "docs/install.md has no table of versions"
    rows = {tests_of(one): one for one in [*found[2].splitlines(keepends=True), row]}
    in_order = "".join(rows[tests] for tests in sorted(rows))
    return page[: found.start(2)] + in_order + page[found.end(2) :]


def tests_of(row: str) -> tuple[str, ...]:
    """Return torch with its build, the Python's first two numbers, and the tests of a row."""
    _, torch, python, _, tests, *_ = (cell.strip() for cell in row.split("|"))
    return torch, python.rpartition(".")[0], tests


if __name__ == "__main__":
    main(*sys.argv[1:])
