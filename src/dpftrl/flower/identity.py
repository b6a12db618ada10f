"""The names of nodes in the ledger, and how far these names can be trusted."""

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
    """Return how the nodes of a grid are identified.

    Flower does not tell a ServerApp whether its SuperLink authenticates SuperNodes. This function
    finds out: it tries to register a node with a new key, which a SuperLink with authentication
    refuses. Without TLS a refusal proves nothing, because Flower signs the time of a message and
    not its content.

    Returns:
        "stated" for an `InProcessGrid`; "registered" if the SuperLink has TLS and accepts
        registered keys only; "unregistered" otherwise.
    """
    if isinstance(grid, InProcessGrid):
        return "stated"
    if isinstance(grid, HttpGrid):
        without_tls = grid._insecure  # pyright: ignore[reportPrivateUsage]  # Flower offers no other way
        return "unregistered" if without_tls or _anybody_may_register(grid) else "registered"
    return "unregistered"


def named_nodes(grid: Grid, identity: Identity) -> dict[str, int]:
    """Return the ids of the nodes that are online, by their names in the ledger.

    The name of a registered node is the SHA-256 of its public key, because its id changes when the
    SuperLink loses its database. The name of any other node is its id.

    Raises:
        InvalidInput: A node has no key although all nodes should be registered.
    """
    if identity != "registered":
        return {str(node_id): node_id for node_id in grid.get_node_ids()}
    node_ids: dict[str, int] = {}
    for node in grid.get_nodes():
        if not node.public_key:
            raise InvalidInput(
                f"node {node.node_id} has no public key, although nodes must be registered; start "
                "the SuperLink with --enable-supernode-auth"
            )
        node_ids[hashlib.sha256(node.public_key).hexdigest()] = node.node_id
    return node_ids


def _anybody_may_register(grid: HttpGrid) -> bool:
    """Whether the SuperLink registers a node with an unknown key; that node is removed again."""
    private, public = generate_key_pairs()
    address, insecure, certificate = grid._addr, grid._insecure, grid._cert  # pyright: ignore[reportPrivateUsage]  # Flower offers no other way
    with FleetHttpClient.from_server_address(
        address,
        insecure,
        certificate,
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
