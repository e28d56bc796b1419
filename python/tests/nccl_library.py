"""A small library in the place of NCCL, which tests compile."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "fake_nccl" / "nccl.c"


class Fake:
    """The library, and its communicators."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.path = folder / "libnccl.so.2"
        command = ["cc", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
        subprocess.run([*command, str(SOURCE), "-o", str(self.path)], check=True)
        self.library = ctypes.CDLL(str(self.path))
        self.library.fake_log.restype = ctypes.c_char_p

    def make(self, ranks: int = 1) -> list[int]:
        comms = (ctypes.c_void_p * ranks)()
        self.library.fake_make(ranks, comms)
        return [comm for comm in comms if comm]

    def taken(self, comm: int) -> str:
        """Returns the calls since the last look."""
        text: bytes = self.library.fake_log(ctypes.c_void_p(comm))
        self.library.fake_forget(ctypes.c_void_p(comm))
        return text.decode().strip()

    def fail(self, comm: int, times: int) -> None:
        self.library.fake_fail(ctypes.c_void_p(comm), times)
