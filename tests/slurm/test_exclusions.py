"""The exclusion list on a real cluster: jobs stay off excluded nodes, and the list keeps none of them from starting."""

import json
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import Run, eventually
from slurmft.lab.cluster import Lab
from slurmft.scheduler.slurm import compress, expand, parse_nodes
from slurmft.storage.exclusions import ExclusionList

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

NewRun = Callable[..., Run]

WRITERS = """
import os, sys, time
from pathlib import Path
from slurmft.policy.suspicion import Observation
from slurmft.storage.exclusions import ExclusionList
path, count = Path(sys.argv[1]), int(sys.argv[2])
host = os.uname().nodename
ready, go = os.pipe()
for number in range(count):
    if not os.fork():
        os.close(go)
        os.read(ready, 1)
        made = Observation(kind="crash", node=host, weight=0.1, at=time.time(), id=f"{host}.{number}")
        ExclusionList(path).observe([made])
        os._exit(0)
(path.parent / f"ready-{host}").touch()
while len(list(path.parent.glob("ready-*"))) < 4:
    time.sleep(0.05)
os.close(go)
sys.exit(sum(os.wait()[1] != 0 for _ in range(count)))
"""


def shown(lab: Lab, job: str) -> dict[str, str]:
    text = lab.run(["scontrol", "-o", "show", "job", job]).stdout
    return dict(word.split("=", 1) for word in text.split() if "=" in word)


def test_a_job_stays_off_excluded_nodes_and_the_list_never_keeps_it_from_starting(lab: Lab, new_run: NewRun) -> None:
    path = lab.home / "exclusions" / "list.json"
    shutil.rmtree(path.parent, ignore_errors=True)  # of a first try
    run = new_run(command=["python", "-c", "pass"], nproc_per_node=1, exclusions={"path": str(path)})
    list_of = ("--config", str(run.config))
    known = {(each.node, each.partition, each.is_default, each.usable)
             for each in parse_nodes(lab.run(["sinfo", "-h", "-a", "-N", "-o", "%N|%P|%T"]).stdout)}  # fmt: skip
    assert known == {
        (f"n{n}", partition, partition == "low", True)
        for n in range(1, 5) for partition in ("low", "high", "nograce", "cancel")
    }  # fmt: skip
    names = ["n1", "n2", "n08", "n09", "n10", "a-1-b3", "a-1-b4", "x7-ib", "login"]
    assert lab.run(["scontrol", "show", "hostnames", compress(names)]).stdout.split() == expand(compress(names))

    run.slurmft("exclude", "add", "n[1,99]", "--reason", "fan", *list_of)
    dry = lab.run(["slurmft", "submit", str(run.config), "--dry-run"])
    assert "#SBATCH --exclude=n1\n" in dry.stdout
    assert "avoiding n1 (n1: fan (by " in dry.stderr
    assert "Slurm does not know n99" in dry.stderr
    assert not run.path.exists()
    job = run.submit()
    run.wait_until_done()
    facts = shown(lab, job)
    assert facts["ExcNodeList"] == "n1"
    assert "n1" not in expand(facts["NodeList"])
    told = run.events("avoiding")[0].details
    assert (told["nodes"], told["unknown"]) == ("n1", ["n99"])

    run.slurmft("exclude", "add", "n[2-3]", "--reason", "cable", *list_of)
    too_many = new_run("too-many", command=["python", "-c", "pass"], nproc_per_node=1, nodes=3,
                       exclusions={"path": str(path), "max_excluded_fraction": 1.0})  # fmt: skip
    said = lab.run(["slurmft", "submit", str(too_many.config)], timeout=90)
    assert "avoiding n1 (" in said.stderr
    assert "warning: not avoiding n[2-3]: without it fewer than 3 usable nodes would be left" in said.stderr
    too_many.wait_until_done()
    refused = lab.run(["sbatch", "-N", "3", "-x", "n[1-2]", "--wrap", "true"], check=False, cwd=lab.home)
    assert "node configuration is not available" in refused.stderr, "the words that make a submission try with fewer"

    path.write_text("{")
    damaged = new_run("damaged", command=["python", "-c", "pass"], nproc_per_node=1, exclusions={"path": str(path)})
    said = lab.run(["slurmft", "submit", str(damaged.config)], timeout=90)
    assert f"warning: no node is avoided: {path} is damaged" in said.stderr
    assert "submitted damaged as job" in said.stdout


def test_a_thousand_writers_on_four_hosts_lose_nothing(lab: Lab) -> None:
    folder = lab.home / "writers"
    lab.run(["mkdir", "-p", str(folder)])
    script, path = folder / "writers.py", folder / "list.json"
    script.write_text(textwrap.dedent(WRITERS))
    options = ["--parsable", "-p", "low", "-N", "4", "--ntasks-per-node", "1", "-t", "5", "-o", str(folder / "log")]
    job = lab.run(["sbatch", *options, "--wrap", f"srun python {script} {path} 250"], cwd=lab.home).stdout.strip()
    eventually(lambda: shown(lab, job)["JobState"] in ("COMPLETED", "FAILED"), 120, "the writers' job ended")
    assert shown(lab, job)["ExitCode"] == "0:0", (folder / "log").read_text()
    expected = {f"n{host}.{number}" for host in range(1, 5) for number in range(250)}
    assert {each.id for each in ExclusionList(path).read().observations} == expected
    lab.run(["slurmft", "exclude", "gc", "--file", str(path)])
    assert {row[4] for row in json.loads(path.read_bytes())["observations"]} == expected
    assert sorted(entry.name for entry in folder.iterdir() if entry.name.startswith(("list", "."))) == [
        "list.json", "list.json.new",
    ]  # fmt: skip
    assert not any(Path(f"{path}.new").iterdir())
