"""The jobs of a run: their ids, and their identities, as ids are reused for other jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from slurmft.errors import StorageError
from slurmft.policy.site.job_identity import NOTHING_KNOWN, JobIdentity, OwnJob, identity_from, is_same_job, merged
from slurmft.storage.patience import write_state
from slurmft.system.files import read_json

JOBS_FILE = "jobs.json"
LOCAL_PREFIX = "local-"
"""Begins the job id of a run that has no Slurm around it."""

_JOB_ID = re.compile(r"(\d{1,10})(?:[_+]\d{1,10})?", re.ASCII)
_MAX_ID = 2**31 - 1


class JobsFile:
    """``jobs.json`` of a run folder. Folders of earlier versions hold ids alone."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOBS_FILE

    def ids(self) -> list[str]:
        """All jobs so far, oldest first.

        Raises:
            StorageError: the file cannot be read or believed.
        """
        return self._read()[0]

    def own_jobs(self, newest: int | None, told_elsewhere: Callable[[], Mapping[str, JobIdentity]]) -> list[OwnJob]:
        """Those of Slurm, oldest first; ``told_elsewhere`` is called where the file has no identities.

        Raises:
            StorageError: the file cannot be read or believed.
        """
        jobs, known = self._read()
        of_slurm = [job for job in jobs if not job.startswith(LOCAL_PREFIX)]
        chosen = of_slurm if newest is None else of_slurm[-newest:]
        told = {} if all(job in known for job in chosen) else told_elsewhere()
        user = self.path.parent.stat().st_uid if chosen else 0
        return [OwnJob(job, replace(known.get(job) or told.get(job) or NOTHING_KNOWN, user=user)) for job in chosen]

    def add(self, job: str, seen: JobIdentity | None) -> None:
        """Remember a job, and its identity. Idempotent.

        A reused id means the newer job: it becomes the newest one.

        Raises:
            StorageError: the file cannot be read, believed or written.
        """
        jobs, known = self._read()
        before = known.get(job)
        is_another = seen is not None and before is not None and is_same_job(before, seen) is False
        if seen is not None:
            own = replace(seen, own_script=(seen.script or "").startswith(f"{self.path.parent}{os.sep}"))
            known[job] = own if before is None or is_another else merged(before, own)
        order = [*(each for each in jobs if each != job), job] if is_another or job not in jobs else jobs
        if order != jobs or seen is not None:
            records = {each: identity.as_json() for each, identity in known.items() if each in order}
            write_state(self.path, {"jobs": order, "known": records})

    def _read(self) -> tuple[list[str], dict[str, JobIdentity]]:
        value = read_json(self.path) or {}
        jobs = value.get("jobs", [])
        if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
            raise StorageError(f"{self.path} does not hold a list of jobs", hint="move it away and run again")
        for job in jobs:  # one that is not an id makes squeue forget all others in the same question
            is_id = (match := _JOB_ID.fullmatch(job)) is not None and 0 < int(match[1]) <= _MAX_ID
            if not is_id and not job.startswith(LOCAL_PREFIX):
                raise StorageError(f"{self.path} names a job {job[:40]!r}", hint="move it away and run again")
        known = value.get("known")
        records = known if isinstance(known, dict) else {}
        return jobs, {str(job): identity_from(facts) for job, facts in records.items() if isinstance(facts, dict)}
