"""What ended a program: the table of signatures of programs, Slurm and the kernel, and the one reader of text.

Only what was printed as an end counts: neither source lines that a traceback quotes, nor remarks, nor errors after
which the program went on. What the words mean is said by ``SIGNATURES``. No text takes long, whatever is in it: only
its newest lines are read, and only the beginning of each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slurmft.policy.verdict import Cause

# The table of signatures: what programs, Slurm and the kernel print when something ends, and what follows from it. To
# add one: a row in ``SIGNATURES`` and an excerpt in ``tests/unit/data/verdict_corpus.txt``, then ``make docs``. A
# signature is tried on single lines, without the marks that launchers, ranks and loggers put in front (``symptoms``).
# Its patterns are regular expressions; `` ... `` in one stands for any text between two parts, each of which is
# looked for once, so that no line can make it slow: write no ``.*`` and no repetition within a repetition. Those that
# begin with a fixed text are found several times faster than others.


class FailureCategory(StrEnum):
    """Kinds of failures that call for different answers."""

    DEVICE_OUT_OF_MEMORY = "device out of memory"
    HOST_OUT_OF_MEMORY = "host out of memory"
    COMMUNICATION = "communication"
    HARDWARE = "hardware"
    NUMERICAL = "numerical"
    TIMEOUT = "timeout"
    STORAGE = "storage"
    PREEMPTION = "preemption"
    CODE = "code"
    UNKNOWN = "unknown"

    @property
    def cause(self) -> Cause:
        """The supervisor's cause for it."""
        return _CAUSES[self]


_CAUSES = {
    FailureCategory.DEVICE_OUT_OF_MEMORY: Cause.DEVICE_OUT_OF_MEMORY,
    FailureCategory.HOST_OUT_OF_MEMORY: Cause.HOST_OUT_OF_MEMORY,
    FailureCategory.COMMUNICATION: Cause.COMMUNICATION_ERROR,
    FailureCategory.HARDWARE: Cause.DATA_CORRUPTION,
    FailureCategory.NUMERICAL: Cause.WORKER_ERROR,
    FailureCategory.TIMEOUT: Cause.HANG,
    FailureCategory.STORAGE: Cause.WORKER_ERROR,
    FailureCategory.PREEMPTION: Cause.PREEMPTED,
    FailureCategory.CODE: Cause.WORKER_ERROR,
    FailureCategory.UNKNOWN: Cause.UNKNOWN,
}


class Suspected(StrEnum):
    """Where the reason lies, most likely."""

    CODE = "the program or its settings"
    DATA = "the data, or the numbers made of them"
    DEVICE = "a GPU"
    NODE = "the node"
    NETWORK = "the network, or a peer"
    STORAGE = "the storage"
    SITE = "Slurm, or services of the site"
    NOBODY = "not known"


class Remedy(StrEnum):
    """What is right to do."""

    AGAIN = "again"
    """In place, from the newest checkpoint."""

    ELSEWHERE = "elsewhere"
    """On other nodes."""

    LESS_MEMORY = "less"
    """With less memory per step, or more of it (``oom.action: reduce_batch``, Slurm's ``mem``)."""

    WAIT = "wait"
    """When there is room again: retries in a row only use up the budget."""

    REQUEUE = "queue"
    """Through the queue, at no cost."""

    STOP = "stop"
    """Not again, once the same has come twice before any step: another try, on any node, repeats it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One row."""

    name: str
    category: FailureCategory
    suspected: Suspected
    remedy: Remedy
    source: str
    """Who prints it."""

    patterns: tuple[str, ...]
    cause: Cause
    """Of a verdict on a rank that has only this to show."""

    is_echo: bool
    """A peer's failure looks like this as well: anything else that a log says is the better reason."""

    is_loose: bool
    """A person's words rather than a program's: good for an exception or a single line, too weak for a verdict."""

    @property
    def strength(self) -> int:
        """How good a reason it is: one that names none yields to any, an echo to all others."""
        return 0 if self.category is FailureCategory.UNKNOWN else 1 if self.is_echo else 2

    def parts(self) -> Iterable[list[re.Pattern[str]]]:
        """The compiled parts of each pattern, to be found one behind the other."""
        return ([re.compile(part) for part in pattern.split(" ... ")] for pattern in self.patterns)


_C, _S, _R = FailureCategory, Suspected, Remedy
NONE = Cause.WORKER_ERROR
"""The cause of a verdict where a log shows that it is none of those with rules of their own."""


def _row(
    name: str, category: FailureCategory, suspected: Suspected, remedy: Remedy, source: str, *patterns: str,
    cause: Cause | None = None, is_echo: bool = False, is_loose: bool = False,
) -> Signature:  # fmt: skip
    return Signature(name, category, suspected, remedy, source, patterns, cause or category.cause, is_echo, is_loose)


_E = r"^(?:\w+\.)*"
"""In front of the name of an exception's class."""

_ANY = _E + r"(?:Assertion|Value|Runtime)Error\b"
"""Errors whose words say more than their class."""

_NOT_FATAL = r"(?!.{0,200}\b[Nn]on-?[Ff]atal\b)"

