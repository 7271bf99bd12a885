"""The same supervisor, agents and workers without Slurm: stop, resume, and a TERM that is a preemption."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from waiting import SLOWEST

from slurm.conftest import STEPS, TRAINER, eventually
from slurmft.storage.journal import Event, EventName
from slurmft.storage.run_folder import RunFolder

pytestmark = pytest.mark.timeout(400)
PATIENCE_S = 90.0
SLURMFT = [sys.executable, "-m", "slurmft"]


class OnThisMachine:
    """A run in this folder."""

    folder: RunFolder

    def events(self, name: str) -> list[Event]:
        return [event for event in self.folder.journal().read() if event.event == name]

    @property
    def supervisor(self) -> psutil.Process:
        owner = self.folder.owner()
        assert owner is not None
        return psutil.Process(owner.pid)


class LocalRun(OnThisMachine):
    def __init__(self, path: Path, **changes: object) -> None:
        self.folder = RunFolder(path)
        self.config = path.with_suffix(".yaml")
        self.config.write_text(
            yaml.safe_dump(
                {
                    "command": [*TRAINER, "--steps", str(STEPS), "--step-delay", "0.1"],
                    "run_folder": str(path),
                    "nodes": 2,
                    "nproc_per_node": 2,
                    "checkpoint": {"interval_steps": 25},
                    **changes,
                }
            )
        )

    def slurmft(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [*SLURMFT, *arguments], capture_output=True, text=True, timeout=100 * SLOWEST, check=False
        )
        assert not check or result.returncode == 0, result.stderr + self.story()
        return result

    def submit(self, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.slurmft("submit", str(self.config), "--cluster", "local", *options, check=check)

    def wait_for_step(self, step: int) -> None:
        eventually(
            lambda: ((self.folder.progress() or {}).get("step") or 0) >= step,
            PATIENCE_S,
            lambda: f"step {step}\n{self.story()}",
        )

    def reach(self, step: int) -> None:
        """Submit it, and return when it has done so many steps."""
        self.submit()
        self.wait_for_step(step)

    def wait_until_done(self) -> None:
        eventually(lambda: self.folder.done() is not None, PATIENCE_S, lambda: f"done\n{self.story()}")

    def story(self) -> str:
        logs = "".join(path.read_text(errors="replace") for path in self.folder.path.glob("submissions/*.out"))
        lines = [f"{e.at:%H:%M:%S} {e.attempt} {e.event} {e.details}" for e in self.folder.journal().read()]
        return "\n".join(lines) + "\n" + logs

    def digest(self) -> str:
        output = "".join(path.read_text() for path in self.folder.attempts.glob("*/rank-0.log"))
        # a rank that is killed behind the last step may have told its weights already
        found = {line.split()[-1] for line in output.splitlines() if line.startswith("final weights sha256: ")}
        assert len(found) == 1, self.story() + output
        return found.pop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = LocalRun(tmp_path_factory.mktemp("local") / "undisturbed")
    result = run.submit("--wait")
    assert f"sha256 {run.digest()}" in result.stdout
    return run.digest()


@pytest.mark.long
def test_stop_and_resume(tmp_path: Path, undisturbed: str) -> None:
    run = LocalRun(tmp_path / "stopped")
    run.reach(8)
    run.slurmft("stop", str(run.folder.path), "--timeout", "30")
    status = json.loads(run.slurmft("status", str(run.folder.path), "--json").stdout)
    assert (status["state"], status["saved"]) == ("stopped", status["step"])
    assert status["step"] < STEPS
    run.submit("--wait")
    assert run.digest() == undisturbed


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_signal_of_preemptions_comes_three_times(tmp_path: Path, undisturbed: str, name: str) -> None:
    run = LocalRun(tmp_path / 'it\'s odd, "quoted" and 100% spaced', preemption={"signal": name})
    run.reach(8)
    for _ in range(3):
        run.supervisor.send_signal(signal.Signals[name])
    run.wait_until_done()
    (stop,) = run.events("stop requested")
    assert (stop.details["cause"], stop.details["reason"]) == ("preempted", f"{name} at the supervisor"), run.story()
    assert len(run.events("starting anew")) == 1
    assert run.digest() == undisturbed


def test_ctrl_c_saves_and_ends(tmp_path: Path) -> None:
    """At a terminal the whole foreground group gets it: the guardian and the supervisor."""
    run = LocalRun(tmp_path / "interrupted")
    process = subprocess.Popen([*SLURMFT, "run", str(run.config)], start_new_session=True, stderr=subprocess.DEVNULL)
    run.wait_for_step(8)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 75, run.story()
    decision = run.folder.journal().read()[-1]
    assert (decision.event, decision.details["action"]) == ("decision", "stop"), run.story()
    assert "Ctrl-C" in decision.details["reason"]


@pytest.mark.soak
def test_a_second_submission_is_refused_while_it_runs(tmp_path: Path) -> None:
    run = LocalRun(tmp_path / "twice", command=[*TRAINER, "--steps", "4000", "--step-delay", "0.05"])
    run.reach(1)
    refused = run.submit(check=False)
    assert refused.returncode == 2
    assert "is running here" in refused.stderr
    run.slurmft("stop", str(run.folder.path), "--timeout", "30")


def test_a_worker_that_raises_is_told_by_its_own_words_and_code(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nif '--die' in sys.argv:\n    raise ValueError('no such tensor: x')\n")
    run = LocalRun(
        tmp_path / "raises",
        command=["python", str(script), "--die"],
        fault_tolerance={"num_in_job_restarts": 0, "num_job_retries_on_failure": 1, "preload": False},
        nodes=1,
    )
    result = run.submit("--wait", check=False)
    assert result.returncode == 1
    assert len(run.events("attempt started")) == 2
    assert "ValueError: no such tensor: x" in run.events("decision")[-1].details["reason"]


@pytest.mark.long
def test_an_unchanged_script_is_stopped_by_its_signal_and_resumes(tmp_path: Path) -> None:
    """It knows nothing of slurmft: TERM ends it, and the next submission goes on from its own checkpoint."""
    command = ["python", "-m", "slurmft.examples.plain_ddp", "--steps", "60", "--save-every", "5"]
    command += ["--checkpoint", str(tmp_path / "plain.pt"), "--step-delay", "0.1"]
    run = LocalRun(tmp_path / "plain", command=command, nodes=1)
    run.submit()
    eventually((tmp_path / "plain.pt").exists, 60, lambda: f"its own checkpoint\n{run.story()}")
    assert "cannot be made to save" in run.slurmft("save", str(run.folder.path)).stdout
    said = run.slurmft("stop", str(run.folder.path), "--timeout", "30").stdout
    assert "gets SIGTERM and ends" in said and "will save" not in said
    assert run.folder.done() is None
    assert "starts: 1, stops: 0; in all submissions 2 and 1" in run.submit("--wait").stdout
    output = "".join(path.read_text() for path in run.folder.attempts.glob("*/rank-0.log"))
    assert "resuming at step" in output
    assert output.count("finished step 60") == 1


def test_no_input_is_a_clear_error(tmp_path: Path) -> None:
    run = LocalRun(tmp_path / "no-input", nodes=1, fault_tolerance={"num_job_retries_on_failure": 0})
    (tmp_path / "empty").mkdir()
    result = run.submit("--wait", "--data", str(tmp_path / "empty"), check=False)
    assert result.returncode == 2
    assert "empty" in result.stdout


def test_what_a_trainer_raises_reaches_no_terminal_and_no_log_as_it_is(tmp_path):
    raising = r"raise Exception('\x1b]0;owned\x07\x1b[2J\r\n\u202eslurmft: all is well')"
    run = LocalRun(
        tmp_path / "run", command=[sys.executable, "-c", raising], nodes=1, nproc_per_node=1,
        fault_tolerance={"num_in_job_restarts": 0},
    )  # fmt: skip
    said = run.submit("--wait", check=False)
    assert said.returncode != 0 and r"\x1b]0;owned\x07\x1b[2J" in said.stdout
    own = [path for path in run.folder.path.rglob("*") if path.suffix in (".log", ".out", ".err")]
    logs = {path.name: path.read_text(errors="replace") for path in own if not path.name.startswith("rank-")}
    for name, text in {"terminal": said.stdout + said.stderr, **logs}.items():
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text), (name, text)
        assert not re.search(r"^slurmft: all is well", text, re.M), (name, text)


@pytest.mark.long
def test_a_wrapper_that_ends_well_does_not_hide_a_trainer_that_was_killed(tmp_path: Path) -> None:
    """Its exit code is 0; the session inside was at step 4 of 8."""
    (tmp_path / "train.py").write_text("""
