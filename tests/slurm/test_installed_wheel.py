"""The wheel, installed as docs/deployment.md and the first-run page say, by root, and used by two ordinary users."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs_pages import REPOSITORY, Block, blocks

from slurm.conftest import eventually
from slurmft.lab.cluster import Lab

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]

TRAINER = """
import pathlib, sys, time
print("trains with", sys.executable, flush=True)
while not pathlib.Path("enough").exists():
    time.sleep(0.2)
"""


def block(page: str, start: str) -> str:
    """The one block of a page's shell commands that begins so."""
    found: list[Block] = [b for b in blocks("bash") if b.page == page and b.text.startswith(start)]
    assert len(found) == 1, page
    return found[0].text


@dataclass
class Site:
    """An installation, its packages from the environment of these tests: nothing is downloaded."""

    folder: Path
    packages: Path

    @property
    def prefix(self) -> Path:
        return self.folder / "opt" / "slurmft"

    def words(self, text: str) -> str:
        """The page's words, with this machine's places; packages of a new environment are there already."""
        text = text.replace("/opt/slurmft", str(self.prefix))
        then = rf'\g<0>\necho {self.packages} > "$(echo \1/lib/python3*/site-packages)/packages.pth"'
        return "set -euo pipefail\n" + re.sub(r"^python3 -m venv (\S+).*$", then, text, flags=re.MULTILINE)

    def environment(self) -> dict[str, str]:
        return {"PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1",
                "PYTHON3": sys.executable}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, lab: Lab) -> Iterator[Site]:
    folder = Path("/tmp") / f"slurmft-site-{os.getpid()}"
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"(__editable__)?_*slurmft|_*pip\b|.*\.pth$", each.name):
            (packages / each.name).symlink_to(each)
    site = Site(folder, packages)
    (folder / "opt").mkdir()
    bare = {"PATH": f"{Path(sys.base_prefix) / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": str(folder)}
    variables = {"RELEASE": _commit(folder), "REPOSITORY": str(folder / "origin"), **bare, **site.environment()}
    clone, *rest = site.words(block("docs/deployment.md", "git clone")).split("make -C", 1)
    _run(clone, folder, variables)
    (folder / "slurmft" / ".venv").symlink_to(sys.prefix)  # what it builds with is installed
    _run("set -euo pipefail\nmake -C" + rest[0], folder, variables)
    yield site
    shutil.rmtree(folder)


def _commit(folder: Path) -> str:
    """A repository of the files as they are now, with one commit, on a branch of the name that is returned."""
    origin = folder / "origin"
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=REPOSITORY, text=True)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(REPOSITORY / name):
            (origin / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, origin / name, follow_symlinks=False)
    who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    for words in (["init", "-q", "-b", "release"], ["add", "-A"], [*who, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *words], cwd=origin, check=True)
    return "release"


def _run(text: str, folder: Path, variables: dict[str, str]) -> None:
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.long
def test_root_sets_up_the_site(site: Site, lab: Lab) -> None:
    shown = lab.run_as_admin([str(site.prefix / "bin/slurmft"), "hooks", "show"]).stdout
    named = set(re.findall(rf"{site.prefix}/bin/[\w-]+", shown))
    assert {Path(each).name for each in named} >= {"slurmft-healthcheck", "slurmft-epilog", "slurmft-prolog"}
    assert all(os.access(each, os.X_OK) for each in named)
    done = lab.run_as_admin([str(site.prefix / "bin/slurmft-healthcheck")])
    assert "nothing is done" not in done.stderr and "failed" not in done.stderr
    sweep = lab.run_as_admin([str(site.prefix / "bin/slurmft-sweep"), "--dry-run"], check=False)
    assert sweep.returncode in (0, 1), sweep.stderr
    for name in ("health.yaml", "slurmft.rules.yml", "run.json", "cluster.json", "train.sh"):
        printed = lab.run_as_admin([str(site.prefix / "bin/slurmft"), "examples", name]).stdout
        origin = next(path for path in (REPOSITORY / "configs", REPOSITORY / "sbatch") for path in path.rglob(name))
        assert printed == origin.read_text(), name


def test_a_user_trains_with_the_installation_and_an_own_python(site: Site, lab: Lab) -> None:
    (lab.home / "own").mkdir(exist_ok=True)
    os.chown(lab.home / "own", lab.uid, lab.gid)
    script = f"""
set -euo pipefail
cd ~/own
rm -rf enough runs train.yaml
{Path(sys.base_prefix) / "bin/python3"} -m venv mine
cat > train.py <<'END'
{TRAINER}
END
export PATH=$HOME/own/mine/bin:{site.prefix}/bin:$PATH
slurmft --version
slurmft init --yes --partition low --time 10 train.py
slurmft submit train.yaml --dry-run
slurmft submit train.yaml
"""
    said = lab.run(["bash", "-c", script], timeout=120)
    assert "submitted train as job" in said.stdout
    log = lab.home / "own/runs/train/attempts"
    eventually(lambda: any("trains with" in each.read_text() for each in log.glob("*/rank-0.log")), 60, "training")
    text = "".join(each.read_text() for each in log.glob("*/rank-0.log"))
    assert f"trains with {lab.home}/own/mine/bin/python" in text
    (lab.home / "own/enough").touch()
    eventually((lab.home / "own/runs/train/done.json").exists, 60, "the end")


def test_another_user_installs_the_wheel_of_the_site(site: Site, lab: Lab) -> None:
    second = lab.second_user()
    wheel = f"{site.prefix}/wheels/slurmft-*.whl"
    text = site.words(block("docs/how-to/first-run.md", "make dist")).replace("dist/slurmft-*.whl", wheel)
    text = re.sub(r"^make dist.*\n", "", text, flags=re.MULTILINE)
    variables = [f"{key}={value}" for key, value in site.environment().items()]
    path = f"PATH={Path(sys.base_prefix) / 'bin'}:/usr/bin:/bin"
    page = (
        text
        + "slurmft --version\nslurmft examples quickstart.yaml > quickstart.yaml\n"
        + (
            "slurmft submit quickstart.yaml --dry-run --cluster local\n"
            "slurmft doctor quickstart.yaml || [[ $? == 1 ]]\n"
        )
    )
    done = lab.run_as(second, ["env", *variables, path, "bash", "-c", page], timeout=180, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    home = lab.folder / "home2"
    started = rf"{home}/slurmft/bin/python\S* -P -u -m slurmft run {home}/runs/quickstart/config.yaml"
    assert re.search(started, done.stdout), done.stdout


def test_a_login_node_needs_little(site: Site) -> None:
    """At most 40 MB beside Python: what the wheel asks for without an extra."""
    from importlib.metadata import requires

    waiting, seen, total = ["slurmft"], set[str](), 0
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        needs = [line for line in requires(name) or [] if "extra ==" not in line]
        waiting += [match[0] for line in needs if _is_for_us(line) and (match := re.match(r"[\w.-]+", line))]
        total += sum(path.stat().st_size for path in _files_of(name))
    assert importlib.util.find_spec("numpy") is None or "numpy" not in seen, sorted(seen)
    assert total < 40e6, (total, sorted(seen))


def _is_for_us(line: str) -> bool:
    from packaging.requirements import Requirement

    marker = Requirement(line).marker
    return marker is None or marker.evaluate({"extra": ""})


def _files_of(name: str) -> Iterator[Path]:
    from importlib.metadata import files

    if name == "slurmft":
        yield from (path for path in (REPOSITORY / "slurmft").rglob("*.py"))
        return
    for each in files(name) or []:
        path = Path(str(each.locate()))
        if path.is_file():
            yield path
