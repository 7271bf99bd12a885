"""Options of sbatch that the site's own Slurm has, and no list of ours: of a newer version, or of a plug-in."""

from __future__ import annotations

import functools
import logging

from slurmft.errors import SlurmError
from slurmft.scheduler import command
from slurmft.scheduler.parsing.sbatch_help import HelpedOptions, parse_sbatch_help

ASK_S = 5.0

log = logging.getLogger(__name__)


def known_options(options: frozenset[str]) -> frozenset[str]:
    """Those of ``options`` that the site's sbatch has; none where there is no sbatch, or it does not answer."""
    return options & options_of_site().names


@functools.cache
def options_of_site() -> HelpedOptions:
    """What ``sbatch --help`` lists; asks no controller. Asked once."""
    try:
        return parse_sbatch_help(command.run(["sbatch", "--help"], timeout_s=ASK_S))
    except SlurmError as error:
        log.debug("sbatch does not tell its options: %s", error.what)
        return HelpedOptions(frozenset(), frozenset())
