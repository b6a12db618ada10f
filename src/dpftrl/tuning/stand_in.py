"""Stand-in people: whose text is used for tuning, instead of that of the private users.

Accuracy on the private users is a statistic of their text. Choosing settings by it would reveal
something about them that the guarantee of the training does not cover. Trials are therefore run on
other, public text, with as many clients as the training has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.simulation.config import Config
from dpftrl.simulation.training import load_training_task
from dpftrl.tasks import TASKS, Task, Vocabulary, load_task
from dpftrl.tasks.task import Users

# Tasks whose text is published, and that need no file. The first that is not the task itself is the
# default.
PUBLISHED = ("chitchat", "poetry")
# Held-out people of a stand-in whose accuracy decides. More of them would cost time per trial.
MOST_HELDOUT = 300


@final
@dataclass(frozen=True)
class StandIn:
    """The text that trials are run on.

    Attributes:
        task: Name of a task with published text, or `jsonl`.
        path: File of public text, for `jsonl`.
        population: Number of clients of the private training. The trials have as many.
    """

    task: str
    path: Path | None
    population: int

    @property
    def title(self) -> str:
        """What the text is, for messages and files."""
        return self.task if self.path is None else f"the public text of {self.path.name}"

    def load(self, config: Config) -> Task:
        """Load the text with the vocabulary size and sentence length of a configuration."""
        data = config.data
        vocabulary = None
        if self.path is not None and data.vocabulary is not None:
            vocabulary = Vocabulary.from_file(data.vocabulary)
        task = load_task(
            self.task,
            vocabulary_size=None if vocabulary else data.vocabulary_size,
            sentence_length=data.sentence_length,
            sentences_per_user=data.sentences_per_user,
            heldout_share=0.1,
            path=self.path,
            vocabulary=vocabulary,
        )
        heldout = task.heldout.select(range(min(MOST_HELDOUT, len(task.heldout))))
        return Task(
            task.name,
            task.source,
            task.vocabulary,
            _resized(task.train, self.population),
            heldout,
            task.public,
        )


def choose_stand_in(
    config: Config,
    *,
    task: str | None = None,
    public: Path | None = None,
    population: int | None = None,
) -> StandIn:
    """Return the stand-in for a configuration; refuse the text of its own users.

    Args:
        config: Configuration of the private training.
        task: Task with published text to use. By default chitchat; poetry for chitchat itself.
        public: File of public text, with lines {"user": ..., "text": ...}, instead of a task.
        population: Number of clients of the private training. By default its users are counted,
            which reads the file but uses nothing else of it. The number is part of the plan, which
            is published.

    Raises:
        InvalidInput: The stand-in is the private text itself, or does not exist.
    """
    if task is not None and public is not None:
        raise InvalidInput("give either a stand-in task or a file of public text, not both")
    if public is not None:
        _refuse_private_file(config, public)
        name = "jsonl"
    else:
        name = task or next(one for one in PUBLISHED if one != config.task)
        if name == config.task:
            raise InvalidInput(_refusal(f"{name} is the task whose users you train on"))
        if name not in PUBLISHED:
            raise InvalidInput(f"stand-in tasks are {', '.join(PUBLISHED)}; got {name!r:.60}")
    if population is None:
        population = len(load_training_task(config).train)
    return StandIn(name, public, whole_number("population", population))


def _refuse_private_file(config: Config, public: Path) -> None:
    """Refuse a file that is missing, or that is the file of the private users."""
    if not public.is_file():
        raise InvalidInput(f"{public} is not a file; give a .jsonl file of public text")
    private = config.data.path
    if private is not None and Path(private).exists() and public.samefile(private):
        raise InvalidInput(_refusal(f"{public} holds the users that you train on"))


def _refusal(reason: str) -> str:
    return (
        f"{reason}: their accuracy is not covered by the guarantee, so it cannot decide anything; "
        f"give other, public text with --public FILE.jsonl, or --stand-in "
        f"{' or '.join(one for one in PUBLISHED if one in TASKS)}"
    )


def _resized(users: Users, population: int) -> Users:
    """Return as many users as the private training has: a selection, or some of them repeatedly."""
    draws = np.random.default_rng(0)
    if population <= len(users):
        chosen = draws.choice(len(users), population, replace=False)
        return users.select(np.sort(chosen))
    chosen = np.sort(np.append(np.arange(len(users)), draws.integers(len(users), size=population)))
    chosen = np.sort(draws.choice(chosen, population, replace=False))
    parts = [users.of(int(index)) for index in chosen]
    width = len(str(population))
    return Users(
        tuple(f"stand-in {number:0{width}d}" for number in range(population)),
        np.concatenate(parts),
        np.cumsum([0, *map(len, parts)], dtype=np.int64),
    )
