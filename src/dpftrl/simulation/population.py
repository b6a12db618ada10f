"""A simulated fleet: who can be asked at what hour, who drops out, and who comes first.

Everything follows from the seed, a client's name, and the hour or the number of the attempt, not
from what was asked before: a resumed run meets the same fleet.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float, whole_number
from dpftrl.errors import InvalidInput, TooFewClients
from dpftrl.federated import Released, Round, Server

# Most devices idle at night: at this hour of their own time.
NIGHT = 2
# Hours from the middle of the fleet to its farthest time zones.
ZONES = 6
# Seconds: nobody reports sooner, this much more is usual, and stragglers take so many times that.
SOONEST, USUAL, STRAGGLING = 20, 40, 10

Keys = NDArray[np.uint64]
Shares = NDArray[np.float64]


@final
class Population:
    """Clients that come and go.

    >>> fleet = Population(["ann", "bob", "eve"], seed=1)
    >>> fleet.reporting(["ann", "bob", "eve"], attempt=0)
    ['ann', 'bob', 'eve']

    Args:
        names: Any sequence, so that millions of names can be made up when they are needed.
        seed: Of all that happens.
        drop_out: Share of the contacted that never report.
        straggler_share: Share of the others that take ten times as long.
        least: Share that is available by day.
        most: Share that is available by night.
    """

    def __init__(
        self,
        names: Sequence[str],
        seed: int,
        *,
        drop_out: float = 0.05,
        straggler_share: float = 0.1,
        least: float = 0.2,
        most: float = 0.8,
    ):
        shares = {"drop_out": drop_out, "straggler_share": straggler_share}
        for name, share in {**shares, "least": least, "most": most}.items():
            if not 0 <= as_float(share) <= 1:
                raise InvalidInput(f"{name} must be from 0 to 1, got {share!r}")
        if not least <= most:
            raise InvalidInput(f"least must not be above most, got {least!r} and {most!r}")
        self._names = names
        self._seed = whole_number("seed", seed, at_least=0)
        self._drop_out, self._straggler_share = drop_out, straggler_share
        self._least, self._most = least, most
        self._keys = self._keys_of(names)
        # Two dice instead of one: the middle zones have the most people.
        self._zone = ZONES * (_share(self._keys, "east") - _share(self._keys, "west"))

    def __len__(self) -> int:
        return len(self._names)

    def available(self, hours: float) -> list[str]:
        """Names of those who can be asked at a time, in hours since the start."""
        return [self._names[int(index)] for index in self.indices(hours)]

    def indices(self, hours: float) -> NDArray[np.int64]:
        """Positions of those who can be asked; a device stays as it is until the full hour."""
        if not math.isfinite(hours):
            raise InvalidInput(f"hours must be a finite number, got {hours!r}")
        hour = math.floor(hours)
        night = (1 + np.cos((hour - NIGHT + self._zone) * (2 * np.pi / 24))) / 2
        share = self._least + (self._most - self._least) * night
        return np.flatnonzero(_share(self._keys, "hour", hour) < share)

    def arrivals(self, cohort: Sequence[str], attempt: int) -> list[tuple[float | None, str]]:
        """When each client reports, in seconds, the soonest first; at the end, who never does."""
        keys = self._keys_of(cohort)
        wait = -np.log1p(-_share(keys, "wait", attempt))
        late = _share(keys, "late", attempt) < self._straggler_share
        seconds = SOONEST + USUAL * wait * np.where(late, STRAGGLING, 1)
        seconds[_share(keys, "lost", attempt) < self._drop_out] = np.inf
        # By name where times are equal, so that the order of the cohort says nothing.
        order = sorted(zip(seconds.tolist(), cohort, strict=True))
        return [(None if time == math.inf else time, name) for time, name in order]

    def reporting(self, cohort: Sequence[str], attempt: int) -> list[str]:
        """Those of the cohort that report, the soonest first."""
        return [name for time, name in self.arrivals(cohort, attempt) if time is not None]

    def _keys_of(self, names: Sequence[str]) -> Keys:
        salt = self._seed.to_bytes((self._seed.bit_length() + 7) // 8 or 1, "little")
        digests = b"".join(_digests(names, salt))
        return np.frombuffer(digests, np.dtype("<u8")).astype(np.uint64)


def _digests(names: Iterable[str], salt: bytes) -> Iterable[bytes]:
    start = hashlib.blake2b(salt, digest_size=8)
    for name in names:
        state = start.copy()
        state.update(b"/" + name.encode())
        yield state.digest()


def _share(keys: Keys, what: str, *when: int) -> Shares:
    """A number in [0, 1) for each client, for one purpose at one time."""
    text = "/".join([what, *map(str, when)]).encode()
    salt = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return (_mixed(keys ^ np.uint64(salt)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[Any]) -> Keys:
    """The finaliser of splitmix64: every bit of the result depends on every bit given."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


# Simulated hours after which nobody new is expected to become available.
LONGEST_WAIT = 48
# Attempts in a row that came to nothing.
MOST_ABANDONED = 50


class Clients(Protocol):
    """Whatever makes updates out of a model."""

    def updates(
        self, model: NDArray[np.float32], cohort: Sequence[str], round_number: int, /
    ) -> Iterator[tuple[str, Any]]:
        """The update of each client: its model minus the one that it was handed."""
        ...


def next_round(
    server: Server, clients: Clients, population: Population, rounds_per_hour: float
) -> Released:
    """Try until a round is committed.

    Everything depends on the journal and on seeds alone: a resumed run asks the same clients, at
    the same simulated time, and gets the same updates.
    """
    for _ in range(MOST_ABANDONED):
        current = _begin(server, population, rounds_per_hour)
        # Late reports would be refused anyway: only those that will count are computed.
        reporting = population.reporting(current.clients, current.attempt)[: current.reports.goal]
        if len(reporting) < current.reports.goal:
            server.abandon(
                current, f"{len(reporting)} of {current.reports.goal} would have reported"
            )
            continue
        return _carry(server, clients, current, reporting)
    raise TooFewClients(
        f"{MOST_ABANDONED} attempts in a row had too few reports; ask more clients for each report "
        "wanted (over_selection), or expect fewer drop-outs"
    )


def _begin(server: Server, population: Population, rounds_per_hour: float) -> Round:
    last_time = server.clock or 0.0
    now = last_time if server.in_flight else last_time + 1 / rounds_per_hour
    for waited in range(LONGEST_WAIT):
        with contextlib.suppress(TooFewClients):
            return server.begin(population.available(now + waited), now + waited)
    now += LONGEST_WAIT
    return server.begin(population.available(now), now)


def _carry(server: Server, clients: Clients, current: Round, reporting: Sequence[str]) -> Released:
    for client, update in clients.updates(server.model, reporting, current.number):
        current.report(client, update, current.attempt)
    return server.commit(current)
