"""Probes of the network: links, InfiniBand ports, names."""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from slurmft.config.health import NetworkLimits
from slurmft.health.judging import bad, fine, gravest
from slurmft.health.node_view import Scene
from slurmft.health.probes.host import own_name
from slurmft.policy.nodes.node_health import ProbeResult, Problem, Status
from slurmft.system.isolation import Answer, Errand, run_all

MIN_ERRORS = 100
"""Fewer say nothing: a few packets are lost while a link comes up."""

IFF_UP = 0x1


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One interface; None where the kernel does not say."""

    name: str
    exists: bool = True
    state: str = ""
    """up, down, unknown, ...; of the kernel's operstate."""

    speed_mbps: int | None = None
    packets: int = 0
    errors: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """One port of an InfiniBand (or RoCE) device."""

    name: str
    state: str
    """ACTIVE, INIT, ARMED or DOWN."""

    physical: str
    """LinkUp, Polling, Disabled, ..."""

    gbps: float | None
    downed: int


def links(scene: Scene) -> ProbeResult:
    """The interfaces that matter: the named ones, or the one with the default route."""
    limits = scene.config.network
    names = list(limits.links) or default_routes(scene.text("proc/net/route"))
    found = [_link(scene, name) for name in names]
    return judge_links(found, limits)


