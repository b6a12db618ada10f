"""Snapshots: the state of a run after one of its rounds, so that resuming need not replay them all.

A snapshot is a cache. It has a keyed digest of its content, which is checked before anything in it
is read, and it names a line of the journal by its number and digest. A file that is missing,
damaged or of another run is ignored: the whole journal is then replayed. A snapshot of this run
whose line is not in the journal is refused, because the journal was rolled back. So a snapshot that
is used always belongs to the journal as it is, and replaying the lines after it gives the same
state as replaying all lines.

The file is the digest (HMAC-SHA256, 64 hexadecimal digits), a header in JSON, and arrays, with a
line break after each of the first two. It is as secret as the journal.
"""

import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, final

import msgspec
import numpy as np

from dpftrl._internal.storage import read_file, replace_with
from dpftrl.adaptive_clipping import ClippedRound
from dpftrl.errors import DpftrlError
from dpftrl.federated.eligibility import Eligibility, Exposure, History
from dpftrl.federated.store.journal import Created, RunState
from dpftrl.journal import Journal
from dpftrl.noise import NoiseKey

SEAL_BYTES: Final = 65  # 64 hexadecimal digits and a line break
MOST_BYTES: Final = 2**40
# The types of the arrays at the end, which are the first four fields of `History`.
COLUMNS: Final = (np.dtype("<u8"), np.dtype("<i4"), np.dtype("<i4"), np.dtype("<f8"))
DIGEST_BYTES: Final = 34  # the digest of a round as JSON: 32 hexadecimal digits and two quotes


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The header of a snapshot.

    Attributes:
        lines: The number of the last journal line before the snapshot.
        mac: The keyed digest of that line.
        created, rounds, attempts, checkpoint_sha256, ledger, epsilon, clock, goal_reached,
            clipping, failures: See `RunState`.
        released: The exposure up to the last committed round.
        contacted: The exposure including attempts that were abandoned since.
        clients: Number of clients that were contacted.
        times: Number of rounds with a time, for timers by time.
    """

    format: Literal["dpftrl snapshot"] = "dpftrl snapshot"
    version: Literal[1] = 1
    lines: int
    mac: str
    created: Created
    rounds: int
    attempts: int
    checkpoint_sha256: str
    ledger: tuple[int, str] | None
    epsilon: float
    clock: float | None
    goal_reached: bool
    released: tuple[int | None, int]
    contacted: tuple[int | None, int]
    clients: int
    times: int
    clipping: ClippedRound | None = None
    failures: int = 0


@final
class Snapshot(NamedTuple):
    """What a snapshot restores.

    Attributes:
        line: The number and the digest of the last journal line before the snapshot.
        exposure: The exposure up to the last committed round.
    """

    line: tuple[int, str]
    exposure: Exposure


def save_snapshot(
    path: Path,
    key: NoiseKey,
    journal: Journal[Any],
    state: RunState,
    eligibility: Eligibility,
    exposure: Exposure,
) -> None:
    """Write a snapshot of a run in which no attempt is open."""
    assert state.created is not None
    assert state.pending is None
    assert state.empty is None
    history = eligibility.history()
    header = Header(
        lines=journal.lines,
        mac=journal.mac,
        created=state.created,
        rounds=state.rounds,
        attempts=state.attempts,
        checkpoint_sha256=state.checkpoint_sha256,
        ledger=state.ledger,
        epsilon=state.epsilon,
        clock=state.clock,
        goal_reached=state.goal_reached,
        released=exposure,
        contacted=history.exposure,
        clients=len(history.keys),
        times=len(history.times),
        clipping=state.clipping,
        failures=state.failures,
    )
    parts = [
        memoryview(msgspec.json.encode(header) + b"\n"),
        *(memoryview(bytes(digest)) for digest in state.digests),
        *(
            column.astype(kind, copy=False).view(np.uint8).data
            for column, kind in zip(history[:4], COLUMNS, strict=True)
        ),
    ]
    seal = _seal(key, parts)
    replace_with(path, lambda file: file.writelines([seal, *parts]), private=True)


def load_snapshot(
    path: Path, key: NoiseKey, run: str, state: RunState, eligibility: Eligibility
) -> Snapshot | None:
    """Restore the state of a run from its snapshot; None, and no change, if there is no such file.

    The caller must refuse a journal without the line of the snapshot.

    Args:
        path: The file.
        key: The noise key of the run.
        run: The identity of the run.
        state: An empty state, which is filled.
        eligibility: An eligibility without contacts, which is filled.
    """
    try:
        content = memoryview(read_file(path, MOST_BYTES, own=True))
    except DpftrlError:  # missing, or not a file of this user
        return None
    rest = content[SEAL_BYTES:]
    if not hmac.compare_digest(content[:SEAL_BYTES], _seal(key, [rest])):
        return None
    end = _end_of_line(rest)
    try:
        header = msgspec.json.decode(rest[:end], type=Header)
    except msgspec.MsgspecError:  # written by a later version
        return None
    if header.created.run != run:  # possible for test keys only, which two runs can share
        return None
    at = end + 1 + header.rounds * DIGEST_BYTES
    starts = range(end + 1, at, DIGEST_BYTES)
    # Copies, because a view would keep the whole file in memory.
    digests = [msgspec.Raw(bytes(rest[i : i + DIGEST_BYTES])) for i in starts]
    columns = list[Any]()
    counts = (header.clients, header.clients, header.clients, header.times)
    for kind, count in zip(COLUMNS, counts, strict=True):
        columns.append(np.frombuffer(rest, kind, count, at).astype(kind.newbyteorder("=")))
        at += count * kind.itemsize
    keys, last, often, times = columns
    eligibility.restore(
        History(keys, last, often, times, Exposure(*header.contacted)), header.clock
    )
    state.created, state.rounds, state.attempts = header.created, header.rounds, header.attempts
    state.checkpoint_sha256, state.ledger = header.checkpoint_sha256, header.ledger
    state.epsilon, state.clock, state.digests = header.epsilon, header.clock, digests
    state.goal_reached, state.clipping = header.goal_reached, header.clipping
    state.failures = header.failures
    return Snapshot((header.lines, header.mac), Exposure(*header.released))


def _seal(key: NoiseKey, parts: Iterable[memoryview]) -> bytes:
    """The keyed digest of the rest of the file, and a line break."""
    keyed = hmac.new(key.derive(b"snapshot").secret_bytes(), digestmod="sha256")
    for part in parts:
        keyed.update(part)
    return keyed.hexdigest().encode() + b"\n"


def _end_of_line(content: memoryview) -> int:
    return bytes(content[: 2**20]).index(b"\n")
