"""An engine of several processes, as vLLM, SGLang, TGI and LitServe are, with children in sessions of their own.

python family_engine.py --socket PATH

Two children are made as they make theirs: one by fork alone, one by exec with an environment that leads nowhere. None
of them ends with its parent. Node, engine, child and how it was made are a line of ``family.txt`` beside this file.
"""

import os
import sys
import time
from pathlib import Path

import serving_engine


def have_children() -> None:
    """Begin them; they live for ever."""
    with (Path(__file__).parent / "family.txt").open("a", encoding="ascii") as family:
        for does_exec in (False, True):
            if (pid := os.fork()) == 0:
                os.setsid()
                if does_exec:
                    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(100000)"], {})
                time.sleep(100_000)
                os._exit(0)
            family.write(f"{os.environ['SLURMD_NODENAME']} {os.getpid()} {pid} {'exec' if does_exec else 'fork'}\n")


if __name__ == "__main__":
    have_children()
    serving_engine.main()
