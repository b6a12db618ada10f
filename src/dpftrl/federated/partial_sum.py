"""The messages between a server and its aggregators: assignments, and partial sums.

An aggregator takes the reports of a share of a cohort, clips them, and adds them on the grid of the
run. Sums on the grid are whole numbers, so the total does not depend on how a cohort is split. The
server gives an `Assignment` to an aggregator and gets back a `PartialSum`. Both are plain values
with an encoding, for any transport that is encrypted and authenticated.
"""

from typing import Literal, Self, final

import msgspec
import numpy as np

from dpftrl._internal.arrays import Layout
from dpftrl.clipping import Grid
from dpftrl.errors import InvalidInput


@final
class Assignment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an aggregator must know to take the reports of its share of a cohort.

    It names clients, so it is as private as the ledger of the run. It contains no data of theirs.

    Attributes:
        run: The identity of the run.
        attempt: Number of the attempt that the reports must be for.
        id: Identity of the assignment, which is also that of its partial sum.
        clients: Names of the clients whose reports the aggregator takes.
        goal: The aggregator counts at most this many reports.
        step: The step of the grid.
        clip_norm: The largest L2 norm of an update.
        names: Names of the arrays of the model.
        shapes: Shapes of these arrays, in the same order.
    """

    format: Literal["dpftrl assignment"] = "dpftrl assignment"
    version: Literal[1] = 1
    run: str
    attempt: int
    id: str
    clients: tuple[str, ...]
    goal: int
    step: float
    clip_norm: float
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __repr__(self) -> str:
        return f"Assignment({len(self.clients)} clients, attempt={self.attempt})"

    def encoded(self) -> bytes:
        """The assignment as JSON, to send it to an aggregator."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read an assignment.

        Raises:
            InvalidInput: The data is not an assignment.
        """
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"this is not an assignment: {error}") from None

    @property
    def layout(self) -> Layout:
        """The names and shapes of the arrays of the model."""
        return Layout(self.names, self.shapes)

    @property
    def grid(self) -> Grid:
        """The grid of the run."""
        return Grid(self.step, self.clip_norm)


@final
class PartialSum(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, eq=False):
    """The exact sum of the clipped updates of some clients, without noise.

    It is as secret as the updates. It has no text form that shows the sum, it cannot be pickled,
    and the sum is kept in memoryviews, whose text form shows nothing in a traceback.

    Attributes:
        run: The identity of the run.
        attempt: Number of the attempt.
        id: Identity of the assignment.
        clients: Names of the clients whose updates are in the sum.
        unfit: Names of those of them whose update could not be used and counts as zeros.
        steps: The sum in steps of the grid, as int64 in little-endian byte order.
    """

    format: Literal["dpftrl partial sum"] = "dpftrl partial sum"
    version: Literal[1] = 1
    run: str
    attempt: int
    id: str
    clients: tuple[str, ...]
    unfit: tuple[str, ...]
    steps: memoryview

    def __repr__(self) -> str:
        return f"PartialSum({len(self.clients)} clients, attempt={self.attempt}, secret)"

    def encoded(self) -> memoryview:
        """The partial sum as MessagePack, to send it to the server; as secret as the sum."""
        return memoryview(msgspec.msgpack.encode(self))

    @classmethod
    def decoded(cls, data: bytes | bytearray | memoryview) -> Self:
        """Read a partial sum. If it is given as a memoryview, no traceback of this method shows it.

        Raises:
            InvalidInput: The data is not a partial sum.
        """
        view = memoryview(data)
        if not view.readonly:  # the checks of the server hold for memory that nobody can change
            view = memoryview(bytes(data))
        try:
            return msgspec.msgpack.decode(view, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"this is not a partial sum: {error}") from None

    def sum(self) -> memoryview:
        """The sum as whole numbers of int64, which nobody can change.

        Raises:
            InvalidInput: The steps are not whole numbers of 8 bytes.
        """
        if len(self.steps) % 8:
            raise InvalidInput("the steps of a partial sum are whole numbers of 8 bytes each")
        return np.frombuffer(self.steps, "<i8").astype(np.int64, copy=False).data
