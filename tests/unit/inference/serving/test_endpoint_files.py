"""The files of an endpoint in its run folder."""

from pathlib import Path

import pytest

from slurmft.errors import UsageError
from slurmft.inference.endpoint import headers_file, prepare, token_of
from slurmft.system.files import token_in


def test_secrets_are_private_and_stay_the_same(tmp_path: Path) -> None:
    prepare(tmp_path, None)
    token = token_of(tmp_path)
    prepare(tmp_path, None)
    assert token_of(tmp_path) == token and len(token) > 30
    assert headers_file(tmp_path).read_text() == f"Authorization: Bearer {token}\n"
    for path in (tmp_path / "serving").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    own = tmp_path / "own"
    own.write_text("my-own-secret-token\n")
    own.chmod(0o600)
    prepare(tmp_path, own)
    assert token_of(tmp_path) == "my-own-secret-token"


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [("a-good-token-of-its-length", 0o644, "others may read"), ("short", 0o600, "at least 16"),
     ("with a space in the token", 0o600, "without spaces"), ("line\r\nX-Evil: yes, and long", 0o600, "at least 16")],
)  # fmt: skip
def test_a_token_that_is_none_is_refused(tmp_path: Path, content: str, mode: int, why: str) -> None:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(UsageError, match=why):
        token_in(path)
