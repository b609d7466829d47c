"""Ports for those that are to listen."""

import socket
from pathlib import Path

from deploy.health import LEAST_PORT, free_ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_free_ports_are_different_and_can_be_listened_at() -> None:
    ports = free_ports("127.0.0.1", 8)
    assert len(set(ports)) == 8
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_they_are_none_that_an_outgoing_connection_may_take() -> None:
    first = int(RANGE.read_text().split()[0]) if RANGE.exists() else LEAST_PORT
    if first > LEAST_PORT + 1000:
        assert all(LEAST_PORT <= port < first for port in free_ports("127.0.0.1", 8))
