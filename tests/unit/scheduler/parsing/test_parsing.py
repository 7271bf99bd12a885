"""What Slurm printed, as values: recorded lines and the awkward ones."""

from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.job_identity import is_same_job
from slurmft.policy.judge import StepWords, TaskEnd
from slurmft.policy.sbatch import FLAGS, OWNED_OPTIONS, SBATCH_OPTIONS
from slurmft.scheduler.parsing import (
    ALIVE,
    JOB_FORMAT,
    MAX_ENDS,
    MAX_NODES,
    NOT_FOR_A_RUN,
    WAITING,
    HelpedOptions,
    JobEnding,
    NamedNodes,
    current_job,
    ended_tasks,
    expand_hostlist,
    is_held_by_launch,
    job_pairs,
    parse_duration_s,
    parse_ending,
    parse_identity,
    parse_jobs,
    parse_named,
    parse_pairs,
    parse_sbatch_help,
    parse_srun_lines,
    parse_time,
    refusal_hint,
    scrubbed,
    why_held,
    why_never,
)
from slurmft.scheduler.slurm import parse_facts, parse_nodes

NO_DATABASE = settings(database=None, deadline=None)
RUNNING = "1|RUNNING|None|n1|n1|2026-11-20T15:28:07|2026-11-20T15:31:07|3:00|low|1000"
COMPLETING = "1|COMPLETING|None|n1|n1|2026-11-20T15:28:07|2026-11-20T15:28:09|3:00|low|1000"


def unix(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# srun


def test_srun_says_which_tasks_have_ended():
    text = (
        "srun: error: n2: task 1: Terminated\n"
        "slurmstepd: error: *** STEP 47.0 ON n1 CANCELLED AT 2026-11-20T15:28:07 ***\n"
        "srun: error: gpu-07: tasks 4-7,9: Exited with exit code 16\n"
        "srun: launch/slurm: launch_p_step_launch: StepId=47.0 aborted before step completely launched.\n"
        "a program's own: srun: error: n3: task 1: Killed\n"
    )
    assert ended_tasks(text) == [("n2", "Terminated"), ("gpu-07", "Exited with exit code 16")]
    assert ended_tasks("") == []


# squeue


def test_a_running_job():
    (job,) = parse_jobs(RUNNING + "\n")
    assert (job.job_id, job.state, job.nodes, job.batch_host, job.partition) == ("1", "RUNNING", "n1", "n1", "low")
    assert (job.start, job.end, job.limit_s) == (unix("2026-11-20T15:28:07"), unix("2026-11-20T15:31:07"), 180.0)
    assert job.identity.user == 1000
    assert job.alive
    assert not job.waiting


def test_a_heterogeneous_job_is_its_first_component():
    second = RUNNING.replace("1|RUNNING", "1+1|RUNNING", 1).replace("n1", "n2")
    (job,) = parse_jobs("\n".join([second, RUNNING.replace("1|RUNNING", "1+0|RUNNING", 1)]))
    assert (job.job_id, job.nodes, job.batch_host) == ("1", "n1,n2", "n1")
    shown = "JobId={} HetJobId=1 JobName=a UserId=u(1000) GroupId=g(1000) JobState={} BatchHost={} Command=/x"
    pairs = job_pairs("\n".join([shown.format(1, "RUNNING", "n1"), shown.format(2, "PREEMPTED", "n2")]))
    assert (pairs["JobState"], pairs["BatchHost"]) == ("RUNNING", "n1")


def test_a_completing_job_ends_before_its_limit():
    (job,) = parse_jobs(COMPLETING)
    assert job.alive
    assert job.end is not None
    assert job.start is not None
    assert job.end - job.start == 2.0


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(
            "7|PENDING|BeginTime||n/a|1763650000|1763650180|3:00|low",
            {"nodes": "", "batch_host": "", "start": 1763650000.0, "end": 1763650180.0, "waiting": True},
            id="epoch times, no nodes yet",
        ),
        pytest.param(
            "7|PENDING|Priority||n/a|N/A|N/A|UNLIMITED|low,high",
            {"start": None, "end": None, "limit_s": None, "partition": "low,high"},
            id="no start, no limit, two partitions",
        ),
        pytest.param(
            "12_4|RUNNING|None|gpu[01-03,7]|gpu01|1763650000|NONE|1-00:00:00|low",
            {"job_id": "12_4", "nodes": "gpu[01-03,7]", "end": None, "limit_s": 86400.0},
            id="array task on several nodes",
        ),
        pytest.param(
            "12_[5-9%2]|PENDING|JobArrayTaskLimit||n/a|N/A|N/A|30:00|low",
            {"job_id": "12_[5-9%2]", "limit_s": 1800.0},
            id="the waiting rest of an array",
        ),
        pytest.param(
            "9|PENDING|(launch failed requeued held)||(null)|Unknown|Unknown|INVALID|low",
            {"reason": "(launch failed requeued held)", "batch_host": "", "start": None, "limit_s": None},
            id="held, everything unknown",
        ),
        pytest.param(
            "  9|RUNNING|None|n1|n1|1763650000|1763650180|NOT_SET|low  ", {"job_id": "9", "limit_s": None}, id="padded"
        ),
        pytest.param(
            "9|REQUEUE_HOLD|x||n/a|N/A|N/A|5|low", {"waiting": True, "alive": False, "limit_s": 300.0}, id="hold"
        ),
        pytest.param("9|TIMEOUT|x|n1|n1|1|2|5|low", {"waiting": False, "alive": False}, id="over"),
        pytest.param("9|UNKNOWN_TO_US|x|n1|n1|1|2|5|low", {"waiting": False, "alive": False}, id="a state of tomorrow"),
    ],
)
def test_an_odd_job(line, expected):
    (job,) = parse_jobs(f"{line.rstrip()}|1000  ")
    assert {name: getattr(job, name) for name in expected} == expected


