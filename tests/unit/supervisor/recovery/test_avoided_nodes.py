"""What a placement avoids: the list, Slurm's answer, the request; and nothing of it ever stands in the way."""

import os
import shlex
import threading
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from slurmft.config.run import RunConfig, validate
from slurmft.errors import SlurmError, SlurmUnavailable, StorageError
from slurmft.policy.job_identity import OwnJob
from slurmft.policy.suspicion import WEIGHTS, ManualEntry, Observation
from slurmft.policy.verdict import Kind
from slurmft.scheduler import slurm
from slurmft.scheduler.slurm import NodeRecord
from slurmft.storage.exclusions import ExclusionList, Exclusions
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder
from slurmft.supervisor import avoided_nodes, placement
from slurmft.supervisor.avoided_nodes import (
    Avoidance,
    cluster_name,
    exclusion_list,
    for_submission,
    list_path,
    submitted,
    to_avoid,
)
from slurmft.supervisor.placement import next_placement, read_exclusions, to_keep_off

NOW = 1_800_000_000.0
NODES = "".join(f"n{n}|low*|idle\nn{n}|high|idle\n" for n in range(1, 5)) + "big1|big|idle\n"


def seen(node: str, kind: Kind = Kind.RERUN_PERSISTENT, weight: float | None = None) -> Observation:
    weight = WEIGHTS[kind] if weight is None else weight
    return Observation(kind=kind, node=node, weight=weight, at=time.time() - 60, id=f"{node}{kind}{weight}")


def records(count: int = 4, **states: bool) -> list[NodeRecord]:
    names = [f"n{number}" for number in range(1, count + 1)]
    return [NodeRecord(node=name, partition="low", is_default=True, usable=states.get(name, True)) for name in names]


