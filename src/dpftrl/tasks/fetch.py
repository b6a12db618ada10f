"""Packages of npm that hold text: fetched once, and checked every time they are read."""

import contextlib
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import final

from dpftrl.errors import InvalidInput
from dpftrl.storage import read_file
from dpftrl.tasks.task import Report

MOST_SECONDS = 1800
MOST_BYTES = 2**30


@final
@dataclass(frozen=True)
class Tarball:
    """A package of npm, down to the last bit.

    Attributes:
        package: Its name.
        version: The one version that is meant.
        sha256: Of the tarball.
    """

    package: str
    version: str
    sha256: str

    @property
    def spec(self) -> str:
        """What to ask npm for."""
        return f"{self.package}@{self.version}"

    @property
    def file_name(self) -> str:
        """What npm calls it."""
        return f"{self.package}-{self.version}.tgz"

    def read(self, path: Path) -> bytes:
        """The bytes, refused unless they are the right ones."""
        content = read_file(path, MOST_BYTES)
        if (found := sha256(content).hexdigest()) != self.sha256:
            raise InvalidInput(
                f"{path} is not {self.spec}: its SHA-256 is {found}, not "
                f"{self.sha256}; give path= to the tarball of that very version"
            )
        return content

    def read_or_fetch(self, folder: Path, report: Report) -> bytes:
        """The bytes from a folder, where they are put first if they are not there."""
        target = folder / self.file_name
        with contextlib.suppress(InvalidInput):
            return self.read(target)
        report(None, f"fetching {self.spec}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".npm-") as place:
                self._pack(Path(place))
                content = self.read(Path(place) / self.file_name)
                (Path(place) / self.file_name).replace(target)
        except OSError as error:
            raise InvalidInput(f"{folder} cannot be written: {error.strerror}") from None
        return content

    def _pack(self, place: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise self._failed("npm was not found")
        command = [npm, "pack", "--ignore-scripts", self.spec]
        try:
            # In an empty folder, so that no project's settings are in the way.
            done = subprocess.run(
                command,
                cwd=place,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
            raise self._failed(f"npm failed with {type(error).__name__}") from None
        if done.returncode or not (place / self.file_name).exists():
            # Only npm's word for it: the rest of what it prints is long, and names hosts.
            found = re.search(r"\bcode (\w+)", done.stderr)
            raise self._failed(
                f"npm failed with {found[1] if found else f'code {done.returncode}'}"
            )

    def _failed(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self.spec} could not be fetched: {why}; run `npm pack {self.spec}` where that "
            "works, and give path= to the tarball"
        )
