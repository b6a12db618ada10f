"""The contacts of a run: how far each client can move the release."""

import numpy as np
import pytest

from dpftrl.verify.contacts import Contacts, largest_client_shift


@pytest.mark.parametrize("often", [0.0, 0.2, 1.0])
def test_the_largest_client_shift_is_that_of_the_worst_client(monkeypatch, often):
    monkeypatch.setattr("dpftrl.verify.contacts.FREQUENT_SHARE", often)
    monkeypatch.setattr("dpftrl.verify.contacts.CLIENTS_PER_BATCH", 3)
    generator = np.random.default_rng(0)
    dense = np.tril(generator.standard_normal((12, 12)))
    taken = generator.uniform(size=(12, 9)) < generator.uniform(size=9)
    clients, rows = np.nonzero(taken.T)
    contacts = Contacts(clients.astype(np.uint64), rows, rows, np.arange(len(rows)))
    worst = np.linalg.norm(dense @ taken, axis=0).max()
    assert largest_client_shift(dense.T @ dense, contacts) == pytest.approx(worst)
