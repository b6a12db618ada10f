"""The run that a strategy works on: begun, or gone on with."""

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


@final
@dataclass(frozen=True)
class Patience:
    """Limits of a deployment; all times in seconds.

    Attributes:
        replies: From asking a cohort to giving up on those who have not answered.
        nodes: For enough nodes to be online and rested.
        lock: For an earlier server that still works on the run; 0 refuses at once.
        attempts: Attempts in a row that may come to nothing.
        backoff: Between the first of them and the next; it doubles with each, up to a minute.
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
            raise InvalidInput("replies must be above 0: a message cannot be answered in no time")
        whole_number("attempts", self.attempts)

    def before_attempt(self, failed: int) -> float:
        """How long to wait after so many attempts in a row that came to nothing."""
        return min(60.0, self.backoff * 2.0 ** min(failed - 1, 10))


HOUR: Final = 3600.0


@final
class RunClock:
    """Hours since 1970, which never go back and never jump while this process lives.

    The machine's clock is asked once. If it is behind what the run has seen, the run goes on from
    there: nobody's turn comes sooner for that. A clock that was too far ahead when the process
    started cannot be told from time that passed; devices may then return sooner, and the guarantee,
    which counts the rounds between their turns as they were, says what that costs.

    Args:
        seen: The latest time that the run knows of, in hours.
    """

    def __init__(self, seen: float | None):
        now = time.time() / HOUR
        self._start = now if seen is None else max(now, seen)
        self._since = time.monotonic()
        if self._start > now:
            log(
                WARNING,
                "The clock is %.1f hours behind the run's last turn; timers go on from that turn",
                self._start - now,
            )

    def hours(self) -> float:
        """The time now."""
        return self._start + (time.monotonic() - self._since) / HOUR


POLL_SECONDS: Final = 0.5

Model = dict[str, NDArray[Any]] | StartModel


@final
@dataclass(frozen=True)
class Place:
    """Where a run is, and how it may be opened.

    Attributes:
        folder: The run's files.
        state_folder: Where its witness is.
        trust_folder: Go on although the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests alone.
        wait: Seconds to wait for another server that works on it.
    """

    folder: str | os.PathLike[str]
    state_folder: str | os.PathLike[str] | None
    trust_folder: bool
    insecure_test_key: int | None
    wait: float

    def open(self, plan: Plan, settings: Settings, model: Model, identity: Identity) -> Server:
        """Go on with the run that is here, if it is the one that is meant; or begin it."""
        told = msgspec.structs.replace(settings, identity=identity)
        return self._when_free(lambda: self._open(plan, told, model))

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

    def _when_free(self, opened: Callable[[], Server]) -> Server:
        deadline, said = time.monotonic() + self.wait, False
        while True:
            try:
                return opened()
            except RunInUse as busy:
                if time.monotonic() >= deadline:
                    raise
                if not said:
                    log(INFO, "Waiting: %s", busy)
                said = True
            time.sleep(POLL_SECONDS)


def _check_same(server: Server, plan: Plan, settings: Settings, model: Model) -> None:
    """Whoever resumes a run must mean the run that is there."""
    folder, kept = server.folder.root, server.settings
    stronger = (kept.identity, settings.identity) == ("unregistered", "registered")
    if kept.identity != settings.identity and not stronger:
        raise UnsafeState(
            f"the run in {folder} promises that its nodes are {kept.identity}, and these are "
            f"{settings.identity}; go on where it began (--enable-supernode-auth, over TLS)"
        )
    if msgspec.structs.replace(settings, identity=kept.identity) != kept:
        raise InvalidInput(f"{folder} holds a run with other settings; resume with the same")
    ours, theirs = plan, server.plan
    if (
        ours.fleet,
        ours.mechanism,
        ours.participation,
        ours.noise_multiplier,
        ours.guarantee.delta,
    ) != (
        theirs.fleet,
        theirs.mechanism,
        theirs.participation,
        theirs.noise_multiplier,
        theirs.guarantee.delta,
    ):
        raise InvalidInput(f"{folder} holds a run of another plan; resume with its own plan.json")
    arrays = model.arrays if isinstance(model, StartModel) else model
    if why := server.layout.misfit(arrays):
        raise InvalidInput(f"{folder} holds a run of another model: {why}")
    if isinstance(model, StartModel) and model.start != server.start:
        raise InvalidInput(
            f"{folder} holds a run that started from another model file, or with another "
            "statement about its people; resume with the same StartModel.load"
        )
