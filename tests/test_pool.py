"""What clients hold of a server, and who goes first."""

import random

import pytest

from draftsmith.net.pool import Place, Pool, client_of


def held(pool: Pool, client: str, gone: list[str], name: str, rank: int | None = 0) -> Place:
    place = Place(client, lambda: gone.append(name), rank=rank)
    assert pool.take(place)
    return place


def test_the_oldest_idle_place_goes_first() -> None:
    gone: list[str] = []
    pool = Pool(4, 3)
    old = held(pool, "a", gone, "old")
    held(pool, "a", gone, "works", rank=None)
    held(pool, "a", gone, "new")
    pool.file(old, 0)  # it has worked in between
    # Its own client's share is full.
    held(pool, "a", gone, "newest")
    assert gone == ["new"]
    # All is full: that of the client that holds most.
    held(pool, "b", gone, "other")
    held(pool, "b", gone, "other 2")
    assert gone == ["new", "old"]
    # Lower ranks go first, whoever has them.
    pool.file(held(pool, "c", gone, "ended", rank=None), -1)
    assert gone == ["new", "old", "newest"]
    held(pool, "b", gone, "other 3")
    assert gone == ["new", "old", "newest", "ended"]


def test_what_works_stays() -> None:
    gone: list[str] = []
    pool = Pool(2, 2)
    first = held(pool, "a", gone, "first", rank=None)
    held(pool, "b", gone, "second", rank=None)
    assert not pool.take(Place("c", lambda: None))
    assert not pool.take(first)
    pool.leave(first)
    pool.leave(first)
    held(pool, "c", gone, "third")
    assert gone == []
    assert pool.size == 2


def test_a_place_is_refused_more_if_it_is_the_oldest_itself() -> None:
    gone: list[str] = []
    pool = Pool(10, 6)
    oldest = held(pool, "a", gone, "oldest")
    held(pool, "a", gone, "young")
    assert not pool.take(oldest, 5)
    assert (oldest.size, gone) == (1, [])


def test_sizes_are_right_whatever_happens() -> None:
    rng = random.Random(0)
    pool = Pool(20, 9)
    places: list[Place] = []
    for _ in range(3000):
        if rng.random() < 0.3 or not places:
            places.append(Place(rng.choice("abcd"), lambda: None, rank=rng.choice([None, 0, 1])))
        place = rng.choice(places)
        match rng.randrange(4):
            case 0:
                pool.leave(place)
            case 1:
                pool.file(place, None)
            case 2:
                pool.file(place, rng.randrange(3))
            case _:
                pool.take(place, rng.randrange(4))
        places = places[-50:]
        sizes = [sum(x.size for x in set(places) if x.client == client) for client in "abcd"]
        assert max(sizes) <= 9
        assert sum(sizes) <= pool.size <= 20


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "", True),
    ],
)
def test_who_is_one_client(one: str, other: str, same: bool) -> None:
    assert (client_of(one) == client_of(other)) == same
