"""``slurmft doctor``: tables of configurations and what is said of them; programs on PATH stand in for Slurm."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.operations import site as diagnosing
from slurmft.operations.site import try_folder
from slurmft.policy.site import (
    AdminFacts,
    FolderFacts,
    Level,
    PartitionFacts,
    Wishes,
    exit_code,
    judge_clocks,
    judge_cluster,
    judge_federation,
    judge_folder,
    judge_partitions,
    judge_permissions,
    requeue_delay_s,
    seconds_of,
)
from slurmft.scheduler.slurm import parse_configuration
from slurmft.system.processes import user_name

OK, NOTE, WARNING, PROBLEM = Level
GOOD = {
    "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "KillWait": "30 sec", "JobRequeue": "1",
    "ProctrackType": "proctrack/cgroup", "SlurmdTimeout": "300 sec", "MinJobAge": "300 sec",
    "AccountingStorageType": "accounting_storage/slurmdbd", "RequeueExit": "(null)", "RequeueExitHold": "(null)",
}  # fmt: skip


def levels(conf: dict[str, str], wishes: Wishes | None = None) -> dict[str, Level]:
    return {each.check: each.level for each in judge_cluster(conf, wishes or Wishes())}


def test_a_federation_is_named():
    assert not list(judge_federation(""))
    (found,) = judge_federation("everywhere")
    assert (found.level, "everywhere" in found.text) == (WARNING, True)


def test_of_a_good_cluster_there_is_nothing_to_do():
    assert {name: level for name, level in levels(GOOD).items() if level is not OK} == {"requeue delay": NOTE}


@of_each(
    key__value__check__level=[
        ("KillWait", "1 sec", "KillWait", WARNING),
        ("JobRequeue", "0", "requeue", NOTE),
        ("ProctrackType", "proctrack/pgid", "proctrack", WARNING),
        ("ProctrackType", "proctrack/linuxproc", "proctrack", OK),
        ("PrivateData", "jobs,nodes", "PrivateData", NOTE),
        ("SlurmdTimeout", "0 sec", "SlurmdTimeout", WARNING),
        ("SlurmdTimeout", "3600 sec", "SlurmdTimeout", WARNING),
        ("AccountingStorageType", "accounting_storage/none", "accounting", WARNING),
        ("AccountingStorageType", "(null)", "accounting", WARNING),
        ("RequeueExitHold", "1-20", "exit codes", PROBLEM),
        ("RequeueExit", "16", "exit codes", WARNING),
        ("RequeueExit", "1-3,90-95", "exit codes", WARNING),
        ("MinJobAge", "2 sec", "MinJobAge", NOTE),
        ("AuthInfo", "cred_expire=5", "requeue delay", OK),
        ("PreemptType", "preempt/none", "preemption", OK),
        ("Prolog", "/etc/slurm/prolog", "Prolog", NOTE),
        ("Prolog[0]", "/etc/slurm/prolog.d/*", "Prolog", NOTE),
    ]
)
def test_what_is_said_of_a_setting(key, value, check, level):
    assert levels(GOOD | {key: value})[check] is level


def test_of_a_prolog_that_holds_no_job_nothing_is_to_be_done():
    site = GOOD | {"Prolog": "/p", "SchedulerParameters": "bf_interval=30,nohold_on_prolog_fail"}
    assert levels(site)["Prolog"] is OK
    assert "Prolog" not in levels(GOOD | {"Prolog": "(null)"})


def test_of_what_is_not_known_nothing_is_said():
    assert levels({}) == {}
    assert levels({"KillWait": "much", "SlurmdTimeout": ""}, Wishes(requeue=False)) == {
        "requeue": WARNING, "requeue delay": NOTE,
    }  # fmt: skip


@of_each(
    mode__grace_s__continue_by__level=[
        ("REQUEUE", 120.0, "auto", OK),
        ("REQUEUE", 0.0, "auto", WARNING),
        ("REQUEUE", 2.0, "auto", WARNING),
        ("REQUEUE", None, "auto", NOTE),
        ("GANG,REQUEUE", 60.0, "auto", OK),
        ("CANCEL", 120.0, "auto", WARNING),
        ("CANCEL", 120.0, "requeue", PROBLEM),
        ("GANG,SUSPEND", 0.0, "auto", OK),
        ("OFF", 0.0, "auto", OK),
        ("", 120.0, "auto", OK),
    ]
)
def test_what_is_said_of_a_partition(mode, grace_s, continue_by, level):
    known = {"p": PartitionFacts(name="p", preempt_mode=mode, grace_s=grace_s)}
    (found,) = judge_partitions(GOOD, known, ["p"], Wishes(continue_by=continue_by))
    assert found.level is level
    assert bool(found.remedy) is (level in (WARNING, PROBLEM))


def test_a_partition_must_exist():
    known = {"p": PartitionFacts(name="p")}
    assert [each.level for each in judge_partitions(GOOD, known, ["p"], Wishes(partitions=("q", "p")))] == [
        PROBLEM,
        NOTE,
    ]
    assert [each.level for each in judge_partitions(GOOD, known, [], Wishes())] == [PROBLEM]
    nobody = GOOD | {"PreemptType": "preempt/none"}
    assert list(judge_partitions(nobody, known, ["p"], Wishes())) == []
    by_qos = GOOD | {"PreemptType": "preempt/qos"}
    assert [each.level for each in judge_partitions(by_qos, known, ["p"], Wishes())] == [NOTE]


@of_each(
    facts__expected=[
        ({}, [OK, OK]),
        ({"flock": "Function not implemented"}, [OK, NOTE]),
        ({"took_s": 3.0}, [WARNING, OK]),
        ({"exclusive": False}, [PROBLEM, OK]),
        ({"renames": False}, [PROBLEM, OK]),
        ({"error": "Read-only file system"}, [PROBLEM]),
    ]
)
def test_what_is_said_of_a_folder(facts, expected):
    assert [each.level for each in judge_folder(FolderFacts(path="/x", **facts))] == expected


def test_clocks_and_permissions():
    assert [each.level for each in judge_clocks({"a": 0.2, "b": -30.0, "c": 400.0})] == [OK, WARNING, PROBLEM]
    found = [judge_permissions(AdminFacts(may_drain=may, why="")).level for may in (True, False, None)]
    assert found == [OK, NOTE, NOTE]


@pytest.mark.parametrize(
    ("conf", "seconds"),
    [
        ({}, 121.0),
        ({"AuthInfo": "socket=/run/x,cred_expire=30"}, 31.0),
        ({"SchedulerParameters": "bf_interval=1,requeue_delay=0"}, 0.0),
    ],
)
def test_the_delay_of_a_requeue(conf, seconds):
    assert requeue_delay_s(conf) == seconds


@given(st.dictionaries(st.sampled_from([*sorted(GOOD), "AuthInfo", "SchedulerParameters"]), st.text()), st.booleans())
def test_no_configuration_raises_anything(conf, requeue):
    found = list(judge_cluster(conf, Wishes(requeue=requeue)))
    known = {"p": PartitionFacts(name="p", preempt_mode=conf.get("PreemptMode", ""))}
    found += judge_partitions(conf, known, ["p"], Wishes())
    assert exit_code(found) in (0, 1, 2)
    assert seconds_of(conf.get("KillWait", "")) is None or conf["KillWait"].strip()[0].isdecimal()


def test_a_real_folder_is_tried_and_left_as_it_was(tmp_path):
    facts = try_folder(tmp_path / "not" / "there" / "yet")
    assert (facts.path, facts.error, facts.exclusive, facts.renames) == (str(tmp_path), "", True, True)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_a_filesystem_that_takes_nothing_is_told():
    assert try_folder(Path("/proc/self")).error


def test_the_keys_of_a_configuration():
    text = "Configuration data as of 1700000000\nKillWait                = 30 sec\nAuthInfo  = (null)\nEmpty   = \n"
    assert parse_configuration(text) == {"KillWait": "30 sec", "AuthInfo": "(null)", "Empty": "", "as of": "1700000000"}


def run_doctor(folder: Path, scontrol: str, *options: str) -> subprocess.CompletedProcess[str]:
    stubs = folder / "bin"
    stubs.mkdir()
    for name, body in (("scontrol", scontrol), ("sbatch", "exit 1"), ("sacctmgr", "exit 1")):
        if body:
            (stubs / name).write_text(f"#!/bin/bash\n{body}\n")
            (stubs / name).chmod(0o755)
    (folder / "slurm.conf").write_text("ClusterName=x\n")
    environment = os.environ | {"PATH": f"{stubs}:/bin", "SLURM_CONF": str(folder / "slurm.conf")}
    argv = [sys.executable, "-P", "-m", "slurmft", "doctor", *options]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=60, cwd=folder, env=environment, check=False
    )  # fmt: skip


def test_a_slurm_that_does_not_answer_is_told_and_the_folder_is_looked_at_all_the_same(tmp_path):
    result = run_doctor(tmp_path, 'echo "Unable to contact slurm controller" >&2; exit 1')
    assert result.returncode == 75
    assert "PROBLEM  Slurm: Slurm did not answer" in result.stdout
    assert "OK       run folder: " in result.stdout


def test_the_findings_for_scripts(tmp_path):
    conf = "echo 'Configuration data as of '$(date +%s); echo 'ClusterName = x'; echo 'KillWait = 1 sec'"
    partition = "echo 'PartitionName=p Default=YES GraceTime=0 PreemptMode=REQUEUE'"
    result = run_doctor(tmp_path, f"[[ $* == *partition ]] && {partition} || {{ {conf}; }}", "--json")
    found = json.loads(result.stdout)
    assert (found["format"], found["exit_code"], result.returncode) == (1, 1, 1)
    told = {each["check"]: each["level"] for each in found["findings"]}
    assert (told["KillWait"], told["partition p"]) == ("warning", "warning")


def test_a_user_without_a_name_is_a_number(monkeypatch):
    """In many containers the process's user id has no entry in passwd; LOGNAME may say something else."""
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setattr("os.getuid", lambda: 54321)
    assert user_name() == "54321"


@pytest.mark.parametrize(
    ("storage", "answer", "may_drain", "why"),
    [
        ("slurmdbd", "Operator", True, "admin level Operator in the accounting"),
        ("slurmdbd", "None", False, "admin level None in the accounting"),
        ("slurmdbd", "", False, "the accounting does not know the user"),
        ("slurmdbd", SlurmUnavailable("sacctmgr did not answer"), None, "did not answer: sacctmgr did not answer"),
        ("none", SlurmError("no accounting"), None, "without accounting"),
    ],
)  # fmt: skip
def test_what_the_accounting_tells_of_permissions(monkeypatch, storage, answer, may_drain, why):
    def admin_level(user: str) -> str:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(diagnosing.slurm, "admin_level", admin_level)
    monkeypatch.setattr("os.getuid", lambda: 54321)
    found = diagnosing._permissions({"AccountingStorageType": f"accounting_storage/{storage}"})
    assert found.may_drain is may_drain and why in found.why
    assert ("without accounting" in found.why) is (storage == "none")
