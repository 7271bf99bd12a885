"""What is read in excerpts of public threads, how fast, and what follows from it."""

import json
import random
import time

from log_endings import log_endings
from of_each import of_each
from verdict_corpus import LABELS, agreement, verdict_corpus

from slurmft.policy.decide import Budget, decide
from slurmft.policy.judge import Circumstances, StepWords, WorkerEnd, held_against, judge
from slurmft.policy.judge import Testimony as Heard
from slurmft.policy.symptoms import MAX_LINE, SIGNATURES, FailureCategory, Remedy, bug_of, cause_of_text, signature_of
from slurmft.policy.verdict import Cause, Kind, Suspect
from slurmft.scheduler.parsing import parse_srun_lines
from slurmft.supervisor.observations import report_of_text
from slurmft.worker.failures import categorize_failure

CORPUS = verdict_corpus()
BUILT_ON = [each for each in CORPUS if not each.judges]
JUDGES = [each for each in CORPUS if each.judges]
TRACE = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    main()\n'
LOADER = f"{TRACE}RuntimeError: DataLoader worker (pid(s) 9001) exited unexpectedly\n"
LOST = f"{TRACE}RuntimeError: No CUDA GPUs are available\n"
OOM = "slurmstepd-n1: error: Detected 2 oom_kill events in StepId=1.0. Some of the step tasks have been OOM Killed.\n"


def test_the_half_that_signatures_are_written_for_is_read_as_labelled():
    wrong = {each.name: each.found() for each in BUILT_ON if each.found() != each.expected}
    assert wrong == {}
    assert sum(each.answer() == each.action for each in BUILT_ON) >= 0.98 * len(BUILT_ON)


def test_the_half_that_judges_is_read_well_and_stops_nothing_that_goes_on():
    count = len(JUDGES)
    assert sum(each.found()[0] == each.expected[0] for each in JUDGES) >= 0.95 * count
    assert sum(each.found()[1] == each.expected[1] for each in JUDGES) >= 0.95 * count
    assert sum(each.answer() == each.action for each in JUDGES) >= 0.97 * count
    assert [each.name for each in CORPUS if each.answer() == Remedy.STOP and each.action != "stop"] == []


def test_the_corpus_is_wide():
    assert len(CORPUS) >= 300 and len({each.project for each in CORPUS}) >= 60
    assert {each.label for each in CORPUS} == set(LABELS)
    assert not {each.project.lower() for each in BUILT_ON} & {each.project.lower() for each in JUDGES}
    assert 0.4 < len(JUDGES) / len(CORPUS) < 0.6


def test_the_half_that_judges_is_labelled_twice_and_the_readers_agree():
    assert all(each.second is not None for each in JUDGES)
    by_cause = [(each.expected[0], LABELS[each.second[0]][0]) for each in JUDGES if each.second is not None]
    actions = [(each.action, each.second[1]) for each in JUDGES if each.second is not None]
    assert agreement(by_cause)[1] > 0.8 and agreement(actions)[1] > 0.8, "kappa: almost perfect by Landis and Koch 1977"
    assert agreement([("a", "a"), ("b", "b"), ("a", "b"), ("b", "a")]) == (0.5, 0.0)
    assert agreement([("a", "a")]) == (1.0, 1.0)


def test_each_signature_is_met_in_an_excerpt():
    texts = [each.text for each in (*CORPUS, *log_endings())]
    met = {row.name for text in texts if (row := signature_of(text, loosely=True)) is not None}
    assert sorted({row.name for row in SIGNATURES if not row.is_loose} - met) == []


@of_each(mark=["[rank3]: ", "3: ", "n17: ", "[1,2]<stderr>:", "(Worker pid=7, ip=10.0.0.1) ",
                                  "2026-01-02 03:04:05,678 ERROR root: ", "\x1b[31m"])  # fmt: skip
def test_marks_in_front_of_lines_change_nothing(mark):
    texts = [
        f"{TRACE}torch.OutOfMemoryError: CUDA out of memory.",
        f"{TRACE}OSError: [Errno 28] No space left on device",
    ]
    for text in texts:
        marked = "".join(f"{mark}{line}\n" for line in text.splitlines())
        assert signature_of(marked) is signature_of(text) is not None


@of_each(
    source=["att = att.masked_fill(mask, float('-inf'))", "raise MemoryError  # or CUDA out of memory",
            "check(nvlink, 'NCCL WARN', 'uncorrectable ECC error encountered')", "except ConnectionResetError:"]
)  # fmt: skip
def test_a_quoted_source_line_says_nothing(source):
    text = f'Traceback (most recent call last):\n  File "m.py", line 1, in f\n    {source}\n    ^^^^^^\nTypeError: no\n'
    assert cause_of_text(text) is None
    assert categorize_failure(text) is FailureCategory.CODE
    assert categorize_failure(text.replace("    ^^^^^^\n", "")) is FailureCategory.CODE
    assert signature_of(f"/env/m.py:9: UserWarning: odd\n  {source}\nstarting\n") is None


