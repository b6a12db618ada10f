"""Classical Chinese poems: Tang poems are public text, Song poets are users."""

import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from unicodedata import normalize

import msgspec

from dpftrl.cache import cache_folder
from dpftrl.tasks.cutting import cut_verse
from dpftrl.tasks.encoding import Encoder
from dpftrl.tasks.fetch import Tarball
from dpftrl.tasks.store import Encoded, Store
from dpftrl.tasks.task import Options, Report, Task
from dpftrl.tasks.users import collect_users
from dpftrl.tasks.vocabulary import Vocabulary

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
