"""Faults that can be injected, who may wait for a connection, and which version of a kept folder a node starts from."""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

# --- The faults that can be injected on purpose, where each of them is carried out, and which rank is hit ---

MAX_AFTER_S = 7 * 86_400.0
NOT_YET = "has not been forked yet"
"""Why an agent has not hit a rank whose worker waits for imports: the supervisor asks again."""


class Fault(StrEnum):
    """The kind of fault, as named by ``slurmft inject``."""

    KILL = "kill"
    """SIGKILL from outside, as from an operator or the kernel."""

    STOP = "stop"
    """SIGSTOP: it lives, holds all it has, and does nothing."""

    HANG = "hang"
    """Its main thread sleeps for ever at the next step boundary."""

    EXCEPTION = "exception"
    """It raises at the next step boundary."""

    NAN = "nan"
    """The first module of the next forward pass computes NaN, once; so the loss is NaN."""

    BIT_FLIP = "bit-flip"
    """At the next step boundary one bit of a parameter changes, silently."""

    BIT_FLIP_MOMENT = "bit-flip-moment"
    """One bit of the optimizer's state does."""

    BIT_FLIP_GRADIENT = "bit-flip-gradient"
    """One bit of a gradient does, after gradients were summed over the ranks and before the optimizer uses them."""

    CORRUPT_CHECKPOINT = "corrupt-newest-checkpoint"
    """Bytes in the newest committed checkpoint change."""


BY_SIGNAL: Mapping[Fault, str] = {Fault.KILL: "SIGKILL", Fault.STOP: "SIGSTOP"}
"""Faults that reach any process."""

IN_SESSION = frozenset(Fault) - {*BY_SIGNAL, Fault.CORRUPT_CHECKPOINT}
"""Faults that the worker's own session carries out at its next step boundary."""

SIMULATED: Mapping[str, Fault] = {"rank_killed": Fault.KILL, "rank_hung": Fault.STOP}
"""Values of fault_tolerance.simulated_fault_type, beside ``random``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A request for a fault."""

    fault: Fault
    who: str = ""
    rank: int | None = None
    """The rank to hit; by chance when neither it nor a node is given."""

    node: str = ""
    """All ranks of this node: its host name, or its number."""

    after_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """For the request's file."""
        return asdict(self)


def order_of(value: Any) -> Order:
    """An order from plain values.

    Raises:
        ValueError: it is invalid; says why.
    """
    import msgspec  # as in ``files.read_as``

    order = msgspec.convert(value, Order)
    if order.fault not in (*BY_SIGNAL, *IN_SESSION):
        raise ValueError(f"{order.fault.value!r} is not a fault of a rank")
    if order.rank is not None and not 0 <= order.rank < 2**31:
        raise ValueError(f"there is no rank {order.rank}")
    if len(order.node) > 255:
        raise ValueError("the name of its node is too long")
    if not 0 <= order.after_s <= MAX_AFTER_S:
        raise ValueError(f"after_s={order.after_s} is not between 0 and {MAX_AFTER_S:.0f} seconds")
    return replace(order, who=order.who[:200])


# --- strangers ---
# Connections that have not authenticated yet: how many may wait, and which one is closed when there are too many.

T = TypeVar("T")


class Strangers(Generic[T]):
    """The connections that wait for their proof, in the order of their arrival.

    One that has proved itself is taken off the list (``forget``) and never closed for another one's sake. Of the
    others the oldest goes: of its own address first, and then of the address that has the most, so that one address
    never takes the places of another.

    Args:
        at_most: how many may wait in all; at least 1.
        per_address: how many of one address. An IPv6 network of 64 bits counts as one address.
    """

    def __init__(self, at_most: int, per_address: int) -> None:
        self._at_most, self._per_address = at_most, per_address
        self._waiting: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def admit(self, connection: T, address: str) -> list[T]:
        """Take in a new connection; returns those to close for it, which are forgotten."""
        group = _group_of(address)
        self._waiting[connection] = group
        closed = []
        if list(self._waiting.values()).count(group) > self._per_address:
            closed.append(self._drop_oldest(group))
        if len(self._waiting) > self._at_most:
            counts = Counter(self._waiting.values())
            closed.append(self._drop_oldest(max(counts, key=lambda each: counts[each])))  # of equals, the oldest
        return closed

    def drop_oldest(self) -> list[T]:
        """The connection to close where there is no room at all; none where none waits."""
        return [self._drop_oldest(next(iter(self._waiting.values())))] if self._waiting else []

    def forget(self, connection: T) -> None:
        """It has proved itself, or is closed."""
        self._waiting.pop(connection, None)

    def _drop_oldest(self, group: str) -> T:
        oldest = next(each for each, its_group in self._waiting.items() if its_group == group)
        del self._waiting[oldest]
        return oldest


