"""The shared list: whole, versioned, and nothing lost, however many write and whoever is killed."""

import errno
import json
import math
import os
import random
import stat
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import odd_files
import pytest
from another_user import OTHER, needs_root
from drawn import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from of_each import of_each

from slurmft.errors import NewerFormat, StorageError, StorageUnavailable
from slurmft.policy.suspicion import (
    WEIGHTS,
    ManualEntry,
    Observation,
    Rules,
    State,
    standing,
    suspect_gpus,
    worth_keeping,
)
from slurmft.policy.verdict import Kind
from slurmft.storage import exclusions
from slurmft.storage.exclusions import MERGE_FROM, ExclusionList, Exclusions
from slurmft.system import files

NOW = 1_800_000_000.0
DAY = 86_400.0
RULES = Rules()


def seen(node: str = "n1", kind: Kind = Kind.CRASH, *, id: str, at: float = NOW - 60, **more: str) -> Observation:
    return Observation(kind=kind, node=node, weight=WEIGHTS[kind], at=at, id=id, **more)


def by_hand(node: str = "n1", **changes: object) -> ManualEntry:
    return ManualEntry(**{"node": node, "reason": "fan", "who": "me", "at": NOW, "until": NOW + DAY} | changes)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state" / "exclusions-c.json"


@pytest.fixture
def shared(path) -> ExclusionList:
    return ExclusionList(path, clock=lambda: NOW)


def ids(found: Exclusions) -> set[str]:
    return {each.id for each in found.observations}


def merge(shared: ExclusionList) -> None:
    shared.exclude(by_hand("merging"))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_list_that_is_not_there_is_empty_and_reading_makes_none(shared, path):
    found = shared.read()
    assert (found.observations, found.manual, found.revision) == ((), (), 0)
    assert not path.parent.exists()


def test_what_was_observed_is_read_back(shared, path):
    one = Observation(kind=Kind.HANG, node="n1'\"ü", weight=0.25, at=NOW - 1.5, id="a|b", gpu="GPU-1",
                      source="supervisor", run="r", job="7_1", evidence="/a path/x\n\u2028\udcff")  # fmt: skip
    shared.observe([one, seen(id="2")])
    assert set(ExclusionList(path).read().observations) == {one, seen(id="2")}
    merge(shared)
    found = ExclusionList(path).read()
    assert set(found.observations) == {one, seen(id="2")}
    assert all(isinstance(each.kind, Kind) for each in found.observations)
    assert not any((path.parent / f"{path.name}.new").iterdir()), "merged"


def test_the_same_observation_counts_once(shared, path):
    shared.observe([seen(id="1"), seen(id="1")])
    shared.observe([seen(id="1")])
    ExclusionList(path).observe([seen(id="1")])
    merge(shared)
    ExclusionList(path).observe([seen(id="1"), seen(id="2")])
    assert sorted(each.id for each in shared.read().observations) == ["1", "2"]


def test_handing_in_the_same_again_writes_nothing(shared, path):
    shared.observe([seen(id="1")])
    before = sorted(path.parent.rglob("*"))
    shared.observe([seen(id="1")])
    shared.observe([])
    assert sorted(path.parent.rglob("*")) == before


def test_many_small_files_are_merged_by_whoever_finds_them(shared, path):
    for number in range(MERGE_FROM - 1):
        shared.observe([seen(id=str(number))])
    assert not path.exists()
    shared.observe([seen(id="last")])
    assert len(shared.read().observations) == MERGE_FROM
    assert path.exists()
    assert not any((path.parent / f"{path.name}.new").iterdir())


def test_exclusions_by_hand_are_kept_by_node_and_person(shared):
    shared.exclude(by_hand(reason="old"), by_hand("n2"))
    shared.exclude(by_hand(reason="new", until=None), by_hand(who="you"))
    assert {(each.node, each.who, each.reason, each.until) for each in shared.read().manual} == {
        ("n1", "me", "new", None), ("n1", "you", "fan", NOW + DAY), ("n2", "me", "fan", NOW + DAY),
    }  # fmt: skip


