"""What attempts leave in the run folder: verdicts, evidence, error files, logs; whole, damaged, odd and hostile."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reported_evidence import read_evidence

from slurmft.errors import StorageUnavailable
from slurmft.policy.judge import Circumstances, WorkerEnd, judge
from slurmft.policy.verdict import Cause, Evidence, Kind, Suspect, Verdict
from slurmft.storage.patience import FolderThread
from slurmft.storage.run_folder import Attempt, RunFolder
from slurmft.storage.verdicts import WorkerVerdict, add_evidence, parse_evidence, write_verdict
from slurmft.supervisor import observations
from slurmft.supervisor.observations import MAX_LOGS, EvidenceReader, collect

ATTEMPT = Attempt(job="7", restart=0)
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n{}\n'
NODE = Suspect(node="n1", gpu="GPU-1", rank=3)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / 'a run\'s "folder"')
    run.create()
    (run.attempts / str(ATTEMPT)).mkdir()
    return run


def end(rank: int, code: int = 1, **facts: object) -> WorkerEnd:
    return WorkerEnd(rank=rank, node=f"n{rank}", code=code, **facts)


def left(run: RunFolder, name: str, content: str | bytes) -> Path:
    path = run.attempts / str(ATTEMPT) / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def said(run: RunFolder, rank: int, verdict: WorkerVerdict, attempt: Attempt = ATTEMPT) -> Path:
    path = run.verdicts / f"{attempt}.rank-{rank}.json"
    write_verdict(path, verdict)
    return path


def judged(run: RunFolder, *ends: WorkerEnd) -> Verdict:
    return judge(ends, world_size=len(ends), seen=Circumstances(heard=collect(run, ATTEMPT, ends)))


# verdict files


def test_a_verdict_file_beats_the_exit_code_and_brings_its_suspects(run):
    said(run, 1, WorkerVerdict(cause="rerun elsewhere", message="loss is NaN", suspects=(NODE,), rerun="undecided"))
    found = judged(run, end(0, 1), end(1, 143))
    assert (found.cause, found.exit_code, found.rank, found.suspects) == (Cause.RERUN_ELSEWHERE, 16, 1, (NODE,))
    assert (found.rerun, "loss is NaN" in found.reason) == ("undecided", True)


def test_a_verdict_of_another_attempt_is_not_ours(run):
    for attempt in (Attempt(job="7", restart=1), Attempt(job="77", restart=0), Attempt(job="7", restart=0, cycle=1)):
        said(run, 0, WorkerVerdict(cause="rerun elsewhere"), attempt)
    assert judged(run, end(0, 1)).cause is Cause.WORKER_ERROR


@pytest.mark.parametrize(
    ("cause", "trace", "expected"),
    [
        ("worker error", TRACE.format("ValueError: x"), Cause.WORKER_ERROR),
        ("worker error", TRACE.format("MemoryError"), Cause.HOST_OUT_OF_MEMORY),
        ("a word of tomorrow", TRACE.format("torch.OutOfMemoryError: CUDA out of memory"), Cause.DEVICE_OUT_OF_MEMORY),
        ("finished", "", Cause.WORKER_ERROR),
        ("hang", "", Cause.HANG),
        ("straggler", "", Cause.STRAGGLER),
        ("data corruption suspected", "", Cause.DATA_CORRUPTION),
    ],
)
def test_what_a_verdict_file_says(run, cause, trace, expected):
    said(run, 0, WorkerVerdict(cause=cause, traceback=trace))
    assert judged(run, end(0, 1)).cause is expected


DAMAGED = {
    "empty": b"", "binary": os.urandom(64), "no object": b"[1]", "torn": b'{"format": 1, "cause": "rerun el',
    "newer": b'{"format": 99, "cause": "rerun elsewhere"}', "deep": b"[" * 100_000, "no version": b'{"cause": "hang"}',
    "huge": b" " * (observations.MAX_VERDICT_BYTES + 1),
}  # fmt: skip


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_verdict_is_told_and_hides_no_other(run, content):
    (run.verdicts / f"{ATTEMPT}.rank-0.json").write_bytes(content)
    said(run, 1, WorkerVerdict(cause="straggler", suspects=(NODE,)))
    found = judged(run, end(0, 1), end(1, 75))
    assert (found.cause, found.suspects) == (Cause.STRAGGLER, (NODE,))
    assert any("rank-0.json" in line for line in found.evidence)


WRONG = {
    "numbers": {"cause": 7, "message": 8, "traceback": 9, "suspects": 10, "rerun": 11},
    "lists": {"cause": [], "suspects": [None, 1, {"node": ""}, {"node": ["n"]}, {"node": "n1", "rank": "x"}]},
    "nothing": {},
}


@pytest.mark.parametrize("fields", WRONG.values(), ids=WRONG)
def test_a_verdict_of_wrong_types_is_an_ordinary_failure(run, fields):
    (run.verdicts / f"{ATTEMPT}.rank-0.json").write_text(json.dumps({"format": 1, **fields}))
    found = judged(run, end(0, 3))
    assert (found.cause, found.exit_code) == (Cause.WORKER_ERROR, 3)


def test_what_is_no_file_is_left_alone(run):
    (run.verdicts / f"{ATTEMPT}.rank-0.json").mkdir()
    os.mkfifo(run.verdicts / f"{ATTEMPT}.rank-1.json")
    os.mkfifo(run.attempts / str(ATTEMPT) / "error.rank_0")
    (run.attempts / str(ATTEMPT) / "error.rank_1").symlink_to("/dev/zero")
    (run.attempts / str(ATTEMPT) / "a.rank_2").mkdir()
    (run.attempts / str(ATTEMPT) / "b.rank_2").symlink_to("nowhere")
    assert judged(run, end(0, 1), end(1, 1), end(2, 1)).cause is Cause.WORKER_ERROR


def test_a_rank_whose_end_nobody_saw_has_a_place(run):
    said(run, 1, WorkerVerdict(cause="rerun elsewhere"))
    heard = collect(run, ATTEMPT, [], {1: "n7"})
    found = judge([], world_size=2, seen=Circumstances(heard=heard))
    assert (found.rank, found.node, found.suspects) == (1, "n7", (Suspect(node="n7", rank=1),))


def test_an_agents_file_speaks_for_its_node(run):
    write_verdict(run.verdicts / f"{ATTEMPT}.agent-n5.json", WorkerVerdict(cause="hang", message="rank 9 stands still"))
    found = judged(run, end(0, 1))
    assert (found.cause, found.node) == (Cause.HANG, "n5")


def test_reading_has_an_end(run):
    for rank in range(3):
        said(run, rank, WorkerVerdict(cause="straggler"))
    found = collect(run, ATTEMPT, [end(rank) for rank in range(3)], within_s=-1.0)
    assert found.reports == ()
    assert "3 of 3 verdict files were not read" in found.problems[0]


def test_a_folder_that_does_not_answer_is_gone_without(run, monkeypatch):
    class Silent(FolderThread):
        def call(self, work, *, timeout_s):
            raise StorageUnavailable("the run folder did not answer within 1 s")

    def start(thread: FolderThread, run: RunFolder) -> Any:
        return SimpleNamespace(thread=thread, run=run, cluster=SimpleNamespace(attempt=ATTEMPT))

    heard = observations.testimony_of(start(Silent(), run), [end(0)], {})
    assert "did not answer" in heard.problems[0]
    assert observations.testimony_of(start(FolderThread(), RunFolder(Path("/nowhere"))), [end(0)], {}).reports == ()


# error files

TORCHS = json.dumps({"message": {"message": "x", "extraInfo": {"py_callstack": TRACE.format("MemoryError")}}})


@pytest.mark.parametrize(
    ("name", "text", "cause", "words"),
    [
        ("error.rank_0", TRACE.format("ValueError: x"), Cause.WORKER_ERROR, "ValueError: x"),
        ("my job's \n.rank_0", "it went wrong\nbecause of me", Cause.WORKER_ERROR, "because of me"),
        (".rank_0", TRACE.format("torch.distributed.DistBackendError: NCCL error"), Cause.COMMUNICATION_ERROR, "NCCL"),
        ("e.rank_0", b"\xff\xfe MemoryError", Cause.WORKER_ERROR, "MemoryError"),
        ("t.rank_0", TORCHS, Cause.HOST_OUT_OF_MEMORY, "MemoryError"),
        ("u.rank_0", json.dumps({"message": "RuntimeError: y"}), Cause.WORKER_ERROR, "RuntimeError: y"),
        ("v.rank_0", '{"message": ', Cause.WORKER_ERROR, '{"message":'),
        ("w.rank_0", "[" * 100_000, Cause.WORKER_ERROR, "[["),
        ("x.rank_0", "x" * 10**6 + "\nCUDA out of memory", Cause.DEVICE_OUT_OF_MEMORY, "CUDA out of memory"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)  # fmt: skip
def test_a_file_of_a_trainer_that_cannot_be_changed(run, name, text, cause, words):
    left(run, name, text)
    found = judged(run, end(0, 1))
    assert found.cause is cause
    assert words in found.reason
    assert len(found.traceback) <= 2000


@pytest.mark.parametrize("name", ["rank_0", "error.rank_", "error.rank_0.txt", "error.rank_x", "error.rank_-1", "r"])
def test_other_files_are_not_read(run, name):
    left(run, name, "CUDA out of memory")
    assert judged(run, end(0, 1)).cause is Cause.WORKER_ERROR


def test_an_error_file_does_not_undo_a_good_end(run):
    left(run, "error.rank_0", TRACE.format("ValueError: handled"))
    assert judged(run, end(0, 0)).cause is Cause.FINISHED


def test_torchruns_report_of_a_16(run):
    report = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n  exitcode  : 16 (pid: 42) \n"
    left(run, "rank-0.log", TRACE.format(report))
    found = judged(run, end(0, 1))
    assert (found.cause, found.exit_code, found.suspect_nodes) == (Cause.RERUN_ELSEWHERE, 16, ("n0",))


# logs


def test_the_last_words_of_a_log_explain_an_exit_that_left_no_file(run):
    left(run, "rank-0.log", "step 1\n" * 10_000 + TRACE.format("OSError: [Errno 28] No space left on device"))
    found = judged(run, end(0, 1))
    assert found.reason == "rank 0 on n0 exited with 1: OSError: [Errno 28] No space left on device"
    assert found.traceback.startswith("Traceback")


def test_a_log_does_not_contradict_a_signal(run):
    left(run, "rank-0.log", "a warning about NCCL error handling\n")
    assert judged(run, end(0, -11)).cause is Cause.SIGNAL_CRASH
    left(run, "rank-0.log", "terminate called after throwing an instance of 'c10::DistBackendError'\n")
    assert judged(run, end(0, -6)).cause is Cause.COMMUNICATION_ERROR


def test_only_so_many_logs_are_read(run):
    for rank in range(MAX_LOGS + 5):
        left(run, f"rank-{rank}.log", "MemoryError\n")
    heard = collect(run, ATTEMPT, [end(rank) for rank in range(MAX_LOGS + 5)])
    assert [report.rank for report in heard.reports] == list(range(MAX_LOGS))


def test_sruns_lines_are_read(run):
    left(run, "srun.err", "srun: error: n0: task 0: Out Of Memory\n")
    assert judged(run, end(0, -9)).cause is Cause.HOST_OUT_OF_MEMORY


# evidence


def observed(number: int) -> Evidence:
    return Evidence(kind=Kind.STRAGGLER, suspect=NODE, message=f"slow {number}", at=float(number), step=number)


def test_each_line_of_evidence_is_read_once(run):
    reader, path = EvidenceReader(run.verdicts, str(ATTEMPT)), run.verdicts / f"{ATTEMPT}.rank-0.evidence.jsonl"
    assert reader.new() == []
    add_evidence(path, observed(1))
    assert reader.new() == [(path.name, observed(1))]
    assert reader.new() == []
    with path.open("a") as stream:
        stream.write('{"format": 1, "kind": "strag')  # its writer was killed
    assert reader.new() == []
    add_evidence(path, observed(2))
    add_evidence(run.verdicts / f"{ATTEMPT}.rank-1.evidence.jsonl", observed(3))
    assert [each for _, each in reader.new()] == [observed(2), observed(3)]
    assert read_evidence(path) == [observed(1), None, observed(2)]
    assert [each for _, each in EvidenceReader(run.verdicts).new()] == [observed(1), observed(2), observed(3)]
    assert collect(run, ATTEMPT, []).evidence == (observed(1), observed(2), observed(3))


def test_an_endless_line_is_passed_over(run, monkeypatch):
    monkeypatch.setattr(observations, "MAX_VERDICT_BYTES", 500)
    path = run.verdicts / f"{ATTEMPT}.rank-0.evidence.jsonl"
    path.write_bytes(b"x" * 1200 + b"\n")
    add_evidence(path, observed(1))
    reader = EvidenceReader(run.verdicts, str(ATTEMPT))
    assert [each for _ in range(5) for _, each in reader.new()] == [observed(1)]


@pytest.mark.parametrize(
    "change",
    [{"at": float("nan")}, {"at": float("inf")}, {"at": "x"}, {"at": 10**400}, {"step": 1e400}, {"step": "x"},
     {"kind": "unheard of"}, {"kind": []}, {"node": ""}, {"node": 7}],
    ids=str,
)  # fmt: skip
def test_evidence_that_cannot_be_is_none(change):
    line = {"format": 1, "kind": "straggler", "node": "n1", "at": 5.0, "message": "m"}
    assert parse_evidence(json.dumps(line)) is not None
    assert parse_evidence(json.dumps(line | change)) is None


@pytest.mark.parametrize("line", ["", "null", "[]", '"x"', "{", "[" * 100_000, "\x00"])
def test_damaged_evidence_is_none(line):
    assert parse_evidence(line) is None
