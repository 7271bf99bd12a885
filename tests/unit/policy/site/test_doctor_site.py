"""What an administrator can set up for all runs, and one run's room: facts in, findings out."""

import os
import pwd
from dataclasses import replace
from pathlib import Path

import pytest
from of_each import of_each

from slurmft.config.run import validate
from slurmft.operations.site import diagnose, newest_size, place
from slurmft.policy.site import (
    HOOKS,
    DrillFacts,
    Level,
    RoomFacts,
    SiteFacts,
    TrustedPath,
    judge_room,
    judge_site,
    passed,
    rows,
)
from slurmft.policy.stop import Preempts

OURS = TrustedPath(path="/opt/slurmft/venv")
CONF = {key: f"/opt/slurmft/bin/{name}" for key, (name, _) in HOOKS.items()}
PROGRAMS = {key: TrustedPath(path=path) for key, path in CONF.items()}
HEALTH = TrustedPath(path="/etc/slurmft/health.yaml")
RESULTS = TrustedPath(path="/shared/health")
GIB = 1 << 30


def site(**changed: object) -> dict[str, Level]:
    facts = {"installation": OURS, "conf": CONF, "programs": PROGRAMS, "health": HEALTH, "results": RESULTS,
             "nodes": ("n1", "n2"), "looked_at": {"n1": 60.0, "n2": 290.0}}  # fmt: skip
    return {each.check: each.level for each in judge_site(SiteFacts(**facts | changed))}  # type: ignore[arg-type]


def run(**changed: object) -> dict[str, Level]:
    facts = {"folder": TrustedPath(path="/shared/runs/first", owner="ann"), "kind": "nfs4", "nodes": 4, "kept": 3,
             "free_bytes": 100 * GIB, "checkpoint_bytes": GIB}  # fmt: skip
    return {each.check: each.level for each in judge_room(RoomFacts(**facts | changed))}  # type: ignore[arg-type]


def test_of_a_good_site_and_run_there_is_nothing_to_do():
    bad = (Level.WARNING, Level.PROBLEM)
    assert not [check for check, level in {**site(), **run()}.items() if level in bad]


OTHERS = TrustedPath(path="/x", changeable_by="every user")
ANNS = TrustedPath(path="/x", owner="ann")


@of_each(
    changed__check__level=[
        ({"conf": {}, "programs": {}, "installation": OTHERS}, "installation", Level.WARNING),
        ({"installation": OTHERS}, "installation", Level.PROBLEM),
        ({"installation": ANNS}, "installation", Level.OK),
        ({"conf": CONF | {"Epilog": "(null)"}}, "Epilog", Level.NOTE),
        ({"conf": CONF | {"Epilog": "/opt/slurmft/bin/slurmft-epilog-of-another"}}, "Epilog", Level.NOTE),
        ({"conf": CONF | {"Epilog": "/etc/one,/opt/slurmft/bin/slurmft-epilog"}}, "Epilog", Level.OK),
        ({"programs": PROGRAMS | {"Epilog": TrustedPath(path="/x", exists=False)}}, "Epilog", Level.NOTE),
        ({"programs": PROGRAMS | {"Epilog": OTHERS}}, "Epilog", Level.PROBLEM),
        ({"programs": PROGRAMS | {"Epilog": ANNS}}, "Epilog", Level.PROBLEM),
        ({"health": TrustedPath(path="/x", exists=False), "results": None}, "health.yaml", Level.NOTE),
        ({"health": OTHERS}, "health.yaml", Level.PROBLEM),
        ({"health": ANNS}, "health.yaml", Level.PROBLEM),
        ({"health_error": "line 3: ..."}, "health.yaml", Level.PROBLEM),
        ({"results": None}, "node results", Level.NOTE),
        ({"results": OTHERS}, "node results", Level.PROBLEM),
        ({"looked_at": {"n1": 60.0}}, "node results", Level.WARNING),
        ({"looked_at": {"n1": 60.0, "n2": 1801.0}}, "node results", Level.WARNING),
    ]
)
def test_what_is_said_of_a_site(changed: dict[str, object], check: str, level: Level):
    assert site(**changed)[check] is level