def default_routes(text: str) -> list[str]:
    """Interfaces with a default route in /proc/net/route."""
    rows = (line.split() for line in text.splitlines()[1:])
    return list(dict.fromkeys(row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"))


def judge_links(found: Sequence[Link], limits: NetworkLimits) -> ProbeResult:
    """Down is critical, slower than it should be too; errors are worth a warning."""
    if not found:
        return fine("links", "no interface is named and none has a default route")
    return gravest([_judge_link(link, limits) for link in found])


def _judge_link(link: Link, limits: NetworkLimits) -> ProbeResult:
    check, remedy = "links", f"ethtool {link.name}; look at the cable and the switch port"
    if not link.exists:
        return bad(check, Status.CRITICAL, f"there is no interface {link.name}", remedy="look at lspci and dmesg")
    if link.state in ("down", "lowerlayerdown", "notpresent"):
        return bad(check, Status.CRITICAL, f"{link.name} is {link.state}", remedy=remedy, problem=Problem.HARDWARE)
    if limits.min_speed_mbps and link.speed_mbps is not None and 0 <= link.speed_mbps < limits.min_speed_mbps:
        detail = f"{link.name} has {link.speed_mbps} Mb/s, not {limits.min_speed_mbps}"
        return bad(check, Status.CRITICAL, detail, remedy=remedy, value=link.speed_mbps, unit="Mb/s",
                   problem=Problem.HARDWARE)  # fmt: skip
    share = link.errors / max(1, link.packets)
    if link.errors >= MIN_ERRORS and share >= limits.error_share_warning:
        detail = f"{link.name}: {link.errors} errors in {link.packets} packets"
        return bad(check, Status.WARNING, detail, remedy=remedy, value=share * 100, unit="%", problem=Problem.HARDWARE)
    return fine(check, f"{link.name} is up", value=share * 100, unit="%")


def _link(scene: Scene, name: str) -> Link:
    folder = f"sys/class/net/{name}"
    if "/" in name or not scene.path(folder).exists():
        return Link(name=name, exists=False)

    def count(*counters: str) -> int:
        return sum(scene.integer(f"{folder}/statistics/{each}") or 0 for each in counters)

    flags = scene.text(f"{folder}/flags").strip()
    is_up = not re.fullmatch(r"0x[0-9a-fA-F]{1,16}", flags) or int(flags, 16) & IFF_UP
    state = scene.text(f"{folder}/operstate").strip() if is_up else "down"
    return Link(
        name=name, state=state, speed_mbps=scene.integer(f"{folder}/speed"),
        packets=count("rx_packets", "tx_packets"), errors=count("rx_errors", "tx_errors", "rx_crc_errors"),
    )  # fmt: skip


def infiniband(scene: Scene) -> ProbeResult | None:
    """Ports of InfiniBand devices; None where there are none and none are expected."""
    folders = scene.folders("sys/class/infiniband", "*/ports/[0-9]*")
    if not folders and not scene.config.network.infiniband_ports:
        return None
    ports = []
    for folder in folders:
        name = str(folder.relative_to(scene.root))
        rate = re.match(r"\s*(\d{1,6}(?:\.\d{1,3})?) Gb/sec", scene.text(f"{name}/rate"))
        ports.append(Port(
            name=f"{folder.parents[1].name}/{folder.name}", state=_word(scene.text(f"{name}/state")),
            physical=_word(scene.text(f"{name}/phys_state")), gbps=float(rate[1]) if rate else None,
            downed=scene.integer(f"{name}/counters/link_downed") or 0,
        ))  # fmt: skip
    return judge_ports(ports, scene.config.network)


def judge_ports(ports: Sequence[Port], limits: NetworkLimits) -> ProbeResult:
    """A port with a link that is not ACTIVE has no subnet manager; one without a link may have no cable."""
    check, remedy = "infiniband", "ibstat; look at the cable, the switch port and the subnet manager"
    active = [port for port in ports if port.state == "ACTIVE"]
    waiting = [port for port in ports if port.physical == "LinkUp" and port.state != "ACTIVE"]
    evidence = [f"{port.name}: {port.state} {port.physical} {port.gbps or 0:g} Gb/s" for port in ports]

    def failed(status: Status, detail: str) -> ProbeResult:
        return bad(check, status, detail, remedy=remedy, evidence=evidence, value=len(active), unit="ports",
                   problem=Problem.HARDWARE)  # fmt: skip

    if limits.infiniband_ports is not None and len(active) < limits.infiniband_ports:
        return failed(Status.CRITICAL, f"{len(active)} of {limits.infiniband_ports} ports are active")
    if waiting:
        status = Status.WARNING if limits.infiniband_ports is not None else Status.CRITICAL
        return failed(status, f"{', '.join(f'{port.name} is {port.state}' for port in waiting)}")
    slow = [port for port in active if port.gbps is not None and port.gbps < limits.infiniband_min_gbps]
    if slow:
        return failed(Status.CRITICAL, ", ".join(f"{port.name} has {port.gbps:g} Gb/s" for port in slow))
    if flapping := [port for port in active if port.downed >= limits.link_downed_warning]:
        return failed(Status.WARNING, ", ".join(f"{port.name} went down {port.downed} times" for port in flapping))
    return fine(check, f"{len(active)} of {len(ports)} ports are active", value=len(active), unit="ports")


def _word(text: str) -> str:
    """ACTIVE of ``4: ACTIVE``."""
    return text.partition(":")[2].strip() or text.strip()


def names(scene: Scene) -> ProbeResult:
    """Names that must resolve, all at the same time."""
    limits = scene.config.network
    wanted, own = list(limits.resolve), own_name(scene)
    limit = scene.stretched(limits.resolve_s)
    errands = [Errand(name=name, limit_s=limit, task=lambda name=name: _resolve(name))  # type: ignore[misc]
               for name in dict.fromkeys(wanted or [own])]  # fmt: skip
    return judge_names(run_all(errands), required=bool(wanted))


def judge_names(answers: Sequence[Answer], *, required: bool) -> ProbeResult:
    """A name of the site's that is not found is critical; the node's own is worth a warning."""
    check, remedy = "names", "getent hosts NAME; look at /etc/resolv.conf, /etc/hosts and the name server"
    failed = [f"{each.name}: {each.error or each.value['error']}" for each in answers
              if each.error or (each.value or {}).get("error")]  # fmt: skip
    if not failed:
        return fine(check, f"{len(answers)} resolve", value=max((each.took_s for each in answers), default=0), unit="s")
    return bad(check, Status.CRITICAL if required else Status.WARNING, "; ".join(failed), remedy=remedy)


def _resolve(name: str) -> dict[str, str]:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return {"error": getattr(error, "strerror", None) or str(error)}
    return {}
