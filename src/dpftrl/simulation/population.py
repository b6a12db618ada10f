"""A simulated population of clients, clients in plain Python, and one round of training.

The population decides which clients are available at what hour, which drop out, and in what order
the others report. Everything depends only on the seed, the client's name, and the hour or the
number of the attempt. It does not depend on earlier calls, so a resumed run meets the same
population.

`Clients` is what computes updates. `PythonClients` calls any Python function for that: PyTorch,
numpy or another framework. Those that train a JAX model are in `jax_clients`.
"""

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector
from dpftrl._internal.checks import as_float, whole_number
from dpftrl._internal.threads import parallel_map
from dpftrl.clipping import ExactSum, Grid
from dpftrl.errors import InvalidInput, TooFewClients
from dpftrl.federated import Layout, Released, Round, Server

# Availability is highest at this hour of a client's local time, when most phones are idle.
PEAK_HOUR = 2
# Hours between the middle time zone of the population and the farthest ones.
MAX_ZONE_OFFSET = 6
# No client reports before MIN_SECONDS. The time after that is exponential with mean MEAN_SECONDS,
# and STRAGGLER_FACTOR times as long for stragglers.
MIN_SECONDS, MEAN_SECONDS, STRAGGLER_FACTOR = 20, 40, 10
# Simulated hours after which no further clients are expected to become available: two full days.
MAX_WAIT_HOURS = 48
# Attempts in a row without enough reports before `next_round` gives up.
MAX_ABANDONED = 50

Keys = NDArray[np.uint64]
Shares = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


@final
class Population:
    """Simulated clients with time zones, drop-outs and stragglers.

    >>> fleet = Population(["ann", "bob", "eve"], seed=1)
    >>> fleet.reporting(["ann", "bob", "eve"], attempt=0)
    ['ann', 'bob', 'eve']

    Args:
        names: Names of the clients. Any sequence works, so that millions of names can be computed
            on demand.
        seed: Seed of all random choices.
        drop_out: Share of the contacted clients that never report.
        straggler_share: Share of the other clients that take ten times as long.
        least: Share of clients that are available by day.
        most: Share of clients that are available by night.

    Raises:
        InvalidInput: A share is not from 0 to 1, or `least` is above `most`.
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
        # The difference of two uniform numbers: most clients are in the middle time zones.
        self._zone = MAX_ZONE_OFFSET * (_share(self._keys, "east") - _share(self._keys, "west"))

    def __len__(self) -> int:
        return len(self._names)

    def available(self, hours: float) -> list[str]:
        """Return the names of the clients available at a time, in hours since the start."""
        return [self._names[int(index)] for index in self.indices(hours)]

    def indices(self, hours: float) -> NDArray[np.int64]:
        """Return the positions of the available clients; this changes only at full hours."""
        if not math.isfinite(hours):
            raise InvalidInput(f"hours must be a finite number, got {hours!r}")
        hour = math.floor(hours)
        night = (1 + np.cos((hour - PEAK_HOUR + self._zone) * (2 * np.pi / 24))) / 2
        share = self._least + (self._most - self._least) * night
        return np.flatnonzero(_share(self._keys, "hour", hour) < share)

    def arrivals(self, cohort: Sequence[str], attempt: int) -> list[tuple[float | None, str]]:
        """Return when each client reports, in seconds, the earliest first; None means never."""
        keys = self._keys_of(cohort)
        wait = -np.log1p(-_share(keys, "wait", attempt))
        late = _share(keys, "late", attempt) < self._straggler_share
        seconds = MIN_SECONDS + MEAN_SECONDS * wait * np.where(late, STRAGGLER_FACTOR, 1)
        seconds[_share(keys, "lost", attempt) < self._drop_out] = np.inf
        # Equal times are ordered by name, so that the order of the cohort has no effect.
        order = sorted(zip(seconds.tolist(), cohort, strict=True))
        return [(None if time == math.inf else time, name) for time, name in order]

    def reporting(self, cohort: Sequence[str], attempt: int) -> list[str]:
        """Return the clients of the cohort that report, the earliest first."""
        return [name for time, name in self.arrivals(cohort, attempt) if time is not None]

    def _keys_of(self, names: Sequence[str]) -> Keys:
        """Return a 64-bit hash of the seed and each name."""
        salt = self._seed.to_bytes((self._seed.bit_length() + 7) // 8 or 1, "little")
        digests = b"".join(_digests(names, salt))
        return np.frombuffer(digests, np.dtype("<u8")).astype(np.uint64)


def _digests(names: Iterable[str], salt: bytes) -> Iterable[bytes]:
    start = hashlib.blake2b(salt, digest_size=8)
    for name in names:
        state = start.copy()
        state.update(b"/" + name.encode())
        yield state.digest()


def _share(keys: Keys, purpose: str, *when: int) -> Shares:
    """Return a pseudo-random number in [0, 1) per client, for one purpose at one time."""
    text = "/".join([purpose, *map(str, when)]).encode()
    salt = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return (_mixed(keys ^ np.uint64(salt)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[Any]) -> Keys:
    """Apply the finalizer of splitmix64: every output bit depends on every input bit."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class Clients(Protocol):
    """Anything that computes clients' updates to a model."""

    def updates(
        self, model: NDArray[np.float32], cohort: Sequence[str], round_number: int, /
    ) -> Iterator[tuple[str, Any]]:
        """Yield each client's name and update: its trained model minus the given one."""
        ...


# Updates that are computed at once, so that threads rarely wait for each other; but never more than
# this memory holds, or one per thread.
UPDATES_PER_THREAD = 16
MOST_UPDATE_BYTES = 2**28  # 256 MB


