"""Workers forked from a real zygote, without torch: run as under the interpreter, and never outliving their agent."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from of_each import of_each
from waiting import until_async

from slurmft.agent import workers as agent_workers
from slurmft.agent.workers import Worker, Workers, reserve_port, worker_environment
from slurmft.agent.zygote import why_not_to_fork
from slurmft.config.run import validate
from slurmft.config.sections import PRELOAD
from slurmft.errors import ConfigError
from slurmft.ipc.messages import StartWorkers
from slurmft.ipc.pages import STOP_SIGNAL_VARIABLE, Slot, State
from slurmft.ipc.zygote_start import useful, zygote_arguments
from slurmft.system import files

WAIT_S = 20.0

pytestmark = pytest.mark.usefixtures("pages_of_its_own")
PYTHON = "python"


class Node:
    """One node's workers, and where they leave things."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: list[Worker] = []
        self.workers = Workers(self.ended.append)

    def script(self, text: str, name: str = "train.py") -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return path

    def start(self, command: Sequence[str], *, ranks: int = 1, folder: Path | None = None, **environment: str) -> None:
        self.workers.start(
            range(ranks),
            [{"PATH": os.environ["PATH"], "RANK": str(rank), **environment} for rank in range(ranks)],
            command=command,
            folder=folder or self.folder,
            logs=self.folder,
            verdicts=[self.folder / f"verdict-{rank}.json" for rank in range(ranks)],
            generation=1,
        )

    async def codes(self) -> list[int | None]:
        await until_async(lambda: len(self.ended) == len(self.workers.by_rank))
        return [worker.exit_code for _, worker in sorted(self.workers.by_rank.items())]

    async def run(self, command: Sequence[str], **options: Any) -> int | None:
        self.start(command, **options)
        return (await self.codes())[0]

    def log(self, rank: int = 0) -> str:
        path = self.folder / f"rank-{rank}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""


@contextlib.asynccontextmanager
async def node_in(folder: Path, *preload: str) -> AsyncIterator[Node]:
    node = Node(folder)
    modules = os.pathsep.join([str(folder / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])])
    node.workers.start_zygote(os.environ | {"PYTHONPATH": modules}, preload=preload)
    try:
        yield node
    finally:
        node.workers.close()


