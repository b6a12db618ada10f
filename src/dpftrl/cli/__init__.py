"""The command line: one file per command, and no mathematics."""

import os
import signal
from contextlib import suppress
from types import FrameType
from typing import NoReturn

# The exit code that a shell reports for a program that SIGINT ended: 128 + 2.
INTERRUPTED = 130


def start() -> None:
    """Run the `dpftrl` command. Ctrl-C ends it quietly, even while it is still loading."""
    with suppress(ValueError):  # only the main thread can set signal handlers
        signal.signal(signal.SIGINT, exit_quietly)
    from dpftrl.cli.main import main

    main()


def exit_quietly(_: int, __: FrameType | None) -> NoReturn:
    """Handle Ctrl-C during imports, where an exception could be lost or shown as a traceback."""
    with suppress(OSError):
        os.write(2, b"interrupted\n")
    os._exit(INTERRUPTED)


def allow_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, now that everything is loaded."""
    if signal.getsignal(signal.SIGINT) is exit_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
