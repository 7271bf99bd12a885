"""A job's number is not its identity: controllers lose their state, and counters wrap."""

import json
import os

import pytest

from slurmft.errors import SlurmError, SlurmUnavailable
from slurmft.policy.job_identity import JobIdentity, OwnJob, identity_from, is_same_job, merged
from slurmft.scheduler import own_jobs
from slurmft.scheduler import slurm as scheduler_slurm
from slurmft.scheduler.parsing import JOB_FORMAT, parse_identity, parse_jobs
from slurmft.storage.run_folder import RunFolder

KNOWN = JobIdentity(
    user=1000, cluster="a", name="gpt", script="/runs/gpt/job.sh", folder="/home/me", submitted=(100.0, 200.0)
)
OWN = JobIdentity(user=1000, script="/runs/gpt/job.sh", own_script=True)


@pytest.mark.parametrize(
    ("known", "seen", "same"),
    [
        pytest.param(JobIdentity(), JobIdentity(), True, id="nothing is known"),
        pytest.param(KNOWN, JobIdentity(user=1000, submitted=(200.0,)), True, id="as it was seen last"),
        pytest.param(KNOWN, JobIdentity(user=1001, submitted=(200.0,)), False, id="of another user"),
        pytest.param(KNOWN, JobIdentity(cluster="b", submitted=(200.0,)), False, id="of another cluster"),
        pytest.param(KNOWN, JobIdentity(cluster="A", submitted=(200.0,)), True, id="a cluster in capitals"),
        pytest.param(KNOWN, JobIdentity(script="/runs/other/job.sh", submitted=(200.0,)), False, id="another script"),
        pytest.param(KNOWN, JobIdentity(script="", submitted=(200.0,)), False, id="no script"),
        pytest.param(KNOWN, JobIdentity(script="/runs/gpt/job.sh -v", submitted=(200.0,)), True, id="with arguments"),
        pytest.param(KNOWN, JobIdentity(script="/runs/gpt/job.sh2", submitted=(200.0,)), False, id="a longer name"),
        pytest.param(KNOWN, JobIdentity(submitted=(300.0,), restarts=0), False, id="submitted anew"),
        pytest.param(KNOWN, JobIdentity(submitted=(300.0,), restarts=2), True, id="requeued since"),
        pytest.param(KNOWN, JobIdentity(submitted=(300.0,)), None, id="requeued since, or another one"),
        pytest.param(KNOWN, JobIdentity(submitted=(100.0,), restarts=0), True, id="a controller without its last hour"),
        pytest.param(KNOWN, JobIdentity(submitted=(50.0,), restarts=3), False, id="submitted before ours"),
        pytest.param(KNOWN, JobIdentity(name="bert", submitted=(200.0,)), True, id="renamed"),
        pytest.param(KNOWN, JobIdentity(name="bert", submitted=(300.0,), restarts=1), True, id="renamed and requeued"),
        pytest.param(
            KNOWN, JobIdentity(name="bert", folder="/data", submitted=(300.0,), restarts=1), False, id="all differs"
        ),
        pytest.param(OWN, JobIdentity(script="/runs/gpt/job.sh", submitted=(900.0,)), True, id="our own script"),
        pytest.param(JobIdentity(begun=1000.0), JobIdentity(submitted=(900.0,), restarts=0), True, id="an old folder"),
        pytest.param(
            JobIdentity(begun=1000.0), JobIdentity(submitted=(9000.0,), restarts=0), False, id="long after it had begun"
        ),
        pytest.param(
            JobIdentity(begun=1000.0), JobIdentity(submitted=(9000.0,), restarts=1), True, id="or requeued then"
        ),
    ],
)  # fmt: skip
def test_which_job_it_is(known, seen, same):
    assert is_same_job(known, seen) is same


def test_what_is_known_survives_the_file_and_grows():
    again = identity_from(json.loads(json.dumps(KNOWN.as_json())))
    assert again == KNOWN
    later = merged(KNOWN, JobIdentity(submitted=(300.0,), name="bert", restarts=2))
    assert later.submitted == (100.0, 200.0, 300.0)
    assert (later.user, later.script, later.name) == (1000, "/runs/gpt/job.sh", "bert")
    many = KNOWN
    for at in range(300, 500):
        many = merged(many, JobIdentity(submitted=(float(at),)))
    assert many.submitted[0] == 100.0 and many.submitted[-1] == 499.0 and len(many.submitted) <= 60


@pytest.mark.parametrize("damaged", [{}, {"user": "me", "submitted": 7, "script": 3}, {"submitted": [None, "x", True]}])
def test_a_damaged_record_knows_nothing(damaged):
    assert identity_from(damaged) == JobIdentity()


# what Slurm shows, recorded on 22.05.8

