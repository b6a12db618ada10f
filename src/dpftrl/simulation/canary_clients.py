"""The canaries of a simulated training: canary clients that train on their sentences, or others."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.auditing.canaries import Canaries, SecretFile, canary_kind, read_secrets, secrets_exist
from dpftrl.auditing.sentences import SentenceFile, read_sentence_file
from dpftrl.clipping import ExactSum, Grid
from dpftrl.errors import InvalidInput
from dpftrl.federated import Server
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
from dpftrl.tasks.language_model import Model, sentence_losses


def open_canaries(
    server: Server, model: Model, local: LocalTraining, seed: int
) -> "Canaries | CanaryClients | None":
    """The canaries of a run that was created or resumed; None if it has none.

    Args:
        server: The server of the run.
        model: The model that is trained.
        local: How a client trains.
        seed: Seed for the order of sentences.
    """
    folder = server.folder.root
    if canary_kind(folder) != "sentences":
        return Canaries.resume(folder, server.plan, server.rounds)
    file = read_sentence_file(folder)
    if not secrets_exist(folder, server.rounds):
        _toss(server, model, file).save(folder)
    secret = read_secrets(folder)
    clients = JaxClients(model, file.users(secret), local, seed)
    return CanaryClients(server, file, secret, clients)


def _toss(server: Server, model: Model, file: SentenceFile) -> SecretFile:
    """Toss the coins and draw the sentences of a new run; measure them on its start model."""
    secret = SecretFile.toss(file.canaries)
    losses = sentence_losses(model, server.arrays(), file.sentences(secret))
    if not np.isfinite(losses).all():
        raise InvalidInput("the start model has diverged: a canary sentence has no finite loss")
    return SecretFile(key=secret.key, coins=secret.coins, start_losses=tuple(losses.tolist()))


@final
class CanaryClients:
    """Canary clients that train on the model of a round like clients, if their coin says so.

    Guarantees:
        The update of every canary is clipped to the clip norm of the round, and a canary takes part
        in the rounds of `SentenceFile.rounds_of` only. Canaries see the last released model, and
        nothing of the round: they depend on nobody's data except through what was released. Their
        updates are functions of the model and the secrets, so a repeated round has the same sum.

    Args:
        server: The server of the run.
        file: What may be published about the canaries.
        secret: Their coins and sentences.
        clients: Trains each of them on its own sentence.
    """

    def __init__(self, server: Server, file: SentenceFile, secret: SecretFile, clients: JaxClients):
        self._server, self._clients = server, clients
        self._by_round: dict[int, list[str]] = {}  # names of the included canaries
        for canary in np.flatnonzero(secret.included(file.canaries)).tolist():
            for number in file.rounds_of(canary):
                self._by_round.setdefault(number, []).append(clients.names[canary])

    def __repr__(self) -> str:
        return f"CanaryClients({len(self._clients.names):,})"  # not how many were included

    def updates(self, number: int, grid: Grid) -> ExactSum | None:
        """The sum of the clipped updates of all included canaries in a round; None if it has none.

        As for clients, an update that is not finite counts as zeros.
        """
        names = self._by_round.get(number)
        if names is None:
            return None
        model = self._server.model
        total = ExactSum(grid, model.size)
        for _, update in self._clients.updates(model, names, number):
            if np.isfinite(update).all():
                total.add(update)
        return total

    def observe(self, number: int, others: NDArray[Any], mean: NDArray[Any]) -> None:
        """Note nothing: the attack sees the released model alone."""

    def save(self) -> None:
        """Write nothing."""
