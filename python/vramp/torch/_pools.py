"""Deleting a torch.cuda.MemPool while another pool is open, on PyTorch's own allocator.

PyTorch's destructor of a pool frees the pool's memory, and ends the process if a use_mem_pool block or a
capture is open then. So a pool that is deleted meanwhile is kept until none is. vramp's own class of
allocators does the same in C++.
"""

from __future__ import annotations

from typing import Any

# One entry for each open use_mem_pool block. Changed by single operations, for destructors run anywhere.
_open: list[None] = []
_deleted: list[Any] = []
_is_installed = False


def install(torch: Any) -> None:
    """Guards all pools of the process. Calling it again changes nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    memory = torch.cuda.memory
    begin, release = memory._cuda_beginAllocateCurrentThreadToPool, memory._cuda_releasePool

    def guarded_begin(*arguments: Any) -> None:
        begin(*arguments)
        _open.append(None)

    def guarded_release(*arguments: Any) -> None:
        release(*arguments)
        if _open:
            _open.pop()
        while _deleted and not _open and not torch.cuda.is_current_stream_capturing():
            _deleted.pop()

    def delete(pool: Any) -> None:
        # Python calls this once for an object: the second end of a kept pool is its last.
        if _open or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            _deleted.append(pool)

    memory._cuda_beginAllocateCurrentThreadToPool = guarded_begin
    memory._cuda_releasePool = guarded_release
    torch.cuda.MemPool.__del__ = delete
