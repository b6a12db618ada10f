"""What can go wrong, as one small tree.

DpftrlError
├── InvalidInput        a value that no mechanism, participation or file may have
│   └── UnknownMechanism    a name that is none of ours (the message offers the nearest)
├── RoundsExceeded      asking a mechanism for more rounds than it was built for
└── TooLarge            a computation refused because of its size, with what to do instead

Every message says what was wrong, what came, and what to do. The command line prints it on one line
and exits with code 2.
"""


class DpftrlError(ValueError):
    """Base of every error that a user's input can cause; its message is one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


class InvalidInput(DpftrlError):
    """A value is outside its domain, or a file is not what it claims to be."""


class UnknownMechanism(InvalidInput):
    """The name is not one of the mechanisms."""


class RoundsExceeded(DpftrlError):
    """A mechanism was asked for a round that it does not support."""


class TooLarge(DpftrlError):
    """The exact answer would need more time or memory than is sensible."""
