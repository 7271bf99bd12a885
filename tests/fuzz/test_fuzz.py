"""Every verb over damaged, odd and hostile files and arguments.

No traceback, no exit code 70, no hang, no control characters, and nothing of another user is changed, executed or
submitted. A failure prints the seed; ``SLURMFT_FUZZ=SEED:1 pytest tests/fuzz`` runs that input again.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fuzz_campaign
import pytest
from fuzz_campaign import Outcome, run_input
from fuzz_state import leave_state, odd_state
from fuzz_world import LOST, World, build

QUICK = len(fuzz_campaign.VERBS)
"""Inputs in `make test`: every verb once. What is drawn by lot beyond that is for `make soak`."""

STATES = 200

LONG = 20_000
PARTS = 20


@pytest.fixture(autouse=True)
def any_number():
    """A file may hold any number; its readers keep Python's own limit, and so do the tests that come after."""
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, World]:
    """The world as it is before an input, and where inputs run: its files name the second place."""
    folder = tmp_path_factory.mktemp("fuzz")
    for each in (folder, *list(folder.parents)[:2]):
        each.chmod(0o755)  # an ordinary user passes through
    moved = build(folder / "built").move_to(folder / "world")
    moved.folder.rename(folder / "pristine")
    return World(folder / "pristine"), World(folder / "world")


def _campaign(worlds: tuple[World, World], first: int, count: int) -> None:
    apart = ["unshare", "--mount", "--propagation", "private"] if os.getuid() == 0 else []
    script = str(Path(__file__).with_name("fuzz_campaign.py"))
    argv = [*apart, sys.executable, script, *(str(world.folder) for world in worlds), str(first), str(count)]
    result = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, timeout=3 * count + 60)
    found = [Outcome(**json.loads(line)) for line in result.stdout.splitlines()]
    assert not found, f"{len(found)} of {count} inputs:\n" + "\n".join(map(str, found[:40]))


@pytest.mark.timeout(560)
def test_inputs_of_every_kind_are_answered_or_refused(worlds):
    start, _, count = os.environ.get("SLURMFT_FUZZ", f"0:{QUICK}").partition(":")
    _campaign(worlds, int(start), int(count or 1))


def _odd_states(worlds: tuple[World, World], first: int, count: int) -> None:
    _, world = worlds
    if not (world.runs / LOST / "live.json").exists():
        shutil.rmtree(world.folder, ignore_errors=True)
        shutil.copytree(worlds[0].folder, world.folder, symlinks=True)
        leave_state(world.runs / LOST)
    wrong = [each for seed in range(first, first + count) for each in odd_state(seed, world)]
    assert not wrong, f"{len(wrong)} of {count} inputs:\n" + "\n".join(wrong[:20])


@pytest.mark.long
@pytest.mark.timeout(560)
def test_odd_values_in_files_of_state_are_read_or_refused(worlds):
    _odd_states(worlds, 0, STATES)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_odd_values_in_files_of_state(worlds, part):
    _odd_states(worlds, 1_000_000 + part * 500, 500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_more(worlds, part):
    each = LONG // PARTS
    _campaign(worlds, 1_000_000 + part * each, each)


def test_the_campaign_finds_what_it_looks_for(worlds, monkeypatch):
    """A verb that fails, hangs, prints escapes or executes something is seen: else a green campaign says nothing."""

    monkeypatch.setattr(fuzz_campaign, "VERBS", ["status"])

    def with_verb(verb: object) -> list[str]:
        monkeypatch.setattr(fuzz_campaign.command_line, "main", verb)
        return run_input(1, *worlds).wrong

    def prints(text: str) -> object:
        return lambda: (print(text), exit(0))

    assert "a traceback" in with_verb(prints("Traceback (most recent call last)"))
    assert any("control character" in each for each in with_verb(prints("\x1b[2J")))
    assert "exit code 70" in with_verb(lambda: exit(70))
    assert "something was executed" in with_verb(lambda: (Path("executed").touch(), exit(0)))
    monkeypatch.setattr(fuzz_campaign, "LIMIT_S", 0.2)
    assert any("hung" in each for each in with_verb(lambda: __import__("time").sleep(30)))