# fmt: off
SIGNATURES: Sequence[Signature] = (
    # --- devices that have spoilt data, or do not work ---
    _row("uncorrectable memory or link error", _C.HARDWARE, _S.DEVICE, _R.ELSEWHERE, "CUDA, NVIDIA's driver",
         r"uncorrectable (?:ECC|NVLink) error(?!s)", r"[Ee][Cc][Cc] error encountered", r"cudaErrorECCUncorrectable",
         r"CUDA_ERROR_(?:ECC|NVLINK)_UNCORRECTABLE", rf"NVRM: Xid \([\w:. -]+\): (?:48|64|94|95|140)\b{_NOT_FATAL}"),
    _row("a program's fault on a GPU", _C.HARDWARE, _S.CODE, _R.AGAIN, "NVIDIA's driver",
         r"NVRM: Xid \([\w:. -]+\): (?:8|11|13|31|43|45|68|69)\b", cause=NONE),
    _row("a GPU has failed", _C.HARDWARE, _S.DEVICE, _R.ELSEWHERE, "NVIDIA's driver, nvidia-smi",
         r"NVRM: Xid \([\w:. -]+\): \d", r"SXid \([\w:.]+\): \d", r"allen off the bus", r"RmInitAdapter failed",
         r"rm_init_adapter failed", r"GPU is lost", r"Unable to determine the device handle for GPU",
         r"nvidia-container-cli: (?!requirement)\w+ error", r"HSA_STATUS_ERROR_EXCEPTION",
         r"NVRM: The NVIDIA probe routine failed", r"amdgpu: (?:GPU reset begin|Uncorrectable hardware error)",
         r"NVMLError_(?:Unknown|ResetRequired)", cause=NONE),
    _row("driver and library differ", _C.HARDWARE, _S.NODE, _R.ELSEWHERE, "NVML: the driver was updated under the node",
         r"Driver/library version mismatch", r"Failed to initialize NVML", r"NVML: Driver", cause=NONE),
    _row("GPUs cannot be used on this node", _C.HARDWARE, _S.NODE, _R.ELSEWHERE, "CUDA, cuBLAS, HIP",
         r"system not yet initialized", r"CUDA_ERROR_SYSTEM_NOT_READY", r"No CUDA GPUs are available",
         r"No visible GPU devices", r"Unexpected error from cudaGetDeviceCount",
         r"Found no NVIDIA driver", r"CUDA unknown error", r"no CUDA-capable device",
         r"all CUDA-capable devices are busy", r"CUDA-capable device\(s\) is/are busy",
         r"CUBLAS_STATUS_NOT_INITIALIZED", r"unspecified launch failure", r"hipErrorLaunchFailure", r"hipErrorNoDevice",
         r"the launch timed out and was terminated", r"cudaErrorLaunchFailure", cause=NONE),

    # --- a network card, before memory and storage: it fails with the system's words for those ---
    _row("network card or fabric", _C.COMMUNICATION, _S.NETWORK, _R.AGAIN, "NCCL, UCX, libfabric, MPI",
         r"NCCL WARN NET/", r"ibv_\w{1,40} failed with error", r"OFI poll failed",
         r"Got completion (?:from peer|with error)", r"Got async event : port error", r"UCX +ERROR",
         r"Transport retry count exceeded", r"libfabric:\d+:\S+<warn> ... (?:err: \d|Cannot allocate)", is_echo=True),

    # --- memory ---
    _row("memory of the device", _C.DEVICE_OUT_OF_MEMORY, _S.CODE, _R.LESS_MEMORY,
         "PyTorch, CUDA, HIP, XLA, TensorFlow, vLLM, SGLang, llama.cpp", r"(?:cuda|torch)\.OutOfMemoryError",
         r"^OutOfMemoryError",
         r"(?:CUDA|HIP|XPU|NPU|MPS backend) out of memory", r"(?:CUDA|HIP)(?: driver)? error: out of memory",
         r"CU(?:DA|BLAS|DNN|SPARSE|SOLVER|FFT)\w{0,40}_ALLOC_FAILED", r"CUDA_ERROR_OUT_OF_MEMORY",
         r"[Cc]uda failure (?:\d+ )?'out of memory'", r"RESOURCE_EXHAUSTED: (?:Out of memory|Failed to allocate)",
         r"hipErrorOutOfMemory", r"OOM when allocating tensor", r"cudaErrorMemoryAllocation",
         r"(?:cuda|hip)Malloc ... out of memory", r"HSA_STATUS_ERROR_OUT_OF_RESOURCES", r"triton ... OutOfResources",
         r"No available memory for the cache blocks", r"Free memory on device ... less than desired GPU memory",
         r"Not enough memory\. Please try to (?:in|de)crease --mem-fraction"),
    _row("memory shared between processes", _C.HOST_OUT_OF_MEMORY, _S.NODE, _R.LESS_MEMORY,
         "PyTorch, NCCL: /dev/shm is full", r"out of shared memory", r"insufficient shared memory",
         r"killed by signal: Bus error", r"creating shared memory segment", r"posix_fallocate failed",
         r"allocate shared memory", r"unable to write to file </torch_", r"No space left on device ... '/dev/shm/",
         r"dev/shm/ ... No space left on device"),
    _row("the kernel or Slurm killed for memory", _C.HOST_OUT_OF_MEMORY, _S.NODE, _R.LESS_MEMORY,
         "Linux, slurmstepd, srun", r"oom[-_]kill(?:er)?(?: event|\(|:)", r"oom-kill event", r"OOM Killed",
         r"invoked oom-killer", r"OOMKilled", r"[Oo]ut of memory: Kill", r"[Ee]xceeded (?:job |step )?memory limit",
         r"srun: error: ... : Out Of Memory", r"oom_reaper: reaped"),
    _row("Ray killed for memory", _C.HOST_OUT_OF_MEMORY, _S.NODE, _R.LESS_MEMORY, "Ray's memory monitor",
         r"ray\.exceptions\.OutOfMemoryError", r"node running low on memory", r"killed due to memory pressure"),
    _row("a child was killed", _C.HOST_OUT_OF_MEMORY, _S.NODE, _R.LESS_MEMORY,
         "PyTorch's loaders, spawn, torchrun, bash; joblib, datasets: mostly for memory",
         r"DataLoader worker \(pid\(?s?\)? ... killed by signal: Killed", r"terminated with signal SIGKILL",
         r"Signal 9 \(SIGKILL\) received by PID", r"failed \(exitcode: -9\)", r"return code = -9$", r"SIGKILL\(-9\)",
         r"subprocesses has abruptly died", r"line \d+: +\d+ Killed\b"),
    _row("memory of the host", _C.HOST_OUT_OF_MEMORY, _S.NODE, _R.LESS_MEMORY, "Python, NumPy, PyTorch, Arrow, C++",
         _E + r"_?(?:Array|Arrow)?MemoryError\b", r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
         r"Unable to allocate ... for an array", r"std::bad_alloc", r"\[Errno 12\]", r"Cannot allocate memory"),

    # --- Slurm's own words ---
    _row("time limit", _C.PREEMPTION, _S.SITE, _R.REQUEUE, "slurmstepd", r"CANCELLED AT ... DUE TO TIME LIMIT",
         cause=NONE),
    _row("preempted or requeued", _C.PREEMPTION, _S.SITE, _R.REQUEUE, "slurmstepd, submitit",
         r"CANCELLED AT ... DUE TO (?:PREEMPTION|JOB REQUEUE)", r"Exiting gracefully after preemption",
         r"timed-out and not checkpointable", r"this job is preempted", cause=NONE),
    _row("a node has failed", _C.HARDWARE, _S.NODE, _R.ELSEWHERE, "slurmstepd, srun", r"DUE TO NODE FAILURE",
         r"\[Hardware Error\]", r"node has (?:crashed|died)", r"srun: error: Node failure on",
         r"Task launch for ... failed on node \S+: (?!.{0,40}(?:credential|execve|[Jj]ob id))", cause=NONE),
    _row("a signal from outside", _C.PREEMPTION, _S.SITE, _R.REQUEUE, "torchrun, Lightning, Megatron",
         r"SignalException: Process \d+ got signal: \d", r"^KeyboardInterrupt\b",
         r"eceiv(?:ed|ing) SIG(?:TERM|USR1|USR2|HUP)\b", r"SIGTERMException", cause=NONE),
    _row("no such program or image", _C.CODE, _S.CODE, _R.STOP, "slurmstepd, pyxis, Apptainer, shells, Python",
         r"error: execve\(\): ", r"pyxis: failed to import", r"^could not open image /",
         r"executable file not found in \$PATH", r": command not found$", r"^\S*sh: \d+: \S+: not found$",
         r"^(?:\S*python[\d.]*: )?(?:No module named \S+$|can't open file ')"),

    # --- storage ---
    _row("no room", _C.STORAGE, _S.STORAGE, _R.WAIT, "Linux, PyTorch's writer, safetensors: a full disk, or a quota",
         r"\[Errno (?:28|122)\]", r"No space left on device", r"[Dd]isk quota exceeded", r"errno = (?:28|122)\b",
         r"disk is full", r"OutOfDiskError", r"PytorchStreamWriter failed writing", r"unexpected pos \d+ vs \d",
         r"StorageFull", r"[Ff]ile ... cannot be opened\.$", r"file write failed"),
    _row("file or server does not answer", _C.STORAGE, _S.STORAGE, _R.AGAIN, "NFS, Lustre, Linux",
         r"[Ss]tale (?:NFS )?file handle", r"\[Errno (?:5|30|107|108|110|116|121)\] ... '/",
         r"\[Errno (?:5|30|107|108|116|121)\]", r"ransport endpoint (?:shutdown|is not connected)", r"\[Errno 12[67]\]",
         r"LustreError", r"nfs: server \S+ not responding", r"EXT4-fs error", r"XFS ... [Cc]orrupt", r"I/O error, dev ",
         r"Buffer I/O error", r"Input/output error", r"Failed to acquire lock on file", r"Read-only file system",
         r"\[Errno 16\] Device or resource busy", r"This client was evicted",
         r"unable to lock file"),
    _row("too many open files", _C.STORAGE, _S.CODE, _R.AGAIN,
         "Linux, PyTorch's loaders: ulimit -n, or file_system sharing", r"[Tt]oo many open files",
         r"received 0 items of ancdata", r"\[Errno 24\]"),
    _row("damaged file", _C.STORAGE, _S.DATA, _R.STOP, "PyTorch, safetensors, zip: cut off, or no such format",
         r"PytorchStreamReader failed", r"deserializing header", r"failed finding central directory",
         _E + r"Bad(?:Zip|Gzip)File", r"^zlib\.error", r"^tarfile\.ReadError", _E + r"DataLossError",
         r"invalid load key", r"pickle data was truncated", r"UnidentifiedImageError",
         r"image file is truncated", r"Compressed file ended before", r"file signature not found",
         r"storage has wrong size", r"unexpected EOF", r"Ran out of input$", r"MetadataIncompleteBuffer",
         r"HeaderTooLarge", r"mmap length is greater than file size", r"magic bytes not found in footer"),
    _row("file is missing, or may not be read", _C.STORAGE, _S.STORAGE, _R.AGAIN, "Python: a mount may be missing",
         _E + r"FileNotFoundError\b", _E + r"PermissionError\b", _E + r"(?:IsA|NotA)DirectoryError\b",
         _E + r"FileExistsError\b", r"Parent directory \S+ does not exist"),

    # --- downloads: other machines, but not the other ranks ---
    _row("offline by settings", _C.CODE, _S.CODE, _R.STOP, "Hugging Face Hub", r"OfflineModeIsEnabled"),
    _row("a download failed", _C.COMMUNICATION, _S.SITE, _R.AGAIN, "requests, urllib3, Hugging Face Hub, S3, W&B",
         r"HTTPS?ConnectionPool", r"^(?:urllib3|requests|httpx|httpcore|aiohttp|botocore|google\.api_core)\.",
         r"LocalEntryNotFoundError", r"couldn't connect to 'https?:", r"URLError: <urlopen error",
         r"HTTP Error [45]\d\d", r"Too Many Requests for url", r"[45]\d\d (?:Client|Server) Error: ",
         r"name resolution", r"wandb\.errors\.", r"Could not connect to the endpoint URL", cause=NONE),

    # --- settings and programs that another try would only repeat ---
    _row("two ranks on one GPU", _C.CODE, _S.CODE, _R.STOP, "NCCL", r"Duplicate GPU detected",
         r"ncclCommInitRank failed: invalid usage"),
    _row("a kernel was used wrongly", _C.CODE, _S.CODE, _R.STOP, "CUDA, HIP",
         r"CUBLAS_STATUS_(?:INVALID_VALUE|NOT_SUPPORTED|ARCH_MISMATCH)",
         r"(?:CUDA|HIP) error: (?:device-side assert|invalid |no kernel image|misaligned address)",
         r"(?:CUDA|HIP) error: (?:too many resources|peer access is|operation not (?:permitted|supported))",
         r"[Cc]uda failure (?:\d+ )?'operation not supported", r"hipErrorNoBinaryForGpu",
         r"Assertion `[^`]{0,200}` failed\.$"),
    _row("driver, library or extension of another version", _C.CODE, _S.SITE, _R.STOP, "CUDA, the loader of Linux",
         r"driver version is insufficient", r"unsatisfied condition: cuda",
         r"cudaErrorInsufficientDriver", r"NVIDIA driver on your system is too old",
         r"undefined symbol", r"with link time reference", r"version `\w+_[\d.]+' not found", r"mismatches the version",
         r"cannot open shared object file", r"compiled with different CUDA", r"Error building extension"),
    _row("checkpoint and model do not match", _C.CODE, _S.CODE, _R.STOP, "PyTorch, Megatron", r"in loading state_dict",
         r"size mismatch for \S+ copying", r"[Mm]issing key(?:\(s\))? in (?:checkpoint )?state_dict",
         r"value from checkpoint \(", r"[Ww]eights only load failed", r"Unexpected key\(s\) in state_dict"),
    _row("wrong arguments or settings", _C.CODE, _S.CODE, _R.STOP, "argparse, Hydra, Lightning, DeepSpeed, vLLM",
         r"error: (?:unrecognized arguments|argument |the following arguments)", r"MisconfigurationException",
         r"is not in struct$", r"batch related parameters", r"not divisible by|be divisible by",
         r"[Cc]ould not override", r"larger than the available KV cache memory", r"[Dd]efault process group",
         r"number of tasks per node configured in SLURM", r"not built with SLURM's PMI support",
         r"Unable to create step for job \d+: (?:More processors|Memory required|Requested node config|Invalid )"),
    _row("model, tokenizer or data set is not there, or is none", _C.CODE, _S.DATA, _R.STOP, "transformers, datasets",
         r"Can't load (?:tokenizer|the configuration|the model|feature)", r"does not appear to have a file named",
         r"no file named \S+", r"not a valid model identifier", r"gated repo", r"GatedRepoError",
         r"RepositoryNotFoundError", r"DatasetGenerationError", r"Data(?:set|Files)NotFoundError",
         r"Arrow(?:Invalid|TypeError)\b", r"JSON parse error",
         r"JSONDecodeError", r"data did not match any variant", r"Couldn't reach server at"),
    _row("parameters without a gradient", _C.CODE, _S.CODE, _R.STOP, "DistributedDataParallel",
         r"Expected to have finished reduction"),

    # --- the other ranks ---
    _row("port is taken", _C.COMMUNICATION, _S.NODE, _R.AGAIN, "c10d, uvicorn: another job's, or an earlier attempt's",
         r"EADDRINUSE", r"[Aa]ddress already in use", r"\[Errno 98\]"),
    _row("collective, store or rendezvous", _C.COMMUNICATION, _S.NETWORK, _R.AGAIN, "NCCL, RCCL, gloo, c10d, MPI, JAX",
         r"Dist(?:Backend|Network|Store|Queue\w{0,10})Error", r"[HNR]CCL (?:error|communicator)",
         r"nccl\w{0,40}Error\b", r"NCCL WARN", r"Watchdog caught collective operation timeout",
         r"ProcessGroup(?:NCCL|Gloo|MPI|UCC)\b",
         r"gloo/transport/", r"gloo::", r"Gloo connect", r"Connection closed by (?:remote )?peer",
         r"[Tt]imed out waiting (?:for (?:send|recv|operation|buf)|\d+ ?ms)", r"client socket has timed out",
         r"(?:TCPStore|c10d|rendezvous|socket) ... (?:timed out|timeout)", r"connect\(\) timed out",
         r"Rendezvous(?:Connection|Timeout|Closed|Graceful)\w{0,10}", r"collective\w{0,20}  ... (?:timed out|timeout)",
         r"failed to recv, got 0 bytes", r"Socket Timeout$", r"store based barrier", r"monitoredBarrier", r"MPI_ERR_",
         r"An error occurred in MPI_", r"Fatal error in P?MPI_", r"(?:ORTE|PRTE) has lost communication",
         r"HorovodInternalError", r"NodeDiedError", r"Barrier timed out", r"CoordinationService",
         r"[Cc]oordination service", r"GetKeyValue\(\) timed out", is_echo=True),
    _row("connection to another process", _C.COMMUNICATION, _S.NETWORK, _R.AGAIN, "Python, Linux",
         _E + r"(?:ConnectionResetError|BrokenPipeError|ConnectionRefusedError|ConnectionAbortedError)\b",
         r"Connection reset by peer", r"Broken pipe", r"No route to host", r"Network is unreachable",
         r"failed to connect to all addresses", r"ActorUnavailableError", is_echo=True),

    # --- numbers ---
    _row("numbers that are none", _C.NUMERICAL, _S.DATA, _R.AGAIN, "Megatron, DeepSpeed, fairseq, detectron2, PyTorch",
         _E + r"FloatingPointError\b", r"found NaN in", r"[Ll]oss scale already at minimum",
         r"Minimum loss scale reached", r"[Ll]oss is (?:nan|NaN|inf)", r"[Ll]oss became infinite or NaN",
         r"returned nan values in", r"loss returned in `training_step` is", r"_LinAlgError ... failed to converge"),

    # --- ends that name no reason ---
    _row("a watchdog of the program", _C.TIMEOUT, _S.NOBODY, _R.AGAIN, "SGLang, vLLM", r"^Watchdog timeout \(",
         r"RPC call to \w+ timed out", cause=NONE, is_echo=True),
    _row("a child crashed", _C.UNKNOWN, _S.NOBODY, _R.AGAIN, "spawn, Ray, Dask",
         r"terminated with signal SIG(?:SEGV|ABRT|BUS|ILL|FPE)", r"died unexpectedly", r"orker died or was killed",
         r"crashed during start", r"KilledWorker", r"exited unexpectedly", r"killed by signal: (?:Segm|Abort)",
         r"failed \(exitcode: -(?:4|6|7|8|11)\)",
         r"\(core dumped\)", r"^Segmentation fault", r"return code = -(?:6|7|11)$",
         r"Signal \d+ \(SIG(?:SEGV|ABRT|BUS)\) received", r"^Fatal Python error: ", cause=NONE, is_echo=True),
    _row("an illegal access, or another error of the device", _C.HARDWARE, _S.CODE, _R.AGAIN, "CUDA, HIP",
         r"illegal memory access", r"cudaErrorIllegalAddress", r"Memory access fault by GPU",
         r"HSA_STATUS_ERROR_(?:MEMORY|ILLEGAL)", r"(?:CUDA|HIP) error\b", r"cuDNN error", r"CUDNN_STATUS_",
         r"MIOpen Error", r"rocBLAS error", cause=NONE),

    # --- people's words, for exceptions and single lines ---
    _row("a program's own error", _C.CODE, _S.CODE, _R.STOP, "Python",
         _E + r"(?:Attribute|Import|ModuleNotFound|Index|Key|Lookup|Name|NotImplemented|Type|UnboundLocal)Error\b",
         _E + r"(?:Syntax|Indentation|Tab|Unicode\w{0,9}|Recursion|Unpickling)Error\b", is_loose=True),
    _row("hardware, in a person's words", _C.HARDWARE, _S.DEVICE, _R.AGAIN, "exceptions of any program",
         r"(?i:hardware (?:error|stack)|\bXid\b|CUDA_ERROR_HARDWARE)", is_loose=True),
    _row("the host's memory, in a person's words", _C.HOST_OUT_OF_MEMORY, _S.NODE, _R.LESS_MEMORY,
         "exceptions of any program",
         r"(?i:\b(?:host|cpu|system|main memory|ram|oom[- _]?kill\w{0,9}|killed|cgroup)\b) ... (?i:\bout of memory\b)",
         r"(?i:\bout of (?:host|system|cpu|main) memory\b|\bout of memory: killed\b|\boom[-_]kill)", is_loose=True),
    _row("the device's memory, in a person's words", _C.DEVICE_OUT_OF_MEMORY, _S.CODE, _R.LESS_MEMORY,
         "exceptions of any program", r"(?i:\bout of (?:device |gpu )?memory\b)", is_loose=True),
    _row("a connection, in a person's words", _C.COMMUNICATION, _S.NETWORK, _R.AGAIN, "exceptions of any program",
         r"(?i:\b(?:NCCL|RCCL|gloo)\b) ... (?i:\b(?:timed?[ -]?out|timeout)\b)",
         r"(?i:\bconnection (?:was )?(?:refused|reset|aborted|timed out)\b)",
         r"(?i:\b(?:no route to host|network is unreachable)\b)", _E + r"Connection\w{0,20}Error\b", is_loose=True),
    _row("time, in a person's words", _C.TIMEOUT, _S.NOBODY, _R.AGAIN, "exceptions of any program",
         r"(?i:\b(?:timed? ?out|deadline exceeded|watchdog)\b)", _E + r"\w{0,40}Time-?[Oo]ut\w{0,20}\b", is_loose=True),
    _row("numbers, in a person's words", _C.NUMERICAL, _S.DATA, _R.AGAIN, "exceptions of any program",
         r"(?i:\b(?:NaNs?|infs?|non-?finite|not finite|overflow|diverged)\b)", _E + r"(?:Overflow|ZeroDivision)Error\b",
         is_loose=True),
    _row("storage, in a person's words", _C.STORAGE, _S.STORAGE, _R.AGAIN, "Python", _E + r"(?:OS|IO)Error: \[Errno",
         is_loose=True),
    _row("what may pass, in a person's words", _C.CODE, _S.NOBODY, _R.AGAIN, "exceptions of any program",
         rf"{_ANY} ... (?i:tempora|unavailable|in use\b|\bbusy\b|try again|\bdevice|memory|interrupted|\bHTTP|\bSSL)",
         rf"{_ANY} ... (?i:\block\b|OS error|failed to (?:open|read|write|connect|get)\b)", cause=NONE, is_loose=True),
    _row("an error with the program's words", _C.CODE, _S.CODE, _R.STOP, "Python", _ANY, is_loose=True),
)
# fmt: on
"""In the order in which they count where one failure has several; loose ones last."""


