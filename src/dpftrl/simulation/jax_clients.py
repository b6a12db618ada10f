"""Clients that train a JAX model, as many at a time as there are processors."""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Model, loss
from dpftrl.tasks.users import Users


@final
@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: plain gradient descent, batch by batch.

    Attributes:
        learning_rate: Of the gradient descent.
        batch_size: Sentences in a batch; the last one of an epoch may have fewer.
        epochs: How often each sentence is seen, in a new order each time.
        most_batches: Stop after this many, however many sentences there are.
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
        """How many batches a client with so many sentences goes through.

        >>> LocalTraining(0.1, batch_size=16, epochs=2).batches(17)
        4
        """
        wanted = self.epochs * -(-sentences // self.batch_size)
        return wanted if self.most_batches is None else min(wanted, self.most_batches)


def client_batches(
    sentences: NDArray[np.int32], local: LocalTraining, order: np.random.Generator, room: int
) -> NDArray[np.int32]:
    """A client's batches [room, batch_size, length + 1], in order; the rest is PAD."""
    count, per_epoch = local.batches(len(sentences)), -(-len(sentences) // local.batch_size)
    filled = np.zeros((room, local.batch_size, sentences.shape[1]), np.int32)
    for first in range(0, count, per_epoch or 1):
        last = min(first + per_epoch, count)
        chosen = order.permutation(len(sentences))[: (last - first) * local.batch_size]
        filled[first:last].reshape(-1, sentences.shape[1])[: len(chosen)] = sentences[chosen]
    return filled


def client_order(seed: int, round_number: int, name: str) -> np.random.Generator:
    """Randomness of one client in one round, whoever else takes part.

    It shuffles sentences and nothing else: no privacy rests on it.
    """
    text = json.dumps([seed, round_number, name]).encode()
    return np.random.Generator(
        np.random.Philox(key=int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))
    )


# JAX leaves much of its interface untyped: what comes back is annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


@final
class JaxClients:
    """People who train the model on their own sentences when a round asks them to.

    All batches of a client are one compiled program, the same for every client and round: the
    number of batches is an argument of it, so that nobody's few sentences wait for another's many.
    Clients run side by side in threads. (One program for many clients, by `vmap`, is slower on
    processors: the scores of a batch no longer fit into the cache.)

    Guarantees:
        A client's update is a function of the model, its sentences, the seed and the round: not of
        the others in the cohort. The same machine gives the same bits again. Updates come in the
        order of the cohort, never in that of how much text somebody has: whose report is in time
        must not depend on anyone's data.
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
        """Who can be asked."""
        return self._users.names

    def updates(
        self, model: Float32Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Float32Vector]]:
        """Each client's update, its model minus the one it was handed, in the cohort's order.

        A model that diverges gives NaN, which is passed on: the server counts it as zeros.

        Args:
            model: The server's, flat by sorted name.
            cohort: Names of the clients.
            round_number: Gives each round its own order of sentences.
        """
        if model.shape != (self._size,) or model.dtype != np.float32:
            raise InvalidInput(
                f"the model must be {self._size:,} numbers of float32, got {model.shape} of "
                f"{model.dtype}"
            )
        for name in cohort:
            if name not in self._index:
                raise InvalidInput(f"the cohort has {name!r:.60}, who is none of the users")
        # A copy, because the server's vector may move on while we still read.
        handed = jnp.array(model, copy=True)
        return _side_by_side(partial(self._update, handed, round_number), cohort)

    def _update(self, handed: jax.Array, round_number: int, name: str) -> Float32Vector:
        sentences = self._users.of(self._index[name])
        order = client_order(self._seed, round_number, name)
        batches = client_batches(sentences, self._local, order, self._room)
        return np.asarray(self._train(handed, batches, self._local.batches(len(sentences))))


def _train(
    model: Model,
    learning_rate: float,
    unravel: Callable[[jax.Array], Any],
    handed: jax.Array,
    batches: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """What `count` steps of gradient descent change."""

    def descend(parameter: jax.Array, gradient: jax.Array) -> jax.Array:
        return parameter - learning_rate * gradient

    def step(number: jax.Array, parameters: Any) -> Any:
        gradients = jax.grad(partial(loss, model))(parameters, batches[number])
        return jax.tree.map(descend, parameters, gradients)

    trained = jax.lax.fori_loop(0, count, step, unravel(handed))
    return ravel_pytree(trained)[0] - handed


def _side_by_side(
    update: Callable[[str], Float32Vector], cohort: Sequence[str]
) -> Iterator[tuple[str, Float32Vector]]:
    """Updates in the cohort's order; only a few wait, however large the cohort is."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    waiting: deque[tuple[str, Future[Float32Vector]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for name in cohort:
                waiting.append((name, pool.submit(update, name)))
                if len(waiting) > 2 * threads:
                    first, result = waiting.popleft()
                    yield first, result.result()
            while waiting:
                first, result = waiting.popleft()
                yield first, result.result()
        finally:
            # Nobody may want the rest: a round closes when it has enough.
            pool.shutdown(cancel_futures=True)
