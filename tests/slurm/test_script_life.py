"""Batch scripts under `slurmft sbatch` whose launches are signalled, killed, requeued: and what runs once, or again."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.conftest import PATIENCE_S, eventually
from slurm.conftest import TRAINER as GPT
from slurmft.lab.cluster import Lab
from slurmft.storage.journal import Event
from slurmft.storage.run_folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

TRAINER = """
import os, signal, sys, time
rank, start, saved = os.environ["SLURM_PROCID"], os.environ.get("SLURM_RESTART_COUNT", "0"), "saved-"
def say(*words):
    os.write(1, (" ".join([f"rank {rank} start {start}", *map(str, words)]) + "\\n").encode())  # also in a handler
def save(number, frame):
    say("got", signal.Signals(number).name)
    open(saved + rank, "w").close()
    sys.exit(int(sys.argv[2]))
for name in sys.argv[1].split(","):
    signal.signal(getattr(signal, name), save)
if os.path.exists(saved + rank):
    say("resumed")
    sys.exit(0)
say("trains", os.getpid())
open("trains-" + rank, "w").close()
time.sleep(300)
"""
HEAD = "#!/bin/bash\n#SBATCH -n2 -t10 -o out\necho begin\n"
TRAIN = "srun /usr/bin/python3 trainer.py"


class Script:
    """A batch script in a folder of its own."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        folder.mkdir()
        self.write("trainer.py", TRAINER)
        os.chown(folder, lab.uid, lab.gid)

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        os.chown(path, self.lab.uid, self.lab.gid)

    def submit(self, text: str, *options: str, words: tuple[str, ...] = ("job.sh",), given: str | None = None) -> str:
        self.write("job.sh", text)
        argv = ["slurmft", "sbatch", *options, *words]
        return self.lab.run(argv, cwd=self.folder, input=given, timeout=90).stdout.split()[-1]

    def squeue(self, job: str, what: str) -> str:
        return self.lab.run(["squeue", "-h", "-j", job, "-o", what], check=False).stdout.strip()

    def output(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("out*"))

    def wait_for(self, text: str, count: int = 1, within_s: float = 2 * PATIENCE_S) -> None:
        eventually(lambda: self.output().count(text) >= count, within_s, lambda: f"{count} x {text!r}\n{self.story()}")

    def wait_until_gone(self, job: str, within_s: float = 2 * PATIENCE_S) -> None:
        eventually(lambda: not self.squeue(job, "%T"), within_s, lambda: f"{job} out of the queue\n{self.story()}")

    def events(self, name: str) -> list[Event]:
        return [event for path in self.folder.glob("runs/job.sh-*[0-9]") for event in RunFolder(path).journal().read()
                if event.event == name]  # fmt: skip

    def story(self) -> str:
        logs = "".join(path.read_text() for path in self.folder.glob("runs/*/logs/*.log"))
        records = "".join(path.read_text() for path in self.folder.glob("runs/*.launches"))
        return f"{self.output()}\n{records}\n{logs}"


@pytest.fixture
def script(lab: Lab, left_idle: None, request: pytest.FixtureRequest) -> Script:
    again = "-again" if getattr(request.node, "execution_count", 1) > 1 else ""
    name = request.node.name.replace("[", "-").replace("]", "").replace(":", "-").replace("@", "-")
    return Script(lab, lab.home / f"{name}{again}")


def send(script: Script, job: str, *how: str) -> None:
    script.lab.run(["scancel", *how, job])


@pytest.mark.long
@pytest.mark.parametrize("name", ["USR1", pytest.param("USR2", marks=pytest.mark.soak), "INT", "TERM"])
def test_a_signal_to_the_steps_reaches_workers_and_the_job_goes_on_once(script: Script, name: str) -> None:
    job = script.submit(HEAD + f"{TRAIN} SIG{name} 0\necho code $?\n", f"--signal={name}@60")
    script.wait_for("trains", 2)
    send(script, job, f"--signal={name}")
    script.wait_until_gone(job)
    told = script.output()
    # where Slurm signals whole trees, a worker gets it from Slurm and from its agent
    assert {f"rank {rank} start 0 got SIG{name}" for rank in (0, 1)} <= {*told.splitlines()}, script.story()
    assert told.count("start 1 resumed") == 2, script.story()
    assert (told.count("begin"), told.count("code 0")) == (2, 1), script.story()