# The one reader of text: what ended a program, by its exceptions, its messages, Slurm's lines and the kernel's.

MAX_LINES, MAX_LINE, MAX_CHARACTERS = 1000, 1000, 400_000
"""Of a text, from its end, and of each line."""

# --- Lines: what launchers, ranks and loggers put in front of them, and whether they are remarks ---

TRACEBACK = "Traceback (most recent call last):"
_HEAD = re.compile(r"Traceback \(most recent call last\):(?: \(RANK \d{1,9}\))?\s*$")
_CHAIN = re.compile(r"^(?:During handling of the above exception|The above exception was the direct cause)")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_WHO = re.compile(
    r"\[(?:rank|default)\d{1,7}\]: ?|\[[Rr]ank \d{1,7}\] (?=Trace)|\[\d{1,7},\d{1,7}\]<std(?:out|err)>: ?|"
    r"\d{1,7}: |\([A-Za-z_]\w{0,60} pid=[^)]{1,80}\) ?|\((?:raylet|autoscaler|pid=\d{1,9})[^)]{0,60}\) ?|"
    r"[a-z][a-z-]{0,30}\d[\w-]{0,30}: |\w{3} \w{3} +\d{1,2} [\d:]{8} \d{4}\[\d{1,7}\]<std(?:out|err)>: ?"
)
"""A rank, a node or an actor, as torch, torchrun, srun, mpirun, Ray, vLLM and DeepSpeed mark lines."""

