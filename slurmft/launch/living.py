"""Whether a run's owner is still there. Apart from the rest, so that reading verbs need not load a supervisor."""

from __future__ import annotations

import logging
import os

from slurmft.errors import SlurmError
from slurmft.scheduler import slurm
from slurmft.storage.processes import lives
from slurmft.storage.run_folder import Owner

log = logging.getLogger(__name__)


def owner_lives(owner: Owner) -> bool:
    """Whether the owner's job has nodes, or its local process runs.

    When Slurm does not answer the owner counts as gone: the fence keeps a living one from doing harm.
    """
    if owner.cluster == "local":
        return owner.host == os.uname().nodename and lives(owner.pid, owner.birth)
    try:
        record = slurm.job(owner.job, patience_s=30.0)
    except SlurmError as error:
        log.warning("cannot tell whether job %s still runs: %s", owner.job, error.what)
        return False
    return record is not None and record.alive and record.state != "COMPLETING"
