"""How a journal writes cohorts and counted clients, in plain Python: one bit after the other."""

import base64
from typing import Any


def clients_of(record: dict[str, Any]) -> list[str]:
    """The pseudonyms of a cohort, 16 hexadecimal digits each."""
    if "size" not in record:
        text = record["clients"]
        return [text[i : i + 16] for i in range(0, len(text), 16)]
    size = record["size"]
    bits = _bits(record["clients"])
    lower_width = 64 - size.bit_length()
    upper_length = size + 2 ** size.bit_length()
    lower = bits[-(-upper_length // 8) * 8 :]
    places = [i for i, bit in enumerate(bits[:upper_length]) if bit == "1"]
    assert len(places) == size
    keys = [
        ((place - i) << lower_width) | int(lower[i * lower_width : (i + 1) * lower_width], 2)
        for i, place in enumerate(places)
    ]
    return [f"{key:016x}" for key in keys]


def set_clients(record: dict[str, Any], clients: list[str]) -> None:
    """Write pseudonyms into a cohort, as its journal does."""
    if "size" not in record:
        record["clients"] = "".join(clients)
        return
    size = record["size"] = len(clients)
    lower_width = 64 - size.bit_length()
    upper = ["0"] * (size + 2 ** size.bit_length())
    for i, client in enumerate(clients):
        upper[(int(client, 16) >> lower_width) + i] = "1"
    lower = "".join(f"{int(client, 16):064b}"[64 - lower_width :] for client in clients)
    record["clients"] = base64.b64encode(_bytes("".join(upper)) + _bytes(lower)).decode()


def counted_of(record: dict[str, Any], size: int) -> list[bool]:
    """Whether each client of a cohort was counted, from the record of its commit."""
    return [bit == "1" for bit in _bits(record["counted"])[:size]]


def set_counted(record: dict[str, Any], counted: list[bool]) -> None:
    record["counted"] = base64.b64encode(_bytes("".join("01"[one] for one in counted))).decode()


def ledger_rows(records: list[dict[str, Any]]) -> list[tuple[int, str, str]]:
    """Round, client and status of all attempts of a journal of version 2 that have ended."""
    rows, cohort = list[tuple[int, str, str]](), dict[str, Any]()
    for record in records[1:]:
        if record["kind"] == "cohort":
            cohort = record
            continue
        if record["kind"] == "empty":
            cohort = dict[str, Any]()
        if not cohort:  # a round in which nobody took part
            continue
        names = cohort["names"] or ["c" + client for client in clients_of(cohort)]
        if record["kind"] == "abandoned":
            statuses = ["abandoned"] * len(names)
        else:
            counted = counted_of(record, len(names))
            statuses = ["counted" if one else "contacted" for one in counted]
        rows += zip([cohort["row"]] * len(names), names, statuses, strict=True)
    return rows


def _bits(text: str) -> str:
    return "".join(f"{byte:08b}" for byte in base64.b64decode(text, validate=True))


def _bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