@pytest.fixture
def node(tmp_path: Path) -> contextlib.AbstractAsyncContextManager[Node]:
    return node_in(tmp_path)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# which commands it can fork


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["train.py", "--lr", "1"], ["train.py", "--lr", "1"]),
        (["python", "train.py"], ["train.py"]),
        (["python3", "-u", "train.py", "-u"], ["train.py", "-u"]),
        (["python", "-m", "pkg.train", "-x"], ["-m", "pkg.train", "-x"]),
        (["python", "-u", "-m", "pkg.train"], ["-m", "pkg.train"]),
        ([sys.executable, "train.py"], ["train.py"]),
        (["python"], None),
        (["python", "-u"], None),
        (["python", "-m"], None),
        (["python", "-c", "1"], None),
        (["python", "-O", "train.py"], None),
        (["python", "-X", "dev", "train.py"], None),
        (["bash", "train.sh"], None),
        (["/nowhere/python3.9", "train.py"], None),
        (["torchrun", "train.py"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_fork_can_run_is_imported_ahead(command, arguments):
    assert zygote_arguments(command) == arguments
    assert useful(["torch"], command) == (("torch",) if arguments else ())


# what is imported ahead


async def test_what_is_named_is_imported_once_for_all_workers(tmp_path, capfd):
    """One that cannot be imported is told of, and no worker fails that does not need it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "framework.py").write_text("import os\nwhere = os.getpid()\n")
    (tmp_path / "installed" / "broken.py").write_text("raise RuntimeError('no display')\n")
    modules = ("broken", "missing.part", "torch.no_such_part", "framework")

    async with node_in(tmp_path, *modules) as node:
        script = node.script(
            f"import os, sys\nprint(sys.modules['framework'].where == os.getppid(), {modules!r}[0] in sys.modules)"
        )
        node.start([PYTHON, str(script)], ranks=2)
        assert await node.codes() == [0, 0]
        assert [node.log(rank) for rank in range(2)] == ["True False\n"] * 2
    said = [line for line in capfd.readouterr().err.splitlines() if "ahead of the workers" in line]
    assert said[0] == "slurmft: broken could not be imported ahead of the workers: no display"
    assert [line.split()[1] for line in said] == list(modules[:3])


@pytest.mark.parametrize(
    ("preload", "extra"), [(True, ()), (["transformers.trainer", "wandb"], ("transformers.trainer", "wandb"))]
)
def test_a_list_is_imported_beside_torch(preload, extra):
    config = validate(
        {"command": ["train.py"], "run_folder": "r", "fault_tolerance": {"preload": preload}}, source="a test"
    )
    assert config.fault_tolerance.preloaded(config.launcher, config.inference) == (*PRELOAD, *extra)


@of_each(preload=[["no-name"], ["../x"], ["a."], [""], "transformers", [1]])
def test_what_is_no_name_of_a_module_is_refused(preload):
    with pytest.raises(ConfigError, match="preload"):
        validate({"command": ["train.py"], "run_folder": "r", "fault_tolerance": {"preload": preload}}, source="a test")


# how it ends


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        pytest.param("print('hello')", 0, "hello\n", id="the end of the script"),
        pytest.param("print('no newline', end='')", 0, "no newline", id="buffered output is not lost"),
        pytest.param("import sys; sys.exit()", 0, "", id="sys.exit()"),
        pytest.param("import sys; sys.exit(3)", 3, "", id="sys.exit(3)"),
        pytest.param("raise SystemExit(259)", 3, "", id="only the last byte counts"),
        pytest.param("import sys; sys.exit('that was it')", 1, "that was it\n", id="sys.exit of a text"),
        pytest.param("import os; os._exit(7)", 7, "", id="os._exit"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", id="SIGKILL"),
        pytest.param("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, "", id="SIGTERM, not ignored"),
        pytest.param("import os; os.abort()", -6, None, id="abort"),
        pytest.param("import atexit; atexit.register(print, 'bye'); print('hello')", 0, "hello\nbye\n", id="atexit"),
        pytest.param("import sys; print('err', file=sys.stderr); print('out')", 0, "err\nout\n", id="both streams"),
        pytest.param("import sys; print(repr(sys.stdin.read()))", 0, "''\n", id="no input"),
        pytest.param(
            "import threading; threading.Timer(0.05, print, ['late']).start()", 0, "late\n", id="waits for its threads"
        ),
    ],
)
async def test_how_a_script_ends(node, text, code, said):
    assert await node.run([PYTHON, str(node.script(text))]) == code
    assert said is None or node.log() == said
    assert node.workers.by_rank[0].page[Slot.STATE] == State.FAILED  # it never used a session


async def test_an_exception_leaves_its_traceback_in_the_log_and_in_the_verdict(node, tmp_path):
    script = node.script("def f():\n    raise ValueError('no such luck')\nf()\n")
    assert await node.run([PYTHON, str(script)]) == 1
    verdict = json.loads((tmp_path / "verdict-0.json").read_text())
    assert (verdict["format"], verdict["cause"]) == (1, "worker error")
    for text in (verdict["traceback"], node.log()):
        assert text.rstrip().endswith("ValueError: no such luck")
        assert "train.py" in text


@pytest.mark.parametrize(
    ("own", "cause"),
    [
        ('{"format": 1, "cause": "rerun elsewhere", "message": "loss is NaN"}', "rerun elsewhere"),
        ('{"format": 1, "cause": "worker error"}', "out of host memory"),
        ('{"format": 1, "cause": "rerun el', "out of host memory"),
        ('{"format": 1, "cause": "finished"}', "out of host memory"),
    ],
)
async def test_a_verdict_of_the_workers_own_is_kept(node, tmp_path, own, cause):
    script = node.script(f"import pathlib\npathlib.Path('verdict-0.json').write_text({own!r})\nraise MemoryError\n")
    assert await node.run([PYTHON, str(script)]) == 1
    assert json.loads((tmp_path / "verdict-0.json").read_text())["cause"] == cause


async def test_a_traceback_that_is_no_utf_8_is_left_all_the_same(node, tmp_path):
    assert await node.run([PYTHON, str(node.script("raise ValueError('odd \\udcff text')"))]) == 1
    assert json.loads((tmp_path / "verdict-0.json").read_text())["message"] == "ValueError: odd \\udcff text"


async def test_a_script_that_ends_well_or_by_itself_leaves_no_verdict(node, tmp_path):
    assert await node.run([PYTHON, str(node.script("raise SystemExit(5)"))]) == 5
    assert not (tmp_path / "verdict-0.json").exists()


async def test_a_long_traceback_keeps_its_end(node, tmp_path):
    assert await node.run([PYTHON, str(node.script("raise ValueError('x' * 20_000 + 'the end')"))]) == 1
    text = json.loads((tmp_path / "verdict-0.json").read_text())["traceback"]
    assert len(text) <= 8000
    assert text.rstrip().endswith("the end")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
    ids=["syntax", "import"],
)
async def test_a_script_that_cannot_start_says_why(node, tmp_path, text, message):
    assert await node.run([PYTHON, str(node.script(text))]) == 1
    assert message in node.log()
    assert message in (tmp_path / "verdict-0.json").read_text()


@pytest.mark.parametrize(
    "command", [["no-such-program"], ["/nowhere/a"], ["python", "/nowhere/train.py"]], ids=" ".join
)
async def test_a_missing_program_is_named(node, command):
    assert await node.run(command) not in (0, None)
    assert command[-1] in node.log()


async def test_a_missing_working_folder_is_named(node, tmp_path):
    assert await node.run(["true"], folder=tmp_path / "gone") == 127
    assert "gone" in node.log()


# what it sees

PROBE = """
import json, os, signal, sys
import __main__
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "name": __name__, "file": os.path.abspath(__file__),
    "main is this": __main__.__dict__ is globals() or vars(__main__).get("json") is json,
    "spec": getattr(__spec__, "name", None), "cwd": os.getcwd(), "rank": os.environ.get("RANK"),
    "term": str(signal.getsignal(signal.SIGTERM)), "int": signal.getsignal(signal.SIGINT).__name__,
    "quit": str(signal.getsignal(signal.SIGQUIT)),
    "chld": str(signal.getsignal(signal.SIGCHLD)), "hup": str(signal.getsignal(signal.SIGHUP)),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "encoding": sys.stdout.encoding.lower(),
    "wakeup": signal.set_wakeup_fd(-1),
}))
"""


def as_in_a_terminal() -> None:
    """The signals of a program that a shell starts in the foreground, whatever started the tests."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


