"""The one reader of text: what ended a program, by its exceptions, its messages, Slurm's lines and the kernel's.

Only what was printed as an end counts: neither source lines that a traceback quotes, nor remarks, nor errors after
which the program went on. What the words mean is said by ``signatures``. No text takes long, whatever is in it: only
its newest lines are read, and only the beginning of each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmft.policy.signatures import SIGNATURES, Remedy, Signature
from slurmft.policy.verdict import Cause

MAX_LINES, MAX_LINE, MAX_CHARACTERS = 1000, 1000, 400_000
"""Of a text, from its end, and of each line."""

# --- Lines: what launchers, ranks and loggers put in front of them, and whether they are remarks ---

TRACEBACK = "Traceback (most recent call last):"
_HEAD = re.compile(r"Traceback \(most recent call last\):(?: \(RANK \d{1,9}\))?\s*$")
_CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_WHO = re.compile(
    r"\[(?:rank|default)\d{1,7}\]: ?|\[[Rr]ank \d{1,7}\] (?=Trace)|\[\d{1,7},\d{1,7}\]<std(?:out|err)>: ?|"
    r"\d{1,7}: |\([A-Za-z_]\w{0,60} pid=[^)]{1,80}\) ?|\((?:raylet|autoscaler|pid=\d{1,9})[^)]{0,60}\) ?|"
    r"[a-z][a-z-]{0,30}\d[\w-]{0,30}: |\w{3} \w{3} +\d{1,2} [\d:]{8} \d{4}\[\d{1,7}\]<std(?:out|err)>: ?"
)
"""A rank, a node or an actor, as torch, torchrun, srun, mpirun, Ray, vLLM and DeepSpeed mark lines."""

_WHEN = re.compile(
    r"\[\d{4}-\d\d-\d\d[T ][\d:]{8}[^\]]{0,40}\] ?|"
    r"\d{4}-\d\d-\d\d[T ][\d:]{8}[.,]?\d{0,9}(?:Z|[+-]\d\d:?\d\d)?[ :|-]{0,4}|"
    r"\d\d[-/]\d\d(?:[-/]\d{4})? [\d:]{8} (?:- )?|[A-Z][a-z]{2} +\d{1,2} [\d:]{8} [\w.-]{1,60} |kernel: |"
    r"\[[ \d]{0,8}\d\.\d{1,9}\] ?|\[\d{1,9}\] (?=\[)|\[[A-Z][a-z]{2} [^\]]{5,40}\] |\[?[\w/]{1,60}\.py:\d{1,6}\] ?|"
    r"\[[\w./]{1,60}:\d{1,6}:\w{1,60}\] |[A-Za-z][\w.]{0,40} - (?=[A-Z]{4,8} - )|"
    r" {0,2}\| (?=\d{4}-|[A-Z]{4,8}\b|\S{1,40}:\d)"
)
"""Times, and where in a program it was said."""

_LEVEL = re.compile(
    r"\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\]?(?: *[|:-] *| +)"
    r"(?:(?![\w.]*(?:Error|Exception|Interrupt)\b)[\w.<>]{1,60}(?::[\w<>]{1,60}:\d{1,6})?(?: - |: ?| \| ))?"
)
_QUIET = frozenset({"DEBUG", "INFO"})
_REMARK = re.compile(
    r"^\[?[IW]\d{3,4} |^\[[IW] |^[^\n]{0,200}?(?:Warning: |\bNCCL INFO\b)|[Rr]etry loop|Trying to resume"
)
"""Remarks of a library, after any exception as well: "destroy_process_group() was not called" is no reason."""

_GROUP = re.compile(r"^[ +|]*\| ?")  # the frame that Python draws around the members of an ExceptionGroup
_FRAME = re.compile(r'\s+File "|\s+[\^~+]+(?:\s|$)|[│╭╰❱]')
_JSON = re.compile(r'\s*"message": "(.*)",?$')
_STEP = re.compile(r"\b(?:step|epoch|iter(?:ation)?)\b", re.IGNORECASE)
_PROGRESS = re.compile(r"\d ?(?:it/s|s/it|[MG]B/s)\b|resuming normal operation")
"""What a program prints while it is well: an error before it was dealt with."""

_MARK = r"^.{0,200}?slurmft rank \d+: "
_MARKED = re.compile(_MARK)
_MAY_BE_OURS = re.compile(r"slurmft|keeper: |hint: ")
_OURS = re.compile(rf"{_MARK}|^slurmft: |^slurmft \d\d:\d\d:\d\d [A-Z]+ |^keeper: |^ {{2}}hint: ")
"""slurmft's own log lines, under any formatter: its reports of handled errors look like the errors themselves. Each
line that it logs in a worker begins like this (``worker.session``), right behind a colour or a bracket of the
formatter."""

_OUR_EXCEPTION = re.compile(r"^slurmft\.errors\.\w+: ")
"""No symptom either; those that it was raised from may be one."""


def _stripped(line: str) -> tuple[str, str, bool]:
    """Who says it, the words, and whether it is a remark; marks may stand one behind the other."""
    who, is_remark = "", False
    for _ in range(6):
        if (match := _WHO.match(line)) is not None:
            who += match[0]
        elif (match := _LEVEL.match(line)) is not None:
            is_remark = is_remark or match[1] in _QUIET
        elif (match := _WHEN.match(line)) is None:
            break
        line = line[match.end() :]
    return who, line, is_remark or _REMARK.search(line) is not None


# --- Failures: exceptions with what they were raised from, and single messages ---


@dataclass(slots=True)
class _Failure:
    """Words that may name a reason: an exception's, newest link first, or a message's."""

    at: int
    """Its line."""

    who: str
    links: list[list[str]] = field(default_factory=lambda: [[]])
    is_exception: bool = True


class _Reading:
    """A text, line by line; processes may speak in turns, each under its own mark."""

    def __init__(self) -> None:
        self._found: list[_Failure] = []
        self._current: dict[str, _Failure] = {}
        self._quoting: set[str] = set()
        """Who has just shown a frame, so that a line of source follows."""

        self._chained: set[str] = set()
        self._went_on: dict[str, int] = {}

    def failures(self) -> list[_Failure]:
        """All of them, oldest first, without those after which the same process went on: its data may be spoilt even
        so."""
        after = self._went_on
        return [each for each in self._found if each.at >= after.get(each.who, -1) or _of_failure(each) is _CORRUPTION]

    def take(self, at: int, line: str) -> None:
        """The next line."""
        who, words, is_remark = _stripped(line)
        if (quoted := _JSON.match(words)) is not None:
            words = quoted[1]
        is_source = who in self._quoting and words[:1].isspace()
        self._quoting.discard(who)
        if _HEAD.search(words):
            self._begin(at, who)
        elif _CHAIN.match(words):
            self._chained.add(who)
        elif _FRAME.match(words):
            self._quoting.add(who)
        elif words.strip() and not is_source:
            self._say(at, who, words, is_remark=is_remark)

    def _begin(self, at: int, who: str) -> None:
        if who in self._current and who in self._chained:
            self._current[who].links.insert(0, [])
        else:
            self._current[who] = _Failure(at, who)
            self._found.append(self._current[who])
        self._chained.discard(who)

    def _say(self, at: int, who: str, words: str, *, is_remark: bool) -> None:
        here = self._current.get(who)
        is_first = here is not None and not here.links[0]  # an exception's own line, whatever it looks like
        if not is_first and _is_progress(words):
            self._went_on[who] = at
            self._current.pop(who, None)
        elif is_remark and not is_first:
            return
        elif here is None:
            self._found.append(_Failure(at, who, [[words.strip()]], is_exception=False))
        elif not words[:1].isspace() or _GROUP.match(words):
            here.links[0].append(_GROUP.sub("", words).strip())


def _failures(text: str) -> list[_Failure]:
    reading = _Reading()
    for at, line in enumerate(_lines(text)):
        reading.take(at, line)
    return reading.failures()


def _is_progress(words: str) -> bool:
    has_loss = "loss" in words.lower() and _STEP.search(words) is not None
    return (has_loss or _PROGRESS.search(words) is not None) and _meaning(words) is None


def _lines(text: str) -> list[str]:
    """The newest lines, without our own."""
    lines = [_COLOUR.sub("", line[:MAX_LINE]) for line in text[-MAX_CHARACTERS:].splitlines()[-MAX_LINES:]]
    return [line for line in lines if not (_MAY_BE_OURS.search(line) and _OURS.match(_stripped(line)[1]))]


# --- What they mean ---

_STRICT = [(each, list(each.parts())) for each in SIGNATURES if not each.is_loose]
_LOOSE = [(each, list(each.parts())) for each in SIGNATURES if each.is_loose]
_CORRUPTION = SIGNATURES[0]
_OWN = next(each for each in SIGNATURES if each.is_loose)
MAX_LOOSE = 20
"""Lines of an exception in which people's words are looked for."""


