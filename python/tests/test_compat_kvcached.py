"""kvcached's operations and its page allocator on the simulator, without torch: tensors are NumPy's."""

from __future__ import annotations

import gc
import os
import random
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from conftest import MIB, run_python

import vramp
import vramp.compat.kvcached as ops
import vramp.kv
from vramp.compat._kvcached_pages import Pages

PAGE = 2 * MIB
LAYERS = 3


@pytest.fixture(autouse=True)
def numpy_tensors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are arrays of NumPy, and no group is left behind."""

    def flat(arena: vramp.kv.Arena, dtype: str, offset: int = 0, size: int | None = None) -> Any:
        return numpy.asarray(arena.view(None, dtype, offset=offset, size=size))

    monkeypatch.setattr(vramp.kv.Arena, "flat", flat)
    monkeypatch.setattr(ops, "_current_device", lambda: 0)
    yield
    ops.shutdown_kvcached()
    gc.collect()


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of a usage file of the test's own."""
    made = f"vramp_test_{os.getpid()}_{abs(hash(request.node.name))}"
    yield made
    Path("/dev/shm", made).unlink(missing_ok=True)


def reserved() -> int:
    return vramp.pool().stats().reserved


def bundle(pages: int = 1, buffers: int = 2) -> int:
    return pages * PAGE * LAYERS * buffers


def create(pages: int = 16, contiguous: bool = True, buffers: int = 2, unified: bool = False, group: int = 0) -> list[Any]:
    """Makes the tensors of a group, after a first call of `init_kvcached`."""
    if ops._device is None:
        ops.init_kvcached("cuda:0", PAGE, contiguous)
    size = pages * PAGE * (1 if unified else buffers)
    tensors: list[Any] = ops.create_kv_tensors(size, 2, "cuda:0", LAYERS, buffers, group, unified)
    return tensors


def test_a_contiguous_tensor_has_the_pages_of_all_layers_side_by_side() -> None:
    before = reserved()
    (tensor,) = create()
    assert tensor.dtype == numpy.int16 and tensor.nbytes == bundle(16)
    assert ops.kv_tensors_created() and reserved() == before + bundle(), "page 0 has memory"
    stride = bundle() // 2
    assert ops.map_to_kv_tensors([2 * bundle(), 5 * bundle()]) and reserved() == before + bundle(3)
    for page in (0, 2, 5):
        tensor[page * stride : (page + 1) * stride] = page
    assert (tensor[2 * stride : 3 * stride] == 2).all()
    assert ops.unmap_from_kv_tensors([2 * bundle()]) and reserved() == before + bundle(2)
    assert (tensor[5 * stride : 6 * stride] == 5).all()


