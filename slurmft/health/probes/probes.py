"""Which probes there are, and how long each may take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slurmft.config.health import HealthConfig, UserProbe
from slurmft.health.node_view import Scene
from slurmft.health.probes import disk, filesystems, gpu, gpu_work, host, memory, network
from slurmft.health.probes.user_probes import user_probe
from slurmft.policy.nodes.node_health import ProbeResult

MOMENT_S = 0.3

Found = ProbeResult | Sequence[ProbeResult] | None
"""The return type of a probe: one result, several, or none where there is nothing of its kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A function that looks at the node, in a process of its own."""

    names: tuple[str, ...]
    """Of the results that it may give; all are UNKNOWN when it fails."""

    look: Callable[[Scene], Found]
    limit_s: float = 1.5
    level: int = 1
    is_patient: bool = True
    """Its limit grows with the patience of the context."""

    waits: Callable[[HealthConfig], float] = lambda _: 0.0
    """Seconds that it waits by itself, as the configuration says: it must live to report what did not answer."""

    def limit(self, scene: Scene) -> float:
        """Seconds that it may take here."""
        base = max(scene.config.probe_limit_s(name, self.limit_s) for name in self.names)
        own = self.waits(scene.config)
        if not self.is_patient:
            return base
        return scene.stretched(max(base - MOMENT_S, own)) + MOMENT_S if own else scene.stretched(base)


PROBES = (
    Probe(names=("load",), look=host.load),
    Probe(names=("processes",), look=host.processes),
    Probe(names=("uptime",), look=host.uptime),
    Probe(names=("clock",), look=host.clock),
    Probe(names=("shared-memory",), look=host.shared_memory),
    Probe(names=("memory",), look=memory.memory),
    Probe(names=("edac",), look=memory.edac),
    Probe(names=("disk-space",), look=disk.disk_space),
    Probe(names=("read-only",), look=disk.read_only),
    Probe(names=("disk-write",), look=disk.disk_write),
    Probe(names=("filesystems",), look=filesystems.filesystems, waits=lambda config: config.filesystems.answer_s),
    Probe(names=("links",), look=network.links),
    Probe(names=("infiniband",), look=network.infiniband),
    Probe(names=("names",), look=network.names, waits=lambda config: config.network.resolve_s),
    Probe(names=gpu.NAMES, look=gpu.gpus),
    Probe(names=("gpu-matmul", "gpu-memory"), look=gpu_work.gpu_compute, limit_s=gpu_work.WORK_S, level=2,
          is_patient=False),
    Probe(names=("dcgm",), look=gpu_work.diagnose, limit_s=gpu_work.DIAGNOSE_S, level=2, is_patient=False),
    Probe(names=("all-reduce",), look=gpu_work.all_reduce, limit_s=gpu_work.PAIR_S, level=2, is_patient=False),
)  # fmt: skip
"""Our own. Those of level 1 take less than two seconds together, even if one hangs."""


def probes_for(scene: Scene) -> list[Probe]:
    """The probes of this look: ours and the site's, without those that are disabled."""
    own = [probe for probe in PROBES if probe.level <= scene.level and not set(probe.names) <= _disabled(scene)]
    theirs = [_user_probe(name, probe) for name, probe in scene.config.user_probes.items()
              if probe.level <= scene.level and name not in _disabled(scene)]  # fmt: skip
    return own + theirs


def known_names(scene: Scene) -> list[str]:
    """Every name that a result may have."""
    return [*(name for probe in PROBES for name in probe.names), *scene.config.user_probes]


def _disabled(scene: Scene) -> frozenset[str]:
    return frozenset(scene.config.disabled)


def _user_probe(name: str, probe: UserProbe) -> Probe:
    def look(scene: Scene, **_: Any) -> ProbeResult:
        return user_probe(scene, name, probe)

    # it ends its program itself; a moment more, so that it can report that
    return Probe(names=(name,), look=look, limit_s=probe.timeout_s, level=probe.level, waits=lambda _: probe.timeout_s)
