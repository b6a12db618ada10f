"""Names under which clients appear in files: keyed hashes, by default."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.client_ids import (
    canonical_id,
    has_known_spellings,
    is_plain_id,
    other_spellings,
    shown,
    why_unfit,
)
from dpftrl.errors import InvalidInput
from dpftrl.federated.timers import Timers
from dpftrl.noise import NoiseKey

Keys = NDArray[np.uint64]

# A letter first, so that nobody takes a pseudonym for a number.
PREFIX: Final = "c"
# Names whose pseudonyms are remembered.
MOST_REMEMBERED: Final = 1_000_000


@final
class Pseudonyms:
    """Keyed hashes of 64 bits: without the key of the run, nobody can tell whose they are."""

    def __init__(self, key: NoiseKey):
        self._key = key.derive(b"pseudonyms")
        self._known: dict[str, int] = {}

    def __repr__(self) -> str:
        return "Pseudonyms(secret)"

    def keys(self, names: Sequence[str]) -> Keys:
        """The pseudonym of each name, as a number."""
        return np.fromiter((self.key(name) for name in names), np.uint64, len(names))

    def key(self, name: str) -> int:
        """The pseudonym of a name, as a number."""
        found = self._known.get(name) if type(name) is str else None
        if found is None:
            found = self._hash(name)
            if len(self._known) < MOST_REMEMBERED:
                self._known[name] = found
        return found

    def _hash(self, name: str) -> int:
        digest = blake2b(_content(name), digest_size=8, key=self._key.secret_bytes()).digest()
        return int.from_bytes(digest, "big")

    def refuse_renamed(self, names: Sequence[str], timers: Timers) -> None:
        """Refuse a client that was contacted before under another spelling of the same number.

        The files of a run hold hashes, not names. So all spellings that `refuse_unclear` lets pass
        are hashed and looked up, which finds them after a restart too.

        Args:
            names: Who is about to be contacted.
            timers: Who was contacted before.
        """
        # For a client that was contacted before, this was checked at its first contact.
        never = (timers.contacts(self.keys(names)) == 0).tolist()
        pairs = [
            (name, other)
            for name, is_new in zip(names, never, strict=True)
            if is_new
            for other in other_spellings(name)
        ]
        keys = np.fromiter((self._hash(other) for _, other in pairs), np.uint64, len(pairs))
        for position in np.flatnonzero(timers.contacts(keys) > 0)[:1]:
            name, other = pairs[int(position)]
            raise _two_spellings(name, f"{shown(other)}, who was contacted before,")


def refuse_unclear(by_key: Mapping[int, str], timers: Timers) -> None:
    """Refuse names under which one client could be taken for two.

    Guarantees:
        Two different names that pass here and in `Pseudonyms.refuse_renamed`, in any rounds of one
        run, have different canonical forms (see `dpftrl.client_ids`). A name must be its own
        canonical form. The exceptions are digits with zeros in front (`007`) and what looks like an
        exponent and may be hexadecimal (`1e5`), since all such spellings of a number can be listed.

    A run that version 0.1.0 began may have contacted clients under other names. Those names are
    accepted in that run, since a client that gets a new name loses its timer; the guarantee above
    does not cover them.

    Args:
        by_key: The names, by pseudonym.
        timers: Who was contacted before.
    """
    unclear = {key: name for key, name in by_key.items() if not is_plain_id(name)}
    if not unclear:
        return
    contacted = timers.contacts(np.fromiter(unclear, np.uint64, len(unclear))) > 0
    all_names, by_form = set(by_key.values()), dict[str, str]()
    for name, is_known in zip(unclear.values(), contacted.tolist(), strict=True):
        form = canonical_id(name)
        if not is_known:
            _refuse_unusual(name, form)
        other = form if form in all_names else by_form.setdefault(form, name)
        if other != name:
            raise _two_spellings(name, shown(other))


def _refuse_unusual(name: str, form: str) -> None:
    if has_known_spellings(name):
        return
    if reason := why_unfit(name):
        raise InvalidInput(f"client name {shown(name)} {reason}")
    if name == form:
        return
    if has_known_spellings(form.removeprefix("-")):
        raise InvalidInput(
            f"client name {shown(name)} is a number, and one client could come under two spellings "
            f"of it; pass {shown(form)}, or put a letter in front of all names"
        )
    raise InvalidInput(
        f"client name {shown(name)} has white space or invisible characters at its ends, or is not "
        f"in Unicode form NFC, so that one client could come under two names; pass {shown(form)}"
    )


def _two_spellings(name: str, other: str) -> InvalidInput:
    return InvalidInput(
        f"client names {shown(name)} and {other} differ only in how they are written, so that one "
        "client could take part under both; pass one of them only, or begin a run in which all "
        "names start with a letter"
    )


def _content(name: str) -> bytes:
    if type(name) is not str or not name:
        raise InvalidInput(f"a client's name is a text that is not empty, got {name!r:.60}")
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"a client's name must be valid Unicode, got {name!r:.60}") from None


def written(key: int) -> str:
    """A pseudonym as it stands in files."""
    return f"{PREFIX}{key:016x}"
