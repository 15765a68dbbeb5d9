"""Mutations of files: what bit rot, broken transfers and hostile authors do to them."""

import numpy as np

__all__ = ["insert_call", "mutate"]

# Sizes, offsets and counts at which arithmetic goes wrong.
INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF)
HEADER_BYTES = 256  # half of the mutations are in the header, which is a small part of most files


def mutate(data: bytes, rng: np.random.Generator) -> bytes:
    """Return a copy of some bytes with one to three mutations."""
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        data = _mutate_once(data, rng)
    return data


def insert_call(data: bytes, executed: str, rng: np.random.Generator) -> bytes:
    """Return a pickle with an instruction that executes code, which creates the file ``executed``."""
    calls = (
        "ccanary\nrun\n(tR",
        "ccanary\nNet\n)\x81",
        f"cos\nsystem\n(Vtouch {executed}\ntR",
        f"cbuiltins\nexec\n(Vopen({executed!r}, 'w')\ntR",
        f"c__builtin__\neval\n(Vopen({executed!r}, 'w')\ntR",
        f"(Vtouch {executed}\nios\nsystem\n",
        "\x8c\x06canary\x8c\x03run\x93)R",
        f"cnumpy.core.multiarray\n_reconstruct\n(cos\nsystem\n(Vtouch {executed}\ntRtR",
    )
    call = calls[int(rng.integers(len(calls)))].encode()
    if rng.random() < 0.3:  # the whole file
        return b"\x80\x02" + call + b"."
    position = int(rng.integers(2, max(3, min(len(data), HEADER_BYTES))))
    return data[:position] + call + rng.choice([b"", b"0", b"."]) + data[position:]


def _mutate_once(data: bytes, rng: np.random.Generator) -> bytes:
    size = len(data)
    limit = min(size, HEADER_BYTES) if rng.random() < 0.5 else size
    start = int(rng.integers(0, max(1, limit)))
    end = min(size, start + int(2 ** rng.uniform(0, 10)))
    kind = rng.integers(0, 9)
    if kind == 0 and size:  # one bit
        return data[:start] + bytes([data[start] ^ 1 << int(rng.integers(0, 8))]) + data[start + 1 :]
    if kind == 1 and size:  # one byte
        return data[:start] + bytes([int(rng.integers(0, 256))]) + data[start + 1 :]
    if kind == 2:  # a number
        width, order = int(rng.choice([1, 2, 4, 8])), rng.choice(["little", "big"])
        value = int(rng.choice(np.array(INTERESTING, dtype=object))) % 256**width
        return data[:start] + value.to_bytes(width, order) + data[start + width :]  # type: ignore[arg-type]
    if kind == 3:  # a broken transfer
        return data[:start]
    if kind == 4:  # missing bytes
        return data[:start] + data[end:]
    if kind == 5:  # inserted bytes
        return data[:start] + rng.bytes(end - start) + data[start:]
    if kind == 6:  # repeated bytes
        return data[:end] + data[start:]
    if kind == 7:  # a bad sector
        return data[:start] + bytes(end - start) + data[end:]
    return data[:start] + rng.bytes(end - start) + data[end:]