async def test_what_the_shell_ignores_a_worker_does_not(tmp_path):
    numbers = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}  # as behind & and nohup
    try:
        async with node_in(tmp_path) as node:
            node.script(PROBE)
            assert await node.run([PYTHON, "train.py"]) == 0, node.log()
            seen = json.loads(node.log())
            assert (seen["int"], seen["quit"], seen["hup"]) == ("default_int_handler", *[str(signal.SIG_DFL)] * 2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(
    "command",
    [
        [PYTHON, "train.py", "--lr", "a b"],
        [PYTHON, "{folder}/train.py"],
        [PYTHON, "{folder}/deep/../train.py", "x"],
        [PYTHON, "-m", "pkg.train", "-x"],
        [PYTHON, "-m", "pkg"],
        [PYTHON, "-m", "train"],
    ],
    ids=" ".join,
)
async def test_a_script_sees_what_the_interpreter_would_show_it(tmp_path, command):
    (tmp_path / "deep").mkdir()
    async with node_in(tmp_path) as node:
        node.script(PROBE)
        node.script(PROBE, "pkg/train.py")
        node.script(PROBE, "pkg/__main__.py")
        node.script("", "pkg/__init__.py")
        argv = [word.format(folder=tmp_path) for word in command]
        real = subprocess.run(
            [sys.executable, *argv[1:]], capture_output=True, text=True, timeout=30, check=True, cwd=tmp_path,
            env={"RANK": "0", "PATH": os.environ["PATH"]}, stdin=subprocess.DEVNULL, preexec_fn=as_in_a_terminal,
        )  # fmt: skip
        assert await node.run(argv) == 0, node.log()
        assert json.loads(node.log()) == json.loads(real.stdout)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param(
            "import os; name = __file__; os.chdir('/'); open(name).close()", "__file__ is relative", id="__file__"
        ),
        pytest.param(
            "import sys; sys.excepthook = lambda *_: print('hook'); raise ValueError",
            "excepthook is not called",
            id="hook",
        ),
    ],
)
async def test_a_script_behaves_as_under_the_interpreter(node, tmp_path, text, why):
    node.script(text)
    real = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=30, check=False, cwd=tmp_path,
        preexec_fn=as_in_a_terminal,
    )  # fmt: skip
    assert await node.run([PYTHON, "train.py"]) == real.returncode, node.log()
    assert node.log() == real.stdout + real.stderr


async def test_modules_beside_the_script_are_found(node):
    node.script("VALUE = 42", "code/model.py")
    script = node.script("import model; print(model.VALUE)", "code/train.py")
    assert await node.run([PYTHON, str(script)]) == 0, node.log()
    assert node.log() == "42\n"


async def test_processes_of_multiprocessing_find_the_script_again(node, tmp_path):
    """spawn imports the parent's __main__ by its path; data loaders depend on it."""
    node.script(
        """
        import multiprocessing

        def double(number):
            return 2 * number

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(double, [1, 2]))
        """
    )
    assert await node.run([PYTHON, "train.py"], HOME=str(tmp_path)) == 0, node.log()
    assert node.log() == "[2, 4]\n"


