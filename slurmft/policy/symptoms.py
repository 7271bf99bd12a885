"""From the text of an exception, or of a program's last lines, to its likely cause."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slurmft.policy.verdict import Cause

_SYMPTOMS: Sequence[tuple[Cause, str]] = (
    (
        Cause.DATA_CORRUPTION,  # hardware that reports spoilt data itself
        r"uncorrectable (ECC|NVLink) error(?!s)|ecc error encountered|cudaErrorECCUncorrectable",
    ),
    (
        Cause.DEVICE_OUT_OF_MEMORY,
        r"\bcuda\.OutOfMemoryError|\btorch\.OutOfMemoryError|^OutOfMemoryError|(CUDA|HIP|XPU|MPS backend) out of memory"
        r"|(CUDA|HIP) error: out of memory|CU(DA|BLAS|DNN|SPARSE|SOLVER|FFT)\w*_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY"
        r"|[Cc]uda failure (\d+ )?'out of memory'|RESOURCE_EXHAUSTED: Out of memory",
    ),
    (
        Cause.HOST_OUT_OF_MEMORY,
        r"^(\w+\.)*_?(Array|Arrow)?MemoryError\b|DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc"
        r"|^OSError: \[Errno 12\]|Cannot allocate memory|out of shared memory|insufficient shared memory"
        r"|oom[-_]kill event|OOM Killed",
    ),
    (
        Cause.COMMUNICATION_ERROR,
        r"\bDist(Backend|Network|Store|Queue\w*)Error|\bNCCL (error|communicator)|\bnccl\w*Error\b|NCCL WARN"
        r"|Watchdog caught collective operation timeout|ProcessGroup(NCCL|Gloo|MPI|UCC)\b"
        r"|\bgloo/transport/|gloo::|\bGloo connect"
        r"|Connection closed by peer|Timed out waiting (\d+ ?ms )?for (send|recv|operation|buf)"
        r"|(TCPStore|c10d|rendezvous|socket).*(timed out|timeout)|client socket has timed out"
        r"|^(\w+\.)*(ConnectionResetError|BrokenPipeError|ConnectionRefusedError|ConnectionAbortedError)\b"
        r"|(Connection reset by peer|Broken pipe|failed to recv, got 0 bytes)"
        r"|collective\w* .*(timed out|timeout)|[Tt]imed out waiting \d+ ?ms",
    ),
)
_PATTERNS = [(cause, re.compile(pattern)) for cause, pattern in _SYMPTOMS]
_CORRUPTION = dict(_PATTERNS)[Cause.DATA_CORRUPTION]

_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = re.compile(
    r"^(Traceback \(most recent call last\):|During handling of the above exception|"
    r"The above exception was the direct cause)"
)
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]: ?")  # torch's excepthook, and torchrun's logs
_GROUP = re.compile(r"^[ +|-]*\| ?")  # the frame that Python draws around the members of an ExceptionGroup
_REMARK = re.compile(r"^\[?[IW]\d{4} |^\[[IW] |^.{0,200}Warning: |^.{0,200}\bNCCL INFO\b")
"""Remarks of a library, after any exception as well: "destroy_process_group() was not called" is no reason."""

_MARK = r"^.{0,200}?slurmft rank \d+: "
_MARKED = re.compile(_MARK)
_OURS = re.compile(rf"{_MARK}|^slurmft: |^slurmft \d\d:\d\d:\d\d [A-Z]+ |^keeper: |^ {{2}}hint: ")
"""slurmft's own log lines, under any formatter: its reports of handled errors look like the errors themselves. Each
line that it logs in a worker begins like this (``worker.session``), right behind a colour or a bracket of the
formatter."""

_OUR_EXCEPTION = re.compile(r"^slurmft\.errors\.\w+: ")
"""No symptom either; those that it was raised from may be one."""

_NCCLS_REMARK = re.compile(r"^.{0,200}\bNCCL WARN\b")
"""That may be a reason, where there is not an exception."""

_FRAME = re.compile(r'^[ +|]*(File ".+", line \d+)', re.MULTILINE)
_EXCEPTION = re.compile(r"^[ +|]*(\w[\w.]*)(?::.*)?$", re.MULTILINE)
_MAY_PASS = re.compile(
    r"OSError|IOError|FileNotFound|FileExists|Permission|Interrupt|Connection|HTTP|SSL|time-?d?\s?out|timeout|tempora"
    r"|unavailable|in use|CUDA|cuDNN|cuBLAS|\bHIP\b|NCCL|gloo|\bdevice|memory|FloatingPoint|\bnan\b|\binf\b|finite",
    re.IGNORECASE,
)
_CHILD = re.compile(r"^\s*exitcode\s*:\s*(\d+) \(pid", re.MULTILINE)
MAX_LINES, MAX_LINE = 400, 1000
"""Of a text, and of each line: patterns look for one word after another, which takes long in endless lines."""


def cause_of_text(text: str) -> Cause | None:
    """The likely cause of the exceptions in ``text``; None when none is recognized.

    The newest exception counts first, and those that it was raised from after it. Lines of source code are ignored: the
    name of an exception in an ``except`` clause is not an exception. So are remarks.
    """
    exceptions = exceptions_in(text)
    if _TRACEBACK in text:
        exceptions = [[line for line in each if not _NCCLS_REMARK.match(line)] for each in exceptions]
    for exception in reversed(exceptions):
        for cause, pattern in _PATTERNS:
            if any(pattern.search(line) for line in exception if not _OUR_EXCEPTION.match(line)):
                return cause
    return None


def cause_of_log(text: str) -> Cause | None:
    """As ``cause_of_text``, for a log with any content: the newest recognized line counts.

    Except for hardware that has spoilt data: later failures only show its consequences.
    """
    lines = [line for line in _lines(text) if not (_REMARK.match(_PREFIX.sub("", line)) or _OUR_EXCEPTION.match(line))]
    if any(_CORRUPTION.search(line) for line in lines):
        return Cause.DATA_CORRUPTION
    for line in reversed(lines):
        for cause, pattern in _PATTERNS:
            if pattern.search(line):
                return cause
    return None


def codes_of_children(text: str) -> frozenset[int]:
    """Exit codes of workers as torchrun's ``ChildFailedError`` lists them; it always ends with 1 itself."""
    return frozenset(int(code) for code in _CHILD.findall(text)) if "ChildFailedError" in text else frozenset()


