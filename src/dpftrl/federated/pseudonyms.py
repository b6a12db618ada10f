"""Pseudonyms of clients: keyed hashes of their names, and whole fleets that are hashed at once.

`Pseudonyms` computes keyed BLAKE2b with digests of 8 bytes (RFC 7693), as `hashlib.blake2b` does,
for many names in one call: per name, a call of `hashlib` takes longer than the hash itself. A
`Population` is the result for the names of a fleet.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple, Self, final

import numba
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.client_ids import MOST_PADDED_DIGITS, canonical_id, is_plain_id
from dpftrl._internal.compiled import compiled
from dpftrl.errors import InvalidInput
from dpftrl.noise import NoiseKey

Keys = NDArray[np.uint64]
Positions = NDArray[np.intp]
NONE_LISTED: Final = np.empty(0, np.intp)
uint64: Any = numba.uint64

BLOCK_BYTES: Final = 128  # that BLAKE2b compresses at a time
DIGEST_BYTES: Final = 8
# The kinds of names that `hash_names` tells apart; see `dpftrl._internal.client_ids`.
PLAIN: Final = 0  # `is_plain_id` holds
PADDED: Final = 1  # digits with leading zeros, not too long
OTHER: Final = 2  # not known here: Python code has to look at the name
EMPTY: Final = 3

# RFC 7693: the initial values (2.6), and the order of the words of a block in each round (2.7).
_IV: Final = np.array(
    [
        0x6A09E667F3BCC908,
        0xBB67AE8584CAA73B,
        0x3C6EF372FE94F82B,
        0xA54FF53A5F1D36F1,
        0x510E527FADE682D1,
        0x9B05688C2B3E6C1F,
        0x1F83D9ABFB41BD6B,
        0x5BE0CD19137E2179,
    ],
    np.uint64,
)
_ORDERS: Final = np.array(
    [
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
        [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
        [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
        [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
        [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
        [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
        [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
        [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
        [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    ],
    np.uint8,
)


@numba.njit
def _mix(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
    """The function G of RFC 7693, 3.1."""
    a = a + b + x
    d ^= a
    d = (d >> uint64(32)) | (d << uint64(32))
    c = c + d
    b ^= c
    b = (b >> uint64(24)) | (b << uint64(40))
    a = a + b + y
    d ^= a
    d = (d >> uint64(16)) | (d << uint64(48))
    c = c + d
    b ^= c
    b = (b >> uint64(63)) | (b << uint64(1))
    return a, b, c, d


@numba.njit
def _compress(h: Any, m: Any, length: Any, is_last: Any) -> Any:
    """The function F of RFC 7693, 3.2: put the block `m` into the state `h`."""
    v0, v1, v2, v3 = h[0], h[1], h[2], h[3]
    v4, v5, v6, v7 = h[4], h[5], h[6], h[7]
    v8, v9, v10, v11 = _IV[0], _IV[1], _IV[2], _IV[3]
    v12, v13, v14, v15 = _IV[4] ^ uint64(length), _IV[5], _IV[6], _IV[7]
    if is_last:
        v14 = ~v14
    for i in range(12):
        s = _ORDERS[i]
        v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m[s[0]], m[s[1]])
        v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m[s[2]], m[s[3]])
        v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m[s[4]], m[s[5]])
        v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m[s[6]], m[s[7]])
        v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m[s[8]], m[s[9]])
        v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m[s[10]], m[s[11]])
        v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m[s[12]], m[s[13]])
        v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m[s[14]], m[s[15]])
    h[0] ^= v0 ^ v8
    h[1] ^= v1 ^ v9
    h[2] ^= v2 ^ v10
    h[3] ^= v3 ^ v11
    h[4] ^= v4 ^ v12
    h[5] ^= v5 ^ v13
    h[6] ^= v6 ^ v14
    h[7] ^= v7 ^ v15


@numba.njit
def _load(m: Any, text: Any, start: Any, end: Any) -> Any:
    """Copy at most a block of `text` to the 16 words `m`, followed by zeros."""
    for i in range(16):
        m[i] = uint64(0)
    for i in range(min(end - start, BLOCK_BYTES)):
        m[i >> 3] |= uint64(text[start + i]) << uint64(8 * (i & 7))


@numba.njit(**compiled)
def keyed_state(key: Any, h: Any) -> None:
    """Set `h` to the state of BLAKE2b after a key of at most 64 bytes, for digests of 8 bytes."""
    m = np.empty(16, np.uint64)
    for i in range(8):
        h[i] = _IV[i]
    h[0] ^= uint64(0x01010000) ^ uint64(len(key) << 8) ^ uint64(DIGEST_BYTES)
    _load(m, key, 0, len(key))
    _compress(h, m, BLOCK_BYTES, False)


@numba.njit
def _digest(state: Any, h: Any, m: Any, text: Any, start: Any, end: Any) -> Any:
    """The digest of text[start:end], not empty, as a number: its first byte is the highest."""
    for i in range(8):
        h[i] = state[i]
    length = BLOCK_BYTES  # of the key
    while True:
        _load(m, text, start, end)
        is_last = end - start <= BLOCK_BYTES
        length += end - start if is_last else BLOCK_BYTES
        _compress(h, m, length, is_last)
        if is_last:
            break
        start += BLOCK_BYTES
    digest = uint64(0)
    for i in range(8):
        digest = (digest << uint64(8)) | ((h[0] >> uint64(8 * i)) & uint64(0xFF))
    return digest


@numba.njit
def _kind(text: Any, start: Any, end: Any, most_padded: Any) -> Any:
    """The kind of the name text[start:end]."""
    if start == end:
        return EMPTY
    first, last = text[start], text[end - 1]
    digits = letters = 0  # letters: of an identifier
    is_number_like = True
    for i in range(start, end):
        c = text[i]
        if c < 0x20 or c > 0x7E:
            return OTHER
        is_digit = 0x30 <= c <= 0x39
        digits += is_digit
        letters += (0x41 <= c <= 0x5A) | (0x61 <= c <= 0x7A) | (c == 0x5F)
        # Characters that occur in numbers: digits + - . e E; and the space, which is not visible.
        in_numbers = is_digit or c in (0x2B, 0x2D, 0x2E, 0x45, 0x65, 0x20)
        is_number_like &= in_numbers
    size = end - start
    if digits == size:
        if first != 0x30 or size == 1:
            return PLAIN
        return PADDED if size <= most_padded else OTHER
    if digits + letters == size and not 0x30 <= first <= 0x39:
        return PLAIN  # an identifier
    if not is_number_like:
        return PLAIN if first != 0x20 and last != 0x20 else OTHER
    if first == 0x2D and size > 1 and digits == size - 1 and text[start + 1] != 0x30:
        return PLAIN  # a negative number
    return OTHER


@numba.njit(**compiled)
def hash_names(
    text: Any, separator: int, state: Any, most_padded: int, keys: Any, forms: Any, kinds: Any
) -> int:
    """Hash names that stand one after the other in a buffer, and tell their kinds.

    Args:
        text: The names in UTF-8, with a separator between two of them.
        separator: The separator, which is one byte.
        state: The state of BLAKE2b after the key; see `keyed_state`.
        most_padded: Largest length of a `PADDED` name.
        keys: Gets the hash of each name.
        forms: Gets the hash of each padded name without its leading zeros.
        kinds: Gets the kind of each name.

    Returns:
        The number of names in the buffer. If it is not the length of `keys`, a name contains the
        separator, and the result must not be used.
    """
    h, m = np.empty(8, np.uint64), np.empty(16, np.uint64)
    start, names = 0, 0
    for end in range(len(text) + 1):
        if end < len(text) and text[end] != separator:
            continue
        if names < len(keys):
            kind = _kind(text, start, end, most_padded)
            kinds[names] = kind
            if kind != EMPTY:
                keys[names] = _digest(state, h, m, text, start, end)
            if kind == PADDED:
                while start < end - 1 and text[start] == 0x30:
                    start += 1
                forms[names] = _digest(state, h, m, text, start, end)
        names += 1
        start = end + 1
    return names


# Pseudonyms start with a letter, so that no program takes them for numbers.
PREFIX: Final = "c"
# Names that are hashed in one call: enough that the call itself takes no time.
BATCH: Final = 65_536
# What stands between two names that are hashed in one call.
LINE_BREAK: Final = "\n"
NOT_IN_UTF8: Final = b"\xff"


class Hashed(NamedTuple):
    """The pseudonyms of names, and which names may not be their own canonical form.

    Attributes:
        keys: The pseudonym of each name.
        unclear: Positions of the names that may not be their own canonical form: mostly none.
        forms: The pseudonyms of the canonical forms of these names.
        unusual: Positions of those of them that are not digits with leading zeros.
    """

    keys: Keys
    unclear: NDArray[np.intp]
    forms: Keys
    unusual: NDArray[np.intp]


@final
class Pseudonyms:
    """Keyed 64-bit hashes of client names, which only the holder of the run's key can compute."""

    def __init__(self, key: NoiseKey):
        self._state = np.empty(8, np.uint64)  # as secret as the key
        secret = key.derive(b"pseudonyms")
        keyed_state(np.frombuffer(secret.secret_bytes(), np.uint8), self._state)

    def __repr__(self) -> str:
        return "Pseudonyms(secret)"

    def keys(self, names: Sequence[str]) -> Keys:
        """The pseudonym of each name, as a number."""
        return self.hashed(names).keys

    def key(self, name: str) -> int:
        """The pseudonym of a name, as a number."""
        return int(self.keys([name])[0])

    def hashed(self, names: Sequence[str]) -> Hashed:
        """The pseudonyms of names, and which of them may have another canonical form.

        Raises:
            InvalidInput: A name is not a text, is empty, or is not valid Unicode.
        """
        parts, rest, first = list[Hashed](), iter(names), 0
        while batch := list(islice(rest, BATCH)):
            keys, forms, kinds = self._hash(batch)
            odd = np.flatnonzero(kinds == OTHER).tolist()
            unusual = [i for i in odd if not is_plain_id(batch[i])]
            if unusual:
                forms[unusual], _, _ = self._hash([canonical_id(batch[i]) or " " for i in unusual])
            kinds[unusual] = PADDED
            unclear = np.flatnonzero(kinds == PADDED)
            at = np.array(unusual, np.intp) + first
            parts.append(Hashed(keys, unclear + first, forms[unclear], at))
            first += len(batch)
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, np.uint64), np.empty(0, np.intp)
        parts.append(Hashed(empty[0], empty[1], empty[0], empty[1]))
        return Hashed(*(np.concatenate(part) for part in zip(*parts, strict=True)))

    def _hash(self, names: Sequence[str]) -> tuple[Keys, Keys, NDArray[np.uint8]]:
        """The pseudonyms of names, those of padded names without zeros, and the kinds of names."""
        keys, forms = np.empty(len(names), np.uint64), np.empty(len(names), np.uint64)
        kinds = np.empty(len(names), np.uint8)
        if not names:
            return keys, forms, kinds
        if {*map(type, names)} != {str}:
            _refuse_what_is_no_name(names)
        try:
            text = np.frombuffer(LINE_BREAK.join(names).encode(), np.uint8)
        except UnicodeEncodeError:
            _refuse_what_is_no_name(names)
            raise
        # The state is in no local variable: a traceback could show it.
        result = (MOST_PADDED_DIGITS, keys, forms, kinds)
        if hash_names(text, ord(LINE_BREAK), self._state, *result) != len(names):
            # A name contains a line break. No name contains 0xff, which UTF-8 does not use.
            text = np.frombuffer(NOT_IN_UTF8.join(map(str.encode, names)), np.uint8)
            hash_names(text, ord(NOT_IN_UTF8), self._state, *result)
        if (kinds == EMPTY).any():
            _refuse_what_is_no_name(names)
        return keys, forms, kinds


