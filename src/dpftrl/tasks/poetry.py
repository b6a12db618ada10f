"""The task `poetry`: classical Chinese poems. Tang poems are public text, Song poets are users.

The poems are fetched with npm (`Tarball`), and the encoded task is kept in a cache (`Store`).
"""

import contextlib
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Self, final
from unicodedata import normalize

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.cache import cache_folder, load_tensors, store_tensors
from dpftrl._internal.progress import Progress
from dpftrl._internal.storage import read_file
from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Encoder, Options, Task, Users, collect_users
from dpftrl.tasks.vocabulary import Vocabulary, cut_verse

# Part of the names of cached files. Increase this number when text is split or encoded differently.
FORMAT = 1

# Longest time for npm to fetch the tarball: half an hour, for slow connections.
MAX_SECONDS = 1800
# Largest tarball to read: 1 GiB.
MAX_BYTES = 2**30

VOCABULARY_SIZE = 4_000
# A line is nearly always a couplet of 5 + 5 or 7 + 7 characters; with END that is at most 15.
SENTENCE_LENGTH = 15

_FILE = re.compile(r"package/dist/quantangshi/poet\.(tang|song)\.(\d+)\.json")


class Poem(msgspec.Struct):
    """A poem. A paragraph is one line of it, mostly a couplet."""

    author: str
    paragraphs: list[str]


Poems = Sequence[Poem]


class Encoded(NamedTuple):
    """The encoded task, before users are held out."""

    vocabulary: Vocabulary
    users: Users
    public: NDArray[np.int32]


def load_poetry(options: Options) -> Task:
    """Load the task: characters are words, lines are sentences, the vocabulary is from Tang poems.

    Guarantees:
        Nobody is both public and a user: an author's name that occurs in both dynasties is not a
        user.

    Raises:
        InvalidInput: The tarball cannot be fetched, or has another version.
    """
    content = None if options.path is None else TARBALL.read(options.path)
    store = Store.of(cache_folder(), "poetry", options, TARBALL.sha256)
    encoded = store.load()
    if encoded is None:
        if content is None:
            content = TARBALL.read_or_fetch(cache_folder(), options.on_progress)
        tang, song = read_poems(content, options.on_progress)
        encoded = _encode(tang, song, options)
        store.save(encoded)
    source = f"{TARBALL.package} {TARBALL.version} of npm, MIT: Tang poems public, Song poets users"
    users = options.split(encoded.users)
    return Task("poetry", source, encoded.vocabulary, *users, encoded.public)


def read_poems(tarball: bytes, on_progress: Progress) -> tuple[Poems, Poems]:
    """Return the Tang poems and the Song poems, in the order of their files' numbers."""
    decoder = msgspec.json.Decoder(list[Poem])
    files: dict[str, dict[int, list[Poem]]] = {"tang": {}, "song": {}}
    packed = BytesIO(tarball)
    with tarfile.open(fileobj=packed, mode="r:gz") as members:
        for member in members:
            match, content = _FILE.fullmatch(member.name), members.extractfile(member)
            if match and content:
                dynasty, number = match[1], int(match[2])
                files[dynasty][number] = decoder.decode(content.read())
                on_progress(packed.tell() / len(tarball), "reading the poems")
    tang, song = (
        [poem for _, poems in sorted(numbered.items()) for poem in poems]
        for numbered in files.values()
    )
    return tang, song


def _encode(tang: Poems, song: Poems, options: Options) -> Encoded:
    """Encode the Tang poems as public text, and the Song poems by user."""
    options.on_progress(None, "encoding the poems")
    public = [line for poem in tang for line in poem.paragraphs]
    vocabulary = options.vocabulary or Vocabulary.of_public_text(
        _letters(public), options.vocabulary_size
    )
    encoder = Encoder(vocabulary, cut_verse, options.sentence_length)
    users = collect_users(_users(tang, song), encoder, options.sentences_per_user)
    return Encoded(vocabulary, users, encoder.encode(public))


def _letters(lines: Iterable[str]) -> Iterator[str]:
    """Yield the characters of lines, without the squares that stand for lost characters."""
    return (word for line in lines for words in cut_verse(line) for word in words if word.isalpha())


def _users(tang: Poems, song: Poems) -> Iterator[tuple[str, str]]:
    """Yield the author and the text of each line by a Song poet who is not a Tang poet too."""
    public_names = {normalize("NFC", poem.author) for poem in tang}
    for poem in song:
        name = normalize("NFC", poem.author)
        # A name with a lost or described character may belong to several people: leave it out.
        if name.isalpha() and name not in public_names:
            for line in poem.paragraphs:
                yield name, line


