"""A configuration of one kind, given to the verb of another."""

from pathlib import Path

import pytest
import yaml

import slurmft
from slurmft.cli.submit import infer, serve
from slurmft.config.run import load
from slurmft.errors import UsageError
from slurmft.inference.endpoint import headers_file
from slurmft.operations import executor

ENGINE = {"engine": {"command": ["engine", "{socket}"]}}
KINDS = {
    "training": {"command": ["true"]},
    "batch": {"inference": {**ENGINE, "input": "requests.jsonl"}},
    "endpoint": {"inference": {**ENGINE, "serving": {"routers": 1}}},
}


def written(folder: Path, kind: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"run_folder": str(folder / "run"), **KINDS[kind]}))
    assert load(path)
    return path


@pytest.mark.parametrize(("verb", "kind", "hint"), [
    (infer, "training", "slurmft submit"), (infer, "endpoint", "slurmft serve"),
    (serve, "training", "slurmft infer"), (serve, "batch", "slurmft infer"),
])  # fmt: skip
def test_it_is_refused_and_the_right_verb_is_named(tmp_path: Path, verb, kind: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        verb.main([str(written(tmp_path, kind)), "--cluster", "local"], standalone_mode=False)
    assert hint in refused.value.hint
    assert not (tmp_path / "run").exists()


def test_an_endpoint_is_submitted_from_python_with_its_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def submitted(settings, *_args: object, **_facts: object) -> object:
        assert headers_file(settings.run_folder).stat().st_mode & 0o777 == 0o600
        raise UsageError("as far as this test goes")

    monkeypatch.setattr(executor, "submit_run", submitted)
    with pytest.raises(UsageError, match="as far as this test goes"):
        slurmft.submit(written(tmp_path, "endpoint"), cluster="local")
