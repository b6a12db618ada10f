"""Everything that dpftrl uses of Flower beyond Flower's public modules.

Public are `flwr.app`, `flwr.clientapp`, `flwr.serverapp`, `flwr.serverapp.strategy` and
`flwr.simulation`. What else dpftrl needs is imported here and nowhere else, and every private field
is read here. Versions of Flower that dpftrl was not tested with are refused, with one message: part
of the guarantee (how nodes are identified) rests on these internals.
"""

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final, NamedTuple

from flwr.app import Message, RecordDict

# Versions that the tests have run with: the first of them, and the first that is not one of them.
FIRST_VERSION: Final = (1, 41)
FIRST_UNKNOWN_VERSION: Final = (1, 43)


def check_version(installed: str) -> None:
    """Refuse a version of Flower that dpftrl was not tested with.

    Raises:
        ImportError: The version is too old or too new.
    """
    release = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if not FIRST_VERSION <= release < FIRST_UNKNOWN_VERSION:
        raise ImportError(unsupported(installed, "its internals are not known"), name="flwr")


def unsupported(installed: str, problem: str) -> str:
    """Return the message about a version of Flower that cannot be used."""
    oldest, newest = (".".join(map(str, one)) for one in (FIRST_VERSION, FIRST_UNKNOWN_VERSION))
    return (
        f"dpftrl.flower works with Flower from {oldest} to below {newest}, and this is Flower "
        f"{installed} ({problem}); pip install 'flwr>={oldest},<{newest}'"
    )


INSTALLED: Final = version("flwr")
check_version(INSTALLED)

try:
    from flwr.app.user_config import UserConfig
    from flwr.clientapp.typing import ClientAppCallable, Mod
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, ErrorCode
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest, UnregisterNodeFleetRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest
    from flwr.supercore import log
    from flwr.supercore.constant import HEAD_BODY_DIVIDER
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.inflatable.inflatable_object import (
        InflatableObject,
        get_object_body,
        get_object_children_ids_from_object_content,
        get_object_type_from_object_content,
        iterate_object_tree,
    )
    from flwr.supercore.inflatable.inflatable_utils import (
        inflate_object_from_contents,
        pull_objects,
    )
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
    from flwr.supercore.run import Run
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
except ImportError as error:
    raise ImportError(unsupported(INSTALLED, str(error)), name="flwr") from error

__all__ = [
    "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE",
    "HEAD_BODY_DIVIDER",
    "ApiErrorCode",
    "ClientAppCallable",
    "ConfirmMessageReceivedRequest",
    "Connection",
    "ErrorCode",
    "FleetHttpClient",
    "FlowerError",
    "HttpGrid",
    "InflatableObject",
    "Mod",
    "NodeAuthHttpInterceptor",
    "PullAppMessagesRequest",
    "PullObjectRequest",
    "RegisterNodeFleetRequest",
    "Run",
    "RuntimeHttpClient",
    "RuntimeVersionHttpInterceptor",
    "TaskIdentity",
    "UnregisterNodeFleetRequest",
    "UserConfig",
    "connection_of",
    "generate_key_pairs",
    "get_object_body",
    "get_object_children_ids_from_object_content",
    "get_object_type_from_object_content",
    "inflate_object_from_contents",
    "is_ray_actor",
    "iterate_object_tree",
    "log",
    "message_with_content",
    "on_lost_connection",
    "public_key_to_bytes",
    "pull_objects",
    "runtime_client",
    "set_message_id",
]


class Connection(NamedTuple):
    """How a grid reaches its SuperLink.

    Attributes:
        address: Host and port.
        insecure: Whether the connection has no TLS.
        certificate: Root certificates in PEM format, or None for those of the system.
    """

    address: str
    insecure: bool
    certificate: bytes | None


def connection_of(grid: HttpGrid) -> Connection:
    """Return how a grid reaches its SuperLink."""
    return Connection(*_fields(grid, "_addr", "_insecure", "_cert"))


def runtime_client(grid: HttpGrid) -> RuntimeHttpClient:
    """Return the client with which a grid talks to its SuperLink."""
    (client,) = _fields(grid, "_runtime_client")
    return client


def on_lost_connection(grid: HttpGrid, call: Callable[[], None]) -> None:
    """Call a function, from now on, whenever a request of the grid fails and is repeated."""
    (invoker,) = _fields(grid, "_retry_invoker")
    (before,) = _fields(invoker, "on_backoff")

    def on_backoff(state: Any) -> None:
        call()
        if before is not None:
            before(state)

    invoker.on_backoff = on_backoff


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message an id, as Flower's own grids do when they send it."""
    message.metadata.__dict__["_message_id"] = message_id


def message_with_content(message: Message, content: RecordDict) -> Message:
    """Return a message with the same metadata and other content."""
    return Message(metadata=message.metadata, content=content)  # pyright: ignore[reportCallIssue]  # Flower does the same


def is_ray_actor() -> bool:
    """Whether this process is an actor of Ray, as the nodes of Flower's simulation are."""
    ray: Any = sys.modules.get("ray")  # if nobody has imported it, this is no actor
    if ray is None or not ray.is_initialized():
        return False
    return ray.get_runtime_context().get_actor_id() is not None


def _fields(owner: Any, *names: str) -> tuple[Any, ...]:
    """Return private fields of one of Flower's objects.

    Raises:
        ImportError: This version of Flower does not have them.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        problem = f"{type(owner).__name__} has no {', '.join(missing)}"
        raise ImportError(unsupported(INSTALLED, problem), name="flwr")
    return tuple(getattr(owner, name) for name in names)
