"""The section ``preemption`` of the configuration."""

from __future__ import annotations

import signal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from slurmft.config.types import Count, Seconds, Section


def _named(value: Any) -> Any:
    """A signal's number, or its name without SIG, as its name."""
    if type(value) not in (int, str, signal.Signals):
        return value
    known = signal.Signals.__members__
    names = {**{f"{number:d}": name for name, number in known.items()}, **{name[3:]: name for name in known}}
    return names.get(value if isinstance(value, str) else f"{value:d}", value)


class PreemptionConfig(Section):
    """Stops that Slurm asks for: signal, lead time, and how the run continues."""

    signal: Annotated[Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"], BeforeValidator(_named)] = "SIGTERM"
    """Signal of ``sbatch --signal``. A preemption sends SIGTERM in any case, so SIGTERM is always obeyed too.
    Whichever it is, workers with a session save at the end of a step: the signal itself is ignored there, unless the
    script handles it. Workers without a session get it, and SIGTERM ten seconds before the time is up. With SIGINT,
    Ctrl-C on a local run is such a signal as well."""

    signal_lead_s: Count = Field(default=120, ge=1, le=65535)
    """Seconds before the time limit at which Slurm sends the signal; up to 30 s earlier."""

    continue_by: Literal["auto", "requeue", "resubmit", "nothing"] = "auto"
    """How the run continues: requeue this job, submit a successor, or only say how. auto: requeue, else resubmit."""

    requeue_delay_s: Count = Field(default=2, ge=1, le=600)
    """Begin time of a requeued job, seconds from now. It must lie after the end of the job's processes and epilog:
    a shorter one falls back to Slurm's own 121 s. Where there is no epilog it may be up to one second sooner."""

    stop_timeout_s: Seconds = Field(default=600.0, gt=0)
    """Longest wait for the save of a stop that has no deadline of its own (``slurmft stop``, a signal by hand)."""
