"""Secret random batches from a key: Poisson, cyclic Poisson and balls-in-bins sampling.

A `Sampling` of `dpftrl.participation` describes how batches are drawn; a `Sampler` draws them. All
three schemes are one: the examples are split into parts, the parts take turns, and every example of
the part whose turn it is joins the batch with the same probability, independently.

| scheme | parts | how an example gets its part | probability |
|---|---|---|---|
| Poisson | 1 | all are in one part | batch size / data set size |
| cyclic Poisson | groups | random split into parts of equal size | that times the groups |
| balls-in-bins | bins | every part is equally likely, independently | 1 |

Secret arrays are passed on as memoryviews and are never local variables, because a traceback may
show the content of a local variable. It shows only the address of a memoryview. Sizes of batches
are not hidden in this way.
"""

from collections.abc import Callable
from dataclasses import fields
from fractions import Fraction
from functools import cached_property
from typing import Any, Final, NamedTuple, NoReturn, final

import numba
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import whole_number
from dpftrl._internal.compiled import compiled
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.noise.key import BLOCK_BYTES, Keystream, NoiseKey
from dpftrl.participation import BallsInBins, CyclicPoisson, Poisson, Sampling

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]
Labels = NDArray[np.uint32]

WORD_BYTES: Final = 8
# Words of keystream that are generated at a time: 512 kB, which fit into the L2 cache.
CHUNK: Final = 2**16
LAST_WORD: Final = np.uint64(2**64 - 1)
ONE: Final = np.uint64(1)
# A split is kept as 32-bit numbers, so it cannot have more examples.
MOST_IN_SPLIT: Final = 2**32 - 1


@final
class Sampler:
    """Draws the batches of a run from a secret key.

    Create it again after a restart: a batch depends only on the key, the step and the sampling
    without its number of steps. So batches can be drawn in any order, and a run that was planned
    with more steps starts with the same batches. Batches have random sizes, and some may be empty.
    Divide sums by the planned `batch_size`. Batches are as secret as the key: do not log them.

    Balls-in-bins and cyclic Poisson sampling split the data set at the first batch, and keep the
    split: 4 bytes per example.

    Guarantees:
        If HMAC-SHA256 and AES-256 are pseudo-random, nobody without the key can tell the batches
        from batches that are drawn as `sampling` describes, independently of the noise of the same
        key. Splits are exactly uniform. The probability that an example joins a batch is rounded
        down to a multiple of 2^-64, never up; a smaller probability gives no weaker guarantee.

        A batch above `max_batch_size` is cut to a uniformly random subset of that size. The subset
        is drawn with a key of its own for every step. In balls-in-bins sampling, a bin that is too
        large is therefore cut to another subset in every epoch, and no example is left out for
        good. Before they are cut, the batches have the distribution of a run without a limit. If
        none is too large, none is changed. So the two runs differ with a probability of at most
        `sampling.overflow_probability`.

    Args:
        sampling: How batches are drawn.
        key: The noise key of the run. The sampler derives a key of its own from it.

    >>> sampling = Poisson(dataset_size=20, batch_size=4, steps=100)
    >>> Sampler(sampling, NoiseKey.insecure_for_tests(0)).batch(0)
    array([ 1,  3,  4,  8, 16])
    """

    def __init__(self, sampling: Sampling, key: NoiseKey):
        if not isinstance(key, NoiseKey):  # pyright: ignore[reportUnnecessaryIsInstance]
            kind = type(key).__name__
            del key  # it may be secret bytes, which no traceback should show
            raise InvalidInput(
                f"key must be a NoiseKey, got {kind}; NoiseKey.generate() creates one"
            )
        self._scheme = _scheme(sampling)
        if self._scheme.parts > 1 and sampling.dataset_size > MOST_IN_SPLIT:
            raise TooLarge(
                f"{sampling.name} sampling splits at most {MOST_IN_SPLIT:,} examples, got "
                f"{sampling.dataset_size:,}; use Poisson sampling"
            )
        self._sampling = sampling
        self._key = key.derive(b"batches", _identity(sampling))

    @property
    def sampling(self) -> Sampling:
        """How batches are drawn."""
        return self._sampling

    def batch(self, step: int) -> Indices:
        """The examples in the batch of a step, as increasing indices from 0.

        Args:
            step: The step, from 0 to `sampling.steps` - 1.

        Raises:
            InvalidInput: There is no such step.
        """
        step = whole_number("step", step, at_least=0)
        if step >= self._sampling.steps:
            raise InvalidInput(
                f"step {step:,} is after the last planned step, {self._sampling.steps - 1:,}, and "
                "no guarantee covers it; plan the run with more steps"
            )
        drawn = self._drawn(step).data
        most = self._sampling.max_batch_size
        if most is None or len(drawn) <= most:
            return np.asarray(drawn)
        labels = (np.arange(len(drawn)) < most).astype(np.uint32).data
        _shuffle(self._key.derive(b"truncation", _number(step)), labels)
        return np.asarray(drawn)[np.asarray(labels) == 1]

    def _drawn(self, step: int) -> Indices:
        """The batch of a step before it is cut to `max_batch_size`.

        Never keep the result in a local variable: tracebacks may show local variables.
        """
        key, probability = self._key.derive(b"step", _number(step)), self._scheme.probability
        if self._scheme.parts == 1:
            return _successes(key, self._sampling.dataset_size, probability)
        part = self._split.part(step % self._scheme.parts)
        if probability == 1:
            return np.asarray(part).astype(np.int64)
        return np.asarray(part)[_successes(key, len(part), probability)].astype(np.int64)

    @cached_property
    def _split(self) -> "_Split":
        """The examples of each part. This is computed once."""
        parts, key = self._scheme.parts, self._key.derive(b"split")
        labels = self._scheme.labels(key, self._sampling.dataset_size, parts)
        return _Split.from_labels(labels, parts)

    def __repr__(self) -> str:
        return f"Sampler({self._sampling!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Sampler cannot be pickled or copied; create it again from the key")