def test_removing_lifts_everything_and_later_evidence_counts_anew(shared):
    ahead = NOW - 0.0  # the newest that is stored: times from the future are cut
    shared.observe([seen(kind=Kind.RERUN_PERSISTENT, id="1", at=NOW + 5), seen("n2", Kind.RERUN_PERSISTENT, id="2")])
    shared.exclude(by_hand())
    assert shared.remove(["n1", "stranger"], "me@here") == ["n1"]
    found = shared.read()
    states = standing(found.observations, found.manual, ahead, RULES)
    assert {node: each.state for node, each in states.items()} == {"n1": State.FREE, "n2": State.EXCLUDED}
    forgiving = [each for each in found.observations if each.kind is Kind.FORGIVEN]
    assert [(each.node, each.source) for each in forgiving] == [("n1", "me@here")]
    later = ExclusionList(shared.path, clock=lambda: NOW + 60)
    later.observe([seen(kind=Kind.RERUN_PERSISTENT, id="3", at=NOW + 30)])
    assert standing(later.read().observations, [], NOW + 60, RULES)["n1"].state is State.EXCLUDED


def test_what_has_faded_is_forgotten(shared, path):
    shared.observe([seen(id="old", at=NOW - 400 * DAY), seen(kind=Kind.RERUN_PERSISTENT, id="new")])
    shared.exclude(by_hand("n2", until=NOW - 1), by_hand("n3"))
    swept = shared.gc(NOW, RULES)
    assert (swept.observations, swept.manual, swept.kept) == (1, 1, 2)
    found = shared.read()
    assert (ids(found), [each.node for each in found.manual]) == ({"new"}, ["n3"])
    assert ExclusionList(path.parent / "none.json").gc(NOW, RULES).kept == 0
    assert not (path.parent / "none.json").exists()


def test_left_overs_of_the_killed_are_removed_when_they_are_old(shared, path):
    shared.observe([seen(id="1")])
    new = path.parent / f"{path.name}.new"
    strays = [new / ".x.json.abc.tmp", new / "torn.json", path.parent / f".{path.name}.abc.tmp"]
    for stray in strays:
        stray.write_text("{")
        os.utime(stray, (NOW - 60, NOW - 60))
    shared.gc(NOW, RULES)
    assert [stray.exists() for stray in strays] == [True] * 3
    for stray in strays:
        os.utime(stray, (NOW - 2 * DAY, NOW - 2 * DAY))
    assert shared.gc(NOW, RULES).files == 3
    assert ids(shared.read()) == {"1"}


def test_a_long_list_is_tidied_by_who_passes_by(shared, path):
    many = [seen(f"n{n}", id=str(n), at=NOW - 400 * DAY) for n in range(exclusions.TIDY_FROM - 2)]
    shared.observe([*many, seen(kind=Kind.RERUN_PERSISTENT, id="new")])
    merge(shared)
    shared.tidy(shared.read(), NOW, RULES)
    assert len(shared.read().observations) == exclusions.TIDY_FROM - 1, "not long"
    shared.observe([seen("old", id="one more", at=NOW - 400 * DAY)])
    lock = path.with_name(f"{path.name}.lock")
    lock.touch()
    shared.tidy(shared.read(), NOW, RULES)
    assert len(shared.read().observations) == exclusions.TIDY_FROM, "somebody else writes"
    lock.unlink()
    shared.tidy(shared.read(), NOW, RULES)
    assert ids(shared.read()) == {"new"}
    assert len(shared.read().manual) == 1


def test_a_link_to_the_list_stays_one(shared, path, tmp_path):
    shared.exclude(by_hand("n1"))
    link = tmp_path / "link.json"
    link.symlink_to(path)
    ExclusionList(link).exclude(by_hand("n2"))
    assert link.is_symlink()
    assert {each.node for each in shared.read().manual} == {"n1", "n2"}


