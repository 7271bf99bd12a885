"""Configurations, command lines and values of nvidia-resiliency-ext, Megatron and NeMo-Run, as parts of this
package.

Sources: ``nvidia_resiliency_ext.fault_tolerance.config`` (also of older versions),
``megatron.bridge.training.config``, ``megatron.bridge.recipes.run_plugins`` and ``nemo.lightning.run.plugins``;
option by option in docs/coming-from.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

from slurmft.config.run import RunConfig, read, validate
from slurmft.errors import ConfigError, UsageError
from slurmft.policy import values as plain
from slurmft.policy.reruns import Injection, Mode
from slurmft.policy.verdict import EXIT_RERUN_ELSEWHERE, EXIT_VALIDATION_FAILED

# --- Values of Megatron-LM's re-run state machine (``megatron.core.rerun_state_machine``), without torch ---

EXIT_CODE_RESUME_TO_DISAMBIGUATE = EXIT_RERUN_ELSEWHERE
EXIT_CODE_FAILED_ON_RESULT_VALIDATION = EXIT_VALIDATION_FAILED

RerunDiagnostic = Injection
"""What a wrong result is attributed to: CORRECT_RESULT, TRANSIENT_ERROR, PERSISTENT_ERROR."""


class RerunMode(StrEnum):
    """Modes by Megatron-LM's names; their values are those of ``rerun.mode``."""

    DISABLED = Mode.DISABLED.value
    VALIDATE_RESULTS = Mode.VALIDATE_RESULTS.value
    REPORT_DETERMINISM_STATS = Mode.REPORT_STATS.value
    REPORT_STATS = Mode.REPORT_STATS.value

    @classmethod
    def _missing_(cls, value: object) -> RerunMode | None:
        return cls.REPORT_STATS if value == "report_determinism_stats" else None


def mode_of(value: Any) -> Mode:
    """The mode by any of its names.

    Raises:
        UsageError: there is no such mode here.
    """
    try:
        return Mode(RerunMode(value))
    except ValueError as error:
        if value == "skip":
            raise UsageError("the mode 'skip' does not exist here: a step that is wrong each time is never left out",
                             hint="validate_results ends the run with a verdict") from error  # fmt: skip
        known = ", ".join([*(mode.value for mode in RerunMode), "report_determinism_stats"])
        raise UsageError(f"{value!r:.60} is no mode of reruns", hint=f"one of {known}") from error


def injection_of(value: object) -> Injection:
    """The kind of error by its name.

    Raises:
        UsageError: there is no such kind.
    """
    try:
        return Injection(value)  # type: ignore[arg-type]
    except ValueError as error:
        known = ", ".join(kind.value for kind in Injection)
        raise UsageError(f"error_injection_type is {value!r:.60}", hint=f"one of {known}") from error


@dataclass(slots=True)
class RerunErrorInjector:
    """Errors that are injected on purpose, for tests: about one in ``error_injection_rate`` validations, 0 for none."""

    error_injection_rate: int = 0
    error_injection_type: Injection = Injection.TRANSIENT_ERROR

    def __post_init__(self) -> None:
        rate = self.error_injection_rate
        if isinstance(rate, bool) or not isinstance(rate, int) or rate < 0:
            raise UsageError(f"error_injection_rate is {rate!r:.60}; it is 0 or a positive integer")
        self.error_injection_type = injection_of(self.error_injection_type)

    @property
    def should_inject_errors(self) -> bool:
        """Whether any are."""
        return self.error_injection_rate > 0


# --- options ---
# Options of another package as a configuration of this one: each is mapped, or named as one without a counterpart.

log = logging.getLogger(__name__)

_ANY_RUN: Mapping[str, Any] = {"command": ["train"], "run_folder": "run"}
"""Values that are needed to validate others."""


