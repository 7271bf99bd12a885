"""The digests of a worker are told once; one that was started again begins anew."""

from pathlib import Path

from slurmft.agent.agent import new_digests
from slurmft.agent.workers import Worker
from slurmft.ipc.messages import RankDigests
from slurmft.ipc.pages import Page


def test_each_digest_is_told_once_and_a_rank_that_is_started_again_begins_anew(tmp_path: Path) -> None:
    """The page of its life before is closed: a look into it would end the agent's reports, and with them the agent."""
    first = Worker(0, Page.create(tmp_path / "first", rank=0, generation=1), tmp_path / "stacks")
    assert list(new_digests([first])) == []
    first.digests.add(3, 10, 77)
    [report] = new_digests([first])
    assert report.ranks == (RankDigests(rank=0, group=3, digests=((10, 77),)),)
    assert list(new_digests([first])) == []
    first.close()
    second = Worker(0, Page.create(tmp_path / "second", rank=0, generation=1), tmp_path / "stacks")
    assert list(new_digests([second])) == []
    second.close()
