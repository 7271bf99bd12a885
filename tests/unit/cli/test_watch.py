"""``slurmft watch``: what it draws in which terminal, and that the terminal is as before afterwards."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from slurmft.storage import run_folder
from slurmft.storage.history import METRICS_FILE, append_lines
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Attempt, LiveView, Owner, RunFolder
from slurmft.system import processes

RANKS = 2000
SLURMFT = [sys.executable, "-m", "slurmft"]
NASTY = "[red]\x1b[2J\x1b]0;title\x07[/red]"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """One that seems to be alive: this process is its owner."""
    run = RunFolder(tmp_path / "runs" / "gpt")
    run.create()
    run.config.write_text("{}")
    me = processes.Process(os.uname().nodename, os.getpid(), processes.birth_of(os.getpid()))
    run.take_over(Owner(job="local-1", restart=0, generation=1, cluster="local", host=me.host, pid=me.pid,
                        birth=me.birth, folder=str(run.path), inode=run.path.stat().st_ino))  # fmt: skip
    journal = run.journal(Attempt(job="local-1", restart=0))
    journal.append(EventName.ATTEMPT_STARTED, nodes="n[1-250]")
    journal.append(EventName.WORKER_FAILED, rank=1, node=NASTY, error=NASTY + "\nsecond line")
    run.write_progress(at=time.time(), attempt="local-1.0.0", step=50, until=200, saved=25, metric=1.5)
    run_folder.write(run.path, LiveView(
        at=time.time(), attempt="local-1.0.0", steps=[50] * RANKS, nodes=[f"n{rank // 8}" for rank in range(RANKS)],
        step_s=[3.0 if rank == 77 else 1.0 + rank % 7 / 100 for rank in range(RANKS)],
        sections=["step"] * (RANKS - 1) + [NASTY], section_s=[0.5] * (RANKS - 1) + [90.0], hang_used=0.9,
        tiers={"memory": "step 50"},
    ))  # fmt: skip
    append_lines(run.path / METRICS_FILE, [json.dumps({"step": n, "loss": 9 - n / 10, "lr": 1}) for n in range(50)])
    return run


def once(run: RunFolder | None, **environment: str) -> str:
    words = [*SLURMFT, "watch", "--once", *([str(run.path)] if run is not None else [])]
    given = {**os.environ, "COLUMNS": "80", "PYTHONUTF8": "1", **environment}
    told = subprocess.run(words, capture_output=True, text=True, env=given, timeout=60, check=True)
    assert told.stderr == ""
    return told.stdout


def test_once_prints_everything_and_text_of_others_as_text(run: RunFolder):
    shown = once(run)
    assert "\x1b" not in shown and "\x07" not in shown
    assert r"[red]\x1b[2J\x1b]0;title\x07[/red]" in shown and r"\nsecond line" in shown
    for told in ("gpt  running", "50 of 200  loss 1.5000", "memory: step 50", "rank 77 on n9 3.000 s", "in 1 rank,",
                 "1 start so far", " s a step, 2 min left",
                 "loss         ", "9 to 4.1", "90% of a time limit", "worker failed"):  # fmt: skip
        assert told in shown, shown


def test_a_limit_that_is_nearly_used_up_is_seen_in_80_columns(run: RunFolder):
    line = next(each for each in once(run).splitlines() if each.startswith("open now"))
    assert "90% of a time limit" in line[:80], line


def test_a_dumb_terminal_gets_digits(run: RunFolder):
    shown = once(run, TERM="dumb", NO_COLOR="1")
    assert shown.isascii()
    rows = [each for each in shown.splitlines() if each[:8].strip().isdecimal()]
    cells = "".join(each[8:] for each in rows)
    assert len(cells) == RANKS and cells[77] == "7" and set(cells) == {"0", "7"}


@pytest.mark.parametrize("width", [10, 200])
def test_lines_of_the_map_fit_the_width(run: RunFolder, width: int):
    shown = once(run, COLUMNS=str(width))
    rows = [each for each in shown.splitlines() if each[:8].strip().isdecimal()]
    assert max(map(len, rows)) <= max(20, width)


def test_all_runs(run: RunFolder):
    assert "gpt  running  " in (shown := once(None, SLURMFT_RUNS=str(run.path.parent))) and "50/200" in shown
    assert "no runs in" in once(None, SLURMFT_RUNS=str(run.path / "nothing"))


def test_a_run_that_has_nothing_yet(tmp_path: Path):
    empty = RunFolder(tmp_path / "empty")
    empty.create()
    empty.config.write_text("{}")
    assert "empty  new" in once(empty)


def test_an_endpoint_shows_its_replicas(run: RunFolder):
    journal = run.journal(Attempt(job="local-1", restart=0))
    journal.append(EventName.ENDPOINT_OPENED, routers=2, replicas=4)
    for node, replica in (("n1", 0), ("n1", 1), ("n2", 0)):
        journal.append(EventName.REPLICA_READY, node=node, replica=replica)
    journal.append(EventName.REPLICA_DIED, node="n1", replica=1, reason="out of memory")
    (run.path / "live.json").unlink()
    shown = once(run)
    assert "replicas     2 ready on 2 nodes: n1, n2" in shown and "out of memory" in shown
    assert "step time of" not in shown


def test_damaged_files_are_survived(run: RunFolder):
    (run.path / "live.json").write_text(json.dumps({"format": 1, "steps": "x", "step_s": [None, "y", 1e999, {}]}))
    with run.journal().path.open("a") as stream:
        stream.write('{"torn')
    assert "gpt" in once(run)


class Terminal:
    """``slurmft watch`` on a pseudoterminal of its own."""

    def __init__(self, run: RunFolder, *, lines: int = 24, columns: int = 80) -> None:
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        environment = {**os.environ, "TERM": "xterm", "PYTHONUTF8": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [*SLURMFT, "watch", str(run.path), "--interval", "0.2"], stdin=self.slave, stdout=self.slave,
            stderr=self.slave, env=environment, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - there are no threads
        )  # fmt: skip
        self.shown = b""

    def read_until(self, text: bytes, within_s: float = 30) -> None:
        deadline = time.monotonic() + within_s
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown[-2000:]
            if select.select([self.master], [], [], 0.2)[0]:
                self.shown += os.read(self.master, 65536)

    def ended(self, within_s: float = 20) -> int:
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it goes on"
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += os.read(self.master, 65536)
        while select.select([self.master], [], [], 0.1)[0]:
            self.shown += os.read(self.master, 65536)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.mark.parametrize("end", ["q", "ctrl-c", "SIGHUP", "SIGTERM twice"])
def test_the_terminal_is_as_before(run: RunFolder, end: str):
    terminal = Terminal(run)
    try:
        terminal.read_until(b"worker failed")
        match end:
            case "q":
                os.write(terminal.master, b"q")
            case "ctrl-c":
                os.write(terminal.master, b"\x03")
            case _:
                number = signal.Signals[end.split(maxsplit=1)[0]]
                for _ in range(2 if "twice" in end else 1):
                    terminal.process.send_signal(number)
        assert terminal.ended() == 0
        assert termios.tcgetattr(terminal.slave) == terminal.before
        left = terminal.shown.rpartition(b"\x1b[?1049h")[2]
        assert b"\x1b[?1049l" in left and b"\x1b[?25h" in left, "the screen of before, and the cursor"
        assert b"Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_events_come_by_themselves_and_a_changed_size_is_drawn(run: RunFolder):
    terminal = Terminal(run, lines=30, columns=90)
    try:
        terminal.read_until(b"worker failed")
        run.journal().append(EventName.SAVE_FAILED, reason="No space left")
        terminal.read_until(b"No space left")
        fcntl.ioctl(terminal.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 8, 30, 0, 0))
        terminal.shown = b""
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.read_until(b"gpt")
        os.write(terminal.master, b"q")
        assert terminal.ended() == 0
    finally:
        terminal.close()


def test_a_pipe_is_no_terminal(run: RunFolder):
    words = [*SLURMFT, "watch", str(run.path)]
    told = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert told.returncode == 2 and "--once" in told.stderr