class Slurm:
    """sinfo and scontrol on PATH, which note that they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked = folder / "asked"
        self.says("sinfo", f"printf '%s' {shlex.quote(NODES)}")
        self.says("scontrol", "echo 'ClusterName = asked'")
        self.says("sbatch", "exit 1")

    def says(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.asked}\n{body}\n')
        path.chmod(0o755)

    def questions(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Slurm:
    folder = tmp_path / "stubs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in list(os.environ):
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    conf = tmp_path / "slurm.conf"
    conf.write_text("# ClusterName=no\nclustername = lab # yes\nInclude other.conf\n")
    monkeypatch.setenv("SLURM_CONF", str(conf))
    avoided_nodes._asked_cluster.cache_clear()
    return Slurm(folder)


def config(tmp_path: Path, **changes: object) -> RunConfig:
    raw = {"command": ["x"], "run_folder": str(tmp_path / "run"), "nodes": 2, **changes}
    return validate(raw, source="test")


def listed(config: RunConfig, *observations: Observation, manual: tuple[ManualEntry, ...] = ()) -> None:
    shared = exclusion_list(config, os.environ)
    shared.observe(observations)
    if manual:
        shared.exclude(*manual)


# to_avoid


def test_slurm_is_asked_once_and_only_when_there_is_something_to_avoid(cluster):
    nothing = Exclusions([seen("n1", Kind.RERUN_TRANSIENT)])
    assert to_avoid(nothing, partition=None, nodes_needed=1, max_excluded_fraction=1.0).is_silent
    assert cluster.questions() == []
    found = to_avoid(Exclusions([seen("n1"), seen("n9")]), partition=None, nodes_needed=1, max_excluded_fraction=1.0)
    assert (found.nodes, found.unknown, found.dropped) == (("n1",), ("n9",), ())
    assert found.reasons == {"n1": "rerun persistent 2.00"}
    assert cluster.questions() == ["sinfo -h -a -N -o %N|%P|%T"]


@pytest.mark.parametrize(
    ("partition", "nodes"),
    [(None, ("n1",)), ("high", ("n1",)), ("low,high", ("n1",)), ("big", ("big1",)), ("gone", ()),
     ("big,low", ("big1", "n1"))],
)  # fmt: skip
def test_only_the_partitions_of_the_request_matter(cluster, partition, nodes):
    found = to_avoid(
        Exclusions([seen("n1"), seen("big1")]), partition=partition, nodes_needed=0, max_excluded_fraction=1.0
    )
    assert (found.nodes, found.unknown) == (nodes, ())


def test_nodes_that_take_no_jobs_do_not_count():
    held = Exclusions([seen("n1"), seen("n2", weight=3.0)])
    known = records(n3=False, n4=False)
    found = to_avoid(held, partition=None, nodes_needed=1, max_excluded_fraction=1.0, known=known)
    assert (found.nodes, [each.node for each in found.dropped]) == (("n2",), ["n1"])
    also = to_avoid(
        held, partition=None, nodes_needed=1, max_excluded_fraction=1.0, known=records(), excluded_anyway=["n3", "n4"]
    )
    assert also.nodes == ("n2",)


def test_suspects_come_first_and_hands_before_scores():
    held = Exclusions([seen("n1", weight=9.0)], [ManualEntry(node="n2", reason="fan", who="me", at=0.0)])
    found = to_avoid(
        held, partition=None, nodes_needed=1, suspects=["n3", "n3"], max_excluded_fraction=1.0, known=records()
    )
    assert found.weakest_first == ("n1", "n2", "n3")
    tight = to_avoid(held, partition=None, nodes_needed=3, suspects=["n3"], max_excluded_fraction=1.0, known=records())
    assert (tight.nodes, tight.reasons) == (("n3",), {"n3": "suspect of this run"})
    assert [each.node for each in tight.dropped] == ["n2", "n1"]


def test_silence_passes_through_and_names_nobody(cluster):
    cluster.says("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmUnavailable):
        to_avoid(Exclusions([seen("n1")]), partition=None, nodes_needed=1, max_excluded_fraction=1.0)


def test_ten_thousand_nodes():
    names = [f"n{number:05}" for number in range(10_000)]
    known = [NodeRecord(node=name, partition="p", is_default=True, usable=True) for name in names]
    began = time.process_time()
    found = to_avoid(Exclusions([seen(name) for name in names[::2]]), partition=None, nodes_needed=4000,
                     max_excluded_fraction=0.5, known=known)  # fmt: skip
    lines = found.lines()
    assert time.process_time() - began < 3
    assert len(found.nodes) == 5000
    assert len(lines) == 1
    assert len(found.as_event()["reasons"]) == 100


# what it says


def test_what_is_said():
    held = Exclusions([seen("n1", weight=2.0), seen("n2", weight=3.0), seen("gone")])
    found = to_avoid(held, partition=None, nodes_needed=3, max_excluded_fraction=1.0, known=records())
    assert found.lines() == [
        "avoiding n2 (n2: rerun persistent 3.00)",
        "warning: not avoiding n1: without it fewer than 3 usable nodes would be left",
        "warning: Slurm does not know gone, which the exclusion list names; slurmft exclude remove forgets a node "
        "that is gone",
    ]
    assert found.as_event() == {
        "nodes": "n2", "reasons": ["n2: rerun persistent 3.00"], "unknown": ["gone"], "problem": "",
        "dropped": ["n1: without it fewer than 3 usable nodes would be left"],
    }  # fmt: skip
    assert Avoidance().lines() == []


# a submission


def test_a_submission_avoids_what_the_list_excludes(cluster, tmp_path):
    run = config(tmp_path)
    assert for_submission(run, {}, os.environ).is_silent
    assert cluster.questions() == []
    listed(run, seen("n1"))
    assert for_submission(run, {}, os.environ).nodes == ("n1",)


@pytest.mark.parametrize(
    ("changes", "options", "environment", "nodes", "dropped"),
    [
        ({}, {}, {}, ["n1", "n2"], []),
        ({"nodes": 3}, {}, {}, ["n2"], ["n1"]),
        ({}, {"exclude": "n[3-4]"}, {}, [], ["n2", "n1"]),
        ({"slurm": {"exclude": "n3"}}, {}, {}, ["n2"], ["n1"]),
        ({}, {}, {"SBATCH_EXCLUDE": "n3"}, ["n2"], ["n1"]),
        ({}, {"exclude": "n[3-"}, {}, ["n1", "n2"], []),
        ({}, {"nodelist": "n[1,3]"}, {}, ["n2"], ["n1"]),
        ({"slurm": {"nodelist": "n2"}}, {}, {}, ["n1"], ["n2"]),
        ({"slurm": {"partition": "big"}}, {}, {}, [], []),
        ({"slurm": {"partition": "big"}}, {"partition": "low"}, {}, ["n1", "n2"], []),
        ({"slurm": {"partition": "big"}}, {}, {"SBATCH_PARTITION": "high"}, ["n1", "n2"], []),
        ({"exclusions": {"max_excluded_fraction": 0.25}}, {}, {}, ["n2"], ["n1"]),
        ({"exclusions": {"threshold": 2.5}}, {}, {}, ["n2"], []),
        ({"exclusions": {"threshold": 2.5, "half_life_hours": {"rerun_persistent": 0.001}}}, {}, {}, [], []),
    ],
)  # fmt: skip
def test_the_request_counts(cluster, tmp_path, changes, options, environment, nodes, dropped):
    run = config(tmp_path, **changes)
    listed(run, seen("n1", weight=2.0), seen("n2", weight=3.0))
    found = for_submission(run, options, {**os.environ, **environment})
    assert (list(found.nodes), [each.node for each in found.dropped]) == (nodes, dropped)


def test_a_silent_slurm_is_told_and_nothing_is_avoided(cluster, tmp_path):
    run = config(tmp_path)
    listed(run, seen("n1"))
    cluster.says("sinfo", "echo 'Unable to contact slurm controller' >&2; exit 1")
    found = for_submission(run, {}, os.environ)
    assert found.nodes == ()
    assert found.lines()[0].startswith("warning: no node is avoided: sinfo -h -a: Unable to contact")


def test_a_damaged_list_is_told_and_nothing_is_avoided(cluster, tmp_path):
    run = config(tmp_path)
    path = list_path(None, os.environ)
    path.parent.mkdir(parents=True)
    for content, words in ((b"{", "is damaged"), (b'{"format": 9}', "has format 9")):
        path.write_bytes(content)
        found = for_submission(run, {}, os.environ)
        assert found.nodes == ()
        assert words in found.lines()[0]


def test_what_can_be_believed_of_a_damaged_list_is_avoided(cluster, tmp_path):
    """With a right checksum and a number of 309 digits for a time it once stopped every submission."""
    run = config(tmp_path)
    listed(run, seen("n1"), manual=(ManualEntry(node="n2", reason="fan", who="me", at=1.0),))
    path = list_path(None, os.environ)
    rest = path.read_bytes().partition(b"\n")[2].replace(b'"at": 1.0', b'"at": ' + b"9" * 309)
    path.write_bytes(b'{"format": 1, "crc": %d,\n' % zlib.crc32(rest) + rest)
    found = for_submission(run, {}, os.environ)
    assert found.nodes == ("n1",)
    assert found.lines()[0].startswith(f"warning: not every node that should be is avoided: {path} is damaged")
    assert read_exclusions(run).damage, "nor does it stop a requeue"


def test_a_filesystem_that_does_not_answer_keeps_nobody_from_submitting(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(ExclusionList, "read", lambda _: threading.Event().wait(30))
    run = config(tmp_path, exclusions={"path": str(tmp_path / "stalled")})
    monkeypatch.setattr(avoided_nodes, "LIST_S", 0.2)
    assert "did not answer" in for_submission(run, {}, os.environ).lines()[0]


def test_another_cluster_is_not_judged_by_this_ones_list(cluster, tmp_path):
    run = config(tmp_path)
    listed(run, seen("n1"))
    assert "another cluster" in for_submission(run, {"clusters": "c2"}, os.environ).problem
    assert "another cluster" in for_submission(config(tmp_path, slurm={"clusters": "c2"}), {}, os.environ).problem


REFUSED = "sbatch refused the job: Batch job submission failed: Requested node configuration is not available"


def test_a_refusal_drops_the_weaker_half_again_and_again():
    tried: list[frozenset[str]] = []

    def submit(nodes: frozenset[str]) -> str:
        tried.append(nodes)
        if len(nodes) > 1:
            raise SlurmError(REFUSED)
        return "7"

    names = ("n1", "n2", "n3", "n4", "n5")
    asked = Avoidance(nodes=names, weakest_first=names, reasons=dict.fromkeys(names, "x"))
    job, avoided = submitted(asked, submit)
    assert (job, tried) == ("7", [frozenset(names), frozenset({"n4", "n5"}), frozenset({"n5"})])
    assert (avoided.nodes, avoided.reasons) == (("n5",), {"n5": "x"})
    assert [each.node for each in avoided.dropped] == ["n3", "n2", "n1", "n4"]
    assert "Slurm refuses the request" in " ".join(avoided.lines())


@pytest.mark.parametrize(("words", "tries"), [(REFUSED, 3), ("Invalid account", 1)])
def test_a_refusal_for_another_reason_stays_one(words, tries):
    tried: list[frozenset[str]] = []

    def submit(nodes: frozenset[str]) -> str:
        tried.append(nodes)
        raise SlurmError(words)

    with pytest.raises(SlurmError, match=words):
        submitted(Avoidance(nodes=("n1", "n2"), weakest_first=("n1", "n2")), submit)
    assert len(tried) == tries


# where the list is


def test_the_list_is_the_clusters_and_the_users(cluster, tmp_path, monkeypatch):
    folder = tmp_path / "state" / "slurmft"
    assert list_path(None, os.environ) == folder / "exclusions-lab.json"
    assert list_path(None, {**os.environ, "SLURM_CLUSTER_NAME": "../a b"}) == folder / "exclusions-_a_b.json"
    assert list_path(Path("/g/{cluster}/x.json"), os.environ) == Path("/g/lab/x.json")
    assert list_path(Path("/g/x.json"), {}) == Path("/g/x.json")
    assert cluster.questions() == []
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    for state in ("", "relative"):
        path = list_path(None, {**os.environ, "XDG_STATE_HOME": state})
        assert path == home / ".local/state/slurmft/exclusions-lab.json"


def test_a_cluster_without_a_name_on_this_machine_is_asked_once(cluster, tmp_path):
    (tmp_path / "slurm.conf").write_text("Include other.conf\n")
    assert [cluster_name(os.environ), cluster_name(os.environ)] == ["asked", "asked"]
    assert cluster.questions() == ["scontrol show config"]
    avoided_nodes._asked_cluster.cache_clear()
    cluster.says("scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(SlurmUnavailable):
        cluster_name(os.environ)
    assert "Unable to contact" in for_submission(config(tmp_path), {}, os.environ).problem


def test_off_slurm_the_cluster_is_local(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.delenv("SLURM_CLUSTER_NAME", raising=False)
    monkeypatch.setattr(slurm, "_CONFIGURATIONS", [tmp_path / "none"])
    assert cluster_name(os.environ) == "local"


def test_nobodys_home_is_an_error_of_ours(monkeypatch):
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(StorageError, match="home folder"):
        list_path(None, {"SLURM_CLUSTER_NAME": "c"})


# where a run goes on


@pytest.fixture
def run_in_slurm(cluster, tmp_path) -> RunConfig:
    """On a cluster whose sbatch refuses to do without n1, in job 7, whose user excludes n4 and asks for n3."""
    cluster.says("scontrol", "echo 'JobId=7 UserId=a(1) GroupId=a(1) ReqNodeList=n3 ExcNodeList=n[2,4]'")
    cluster.says("sbatch", f'case "$*" in *=n1*|*"[1"*) echo "{REFUSED}" >&2; exit 1 ;; esac')
    found = config(tmp_path, nodes=1, exclusions={"max_excluded_fraction": 1.0})
    RunFolder(found.run_folder).create()
    RunFolder(found.run_folder).script.write_text("#!/bin/bash\n")
    return found


REFUSED = "sbatch: error: Requested node configuration is not available"


def event(name: str, **details: object) -> Event:
    return Event(at=datetime(2026, 1, 1, tzinfo=UTC), attempt="7.0.0", event=name, details=details)


HISTORY = [event("submitting", excluded="n4"), event("attempt started"), event("avoiding", nodes="n[2,4]")]


def test_where_a_job_goes_on_its_users_nodes_stay_its_users(run_in_slurm):
    found = next_placement(run_in_slurm, partition="low", job=OwnJob("7"), history=HISTORY, suspects=["n2"])
    assert found is not None
    assert (found.own, found.excluded, found.impossible) == ({"n4"}, {"n2", "n4"}, "")
    later = next_placement(run_in_slurm, partition="low", job=OwnJob("7"), history=HISTORY, suspects=[])
    assert later is not None
    assert later.excluded == {"n4"}


@pytest.mark.parametrize(("suspect", "why"), [("n1", "Slurm refuses"), ("n3", "nodelist")])
def test_a_suspect_that_the_request_cannot_do_without_is_said_before_the_job_is_stuck(run_in_slurm, suspect, why):
    found = next_placement(run_in_slurm, partition="low", job=OwnJob("7"), history=HISTORY, suspects=[suspect])
    assert found is not None
    assert found.excluded == {"n4"}
    assert why in found.impossible


@pytest.mark.parametrize(("nodes", "keep_off"), [(["n1", "n2", "n3"], {"n2"}), (["n2", "n3"], set())])
def test_a_slurm_that_does_not_answer_keeps_no_run_on_a_node_that_it_need_not_have(
    run_in_slurm, monkeypatch, nodes, keep_off
):
    def silent(*_args, **_more):
        raise SlurmUnavailable("no answer")

    listed(run_in_slurm, seen("n2"))
    monkeypatch.setattr(placement, "named_by_user", silent)
    config = run_in_slurm.model_copy(update={"nodes": 2})
    assert to_keep_off(config, partition="low", job=OwnJob("7"), history=HISTORY, allocated=nodes) == keep_off


@pytest.mark.parametrize(("part", "keep_off"), [("", {"n2"}), ("n[1-2]", set())])
def test_a_role_stays_where_its_job_could_not_do_without_the_node(run_in_slurm, monkeypatch, part, keep_off):
    """The job needs three nodes, its role two: the role left for other nodes, and came back to the same, in vain."""
    listed(run_in_slurm, seen("n2"))
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURMFT_NODES": part}.items():
        monkeypatch.setenv(name, value)
    config = run_in_slurm.model_copy(update={"nodes": 2})
    found = to_keep_off(config, partition="low", job=OwnJob("7"), history=HISTORY, allocated=["n1", "n2"])
    assert found == keep_off


def test_what_cannot_be_kept_away_from_has_not_escaped(run_in_slurm):
    listed(run_in_slurm, seen("n1"), seen("n2"), seen("n3"))
    keep_off = to_keep_off(
        run_in_slurm, partition="low", job=OwnJob("7"), history=HISTORY, allocated=["n1", "n2", "n3"]
    )
    assert keep_off == {"n2"}
