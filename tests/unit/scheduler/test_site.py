"""What a site promises its jobs, from recorded output of scontrol."""

import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.config.run import validate
from slurmft.errors import SlurmError, UsageError
from slurmft.operations import submit
from slurmft.policy.stop import KILL_WAIT_S, Finding, Severity
from slurmft.scheduler import slurm
from slurmft.scheduler.slurm import parse_configuration, parse_job_times, parse_limit_s, parse_partitions, parse_site

V22 = (
    "PartitionName=low AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=15 Hidden=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED Nodes=n[1-4] PriorityJobFactor=1 PriorityTier=1 RootOnly=NO ReqResv=NO "
    "OverSubscribe=NO OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=32 TotalNodes=4 "
    "SelectTypeParameters=NONE JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED "
    "TRES=cpu=32,mem=250G,node=4,billing=32\n"
)
V24 = (  # ExclusiveTopo and MaxCPUsPerSocket came with 23.02 and 24.05
    "PartitionName=public-gpu AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=00:02:00 DisableRootJobs=NO ExclusiveUser=NO ExclusiveTopo=NO GraceTime=0 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=2-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=UNLIMITED MaxCPUsPerSocket=UNLIMITED "
    "Nodes=gpu[001-003] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO OverSubscribe=FORCE:1 "
    "OverTimeLimit=NONE PreemptMode=GANG,SUSPEND State=UP TotalCPUs=272 TotalNodes=3 SelectTypeParameters=NONE "
    "JobDefaults=(null) DefMemPerNode=UNLIMITED MaxMemPerNode=UNLIMITED TRES=cpu=266,mem=1500G,node=3,billing=773\n"
)
CONFIGURATION = """\
Configuration data as of 1795197969
AccountingStorageHost   = localhost
KillWait                = 5 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/partition_prio
PreemptExemptTime       = 00:00:00
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at ctl is UP
"""
JOB = (
    "JobId=1 JobName={name} UserId=slurmft-lab(999) GroupId=slurmft-lab(995) MCS_label=N/A Priority=4294901759 "
    "JobState=RUNNING Reason=None Requeue=1 Restarts=0 RunTime=00:00:06 TimeLimit=00:05:00 TimeMin=N/A "
    "SubmitTime=1795198340 EligibleTime=1795198340 StartTime=1795198340 EndTime={end} Deadline=N/A "
    "PreemptEligibleTime=1795198340 PreemptTime={preempted} SuspendTime=None Partition=low "
    "WorkDir=/work StdOut=/dev/null Power= Comment=PreemptTime=77\n"
)


def test_partitions_of_two_versions():
    low, gpu = parse_partitions("a banner\n" + V22 + V24)
    assert (low.name, low.is_default, low.grace_s, low.preempt_mode, low.priority_tier) == (
        "low", True, 15.0, "REQUEUE", 1
    )  # fmt: skip
    assert low.default_limit_s == math.inf
    assert (gpu.name, gpu.is_default, gpu.grace_s, gpu.preempt_mode, gpu.priority_tier) == (
        "public-gpu", False, 0.0, "GANG,SUSPEND", 10
    )  # fmt: skip
    assert gpu.default_limit_s == 120.0


def test_without_a_default_the_longest_limit_holds():
    (partition,) = parse_partitions(V24.replace("DefaultTime=00:02:00", "DefaultTime=NONE"))
    assert partition.default_limit_s == 2 * 86_400.0


def test_a_partition_that_says_little_is_still_one():
    (partition,) = parse_partitions("PartitionName=odd GraceTime=soon\n")
    assert (partition.grace_s, partition.priority_tier, partition.default_limit_s) == (None, None, None)
    assert parse_partitions("No partitions in the system\n") == []


def test_the_cluster():
    site = parse_site(CONFIGURATION)
    assert (site.preempt_type, site.kill_wait_s, site.clock) == ("preempt/partition_prio", 5.0, 1795197969.0)
    for line in ("Epilog                  = /etc/slurm/epilog.sh", "Epilog[0]               = /etc/slurm/epilog.sh"):
        assert parse_site(f"{line}\nEpilogMsgTime           = 2000 usec\n").has_epilog
    nothing = parse_site("")
    assert (nothing.preempt_type, nothing.kill_wait_s, nothing.clock, nothing.has_epilog) == ("", None, None, True)


@of_each(text__seconds=[("10", 600.0), ("0:30", 60.0), ("90:01", 91 * 60.0), ("1:00:00", 3600.0), ("1-0", 86_400.0),
     ("0", math.inf), ("UNLIMITED", math.inf), ("infinite", math.inf), ("-1", math.inf), (" 5 ", 300.0), ("", None),
     ("soon", None)])  # fmt: skip
def test_a_limit_in_the_minutes_slurm_makes_of_it(text, seconds):
    assert parse_limit_s(text) == seconds


def test_the_times_of_a_job_in_its_grace():
    times = parse_job_times(JOB.format(name="x", end=1795198358, preempted=1795198343))
    assert (times.start, times.end, times.limit_s, times.grace_s) == (1795198340.0, 1795198358.0, 300.0, 15.0)


def test_the_users_words_are_no_times():
    times = parse_job_times(JOB.format(name="EndTime=5 PreemptTime=6", end=1795198640, preempted="None"))
    assert (times.end, times.preempted, times.grace_s) == (1795198640.0, None, None)


