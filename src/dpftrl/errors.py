"""What can go wrong, as one small tree.

DpftrlError
├── InvalidInput        a value that no mechanism, participation or file may have
│   ├── UnknownMechanism    a name that is none of ours (the message offers the nearest)
│   └── UnsafeState         a run that must not go on: rolled back, edited, damaged or in use
│       └── RunInUse            another server works on it; it may be free later
├── ReportRefused       an update from a client that may not send it, or not now
├── TooFewClients       not enough clients may be asked for a round yet
├── RunOver             no further round: all are done, or the budget is spent
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


class UnsafeState(InvalidInput):
    """Going on from this state could break the guarantee, so nothing was changed."""


class RunInUse(UnsafeState):
    """Another process works on the run; what it holds is given back when it ends."""


class ReportRefused(DpftrlError):
    """A client's report does not belong to this round; the round goes on without it."""


class TooFewClients(DpftrlError):
    """Nobody was contacted: fewer clients may take part now than a round needs."""


class RunOver(DpftrlError):
    """There is no further round; what was released stays as it is."""


class RoundsExceeded(DpftrlError):
    """A mechanism was asked for a round that it does not support."""


class TooLarge(DpftrlError):
    """The exact answer would need more time or memory than is sensible."""
