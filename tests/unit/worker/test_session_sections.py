"""What a session's page says that a rank is doing: in its setup, its steps, saves and evaluations, and after them."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slurmft.ipc.pages import Page, Slot, State, open_sections
from slurmft.policy.stop import END
from slurmft.worker.session import Session, start_session

INTERVAL_STEPS = 2

pytestmark = pytest.mark.usefixtures("own_environment")


@pytest.fixture
def session(page) -> Iterator[Session]:
    with start_session() as session:
        yield session


def doing(page: Page) -> list[str]:
    return [section.name for section in open_sections(page)[0]]


def test_a_run_from_its_setup_to_its_end(page: Page, session: Session):
    assert doing(page) == ["setup"]
    assert page[Slot.ATTACHED_AT_NS] > 0
    saves = []
    for step in session.steps(start=0, until=4, save=lambda step: saves.append((step, doing(page)))):
        with session.section("load"):
            assert doing(page) == ["step", "load"]
        if step == 1:
            for batch in session.evaluating("ab"):
                assert doing(page) == ["evaluation"], batch
            assert doing(page) == ["step"]
    assert saves == [(2, ["checkpointing"]), (4, ["checkpointing"])]
    assert doing(page) == []


def test_each_batch_of_an_evaluation_begins_anew(page: Page, session: Session):
    began = []
    for _ in session.steps(start=0, until=1, save=lambda step: None):
        for _ in session.evaluating("abc"):
            began.append(open_sections(page)[0][0].began_ns)
    assert began == sorted(set(began))
    assert len(began) == 3


def test_an_evaluation_that_is_left_early_is_over(page: Page, session: Session):
    for _ in session.steps(start=0, until=1, save=lambda step: None):
        for _ in session.evaluating("abc"):
            break
        assert doing(page) in (["step"], ["evaluation"])  # its iterator may be collected later
    assert doing(page) == []


def test_a_loop_that_is_left_early_leaves_no_step_open(page: Page, session: Session):
    for step in session.steps(start=0, until=4, save=lambda step: None):
        if step == 1:
            break
    assert doing(page) == []
    with pytest.raises(ValueError, match="bad"):
        for _ in session.steps(start=0, until=4, save=lambda step: None):
            raise ValueError("bad")
    assert doing(page) == []


def test_evaluations_before_the_first_step_and_after_the_last_one_change_nothing(page: Page, session: Session):
    assert list(session.evaluating("ab")) == ["a", "b"]
    assert (doing(page), page[Slot.STATE]) == (["setup"], State.SETUP)
    for _ in session.steps(start=0, until=1, save=lambda step: None):
        pass
    for _ in session.evaluating("ab"):
        assert (doing(page), page[Slot.STATE]) == (["evaluation"], State.EVALUATING)
    assert (doing(page), page[Slot.STATE], page[Slot.TICK]) == ([], State.FINISHED, END)


def test_a_save_that_fails_ends_its_section(page: Page, session: Session):
    def save(step: int) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        for _ in session.steps(start=0, until=4, save=save):
            pass
    assert doing(page) == ["step"]


def test_a_loop_of_the_users_own(page: Page, session: Session):
    with session.section("load model"):
        assert doing(page) == ["setup", "load model"]
    for _ in range(3):
        session.start_section("step")
        session.start_section("forward")
        assert doing(page) == ["step", "forward"]
        session.end_section("forward")
        session.end_section("step")
    assert (doing(page), page[Slot.OWN_STEPS]) == ([], 3)
    session.start_section("a")
    session.start_section("b")
    session.end_all_sections()
    assert doing(page) == []


def test_signs_of_life_without_sections(page: Page, session: Session):
    session.report(loss=1.0)
    assert (doing(page), page[Slot.BEAT_AT_NS], page[Slot.CLOSED_AT_NS] > 0) == ([], 0, True)
    session.heartbeat()
    assert page[Slot.BEAT_AT_NS] > 0


def test_without_an_agent_sections_may_be_used_as_well(monkeypatch):
    with start_session() as session, session.section("a"):
        session.heartbeat()


def test_a_rank_that_waits_for_the_others_has_done_its_own_work(page: Page, session: Session):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 1))
        session.stragglers.attach(model)
        for step in session.steps(start=0, until=4, save=lambda step: None):
            assert page[Slot.OWN_WORK_DONE] == step
            model(torch.ones(1, 2)).sum().backward()
            assert page[Slot.OWN_WORK_DONE] == (step + 1 if step else 0)  # the first step finds out where it is
            page[Slot.OWN_WORK_DONE] = step + 1
    finally:
        torch.distributed.destroy_process_group()
