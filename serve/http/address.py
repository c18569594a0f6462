"""The socket of the HTTP endpoint, taken before anything slow is imported or loaded."""

from __future__ import annotations

import ipaddress
import socket

from inferc.errors import ConfigError

BACKLOG = 2048
# Last parts of names that nobody can register, so that no stranger's web page can be one's that such a name stands for.
PRIVATE = (".localhost", ".local", ".internal")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if there is no such port to have."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port} for HTTP: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port} for HTTP: {error.strerror}; give another --http-port"
        ) from None
    listener.setblocking(False)
    return listener


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine reaches what listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name: of whatever address
        return False


def is_of_this_network(host: str) -> bool:
    """Whether a Host header, NAME or NAME:PORT, is one that a browser sends only for a page of this machine or its network.

    A web page from elsewhere is read by a browser here; its owner can then let its name stand for 127.0.0.1 ("DNS rebinding"),
    and the page may ask, and read, whatever answers there. Its requests bear that name: a registered one, with a dot, and no address.
    """
    name = host.strip().lower()
    if name.startswith("["):
        name = name.partition("]")[0].strip("[")
    elif name.count(":") < 2:
        name = name.partition(":")[0]
    name = name.rstrip(".")
    if "." not in name or name.endswith(PRIVATE) or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def name_of(listener: socket.socket) -> str:
    """HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