def damage(content: bytes) -> list[bytes]:
    return [b"", content[:-1], content[: len(content) // 2], content.replace(b"crash", b"crush"), b"\x00" * 99, b"{",
            b'{"format"', b'{"format": 1}', content + b"x", content.replace(b"\n", b" ")]  # fmt: skip


@pytest.mark.parametrize("which", range(10))
def test_a_damaged_list_is_ignored_and_set_aside_by_the_next_change(shared, path, which, caplog):
    shared.observe([seen(id="1")])
    merge(shared)
    whole = path.read_bytes()
    path.write_bytes(damage(whole)[which])
    shared.observe([seen(id="meanwhile")])
    found = shared.read()
    assert found.damage.startswith(f"{path} is damaged: ")
    assert (ids(found), found.manual) == ({"meanwhile"}, ())
    assert path.read_bytes() == damage(whole)[which], "a reader changes nothing"
    shared.exclude(by_hand("n9"))
    (aside,) = path.parent.glob(f"{path.name}.damaged-*")
    assert aside.read_bytes() == damage(whole)[which], "evidence of what went wrong stays"
    assert f"it is kept as {aside}" in caplog.text
    found = shared.read()
    assert found.damage == ""
    assert (ids(found), [each.node for each in found.manual]) == ({"meanwhile"}, ["n9"])
    assert not path.with_name(f"{path.name}.lock").exists()


@pytest.mark.parametrize(
    "content", [b"ssh-ed25519 AAAA me\n", b"export A=1\n", b"{}", b"null", b"[" * 9999, b"\x7fELF"]
)
def test_what_is_not_a_list_of_ours_is_never_replaced(shared, path, content):
    shared.observe([seen(id="1")])
    path.write_bytes(content)
    assert ids(shared.read()) == {"1"}, "what cannot be believed says nothing"
    for change in (lambda: shared.exclude(by_hand()), lambda: shared.gc(NOW, Rules())):
        with pytest.raises(StorageError, match="is no exclusion list of slurmft"):
            change()
    shared.observe([seen(id="2")])
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir() if each.name != f"{path.name}.new"] == [path.name]


def every_use(shared: ExclusionList) -> None:
    for use in (shared.read, lambda: shared.observe([seen(id="9")]), lambda: shared.exclude(by_hand()),
                lambda: shared.remove("n1", "me"), lambda: shared.gc(NOW, Rules())):  # fmt: skip
        with pytest.raises(StorageError, match="symbolic link"):
            use()


@pytest.mark.parametrize("mode", [0o770, 0o3770, 0o777, 0o1777])
@pytest.mark.parametrize("which", ["list.json", "folder", "list.json.new"])
@needs_root
def test_a_link_that_another_user_made_is_not_followed(tmp_path, mode, which):
    home, group = tmp_path / "home", tmp_path / "group"
    home.mkdir()
    group.mkdir()
    group.chmod(mode)
    for name in ("keys", "list.json", "0.json", ".x.tmp"):
        (home / name).write_text("mine")
        os.utime(home / name, (0, 0))
    target = home / "keys" if which == "list.json" else home
    (group / which).symlink_to(target)
    os.lchown(group / which, OTHER, OTHER)
    path = group / "folder" / "list.json" if which == "folder" else group / "list.json"
    every_use(ExclusionList(path, mode=0o660))
    assert {each.name: each.read_text() for each in home.iterdir()} == dict.fromkeys(
        ("keys", "list.json", "0.json", ".x.tmp"), "mine"
    )


@needs_root
def test_a_link_of_our_own_counts_only_where_nobody_else_can_replace_it(shared, path, tmp_path):
    shared.exclude(by_hand("n1"))
    (group := tmp_path / "group").mkdir()
    (group / "list.json").symlink_to(path)
    for mode in (0o700, 0o1777, 0o755):
        group.chmod(mode)
        assert len(ExclusionList(group / "list.json").read().manual) == 1
    for mode in (0o770, 0o2770, 0o777):
        group.chmod(mode)
        every_use(ExclusionList(group / "list.json"))


