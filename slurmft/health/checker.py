"""Runs all probes of this node, and keeps the results."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slurmft.config import run as configuration
from slurmft.config.health import HealthConfig
from slurmft.errors import ConfigError, StorageError, UsageError
from slurmft.health import results as kept
from slurmft.health.node import Scene, bad, evidence_folder
from slurmft.health.probes import Probe, known_names, probes_for
from slurmft.policy import plain_values as plain
from slurmft.policy.node_health import Checkup, ProbeResult, Problem, Status
from slurmft.system.files import write_json
from slurmft.system.isolation import Answer, Errand, run_all

CONFIG_VARIABLE = "SLURMFT_HEALTH_CONFIG"
SYSTEM_CONFIG = Path("/etc/slurmft/health.yaml")
CONTEXTS = ("manual", "prolog", "epilog", "healthcheck", "cron")
WRITE_S = 2.0
"""Seconds that writing the result to a folder may take, which may hang."""

CHECK_S = (20.0, 600.0)
"""Seconds that a program waits for its answer: of level 1, and of level 2."""

MAX_CHECK_S = 86_400
_TOLD = ("healthy", "status", "checks", "timestamp")


def load_config(path: Path | None, environment: Mapping[str, str]) -> HealthConfig:
    """The named configuration, else ``$SLURMFT_HEALTH_CONFIG``, else /etc/slurmft/health.yaml, else the defaults.

    Raises:
        ConfigError: it cannot be used; for root, also where another user decides which programs it runs.
    """
    named = path or (Path(environment[CONFIG_VARIABLE]) if environment.get(CONFIG_VARIABLE) else None)
    if named is None:
        if not SYSTEM_CONFIG.exists():
            return HealthConfig()
        named = SYSTEM_CONFIG
    found = configuration.load_section(named, HealthConfig)
    if found.user_probes and os.geteuid() == 0:
        _refuse_another_users(named)
    return found


def _refuse_another_users(path: Path) -> None:
    status = path.stat()
    if status.st_uid != 0 or status.st_mode & 0o022:
        raise ConfigError(f"{path} names programs (user_probes), and users other than root may write to it",
                          hint=f"chown root {path} && chmod go-w {path}")  # fmt: skip


def node_name(environment: Mapping[str, str]) -> str:
    """This node as Slurm calls it, where it says so; else the first part of the host's name."""
    return environment.get("SLURMD_NODENAME") or os.uname().nodename.partition(".")[0]


def look(scene: Scene, *, only: Collection[str] = ()) -> Checkup:
    """Run the probes and return their results, worst first. For programs with a single thread.

    Raises:
        UsageError: ``only`` names a probe that does not exist.
    """
    known = known_names(scene)
    for name in only:
        if name not in known:
            raise UsageError(
                f"there is no probe {name[:80]!r}{plain.did_you_mean(name, known)}", hint=f"probes: {', '.join(known)}"
            )
    chosen = [probe for probe in probes_for(scene) if not only or set(probe.names) & set(only)]
    errands = [
        Errand(name=str(number), limit_s=probe.limit(scene), task=lambda probe=probe: _plain(probe, scene))  # type: ignore[misc]
        for number, probe in enumerate(chosen)
    ]
    found = [
        result
        for probe, answer in zip(chosen, run_all(errands), strict=True)
        for result in results_of(probe, answer, late_is_bad=probe.is_judged_late(scene))
        if (not only or result.name in only) and result.name not in scene.config.disabled
    ]
    return Checkup(node=scene.node, at=scene.now, results=tuple(found), context=scene.context, level=scene.level)


def results_of(probe: Probe, answer: Answer, *, late_is_bad: bool = False) -> list[ProbeResult]:
    """The results of a probe; UNKNOWN where it crashed, was too late (or CRITICAL), or returned something else."""
    if not answer.error:
        try:
            return [replace(kept.result_of(value), took_s=answer.took_s) for value in answer.value]
        except (TypeError, ValueError) as error:
            answer = Answer(name=answer.name, error=f"its answer cannot be read: {error}", took_s=answer.took_s)
    reason = answer.error if answer.timed_out else f"the probe failed: {answer.error}"
    if answer.timed_out and late_is_bad:
        return [bad(probe.names[0], Status.CRITICAL, f"what it asks hangs: {reason}", problem=Problem.HARDWARE,
                    remedy="look at dmesg; boot the node")]  # fmt: skip
    # one probe of several names fails once
    return [ProbeResult(name=probe.names[0], status=Status.UNKNOWN, detail=reason, took_s=answer.took_s)]


def _plain(probe: Probe, scene: Scene) -> list[dict[str, Any]]:
    found = probe.look(scene)
    results: Sequence[ProbeResult] = [found] if isinstance(found, ProbeResult) else found or []
    return [kept.result_json(result) for result in results]


