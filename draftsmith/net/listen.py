"""The socket that a server listens on."""

import os
import socket

from decode.base.errors import UserError


def bind(host: str, port: int) -> socket.socket:
    """A socket with this address, which does not listen yet. Raises UserError if it is taken or is
    no address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that name TCP. With it, every second of
    # two small messages waits some 40 ms for the other side's acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # On Windows this option lets two servers share a port, and without it a port is free at once.
    if os.name == "posix":
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(
            f"cannot listen on {host}, port {port}: {error}; choose another --host or --port"
        ) from None
    return bound


def address_of(host: str, bound: socket.socket) -> str:
    """HOST:PORT of a socket of `bind`, for a URL."""
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{bound.getsockname()[1]}"
