"""Compressed logs that would fill the memory."""

import gzip
import subprocess
import sys
import zlib

import pytest

from dpftrl.accounting.logs import observe
from dpftrl.errors import InvalidInput


def bomb(path, line: bytes, times: int):
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(b"round,client\n")
        for _ in range(times):
            file.write(line * 1000)
    return path


@pytest.mark.parametrize("line", [b"0,a\n", b"x" * 4096], ids=["rows", "one line"])
def test_a_bomb_is_refused_without_much_memory(tmp_path, line):
    path = bomb(tmp_path / "log.csv.gz", line, 600_000_000 // (1000 * len(line)))
    assert path.stat().st_size < 3_000_000
    program = (
        "import sys; from dpftrl.accounting.logs import observe\n"
        "from dpftrl.errors import InvalidInput\n"
        "try: observe(sys.argv[1])\n"
        "except InvalidInput as error: print(error)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(next(line.split()[1] for line in lines if line.startswith('VmHWM')))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    message, kilobytes = ended.stdout.splitlines()
    assert "decompress it yourself if you trust it" in message
    assert int(kilobytes) < 500_000


def test_a_log_that_compresses_well_is_read(tmp_path):
    path = tmp_path / "log.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write("round,client\n")
        file.writelines(f"{i},client-{i}\n" for i in range(100_000))
    assert observe(path).participation.max_participations == 1


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_compressed_log_says_so_in_its_name(tmp_path, pack):
    path = tmp_path / "log.csv"
    path.write_bytes(pack(b"round,client\n0,a\n"))
    with pytest.raises(InvalidInput, match="is compressed; decompress it"):
        observe(path)