async def test_every_rank_has_its_own_environment_log_and_page(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAK", "1")
    async with node_in(tmp_path) as node:
        node.script(
            """
            import os; from pathlib import Path
            from slurmft.ipc.pages import Page, Slot, PAGE_VARIABLE
            page = Page.attach(Path(os.environ[PAGE_VARIABLE]))
            page[Slot.STEP] = 100 + int(os.environ["RANK"])
            print(os.environ["RANK"], os.environ["EXTRA"], "LEAK" in os.environ)
            raise SystemExit(page[Slot.RANK])
            """
        )
        node.start([PYTHON, "train.py"], ranks=3, EXTRA="x y")
        assert await node.codes() == [0, 1, 2]
        for rank, worker in node.workers.by_rank.items():
            assert node.log(rank) == f"{rank} x y False\n"
            assert worker.page[Slot.STEP] == 100 + rank
            assert worker.look().attached
            assert not worker.look().alive


async def test_a_program_that_is_not_python_is_executed(node, tmp_path):
    assert await node.run(["bash", "-c", 'echo "rank $RANK of $0 at $PWD"; exit 9', "me"]) == 9
    assert node.log() == f"rank 0 of me at {tmp_path}\n"


async def test_a_program_that_is_executed_has_the_signals_of_a_fresh_process(node):
    assert await node.run(["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]) == 0
    ignored = {line.split()[0]: int(line.split()[1], 16) for line in node.log().splitlines()}
    wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD]
    assert [number for number in wanted if ignored["SigIgn:"] & 1 << (number - 1)] == []
    assert ignored["SigBlk:"] == 0


# signals and ends from outside


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1", "SIGUSR2"])
def test_the_configured_signal_ends_no_trainer_of_a_launcher_either(name):
    """Launchers have handlers of their own, which end with their program."""
    trainer = f"import os, signal; os.kill(os.getpid(), signal.{name}); print('went on', flush=True)"
    launcher = f"""
import os, signal, sys
from slurmft.agent.torchrun import start_child
signal.signal(signal.{name}, lambda *_: None)
sys.exit(start_child([sys.executable, "-c", {trainer!r}], os.environ, signal.SIGKILL).wait())
"""
    environment = {**os.environ, "SLURMFT_STOP_SIGNAL": name}
    done = subprocess.run([PYTHON, "-c", launcher], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


@pytest.mark.parametrize("name", ["SIGINT", "SIGUSR1", "SIGUSR2"])
async def test_the_configured_signal_ends_neither_a_trainer_nor_its_loaders(node, name):
    node.script(f"""
import multiprocessing, os, signal
def loader():
    os.kill(os.getpid(), signal.{name})
if __name__ == "__main__":
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=loader)
        child.start()
        child.join()
        print(method, child.exitcode)
    os.kill(os.getpid(), signal.{name})
    heard = []
    signal.signal(signal.{name}, lambda *_: heard.append(1))
    os.kill(os.getpid(), signal.{name})
    print("went on", heard)
""")
    assert await node.run([PYTHON, "train.py"], SLURMFT_STOP_SIGNAL=name) == 0, node.log()
    assert node.log().splitlines() == ["fork 0", "spawn 0", "went on [1]"]


@pytest.mark.parametrize(("stop_signal", "code"), [("SIGINT", 0), ("", 1)])
async def test_a_sigint_that_asks_for_a_stop_does_not_end_a_trainer(node, stop_signal, code):
    node.script("import os, signal; os.kill(os.getpid(), signal.SIGINT); print('went' + ' on')")
    command = [PYTHON, "train.py"]
    assert (await node.run(command, SLURMFT_STOP_SIGNAL=stop_signal) == 0) is (code == 0), node.log()
    assert ("went on" in node.log()) is (code == 0)


def test_the_worker_is_told_which_signal_asks_for_a_stop():
    start = StartWorkers(
        attempt="7.0.0", cycle=0, first_rank=0, nodes=1, generation=1, master_addr="n1", master_port=1
    )  # fmt: skip
    for value, told in (("SIGINT", "SIGINT"), ("SIGUSR1", "SIGUSR1"), ("SIGTERM", None)):
        run = {"command": ["x"], "run_folder": "/runs/a", "preemption": {"signal": value}}
        environment = worker_environment(validate(run, source="it"), {}, start, 0, "7.0.0")
        assert environment.get(STOP_SIGNAL_VARIABLE) == told


WAITING = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("term", flush=True), sys.exit(4)))
child = subprocess.Popen(["sleep", "300"])
print("ready", child.pid, flush=True)
time.sleep(300)
"""


async def ready(node: Node) -> int:
    """The process id of the worker's child, once it waits."""
    await until_async(lambda: node.log().startswith("ready"))
    await until_async(lambda: node.workers.by_rank[0].pid)  # the zygote's word may come later; kill(0) is for ourselves
    return int(node.log().split()[1])


async def test_a_signal_reaches_the_worker_and_not_its_children(node):
    node.script(WAITING.replace("sys.exit(4)", "sys.exit(4 if child.wait(300) == -9 else 5)"))
    node.start([PYTHON, "train.py"])
    child = await ready(node)
    node.workers.signal(signal.SIGTERM)
    await until_async(lambda: "term" in node.log())
    os.kill(child, signal.SIGKILL)  # what a TERM had ended before would end it with 5
    assert await node.codes() == [4]


async def test_a_worker_is_killed_with_its_children(node):
    node.script(WAITING)
    node.start([PYTHON, "train.py"])
    child = await ready(node)
    node.workers.kill()
    assert await node.codes() == [-9]
    assert node.workers.by_rank[0].killed
    await until_async(lambda: gone(child))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_worker_that_a_signal_ends_leaves_no_children_to_the_next_attempt(node, number):
    node.script(WAITING)
    node.start([PYTHON, "train.py"])
    child = await ready(node)
    os.kill(node.workers.by_rank[0].pid, number)
    assert await node.codes() == [-number]
    await until_async(lambda: gone(child))


CHILDREN = {
    "child": "subprocess.Popen(['sleep', '300'])",
    "own session": "subprocess.Popen(['sleep', '300'], start_new_session=True)",
    "daemon": "subprocess.Popen(['sh', '-c', 'setsid sleep 300 & echo $!'], stdout=subprocess.PIPE)",
    "fork": "types.SimpleNamespace(pid=os.fork() or time.sleep(300))",
}
LEAVING = """
import os, subprocess, sys, time, types
child = {child}
print("ready", getattr(child, "stdout", None) and child.stdout.readline().decode() or child.pid, flush=True)
{end}
"""
ENDS = {0: "", 1: "raise RuntimeError('an ordinary failure')", 3: "sys.exit(3)"}


@pytest.mark.parametrize("child", CHILDREN)
@pytest.mark.parametrize("code", ENDS)
async def test_a_worker_that_ends_by_itself_leaves_no_processes_to_the_next_attempt(node, child, code):
    node.script(LEAVING.format(child=CHILDREN[child], end=ENDS[code]))
    node.start([PYTHON, "train.py"])
    await until_async(lambda: node.log().startswith("ready"))
    left = int(node.log().split()[1])
    assert await node.codes() == [code]
    node.ended.clear()
    gone_at_start = []
    node.script("print('next', flush=True)", "next.py")
    node.start([PYTHON, "next.py"])
    await until_async(lambda: node.workers.by_rank[0].pid)
    gone_at_start.append(gone(left))
    assert await node.codes() == [0]
    assert gone_at_start == [True]


ENGINE = """
import os, sys, time
def session_of_its_own(name):
    \"\"\"Like what setproctitle leaves: neither parent, session nor environment lead to the engine.\"\"\"
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(writes, f"{os.getpid()} ".encode())
        os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(300)"], {})
    os.wait()
    return os.read(reads, 99).decode()
print("ready", session_of_its_own("a"), session_of_its_own("b"), flush=True)
time.sleep(300)
"""


def start_engine(node: Node, rank: int) -> None:
    node.workers.start_one(rank, {"PATH": os.environ["PATH"]}, command=[PYTHON, "engine.py"], folder=node.folder,
                           logs=node.folder, verdict=node.folder / "verdict", generation=1)  # fmt: skip


async def family_of(node: Node, rank: int, life: int = 1) -> list[int]:
    await until_async(lambda: node.log(rank).count("ready") == life and node.log(rank).endswith("\n"))
    return [int(word) for word in node.log(rank).splitlines()[-1].split()[1:]]


async def test_processes_of_an_engine_are_gone_before_it_is_started_again_and_those_of_others_live(node):
    node.script(ENGINE, "engine.py")
    for rank in (0, 1):
        start_engine(node, rank)
    mine, others = [await family_of(node, rank) for rank in (0, 1)]
    assert not any(map(gone, (*mine, *others)))
    os.kill(node.workers.by_rank[0].pid, signal.SIGKILL)
    await until_async(lambda: node.ended)
    first = node.workers.by_rank[0].pid
    start_engine(node, 0)
    await until_async(lambda: node.workers.by_rank[0].pid not in (0, first))
    assert all(map(gone, mine)) and not any(map(gone, others))
    again = await family_of(node, 0, life=2)
    assert set(again).isdisjoint(mine)
    node.workers.close()
    await until_async(lambda: all(map(gone, (*again, *others))))


def test_the_next_agent_ends_what_an_agent_and_its_zygote_have_left(tmp_path):
    script = f"""
    import asyncio, os, sys
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from pathlib import Path
    from slurmft.agent.workers import Workers
    from slurmft.system import files
    files.SHARED_MEMORY = Path({str(files.SHARED_MEMORY)!r})
    async def main():
        workers = Workers(lambda worker: None)
        workers.start_zygote(dict(os.environ), [])
        workers.start_one(0, {{"PATH": os.environ["PATH"]}}, command=["sh", "-c",
            "setsid sleep 300 & echo ready $!; wait"], folder=Path({str(tmp_path)!r}), logs=Path({str(tmp_path)!r}),
            verdict=Path({str(tmp_path / "verdict")!r}), generation=1)
        print(workers._zygote.process.pid, flush=True)
        await asyncio.sleep(300)
    asyncio.run(main())
    """
    log = tmp_path / "rank-0.log"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE) as agent:
        assert agent.stdout is not None
        zygote = int(agent.stdout.readline())

        async def work(_node: Node | None = None) -> None:
            async with asyncio.timeout(WAIT_S):
                while not (log.exists() and log.read_text().endswith("\n")):
                    await asyncio.sleep(0.01)

        asyncio.run(work())
        left = int(log.read_text().split()[1])
        os.kill(agent.pid, signal.SIGSTOP)  # else it would clean up after its zygote, or its zygote after it
        os.kill(zygote, signal.SIGKILL)
        agent.kill()
    assert not gone(left)
    other = Workers(lambda _worker: None)
    try:
        assert gone(left)
    finally:
        other.close()