SHOWN = (
    "JobId=6 JobName=a b UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=4294901752 JobState=RUNNING "
    "Reason=None Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 SubmitTime=1795371954 EligibleTime=1795371954 "
    "NodeList=n2 BatchHost=n2 Command=/home/me/a b.sh one two WorkDir=/home/my folder Comment=x StdErr=/dev/null "
    "StdIn=/dev/null StdOut=/dev/null Power= \n"
)


def test_who_a_job_is_says_scontrol():
    assert parse_identity(SHOWN) == JobIdentity(
        user=1000, name="a b", script="/home/me/a b.sh one two", folder="/home/my folder", submitted=(1795371954.0,),
        restarts=2,
    )  # fmt: skip
    het = SHOWN.replace("JobName", "HetJobId=6 HetJobOffset=0 JobName").replace(" UserId", " HetJobIdSet=6-7 UserId")
    other = het.replace("JobId=6 ", "JobId=7 ", 1).replace("a b.sh", "c.sh")
    assert parse_identity(het + other) == parse_identity(SHOWN)
    assert parse_identity("") == JobIdentity()
    assert parse_identity(SHOWN.replace("/home/me/a b.sh one two", "(null)")).script == ""


def line(job_id: str = "6", *, user: int = 1000, at: int = 100, name: str = "gpt", script: str = "/s",
         state: str = "RUNNING") -> str:  # fmt: skip
    values = {"%i": job_id, "%T": state, "%r": "None", "%N": "n1", "%B": "n1", "%S": "1", "%e": "2", "%l": "3:00",
              "%P": "low", "%U": str(user), "%V": str(at), "%j": name, "%Z": "/home", "%o": script}  # fmt: skip
    text = JOB_FORMAT
    for field, value in values.items():
        text = text.replace(field, value)
    return f"{text}\n"


def test_who_a_job_is_says_squeue():
    text = "CLUSTER: a\n" + line() + line("7", name="a|b\nc") + line("8+0") + line("8+1")
    records = parse_jobs(text)
    assert [record.job_id for record in records] == ["6", "7", "8"], "components of a heterogeneous job are one job"
    assert records[0].identity == JobIdentity(user=1000, name="gpt", script="/s", folder="/home", submitted=(100.0,))
    assert records[1].identity.name == "a|b\nc"
    assert records[0].batch_host == "n1" and records[0].partition == "low"


