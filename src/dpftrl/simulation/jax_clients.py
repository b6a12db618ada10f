"""Simulated clients that train a JAX language model, one per core at a time."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector
from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Model, loss
from dpftrl.tasks.task import Users

# Updates that are computed at once. All threads wait for the last of them, so there are many; but
# never more than this memory holds, or one per thread.
UPDATES_PER_THREAD = 16
MOST_UPDATE_BYTES = 2**28  # 256 MB


@final
@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: plain stochastic gradient descent.

    Attributes:
        learning_rate: Learning rate of the gradient descent.
        batch_size: Sentences per batch. The last batch of an epoch may have fewer.
        epochs: Passes over the client's sentences, each in a new order.
        most_batches: Largest number of batches in total; None for no limit.
    """

    learning_rate: float
    batch_size: int = 16
    epochs: int = 1
    most_batches: int | None = None

    def __post_init__(self) -> None:
        positive_number("learning_rate", self.learning_rate)
        whole_number("batch_size", self.batch_size)
        whole_number("epochs", self.epochs)
        if self.most_batches is not None:
            whole_number("most_batches", self.most_batches)

    def batches(self, sentences: int) -> int:
        """Return the number of batches of a client that has `sentences` sentences.

        >>> LocalTraining(0.1, batch_size=16, epochs=2).batches(17)
        4
        """
        batches = self.epochs * -(-sentences // self.batch_size)
        return batches if self.most_batches is None else min(batches, self.most_batches)


def client_batches(
    sentences: NDArray[np.int32], local: LocalTraining, order: np.random.Generator, room: int
) -> NDArray[np.int32]:
    """Return a client's batches as [room, batch_size, length + 1]; unused places hold PAD."""
    count, per_epoch = local.batches(len(sentences)), -(-len(sentences) // local.batch_size)
    filled = np.zeros((room, local.batch_size, sentences.shape[1]), np.int32)
    for first in range(0, count, per_epoch or 1):
        last = min(first + per_epoch, count)
        chosen = order.permutation(len(sentences))[: (last - first) * local.batch_size]
        filled[first:last].reshape(-1, sentences.shape[1])[: len(chosen)] = sentences[chosen]
    return filled


def client_order(seed: int, round_number: int, name: str) -> np.random.Generator:
    """Return the random generator of one client in one round.

    It does not depend on the other clients of the round. It only shuffles sentences: the privacy
    guarantee does not rely on it.
    """
    text = json.dumps([seed, round_number, name]).encode()
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))
    )


# JAX leaves much of its API untyped: return values are annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


@final
class JaxClients:
    """Clients that train the model on their own sentences when a round contacts them.

    One compiled program trains a client on all of its batches. It is the same for every client and
    round: the number of batches is an argument, so that a client with few sentences takes less
    time. Clients run in parallel threads. (Training many clients in one program, with `vmap`, is
    slower on CPUs: the scores of a batch no longer fit into the cache.)

    Guarantees:
        A client's update is a function of the model, its sentences, the seed and the round. It does
        not depend on the other clients of the cohort. The same machine gives the same bits again.
        Updates come in the order of the cohort, never in the order of how much text a client has:
        which reports are in time must not depend on anyone's data.

    Args:
        model: The model to train.
        users: The clients and their sentences.
        local: How a client trains.
        seed: Seed for the order of sentences.
    """

    def __init__(self, model: Model, users: Users, local: LocalTraining, seed: int):
        self._users = users
        self._local = local
        self._seed = whole_number("seed", seed, at_least=0)
        self._index = {name: index for index, name in enumerate(users.names)}
        self._room = max(map(local.batches, np.diff(users.offsets).tolist()), default=0)
        start, unravel = ravel_pytree(model.init(seed=0))
        self._size = len(start)
        self._train = jax.jit(partial(_train, model, local.learning_rate, unravel))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all clients."""
        return self._users.names

    def updates(
        self, model: Float32Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Float32Vector]]:
        """Yield each client's name and update (trained model minus given model), in cohort order.

        A model that diverges gives NaN. It is yielded as it is; the server counts it as zeros.

        Args:
            model: The server's model, flattened in the order of sorted array names.
            cohort: Names of the clients.
            round_number: Number of the round; each round has its own order of sentences.

        Raises:
            InvalidInput: The model has another size or type, or a client is unknown.
        """
        if model.shape != (self._size,) or model.dtype != np.float32:
            raise InvalidInput(
                f"the model must have {self._size:,} numbers of float32, got {model.shape} of "
                f"{model.dtype}"
            )
        for name in cohort:
            if name not in self._index:
                raise InvalidInput(f"the cohort has {name!r:.60}, which is not one of the users")
        # A copy, because the server may change its vector while clients still read it.
        received = jnp.array(model, copy=True)
        return _in_parallel(
            partial(self._update, received, round_number), cohort, update_bytes=model.nbytes
        )

    def _update(self, received: jax.Array, round_number: int, name: str) -> Float32Vector:
        sentences = self._users.of(self._index[name])
        order = client_order(self._seed, round_number, name)
        batches = client_batches(sentences, self._local, order, self._room)
        return np.asarray(self._train(received, batches, self._local.batches(len(sentences))))


def _train(
    model: Model,
    learning_rate: float,
    unravel: Callable[[jax.Array], Any],
    received: jax.Array,
    batches: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """Return the change of the model after `count` steps of gradient descent."""

    def descend(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
        return parameter - learning_rate * gradient

    def step(number: jax.Array, parameters: Any) -> Any:
        gradients = jax.grad(partial(loss, model))(parameters, batches[number])
        return jax.tree.map(descend, parameters, gradients)

    trained = jax.lax.fori_loop(0, count, step, unravel(received))
    return ravel_pytree(trained)[0] - received


def _in_parallel(
    update: Callable[[str], Float32Vector], cohort: Sequence[str], update_bytes: int
) -> Iterator[tuple[str, Float32Vector]]:
    """Compute updates in threads, some at a time; yield them in cohort order.

    A round that has enough reports does not need the remaining updates: they are not computed.
    """
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    fitting = MOST_UPDATE_BYTES // update_bytes
    at_once = max(threads, min(UPDATES_PER_THREAD * threads, fitting))
    for start in range(0, len(cohort), at_once):
        names = cohort[start : start + at_once]
        yield from zip(names, parallel_map(update, names, threads), strict=True)
