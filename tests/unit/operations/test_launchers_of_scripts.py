"""The functions that a batch script of `slurmft sbatch` reads: which calls they meet, in which shells, with what."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmft.operations import script
from slurmft.operations.script import LAUNCHERS, last_word
from slurmft.policy import sbatch
from slurmft.storage.journal import EventName
from slurmft.storage.run_folder import Attempt

STAND_IN = """#!/bin/sh
shift 5
echo "met $*"
case $* in *--wait*) trap 'echo got USR1; exit 5' USR1; echo ready; while :; do sleep 0.05; done ;; esac
cat
exit "${CODE:-0}"
"""
REAL = '#!/bin/sh\necho "real ${0##*/} $*"\n'


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    for name in ("srun", "torchrun", "python", "uv", "accelerate"):
        (tmp_path / "bin" / name).write_text(REAL)
        (tmp_path / "bin" / name).chmod(0o755)
    stand_in = tmp_path / "interpreter"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)

    def run(body: str, *, shell: str = "bash", traces: str = "", **environment: str) -> list[str]:
        guard = (f"slurmft_is_batch_script=yes; SLURMFT_PYTHON={stand_in}; SLURMFT_LAUNCHERS={LAUNCHERS}; "
                 f". {LAUNCHERS}/functions.sh; ")  # fmt: skip
        path = tmp_path / "job.sh"
        path.write_text(sbatch.with_guard(f"#!/bin/{shell}\n{body}\n", guard))
        given = {
            "PATH": f"{tmp_path}/bin:{os.defpath}",
            "SLURM_JOB_ID": "7",
            "OTHER": str(tmp_path / "bin"),
            **environment,
        }
        done = subprocess.run([shell, str(path)], env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60,
                              check=False, stdin=subprocess.DEVNULL)  # fmt: skip
        assert [line for line in done.stderr.splitlines() if "last" not in line] == (
            [traces, "+ set +x"] if traces else []
        )
        return [line for line in done.stdout.splitlines() if line != "met --last-word"]

    return run


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("srun -n2 'a b'", ["met srun -n2 a b"]),
        ("PATH=$PWD/bin:$PATH; torchrun x.py", ["met torchrun x.py"]),
        ("L='srun -n1'; $L x", ["met srun -n1 x"]),
        ('x=$(srun y); echo "[$x]"', ["[met srun y]"]),
        ("echo text | srun y", ["met srun y", "text"]),
        ("srun a || echo failed $?", ["met srun a", "failed 3"]),
        ("python -m torch.distributed.run x.py", ["met python -m torch.distributed.run x.py"]),
        ("python prepare.py", ["real python prepare.py"]),
        ("exec srun a", ["met srun a"]),
        ("env X=1 srun a", ["met srun a"]),
        ("sbatch -n2 x.sh", ["met sbatch -n2 x.sh"]),
        (f"{sys.executable} -u $(command -p which torchrun) x.py", ["met torchrun x.py"]),
    ],
)
def test_calls_that_are_met(run, body: str, lines: list[str], shell: str):
    assert run(body, shell=shell, **({"CODE": "3"} if "failed" in body else {})) == lines


def test_a_scripts_own_handler_of_errors_is_called_where_it_would_be(run):
    body = "set -e\ntrap 'echo failed in line $LINENO' ERR\nsrun a\necho not here"
    assert run(body, CODE="3") == ["met srun a", "failed in line 4"]
    assert run(f"set -E; {body}", CODE="3") == ["met srun a", "failed in line 4"]


def test_a_script_that_is_called_has_them_too_and_its_own_environment_file_is_read(run, tmp_path: Path):
    (tmp_path / "inner.sh").write_text("srun inside; echo $OF_SITE\n")
    (tmp_path / "site.sh").write_text("OF_SITE=yes\n")
    assert run("bash inner.sh", BASH_ENV=str(tmp_path / "site.sh")) == ["met srun inside", "yes"]


@pytest.mark.parametrize("body", ["srun a", "python a"])
def test_a_script_that_traces_itself_shows_its_own_commands(run, body: str):
    assert run(f"set -x; {body}; set +x 2> /dev/null", traces="+ " + body)


def test_a_task_and_another_job_are_left_alone(run, tmp_path: Path):
    assert run("srun a", SLURM_STEP_ID="0") == ["real srun a"]
    (tmp_path / "inner.sh").write_text("python -m torch.distributed.run x.py\n")
    assert run("SLURM_JOB_ID=8 bash inner.sh") == ["real python -m torch.distributed.run x.py"]


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_signal_to_what_runs_in_the_background_reaches_the_launcher(run, shell: str, tmp_path: Path):
    (tmp_path / "fifo").unlink(missing_ok=True)
    body = """mkfifo fifo