class Slurm:
    """Answers in the place of Slurm's commands; what changes something is noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, squeue: str = "", shown: str = "") -> None:
        self.squeue, self.shown = squeue, shown
        self.acts: list[str] = []
        self.clusters: set[str] = set()
        monkeypatch.setattr(scheduler_slurm, "run", self.run)

    def run(self, argv, *, cluster: str = "", **_) -> str:
        self.clusters.add(cluster)
        if argv[0] == "squeue":
            return self.squeue
        if "show" in argv:
            if not self.shown:
                raise SlurmError("scontrol: Invalid job id specified")
            return self.shown
        self.acts.append(" ".join(argv))
        return ""


MINE = OwnJob("6", JobIdentity(user=1000, script="/home/me/a b.sh one two", submitted=(1795371954.0,)))
FOREIGN = SHOWN.replace("a b.sh one two", "other.sh")


@pytest.mark.parametrize(
    "act",
    [
        lambda job: own_jobs.requeue(job, restart=2, delay_s=2, patience_s=0),
        lambda job: own_jobs.requeue_ended(job, 2, avoid=None),
        lambda job: own_jobs.shrink(job, ["n1"]),
        own_jobs.release,
        own_jobs.cancel,
        lambda job: own_jobs.ending(job, 2),
        own_jobs.job_times,
        own_jobs.named_nodes,
    ],
    ids=["requeue", "requeue_ended", "shrink", "release", "cancel", "ending", "times", "nodes"],
)
def test_nothing_is_done_to_a_job_that_has_our_number_and_nothing_it_says_is_believed(monkeypatch, act):
    slurm = Slurm(monkeypatch, shown=FOREIGN)
    with pytest.raises(own_jobs.ForeignJob, match="job 6 of this run is gone: another job has its number now"):
        act(MINE)
    assert slurm.acts == []
    slurm.shown = SHOWN
    act(MINE)


def test_a_waiting_job_that_has_got_our_number_since_we_looked_is_not_placed(monkeypatch):
    slurm = Slurm(monkeypatch, shown=SHOWN)

    def lost(argv, **rest) -> str:
        if "requeue" in argv:
            slurm.shown = FOREIGN
            raise SlurmError("Job is pending execution")
        return slurm.run(argv, **rest)

    monkeypatch.setattr(scheduler_slurm, "run", lost)
    with pytest.raises(own_jobs.ForeignJob):
        own_jobs.requeue(MINE, restart=2, delay_s=2, patience_s=0)
    assert slurm.acts == []


def test_a_job_of_another_run_counts_as_gone(monkeypatch):
    slurm = Slurm(monkeypatch, squeue=line(script="/other.sh"), shown=FOREIGN)
    assert own_jobs.find([MINE]) == {}
    slurm.squeue = line(script="/home/me/a b.sh one two", at=1795371954)
    assert own_jobs.find([MINE])[MINE].state == "RUNNING"
    assert own_jobs.find([MINE, OwnJob("6", JobIdentity(user=7))]).keys() == {MINE}, "of two runs that had it, one"


def test_a_plain_script_that_was_submitted_twice_is_told_by_its_restarts(monkeypatch):
    slurm = Slurm(monkeypatch, squeue=line(script="/home/me/a b.sh one two", at=1795379999))
    slurm.shown = SHOWN.replace("SubmitTime=1795371954", "SubmitTime=1795379999")
    assert own_jobs.find([MINE]).keys() == {MINE}, "requeued"
    slurm.shown = slurm.shown.replace("Restarts=2", "Restarts=0")
    assert own_jobs.find([MINE]) == {}, "submitted anew"


def test_another_cluster_is_asked_by_name_and_this_one_plainly(monkeypatch, tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=Here\n")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    slurm = Slurm(monkeypatch, squeue=line())
    own_jobs.find([OwnJob("6", JobIdentity(cluster="here"))])
    assert slurm.clusters == {""}
    own_jobs.find([OwnJob("6", JobIdentity(cluster="there")), OwnJob("7")])
    assert slurm.clusters == {"", "there"}
    slurm.clusters.clear()
    slurm.shown = SHOWN
    own_jobs.batch_script(OwnJob("6", JobIdentity(cluster="there")))
    assert slurm.clusters == {"there"}


def test_the_environment_of_a_shell_changes_no_answer(monkeypatch, tmp_path):
    script = tmp_path / "squeue"
    script.write_text("#!/bin/sh\nenv\n")
    script.chmod(0o755)
    noise = ("SLURM_CLUSTERS", "SQUEUE_USERS", "SQUEUE_STATES", "SINFO_PARTITION", "SACCT_FORMAT", "SCANCEL_NAME",
             "SCANCEL_INTERACTIVE", "SCONTROL_FUTURE", "SBATCH_PARTITION")  # fmt: skip
    for name in noise:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/x")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    names = {each.partition("=")[0] for each in scheduler_slurm.run(["squeue"]).splitlines()}
    assert not names & set(noise)
    assert {"SLURM_CONF", "SLURM_TIME_FORMAT"} <= names
    assert "SLURM_CLUSTERS=there" in scheduler_slurm.run(["squeue"], cluster="there").splitlines()


@pytest.mark.parametrize(
    "words",
    ["slurm_load_jobs error: Rate limit exceeded, please retry later", "RPC rate limit exceeded", "No route to host"],
)
def test_an_answer_that_asks_to_come_again_is_no_refusal(monkeypatch, tmp_path, words):
    script = tmp_path / "squeue"
    script.write_text(f"#!/bin/sh\necho '{words}' >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SlurmUnavailable):
        scheduler_slurm.run(["squeue"])


# the run folder


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_a_run_remembers_who_its_jobs_are(run):
    run.add_job("6", JobIdentity(user=1, script=f"{run.path}/job.sh", submitted=(5.0,)))
    run.add_job("7")
    run.add_job("local-3")
    six, seven = run.own_jobs()
    assert six.known.own_script and six.known.submitted == (5.0,)
    assert (seven.job_id, seven.known.user) == ("7", os.getuid())
    run.add_job("6", JobIdentity(submitted=(9.0,), restarts=1))
    assert run.own_jobs()[0].known.submitted == (5.0, 9.0)
    assert run.jobs() == ["6", "7", "local-3"]
    assert [str(job) for job in run.own_jobs(newest=1)] == ["7"]


def test_a_number_that_comes_again_is_the_newest_job_of_the_run(run):
    run.add_job("6", JobIdentity(user=1, script="/a.sh", submitted=(5.0,)))
    run.add_job("7", JobIdentity(user=1, script="/a.sh", submitted=(6.0,)))
    run.add_job("6", JobIdentity(user=1, script="/b.sh", submitted=(50.0,), restarts=0))
    assert run.jobs() == ["7", "6"]
    assert run.own_jobs()[-1].known.submitted == (50.0,)


def test_the_folder_of_an_earlier_version_tells_when_its_jobs_had_begun(run):
    (run.path / "jobs.json").write_text('{"format": 1, "jobs": ["6", "7"]}')
    begun = run.journal()
    begun.attempt = "6.0.0"
    at = begun.append("attempt started").seconds()
    six, seven = run.own_jobs()
    assert six.known.begun == pytest.approx(at, abs=0.01)
    assert seven.known == JobIdentity(user=os.getuid())
    assert is_same_job(six.known, JobIdentity(user=os.getuid(), submitted=(at - 60,), restarts=0)) is True
