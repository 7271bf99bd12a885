"""Which mounts make private paths readable; computed from real folders, nothing is mounted here."""

import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurmft
from slurmft.lab.members import compile_sources, needed_paths, paths_to_expose


@pytest.fixture
def root() -> Iterator[Path]:
    """Not tmp_path: its own parents are private, which is the very thing under test."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        root.chmod(0o755)
        yield root


def folder(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


def plan(*paths: Path, **options) -> list[tuple[str, str]]:
    return [(mount.kind, mount.target) for mount in paths_to_expose(paths, **options)]


def test_an_open_path_needs_nothing(root):
    assert plan(folder(root / "a/b")) == []


def test_a_path_that_does_not_exist_needs_nothing(root):
    assert plan(root / "missing/b") == []


def test_a_private_ancestor_is_covered_and_only_the_path_comes_back(root):
    path = folder(root / "private/secret/python")
    folder(root / "private", 0o700)
    assert plan(path) == [("tmpfs", f"{root}/private"), ("bind", str(path))]


def test_two_paths_below_one_private_folder_share_its_cover(root):
    paths = [folder(root / "private/a"), folder(root / "private/b")]
    folder(root / "private", 0o700)
    assert plan(*paths) == [("tmpfs", f"{root}/private"), *(("bind", str(path)) for path in paths)]


def test_a_path_inside_an_exposed_one_needs_nothing_more(root):
    outer, inner = folder(root / "private/src"), folder(root / "private/src/.venv")
    folder(root / "private", 0o700)
    assert plan(inner, outer) == [("tmpfs", f"{root}/private"), ("bind", str(outer))]


def test_a_private_folder_itself_is_replaced_and_its_children_bound(root):
    checkout = folder(root / "clone")
    folder(checkout / "pkg")
    (checkout / "setup.cfg").touch()
    (checkout / "dangling").symlink_to("nowhere")
    folder(checkout, 0o700)
    assert plan(checkout) == [
        ("tmpfs", str(checkout)),
        ("bind", str(checkout / "pkg")),
        ("bind", str(checkout / "setup.cfg")),
    ]


def test_a_private_folder_below_an_exposed_one_is_opened_too(root):
    venv = folder(root / "src/.venv")
    folder(venv / "bin")
    folder(venv, 0o700)
    assert plan(root / "src", venv) == [("tmpfs", str(venv)), ("bind", str(venv / "bin"))]


def test_a_link_into_a_private_folder_exposes_where_it_leads(root):
    interpreter = folder(root / "home/pyenv")
    folder(root / "home", 0o700)
    (root / "link").symlink_to(interpreter)
    assert plan(root / "link") == [("tmpfs", f"{root}/home"), ("bind", str(interpreter))]


def test_a_link_inside_a_private_folder_comes_back_with_what_it_leads_to(root):
    target = folder(root / "home/versions/3.11.7")
    (root / "home/versions/3.11").symlink_to("3.11.7")
    folder(root / "home", 0o700)
    assert plan(root / "home/versions/3.11") == [
        ("tmpfs", f"{root}/home"),
        ("bind", f"{root}/home/versions/3.11"),
        ("bind", str(target)),
    ]


def test_a_loop_of_links_ends(root):
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    assert plan(root / "a") == []


def test_exposed_paths_are_read_only_unless_named_writable(root):
    one, two = folder(root / "private/one"), folder(root / "private/two")
    folder(root / "private", 0o700)
    mounts = paths_to_expose([one], writable=[two])
    assert {mount.target: mount.read_only for mount in mounts if mount.kind == "bind"} == {
        str(one): True,
        str(two): False,
    }


def test_what_another_mount_hides_is_bound_back(root):
    path = folder(root / "shm/checkout")
    assert plan(path, covered=[root / "shm"]) == [("bind", str(path))]


def test_this_interpreter_and_this_source_are_needed():
    import sys

    import slurmft

    needed = needed_paths()
    assert Path(sys.base_prefix) in needed
    assert any(Path(slurmft.__file__).is_relative_to(path) for path in needed)


def test_sources_are_compiled_for_those_who_cannot_write_beside_them(tmp_path, monkeypatch):
    source = folder(tmp_path / "slurmft") / "__init__.py"
    source.write_text("x = 1\n")
    monkeypatch.setattr(slurmft, "__file__", str(source))
    compile_sources()
    assert Path(importlib.util.cache_from_source(str(source))).exists()
