"""Users' names: which are safe to write down, and how chance is taken from them."""

from hashlib import sha256
from unicodedata import normalize

from dpftrl.errors import InvalidInput


def safe_name(name: str) -> str:
    """The name in its usual Unicode form, so that one person is not two; or say what is wrong.

    What passes can be printed, and written to a CSV file as it is.

    >>> safe_name("A" + chr(0x30A)) == safe_name(chr(0xC5))
    True
    """
    usual = normalize("NFC", name)
    if not usual or usual != usual.strip() or not usual.isprintable() or {",", '"'} & set(usual):
        raise InvalidInput(
            "a user's name has printable characters, no comma, no double quote and no space at "
            f"its ends, got {name!r:.60}; rename that user"
        )
    return usual


def chance(name: str, purpose: str) -> float:
    """A number from 0 up to 1 that depends on the name alone: others may come and go."""
    digest = sha256(f"{purpose}\0{name}".encode()).digest()
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def sample(names: list[str], most: int | None) -> list[str]:
    """At most so many names, by chance, in sorted order."""
    if most is None or len(names) <= most:
        return sorted(names)
    return sorted(sorted(names, key=lambda name: (chance(name, "sample"), name))[:most])