def test_an_exceptions_first_line_says_more_than_advice_below_it():
    text = f"{TRACE}RuntimeError: CUDA error: device-side assert triggered\nTip: CUDA out of memory? Lower it\n"
    assert signature_of(text).name == "a kernel was used wrongly"


def test_a_traceback_in_a_record_of_json_is_read():
    record = json.dumps({"level": "error", "exc": f"{TRACE}torch.OutOfMemoryError: CUDA out of memory."})
    assert cause_of_text(f"step 1\n{record}\n") is Cause.DEVICE_OUT_OF_MEMORY
    bug = json.dumps({"level": "error", "exc": f"{TRACE}    x[\"a\"]\nKeyError: 'a'"})
    assert categorize_failure(f"{bug}\n") is FailureCategory.CODE


@of_each(line=["step 12 loss 2.31", " 12%|#2    | 12/100 [00:01<00:09,  9.1it/s]", "INFO epoch 3: loss=0.5"])
def test_an_error_after_which_the_program_went_on_is_no_end(line):
    error = f"{TRACE}torch.OutOfMemoryError: CUDA out of memory.\n"
    assert signature_of(error) is not None
    assert signature_of(f"{error}{line}\n") is None
    assert signature_of(f"{line}\n{error}") is signature_of(error)
    spoilt = f"{TRACE}RuntimeError: CUDA error: uncorrectable ECC error encountered\n{line}\n"
    assert cause_of_text(spoilt) is Cause.DATA_CORRUPTION


