"""The run of a strategy: waiting times, the clock for contact timers, creating and resuming."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Final, final

import msgspec
from flwr.supercore import log
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float, whole_number
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.federated import RunFolder, Server, Settings, StartModel
from dpftrl.flower.identity import Identity
from dpftrl.plan import Plan

SECONDS_PER_HOUR: Final = 3600.0
LONGEST_BACKOFF: Final = 60.0
# Between two looks at a run that another server uses.
POLL_SECONDS: Final = 0.5

Model = dict[str, NDArray[Any]] | StartModel


@final
@dataclass(frozen=True)
class Patience:
    """How long a deployment waits before it gives up. All times are in seconds.

    Attributes:
        replies: Time from contacting a cohort until missing replies count as drop-outs.
        nodes: Longest wait until enough nodes are online and may be contacted.
        lock: Longest wait for another server that still uses the run; 0 fails at once.
        attempts: Largest number of failed attempts in a row.
        backoff: Wait after the first failed attempt. It doubles with each further one, up to 60 s.
    """

    replies: float = 600.0
    nodes: float = 3600.0
    lock: float = 0.0
    attempts: int = 20
    backoff: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= as_float(getattr(self, field.name)) < float("inf"):
                raise InvalidInput(
                    f"{field.name} must be a finite number that is not negative, "
                    f"got {getattr(self, field.name)!r}"
                )
        if not self.replies > 0:
            raise InvalidInput(f"replies must be above 0 seconds, got {self.replies!r}")
        whole_number("attempts", self.attempts)

    def before_attempt(self, failed: int) -> float:
        """Return the seconds to wait after `failed` failed attempts in a row."""
        # The exponent is capped, or 2.0**1024 would overflow.
        return min(LONGEST_BACKOFF, self.backoff * 2.0 ** min(failed - 1, 10))


@final
class RunClock:
    """Hours since 1970, which never go back and never jump while this process lives.

    The machine's clock is read once. If it is behind the last contact of the run, the clock starts
    at that contact, so that no client can be contacted too early. A machine clock that was ahead
    when the process started cannot be distinguished from time that has passed. Clients may then
    return sooner than they should. The observed guarantee includes this, because it counts the
    rounds between the contacts that took place.

    Args:
        last_contact: Time of the run's last contact, in hours; None if there was none.
    """

    def __init__(self, last_contact: float | None):
        now = time.time() / SECONDS_PER_HOUR
        self._start = now if last_contact is None else max(now, last_contact)
        self._started_at = time.monotonic()
        if self._start > now:
            log(
                WARNING,
                "The clock is %.1f hours behind the run's last contact; timers start from there",
                self._start - now,
            )

    def hours(self) -> float:
        """Return the current time."""
        return self._start + (time.monotonic() - self._started_at) / SECONDS_PER_HOUR


@final
@dataclass(frozen=True)
class RunLocation:
    """Where the files of a run are, and how it may be created or resumed.

    Attributes:
        folder: Folder with the run's files.
        state_folder: Folder with the run's witness.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
        wait: Seconds to wait for another server that uses the run.
    """

    folder: str | os.PathLike[str]
    state_folder: str | os.PathLike[str] | None
    trust_folder: bool
    insecure_test_key: int | None
    wait: float

    def open(self, plan: Plan, settings: Settings, model: Model, identity: Identity) -> Server:
        """Resume the run in the folder, or create it if the folder holds none.

        Raises:
            InvalidInput: The folder holds another run.
            UnsafeState: The nodes are identified less reliably than when the run was created.
            RunInUse: Another server still uses the run after the wait.
        """
        with_identity = msgspec.structs.replace(settings, identity=identity)
        return self._when_free(lambda: self._open(plan, with_identity, model))

    def _open(self, plan: Plan, settings: Settings, model: Model) -> Server:
        if not RunFolder(Path(self.folder)).exists:
            return Server.create(
                self.folder,
                plan,
                settings,
                model,
                state_folder=self.state_folder,
                insecure_test_key=self.insecure_test_key,
            )
        server = Server.resume(
            self.folder, state_folder=self.state_folder, trust_folder=self.trust_folder
        )
        try:
            _check_same(server, plan, settings, model)
        except BaseException:
            server.close()
            raise
        return server

    def _when_free(self, open_run: Callable[[], Server]) -> Server:
        """Call `open_run` until no other server uses the run, or the wait is over."""
        deadline, is_logged = time.monotonic() + self.wait, False
        while True:
            try:
                return open_run()
            except RunInUse as in_use:
                if time.monotonic() >= deadline:
                    raise
                if not is_logged:
                    log(INFO, "Waiting: %s", in_use)
                is_logged = True
            time.sleep(POLL_SECONDS)


def _check_same(server: Server, plan: Plan, settings: Settings, model: Model) -> None:
    """Refuse to resume a run with another plan, other settings or another model."""
    folder, stored = server.folder.root, server.settings
    is_stronger = (stored.identity, settings.identity) == ("unregistered", "registered")
    if stored.identity != settings.identity and not is_stronger:
        raise UnsafeState(
            f"the run in {folder} promises that its nodes are {stored.identity}, but these nodes "
            f"are {settings.identity}; resume it on the SuperLink that it was created on "
            "(--enable-supernode-auth, over TLS)"
        )
    if msgspec.structs.replace(settings, identity=stored.identity) != stored:
        raise InvalidInput(f"{folder} holds a run with other settings; resume it with the same")
    if _essentials(plan) != _essentials(server.plan):
        raise InvalidInput(f"{folder} holds a run of another plan; resume with its own plan.json")
    arrays = model.arrays if isinstance(model, StartModel) else model
    if mismatch := server.layout.misfit(arrays):
        raise InvalidInput(f"{folder} holds a run of another model: {mismatch}")
    if isinstance(model, StartModel) and model.start != server.start:
        raise InvalidInput(
            f"{folder} holds a run that started from another model file, or with another "
            "statement about its people; resume with the same StartModel.load"
        )


def _essentials(plan: Plan) -> tuple[object, ...]:
    """Return the parts of a plan that must be equal for two plans to be of one run."""
    return (
        plan.fleet,
        plan.mechanism,
        plan.participation,
        plan.noise_multiplier,
        plan.guarantee.delta,
    )