srun --wait > fifo &
child=$!
while read -r line; do
    echo "$line"
    case $line in ready) kill -USR1 $child ;; esac
done < fifo
wait $child
echo "ended with $?" """
    assert run(body, shell=shell) == ["met srun --wait", "ready", "got USR1", "ended with 5"]


def test_the_word_at_the_end(tmp_path: Path):
    job = {"SLURM_JOB_ID": "7", "SLURMFT_BATCH_JOB": "7", "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NAME": "a/b c"}
    around = script._Script(job)
    assert around.base == tmp_path / "runs" / "a-b-c-7"
    assert "it calls no launcher by its name" in last_word(job)
    around.note(why="hostname")
    around.note(why="its tasks are odd", trains=True)
    assert last_word(job).endswith("because its tasks are odd")  # which no word of the script's changes
    around.note(number=1, words=["srun", "x.py"], code=None)
    assert last_word(job) == ""
    assert "it calls no launcher" in last_word({**job, "SLURM_RESTART_COUNT": "1"})  # each start has its own
    assert last_word({**job, "SLURM_STEP_ID": "0"}) == last_word({}) == ""


def test_what_the_script_itself_sees_has_nothing_of_slurmft():
    given = {"PATH": f"{LAUNCHERS}/bin:/usr/bin", "SLURMFT_LAUNCHERS": str(LAUNCHERS), "BASH_ENV": "ours",
             "SLURMFT_BASH_ENV": "/site", "SLURMFT": "train", "SLURMFT_SET": "[]", "X": "1"}  # fmt: skip
    assert script._Script(given).own == {"PATH": "/usr/bin", "BASH_ENV": "/site", "X": "1"}


@pytest.mark.parametrize("words", [["python"], ["python", "-m"], ["python", "-u", "x.py"], ["python", "-c", "x"]])
def test_a_python_that_starts_no_ranks_is_no_launcher_whatever_it_is_given(words: list[str]):
    assert script._ranks(words, {"PATH": os.defpath}, sbatch.Places("", 1, 1, "", {}), lambda _: pytest.fail()) is None


@pytest.mark.parametrize("launch", ["./launch.sh --x 1", "launch.sh", "bash launch.sh", "sh -e ./launch.sh"])
def test_a_shell_script_is_what_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch.sh").write_text("#!/bin/sh\n# python it.py\nhostname\n")
    (tmp_path / "launch.sh").chmod(0o755)
    line, own = sbatch.split_line(launch.split(), sbatch.SRUN_FLAGS), {"PATH": os.defpath}
    assert not sbatch.judged("srun", script._with_scripts("srun", line, own), said="", environment=own).trains
    (tmp_path / "launch.sh").write_text("#!/bin/sh\nexec torchrun \\\n  x.py\n")
    words = script._with_scripts("srun", line, own)
    assert sbatch.judged("srun", words, said="", environment=own).trains and sbatch.starts_ranks(words, own)
    assert script._with_scripts("torchrun", line, own) == list(line.command)
    assert script._found(["launch.sh"], own) == ["env", "./launch.sh"]  # as srun finds it


class Job:
    """A batch script in its job, with an sbatch that notes what it is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        self.own = folder / "job.sh"
        self.own.write_text("#!/bin/bash\nsrun python train.py\n")
        spooled = folder / "slurm_script"
        spooled.write_text(sbatch.with_guard(self.own.read_text(), script._guard(None, ["nodes=2"], again=False)))
        (folder / "bin/sbatch").write_text(
            f'#!/bin/sh\nfor last; do :; done\ncp "$last" {folder}/given\necho "$*" >> {folder}/calls\n'
        )
        (folder / "bin/sbatch").chmod(0o755)
        self.environment = {
            "SLURM_JOB_ID": "7", "SLURMFT_BATCH_JOB": "7", "SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NAME": "job",
            "SLURMFT_SCRIPT": str(spooled), "SLURMFT_SET": '["nodes=2"]', "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "HOME": str(folder),
        }  # fmt: skip
        self.around = script._Script(self.environment)

    def sbatch(self, *words: str, within_s: float = 60) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-P", "-m", "slurmft", "launch", "sbatch", *words]
        return subprocess.run(argv, env=self.environment, cwd=self.folder, capture_output=True, text=True,
                              timeout=within_s, check=True)  # fmt: skip

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


