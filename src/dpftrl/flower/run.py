"""The run behind a Flower strategy: creating or resuming it, its clock, and its nodes' identities.

`RunLocation` creates or resumes the run, `Patience` holds the waiting times, and `RunClock` is the
clock. `named_nodes` gives every node its name in the ledger, and `identity_of` tells how far these
names can be trusted.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, Final, Literal, final

import httpx
import msgspec
from flwr.serverapp import Grid
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float, whole_number
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.federated import RunFolder, Server, Settings, StartModel
from dpftrl.flower._flwr_internals import (
    ApiErrorCode,
    FleetHttpClient,
    FlowerError,
    HttpGrid,
    NodeAuthHttpInterceptor,
    RegisterNodeFleetRequest,
    RuntimeVersionHttpInterceptor,
    UnregisterNodeFleetRequest,
    connection_of,
    generate_key_pairs,
    log,
    on_lost_connection,
    public_key_to_bytes,
)
from dpftrl.flower.in_process import InProcessGrid
from dpftrl.plan import Plan

SECONDS_PER_HOUR: Final = 3600.0
LONGEST_BACKOFF: Final = 60.0  # seconds
# Seconds between two attempts to open a run that another server uses.
POLL_SECONDS: Final = 0.5

Model = dict[str, NDArray[Any]] | StartModel
Identity = Literal["stated", "registered", "unregistered"]


def identity_of(grid: Grid) -> Identity:
    """Return how the nodes of a grid are identified.

    Flower does not tell a ServerApp whether its SuperLink authenticates SuperNodes. This function
    finds out: it tries to register a node with a new key, which a SuperLink with authentication
    refuses. Without TLS a refusal proves nothing, because Flower signs the time of a message and
    not its content.

    Returns:
        "stated" for an `InProcessGrid`, whose creator chooses the node ids; "registered" if the
        SuperLink has TLS and accepts registered keys only; "unregistered" otherwise.
    """
    if isinstance(grid, InProcessGrid):
        return "stated"
    if isinstance(grid, HttpGrid):
        without_tls = connection_of(grid).insecure
        return "unregistered" if without_tls or _anybody_may_register(grid) else "registered"
    return "unregistered"


@final
class NodeIdentity:
    """How the nodes of a grid are identified: found out at the start, and after a lost connection.

    It is not found out before every attempt, because the SuperLink logs a refused registration as
    an error. A ServerApp that its SuperLink started ends with that SuperLink; one that outlives it
    (`--isolation process`) loses the connection.
    """

    def __init__(self, grid: Grid):
        self._grid = grid
        self._known: Identity | None = None
        if isinstance(grid, HttpGrid):
            on_lost_connection(grid, self._forget)

    def current(self) -> Identity:
        """Return how nodes are identified."""
        if self._known is None:
            self._known = identity_of(self._grid)
        return self._known

    def _forget(self) -> None:
        self._known = None


def named_nodes(grid: Grid, identity: Identity) -> dict[str, int]:
    """Return the ids of the nodes that are online, by their names in the ledger.

    The name of a registered node is the SHA-256 of its public key, because its id changes when the
    SuperLink loses its database. The name of any other node is its id.

    Raises:
        InvalidInput: A node has no key although all nodes should be registered.
    """
    if identity != "registered":
        return {str(node_id): node_id for node_id in grid.get_node_ids()}
    node_ids: dict[str, int] = {}
    for node in grid.get_nodes():
        if not node.public_key:
            raise InvalidInput(
                f"node {node.node_id} has no public key, although nodes must be registered; start "
                "the SuperLink with --enable-supernode-auth"
            )
        node_ids[hashlib.sha256(node.public_key).hexdigest()] = node.node_id
    return node_ids


def _anybody_may_register(grid: HttpGrid) -> bool:
    """Whether the SuperLink registers a node with an unknown key; that node is removed again."""
    private, public = generate_key_pairs()
    with FleetHttpClient.from_server_address(
        *connection_of(grid),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        ],
    ) as client:
        request = RegisterNodeFleetRequest(public_key=public_key_to_bytes(public))
        try:
            registered = client.RegisterNode(request)
        except httpx.HTTPStatusError as refused:
            error = FlowerError.from_json(refused.response.text)
            return error is None or error.code != ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
        client.UnregisterNode(UnregisterNodeFleetRequest(node_id=registered.node_id))
    return True


@final
@dataclass(frozen=True)
class Patience:
    """How long a deployment waits before it gives up. All times are in seconds.

    Attributes:
        replies: Time from contacting a cohort until missing replies count as drop-outs.
        nodes: Longest wait until enough nodes are online and may be contacted.
        lock: Longest wait for another server that still uses the run; 0 fails at once.
        attempts: Largest number of failed attempts in a row. Rounds that were closed as empty
            between two of them do not matter.
        backoff: Wait after the first failed attempt. Each further failure doubles the wait, up to
            60 seconds.
        interrupted: Longest wait, after a restart, for the nodes of an interrupted attempt. After
            it the attempt is abandoned, if enough other nodes may be contacted.
    """

    replies: float = 600.0
    nodes: float = 3600.0
    lock: float = 0.0
    attempts: int = 20
    backoff: float = 1.0
    interrupted: float = 60.0

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
    """A clock in hours since 1970 that never goes back and never jumps while the process lives.

    The machine's clock is read once. If it is behind the last contact of the run, the run's clock
    starts at that contact, so that no client can be contacted too early. A machine clock that was
    ahead when the process started cannot be distinguished from time that has passed. Clients may
    then return sooner than they should. The observed guarantee covers such early returns, because
    it is computed from the rounds between the contacts that took place.

    Args:
        last_contact: Time of the run's last contact, in hours; None if nobody was contacted yet.
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
        """Return the current time in hours since 1970."""
        return self._start + (time.monotonic() - self._started_at) / SECONDS_PER_HOUR


@final
@dataclass(frozen=True)
class RunLocation:
    """The folders of a run, and the conditions under which the run may be created or resumed.

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
        """Resume the run in the folder, or create a run if the folder holds none.

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
    """Return the parts of a plan that must not change when a run is resumed."""
    return (
        plan.fleet,
        plan.mechanism,
        plan.participation,
        plan.noise_multiplier,
        plan.guarantee.delta,
    )
