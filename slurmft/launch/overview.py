"""What a run is doing, from its folder and from Slurm: the value behind ``slurmft status``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmft.errors import SlurmError, StorageError
from slurmft.launch.run import owner_lives
from slurmft.scheduler import slurm
from slurmft.scheduler.parsing import JobRecord
from slurmft.storage.run_folder import Owner, RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """One run at one moment."""

    run: str
    folder: str
    state: str
    """finished, running, waiting, stopped, unknown (Slurm did not answer), damaged, or new."""

    detail: str
    """Why, in Slurm's or the journal's words."""

    job: str | None
    jobs: tuple[str, ...]
    """The chain of the run's jobs, oldest first."""

    step: int | None
    until: int | None
    saved: int | None
    """Newest step in a committed checkpoint of the newest attempt."""

    metric: float | None
    attempts: int
    at: float | None
    """Unix time of the progress report."""

    def as_json(self) -> dict[str, Any]:
        """For scripts; the format only grows."""
        return {"format": 1, **asdict(self)}


def overview(run: RunFolder, records: Mapping[str, JobRecord] | None) -> Overview:
    """The run's state; ``records`` is what Slurm said of its jobs, None when it did not answer."""
    owner, done, progress = run.owner(), run.done(), run.progress() or {}
    jobs = run.jobs()
    state, detail = _state(run, owner, done, run.slurm_jobs(), records)
    return Overview(
        run=run.path.name,
        folder=str(run.path),
        state=state,
        detail=detail,
        job=jobs[-1] if jobs else None,
        jobs=tuple(jobs),
        step=progress.get("step"),
        until=progress.get("until"),
        saved=saved if (saved := progress.get("saved")) is not None and saved >= 0 else None,
        metric=progress.get("metric"),
        attempts=owner.generation if owner is not None else 0,
        at=progress.get("at"),
    )


def overviews(runs: Sequence[RunFolder]) -> list[Overview]:
    """All of them with one question to Slurm."""
    job_ids = [job for run in runs for job in _slurm_jobs(run)]
    records: Mapping[str, JobRecord] | None = {}
    if job_ids and slurm.available():
        try:
            records = slurm.jobs(job_ids)
        except SlurmError:
            records = None
    return [_overview_or_damage(run, records) for run in runs]


def _slurm_jobs(run: RunFolder) -> list[str]:
    try:
        return [] if run.done() else run.slurm_jobs()[-5:]
    except StorageError:
        return []


def _overview_or_damage(run: RunFolder, records: Mapping[str, JobRecord] | None) -> Overview:
    """One damaged run folder must not hide the others."""
    try:
        return overview(run, records)
    except StorageError as error:
        nothing: dict[str, Any] = dict.fromkeys(("job", "step", "until", "saved", "metric", "at"))
        return Overview(
            run=run.path.name, folder=str(run.path), state="damaged", detail=error.what, jobs=(), attempts=0, **nothing
        )


def _state(
    run: RunFolder,
    owner: Owner | None,
    done: Mapping[str, Any] | None,
    jobs: Sequence[str],
    records: Mapping[str, JobRecord] | None,
) -> tuple[str, str]:
    if done is not None:
        return "finished", str(done.get("reason", ""))
    if owner is not None and owner.cluster == "local" and owner_lives(owner):
        return "running", f"process {owner.pid} on {owner.host}"
    if jobs and records is None:
        return "unknown", "Slurm did not answer"
    mine = [record for job in jobs if (record := (records or {}).get(job)) is not None]
    for record in mine:
        if record.alive:
            return "running", f"job {record.job_id} {record.state.lower()} on {record.nodes}"
    for record in mine:
        if record.waiting:
            return "waiting", f"job {record.job_id} {record.state.lower()} ({record.reason})"
    return _ended(run)


def _ended(run: RunFolder) -> tuple[str, str]:
    events = run.journal().read()
    for event in reversed(events):
        if event.event in ("decision", "cancelled", "ended from outside", "submission failed"):
            return "stopped", str(event.details.get("reason", event.event))
    return ("stopped", "it left no verdict") if any(e.event == "attempt started" for e in events) else ("new", "")
