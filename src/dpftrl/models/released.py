"""`load_model`: an exported model, its guarantee, and its predictions of the next word."""

import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl._internal.formatting import rounded_up
from dpftrl.errors import InvalidInput
from dpftrl.federated import StartModel
from dpftrl.federated.start_model import DESCRIPTION, UNRECORDED_KEYS, EarlierRun, Start
from dpftrl.models.description import ModelDescription, read_description, size_of_vocabulary
from dpftrl.tasks.vocabulary import BEGIN, CUTS, SPECIAL, UNKNOWN

# The name of the model in a folder that `dpftrl export` writes.
MODEL_FILE: Final = "model.safetensors"
TOLERANCE: Final = 1e-6  # far more than the rounding error of recomputing an epsilon


@final
@dataclass(frozen=True)
class NextWord:
    """A prediction of the next word.

    Attributes:
        word: The word.
        probability: Its probability, among all words of the vocabulary.
    """

    word: str
    probability: float


@final
@dataclass(frozen=True, eq=False)
class ReleasedModel:
    """A model that `dpftrl export` wrote, as `load_model` returns it.

    Attributes:
        arrays: The arrays of the model, by name.
        description: Architecture, vocabulary and preprocessing; None if the file has none.
        epsilon: Epsilon of all private rounds, as the file states it.
        delta: Delta of the guarantee.
        rounds: Number of rounds of the last private run.
        runs: The private runs that trained the model, first to last; all numbers of their
            guarantees were recomputed.
        path: The file.
    """

    arrays: Mapping[str, NDArray[np.float32]] = field(repr=False)
    description: ModelDescription | None
    epsilon: float
    delta: float
    rounds: int
    runs: tuple[EarlierRun, ...]
    path: Path

    def __repr__(self) -> str:
        kind = "arrays" if self.description is None else self.description.architecture.name
        size = sum(array.size for array in self.arrays.values())
        return (
            f"ReleasedModel({kind}, {size:,} parameters, {self.rounds:,} rounds, epsilon "
            f"{rounded_up(self.epsilon)} at delta {self.delta:g})"
        )

    def predict(self, text: str, top: int = 5) -> list[NextWord]:
        """Return the most probable next words after a text, the most probable first.

        Args:
            text: The beginning of a sentence; it may be empty. Of several sentences, the last one
                counts.
            top: Number of words to return.

        Raises:
            InvalidInput: The file does not describe its model, or JAX is not installed.
        """
        top = whole_number("top", top)
        description, network = self._network
        words = self._words(text)
        length = description.preprocessing.sentence_length
        # One row of a fixed length, so that JAX compiles the model once for all texts.
        row = [BEGIN, *description.vocabulary.numbers(words[-(length - 1) :] if length > 1 else [])]
        inputs: Any = np.zeros((1, length), np.int32)
        inputs[0, : len(row)] = row
        from dpftrl.tasks.language_model import logits

        scores = np.asarray(logits(network, self.arrays, inputs), np.float64)[0, len(row) - 1]
        scores = scores[SPECIAL:]  # the model is not trained to predict special tokens
        if not np.isfinite(scores).all():
            raise InvalidInput(f"{self.path} gives no finite scores: the model diverged")
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        best: list[int] = np.argsort(-shares, kind="stable")[:top].tolist()
        return [NextWord(description.words[i], float(shares[i])) for i in best]

    def unknown_words(self, text: str) -> list[str]:
        """Return the words of the last sentence that are not in the vocabulary."""
        words = self._words(text)
        numbers = self._described().vocabulary.numbers(words)
        return [word for word, number in zip(words, numbers, strict=True) if number == UNKNOWN]

    def _words(self, text: str) -> list[str]:
        sentences = CUTS[self._described().preprocessing.cut](text)
        return sentences[-1] if sentences else []

    def _described(self) -> ModelDescription:
        if self.description is not None:
            return self.description
        if not any(run.run for run in self.runs):
            raise InvalidInput(
                f"{self.path} was exported by dpftrl 0.1, and does not say what kind of model it "
                "is; train again with this version, or rebuild the model from its arrays yourself"
            )
        raise InvalidInput(
            f"{self.path} does not say what kind of model it is: its run was created by an older "
            "dpftrl, or by a program with a model of its own; its arrays are in `arrays`"
        )

    @cached_property
    def _network(self) -> tuple[ModelDescription, Any]:
        """The description, and the model of dpftrl.tasks that it describes."""
        description = self._described()
        try:
            from dpftrl.tasks.language_model import language_model
        except ImportError:
            raise InvalidInput(
                "predicting needs extra packages such as JAX: pip install 'dpftrl[train]'"
            ) from None
        architecture = description.architecture
        try:
            network = language_model(
                architecture.name, size_of_vocabulary(description), **architecture.sizes
            )
            shapes = network.shapes()
        except (InvalidInput, TypeError, ValueError, OverflowError) as error:
            raise InvalidInput(
                f"{self.path} describes a model that this dpftrl does not have: {error}"
            ) from None
        found = {name: array.shape for name, array in self.arrays.items()}
        if found != shapes:
            name = min(found.items() ^ shapes.items())[0]
            raise InvalidInput(
                f"{self.path} is damaged: {name!r:.60} has the shape {found.get(name, 'none')}, "
                f"and its description says {shapes.get(name, 'none')}"
            )
        return description, network


