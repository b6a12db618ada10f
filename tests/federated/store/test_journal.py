"""Codes of cohorts, against plain Python; and what a journal of another version is refused for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_codes import clients_of, counted_of, set_clients, set_counted

from dpftrl.errors import UnsafeState
from dpftrl.federated.store.journal import packed, packed_mask, unpacked, unpacked_mask
from dpftrl.verify.journal import _decode_clients

ENDS = [0, 1, 2, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1]
COHORTS = st.lists(
    st.one_of(st.integers(0, 2**64 - 1), st.sampled_from(ENDS)),
    min_size=1,
    max_size=40,
    unique=True,
)


@given(clients=COHORTS)
def test_cohorts_come_back_and_are_written_as_plain_python_writes_them(clients):
    keys = np.sort(np.array(clients, np.uint64))
    text, record = packed(keys), {"size": 0}
    set_clients(record, [f"{key:016x}" for key in keys.tolist()])
    assert text == record["clients"]
    assert unpacked(text, len(keys)).tolist() == keys.tolist()
    assert _decode_clients(text, len(keys)).tolist() == keys.tolist()
    assert [int(client, 16) for client in clients_of(record)] == keys.tolist()


@pytest.mark.parametrize("size", [1, 2, 127, 128, 6500])
def test_random_cohorts_take_less_than_nine_bytes_per_client_when_they_are_large(size):
    keys = np.sort(np.random.default_rng(size).integers(0, 2**64, size, dtype=np.uint64))
    text = packed(keys)
    assert unpacked(text, size).tolist() == keys.tolist()
    assert _decode_clients(text, size).tolist() == keys.tolist()
    if size == 6500:
        assert len(text) / size < 8.9


@given(mask=st.lists(st.booleans(), min_size=1, max_size=40))
def test_who_was_counted_comes_back(mask):
    record = {}
    set_counted(record, mask)
    assert packed_mask(np.array(mask)) == record["counted"]
    assert unpacked_mask(record["counted"], len(mask)).tolist() == mask
    assert counted_of(record, len(mask)) == mask


@pytest.mark.parametrize(("text", "size"), [("", 0), ("", 1), ("AAAA", 2), ("*", 3), ("é", 3)])
def test_what_is_no_cohort_is_refused(text, size):
    with pytest.raises(UnsafeState, match="makes no sense"):
        unpacked(text, size)
    with pytest.raises(UnsafeState, match="makes no sense"):
        unpacked_mask(text, size + 9)
