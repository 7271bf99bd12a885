"""The evidence of hardware that a worker has left in a file."""

from pathlib import Path

from slurmft.policy.verdict import Evidence
from slurmft.storage.verdicts import parse_evidence
from slurmft.system.files import read_text


def read_evidence(path: Path) -> list[Evidence | None]:
    """In order; None for a line that is damaged or of an unknown kind, and empty where there is no file."""
    lines = read_text(path, errors="replace").split("\n") if path.exists() else []
    return [parse_evidence(line) for line in lines[:-1]]
