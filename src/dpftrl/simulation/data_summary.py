"""What an operator must know about the text before trusting an accuracy. It is private.

The summary is computed from the users' text without any noise. It is for the operator's terminal
and for the folder `private/` of a run, and must not be in a statement, a model card or a metric.
"""

import math
from pathlib import Path
from typing import Final, Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import replace_file
from dpftrl.plan import Plan
from dpftrl.tasks import UNKNOWN, Task, Users, Vocabulary

# The file in the folder `private/` of a run.
SUMMARY_FILE: Final = "data_summary.json"
# With a larger share of unknown words, an accuracy says little about the text: there is a warning.
MOST_UNKNOWN: Final = 0.4
# There is a warning if the noise in the model is above this share of how far the clients could move
# the model if all of them agreed in every round. Real clients agree far less.
MOST_NOISE: Final = 0.5
# With fewer people to train on, or fewer held-out people, there is a warning: the noise hides what
# so few people have in common, and an accuracy on so few people is mostly chance.
FEW_PEOPLE: Final = 100
FEW_HELDOUT_PEOPLE: Final = 10
# A vocabulary that covers less than this of general English is not an English one.
LEAST_ENGLISH: Final = 0.1


@final
class DataSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Statistics of the users' text, and of the noise that the plan adds. Never publish them.

    Attributes:
        people: Users to train on.
        heldout_people: Users to evaluate on.
        words: Words of the users to train on, after cutting sentences to their length.
        heldout_words: Words of the users to evaluate on.
        vocabulary: Number of words that the model knows.
        unknown_share: Share of the words to train on that are not in the vocabulary.
        heldout_unknown_share: The same for the words to evaluate on.
        english_share: Share of general English that the vocabulary covers, from public frequencies;
            None if it is not an English vocabulary.
        baseline: Accuracy of always guessing the most common word, on held-out words that are in
            the vocabulary.
        baseline_of_all_words: The same, on all held-out words.
        noise_to_signal: Norm of the noise in the final model, divided by how far the clients could
            move it at most.
    """

    format: Literal["dpftrl data summary"] = "dpftrl data summary"
    version: Literal[1] = 1
    people: int
    heldout_people: int
    words: int
    heldout_words: int
    vocabulary: int
    unknown_share: float
    heldout_unknown_share: float
    english_share: float | None
    baseline: float
    baseline_of_all_words: float
    noise_to_signal: float

    @classmethod
    def of(cls, task: Task, plan: Plan, parameters: int) -> "DataSummary":
        """Summarize the text of a task and the noise of a plan.

        Args:
            task: The users and their text.
            plan: Mechanism, noise and fleet.
            parameters: Number of parameters of the model.
        """
        train, heldout = _words(task.train), _words(task.heldout)
        known, heldout_known = train[train > UNKNOWN], heldout[heldout > UNKNOWN]
        hits = 0
        if len(known):
            hits = int(np.sum(heldout_known == np.bincount(known).argmax()))
        return cls(
            people=len(task.train),
            heldout_people=len(task.heldout),
            words=len(train),
            heldout_words=len(heldout),
            vocabulary=len(task.vocabulary.words),
            unknown_share=_share(len(train) - len(known), len(train)),
            heldout_unknown_share=_share(len(heldout) - len(heldout_known), len(heldout)),
            english_share=_english_share(task.vocabulary),
            baseline=_share(hits, len(heldout_known)),
            baseline_of_all_words=_share(hits, len(heldout)),
            noise_to_signal=noise_to_signal(plan, parameters),
        )

    def lines(self) -> list[str]:
        """The summary for a terminal."""
        english = ""
        if self.english_share is not None:
            english = f" (it covers {self.english_share:.0%} of general English)"
        return [
            f"private, for your eyes: {self.words:,} words of {self.people:,} people; "
            f"{self.unknown_share:.1%} are not among the {self.vocabulary:,} words of the "
            f"vocabulary{english}",
            f"always guessing the most common word would be right for {self.baseline:.2%} of the "
            f"known held-out words, and for {self.baseline_of_all_words:.2%} of all",
            f"noise to signal in the final model: {self.noise_to_signal:.2g}, at best",
        ]

    def warnings(self) -> list[str]:
        """What makes a useful model unlikely, and what to do about it."""
        found = list[str]()
        if self.unknown_share > MOST_UNKNOWN:
            found.append(
                f"{self.unknown_share:.0%} of the words are not in the vocabulary, and accuracy is "
                "measured on the others only; raise data.vocabulary_size, or give a public list of "
                "the words of this field as data.vocabulary"
            )
        if self.people < FEW_PEOPLE:
            found.append(
                f"{self.people:,} people to train on are too few for a useful model; take the text "
                "of several hundred people or more"
            )
        if self.heldout_people < FEW_HELDOUT_PEOPLE:
            found.append(
                f"the accuracy on {self.heldout_people:,} held-out people is mostly chance; raise "
                "data.heldout_share, or take the text of more people"
            )
        if self.noise_to_signal > MOST_NOISE:
            found.append(
                f"the noise in the final model is {self.noise_to_signal:.2g} times as large as the "
                "clients together could move the model, so the model may learn little: compare its "
                f"accuracy with the baseline, {self.baseline:.2%}; more clients per round "
                "(privacy.report_goal) out of more people, a smaller model (model.sizes) or a "
                "larger epsilon (privacy.epsilon) help"
            )
        return found

    def save(self, folder: Path) -> None:
        """Write the summary to the private folder of a run, readable by the owner only."""
        content = msgspec.json.format(msgspec.json.encode(self))
        replace_file(folder / SUMMARY_FILE, content, private=True)


def noise_to_signal(plan: Plan, parameters: int) -> float:
    """The norm of the noise in the final model, divided by the largest norm of the signal.

    The signal of a round is the mean of clipped updates, whose norm is at most the clip norm; that
    of all rounds is their sum. The noise on the sum of the first rounds has, per coordinate, at
    most the standard deviation `noise_multiplier * clip_norm * max_error`. The clip norm cancels,
    and so does a constant learning rate.
    """
    rounds, goal = plan.participation.rounds, plan.fleet.report_goal
    error = plan.mechanism.error_report(plan.participation).max_error
    return plan.noise_multiplier * error * math.sqrt(parameters) / (goal * rounds)


def _words(users: Users) -> NDArray[np.int32]:
    """All words of users, known or not, without special tokens."""
    targets = users.sentences[:, 1:]
    return targets[targets >= UNKNOWN]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _english_share(vocabulary: Vocabulary) -> float | None:
    """The share of general English that a vocabulary covers, by the frequencies of wordfreq."""
    try:
        from wordfreq import word_frequency
    except ImportError:
        return None
    share = math.fsum(float(word_frequency(word, "en")) for word in vocabulary.words)
    return min(share, 1.0) if share >= LEAST_ENGLISH else None
