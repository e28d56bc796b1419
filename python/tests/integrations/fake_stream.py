"""A stream of a library, without a driver."""

from __future__ import annotations


class FakeStream:
    """A stream as cupy.cuda.Stream 13.6 and 14.2 has it: destroyed with its last reference."""

    destroyed: list[int] = []

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr
        self.device_id = 0

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.ptr)

    def __del__(self) -> None:
        FakeStream.destroyed.append(self.ptr)
