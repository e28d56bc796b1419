"""Functions around the sleep of regions: what others know of memory ends before it leaves, and is made again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from conftest import MIB

import vramp


@pytest.fixture
def pool() -> Iterator[vramp.Pool]:
    """A pool of 1 GiB."""
    with vramp.open("sim:h200", limit="1GiB") as opened:
        yield opened
        if not opened.is_closed:
            opened.audit()


class Log(list[str]):
    """Names of the functions that were called."""

    def note(self, text: str, error: BaseException | None = None) -> Callable[[], None]:
        def call() -> None:
            self.append(text)
            if error is not None:
                raise error

        return call

    def taken(self) -> str:
        text = " ".join(self)
        self.clear()
        return text


def phase(pool: vramp.Pool, tag: str) -> str:
    return next(found.phase for found in vramp.status(pool) if found.tag == tag)


def block(pool: vramp.Pool, tag: str, size: int = 8 * MIB) -> vramp.Allocation:
    with vramp.region(tag, device=pool):
        return pool.malloc(size)


def test_a_region_with_pins_sleeps_once_a_function_ended_them(pool: vramp.Pool) -> None:
    weights = block(pool, "weights")
    pins = [pool.pin(weights)]
    with pytest.raises(vramp.RegionError, match="pinned"):
        vramp.pause(device=pool)
    with vramp.around_sleep(
        "the network card", lambda: pins.pop().unpin(), lambda: pins.append(pool.pin(weights)), device=pool
    ):
        for _ in range(3):
            vramp.pause("weights", device=pool)
            assert not pins and pool.stats().reserved == 0
            vramp.resume("weights", device=pool)
            assert len(pins) == 1
    with pytest.raises(vramp.RegionError, match="pinned"):
        vramp.pause(device=pool)


def test_order_tags_and_one_call_for_several_regions(pool: vramp.Pool) -> None:
    log = Log()
    vramp.around_sleep("all", log.note("-all"), log.note("+all"), device=pool)
    vramp.around_sleep("b", log.note("-b"), log.note("+b"), tags="b", device=pool)
    blocks = [block(pool, tag) for tag in "ab"]
    with vramp.around_sleep("before only", log.note("-only"), tags=["a", "later"], device=pool):
        vramp.pause(device=pool)
        assert log.taken() == "-all -b -only"
        vramp.resume("b", device=pool)
        assert log.taken() == "+b"
        vramp.resume(device=pool)
        assert log.taken() == "+all"
    vramp.pause("a", device=pool)
    vramp.resume("a", device=pool)
    assert log.taken() == "-all +all"
    assert len(blocks) == 2


def test_what_raises_before_a_pause_is_the_cause_and_changes_nothing(pool: vramp.Pool) -> None:
    weights, log = block(pool, "weights"), Log()
    vramp.around_sleep("first", log.note("-first"), log.note("+first"), device=pool)
    wrong = ConnectionError("no peer")
    with vramp.around_sleep("second", log.note("-second", wrong), log.note("+second"), device=pool):
        for wait in (True, False):
            with pytest.raises(vramp.CallbackError, match='"second": ConnectionError: no peer') as raised:
                moved = vramp.pause(device=pool, wait=wait)
                assert moved is not None
                moved.wait(60)
            assert raised.value.callback == "second" and raised.value.__cause__ is wrong
            assert isinstance(raised.value, vramp.RegionError)
            assert log.taken() == "-first -second +first" and phase(pool, "weights") == "awake"
    with vramp.around_sleep("third", log.note("-third", KeyboardInterrupt()), device=pool):
        with pytest.raises(KeyboardInterrupt):
            vramp.pause(device=pool)
    assert log.taken() == "-first -third +first"
    # A later failure has no cause of an earlier call.
    with pool.pin(weights), pytest.raises(vramp.RegionError, match="pinned") as other:
        vramp.pause(device=pool)
    assert other.value.__cause__ is None and not isinstance(other.value, vramp.CallbackError)
    assert log.taken() == "-first +first"


def test_what_raises_after_a_resume_is_called_again_by_the_next(pool: vramp.Pool) -> None:
    weights, log = block(pool, "weights"), Log()
    failures = [OSError("busy"), OSError("still busy")]

    def again() -> None:
        log.append("+second")
        if failures:
            raise failures[0]

    vramp.around_sleep("first", log.note("-first"), log.note("+first"), device=pool)
    vramp.around_sleep("second", log.note("-second"), again, device=pool)
    vramp.pause(device=pool)
    log.clear()
    for calls in ("+second +first", "+second"):
        with pytest.raises(vramp.CallbackError, match='the memory is back.*"second"') as raised:
            vramp.resume(device=pool)
        assert raised.value.callback == "second" and raised.value.__cause__ is failures.pop(0)
        assert log.taken() == calls and phase(pool, "weights") == "awake"
    vramp.resume(device=pool)
    assert log.taken() == "+second"
    vramp.resume(device=pool)
    assert log.taken() == ""
    weights.free()


def test_inside_one_it_allocates_and_registers_but_moves_nothing(pool: vramp.Pool) -> None:
    weights, log, made = block(pool, "weights"), Log(), []

    def before() -> None:
        for call in (vramp.pause, vramp.resume):
            with pytest.raises(vramp.InUseError, match="return from it"):
                call(device=pool)
        with pytest.raises(vramp.InUseError):
            vramp.clean("weights", device=pool)
        with pytest.raises(vramp.InUseError):
            vramp.read_backup(weights.ptr, 1, device=pool)
        made.append(pool.malloc(MIB))
        vramp.around_sleep("added", log.note("-added"), device=pool)
        own.close()

    own = vramp.around_sleep("busy", before, log.note("+busy"), device=pool)
    vramp.pause(device=pool)
    vramp.resume(device=pool)
    assert log.taken() == "" and made[0].size == MIB
    vramp.pause(device=pool)
    assert log.taken() == "-added"
    own.close()


def test_a_close_waits_for_a_call_on_another_thread(pool: vramp.Pool) -> None:
    weights = block(pool, "weights")
    begun, go, log = threading.Event(), threading.Event(), Log()

    def before() -> None:
        begun.set()
        assert go.wait(60)
        log.append("-slow")

    registered = vramp.around_sleep("slow", before, log.note("+slow"), device=pool)
    moved = vramp.pause(device=pool, wait=False)
    assert moved is not None and begun.wait(60)
    # Requests, frees and states go on meanwhile.
    assert phase(pool, "weights") == "awake"
    block(pool, "weights", MIB).free()
    closing = threading.Thread(target=registered.close)
    closing.start()
    go.set()
    moved.wait(60)
    closing.join(60)
    assert not closing.is_alive()
    vramp.resume(device=pool)
    assert log.taken() == "-slow"
    weights.free()


def test_under_pressure_collective_ones_keep_their_region_awake() -> None:
    with vramp.open("sim:h200", limit="256MiB") as pool:
        blocks = [block(pool, tag, 60 * MIB) for tag in ("shared", "own", "failing")]
        log = Log()
        shared = vramp.around_sleep(
            "shared", log.note("-shared"), log.note("+shared"), tags="shared", device=pool, collective=True
        )
        vramp.around_sleep("own", log.note("-own"), log.note("+own"), tags="own", device=pool)
        failing = vramp.around_sleep("failing", log.note("-no", OSError()), tags="failing", device=pool)
        vramp.on_pressure(["shared", "failing", "own"], device=pool)
        more = pool.malloc(100 * MIB)
        assert log.taken() == "-no -own"
        assert [phase(pool, tag) for tag in ("shared", "own", "failing")] == ["awake", "asleep", "awake"]
        failing.close()
        # A resume that is short makes another region sleep, by that region's functions.
        vramp.around_sleep("other", log.note("-other"), tags="failing", device=pool)
        vramp.resume("own", device=pool)
        assert log.taken() == "-other +own"
        shared.close()
        more.free()
        vramp.resume(device=pool)
        assert len(blocks) == 3


def test_arguments_and_ends(pool: vramp.Pool) -> None:
    with pytest.raises(TypeError, match="a callback is a function"):
        vramp.around_sleep("a", 1, device=pool)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a name is a str"):
        vramp.around_sleep(None, device=pool)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a tag is a str"):
        vramp.around_sleep("a", tags=[1], device=pool)  # type: ignore[list-item]
    registered = vramp.around_sleep("a", device=pool)
    registered.close()
    registered.close()
    left = vramp.around_sleep("b", lambda: None, device=pool)
    pool.close()
    left.close()
    with pytest.raises(vramp.ClosedError):
        vramp.around_sleep("c", device=pool)


def test_budgets_and_the_compat_layers_call_them(memory: object) -> None:
    from vramp.compat.vllm import Allocator

    log = Log()
    allocator = Allocator()
    with allocator.use_memory_pool("weights"):
        weights = vramp.pool().malloc(8 * MIB)
    with vramp.around_sleep("all", log.note("-all"), log.note("+all"), tags="weights"):
        allocator.sleep(("weights",))
        assert log.taken() == "-all"
        allocator.wake_up()
        assert log.taken() == "+all"
        vramp.budget.sleep_regions("pause")
        vramp.budget.sleep_regions("resume")
        assert log.taken() == "-all +all"
    weights.free()
    vramp.remove_region("weights")


@pytest.mark.parametrize("count", [10, 1_000, 100_000])
def test_functions_of_other_regions_cost_a_pause_nothing(pool: vramp.Pool, count: int) -> None:
    weights, calls = block(pool, "weights", MIB), []
    for number in range(count):
        vramp.around_sleep("other", lambda: calls.append(0), tags=f"tag {number}", device=pool)
    vramp.around_sleep("own", lambda: calls.append(1), tags="weights", device=pool)
    for _ in range(3):
        vramp.pause(device=pool)
        vramp.resume(device=pool)
    assert calls == [1, 1, 1]
    weights.free()
