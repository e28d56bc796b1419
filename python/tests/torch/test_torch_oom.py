"""Running out of memory in PyTorch: the error, its text, observers, limits and what happens after it."""

import threading

import pytest
import torch
from support import GIB, KIB, MIB, TOO_MUCH, allocated, block, limit, run_script, settings, stat, tidy


def test_the_error_is_pytorchs_and_names_the_numbers():
    with pytest.raises(torch.OutOfMemoryError) as raised:
        block(GIB * 800_000_000)
    error = raised.value
    assert torch.cuda.OutOfMemoryError is torch.OutOfMemoryError
    assert isinstance(error, RuntimeError)
    text = str(error)
    assert text.startswith("CUDA out of memory. Tried to allocate 800000000.00 GiB. GPU 0 has a total capacity of ")
    for part in (" is free", "is allocated by PyTorch", "is reserved by PyTorch but unallocated"):
        assert part in text, text


def test_more_than_an_exbibyte_is_refused_with_its_own_text():
    with pytest.raises(RuntimeError, match="more than 1EB memory"):
        block(GIB * 8_000_000_000)


def test_a_limit_is_named_in_the_text():
    with limit(64 * MIB), pytest.raises(torch.OutOfMemoryError) as raised:
        block(100 * MIB)
    assert "allowed" in str(raised.value), str(raised.value)


def test_memory_and_work_go_on_after_a_failed_request():
    kept = torch.zeros(1024, device="cuda")
    for _ in range(20):
        with pytest.raises(torch.OutOfMemoryError):
            block(TOO_MUCH)
    kept.fill_(1)
    torch.cuda.synchronize()
    again = block(8 * MIB)
    assert allocated() >= 8 * MIB
    del kept, again


@pytest.mark.parametrize("text", ["", "max_split_size_mb:1024", "garbage_collection_threshold:0.8"])
def test_running_out_is_an_error_under_settings_too(text):
    with settings(text):
        with pytest.raises(torch.cuda.OutOfMemoryError):
            block(TOO_MUCH)


def test_unused_memory_makes_room_before_a_request_fails():
    with limit(200 * MIB):
        first = block(100 * MIB)
        with pytest.raises(torch.OutOfMemoryError):
            block(120 * MIB)
        del first
        second = block(120 * MIB)
        del second
        # Pieces of a cached 100 MiB and nothing more: the cache is given back and asked for again.
        pieces = [block(20 * MIB) for _ in range(10)]
        del pieces[::2]
        with pytest.raises(torch.OutOfMemoryError):
            block(120 * MIB)
        del pieces
        last = block(190 * MIB)
        del last


def test_the_fraction_is_what_was_set():
    for fraction in (1.0, 0.5, 0.0, 0.123456789):
        torch.cuda.set_per_process_memory_fraction(fraction)
        assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(fraction, abs=1e-8)
    with pytest.raises(TypeError, match="Invalid type"):
        torch.cuda.set_per_process_memory_fraction(1)
    for wrong in (-0.1, 2.0):
        with pytest.raises(ValueError, match="Invalid fraction value"):
            torch.cuda.set_per_process_memory_fraction(wrong)


def test_a_fraction_of_the_card_is_kept_and_lifted():
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.5, 0)
    kept = block(int(total * 0.499) - torch.cuda.memory_reserved())
    del kept
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        block(int(total * 0.5) + MIB)
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    kept = block(int(total * 0.6))
    del kept
    torch.cuda.set_per_process_memory_fraction(0.0, 0)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        block(32 * MIB)


def test_the_fraction_of_the_environment_is_in_force():
    text = "torch._C._cuda_getDevice(); print(torch.cuda.memory.get_per_process_memory_fraction(0))"
    for value in ("0.0", "0.5", "1.0"):
        done = run_script(text, PYTORCH_CUDA_ALLOC_CONF=f"per_process_memory_fraction:{value}")
        assert done.stdout.strip() == value
    for value in ("-0.1", "1.1"):
        done = run_script(text, check=False, PYTORCH_CUDA_ALLOC_CONF=f"per_process_memory_fraction:{value}")
        assert done.returncode != 0
        assert "per_process_memory_fraction is invalid" in done.stderr


def test_an_observer_is_called_with_what_was_asked_and_may_look():
    text = """
seen = []
def observer(device, asked, total, free):
    seen.append((device, asked, total, free, torch.cuda.memory_allocated(), len(torch.cuda.memory._snapshot()["segments"])))
torch.cuda.init()
torch._C._cuda_attach_out_of_memory_observer(observer)
kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
for _ in range(2):
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
assert len(seen) == 2, seen
device, asked, total, free, allocated, segments = seen[0]
assert device == 0 and asked == 1 << 50 and 0 <= free <= total, seen
assert total == torch.cuda.get_device_properties(0).total_memory, (total, torch.cuda.get_device_properties(0))
assert allocated == 1 << 20 and segments >= 1, seen
print("seen")
"""
    assert run_script(text).stdout == "seen\n"


def test_an_observer_may_write_the_snapshot_that_shows_the_failure(tmp_path):
    path = tmp_path / "oom.pickle"
    text = f"""
import pickle
torch.cuda.memory._record_memory_history(max_entries=1000)
def observer(device, asked, total, free):
    torch.cuda.memory._dump_snapshot({str(path)!r})
torch._C._cuda_attach_out_of_memory_observer(observer)
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    pass
last = pickle.load(open({str(path)!r}, "rb"))["device_traces"][0][-1]
print(last["action"], last["size"])
"""
    # The event is recorded before observers are called, and a snapshot adds none.
    assert run_script(text).stdout.split()[0] in ("oom", "snapshot")


def test_running_out_in_many_threads_at_once_ends_in_errors_and_no_loss():
    results = []

    def work():
        for _ in range(50):
            try:
                kept = block(40 * MIB)
                results.append("served")
                del kept
            except torch.OutOfMemoryError:
                results.append("refused")

    start = allocated()
    with limit(100 * MIB):
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(results) == 8 * 50
        assert "served" in results
        assert allocated() == start
        last = block(90 * MIB)
        del last


def test_retries_are_counted():
    with limit(120 * MIB):
        kept = block(100 * MIB)
        del kept
        retries, ooms = stat("num_alloc_retries"), stat("num_ooms")
        with pytest.raises(torch.OutOfMemoryError):
            block(130 * MIB)
        assert stat("num_ooms") == ooms + 1
        assert stat("num_alloc_retries") == retries + 1


def test_memory_that_other_streams_used_is_waited_for_before_a_request_fails():
    stream = torch.cuda.Stream()
    with limit(800 * MIB):
        for _ in range(100):
            kept = block(160 * MIB)
            kept.record_stream(stream)
            del kept
    tidy()


def test_a_failed_request_leaves_no_small_pieces():
    reserved = torch.cuda.memory_reserved()
    for size in (TOO_MUCH, TOO_MUCH + 1, TOO_MUCH - KIB):
        with pytest.raises(torch.OutOfMemoryError):
            block(size)
    assert torch.cuda.memory_reserved() == reserved


def test_the_error_is_freed_with_its_tensors():
    start = allocated()

    def fail():
        kept = block(4 * MIB)
        block(TOO_MUCH)
        return kept

    with pytest.raises(torch.OutOfMemoryError) as raised:
        fail()
    assert allocated() == start + 4 * MIB
    raised.value.__traceback__ = None
    del raised
    tidy()
    assert allocated() == start
