"""The replicas of an endpoint get another engine one by one, while a hundred clients ask it."""

import pytest
import yaml

from slurm.conftest import eventually
from slurm.endpoints import NODES, REPLICAS, EndpointRun, Load, NewEndpoint
from slurmft.inference.endpoint import State, read_update
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


def with_engine(run: EndpointRun, *more: str) -> str:
    """Another configuration file, of an engine with these options more; returns its path."""
    config = yaml.safe_load(run.config.read_text())
    config["inference"]["engine"]["command"] += more
    path = run.path.parent / "update.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.long
def test_an_update_replaces_all_engines_and_goes_back_from_a_bad_one(lab: Lab, new_endpoint: NewEndpoint) -> None:
    run = new_endpoint(max_restarts=1)
    run.submit()
    load = Load(run, 150)
    run.wait_for_step(300)
    told = run.slurmft("serve", "--update", with_engine(run, "--delay", "0.1"))
    assert f"all {NODES * REPLICAS} replicas" in told
    assert "0.1" in (run.path / "config.yaml").read_text()
    assert len(run.events("replica ready")) == 2 * NODES * REPLICAS, run.story()

    bad = lab.run(["slurmft", "serve", "--update", with_engine(run, "--no-such-option")], check=False, timeout=120)
    assert bad.returncode == 75 and "went back to the old engine" in bad.stderr, f"{bad}\n{run.story()}"
    went = run.wait_for("update went back")
    assert "replica" in went.details["reason"]
    assert "no-such-option" not in (run.path / "config.yaml").read_text()
    update = read_update(run.folder)
    assert update is not None and (update.number, update.state) == (2, State.BACK)
    assert "went back" in run.slurmft("status", str(run.path))
    # one that begins well, and refuses all that clients ask
    refusing = lab.run(["slurmft", "serve", "--update", with_engine(run, "--key", "other")], check=False, timeout=120)
    assert refusing.returncode == 75 and "HTTP 401" in refusing.stderr, f"{refusing}\n{run.story()}"
    load.enough(right=600)

    config = yaml.safe_load(run.config.read_text())
    config["inference"]["concurrency"] = 3
    (run.path.parent / "more.yaml").write_text(yaml.safe_dump(config))
    refused = lab.run(["slurmft", "serve", "--update", str(run.path.parent / "more.yaml")], check=False)
    assert refused.returncode == 2 and "inference.concurrency" in refused.stderr, refused
    run.end()


@pytest.mark.soak
def test_a_supervisor_killed_in_the_middle_of_an_update_leaves_the_old_engine(
    lab: Lab, new_endpoint: NewEndpoint
) -> None:
    run = new_endpoint()
    run.submit()
    before = (run.path / "config.yaml").read_text()
    load = Load(run, 50)
    path = with_engine(run, "--delay", "0.1")
    lab.run(["bash", "-c", f"slurmft serve --update {path} > {run.path.parent}/told 2>&1 &"], check=False)
    run.wait_for("replica ready", NODES * REPLICAS + 1)
    host = run.events("attempt started")[0].details["host"]
    found = lab.run_on_as_admin(host, ["pgrep", "-f", "[s]lurmft run "]).stdout.split()
    lab.run_on_as_admin(host, ["kill", "-9", found[-1]])
    run.wait_for("update went back")
    assert (run.path / "config.yaml").read_text() == before
    eventually(lambda: "went back" in (run.path.parent / "told").read_text(), 20, run.story)
    load.result(right=600)
    run.end()
