"""The wheel and the source archive: the same bits whenever they are built, and nothing extra."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import dpftrl

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
for builder in (WheelBuilder, SdistBuilder):
    print(*builder(sys.argv[1]).build(directory=sys.argv[2]))
"""


def build(source: Path, target: Path) -> dict[str, Path]:
    variables = {name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(source), str(target)],
        capture_output=True, text=True, check=True, env=variables,
    )  # fmt: skip
    files = [Path(line) for line in done.stdout.split() if line.endswith((".whl", ".gz"))]
    return {file.name: file for file in files}


def digests(files: dict[str, Path]) -> dict[str, str]:
    return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A copy of what is built, in another place and with other times."""
    folder = tmp_path_factory.mktemp("copy") / "elsewhere"
    for name in ("src", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "api", "_build")
        shutil.copytree(ROOT / name, folder / name, copy_function=shutil.copy, ignore=ignored)
    others = (ROOT / name for name in ("pyproject.toml", "LICENSE", "CITATION.cff", ".gitignore"))
    for file in (*ROOT.glob("*.md"), *others):
        shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> dict[str, Path]:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_two_builds_have_the_same_bits(package, copy, tmp_path):
    assert len(package) == 2
    assert digests(build(copy, tmp_path)) == digests(package)


def test_a_changed_source_is_noticed(package, copy, tmp_path):
    changed = copy / "src/dpftrl/errors.py"
    changed.write_text(changed.read_text() + "# changed\n")
    assert not set(digests(build(copy, tmp_path)).values()) & set(digests(package).values())


def test_the_wheel_holds_the_package_and_nothing_else(package):
    wheel = next(file for name, file in package.items() if name.endswith(".whl"))
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {
        str(file.relative_to(ROOT / "src"))
        for file in (ROOT / "src/dpftrl").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    about = {name for name in names if name.startswith(f"dpftrl-{dpftrl.__version__}.dist-info/")}
    assert names - about == sources
    assert "dpftrl/py.typed" in names
    assert wheel.stat().st_size < 2e6


def test_the_source_archive_builds_and_has_no_data(package):
    archive = next(file for name, file in package.items() if name.endswith(".tar.gz"))
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[1] for name in opened.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "src/dpftrl/__init__.py"} <= names
    assert not {name for name in names if name.startswith(("tests/", "benchmarks/", ".venv"))}


def test_the_metadata_is_true():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = {one.rpartition(" ")[2] for one in project["classifiers"] if ":: Python" in one}
    assert pythons == {"3.11", "Only"}
    citation = (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {dpftrl.__version__}\n" in citation
    assert f"## [{dpftrl.__version__}] - " in changelog
    extras = set(project["optional-dependencies"])
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import clean_install
    finally:
        sys.path.pop(0)
    assert extras == set(clean_install.TRIALS) - {""}
