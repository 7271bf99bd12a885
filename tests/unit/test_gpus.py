"""Which GPUs of a node are proven not to be a suspect; a small program stands in for nvidia-smi."""

from __future__ import annotations

import pytest

from slurmft.launch.gpus import gpu_uuids, visible_without

FOUR = "0, GPU-a\\n1, GPU-b\\n2, GPU-c\\n3, GPU-d\\n"


@pytest.fixture
def smi(tmp_path):
    def write(body: str) -> dict[str, str]:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    return write


@pytest.mark.parametrize(
    ("visible", "uuids"),
    [
        (None, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]),
        ("2,0", ["GPU-c", "GPU-a"]),
        ("GPU-d, 1", ["GPU-d", "GPU-b"]),
        ("", []),
        ("0,9", []),
        ("MIG-1", []),
    ],
)
def test_what_a_worker_would_see(smi, visible, uuids):
    environment = smi(f"printf '{FOUR}'")
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = visible
    assert gpu_uuids(environment) == uuids


@pytest.mark.parametrize("body", ["exit 9", "echo 'no devices were found'", "printf '%b' '\\xff\\n'"])
def test_a_tool_that_cannot_tell(smi, body):
    assert gpu_uuids(smi(body)) == []


def test_a_node_without_the_tool(tmp_path):
    assert gpu_uuids({"PATH": str(tmp_path)}) == []


@pytest.mark.parametrize(
    ("suspects", "needed", "visible"),
    [
        ({"GPU-a"}, 3, "GPU-b,GPU-c,GPU-d"),
        ({"GPU-a"}, 4, None),
        ({"GPU-a", "GPU-c"}, 1, "GPU-b,GPU-d"),
        ({"GPU-elsewhere"}, 4, "GPU-a,GPU-b,GPU-c,GPU-d"),
    ],
)
def test_what_is_left_beside_the_suspects(smi, suspects, needed, visible):
    assert visible_without(smi(f"printf '{FOUR}'"), suspects, needed) == visible


def test_nothing_is_proven_where_nothing_is_known(tmp_path):
    assert visible_without({"PATH": str(tmp_path)}, {"GPU-a"}, 1) is None
