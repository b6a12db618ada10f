"""How far the clients of a run could move its release, each by the rounds it was counted in."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from dpftrl.audit.contacts import Contacts

Matrix = NDArray[np.float64]

# A client counted in more than this share of the rounds is cheaper to multiply out.
OFTEN: Final = 1 / 32
AT_ONCE: Final = 256


def furthest_moved(gram: Matrix, counted: Contacts) -> float:
    """The largest norm of the sum of a client's columns."""
    if not len(counted):
        return 0.0
    each = counted.each()
    is_often = np.repeat(each > OFTEN * len(gram), each)
    squares = (_by_pairs(gram, counted.kept(~is_often)), _by_rows(gram, counted.kept(is_often)))
    return max(squares) ** 0.5


def _by_pairs(gram: Matrix, counted: Contacts) -> float:
    """Add up the Gram entries of all pairs of rounds: next neighbours, then those beyond."""
    if not len(counted):
        return 0.0
    clients, rows = counted.clients, counted.rows
    sizes = counted.each()
    owner = np.repeat(np.arange(len(sizes)), sizes)
    total = np.bincount(owner, gram[rows, rows])
    for lag in range(1, int(sizes.max())):
        (first,) = np.nonzero(clients[lag:] == clients[:-lag])
        pairs = 2 * gram[rows[first], rows[first + lag]]
        total += np.bincount(owner[first], pairs, minlength=len(total))
    return float(total.max())


def _by_rows(gram: Matrix, counted: Contacts) -> float:
    """Multiply the Gram matrix by who was counted, some clients at a time."""
    sizes, worst = counted.each(), 0.0
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for start in range(0, len(sizes), AT_ONCE):
        here = (owner >= start) & (owner < start + AT_ONCE)
        taken = np.zeros((len(gram), AT_ONCE))
        taken[counted.rows[here], owner[here] - start] = 1.0
        worst = max(worst, float(np.einsum("ij,ij->j", taken, gram @ taken).max()))
    return worst
