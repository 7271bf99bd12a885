"""Nodes as sinfo shows them, and hostlists in and out."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurmft.scheduler.nodes import compress, expand, is_usable, parse_nodes


@pytest.mark.parametrize(
    "state",
    ["idle", "mixed", "allocated", "completing", "allocated+", "idle~", "idle#", "idle%", "idle@", "idle^", "mixed-",
     "reserved", "planned", "IDLE", "powered_down", "idle!", "rebooted"],
)  # fmt: skip
def test_a_node_that_takes_jobs_sooner_or_later_is_usable(state):
    assert is_usable(state)


@pytest.mark.parametrize(
    "state", ["down", "down*", "drained", "draining", "draining*", "drained~", "idle*", "fail", "failing", "error",
              "unknown", "future", "maint", "idle$", "inval", "blocked", "unknown*", "", "*", " down "],
)  # fmt: skip
def test_a_node_that_does_not_is_not(state):
    assert not is_usable(state)


def test_the_output_of_sinfo_becomes_values():
    text = "n1|low*|idle\nn1|high|idle\nslurm_load_partitions: a warning\n n2|low*|drained*\nn3|a|b|c\n|low*|idle\n"
    found = [(each.node, each.partition, each.is_default, each.usable) for each in parse_nodes(text)]
    assert found == [("n1", "low", True, True), ("n1", "high", False, True), ("n2", "low", True, False)]
    assert parse_nodes("") == []


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n1"], "n1"),
        (["n1", "n3", "n2", "n2"], "n[1-3]"),
        (["n1", "n3"], "n[1,3]"),
        (["n08", "n09", "n10", "n11"], "n[08-11]"),
        (["n8", "n9", "n10", "n11"], "n[8-11]"),
        (["n1", "n01", "n001"], "n[1,01,001]"),
        (["n0"], "n0"),
        (["n0", "n00"], "n[0,00]"),
        (["rack1-blade2", "rack1-blade3", "rack2-blade2"], "rack1-blade[2-3],rack2-blade2"),
        (["n1-ib", "n2-ib"], "n1-ib,n2-ib"),
        (["login", "n1"], "n1,login"),
        (["n12345678901", "n12345678902"], "n12345678901,n12345678902"),
        (["n[1-2]"], "n[1-2]"),
        (["1", "2"], "1,2"),
        (["n099", "n100", "n0099"], "n[099-100,0099]"),
        ([], ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_names_become_a_short_hostlist(names, text):
    assert compress(names) == text


name = st.from_regex(r"[a-z]([a-z]|[0-9]{1,3}|-){0,4}[0-9]{0,11}", fullmatch=True)


@settings(deadline=None, max_examples=150)
@given(st.frozensets(name, max_size=20))
@example(frozenset({"a09", "a10", "a9", "a009", "a99", "a100", "a0", "a00"}))
def test_a_hostlist_stands_for_exactly_its_names(names):
    assert sorted(expand(compress(names))) == sorted(names)
    assert len(compress(names)) <= max(1, len(",".join(names)) + 2 * len(names))


def test_ten_thousand_nodes_are_short_and_fast():
    names = [f"gpu-{rack:02}-{number:03}" for rack in range(20) for number in range(500)]
    began = time.perf_counter()
    text = compress(names)
    assert expand(text) == sorted(names)
    assert time.perf_counter() - began < 2
    assert len(text) < 20 * 20


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3],login", ["n08", "n09", "n10", "n3", "login"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n1,n1,n[1-2]", ["n1", "n2"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        (" n1 , n2 ", ["n1", "n2"]),
        ("", []),
    ],
)
def test_a_hostlist_is_taken_apart(text, names):
    assert expand(text) == names


@pytest.mark.parametrize(
    "text",
    ["n[1-", "n]1[", "n[]", "n[a-b]", "n[1-2", "n[[1]]", "n[3-1]", "n[0-99999999]", "n[1-1000]m[1-1000]o[1-1000]",
     "n[1-99999999999999999999999]", "a;b", "-w", "$(x)", "n[1,]", "n[1--2]", "a\x00b", "n\u0661", "n[\u0661-\u0662]"],
    ids=ascii,
)  # fmt: skip
def test_what_is_no_hostlist_is_refused(text):
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"is not a hostlist|more than|not the name"):
        expand(text)
    assert time.perf_counter() - began < 1