_WHEN = re.compile(
    r"\[\d{4}-\d\d-\d\d[T ][\d:]{8}[^\]]{0,40}\] ?|"
    r"\d{4}-\d\d-\d\d[T ][\d:]{8}[.,]?\d{0,9}(?:Z|[+-]\d\d:?\d\d)?[ :|-]{0,4}|"
    r"\d\d[-/]\d\d(?:[-/]\d{4})? [\d:]{8} (?:- )?|[A-Z][a-z]{2} +\d{1,2} [\d:]{8} [\w.-]{1,60} |kernel: |"
    r"\[[ \d]{0,8}\d\.\d{1,9}\] ?|\[\d{1,9}\] (?=\[)|\[[A-Z][a-z]{2} [^\]]{5,40}\] |\[?[\w/]{1,60}\.py:\d{1,6}\] ?|"
    r"\[[\w./]{1,60}:\d{1,6}:\w{1,60}\] |[A-Za-z][\w.]{0,40} - (?=[A-Z]{4,8} - )|"
    r" {0,2}\| (?=\d{4}-|[A-Z]{4,8}\b|\S{1,40}:\d)"
)
"""Times, and where in a program it was said."""

_LEVEL = re.compile(
    r"\[?(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\]?(?: *[|:-] *| +)"
    r"(?:(?![\w.]*(?:Error|Exception|Interrupt)\b)[\w.<>]{1,60}(?::[\w<>]{1,60}:\d{1,6})?(?: - |: ?| \| ))?"
)
_QUIET = frozenset({"DEBUG", "INFO"})
_REMARK = re.compile(
    r"^\[?[IW]\d{3,4} |^\[[IW] |^[^\n]{0,200}?(?:Warning: |\bNCCL INFO\b)|[Rr]etry loop|Trying to resume"
)
"""Remarks of a library, after any exception as well: "destroy_process_group() was not called" is no reason."""

