"""Enclosures of a guarantee in interval arithmetic, for `dpftrl account --rigorous`."""

from rich.table import Table

from dpftrl.accounting import Guarantee
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.rigorous import NoiseStream, RigorousNumbers, enclose, is_installed


def require_interval_arithmetic() -> None:
    """Raise an error that says what to install, if python-flint is missing."""
    if not is_installed():
        raise InvalidInput("--rigorous needs python-flint: pip install 'dpftrl[audit]'")


def enclose_guarantee(guarantee: Guarantee) -> RigorousNumbers:
    """Enclose the numbers of a guarantee.

    Raises:
        TooLarge: This would take longer than a few seconds.
        UnsafeState: The stated epsilon or delta is below the enclosure.
    """
    streams = [
        NoiseStream(run.mechanism, run.participation, run.noise_multiplier, run.buffers)
        for run in guarantee.runs
    ]
    numbers = enclose(streams, guarantee.delta, guarantee.epsilon, guarantee.devices)
    is_safe = guarantee.epsilon >= numbers.epsilon.high
    if not is_safe or not guarantee.total_delta >= numbers.delta.high:
        raise UnsafeState(
            f"epsilon {guarantee.epsilon!r} at delta {guarantee.total_delta!r} is not above all "
            f"numbers that the true ones can be: epsilon {numbers.epsilon}, delta {numbers.delta}; "
            "do not publish it, and report this as a bug"
        )
    return numbers


def enclosure_table(numbers: RigorousNumbers) -> Table:
    """Return the enclosures as a table."""
    table = Table(title="enclosures by interval arithmetic: they contain the true values")
    table.add_column("")
    for heading in ("at least", "at most"):
        table.add_column(heading, justify="right")
    rows = [("sensitivity", enclosure) for enclosure in numbers.sensitivities]
    rows += [
        ("mu", numbers.mu),
        ("epsilon", numbers.epsilon),
        ("delta at the stated epsilon", numbers.delta),
    ]
    for label, enclosure in rows:
        table.add_row(label, repr(enclosure.low), repr(enclosure.high))
    return table