def test_a_link_that_comes_while_the_list_is_in_use_is_not_followed(shared, path, tmp_path):
    shared.exclude(by_hand("n1"))
    (other := tmp_path / "other.json").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(other)
    with pytest.raises(StorageError):
        shared.gc(NOW, Rules())
    assert path.is_symlink()


def test_a_damaged_list_is_set_aside_where_there_are_no_hard_links(shared, path, monkeypatch):
    shared.exclude(by_hand())
    path.write_bytes(b"{")
    monkeypatch.setattr(Path, "hardlink_to", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no")))
    shared.exclude(by_hand("n9"))
    (aside,) = path.parent.glob(f"{path.name}.damaged-*")
    assert aside.read_bytes() == b"{"
    assert [each.node for each in shared.read().manual] == ["n9"]


@pytest.mark.parametrize(
    "content",
    [b'{"format": 2, "crc": 1,\n"x": []}\n', b'{"observations": {}, "format": 2}'],
    ids=["our form", "another form"],
)
def test_a_newer_list_is_left_alone(shared, path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(NewerFormat, match="has format 2; this slurmft reads up to 1"):
        shared.read()
    with pytest.raises(NewerFormat):
        shared.remove("n1", "me")
    assert path.read_bytes() == content


def test_a_small_file_that_is_damaged_hides_no_other(shared, path, caplog):
    shared.observe([seen(id="1")])
    new = path.parent / f"{path.name}.new"
    rows = ['[["crash"]]', '[[1,2,3,4,5,6,7,8,9,10]]', '{"a": 1}', "[3]", "null", '["1234567890"]']  # fmt: skip
    for number, text in enumerate(["", "{", "[]", "3", *(f'{{"format": 1, "observations": {row}}}' for row in rows)]):
        (new / f"{number}.json").write_text(text)
    assert ids(shared.read()) == {"1"}
    merge(shared)
    assert ids(shared.read()) == {"1"}
    assert "cannot be read and is left out" in caplog.text
    (new / "newer.json").write_text('{"format": 2, "observations": []}')
    with pytest.raises(NewerFormat):
        shared.read()


def forge(path: Path, revision: object, manual: object, rows: object) -> None:
    """A list with a right checksum."""
    path.parent.mkdir(parents=True, exist_ok=True)
    forge_text(path, f'"revision": {json.dumps(revision)}, "manual": {json.dumps(manual)}', json.dumps(rows))


def forge_text(path: Path, head: str, rows: str) -> None:
    rest = f'{head}, "observations": [\n{rows[1:-1] if rows[0] == "[" else rows}\n]}}\n'.encode()
    path.write_bytes(b'{"format": 1, "crc": %d,\n' % zlib.crc32(rest) + rest)


ROW = list(seen(id="1"))
ENTRY = {"node": "n1", "reason": "fan", "who": "me", "at": NOW, "until": None}
DIGITS = 10**308
FORGED_ROWS = [
    ["crash", 7], {}, None, "1234567890", [ROW], ROW[:-1], [*ROW, ""], [*ROW[:2], True, *ROW[3:]],
    *([*ROW[:place], value, *ROW[place + 1 :]] for place in (0, 1, 4, 5, 8) for value in (1, None, [], {}, 1.5)),
    *([*ROW[:place], value, *ROW[place + 1 :]] for place in (2, 3)
      for value in (math.nan, math.inf, -math.inf, DIGITS, -DIGITS, 1e300, "1", None, [])),
    *([ROW[0], node, *ROW[2:]] for node in ("", "a,b", "n[1-9]", "a b", "n\n1", "n\x1b[2J", "n\ud800", "n" * 256)),
]  # fmt: skip
FORGED_ENTRIES = [
    1, None, [], "node", {}, {**ENTRY, "node": 1}, {**ENTRY, "node": ["n1"]}, {**ENTRY, "node": "a,b"},
    *({**ENTRY, name: value} for name in ("at", "until") for value in (math.nan, math.inf, DIGITS, "1", [], True)),
    {**ENTRY, "at": None}, {**ENTRY, "reason": 1}, {**ENTRY, "who": {}}, {**ENTRY, "who": None},
]  # fmt: skip


@of_each(row=FORGED_ROWS)
def test_a_forged_row_is_left_out_and_hides_no_other(tmp_path, row):
    path = tmp_path / "list.json"
    shared = ExclusionList(path, clock=lambda: NOW)
    forge(path, 3, [ENTRY], [row, list(seen(id="2"))])
    found = shared.read()
    assert (ids(found), len(found.manual), found.revision) == ({"2"}, 1, 3)
    assert "a row is not an observation" in found.damage
    shared.remove("n1", "me")
    assert len(list(path.parent.glob(f"{path.name}.damaged-*"))) == 1
    assert shared.read().damage == ""


@of_each(entry=FORGED_ENTRIES)
def test_a_forged_exclusion_by_hand_is_left_out_and_hides_no_other(shared, path, entry):
    forge(path, 3, [entry, ENTRY], [ROW])
    found = shared.read()
    assert (ids(found), [each.node for each in found.manual]) == ({"1"}, ["n1"])
    assert "an exclusion by hand is invalid" in found.damage


@pytest.mark.parametrize("revision", [None, "1", -1, 1.0, True, DIGITS, []])
def test_a_forged_revision_hides_nothing(shared, path, revision):
    forge(path, revision, [ENTRY], [ROW])
    found = shared.read()
    assert (ids(found), len(found.manual), found.revision) == ({"1"}, 1, 0)
    assert "its revision" in found.damage


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        ('"revision": 1, "manual": 5', "[]"),
        ('"revision": 1, "manual": ' + "[" * 5000, "[]"),
        ('"revision": ' + "9" * 5000 + ', "manual": []', "[]"),
        ('"revision": 1, "manual": []', "[" + "[" * 5000 + "]" * 5000 + "]"),
        ('"revision": 1, "manual": []', "9" * 5000),
        ('"revision": 1, "manual": []', "garbage"),
        ("", ""),
    ],
)
def test_a_list_that_no_parser_takes_is_ignored(shared, path, head, rows):
    path.parent.mkdir()
    forge_text(path, head, rows or "x")
    found = shared.read()
    assert found.observations == () and found.damage


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([DIGITS, -DIGITS, NOW, "n1"]),
    lambda inner: st.lists(inner, max_size=11) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)
