"""Values between workers.

A worker reads its data to send it (`_reading`). Contents that left the card are sent from where they are, and
over a transport of host memory a value on the card is sent as its contents on the host. Both arrive as contents: a
worker that gathers many dependencies takes no memory of its card before a task reads them. Any other process,
such as a client, gets the value.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from dask.sizeof import sizeof
from distributed.protocol import dask_deserialize, dask_serialize
from distributed.sizeof import safe_sizeof

from ._reading import Prepared, using
from ._values import Contents, Header

_receiving: ContextVar[bool] = ContextVar("vramp_receiving", default=False)


class Sent(Prepared):
    """A value on its way to another process: its contents, or the value itself until it is serialized."""

    __slots__ = ("_frames", "_make_room", "_what", "size")

    def __init__(self, what: Any, make_room: Callable[[int], bool]) -> None:
        self._what = what
        self._make_room = make_room
        self._frames: tuple[Header, list[Any]] | None = None
        self.size = safe_sizeof(what)
        """`sizeof` of the value."""

    def prepare(self) -> None:
        """Copies the value to host frames, and refers to it no longer.

        Makes room on the card for contents that are on the disk.
        """
        contents = self._what if isinstance(self._what, Contents) else Contents.on_host(self._what)
        # The message lives until it was answered, and the value's memory may be needed before.
        self._what = contents
        while self._frames is None:
            try:
                self._frames = contents.to_frames()
            except (MemoryError, TimeoutError):
                if not self._make_room(self.size):
                    raise
        self._what = None

    def to_frames(self) -> tuple[Header, list[Any]]:
        """Returns the value as host frames."""
        if self._frames is None:
            self.prepare()
        assert self._frames is not None, "prepare makes them"
        return self._frames


@dask_serialize.register(Sent)
def _serialize(sent: Sent) -> tuple[Header, list[Any]]:
    return sent.to_frames()


@dask_deserialize.register(Sent)
def _deserialize(header: Header, frames: Sequence[Any]) -> Any:
    contents = Contents.from_frames(header, frames)
    if _receiving.get():
        return contents
    from ._store import store_of_process

    return contents.restore(store_of_process())


@sizeof.register(Sent)
def _size(sent: Sent) -> int:
    return sent.size


def receive_contents(worker: Any) -> None:
    """Makes a worker keep the contents that it receives as they are. Call it once for a worker."""
    worker.gather_dep = _receives(worker.gather_dep)


def _receives(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(method)
    async def gather_dep(*args: Any, **kwargs: Any) -> Any:
        with using(_receiving, True):
            return await method(*args, **kwargs)

    return gather_dep