def load_model(path: str | os.PathLike[str]) -> ReleasedModel:
    """Load a model that `dpftrl export` wrote; the text that it was trained on is not needed.

    The file is a safetensors file: nothing in it is executed.

    Args:
        path: The .safetensors file, or a folder that `dpftrl export` wrote.

    Raises:
        InvalidInput: The file is damaged, was changed, or is not an export of dpftrl.

    Guarantees:
        All numbers of the guarantees of the private runs in the file are recomputed, and an epsilon
        below that of the last run is refused. Whether the runs took place as the file says, only
        the run's own folder can show: see `verify_run`.
    """
    source = Path(path)
    if source.is_dir():
        _refuse_run(source)
        source = source / MODEL_FILE
    loaded = StartModel.load(source)
    metadata = loaded.metadata
    if not metadata.keys() >= UNRECORDED_KEYS:
        raise InvalidInput(
            f"{source} is not a model that dpftrl exported: it states no epsilon; write one with "
            "`dpftrl export RUN MODEL.safetensors`"
        )
    try:
        epsilon, delta = float(metadata["epsilon"]), float(metadata["delta"])
        rounds = int(metadata["rounds"])
    except ValueError:
        raise InvalidInput(f"{source} is damaged: epsilon, delta or rounds is no number") from None
    _check_stated(epsilon, delta, rounds, loaded.start, source)
    for name, array in loaded.arrays.items():
        if not np.isfinite(array).all():
            raise InvalidInput(f"{source} is damaged: {name!r:.60} has NaN or infinity in it")
    text = metadata.get(DESCRIPTION)
    description = None if text is None else read_description(text, str(source))
    parts = (loaded.arrays, description, epsilon, delta, rounds, loaded.start.earlier, source)
    return ReleasedModel(*parts)


def _refuse_run(folder: Path) -> None:
    """Refuse the folder of a run, which has no exported model in it."""
    from dpftrl.verify.centralized_files import is_centralized  # here, because it is slow to import

    if (folder / MODEL_FILE).exists() or not (folder / "run.json").exists():
        return
    if is_centralized(folder):
        raise InvalidInput(
            f"{folder} is a run of a training loop of your own; load the model with the program "
            "that trained it"
        )
    raise InvalidInput(
        f"{folder} is a run; write its model first: dpftrl export {shlex.quote(str(folder))} "
        f"{MODEL_FILE}"
    )


def _check_stated(epsilon: float, delta: float, rounds: int, start: Start, source: Path) -> None:
    """Refuse a stated guarantee that the private runs in the file contradict."""
    if not (0 <= epsilon < math.inf and 0 < delta < 1 and rounds >= 1):
        raise InvalidInput(
            f"{source} is damaged: it states epsilon {epsilon:g}, delta {delta:g} and {rounds} "
            "rounds"
        )
    last = start.earlier[-1]
    alone = Start("", (last,)).epsilon(delta)
    if not epsilon >= alone * (1 - TOLERANCE):
        raise InvalidInput(
            f"{source} was changed: it states epsilon {epsilon:.4g} at delta {delta:g}, and its "
            f"last private run alone has {alone:.4g}"
        )
