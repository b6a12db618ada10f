"""Planted privacy bugs: each replaces a function of the library with a wrong one.

No check knows them. A bug is planted in a process before anything else uses the library:
`plant(name)`, or for tests `pytest -p _planted_bugs` with the name in the variable PLANTED_BUG.
"""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Bug(NamedTuple):
    """One planted bug.

    Attributes:
        text: What is wrong.
        module: The module with the wrong function, as a path below `src/dpftrl`.
        plant: Replaces the function.
    """

    text: str
    module: str
    plant: Callable[[], None]


def _noise_halved() -> None:
    from dpftrl.noise.stream import NoiseStream

    setup = NoiseStream._setup

    def halved(self: Any, *arguments: Any) -> None:
        setup(self, *arguments)
        self._noise_multiplier /= 2

    NoiseStream._setup = halved


def _row_reused_after_resume() -> None:
    from dpftrl.noise import stream

    right, replay, load = stream.row_key, stream.NoiseStream.replay, stream.read_state
    last, resumed = [], []

    def reused(keys: Any, row: int, digest: Any) -> Any:
        if resumed and last:
            resumed.clear()
            return last[-1]
        last.append(right(keys, row, digest))
        return last[-1]

    def replayed(self: Any, digest: Any) -> None:
        resumed.clear()
        replay(self, digest)
        resumed.append(True)

    def loaded(*arguments: Any, **options: Any) -> Any:
        resumed.append(True)
        return load(*arguments, **options)

    stream.row_key, stream.NoiseStream.replay, stream.read_state = reused, replayed, loaded


def _buffers_not_carried_over() -> None:
    from dpftrl.noise import stream

    replay, load = stream.NoiseStream.replay, stream.read_state

    def empty(state: Any) -> None:
        for buffer in state.buffers:
            buffer.array[:] = 0

    def replayed(self: Any, digest: Any) -> None:
        replay(self, digest)
        empty(self._state)

    def loaded(*arguments: Any, **options: Any) -> Any:
        header, state = load(*arguments, **options)
        for buffer in state.buffers:
            buffer.array = np.zeros_like(buffer.array)
        return header, state

    stream.NoiseStream.replay, stream.read_state = replayed, loaded


def _min_sep_off_by_one() -> None:
    from dpftrl.federated.eligibility import Rules

    right = Rules.__init__

    def off(self: Any, min_sep: int, cap: int, timer_hours: float | None) -> None:
        right(self, max(1, min_sep - 1), cap, timer_hours)

    Rules.__init__ = off


def _timer_off_by_one_hour() -> None:
    from dpftrl.federated.eligibility import Rules

    right = Rules.__init__

    def off(self: Any, min_sep: int, cap: int, timer_hours: float | None) -> None:
        right(self, min_sep, cap, None if timer_hours is None else timer_hours - 1)

    Rules.__init__ = off


def _clip_after_the_sum() -> None:
    from dpftrl.clipping import ExactSum
    from dpftrl.federated.round import Reports

    close = Reports.close

    def unclipped(self: Any, *update: Any) -> None:
        flat = np.concatenate([np.ravel(part) for part in self._checked(update)])
        if not np.all(np.isfinite(flat)):
            from dpftrl.errors import InvalidInput

            raise InvalidInput("an update and its norm must be finite")
        self._count(1)
        self.steps[: flat.size] += np.trunc(flat / self.grid.step).astype(np.int64)

    def clipped(self: Any) -> Any:
        total = close(self)
        most = total.updates * total.grid.clip_norm / total.grid.step
        norm = float(np.linalg.norm(total.steps.astype(np.float64)))
        if norm > most:
            total.steps[:] = np.trunc(total.steps * (most / norm)).astype(np.int64)
        return total

    ExactSum.add, Reports.close = unclipped, clipped


