"""Valid values of sbatch's options, as far as they do not depend on a site.

A wrong value costs a second on the login node, and does not wait for sbatch: `--dry-run` refuses it as well.
"""

from __future__ import annotations

import re
from typing import Any

from slurmft.policy.plain_values import CONTROL

MAX_NUMBER = 2**32 - 3
"""Slurm counts in 32 bits; its highest values mean "not given" and "without limit"."""

MAX_NAME = 1024

_PART = r"[0-9]{1,9}"
_SIXTIETHS = r"[0-5]?[0-9]"  # Slurm takes 1:99:99 for 2:40:39, but it is a typo
_LIMIT = rf"{_PART}(:{_SIXTIETHS}){{0,2}}|{_PART}-{_PART}(:{_SIXTIETHS}){{0,2}}|-1|infinite|unlimited|partition_limit"
_CLOCK = r"([01]?[0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9])?[ ]?([ap]m)?"
_MONTH, _DAY_OF_MONTH = "(0?[1-9]|1[0-2])", "(0?[1-9]|[12][0-9]|3[01])"
_SHORT_DATE = r"(0[1-9]|1[0-2])(0[1-9]|[12][0-9]|3[01])([0-9]{2})?"
_DATE = rf"[0-9]{{4}}-{_MONTH}-{_DAY_OF_MONTH}|{_SHORT_DATE}|{_MONTH}[./]{_DAY_OF_MONTH}([./][0-9]{{2,4}})?"
_DAY = rf"today|tomorrow|{_DATE}"
_HOUR = rf"midnight|noon|elevenses|fika|teatime|{_CLOCK}"
_UNIT = r"seconds?|minutes?|hours?|days?|weeks?"
_MOMENT = rf"now([+-]{_PART}[ ]?({_UNIT})?)?|({_DAY})([T \-]({_HOUR}))?|({_HOUR})([ ]({_DAY}))?|uptime[+-]?{_PART}"
_NAME = r"(?![-.]+$)(?!-)[^\s/\\'\"`$;&|<>()\[\]{}*?!,]+"
_NAMES = rf"{_NAME}(,{_NAME})*"
_SIZE = r"[0-9]{1,15}[kmgt]?b?"
_COUNTS = rf"([a-z][\w.+-]*:)?{_PART}(,([a-z][\w.+-]*:)?{_PART})*"

_FORMS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("time", "time-min"), (_LIMIT, 'minutes, "H:MM:SS" or "D-HH:MM:SS"')),
    **dict.fromkeys(("begin", "deadline"), (_MOMENT, "a time, such as 18:00, 2030-01-31T18:00 or now+1hour")),
    **dict.fromkeys(("partition",), (_NAMES, "names, with commas between them")),
    **dict.fromkeys(("account", "qos", "reservation"), (_NAMES, "a name")),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu", "tmp"), (_SIZE, "a size, such as 500M or 64G")),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"),
                    (_COUNTS, "a number, or type:number")),
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "mincpus", "ntasks-per-core", "ntasks-per-gpu",
                     "ntasks-per-socket", "threads-per-core", "cores-per-socket", "sockets-per-node"),
                    (_PART, "a number")),
}  # fmt: skip
_NAMED = frozenset({"partition", "account", "qos", "reservation", "job-name"})
_MAY_BE_NEGATIVE = frozenset({"nice", "time", "time-min"})


def unusable_value(option: str, value: Any) -> str:
    """Why ``value`` cannot be that of sbatch's long option ``option``; empty when it may be."""
    if isinstance(value, bool) or value is None:
        return ""
    text = str(value) if not isinstance(value, int) or abs(value) <= 10**18 else ""
    if isinstance(value, int) and (abs(value) > MAX_NUMBER or (value < 0 and option not in _MAY_BE_NEGATIVE)):
        return f"{text or 'a number of more than 18 digits'} is not a number that Slurm accepts"
    if not text.strip() and option in _FORMS.keys() | _NAMED:
        return "it is empty"
    if CONTROL.search(text):
        return f"{text[:80]!r} holds a line break or control character"
    if option in _NAMED and len(text) > MAX_NAME:
        return f"{text[:40]!r}... is a name of {len(text)} characters; at most {MAX_NAME}"
    if option in ("partition", "account", "qos", "reservation"):
        fits = re.fullmatch(_NAMES, text) is not None
    else:  # compiled only when such an option is given
        flags = re.IGNORECASE | re.ASCII
        fits = option not in _FORMS or re.fullmatch(_FORMS[option][0], text.strip(), flags) is not None
    return "" if fits else f"{text[:80]!r} is not {_FORMS[option][1]}"
