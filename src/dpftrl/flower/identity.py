"""Who a node is, and whether that can be relied upon."""

import hashlib
from typing import Literal

import httpx
from flwr.proto.fleet_pb2 import (
    RegisterNodeFleetRequest,
    UnregisterNodeFleetRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.grid import HttpGrid
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from dpftrl.errors import InvalidInput
from dpftrl.flower.in_process import InProcessGrid

Identity = Literal["stated", "registered", "unregistered"]


def identity_of(grid: Grid) -> Identity:
    """How the nodes of a grid got their names.

    A ServerApp is not told whether its SuperLink authenticates SuperNodes, so it finds out: it asks
    to register as a node with a key that nobody knows. Where authentication is on, that is refused.
    Without TLS it counts for nothing: Flower signs the time of a message and not what is in it.
    """
    if isinstance(grid, InProcessGrid):
        return "stated"
    if isinstance(grid, HttpGrid):
        is_plain = grid._insecure  # pyright: ignore[reportPrivateUsage]  # Flower offers no other way
        return "unregistered" if is_plain or _anybody_may_register(grid) else "registered"
    return "unregistered"


def named_nodes(grid: Grid, identity: Identity) -> dict[str, int]:
    """The nodes that are online, by the name that the ledger has for them.

    A registered node is known by its key: its id changes when the SuperLink loses its database.
    """
    if identity != "registered":
        return {str(node_id): node_id for node_id in grid.get_node_ids()}
    found: dict[str, int] = {}
    for node in grid.get_nodes():
        if not node.public_key:
            raise InvalidInput(f"node {node.node_id} has no public key, and all were to be known")
        found[hashlib.sha256(node.public_key).hexdigest()] = node.node_id
    return found


def _anybody_may_register(grid: HttpGrid) -> bool:
    private, public = generate_key_pairs()
    address, insecure, root = grid._addr, grid._insecure, grid._cert  # pyright: ignore[reportPrivateUsage]  # Flower offers no other way
    with FleetHttpClient.from_server_address(
        address,
        insecure,
        root,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        ],
    ) as client:
        request = RegisterNodeFleetRequest(public_key=public_key_to_bytes(public))
        try:
            registered = client.RegisterNode(request)
        except httpx.HTTPStatusError as refused:
            error = FlowerError.from_json(refused.response.text)
            return error is None or error.code != ApiErrorCode.FLEET_SUPERNODE_REGISTRATION_DISABLED
        client.UnregisterNode(UnregisterNodeFleetRequest(node_id=registered.node_id))
    return True
