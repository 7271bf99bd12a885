"""``hf_trainer`` with FSDP2 on CPUs: Accelerate takes its plugin for FSDP on devices only, torch shards on both."""

import os
from typing import Any

import hf_trainer
from accelerate import state
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

ENVIRONMENT = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
               "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "GPT2Block",
               "FSDP_RESHARD_AFTER_FORWARD": "true"}  # fmt: skip


class ShardsOnCpu(state.AcceleratorState):
    def __init__(self, *args: Any, fsdp_plugin: FullyShardedDataParallelPlugin | None = None, **options: Any) -> None:
        super().__init__(*args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin


def main() -> None:
    os.environ |= ENVIRONMENT
    import accelerate.accelerator

    accelerate.accelerator.AcceleratorState = ShardsOnCpu
    hf_trainer.main()


if __name__ == "__main__":
    main()
