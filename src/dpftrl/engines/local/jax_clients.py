"""Clients that train a JAX model, as many at a time as there are processors."""

# JAX leaves much of its interface untyped: what comes back is annotated where it matters.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpy.typing import NDArray

from dpftrl.checks import whole_number
from dpftrl.engines.local.batches import LocalTraining, client_batches, client_order
from dpftrl.errors import InvalidInput
from dpftrl.tasks.language_model import Model, loss
from dpftrl.tasks.users import Users

Vector = NDArray[np.float32]


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
        self, model: Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Vector]]:
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

    def _update(self, handed: jax.Array, round_number: int, name: str) -> Vector:
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
    update: Callable[[str], Vector], cohort: Sequence[str]
) -> Iterator[tuple[str, Vector]]:
    """Updates in the cohort's order; only a few wait, however large the cohort is."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    waiting: deque[tuple[str, Future[Vector]]] = deque()
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
