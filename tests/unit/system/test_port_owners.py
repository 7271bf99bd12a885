"""Who listens at a port, as the kernel shows it."""

from __future__ import annotations

import os
import socket

import pytest

from slurmft.system.processes import owners_of_loopback_port

PLACES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"),
          (socket.AF_INET6, "::ffff:127.0.0.1")]  # fmt: skip


@pytest.mark.parametrize(("family", "address"), PLACES, ids=[address for _, address in PLACES])
def test_a_listener_that_answers_at_loopback(family, address):
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))
        port = listener.getsockname()[1]
        assert owners_of_loopback_port(port) == set(), "it does not listen yet"
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            assert owners_of_loopback_port(port) == {os.geteuid()}


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")])
def test_a_listener_elsewhere_is_none(family, address):
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        assert owners_of_loopback_port(listener.getsockname()[1]) == set()
