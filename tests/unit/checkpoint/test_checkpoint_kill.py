"""kill -9 at random moments of a save: the newest committed checkpoint can always be loaded."""

import subprocess
import sys

SCRIPT = """
import os, random, select, signal, sys, time
import torch
from slurmft.checkpoint import Catalog, CheckpointManager

torch.set_num_threads(1)  # a fork must not inherit a thread pool
folder, chance = sys.argv[1], random.Random(int(sys.argv[2]))

def objects():
    model = torch.nn.Linear(256, 256)
    return model, torch.optim.SGD(model.parameters(), momentum=0.9)

def writers(child):
    return [int(pid) for pid in open(f"/proc/{child}/task/{child}/children").read().split()]

def end(pid, number):
    # a process that is not our child
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    if number:
        signal.pidfd_send_signal(handle, number)
    assert select.select([handle], [], [], 60)[0], "a writer did not end by itself"
    os.close(handle)

def save_for_ever(step, pipe):
    model, optimizer = objects()
    checkpoints = CheckpointManager(folder, keep_last_n=2)
    while True:
        step += 1
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(step)
        checkpoints.save(model, optimizer, step=step, metrics={"loss": -step % 7})
        os.write(pipe, step.to_bytes(8, "big"))

step, unfinished, before = 0, 0, set()
for kill in range(20):
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        save_for_ever(step, send)
    os.close(send)
    for _ in range(chance.randrange(1, 4)):
        last = int.from_bytes(os.read(receive, 8), "big")
    time.sleep(chance.random() * 0.02)  # the length of about one save: a random place in it, not a wait for something
    own, alone = writers(child), kill % 4 == 3
    os.kill(child, signal.SIGKILL)
    for pid in own:  # as the end of a job does; else it finishes by itself
        end(pid, 0 if alone else signal.SIGKILL)
    os.waitpid(child, 0)
    while told := os.read(receive, 8):
        last = int.from_bytes(told, "big")
    os.close(receive)
    left = set(Catalog(folder).scan().uncommitted)
    assert not alone or left <= before, "a writer whose worker died left a save unfinished"
    unfinished += len(left - before)
    before = left
    model, optimizer = objects()
    loaded = CheckpointManager(folder).load_latest(model, optimizer)
    assert not loaded.skipped, loaded.skipped
    assert loaded.step in (last, last + 1), (loaded.step, last)
    assert all(bool((weight == loaded.step).all()) for weight in model.parameters())
    contents = Catalog(folder).scan()
    assert not contents.unreadable and set(contents.uncommitted) == left, "who loads removes nothing"
    assert CheckpointManager(folder).load_best(model, optimizer).found
    step = loaded.step
checkpoints = CheckpointManager(folder, async_save=False)
checkpoints.save(*objects(), step=step + 1)
checkpoints.close()
deadline = time.monotonic() + 20
while Catalog(folder).scan().uncommitted:
    assert time.monotonic() < deadline, "what was never committed stays for ever"
    time.sleep(0.01)
assert unfinished, "no kill hit a save; the test proves nothing"
print("unfinished saves:", unfinished)
"""


def test_whenever_the_saving_process_is_killed_the_newest_commit_is_intact(tmp_path):
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path / "checkpoints"), "7"]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
