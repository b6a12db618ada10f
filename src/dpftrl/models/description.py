"""What an exported language model says about itself: architecture, vocabulary, preprocessing.

With its description, a model can be used without the text that it was trained on. The description
is the file `model.json` of a run, which is sealed when the run is created, and part of the metadata
of an exported model. Everything in it is public: it is fixed before the first client is contacted.
"""

from typing import Any, Final, Literal, Self, final

import msgspec

from dpftrl.errors import InvalidInput
from dpftrl.tasks.load import cut_of
from dpftrl.tasks.task import Task
from dpftrl.tasks.vocabulary import BEGIN, CUTS, END, PAD, SPECIAL, UNKNOWN, Vocabulary

FORMAT: Final = "dpftrl model description"
VERSION: Final = 1
TOKENS: Final = {"pad": PAD, "begin": BEGIN, "end": END, "unknown": UNKNOWN}
# Tasks whose text is a file of the operator: its name is nobody else's business.
OWN_TEXT: Final = ("jsonl",)
MOST_WORDS: Final = 2_000_000
LARGEST_SIZE: Final = 2**31 - 1


@final
class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model by its name and its sizes.

    Attributes:
        name: The name of the model, such as `window`.
        sizes: All its sizes by name, without the vocabulary.
    """

    name: str
    sizes: dict[str, int | bool]


@final
class Preprocessing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a text becomes numbers.

    Attributes:
        cut: How a text is split into sentences and words; see `dpftrl.tasks.vocabulary.CUTS`.
        sentence_length: Largest number of words of a sentence in the training.
        tokens: The numbers of the special tokens. Words are numbered after them, in order.
    """

    cut: str
    sentence_length: int
    tokens: dict[str, int]


@final
class ModelDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The description of a model that predicts the next word.

    Attributes:
        task: The task that the model was trained on.
        source: Origin and license of the text, if it is a published data set.
        architecture: The model by its name and its sizes.
        preprocessing: How a text becomes numbers.
        words: The vocabulary, the most frequent word first. It comes from a public source.
        created_by: The program that wrote this.
    """

    format: Literal["dpftrl model description"] = FORMAT
    version: Literal[1] = VERSION
    kind: Literal["next word"] = "next word"
    task: str
    source: str | None = None
    architecture: Architecture
    preprocessing: Preprocessing
    words: tuple[str, ...]
    created_by: str

    def content(self) -> bytes:
        """The description as JSON."""
        return msgspec.json.encode(self)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the model."""
        return Vocabulary(self.words)

    def check(self) -> Self:
        """Refuse a description that no version of dpftrl writes.

        Raises:
            InvalidInput: A size, the vocabulary or the preprocessing makes no sense.
        """
        if not 1 <= len(self.words) <= MOST_WORDS:
            raise InvalidInput(f"it has {len(self.words):,} words")
        _ = self.vocabulary  # refuses words that occur twice or have spaces
        for name, size in self.architecture.sizes.items():
            if not 0 <= size <= LARGEST_SIZE:
                raise InvalidInput(f"the size {name!r:.40} is {size}")
        if self.preprocessing.cut not in CUTS:
            raise InvalidInput(f"it splits text by {self.preprocessing.cut!r:.40}")
        if self.preprocessing.tokens != TOKENS:
            raise InvalidInput("it has other special tokens")
        if not 1 <= self.preprocessing.sentence_length <= LARGEST_SIZE:
            raise InvalidInput(f"its sentences have {self.preprocessing.sentence_length} words")
        return self


def describe(task: Task, architecture: dict[str, Any], created_by: str) -> ModelDescription:
    """Describe a model that is trained on a task.

    Args:
        task: The task. Only its name, its vocabulary and the length of its sentences are used, and
            its source if the text is published.
        architecture: The name of the model and its sizes.
        created_by: The program, with its version.
    """
    sizes = {key: value for key, value in architecture.items() if key not in ("name", "vocabulary")}
    return ModelDescription(
        task=task.name,
        source=None if task.name in OWN_TEXT else task.source,
        architecture=Architecture(name=architecture["name"], sizes=sizes),
        preprocessing=Preprocessing(
            cut=cut_of(task.name),
            sentence_length=task.train.sentences.shape[1] - 1,
            tokens=TOKENS,
        ),
        words=task.vocabulary.words,
        created_by=created_by,
    )


class _Header(msgspec.Struct):
    format: str
    version: int


def read_description(content: str | bytes, source: str) -> ModelDescription:
    """Read the JSON of a description, and check everything in it.

    Args:
        content: The JSON.
        source: Where it comes from, for messages.

    Raises:
        InvalidInput: It is damaged, or a newer version of dpftrl wrote it.
    """
    try:
        header = msgspec.json.decode(content, type=_Header)
        if header.format == FORMAT and header.version > VERSION:
            raise InvalidInput(
                f"{source} has a description of version {header.version}, and this dpftrl reads "
                f"version {VERSION}; install a newer dpftrl"
            )
        description = msgspec.json.decode(content, type=ModelDescription)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{source}: its description cannot be read: {error}") from None
    try:
        return description.check()
    except InvalidInput as error:
        raise InvalidInput(f"{source}: its description makes no sense: {error}") from None


def size_of_vocabulary(description: ModelDescription) -> int:
    """Number of words with the special tokens."""
    return SPECIAL + len(description.words)
