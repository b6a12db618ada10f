"""All errors that dpftrl raises for a user's input or situation.

DpftrlError
├── InvalidInput        a value outside its domain, or a file that is not valid
│   ├── UnknownMechanism    the name is not a mechanism (the message offers the nearest name)
│   └── UnsafeState         a run that must not be resumed: rolled back, edited, damaged or in use
│       └── RunInUse            another program uses the run; it may be free later
├── ReportRefused       a report from a client that may not send it, or not in this round
├── TooFewClients       not enough clients are eligible for a round yet
├── RunOver             no further round: all rounds are done, or the budget is spent
├── RoundsExceeded      more rounds than the mechanism was built for
└── TooLarge            a computation that needs too much time or memory

Every message says what is wrong, what was given, and what to do. The command line prints it on one
line and exits with code 2.
"""

# Most characters of a message; of a longer one, the start and the end are kept.
LONGEST_MESSAGE = 1_200
# Characters of the end, which says what to do.
KEPT_AT_THE_END = 400


def visible(text: str) -> str:
    r"""The text with control characters as escapes, so that no file can give a terminal orders.

    >>> visible("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape", "surrogatepass").decode()
        for c in text
    )


class DpftrlError(ValueError):
    """The base class of all errors of dpftrl.

    The message is always one line of printable characters, and of limited length.
    """

    def __init__(self, message: str):
        line = visible(" ".join(message.split()))
        if len(line) > LONGEST_MESSAGE:
            start, end = line[: LONGEST_MESSAGE - KEPT_AT_THE_END], line[-KEPT_AT_THE_END:]
            line = f"{start} ... ({len(line):,} characters) ... {end}"
        super().__init__(line)


class InvalidInput(DpftrlError):
    """A value is outside its domain, or a file is not valid."""


class UnknownMechanism(InvalidInput):
    """The name is not the name of a mechanism."""


class UnsafeState(InvalidInput):
    """Resuming from this state could break the guarantee, so nothing was changed."""


class RunInUse(UnsafeState):
    """Another process uses the run. Its lock is released when that process ends."""


class ReportRefused(DpftrlError):
    """A client's report does not belong to this round. The round continues without it."""


class TooFewClients(DpftrlError):
    """No client was contacted: fewer clients are eligible now than a round needs."""


class RunOver(DpftrlError):
    """The run has no further round. What was released stays valid."""


class RoundsExceeded(DpftrlError):
    """A mechanism was used for more rounds than it supports."""


class TooLarge(DpftrlError):
    """A computation would need too much time or memory."""