def _division_by_the_number_of_reports() -> None:
    from dpftrl.clipping import Grid
    from dpftrl.federated import server

    right, used = server.Server._release, []
    values = Grid.values

    def release(self: Any, reports: Any) -> None:
        used[:] = [] if reports is None else [len(reports.counted) - len(reports.unfit_clients)]
        try:
            right(self, reports)
        finally:
            used.clear()

    def divided(self: Any, steps: Any, divisor: float = 1.0, *rest: Any, **options: Any) -> Any:
        return values(self, steps, max(1, used[0]) if used else divisor, *rest, **options)

    server.Server._release, Grid.values = release, divided


def _nan_drops_a_client() -> None:
    from dpftrl.federated.round import Reports

    right = Reports.take

    def take(self: Any, client: int, update: Any) -> str | None:
        if isinstance(update, np.ndarray) and not np.all(np.isfinite(update)):
            return "not finite"
        return right(self, client, update)

    Reports.take = take


def _wrong_theta_in_the_stream() -> None:
    from dpftrl.mechanisms.base import DecayingBuffers
    from dpftrl.mechanisms.blt import BLT

    BLT.decaying_buffers = property(
        lambda self: DecayingBuffers((1.0,) * len(self.theta), self.omega)
    )


def _sensitivity_of_another_mechanism() -> None:
    from dpftrl.mechanisms.blt import BLT
    from dpftrl.mechanisms.independent import Independent

    BLT.sensitivity = lambda _, participation: Independent().sensitivity(participation)


def _known_batches() -> None:
    from dpftrl.noise import NoiseKey
    from dpftrl.sampler import Sampler

    right = Sampler.__init__
    known = NoiseKey.generate()

    def fixed(self: Any, sampling: Any, key: Any) -> None:
        del key
        right(self, sampling, known)

    Sampler.__init__ = fixed


def _delta_off() -> None:
    from dpftrl.accounting import guarantee

    right = guarantee.epsilon_as_drawn

    def off(delta: float, *rest: Any, **options: Any) -> Any:
        return right(min(10 * delta, 0.5), *rest, **options)

    guarantee.epsilon_as_drawn = off


def _float32_sum() -> None:
    from dpftrl.clipping import ExactSum

    right = ExactSum.add

    def rounded(self: Any, *update: Any) -> None:
        right(self, *update)
        size = self.steps.size - (0 if self.joint is None else 1)
        self.steps[:size] = self.steps[:size].astype(np.float32).astype(np.int64)

    ExactSum.add = rounded


def _client_counted_twice() -> None:
    from dpftrl.federated.round import Reports

    right = Reports._check_may_report

    def lenient(self: Any, clients: Any, who: str) -> None:
        right(self, set(clients) - self.counted, who)

    Reports._check_may_report = lenient


def _model_before_commit() -> None:
    from dpftrl.federated.store.run_store import Checkpoint, RunStore

    right = RunStore.commit

    def early(self: Any, counted: Any, clipping: Any, model: Any, *rest: Any) -> None:
        self.checkpoint = Checkpoint(model, rest[0])
        right(self, counted, clipping, model, *rest)

    RunStore.commit = early


def _adaptive_clip_without_noise() -> None:
    from dpftrl.clipping import ExactSum
    from dpftrl.noise.stream import NoiseStream

    right = NoiseStream.add_to

    def spared(self: Any, total: Any, *rest: Any, **options: Any) -> None:
        bits = int(total.steps[-1]) if isinstance(total, ExactSum) and total.joint else None
        right(self, total, *rest, **options)
        if bits is not None:
            total.steps[-1] = bits

    NoiseStream.add_to = spared


def _rounding_left_out_of_mu() -> None:
    from dpftrl.accounting import guarantee

    guarantee.mu_with_rounding = lambda mu, *_: mu


def _epsilon_rounded_down() -> None:
    from dpftrl.accounting import guarantee

    right = guarantee.epsilon_as_drawn

    def down(*arguments: Any, **options: Any) -> Any:
        drawn = right(*arguments, **options)
        return drawn._replace(epsilon=drawn.epsilon * (1 - 5e-10))

    guarantee.epsilon_as_drawn = down


