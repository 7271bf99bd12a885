"""Which weights engines are to serve: versions grow, branches replace each other, a strange file is not believed."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurmft import publish_weights
from slurmft.errors import StorageError, StorageUnavailable, UsageError
from slurmft.inference.endpoint import WEIGHTS_FILE, Published, read_published
from slurmft.policy.serving import Served
from slurmft.storage import patience

TRAINER = "import sys, slurmft; slurmft.publish_weights(sys.argv[1], version=int(sys.argv[2]), to=sys.argv[3])"


@pytest.fixture(autouse=True)
def outside_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURMFT_RUN_FOLDER", "SLURMFT_GENERATION", "SLURMFT_QUEUES", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def endpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "job" / "roles" / "rollout"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "config.yaml").write_text("")
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / 'w "1" {version}.bin'
    path.write_bytes(b"w")
    return path


def served(endpoint: Path) -> Served | None:
    found = read_published(endpoint)
    return found and found.served


def elsewhere(weights: Path, version: int, endpoint: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Publish from a process of its own, as a trainer that was started again does."""
    argv = [sys.executable, "-c", TRAINER, str(weights), str(version), str(endpoint)]
    return subprocess.run(argv, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


def test_versions_grow_in_one_trainer_and_its_last_publication_may_be_repeated(endpoint: Path, weights: Path) -> None:
    assert read_published(endpoint) is None
    publish_weights(weights, version=0, to=endpoint)
    publish_weights(str(weights), version=7, to=str(endpoint))
    publish_weights(weights, version=7, to=endpoint)
    found = read_published(endpoint)
    assert found is not None and (found.path, found.served) == (str(weights), Served(1, 7))
    for version in (6, 0):
        with pytest.raises(UsageError, match="does not follow 7"):
            publish_weights(weights, version=version, to=endpoint)
    with pytest.raises(UsageError, match="does not follow 7"):
        publish_weights(weights.parent, version=7, to=endpoint)
    assert served(endpoint) == Served(1, 7)


def test_a_trainer_that_begins_again_begins_a_branch_with_whichever_version(endpoint: Path, weights: Path) -> None:
    publish_weights(weights, version=410, to=endpoint)
    for branch, version in ((2, 405), (3, 410)):
        assert elsewhere(weights, version, endpoint).returncode == 0
        assert served(endpoint) == Served(branch, version)


def test_an_attempt_that_was_replaced_publishes_nothing_any_more(
    endpoint: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURMFT_RUN_FOLDER": "/run", "SLURMFT_GENERATION": "2"}.items():
        monkeypatch.setenv(name, value)
    publish_weights(weights, version=400, to=endpoint)
    old = elsewhere(weights, 410, endpoint, SLURMFT_GENERATION="1")
    assert old.returncode != 0 and "newer attempt" in old.stderr
    assert served(endpoint) == Served(1, 400)


def test_a_role_is_found_beside_the_queues_and_other_ranks_do_nothing(
    endpoint: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="belongs to a job of roles"):
        publish_weights(weights, version=1, to="rollout")
    monkeypatch.setenv("SLURMFT_QUEUES", str(endpoint.parent.parent / "queues"))
    monkeypatch.setenv("RANK", "1")
    publish_weights(weights, version=1, to="rollout")
    assert read_published(endpoint) is None
    monkeypatch.setenv("RANK", "0")
    publish_weights(weights, version=1, to="rollout")
    assert served(endpoint) == Served(1, 1)
    for to, words in {"rolout": "no endpoint has begun", "..": "no name of a role", "": "no name of a role"}.items():
        with pytest.raises(UsageError, match=words):
            publish_weights(weights, version=2, to=to)


@pytest.mark.parametrize("version", [-1, True, 1.0, "1", 2**53, None])
def test_what_is_no_version(endpoint: Path, weights: Path, version: Any) -> None:
    with pytest.raises(UsageError, match="whole number"):
        publish_weights(weights, version=version, to=endpoint)


def test_weights_that_are_not_there_are_not_published(endpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weights at"):
        publish_weights(tmp_path / "none", version=1, to=endpoint)


def test_a_full_disk_is_waited_for_and_loses_nothing(
    endpoint: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_weights(weights, version=1, to=endpoint)
    refusals, real = [OSError(errno.ENOSPC, "No space left on device")] * 2, patience.write_json

    def full(path: Path, value: Any) -> None:
        if refusals:
            raise refusals.pop()
        real(path, value)

    monkeypatch.setattr(patience, "write_json", full)
    publish_weights(weights, version=2, to=endpoint)
    assert served(endpoint) == Served(1, 2) and not refusals
    refusals += [OSError(errno.ENOSPC, "No space left on device")] * 9
    with pytest.raises(StorageUnavailable):
        publish_weights(weights, version=3, to=endpoint, patience_s=0.5)
    assert served(endpoint) == Served(1, 2)
    assert sorted(path.name for path in endpoint.iterdir()) == ["config.yaml", WEIGHTS_FILE]


GOOD = {"format": 1, "path": "/w", "version": 1, "branch": 1, "writer": "w", "run": "", "generation": 0, "at": ""}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b"null", json.dumps({**GOOD, "version": -1}).encode(),
        json.dumps({**GOOD, "version": "1"}).encode(), json.dumps({**GOOD, "version": 2**60}).encode(),
        json.dumps({**GOOD, "branch": 0}).encode(), json.dumps({**GOOD, "path": "w"}).encode(),
        json.dumps({**GOOD, "path": "/w\0"}).encode(), json.dumps({**GOOD, "path": "/" + "w" * (1 << 16)}).encode(),
        json.dumps({**GOOD, "format": 99}).encode(), b"[" * 10_000, json.dumps({"format": 1}).encode(),
    ],
    ids=range(15),
)  # fmt: skip
def test_a_file_that_is_not_ours_is_not_believed(endpoint: Path, weights: Path, content: bytes) -> None:
    (endpoint / WEIGHTS_FILE).write_bytes(content)
    with pytest.raises(StorageError):
        read_published(endpoint)
    with pytest.raises(StorageError):
        publish_weights(weights, version=1, to=endpoint)
    assert (endpoint / WEIGHTS_FILE).read_bytes() == content


def test_a_good_file_with_keys_of_a_newer_version_is_read(endpoint: Path) -> None:
    (endpoint / WEIGHTS_FILE).write_text(json.dumps({**GOOD, "more": 1}))
    assert read_published(endpoint) == Published(**{key: GOOD[key] for key in GOOD if key != "format"})


def test_a_pipe_or_the_file_of_another_user_is_not_opened(endpoint: Path) -> None:
    os.mkfifo(endpoint / WEIGHTS_FILE)
    with pytest.raises(StorageError):
        read_published(endpoint)
    (endpoint / WEIGHTS_FILE).unlink()
    (endpoint / WEIGHTS_FILE).write_text(json.dumps(GOOD))
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(endpoint / WEIGHTS_FILE, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to"):
        read_published(endpoint)
