"""The supervisor's roster: which replicas routers are told of, which nodes have a router, and what clients find."""

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from slurmft.config.inference import InferenceConfig
from slurmft.inference.coordinator import Roster
from slurmft.inference.endpoint import HighAvailabilityCluster
from slurmft.ipc.messages import Call, Members, ReplicaDied, ReplicaPhase, ReplicaPlace, RouterPhase
from slurmft.policy.inference import Restarts


class Cluster:
    """A roster, and what each of its agents was told last."""

    def __init__(self, folder: Path, *, nodes: int = 3, routers: int = 2, per_node: int = 2) -> None:
        config = InferenceConfig.model_validate(
            {"engine": {"command": ["e", "{port}"]}, "replicas_per_node": per_node, "serving": {"routers": routers}}
        )
        self.roster = Roster(config, nodes=nodes, run_folder=folder, submit=self._submit, served=100)
        self.told: dict[int, Members] = {}
        self.epochs: dict[int, int] = {}

    @staticmethod
    def _submit(work: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work())
        return done

    def join(self, node: int, lender: str = "") -> None:
        if lender:
            self.roster.lenders[node] = lender

        def send(call: Call[Any]) -> None:
            assert isinstance(call, Members)
            self.told[node] = call

        self.epochs[node] = self.roster.join(node, f"n{node}", send)
        self.roster.admit(node)

    def replica(self, node: int, number: int, phase: str = "ready", life: int = 1) -> bool:
        where: dict[str, Any] = {"hosts": (f"n{node}",), "port": 4000 + number} if phase == "ready" else {}
        report = ReplicaPhase(epoch=self.epochs[node], replica=number, phase=phase, life=life, **where)
        return self.roster.on_report(node, report)

    def router(self, node: int, phase: str = "ready", answered: int = 0) -> None:
        report = RouterPhase(epoch=self.epochs[node], phase=phase, hosts=(f"n{node}",), port=80, answered=answered)
        self.roster.on_report(node, report)

    @property
    def on(self) -> set[int]:
        """Nodes with a replica that is to be on."""
        return {node for node in self.roster.agents if self.told[node].on}

    @property
    def with_router(self) -> list[int]:
        return sorted(node for node, call in self.told.items() if call.router and node in self.roster.agents)

    def names(self, node: int) -> list[str]:
        return [place.name.partition("#")[0] for place in self.told[node].replicas]