async def test_what_a_living_rank_has_started_and_a_job_of_its_own_are_spared(tmp_path):
    text = """
    import os, subprocess, sys, time
    own = dict(os.environ, SLURM_JOB_ID="123456789")
    pids = [subprocess.Popen(["sleep", "300"], start_new_session=True, env=env).pid for env in (own, os.environ)]
    print("ready", *pids, flush=True)
    time.sleep(0 if os.environ["RANK"] == "0" else 300)
    """
    async with node_in(tmp_path) as node:
        node.script(text)
        node.start([PYTHON, "train.py"], ranks=2)
        await until_async(lambda: node.ended and node.log(1).startswith("ready"))
        jobs, children = zip(*(map(int, node.log(rank).split()[1:]) for rank in (0, 1)), strict=True)
        await until_async(lambda: gone(children[0]))
        assert [gone(pid) for pid in (*jobs, children[1])] == [False] * 3
        node.workers.kill()
        await node.codes()
        await until_async(lambda: gone(children[1]))
        for pid in jobs:
            os.kill(pid, signal.SIGKILL)


async def test_workers_that_were_killed_before_they_came_to_life_do_not_take_the_next_ones_along(node):
    node.script("print('ran')")
    node.start([PYTHON, "train.py"])  # the zygote is not ready yet
    node.workers.kill()
    await node.workers.end_earlier()
    node.ended.clear()
    assert await node.run([PYTHON, "train.py"]) == 0
    assert node.log() == "ran\n"