def in_parallel(
    update: Callable[[str], Float32Vector],
    cohort: Sequence[str],
    threads: int,
    update_bytes: int,
) -> Iterator[tuple[str, Float32Vector]]:
    """Compute updates in threads, some at a time; yield them in cohort order.

    A round that has enough reports does not need the remaining updates: they are not computed.

    Args:
        update: Computes the update of the client of this name.
        cohort: Names of the clients.
        threads: Number of threads.
        update_bytes: Memory that an update takes.
    """
    fitting = MOST_UPDATE_BYTES // max(update_bytes, 1)
    at_once = 1 if threads == 1 else max(threads, min(UPDATES_PER_THREAD * threads, fitting))
    for start in range(0, len(cohort), at_once):
        names = cohort[start : start + at_once]
        yield from zip(names, parallel_map(update, names, threads), strict=True)


@final
class PythonClients:
    """Clients that are trained by a Python function, one after the other.

    >>> import numpy as np
    >>> def train(model, client, round_number):
    ...     return {"w": model["w"] + len(client)}
    >>> clients = PythonClients(train, {"w": np.zeros(2, np.float32)})
    >>> [update.tolist() for _, update in clients.updates(np.ones(2, np.float32), ["ann"], 0)]
    [[3.0, 3.0]]
    """

    def __init__(
        self,
        train: Callable[[Arrays, str, int], Mapping[str, NDArray[Any]]],
        model: Mapping[str, NDArray[Any]],
    ):
        """Use a training function for models of one layout.

        Args:
            train: Called with named arrays (its own copy), a client's name and the round number.
                Returns the trained arrays (not the difference).
            model: Any model with the right names and shapes.
        """
        self._train = train
        self._layout = Layout.of(model)

    def updates(
        self, model: Float32Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Float32Vector]]:
        """Yield each client's name and update (trained model minus given model), in cohort order.

        Raises:
            InvalidInput: The model has another size, or `train` returns arrays that do not fit.
        """
        if model.shape != (self._layout.size,):
            raise InvalidInput(
                f"the model must have {self._layout.size:,} numbers, got {model.shape}"
            )
        for name in cohort:
            trained = self._train(self._layout.arrays(model.copy()), name, round_number)
            if mismatch := self._layout.misfit(trained):
                raise InvalidInput(
                    f"the model that came back from training {name!r:.60} does not fit: {mismatch}"
                )
            yield name, self._layout.flat(trained) - model


class AuditCanaries(Protocol):
    """The canaries of an audit, of either kind: they are added to the sums of a run."""

    def updates(self, number: int, grid: Grid, /) -> ExactSum | None:
        """The sum of the clipped updates of all included canaries in a round; None if none."""
        ...

    def observe(self, number: int, others: NDArray[Any], mean: NDArray[Any], /) -> None:
        """Note the noisy mean of a round, and the mean of the others without noise."""
        ...

    def save(self) -> None:
        """Write what was observed."""
        ...


def next_round(
    server: Server,
    clients: Clients,
    population: Population,
    rounds_per_hour: float,
    canaries: AuditCanaries | None = None,
) -> Released:
    """Repeat attempts until a round is committed.

    Everything depends on the journal and the seeds only: a resumed run contacts the same clients at
    the same simulated time, and gets the same updates.

    Args:
        server: The server of the run.
        clients: Computes the updates.
        population: Decides who is available and who reports.
        rounds_per_hour: Speed of the simulated clock.
        canaries: The canaries of an audit, which are added to the sums.

    Raises:
        RunOver: There is no further round.
        TooFewClients: Too few clients are available, or too many attempts in a row failed.
    """
    for _ in range(MAX_ABANDONED):
        current = _begin(server, population, rounds_per_hour)
        # The server would refuse later reports: compute only those that it will count.
        reporting = population.reporting(current.clients, current.attempt)[: current.reports.goal]
        if len(reporting) < current.reports.goal:
            server.abandon(
                current, f"{len(reporting)} of {current.reports.goal} would have reported"
            )
            continue
        return _commit(server, clients, current, reporting, canaries)
    raise TooFewClients(
        f"{MAX_ABANDONED} attempts in a row had too few reports; contact more clients per report "
        "(over_selection), or simulate fewer drop-outs"
    )


def _begin(server: Server, population: Population, rounds_per_hour: float) -> Round:
    """Start a round as soon as enough clients are available, by the simulated clock."""
    last_time = server.clock or 0.0
    now = last_time if server.in_flight else last_time + 1 / rounds_per_hour
    for waited in range(MAX_WAIT_HOURS):
        with contextlib.suppress(TooFewClients):
            return server.begin(population.available(now + waited), now + waited)
    now += MAX_WAIT_HOURS
    return server.begin(population.available(now), now)


def _commit(
    server: Server,
    clients: Clients,
    current: Round,
    reporting: Sequence[str],
    canaries: AuditCanaries | None,
) -> Released:
    """Compute the updates of the reporting clients, report them, and commit the round."""
    for client, update in clients.updates(server.model, reporting, current.number):
        current.report(client, update, current.attempt)
    if canaries is None:
        return server.commit(current)
    grid, goal = current.reports.grid, current.reports.goal
    others = grid.values(current.reports.sum().steps, goal)  # the attack knows everybody else
    added = canaries.updates(current.number, grid)
    if added is not None:
        current.reports.add_canaries(added.steps.data, added.updates)
    released = server.commit(current, partial(canaries.observe, current.number, others))
    canaries.save()
    return released
