"""Canary sentences: artificial clients that hold an unusual sentence, for black-box audits.

A canary of this kind is a client whose text is one sentence of random words, repeated as often as a
client may have sentences. It trains on the model of the round like a client, and its update is
clipped like an update. It takes part in every `min_sep`-th round, and canaries begin in different
rounds. Like the other kind (`dpftrl.auditing.canaries`), it is included or not by a secret fair
coin, is added to the sum after the updates of clients, takes nobody's place, and depends on
nobody's data. So it changes nobody's guarantee.

The attack sees the released model and the model that the run started from, and nothing else. The
score of a sentence is its loss under the start model minus its loss under the released model: how
much of it the model has learned. Of all sentences, the quarter with the highest scores is guessed
to have been included, and the quarter with the lowest scores not. About the others there is no
guess, so the number of guesses is fixed in advance.

Guarantees:
    The coin of one canary, given the coins of all others, is protected like the participation of
    one client: the updates of one canary keep to the planned participation and to the clip norm.
    That is all that the general test of `dpftrl.auditing.one_run` needs. The test for independent
    noise does not apply, because the updates of two canaries are not orthogonal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Vector
from dpftrl._internal.checks import whole_number
from dpftrl._internal.storage import read_json
from dpftrl.auditing.canaries import PUBLIC, SecretFile
from dpftrl.auditing.one_run import Guesses
from dpftrl.errors import InvalidInput
from dpftrl.federated import Layout, RunFolder
from dpftrl.federated.store.run_store import released_model
from dpftrl.participation import Participation
from dpftrl.tasks.task import Users
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, SPECIAL

if TYPE_CHECKING:
    from dpftrl.tasks.language_model import Lstm, Window

# Words of a canary sentence, or fewer if sentences of the task are shorter.
WORDS: Final = 10
# Of so many canaries, one is guessed to have been included, and one not.
GUESS_ONE_OF: Final = 4


@final
class SentenceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`canaries.json` of a run with canary sentences: what may be published.

    Attributes:
        canaries: Number of canaries.
        rounds: Number of planned rounds.
        min_sep: A canary takes part in every so many rounds.
        max_participations: Largest number of participations of a canary.
        words: Number of words per sentence.
        copies: How often a canary has its sentence.
        sentence_length: Largest number of words of a sentence in the training.
        model: The name of the model and its sizes.
    """

    format: Literal["dpftrl canaries"] = "dpftrl canaries"
    version: Literal[1] = 1
    kind: Literal["sentences"] = "sentences"
    canaries: int
    rounds: int
    min_sep: int
    max_participations: int
    words: int
    copies: int
    sentence_length: int
    model: dict[str, str | int]

    def encoded(self) -> bytes:
        """The content of the file."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    def rounds_of(self, canary: int) -> range:
        """The rounds in which a canary takes part, if it is included.

        If it may not take part in all of its turns, it takes the last ones, which a model remembers
        best.
        """
        first = canary % min(self.min_sep, self.rounds)
        turns = range(first, self.rounds, self.min_sep)
        return turns[-self.max_participations :]

    def sentences(self, secret: SecretFile) -> NDArray[np.int32]:
        """The sentence of every canary, in the form of `dpftrl.tasks.Users.sentences`."""
        vocabulary = int(self.model["vocabulary"])
        rows = np.full((self.canaries, self.sentence_length + 1), PAD, np.int32)
        words = secret.generator().integers(SPECIAL, vocabulary, (self.canaries, self.words))
        rows[:, 0], rows[:, 1 : self.words + 1] = BEGIN, words
        if self.words < self.sentence_length:
            rows[:, self.words + 1] = END
        return rows

    def users(self, secret: SecretFile) -> Users:
        """The canaries as clients, in their order, each with all copies of its sentence."""
        names = tuple(f"canary-{number:09d}" for number in range(self.canaries))
        sentences = np.repeat(self.sentences(secret), self.copies, axis=0)
        return Users(names, sentences, np.arange(self.canaries + 1, dtype=np.int64) * self.copies)

    def network(self) -> "Lstm | Window":
        """The model that the run trains."""
        try:
            from dpftrl.tasks.language_model import language_model
        except ImportError:
            raise InvalidInput(
                "canary sentences need extra packages such as JAX: pip install 'dpftrl[train]'"
            ) from None
        sizes = {name: int(size) for name, size in self.model.items() if name != "name"}
        return language_model(str(self.model["name"]), **sizes)


def sentence_file(
    canaries: int,
    participation: Participation,
    model: Mapping[str, Any],
    *,
    sentence_length: int,
    copies: int,
) -> SentenceFile:
    """Describe the canaries of a new run.

    Args:
        canaries: Number of canaries; at least 4, because a quarter of them is guessed.
        participation: The planned participation.
        model: The name of the model and its sizes (`architecture` of `dpftrl.tasks`).
        sentence_length: Largest number of words of a sentence in the training.
        copies: How often a canary has its sentence.
    """
    return SentenceFile(
        canaries=whole_number("canaries", canaries, at_least=GUESS_ONE_OF),
        rounds=participation.rounds,
        min_sep=participation.min_sep,
        max_participations=participation.max_participations,
        words=min(WORDS, sentence_length),
        copies=whole_number("copies", copies),
        sentence_length=sentence_length,
        model=dict(model),
    )


def read_sentence_file(folder: Path) -> SentenceFile:
    """`canaries.json` of a run with canary sentences."""
    return read_json(folder / PUBLIC, SentenceFile, "canary sentences")


@final
class SentenceScores(NamedTuple):
    """What the attack on canary sentences computes.

    Attributes:
        rounds: Number of rounds of the released model.
        scores: By how much the loss of each sentence fell, compared with the median sentence.
    """

    rounds: int
    scores: Vector


def sentence_scores(folder: Path, file: SentenceFile, secret: SecretFile) -> SentenceScores:
    """Score every sentence by how much the released model of a run has learned of it.

    Raises:
        InvalidInput: No round was released, or the model diverged.
        UnsafeState: A sealed file or the model was changed.
    """
    rounds, vector = released_model(RunFolder(folder))
    if not rounds:
        raise InvalidInput(f"{folder} has released nothing yet; train at least one round")
    model = file.network()
    from dpftrl.tasks.language_model import sentence_losses

    layout = Layout.of(model.init(seed=0))
    if vector.shape != (layout.size,) or len(secret.start_losses) != file.canaries:
        raise InvalidInput(f"{folder / PUBLIC} does not fit the model or the secrets of the run")
    losses = sentence_losses(model, layout.arrays(vector), file.sentences(secret))
    learned = np.array(secret.start_losses) - losses
    if not np.isfinite(learned).all():
        raise InvalidInput(f"the model of {folder} diverged: a sentence has no finite loss")
    return SentenceScores(rounds, learned - np.median(learned))


def guess_extremes(scores: Vector, included: NDArray[np.bool_]) -> Guesses:
    """Guess that the quarter with the highest scores was included, and the lowest was not.

    Args:
        scores: The score of each canary.
        included: Whether each canary was included.
    """
    order = np.argsort(scores, kind="stable")
    each = len(scores) // GUESS_ONE_OF
    lowest, highest = order[:each], order[len(order) - each :]
    correct = int(np.count_nonzero(~included[lowest]) + np.count_nonzero(included[highest]))
    return Guesses(len(scores), 2 * each, correct)