async def test_a_worker_that_lingers_after_its_stop_is_killed(node):
    node.script(WAITING)
    node.start([PYTHON, "train.py"], ranks=2)
    await until_async(lambda: node.log(0).startswith("ready") and node.log(1).startswith("ready"))
    node.workers.by_rank[0].page[Slot.STATE] = State.STOPPED
    node.workers.kill_lingering(60.0)
    assert not node.workers.by_rank[0].killed
    await asyncio.sleep(0.02)
    node.workers.kill_lingering(0.01)
    await until_async(lambda: node.ended)
    assert node.workers.by_rank[0].exit_code == -9
    assert node.workers.by_rank[1].alive


async def test_closing_ends_everything_and_removes_the_pages(tmp_path):
    pids: list[int] = []
    async with node_in(tmp_path) as node:
        node.script(WAITING)
        node.start([PYTHON, "train.py"])
        pids.append(await ready(node))
        pids.append(node.workers.by_rank[0].pid)
        pids.append(psutil.Process(pids[1]).ppid())
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).wait(WAIT_S)
        assert gone(pid)
    assert list((tmp_path / "shm").iterdir()) == []


async def test_a_zygote_that_dies_takes_its_workers_along_and_is_noticed(node):
    node.script(WAITING)
    node.start([PYTHON, "train.py"])
    child = await ready(node)
    worker = node.workers.by_rank[0].pid
    psutil.Process(worker).parent().kill()
    assert await node.codes() == [-9]
    await until_async(lambda: gone(worker) and gone(child))


