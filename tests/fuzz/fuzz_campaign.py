"""Runs fuzzed inputs, each in a process forked from one that has everything imported, and looks at what they did."""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import random
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzz_mutations import ARGUMENTS, VALUES, mutate_file, mutate_value
from fuzz_world import BATCH, CALLER, FINISHED, FOREIGN, LOST, STRANGER, World

from slurmft.cli import main as command_line
from slurmft.lab.members import needed_paths, paths_to_expose
from slurmft.system.files import read_text

LIMIT_S = 10.0
"""A verb that takes longer hangs."""

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What must not reach a terminal: a carriage return overwrites what was said before."""

RUNS = (FINISHED, LOST, FOREIGN)

VERBS = """
status
status --json
status RUN
status RUN --json
explain RUN
explain RUN --json
report
report RUN
report RUN --json
report RUN --html OUT
report RUN --compare RUN
report --since TEXT
logs RUN
logs RUN --all-attempts -n N
logs RUN --rank N
logs RUN --attempt TEXT
stop RUN
save RUN
requeue RUN
requeue --rescue
requeue RUN --rescue
submit --dry-run CONFIG
submit --dry-run CONFIG --set SET
submit --dry-run --cluster slurm CONFIG
submit --dry-run --cluster local CONFIG
submit --dry-run CONFIG -- TEXT
convert CONFIG
sbatch CONFIG
sbatch --set SET CONFIG
plan CONFIG --seeds 2
plan CONFIG --site CONFIG --seeds 2
convert TEXT
launch --last-word
ft-launch --dry-run --cluster local --run-folder OUT --nnodes TEXT train.py
ft-launch --print-config --set SET --ft-rank-heartbeat-timeout TEXT train.py TEXT
ft-launch --dry-run --cluster local --ft-cfg-path CONFIG TEXT
infer --dry-run CONFIG
serve --dry-run CONFIG
serve --update --dry-run CONFIG
serve --dry-run BATCH --set SET
endpoint RUN
endpoint --header-file RUN
infer --dry-run BATCH --set SET
infer --dry-run --cluster slurm BATCH -- TEXT
infer --cluster slurm BATCH
infer --cluster slurm BATCH --set SET
advise CONFIG
advise CONFIG --json
doctor
doctor CONFIG
doctor CONFIG --json
drill --dry-run CONFIG
checkpoint list RUN
checkpoint list RUN --json
checkpoint verify RUN
checkpoint verify RUN --newest
checkpoint verify RUN --step N
checkpoint rm RUN STEP
checkpoint rm RUN STEP --force
exclude list WHERE
exclude list WHERE --json
exclude list --all
exclude why NODE WHERE
exclude add NODE --reason TEXT WHERE
exclude add NODE --reason x --for TEXT WHERE
exclude add NODE --reason x --until TEXT WHERE
exclude remove NODE WHERE
exclude gc WHERE
sweep --config CONFIG
sweep --config CONFIG --dry-run --json
sweep --config CONFIG --limit N
sweep --config CONFIG --test N --drain
sweep --config CONFIG --metrics OUT
sweep --health PATH
hooks show
metrics
metrics RUN
metrics RUN --textfile OUT
metrics RUN --targets OUT
watch --once
watch RUN --once
rm RUN
schema
examples TEXT
init --yes --output OUT TEXT
health --only memory
health --only TEXT
health --only memory --config PATH --json
health --only memory --context cron
inject RUN TEXT
inject RUN nan --rank N
join --dry-run RUN -N N
""".strip().splitlines()
"""In capitals: what is filled in, see ``_fill``."""

_MODULES = sorted({module for module, _ in command_line.VERBS.values()})
_KEYS = ("slurm.time", "slurm.nodes", "nodes", "nproc_per_node", "run_folder", "command", "checkpoint.interval_steps",
         "checkpoint.directory", "preemption.signal_lead_s", "fault_tolerance.poison_after", "exclusions.path",
         "slurm.partition", "notices.command", "elastic.min_nodes", "checkpoint.bandwidth", "inference.input",
         "inference.output", "inference.engine.command", "inference.on_bad_input")  # fmt: skip


@dataclass
class Outcome:
    """One input, and what is wrong with what it did."""

    seed: int
    argv: list[str]
    mutations: list[str]
    code: int = 0
    output: str = ""
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        words = "\n".join(f"  {each}" for each in (*self.mutations, *self.wrong))
        command = " ".join(map(ascii, self.argv))
        return f"seed {self.seed}: slurmft {command} -> {self.code}\n{words}\n{self.output[-1500:]}"


def main(pristine: str, world: str, first: str, count: str) -> None:
    """Run inputs; one line of JSON for each that is wrong. In a mount namespace of its own where root runs it."""
    if os.getuid() == 0:
        _let_everyone_read_the_interpreter()
    for module in _MODULES:
        importlib.import_module(f"slurmft.cli.{module}")
    began_s = time.monotonic()
    for seed in range(int(first), int(first) + int(count)):
        outcome = run_input(seed, World(Path(pristine)), World(Path(world)))
        if outcome.wrong:
            print(json.dumps(asdict(outcome)), flush=True)
        if (done := seed - int(first) + 1) % 100 == 0:
            print(f"{done} of {count} inputs, {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)


def _let_everyone_read_the_interpreter() -> None:
    """It may lie below /root, where the ordinary user of an input cannot pass."""
    mounts = paths_to_expose(needed_paths())
    sources = {mount.source: os.open(mount.source, os.O_PATH) for mount in mounts if mount.kind == "bind"}
    for mount in mounts:
        target = Path(mount.target)
        if mount.kind == "tmpfs":
            argv = ["mount", "-t", "tmpfs", "-o", f"mode={mount.mode}", mount.source, mount.target]
        else:
            target.mkdir(parents=True, exist_ok=True)
            argv = ["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{sources[mount.source]}", mount.target]
        subprocess.run(argv, check=True, pass_fds=list(sources.values()))
    importlib.invalidate_caches()


def run_input(seed: int, pristine: World, world: World) -> Outcome:
    """One input of the campaign; the same seed is the same input."""
    chance = random.Random(seed)
    _reset(pristine, world)
    argv = _arguments(seed, chance, world)
    mutations = _mutations(chance, world)
    caller = CALLER if os.getuid() == 0 and chance.random() < 0.75 else os.getuid()
    outcome = Outcome(seed, argv, [*mutations, f"as user {caller}"])
    before = _belongings_of_others(world, caller)
    for _ in range(2):  # a machine that is busy with other things may take long once
        outcome.code, outcome.output, hung = _run(argv, world, caller)
        if not hung:
            break
    outcome.wrong = _wrongs(outcome, world, caller, before, hung=hung)
    return outcome


def _reset(pristine: World, world: World) -> None:
    if world.folder.exists():
        if os.getuid() != 0:
            subprocess.run(["chmod", "-R", "u+rwX", str(world.folder)], check=False, capture_output=True)
        shutil.rmtree(world.folder)
    subprocess.run(["cp", "-a", "--", str(pristine.folder), str(world.folder)], check=True)
    for run in (LOST, FOREIGN):  # a copy of a run folder is refused by its inode; this one is the run itself
        owner = world.runs / run / "owner.json"
        status = owner.stat()
        owner.write_text(json.dumps({**json.loads(owner.read_text()), "inode": owner.parent.stat().st_ino}))
        os.utime(owner, ns=(status.st_atime_ns, status.st_mtime_ns))


def _arguments(seed: int, chance: random.Random, world: World) -> list[str]:
    argv: list[str] = []
    for word in VERBS[seed % len(VERBS)].split():
        argv += _fill(word, chance, world)
    if chance.random() < 0.03:
        argv[chance.randrange(len(argv))] = chance.choice(ARGUMENTS)
    return argv


def _fill(word: str, chance: random.Random, world: World) -> list[str]:
    odd = chance.choice(ARGUMENTS)
    seldom = chance.random() < 0.15
    configs = [world.folder / f"{name}.yaml" for name in (FINISHED, LOST, FOREIGN)]
    match word:
        case "RUN":
            return [odd if seldom else chance.choice([*RUNS, str(world.runs / FINISHED), str(world.runs / LOST)])]
        case "CONFIG":
            return [odd if seldom else str(chance.choice(configs))]
        case "BATCH":
            return [odd if seldom else str(world.folder / f"{BATCH}.yaml")]
        case "SET":
            return [f"{chance.choice(_KEYS)}={odd}"]
        case "N" | "STEP":
            return [chance.choice(["2", "4", "0", "1", odd, odd])]
        case "NODE":
            return [chance.choice(["n1", "n3", "n[1-3]", odd])]
        case "TEXT":
            return [odd]
        case "OUT":
            return [chance.choice([str(world.folder / "metrics.prom"), odd])]
        case "PATH":
            return [chance.choice([str(world.folder / "health.yaml"), str(world.outside / "precious"), odd])]
        case "WHERE":
            return (
                ["--config", str(configs[0])]
                if chance.random() < 0.7
                else ["--file", str(world.folder / "excluded.json")]
            )
    return [word]


def _mutations(chance: random.Random, world: World) -> list[str]:
    done = []
    for _ in range(chance.choice([0, 1, 1, 1, 2, 4])):
        if chance.random() < 0.15:
            done.append(_mutate_config(chance, world))
            continue
        if chance.random() < 0.12:
            done.append(_mutate_answer(chance, world))
            continue
        paths = [path for path in sorted(world.folder.rglob("*")) if _may_mutate(path, world)]
        done.append(mutate_file(chance.choice(paths), chance, world))
    return done


def _may_mutate(path: Path, world: World) -> bool:
    top = path.relative_to(world.folder).parts[0]
    return (
        top not in ("bin", "answers", "calls", "outside", "tmp", "home") and path != world.runs and not path.is_socket()
    )


def _mutate_config(chance: random.Random, world: World) -> str:
    path = world.folder / f"{chance.choice([*RUNS, BATCH])}.yaml"
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):  # an earlier mutation was here
        return mutate_file(path, chance, world) if path.exists() else "nothing"
    changed = mutate_value(value, chance)
    path.write_bytes(json.dumps(changed).encode("utf-8", "surrogateescape"))
    return f"{path.name}: {json.dumps(changed)[:300]}"


def _mutate_answer(chance: random.Random, world: World) -> str:
    """Slurm says something odd, or that it cannot."""
    name = chance.choice(["squeue", "sinfo", "config", "job", "partition", "sacct", "sbatch"])
    path = world.folder / "answers" / name
    if chance.random() < 0.3:
        path.with_name(f"{name}.error").write_text(chance.choice(["error: Invalid job id specified", "error: odd"]))
        return f"{name}: an error"
    if name in ("squeue", "sinfo"):
        odd = chance.choice(["", "1", "a|b|c", "\x1b[2J", "n[1-", "9" * 300, "PENDING", "None", "JobHeldUser"])
        lines = path.read_text().splitlines()
        at = chance.randrange(len(lines))
        lines[at] = "s\x01" + lines[at].split("\x01")[1] + "\x01" + odd + "\x01g"
        path.write_text("\n".join(lines) + "\n")
        return f"{name}: {lines[at]!a}"
    text = path.read_text()
    at = chance.randrange(len(text) + 1)
    path.write_text(
        text[:at] + str(chance.choice(VALUES)).encode("ascii", "replace").decode().replace("\0", "") + text[at + 3 :]
    )
    return f"{name}: other text at {at}"


def _run(argv: list[str], world: World, caller: int) -> tuple[int, str, bool]:
    """Exit code (negative: a signal), everything that was printed, and whether it hung."""
    said = world.folder.with_name(f"{world.folder.name}.out")
    pid = os.fork()
    if pid == 0:
        code = 99
        with contextlib.suppress(BaseException):
            code = _be(argv, world, caller, said)
        os._exit(code)
    descriptor = os.pidfd_open(pid)
    ended = bool(select.select([descriptor], [], [], LIMIT_S)[0])
    os.close(descriptor)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # a verb leaves nothing running either
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, said.read_text(errors="surrogateescape"), not ended


def _be(argv: list[str], world: World, caller: int, said: Path) -> int:
    os.setsid()
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(world.folder)
    if caller != os.getuid():
        os.setgroups([])
        os.setresgid(caller, caller, caller)
        os.setresuid(caller, caller, caller)
    os.environ.clear()
    os.environ.update(world.environment())
    sys.argv = ["slurmft", *argv]
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    for handler in logging.getLogger().handlers[:]:
        logging.getLogger().removeHandler(handler)
    sys.set_int_max_str_digits(4300)  # as every reader has it
    try:
        command_line.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 98
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 98


def _belongings_of_others(world: World, caller: int) -> dict[str, tuple[int, int, str]]:
    """What is not the caller's, and must be as it was: kind, size, content, without the times of reading."""
    found = {}
    folders = [world.outside, world.runs]
    for path in sorted(each for folder in folders for each in folder.rglob("*")):
        status = path.lstat()
        if status.st_uid == STRANGER != caller or world.outside in path.parents:
            content = ""
            if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 24:
                with contextlib.suppress(OSError):
                    content = hashlib.sha256(path.read_bytes()).hexdigest()
            found[str(path)] = (status.st_mode, status.st_uid, content)
    return found


