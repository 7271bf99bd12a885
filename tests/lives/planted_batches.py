"""Faults of ours in what answers batches, each in one place, and the life of a batch that shows it; as ``planted``."""

from typing import Any

from lives import faults
from lives.batches import BATCH, BatchWorld, hang_all, lose_power, lose_power_of_supervisor
from lives.life import Bounds, lived
from lives.planted import SLURM, Planted, Scene, _nothing, _put, _wrap, run_folder_is
from lives.world import World
from slurmft.inference import coordinator as coordinator_module
from slurmft.inference.coordinator import Leases
from slurmft.inference.driver import Driver
from slurmft.inference.ledger import Partials
from slurmft.inference.pool import ReplicaPool, Watched
from slurmft.storage.queue import SegmentWriter
from slurmft.supervisor.inference import InferenceAttempt


def _life(*befalls: tuple[float, faults.Fault], shift_s: float = 0.2, stops: bool = False, **settings: Any) -> Scene:
    def scene(seed: int) -> World:
        moved = [(at_s + seed * shift_s, fault) for at_s, fault in befalls]
        longest_s = 1600.0 if "in_slurm" in settings else 300.0
        given = {**BATCH, "until": 20, "nodes": 2, **settings}
        return lived(moved, seed=seed, kind=BatchWorld, bounds=Bounds(stops=stops, longest_s=longest_s), **given)

    return scene


AGENT = _life((3.0, faults.kill_agent))
REPLICA = _life((3.0, faults.kill_rank), nodes=1)
ALONE = _life((3.0, faults.kill_rank), nodes=1, inference={"concurrency": 1})
HUNG = _life((3.0, hang_all), nodes=1)
POWER = _life((3.0, lose_power), inference={"concurrency": 2, "commit_interval_s": 0.1})
BATCH_HOST = _life((3.0, lose_power_of_supervisor), in_slurm=SLURM, slurm={"partition": "low"})
FULL = _life((3.0, run_folder_is("full", 5.0)), nodes=1)
RESET = _life((3.0, faults.reset))
LONG: dict[str, Any] = {"nodes": 1, "until": 50, "answer_s": 2.0}
STOP = _life((3.0, faults.ask_for_stop), stops=True, **LONG)
REQUEUE = _life((3.0, faults._request("REQUEUE")), **LONG)


def _unsynced(kind: str) -> Any:
    """Files of this kind are never made durable."""

    def sync(real: Any, self: SegmentWriter) -> None:
        if not self.path.name.startswith(kind):
            real(self)

    return _wrap(SegmentWriter, "sync", sync)


async def _salvaged(_: Any, replica: Any) -> list[int]:
    return []


def _written(real: Any, *args: Any) -> bool:
    real(*args)
    return True


def _any_text(real: Any, self: Partials, key: str) -> Any:
    return real(self, next(iter(self._entries), key))


def _nearly(self: Leases) -> bool:
    return self.done >= self.total - 1


async def _not_revoked(real: Any, self: ReplicaPool, **begin: Any) -> None:
    held = [(replica, dict(replica.in_flight)) for replica in self.replicas]
    await real(self, **begin)
    for replica, in_flight in held:
        replica.in_flight |= in_flight


def _forgets(real: Any, self: Leases, done: Any, **rest: Any) -> None:
    real(self, done, **rest)
    if self.done and not self.finished:
        self.answered([(int(done.argmin()), int(done.argmin()) + 1)])


PLANTED: dict[str, Planted] = {
    "what a lost agent had is nobody's": Planted(
        _put(Leases, "lose", lambda *_: 0), "every life ends", AGENT),
    "what a dead engine had is nobody's": Planted(
        _put(Leases, "died", lambda *_: []), "every life ends", REPLICA),
    "what a dead engine has written is not looked at": Planted(
        _put(ReplicaPool, "_salvage", _salvaged), "every life ends", REPLICA),
    "a hang is not seen": Planted(_put(Watched, "overdue", lambda *_: ""), "every life ends", HUNG),
    "one death makes a request a poisoned one": Planted(
        _put(coordinator_module, "is_poison", lambda _: True), "no request is given up", ALONE),
    "answers are told before they are durable": Planted(_unsynced("g"), "what counts can be read", POWER),
    "nothing is made durable": Planted(_unsynced(""), "what counts is kept", BATCH_HOST),
    "an answer that was not written is told": Planted(
        _wrap(Driver, "_write", _written), "what counts can be read", FULL),
    "the output is written before the last answer": Planted(
        _put(Leases, "finished", property(_nearly)), "what counts can be read", REPLICA),
    "an answer goes on from another request's text": Planted(
        _wrap(Partials, "take", _any_text), "every request is answered", REPLICA),
    "a request is lost at a requeue": Planted(
        _wrap(Leases, "__init__", _forgets), "what counts can be read", REQUEUE),
    "a new lease does not end the old one": Planted(_wrap(ReplicaPool, "begin", _not_revoked), "every", RESET),
    "requests of the user are not heeded": Planted(
        _put(InferenceAttempt, "_heed_requests", _nothing), "requests are answered", REQUEUE),
    "a stop is not heeded": Planted(_put(InferenceAttempt, "_heed_requests", _nothing), "stop means stop", STOP),
}  # fmt: skip