def keep(checkup: Checkup, config: HealthConfig, *, share: bool = True) -> tuple[Checkup, list[str]]:
    """Write the evidence on the node, and the look itself to the shared folder where there is one.

    Neither can hang us or end us: errors are returned in words. The returned look names the file that holds its
    evidence.
    """
    folder = evidence_folder(config)
    path = folder / f"{checkup.node}.evidence.json"
    pointed = replace(checkup, results=tuple(
        replace(result, evidence=(str(path),)) if result.evidence else result for result in checkup.results
    ))  # fmt: skip
    errands = [Errand(name="evidence", limit_s=WRITE_S, task=lambda: _write_evidence(path, checkup))]
    if share and config.results_folder is not None:
        target = config.results_folder
        errands.append(Errand(name="results", limit_s=WRITE_S, task=lambda: _share(target, pointed)))
    answers = run_all(errands)
    problems = [f"{each.name} not kept: {each.error or each.value}" for each in answers if each.error or each.value]
    return pointed if not answers[0].error and not answers[0].value else checkup, problems


def _write_evidence(path: Path, checkup: Checkup) -> str:
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_json(path, kept.checkup_json(checkup), mode=0o644, durable=False)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _share(folder: Path, checkup: Checkup) -> str:
    try:
        kept.write_result(folder, checkup.node, checkup)
    except StorageError as error:
        return error.what
    return ""


class HealthChecker:
    """The probes of this node, for use inside of programs.

    They run in a process of their own, so threads, GPUs and signals of the calling program are left alone.

    Raises:
        ConfigError: the configuration cannot be used.
    """

    def __init__(self, config: Path | None = None, *, level: int = 1, only: Sequence[str] = ()) -> None:
        self._config, self._level, self._only = config, level, tuple(only)
        load_config(config, os.environ)

    def check_health(self, timeout_s: float | None = None) -> dict[str, Any]:
        """``{"healthy": bool, "status": "OK", "checks": [...], "timestamp": ...}``.

        status is the gravest of all checks: CRITICAL, WARNING, UNKNOWN or OK. healthy means that at least one probe
        could look, and that no check is CRITICAL. Where no probe could, status is UNKNOWN and healthy is False: the
        node is neither healthy nor sick, and only CRITICAL is a reason to take it out. Each check has name, status,
        detail, value, unit, evidence, remedy. Never raises because of the node's state: when the probes cannot run at
        all, the only check is UNKNOWN, with the reason.

        Args:
            timeout_s: seconds to wait for the probes; by their level when it is not given.

        Raises:
            UsageError: ``timeout_s`` is not a positive number of seconds, or more than a day.
        """
        limit_s = timeout_s if timeout_s is not None else CHECK_S[self._level > 1]
        if not isinstance(limit_s, int | float) or isinstance(limit_s, bool) or not 0 < limit_s <= MAX_CHECK_S:
            raise UsageError(f"timeout_s is {limit_s!r:.40}; it is a positive number of seconds, at most {MAX_CHECK_S}")
        argv = [sys.executable, "-P", "-m", "slurmft", "health", "--json", "--level", str(self._level)]
        argv += ["--config", str(self._config)] if self._config is not None else []
        argv += [word for name in self._only for word in ("--only", name)]
        found: Any = None
        reason = ""
        try:
            done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=limit_s,
                                  check=False, stdin=subprocess.DEVNULL)  # fmt: skip
            reason = " ".join(done.stderr.split())[-300:]
            with contextlib.suppress(ValueError):
                found = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            reason = f"no answer within {limit_s:.0f} s"
        except OSError as error:
            reason = error.strerror or str(error)
        if not isinstance(found, dict) or not set(_TOLD) <= set(found):
            nothing = ProbeResult(name="probes", status=Status.UNKNOWN, detail=reason or "no answer")
            found = told(Checkup(node="", at=time.time(), results=(nothing,)))
        return {key: found[key] for key in _TOLD}


def told(checkup: Checkup) -> dict[str, Any]:
    """A look as ``slurmft health --json`` prints it."""
    checks = [kept.result_json(result) for result in checkup.results]
    return {
        "format": 1,
        "node": checkup.node,
        "status": checkup.status.name,
        "healthy": checkup.is_healthy,
        "checks": checks,
        "timestamp": datetime.fromtimestamp(checkup.at, UTC).isoformat(),
        "context": checkup.context,
        "level": checkup.level,
    }


def scene_here(config: HealthConfig, environment: Mapping[str, str], *, context: str, level: int) -> Scene:
    """This node, now."""
    node = node_name(environment)
    return Scene(node=node, now=time.time(), config=config.for_node(node), context=context, level=level,
                 environment=environment)  # fmt: skip
