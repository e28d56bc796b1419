"""SGLang's arena on the simulator, without torch: which bytes have memory, and what wrong calls say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import numpy
import pytest
from conftest import MIB

import vramp
import vramp.compat.sglang_kv as sglang_kv

PAGE = 2 * MIB


@pytest.fixture
def arena() -> Iterator[sglang_kv.KvVmmArena]:
    made = sglang_kv.KvVmmArena(0, 64 * PAGE)
    yield made
    made.close()


def test_buffers_grow_from_their_beginning(arena: sglang_kv.KvVmmArena) -> None:
    before = vramp.pool().stats().reserved
    assert (arena.granularity, arena.reserved, arena.device_id) == (PAGE, 64 * PAGE, 0)
    assert arena.base % PAGE == 0 and arena.backed_bytes == 0 == arena.cursor_bytes
    arena.commit_range(0, 3 * PAGE + 1)
    arena.commit_range(32 * PAGE, PAGE)
    assert arena.backed_bytes == 5 * PAGE == vramp.pool().stats().reserved - before
    view = numpy.asarray(arena._arena.array())
    view[: 4 * PAGE] = 1
    view[32 * PAGE : 33 * PAGE] = 2
    arena.commit_range(0, PAGE)
    arena.commit_range(0, 6 * PAGE)
    assert arena.backed_bytes == 7 * PAGE and (view[: 4 * PAGE] == 1).all()
    assert arena.uncommit_beyond(0, PAGE + 1) == 4 * PAGE and arena.uncommit_beyond(0, 5 * PAGE) == 0
    assert arena.uncommit_beyond(8 * PAGE, 0) == 0, "nothing was committed there"
    assert arena._committed_by_offset == {0: 2 * PAGE, 32 * PAGE: PAGE}
    arena.commit_range(0, 64 * PAGE - 32 * PAGE)
    assert (view[:PAGE] == 1).all() and (view[32 * PAGE : 33 * PAGE] == 2).all()
    del view


def test_a_commit_that_fails_changes_nothing(arena: sglang_kv.KvVmmArena) -> None:
    arena.commit_range(0, PAGE)
    arena._arena.limit = 4 * PAGE
    with pytest.raises(RuntimeError, match="limit"):
        arena.commit_range(0, 8 * PAGE)
    assert arena.backed_bytes == PAGE
    arena.commit_range(0, 4 * PAGE)


def test_wrong_calls_say_what_to_do(arena: sglang_kv.KvVmmArena) -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        arena.commit_range(5, PAGE)
    for offset, want in ((0, 65 * PAGE), (64 * PAGE, 1), (-PAGE, PAGE)):
        with pytest.raises(RuntimeError, match="beyond the"):
            arena.commit_range(offset, want)
    with pytest.raises(vramp.UnsupportedError, match="has no retain_handles"):
        sglang_kv.KvVmmArena(0, PAGE, retain_handles=True)
    arena.close()
    arena.close()
    with pytest.raises(RuntimeError, match="after close"):
        arena.commit_range(0, PAGE)
    assert arena.uncommit_beyond(0, 0) == 0


def test_addresses_are_handed_out_once(arena: sglang_kv.KvVmmArena) -> None:
    take = arena._bump._take
    assert take(1, 0, None) == arena.base and take(3 * PAGE, 0, None) == arena.base + PAGE
    assert arena.cursor_bytes == 4 * PAGE
    assert take(61 * PAGE, 0, None) is None and take(60 * PAGE, 0, None) == arena.base + 4 * PAGE


def test_install_puts_the_arena_into_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("kv_vmm_backing")
    parents = ["sglang", "sglang.srt", "sglang.srt.mem_cache"]
    for parent in parents:
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    sys.modules[parents[-1]].kv_vmm_backing = found  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="post-capture"):
        sglang_kv.install()
    found.KvVmmArena = object  # type: ignore[attr-defined]
    sglang_kv.install()
    assert found.KvVmmArena is sglang_kv.KvVmmArena