@dataclass(frozen=True, slots=True)
class To:
    """An option that is a key of ours, such as ``preemption.signal_lead_s``."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value
    back: Callable[[Any], Any] = lambda value: value
    """A default of ours as a value of theirs."""


@dataclass(frozen=True, slots=True)
class AlwaysOn:
    """A switch that cannot be switched off here."""

    what: str


@dataclass(frozen=True, slots=True)
class Without:
    """An option without a counterpart, and what there is instead."""

    instead: str
    default: Any = None


Rule = To | AlwaysOn | Without


class BecomesSettings(Protocol):
    """What ``configuration`` takes up."""

    def settings(self) -> dict[str, Any]: ...


class Options:
    """Options by the names of another package. ``settings`` is what they are here, ``remarks`` what they are not.

    Each can be given, read and assigned by its name. Those that are not given keep the defaults of this package, but
    for those in ``THEIRS``.

    Raises:
        ConfigError: an option does not exist there, or its value makes no sense here.
    """

    RULES: ClassVar[Mapping[str, Rule]] = {}
    THEIRS: ClassVar[Mapping[str, Any]] = {}
    """Defaults of theirs that differ from ours, and that a user relies on."""

    given: Mapping[str, Any]
    remarks: tuple[str, ...]

    def __init__(self, **options: Any) -> None:
        self.__dict__["remarks"] = ()
        self._give({**self.THEIRS, **options})

    def _give(self, given: Mapping[str, Any]) -> None:
        """These options from now on, all of them checked; the earlier ones stay where one is refused."""
        name = type(self).__name__
        for key in given:
            if key not in self.RULES:
                raise ConfigError(f"{name} has no option {key[:60]}{plain.did_you_mean(key, list(self.RULES))}")
        settings: dict[str, Any] = {}
        taken = [self._take(settings, key, value, self.RULES[key]) for key, value in given.items()]
        remarks = tuple(f"{name}: {remark}" for remark in taken if remark)
        validate({**_ANY_RUN, **settings}, source=name)
        for remark in remarks:
            if remark not in self.remarks:
                log.warning("%s", remark)
        self.__dict__.update(given=given, _settings=settings, remarks=remarks)

    def settings(self) -> dict[str, Any]:
        """A part of a configuration, by section."""
        return {section: dict(keys) for section, keys in self._settings.items()}

    def __setattr__(self, name: str, value: Any) -> None:
        key = self._key(name)  # two names of one key: the later one counts
        self._give({**{each: was for each, was in self.given.items() if self._key(each) != key}, name: value})

    def __getattr__(self, name: str) -> Any:
        given: Mapping[str, Any] = self.__dict__.get("given", {})
        if name in given:
            return given[name]
        match self.RULES.get(name):
            case To(key=key, back=back):
                section, _, inner = key.partition(".")
                settings = {**_ANY_RUN, **self.__dict__.get("_settings", {})}
                value = back(getattr(getattr(validate(settings, source=name), section), inner))
                return MappingProxyType(value) if isinstance(value, dict) else value  # to be assigned as a whole
            case Without(default=value):
                return value
            case AlwaysOn():
                return True
        near = plain.did_you_mean(name, list(self.RULES))
        raise AttributeError(f"{type(self).__name__} has no option {name[:60]}{near}")

    def _key(self, name: str) -> str:
        rule = self.RULES.get(name)
        return rule.key if isinstance(rule, To) else name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in self.given.items())})"

    def _take(self, settings: dict[str, Any], key: str, value: Any, rule: Rule) -> str:
        """Take an option up in ``settings``; returns what there is to say about it."""
        if isinstance(rule, AlwaysOn):
            if not isinstance(value, bool):
                raise ConfigError(f"{type(self).__name__}: {key} is {value!r:.60}; it is True or False")
            return "" if value else f"{key}=False is not possible: {rule.what}"
        if isinstance(rule, Without):
            return "" if value is None or value is False else f"{key} has no counterpart: {rule.instead}"
        try:
            converted = rule.convert(value)
        except ValueError as error:
            return f"{key}={value!r:.60}: {error}"
        section, _, inner = rule.key.partition(".")
        settings.setdefault(section, {})[inner] = converted
        return ""


def configuration(*parts: BecomesSettings, **keys: Any) -> RunConfig:
    """A configuration of ``keys``, as in a file, and of parts such as ``FaultTolerancePlugin(...)``.

    A key in ``keys`` beats those of the parts, and a later part an earlier one. ``as_yaml()`` of the result is a file
    for ``slurmft submit``.

    Raises:
        ConfigError: it cannot be used; names every wrong key at once.
    """
    merged: dict[str, Any] = {}
    for part in (*(part.settings() for part in parts), keys):
        for section, value in part.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(section), Mapping)
            merged[section] = {**merged[section], **value} if both else value
    return validate(merged, source="configuration(...)")


# --- neighbours ---

_FT = "fault_tolerance"
_MEMORY = "a worker's memory is free when its process is gone, which is waited for"
_OF_THE_SCRIPT = "it is for the training script, which slurmft starts as it is"
_PROBES = "probes of the node find that: slurmft health, slurmft sweep, Slurm's hooks"
_SHIELDED = "processes of data loaders are always shielded from the signal"


def _same(section: str, *names: str) -> dict[str, Rule]:
    return {name: To(f"{section}.{name}") for name in names}


def _cycles(value: Any) -> Any:
    """NVRx switches the check off with 0."""
    if isinstance(value, int) and value < 1:
        raise ValueError("it cannot be switched off; the default stays")
    return value


def _cycles_of_restarts(value: Any) -> Any:
    """The first start is a cycle as well."""
    return _cycles(value) + 1 if type(value) is int else value


class FaultToleranceConfig(Options):
    """Options of nvidia-resiliency-ext's and of Megatron Bridge's class of this name."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        **_same(
            _FT, "rank_section_timeouts", "rank_out_of_section_timeout", "initial_rank_heartbeat_timeout",
            "rank_heartbeat_timeout", "workload_check_interval", "safety_factor", "num_warmup_iterations",
            "calc_ft_timeouts", "simulate_fault", "simulated_fault_type", "simulated_fault_rank",
            "simulated_fault_base_delay",
        ),
        "max_no_progress_cycles": To(f"{_FT}.max_no_progress_cycles", _cycles),
        "max_no_progress_restarts": To(f"{_FT}.max_no_progress_cycles", _cycles_of_restarts, lambda cycles: cycles - 1),
        "enable_ft_package": AlwaysOn("faults are always detected and answered"),
        "skip_section_response": AlwaysOn("sections are notes in shared memory, which no process answers"),
        "check_remaining_processes": Without("left-over processes of a rank are always looked for, and killed"),
        "install_exception_hook": Without("the agent reports exceptions of its workers; elsewhere: @slurmft.record"),
        "rank_termination_signal": Without("a rank that hangs is killed with SIGKILL, after its stacks are taken"),
        **dict.fromkeys(
            ("node_health_check_interval", "enable_nic_monitor", "enable_nic_healthcheck",
             "link_down_path_template", "link_state_path_template", "pci_topo_file",
             "enable_dist_storage_healthcheck", "segment_health_check_dir"),
            Without(_PROBES),
        ),
        **dict.fromkeys(
            ("attribution_endpoint", "attribution_stop_action", "attribution_export_url", "attrsvc_host",
             "attrsvc_port"),
            Without("verdicts come from evidence: slurmft explain"),
        ),
        **dict.fromkeys(
            ("gpu_memory_reclaim_timeout", "gpu_memory_tolerance_mb", "gpu_memory_poll_interval"),
            Without(_MEMORY),
        ),
        "log_level": Without("slurmft -v shows more"),
        "min_progress_iterations": Without("progress is a newly saved step"),
        "checkpoint_iteration_file": Without("progress is a newly saved step"),
        "progress_update_interval": Without("progress is a newly saved step"),
        "restart_check_interval": Without("the supervisor is told at once"),
        "storage_healthcheck_path": Without("filesystems: in health.yaml names the paths to probe"),
        "segment": Without("Slurm places nodes: slurm.switches, or slurm.segment where it has that option"),
        "numa_bind_strict": Without("slurm.srun_args: [--mem-bind=...]"),
        "cycle_info_dir": Without("the journal in the run folder: slurmft explain"),
    }  # fmt: skip

    def _take(self, settings: dict[str, Any], key: str, value: Any, rule: Rule) -> str:
        if key == "rank_termination_signal" and value in (signal.SIGKILL, "SIGKILL", "KILL"):
            return ""  # as here
        if key == "rank_section_timeouts" and value is None:
            return ""
        return super()._take(settings, key, value, rule)