def _fits(words: str, parts: Sequence[re.Pattern[str]]) -> bool:
    at = 0
    for part in parts:
        found = part.match(words) if part.pattern.startswith("^") else part.search(words, at)
        if found is None:
            return False
        at = found.end()
    return True


@functools.lru_cache(maxsize=4096)
def _meaning(words: str) -> Signature | None:
    if _OUR_EXCEPTION.match(words):
        return None
    return next((row for row, patterns in _STRICT if any(_fits(words, parts) for parts in patterns)), None)


def _loose_meaning(words: str) -> Signature | None:
    return next((row for row, patterns in _LOOSE if any(_fits(words, parts) for parts in patterns)), None)


def _of_failure(failure: _Failure) -> Signature | None:
    """By its newest link that names a reason; what NCCL warns of beside an exception is none of the other ranks'."""
    last = None
    for link in failure.links:
        rows = [row for words in link if (row := _meaning(words)) is not None
                and not (failure.is_exception and row.is_echo and "NCCL WARN" in words)]  # fmt: skip
        if rows:
            last = min(rows, key=SIGNATURES.index)
            if last.strength > 0:
                break
    return last


def signature_of(text: str, *, loosely: bool = False) -> Signature | None:
    """The signature of what ended the program that has printed ``text``; None when none is recognized.

    The newest failure counts, unless it is one that a peer's failure looks like too and an earlier one is not. Hardware
    that has spoilt data counts wherever it is found: later failures only show its consequences. Of an exception, its
    own words count first, those of what it was raised from after them.

    Args:
        loosely: people's words in an exception, or in a text of one line, count where nothing else is recognized.
    """
    failures = _failures(text)
    if any(each.is_exception for each in failures):  # NCCL's warnings are reasons only where there is no exception
        failures = [each for each in failures if each.is_exception or not _is_nccls_remark(each.links[0][0])]
    best: Signature | None = None
    at = _Failure(0, "")
    for failure in reversed(failures):
        row = _of_failure(failure)
        if row is _CORRUPTION:
            return row
        if row is not None and (best is None or row.strength > best.strength):
            best, at = row, failure
    if best is not None and best.is_echo and (own := _own_error(failures, at)) is not None:
        best = own if loosely else None
    if best is not None or not loosely:
        return best
    named = [
        words
        for each in reversed(failures)
        if each.is_exception or len(failures) == 1
        for link in each.links
        for words in link[:MAX_LOOSE]
    ]
    return next(filter(None, map(_loose_meaning, named)), None)


