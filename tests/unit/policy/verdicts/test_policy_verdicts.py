"""Who is to blame: what ranks, their files and srun say, merged into one verdict. Victims are never blamed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.judge import (
    CLAIMABLE,
    DECIDING,
    LEVEL_OF,
    Circumstances,
    Level,
    Report,
    StepWords,
    TaskEnd,
    WorkerEnd,
    claimed,
    ends_attempt,
    held_against,
    judge,
)
from slurmft.policy.judge import Testimony as Heard  # pytest takes a name that begins with Test for tests
from slurmft.policy.symptoms import cause_of_text, codes_of_children, exceptions_in, last_words
from slurmft.policy.verdict import Cause, Evidence, Kind, Suspect, Verdict

# symptoms

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n{}\n'
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:537] Read error [10.0.0.3]:6114: Connection reset by peer"
CORRUPT, HOST, DEVICE, COMM = (
    Cause.DATA_CORRUPTION, Cause.HOST_OUT_OF_MEMORY, Cause.DEVICE_OUT_OF_MEMORY, Cause.COMMUNICATION_ERROR,
)  # fmt: skip


@of_each(line__cause=[
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", DEVICE),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory.", DEVICE),
        ("RuntimeError: CUDA error: out of memory", DEVICE),
        ("RuntimeError: HIP out of memory. Tried to allocate 20.00 MiB", DEVICE),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", DEVICE),
        ("MemoryError", HOST),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.11 PiB for an array", HOST),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you", HOST),
        ("OSError: [Errno 12] Cannot allocate memory", HOST),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory.", HOST),
        (GLOO, COMM),
        ("RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 4000ms for recv operation", COMM),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, remote process exited", COMM),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 1000ms while trying", COMM),
        ("torch.distributed.DistStoreError: Timed out after 2 seconds waiting for clients.", COMM),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", COMM),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", CORRUPT),
        ("ValueError: out of ideas", None),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", None),
        ("TypeError: MemoryErrorish", None),
        ("AssertionError", None),
    ])  # fmt: skip
def test_what_an_exception_is_a_symptom_of(line, cause):
    assert cause_of_text(TRACE.format(line)) is cause
    assert cause_of_text(f"[rank3]: {line}") is cause
    assert last_words(TRACE.format(line)) == line


def test_source_code_is_no_symptom():
    text = TRACE.format("    except MemoryError:  # or CUDA out of memory\n           ^^^^^^^\nValueError: x")
    assert cause_of_text(text) is None


@pytest.mark.parametrize(
    "remark",
    [
        "[rank0]:[W1121 19:20:01.1 ProcessGroupNCCL.cpp:1496] Warning: WARNING: destroy_process_group() was not called",
        "[W ProcessGroupNCCL.cpp:1169] Warning: process group has NOT been destroyed before we destruct it",
        "n1:312:340 [0] misc/socket.cc:58 NCCL WARN socketProgress: Connection closed by remote peer n2",
        "n1:312:340 [0] NCCL INFO comm 0x55 rank 0 - Abort COMPLETE",
    ],
)
def test_remarks_around_an_exception_are_no_symptom(remark):
    trace = "Traceback (most recent call last):\n  File 'a', line 1\nValueError: odd"
    assert cause_of_text(f"{trace}\n{remark}\n") is None
    assert cause_of_text(f"{remark}\n{trace}\n") is None
    assert last_words(f"{trace}\n{remark}\n") == "ValueError: odd"
    assert cause_of_text(f"loss 3\n{remark}\n") is (Cause.COMMUNICATION_ERROR if "NCCL WARN" in remark else None)
    comm = trace.replace("ValueError: odd", "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, timeout")
    assert cause_of_text(f"{comm}\n{remark}\n") is Cause.COMMUNICATION_ERROR


def test_what_it_was_raised_from_counts_where_it_says_nothing_itself():
    chain = TRACE.format("torch.OutOfMemoryError: CUDA out of memory")
    chain += "\nThe above exception was the direct cause of the following exception:\n\n"
    assert cause_of_text(chain + TRACE.format("RuntimeError: training failed")) is DEVICE
    assert cause_of_text(chain + TRACE.format(GLOO)) is COMM, "the newest one speaks first"
    assert last_words(chain + TRACE.format("RuntimeError: training failed")) == "RuntimeError: training failed"


def test_the_members_of_a_group_count():
    text = "  + Exception Group Traceback (most recent call last):\n  | ExceptionGroup: two (2 sub-exceptions)\n"
    text += "  +-+---------------- 1 ----------------\n    | MemoryError\n    +------------------------------------\n"
    assert cause_of_text(text) is HOST


def test_torchruns_report_tells_the_codes_of_its_workers():
    text = TRACE.format("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n====\ntrain.py FAILED")
    text += "Root Cause (first observed failure):\n[0]:\n  rank      : 3\n  exitcode  : 16 (pid: 4242) \n"
    assert codes_of_children(text) == {16}
    assert codes_of_children("  exitcode  : 16 (pid: 4242)") == frozenset(), "not torchrun's"
    assert cause_of_text(text) is None


@given(st.text(max_size=300))
def test_any_text_is_looked_at(text):
    assert cause_of_text(text) in {None, *CLAIMABLE}
    assert cause_of_text(text) in {None, *CLAIMABLE}
    assert isinstance(exceptions_in(text), list)
    assert len(last_words(text)) <= 500
    assert claimed(text) in {Cause.UNKNOWN, *CLAIMABLE}


def test_long_texts_are_looked_at_quickly():
    cause_of_text("x timed out " * 50_000)
    cause_of_text("collective " * 50_000)
    cause_of_text(("(" * 1000 + "\n") * 1000)


# judge: one rank's end


def end(rank: int, code: int = 0, **facts: object) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=f"n{rank // 2}", code=code, **{"attached": True, "step": 7, **facts})


def said(rank: int | None, cause: Cause, **facts: object) -> Report:
    return Report(**{"source": "verdict file", "rank": rank, "cause": cause, "binding": True, **facts})


def judged(ends: list[WorkerEnd], *reports: Report, world_size: int = 0, **seen: object) -> Verdict:
    heard = Heard(reports=reports, step=seen.pop("step", StepWords()))
    return judge(ends, world_size=world_size or len(ends), seen=Circumstances(heard=heard, **seen))


def where(found: Verdict) -> tuple[Cause, int | None, str]:
    return found.cause, found.rank, found.node


FINE = [end(rank, finished=True) for rank in range(3)]


@of_each(
    code__report__cause=[
        (1, None, Cause.WORKER_ERROR),
        (1, said(3, Cause.WORKER_ERROR), Cause.WORKER_ERROR),
        (1, said(3, Cause.UNKNOWN), Cause.WORKER_ERROR),
        (1, said(3, DEVICE), DEVICE),
        (1, said(3, HOST), HOST),
        (1, said(3, Cause.HANG), Cause.HANG),
        (-6, said(3, COMM, binding=False, guessed=True), COMM),
        (-11, said(3, COMM, binding=False, guessed=True), Cause.SIGNAL_CRASH),
        (-11, None, Cause.SIGNAL_CRASH),
        (-9, None, Cause.SIGNAL_CRASH),
        (-15, None, Cause.SIGNAL_CRASH),
        (-9, said(3, Cause.WORKER_ERROR, binding=False, guessed=True), Cause.SIGNAL_CRASH),
        (16, None, Cause.RERUN_ELSEWHERE),
        (17, None, Cause.VALIDATION_FAILED),
        (16, said(3, Cause.WORKER_ERROR), Cause.RERUN_ELSEWHERE),
        (1, said(3, Cause.RERUN_ELSEWHERE), Cause.RERUN_ELSEWHERE),
        (143, said(3, Cause.RERUN_ELSEWHERE), Cause.RERUN_ELSEWHERE),
        (137, said(3, Cause.VALIDATION_FAILED), Cause.VALIDATION_FAILED),
        (-15, said(3, Cause.STRAGGLER), Cause.STRAGGLER),
        (0, said(3, Cause.RERUN_ELSEWHERE), Cause.RERUN_ELSEWHERE),
        (1, said(3, Cause.VALIDATION_FAILED, binding=False), Cause.VALIDATION_FAILED),
        (75, said(3, Cause.STRAGGLER), Cause.STRAGGLER),
    ]
)
def test_a_file_beats_the_exit_code(code, report, cause):
    found = judged([end(0), end(1), end(2), end(3, code)], *([report] if report else []))
    assert found.cause is cause
    assert (found.rank, found.node) == (None, "") if cause is COMM else (3, "n1")
    expected = {Cause.RERUN_ELSEWHERE: 16, Cause.VALIDATION_FAILED: 17}.get(cause, 128 - code if code < 0 else code)
    assert found.exit_code == expected


@pytest.mark.parametrize("ended", [{"killed": True, "code": -9}, {"stopped": True, "code": 75}], ids=["killed", "75"])
@pytest.mark.parametrize("cause", sorted(DECIDING))
def test_a_verdict_counts_also_of_who_was_killed_or_stopped(ended, cause):
    found = judged([end(0, 1, error="my peer is gone"), end(1, **ended)], said(1, cause, message="loss is NaN"))
    assert where(found) == (cause, 1, "n0")
    assert "loss is NaN" in found.reason


def test_who_was_killed_may_have_failed_before():
    assert where(judged([end(0), end(1, -9, killed=True)], said(1, DEVICE))) == (DEVICE, 1, "n0")
    assert judged([end(0), end(1, -9, killed=True)], said(1, DEVICE, binding=False)).cause is Cause.UNKNOWN


def test_a_file_of_a_rank_whose_end_nobody_saw_counts():
    found = judged([end(0)], said(1, Cause.RERUN_ELSEWHERE, suspects=(Suspect(node="n7"),)), world_size=2)
    assert (found.cause, found.exit_code, found.suspect_nodes) == (Cause.RERUN_ELSEWHERE, 16, ("n7",))


def test_an_agent_speaks_for_its_node():
    found = judged([end(0, 1)], said(None, Cause.HANG, node="n4", message="rank 9 stands still"), world_size=2)
    assert (found.cause, found.node) == (Cause.HANG, "n4")
    assert "the agent on n4" in found.reason


@pytest.mark.parametrize("rerun", ["persistent", "transient"])
def test_what_was_written_on_the_way_does_not_undo_a_finished_run(rerun):
    report = said(0, Cause.VALIDATION_FAILED, rerun=rerun)
    assert judged(FINE, report).cause is Cause.FINISHED
    plain = [end(0, attached=False)]
    assert (judged(plain, report).cause is Cause.FINISHED) == (rerun == "transient")


def test_a_worker_cannot_say_that_the_run_is_over():
    for word in ("finished", "cancelled", "preempted", "stopped by user", "", "nonsense"):
        assert claimed(word) is Cause.UNKNOWN


# suspects

BAD = (Suspect(node="n5", gpu="GPU-1"),)


@of_each(given__suspects=[
        (judged([end(1, 16)]), (Suspect(node="n0", rank=1),)),
        (judged([end(1, 16)], said(1, Cause.RERUN_ELSEWHERE, suspects=BAD)), BAD),
        (judged([end(1, 17)]), ()),
        (judged([end(1, 17)], said(1, Cause.VALIDATION_FAILED, rerun="persistent", suspects=BAD)), BAD),
        (judged([end(1, 1)]), ()),
        (judged([end(1, -11)]), (Suspect(node="n0", rank=1),)),
        (judged([end(1, 75)], said(1, Cause.STRAGGLER, suspects=BAD)), BAD),
        (judged([end(1, 1)], said(1, DEVICE)), ()),
        (judged([], world_size=2, lost_nodes=("n3", "n4")), (Suspect(node="n3"), Suspect(node="n4"))),
    ])  # fmt: skip
def test_who_is_suspected(given, suspects):
    assert given.suspects == suspects


def test_a_planned_stop_keeps_what_is_held_against_a_node():
    ends = [end(0, 75, stopped=True), end(1, 75, stopped=True)]
    found = judged(ends, said(1, Cause.STRAGGLER, suspects=BAD), planned=Cause.PREEMPTED, planned_reason="TERM")
    assert (found.cause, found.suspects) == (Cause.PREEMPTED, BAD)


# what counts more


def test_every_cause_that_can_be_claimed_has_its_level():
    assert set(LEVEL_OF) == CLAIMABLE
    assert {cause for cause in CLAIMABLE if LEVEL_OF[cause] <= Level.HANG} == DECIDING


STOP = {"planned": Cause.STOPPED_BY_USER, "planned_reason": "stopped by somebody"}
TERM = {"planned": Cause.PREEMPTED, "planned_reason": "SIGTERM"}
CANCEL = {"outside": Cause.CANCELLED, "outside_reason": "scancel"}
REQUEUE = {"outside": Cause.REQUEUED, "outside_reason": "Slurm"}
ORDER = [
    pytest.param({"code": 17}, STOP, Cause.VALIDATION_FAILED, id="17 over a person's stop"),
    pytest.param({"code": 17}, CANCEL, Cause.VALIDATION_FAILED, id="17 over scancel"),
    pytest.param({"code": 16}, STOP, Cause.STOPPED_BY_USER, id="a person's stop over 16"),
    pytest.param({"code": 16}, CANCEL, Cause.CANCELLED, id="scancel over 16"),
    pytest.param({"code": 16}, TERM, Cause.RERUN_ELSEWHERE, id="16 over a preemption"),
    pytest.param({"code": 16}, REQUEUE, Cause.RERUN_ELSEWHERE, id="16 over Slurm's requeue"),
    pytest.param({"code": 1}, REQUEUE, Cause.REQUEUED, id="Slurm's requeue over an error"),
    pytest.param({"code": 1}, {"launch_error": "x", **REQUEUE}, Cause.REQUEUED, id="Slurm's requeue over a launch"),
    pytest.param({"code": 1}, {"launch_error": "x", **TERM}, Cause.LAUNCH_FAILURE, id="a launch over a planned stop"),
    pytest.param({"code": 1}, TERM, Cause.PREEMPTED, id="a planned stop over an error"),
    pytest.param({"code": 1}, {"lost_nodes": ("n9",)}, Cause.NODE_LOST, id="a lost node over an error"),
    pytest.param({"code": -11}, {"lost_nodes": ("n9",)}, Cause.NODE_LOST, id="a lost node over a crash"),
]


@pytest.mark.parametrize(("facts", "seen", "cause"), ORDER)
def test_the_order_of_what_the_supervisor_knows(facts, seen, cause):
    assert judged([end(0, **facts), end(1, -9, killed=True)], **seen).cause is cause


def test_a_persistent_error_does_not_continue_a_run_that_a_person_stops():
    report = said(0, Cause.VALIDATION_FAILED, rerun="persistent", suspects=BAD)
    assert judged([end(0, 17)], report, **STOP).cause is Cause.STOPPED_BY_USER
    assert judged([end(0, 17)], report, **TERM).cause is Cause.VALIDATION_FAILED


@given(st.permutations(sorted(CLAIMABLE)), st.integers(1, len(CLAIMABLE)))
def test_the_most_severe_wins_in_any_order(causes, count):
    chosen = causes[:count]
    ends = [end(rank, 1) for rank in range(len(chosen))]
    found = judged(ends, *(said(rank, cause) for rank, cause in enumerate(chosen)))
    assert LEVEL_OF[found.cause] == min(LEVEL_OF[cause] for cause in chosen)


def test_of_equals_the_first_seen_is_to_blame():
    assert judged([end(1, 3), end(0, 4)]).rank == 1
    assert judged([end(1, -9), end(0, 4)]).rank == 1, "peers fail of a kill"
    assert judged([end(0, 4), end(1, -9)]).rank == 0, "or are killed because of a failure"
    assert judged([end(0, 4), end(1, -15)]).rank == 0


# memory


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
@pytest.mark.parametrize(
    ("cause", "code", "rerun"),
    [(Cause.RERUN_ELSEWHERE, 16, "undecided"), (Cause.VALIDATION_FAILED, 17, "persistent")],
)
def test_ranks_that_only_follow_suit_are_no_suspects(order, cause, code, rerun):
    """Trainers agree on the exit code; only the ranks that met the wrong result leave a file."""
    guilty = {rank: said(rank, cause, rerun=rerun, suspects=(Suspect(node=f"bad{rank}"),)) for rank in (1, 2)}
    ends = [end(rank, code) for rank in order]
    one = judged(ends, guilty[1])
    assert (one.cause, one.rank, one.rerun, one.suspects) == (cause, 1, rerun, (Suspect(node="bad1"),))
    two = judged(ends, *guilty.values())
    assert (two.cause, set(two.suspect_nodes)) == (cause, {"bad1", "bad2"})
    other = said(2, cause, rerun="correct", suspects=(Suspect(node="bad2"),))
    assert len(judged(ends, guilty[1], other).suspects) == 1


def test_where_nobody_left_a_file_the_first_to_exit_with_16_is_suspected():
    assert len(judged([end(1, 16), end(0, 16)]).suspect_nodes) == 1


def killed_line(node: str, word: str = "Killed") -> TaskEnd:
    return TaskEnd(nodes=(node,), tasks="1", word=word)


@pytest.mark.parametrize(
    ("ended", "step", "cause"),
    [
        pytest.param({"code": -9}, StepWords(), Cause.SIGNAL_CRASH, id="killed by somebody"),
        pytest.param({"code": -9}, StepWords(ends=(killed_line("n0"),)), Cause.SIGNAL_CRASH, id="srun: Killed"),
        pytest.param({"code": -9}, StepWords(oom_somewhere=True), HOST, id="an event somewhere"),
        pytest.param({"code": -9}, StepWords(oom_nodes=("n0",), oom_somewhere=True), HOST, id="an event here"),
        pytest.param(
            {"code": -9}, StepWords(oom_nodes=("n1",), oom_somewhere=True), Cause.SIGNAL_CRASH, id="elsewhere"
        ),
        pytest.param({"code": 137}, StepWords(oom_somewhere=True), HOST, id="a shell's 137"),
        pytest.param({"code": -11}, StepWords(oom_somewhere=True), Cause.SIGNAL_CRASH, id="another signal"),
        pytest.param({"code": 1}, StepWords(oom_somewhere=True), Cause.WORKER_ERROR, id="an exception"),
        pytest.param({"code": -9, "killed": True}, StepWords(oom_somewhere=True), Cause.UNKNOWN, id="killed by us"),
    ],
)
def test_a_kill_for_memory(ended, step, cause):
    assert judged([end(0, **ended)], step=step).cause is cause


def test_an_agent_that_was_killed_for_memory_is_no_lost_node():
    step = StepWords(oom_nodes=("n1",), oom_somewhere=True)
    found = judged([end(0, 1)], world_size=4, step=step, lost_nodes=("n1",))
    assert (found.cause, found.node) == (HOST, "n1")
    assert judged([end(0, 1)], world_size=4, step=step, lost_nodes=("n1", "n2")).cause is Cause.NODE_LOST


@pytest.mark.parametrize(
    ("lost", "closed", "states", "kinds"),
    [
        pytest.param(("n1",), {"n1"}, {}, {"n1": Kind.CRASH}, id="the node closed the connection"),
        pytest.param(("n1",), {"n1", "n2"}, {"n1": "ALLOCATED"}, {"n1": Kind.CRASH}, id="and is well for Slurm"),
        pytest.param(("n1",), set(), {}, {"n1": Kind.NODE_LOST}, id="it is silent"),
        pytest.param(("n1", "n2"), {"n1"}, {}, {"n1": Kind.CRASH, "n2": Kind.NODE_LOST}, id="another one is silent"),
        pytest.param(("n1",), {"n1"}, {"n1": "DOWN*"}, {"n1": Kind.NODE_LOST}, id="Slurm says that it is down"),
    ],
)
def test_an_agent_that_ends_on_a_node_that_lives_is_no_lost_node(
    lost: tuple[str, ...], closed: set[str], states: dict[str, str], kinds: dict[str, Kind]
) -> None:
    """Who kills an agent may be the script itself, or its user."""
    found = judged([], world_size=4, lost_nodes=lost, closed=frozenset(closed), node_states=states)
    assert found.cause is Cause.NODE_LOST
    assert {each.suspect.node: each.kind for each in held_against(found, (), at=1.0)} == kinds


# nodes


def test_sruns_word_on_a_node_counts_and_so_does_slurms():
    found = judged([end(0, 1, error="peer is gone")], world_size=4, step=StepWords(failed_nodes=("n1",)))
    assert (found.cause, found.suspect_nodes) == (Cause.NODE_LOST, ("n1",))
    assert "felt by rank 0 on n0 exited with 1: peer is gone" in found.reason
    assert "srun: node failure on n1" in found.evidence
    found = judged([end(0, 1)], world_size=4, node_states={"n0": "MIXED", "n1": "DOWN*"})
    assert (found.cause, found.suspect_nodes, found.evidence[0]) == (Cause.NODE_LOST, ("n1",), "Slurm says n1 is DOWN*")


@of_each(state=["IDLE", "ALLOCATED", "MIXED", "DRAINING", "DRAINED", "UNKNOWN", "COMPLETING", ""])
def test_a_node_that_is_not_gone_is_not_lost(state):
    assert judged([end(0, 1)], node_states={"n0": state}).cause is Cause.WORKER_ERROR


@pytest.mark.parametrize("word", ["Killed", "Terminated", "Segmentation fault", "Exited"])
def test_sruns_lines_on_tasks_accuse_nobody(word):
    step = StepWords(ends=(TaskEnd(nodes=("n0",), tasks="0", word=word, code=1),))
    found = judged([end(0), end(1, 3)], step=step)
    assert where(found) == (Cause.WORKER_ERROR, 1, "n0")
    assert any(word in line for line in found.evidence)


def test_an_exit_code_that_only_srun_has_seen():
    step = StepWords(ends=(killed_line("n0"), TaskEnd(nodes=("n1", "n2"), tasks="1-2", word="Exited", code=16)))
    found = judged([], step=step, world_size=4)
    assert (found.cause, found.exit_code, found.suspect_nodes) == (Cause.RERUN_ELSEWHERE, 16, ("n1", "n2"))


# communication


def complains(*ranks: int) -> list[Report]:
    return [said(rank, COMM, message="Connection closed by peer", traceback=f"trace {rank}") for rank in ranks]


@pytest.mark.parametrize(
    ("ends", "complaints", "cause", "rank"),
    [
        pytest.param([end(0, 1), end(1, 1), end(2, 1), end(3, 1)], (0, 1, 2, 3), COMM, None, id="nobody is behind"),
        pytest.param(
            [end(0, 1), end(1, 1), end(2, 1, step=5), end(3, 1)], (0, 1, 2, 3), COMM, 2, id="one is behind"
        ),
        pytest.param([end(0, 1), end(1, 1, step=6)], (0, 1), COMM, 1, id="one of two is behind"),
        pytest.param(
            [end(0, 1), end(1, 1, step=8), end(2, 1), end(3, 1)], (0, 1, 2, 3), COMM, None, id="one is ahead"
        ),
        pytest.param(
            [end(0, 1), end(1, 1), end(2, -9, killed=True), end(3, 1)], (0, 1, 3), COMM, 2, id="one did not come"
        ),
        pytest.param(
            [end(0, 1), end(1, -9, killed=True), end(2, -9, killed=True), end(3, 1)], (0, 3), COMM, None,
            id="two were killed before they could complain",
        ),
        pytest.param([end(0, 1), end(1, -9, killed=True)], (0,), COMM, None, id="one of two was killed by us"),
        pytest.param([end(0, 1), end(1, 1), end(2, -11), end(3, 1)], (0, 1, 3), Cause.SIGNAL_CRASH, 2, id="a crash"),
        pytest.param([end(0, 1), end(1, 1), end(2, 1), end(3, 1)], (0, 1, 3), Cause.WORKER_ERROR, 2, id="an exception"),
        pytest.param(
            [end(0, 1), end(1, 1), end(2, -9), end(3, 1)], (0, 1, 3), Cause.SIGNAL_CRASH, 2, id="a kill by somebody"
        ),
        pytest.param(
            [end(0, 1, attached=False, step=0), end(1, 1, attached=False, step=0)], (0, 1), COMM, None,
            id="plain scripts tell no steps",
        ),
    ],
)  # fmt: skip
def test_who_is_missed_is_to_blame_and_not_who_waits(ends, complaints, cause, rank):
    found = judged(ends, *complains(*complaints))
    assert (found.cause, found.rank) == (cause, rank)
    if cause is COMM:
        assert found.suspects == (() if rank is None else (Suspect(node=f"n{rank // 2}", rank=rank),))
        assert "Connection closed by peer" in found.reason


def test_a_lost_node_explains_every_complaint():
    found = judged([end(0, 1), end(1, 1)], *complains(0, 1), world_size=4, lost_nodes=("n1",))
    assert (found.cause, found.suspect_nodes) == (Cause.NODE_LOST, ("n1",))
    assert found.traceback.startswith("trace")


def test_ten_thousand_ranks_complain():
    ends = [end(rank, 1, step=6 if rank == 4321 else 7) for rank in range(10_000)]
    found = judged(ends, *complains(*range(10_000)))
    assert (found.cause, found.rank, len(found.suspects)) == (COMM, 4321, 1)
    lost = tuple(f"n{node}" for node in range(10_000))
    assert len(judged([], world_size=10_000, lost_nodes=lost).reason) < 300


# exit_actions and ignore_nonlead_status


def test_codes_that_mean_complete_are_no_failure():
    codes = frozenset({42, 43})
    plain = [end(0, 42, attached=False), end(1, 0, attached=False), end(2, 43, attached=False)]
    found = judged(plain, complete_codes=codes)
    assert (found.cause, found.exit_code) == (Cause.FINISHED, 43)
    assert judged(plain).cause is Cause.WORKER_ERROR
    assert where(judged([*plain, end(3, 1)], complete_codes=codes)) == (Cause.WORKER_ERROR, 3, "n1")
    assert judged([end(0, 42), end(1, -9, killed=True)], complete_codes=codes).cause is not Cause.FINISHED


@pytest.mark.parametrize(
    ("ends", "cause", "rank"),
    [
        ([end(0, finished=True), end(1, 1)], Cause.FINISHED, None),
        ([end(0, attached=False), end(1, -9, killed=True)], Cause.FINISHED, None),
        ([end(1, 1), end(0, 3)], Cause.WORKER_ERROR, 0),
        ([end(1, 16), end(0, 3)], Cause.WORKER_ERROR, 0),
        ([end(1, 1)], Cause.UNKNOWN, None),
    ],
)
def test_only_the_leads_status_counts_where_that_is_asked_for(ends, cause, rank):
    found = judged(ends, only_lead=True, world_size=2)
    assert (found.cause, found.rank) == (cause, rank)


def test_a_verdict_of_another_rank_explains_the_leads_end():
    found = judged([end(1, 1), end(0, 1)], said(1, Cause.RERUN_ELSEWHERE), said(0, COMM), only_lead=True, world_size=2)
    assert (found.cause, found.rank) == (Cause.RERUN_ELSEWHERE, 1)


@of_each(
    given__planned__only_lead__expected=[
        (end(1, 1), False, False, True),
        (end(1, 0), False, False, False),
        (end(1, 42), False, False, False),
        (end(1, 1), False, True, False),
        (end(0, 1), False, True, True),
        (end(1, -15), False, False, True),
        (end(1, -15), True, False, False),
        (end(1, 143), True, False, False),
        (end(1, -9, killed=True), False, False, False),
        (end(1, 75, stopped=True), False, False, False),
    ]
)
def test_what_ends_an_attempt(given, planned, only_lead, expected):
    assert ends_attempt(given, planned=planned, complete_codes=frozenset({42}), only_lead=only_lead) is expected


# what the exclusion list is told


@of_each(
    cause__rerun__kind=[
        (Cause.NODE_LOST, "", Kind.NODE_LOST),
        (Cause.SIGNAL_CRASH, "", Kind.CRASH),
        (Cause.STRAGGLER, "", Kind.STRAGGLER),
        (Cause.RERUN_ELSEWHERE, "undecided", Kind.RERUN_UNDECIDED),
        (Cause.VALIDATION_FAILED, "persistent", Kind.RERUN_PERSISTENT),
        (Cause.VALIDATION_FAILED, "correct", Kind.RERUN_ACQUITTED),
        (Cause.VALIDATION_FAILED, "", None),
        (Cause.VALIDATION_FAILED, "inconclusive", None),
        (Cause.WORKER_ERROR, "", None),
        (Cause.PREEMPTED, "", None),
    ]
)
def test_what_a_verdict_holds_against_a_node(cause, rerun, kind):
    suspects = (Suspect(node="n1", rank=2), Suspect(node="n1", rank=3), Suspect(node="n2"))
    found = Verdict(cause=cause, reason="why", rerun=rerun, suspects=suspects, last_step=5)
    known = Evidence(kind=kind or Kind.HANG, suspect=Suspect(node="n2"), message="seen", at=1.0)
    held = held_against(found, [known], at=9.0)
    added = Evidence(kind=kind or Kind.HANG, suspect=suspects[0], message="why", at=9.0, step=5)
    assert held == ((known, added) if kind else (known,))


# any circumstances

ENDS = st.lists(
    st.builds(
        WorkerEnd, rank=st.integers(0, 4), node=st.sampled_from(["n0", "n1", ""]),
        code=st.sampled_from([0, 1, 2, 16, 17, 42, 75, 137, 143, -6, -9, -11, -15, -40]), attached=st.booleans(),
        stopped=st.booleans(), finished=st.booleans(), killed=st.booleans(), step=st.integers(-1, 3),
    ),
    max_size=5, unique_by=lambda each: each.rank,
)  # fmt: skip
REPORTS = st.lists(
    st.builds(
        Report, source=st.just("file"), rank=st.none() | st.integers(0, 6), node=st.sampled_from(["", "n1"]),
        cause=st.sampled_from([*CLAIMABLE, Cause.UNKNOWN]), message=st.text(max_size=5), binding=st.booleans(),
        guessed=st.booleans(), rerun=st.sampled_from(["", "persistent", "transient", "correct"]),
    ),
    max_size=6,
)  # fmt: skip
STEP = st.builds(
    StepWords, failed_nodes=st.lists(st.sampled_from(["n0", "n1"]), max_size=2).map(tuple), oom_somewhere=st.booleans(),
    ends=st.lists(st.builds(TaskEnd, nodes=st.just(("n0",)), tasks=st.just("0"), word=st.just("Exited"),
                            code=st.sampled_from([None, 1, 16, 17])), max_size=2).map(tuple),
)  # fmt: skip
SEEN = st.builds(
    Circumstances, planned=st.none() | st.sampled_from([Cause.PREEMPTED, Cause.STOPPED_BY_USER]),
    outside=st.none() | st.sampled_from([Cause.CANCELLED, Cause.REQUEUED]), launch_error=st.sampled_from(["", "x"]),
    lost_nodes=st.sampled_from([(), ("n1",)]), only_lead=st.booleans(),
    broken=st.sampled_from([{}, {"n1": "xid: Xid 79"}]),
    complete_codes=st.sampled_from([frozenset(), frozenset({42})]),
)  # fmt: skip


@given(ENDS, REPORTS, STEP, SEEN)
def test_there_is_a_verdict_on_anything(ends, reports, step, seen):
    seen = replace(seen, heard=Heard(reports=tuple(reports), step=step))
    found = judge(ends, world_size=5, seen=seen)
    assert found.exit_code >= 0
    assert len(found.evidence) <= 12
    if found.cause is Cause.FINISHED:
        counted = [each for each in ends if each.rank == 0] if seen.only_lead else ends
        assert len(counted) == (1 if seen.only_lead else 5)
        assert all(each.code in (0, 42) or each.stopped or each.killed for each in counted)
    if seen.outside is Cause.CANCELLED and found.cause is not Cause.FINISHED:
        assert found.cause in (Cause.CANCELLED, Cause.VALIDATION_FAILED, Cause.STOPPED_BY_USER)
    if found.cause is Cause.SIGNAL_CRASH and found.rank is not None:
        blamed = [each for each in ends if each.rank == found.rank]
        assert not blamed or not blamed[0].killed or any(r.binding for r in reports if r.rank == found.rank)
    if found.rank is not None and any("of one rank" in each or "ranks that failed" in each for each in found.evidence):
        assert any(each.rank == found.rank and each.code and not each.killed for each in ends)


def test_a_node_whose_hardware_has_failed_is_left_whatever_its_ranks_say():
    what = "gpu-count: GPU 3: GPU is lost"
    for ends in ([end(2, 1, error="CUDA error"), end(3, -11)], [end(rank, -9, killed=True) for rank in range(4)]):
        found = judged(ends, world_size=4, broken={"n1": what})
        assert (found.cause, found.node, found.suspect_nodes) == (Cause.NODE_LOST, "n1", ("n1",))
        assert found.reason == f"n1 cannot be used: {what}"
    assert judged(FINE, broken={"n1": what}).cause is Cause.FINISHED, "it came too late to matter"
    assert judged([end(0, 17)], world_size=1, broken={"n1": what}).cause is Cause.VALIDATION_FAILED


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ([end(1, 1, error="KeyError"), *(end(rank, -9, killed=True) for rank in (0, 2, 3))],
         "the only one of 4 ranks that failed by itself"),
        ([end(rank, 1, error="KeyError: 'a'") for rank in (2, 0, 1)],
         "first of 3 ranks that failed by themselves, 3 of them alike"),
        ([end(2, 1, error="KeyError"), end(0, 1, error="ValueError"), end(1)],
         "first of 2 ranks that failed by themselves, 1 of them alike"),
        ([end(0, 1, error="ValueError"), end(2, -11)], "one of 2 ranks that failed by themselves, 1 of them alike"),
    ],
    ids=["alone", "all alike", "the first", "a crash comes before an exception"],
)  # fmt: skip
def test_the_evidence_says_whether_the_culprit_was_alone(ends, words):
    assert words in judged(ends).evidence


def test_a_node_on_which_srun_could_not_start_an_agent_is_named_and_not_the_victim():
    step = StepWords(
        refused=(("n2", "Communication connection failure"),), ends=(TaskEnd(nodes=("n1",), tasks="0", word="Killed"),)
    )
    found = judged([], world_size=4, launch_error="the agent on n1 ended before it had reported: Killed", step=step)
    assert (found.cause, found.node, found.suspect_nodes) == (Cause.LAUNCH_FAILURE, "n2", ("n2",))
    assert found.reason == "srun could not start the agent on n2: Communication connection failure"
    assert "srun: launch failed on n2: Communication connection failure" in found.evidence
    blameless = judged([], world_size=4, launch_error="2 of 4 agents did not report")
    assert (blameless.node, blameless.suspects) == ("", ())


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, Cause.FINISHED),
        ({"unclosed": True, "error": "never closed"}, Cause.WORKER_ERROR),
        ({"unclosed": True, "killed": True}, Cause.FINISHED),
    ],
)
def test_exit_0_of_a_wrapper_counts_where_the_session_inside_was_closed(change, cause):
    ends = [WorkerEnd(rank=0, node="n1", code=0, attached=True, step=20), WorkerEnd(rank=1, node="n1", code=0)]
    ends[0] = replace(ends[0], **change)
    found = judge(ends, world_size=2, seen=Circumstances(reached=(0, 20)))
    assert (found.cause, found.suspects) == (cause, ())
    is_failure = cause is not Cause.FINISHED
    assert ends_attempt(ends[0], planned=False, complete_codes=frozenset(), only_lead=False) is is_failure


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        ({"only_ignored_signals": True, "complete_codes": frozenset({0})}, Cause.FINISHED),
        ({"only_ignored_signals": True}, Cause.TIME_LIMIT),  # a script that says nothing may have saved, and left
        ({"complete_codes": frozenset({0})}, Cause.TIME_LIMIT),  # it may have answered a TERM
        ({"only_ignored_signals": True, "complete_codes": frozenset({0}), "outside": Cause.PREEMPTED}, Cause.PREEMPTED),
    ],
)
def test_a_script_that_ends_by_itself_while_a_stop_is_asked_for(seen, cause):
    seen = {"planned": Cause.TIME_LIMIT, "planned_reason": "SIGUSR2 at n1", **seen}
    assert judged([end(0, attached=False), end(1, attached=False)], **seen).cause is cause
    with_session = judged([end(0), end(1)], **seen)  # it has saved, and its loop has ended
    assert with_session.cause is seen.get("outside", Cause.TIME_LIMIT)