class NVRxStragglerDetectionConfig(Options):
    """Options of Megatron Bridge's class of this name, and of the callback for Lightning. Off unless ``enabled``."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        **_same(
            "straggler_detection", "enabled", "report_time_interval", "calc_relative_gpu_perf",
            "calc_individual_gpu_perf", "num_gpu_perf_scores_to_print", "gpu_relative_perf_threshold",
            "gpu_individual_perf_threshold", "stop_if_detected", "enable_logging", "profiling_interval", "logger_name",
        ),
        "enable_ptl_logging": Without("reports go to the supervisor's log, and to no logger of Lightning"),
    }  # fmt: skip
    THEIRS: ClassVar[Mapping[str, Any]] = {"enabled": False}


class FaultTolerancePlugin(Options):
    """Options of the plugin for NeMo-Run. Timeouts are ours unless they are given: its own end healthy runs."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        **_same(
            _FT, "calc_ft_timeouts", "num_in_job_restarts", "num_job_retries_on_failure",
            "initial_rank_heartbeat_timeout", "rank_heartbeat_timeout",
        ),
        "enable_ft_package": AlwaysOn("faults are always detected and answered"),
        "callbacks": Without("no callback is needed; session.section and session.heartbeat report to the agent"),
        "script_args_converter_fn": Without("nothing is added to the command"),
    }  # fmt: skip
    THEIRS: ClassVar[Mapping[str, Any]] = {"calc_ft_timeouts": True}


