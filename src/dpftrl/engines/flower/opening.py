"""The run that a strategy works on: begun, or gone on with."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any, Final, final

import msgspec
from flwr.supercore import log
from numpy.typing import NDArray

from dpftrl.engines.flower.identity import Identity
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.federated import RunFolder, Server, Settings, StartModel
from dpftrl.plan import Plan

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
        server = Server.open(
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
    if (ours.fleet, ours.mechanism, ours.participation, ours.sigma, ours.guarantee.delta) != (
        theirs.fleet,
        theirs.mechanism,
        theirs.participation,
        theirs.sigma,
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