@of_each(
    line__name=[
        ("torch.cuda: Unexpected error from cudaGetDeviceCount(). Error 304: OS call failed", "GPUs cannot be used"),
        ("RuntimeError: Unable to initialize backend 'cuda': No visible GPU devices.", "GPUs cannot be used"),
        ("slurmstepd: error: pyxis:     nvidia-container-cli: ldcache error: process failed", "a GPU has failed"),
        ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.4", "driver, library"),
        ("[ 12.3] amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "a GPU has failed"),
        ("pynvml.NVMLError_Unknown: Unknown Error", "a GPU has failed"),
        ("srun: error: Task launch for StepId=1.0 failed on node n3: Socket timed out", "a node has failed"),
        ("NVRM: Xid (PCI:0000:3b:00 GPU-I:03): 79, GPU has fallen off the bus.", "a GPU has failed"),
        ("srun: error: Unable to create step for job 1: More processors requested", "wrong arguments"),
        ("FATAL:   could not open image /s/c.sif: lstat /s/c.sif: no such file or directory", "no such program"),
        ("/var/spool/slurmd/job1/slurm_script: line 12: torchrun: command not found", "no such program"),
        ("/env/bin/python: No module named trainer", "no such program"),
        ("python3: can't open file '/w/x.py': [Errno 2] No such file or directory", "no such program"),
        ("[exiting program after receiving SIGTERM.] datetime: 2025-01-10 10:00:20", "a signal from outside"),
        ("BlockingIOError: [Errno 11] Unable to open file (unable to lock file, errno = 11)", "file or server"),
        ("google.api_core.exceptions.ServiceUnavailable: 503 POST https://x", "a download failed"),
        ("datasets.exceptions.DatasetNotFoundError: Dataset 'a/b' doesn't exist on the Hub", "model, tokenizer"),
        ("RuntimeError: Parent directory /s/ck does not exist.", "file is missing"),
        ("RuntimeError: [ERROR] HCCL error in: torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:64.", "collective"),
        ("ray.exceptions.ActorUnavailableError: The actor x is unavailable: RpcError", "connection to another"),
        ("gzip.BadGzipFile: Not a gzipped file (b've')", "damaged file"),
        ("zlib.error: Error -3 while decompressing data: incorrect data check", "damaged file"),
        ("tarfile.ReadError: unexpected end of data", "damaged file"),
        ("ValueError: mmap length is greater than file size", "damaged file"),
        ("errors_impl.DataLossError: {{function_node x}} corrupted record at 12", "damaged file"),
        ("pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.", "damaged file"),
        ("HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION: beyond the largest legal address.", "an illegal access"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx(x)`", "a kernel was used"),
        ("RuntimeError: DataLoader worker (pid 9) is killed by signal: Segmentation fault.", "a child crashed"),
    ]
)  # fmt: skip
def test_words_of_programs(line, name):
    assert signature_of(line).name.startswith(name)


def test_torchrun_quotes_a_childs_traceback_inside_of_its_own():
    quoted = f"  traceback : {TRACE}".replace("\n  ", "\n    ") + "  KeyError: 'k'\n  \n=====\n"
    text = f"{TRACE}torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n{quoted}"
    assert categorize_failure(text) is FailureCategory.CODE
    assert categorize_failure(text.replace("KeyError", "MemoryError")) is FailureCategory.HOST_OUT_OF_MEMORY


def test_what_is_not_a_peers_failure_counts_more_than_its_echoes():
    echo = (
        f"[rank0]: {TRACE}".replace("\n  ", "\n[rank0]:   ")
        + "[rank0]: torch.distributed.DistBackendError: NCCL error\n"
    )
    own = f"{TRACE}OSError: [Errno 122] Disk quota exceeded\n"
    for text in (own + echo, echo + own):
        assert signature_of(text) is signature_of(own)
    assert signature_of(f"[rank2]: {TRACE}[rank2]: KeyError: 'x'\n{echo}", loosely=True).remedy is Remedy.STOP
    assert cause_of_text(echo) is Cause.COMMUNICATION_ERROR


@of_each(
    words=["OSError: [Errno 122] Disk quota exceeded", "RuntimeError: Address already in use", "TimeoutError: late",
           "RuntimeError: the service is temporarily unavailable", "torch.OutOfMemoryError: CUDA out of memory",
           "requests.exceptions.ReadTimeout: x", "PermissionError: [Errno 13] Permission denied: '/x'"]
)  # fmt: skip
def test_what_may_pass_is_never_a_bug(words):
    assert bug_of(TRACE + words) == ""


def judged(code: int, text: str, step: StepWords = StepWords()):  # noqa: B008 - frozen
    report = report_of_text(text, source="log", rank=0, node="n1", log=True)
    seen = Circumstances(heard=Heard(reports=(report,), step=step))
    return judge([WorkerEnd(rank=0, node="n1", code=code)], world_size=1, seen=seen)


def test_a_child_that_the_kernel_took_is_lack_of_memory_whichever_the_exit_code():
    assert judged(1, LOADER).cause is Cause.WORKER_ERROR
    assert judged(1, LOADER, parse_srun_lines(OOM)).cause is Cause.HOST_OUT_OF_MEMORY
    assert judged(1, LOADER, parse_srun_lines(OOM.replace("-n1", "-n2"))).cause is Cause.WORKER_ERROR
    assert judged(1, f"{TRACE}KeyError: 'x'", parse_srun_lines(OOM)).cause is Cause.WORKER_ERROR


def test_an_error_of_the_node_leads_away_from_it():
    verdict = judged(1, LOST)
    assert (verdict.cause, verdict.suspects) == (Cause.WORKER_ERROR, (Suspect(node="n1", rank=0),))
    assert any("cannot be used on this node" in line for line in verdict.evidence)
    assert [(each.kind, each.suspect.node) for each in held_against(verdict, (), at=1.0)] == [(Kind.CRASH, "n1")]
    assert decide(verdict, Budget(failures_so_far=0, max_failures=3)).avoid == ("n1",)
    other = judged(1, f"{TRACE}KeyError: 'x'")
    assert (other.suspects, held_against(other, (), at=1.0)) == ((), ())


@of_each(
    words__cause=[("TIME LIMIT", Cause.TIME_LIMIT), ("PREEMPTION", Cause.PREEMPTED), ("JOB REQUEUE", Cause.REQUEUED),
                  ("NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", Cause.NODE_LOST)]
)  # fmt: skip
def test_slurms_own_words_name_the_end_where_nothing_else_was_known(words, cause):
    line = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-02T03:04:05{} ***"
    step = parse_srun_lines(line.format(f" DUE TO {words}"))
    assert step.ended is cause
    assert judged(143, f"{TRACE}KeyError: 'x'", step).cause is cause
    known = Circumstances(planned=Cause.STOPPED_BY_USER, planned_reason="asked", heard=Heard(step=step))
    assert judge([WorkerEnd(rank=0, node="n1", code=75)], world_size=1, seen=known).cause is Cause.STOPPED_BY_USER
    assert parse_srun_lines(line.format("")).ended is None


def hostile_lines() -> dict[str, str]:
    """Beginnings of patterns, and of the marks of loggers, over and over."""
    starts = {part.pattern for row in SIGNATURES for pattern in row.parts() for part in pattern}
    plain = {"".join(c for c in each if c.isalnum() or c in " _.-:'")[:30] for each in starts}
    marks = {
        "[1,2]<stderr>:",
        "2026-01-02 03:04:05,678 ",
        "(Worker pid=1",
        "[rank1]: ",
        "a.",
        "| ",
        "slurmft rank 1",
        "(",
    }
    return {each: each * (MAX_LINE // max(1, len(each))) for each in sorted(plain | marks) if each}


def test_no_line_makes_it_slow():
    took = {}
    for name, line in hostile_lines().items():
        began_s = time.process_time()
        signature_of("\n".join(f"{line}{number}" for number in range(10)))
        took[name] = time.process_time() - began_s
    assert {name: spent_s for name, spent_s in took.items() if spent_s > 0.3} == {}  # usually 0.005


def test_only_the_end_of_a_long_log_is_read():
    lines = "".join(f"{random.Random(number).random()} is said here, and nothing else\n" for number in range(1000))
    end = "OSError: [Errno 28] No space left on device\n"
    began_s = time.process_time()
    assert signature_of(lines * 500 + TRACE + end).remedy is Remedy.WAIT
    assert time.process_time() - began_s < 2.0