async def test_a_zygote_that_the_kernel_kills_for_memory_is_no_crash_of_its_workers(tmp_path, monkeypatch):
    kills = [3]
    monkeypatch.setattr(agent_workers.processes, "memory_kills", lambda: kills[0])
    async with node_in(tmp_path) as node:
        node.script(WAITING)
        node.start([PYTHON, "train.py"])
        await ready(node)
        kills[0] = 4
        psutil.Process(node.workers.by_rank[0].pid).parent().kill()
        assert await node.codes() == [-9]
        assert node.workers.by_rank[0].starved


def test_an_agent_that_is_killed_takes_its_workers_along(tmp_path):
    (tmp_path / "train.py").write_text(WAITING.replace('"300"]', '"300"], start_new_session=True'))
    (tmp_path / "agent.py").write_text(
        textwrap.dedent(
            """
            import asyncio, os, sys
            from pathlib import Path
            from slurmft.agent import workers
            from slurmft.system import files
            here = Path(sys.argv[1])
            files.SHARED_MEMORY = here

            async def main():
                node = workers.Workers(print)
                node.start_zygote(dict(os.environ), preload=())
                node.start([0], [dict(os.environ)], command=["python", "train.py"], folder=here, logs=here,
                           verdicts=[here / "v"], generation=1)
                log = here / "rank-0.log"
                log.touch()
                while not node.by_rank[0].pid or "ready" not in log.read_text():
                    await asyncio.sleep(0.01)
                print(node.by_rank[0].pid, node._zygote.process.pid, log.read_text().split()[1], flush=True)
                await asyncio.sleep(300)

            asyncio.run(main())
            """
        )
    )
    agent = subprocess.Popen(
        [sys.executable, str(tmp_path / "agent.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        assert len(pids) == 3  # the worker, the zygote, and a process that the worker has started
        assert not any(gone(pid) for pid in pids)
    finally:
        agent.kill()
        agent.wait()
        agent.stdout.close()
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).wait(WAIT_S)
        assert gone(pid)


async def test_the_pages_of_a_dead_agent_are_removed_and_those_of_a_living_one_are_kept(tmp_path):
    dead = tmp_path / "shm" / f"{files.prefix()}dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "rank-0").touch()
    async with node_in(tmp_path) as node:
        other = Workers(lambda _: None)
        assert not dead.exists()
        assert node.workers.folder.exists()
        other.close()


@pytest.mark.parametrize(("ranks", "size"), [(1, 300_000), (16, 20_000)], ids=["one large", "many ranks"])
async def test_a_large_environment_reaches_the_workers(node, ranks, size):
    """Requests wait in the socket while the zygote imports torch."""
    node.script("import os; print(sum(len(os.environ[f'V{n}']) for n in range(10)))")
    node.start([PYTHON, "train.py"], ranks=ranks, **{f"V{n}": "x" * (size // 10) for n in range(10)})
    assert await node.codes() == [0] * ranks
    assert node.log() == f"{size}\n"


async def test_a_kill_right_after_the_fork_is_a_kill(node):
    node.script("import time; time.sleep(300)")
    await node.workers.ready.wait()
    for _ in range(10):
        node.ended.clear()
        node.start([PYTHON, "train.py"])
        while not node.workers.by_rank[0].pid:
            await asyncio.sleep(0)
        node.workers.kill()
        async with asyncio.timeout(2):
            assert await node.codes() == [-9]


def test_a_reserved_port_can_be_bound_by_the_store_and_by_nobody_else():
    import socket

    holder, port = reserve_port()
    with holder:
        store = socket.socket(holder.family)
        with store:
            store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            store.bind(("", port))
            store.listen()
        others = {reserve_port() for _ in range(50)}
        assert port not in {other for _, other in others}
        for other, _ in others:
            other.close()


# forked ahead


def ahead(node: Node) -> list[int]:
    """Children of the zygote that wait to become workers."""
    zygote = psutil.Process(node.workers._zygote.process.pid)
    known = {worker.pid for worker in node.workers.by_rank.values()}
    return sorted(child.pid for child in zygote.children() if child.pid not in known)


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_the_next_attempt_finds_its_workers_forked(tmp_path, lost):
    """One for each that works; whichever was ended from outside is forked anew."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "framework.py").write_text("")
    async with node_in(tmp_path, "framework") as node:
        node.script("import os, time; print(os.environ.get('MARK'), flush=True); time.sleep(60)")
        node.start([PYTHON, "train.py"], ranks=2, MARK="first")
        await until_async(lambda: all(worker.pid for worker in node.workers.by_rank.values()) and len(ahead(node)) == 2)
        waiting = ahead(node)
        for pid in waiting[:lost]:
            os.kill(pid, signal.SIGKILL)
        await node.workers.end_earlier()
        node.start([PYTHON, "train.py"], ranks=2, MARK="x" * 100_000)
        await until_async(lambda: all(len(node.log(rank)) > 100_000 for rank in range(2)))
        pids = {worker.pid for worker in node.workers.by_rank.values()}
        assert len(pids) == 2 and len(pids & set(waiting)) == 2 - lost
        await until_async(lambda: len(ahead(node)) == 2)
        left = [*pids, *ahead(node)]
        node.workers.close()
        await until_async(lambda: all(map(gone, left)))


async def test_one_that_is_stopped_from_outside_does_not_stop_the_zygote(tmp_path):
    """It becomes a worker that stands still, as any may, and its agent can kill it."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "framework.py").write_text("")
    async with node_in(tmp_path, "framework") as node:
        node.script("import time; time.sleep(60)")
        node.start([PYTHON, "train.py"])
        await until_async(lambda: node.workers.by_rank[0].pid and ahead(node))
        os.kill(ahead(node)[0], signal.SIGSTOP)
        await node.workers.end_earlier()
        node.start([PYTHON, "train.py"], MARK="x" * 1_000_000)
        await until_async(lambda: node.workers.by_rank[0].pid)
        await node.workers.end_earlier()


# GPUs


async def test_no_worker_is_forked_from_a_zygote_that_has_used_a_gpu(tmp_path, monkeypatch):
    """A sitecustomize of the user's, which every interpreter runs first."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "if 'slurmft.agent.zygote' in sys.orig_argv:\n"
        "    sys.modules['torch.cuda'] = types.SimpleNamespace(is_initialized=lambda: True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with node_in(tmp_path) as node:
        node.script("print('trains')")
        assert await node.run(["python", "train.py"]) == 2
        assert "torch has initialised CUDA" in node.log() and "none of them could use a GPU" in node.log()
        assert "trains" not in node.log()
        assert "GPU" in json.loads((tmp_path / "verdict-0.json").read_text())["message"]


def test_the_driver_tells_of_cuda_that_torch_does_not_know_of(tmp_path):
    (tmp_path / "3").symlink_to("/dev/nvidiactl")  # NVML opens it as well, which a fork survives
    (tmp_path / "4").symlink_to("pipe:[7]")
    assert why_not_to_fork(tmp_path) == ""
    (tmp_path / "5").symlink_to("/dev/nvidia-uvm")
    assert why_not_to_fork(tmp_path) == "/dev/nvidia-uvm is open"


async def test_the_fabrics_variables_reach_a_forked_worker(tmp_path):
    fabric = {"NCCL_P2P_LEVEL": "NVL", "NCCL_IB_HCA": "mlx5_0", "UCX_TLS": "rc", "FI_PROVIDER": "efa"}
    async with node_in(tmp_path) as node:
        node.script("import ctypes, os; libc = ctypes.CDLL(None); libc.getenv.restype = ctypes.c_char_p\n"
                    f"print([libc.getenv(name.encode()).decode() for name in {sorted(fabric)}])\n"
                    "print(libc.getenv(b'PYTORCH_NVML_BASED_CUDA_CHECK'))")  # fmt: skip
        assert await node.run(["python", "train.py"], **fabric) == 0
        assert str([fabric[name] for name in sorted(fabric)]) in node.log(), "as C libraries read them"
        assert "None" in node.log(), "what is for the zygote alone"


async def test_forked_workers_draw_other_random_numbers_each_and_after_each_start(tmp_path):
    drawn: list[str] = []
    async with node_in(tmp_path, "numpy.random", "torch") as node:
        drawing = "numpy.random.rand(), random.random(), torch.rand(1).item()"
        script = node.script(f"import random, numpy, torch\nprint({drawing})")
        for _ in range(2):
            node.ended.clear()
            node.start([PYTHON, str(script)], ranks=2)
            assert await node.codes() == [0, 0]
            drawn += [number for rank in range(2) for number in node.log(rank).split()[-3:]]
    assert len(set(drawn)) == 12
