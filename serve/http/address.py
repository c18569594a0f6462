"""The listening socket of the HTTP endpoint, which is bound before anything slow is imported or loaded."""

from __future__ import annotations

import ipaddress
import socket

from inferc.errors import ConfigError

BACKLOG = 2048
# Ends of host names that nobody can register, so a page of a host with such a name is not from a stranger's site.
PRIVATE = (".localhost", ".local", ".internal")


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise ConfigError if the port cannot be had."""
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
    """Return whether only this machine can reach a server that listens on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may have any address
        return False


def is_of_this_network(host: str) -> bool:
    """Return whether a Host header (NAME or NAME:PORT) is of this machine or its network, not of a registered name.

    This prevents DNS rebinding: the owner of a web page that is open in a browser here makes its domain resolve to
    127.0.0.1, so that the page may send requests to this server and read the answers. The Host header of such
    requests is that domain: a registered name with a dot, and no IP address.
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
    """Return the address of a listening socket as HOST:PORT."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
