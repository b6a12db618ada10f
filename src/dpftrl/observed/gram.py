"""The worst pattern of a log by the Gram matrix of the strategy: every client, exactly."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dpftrl.mechanisms.base import Matrix, Mechanism, Vector
from dpftrl.observed.patterns import Integers, Patterns, Visits
from dpftrl.observed.result import WorstPattern
from dpftrl.participation import Pattern

# Numbers that are worked on at once: some 30 MB.
CHUNK = 4_000_000

# Multiplying by a whole row of the Gram matrix beats picking entries from it when a pattern holds
# more than one round in so many.
DENSE_SHARE = 8


class _Found(NamedTuple):
    energy: float
    pattern: Pattern
    client: str | None


def worst_by_gram(mechanism: Mechanism, rounds: int, partitions: Iterable[Visits]) -> WorstPattern:
    """Maximise the sum of the entries of |C|^T |C| in the rows and columns of one pattern.

    Guarantees:
        A client whose updates have norm at most 1 moves C X by a sum of columns of C, each times
        such an update: in norm by no more than the sum of the columns of |C|.
    """
    size = np.abs(mechanism.strategy(rounds))
    gram = size.T @ size
    del size
    best = _Found(0.0, (), None)
    for visits in partitions:
        counted = visits.counted()
        energies = _energies(gram, counted)
        if not len(energies) or not energies.max() > best.energy:
            continue
        winner = int(energies.argmax())
        client = str(visits.ids[int(counted.clients[winner])])
        best = _Found(float(energies[winner]), counted.pattern(winner), client)
    if best.client is None:
        return WorstPattern(0.0, "exact", (), None)
    # Summed in another way: equal but for rounding, unless the mechanism's own is a bound.
    norm, own = best.energy**0.5, mechanism.pattern_norm(best.pattern, rounds)
    agreed = abs(norm - own) <= 1e-9 * norm
    return WorstPattern(
        max(norm, own), "exact" if agreed else "upper bound", best.pattern, best.client
    )


def _energies(gram: Matrix, patterns: Patterns) -> Vector:
    """The squared norm of every pattern."""
    energies = np.zeros(len(patterns))
    for count in np.unique(patterns.counts).tolist():
        where = np.flatnonzero(patterns.counts == count)
        dense = count * DENSE_SHARE > len(gram)
        step = max(1, CHUNK // (len(gram) if dense else count * count))
        for start in range(0, len(where), step):
            chunk = where[start : start + step]
            taken = patterns.matrix(chunk, count)
            energies[chunk] = _by_products(gram, taken) if dense else _by_entries(gram, taken)
    return energies


def _by_entries(gram: Matrix, taken: Integers) -> Vector:
    return gram[taken[:, :, None], taken[:, None, :]].sum(axis=(1, 2))


def _by_products(gram: Matrix, taken: Integers) -> Vector:
    present = np.zeros((len(taken), len(gram)))
    np.put_along_axis(present, taken, 1.0, axis=1)
    return np.einsum("ij,ij->i", present @ gram, present)