@given(st.text(alphabet="PartitionName=GraceTime0123456789:- \n=ofKillWait", max_size=200))
def test_no_output_breaks_the_parsers(text):
    parse_partitions(text)
    parse_site(text)
    parse_job_times(text)


# what submit makes of it


@pytest.fixture
def site(monkeypatch) -> dict[str, str]:
    """Answers of scontrol; a missing one is a refusal."""
    answers = {"partition": V22 + V24, "config": CONFIGURATION}

    def run(argv: list[str], *, timeout_s: float) -> str:
        if argv[-1] not in answers:
            raise SlurmError("slurm_load: no")
        return answers[argv[-1]]

    monkeypatch.setattr("slurmft.scheduler.slurm.run", run)
    return answers


def check(tmp_path, options=None, environment=None, **changes) -> list[Finding]:
    config = validate({"command": "x", "run_folder": str(tmp_path / "run")} | changes, source="")
    return submit.check_grace(config, options or {}, environment or {})


def test_the_default_partition_and_its_limit(site, tmp_path):
    (note,) = check(tmp_path)
    assert note.text.endswith("a stop has 15 s at a preemption"), "no limit, so no time limit's signal"


@pytest.mark.parametrize(
    ("options", "environment", "slurm_section"),
    [
        ({"partition": "public-gpu"}, {}, {}),
        ({}, {"SBATCH_PARTITION": "public-gpu"}, {"partition": "low"}),
        ({}, {}, {"partition": "public-gpu"}),
        ({"time": "2"}, {}, {"partition": "low", "time": "60"}),
        ({}, {"SBATCH_TIMELIMIT": "0:02:00"}, {"time": "60"}),
        ({}, {}, {"time": "2:00"}),
    ],
)
def test_partition_and_limit_are_the_ones_sbatch_takes(site, tmp_path, options, environment, slurm_section):
    found = check(tmp_path, options, environment, slurm=slurm_section)
    assert found[0].severity is Severity.WARNING
    assert "the time limit of 120 s is too short" in found[0].text


def test_of_several_partitions_the_worst_counts(site, tmp_path):
    site["partition"] += V22.replace("=low", "=none").replace("GraceTime=15", "GraceTime=0")
    warning, note = check(tmp_path, {"partition": "low,none"})
    assert "partition none leaves no grace" in warning.text
    assert note.text.endswith("0 s at a preemption")


@pytest.mark.parametrize("missing", ["partition", "config"])
def test_slurm_not_answering_is_no_reason_not_to_submit(site, tmp_path, missing):
    del site[missing]
    (note,) = check(tmp_path, slurm={"time": "60"})
    assert note.text.endswith("120 s at the time limit, an unknown time at a preemption")


def test_another_cluster_is_not_judged_by_this_one(site, tmp_path):
    (note,) = check(tmp_path, {"clusters": "far"}, slurm={"partition": "low", "time": "60"})
    assert "an unknown time at a preemption" in note.text


def test_strict_refuses_warnings_and_nothing_else():
    submit.refuse_warnings([Finding(Severity.NOTE, "fine")])
    with pytest.raises(UsageError, match="2 problems"):
        submit.refuse_warnings([Finding(Severity.WARNING, "a"), Finding(Severity.WARNING, "b")])


def test_slurms_clock_and_killwait(site):
    terms = slurm.terms()
    assert terms.clock.at(time.monotonic()) == pytest.approx(1795197969.5, abs=1.0)
    assert terms.kill_wait_s == 5.0
    site["config"] = "Configuration data as of 1795197969\n"
    assert slurm.terms().kill_wait_s == KILL_WAIT_S
    site["config"] = "KillWait = 5 sec\n"
    with pytest.raises(SlurmError, match="what time it is"):
        slurm.terms()


@pytest.mark.parametrize("version", ["22.05", "23.11", "24.11", "25.11", "26.05"])
def test_a_cluster_without_preemption_says_so_in_either_way(version):
    recorded = Path(__file__).parents[1] / "data" / "slurm" / version / "config.txt"
    text = recorded.read_text()
    assert parse_site(text).preempt_type == parse_configuration(text)["PreemptType"] == "preempt/partition_prio"
    for none in ("(null)", "preempt/none"):
        without = text.replace("= preempt/partition_prio", f"= {none}")
        assert parse_site(without).preempt_type == parse_configuration(without)["PreemptType"] == "preempt/none"


@pytest.mark.parametrize("version", ["22.05", "23.11", "24.11", "25.11", "26.05"])
def test_what_each_version_says_of_its_partitions_and_clock(version):
    folder = Path(__file__).parents[1] / "data" / "slurm" / version
    found = {each.name: each for each in parse_partitions((folder / "partitions.txt").read_text())}
    assert {name: (each.grace_s, each.preempt_mode, each.priority_tier) for name, each in found.items()} == {
        "low": (20, "REQUEUE", 1), "nograce": (0, "REQUEUE", 1), "cancel": (20, "CANCEL", 1), "high": (0, "OFF", 10),
    }  # fmt: skip
    assert [name for name, each in found.items() if each.is_default] == ["low"]
    site = parse_site((folder / "config.txt").read_text())
    assert (site.kill_wait_s, site.cluster, site.has_epilog) == (5, "slurmftlab", False)
    assert site.clock is not None
    times = parse_job_times((folder / "job-grace.txt").read_text())
    assert times.preempted is not None
    assert times.end - times.preempted == pytest.approx(20, abs=1)
    assert parse_job_times((folder / "job-later-start.txt").read_text()).preempted is None
