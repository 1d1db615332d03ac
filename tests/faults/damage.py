"""What can happen to a file: each function damages the file it is given, and changes at least one byte of it.

`DAMAGES` holds them by name, `HARMS` with one that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def cut(path: Path) -> None:
    """Lose the second half."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def delete(path: Path) -> None:
    path.unlink()


def drop_line(path: Path) -> None:
    """Lose the line in the middle of the file; the only one is lost whole."""
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[len(lines) // 2]
    path.write_bytes(b"".join(lines))


def flip_digit(path: Path) -> None:
    """Change the digit that is nearest behind the middle; a file without digits loses a bit there."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    places = [place for place in (*range(middle, len(data)), *range(middle)) if chr(data[place]).isdigit()]
    place = next((place for place in places if data[place] < 128), middle)
    data[place] = data[place] ^ 1
    path.write_bytes(bytes(data))


def zeros(path: Path) -> None:
    """Zero bytes in the place of sixteen, as after a power loss; where all are zero already, they become ones."""
    data = bytearray(path.read_bytes())
    place = max(0, len(data) // 2 - 8)
    hole = data[place : place + 16]
    data[place : place + 16] = bytes([int(not any(hole))]) * len(hole)
    path.write_bytes(bytes(data))


def binary(path: Path) -> None:
    """Other bytes of the same length, no UTF-8."""
    path.write_bytes(bytes((0x80 + 37 * place) % 256 for place in range(max(1, path.stat().st_size))))


DAMAGES: dict[str, Callable[[Path], None]] = {
    function.__name__: function for function in (cut, empty, delete, drop_line, flip_digit, zeros, binary)
}


def nothing(path: Path) -> None:
    """Read the file, and leave it as it is."""
    path.stat()


HARMS = DAMAGES | {nothing.__name__: nothing}