def test_banners_and_errors_between_the_jobs_are_skipped():
    text = "\n".join(
        [
            "*** Welcome | maintenance on Monday ***", "slurm_load_jobs error: Invalid job id specified", "", RUNNING,
            "squeue: warning: something | something", "1|2|3", "\x1b[0m", COMPLETING.replace("1|", "2|", 1),
            RUNNING + "|one too many",
        ]
    )  # fmt: skip
    assert [job.job_id for job in parse_jobs(text)] == ["1", "2"]
    assert parse_jobs("") == []


def test_a_format_field_for_every_fact():
    assert len(JOB_FORMAT.split("|")) == 10


def test_no_state_is_both_alive_and_waiting():
    assert frozenset() == ALIVE & WAITING


@NO_DATABASE
@given(st.text(alphabet="0123456789|:-TN/A\n ", max_size=200))
def test_no_output_of_squeue_breaks_the_parser(text):
    parse_jobs(text)


# times


@of_each(text__seconds=[
        ("3:00", 180), ("0:05", 5), ("30", 1800), ("1:00:00", 3600), ("1-00:00:00", 86400), ("1-2", 93600),
        ("1-02:03", 93780), ("1-02:03:04", 93784), ("365-00:00:00", 31_536_000), ("00:00", 0), ("120:00", 7200),
        *dict.fromkeys(["UNLIMITED", "INVALID", "Partition_Limit", "N/A", "", "-1", "1:2:3:4", "1.5", "3m"]).items(),
        ("-", None),
    ])  # fmt: skip
def test_a_duration(text, seconds):
    assert parse_duration_s(text) == seconds


@of_each(text__time=[
        ("1763650000", 1763650000.0), ("2026-11-20T15:28:07", unix("2026-11-20T15:28:07")),
        ("2026-11-20T15:28:07+00:00", 1795188487.0),
        *dict.fromkeys(["", "N/A", "NONE", "None", "(null)", "Unknown", "n/a", "Tomorr 15:00", "15:28", "-1"]).items(),
    ])  # fmt: skip
def test_a_time(text, time):
    assert parse_time(text) == time


# scontrol