def _own_error(failures: Sequence[_Failure], echo: _Failure) -> Signature | None:
    """The error of another process's program, before what may be its echo; None where there was none."""
    others = [each for each in failures if each.is_exception and each.who != echo.who and each.at < echo.at]
    rows = [_loose_meaning(link[0]) for each in others for link in each.links[:1] if link]
    return next((row for row in rows if row is _OWN), None)


def _is_nccls_remark(words: str) -> bool:
    return "NCCL WARN" in words and (row := _meaning(words)) is not None and row.is_echo


def cause_of_text(text: str) -> Cause | None:
    """The likely cause of a verdict on a rank that has left ``text``; None when it shows none that has rules of its
    own."""
    return verdict_cause(signature_of(text))


def verdict_cause(row: Signature | None) -> Cause | None:
    """As ``cause_of_text``, of a signature that was found; people's words are too weak for a verdict."""
    return None if row is None or row.is_loose or row.cause is Cause.WORKER_ERROR else row.cause


_FRAMES = re.compile(r'^[ +|]*(File ".+", line \d+)', re.MULTILINE)
_EXCEPTION = re.compile(r"^[ +|]*(\w[\w.]*)(?::.*)?$", re.MULTILINE)
_CHILD = re.compile(r"^\s*exitcode\s*:\s*(\d+) \(pid", re.MULTILINE)


def codes_of_children(text: str) -> frozenset[int]:
    """Exit codes of workers as torchrun's ``ChildFailedError`` lists them; it always ends with 1 itself."""
    return frozenset(int(code) for code in _CHILD.findall(text)) if "ChildFailedError" in text else frozenset()


def exceptions_in(text: str) -> list[list[str]]:
    """The lines of each exception's own words, oldest first; those of messages where there is no exception."""
    failures = _failures(text)
    chosen = [each for each in failures if each.is_exception] or failures
    return [link for each in chosen for link in reversed(each.links) if link]


def last_words(text: str) -> str:
    """The line that names the newest exception in ``text``, or its last line; empty when there is none."""
    if TRACEBACK in text and (exceptions := exceptions_in(text)):
        return exceptions[-1][0][:500]
    lines = [line.strip() for line in _lines(text) if line.strip()]
    return lines[-1][:500] if lines else ""


def bug_of(traceback: str) -> str:
    """Kind and innermost line of an exception that another try would only repeat; empty where it may pass with time or
    on other hardware, or where that cannot be seen."""
    frames = list(_FRAMES.finditer(traceback))
    words = _EXCEPTION.search(traceback, frames[-1].end()) if frames else None
    row = signature_of(traceback, loosely=True)
    if words is None or (row is not None and row.remedy is not Remedy.STOP):
        return ""
    return f"{words[1]} in {frames[-1][1]}"


def without_own_lines(log: str) -> str:
    """The log of a worker without what slurmft has logged there, such as an exception that it has dealt with."""
    return "\n".join(line for line in log.splitlines() if not _MARKED.match(line))


def end_of(text: str, *, lines: int = 20, characters: int = 2000) -> str:
    """The end of ``text``, short enough for a journal."""
    return "\n".join(text.strip().splitlines()[-lines:])[-characters:]
