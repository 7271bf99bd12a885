"""A node that is made slow is slow, the others are not, and it ends by itself."""

import time

import pytest

from slurmft.errors import LabError
from slurmft.lab import cluster
from slurmft.lab.cluster import Lab

pytestmark = pytest.mark.slurm

BUSY = """
import sys, time
began, cpu = time.monotonic(), time.process_time()
while time.process_time() - cpu < 0.1:
    pass
print(time.monotonic() - began)
"""


def share(lab: Lab, node: str) -> float:
    """CPUs that a job's process gets on this node while it computes."""
    done = lab.run(["srun", "--quiet", "-w", node, "-N", "1", "python3", "-c", BUSY])
    return 0.1 / float(done.stdout.split()[-1])


def test_a_slow_node_is_slow_for_a_while(own_lab: Lab):
    try:
        own_lab.slow_node("n2", cpus=0.05, for_s=300)
    except LabError as error:
        pytest.skip(str(error))
    assert share(own_lab, "n2") < 0.1
    assert share(own_lab, "n1") > 0.1
    own_lab.restore_speed("n2")
    assert share(own_lab, "n2") > 0.1


def test_it_ends_by_itself_and_leaves_nothing(own_lab: Lab):
    try:
        own_lab.slow_node("n2", cpus=0.05, for_s=1)
    except LabError as error:
        pytest.skip(str(error))
    group = cluster._cpu_group(own_lab.folder, "n2")
    deadline = time.monotonic() + 10
    while group.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not group.exists()
    own_lab.restore_speed("n2")  # no harm


@pytest.mark.parametrize(("cpus", "for_s"), [(0, 5), (-1, 5), (float("nan"), 5), (0.5, 0), (0.5, 1e9)])
def test_what_is_no_limit_is_refused(own_lab: Lab, cpus: float, for_s: float):
    with pytest.raises(LabError, match="is not a valid limit"):
        own_lab.slow_node("n2", cpus=cpus, for_s=for_s)