_GROUP = re.compile(r"^[ +|]*\| ?")  # the frame that Python draws around the members of an ExceptionGroup
_FRAME = re.compile(r'\s+File "|\s+[\^~+]+(?:\s|$)|[│╭╰❱]|\S{1,300}:\d+: \w*Warning: ')
_JSON = re.compile(r'\s*"message": "(.*)",?$')
_STEP = re.compile(r"\b(?:step|epoch|iter(?:ation)?)\b", re.IGNORECASE)
_PROGRESS = re.compile(r"\d ?(?:it/s|s/it|[MG]B/s)\b|resuming normal operation")
"""What a program prints while it is well: an error before it was dealt with."""

_MARK = r"^.{0,200}?slurmft rank \d+: "
_MARKED = re.compile(_MARK)
_MAY_BE_OURS = re.compile(r"slurmft|keeper: |hint: ")
_OURS = re.compile(rf"{_MARK}|^slurmft: |^slurmft \d\d:\d\d:\d\d [A-Z]+ |^keeper: |^ {{2}}hint: ")
"""slurmft's own log lines, under any formatter: its reports of handled errors look like the errors themselves. Each
line that it logs in a worker begins like this (``worker.session``), right behind a colour or a bracket of the
formatter."""

_OUR_EXCEPTION = re.compile(r"^slurmft\.errors\.\w+: ")
"""No symptom either; those that it was raised from may be one."""


