"""``moments.py``, but rank 1 is killed once, while it copies the save of step $DIES_AT, which all have agreed on."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from slurmft import CheckpointManager
from slurmft.checkpoint.write_requests import VARIABLE

mark = Path(sys.argv[sys.argv.index("--marks") + 1]) / "died"
save = CheckpointManager.save


def save_or_die(manager: CheckpointManager, *objects: Any, step: int, **parts: Any) -> Path | None:
    if step == int(os.environ["DIES_AT"]) and os.environ["RANK"] == "1" and not mark.exists():
        mark.touch()
        os.environ[VARIABLE] = "half staged=kill"
    return save(manager, *objects, step=step, **parts)


CheckpointManager.save = save_or_die  # type: ignore[method-assign]
runpy.run_path(str(Path(__file__).with_name("moments.py")), run_name="__main__")
