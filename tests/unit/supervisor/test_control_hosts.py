"""At which names and addresses the agents of other nodes look for their supervisor."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil

from slurmft.scheduler.parsing import SlurmJob
from slurmft.supervisor.cluster import SlurmCluster

INTERFACES = {
    "lo": [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")],
    "ib0": [(socket.AF_INET6, "fd00:6::7"), (socket.AF_INET6, "fe80::1%ib0"), (socket.AF_PACKET, "00:00:00:00:00:00")],
    "eth0": [(socket.AF_INET, "10.0.0.7"), (socket.AF_INET6, "2001:db8::7")],
}


def test_every_address_that_other_nodes_may_reach_of_both_families(monkeypatch):
    found = {
        name: [SimpleNamespace(family=family, address=address) for family, address in addresses]
        for name, addresses in INTERFACES.items()
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    cluster = SlurmCluster(SlurmJob(job_id="7", restart=0, nodes="n1", node_count=1, partition="p"))
    assert cluster.control_hosts() == ["n1", "10.0.0.7", "fd00:6::7", "2001:db8::7"]
