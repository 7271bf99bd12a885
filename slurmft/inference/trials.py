"""The trials of a sweep in its run folder: their names and folders, adding some, and what has come of them.

A trial is a request of a batch that may grow. Repeating one adds another request for the same trial, and what counts
is the newest; nothing that was recorded is changed.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import json
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from slurmft.config.inference import MAX_TRIALS, TrialsConfig
from slurmft.errors import ConfigError, UsageError
from slurmft.inference.ledger import AnswersSoFar
from slurmft.inference.requests import MAX_ID_LENGTH, Requests, arrow, extend, folder_of, object_in, records_of
from slurmft.storage.patience import writing
from slurmft.system.files import open_regular, replace_atomically

NAME, CANCEL = "custom_id", "cancel"
LONGEST_NAME = 100
"""Of one that is made of the parameters."""

LOOK_S = 0.5

_PLAIN_KEY, _PLAIN_FOLDER = re.compile(r"\w[\w.]*"), re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9_=,+.-]{0,119}")
_NUMBERED = re.compile(r".*-[0-9a-f]{12}", re.DOTALL)


class Known:
    """The trials that are in a run folder, for looks of which each reads on where the last one ended. Memory: some 300
    bytes for each."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = folder_of(run_folder)
        self._read = 0
        self.digests: dict[str, bytes] = {}
        """Of each trial's parameters."""

        self.numbers: dict[str, int] = {}
        """The newest request for each."""

    def look(self) -> Self:
        """Learn of what was added.

        Raises:
            StorageError: it cannot be read.
        """
        for record in records_of(self._folder, self._read):
            name = trial_of(record)
            self.digests[name], self.numbers[name] = _canonical(record["body"]), self._read
            self._read += 1
        return self


@dataclass(frozen=True, slots=True)
class Added:
    """What became of trials that were given."""

    total: int
    """Requests in all, those before and repeated ones included."""

    new: int
    known: int


def name_of(parameters: Mapping[str, Any]) -> str:
    """A trial's name where none was given: its parameters, or a digest of them where those are long."""
    parts = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in sorted(parameters.items())]
    text = ",".join(parts)
    if text and len(text) <= LONGEST_NAME and all(map(_PLAIN_KEY.fullmatch, parameters)):
        return text
    return f"trial-{_canonical(parameters).hex()[:16]}"


def folder_of_trial(run_folder: Path, name: str) -> Path:
    """The folder of a trial, which no other one has."""
    if not _PLAIN_FOLDER.fullmatch(name) or _NUMBERED.fullmatch(name):
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]
        name = f"{re.sub(r'[^A-Za-z0-9_=,+-]', '_', name)[:80]}-{digest}"
    return run_folder / "trials" / name


def add(run_folder: Path, trials: TrialsConfig) -> Added:
    """Put the trials of a configuration into the run folder that are not there yet. The run's lock is to be held.

    Raises:
        ConfigError: one of them is none, or is there twice or with other parameters; nothing is added.
        StorageError: they cannot be kept.
    """
    return add_values(run_folder, _given(trials))


def add_values(
    run_folder: Path, values: Iterable[tuple[bytes | Mapping[str, Any], str]], known: Known | None = None
) -> Added:
    """As ``add``, of values and where each is from; ``known`` are the trials of the run that were seen before."""
    folder, seen, new = folder_of(run_folder), set[str](), list[dict[str, Any]]()
    known = (known or Known(run_folder)).look()
    for value, where in values:
        name, parameters = _trial_in(value, where)
        if name in seen:
            raise ConfigError(f"trials: {where}: {name[:200]} is there twice",
                              hint=f"a parameter such as seed, or a {NAME}, tells them apart")  # fmt: skip
        seen.add(name)
        if name not in known.digests:
            new.append({"id": name, "body": parameters})
        elif known.digests[name] != _canonical(parameters):
            raise ConfigError(f"trials: {where}: {name[:200]} is in this sweep already, with other parameters",
                              hint=f"choose another {NAME}")  # fmt: skip
        if len(known.digests) + len(new) > MAX_TRIALS:
            raise ConfigError(f"trials: there are more than {MAX_TRIALS}")
    batch = extend(folder, new, digest=uuid.uuid4().hex)
    return Added(batch.total, len(new), len(seen) - len(new))


def retry_failed(run_folder: Path) -> Added:
    """Add those trials again that have failed, and are not cancelled. The run's lock is to be held.

    Raises:
        StorageError: they cannot be read, or kept.
    """
    folder = folder_of(run_folder)
    ids = {record["id"] for record in records_of(folder)}
    failed = [
        row for row in rows(run_folder) if row["state"] == "failed" and not (Path(row["folder"]) / CANCEL).exists()
    ]  # fmt: skip
    new = []
    for row in failed:
        names = (f"{row['trial'][: MAX_ID_LENGTH - 20]}#retry-{number}" for number in itertools.count(1))
        ids.add(name := next(each for each in names if each not in ids))
        new.append({"id": name, "trial": row["trial"], "body": row["parameters"]})
    return Added(extend(folder, new, digest=uuid.uuid4().hex).total, len(new), 0)


def trial_of(record: Mapping[str, Any]) -> str:
    """The name of the trial that a request is for."""
    return str(record.get("trial", record["id"]))