def scontrol(state: str, restarts: int = 0, **fields: str) -> str:
    """One line of ``scontrol -o show job``, as recorded in the lab."""
    facts = {
        "TimeLimit": "00:03:00", "StartTime": "2026-11-20T15:28:07", "EndTime": "2026-11-20T15:28:09",
        "PreemptEligibleTime": "2026-11-20T15:28:07", "PreemptTime": "None",
    } | fields  # fmt: skip
    rest = " ".join(f"{key}={value}" for key, value in facts.items())
    return (
        f"JobId=2 JobName=job.sh UserId=ann(1001) GroupId=ann(1001) MCS_label=N/A Priority=1 Nice=0 Account=(null) "
        f"QOS=(null) JobState={state} Reason=None Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 Reboot=0 "
        f"ExitCode=0:0 RunTime=00:00:02 {rest} NtasksPerN:B:S:C=0:0:*:* TRES=cpu=1,node=1 Command=/home/ann/job.sh\n"
    )


LIMIT_REACHED = {"StartTime": "2026-11-20T15:28:18", "EndTime": "2026-11-20T15:31:18"}


@of_each(
    state__code__ending=[
        ("COMPLETING", "0:0", JobEnding.CANCELLED),
        ("COMPLETING", "0:15", JobEnding.CANCELLED),
        ("COMPLETING", "143:0", JobEnding.CANCELLED),
        ("COMPLETING", "0:9", JobEnding.BATCH_LOST),
        ("FAILED", "137:0", JobEnding.BATCH_LOST),
        ("CANCELLED", "0:9", JobEnding.CANCELLED),
    ]
)
def test_the_end_of_the_batch_step_is_told_by_its_exit_code(state, code, ending):
    """A shell that waits for us obeys the TERM of a scancel at once; what was killed did not obey."""
    assert parse_ending(scontrol(state).replace("ExitCode=0:0", f"ExitCode={code}"), 0) is ending


@pytest.mark.parametrize(
    ("end", "grace_s", "ending"),
    [
        ("15:28:28", 20.0, JobEnding.PREEMPTED),
        ("15:28:27", 20.0, JobEnding.PREEMPTED),
        ("15:28:12", 20.0, JobEnding.CANCELLED),
        ("15:28:08", 0.0, JobEnding.PREEMPTED),
        ("15:28:12", 0.0, JobEnding.PREEMPTED),
    ],
    ids=["at the end of the grace", "clocks round", "in the middle of it", "no grace", "later than no grace"],
)
def test_an_end_within_the_grace_of_a_preemption_is_a_scancel(end, grace_s, ending):
    text = scontrol("COMPLETING", PreemptTime="2026-11-20T15:28:08", EndTime=f"2026-11-20T{end}")
    assert parse_ending(text, 0, grace_s=grace_s) is ending


