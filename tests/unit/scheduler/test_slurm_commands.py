"""Running Slurm's commands: small programs on PATH stand in for them, and misbehave."""

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from waiting import slowness

from slurmft.config.run import RunConfig, from_values, validate
from slurmft.errors import SlurmError, SlurmUnavailable, UsageError
from slurmft.policy.job_identity import JobIdentity, OwnJob
from slurmft.scheduler import own_jobs, slurm, submission
from slurmft.scheduler.parsing import Asked, JobRecord, NamedNodes
from slurmft.scheduler.submission import parse_sbatch_options, script_text, submit_to_slurm
from slurmft.storage.run_folder import RunFolder


class Stubs:
    """Programs in a folder that comes first on PATH; each notes its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls"

    def write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(
            f'#!/bin/bash\nprintf "%s\\n" "{name} $*" >> {shlex.quote(str(self.log))}\n{textwrap.dedent(body)}\n'
        )
        path.chmod(0o755)

    def calls(self) -> list[str]:
        return self.log.read_text().removesuffix("\n").split("\n") if self.log.exists() else []


@pytest.fixture
def stubs(tmp_path, monkeypatch) -> Stubs:
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Stubs(folder)


# what the site hides, changes or refuses


def test_where_the_states_of_nodes_are_hidden_the_partitions_name_them(stubs):
    stubs.write("sinfo", 'echo "slurm_load_node: Access/permission denied" >&2; exit 1')
    stubs.write(
        "scontrol",
        """
        echo "PartitionName=low Default=YES GraceTime=9 Nodes=cpu-a,gpu[01-02] PriorityJobFactor=1"
        echo "PartitionName=none Default=NO Nodes=(null) PriorityJobFactor=1"
    """,
    )
    found = slurm.nodes()
    assert [(each.node, each.partition, each.is_default, each.usable) for each in found] == [
        (name, "low", True, True) for name in ("cpu-a", "gpu01", "gpu02")
    ]
    assert not any(each.is_free for each in found), "nobody knows"


def test_a_silent_slurm_names_no_nodes(stubs):
    stubs.write("sinfo", 'echo "Unable to contact slurm controller (connect failure)" >&2; exit 1')
    with pytest.raises(SlurmUnavailable):
        slurm.nodes()
    assert len(stubs.calls()) == 1


@pytest.mark.parametrize(
    ("options", "section", "environment"),
    [
        ({"clusters": "a,b"}, {}, {}),
        ({}, {"clusters": "all"}, {}),
        ({}, {}, {"SLURM_CLUSTERS": "a,b"}),
        ({}, {}, {"SBATCH_CLUSTERS": "ALL"}),
    ],
)
def test_several_clusters_are_refused(stubs, options, section, environment):
    config = validate({"command": ["true"], "run_folder": "/r", "slurm": section}, source="test")
    with pytest.raises(UsageError, match="one of several clusters"):
        submission.wished_cluster(config, options, environment)


def test_in_a_federation_the_cluster_must_be_named(stubs):
    stubs.write("scontrol", 'echo "Federation: fed1"; echo "Self:       mars:10.0.0.1:6817 ID:1 FedState:ACTIVE"')
    config = validate({"command": ["true"], "run_folder": "/r"}, source="test")
    with pytest.raises(UsageError, match="belongs to the federation fed1"):
        submission.wished_cluster(config, {}, {})
    assert submission.wished_cluster(config, {"clusters": "mars"}, {}) == "mars"
    stubs.write("scontrol", "")
    assert submission.wished_cluster(config, {}, {}) == ""


@pytest.mark.parametrize(
    ("partition", "time", "said"),
    [
        ("", "", []),
        ("low", "10", []),
        ("high,low", "0:10:00", []),
        ("high", "10", ["it is in partition low, not high"]),
        ("low", "1:00:00", ["its time limit is 10 minutes, not 1:00:00"]),
        ("low", "UNLIMITED", ["its time limit is 10 minutes, not UNLIMITED"]),
        ("low", "nonsense", []),
    ],
)
def test_what_the_site_has_changed_is_said(partition, time, said):
    record = JobRecord(job_id="7", state="PENDING", reason="None", nodes="", batch_host="", start=None, end=None,
                       limit_s=600.0, partition="low")  # fmt: skip
    assert submission.changed_by_site(record, Asked(partition, time)) == said


# command


def test_the_output_is_returned(stubs):
    stubs.write("squeue", 'echo "1|RUNNING"; echo "a warning" >&2')
    assert slurm.run(["squeue", "-h"]) == "1|RUNNING\n"
    assert stubs.calls() == ["squeue -h"]


def test_arguments_reach_the_command_unchanged(stubs):
    stubs.write("squeue", 'printf "<%s>" "$@"')
    assert slurm.run(["squeue", "a b", "$HOME", "*", "'", ""]) == "<a b><$HOME><*><'><>"


def test_times_are_asked_for_in_unix_seconds_and_input_is_empty(stubs):
    stubs.write("squeue", 'echo "$SLURM_TIME_FORMAT"; cat')
    assert slurm.run(["squeue"]) == "%s\n"


def test_an_environment_of_its_own(stubs, monkeypatch):
    monkeypatch.setenv("LEAK", "1")
    stubs.write("sbatch", 'echo "[$LEAK]"')
    assert slurm.run(["sbatch"], environment={"PATH": os.environ["PATH"]}) == "[]\n"


def test_output_that_is_no_text_is_still_output(stubs):
    stubs.write("squeue", r"printf 'a\xffb'")
    assert slurm.run(["squeue"]) == "a\ufffdb"


def test_a_missing_command(stubs):
    with pytest.raises(SlurmUnavailable, match="the command sacctx is not on this machine"):
        slurm.run(["sacctx"])


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: path.chmod(0o644), id="not executable"),
        pytest.param(lambda path: (path.write_text("no program"), path.chmod(0o755)), id="no program"),
    ],
)
def test_a_command_that_cannot_be_run(stubs, make):
    stubs.write("squeuex", "true")
    make(stubs.folder / "squeuex")
    with pytest.raises(SlurmUnavailable):
        slurm.run(["squeuex"])


@pytest.mark.parametrize(
    "body", ["exec sleep 20", "sleep 4 & wait", "trap '' TERM; sleep 4"], ids=["hangs", "child", "deaf"]
)
def test_a_command_that_hangs(stubs, body):
    stubs.write("squeue", body)
    began = time.monotonic()
    with pytest.raises(SlurmUnavailable, match="squeue did not answer within 0 s"):
        slurm.run(["squeue"], timeout_s=0.3)
    assert time.monotonic() - began < 3.0 * slowness()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", SlurmUnavailable),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", SlurmUnavailable),
        ("error: If munged is up, restart with --num-threads=10", SlurmUnavailable),
        ("Zero Bytes were transmitted or received", SlurmUnavailable),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", SlurmError),
        ("scontrol_requeue: Access/permission denied", SlurmError),
        ("", SlurmError),
    ],
)
def test_no_answer_is_told_from_a_refusal(stubs, message, kind):
    stubs.write("scontrol", f"echo {shlex.quote(message)} >&2; exit 1")
    with pytest.raises(SlurmError) as caught:
        slurm.run(["scontrol", "requeue", "7", "secret-looking"])
    assert type(caught.value) is kind
    assert str(caught.value) == f"scontrol requeue 7: {message or 'exit code 1'}"


def test_data_beside_an_error_is_not_data(stubs):
    """squeue prints what it has and fails: half an answer must not pass for a whole one."""
    stubs.write("squeue", 'echo "1|RUNNING"; echo "slurm_load_jobs error: something" >&2; exit 1')
    with pytest.raises(SlurmError, match="something"):
        slurm.run(["squeue"])


def test_a_controller_that_comes_back_is_waited_for(stubs, tmp_path):
    stubs.write(
        "scontrol",
        f"""
        if [ "$(wc -l < {stubs.log})" -lt 3 ]; then
            echo "Unable to contact slurm controller (connect failure)" >&2; exit 1
        fi
        echo fine
        """,
    )
    pauses: list[float] = []
    assert slurm.run_patiently(["scontrol", "ping"], patience_s=30, pause_s=0.5, sleep=pauses.append) == "fine\n"
    assert pauses == [0.5, 0.5]


def test_patience_ends(stubs):
    stubs.write("scontrol", 'echo "Unable to contact slurm controller" >&2; exit 1')
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(SlurmUnavailable):
        slurm.run_patiently(["scontrol", "ping"], patience_s=5.0, clock=lambda: now[0], sleep=sleep)
    assert now[0] == 4.0
    assert len(stubs.calls()) == 5


def test_a_refusal_is_not_repeated(stubs):
    stubs.write("scontrol", 'echo "Access/permission denied" >&2; exit 1')
    with pytest.raises(SlurmError):
        slurm.run_patiently(["scontrol", "ping"], patience_s=30)
    assert len(stubs.calls()) == 1


def test_signals_are_ignored_inside_and_handled_again_afterwards():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with pytest.raises(KeyError), slurm.ignoring_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            raise KeyError
        assert seen == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# slurm

DISABLED = 'echo "Requested operation is presently disabled for job 7" >&2; exit 1'


@pytest.fixture(autouse=True)
def _clock_that_shows_a_whole_second(monkeypatch):
    monkeypatch.setattr(own_jobs, "whole_seconds", lambda delay_s, now_s, early_s: delay_s)


def in_queue(job_id: str, script: object, *, user: int = 1000, submitted: int = 100, state: str = "PENDING") -> str:
    """One job as squeue shows it in our format."""
    identity = "".join(f"\x1f{each}" for each in (submitted, "name", "/folder", script))
    return f"{job_id}|{state}|None|||N/A|N/A|10:00|low|{user}{identity}\x1e\n"


LOOK = "scontrol -a -o show job 7"
UPDATE = "scontrol update JobId=7 StartTime=now+2"


def test_a_requeue_looks_whether_it_should_acts_and_sets_the_begin_time(stubs):
    stubs.write("scontrol", "")
    own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1)
    assert stubs.calls() == [LOOK, "scontrol requeue 7", UPDATE]


def test_a_job_that_was_requeued_already_is_not_requeued_again(stubs):
    stubs.write("scontrol", 'echo "JobState=COMPLETING Restarts=3"')
    own_jobs.requeue(OwnJob("7"), restart=2, delay_s=2, patience_s=1)
    assert stubs.calls() == [LOOK, UPDATE]


def test_a_job_that_was_cancelled_while_slurm_did_not_answer_stays_cancelled(stubs):
    stubs.write(
        "scontrol",
        f"""
        if [ "$1" = requeue ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi
        [ $(wc -l < {stubs.log}) -gt 2 ] && echo "JobState=COMPLETING Restarts=0 ExitCode=0:0"
        """,
    )
    with pytest.raises(own_jobs.JobCancelled):
        own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=5)
    assert stubs.calls().count("scontrol requeue 7") == 1
    assert UPDATE not in stubs.calls()


def test_a_begin_time_after_a_long_silence_allows_for_slurmds_late_report(stubs, monkeypatch):
    monkeypatch.setattr(own_jobs, "SILENT_S", -1.0)
    stubs.write("scontrol", "")
    own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1)
    assert stubs.calls()[-1] == f"scontrol update JobId=7 StartTime=now+{2 + own_jobs.COMPLETION_RETRY_S}"


@pytest.mark.parametrize(
    ("listed", "delay_s"),
    [
        ("echo 7.batch; echo 7.extern", 2),
        ("echo 7.batch; echo 7.0; echo 7.1", 2 + own_jobs.COMPLETION_RETRY_S),
        ("[ -e LOOKED ] || echo 7.0; touch LOOKED", 2),
        ("echo 'Socket timed out' >&2; exit 1", 2),
    ],
    ids=["ended", "not heard of", "heard of late", "no answer"],
)
def test_a_step_whose_end_slurm_has_not_heard_of_delays_the_begin(stubs, monkeypatch, tmp_path, listed, delay_s):
    monkeypatch.setattr(own_jobs, "STEPS_END_S", 0.4)
    monkeypatch.setattr(own_jobs, "SLOWNESS", 0)
    stubs.write("scontrol", "")
    stubs.write("squeue", listed.replace("LOOKED", str(tmp_path / "looked")))
    placed = own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1, orderly=True)
    assert placed.delay_s == delay_s


def test_requeueing_that_is_switched_off_is_switched_on(stubs):
    stubs.write(
        "scontrol",
        f"""
        if [ "$1" = requeue ] && ! grep -q Requeue=1 {stubs.log}; then {DISABLED}; fi
        """,
    )
    own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1)
    assert [call for call in stubs.calls() if call != LOOK] == [
        "scontrol requeue 7",
        "scontrol update JobId=7 Requeue=1",
        "scontrol requeue 7",
        UPDATE,
    ]


@pytest.mark.parametrize(
    "body",
    [
        f'[ "$1" = requeue ] && {{ {DISABLED}; }}; echo "Access/permission denied" >&2; exit 1',
        f'[ "$1" = requeue ] && {{ {DISABLED}; }}; exit 0',
    ],
    ids=["the update is refused", "the update changes nothing"],
)
def test_requeueing_that_stays_off_says_so(stubs, body):
    stubs.write("scontrol", body)
    with pytest.raises(own_jobs.RequeueDisabled):
        own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1)
    assert not any("StartTime" in call for call in stubs.calls())


def test_a_job_that_is_pending_counts_as_requeued(stubs):
    stubs.write("scontrol", '[ "$1" = requeue ] && { echo "Job is pending execution" >&2; exit 1; }; exit 0')
    own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1)
    assert stubs.calls()[-1] == "scontrol update JobId=7 StartTime=now+2"


def test_a_refused_requeue_is_an_error(stubs):
    stubs.write(
        "scontrol", '[ "$1" = requeue ] && { echo "Job/step already completing or completed" >&2; exit 1; }; exit 0'
    )
    with pytest.raises(SlurmError, match="already completing"):
        own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1)
    assert stubs.calls() == [LOOK, "scontrol requeue 7"]


def test_both_commands_survive_the_terms_that_the_requeue_itself_sends(stubs):
    """As in the batch step: scontrol requeue makes Slurm send TERM and CONT to everything around it."""
    stubs.write("scontrol", 'kill -TERM 0; kill -CONT 0; kill -HUP 0; sleep 0.05; echo "done $1" >> "$0.done"')
    code = (
        "from slurmft.policy.job_identity import OwnJob\n"
        "from slurmft.scheduler import slurm as command, own_jobs as queueing\n"
        "with command.ignoring_signals():\n"
        "    queueing.requeue(OwnJob('7'), restart=0, delay_s=2, patience_s=5)\n"
        "print('survived')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, start_new_session=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "survived\n"), result.stderr
    assert (stubs.folder / "scontrol.done").read_text() == "done -a\ndone requeue\ndone update\n"


def test_a_requeue_elsewhere_is_one_update(stubs):
    stubs.write("scontrol", "")
    done = own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1, avoid={"n2", "n10"}, nodes=3)
    update = stubs.calls()[-1]
    assert update.startswith("scontrol update JobId=7 StartTime=now+2 ExcNodeList=")
    assert update.endswith(" NumNodes=3")
    assert done == own_jobs.Requeued(on_time=True, avoiding=True, delay_s=2)


@pytest.mark.parametrize(
    ("now_s", "asked_s"), [(100.0, 2), (100.3, 2), (100.5, 2), (100.51, 3), (100.99, 3), (101.0, 2)]
)
def test_slurm_cuts_its_clock_down_so_a_late_moment_of_a_second_asks_for_one_more(now_s, asked_s, monkeypatch):
    monkeypatch.undo()
    assert own_jobs.whole_seconds(2, now_s) == asked_s
    begins_s = int(now_s) + asked_s
    assert 1.5 <= begins_s - now_s <= 2.5


@pytest.mark.parametrize("now_s", [100.0, 100.3, 100.51, 100.99])
def test_a_job_that_leaves_nothing_behind_may_begin_a_second_sooner(now_s, monkeypatch):
    monkeypatch.undo()
    begins_s = int(now_s) + own_jobs.whole_seconds(2, now_s, own_jobs.EARLY_WITHOUT_EPILOG_S)
    assert 1.0 <= begins_s - now_s <= 2.0


@pytest.mark.parametrize(
    ("orderly", "has_epilog", "delay_s", "early_s"),
    [(True, False, 2, 1.0), (True, False, 1, 0.5), (True, True, 2, 0.5), (False, False, 2, 0.5)],
)
def test_the_begin_time_is_closest_where_the_steps_have_ended_and_no_epilog_follows(
    stubs, monkeypatch, orderly, has_epilog, delay_s, early_s
):
    asked = []
    monkeypatch.setattr(own_jobs, "whole_seconds", lambda delay_s, now_s, early_s: asked.append(early_s) or delay_s)
    monkeypatch.setattr(own_jobs, "SLOWNESS", 0)  # the stubs are slow where the machine is busy
    stubs.write("scontrol", "")
    stubs.write("squeue", "")
    own_jobs.requeue(OwnJob("7"), restart=0, delay_s=delay_s, patience_s=1, orderly=orderly, has_epilog=has_epilog)
    assert asked == [early_s]


KEEPS_AHEAD = """
import sys, time
from slurmft.policy.job_identity import OwnJob
from slurmft.scheduler import own_jobs as queueing
queueing.AHEAD_EVERY_S = 0.05
on_time, seconds = sys.argv[1] == "on time", float(sys.argv[2])
queueing.keep_ahead(OwnJob("7"), queueing.Requeued(on_time=on_time, avoiding=True, delay_s=4))
time.sleep(seconds)
"""


def calls_of_a_process_that_ends(stubs, *arguments):
    subprocess.run([sys.executable, "-c", KEEPS_AHEAD, *arguments], check=True, timeout=60)
    return stubs.calls()


def test_the_begin_time_stays_ahead_for_as_long_as_the_process_takes_to_end(stubs):
    stubs.write("scontrol", "")
    calls = calls_of_a_process_that_ends(stubs, "on time", "2")
    assert len(calls) > 2
    assert {call.split("now+")[0] for call in calls} == {"scontrol update JobId=7 StartTime="}
    assert {int(call.split("now+")[1]) for call in calls} <= {5, 6}


def test_a_silent_slurm_is_asked_again_and_a_refusal_ends_it(stubs):
    answer = 'echo "Unable to contact slurm controller" >&2; exit 1'
    stubs.write("scontrol", f'[ $(wc -l < {stubs.log}) -le 2 ] && {{ {answer}; }}; echo "Access denied" >&2; exit 1')
    assert len(calls_of_a_process_that_ends(stubs, "on time", "3")) == 3


@pytest.mark.parametrize("arguments", [("on time", "0"), ("refused", "1")], ids=["it ends at once", "was refused"])
def test_a_begin_time_is_not_set_anew_without_need(stubs, arguments):
    stubs.write("scontrol", "")
    assert calls_of_a_process_that_ends(stubs, *arguments) == []


def test_no_excluded_nodes_clear_those_that_the_job_has(stubs):
    stubs.write("scontrol", "")
    own_jobs.place(OwnJob("7"), 2, avoid=())
    assert stubs.calls() == [f"{UPDATE} ExcNodeList="]


def test_refused_nodes_cost_neither_the_begin_time_nor_those_that_were_excluded_before(stubs):
    refuse = 'case "$*" in *ExcNodeList*) echo "Invalid node name specified for job 7" >&2; exit 1;; esac'
    stubs.write("scontrol", refuse)
    done = own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1, avoid={"gone"})
    assert stubs.calls()[-1] == UPDATE
    assert (done.on_time, done.avoiding) == (True, False)
    assert "Invalid node name" in done.refusal


def test_a_requeue_whose_update_fails_is_still_a_requeue(stubs):
    stubs.write("scontrol", 'case "$1" in update) echo "Access/permission denied" >&2; exit 1;; esac')
    done = own_jobs.requeue(OwnJob("7"), restart=0, delay_s=2, patience_s=1, avoid={"n1"})
    assert (done.on_time, done.avoiding) == (False, False)


def test_a_job_that_has_ended_is_held_placed_and_released(stubs):
    stubs.write("scontrol", "")
    own_jobs.requeue_ended(OwnJob("7"), 2, avoid={"n1"})
    acts = [call for call in stubs.calls() if call != LOOK]
    assert acts == ["scontrol requeuehold 7", f"{UPDATE} ExcNodeList=n1", "scontrol release 7"]


def test_a_job_that_cannot_be_placed_is_released_all_the_same(stubs):
    stubs.write("scontrol", 'case "$1" in update) echo "Access/permission denied" >&2; exit 1;; esac')
    assert not own_jobs.requeue_ended(OwnJob("7"), 2, avoid={"n1"}).avoiding
    assert stubs.calls()[-1] == "scontrol release 7"


def test_a_job_that_slurm_has_forgotten_cannot_be_brought_back(stubs):
    stubs.write("scontrol", 'echo "Invalid job id specified" >&2; exit 1')
    with pytest.raises(SlurmError, match="Invalid job id"):
        own_jobs.requeue_ended(OwnJob("7"), 2, avoid=None)


def test_shrinking_leaves_nothing_in_the_current_folder(stubs, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    stubs.write("scontrol", '[ "$1" != update ] || touch slurm_job_7_resize.sh')
    own_jobs.shrink(OwnJob("7"), ["n1", "n3"])
    assert stubs.calls() == [LOOK, "scontrol update JobId=7 NodeList=n[1,3]"]
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("JobId=7 JobName=ExcNodeList=n9 UserId=a(1) GroupId=a(1) ExcNodeList=n[1,3] Comment=x", {"n1", "n3"}),
        ("JobId=7 UserId=a(1) GroupId=a(1) ExcNodeList=(null) NumNodes=2", set()),
        ("JobId=7 UserId=a(1) GroupId=a(1) NumNodes=2", set()),
    ],
)
def test_the_excluded_nodes_of_a_job(stubs, text, nodes):
    stubs.write("scontrol", f"echo {shlex.quote(text)}")
    assert own_jobs.named_nodes(OwnJob("7")).excluded == nodes


def test_the_nodes_that_a_job_asks_for(stubs):
    stubs.write("scontrol", "echo 'JobId=7 UserId=a(1) GroupId=a(1) ReqNodeList=n[2-3] ExcNodeList='")
    assert own_jobs.named_nodes(OwnJob("7")) == NamedNodes(excluded=frozenset(), required=frozenset({"n2", "n3"}))


@pytest.mark.parametrize(("delay_s", "when"), [(0, "now"), (-5, "now"), (1, "now+1"), (600, "now+600")])
def test_a_begin_time(stubs, delay_s, when):
    stubs.write("scontrol", "")
    own_jobs.begin_in(OwnJob("12_4"), delay_s)
    assert stubs.calls() == [f"scontrol update JobId=12_4 StartTime={when}"]


def test_jobs_are_looked_up_in_one_command(stubs):
    stubs.write(
        "squeue",
        'echo "banner"; echo "7|RUNNING|None|n1|n1|1|2|3:00|low|1000"; echo "8|PENDING|x||n/a|N/A|N/A|5|low|1000"',
    )
    assert {job_id: job.state for job_id, job in slurm.jobs(["7", "8", "9"]).items()} == {
        "7": "RUNNING",
        "8": "PENDING",
    }
    assert stubs.calls()[0].startswith("squeue -h -a -t all -j 7,8,9 -o ")
    assert slurm.job("9") is None


def test_no_jobs_are_no_command(stubs):
    assert slurm.jobs([]) == {}


def test_a_forgotten_job_is_none_and_a_silent_controller_is_an_error(stubs):
    stubs.write("squeue", 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1')
    assert slurm.job("7") is None
    stubs.write("squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(SlurmUnavailable):
        slurm.job("7", patience_s=0.1)


def test_one_word_that_is_no_job_id_does_not_make_all_others_forgotten(stubs):
    stubs.write("squeue", 'echo "slurm_load_jobs error: Invalid job id: abc" >&2; exit 1')
    with pytest.raises(SlurmError, match="Invalid job id: abc"):
        slurm.jobs(["7", "abc"])


def test_many_jobs_are_looked_up_in_few_commands(stubs):
    stubs.write("squeue", 'echo "$6" | tr , "\\n" | sed "s/$/|RUNNING|None|n1|n1|1|2|3:00|low|1000/"')
    assert len(slurm.jobs([str(number) for number in range(20_000)])) == 20_000
    assert len(stubs.calls()) == 10


@pytest.mark.parametrize(
    ("preemption", "cause"), [("preempt/partition_prio", "cancelled"), ("preempt/qos", "preempted")]
)
def test_a_scancel_within_the_grace_is_told_where_the_grace_is_the_partitions(stubs, preemption, cause):
    job = "JobState=COMPLETING Restarts=0 Partition=low PreemptTime=1763650000 EndTime=1763650005 ExitCode=0:0"
    stubs.write(
        "scontrol",
        f"""
        case "$*" in
        *"show job"*) echo "{job}" ;;
        *"show config"*) echo "PreemptType = {preemption}" ;;
        *) echo "PartitionName=high GraceTime=0"; echo "PartitionName=low GraceTime=20" ;;
        esac
        """,
    )
    assert own_jobs.ending(OwnJob("7"), 0) == cause


@pytest.mark.parametrize(
    ("text", "mode"),
    [("PartitionName=low PreemptMode=REQUEUE,GANG X=1", "REQUEUE"), ("PreemptMode=CANCEL", "CANCEL"), ("X=1", "OFF")],
)
def test_the_preempt_mode(stubs, text, mode):
    stubs.write("scontrol", f"echo {shlex.quote(text)}")
    assert slurm.preempt_mode("low") == mode


@pytest.mark.parametrize(("printed", "job_id"), [("43", "43"), ("43;cluster", "43")])
def test_a_successor_is_submitted_once_with_a_clean_environment(stubs, tmp_path, monkeypatch, printed, job_id):
    (tmp_path / "where the job was submitted").mkdir()
    monkeypatch.chdir(tmp_path / "where the job was submitted")
    stubs.write("scontrol", "")
    stubs.write("sbatch", f'echo "{printed}"; env > "$0.env"; pwd > "$0.pwd"')
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "42", "SLURM_CONF": "/c", "SLURMFT_GENERATION": "3"}
    script = tmp_path / "job.sh"
    options = ["--nodes=2"]
    submitted = own_jobs.submit_successor(
        script, after=OwnJob("42"), restart=0, options=options, environment=environment, patience_s=1
    )
    assert submitted == job_id
    assert stubs.calls()[1:] == [f"sbatch --parsable --dependency=afterany:42 --nodes=2 {script}"]
    names = {line.split("=")[0] for line in (stubs.folder / "sbatch.env").read_text().splitlines()}
    assert "SLURM_CONF" in names
    assert names & {"SLURM_JOB_ID", "SLURMFT_GENERATION"} == set()
    assert (stubs.folder / "sbatch.pwd").read_text().strip() == str(Path.cwd()), "its SLURM_SUBMIT_DIR"


def test_a_successor_whose_submission_was_not_confirmed_is_looked_for_before_another_try(stubs, tmp_path):
    script = tmp_path / "job | 1.sh"
    stubs.write("sbatch", 'echo "Socket timed out on send/recv operation" >&2; exit 1')
    shown = [in_queue("41", script), in_queue("44", "/other.sh"), in_queue("45", script)]
    stubs.write("scontrol", "")
    stubs.write("squeue", f"cat <<'END'\n{''.join(shown)}END")
    known = [OwnJob("41", JobIdentity(script=str(script)))]
    found = own_jobs.submit_successor(
        script, after=OwnJob("42"), restart=0, known=known, options=[], environment=os.environ, patience_s=5
    )
    assert found == "45"
    assert [call.split()[0] for call in stubs.calls()] == ["scontrol", "sbatch", "squeue"]


def test_a_successor_is_not_tried_again_while_nobody_tells_whether_there_is_one(stubs, tmp_path):
    stubs.write("scontrol", "")
    for name in ("sbatch", "squeue"):
        stubs.write(name, 'echo "Socket timed out on send/recv operation" >&2; exit 1')
    with pytest.raises(SlurmUnavailable):
        own_jobs.submit_successor(
            tmp_path / "a.sh", after=OwnJob("42"), restart=0, options=[], environment=os.environ, patience_s=2.5
        )
    assert [call.split()[0] for call in stubs.calls()].count("sbatch") == 1


def test_a_job_that_was_cancelled_while_slurm_did_not_answer_has_no_successor(stubs, tmp_path):
    """Nobody had seen the scancel, and the run went on."""
    stubs.write("sbatch", "echo 43")
    stubs.write(
        "scontrol",
        """
        test -e "$0.asked" && { echo "JobState=CANCELLED Restarts=0 ExitCode=0:15"; exit; }
        touch "$0.asked"; echo "Socket timed out on send/recv operation" >&2; exit 1
        """,
    )
    with pytest.raises(own_jobs.JobCancelled):
        own_jobs.submit_successor(
            tmp_path / "a.sh", after=OwnJob("42"), restart=0, options=[], environment=os.environ, patience_s=60
        )
    assert [call.split()[0] for call in stubs.calls()] == ["scontrol", "scontrol"]


def test_a_successor_inherits_size_and_place():
    environment = {"SLURM_JOB_PARTITION": "low", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ACCOUNT": "", "X": "1"}
    assert own_jobs.inherited_options(environment) == ["--partition=low", "--nodes=2"]


# submission


def config_of(run: RunFolder, **keys: object) -> RunConfig:
    return validate({"command": ["python", "train.py"], "run_folder": str(run.path), **keys}, source="test")


def directives(text: str) -> dict[str, str | bool]:
    """What sbatch would read: one option per line, quotes removed."""
    found: dict[str, str | bool] = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line.removeprefix("#SBATCH "))
            name, equals, value = word.removeprefix("--").partition("=")
            found[name] = value if equals else True
    return found


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "runs" / "a")


def test_the_script_carries_the_protocol(run):
    text = script_text(config_of(run, nodes=2, slurm={"partition": "low"}), run, {}, frozenset())
    assert directives(text) == {
        "job-name": "a", "nodes": "2", "ntasks-per-node": "1", "open-mode": "append", "requeue": True,
        "partition": "low", "output": f"{run.path}/logs/%j.log", "signal": "SIGTERM@120",
    }  # fmt: skip
    assert text.startswith("#!/bin/bash\n")
    assert text.splitlines()[-1] == f"exec {sys.executable} -P -u -m slurmft run {run.config}"
    assert not run.path.exists(), "a dry run changes nothing"


def test_a_script_for_roles_on_other_nodes_has_a_component_for_them(run):
    engine = {"command": ["serve", "{port}"]}
    roles = {"trainer": {"command": "x", "nodes": 2, "slurm": {"partition": "gpu", "gpus_per_node": 8, "mem": "64G"}},
             "rollout": {"engine": engine}}  # fmt: skip
    raw = {"run_folder": str(run.path), "slurm": {"partition": "low", "mem": "1G", "time": "60"}, "roles": roles}
    text = script_text(from_values(raw, source="test"), run, {"qos": "high"}, frozenset({"n9"}))
    first, second = (directives(part) for part in text.split("#SBATCH hetjob\n"))
    assert first.items() >= {"nodes": "1", "partition": "low", "mem": "1G"}.items()
    other = {"nodes": "2", "partition": "gpu", "mem": "64G", "gpus-per-node": "8"}
    assert second == {**first, **other}, "all that does not describe nodes is the same"
    assert second.items() >= {"time": "60", "qos": "high", "exclude": "n9", "signal": "SIGTERM@120"}.items()
    assert text.splitlines()[-1] == f"exec {sys.executable} -P -u -m slurmft run {run.config}"


def test_no_time_limit_is_invented(run):
    assert "time" not in directives(script_text(config_of(run), run, {}, frozenset()))


@pytest.mark.parametrize(
    ("keys", "options", "avoid", "expected"),
    [
        ({"slurm": {"time": "1:30:00"}}, {}, (), {"time": "1:30:00"}),
        ({"slurm": {"time": "30"}}, {"time": "60"}, (), {"time": "60"}),
        ({"slurm": {"requeue": False}}, {}, (), {"no-requeue": True}),
        ({"slurm": {"no_kill": True}}, {}, (), {"no-kill": True}),
        ({"nodes": 4, "spare_nodes": 1}, {}, (), {"no-kill": True, "nodes": "5"}),
        ({"nodes": 4, "elastic": {"min_nodes": 2}}, {}, (), {"no-kill": True, "nodes": "4"}),
        ({"nodes": 4, "elastic": {"max_nodes": 6}}, {}, (), {"no-kill": True, "nodes": "4"}),
        (
            {"nodes": 4, "spare_nodes": 1, "elastic": {"min_nodes": 2, "start_with_fewer": True}},
            {},
            (),
            {"no-kill": True, "nodes": "2-5"},
        ),
        ({"slurm": {"hold": True, "exclusive": False}}, {}, (), {"hold": True}),
        ({"slurm": {"job_name": "my job"}}, {}, (), {"job-name": "my job"}),
        ({"slurm": {"output": "/logs/%x-%j.out"}}, {}, (), {"output": "/logs/%x-%j.out"}),
        ({"slurm": {"wckey": "w"}}, {}, (), {"wckey": "w"}),
        ({"preemption": {"signal": "SIGUSR1", "signal_lead_s": 300}}, {}, (), {"signal": "SIGUSR1@300"}),
        ({"preemption": {"signal": "SIGINT"}}, {}, (), {"signal": "SIGINT@120"}),
        ({"slurm": {"exclude": "n9"}}, {}, ("n2", "n1"), {"exclude": "n9,n[1-2]"}),
        ({}, {}, ("n2",), {"exclude": "n2"}),
        (
            {"slurm": {"gpus_per_node": 8, "mem": 0, "gres": "tmp:5"}},
            {},
            (),
            {"gpus-per-node": "8", "mem": "0", "gres": "tmp:5"},
        ),
        ({"slurm": {"comment": "two words"}}, {}, (), {"comment": "two words"}),
    ],
    ids=str,
)
def test_what_a_key_becomes(run, keys, options, avoid, expected):
    found = directives(script_text(config_of(run, **keys), run, options, frozenset(avoid)))
    assert {name: found.get(name) for name in expected} == expected


def test_switched_off_options_leave_no_trace(run):
    found = directives(script_text(config_of(run, slurm={"requeue": False, "exclusive": False}), run, {}, frozenset()))
    assert found.keys() & {"requeue", "no-kill", "exclusive", "exclude", "srun-args"} == set()


@pytest.mark.parametrize("name", ["two words", "it's", 'say "x"', "100%", "a$HOME`id`", "back\\slash", "ü"])
def test_an_odd_name_of_a_run_stays_one_word(tmp_path, name):
    run = RunFolder(tmp_path / name)
    text = script_text(config_of(run), run, {}, frozenset())
    assert shlex.split(text.splitlines()[-1])[-1] == str(run.config)
    assert directives(text)["output"] == str(run.logs).replace("%", "%%") + "/%j.log"
    assert directives(text)["job-name"] == name


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["line\nbreak", "tab\tbed", "esc\x1b"], "line break or control character"),
        (["p%j", "%A_%a", "x%t"], "stands for a job's number"),  # submitit would rename it
    ],
)
def test_a_run_folder_that_no_script_can_name_is_refused(tmp_path, names, problem):
    for run in (RunFolder(tmp_path / name) for name in names):
        with pytest.raises(UsageError, match=problem):
            script_text(config_of(run), run, {}, frozenset())


@pytest.mark.parametrize("slurm_section", [{"comment": "a\n#SBATCH --uid=0"}, {"job_name": "a\nb"}], ids=str)
def test_a_line_break_in_an_option_is_refused(run, slurm_section):
    with pytest.raises((UsageError, SlurmError)):
        script_text(config_of(run, slurm=slurm_section), run, {}, frozenset())


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--partition=low"], {"partition": "low"}),
        (["--partition", "low", "--hold"], {"partition": "low", "hold": True}),
        (["-p", "low", "-t30"], {"partition": "low", "time": "30"}),
        (["-J", "a b", "-x", "n[1-2]"], {"job-name": "a b", "exclude": "n[1-2]"}),
        (["--exclusive", "--nice=-5"], {"exclusive": True, "nice": "-5"}),
        (["--comment=a=b"], {"comment": "a=b"}),
        (["--time=1", "--time=2"], {"time": "2"}),
        (["-H"], {"hold": True}),
        (["--mail-type="], {"mail-type": ""}),
    ],
    ids=str,
)
def test_options_behind_the_dashes(arguments, options):
    assert parse_sbatch_options(arguments) == options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["low"], "'low' is not an option of sbatch"),
        (["--partitoin=low"], "is not an option of sbatch"),
        (["-Z"], "is not an option of sbatch"),
        (["--nodes=2"], "--nodes is set by slurmft"),
        (["-N2"], "--nodes is set by slurmft"),
        (["-n", "4"], "--ntasks is set by slurmft"),
        (["--signal=USR1@9"], "preemption.signal"),
        (["-a1-3"], "--array is set by slurmft"),
        (["--hold", "-p", "low", "extra"], "'extra' is not an option of sbatch"),
        (["--"], "is not an option of sbatch"),
        (["-"], "is not an option of sbatch"),
    ],
    ids=str,
)
def test_options_that_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        parse_sbatch_options(arguments)


@pytest.mark.parametrize("option", ["--requeue", "--no-kill", "-k", "-M", "-F", "-s", "-m", "-S"])
def test_a_true_option_of_sbatch_is_not_called_unknown(option):
    try:
        parse_sbatch_options([option, "x"])
    except UsageError as error:
        assert "is not an option of sbatch" not in str(error)


def test_a_submission_leaves_its_script_for_successors(stubs, run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    stubs.write("sbatch", 'cp "${@: -1}" "$0.script"; env > "$0.env"; echo "Submitted batch job 42"')
    run.create()
    job = submit_to_slurm(config_of(run), run, {"hold": True}, frozenset({"n3"}))
    assert job == "42"
    submitted = (stubs.folder / "sbatch.script").read_text()
    assert run.script.read_text() == submitted
    assert directives(submitted)["exclude"] == "n3"
    assert directives(submitted)["hold"] is True
    assert submitted.splitlines()[-1].startswith("exec ")
    assert "SLURM_JOB_ID=" not in (stubs.folder / "sbatch.env").read_text()
    assert os.environ["SLURM_JOB_ID"] == "41"


def test_a_dry_run_shows_what_is_submitted(stubs, run):
    stubs.write("sbatch", 'echo "Submitted batch job 42"')
    run.create()
    shown = script_text(config_of(run), run, {}, frozenset())
    submit_to_slurm(config_of(run), run, {}, frozenset())
    assert run.script.read_text() == shown


def test_a_refused_submission_has_sbatchs_own_words(stubs, run):
    stubs.write("sbatch", 'echo "sbatch: error: Batch job submission failed: Invalid account" >&2; exit 1')
    run.create()
    with pytest.raises(SlurmError, match="sbatch refused the job: Batch job submission failed: Invalid account"):
        submit_to_slurm(config_of(run), run, {}, frozenset())
    assert not run.script.exists()


def test_a_submission_without_sbatch(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    run.create()
    with pytest.raises(SlurmUnavailable, match="there is no sbatch on this machine"):
        submit_to_slurm(config_of(run), run, {}, frozenset())


def test_each_error_of_a_refusal_is_told_once_and_nothing_is_left_of_it(stubs, run):
    words = ["sbatch: a word of the site's", *["sbatch: error: no project was named"] * 2, "sbatch: error: Unspecified"]
    stubs.write("sbatch", "".join(f'echo "{line}" >&2; ' for line in words) + "exit 1")
    run.create()
    with pytest.raises(SlurmError, match=r"sbatch refused the job: no project was named Unspecified$"):
        submit_to_slurm(config_of(run), run, {}, frozenset())
    assert list(run.submissions.iterdir()) == []


def test_a_job_that_sbatch_does_not_name_may_have_arrived(stubs, run):
    stubs.write("sbatch", "echo welcome")
    run.create()
    with pytest.raises(SlurmUnavailable, match="sbatch got no answer"):
        submit_to_slurm(config_of(run), run, {}, frozenset())


def test_the_supervisor_runs_in_the_interpreter_that_submits(run):
    assert submission.RunSupervisor(run.config).argv()[:5] == [sys.executable, "-P", "-u", "-m", "slurmft"]
