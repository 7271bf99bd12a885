"""How long a retry waits."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from slurmft.config.run import validate
from slurmft.supervisor.act import LONGEST_RESTART_S, retry_delay_s, wait_before_restart


def config(**section):
    return validate({"command": ["true"], "run_folder": "/tmp/x", "fault_tolerance": section}, source="test")


@pytest.mark.parametrize(
    ("failures", "least", "most"),
    [(0, 0, 0), (1, 1, 2), (2, 2, 3), (5, 16, 17), (9, 256, 257), (10, 300, 300), (10**6, 300, 300)],
)
def test_the_delay_doubles_with_jitter_up_to_its_bound(failures, least, most):
    found = [retry_delay_s(config(), failures) for _ in range(50)]
    assert all(least <= each <= most for each in found)
    assert (len(set(found)) > 1) == (least != most), "jitter"


def test_it_can_be_switched_off():
    assert retry_delay_s(config(retry_delay_s=0), 5) == 0
    assert retry_delay_s(config(max_retry_delay_s=0), 5) == 1, "the first delay is the least"


def test_a_first_restart_is_immediate():
    began = time.monotonic()
    assert wait_before_restart(config(), 0) < 0.1
    assert time.monotonic() - began < 0.5


def test_a_signal_ends_the_wait():
    body = """
    import os, signal, threading
    from slurmft.config.run import validate
    from slurmft.supervisor.act import wait_before_restart
    from slurmft.supervisor.guardian import any_kept, keep_signals
    keep_signals()
    given = {"command": ["true"], "run_folder": "/tmp/x", "fault_tolerance": {"retry_delay_s": 9}}
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    print(wait_before_restart(validate(given, source="test"), 3), any_kept())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(body)], capture_output=True, text=True, timeout=60, check=False
    )
    seconds, kept = done.stdout.split()
    assert (float(seconds) < LONGEST_RESTART_S / 2, kept) == (True, "True"), done.stderr
