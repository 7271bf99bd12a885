"""Containers that cannot be, or do what they should not. On this machine alone: what starts an agent is the same."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm.conftest import eventually
from slurm.test_containers import BUBBLEWRAP, bubblewrap
from slurm.test_local import LocalRun

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., LocalRun]


@pytest.fixture
def local(tmp_path: Path) -> Make:
    """Makes runs of one node and one rank in bubblewrap."""
    if (
        shutil.which("bwrap") is None
        or subprocess.run(["bwrap", "--ro-bind", "/", "/", "true"], check=False).returncode
    ):
        pytest.skip("bubblewrap is missing, or may not make namespaces here")

    def make(
        name: str = "run", *, command: list[str] | None = None, start: list[str] | None = None, **own: Any
    ) -> LocalRun:
        container = bubblewrap(**({"command": start} if start else {}), **own)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return LocalRun(
            path, nodes=1, nproc_per_node=1, working_directory=str(tmp_path), container=container,
            command=command or ["true"],
            fault_tolerance={"num_job_retries_on_failure": 0, "launch_timeout_s": 30.0, "preload": False},
        )  # fmt: skip

    return make


def ended(run: LocalRun) -> str:
    """The reason of its verdict."""
    run.submit()
    events = lambda: [each for each in run.folder.journal().read() if each.event == "verdict"]  # noqa: E731
    eventually(events, 60, run.story)
    return str(events()[0].details["reason"])


ODD = ["a b", "a:b", "a,b", "a'b", "a{target}b", "-a", "$HOME"]


def test_paths_with_odd_names_are_mounted(local: Make, tmp_path: Path) -> None:
    mounts = []
    for name in ODD:
        (data := tmp_path / "data" / name).mkdir(parents=True)
        (data / "found").write_text(name)
        mounts += [{"source": str(data), "target": f"/tmp/in/{name}"}, {"source": str(data), "read_only": True}]
    look = f"""
        cd /tmp/in && cat ./*/found
        cd "{tmp_path}/data" && for each in *; do echo >> "./$each/found" && exit 3; done
        cd /tmp/in && for each in *; do echo inside > "./$each/found" || exit 4; done"""
    run = local("a b,c:d/run", command=["sh", "-c", look], mounts=mounts)
    run.submit()
    run.wait_until_done()
    (output,) = run.folder.attempts.glob("*/rank-0.log")
    assert all(name in output.read_text() for name in ODD)
    assert {(tmp_path / "data" / name / "found").read_text() for name in ODD} == {"inside\n"}


@pytest.mark.parametrize(
    ("container", "words"),
    [
        pytest.param({"start": ["/no/such/runtime", "{mounts}"]}, "cannot be started on", id="no runtime",
                     marks=pytest.mark.soak),
        pytest.param({"start": [*BUBBLEWRAP[:5], "{image}", "/", *BUBBLEWRAP[7:]], "image": "/no/such/image"},
                     "/no/such/image", id="no image"),
        pytest.param({"mounts": ["/no/such/data"]}, "/no/such/data", id="no data", marks=pytest.mark.soak),
        pytest.param({"start": ["sh", "-c", "exit 0", "{mounts}"]}, "[0] before they had started", id="ends at once"),
        pytest.param({"start": ["sh", "-c", "exit 9", "{mounts}"]}, "sh: ended with exit code 9", id="fails at once",
                     marks=pytest.mark.soak),
        pytest.param({"python": "/no/such/python"}, "/no/such/python", id="no python"),
        pytest.param({"python": "/bin/true"}, "[0] before they had started", id="no python at all",
                     marks=pytest.mark.soak),
        pytest.param({"start": [word for word in BUBBLEWRAP if word not in ("--proc", "/proc")]},
                     "/proc shows those of the node", id="the node's /proc"),
    ],
)  # fmt: skip
def test_a_container_that_cannot_be_says_why(local: Make, container: dict[str, Any], words: str) -> None:
    run = local(**container)
    reason = ended(run)
    assert words in reason, run.story()
    assert "container" in reason or "before they had started" in reason


@pytest.mark.parametrize(
    ("prelude", "words"),
    [
        pytest.param(
            "import sys; sys.version_info = (3, 9, 2)", "slurmft needs Python 3.11 or newer", id="an old Python"
        ),
        pytest.param(
            "import importlib.util as u; u.find_spec = lambda name: None",
            "there is no torch",
            id="no torch",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "import sys; sys.modules['slurmft'] = None",
            "slurmft cannot be imported",
            id="no slurmft",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_python_that_will_not_do_is_named(local: Make, tmp_path: Path, prelude: str, words: str) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!{sys.executable}\nimport sys\nsys.argv = sys.argv[2:]\n{prelude}\nsys.argv[0:0] = ["-c"]\n'
                      "code = sys.argv.pop(1)\nexec(code)\n")  # fmt: skip
    python.chmod(0o755)
    run = local(python=str(python))
    reason = ended(run)
    assert "container bwrap: " in reason and words in reason, run.story()


def test_what_the_container_cannot_do_is_in_the_journal(local: Make) -> None:
    little = [*BUBBLEWRAP[:-3], "--tmpfs", "/sys", "{mounts}", "--chdir", "{workdir}"]
    silent = ["sh", "-c", 'exec "$@" < /dev/null', "sh"]
    run = local(start=[*silent, *little])
    run.submit()
    run.wait_until_done()
    limits = [each.details["reason"] for each in run.folder.journal().read() if each.event == "container limit"]
    assert [words.split(":")[0] for words in limits] == ["/sys is not there", "it does not pass standard input on"]


def test_srun_alone_can_start_some_of_them(local: Make) -> None:
    run = local()
    run.config.write_text(run.config.read_text().replace("runtime: command", "runtime: pyxis\n  image: some#image"))
    text = run.config.read_text()
    kept = text[: text.index("  bind")] if "  bind" in text else text
    run.config.write_text(kept)
    assert "container" in run.submit(check=False).stderr + run.story()


def test_nothing_of_an_ended_run_is_left(local: Make) -> None:
    """Its memory is the node's, so that a tool of the node's can find what a killed container leaves."""
    run = local(command=["sh", "-c", 'echo "$SLURMFT_MEMORY_DIR"'])
    run.submit()
    run.wait_until_done()
    (output,) = run.folder.attempts.glob("*/rank-0.log")
    memory = Path(output.read_text().strip())
    assert memory.is_relative_to("/dev/shm")
    eventually(lambda: not memory.parent.exists(), 30, "shared memory is left")
    # the run is complete before its agents, and what they are in, have ended
    look = ["pgrep", "-af", f"bwrap.*{run.folder.path}"]
    eventually(lambda: subprocess.run(look, capture_output=True, check=False).stdout == b"", 30, run.story)
