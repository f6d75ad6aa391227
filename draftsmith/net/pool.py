"""What clients hold of a server, bounded for each client and in all."""

import ipaddress
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass


def client_of(address: str) -> str:
    """The client behind an address: the address itself. For IPv6 its network of 64 bits, which one
    machine usually has for itself."""
    with suppress(ValueError):
        found = ipaddress.ip_address(address)
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is not None:
                return str(found.ipv4_mapped)
            return str(ipaddress.ip_network((int(found), 64), strict=False))
    return address


# Environment variable with the proxies whose `X-Forwarded-For` is believed, as of uvicorn. Nobody
# is believed by default: behind a tunnel that passes headers on, a client could be any address.
TRUSTED_PROXIES = "FORWARDED_ALLOW_IPS"


def trusted_proxies() -> str:
    """Their addresses and networks, with commas; "": none."""
    return os.environ.get(TRUSTED_PROXIES, "").strip()


@dataclass(eq=False)
class Place:
    """What one client holds at one spot: a connection, the bytes of a body, a session.

    client: as of `client_of`. drop: ends it, when another one needs the room. The place has then
    left the pool. size: what it holds. rank: None: it works for its client and stays. Else it is
    idle, which means that it waits for its client. Lower ranks go first.
    """

    client: str
    drop: Callable[[], None]
    size: int = 0
    rank: int | None = None


class _Client:
    """The places of one client. idle: by rank, in the order in which they became idle."""

    def __init__(self) -> None:
        self.size, self.count = 0, 0
        self.idle: dict[int, OrderedDict[Place, None]] = {}

    def oldest(self) -> Place | None:
        """The idle place of the lowest rank that is idle for longest."""
        ranks = [rank for rank, places in self.idle.items() if places]
        return next(iter(self.idle[min(ranks)])) if ranks else None


class Pool:
    """The places that all clients hold.

    in_all, each: the largest size in all, and of each client. If there is no room, the oldest idle
    place goes: of the client itself if its own share is full, else of the client that holds most.
    """

    def __init__(self, in_all: int, each: int) -> None:
        self.in_all, self.each = in_all, min(each, in_all)
        self.size = 0
        self._clients: dict[str, _Client] = {}

    def take(self, place: Place, size: int = 1) -> bool:
        """Let a place hold more. False: there is no room, also because this place itself is the
        oldest that is idle. What it holds then stays as it was."""
        while not self.fits(place.client, size):
            oldest = self._oldest(place.client, size)
            if oldest is None or oldest is place:
                return False
            self.leave(oldest)
            oldest.drop()
        if not size:
            return True
        client = self._clients.setdefault(place.client, _Client())
        client.count += not place.size
        client.size += size
        self.size += size
        place.size += size
        if place.rank is None or place not in client.idle.get(place.rank, ()):
            self.file(place, place.rank)
        return True

    def fits(self, client: str, size: int) -> bool:
        """Whether there is room for more of a client without another one's leaving."""
        return self.size + size <= self.in_all and self._of(client) + size <= self.each

    def file(self, place: Place, rank: int | None) -> None:
        """A place has this rank from now on. If it is idle, it is so for the shortest time."""
        if place.size:
            idle = self._clients[place.client].idle
            if place.rank in idle:
                idle[place.rank].pop(place, None)
            if rank is not None:
                idle.setdefault(rank, OrderedDict())[place] = None
        place.rank = rank

    def leave(self, place: Place) -> None:
        """A place holds nothing any more."""
        client = self._clients.get(place.client)
        if client is None or not place.size:
            return
        if place.rank is not None:
            client.idle[place.rank].pop(place, None)
        client.size -= place.size
        client.count -= 1
        self.size -= place.size
        place.size = 0
        if not client.count:
            del self._clients[place.client]

    def _of(self, client: str) -> int:
        return self._clients[client].size if client in self._clients else 0

    def _oldest(self, client: str, size: int) -> Place | None:
        """The place that makes room for more of this client."""
        if self._of(client) + size > self.each:
            return self._clients[client].oldest() if client in self._clients else None
        places = [(one.oldest(), one.size) for one in self._clients.values()]
        idle = [(place.rank or 0, -held, place) for place, held in places if place is not None]
        return min(idle, key=lambda found: found[:2])[2] if idle else None