@pytest.mark.parametrize(
    ("text", "restart", "ending"),
    [
        pytest.param(scontrol("RUNNING"), 0, JobEnding.NOT_ENDING, id="running"),
        pytest.param(scontrol("RUNNING", 3), 3, JobEnding.NOT_ENDING, id="running after requeues"),
        pytest.param(scontrol("RUNNING", 1), 0, JobEnding.REQUEUED, id="a later start runs"),
        pytest.param(scontrol("SUSPENDED"), 0, JobEnding.NOT_ENDING, id="suspended"),
        pytest.param(scontrol("CONFIGURING"), 0, JobEnding.NOT_ENDING, id="nodes are booting"),
        pytest.param(scontrol("COMPLETING", 1, **LIMIT_REACHED), 0, JobEnding.REQUEUED, id="requeue, recorded"),
        pytest.param(scontrol("PENDING", 1), 0, JobEnding.REQUEUED, id="requeued and pending already"),
        pytest.param(scontrol("REQUEUE_HOLD", 1), 0, JobEnding.REQUEUED, id="requeued and held"),
        pytest.param(scontrol("COMPLETING", 2), 1, JobEnding.REQUEUED, id="requeued a second time"),
        pytest.param(scontrol("COMPLETING"), 0, JobEnding.CANCELLED, id="scancel, recorded"),
        pytest.param(scontrol("COMPLETING", 2), 2, JobEnding.CANCELLED, id="scancel of a second restart"),
        pytest.param(scontrol("CANCELLED"), 0, JobEnding.CANCELLED, id="cancelled"),
        pytest.param(
            scontrol("COMPLETING", PreemptTime="2026-11-20T15:28:08"), 0, JobEnding.PREEMPTED, id="being preempted"
        ),
        pytest.param(scontrol("PREEMPTED"), 0, JobEnding.PREEMPTED, id="preempted"),
        pytest.param(
            scontrol("COMPLETING", 1, PreemptTime="2026-11-20T15:28:08"), 0, JobEnding.REQUEUED,
            id="preempted and requeued by Slurm",
        ),
        pytest.param(scontrol("COMPLETING", **LIMIT_REACHED), 0, JobEnding.TIME_LIMIT, id="time limit, completing"),
        pytest.param(scontrol("TIMEOUT"), 0, JobEnding.TIME_LIMIT, id="time limit"),
        pytest.param(
            scontrol("COMPLETING").replace("Reason=None", "Reason=TimeLimit"), 0, JobEnding.TIME_LIMIT,
            id="end of its reservation",
        ),
        pytest.param(
            scontrol("COMPLETING", StartTime="1763650000", EndTime="1763650180"), 0, JobEnding.TIME_LIMIT,
            id="time limit in epoch seconds",
        ),
        pytest.param(
            scontrol("COMPLETING", TimeLimit="UNLIMITED", **LIMIT_REACHED), 0, JobEnding.CANCELLED, id="no limit"
        ),
        pytest.param("", 0, JobEnding.NOT_ENDING, id="nothing"),
        pytest.param("*** maintenance on Monday ***\n", 0, JobEnding.NOT_ENDING, id="a banner"),
        pytest.param("No jobs in the system\n", 0, JobEnding.NOT_ENDING, id="no jobs"),
        pytest.param(scontrol("RUNNING").strip() + " Comment=try Restarts=9 JobState=CANCELLED", 0,
                     JobEnding.NOT_ENDING, id="a comment with equals signs"),
        pytest.param(scontrol("RUNNING").replace("job.sh ", "job.sh JobState=CANCELLED "), 0, JobEnding.NOT_ENDING,
                     id="a name with an equals sign"),
    ],
)  # fmt: skip
def test_why_a_job_is_ending(text, restart, ending):
    assert parse_ending(text, restart) is ending


@pytest.mark.parametrize("state", ["NODE_FAIL", "BOOT_FAIL"])
def test_a_lost_node_is_not_a_cancellation(state):
    assert parse_ending(scontrol(state), 0) is not JobEnding.CANCELLED


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", {}),
        ("A=1 B=2", {"A": "1", "B": "2"}),
        ("TRES=cpu=1,node=2 C=", {"TRES": "cpu=1,node=2", "C": ""}),
        ("JobName=my job X=1 banner", {"JobName": "my", "X": "1"}),
        ("PartitionName=low\n   PreemptMode=REQUEUE\n", {"PartitionName": "low", "PreemptMode": "REQUEUE"}),
    ],
)
def test_pairs(text, pairs):
    assert parse_pairs(text) == pairs


# hostlists


@of_each(
    text__hosts=[
        ("", []),
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("n[008-011]", ["n008", "n009", "n010", "n011"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("rack[1-2]node[01-02]", ["rack1node01", "rack1node02", "rack2node01", "rack2node02"]),
        ("n[1-2]-ib,m[3]", ["n1-ib", "n2-ib", "m3"]),
        ("a[1,3,5-6]b", ["a1b", "a3b", "a5b", "a6b"]),
        ("n1.cluster.org", ["n1.cluster.org"]),
        ("n[1-2],", ["n1", "n2"]),
    ]
)
def test_a_hostlist(text, hosts):
    assert expand_hostlist(text) == hosts


def test_a_huge_range_keeps_its_padding():
    hosts = expand_hostlist("n[0001-10000]")
    assert (len(hosts), hosts[0], hosts[998], hosts[-1]) == (10_000, "n0001", "n0999", "n10000")


@of_each(text=["n[1", "n1]", "n[1-[2]]", "]n[", "n[a-b]", "n[1-]", "n[0-99999999999]"])
def test_what_is_no_hostlist(text):
    with pytest.raises(ValueError, match=r"hostlist|invalid literal|too many hosts"):
        expand_hostlist(text)


@NO_DATABASE
@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "r1n"]), st.integers(0, 99), st.integers(0, 20), st.integers(1, 4))
    )
)
def test_ranges_of_any_padding(parts):
    text = ",".join(f"{prefix}[{first:0{width}d}-{first + more:0{width}d}]" for prefix, first, more, width in parts)
    expected = [
        f"{prefix}{number:0{width}d}"
        for prefix, first, more, width in parts
        for number in range(first, first + more + 1)
    ]
    assert expand_hostlist(text) == expected