def _group_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return str(parsed)


# --- synced folders ---
# Whether a node keeps what its folder holds, or gets the version that is stored: ``sync`` in the configuration.
#
# Nothing here looks at a clock, which may differ between nodes: versions are ordered by the generation of the attempt
# that wrote them, and counted within it.


class Version(NamedTuple):
    """The order of versions; a newer attempt's are newer, whatever an older one still writes."""

    generation: int
    sequence: int

    def __str__(self) -> str:
        return f"{self.generation}.{self.sequence}"


NONE = Version(-1, -1)


class Choice(StrEnum):
    """What is done before the workers start."""

    KEEP = "keep"
    RESTORE = "restore"
    SET_ASIDE = "set aside"
    """Move what is there away, and begin with an empty folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Local:
    """What a node has in its folder.

    ``run``: the run that used it last, empty where that is unknown. ``version``: the one it was taken from, or stored
    as. ``generation``: of the last attempt that used it. ``changed``: files differ from that version. ``damaged``: a
    file was cut off while it was written, or a restore did not come to its end.
    """

    has_files: bool
    run: str = ""
    version: Version = NONE
    generation: int = -1
    changed: bool = False
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice, its reason, and whether what is there is kept beside it."""

    choice: Choice
    reason: str
    spare_old: bool = False


def decide(local: Local, stored: Version | None, *, run: str, follows_lead: bool) -> Decision:
    """What follows from both.

    Args:
        stored: the newest complete version; None where there is none.
        follows_lead: the first node's version is for all nodes, and this is another one.
    """
    is_ours = local.run == run
    if stored is None:
        if local.has_files and local.run and not is_ours:
            return Decision(Choice.SET_ASIDE, "the files are those of another run", spare_old=True)
        return Decision(Choice.KEEP, "nothing is stored yet")
    if not local.has_files:
        return Decision(Choice.RESTORE, "the folder is empty")
    if not is_ours:
        return Decision(Choice.RESTORE, "the files are not of this run", spare_old=True)
    if local.damaged:
        return Decision(Choice.RESTORE, "a file here is incomplete", spare_old=True)
    if local.version >= stored:
        return Decision(Choice.KEEP, "nothing newer is stored")
    if not local.changed:
        return Decision(Choice.RESTORE, "an older version is here")
    if follows_lead:
        return Decision(Choice.RESTORE, "the first node has stored a newer one", spare_old=True)
    if local.generation >= stored.generation:
        return Decision(Choice.KEEP, "the last attempt saved here")
    return Decision(Choice.RESTORE, "a later attempt has saved elsewhere", spare_old=True)


# --- Limits for the values of all settings: values that can be written down, given to a process, and counted ---