def _wrongs(
    outcome: Outcome, world: World, caller: int, before: dict[str, tuple[int, int, str]], *, hung: bool
) -> list[str]:
    wrong = []
    if hung:
        wrong.append(f"hung for {LIMIT_S:.0f} s")
    elif outcome.code < 0:
        wrong.append(f"killed by signal {-outcome.code}")
    elif outcome.code in (70, 98, 99):
        wrong.append(f"exit code {outcome.code}")
    if "Traceback (most recent call last)" in outcome.output:
        wrong.append("a traceback")
    if outcome.argv[0] != "logs" and (match := CONTROL.search(outcome.output)):  # the user's own log, exact in a pipe
        wrong.append(
            f"a control character {match[0]!a} near {outcome.output[max(0, match.start() - 60) : match.end()]!a}"
        )
    wrong += _not_json(outcome)
    if os.getuid() == 0:
        after = _belongings_of_others(world, caller)
        wrong += [f"changed, and not the caller's: {path}" for path, was in before.items() if after.get(path) != was]
        wrong += [f"made among another's: {path}" for path in after.keys() - before.keys() if f"/{FOREIGN}/" in path]
    if world.executed.exists() or list(world.folder.rglob("executed")):
        wrong.append("something was executed")
    return wrong + _bad_calls(world, caller)


