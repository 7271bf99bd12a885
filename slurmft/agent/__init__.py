"""The agent, one process per node, and what it starts: zygote, workers, keeper. No torch, except in the zygote."""