ROWS = st.tuples(
    VALUES | st.sampled_from(list(Kind)), VALUES | st.just("n1"), VALUES | st.floats(), VALUES | st.just(NOW),
    VALUES | st.text(), *[VALUES | st.text()] * 5,
).map(list)  # fmt: skip
ENTRIES = st.fixed_dictionaries(
    {"node": VALUES | st.just("n1"), "reason": VALUES, "who": VALUES, "at": VALUES, "until": VALUES}
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(300))
@given(
    revision=VALUES | st.just(1), manual=VALUES | st.lists(ENTRIES | VALUES, max_size=4),
    rows=st.lists(ROWS | VALUES, max_size=4) | VALUES,
)  # fmt: skip
def test_any_list_with_a_right_checksum_is_read_or_ignored(path, revision, manual, rows):
    forge(path, revision, manual, rows)
    found = ExclusionList(path, clock=lambda: NOW).read()
    standings = standing(found.observations, found.manual, NOW, Rules())
    assert found.damage or [list(each) for each in found.observations] == rows
    for each in standings.values():
        assert each.node.isprintable() and math.isfinite(each.score)
    suspect_gpus(found.observations, NOW, Rules())
    worth_keeping(found.observations, NOW, Rules())


@of_each(where=["list", "small file", "folder of small files"], kind=odd_files.MAKERS)
@pytest.mark.timeout(60)
def test_whatever_lies_there_a_list_never_hangs_nor_raises_but_ours(tmp_path, kind, where):
    path = tmp_path / "list.json"
    shared = ExclusionList(path, clock=lambda: NOW)
    shared.exclude(by_hand())
    content = path.read_bytes()
    new = path.with_name(f"{path.name}.new")
    if where == "folder of small files":
        new.rmdir()
    odd_files.put(kind, {"list": path, "small file": new / "1.json"}.get(where, new), content)
    for act in (shared.read, lambda: shared.observe([seen(id="2")]), lambda: shared.exclude(by_hand("n2"))):
        try:
            act()
        except StorageError as error:
            assert str(path) in error.what
            assert where != "small file" or kind == "newer"