class _Scheme(NamedTuple):
    """A sampling as parts that take turns; see the table at the top.

    Attributes:
        parts: Number of parts.
        probability: The probability that an example joins a batch of its part.
        labels: Draws the part of every example from a key, the number of examples and the number of
            parts. It is not called if there is only one part.
    """

    parts: int
    probability: Fraction
    labels: Callable[[NoiseKey, int, int], memoryview]


def _scheme(sampling: Sampling) -> _Scheme:
    match sampling:
        case Poisson():
            probability = Fraction(sampling.batch_size, sampling.dataset_size)
            return _Scheme(1, probability, _equal_parts)
        case CyclicPoisson():
            probability = Fraction(sampling.batch_size * sampling.groups, sampling.dataset_size)
            return _Scheme(sampling.groups, probability, _equal_parts)
        case BallsInBins():
            return _Scheme(sampling.bins, Fraction(1), _independent_parts)
        case _:
            raise InvalidInput(
                "sampling must be Poisson, CyclicPoisson or BallsInBins, got "
                f"{type(sampling).__name__}"
            )


def _identity(sampling: Sampling) -> bytes:
    """The name of the scheme and all its numbers except the number of steps."""
    numbers = sorted(
        (field.name, getattr(sampling, field.name))
        for field in fields(sampling)
        if field.name != "steps"
    )
    return repr((sampling.name, numbers)).encode()


def _number(step: int) -> bytes:
    return step.to_bytes(8, "big")


@final
class _RandomWords:
    """Random 64-bit words from a key, at most so many at a time."""

    def __init__(self, key: NoiseKey, most: int):
        size = most * WORD_BYTES
        self._keystream = Keystream(key)
        self._zeros = memoryview(bytes(size))
        # The cipher needs one block more than it writes.
        self._raw = bytearray(size + BLOCK_BYTES)
        self._words: NDArray[Any] = np.frombuffer(self._raw, "<u8", most)

    def next(self, count: int) -> Words:
        """The next words. The next call overwrites them.

        Never keep the result in a local variable: tracebacks may show local variables.
        """
        self._keystream.fill(self._zeros[: count * WORD_BYTES], self._raw)
        return self._words[:count]

    def __repr__(self) -> str:
        return "_RandomWords(secret)"


def _successes(key: NoiseKey, trials: int, probability: Fraction) -> Indices:
    """The sorted positions of the successes among independent trials.

    Memory is proportional to the number of successes, not of trials. Never keep the result in a
    local variable: tracebacks may show local variables.
    """
    if probability == 1 or trials == 0:
        return np.arange(trials)
    threshold = probability.numerator * 2**64 // probability.denominator
    words = _RandomWords(key, min(CHUNK, trials))
    return np.concatenate(
        [
            (words.next(min(CHUNK, trials - start)) < threshold).nonzero()[0] + start
            for start in range(0, trials, CHUNK)
        ]
    )


