"""The options of sbatch, as the help of several versions lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurmft.policy.sbatch import FLAGS, OWNED_OPTIONS, SBATCH_OPTIONS
from slurmft.scheduler.parsing import NOT_FOR_A_RUN, HelpedOptions, parse_sbatch_help

RECORDED = Path(__file__).parents[2] / "data" / "slurm"


@pytest.mark.parametrize(
    ("version", "count"), [("22.05", 85), ("23.11", 87), ("24.11", 91), ("25.11", 92), ("26.05", 93)]
)
def test_our_list_has_every_option_of_these_versions(version: str, count: int) -> None:
    helped = parse_sbatch_help((RECORDED / version / "sbatch-help.txt").read_text())
    assert len(helped.names) == count
    assert helped.names <= SBATCH_OPTIONS | OWNED_OPTIONS.keys()
    assert not helped.names & NOT_FOR_A_RUN
    # these are described without a value, or with one that may be left out: we ask for one
    lenient = {"container", "container-id", "export", "oom-kill-step", "resv-ports"}
    assert {"exclusive", "contiguous", "spread-job"} <= helped.flags <= FLAGS | OWNED_OPTIONS.keys() | lenient
    assert not helped.flags & {"partition", "mem", "account", "time"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("      --of-a-plugin=text      what it is\n", HelpedOptions(frozenset({"of-a-plugin"}), frozenset())),
        ("  -Q, --very-quiet            no words\n", HelpedOptions(*[frozenset({"very-quiet"})] * 2)),
        ("      --maybe[=value]         \n", HelpedOptions(frozenset({"maybe"}), frozenset({"maybe"}))),
        ("                              see --not-described=here\n", HelpedOptions(frozenset(), frozenset())),
        ("error: --is-not an option", HelpedOptions(frozenset(), frozenset())),
        ("", HelpedOptions(frozenset(), frozenset())),
    ],
)  # fmt: skip
def test_what_counts_as_an_option(text: str, expected: HelpedOptions) -> None:
    assert parse_sbatch_help(text) == expected