def test_kinds_of_a_newer_slurmft_are_kept(shared, path):
    strange = seen(id="1")._replace(kind="invented later", weight=1.0)
    shared.observe([strange])
    merge(shared)
    assert ExclusionList(path).read().observations == (strange,)


@pytest.mark.parametrize(
    "changes", [{"weight": math.nan}, {"at": math.inf}, {"at": math.nan}, {"node": ""}, {"id": ""}]
)
def test_what_is_no_observation_is_refused(shared, path, changes):
    with pytest.raises(StorageError, match=r"not a number|names no node"):
        shared.observe([seen(id="1"), seen(id="2")._replace(**changes)])
    assert shared.read().observations == ()


@pytest.mark.parametrize("changes", [{"node": ""}, {"until": math.inf}, {"at": math.nan}])
def test_what_is_no_exclusion_by_hand_is_refused(shared, changes):
    with pytest.raises(StorageError, match=r"not a number|names no node"):
        shared.exclude(by_hand(**changes))


def test_long_words_and_great_weights_are_cut(shared):
    shared.observe([seen(id="1", evidence="x" * 10_000)._replace(weight=1e300)])
    stored = shared.read().observations[0]
    assert (len(stored.evidence), stored.weight) == (1000, 1_000_000.0)


def test_a_full_disk_is_told_and_leaves_what_was_there(shared, path, monkeypatch):
    shared.observe([seen(id="1")])
    merge(shared)
    before = {entry: entry.read_bytes() for entry in path.parent.rglob("*") if entry.is_file()}

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", refuse)
    with pytest.raises(StorageUnavailable, match="No space left"):
        shared.observe([seen(id="2")])
    with pytest.raises(StorageUnavailable, match="No space left"):
        shared.exclude(by_hand("n2"))
    monkeypatch.undo()
    assert {entry: entry.read_bytes() for entry in path.parent.rglob("*") if entry.is_file()} == before
    shared.observe([seen(id="2")])
    assert ids(shared.read()) == {"1", "2"}


def test_a_merge_that_lost_its_lock_writes_nothing(shared, path, monkeypatch):
    shared.observe([seen(id="1")])
    monkeypatch.setattr("slurmft.storage.patience.SoftLock.is_ours", lambda _: False)
    with pytest.raises(StorageUnavailable, match="was taken from us"):
        shared.exclude(by_hand())
    assert not path.exists()


