"""The digests of a rank that was started again are those of its new page."""

from dataclasses import dataclass
from pathlib import Path

from slurmft.agent.agent import DigestReports
from slurmft.ipc.pages import Page


@dataclass
class Worker:
    rank: int
    page: Page


def test_a_rank_that_is_started_again_has_a_page_of_its_own(tmp_path: Path) -> None:
    """The page of its life before is closed: a look into it would end the agent's reports, and with them the agent."""
    first = Worker(0, Page.create(tmp_path / "first", rank=0, generation=1))
    reports = DigestReports()
    assert list(reports.new([first])) == []
    first.page.close()
    second = Worker(0, Page.create(tmp_path / "second", rank=0, generation=1))
    assert list(reports.new([second])) == []
    second.page.close()