# environment

INSIDE = {
    "SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "low",
}  # fmt: skip


def test_the_job_around_us():
    job = current_job(INSIDE)
    assert job is not None
    assert (job.job_id, job.restart, job.nodes, job.node_count, job.partition) == ("77", 2, "n[1-2]", 2, "low")


HET = INSIDE | {
    "SLURM_HET_SIZE": "2", "SLURM_JOB_PARTITION_HET_GROUP_0": "low", "SLURM_JOB_PARTITION_HET_GROUP_1": "cpu",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]", "SLURM_JOB_NODELIST_HET_GROUP_1": "c[07-09]",
}  # fmt: skip


def test_a_heterogeneous_job_has_the_nodes_of_each_component():
    job = current_job(HET)
    assert job is not None
    assert (job.job_id, job.nodes, job.node_count, job.partition) == ("77", "n[1-2]", 2, "low,cpu")
    assert job.components == ("n[1-2]", "c[07-09]")


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": ""}, {"SLURM_CONF": "/etc/slurm.conf"}], ids=str)
def test_outside_of_a_job(environment):
    assert current_job(environment) is None


def test_a_first_start_has_no_restart_count():
    job = current_job({"SLURM_JOB_ID": "77"})
    assert job is not None
    assert (job.restart, job.node_count) == (0, 1)


def test_an_array_task_is_named_as_commands_take_it():
    job = current_job(INSIDE | {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "4"})
    assert job is not None
    assert job.job_id == "70_4"


def test_what_describes_the_parent_does_not_leak_into_a_successor():
    kept = {
        "PATH": "/bin", "HOME": "/h", "SLURM_CONF": "/etc/slurm.conf", "SLURMFT_RUNS": "/runs",
        "NCCL_DEBUG": "INFO", "MY_SLURM_NOTE": "x", "RANKING": "x",
    }  # fmt: skip
    leaking = INSIDE | {
        "SLURMD_NODENAME": "n1", "SLURM_CPUS_PER_TASK": "4", "SLURMFT_GENERATION": "3", "SLURMFT_PAGE": "/dev/shm/x",
        "SUBMITIT_EXECUTOR": "slurm", "PMI_RANK": "0", "PMIX_RANK": "0", "TORCHELASTIC_RUN_ID": "x",
        "SRUN_DEBUG": "3",
    }  # fmt: skip
    assert scrubbed(kept | leaking) == kept


@pytest.mark.parametrize("name", ["SBATCH_PARTITION", "SBATCH_EXCLUDE"])
def test_what_the_user_set_for_sbatch_stays(name):
    assert scrubbed({name: "x"}) == {name: "x"}


@of_each(reason=["PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "BadConstraints", "InvalidAccount",
     "InvalidQOS", "DependencyNeverSatisfied", "QOSMaxNodePerJobLimit", "AssocMaxCpuPerJobLimit"])  # fmt: skip
def test_reasons_that_time_does_not_mend(reason):
    assert why_never(reason)


@of_each(reason=["None", "", "Priority", "Resources", "BeginTime", "Dependency", "JobHeldUser", "JobHeldAdmin",
     "Licenses", "QOSGrpNodeLimit", "ReqNodeNotAvail, UnavailableNodes:n1", "PartitionDown", "AssocGrpCpuLimit",
     "QOSMaxJobsPerUserLimit"])  # fmt: skip
def test_reasons_that_pass(reason):
    assert why_never(reason) == ""


