"""How a router and a replica's gate prove to each other that they hold the run's key, before a byte of a request flows.

    gate    nonce (32 bytes)
    router  nonce (32 bytes), what for (1 byte), tag over both nonces
    gate    tag over both nonces

Without it, any user of the cluster could use an engine, or pose as one on a port that has become free.
"""

from __future__ import annotations

import asyncio
import hmac
import socket

from slurmft.system.authentication import NONCE_BYTES, TAG_BYTES, derived_key, new_nonce

REQUESTS, CONTROL = b"r", b"c"
"""What a connection is for: one engine connection, or words between router and gate."""

ANSWER_BYTES = NONCE_BYTES + 1 + TAG_BYTES


class NotTheGate(OSError):
    """The other side does not hold the run's key."""


def tag_of_router(key: bytes, gate: bytes, router: bytes, what: bytes) -> bytes:
    """The router's proof."""
    return derived_key(key, "router to gate", gate, router, what)


def tag_of_gate(key: bytes, gate: bytes, router: bytes) -> bytes:
    """The gate's proof."""
    return derived_key(key, "gate to router", gate, router)


def answered_well(key: bytes, nonce: bytes, answer: bytes) -> tuple[bytes, bytes] | None:
    """What a connection is for, and the gate's proof, where a router's answer is right."""
    router, what, tag = answer[:NONCE_BYTES], answer[NONCE_BYTES : NONCE_BYTES + 1], answer[NONCE_BYTES + 1 :]
    is_right = hmac.compare_digest(tag, tag_of_router(key, nonce, router, what))
    return (what, tag_of_gate(key, nonce, router)) if is_right and what in (REQUESTS, CONTROL) else None


async def knock(host: str, port: int, key: bytes, what: bytes) -> socket.socket:
    """A connection to a gate, on which both sides have proved themselves. The caller limits the time.

    Raises:
        OSError: no connection, or ``NotTheGate``.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    errors: list[OSError] = []
    for family, kind, protocol, _, address in found:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_lost_peers(connection)
            await loop.sock_connect(connection, address)
            gate, mine = await _exactly(connection, NONCE_BYTES), new_nonce()
            await loop.sock_sendall(connection, mine + what + tag_of_router(key, gate, mine, what))
            if not hmac.compare_digest(await _exactly(connection, TAG_BYTES), tag_of_gate(key, gate, mine)):
                raise NotTheGate(f"what listens at {host}:{port} is not this run's replica")
        except OSError as error:
            connection.close()
            errors.append(error)
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise errors[-1] if errors else OSError(f"{host} has no address")


async def _exactly(connection: socket.socket, count: int) -> bytes:
    content = b""
    while len(content) < count:
        if not (part := await asyncio.get_running_loop().sock_recv(connection, count - len(content))):
            raise NotTheGate("the connection has ended before the other side proved itself")
        content += part
    return content


def notice_lost_peers(connection: socket.socket, within_s: int = 10) -> None:
    """Have the kernel end a connection whose other side is silent for about so long, such as that of a dead node."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, within_s * 2 // 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, within_s // 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # the others do nothing while data is under way
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * within_s)


def listening_socket(host: str | None, port: int) -> socket.socket:
    """One socket, with one port, of IPv4 and IPv6; where ``host`` is given, of that address of IPv4 alone.

    Raises:
        OSError: the port is taken.
    """
    if host is not None:
        found = socket.socket(socket.AF_INET)
    else:
        dual = socket.has_dualstack_ipv6()
        found = socket.socket(socket.AF_INET6 if dual else socket.AF_INET)
        if dual:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host or "", port))
        found.setblocking(False)
    except OSError:
        found.close()
        raise
    return found
