"""The options and words that start an agent in a container, for each runtime."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from of_each import of_each

import slurmft
from slurmft.policy.container import (
    LOOK,
    Container,
    Mount,
    all_mounts,
    command_prefix,
    problem_of,
    srun_options,
    starting,
    with_mounts,
)

RUN, DATA = Mount(source="/scratch/run", target="/scratch/run"), Mount(source="/data", target="/in", read_only=True)
BWRAP = ("bwrap", "--ro-bind", "{image}", "/", "{mounts}", "--chdir", "{workdir}")


def container(runtime: str, **changes: Any) -> Container:
    plain = Container(
        runtime=runtime, image="/images/torch", mounts=(RUN, DATA), workdir="/work", python="/opt/bin/python",
        command=BWRAP if runtime == "command" else (),
        bind=("--bind", "{source}", "{target}"), bind_read_only=("--ro-bind", "{source}", "{target}"),
    )  # fmt: skip
    return replace(plain, **changes)


def at(*paths: str) -> tuple[Mount, ...]:
    return tuple(Mount(source=path, target=path) for path in paths)


@pytest.mark.parametrize(
    ("own", "needed", "wished", "expected"),
    [
        pytest.param((), ["/run/a"], [], at("/run/a"), id="nothing of the user's"),
        pytest.param((), ["/run/a", "/run/a/checkpoints"], [], at("/run/a"), id="one is in the other"),
        pytest.param((), ["/a/b/c", "/a"], [], at("/a", "/a/b/c"), id="outer ones come first"),
        pytest.param(at("/scratch"), ["/scratch/run"], [], at("/scratch"), id="it is in a mount of the user's"),
        pytest.param(at("/scratch"), ["/scratching"], [], at("/scratch", "/scratching"), id="it only begins alike"),
        pytest.param((Mount(source="/s", target="/s", read_only=True),), ["/s/run"], [],
                     (Mount(source="/s", target="/s", read_only=True), *at("/s/run")), id="in a read-only one"),
        pytest.param((Mount(source="/other", target="/s"),), ["/s/run"], [],
                     (Mount(source="/other", target="/s"), *at("/s/run")), id="below another folder"),
        pytest.param((Mount(source="/mine", target="/home/me"),), [], ["/home/me"],
                     (Mount(source="/mine", target="/home/me"),), id="another working directory"),
        pytest.param((), [], ["/home/me"], at("/home/me"), id="the working directory"),
        pytest.param(at("/"), ["/a", "/dev/shm"], ["/b"], at("/"), id="all of the node"),
    ],
)  # fmt: skip
def test_what_is_mounted(own: tuple[Mount, ...], needed: list[str], wished: list[str], expected: tuple[Mount, ...]):
    assert all_mounts(own, needed, wished) == expected


@pytest.mark.parametrize(
    ("own", "words"),
    [
        pytest.param(
            [Mount(source="/other", target="/s/run")], "hides what the run needs in /s/run", id="in its place"
        ),
        pytest.param([Mount(source="/o", target="/s/run/checkpoints")], "hides what the run needs", id="in it"),
        pytest.param([Mount(source="/s/run", target="/s/run", read_only=True)], "mounted read-only", id="read-only"),
        pytest.param([*at("/d"), Mount(source="/e", target="/d")], "two of them are seen at /d", id="two at one place"),
    ],
)
def test_mounts_that_take_from_the_run_what_it_needs(own: list[Mount], words: str):
    with pytest.raises(ValueError, match=words):
        all_mounts(own, ["/s/run"])


@pytest.mark.parametrize(
    ("asked", "options", "words"),
    [
        pytest.param(
            container("pyxis"),
            ["--container-image=/images/torch", "--container-mounts=/scratch/run:/scratch/run,/data:/in:ro",
             "--container-workdir=/work", "--no-container-mount-home"],
            [], id="pyxis"),
        pytest.param(
            container("pyxis", image="nvcr.io#nvidia/pytorch:25.01-py3", mounts=(RUN,),
                      options=("--container-mount-home", "--container-writable")),
            ["--container-image=nvcr.io#nvidia/pytorch:25.01-py3", "--container-mounts=/scratch/run:/scratch/run",
             "--container-workdir=/work", "--container-mount-home", "--container-writable"],
            [], id="pyxis with its home"),
        pytest.param(
            container("apptainer", options=("--nv",)), [],
            ["apptainer", "exec", "--bind", "/scratch/run:/scratch/run", "--bind", "/data:/in:ro", "--pwd", "/work",
             "--nv", "/images/torch"], id="apptainer"),
        pytest.param(container("oci"), ["--container=/images/torch"], [], id="oci"),
        pytest.param(
            container("command"), [],
            ["bwrap", "--ro-bind", "/images/torch", "/", "--bind", "/scratch/run", "/scratch/run",
             "--ro-bind", "/data", "/in", "--chdir", "/work"], id="command"),
        pytest.param(
            container("command", command=("podman", "run", "{mounts}", "{image}"), bind=("--volume={source}:{target}",),
                      bind_read_only=("--volume={source}:{target}:ro",)), [],
            ["podman", "run", "--volume=/scratch/run:/scratch/run", "--volume=/data:/in:ro", "/images/torch"],
            id="command with one word for each mount"),
        pytest.param(
            container("command", mounts=(Mount(source="/a/{target} b", target="/a/{image}"),)), [],
            ["bwrap", "--ro-bind", "/images/torch", "/", "--bind", "/a/{target} b", "/a/{image}", "--chdir", "/work"],
            id="paths that look like placeholders"),
    ],
)  # fmt: skip
def test_the_options_of_srun_and_the_words_in_front(asked: Container, options: list[str], words: list[str]):
    assert problem_of(asked) == ""
    assert (srun_options(asked), command_prefix(asked)) == (options, words)


PODMAN = {"bind": ("-v={source}:{target}",), "bind_read_only": ("-v={source}:{target}:ro",)}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        pytest.param(container("pyxis", mounts=at("/a,b")), "takes ',' in '/a,b'", id="pyxis, a comma"),
        pytest.param(container("pyxis", mounts=at("/a:b")), "takes ':' in '/a:b'", id="pyxis, a colon"),
        pytest.param(container("apptainer", mounts=at("/a:b")), "apptainer takes ':'", id="apptainer, a colon"),
        pytest.param(container("apptainer", mounts=at("/a,b")), "apptainer takes ','", id="apptainer, a comma"),
        pytest.param(container("pyxis", options=("--container-mounts=/x",)), "is set by slurmft", id="pyxis' own"),
        pytest.param(container("oci", options=("--container=/x",)), "is set by slurmft", id="Slurm's own"),
        pytest.param(container("command", command=("bwrap",)), "must be {mounts}", id="no mounts"),
        pytest.param(container("command", command=("x", "-v={mounts}", "{mounts}")), "word of its own", id="in a word"),
        pytest.param(container("command", command=("x", "{mounts}", "{imge}")), "holds {imge}", id="unknown"),
        pytest.param(container("command", image=""), "needs container.image", id="no image"),
        pytest.param(container("command", bind=("-v", "{source}")), "bind: {target} is missing", id="no target"),
        pytest.param(container("command", mounts=at("/a:b"), **PODMAN), "separates the paths", id="podman, a colon"),
    ],
)
def test_settings_that_the_runtime_cannot_be_given(asked: Container, words: str):
    assert words in problem_of(asked)


@pytest.mark.parametrize(
    "path", ["/a b", "/a'b", '/a"b', "/$(x)", "/ä"], ids=["blank", "quote", "quotes", "shell", "umlaut"]
)
@pytest.mark.parametrize("runtime", ["pyxis", "apptainer", "oci", "command"])
def test_other_paths_are_given_as_they_are(runtime: str, path: str):
    asked = container(runtime, mounts=at(path))
    assert problem_of(asked) == ""
    if runtime != "oci":
        assert any(path in word for word in (*srun_options(asked), *command_prefix(asked)))


@pytest.mark.parametrize("path", ["/a:b", "/a,b"])
def test_a_command_with_words_for_themselves_takes_any_path(path: str):
    asked = container("command", mounts=at(path))
    assert problem_of(asked) == "" and command_prefix(asked)[4:7] == ["--bind", path, path]


def test_the_bundle_of_a_run_has_its_mounts():
    spec = {
        "ociVersion": "1.0.0", "root": {"path": "rootfs", "readonly": True}, "process": {"args": ["sh"], "cwd": "/"},
        "mounts": [{"destination": "/proc", "type": "proc"}, {"destination": "/in/", "type": "tmpfs"}],
    }  # fmt: skip
    made, root = with_mounts(spec, container("oci"))
    assert (root, made["root"]) == ("/images/torch/rootfs", {"path": "rootfs", "readonly": True})
    assert made["process"] == {"args": ["sh"], "cwd": "/work", "terminal": False}
    assert [(each["destination"], each.get("source"), each.get("options")) for each in made["mounts"]] == [
        ("/proc", None, None),
        ("/scratch/run", "/scratch/run", ["rbind", "rw"]),
        ("/in", "/data", ["rbind", "ro"]),
    ]
    assert spec["root"] == {"path": "rootfs", "readonly": True}, "the user's own is left alone"


def test_a_root_elsewhere_stays_there():
    assert with_mounts({"root": {"path": "/r"}}, container("oci"))[1] == "/r"


@of_each(spec=[{}, [], {"root": []}, {"root": {"path": 1}}, {"root": {"path": "r"}, "mounts": [1]},
                                  {"root": {"path": "r"}, "process": [1]}])  # fmt: skip
def test_a_damaged_bundle_is_refused(spec: Any):
    with pytest.raises(ValueError, match=r"root\.path|mounts|process|not an object"):
        with_mounts(spec, container("oci"))


def looked(*arguments: str, version: str = slurmft.__version__, prelude: str = "", **options: Any) -> Any:
    words = starting(container("oci"), version=version, arguments=arguments)
    code = f"{prelude}\n{LOOK}" if prelude else LOOK
    return subprocess.run(
        [sys.executable, "-c", code, *words[3:]], check=False, capture_output=True, text=True, timeout=60, **options
    )


def test_the_look_at_python_says_what_it_has_found():
    done = looked()
    assert (done.returncode, done.stderr) == (0, "")
    assert f", slurmft {slurmft.__version__}, torch " in done.stdout


def test_after_the_look_slurmft_is_run():
    assert looked("--version").stdout == f"slurmft, version {slurmft.__version__}\n"


@pytest.mark.parametrize(
    ("prelude", "version", "words"),
    [
        pytest.param("import sys; sys.version_info = (3, 9, 2)", "", "needs Python 3.11 or newer", id="an old Python"),
        pytest.param("import sys; sys.modules['slurmft'] = None", "", "slurmft cannot be imported", id="no slurmft"),
        pytest.param("", "0.0.9", "the supervisor outside is 0.0.9", id="another slurmft"),
        pytest.param("import importlib.util; importlib.util.find_spec = lambda name: None", "", "there is no torch",
                     id="no torch"),
        pytest.param("import importlib.metadata; importlib.metadata.version = lambda name: '2.5.1+cu'", "",
                     "needs torch 2.6 or newer, and it has 2.5.1+cu", id="an old torch"),
    ],
)  # fmt: skip
def test_a_python_that_will_not_do_is_named_with_its_container(prelude: str, version: str, words: str):
    done = looked("agent", version=version or slurmft.__version__, prelude=prelude)
    assert done.returncode == 1
    assert done.stderr.startswith("slurmft: container oci /images/torch: ") and words in done.stderr
    assert "Traceback" not in done.stderr


def test_what_lies_in_the_present_folder_is_not_taken_for_slurmft(tmp_path: Path):
    (tmp_path / "slurmft.py").write_text("raise SystemExit('wrong one')")
    assert looked(cwd=tmp_path).returncode == 0