def test_a_comment_in_another_encoding_reaches_sbatch_as_it_is(tmp_path: Path):
    job = Job(tmp_path)
    job.own.write_bytes(b"#!/bin/bash\n#SBATCH -N1 # f\xfcr alle\nsrun python train.py\n")
    argv = [sys.executable, "-P", "-m", "slurmft", "sbatch", "job.sh"]
    subprocess.run(argv, env=job.environment, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    head, comment, command = (tmp_path / "given").read_bytes().splitlines()
    assert (head, comment, command[-21:]) == (b"#!/bin/bash", b"#SBATCH -N1 # f\xfcr alle", b" srun python train.py")


HELP = Path(__file__).parents[1] / "data" / "slurm"


@pytest.mark.parametrize("version", sorted(path.name for path in HELP.iterdir()))
def test_an_option_whose_value_help_shows_as_if_it_were_optional_keeps_it(tmp_path: Path, version: str):
    job = Job(tmp_path)
    stub = (tmp_path / "bin/sbatch").read_text()
    help_of_site = f"case $1 in --help) exec cat {HELP}/{version}/sbatch-help.txt ;; esac\n"
    (tmp_path / "bin/sbatch").write_text(stub.replace("#!/bin/sh\n", f"#!/bin/sh\n{help_of_site}"))
    argv = [sys.executable, "-P", "-m", "slurmft", "sbatch", "--export", "ALL,A=1", "--oom-kill-step", "job.sh", "x"]
    subprocess.run(argv, env=job.environment, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    call = job.calls()[-1].split()
    assert call[:3] == ["--export", "ALL,A=1", "--oom-kill-step"] and call[-1] == "x"


def test_options_that_sbatch_will_not_read_are_named(tmp_path: Path):
    job = Job(tmp_path)
    job.own.write_text("#!/bin/bash\n#SBATCH\n--mem=32G\n#SBATCH --gres=gpu:1\npython train.py\n")
    argv = [sys.executable, "-P", "-m", "slurmft", "sbatch", "job.sh"]
    done = subprocess.run(argv, env=job.environment, cwd=tmp_path, capture_output=True, text=True, timeout=60,
                          check=True)  # fmt: skip
    assert "behind the first command does not count, as for sbatch: line 4\n" in done.stderr


def test_another_script_is_submitted_as_it_is(tmp_path: Path):
    job = Job(tmp_path)
    (tmp_path / "other.sh").write_text("#!/bin/bash\n")
    job.around.note(number=1, words=["srun", "x.py"], code=None)
    job.sbatch("-n3", "other.sh")
    assert job.calls() == ["-n3 other.sh"]


@pytest.mark.parametrize("name", ["job.sh", "slurm_script"])
def test_a_script_that_submits_itself_when_all_has_finished_is_supervised_again(tmp_path: Path, name: str):
    job = Job(tmp_path)
    job.around.note(number=1, words=["srun", "x.py"], code=0)
    job.sbatch("--dependency=afterany:7", name)
    call = job.calls()[-1]
    assert call.startswith("--dependency=afterany:7 --requeue")
    assert (tmp_path / "given").read_text().count("slurmft_is_batch_script") == 1


@pytest.mark.parametrize("name", ["job.sh", "slurm_script"])
def test_a_script_that_submits_itself_while_it_trains_goes_on_in_this_job_alone(tmp_path: Path, name: str):
    job = Job(tmp_path)
    job.around.note(number=1, words=["srun", "x.py"], code=None)
    run = job.around.run(1)
    run.create()
    journal = run.journal(Attempt(job="7", restart=0))
    journal.append(EventName.DECISION, action="continue")
    journal.append(EventName.REQUEUED)
    done = job.sbatch("--parsable", name)
    assert (done.stdout, job.calls(), run.see_request("REQUEUE")) == ("7\n", [], "sbatch in its script")
    assert "is not submitted a second time" in done.stderr


def test_a_link_of_a_chain_is_not_submitted_again_by_a_later_start(tmp_path: Path):
    job = Job(tmp_path)
    job.around.note(number=1, words=["srun", "x.py"], code=None)
    job.environment["SLURM_RESTART_COUNT"] = "1"
    done = job.sbatch("--dependency=afterany:7", "job.sh", within_s=30)
    assert (done.stdout, job.calls()) == ("Submitted batch job 7\n", [])
    assert not job.around.run(1).path.exists()