class PreemptionPlugin(Options):
    """Options of the plugin for NeMo-Run: ``preempt_time`` is ``preemption.signal_lead_s``, and 60 as there."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        "preempt_time": To("preemption.signal_lead_s"),
        "enable_exit_handler": AlwaysOn("a stop always saves first"),
        "enable_exit_handler_for_data_loader": Without(_SHIELDED, False),
        "callbacks": Without("no callback is needed; session.steps saves and stops"),
        "script_args_converter_fn": Without("nothing is added to the command"),
    }
    THEIRS: ClassVar[Mapping[str, Any]] = {"preempt_time": 60}


class TrainingConfig(Options):
    """What Megatron Bridge's class of this name says about signals; the rest of it is for the training script."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        "exit_signal_handler": AlwaysOn("a stop always saves first"),
        "exit_signal": To("preemption.signal", back=lambda name: signal.Signals[name]),
        "exit_signal_handler_for_dataloader": Without(_SHIELDED, False),
        **dict.fromkeys(
            ("micro_batch_size", "global_batch_size", "rampup_batch_size", "decrease_batch_size_if_needed",
             "empty_unused_memory_level", "train_sync_interval", "train_iters", "train_samples", "exit_interval",
             "exit_duration_in_mins", "manual_gc", "manual_gc_interval", "manual_gc_eval", "iterations_to_skip"),
            Without(_OF_THE_SCRIPT),
        ),
    }  # fmt: skip


class RerunStateMachineConfig(Options):
    """Megatron's section of the same name; ``validate_results`` where no mode is given, and theirs is ``disabled``."""

    RULES: ClassVar[Mapping[str, Rule]] = {
        **_same("rerun", "error_injection_rate", "check_for_nan_in_loss", "check_for_spiky_loss"),
        "error_injection_type": To("rerun.error_injection_type", lambda value: injection_of(value).value),
        "rerun_mode": To("rerun.mode", lambda value: mode_of(value).value),
    }


