"""The account of a run, from its folder: one pass over the journal, which is never in memory as a whole."""

from __future__ import annotations

from dataclasses import asdict

from slurmft.errors import StorageError
from slurmft.reporting.accounting import WANTED, Accounting
from slurmft.reporting.summary import Report
from slurmft.storage.history.progress import progress_of
from slurmft.storage.run_folder import RunFolder


def report_of(run: RunFolder, *, now_s: float, since_s: float = 0.0) -> Report:
    """What the journal of ``run`` shows of the time from ``since_s`` to ``now_s``, both Unix times.

    Raises:
        StorageError: there is no journal, it cannot be read, holds no event, or a newer slurmft wrote it.
    """
    journal, accounting, unreadable = run.journal(), Accounting(since_s), 0
    try:
        for event in journal.each(WANTED):
            if event is None:
                unreadable += 1
            else:
                accounting.note(event)
    except FileNotFoundError as error:
        raise StorageError(f"run {run.path.name} has no journal yet: nothing was submitted",
                           hint="slurmft submit CONFIG submits it") from error  # fmt: skip
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError):
            raise StorageError(error.what, hint="it belongs to another user") from error.__cause__
        raise
    if not accounting.account.events:
        damage = f": none of its {unreadable} lines can be read" if unreadable else " is empty"
        raise StorageError(f"{journal.path}{damage}", hint=f"see also {run.logs}")
    account = accounting.finish(now_s=now_s, seen=asdict(progress_of(run)))
    return Report(name=run.name, account=account, unreadable=unreadable)