@of_each(
    reason__by_launch__words=[
        ("launch failed requeued held", True, "slurmft requeue --rescue"),
        ("launch_failed_requeued_held", True, "slurmft requeue --rescue"),
        ("(user env retrieval failed requeued held)", True, "slurmft requeue --rescue"),
        ("launch failure limit exceeded requeued held", True, "slurmft requeue --rescue"),
        ("job requeued in held state", False, "it is held; scontrol release"),
        ("JobHeldUser", False, "it is held; scontrol release"),
        ("JobHeldAdmin", False, "an administrator holds it"),
        ("Reservation course was deleted", False, "its reservation is gone; scontrol release"),
        ("BeginTime", False, ""),
        ("Priority", False, ""),
    ]
)
def test_who_holds_a_job(reason, by_launch, words):
    assert is_held_by_launch(reason) is by_launch
    assert why_held(reason) == "" if not words else words in why_held(reason)


@of_each(words__key=[
        ("Batch job submission failed: Invalid node name specified", "exclude or nodelist"),
        ("invalid partition specified: x Batch job submission failed: Invalid partition name specified", "partition"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account"),
        ("Batch job submission failed: Invalid qos specification", "slurm.qos"),
        ("Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)", "slurm.time"),
        ("Invalid --time specification", "slurm.time"),
        ("Invalid generic resource (gres) specification", "slurm.gpus_per_node"),
        ("Batch job submission failed: Invalid feature specification", "slurm.constraint"),
        ("Memory specification can not be satisfied Batch job submission failed: Requested node configuration is not "
         "available", "slurm.mem"),
        ("CPU count per node can not be satisfied Batch job submission failed: Requested node configuration is not "
         "available", "slurm.cpus_per_task"),
        ("Batch job submission failed: Node count specification invalid", "nodes"),
        ("Batch job submission failed: Requested node configuration is not available", "nodes"),
        ("Batch job submission failed: Requested reservation is invalid", "reservation"),
    ])  # fmt: skip
def test_what_sbatch_refuses_has_a_hint_that_names_the_key(words, key):
    assert key in refusal_hint(words)


def test_words_that_nobody_knows_have_no_hint():
    assert refusal_hint("the site's own plugin says no") == ""


FORGED = "x UserId=root(0) GroupId=root(0) JobState=COMPLETED Restarts=7 Partition=other"


@pytest.mark.parametrize("text", [
    scontrol("RUNNING", restarts=1).replace("JobName=job.sh", f"JobName={FORGED}"),
    scontrol("RUNNING", restarts=1).replace("job.sh\n", f"job.sh WorkDir=/home/ann Comment={FORGED}\n"),
])  # fmt: skip
def test_a_users_text_that_looks_like_fields_is_not_believed(text):
    assert job_pairs(text)["JobState"] == "RUNNING"
    found = parse_identity(text)
    assert found.user in (None, 1001)
    assert found.restarts == 1
    assert found.script == "/home/ann/job.sh"


@pytest.mark.parametrize("hostlist", ["n[1-3", "n]1", "n[a]", "n[3-x]"])
def test_a_hostlist_that_is_none_names_no_node(hostlist):
    text = scontrol("PENDING", ReqNodeList=hostlist, ExcNodeList="n7")
    assert parse_named(text) == NamedNodes(excluded=frozenset({"n7"}), required=parse_named(text).required)


# --- Output of 22.05.8, 23.11.4, 24.11.5, 25.11.2 and 26.05.5, recorded on clusters of one shape: each says the same


VERSIONS = pytest.mark.parametrize("version", ["22.05", "23.11", "24.11", "25.11", "26.05"])


def recorded(version: str, name: str) -> str:
    return (Path(__file__).parents[2] / "data" / "slurm" / version / f"{name}.txt").read_text()


@VERSIONS
def test_jobs_that_run_wait_and_are_held(version: str) -> None:
    found = {job.job_id: job for job in parse_jobs(recorded(version, "squeue"))}
    running, waiting, held = (found[number] for number in "123")
    assert (running.state, running.nodes, running.batch_host, running.limit_s) == ("RUNNING", "n[1-2]", "n1", 600)
    assert running.identity.name == "a | b", "the user's text"
    assert running.end - running.start == 600
    assert (waiting.state, waiting.reason, waiting.nodes, waiting.batch_host) == ("PENDING", "BeginTime", "", "")
    assert not why_held(waiting.reason)
    assert why_held(held.reason)
    assert not is_held_by_launch(held.reason)
    for job in found.values():
        assert (job.identity.user, job.identity.script) == (1000, "/home/someone/train.sh")
        assert len(job.identity.submitted) == 1


@VERSIONS
@pytest.mark.parametrize(
    ("name", "restart", "ending"),
    [
        ("job-calm", 0, JobEnding.NOT_ENDING),
        ("job-grace", 0, JobEnding.NOT_ENDING),
        ("job-requeued", 0, JobEnding.REQUEUED),
        ("job-later-start", 0, JobEnding.REQUEUED),
        ("job-later-start", 1, JobEnding.NOT_ENDING),
        ("job-cancelled", 1, JobEnding.CANCELLED),
    ],
)
def test_why_a_job_ends(version: str, name: str, restart: int, ending: JobEnding) -> None:
    assert parse_ending(recorded(version, name), restart, grace_s=20) is ending


@VERSIONS
def test_a_job_is_the_same_one_after_a_requeue_and_names_no_nodes(version: str) -> None:
    """26.05 also shows the line with which it was submitted, between the script and the folder."""
    calm, later = (parse_identity(recorded(version, name)) for name in ("job-calm", "job-later-start"))
    assert (calm.user, calm.name, calm.restarts, later.restarts) == (1000, "meas.sh", 0, 1)
    assert calm.script == "/home/someone/meas.sh"
    assert calm.folder == "/home/someone"
    assert later.submitted > calm.submitted, "a requeue counts as a submission"
    assert is_same_job(calm, later) is not False
    assert not parse_named(recorded(version, "job-calm")).excluded


@VERSIONS
def test_nodes_and_why_one_is_drained(version: str) -> None:
    nodes = parse_nodes(recorded(version, "sinfo-nodes"))
    assert {each.partition for each in nodes} == {"low", "nograce", "cancel", "high"}
    assert {each.node for each in nodes if each.usable} == {"n1", "n2"}
    assert {each.partition for each in nodes if each.is_default} == {"low"}
    facts = parse_facts(recorded(version, "sinfo-facts"))
    assert set(facts) == {"n1", "n2", "n3"}
    assert (facts["n3"].state, facts["n3"].reason) == ("DRAINED", "a reason | with a bar")
    assert facts["n3"].since is not None


@VERSIONS
def test_a_job_that_slurm_does_not_know_is_told_in_the_same_words(version: str) -> None:
    assert "Invalid job id specified" in recorded(version, "unknown-job")


# --- The options of sbatch, as the help of several versions lists them ---


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


@of_each(text__expected=[
        ("      --of-a-plugin=text      what it is\n", HelpedOptions(frozenset({"of-a-plugin"}), frozenset())),
        ("  -Q, --very-quiet            no words\n", HelpedOptions(*[frozenset({"very-quiet"})] * 2)),
        ("      --maybe[=value]         \n", HelpedOptions(frozenset({"maybe"}), frozenset({"maybe"}))),
        ("                              see --not-described=here\n", HelpedOptions(frozenset(), frozenset())),
        ("error: --is-not an option", HelpedOptions(frozenset(), frozenset())),
        ("", HelpedOptions(frozenset(), frozenset())),
    ])  # fmt: skip
def test_what_counts_as_an_option(text: str, expected: HelpedOptions) -> None:
    assert parse_sbatch_help(text) == expected


# --- srun's and slurmstepd's lines, as several versions write them ---


STEP = """\
slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-21T17:50:29 ***
srun: error: n2: tasks 4-7: Killed
srun: error: n1: task 0: Exited with exit code 16
srun: error: n1: tasks 1-3: Terminated
srun: error: n3: task 8: Segmentation fault (core dumped)
srun: launch/slurm: _step_signal: Terminating StepId=12.0
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
a worker wrote this: Exited with exit code 17
srun: error: Node failure on n3
srun: error: n2: tasks 4-7: Killed
"""


def test_a_steps_lines():
    assert parse_srun_lines(STEP) == StepWords(
        ends=(
            TaskEnd(nodes=("n2",), tasks="4-7", word="Killed"),
            TaskEnd(nodes=("n1",), tasks="0", word="Exited", code=16),
            TaskEnd(nodes=("n1",), tasks="1-3", word="Terminated"),
            TaskEnd(nodes=("n3",), tasks="8", word="Segmentation fault"),
        ),
        failed_nodes=("n3",),
    )


LAUNCH = """\
srun: error: Task launch for StepId=1.0 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-23T15:27:21 ***
srun: error: n1: task 0: Killed
"""


def test_a_node_that_cannot_be_reached_at_launch_is_not_its_victim():
    """As 22.05 and 24.11 write it."""
    assert parse_srun_lines(LAUNCH).refused == (("n2", "Communication connection failure"),)


@pytest.mark.parametrize(
    "words", ["Job credential revoked", "Invalid job credential", "Slurmd could not execve job", "Invalid job id"]
)
def test_a_launch_that_fails_for_no_fault_of_the_node(words):
    assert parse_srun_lines(f"srun: error: Task launch for StepId=1.0 failed on node n2: {words}").refused == ()


@of_each(
    line__nodes=[
        ("srun: error: n[1-2,04]: tasks 0-2: Killed", ("n1", "n2", "04")),
        ("srun: error: gpu-[01-03]: tasks 0,2-3: Killed", ("gpu-01", "gpu-02", "gpu-03")),
        ("0: srun: error: n1: task 0: Killed", ("n1",)),
        ("srun: error: n[1: task 0: Killed", ("n[1",)),
        ("srun: error: n[1-999999999]: task 0: Killed", ("n[1-999999999]",)),
        (f"srun: error: n[1-{MAX_NODES}]: task 0: Killed", None),
    ]
)
def test_which_nodes(line, nodes):
    (end,) = parse_srun_lines(line).ends
    if nodes is None:
        assert len(end.nodes) == MAX_NODES
    elif nodes == ("n1", "n2", "04"):
        assert end.nodes == ("n1", "n2", "n04")
    else:
        assert end.nodes == nodes


@of_each(
    line__nodes=[
        (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
            (),
        ),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0 cgroup. Some of your processes may", ()),
        ("slurmstepd: error: Detected 2 oom-kill event(s) in step 7.batch cgroup.", ()),
        ("slurmstepd-n2: error: Detected 1 oom_kill event in StepId=7.0.", ("n2",)),
        ("slurmstepd: error: Exceeded step memory limit at some point.", ()),
        ("srun: error: n2: task 1: Out Of Memory", ("n2",)),
    ]
)
def test_memory(line, nodes):
    words = parse_srun_lines(line)
    assert (words.oom_somewhere, words.oom_nodes) == (True, nodes)
    assert words.oom_on("n2")
    assert words.oom_on("n1") is (nodes == ())


@of_each(
    line=[
        "",
        "srun: error: Unable to create step for job 7: Requested node configuration is not available",
        "srun: error: n1: task 0: ",
        "error: n1: task 0: Killed",
        "he said srun: error: Node failure on n1",
        "my oom_kill event",
        "srun: error: Timed out waiting for job step to complete",
    ]
)
def test_lines_that_say_nothing_of_an_end(line):
    assert parse_srun_lines(line) == StepWords()


def test_endless_output_is_bounded():
    text = "\n".join(f"srun: error: n{number}: task {number}: Killed" for number in range(10_000))
    assert len(parse_srun_lines(text).ends) == MAX_ENDS
    parse_srun_lines("srun: error: n1: task 0: " + " x" * 500_000)


@given(st.lists(st.sampled_from([*STEP.splitlines(), "srun: error: ", "n[1-2", ": task ", "\x00", "oom_kill"])))
def test_any_mixture_is_read(pieces):
    words = parse_srun_lines("\n".join(pieces) + "".join(pieces))
    assert set(words.failed_nodes) <= {"n3"} or "Node failure" in "".join(pieces)