def test_a_handler_that_passes_the_signal_on_and_requeues_by_itself(script: Script) -> None:
    handler = "again() { echo handler; kill -USR1 $child; wait $child; scontrol requeue $SLURM_JOB_ID; }\n"
    text = HEAD + handler + f"trap again USR1\n{TRAIN} SIGUSR1 0 &\nchild=$!\nwait $child\necho code $?\n"
    job = script.submit(text, "--signal=B:USR1@60")
    script.wait_for("trains", 2)
    send(script, job, "--batch", "--signal=USR1")
    script.wait_until_gone(job)
    told = script.output()
    assert {f"rank {rank} start 0 got SIGUSR1" for rank in (0, 1)} <= {*told.splitlines()}, script.story()
    assert (told.count("handler"), told.count("begin"), told.count("start 1 resumed")) == (1, 2, 2), script.story()


BEHIND = f"{TRAIN} SIGUSR1,SIGTERM 0 &\nchild=$!\nwait $child\necho code $?\n"


def handler(last: str) -> str:
    return f"again() {{ echo handler; kill -USR1 $child; wait $child; {last}; }}\ntrap again USR1\n{BEHIND}"


TO_SCRIPT, TO_STEPS, NOBODY = "--signal=B:USR1@60", "--signal=USR1@60", "--signal=USR1@500"
FORMS = {
    "a handler that waits": (TO_SCRIPT, handler(":")),
    "one that ends the script": (TO_SCRIPT, handler("exit 0")),
    "one that submits its copy": (TO_SCRIPT, handler("sbatch $0")),
    "one that submits the file": (TO_SCRIPT, handler("sbatch job.sh; exit")),
    "one that submits at once": (TO_SCRIPT, f"trap 'echo handler; sbatch job.sh' USR1\n{BEHIND}"),
    "one that requeues at once": (TO_SCRIPT, f"trap 'echo handler; scontrol requeue $SLURM_JOB_ID' USR1\n{BEHIND}"),
    "a handler at the end": (TO_STEPS, f"trap 'echo handler' EXIT\n{TRAIN} SIGUSR1 0\necho code $?\n"),
    "a script that ignores it": (TO_STEPS, f"trap '' USR1\n{TRAIN} SIGUSR1 0\necho code $?\n"),
    "set -e": (TO_STEPS, f"set -euo pipefail\n{TRAIN} SIGUSR1 0\necho code $?\n"),
    "a function": (TO_STEPS, f"train() {{ {TRAIN} SIGUSR1 0; }}\ntrain\necho code $?\n"),
    "a subshell": (TO_STEPS, f"( cd . && {TRAIN} SIGUSR1 0 )\necho code $?\n"),
    "a pipe": (TO_STEPS, f"set -o pipefail\n{TRAIN} SIGUSR1 0 | tee log\necho code $?\n"),
    "a loop": (TO_STEPS, f"for try in 1 2 3; do {TRAIN} SIGUSR1 0 && break; sleep 1; done\necho code $?\n"),
    "timeout, then requeue": (
        NOBODY, f"timeout 15 {TRAIN} SIGTERM,SIGUSR1 0\ncode=$?\n[ $code != 124 ] || scontrol requeue $SLURM_JOB_ID\n"
        "echo code $code\n",
    ),
}  # fmt: skip
"""By its name: the option, which says whom the test sends the signal to, and the script's text."""

SELDOM = {"one that submits its copy", "a function", "a subshell", "a pipe"}
"""In soak: another one like it is in every run, and ``test_script_forms`` has the ways to start a launch."""


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak) if name in SELDOM else name for name in FORMS]
)
def test_a_script_with_traps_goes_on_once(script: Script, name: str) -> None:
    option, text = FORMS[name]
    job = script.submit(HEAD + text, option)
    script.wait_for("trains", 2)
    if option != NOBODY:
        send(script, job, "--signal=USR1", *(["--batch"] if option == TO_SCRIPT else []))
    script.wait_for("start 1 resumed", 2)
    script.wait_until_gone(job)
    told = script.output()
    assert [told.count(word) for word in ("begin", "trains", "start 1 resumed", "start 2")] == [2, 2, 2, 0], (
        script.story()
    )
    assert "code 0" in told and told.count("handler") >= ("handler" in text), script.story()
    assert [path.name for path in script.folder.glob("runs/*[0-9]")] == [f"job.sh-{job}"], script.story()
    assert script.lab.run(["squeue", "-h", "-u", str(script.lab.uid)]).stdout == "", "another job"


@pytest.mark.long
def test_a_lost_node_is_left_and_the_script_goes_on(script: Script) -> None:
    job = script.submit(HEAD.replace("-n2", "-N2 --ntasks-per-node=1") + f"{TRAIN} SIGTERM,SIGUSR2 0\necho code $?\n")
    script.wait_for("trains", 2)
    for rank in "01":
        (script.folder / f"saved-{rank}").touch()
    nodes = script.lab.run(["scontrol", "show", "hostnames", script.squeue(job, "%N")]).stdout.split()
    [lost] = {*nodes} - {script.squeue(job, "%B")}
    script.lab.kill_node(lost)
    try:
        script.wait_for("code 0", within_s=300)
    finally:
        script.lab.start_node(lost)
    assert script.output().count("resumed") == 2, script.story()