def _stripped(line: str) -> tuple[str, str, bool]:
    """Who says it, the words, and whether it is a remark; marks may stand one behind the other."""
    who, is_remark = "", False
    for _ in range(6):
        if (match := _WHO.match(line)) is not None:
            who += match[0]
        elif (match := _LEVEL.match(line)) is not None:
            is_remark = is_remark or match[1] in _QUIET
        elif (match := _WHEN.match(line)) is None:
            break
        line = line[match.end() :]
    return who, line, is_remark or _REMARK.search(line) is not None


# --- Failures: exceptions with what they were raised from, and single messages ---


@dataclass(slots=True)
class _Failure:
    """Words that may name a reason: an exception's, newest link first, or a message's."""

    at: int
    """Its line."""

    who: str
    links: list[list[str]] = field(default_factory=lambda: [[]])
    is_exception: bool = True
    indent: str = ""
    """Of the traceback's head, and so of its exception's line: torchrun shows a child's inside of its own."""


class _Reading:
    """A text, line by line; processes may speak in turns, each under its own mark."""

    def __init__(self) -> None:
        self._found: list[_Failure] = []
        self._current: dict[str, _Failure] = {}
        self._quoting: set[str] = set()
        """Who has just shown a frame, so that a line of source follows."""

        self._chained: set[str] = set()
        self._went_on: dict[str, int] = {}

    def failures(self) -> list[_Failure]:
        """All of them, oldest first, without those after which the same process went on: its data may be spoilt even
        so."""
        after = self._went_on
        return [each for each in self._found if each.at >= after.get(each.who, -1) or _of_failure(each) is _CORRUPTION]

    def take(self, at: int, line: str) -> None:
        """The next line."""
        who, words, is_remark = _stripped(line)
        if (quoted := _JSON.match(words)) is not None:
            words = quoted[1]
        if (here := self._current.get(who)) is not None:
            words = words.removeprefix(here.indent)
        is_source = who in self._quoting and words[:1].isspace()
        self._quoting.discard(who)
        if _HEAD.search(words):
            self._begin(at, who, words[: len(words) - len(words.lstrip())])
        elif _CHAIN.match(words):
            self._chained.add(who)
        elif _FRAME.match(words):
            self._quoting.add(who)
        elif words.strip() and not is_source:
            self._say(at, who, words, is_remark=is_remark)

    def _begin(self, at: int, who: str, indent: str) -> None:
        if who in self._current and who in self._chained:
            self._current[who].links.insert(0, [])
        else:
            self._current[who] = _Failure(at, who, indent=indent)
            self._found.append(self._current[who])
        self._chained.discard(who)

    def _say(self, at: int, who: str, words: str, *, is_remark: bool) -> None:
        here = self._current.get(who)
        is_first = here is not None and not here.links[0]  # an exception's own line, whatever it looks like
        if not is_first and _is_progress(words):
            self._went_on[who] = at
            self._current.pop(who, None)
        elif is_remark and not is_first:
            return
        elif here is None:
            self._found.append(_Failure(at, who, [[words.strip()]], is_exception=False))
        elif not words[:1].isspace() or _GROUP.match(words):
            here.links[0].append(_GROUP.sub("", words).strip())


