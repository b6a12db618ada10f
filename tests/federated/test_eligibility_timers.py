"""The table of contacts, against a dict; and how much memory millions of clients take."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl.federated import eligibility as timers_module
from dpftrl.federated.eligibility import NEVER, Timers

# The ends of the range, where a comparison of unsigned numbers can go wrong, and neighbours.
KEYS = [0, 1, 2, 3, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]
SEQUENCES = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.sampled_from(KEYS), unique=True, max_size=8)),
    max_size=25,
)


class Plain:
    """What `Timers` does, the slow way: every contact of every client."""

    def __init__(self):
        self.rows: dict[int, list[int]] = {}

    def mark(self, keys: list[int], row: int) -> None:
        for key in keys:
            self.rows.setdefault(key, []).append(row)

    @property
    def least_gap(self) -> int | None:
        gaps = [b - a for rows in self.rows.values() for a, b in itertools.pairwise(rows)]
        return min(gaps, default=None)

    @property
    def most_contacts(self) -> int:
        return max(map(len, self.rows.values()), default=0)


def as_keys(keys: list[int]) -> np.ndarray:
    return np.array(keys, dtype=np.uint64)


@given(sequence=SEQUENCES, smallest=st.sampled_from([0, 2, 65_536]))
def test_they_say_what_a_dict_says(sequence, smallest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers_module, "SMALLEST_RECENT", smallest)  # so that tables join often
        timers, plain, row = Timers(), Plain(), 0
        for ahead, keys in sequence:
            row += ahead
            # As the rules do: nobody is contacted twice for one row.
            fresh = [key for key in keys if plain.rows.get(key, [-1])[-1] < row]
            gap, most = timers.exposure_after(as_keys(fresh), row)
            timers.mark(as_keys(fresh), row)
            plain.mark(fresh, row)
            assert (timers.exposure.min_gap, timers.exposure.max_contacts) == (
                plain.least_gap,
                plain.most_contacts,
            )
            assert (gap, most) == (plain.least_gap, plain.most_contacts)
            last = [plain.rows.get(key, [NEVER])[-1] for key in KEYS]
            assert timers.last(as_keys(KEYS)).tolist() == last
            counts = [len(plain.rows.get(key, [])) for key in KEYS]
            assert timers.contacts(as_keys(KEYS)).tolist() == counts
            assert len(timers) == len(plain.rows)


def test_what_will_be_is_asked_without_changing_anything():
    timers = Timers()
    timers.mark(as_keys([7]), 0)
    assert timers.exposure_after(as_keys([7, 8]), 5) == (5, 2)
    assert timers.exposure.min_gap is None
    assert timers.exposure.max_contacts == 1
    assert timers.last(as_keys([7, 8])).tolist() == [0, NEVER]


MEASURE = """
import resource, sys
import numpy as np
from dpftrl.federated.eligibility import Timers

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
timers, count, each = Timers(), 10_000_000, 100_000
for row in range(2 * count // each):
    first = row * each % count
    # Odd, hence a permutation of all 64-bit numbers: keys that look like hashes, none twice.
    keys = np.arange(first, first + each, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    timers.mark(np.sort(keys), row)
assert len(timers) == count
assert (timers.exposure.min_gap, timers.exposure.max_contacts) == (count // each, 2)
print(peak() - before)
"""


@pytest.mark.slow
def test_ten_million_clients_take_less_than_half_a_gigabyte():
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], capture_output=True, text=True, timeout=600, check=True
    )
    assert int(done.stdout) < 500e6