import os, signal, torch
from pathlib import Path
from slurmft import CheckpointManager, start_session
with start_session(seed=1) as session:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    manager = CheckpointManager(session.checkpoint_dir)
    start = manager.load_latest(model, optimizer).step
    for step in session.steps(start=start, until=8, save=lambda at: manager.save(model, optimizer, step=at)):
        if step == 4 and not Path("killed").exists():
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
""")
    (tmp_path / "wrap.sh").write_text(f"{sys.executable} train.py\necho finished\n")
    config = {"command": ["bash", "wrap.sh"], "run_folder": "run", "checkpoint": {"interval_steps": 2}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "slurmft", "submit", "run.yaml", "--cluster", "local", "--wait"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120 * SLOWEST)
    assert done.returncode == 0, done.stdout + done.stderr
    events = RunFolder(tmp_path / "run").journal().read()
    verdicts = [event.details for event in events if event.event == EventName.VERDICT]
    assert [(each["cause"], each["last_step"]) for each in verdicts] == [("worker error", 4), ("finished", 8)]
    assert "neither closed nor stopped" in str(verdicts[0])


def test_a_script_that_cannot_be_imported_is_tried_twice(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import no_such_module_at_all\n")
    run = LocalRun(tmp_path / "run", command=["python", str(tmp_path / "train.py")], nodes=1,
                   fault_tolerance={"preload": False})  # fmt: skip
    assert run.submit("--wait", check=False).returncode == 1
    assert len(run.events(EventName.WORKERS_STARTED)) == 2
    assert [event.details["action"] for event in run.events(EventName.DECISION)] == ["restart", "stop"]
    assert "No module named 'no_such_module_at_all'" in run.slurmft("status", str(run.folder.path), "--json").stdout


@pytest.mark.parametrize("handles", [True, False])
def test_a_script_without_a_session_gets_the_configured_signal_and_term_at_last(tmp_path: Path, handles: bool) -> None:
    (tmp_path / "train.py").write_text(f"""