def _failures(text: str) -> list[_Failure]:
    reading = _Reading()
    for at, line in enumerate(_lines(text)):
        reading.take(at, line)
    return reading.failures()


def _is_progress(words: str) -> bool:
    has_loss = "loss" in words.lower() and _STEP.search(words) is not None
    return (has_loss or _PROGRESS.search(words) is not None) and _meaning(words) is None


def _lines(text: str) -> list[str]:
    """The newest lines, without our own."""
    text = text[-MAX_CHARACTERS:]
    if f"{TRACEBACK}\\n" in text:  # a logger of JSON, whose records are a line each
        text = text.replace("\\n", "\n").replace('\\"', '"')
    lines = [_COLOUR.sub("", line[:MAX_LINE]) for line in text.splitlines()[-MAX_LINES:]]
    return [line for line in lines if not (_MAY_BE_OURS.search(line) and _OURS.match(_stripped(line)[1]))]


# --- What they mean ---

_STRICT = [(each, list(each.parts())) for each in SIGNATURES if not each.is_loose]
_LOOSE = [(each, list(each.parts())) for each in SIGNATURES if each.is_loose]
_CORRUPTION = SIGNATURES[0]
_OWN = next(each for each in SIGNATURES if each.is_loose)
MAX_LOOSE = 20
"""Lines of an exception in which people's words are looked for."""


def _fits(words: str, parts: Sequence[re.Pattern[str]]) -> bool:
    at = 0
    for part in parts:
        found = part.match(words) if part.pattern.startswith("^") else part.search(words, at)
        if found is None:
            return False
        at = found.end()
    return True


@functools.lru_cache(maxsize=4096)
def _meaning(words: str) -> Signature | None:
    if _OUR_EXCEPTION.match(words):
        return None
    return next((row for row, patterns in _STRICT if any(_fits(words, parts) for parts in patterns)), None)


def _loose_meaning(words: str) -> Signature | None:
    return next((row for row, patterns in _LOOSE if any(_fits(words, parts) for parts in patterns)), None)


def _of_failure(failure: _Failure) -> Signature | None:
    """By its newest link that names a reason; what NCCL warns of beside an exception is none of the other ranks'."""
    last = None
    for link in failure.links:
        rows = [row for words in link if (row := _meaning(words)) is not None
                and not (failure.is_exception and row.is_echo and "NCCL WARN" in words)]  # fmt: skip
        if rows:
            named = _meaning(link[0])
            last = named if named in rows and named.strength > 1 else min(rows, key=SIGNATURES.index)
            if last.strength > 0:
                break
    return last


