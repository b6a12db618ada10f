"""GHASH in plain Python, from NIST SP 800-38D: an oracle, and an attacker's tool.

Blocks are integers with the first bit of the block as the highest. That bit is the coefficient of
x^0, so that multiplying by x shifts to the right.
"""

R = 0xE1 << 120
ONE = 1 << 127


def multiply(a: int, b: int) -> int:
    """Algorithm 1."""
    product = 0
    for place in range(127, -1, -1):
        if a >> place & 1:
            product ^= b
        b = b >> 1 ^ (R if b & 1 else 0)
    return product


def power(a: int, exponent: int) -> int:
    result = ONE
    while exponent:
        if exponent & 1:
            result = multiply(result, a)
        a = multiply(a, a)
        exponent >>= 1
    return result


def inverse(a: int) -> int:
    return power(a, 2**128 - 2)


def square_root(a: int) -> int:
    return power(a, 2**127)


def blocks_of(content: bytes) -> list[int]:
    padded = content + bytes(-len(content) % 16)
    return [int.from_bytes(padded[i : i + 16], "big") for i in range(0, len(padded), 16)]


def ghash(h: int, blocks: list[int]) -> int:
    """Algorithm 2."""
    y = 0
    for block in blocks:
        y = multiply(y ^ block, h)
    return y


def hashed(h: int, additional: bytes, encrypted: bytes = b"") -> int:
    """What GCM hashes: both contents, padded, and their lengths in bits."""
    lengths = (8 * len(additional) << 64) | 8 * len(encrypted)
    return ghash(h, [*blocks_of(additional), *blocks_of(encrypted), lengths])