class NVRxStragglerDetectionManager:
    """Megatron Bridge's wrapper of the step function, which is not needed here; making one says what to write.

    Raises:
        UsageError: always.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(
            "there is no NVRxStragglerDetectionManager here: session.steps times each step, and nothing is wrapped",
            hint="NVRxStragglerDetectionConfig(...) in configuration(...); docs/how-to/stragglers.md",
        )


# --- ft launcher ---
# The command line of nvidia-resiliency-ext's ``ft_launcher``, which is torchrun's with ``--ft-*`` options, as a run.
#
# Source: its ``launcher.py``, main of 2026-08 and older versions (``--ft-param-*``). Options may be written with
# ``-`` or ``_``, and as ``--name=value`` or ``--name value``.

_FINDS = "slurmft finds the nodes, and gives each rank its variables"
_LOGS = "logs are in the run folder, one for each rank and attempt: slurmft logs"
_HERE = "the agent of each node starts the ranks"

WITHOUT: Mapping[str, str] = {
    "rdzv-backend": _FINDS, "rdzv-endpoint": _FINDS, "rdzv-conf": _FINDS, "master-addr": _FINDS, "master-port": _FINDS,
    "node-rank": _FINDS, "local-addr": _FINDS, "ft-rdzv-impl": _FINDS,
    "monitor-interval": _HERE, "start-method": _HERE, "role": _HERE, "event-log-handler": _HERE,
    "numa-binding": "ranks are bound to no CPUs of their own", "signals-to-handle": "preemption.signal is the signal",
    **dict.fromkeys(("workers-stop-timeout", "shutdown-timeout"),
                    "the ranks of a failed attempt are killed at once, after their evidence is taken"),
    "log-dir": _LOGS, "redirects": _LOGS, "r": _LOGS, "tee": _LOGS, "t": _LOGS, "local-ranks-filter": _LOGS,
    "logs-specs": _LOGS, "ft-base-logfile": _LOGS, "duplicate-stdout-filters": _LOGS, "duplicate-stderr-filters": _LOGS,
}  # fmt: skip
"""Options with a value that have no counterpart, and what there is instead."""

FLAGS_WITHOUT: Mapping[str, str] = {
    "run-path": "the script runs in a process of its own",
    "virtual-local-rank": "LOCAL_RANK is a rank's own number",
    "ft-ignore-missing-cfg": "a configuration is not needed",
    "ignore-missing-fault-tol-cfg": "a configuration is not needed",
}
VALUES = ("nnodes", "nproc-per-node", "max-restarts", "rdzv-id", "term-timeout", "ft-cfg-path", "fault-tol-cfg-path",
          "ft-restart-policy")  # fmt: skip
LAUNCHER_FLAGS = ("standalone", "module", "m", "no-python")

OURS = ("run-folder", "cluster", "set", "print-config", "dry-run", "wait")
"""Options of the verb itself."""

_PREFIXES = ("ft-param-", "ft-")


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line in our words."""

    settings: dict[str, Any]
    """Keys and values of a configuration, with the command, and a run folder by ``--rdzv-id`` or the script's name."""

    remarks: tuple[str, ...]
    """One line for each option without a counterpart."""

    standalone: bool = False
    """``--standalone``: on this machine alone."""


def parse(words: Sequence[str]) -> Launch:
    """The run that a command line of ``ft_launcher`` describes.

    Raises:
        ConfigError: an option's value makes no sense, or the file of ``--ft-cfg-path`` cannot be used.
        UsageError: an option does not exist there, has no value, or there is no script.
    """
    given, command = _split_options(words)
    if not command:
        raise UsageError("there is no script to launch", hint="slurmft ft-launch --nproc-per-node 8 train.py --lr 1e-4")
    remarks = [
        f"--{name} has no counterpart: {why}" for name, why in {**WITHOUT, **FLAGS_WITHOUT}.items() if name in given
    ]
    if given.get("ft-restart-policy", "any-failed") != "any-failed":
        remarks.append("--ft-restart-policy has no counterpart: all ranks are restarted when one fails; "
                       "elastic.min_nodes lets fewer nodes go on")  # fmt: skip
    ft = _fault_tolerance(given)
    settings: dict[str, Any] = {
        "command": _command(command, given), "run_folder": f"runs/{_run_name(command, given)}", **ft.settings()
    }  # fmt: skip
    if "max-restarts" in given:
        section = settings.setdefault("fault_tolerance", {})
        section["num_in_job_restarts"] = _integer("max-restarts", given["max-restarts"], at_least=0)
    if "term-timeout" in given:
        settings["preemption"] = {"stop_timeout_s": given["term-timeout"]}
    settings |= _size(given)
    return Launch(settings, (*remarks, *ft.remarks), standalone="standalone" in given)