def test_every_router_is_told_of_every_replica_that_is_ready(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for node in range(3):
        cluster.join(node)
    assert cluster.with_router == [0, 1]
    cluster.replica(0, 0, "starting")
    assert cluster.names(2) == []
    cluster.replica(0, 0)
    cluster.replica(2, 1)
    assert cluster.names(0) == cluster.names(1) == ["n0.0/0", "n2.2/1"]
    assert cluster.told[0].expected == 6
    died = ReplicaDied(epoch=cluster.epochs[0], replica=0, name="n0/0#1", code=-9, how="ended by SIGKILL", in_flight=(),
                       was_ready=True, answered=3, failures=1, load=0)  # fmt: skip
    cluster.roster.on_report(0, died)
    assert cluster.names(1) == ["n2.2/1"]
    cluster.replica(0, 0, life=2)
    assert len({place.name for place in cluster.told[1].replicas}) == 2, "another life has another name"


def test_the_replicas_of_a_lost_agent_are_gone_and_another_node_gets_its_router(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for node in range(3):
        cluster.join(node)
        cluster.replica(node, 0)
    cluster.router(0)
    cluster.router(1)
    before = cluster.epochs[0]
    cluster.roster.lose(0)
    assert cluster.with_router == [1, 2] and cluster.names(1) == ["n1.1/0", "n2.2/0"]
    assert [each.node for each in cluster.roster.cluster.routers] == ["n1"]
    late = ReplicaPhase(epoch=before, replica=0, phase="ready", life=1, hosts=("n0",), port=4000)
    assert not cluster.roster.on_report(0, late)
    cluster.join(0)
    assert not cluster.roster.on_report(0, late), "what it said before it was lost does not count"
    assert cluster.with_router == [0, 1]


def test_a_router_that_stays_down_is_replaced_and_its_requests_stay_counted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for node in range(3):
        cluster.join(node)
    cluster.router(0, answered=5)
    cluster.router(0, answered=9)
    assert cluster.roster.requests.done == 109
    cluster.router(0, "died")
    assert cluster.with_router == [0, 1] and not cluster.roster.cluster.available
    cluster.router(0, answered=2)
    assert cluster.roster.requests.done == 111, "its next life counts from 0"
    cluster.router(0, "down")
    assert cluster.with_router == [1, 2]
    cluster.router(1, "down")
    assert not cluster.roster.routers_down
    cluster.router(2, "down")
    assert cluster.roster.routers_down and not cluster.roster.all_down


def test_all_replicas_must_be_down_before_the_endpoint_is(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=1)
    cluster.join(0)
    assert not cluster.roster.all_down
    cluster.replica(0, 0, "down")
    assert not cluster.roster.all_down
    cluster.replica(0, 1, "down")
    assert cluster.roster.all_down


def test_the_cluster_of_routers_is_read_as_it_was_written(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for node in (1, 0):
        cluster.join(node)
        cluster.router(node)
    found = cluster.roster.cluster
    found.write(tmp_path)
    assert HighAvailabilityCluster.read(tmp_path) == found
    assert [each.urls for each in found.routers] == [["https://n0:80"], ["https://n1:80"]]


def test_restarts_of_an_endpoint_are_counted_within_a_window() -> None:
    restarts, delays = Restarts(2, window_s=100.0), []
    for at_s in (0.0, 10.0, 20.0, 105.0, 300.0):
        restarts = restarts.failed(at_s)
        delays.append(restarts.delay_s)
        restarts = restarts.succeeded()
    assert delays == [0.0, 1.0, None, None, 0.0], "what it answers in between does not matter, and old failures neither"
    assert restarts.failures == 1


def test_a_handover_gives_the_routers_the_heirs_replicas_and_then_ends_them(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    for node in range(2):
        cluster.join(node)
        cluster.replica(node, 0)
        cluster.router(node)
    readiness = cluster.roster.readiness()
    assert (readiness.ready, readiness.routers, readiness.routers_wanted) == (2, 2, 2)
    heirs = [ReplicaPlace(name="n0.0/0#1.1", hosts=("n0",), port=5000)]
    cluster.roster.hand_over(heirs, "7")
    told = cluster.told[0]
    assert [place.name for place in told.replicas] == ["n0.0/0#1.4000", "n1.1/0#1.4000", "n0.0/0#1.1@7"]
    assert told.expected == 1 and cluster.with_router == [0, 1]
    cluster.roster.retire()
    assert cluster.with_router == []
    cluster.router(0, "ended")
    cluster.router(1, "ended")
    assert cluster.roster.cluster.routers == ()


async def test_a_roster_that_follows_another_one_tells_routers_nothing_until_it_knows_what_they_know(
    tmp_path: Path,
) -> None:
    before, after = Cluster(tmp_path, nodes=2), Cluster(tmp_path, nodes=2)
    after.roster.hold(60)
    for cluster, order in ((before, (0, 1)), (after, (1, 0))):
        for node in order:
            cluster.join(node)
            cluster.router(node)
            for number in range(2):
                assert cluster is before or cluster.told == {}
                cluster.replica(node, number)
    assert set(after.told[0].replicas) == set(before.told[0].replicas), "names are the same: nothing is done again"
    assert after.with_router == [0, 1]
    after.replica(0, 1, "waiting")
    assert len(after.names(1)) == 3


async def test_replicas_that_do_not_report_to_the_next_roster_are_waited_for_a_while(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=2)
    cluster.roster.hold(0.05)
    cluster.join(0)
    cluster.replica(0, 0)
    assert cluster.told == {}
    async with asyncio.timeout(10):
        while not cluster.told:
            await asyncio.sleep(0.01)
    assert cluster.names(0) == ["n0.0/0"]


def test_routers_hear_that_the_endpoint_goes_away_from_the_supervisor_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join(0)
    cluster.replica(0, 0)
    cluster.replica(0, 0, "waiting")
    assert not cluster.told[0].closing
    cluster.roster.hand_over((), "8")
    assert cluster.told[0].closing, "no one is left to pass requests to"
    other = Cluster(tmp_path)
    other.join(0)
    other.roster.stop()
    assert other.told[0].closing


def lent(folder: Path) -> Cluster:
    """A node of its own and two lent ones, with a replica each."""
    cluster = Cluster(folder, nodes=1, per_node=1)
    cluster.roster.wanted = 3
    cluster.join(0)
    cluster.router(0)
    for node in (1, 2):
        cluster.join(node, lender=f"job{node}")
    return cluster


def test_replicas_on_lent_nodes_are_stopped_first(tmp_path: Path) -> None:
    cluster = lent(tmp_path)
    assert cluster.on == {0, 1, 2}
    for node in range(3):
        cluster.replica(node, 0)
    assert cluster.names(0) == ["n0.0/0", "n1.job1/0", "n2.job2/0"], "the job is the same for the next supervisor"
    cluster.roster.want(2)
    assert cluster.on == {0, 1} and cluster.roster.is_used(2), "it has something to finish"
    cluster.replica(2, 0, "off")
    assert not cluster.roster.is_used(2) and cluster.roster.is_used(1)
    cluster.roster.want(0)
    assert cluster.on == set()


def test_a_replica_on_a_lent_node_stays_until_that_of_the_own_node_is_ready(tmp_path: Path) -> None:
    cluster = lent(tmp_path)
    for node in (1, 2):
        cluster.replica(node, 0)
    cluster.replica(0, 0, "starting")
    cluster.roster.want(1)
    assert cluster.on == {0, 1}
    cluster.replica(0, 0)
    assert cluster.on == {0}


def test_another_replica_begins_when_the_job_that_lends_a_node_ends(tmp_path: Path) -> None:
    cluster = lent(tmp_path)
    cluster.roster.want(2)
    for node in (0, 1):
        cluster.replica(node, 0)
    assert cluster.on == {0, 1}
    cluster.roster.let_go(1)
    assert cluster.on == {0, 2}


def test_a_lent_node_has_a_router_only_in_place_of_a_lost_one(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, nodes=2)
    cluster.roster.wanted = 0
    cluster.join(0)
    for node in (2, 3):
        cluster.join(node, lender=f"job{node}")
    assert cluster.with_router == [0, 2]
    cluster.router(2)
    assert cluster.roster.is_used(2) and not cluster.roster.is_used(3)
    cluster.join(1)
    assert cluster.with_router == [0, 1]
    cluster.router(2, "ended")
    assert not cluster.roster.is_used(2)
