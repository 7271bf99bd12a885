"""The guardian: passes signals and exit codes through, and takes over when a signal has ended its child."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROLOGUE = """
import os, signal, subprocess, sys, time
from pathlib import Path
from slurmft.supervisor.guardian import guarded, lost_pids
from slurmft.supervisor.guardian import hearing, keep_across_exec
here = Path(sys.argv[1])
guarded([sys.executable, str(here / "program.py"), str(here)])
def say(text):
    with (here / "said").open("a") as stream:
        stream.write(text + chr(10))
"""


def start(folder: Path, body: str) -> subprocess.Popen[bytes]:
    (folder / "program.py").write_text(PROLOGUE + textwrap.dedent(body))
    return subprocess.Popen([sys.executable, str(folder / "program.py"), str(folder)], start_new_session=True)


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines() if (folder / "said").exists() else []


@pytest.mark.parametrize("code", [0, 1, 75])
def test_the_exit_code_is_the_childs(tmp_path, code):
    assert start(tmp_path, f"say('once'); sys.exit({code})").wait(60) == code
    assert said(tmp_path) == ["once"]


def test_a_signal_that_comes_before_the_handlers_stand_is_not_lost(tmp_path):
    body = """
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.3)
    with hearing(lambda number: (say(str(number)), os._exit(3))):
        time.sleep(30)
    """
    assert start(tmp_path, body).wait(60) == 3
    assert said(tmp_path) == ["15"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_guardian_reaches_the_child(tmp_path, number):
    body = f"""
    with hearing(lambda number: os._exit(5 if number == {int(number)} else 6)):
        say("ready")
        time.sleep(30)
    """
    process = start(tmp_path, body)
    while said(tmp_path) != ["ready"]:
        assert process.poll() is None
    os.kill(process.pid, number)
    assert process.wait(60) == 5


def test_after_a_loss_the_children_are_ended_and_somebody_acts(tmp_path):
    """The orphan had left the child's session; it is found all the same."""
    body = """
    if len(sys.argv) > 2:
        say(f"acting after {sys.argv[2]}, lost {min(lost_pids(os.environ))}")
        sys.exit(0)
    orphan = subprocess.Popen(["sleep", "100"], start_new_session=True)
    say(f"{os.getpid()} {orphan.pid}")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert start(tmp_path, body).wait(60) == 0
    first, second = said(tmp_path)
    lost, orphan = first.split()
    assert second == f"acting after 9, lost {lost}"
    with pytest.raises(ProcessLookupError):
        os.kill(int(orphan), 0)


def test_losses_have_a_limit(tmp_path):
    assert start(tmp_path, "say('x'); os.kill(os.getpid(), signal.SIGKILL)").wait(60) == 128 + signal.SIGKILL
    assert len(said(tmp_path)) == 4, "the first, and three in its place"


def test_a_program_that_replaces_itself_gets_no_second_guardian(tmp_path):
    body = """
    say(str(os.getppid()))
    if len(said := (here / "said").read_text().splitlines()) < 3:
        keep_across_exec()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    """
    process = start(tmp_path, body)
    assert process.wait(60) == 0
    assert said(tmp_path) == [str(process.pid)] * 3


def test_a_signal_while_nobody_hears_it_ends_nothing_whichever_thread_it_meets(tmp_path):
    """Threads that were started while signals were heard have no mask that would keep them out."""
    body = """
    import threading
    idle, heard = threading.Event(), []
    thread = threading.Thread(target=idle.wait, daemon=True)
    with hearing(heard.append):
        thread.start()
    signal.pthread_kill(thread.ident, signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    with hearing(heard.append):
        say(str(sorted(set(heard))))
    """
    assert start(tmp_path, body).wait(60) == 0
    assert said(tmp_path) == ["[10, 15]"]


def test_a_kept_signal_outlives_an_exec(tmp_path):
    body = """
    if not (here / "said").exists():
        os.kill(os.getpid(), signal.SIGTERM)
        say("first")
        keep_across_exec()
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with hearing(lambda number: say(str(number))):
        pass
    """
    assert start(tmp_path, body).wait(60) == 0
    assert said(tmp_path) == ["first", "15"]


@pytest.mark.parametrize("losses", [1, 3])
def test_what_is_spared_lives_on(tmp_path, losses):
    """The next program finds it as a child of the guardian; everything else is ended; in the end it too."""
    body = f"""
    if len(sys.argv) > 2 and int(os.environ['SLURMFT_GUARD_LOSSES']) < {losses}:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    body += """
    if len(sys.argv) > 2:
        said_so = os.path.exists('/proc/' + (here / 'spared.pid').read_text())
        say(str(said_so))
        say(f"{os.path.exists('/proc/' + (here / 'other.pid').read_text())}")
        if said_so:
            os.kill(int((here / 'spared.pid').read_text()), signal.SIGKILL)
        sys.exit(0)
    for name in ("spared", "other"):
        (here / f"{name}.pid").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    prologue = PROLOGUE.replace(
        "str(here)])",
        "str(here)], lambda pid: str(pid) == (here / 'spared.pid').read_text())",
    )
    (tmp_path / "program.py").write_text(prologue + textwrap.dedent(body))
    argv = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    assert subprocess.run(argv, check=False, timeout=60, start_new_session=True).returncode == 0
    assert said(tmp_path) == [str(losses < 3), "False"]