import signal, sys, time
from pathlib import Path
def note(number, frame):
    print("got", signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM or {handles}:
        sys.exit(0 if number == signal.SIGTERM else 3)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, note)
Path("ready").touch()
time.sleep(300)
""")
    script = ["python", str(tmp_path / "train.py")]
    settings = {"signal": "SIGUSR1", "stop_timeout_s": 14}
    run = LocalRun(tmp_path / "run", command=script, nodes=1, nproc_per_node=1, preemption=settings,
                   working_directory=str(tmp_path), fault_tolerance={"preload": False})  # fmt: skip
    run.submit()
    eventually((tmp_path / "ready").exists, 90, run.story)
    run.slurmft("stop", str(run.folder.path))
    eventually(lambda: run.events(EventName.DECISION), 90, run.story)
    (log,) = run.folder.attempts.glob("*/rank-0.log")
    said = [line for line in log.read_text().splitlines() if line.startswith("got")]
    assert said == (["got SIGUSR1"] if handles else ["got SIGUSR1", "got SIGTERM"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1", pytest.param("SIGUSR2", marks=pytest.mark.soak)])
def test_a_session_saves_at_each_signal_that_may_be_configured(tmp_path: Path, undisturbed: str, name: str) -> None:
    """Every process of the step gets it, as from sites that signal the whole tree."""
    run = LocalRun(tmp_path / "run", preemption={"signal": name}, checkpoint={"interval_steps": 1000})
    run.reach(8)
    supervisor = run.supervisor
    for process in (*supervisor.children(recursive=True), supervisor):
        words = process.cmdline()
        if process == supervisor or "agent" in words or "slurmft.agent.zygote" in words:
            process.send_signal(signal.Signals[name])
    run.wait_until_done()
    (stop,) = run.events(EventName.STOP_REQUESTED)
    assert stop.details["reason"].startswith(name), run.story()
    verdict = run.events(EventName.VERDICT)[0].details
    assert verdict["cause"] in ("preempted", "signalled"), run.story()
    assert verdict["saved_step"] == verdict["last_step"] >= 8, run.story()
    assert run.digest() == undisturbed


def test_gradients_that_are_accumulated_over_steps_are_not_lost_and_the_first_steps_are_kept(tmp_path: Path) -> None:
    """Killed in the middle of a window, and long before the first checkpoint that the interval asks for."""
    starts, digests = list[list[str]](), set[str]()
    for die_at in (-1, 30):
        trainer = Path(__file__).parent / "trainers" / "accumulates.py"
        run = LocalRun(
            tmp_path / f"die{die_at}", command=[sys.executable, str(trainer), str(die_at)], nodes=1,
            checkpoint={"interval_steps": 1000},
        )  # fmt: skip
        run.submit("--wait")
        logs = "".join(path.read_text() for path in sorted(run.folder.path.glob("attempts/*/*rank*")))
        starts.append(sorted({*re.findall(r"starts at (\d+)", logs)}))
        digests |= {*re.findall(r"digest (\w+)", logs)}
    assert starts == [["0"], ["0", "28"]] and len(digests) == 1