def _refuse_what_is_no_name(names: Sequence[object]) -> None:
    for name in names:
        if type(name) is not str or not name:
            raise InvalidInput(f"a client's name is a text that is not empty, got {name!r:.60}")
        try:
            name.encode()
        except UnicodeEncodeError:
            raise InvalidInput(f"a client's name must be valid Unicode, got {name!r:.60}") from None


def written(key: int) -> str:
    """A pseudonym as text, as it is written to files."""
    return f"{PREFIX}{key:016x}"


@final
class Population:
    """Names of clients with their pseudonyms, to begin many rounds with.

    `Server.population` makes one. It hashes and checks the names once; a round that begins with it
    looks up the names of its cohort only. The names cannot be changed afterwards: make a new
    population when clients join. `select` says who is available in a round.
    """

    def __init__(self, names: Sequence[str], keys: Keys, owner: object):
        """Call `Server.population` instead.

        Args:
            names: The names, in any order. A name may be there more than once.
            keys: Their pseudonyms, in the same order.
            owner: Whoever made the pseudonyms: they depend on the key of the run.
        """
        self.owner = owner
        self.available: NDArray[np.bool_] | None = None  # for each of `keys`; None: all
        self._names = names
        order = np.argsort(keys, kind="stable")  # of equal pseudonyms, the last name is kept
        in_order = keys[order]
        is_last = np.append(in_order[1:] != in_order[:-1], True)[: len(keys)]
        has_repeats = not is_last.all()
        self.keys: Keys = in_order[is_last] if has_repeats else in_order
        self._order = order
        self._is_last = is_last if has_repeats else None

    def __len__(self) -> int:
        """The number of different clients that are available."""
        return len(self.keys) if self.available is None else int(self.available.sum())

    def __repr__(self) -> str:
        return f"Population({len(self):,} of {len(self.keys):,} clients)"

    def select(self, which: Any) -> Self:
        """The clients that are available now, as a population that shares the memory of this one.

        Args:
            which: Of the names as they were given, a mask (an array of booleans, as long as the
                names) or their positions (an array of whole numbers).
        """
        chosen = np.asarray(which)
        if chosen.dtype == np.bool_ and chosen.shape != (len(self._names),):
            raise InvalidInput(
                f"a mask has one entry for each of the {len(self._names):,} names, got an array of "
                f"shape {chosen.shape}"
            )
        if not chosen.size:
            chosen = NONE_LISTED
        if chosen.dtype != np.bool_ and not (
            chosen.ndim == 1
            and np.issubdtype(chosen.dtype, np.integer)
            and np.all((chosen >= 0) & (chosen < len(self._names)))
        ):
            raise InvalidInput(
                "the available clients are a mask, or positions from 0 to "
                f"{len(self._names) - 1:,}; got an array of {chosen.dtype} that is neither"
            )
        available = np.zeros(len(self.keys), np.bool_)
        available[self._places[chosen]] = True
        selected = object.__new__(type(self))
        selected.__dict__.update(self.__dict__)
        selected.available = available
        return selected

    def names_of(self, keys: Keys) -> dict[int, str]:
        """Names of the available clients by pseudonym, for some pseudonyms in rising order."""
        at = np.searchsorted(self.keys, keys)
        known = at < len(self.keys)
        known[known] = self.keys[at[known]] == keys[known]
        if self.available is not None:
            known[known] = self.available[at[known]]
        positions: list[int] = self._positions[at[known]].tolist()
        found = zip(keys[known].tolist(), positions, strict=True)
        return {key: self._names[position] for key, position in found}

    @cached_property
    def _positions(self) -> Positions:
        """The position of the name of each of `keys`."""
        return self._order if self._is_last is None else self._order[self._is_last]

    @cached_property
    def _places(self) -> Positions:
        """For each name, the position of its pseudonym in `keys`."""
        places = np.empty(len(self._order), np.intp)
        if self._is_last is None:
            places[self._order] = np.arange(len(self._order))
        else:
            places[self._order] = np.cumsum(self._is_last) - self._is_last
        return places