def signature_of(text: str, *, loosely: bool = False) -> Signature | None:
    """The signature of what ended the program that has printed ``text``; None when none is recognized.

    The newest failure counts, unless it is one that a peer's failure looks like too and an earlier one is not. Hardware
    that has spoilt data counts wherever it is found: later failures only show its consequences. Of an exception, its
    own words count first, those of what it was raised from after them.

    Args:
        loosely: people's words in an exception, or in a text of one line, count where nothing else is recognized.
    """
    failures = _failures(text)
    if any(each.is_exception for each in failures):  # NCCL's warnings are reasons only where there is no exception
        failures = [each for each in failures if each.is_exception or not _is_nccls_remark(each.links[0][0])]
    best: Signature | None = None
    at = _Failure(0, "")
    for failure in reversed(failures):
        row = _of_failure(failure)
        if row is _CORRUPTION:
            return row
        if row is not None and (best is None or row.strength > best.strength):
            best, at = row, failure
    if best is not None and best.is_echo and (own := _own_error(failures, at)) is not None:
        best = own if loosely else None
    if best is not None or not loosely:
        return best
    named = [
        words
        for each in reversed(failures)
        if each.is_exception or len(failures) == 1
        for link in each.links
        for words in link[:MAX_LOOSE]
    ]
    return next(filter(None, map(_loose_meaning, named)), None)


def _own_error(failures: Sequence[_Failure], echo: _Failure) -> Signature | None:
    """The error of another process's program, before what may be its echo; None where there was none."""
    others = [each for each in failures if each.is_exception and each.who != echo.who and each.at < echo.at]
    rows = [_loose_meaning(link[0]) for each in others for link in each.links[:1] if link]
    return next((row for row in rows if row is _OWN), None)


def _is_nccls_remark(words: str) -> bool:
    return "NCCL WARN" in words and (row := _meaning(words)) is not None and row.is_echo


def cause_of_text(text: str) -> Cause | None:
    """The likely cause of a verdict on a rank that has left ``text``; None when it shows none that has rules of its
    own."""
    return verdict_cause(signature_of(text))


def verdict_cause(row: Signature | None) -> Cause | None:
    """As ``cause_of_text``, of a signature that was found; people's words are too weak for a verdict."""
    return None if row is None or row.is_loose or row.cause is Cause.WORKER_ERROR else row.cause


_FRAMES = re.compile(r'^[ +|]*(File ".+", line \d+)', re.MULTILINE)
_EXCEPTION = re.compile(r"^[ +|]*(\w[\w.]*)(?::.*)?$", re.MULTILINE)
_CHILD = re.compile(r"^\s*exitcode\s*:\s*(\d+) \(pid", re.MULTILINE)


def codes_of_children(text: str) -> frozenset[int]:
    """Exit codes of workers as torchrun's ``ChildFailedError`` lists them; it always ends with 1 itself."""
    return frozenset(int(code) for code in _CHILD.findall(text)) if "ChildFailedError" in text else frozenset()


def exceptions_in(text: str) -> list[list[str]]:
    """The lines of each exception's own words, oldest first; those of messages where there is no exception."""
    failures = _failures(text)
    chosen = [each for each in failures if each.is_exception] or failures
    return [link for each in chosen for link in reversed(each.links) if link]


MAX_TOLD = 250
"""Characters of each of a program's last words."""


def last_words(text: str) -> str:
    """The line that names the newest exception in ``text``, or its last line; empty when there is none."""
    return (_raised(text) or _said(text) or [""])[-1][:500]


def _raised(text: str) -> list[str]:
    """The lines that name its exceptions, oldest first."""
    return [each[0] for each in exceptions_in(text)] if TRACEBACK in text else []


def _said(text: str) -> list[str]:
    return [line.strip() for line in _lines(text) if line.strip()]


_TELLS = re.compile(r"\w(?:Error|Exception)\b|\b(?:error|fatal|failed|cannot|couldn't|unable|invalid|no such)\b", re.I)


def words_of_end(log: str) -> str:
    """What the newest life of a program in ``log`` said of its end; empty when it said nothing.

    Last words of ours, which begin with ``slurmft: `` and begin and end a life, and of the program itself what names a
    reason: its first and its newest exception, since servers of several processes end with one that says that another
    has failed; without any the first line that tells of an error, and the last one.
    """
    lines = log.strip().splitlines()
    ours = [at for at, line in enumerate(lines) if line.startswith("slurmft: ")]
    begin, end = (ours[-2] + 1 if len(ours) > 1 else 0), (ours[-1] if ours else len(lines))
    text = "\n".join(lines[begin:end])
    told = _raised(text)
    if not told:
        said = _said(text)
        told = [*filter(_TELLS.search, said), *said[-1:]]
    program = "; ".join(dict.fromkeys(each[:MAX_TOLD] for each in (*told[:1], *told[-1:])))
    return ": ".join(filter(None, [" ".join(line.strip() for line in lines[end:]), program]))


def bug_of(traceback: str) -> str:
    """Kind and innermost line of an exception that another try would only repeat; empty where it may pass with time or
    on other hardware, or where that cannot be seen."""
    frames = list(_FRAMES.finditer(traceback))
    words = _EXCEPTION.search(traceback, frames[-1].end()) if frames else None
    if words is None:
        return ""
    row = signature_of(traceback, loosely=True)
    if row is not None and row.remedy is not Remedy.STOP:
        return ""
    return f"{words[1]} in {frames[-1][1]}"


def without_own_lines(log: str) -> str:
    """The log of a worker without what slurmft has logged there, such as an exception that it has dealt with."""
    return "\n".join(line for line in log.splitlines() if not _MARKED.match(line))


def end_of(text: str, *, lines: int = 20, characters: int = 2000) -> str:
    """The end of ``text``, short enough for a journal."""
    return "\n".join(text.strip().splitlines()[-lines:])[-characters:]
