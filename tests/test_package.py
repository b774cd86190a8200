"""The sdist has every file of the repository, and the wheel made from it all that a run needs;
`scripts/try_wheel.sh` installs it in an empty environment, and runs it."""

import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from tests.processes.runs import ROOT, said

LINK = "torchtitan_dp/train_configs"

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a Python process printed; AssertionError with all of it if it fails."""
    done = said(sys.executable, *command, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    listed = said("git", "ls-files").stdout
    if not listed:
        pytest.skip("not a checkout of git")
    return set(listed.splitlines())


@pytest.fixture(scope="module")
def built(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy, since setuptools writes into the tree."""
    copy, built = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("built")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (copy / name).symlink_to((ROOT / name).readlink())
        else:
            (copy / name).write_bytes((ROOT / name).read_bytes())
    sdist = "from setuptools import build_meta; build_meta.build_sdist({!r})"
    run("-c", sdist.format(str(built)), cwd=copy)
    (archive,) = built.glob("*.tar.gz")
    wheel = ("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", built, archive)
    run(*wheel, cwd=built)
    return built


def the(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def member(archive: zipfile.ZipFile, ending: str) -> bytes:
    return archive.read(next(n for n in archive.namelist() if n.endswith(ending)))


def test_the_sdist_has_every_file_of_the_repository(built: Path, tracked: set[str]) -> None:
    with tarfile.open(the(built, "*.tar.gz")) as archive:
        names = {m.name.split("/", 1)[1] for m in archive if m.isfile()}
    configs = {f"torchtitan_dp/{n}" for n in tracked if n.startswith("train_configs/")}
    made = {n for n in names if n in ("PKG-INFO", "setup.cfg") or ".egg-info/" in n}
    assert names - made == tracked - {LINK} | configs


def test_the_wheel_has_the_package_and_nothing_else(built: Path, tracked: set[str]) -> None:
    with zipfile.ZipFile(the(built, "*.whl")) as archive:
        names = {n for n in archive.namelist() if ".dist-info/" not in n}
        scripts = member(archive, "/entry_points.txt").decode()
    configs = {f"torchtitan_dp/{n}" for n in tracked if n.startswith("train_configs/")}
    assert names == {n for n in tracked if n.startswith("torchtitan_dp/")} - {LINK} | configs
    assert "torchtitan-dp = torchtitan_dp.__main__:main" in scripts


def test_the_metadata_is_valid(built: Path) -> None:
    with zipfile.ZipFile(the(built, "*.whl")) as archive:
        raw = member(archive, "/METADATA")
    metadata = Metadata.from_email(raw, validate=True)  # raises where PyPI would refuse it
    assert metadata.license_expression == "BSD-3-Clause"
    assert metadata.description_content_type == "text/markdown"


def test_shipped_configurations_are_found_wherever_pip_puts_the_package(
    built: Path, tmp_path: Path
) -> None:
    pip = ("-m", "pip", "install", "--no-deps", the(built, "*.whl"))
    target, user = tmp_path / "target", tmp_path / "user"
    run(*pip, "--target", target, cwd=tmp_path)
    run(*pip, "--prefix", user, "--ignore-installed", cwd=tmp_path)
    shipped = ", ".join(p.stem for p in sorted((ROOT / "train_configs").glob("*.toml")))
    for place in (target, the(user, "lib/python*/site-packages")):
        usage = run("-m", "torchtitan_dp", cwd=tmp_path, PYTHONPATH=str(place))
        assert usage.endswith(f"shipped configurations: {shipped}\n")
        where = "import torchtitan_dp as t; print(t.__file__)"
        assert Path(run("-c", where, cwd=tmp_path, PYTHONPATH=str(place))).is_relative_to(place)
