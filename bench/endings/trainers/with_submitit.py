"""The workload as a checkpointable of submitit: ``python with_submitit.py FOLDER NODES RANKS`` submits it.

By its documentation: on its signal (SIGUSR2) rank 0 calls ``checkpoint``, pickles what that returns, and requeues.
"""

from __future__ import annotations

import sys
from pathlib import Path

import submitit
from submitit.helpers import TorchDistributedEnvironment


class Training:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        import workload
        from torch.nn.parallel import DistributedDataParallel

        TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        rank = workload.join()
        self.model = workload.new_model()
        self.optimizer = workload.new_optimizer(self.model)
        first = workload.load(self.folder / "submitit.pt", self.model, self.optimizer)
        model = DistributedDataParallel(self.model)
        for self.step in range(first, 10**9):
            workload.train_one(model, self.optimizer, self.step, rank)
            if rank == 0 and self.step == first:
                workload.note_start(self.folder, self.step)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        import workload

        workload.save(self.folder / "submitit.pt", self.step, self.model, self.optimizer)
        return submitit.helpers.DelayedSubmission(Training(self.folder))


def main(folder: Path, nodes: int, ranks: int) -> None:
    executor = submitit.SlurmExecutor(folder=folder / "submitit", max_num_timeout=100)
    executor.update_parameters(nodes=nodes, ntasks_per_node=ranks, time=60, additional_parameters={"requeue": True})
    print(executor.submit(Training(folder)).job_id)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