MAX_VALUES, MAX_DEPTH = 10_000, 20
"""A short file can expand to billions of values, by aliases of aliases."""

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters, line separators, and what turns the direction of text."""

MAX_PATH_BYTES, MAX_NAME_BYTES = 4095, 255
"""Of a path, and of each of its parts, as Linux has them."""

_FREE_TEXT = frozenset({"command", "environment", "srun_args", "remedy"})
"""Keys whose texts may have several lines: they are given to a program, or to a person."""

MAX_PROBLEMS, MAX_PROBLEM_LENGTH = 20, 300
_NAME_A_FOLDER = "name a folder of this run's own; its last part is the run's name"


def no_bool(value: Any) -> Any:
    """``value``, unless it is true or false, which Python would take for 1 and 0.

    Raises:
        ValueError: it is.
    """
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return value


def at_most(limit: float) -> Callable[[Any], Any]:
    """A check that returns its argument, or raises ValueError when that is above ``limit``."""

    def check(value: Any) -> Any:
        if value > limit:
            # a whole number may be beyond any float
            told = f"{value:g}" if value < 1e300 else "a number of more than 300 digits"
            raise ValueError(f"{told} is too much; at most {limit:g}")
        return value

    return check


def shown(key: Any) -> str:
    """A key as one short printable line."""
    text = str(key) if isinstance(key, (str, bool, float)) or key is None else repr(key)[:80]
    return (text if text.isprintable() else repr(text))[:80]


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """The end of a sentence: the nearest known key, or nothing when none is near."""
    import difflib  # only mistakes pay for it

    begins = [name for name in known if len(key) >= 3 and name.startswith(key)]  # env for environment
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.7) or (begins if len(begins) == 1 else [])
    return f"; did you mean {near[0]}?" if near else ""


def few(names: Sequence[object], most: int) -> str:
    """As many of them as a line names; the others are counted."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def as_text(problems: Sequence[str]) -> str:
    """The problems, one per line, up to a readable number."""
    lines = [f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"]
    lines += [f"  {problem[:MAX_PROBLEM_LENGTH]}" for problem in problems[:MAX_PROBLEMS]]
    if len(problems) > MAX_PROBLEMS:
        lines.append(f"  and {len(problems) - MAX_PROBLEMS} more")
    return "\n".join(lines)


def unusable(raw: Mapping[str, Any]) -> Iterator[str]:
    """Values that no setting can have: not text, not storable, or endless.

    Raises:
        ValueError: there are too many values to look at.
    """
    waiting: list[tuple[str, Any, int]] = [("", raw, 0)]
    for count, (where, value, depth) in enumerate(waiting):
        if count > MAX_VALUES or depth > MAX_DEPTH:
            raise ValueError("too many values, or nested too deeply")
        if isinstance(value, Mapping):
            waiting += ((where, key, depth + 1) for key in value)
            waiting += ((f"{where}.{shown(key)}".lstrip("."), each, depth + 1) for key, each in value.items())
        elif isinstance(value, (list, tuple)):
            waiting += ((where, each, depth + 1) for each in value)
        elif isinstance(value, str):
            if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
                yield f"{where or 'a key'}: {value[:40]!r} holds a character that is not text"
            elif CONTROL.search(value) and not _FREE_TEXT & set(where.split(".")):
                yield f"{where or 'a key'}: {value[:40]!r} holds a line break or control character"
        elif not isinstance(value, (bool, int, float, type(None))) and not hasattr(value, "__fspath__"):
            yield f"{where or 'a key'}: a {type(value).__name__} is not a setting; put it in quotes"


def object_name(value: str) -> str:
    """``value``, unless it is no ``package.module:name``.

    Raises:
        ValueError: it is none.
    """
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
        raise ValueError(f"{value!r} is not of the form package.module:name")
    return value


def usable_path(value: Any) -> Any:
    """``value``, unless it cannot be the path of a file.

    Raises:
        ValueError: says why.
    """
    text = str(value)
    if not text.strip():
        raise ValueError("the path is empty")  # an empty path would be the current folder
    if CONTROL.search(text):
        raise ValueError(f"{text[:80]!r} holds a line break or control character")
    if len(os_bytes := text.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
        raise ValueError(f"a path of {len(os_bytes)} bytes; at most {MAX_PATH_BYTES}")
    if any(len(part) > MAX_NAME_BYTES for part in os_bytes.split(b"/")):
        raise ValueError(f"{text[:40]!r}... has a part of more than {MAX_NAME_BYTES} bytes")
    return value


def usable_run_folder(value: Any) -> Any:
    """``value``, unless it cannot be the path of a run folder.

    Raises:
        ValueError: says why.
    """
    text = str(value)
    if not text.strip().strip("/"):
        raise ValueError(_NAME_A_FOLDER)  # an empty path would be the current folder
    usable_path(value)
    if text.rstrip("/").rpartition("/")[2] == "..":
        raise ValueError(f"{text!r} ends in .., which cannot be the name of a run; {_NAME_A_FOLDER}")
    if pattern := re.search(r"%[jtAa]", text):
        raise ValueError(f"{text!r} holds {pattern.group()}, which stands for a job's number")
    return value
