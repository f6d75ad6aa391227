"""What a server lets its clients hold, and how long it waits for them."""

from contextlib import suppress
from dataclasses import dataclass

from decode.base.errors import require_fits

# Connections beside those of `ServerLimits`, for `/health` alone, so that monitoring works on a
# full server.
SPARE, CLIENT_SPARE = 64, 8
# Frames of WebSockets in a second, for each connection that a client may have.
_FRAMES = 8
# Open files of a process beside its connections.
_OTHER_FILES = 256


@dataclass(frozen=True)
class ServerLimits:
    """The bounds of one server. A client is an address; see `net.pool.client_of`.

    connections, client_connections: open at a time, in all and of one client.
    header_seconds: for the headers of a request, for a WebSocket handshake with its first message,
    and for the rest of a body whose request has been answered.
    body_seconds, body_rate: a body or a WebSocket message has so many seconds, and one more for
    each `body_rate` bytes.
    unread_seconds: until a client has taken anything of what is sent to it.
    body_bytes, client_body_bytes: of bodies in memory, in all and of one client.
    viewers, client_viewers: streams of `/live`, which have no end, in all and of one client.

    Raises UserError for a bound that is not positive.
    """

    connections: int = 1024
    client_connections: int = 256
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    body_rate: int = 64 << 10
    unread_seconds: float = 60.0
    body_bytes: int = 64 << 20
    client_body_bytes: int = 16 << 20
    viewers: int = 64
    client_viewers: int = 16

    def __post_init__(self) -> None:
        require_fits(lambda value: value > 0, "a number above 0", **vars(self))

    @property
    def client_frames(self) -> int:
        """Frames of WebSockets that are read of one client in a second; the others wait."""
        return _FRAMES * self.client_connections


def connections_that_fit(wanted: int, files_each: int = 1) -> int:
    """How many connections the process has files for: a server without free files accepts nobody.
    The process's own limit is raised if its user may do that. files_each: files of a connection."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    needed = (wanted + SPARE) * files_each + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        fitting = (soft - _OTHER_FILES) // files_each - SPARE
        return wanted if soft >= needed else max(fitting, 1)
    return wanted
