"""How many samples a step has when the number of ranks changes: ``elastic.batch``, from configuration to split."""

from of_each import of_each

from slurmft.agent.workers import worker_environment
from slurmft.config.run import validate
from slurmft.ipc.messages import StartWorkers
from slurmft.worker.session import Batches


@of_each(
    policy__nodes__samples=[
        ("keep_global_batch", 4, 64),
        ("keep_global_batch", 3, 64),
        ("keep_global_batch", 5, 64),
        ("keep_micro_batch", 4, 64),
        ("keep_micro_batch", 3, 48),
        ("keep_micro_batch", 5, 80),
        ("keep_micro_batch", 1, 16),
    ]
)
def test_the_samples_of_a_step(policy: str, nodes: int, samples: int):
    elastic = {"min_nodes": 1, "max_nodes": 5, "batch": policy}
    config = validate(
        {"command": "true", "run_folder": "/r", "nodes": 4, "nproc_per_node": 2, "elastic": elastic}, source="here"
    )
    start = StartWorkers(
        attempt="7.0.0", first_rank=2, nodes=nodes, generation=1, master_addr="n1", master_port=1, cycle=0
    )
    environment = worker_environment(config, {}, start, 2, "7.0.0")
    del environment["SLURMFT_ERROR_DIR"]  # nothing is written here
    split = Batches(environment).split(64, int(environment["WORLD_SIZE"]), 8)
    assert len(split.samples) == nodes * 2
    assert sum(split.samples) == samples
