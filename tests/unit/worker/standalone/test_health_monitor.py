"""Progress, results, memory: what a loop may ask about itself."""

import errno
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

import slurmft
from slurmft.errors import UsageError
from slurmft.policy.verdict import Cause
from slurmft.worker import standalone
from slurmft.worker.failures import FailureCategory, categorize_failure
from slurmft.worker.standalone import HealthMonitor


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_progress_is_a_new_step_and_looking_is_none(clock):
    monitor = HealthMonitor(timeout_seconds=10, clock=clock)
    clock.now_s += 10
    assert monitor.check_progress()
    clock.now_s += 0.1
    assert not monitor.check_progress(), "looking is no progress"
    assert not monitor.check_progress(1), "it came too late"
    assert monitor.check_progress(1)
    clock.now_s += 6
    assert monitor.check_progress(1)
    clock.now_s += 6
    assert not monitor.check_progress(1), "the same step again is no progress"
    monitor.update_progress()
    assert monitor.check_progress(1) and monitor.seconds_since_progress == 0


def test_the_defaults_are_those_that_users_know():
    assert slurmft.HealthMonitor().timeout_seconds == 300
    assert slurmft.HealthMonitor(timeout_seconds=5).check_progress()


@of_each(timeout=[0, -1, math.inf, math.nan, "5", None])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(UsageError):
        HealthMonitor(timeout)
    with pytest.raises(UsageError):
        slurmft.WatchdogTimer(timeout)


@pytest.mark.parametrize(
    ("loss", "is_bad"),
    [
        (0.5, False), (math.nan, True), (-math.inf, True), (7, False), (10**400, False), (True, False),
        (torch.tensor(0.5), False), (torch.tensor(math.nan), True), (torch.tensor([0.5, math.inf]), True),
        (torch.tensor([1, 2]), False), (torch.zeros(0), False), (torch.tensor(math.nan, dtype=torch.bfloat16), True),
        (torch.tensor(65504.0, dtype=torch.half) * 2, True), (torch.tensor(complex(0, math.nan)), True),
        (complex(math.inf, 0), True), (np.float32("nan"), True), (np.array([1.0, np.inf]), True), (np.int64(3), False),
        ({"a": torch.tensor(1.0), "b": [0.1, (math.nan,)]}, True), ([], False), ({"a": 1.0}, False),
        (torch.tensor(math.nan, requires_grad=True), True),
    ],
    ids=repr,
)  # fmt: skip
def test_nan_and_inf_are_found_in_anything_that_holds_numbers(loss, is_bad):
    assert HealthMonitor().detect_nan_inf(loss) is is_bad


@pytest.mark.parametrize(("loss", "is_bad"), [(1.0, False), (math.inf, True), (math.nan, True)])
def test_what_a_scalar_tensor_is_in_numpy(loss: float, is_bad: bool):
    assert HealthMonitor().detect_nan_inf(torch.tensor(loss).numpy()) is is_bad
    assert HealthMonitor().detect_nan_inf({"a": [torch.tensor([[loss, 1.0]]).numpy()]}) is is_bad


LAYOUTS = {
    "coo": lambda tensor: tensor.to_sparse(), "csr": lambda tensor: tensor.to_sparse_csr(),
    "csc": lambda tensor: tensor.to_sparse_csc(), "bsr": lambda tensor: tensor.to_sparse_bsr((1, 1)),
    "bsc": lambda tensor: tensor.to_sparse_bsc((1, 1)), "mkldnn": lambda tensor: tensor.to_mkldnn(),
    "nested": lambda tensor: torch.nested.nested_tensor([torch.zeros(2), tensor[0]]),
    "coo with a gradient": lambda tensor: tensor.to_sparse().requires_grad_(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("value", "is_bad"), [(1.0, False), (math.nan, True), (-math.inf, True)])
def test_the_layout_of_a_tensor_hides_nothing(layout, value, is_bad):
    tensor = LAYOUTS[layout](torch.tensor([[value, 1.0], [0.0, 2.0]]))
    assert HealthMonitor().detect_nan_inf(tensor) is is_bad


@pytest.mark.parametrize("name", [name for name in dir(torch) if name.startswith("float8_")])
@pytest.mark.parametrize(("value", "is_bad"), [(1.0, False), (math.nan, True)])
def test_float8_has_nan_too(name, value, is_bad):
    assert HealthMonitor().detect_nan_inf(torch.tensor([1.0, value]).to(getattr(torch, name))) is is_bad


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize(("value", "is_bad"), [(1.0, False), (math.nan, True)])
def test_float8_in_a_sparse_tensor_and_a_scale_that_is_nan(layout, value, is_bad):
    values = torch.tensor([value]).to(torch.float8_e5m2)
    if layout == "coo":
        sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), values, (3,))
    else:
        sparse = torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), values, (1, 3))
    assert HealthMonitor().detect_nan_inf(sparse) is is_bad
    assert HealthMonitor().detect_nan_inf(torch.quantize_per_tensor(torch.ones(3), value, 0, torch.qint8)) is is_bad