@pytest.mark.long
def test_what_has_finished_is_not_repeated_after_a_requeue(script: Script) -> None:
    script.write("first.py", "print('first part')\n")
    first = "srun -n1 /usr/bin/python3 first.py\necho first $?\n"
    job = script.submit(HEAD + first + f"{TRAIN} SIGTERM,SIGUSR2 0 --${{SLURM_RESTART_COUNT:-0}}\necho second $?\n")
    script.wait_for("trains", 2)
    script.lab.run(["scontrol", "requeue", job])
    script.wait_for("second 0")
    told = script.output()
    assert (told.count("first part"), told.count("first 0"), told.count("begin")) == (1, 2, 2), script.story()
    assert sorted(path.name for path in script.folder.glob("runs/*[0-9]")) == [f"job.sh-{job}", f"job.sh-{job}-2"]


def test_a_killed_rank_restarts_all_in_place(script: Script) -> None:
    script.submit(HEAD + f"{TRAIN} SIGTERM 0\necho code $?\n")
    script.wait_for("trains", 2)
    for rank in "01":
        (script.folder / f"saved-{rank}").touch()  # the next try is done at once
    victim = script.output().partition("rank 0 start 0 trains ")[2].split()[0]
    nodes = [event.details["nodes"] for event in script.events("attempt started")]
    script.lab.run_on_as_admin(nodes[0], ["kill", "-KILL", victim])
    script.wait_for("code 0")
    told = script.output()
    assert (told.count("start 0 resumed"), told.count("begin")) == (2, 1), script.story()


def test_a_trainer_with_a_session_saves_at_an_agreed_step_and_resumes_there(script: Script) -> None:
    job = script.submit(HEAD + f"srun {' '.join(GPT)} --steps 60 --step-delay 0.2\necho code $?\n")
    run = RunFolder(script.folder / "runs" / f"job.sh-{job}")
    eventually(lambda: ((run.progress() or {}).get("step") or 0) >= 5, 2 * PATIENCE_S, script.story)
    send(script, job, "--signal=USR2")
    script.wait_for("code 0")
    [agreed] = script.events("stop agreed")
    assert agreed.details["plan"] == "save at step", script.story()
    starts = [event.details for event in script.events("measured")]
    assert [facts["attached"] for facts in starts] == [True, True], starts
    resumed = max(event.details.get("first_step") or 0 for event in script.events("verdict"))
    assert resumed == agreed.details["step"], script.story()
    assert script.output().count("final weights sha256: ") == 1


def test_each_element_of_an_array_is_a_run(script: Script) -> None:
    script.write("first.py", "print('element')\n")
    script.submit("#!/bin/bash\n#SBATCH -o out-%A_%a --array=1-2\nsrun -n1 /usr/bin/python3 first.py\necho over $?\n")
    script.wait_for("over 0", 2)
    assert {path.name.rpartition("_")[2] for path in script.folder.glob("runs/*[0-9]")} == {"1", "2"}
    assert script.output().count("element") == 2


def ways() -> dict[str, Callable[[Script, str], str]]:
    return {
        "wrap": lambda script, line: script.submit("", "--wrap", line, "-oout", words=()),
        "standard input": lambda script, line: script.submit("", "-oout", words=(), given=f"#!/bin/sh\n{line}\n"),
        "written on Windows": lambda script, line: script.submit(f"\ufeff#!/bin/bash\r\n{line}\r\n", "-oout"),
    }


@pytest.mark.parametrize("way", list(ways()))
def test_other_ways_to_give_a_script(script: Script, way: str) -> None:
    script.write("first.py", "print('trained')\n")
    ways()[way](script, "srun -n1 /usr/bin/python3 first.py; echo code $?")
    script.wait_for("code 0")
    assert "trained" in script.output()
    assert len(list(script.folder.glob("runs/*/done.json"))) == 1, script.story()


def test_a_training_that_ends_by_itself_after_the_notice_has_finished(script: Script) -> None:
    script.write(
        "short.py",
        "import os, time\nprint('begun', flush=True)\nwhile not os.path.exists('end'):\n    time.sleep(0.1)\n",
    )
    job = script.submit(HEAD + "srun /usr/bin/python3 short.py\necho code $?\n")
    script.wait_for("begun", 2)
    send(script, job, "--signal=USR2")
    eventually(lambda: script.events("stop agreed"), PATIENCE_S, script.story)
    script.write("end", "")
    script.wait_for("code 0")
    assert script.output().count("begun") == 2, script.story()