def test_a_layers_tensor_has_keys_and_values_in_its_halves() -> None:
    before = reserved()
    tensors = create(contiguous=False)
    assert [tensor.nbytes for tensor in tensors] == [2 * 16 * PAGE] * LAYERS
    ops.map_to_kv_tensors([3 * PAGE])
    assert reserved() == before + bundle(2)
    for layer, tensor in enumerate(tensors):
        keys, values = tensor[: tensor.size // 2], tensor[tensor.size // 2 :]
        for half in (keys, values):
            half[3 * PAGE // 2 : 4 * PAGE // 2] = layer
            half[: PAGE // 2] = 9
    assert all((tensor[3 * PAGE // 2 : 4 * PAGE // 2] == layer).all() for layer, tensor in enumerate(tensors))


@pytest.mark.parametrize("buffers", [1, 2])
def test_a_unified_pool_has_one_page_of_each_layer(buffers: int) -> None:
    before = reserved()
    tensors = create(contiguous=False, buffers=buffers, unified=True)
    ops.map_to_kv_tensors([15 * PAGE])
    assert reserved() == before + bundle(2, 1)
    for tensor in tensors:
        tensor[-PAGE // 2 :] = 4


def test_latent_attention_by_layer_has_one_page_of_each_layer() -> None:
    tensors = create(contiguous=False, buffers=1)
    assert ops.map_to_kv_tensors([15 * PAGE])
    for tensor in tensors:
        tensor[-PAGE // 2 :] = 4


def test_groups_have_pages_of_their_own() -> None:
    create(group=0)
    create(group=7, pages=4)
    before = reserved()
    assert ops.map_to_kv_tensors([bundle()], group_id=7) and not ops.kv_tensors_created(3)
    assert reserved() == before + bundle()
    assert ops.map_to_kv_tensors([bundle()]) and reserved() == before + bundle(2)
    with pytest.raises(vramp.RangeError, match="not the offset of a page"):
        ops.map_to_kv_tensors([bundle(4)], group_id=7)
    with pytest.raises(vramp.InUseError, match="another group_id"):
        ops.create_kv_tensors(bundle(4), 2, "cuda:0", LAYERS + 1, 2, 7)
    assert create(group=7, pages=4)[0] is create(group=7, pages=4)[0], "a group keeps its tensors"


def test_a_page_that_is_mapped_is_not_mapped_again() -> None:
    create()
    ops.map_to_kv_tensors([bundle(), bundle(), 0])
    before = reserved()
    ops.map_to_kv_tensors([bundle(), 2 * bundle()])
    assert reserved() == before + bundle()
    ops.unmap_from_kv_tensors([bundle(), bundle(), 9 * bundle()])
    assert reserved() == before


def test_a_map_that_fails_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    create()
    pool = vramp.pool()
    monkeypatch.setattr(ops._device.groups[0].arena, "limit", bundle(3)) if ops._device else None
    with pytest.raises(vramp.OutOfMemoryError):
        ops.map_to_kv_tensors([page * bundle() for page in (1, 2, 3)])
    ops.map_to_kv_tensors([page * bundle() for page in (1, 2)])
    pool.audit()


def test_wrong_calls_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="call init_kvcached before"):
        ops.kv_tensors_created()
    with pytest.raises(vramp.UnsupportedError, match="use cuda:N"):
        ops.init_kvcached("cpu")
    with pytest.raises(vramp.RangeError, match="KVCACHED_PAGE_SIZE_MB"):
        ops.init_kvcached("cuda:0", 3 * MIB)
    ops.init_kvcached("cuda")
    assert not ops.map_to_kv_tensors([0]) and not ops.unmap_from_kv_tensors([0])
    with pytest.raises(RuntimeError, match="use 1, 2, 4 or 8"):
        ops.create_kv_tensors(PAGE, 3, "cuda:0", 1)
    with pytest.raises(vramp.RangeError, match="use 1 at least"):
        ops.create_kv_tensors(PAGE, 1, "cuda:0", 0)
    create()
    for offset in (1, -bundle(), bundle(16)):
        with pytest.raises(vramp.RangeError, match="not the offset of a page"):
            ops.map_to_kv_tensors([offset])


def test_a_shutdown_gives_memory_back_though_tensors_live() -> None:
    before = reserved()
    (tensor,) = create()
    ops.map_to_kv_tensors([bundle()])
    ops.shutdown_kvcached()
    ops.shutdown_kvcached()
    assert reserved() == before and tensor.nbytes == bundle(16)
    create()
    ops.init_kvcached("cuda:0")
    assert reserved() == before


def allocator(name: str, pages: int = 16, **options: Any) -> ops.PageAllocator:
    options = {"enable_page_prealloc": False, **options}
    return ops.PageAllocator(LAYERS, pages * PAGE, PAGE, ipc_name=name, **options)


def test_pages_are_handed_out_by_number_and_some_stay_mapped(name: str) -> None:
    create()
    pages = allocator(name)
    before = reserved()
    taken = [pages.alloc_page().page_id for _ in range(14)]
    assert taken == list(range(14)) and reserved() == before + bundle(13), "page 0 was mapped"
    assert pages.get_page_state() == {"total_pages": 16, "free_pages": 2, "inuse_pages": 14, "reserved_pages": 0}
    pages.free_pages(taken[:12])
    assert pages.get_num_reserved_pages() == 10 and reserved() == before + bundle(11)
    assert pages.alloc_page().page_id == 0, "reserved pages come first"
    pages.free_page(0)
    pages.trim()
    assert (pages.get_num_reserved_pages(), pages.get_num_free_pages()) == (0, 14)
    assert reserved() == before + bundle(1)
    pages.reset_free_page_order()
    assert [pages.alloc_page().page_id for _ in range(14)] == [*range(12), 14, 15]
    with pytest.raises(RuntimeError, match="no page is left of 16"):
        pages.alloc_page()


def test_a_page_that_cannot_be_mapped_is_free_again(name: str) -> None:
    create()
    assert ops._device is not None
    ops._device.groups[0].arena.limit = bundle(2)
    pages = allocator(name)
    assert [pages.alloc_page().page_id for _ in range(2)] == [0, 1]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="page 2 was not mapped"):
            pages.alloc_page()
    assert pages.get_page_state()["free_pages"] == 14
    ops._device.groups[0].arena.limit = None
    assert pages.alloc_page().page_id == 2


def test_the_number_of_pages_shrinks_and_grows_without_a_page_twice(name: str) -> None:
    create(pages=64)
    pages = allocator(name, 32)
    taken = [pages.alloc_page().page_id for _ in range(4)]
    assert not pages.resize(3 * PAGE) and pages.resize(16 * PAGE) and pages.resize(16 * PAGE)
    assert (pages.get_num_total_pages(), pages.get_num_free_pages(), pages.get_num_inuse_pages()) == (16, 12, 4)
    assert pages.resize(40 * PAGE)
    taken += [pages.alloc_page().page_id for _ in range(36)]
    assert sorted(taken) == list(range(40))
    pages.free_pages(taken)
    assert pages.resize(4 * PAGE), "what is reserved is trimmed for it"
    assert pages.get_page_state() == {"total_pages": 4, "free_pages": 4, "inuse_pages": 0, "reserved_pages": 0}


def test_pages_are_mapped_ahead_on_a_thread_that_ends_with_the_allocator(name: str) -> None:
    create()
    pages = allocator(name, enable_page_prealloc=True)
    pages.start_prealloc_thread()
    pages.start_prealloc_thread()
    wait_for(lambda: pages.get_num_reserved_pages() == 5)
    for _ in range(6):
        pages.alloc_page()
    wait_for(lambda: pages.get_num_reserved_pages() == 5)
    pages.stop_prealloc_thread()
    pages.stop_prealloc_thread()
    pages.start_prealloc_thread()
    before = threading.active_count()
    del pages
    gc.collect()
    wait_for(lambda: threading.active_count() < before)


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_the_limit_comes_from_the_file_and_the_usage_goes_there(name: str) -> None:
    create()
    pages = allocator(name, enable_page_prealloc=True)
    path = Path("/dev/shm", name)
    numbers = struct.Struct("=qqq")
    assert numbers.unpack(path.read_bytes()) == (bundle(16), 0, 0)
    pages.alloc_page()
    pages.free_page(pages.alloc_page().page_id)
    assert numbers.unpack(path.read_bytes()) == (bundle(16), bundle(), bundle())
    assert pages.check_and_get_resize_target(16 * PAGE) == -1 == pages.get_resize_target()
    with path.open("r+b") as file:
        file.write(struct.pack("=q", bundle(8)))
    assert pages.check_and_get_resize_target(16 * PAGE) == 8 * PAGE
    pages.start_prealloc_thread()
    wait_for(lambda: pages.get_resize_target() == 8 * PAGE)
    pages.stop_prealloc_thread()
    assert pages.resize(pages.get_resize_target()) and pages.get_num_total_pages() == 8
    pages.alloc_page()
    assert numbers.unpack(path.read_bytes())[0] == bundle(8), "a limit of another process stays"
    path.unlink()
    assert pages.check_and_get_resize_target(16 * PAGE) == -1
    del pages
    gc.collect()
    assert not path.exists()


def test_ranks_map_by_the_callbacks(name: str) -> None:
    calls: list[tuple[str, int, list[int]]] = []
    pages = allocator(name, world_size=2, contiguous_layout=False)
    pages.set_broadcast_map_callback(lambda ranks, offsets: calls.append(("map", ranks, offsets)))
    pages.set_broadcast_unmap_callback(lambda ranks, offsets: calls.append(("unmap", ranks, offsets)))
    assert pages.alloc_page().page_id == 0
    pages.free_page(0)
    pages.trim()
    assert calls == [("map", 2, [0]), ("unmap", 2, [0])]

    def fail(ranks: int, offsets: Sequence[int]) -> None:
        raise RuntimeError("Worker 1 failed to map")

    pages.set_broadcast_map_callback(fail)
    with pytest.raises(RuntimeError, match="Worker 1 failed to map"):
        pages.alloc_page()
    assert pages.get_num_free_pages() == 16

    alone = allocator(name, contiguous_layout=True)
    alone.set_broadcast_map_callback(lambda ranks, offsets: calls.append(("alone", ranks, offsets)))
    alone.set_use_worker_ipc(True)
    alone.alloc_page()
    alone.alloc_page()
    assert calls[-1] == ("alone", 1, [bundle()])


def test_a_thread_that_finds_no_page_waits_for_those_that_are_moved(name: str) -> None:
    inside, go_on = threading.Event(), threading.Event()
    pages = allocator(name, 5, world_size=2, enable_page_prealloc=True)

    def slow(ranks: int, offsets: Sequence[int]) -> None:
        inside.set()
        assert go_on.wait(20)

    pages.set_broadcast_map_callback(slow)
    pages.start_prealloc_thread()
    assert inside.wait(20)
    threading.Timer(0.05, go_on.set).start()
    assert pages.alloc_page().page_id == 0
    pages.stop_prealloc_thread()


def test_blocks_and_pages() -> None:
    page = ops.InternalPage(3, 100)
    page.init(30)
    assert page.get_free_blocks() == [10, 11, 12] and page.get_block_range(3, 100, 30) == (10, 13)
    assert page.alloc(2) == [10, 11] and page.num_free_blocks() == 1 and not page.full() and not page.empty()
    with pytest.raises(RuntimeError, match="ask for no more"):
        page.alloc(2)
    assert page.alloc() == [12] and page.full()
    page.free(11)
    page.free_batch([10, 12])
    assert page.empty() and page.alloc(3) == [11, 10, 12]
    assert ops.InternalPage.get_num_blocks(100, 30) == 3


def test_no_page_is_in_two_hands_when_threads_move_them_and_moves_fail() -> None:
    chance = random.Random(7)
    mapped: set[int] = set()
    lock = threading.Lock()

    def map_pages(pages: Sequence[int]) -> None:
        with lock:
            assert not mapped.intersection(pages)
            if chance.random() < 0.2:
                raise RuntimeError("no memory")
            mapped.update(pages)

    def unmap_pages(pages: Sequence[int]) -> None:
        with lock:
            assert mapped.issuperset(pages)
            if chance.random() < 0.1:
                raise RuntimeError("the driver failed")
            mapped.difference_update(pages)

    pages = Pages(40, (3, 6), map_pages, unmap_pages, lambda used, ahead: None)
    hands: list[set[int]] = [set() for _ in range(4)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        own, turn = hands[number], random.Random(number)
        try:
            for _ in range(2000):
                try:
                    match turn.randrange(6):
                        case 0 | 1:
                            page = pages.take(refills=False)
                            with lock:
                                assert page in mapped and all(page not in hand for hand in hands)
                                own.add(page)
                        case 2 | 3 if own:
                            some = turn.sample(sorted(own), turn.randint(1, len(own)))
                            with lock:
                                own.difference_update(some)
                            pages.give(some)
                        case 4:
                            turn.choice((pages.trim, lambda: pages.refill(4), pages.sort))()
                        case _:
                            pages.resize(turn.randint(20, 60))
                except RuntimeError:
                    pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    state = pages.state()
    held = sorted(page for hand in hands for page in hand)
    assert len(set(held)) == len(held) == state["inuse_pages"]
    assert len(pages._free) + len(pages._reserved) == state["free_pages"] and pages._moving == 0
    assert mapped == {*held, *pages._reserved}
    everywhere = [*held, *pages._free, *pages._reserved, *pages._beyond]
    assert len(set(everywhere)) == len(everywhere)


def test_install_stands_in_for_the_compiled_module(tmp_path: Path) -> None:
    (tmp_path / "kvcached").mkdir()
    (tmp_path / "kvcached" / "__init__.py").touch()
    (tmp_path / "kvcached" / "vmm_ops.py").write_text("PageAllocator = None\n")
    code = """if True:
        import importlib.util
        import vramp.compat.kvcached as ours
        ours.install()
        ours.install()
        assert importlib.util.find_spec("kvcached.vmm_ops") is not None
        import kvcached.vmm_ops as v
        from kvcached.vmm_ops import kv_tensors_created
        assert v.PageAllocator is ours.PageAllocator and v.install is ours.install
        v.init_kvcached("cuda:0", 0, False)
        assert not kv_tensors_created()
        print("ours")
    """
    ran = run_python(code, PYTHONPATH=str(tmp_path))
    assert ran.stdout == "ours\n", ran.stderr
    late = "import kvcached.vmm_ops, vramp.compat.kvcached; vramp.compat.kvcached.install()"
    assert "call install before it imports kvcached" in run_python(late, PYTHONPATH=str(tmp_path)).stderr


@pytest.mark.parametrize(("wanted", "printed"), [("on", "ours\n"), ("off", "installed\n")])
def test_programs_under_run_and_those_they_start_find_it(tmp_path: Path, wanted: str, printed: str) -> None:
    (tmp_path / "kvcached").mkdir()
    (tmp_path / "kvcached" / "__init__.py").touch()
    (tmp_path / "kvcached" / "vmm_ops.py").touch()
    code = "import kvcached.vmm_ops as v; print('ours' if hasattr(v, 'PageAllocator') else 'installed')"
    inherit = Path(vramp.__file__).parent / "_inherit"
    path = os.pathsep.join((str(inherit), str(tmp_path)))
    ran = run_python(code, PYTHONPATH=path, VRAMP_RUN_ROUTE="auto", VRAMP_COMPAT=wanted)
    assert ran.stdout == printed, ran.stderr


def test_a_forked_child_has_no_device() -> None:
    create()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ops.map_to_kv_tensors([0])
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        assert "call init_kvcached" in answer.read()
    os.waitpid(child, 0)