# --- Splits ------------------------------------------------------------------------------------


class _Split(NamedTuple):
    """The examples of each part.

    Attributes:
        members: All examples, ordered by part, and by index within a part.
        starts: Where each part starts in `members`, and the number of examples at the end.
    """

    members: memoryview
    starts: memoryview

    @classmethod
    def from_labels(cls, labels: memoryview, parts: int) -> "_Split":
        """The split in which example i belongs to part labels[i]."""
        split = cls(np.empty(len(labels), np.uint32).data, np.zeros(parts + 1, np.int64).data)
        sort_by_label(np.asarray(labels), np.asarray(split.members), np.asarray(split.starts))
        return split

    def part(self, index: int) -> memoryview:
        """The examples of one part, sorted."""
        return self.members[self.starts[index] : self.starts[index + 1]]


def _equal_parts(key: NoiseKey, examples: int, parts: int) -> memoryview:
    """A part for every example: a uniformly random split whose sizes differ by at most one."""
    labels = (np.arange(examples, dtype=np.uint32) % np.uint32(parts)).data
    _shuffle(key, labels)
    return labels


def _independent_parts(key: NoiseKey, examples: int, parts: int) -> memoryview:
    """A part for every example: all are equally likely, independently."""
    labels = np.empty(examples, np.uint32).data
    words, drawn = _RandomWords(key, min(CHUNK, examples)), 0
    while drawn < examples:
        count = min(CHUNK, examples - drawn)
        drawn = draw_below(words.next(count), np.uint64(parts), np.asarray(labels), drawn)
    return labels


def shuffled(count: int, key: NoiseKey) -> Indices:
    """The numbers from 0 to `count` - 1 in a uniformly random order, which the key decides.

    >>> shuffled(5, NoiseKey.insecure_for_tests(0)).tolist()
    [1, 0, 3, 4, 2]
    """
    if whole_number("count", count) > MOST_IN_SPLIT:
        raise TooLarge(f"at most {MOST_IN_SPLIT:,} numbers can be shuffled, got {count:,}")
    order = np.arange(count, dtype=np.uint32).data
    _shuffle(key, order)
    return np.asarray(order).astype(np.int64)


def _shuffle(key: NoiseKey, labels: memoryview) -> None:
    """Put the labels into a uniformly random order, in place."""
    words, left = _RandomWords(key, min(CHUNK, len(labels))), len(labels)
    while left > 1:
        left = shuffle_step(words.next(min(CHUNK, left - 1)), np.asarray(labels), left)


@numba.njit(**compiled)
def draw_below(words: Words, bound: np.uint64, labels: Labels, drawn: int) -> int:
    """Write uniform numbers below `bound` to `labels`, from position `drawn` on.

    A word modulo the bound is uniform if words after the last multiple of the bound are left out.

    Returns:
        The number of labels that are written now, one more for every word that was not left out.
    """
    for word in words:
        label = word % bound
        if word - label <= LAST_WORD - (bound - ONE):  # all `bound` words of this run exist
            labels[drawn] = label
            drawn += 1
    return drawn


@numba.njit(**compiled)
def shuffle_step(words: Words, labels: Labels, left: int) -> int:
    """Continue the shuffle of Fisher and Yates: swap label `left` - 1 with a random one up to it.

    Returns:
        The number of labels whose place is still to be drawn, one fewer for every word that was
        not left out (see `draw_below`).
    """
    for word in words:
        bound = np.uint64(left)
        place = word % bound
        if word - place <= LAST_WORD - (bound - ONE):
            left -= 1
            labels[left], labels[place] = labels[place], labels[left]
    return left


@numba.njit(**compiled)
def sort_by_label(labels: Labels, members: Labels, starts: Indices) -> None:
    """Sort the positions of the labels by label, by counting.

    Args:
        labels: Labels below the number of parts.
        members: The positions of the labels 0, then of the labels 1, and so on.
        starts: Zeros, one more than parts; becomes where each part starts in `members`.
    """
    for label in labels:
        starts[label + 1] += 1
    for part in range(1, len(starts)):
        starts[part] += starts[part - 1]
    following = starts.copy()
    for position in range(len(labels)):
        label = labels[position]
        members[following[label]] = position
        following[label] += 1
