"""The labelled ends of logs in ``data/log_endings.txt``, and how they are judged."""

from dataclasses import dataclass
from pathlib import Path

from slurmft.policy.verdict import Cause
from slurmft.supervisor.observations import report_of_text

LABELS = {
    "corrupt": Cause.DATA_CORRUPTION,
    "device": Cause.DEVICE_OUT_OF_MEMORY,
    "host": Cause.HOST_OUT_OF_MEMORY,
    "comm": Cause.COMMUNICATION_ERROR,
    "none": Cause.WORKER_ERROR,
}


@dataclass(frozen=True)
class LogEnding:
    """One entry of the corpus."""

    label: str
    name: str
    text: str

    def found(self) -> str:
        """The label that slurmft gives it, as it does for a rank whose log is all there is."""
        cause = report_of_text(self.text, source="log", rank=0, node="n1", log=True).cause
        return next(label for label, each in LABELS.items() if each is cause)


def log_endings() -> list[LogEnding]:
    """The whole corpus."""
    text = (Path(__file__).parents[1] / "data" / "log_endings.txt").read_text(encoding="utf-8")
    found = []
    for entry in text.split("\n=== ")[1:]:
        head, _, body = entry.partition("\n")
        label, _, name = head.partition(": ")
        found.append(LogEnding(label, name, body))
    return found