@final
@dataclass(frozen=True)
class Store:
    """The place of one encoded task in the cache.

    Attributes:
        folder: Folder of the cache.
        key: Name of the entry.
    """

    folder: Path
    key: str

    @classmethod
    def of(cls, folder: Path, name: str, options: Options, data_sha256: str) -> Self:
        """Return the place of a task; the key depends only on options that change the encoding."""
        words = options.vocabulary.sha256 if options.vocabulary else options.vocabulary_size
        parts = (FORMAT, data_sha256, words, options.sentence_length, options.sentences_per_user)
        return cls(folder, f"{name}-{sha256(msgspec.json.encode(parts)).hexdigest()[:32]}")

    def load(self) -> Encoded | None:
        """Return the cached task; None if there is none, or if it is damaged."""
        tensors: dict[str, Any] = load_tensors(self.folder, self.key) or {}
        digest = tensors.pop("sha256", None)
        if digest is None or digest.tobytes() != _digest(tensors).tobytes():
            return None
        users = Users(_strings(tensors["names"]), tensors["sentences"], tensors["offsets"])
        return Encoded(Vocabulary(_strings(tensors["words"])), users, tensors["public"])

    def save(self, encoded: Encoded) -> None:
        """Store the task in the cache; do nothing if the cache cannot be written."""
        users = encoded.users
        tensors: dict[str, NDArray[Any]] = {
            "names": _bytes(users.names),
            "sentences": users.sentences,
            "offsets": users.offsets,
            "words": _bytes(encoded.vocabulary.words),
            "public": encoded.public,
        }
        tensors["sha256"] = _digest(tensors)
        store_tensors(self.folder, self.key, tensors)


def _digest(tensors: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Return the SHA-256 of all tensors, which detects a damaged cache."""
    digest = sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def _bytes(strings: tuple[str, ...]) -> NDArray[np.uint8]:
    """Return strings as bytes, separated by line breaks, which names and words do not have."""
    return np.frombuffer("\n".join(strings).encode(), dtype=np.uint8)


def _strings(content: NDArray[np.uint8]) -> tuple[str, ...]:
    """Return the strings that `_bytes` joined."""
    return tuple(content.tobytes().decode().split("\n"))


@final
@dataclass(frozen=True)
class Tarball:
    """The tarball of one version of an npm package, identified by its SHA-256.

    Attributes:
        package: Name of the package.
        version: Version of the package.
        sha256: SHA-256 of the tarball.
    """

    package: str
    version: str
    sha256: str

    @property
    def spec(self) -> str:
        """Package and version, as npm writes them."""
        return f"{self.package}@{self.version}"

    @property
    def file_name(self) -> str:
        """File name that npm gives to the tarball."""
        return f"{self.package}-{self.version}.tgz"

    def read(self, path: Path) -> bytes:
        """Return the bytes of a tarball; refuse any other file."""
        content = read_file(path, MAX_BYTES)
        if (digest := sha256(content).hexdigest()) != self.sha256:
            raise InvalidInput(
                f"{path} is not {self.spec}: its SHA-256 is {digest}, not "
                f"{self.sha256}; give path= to the tarball of exactly that version"
            )
        return content

    def read_or_fetch(self, folder: Path, on_progress: Progress) -> bytes:
        """Return the bytes of the tarball in a folder; fetch it with npm first if it is missing."""
        target = folder / self.file_name
        with contextlib.suppress(InvalidInput):
            return self.read(target)
        on_progress(None, f"fetching {self.spec}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".npm-") as temporary:
                self._fetch(Path(temporary))
                content = self.read(Path(temporary) / self.file_name)
                (Path(temporary) / self.file_name).replace(target)
        except OSError as error:
            raise InvalidInput(f"{folder} cannot be written: {error.strerror}") from None
        return content

    def _fetch(self, folder: Path) -> None:
        """Fetch the tarball into an empty folder."""
        npm = shutil.which("npm")
        if npm is None:
            raise self._failed("npm was not found")
        command = [npm, "pack", "--ignore-scripts", self.spec]
        try:
            # In an empty folder no project's npm settings apply.
            result = subprocess.run(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=MAX_SECONDS,
                check=False,
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError) as error:
            raise self._failed(f"npm failed with {type(error).__name__}") from None
        if result.returncode or not (folder / self.file_name).exists():
            # Show npm's error code only: the rest of its output is long, and names hosts.
            code = re.search(r"\bcode (\w+)", result.stderr)
            raise self._failed(
                f"npm failed with {code[1] if code else f'code {result.returncode}'}"
            )

    def _failed(self, reason: str) -> InvalidInput:
        return InvalidInput(
            f"{self.spec} could not be fetched: {reason}; run `npm pack {self.spec}` on a machine "
            "where npm works, and give path= to the tarball"
        )


TARBALL = Tarball(
    "chinese-poetry", "2.0.1", "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86"
)
