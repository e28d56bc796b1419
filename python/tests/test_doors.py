"""Free memory of other cards, and reads in place. Bytes are read through NumPy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest
from conftest import MIB, check, fill

import vramp


@pytest.fixture
def cards() -> Iterator[list[vramp.Pool]]:
    """Two cards of one simulated machine, with pools of 64 MiB."""
    pools = vramp.open_all("sim:h200x2", limit="64MiB")
    yield pools
    for pool in pools:
        if not pool.is_closed:
            pool.close()


PEERS: list[dict[str, object]] = [
    {"host": "256MiB", "peers": {1: "64MiB"}},
    {"config": "[[host]]\nindex = 0\ncapacity = '256MiB'\n[[peer]]\nindex = 1\nlimit = '64MiB'\n"},
]


@pytest.mark.parametrize("arguments", PEERS)
@pytest.mark.parametrize("closes_first", [False, True])
def test_contents_go_to_free_memory_of_another_card(
    cards: list[vramp.Pool], arguments: dict[str, object], closes_first: bool
) -> None:
    with vramp.Tiers(cards[0], **arguments) as tiers:  # type: ignore[arg-type]
        buffers = [tiers.buffer(24 * MIB) for _ in range(5)]
        for byte, buffer in enumerate(buffers, 1):
            fill(buffer, byte)
        stats = tiers.stats()
        # Two chunks of 32 MiB are the limit. What has no room there goes to the host.
        assert (stats.to_device, stats.to_host) == (48 * MIB, 24 * MIB)
        if closes_first:
            cards[1].close()
        for byte, buffer in enumerate(buffers, 1):
            check(buffer, byte)
        assert tiers.stats().from_device >= 24 * MIB
        tiers.audit()


def test_a_card_that_is_no_peer_is_refused(cards: list[vramp.Pool]) -> None:
    with pytest.raises(vramp.OptionError, match="card 7 is no peer"):
        vramp.Tiers(cards[0], host="256MiB", peers={7: "64MiB"})
    with pytest.raises(vramp.OptionError, match="not both"):
        vramp.Tiers(cards[0], PEERS[1]["config"], peers={1: "64MiB"})  # type: ignore[arg-type]
    with pytest.raises(vramp.OptionError, match="the most bytes for each number of a card"):
        vramp.Tiers(cards[0], host="256MiB", peers=[1])  # type: ignore[arg-type]
    with vramp.open("sim:h200") as alone, pytest.raises(vramp.OptionError, match="is no peer"):
        vramp.Tiers(alone, host="256MiB", peers={1: "64MiB"})


def test_a_readable_buffer_is_read_where_it_lies(tiers: vramp.Tiers) -> None:
    buffer = tiers.buffer(16 * MIB, readable=True)
    fill(buffer, 7)
    assert tiers.evict(16 * MIB) == 16 * MIB
    for is_in_place in (True, True, True, False):
        lease = buffer.lease("r", in_place=True)
        with lease as view:
            assert lease.is_in_place is is_in_place
            assert view.ptr == buffer.ptr
            assert (numpy.asarray(view) == 7).all()
        assert not lease.is_in_place
    assert (tiers.stats().reads_in_place, tiers.stats().promotions) == (3, 1)


def test_only_what_is_read_and_readable_stays_of_a_set(tiers: vramp.Tiers) -> None:
    column, other, table = (
        tiers.buffer(8 * MIB, readable=True),
        tiers.buffer(8 * MIB),
        tiers.buffer(8 * MIB, readable=True),
    )
    for byte, buffer in enumerate((column, other, table), 1):
        fill(buffer, byte)
    tiers.evict(24 * MIB)
    lease = tiers.lease([(column, "r"), (other, "r"), (table, "rw")], in_place=True)
    with lease as views:
        assert lease.in_place == (True, False, False)
        assert [numpy.asarray(view)[0] for view in views] == [1, 2, 3]
    with column.lease("r") as view:
        assert numpy.asarray(view)[0] == 1, "a plain lease restores it"
    assert column.is_resident


def test_promote_after_is_set_with_the_tiers() -> None:
    with vramp.open("sim:h200", limit="64MiB") as pool:
        with vramp.Tiers(pool, host="256MiB", promote_after=1) as tiers:
            buffer = tiers.buffer(8 * MIB, readable=True)
            fill(buffer, 3)
            tiers.evict(8 * MIB)
            for is_in_place in (True, False):
                lease = buffer.lease("r", in_place=True)
                with lease:
                    assert lease.is_in_place is is_in_place