@pytest.mark.parametrize("dies_in", ["os.replace", "Path.unlink"])
def test_a_writer_that_is_killed_loses_nothing_of_others(shared, path, dies_in):
    shared.observe([seen(id="1")])
    merge(shared)
    shared.observe([seen(id="2")])
    code = f"""
        import os, sys
        from pathlib import Path
        from slurmft.policy.suspicion import ManualEntry
        from slurmft.storage.exclusions import ExclusionList
        shared = ExclusionList(Path(sys.argv[1]))
        {dies_in} = lambda *_, **__: os._exit(9)
        shared.exclude(ManualEntry(node="n5", reason="x", who="dying", at=1.0))
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], timeout=30, check=False)
    assert result.returncode == 9
    assert ids(shared.read()) == {"1", "2"}
    shared.exclude(by_hand("n6"))
    assert ids(shared.read()) == {"1", "2"}
    assert {"merging", "n6"} <= {entry.node for entry in shared.read().manual}


@pytest.mark.parametrize(("mode", "folder"), [(0o600, 0o700), (0o660, 0o2770), (0o640, 0o2750)], ids=oct)
def test_a_group_can_use_its_list(path, mode, folder):
    before = os.umask(0o077)
    try:
        shared = ExclusionList(path, mode)
        shared.observe([seen(id="1")])
        small = next((path.parent / f"{path.name}.new").iterdir())
        assert (mode_of(small), mode_of(small.parent), mode_of(path.parent)) == (mode, folder, folder)
        shared.exclude(by_hand())
        assert mode_of(path) == mode
        assert path.stat().st_gid == path.parent.stat().st_gid
    finally:
        os.umask(before)


def test_a_list_that_may_not_be_read_is_an_error_of_ours(path):
    path.mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot read"):
        ExclusionList(path).read()
    (path.parent / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        ExclusionList(path.parent / "file" / "list.json").observe([seen(id="1")])


WRITERS = """
import os, sys, time
from pathlib import Path
from slurmft.policy.suspicion import Observation
from slurmft.storage.exclusions import ExclusionList
path, writers, each = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ready, go = os.pipe()
children = []
for writer in range(writers):
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(ready, 1)  # all begin at once: when the other end is closed
        shared = ExclusionList(path, host=f"host{writer % 7}")
        for number in range(each):
            shared.observe([Observation(kind="crash", node=f"n{writer}", weight=0.1, at=1.0, id=f"{writer}.{number}")])
        os._exit(0)
    children.append(pid)
os.close(go)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
sys.exit(sum(code != 0 for code in codes))
"""


@pytest.mark.parametrize(("writers", "each"), [(20, 50), (150, 1)], ids=["20 x 50", "150 at once"])
def test_however_many_write_at_once_nothing_is_lost(path, writers, each):
    command = [sys.executable, "-c", WRITERS, str(path), str(writers), str(each)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    expected = {f"{writer}.{number}" for writer in range(writers) for number in range(each)}
    assert ids(ExclusionList(path).read()) == expected
    merge(ExclusionList(path))
    assert ids(ExclusionList(path).read()) == expected
    assert not path.with_name(f"{path.name}.lock").exists()


def test_writers_that_are_killed_at_any_moment_lose_nothing_that_was_said_to_be_written(path):
    code = """
        import sys
        from pathlib import Path
        from slurmft.policy.suspicion import Observation
        from slurmft.storage.exclusions import ExclusionList
        shared = ExclusionList(Path(sys.argv[1]))
        for number in range(100000):
            id = f"{sys.argv[2]}.{number}"
            shared.observe([Observation(kind="crash", node="n1", weight=0.1, at=1.0, id=id)])
            print(id, flush=True)
    """
    promised: set[str] = set()
    dice = random.Random(4)
    for round_ in range(3):
        begin = [sys.executable, "-c", textwrap.dedent(code), str(path)]
        writers = [subprocess.Popen([*begin, f"{round_}.{n}"], stdout=subprocess.PIPE, text=True) for n in range(3)]
        for writer in writers:
            for _ in range(dice.randrange(20, 60)):
                promised.add(writer.stdout.readline().strip())
        for writer in writers:
            writer.kill()
            promised.update(line.strip() for line in writer.stdout if line.endswith("\n"))
            writer.wait()
            writer.stdout.close()
        assert promised <= ids(ExclusionList(path).read())
    merge(ExclusionList(path))
    assert promised <= ids(ExclusionList(path).read())


def test_a_reader_sees_everything_while_others_merge(path):
    ExclusionList(path).observe([seen(id=f"before {n}") for n in range(50)])
    writers = subprocess.Popen([sys.executable, "-c", WRITERS, str(path), "4", "100"])
    looks = 0
    before: set[str] = set()
    while writers.poll() is None:
        now = ids(ExclusionList(path).read())
        assert before <= now, "what was there once stays"
        before = now
        looks += 1
    assert writers.returncode == 0
    assert looks > 5
    assert len(ids(ExclusionList(path).read())) == 450


def test_the_list_is_one_json_object_for_other_programs(shared, path):
    shared.observe([seen(id="1")])
    merge(shared)
    value = json.loads(path.read_bytes())
    assert value["format"] == 1
    assert len(value["observations"]) == 1