def rows(
    run_folder: Path, numbers: Collection[int] | None = None, so_far: AnswersSoFar | None = None
) -> Iterator[dict[str, Any]]:
    """What has come of each trial so far, in the order in which they were added: ``trial``, ``state`` (``done``,
    ``failed`` or ``open``), ``parameters``, ``result``, ``error``, ``seconds``, ``node`` and ``folder``.

    Args:
        numbers: of requests, in place of the newest one of each trial.
        so_far: what earlier looks have seen, which are read on.

    Raises:
        UsageError: the run is no sweep.
        StorageError: its records cannot be read.
    """
    folder = folder_of(run_folder)
    so_far = so_far or AnswersSoFar(folder)
    if numbers is None:
        numbers = {trial_of(record): number for number, record in enumerate(records_of(folder))}.values()
    if so_far.look() is None:
        raise UsageError(f"run {run_folder.name} has no trials", hint="slurmft trials CONFIG begins a sweep")
    with Requests(folder) as requests:
        for number, record in zip(numbers, so_far.answers(numbers), strict=True):
            request = requests.get(number)
            name = trial_of(request)
            error = None if record is None else record.get("error")
            body = {} if record is None or error is not None else record["response"]["body"]
            yield {
                "trial": name, "state": "open" if record is None else "done" if error is None else "failed",
                "parameters": request["body"], "result": body.get("result"),
                "error": None if error is None else f"{error.get('code')}: {error.get('message')}",
                "seconds": body.get("seconds"), "node": body.get("node"),
                "folder": str(folder_of_trial(run_folder, name)),
            }  # fmt: skip


class Outcomes:
    """What has come of a run's trials so far, by their names, for many who ask often; safe for threads."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder, self._lock, self._looked_s = run_folder, threading.Lock(), -LOOK_S
        self._known, self._so_far = Known(run_folder), AnswersSoFar(folder_of(run_folder))

    def of(self, name: str, *, force: bool = False) -> Mapping[str, Any] | None:
        """The record of a trial that has ended: ``response``, or ``error``. ``force``: not as of half a second ago.

        Raises:
            StorageError: the records of the run cannot be read.
        """
        with self._lock:
            if force or time.monotonic() - self._looked_s > LOOK_S:
                self._known.look()
                self._so_far.look()
                self._looked_s = time.monotonic()
            number = self._known.numbers.get(name)
            return None if number is None else next(self._so_far.answers([number]))

    @property
    def are_over(self) -> bool:
        """Whether each trial has ended, or is cancelled."""
        names = reversed(self._known.numbers)  # which are cancelled in their order, if all are
        return all((folder_of_trial(self._run_folder, name) / CANCEL).exists() or self.of(name) for name in names)


def cancel(run_folder: Path, name: str) -> None:
    """Have a trial end, or not begin; it has the time to save, where it has a handler for the signal of a stop.

    Raises:
        StorageError: that cannot be noted.
    """
    path = folder_of_trial(run_folder, name) / CANCEL
    with writing(path):
        replace_atomically(path, "")


def write_csv(found: Iterable[Mapping[str, Any]], stream: TextIO) -> None:
    """Rows as a table, with a column for each parameter and each key of the results."""
    flat = [_flat(row) for row in found]
    names = dict.fromkeys(name for row in flat for name in row)
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)


def write_parquet(found: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Rows as columns; parameters and results as texts in JSON.

    Raises:
        UsageError: pyarrow is missing.
    """
    pyarrow = arrow("--parquet")
    kinds = {"seconds": pyarrow.float64()}
    names = ("trial", "state", "parameters", "result", "error", "seconds", "node", "folder")
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in names])
    texts = [{**row, **{name: json.dumps(row[name]) for name in ("parameters", "result")}} for row in found]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(texts, schema=schema), path)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat = dict[str, Any]()
    for name, value in row.items():
        if name in ("parameters", "result") and isinstance(value, Mapping):
            flat |= {f"{name}.{key}": _cell(each) for key, each in value.items()}
        else:
            flat[name] = _cell(value)
    return flat


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else value


def _canonical(parameters: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps(parameters, sort_keys=True, separators=(",", ":")).encode()).digest()


def _trial_in(value: bytes | Mapping[str, Any], where: str) -> tuple[str, dict[str, Any]]:
    try:
        found = dict(object_in(value))
        name = found.pop(NAME, None)
        name = name_of(found) if name is None else str(name) if type(name) is int else name
        if not isinstance(name, str) or not 0 < len(name) <= MAX_ID_LENGTH:
            raise ValueError(f"its {NAME} is not a text of 1 to {MAX_ID_LENGTH} characters")
        name.encode()
    except ValueError as error:
        raise ConfigError(f"trials: {where}: {error}") from error
    return name, found


def _given(trials: TrialsConfig) -> Iterator[tuple[bytes | Mapping[str, Any], str]]:
    if trials.list is not None:
        yield from ((each, f"list, trial {number}") for number, each in enumerate(trials.list, 1))
    if trials.grid is not None:
        combinations = itertools.product(*trials.grid.values())
        yield from ((dict(zip(trials.grid, each, strict=True)), "grid") for each in combinations)
    if trials.file is not None:
        try:
            with io.BufferedReader(io.FileIO(open_regular(trials.file))) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield line, f"{trials.file.name}:{number}"
        except OSError as error:
            raise UsageError(f"trials.file: cannot read {trials.file}: {error.strerror or error}") from error
