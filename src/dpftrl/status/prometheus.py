"""The figures of a status as metrics for Prometheus.

The names of figures that may be published begin with `dpftrl_`, and those for the operator only
with `dpftrl_private_`. A figure that is not known is left out. The package `prometheus-client` is
needed (`pip install 'dpftrl[metrics]'`).
"""

from collections.abc import Iterable, Iterator
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, final, get_args

from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.status.figures import Status, WarningKind
from dpftrl.status.status import StatusReader

if TYPE_CHECKING:
    from prometheus_client import Metric

# For each metric, its place in a `Status`, and what it means.
FIGURES: Final = {
    "dpftrl_rounds": ("public.rounds", "Rounds (or steps) released."),
    "dpftrl_rounds_planned": ("public.rounds_planned", "Rounds of the plan."),
    "dpftrl_rounds_within_budget": (
        "public.rounds_within_budget",
        "Rounds that the budget allows.",
    ),
    "dpftrl_epsilon": ("public.epsilon", "Epsilon of everything released."),
    "dpftrl_epsilon_planned": ("public.epsilon_planned", "Epsilon after the last planned round."),
    "dpftrl_epsilon_budget": ("public.epsilon_budget", "The budget of epsilon."),
    "dpftrl_delta": ("public.delta", "The delta at which epsilon is stated."),
    "dpftrl_clip_norm": ("public.clip_norm", "Clip norm of the last round."),
    "dpftrl_population_planned": ("public.population", "Clients of the plan."),
    "dpftrl_report_goal": ("public.report_goal", "Reports per round."),
    "dpftrl_contacts_per_round": (
        "public.contacts_per_round",
        "Clients that one attempt at a round contacts.",
    ),
    "dpftrl_drop_out_planned": (
        "public.drop_out_planned",
        "Share of contacted clients whose report the plan does not need.",
    ),
    "dpftrl_private_running": (
        "private.process.running",
        "1 if a process of this machine works on the run.",
    ),
    "dpftrl_private_last_change_timestamp_seconds": (
        "private.process.last_change",
        "Time of the last journal record.",
    ),
    "dpftrl_private_last_round_timestamp_seconds": (
        "private.pace.last_round",
        "Time of the last release.",
    ),
    "dpftrl_private_seconds_per_round": (
        "private.pace.seconds_per_round",
        "Time from one release to the next.",
    ),
    "dpftrl_private_expected_end_timestamp_seconds": (
        "private.pace.expected_end",
        "Expected time of the last release.",
    ),
    "dpftrl_private_attempts": ("private.attempts.total", "Attempts at rounds."),
    "dpftrl_private_abandoned_attempts": ("private.attempts.abandoned", "Abandoned attempts."),
    "dpftrl_private_drop_out": (
        "private.attempts.drop_out",
        "Share of lately contacted clients that were not counted.",
    ),
    "dpftrl_private_unfit_updates": (
        "private.attempts.unfit",
        "Updates that counted as zeros, in the rounds that the private log shows.",
    ),
    "dpftrl_private_open_round_seconds": (
        "private.attempts.open.seconds",
        "Time since the clients of the open round were contacted.",
    ),
    "dpftrl_private_contacted_clients": (
        "private.clients.contacted",
        "Different clients contacted so far.",
    ),
    "dpftrl_private_eligible_clients": (
        "private.clients.eligible",
        "Clients that may be contacted next, if the fleet is as planned.",
    ),
    "dpftrl_private_available_clients_at_begin": (
        "private.clients.available_at_begin",
        "Clients that were available when clients were last selected.",
    ),
    "dpftrl_private_eligible_clients_at_begin": (
        "private.clients.eligible_at_begin",
        "How many of them could be contacted.",
    ),
    "dpftrl_private_stand_still_rounds": (
        "private.clients.stand_still.rounds_left",
        "Rounds until too few clients may be contacted.",
    ),
    "dpftrl_private_stand_still_seconds": (
        "private.clients.stand_still.seconds_left",
        "Seconds until too few clients may be contacted.",
    ),
    "dpftrl_private_disk_free_bytes": ("private.disk.free_bytes", "Free bytes on the disk."),
    "dpftrl_private_disk_needed_bytes": (
        "private.disk.bytes_needed",
        "Bytes that the remaining rounds need.",
    ),
    "dpftrl_private_run_bytes": ("private.disk.run_bytes", "Bytes of the files of the run."),
}
# Metrics that do not come from one number: whether there is no further round, whether the run can
# be read, and the warnings by their kinds.
ENDED: Final = "dpftrl_ended"
READABLE: Final = "dpftrl_private_readable"
WARNING: Final = "dpftrl_private_warning"


@final
class StatusCollector:
    """Reads the status of a run whenever Prometheus asks for it.

    Args:
        reader: Reads the status.
    """

    def __init__(self, reader: StatusReader):
        self._reader = reader
        self._lock = Lock()

    def describe(self) -> Iterable["Metric"]:
        """Return nothing, so that the status is not read before Prometheus asks."""
        return []

    def collect(self) -> Iterator["Metric"]:
        """Yield all metrics that are known."""
        from prometheus_client.core import GaugeMetricFamily

        try:
            with self._lock:
                status = self._reader.read()
        except DpftrlError:
            status = None

        def gauge(name: str, text: str, value: float, **labels: str) -> "Metric":
            family = GaugeMetricFamily(name, text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
            return family

        yield gauge(READABLE, "1 if the run can be read.", float(status is not None))
        if status is None:
            return
        run, kinds = status.public.run, {warning.kind for warning in status.warnings}
        is_over = status.public.ended is not None
        yield gauge(ENDED, "1 if there is no further round.", float(is_over), run=run)
        for name, (place, text) in FIGURES.items():
            value = _figure(status, place)
            if value is not None:
                yield gauge(name, text, value, run=run)
        warnings = GaugeMetricFamily(WARNING, "1 if there is a warning.", labels=["run", "kind"])
        for kind in get_args(WarningKind):
            warnings.add_metric([run, kind], float(kind in kinds))
        yield warnings


def _figure(status: Status, place: str) -> float | None:
    """A figure of a status; None if it, or the group that it is in, is not known."""
    value: Any = status
    for name in place.split("."):
        value = None if value is None else getattr(value, name)
    return None if value is None else float(value)


def check_extra() -> None:
    """Refuse to go on without the package `prometheus-client`.

    Raises:
        InvalidInput: It is not installed.
    """
    try:
        import prometheus_client  # noqa: F401 # pyright: ignore[reportUnusedImport]
    except ImportError:
        raise InvalidInput(
            "metrics for Prometheus need another package: pip install 'dpftrl[metrics]'"
        ) from None


def serve(reader: StatusReader, host: str, port: int) -> Any:
    """Serve the metrics of a run over HTTP, in a thread.

    Args:
        reader: Reads the status.
        host: The address to listen on.
        port: The port to listen on; 0 takes a free one.

    Returns:
        The server. Its `server_port` is the port; `shutdown()` and `server_close()` end it.

    Raises:
        InvalidInput: The address or the port cannot be used.
    """
    check_extra()
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(reader))
    try:
        server, _ = start_http_server(port, addr=host, registry=registry)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"cannot listen on {host}, port {port}: {reason}") from None
    return server
