"""A command for ``launcher: ray`` that trains nothing: it has a worker process, notes what it sees, and waits.

ray_driver.py NOTES [EXIT_CODE]      ends with that code, or when the file NOTES.end exists
"""

import json
import os
import sys
import time
from pathlib import Path

import ray


@ray.remote(num_cpus=0)
class Worker:
    def seen(self) -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name in ("RANK", "SLURMFT_PAGE", "WORLD_SIZE")}


def main() -> None:
    notes = Path(sys.argv[1])
    ray.init(log_to_driver=False)
    worker = Worker.remote()
    seen = {"nodes": len(ray.nodes()), "rank": ray.get(worker.seen.remote()), "address": os.environ["RAY_ADDRESS"]}
    notes.write_text(json.dumps(seen))
    if len(sys.argv) > 2:
        sys.exit(int(sys.argv[2]))
    while not notes.with_suffix(".end").exists():
        time.sleep(0.05)


if __name__ == "__main__":
    main()