def test_duplicates_of_a_sparse_tensor_are_summed_and_one_without_data_is_refused():
    assert HealthMonitor().detect_nan_inf(torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (1,), check_invariants=True))
    with pytest.raises(UsageError, match="meta"):
        HealthMonitor().detect_nan_inf(torch.empty(1, device="meta"))


@pytest.mark.parametrize("loss", [None, "0.5", b"1", object(), [None]], ids=lambda loss: type(loss).__name__)
def test_what_is_no_number_is_refused(loss):
    with pytest.raises(UsageError, match="neither a number"):
        HealthMonitor().detect_nan_inf(loss)


def test_memory_that_has_run_out(monkeypatch):
    monitor = HealthMonitor()
    assert monitor.detect_oom(MemoryError())
    assert monitor.detect_oom(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not monitor.detect_oom(ValueError("full"))
    monkeypatch.setattr(standalone, "host_fraction_used", lambda: 0.96)
    assert monitor.detect_oom() and not monitor.detect_oom(threshold=0.97)
    monkeypatch.setattr(standalone, "host_fraction_used", lambda: 0.1)
    assert not monitor.detect_oom()
    monkeypatch.setattr(standalone, "device_allocation_failures", lambda: 1)
    assert monitor.detect_oom(), "one has failed since it was made"
    assert not HealthMonitor().detect_oom(), "and before this one was"


def test_the_limit_of_the_job_counts_and_page_cache_does_not(tmp_path):
    job = tmp_path / "slurm" / "job_1"
    job.mkdir(parents=True)
    for folder, limit, used in ((tmp_path / "slurm", "max", 10**9), (job, "1000", 900)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\nfile 700\nactive_file 300\ninactive_file 100\n")
    assert standalone._cgroup_fractions(job, root=tmp_path) == [0.5]
    (job / "memory.stat").unlink()
    assert standalone._cgroup_fractions(job, root=tmp_path) == []
    assert standalone._cgroup_fractions(None) == [] and 0 < standalone.host_fraction_used() <= 1


def raised_from(cause: Exception) -> Exception:
    try:
        try:
            raise cause
        except Exception as error:
            raise RuntimeError("the step failed") from error
    except RuntimeError as error:
        return error


class Mute(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize(
    ("error", "category", "cause"),
    [
        (MemoryError(), "host out of memory", Cause.HOST_OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory"), "device out of memory", Cause.DEVICE_OUT_OF_MEMORY),
        (RuntimeError("NCCL error: unhandled system error"), "communication", Cause.COMMUNICATION_ERROR),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), "communication", Cause.COMMUNICATION_ERROR),
        (RuntimeError("uncorrectable ECC error encountered"), "hardware", Cause.DATA_CORRUPTION),
        (RuntimeError("CUDA error: unspecified launch failure"), "hardware", Cause.DATA_CORRUPTION),
        (ValueError("loss is NaN at step 3"), "numerical", Cause.WORKER_ERROR),
        (FloatingPointError("invalid value"), "numerical", Cause.WORKER_ERROR),
        (TimeoutError("took too long"), "timeout", Cause.HANG),
        (OSError(errno.ENOSPC, "No space left on device"), "storage", Cause.WORKER_ERROR),
        (FileNotFoundError(errno.ENOENT, "No such file"), "storage", Cause.WORKER_ERROR),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "host out of memory", Cause.HOST_OUT_OF_MEMORY),
        (KeyboardInterrupt(), "preemption", Cause.PREEMPTED),
        (SystemExit(75), "preemption", Cause.PREEMPTED),
        (SystemExit(1), "code", Cause.WORKER_ERROR),
        (KeyError("weights"), "code", Cause.WORKER_ERROR),
        (ImportError("no module named information"), "code", Cause.WORKER_ERROR),
        (Mute(), "code", Cause.WORKER_ERROR),
        (raised_from(MemoryError()), "host out of memory", Cause.HOST_OUT_OF_MEMORY),
        (ExceptionGroup("two", [KeyError("a"), ConnectionError("gone")]), "communication", Cause.COMMUNICATION_ERROR),
        ("Traceback (most recent call last):\n  File\ntorch.OutOfMemoryError: CUDA", "device out of memory",
         Cause.DEVICE_OUT_OF_MEMORY),
        ("something", "unknown", Cause.UNKNOWN),
        ("", "unknown", Cause.UNKNOWN),
        ("x" * 10**6, "unknown", Cause.UNKNOWN),
    ],
    ids=lambda value: repr(value)[:50],
)  # fmt: skip
def test_what_kind_of_failure_it_was(error, category, cause):
    found = categorize_failure(error)
    assert (found, found.cause) == (category, cause)
    assert isinstance(found, FailureCategory) and slurmft.categorize_failure is categorize_failure


PLAIN_TEXTS = [
    ("connection refused", "communication"), ("[Errno 111] Connection refused", "communication"),
    ("NCCL timeout", "communication"), ("NCCL watchdog timed out", "communication"),
    ("CUDA error", "hardware"), ("CUDA error: an illegal memory access was encountered", "hardware"),
    ("CUDA error: device-side assert triggered", "code"), ("CUDA error: out of memory", "device out of memory"),
    ("out of memory", "device out of memory"), ("Out of memory: Killed process 12 (python)", "host out of memory"),
    ("the host is out of memory", "host out of memory"), ("oom-kill event in step 3.0", "host out of memory"),
]  # fmt: skip


@of_each(text__category=PLAIN_TEXTS)
def test_a_plain_text_is_known_with_and_without_an_exception(text, category):
    assert [categorize_failure(one) for one in (text, RuntimeError(text), raised_from(Exception(text)))] == [
        category
    ] * 3


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class Guarded(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise ValueError("not for you")


class NoCode(SystemExit):
    @property
    def code(self) -> int:  # type: ignore[override]
        raise ValueError("none")


class Text(str):
    def splitlines(self, keepends: bool = False) -> list[str]:
        raise ValueError("no lines")


def deep_chain(levels: int) -> Exception:
    error = Exception("0")
    for level in range(levels):
        outer = Exception(str(level))
        outer.__cause__, error = error, outer
    return error


def unusual_errno() -> OSError:
    error = OSError("x")
    error.errno = [1]  # type: ignore[assignment]
    return error


@pytest.mark.parametrize(
    ("error", "category"),
    [
        (None, "unknown"), (5, "unknown"), (b"CUDA error", "unknown"), (MemoryError, "unknown"), (object(), "unknown"),
        (Interrupting(), "code"), (Guarded(), "code"), (NoCode(), "code"), (Text("CUDA error"), "hardware"),
        (unusual_errno(), "code"), ("\ud800", "unknown"), (ExceptionGroup("all", [KeyError("a")] * 2000), "code"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_no_object_makes_it_raise(error, category):
    assert categorize_failure(error) == category


@pytest.mark.timeout(20)
def test_what_is_huge_ends_soon():
    assert categorize_failure(deep_chain(50_000)) is FailureCategory.CODE
    assert categorize_failure("x" * 10**8) is FailureCategory.UNKNOWN
    assert categorize_failure(RuntimeError("CUDA out of memory" + "\n" * 10**7)) == "device out of memory"


@given(st.one_of(st.text(), st.binary(), st.integers(), st.builds(Exception, st.text()), st.builds(OSError, st.text())))
def test_it_never_raises(error):
    assert isinstance(categorize_failure(error), FailureCategory)


def test_a_chain_that_bites_its_tail_ends():
    first, second = KeyError("a"), KeyError("b")
    first.__context__, second.__context__ = second, first
    assert categorize_failure(first) is FailureCategory.CODE