def exceptions_in(text: str) -> list[list[str]]:
    """The lines of each exception's own words, oldest first; all lines as one where there is no traceback."""
    lines = [_GROUP.sub("", _PREFIX.sub("", line)) for line in _lines(text)]
    found: list[list[str]] = [[]]
    for line in lines:
        if _CHAIN.match(line):
            found.append([])
        elif line[:1].strip() and not line.startswith("^") and not _REMARK.match(line):
            found[-1].append(line)
    return [exception for exception in found if exception]


def last_words(text: str) -> str:
    """The line that names the newest exception in ``text``, or its last line; empty when there is none."""
    exceptions = exceptions_in(text)
    if exceptions and _TRACEBACK in text:
        return exceptions[-1][0].strip()[:500]
    lines = [line.strip() for line in _lines(text) if line.strip()]
    return lines[-1][:500] if lines else ""


def bug_of(traceback: str) -> str:
    """Kind and innermost line of an exception that another try would only repeat; empty where it may pass with time or
    on other hardware, or where that cannot be seen."""
    frames = list(_FRAME.finditer(traceback))
    words = _EXCEPTION.search(traceback, frames[-1].end()) if frames else None
    if words is None or _MAY_PASS.search(words[0]):
        return ""
    return f"{words[1]} in {frames[-1][1]}"


def without_own_lines(log: str) -> str:
    """The log of a worker without what slurmft has logged there, such as an exception that it has dealt with."""
    return "\n".join(line for line in log.splitlines() if not _MARKED.match(_PREFIX.sub("", line)))


def _lines(text: str) -> list[str]:
    """The newest lines, without our own."""
    lines = [line[:MAX_LINE] for line in text.splitlines()[-MAX_LINES:]]
    return [line for line in lines if not _OURS.match(_PREFIX.sub("", line))]


def end_of(text: str, *, lines: int = 20, characters: int = 2000) -> str:
    """The end of ``text``, short enough for a journal."""
    return "\n".join(text.strip().splitlines()[-lines:])[-characters:]
