"""What the kernel says of the memory of a control group."""

from pathlib import Path

import pytest

from slurmft.system.processes import memory_kills

V1 = "6:freezer:/slurm_n1/job_1/step_0\n4:cpu,memory:/slurm_n1/job_1/step_0/task_0\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_1/step_0/user/task_0\n"
KILLS_V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
KILLS_V2 = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("groups", "path", "text", "kills"),
    [
        (V1, "sys/fs/cgroup/memory/slurm_n1/job_1/step_0/task_0/memory.oom_control", KILLS_V1, 3),
        (V2, "sys/fs/cgroup/system.slice/slurmstepd.scope/job_1/step_0/user/task_0/memory.events", KILLS_V2, 2),
        (V2, "sys/fs/cgroup/memory.events", KILLS_V2, 2),
        (V1, "sys/fs/cgroup/memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n", 0),
        (V1, "sys/fs/cgroup/other", "", 0),
        ("nonsense\n", "sys/fs/cgroup/memory.events", KILLS_V2, 0),
    ],
    ids=["v1", "v2", "v2 in a container", "an old kernel", "nothing there", "nonsense"],
)
def test_kills_for_memory(tmp_path: Path, groups: str, path: str, text: str, kills: int) -> None:
    for name, content in (("proc/self/cgroup", groups), (path, text)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert memory_kills(str(tmp_path)) == kills


def test_no_control_groups_at_all(tmp_path: Path) -> None:
    assert memory_kills(str(tmp_path)) == 0
    assert memory_kills() >= 0