def _split_options(words: Sequence[str]) -> tuple[dict[str, str], Sequence[str]]:
    """The options in front of the script, by their names with ``-``; and the script with its arguments."""
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if name in LAUNCHER_FLAGS or name in FLAGS_WITHOUT:
            if equals:
                raise UsageError(f"--{name} takes no value")
            value = "true"
        elif name in OURS:
            raise UsageError(f"--{name} is slurmft's own option", hint="write it in front of those of the launcher")
        elif not _exists(name):
            of_ft = (f"ft-{name.replace('_', '-')}" for name in FaultToleranceConfig.RULES)
            known = [*LAUNCHER_FLAGS, *FLAGS_WITHOUT, *VALUES, *WITHOUT, *of_ft]
            raise UsageError(f"ft_launcher has no option {word[:60]}{plain.did_you_mean(name, known)}")
        elif not equals:
            if not rest:
                raise UsageError(f"--{name} needs a value")
            value = rest.pop(0)
        given[name] = value
    return given, rest


def _exists(name: str) -> bool:
    return name in VALUES or name in WITHOUT or _ft_name(name) is not None


def _ft_name(name: str) -> str | None:
    """The option of ``FaultToleranceConfig`` that ``--ft-NAME`` or ``--ft-param-NAME`` sets."""
    for prefix in _PREFIXES:
        inner = name.removeprefix(prefix).replace("-", "_")
        if name.startswith(prefix) and inner in FaultToleranceConfig.RULES:
            return inner
    return None


def _fault_tolerance(given: Mapping[str, str]) -> FaultToleranceConfig:
    """The file's section, and above it the options."""
    options: dict[str, Any] = {}
    for name in ("ft-cfg-path", "fault-tol-cfg-path"):
        if name in given:
            options |= _section_in(read(Path(given[name])), given[name])
    options |= {inner: _value(value) for name, value in given.items() if (inner := _ft_name(name)) is not None}
    return FaultToleranceConfig(**options)


def _section_in(values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The section ``fault_tolerance``, at whatever depth.

    Raises:
        ConfigError: there is none.
    """
    waiting = [values]
    for mapping in waiting:
        section = mapping.get("fault_tolerance")
        if isinstance(section, Mapping):
            return {str(key): value for key, value in section.items()}
        waiting += [value for value in mapping.values() if isinstance(value, Mapping)]
    raise ConfigError(f"{path} has no section fault_tolerance")


def _value(text: str) -> Any:
    """A value of the command line as one of Python; fractions are left to the section that takes them."""
    if ":" in text:  # section:seconds, ...
        return ",".join(part if _value(part.rpartition(":")[2]) is not None else f"{part.rpartition(':')[0]}:null"
                        for part in text.split(","))  # fmt: skip
    if re.fullmatch(r"[-+]?[0-9]{1,18}", text):
        return int(text)
    return {"none": None, "null": None, "": None, "true": True, "false": False}.get(text.strip().lower(), text)


def _size(given: Mapping[str, str]) -> dict[str, Any]:
    least, colon, most = given.get("nnodes", "1").partition(":")
    nodes = _integer("nnodes", most if colon else least)
    settings: dict[str, Any] = {"nodes": nodes}
    if colon and (fewest := _integer("nnodes", least)) != nodes:
        settings["elastic"] = {"min_nodes": fewest}
    per_node = given.get("nproc-per-node", "1")
    if per_node in ("auto", "gpu", "cpu"):
        raise UsageError(
            f"--nproc-per-node={per_node} is not known here, where the nodes are not", hint="give a number"
        )
    return {**settings, "nproc_per_node": _integer("nproc-per-node", per_node)}


def _integer(name: str, text: str, *, at_least: int = 1) -> int:
    if not text.strip().isascii() or not text.strip().isdecimal() or len(text) > 9 or int(text) < at_least:
        raise UsageError(f"--{name}: {text[:40]!r} is not a whole number from {at_least} on")
    return int(text)


def _command(command: Sequence[str], given: Mapping[str, str]) -> list[str]:
    if "no-python" in given:
        return list(command)
    module = ["-m"] if "module" in given or "m" in given else []
    return ["python", *module, *command]


def _run_name(command: Sequence[str], given: Mapping[str, str]) -> str:
    name = given.get("rdzv-id", "none")
    if name == "none":
        name = PurePath(command[0]).stem or "run"
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name)[:100].lstrip(".") or "run"
