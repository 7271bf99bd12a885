"""What a supervisor says of a stop."""

from __future__ import annotations

import pytest

from slurmft.supervisor.guardian import log_signal


@pytest.mark.parametrize(("name", "number"), [("SIGTERM", 15), ("SIGUSR1", 10), ("no signal", 0)])
def test_a_signal_is_logged_in_megatrons_words_whatever_its_name(name: str, number: int, caplog) -> None:
    with caplog.at_level("INFO"):
        log_signal("Received signal %d, initiating graceful stop", name)
    assert f"Received signal {number}, initiating graceful stop" in caplog.text