@of_each(
    changed__check__level=[
        ({"folder": OTHERS}, "run folder's place", Level.WARNING),
        ({"kind": "ext4"}, "run folder's place", Level.NOTE),
        ({"kind": "ext4", "nodes": 1}, "run folder's place", None),
        ({"free_bytes": GIB - 1}, "room for checkpoints", Level.PROBLEM),
        ({"free_bytes": 4 * GIB - 1}, "room for checkpoints", Level.WARNING),
        ({"free_bytes": 4 * GIB}, "room for checkpoints", Level.OK),
        ({"free_bytes": None}, "room for checkpoints", None),
        ({"checkpoint_bytes": 0}, "room for checkpoints", None),
        ({"kept": 1}, "kept checkpoints", Level.WARNING),
    ]
)
def test_what_is_said_of_a_run(changed: dict[str, object], check: str, level: Level | None):
    assert run(**changed).get(check) is level


def test_who_may_change_a_place(tmp_path: Path):
    """Also by a folder above it, and by what a link leads to."""
    me = pwd.getpwuid(os.geteuid()).pw_name
    real, other = tmp_path / "real", tmp_path / "other"
    real.mkdir()
    other.mkdir()
    (real / "program").touch(0o755)
    (other / "link").symlink_to(real / "program")
    assert place(real / "program") == TrustedPath(path=str(real / "program"), owner=me)
    assert not place(tmp_path / "missing").exists
    real.chmod(0o777)
    assert place(real / "program").changeable_by == place(other / "link").changeable_by == "every user"
    real.chmod(0o1777)
    assert place(real / "program").changeable_by == ""
    (real / "program").chmod(0o666)
    assert place(other / "link").changeable_by == "every user"


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
def test_an_owner_of_a_folder_above_may_change_a_place(tmp_path: Path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "program").touch()
    os.chown(folder, 54321, 54321)
    assert place(folder / "program").changeable_by == "user id 54321"


def test_the_room_is_compared_with_the_newest_committed_checkpoint(tmp_path: Path):
    for name, size, is_committed in (("step-00000001.g1.c1", 10, True), ("step-00000002.g1.c2", 100, True),
                                     ("step-00000003.g1.c3", 1000, False)):  # fmt: skip
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(bytes(size))
        if is_committed:
            (folder / "manifest.json").touch()
    given = {"command": ["true"], "run_folder": str(tmp_path), "checkpoint": {"keep_last_n": 5}}
    found = diagnose(validate(given, source="test"), {}, here=tmp_path).findings
    text = next(each.text for each in found if each.check == "room for checkpoints")
    assert text.endswith("a checkpoint has 0.00 GiB") and "GiB free" in text
    assert newest_size(tmp_path / "checkpoints") == 100
    assert newest_size(tmp_path / "missing") == 0


# --- What the table of a drill says, row by row ---


GOOD = DrillFacts(
    how="scancel --signal=TERM", partition="low", preempts=Preempts.BY_PARTITION, preempt_mode="REQUEUE", grace_s=20.0,
    kill_wait_s=5.0, stop_reason="SIGTERM at n1", stop_cause="signalled", world_size=4, marked=4, saved_step=12,
    save_s=0.4, requeued=True, waited_s=2.1, resumed_from=12, workload_needs_s=8.0,
)  # fmt: skip


def test_a_drill_in_which_all_went_well():
    assert [row.passed for row in rows(GOOD)] == [True] * 8
    assert passed(rows(GOOD))


@of_each(
    changes__failed=[
        ({"stop_reason": None}, ["signal", "who got it"]),
        ({"saved_step": None, "resumed_from": 0}, ["save", "resumed"]),
        ({"grace_s": 0.0}, ["grace", "your workload"]),
        ({"grace_s": 3.2}, ["grace", "your workload"]),
        ({"workload_needs_s": 30.0}, ["your workload"]),
        ({"grace_s": None, "workload_needs_s": None}, []),
        ({"preempts": Preempts.NEVER, "grace_s": 0.0}, []),
        ({"preempts": Preempts.BY_QOS, "grace_s": 0.0}, []),
        ({"preempt_mode": "CANCEL"}, ["requeue"]),
        ({"requeued": False, "resubmitted": True}, ["requeue"]),
        ({"requeued": False, "waited_s": None, "resumed_from": None}, ["requeue", "ineligible", "resumed"]),
        ({"waited_s": 121.4}, ["ineligible"]),
        ({"resumed_from": 0}, ["resumed"]),
        ({"save_s": None}, []),
    ]
)
def test_what_fails(changes, failed):
    table = rows(replace(GOOD, **changes))
    assert [row.what for row in table if row.passed is False] == failed
    assert passed(table) is (failed == [])