def _one_coordinate_without_noise() -> None:
    from dpftrl.noise.stream import NoiseStream

    right = NoiseStream.add_to

    def spared(self: Any, total: Any, *rest: Any, **options: Any) -> None:
        steps = total if isinstance(total, np.ndarray) else getattr(total, "steps", None)
        first = None if steps is None else steps[0]
        right(self, total, *rest, **options)
        if steps is not None:
            steps[0] = first

    NoiseStream.add_to = spared


def _cap_ignored() -> None:
    from dpftrl.federated.eligibility import Rules

    right = Rules.__init__

    def uncapped(self: Any, min_sep: int, cap: int, timer_hours: float | None) -> None:
        right(self, min_sep, 2**31 - 1 + 0 * cap, timer_hours)

    Rules.__init__ = uncapped


BUGS = {
    "noise-halved": Bug(
        "the noise has half of its standard deviation", "noise/stream", _noise_halved
    ),
    "row-reused": Bug(
        "the first row of noise after a resume is the last one before it",
        "noise/stream",
        _row_reused_after_resume,
    ),
    "buffers-lost": Bug(
        "noise buffers are not carried over a resume",
        "noise/stream",
        _buffers_not_carried_over,
    ),
    "min-sep": Bug(
        "the server lets clients return one round early",
        "federated/eligibility",
        _min_sep_off_by_one,
    ),
    "timer": Bug(
        "timers in hours end one hour early", "federated/eligibility", _timer_off_by_one_hour
    ),
    "cap": Bug("the server ignores the cap on contacts", "federated/eligibility", _cap_ignored),
    "clip-after-sum": Bug("the sum is clipped, not each update", "clipping", _clip_after_the_sum),
    "divisor": Bug(
        "the mean is over the updates that were fit",
        "federated/server",
        _division_by_the_number_of_reports,
    ),
    "nan": Bug(
        "a client that sends NaN is dropped, and another takes its place",
        "federated/round",
        _nan_drops_a_client,
    ),
    "theta": Bug(
        "the stream uses other decays than the strategy: its buffers never decay",
        "mechanisms/blt",
        _wrong_theta_in_the_stream,
    ),
    "sensitivity": Bug(
        "a BLT states the sensitivity of independent noise",
        "mechanisms/blt",
        _sensitivity_of_another_mechanism,
    ),
    "known-batches": Bug("all samplers draw the same batches", "sampler", _known_batches),
    "delta": Bug("epsilon is stated at ten times delta", "accounting/guarantee", _delta_off),
    "float32-sum": Bug("sums are rounded to float32", "clipping", _float32_sum),
    "counted-twice": Bug(
        "a client may report twice in one round", "federated/round", _client_counted_twice
    ),
    "before-commit": Bug(
        "a model can be read before its round is on the disk",
        "federated/store/run_store",
        _model_before_commit,
    ),
    "adaptive-clip": Bug(
        "the bits of adaptive clipping get no noise",
        "noise/stream",
        _adaptive_clip_without_noise,
    ),
    "buffer-rounding": Bug(
        "mu leaves out rounding in the noise buffers",
        "accounting/guarantee",
        _rounding_left_out_of_mu,
    ),
    "epsilon-digits": Bug(
        "epsilon is too small in its tenth digit", "accounting/guarantee", _epsilon_rounded_down
    ),
    "bare-coordinate": Bug(
        "the first coordinate gets no noise", "noise/stream", _one_coordinate_without_noise
    ),
}


def plant(name: str) -> None:
    """Plant a bug in this process."""
    BUGS[name].plant()


def pytest_configure() -> None:
    """Plant the bug that the environment names, before any test is imported."""
    if name := os.environ.get("PLANTED_BUG"):
        plant(name)