def _not_json(outcome: Outcome) -> list[str]:
    """A program that asks for JSON can parse what is printed; errors go to the other stream."""
    if "--json" not in outcome.argv or outcome.code != 0:
        return []
    lines = [line for line in outcome.output.splitlines() if line.startswith(("{", "["))]
    for line in lines:
        try:
            json.loads(line, parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))
        except ValueError as error:
            if len(lines) > 1 or "\n" not in outcome.output.strip():
                return [f"no JSON: {error}: {line[:200]!a}"]
    return []


def _bad_calls(world: World, caller: int) -> list[str]:
    """Slurm was told to do something with what is not the caller's."""
    wrong = []
    with contextlib.suppress(OSError):
        for line in world.calls.read_text(errors="replace").splitlines():
            user, _, call = line.partition(" ")
            acts = call.startswith("sbatch ") and "--test-only" not in call
            if acts and "/runs/" in call and call.split()[-1].startswith(str(world.runs)):
                script = Path(call.split()[-1])
                if script.exists() and script.lstat().st_uid != int(user):
                    wrong.append(f"submitted another's script as user {user}: {call}")
                if f"/{FOREIGN}/" in call and caller != STRANGER:
                    wrong.append(f"submitted another's run as user {user}: {call}")
    return wrong


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)  # here, not in what reads: a file may hold any number
    main(*sys.argv[1:])
