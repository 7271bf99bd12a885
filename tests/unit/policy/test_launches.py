"""Which launch trains, what is added to sbatch's command line, and what makes a worker the task it stands for."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.errors import UsageError
from slurmft.operations import script
from slurmft.policy import sbatch
from slurmft.policy.sbatch import Known, Line, split_line

GUARD = "GUARD; "


@of_each(words__flags__options__command=[
        (["-N2", "-n", "4", "job.sh", "-x"], sbatch.SBATCH_FLAGS, (("N", "2"), ("n", "4")), ("job.sh", "-x")),
        (["--nodes=2", "--wait", "job.sh"], sbatch.SBATCH_FLAGS, (("nodes", "2"), ("wait", "")), ("job.sh",)),
        (["-HW", "job.sh"], sbatch.SBATCH_FLAGS, (("H", ""), ("W", "")), ("job.sh",)),
        (["--kill-on-bad-exit", "run.sh", "python"], sbatch.SRUN_FLAGS, (("kill-on-bad-exit", ""),),
         ("run.sh", "python")),
        (["-luc8", "python"], sbatch.SRUN_FLAGS, (("l", ""), ("u", ""), ("c", "8")), ("python",)),
        (["--bcast", "-I60", "--nice", "./x.py"], sbatch.SRUN_FLAGS, (("bcast", ""), ("I", "60"), ("nice", "")),
         ("./x.py",)),
        (["--no-container-mount-home", "bash", "-c", "x"], sbatch.SRUN_FLAGS, (("no-container-mount-home", ""),),
         ("bash", "-c", "x")),
        (["-q", "debug", "python"], sbatch.SRUN_FLAGS, (("q", "debug"),), ("python",)),
        (["--kill-on-invalid-dep", "yes", "job.sh"], sbatch.SBATCH_FLAGS, (("kill-on-invalid-dep", "yes"),),
         ("job.sh",)),
        (["-n1", "--", "-odd"], sbatch.SRUN_FLAGS, (("n", "1"),), ("-odd",)),
        ([], sbatch.SRUN_FLAGS, (), ()),
    ])  # fmt: skip
def test_options_end_where_getopt_ends_them(words, flags, options, command):
    line = split_line(words, flags)
    assert (line.options, line.command) == (options, command)
    assert [*line.words, *line.command] == [word for word in words if word != "--"]


ALL = ["--requeue", "--open-mode=append", "--signal=USR2@120"]


@of_each(given__environment__added=[
        ([[], []], {}, ALL),
        ([["--signal=TERM@60"], []], {}, ALL[:2]),
        ([[], ["--signal", "B:USR1@60"]], {}, ALL[:2]),
        ([["--no-requeue"], ["--open-mode", "truncate"]], {}, ALL[2:]),
        ([["--sig=TERM"], []], {}, ALL[:2]),
        ([[], []], {"SBATCH_SIGNAL": "TERM", "SBATCH_REQUEUE": "1", "SBATCH_OPEN_MODE": "append"}, []),
    ])  # fmt: skip
def test_only_what_the_user_has_not_set_is_added(given, environment, added):
    assert sbatch.added_options(given, environment) == added


@of_each(given__environment__expected=[
        ([[], []], {}, ("SIGUSR2", 120)),
        ([["--signal=TERM@60"], []], {}, ("SIGTERM", 60)),
        ([["--signal=TERM@60"], ["--signal=B:USR1@300"]], {}, ("SIGUSR1", 300)),
        ([["--signal=TERM@60"], []], {"SBATCH_SIGNAL": "2@30"}, ("SIGINT", 30)),
        ([[], ["--signal", "SIGUSR2"]], {}, ("SIGUSR2", 60)),
        ([["--signal=HUP@60"], []], {}, ("SIGUSR2", 60)),
    ])  # fmt: skip
def test_the_signal_is_the_one_that_sbatch_would_take(given, environment, expected):
    assert sbatch.signal_of(given, environment) == expected


@pytest.mark.parametrize(
    ("text", "guarded"),
    [
        ("#!/bin/bash\n#SBATCH -N1\n\nset -e\nrun\n", "#!/bin/bash\n#SBATCH -N1\n\nGUARD; set -e\nrun\n"),
        ("#!/usr/bin/env bash\nrun", "#!/usr/bin/env bash\nGUARD; run"),
        ("\ufeff#!/bin/sh -l\r\n# first\r\nrun\r\n", "#!/bin/sh -l\n# first\nGUARD; run\n"),
        ("#!/bin/bash\n#SBATCH\n--mem=32G\n", "#!/bin/bash\n#SBATCH\nGUARD; --mem=32G\n"),
        ("#!/bin/sh\n# nothing\n", "#!/bin/sh\n# nothing\nGUARD; \n"),
        ("#!/bin/sh\n  # more\n#SBATCH -N2\n\trun\n", "#!/bin/sh\n  # more\n#SBATCH -N2\nGUARD; \trun\n"),
    ],
)
def test_the_guard_moves_no_line(text, guarded):
    assert sbatch.with_guard(text, GUARD) == guarded


@pytest.mark.parametrize("text", ["run\n", "", "#!/usr/bin/env python3\nprint()\n", "#!/bin/tcsh\nrun\n"])
def test_a_script_whose_launches_cannot_be_met_is_refused(text):
    with pytest.raises(UsageError, match=r"first line|cannot be met"):
        sbatch.with_guard(text, GUARD)


def test_sbatch_reads_options_behind_a_comment_that_is_indented():
    head = "#!/bin/sh\n #SBATCH -N9\n\n  # more\n#SBATCH --signal=USR1@60 # as ever\nrun\n#SBATCH -N7\n"
    assert sbatch.head_of(head) == ["--signal=USR1@60"]


def test_options_behind_the_first_command_are_found_but_not_those_of_scripts_that_it_writes():
    lines = ["#!/bin/sh", "#SBATCH -N2", "cat > inner.sh <<-'END'", "#SBATCH -N3", "\tEND", "x <<< END", "#SBATCH -N4"]
    assert sbatch.late_options("\n".join(lines)) == [7]
    assert sbatch.late_options("#!/bin/sh\n#SBATCH\n--mem=32G\n#SBATCH -p gpu\n#SBATCH --gres=gpu:1\n") == [4, 5]
    assert sbatch.late_options("#!/bin/sh\n # x << END\n\n#SBATCH -N1\nrun\n") == []


@of_each(words__text=[
        ([], "#!/bin/sh\n#SBATCH hetjob\n"), ([], "#!/bin/sh\n#SBATCH packjob\n"),
        (["-N1", ":", "-N2", "job.sh"], "#!/bin/sh\n"),
    ])  # fmt: skip
def test_a_job_of_several_components_is_refused(words, text):
    with pytest.raises(UsageError, match="not one run"):
        sbatch.refuse_several(split_line(words, sbatch.SBATCH_FLAGS).command, text)


@of_each(words=[["job.sh", "a", ":", "b"], ["--comment", ":", "job.sh"]])
def test_a_colon_among_a_scripts_own_words_makes_no_components(words):
    sbatch.refuse_several(split_line(words, sbatch.SBATCH_FLAGS).command, "#!/bin/sh\n#SBATCH\nhetjob\n")


@of_each(
    name__command__trains=[
        ("srun", "python train.py --lr 1", True),
        ("srun", "python -u -m pkg.train", True),
        ("srun", "python3.11 -X dev train.py", True),
        ("srun", "scripts/with_env.sh python src/train.py", True),
        ("srun", "./train.py", True),
        ("srun", "bash -c source a && python train.py", True),
        ("srun", "sh -xeuc \n  torchrun \\\n --nnodes 2 main.py", True),
        ("srun", "singularity exec img python -m torch.distributed.run vit.py", True),
        ("srun", "uv run train.py", True),
        ("srun", "./select_gpu singularity exec x.sif conda-python-distributed -u mnist.py", True),
        ("srun", "python -um pkg.train", True),
        ("srun", "python /data of/ann/train.py", True),
        ("srun", "bash -c cd src; ./train.py", True),
        ("srun", 'bash -c python "$SCRIPT"', True),
        ("srun", "pkill -f torchrun", False),
        ("srun", "pkill -f train.py", False),
        ("srun", "cp train.py /tmp", False),
        ("srun", "hostname --ip-address", False),
        ("srun", "prepare_env.sh", False),
        ("srun", "python -c import torch", False),
        ("srun", "python --version", False),
        ("srun", "python -m pip install x", False),
        ("srun", "cp -r /data/python /tmp", False),
        ("srun", "sh -c if test $SLURM_PROCID -eq 0; then hostname; fi", False),
        ("torchrun", "--nproc_per_node 2 train.py", True),
        ("accelerate", "launch train.py", True),
        ("accelerate", "config", False),
        ("deepspeed", "train.py", True),
        ("python", "-m torch.distributed.launch train.py", True),
        ("python", "-m accelerate.commands.launch train.py", True),
        ("python", "-m deepspeed.launcher.runner train.py", True),
        ("python", "prepare.py", False),
        ("uv", "run torchrun --nproc-per-node 4 train.py", True),
        ("uv", "run python prepare.py", False),
        ("mpirun", "-n 4 python train.py", False),
    ]
)
def test_which_launch_trains(name, command, trains):
    assert sbatch.judged(name, command.split(" "), said="", environment={}).trains is trains


def test_a_text_for_a_shell_is_judged_with_the_values_of_its_variables():
    text = ["bash", "-c", "$LAUNCHER --node_rank $SLURM_PROCID ${CMD}"]
    given = {"LAUNCHER": "python -u -m torch.distributed.run --nnodes 2", "CMD": "train.py"}
    assert sbatch.judged("srun", text, said="", environment=given).trains and sbatch.starts_ranks(text, given)
    given["LAUNCHER"] = "numactl -N 0 python"
    assert sbatch.judged("srun", text, said="", environment={"CMD": "python train.py"}).trains
    assert not sbatch.starts_ranks(text, given)
    assert not sbatch.judged("srun", text, said="", environment={"LAUNCHER": "hostname"}).trains


@of_each(
    words__names=[
        ("./launch.sh --epochs 3", ["./launch.sh"]),
        ("bash -l launch.sh x", ["bash", "launch.sh"]),
        ("apptainer exec x.sif sh run.sh", ["apptainer", "run.sh"]),
        ("-n4 --multi-prog list", ["list"]),
        ("cp launch.sh /tmp", ["cp"]),
        ("", []),
    ]
)
def test_which_words_name_a_script_that_runs(words, names):
    assert sbatch.scripts_of(split_line(words.split(), sbatch.SRUN_FLAGS)) == names


@of_each(
    text__commands=[
        ("#!/bin/bash -l\n# python x.py\nset -e\ntorchrun \\\n  x.py\n", "set -e; torchrun    x.py"),
        ("0 python a.py\n1-3 python b.py", "0 python a.py; 1-3 python b.py"),
        ("#!/usr/bin/env python3\nimport x  # sh\n", ""),
        ("\x7fELF\0python x.py", ""),
    ]
)
def test_the_commands_of_a_script(text, commands):
    assert sbatch.commands_in(text) == commands


def test_a_step_of_agents_has_the_network_of_the_step_that_it_stands_for_and_all_gpus_of_its_node():
    line = split_line(
        ["-G4", "--gpus-per-node=2", "--network=job_vni", "--comment", "x", "-i", "none", "python", "x.py"],
        sbatch.SRUN_FLAGS,
    )
    assert sbatch.why_not_srun(line) == ""
    assert sbatch.options_for_agents(line) == ["--gpus-per-node=2", "--network=job_vni"]
    assert "--input" in sbatch.why_not_srun(split_line(["--input=all", "python", "x.py"], sbatch.SRUN_FLAGS))


@of_each(words=[["python"] * 10_000, ["python" * 10_000], ["python -"] * 10_000, [f"/d/f{n}" for n in range(10_000)]])
def test_no_command_takes_long_to_judge(words):
    began = time.process_time()
    sbatch.judged("srun", words, said="", environment={})
    assert time.process_time() - began < 5


def test_what_the_script_says_goes_first():
    assert sbatch.judged("srun", ["hostname"], said="train", environment={}).trains
    assert not sbatch.judged("torchrun", ["train.py"], said="off", environment={}).trains


SCRIPT = ["#!/bin/bash", "#SLURMFT train", "python train.py \\", "  --lr 1", "python other.py", "srun x  #SLURMFT off"]


@of_each(line__said=[(3, "train"), (4, "train"), (5, ""), (6, "off"), (0, ""), (9, "")])
def test_a_remark_holds_for_the_command_below_it(line, said):
    assert sbatch.said_in(SCRIPT, line) == said


@of_each(
    words__why=[
        (["--pty", "python", "train.py"], "--pty"),
        (["--gpus-per-task=1", "--gpu-bind=single:1", "python", "train.py"], ""),
        (["--exact", "python", "train.py"], "--exact"),
        (["--mpi=pmix", "python", "train.py"], "MPI"),
        (["python", "-"], "standard input"),
        (["--multi-prog", "list"], "--multi-prog"),
        ([], "no command"),
        (["--cpu_bind=cores", "-q", "debug", "python", "train.py"], ""),
        (["--mpi=none", "-N1", "--gres=gpu:2", "python", "train.py"], ""),
    ]
)
def test_a_step_that_agents_cannot_stand_for_says_why(words, why):
    found = sbatch.why_not_srun(split_line(words, sbatch.SRUN_FLAGS))
    assert why in found if why else found == ""


@given(st.text("ab\n\"'; #=$", max_size=40), st.lists(st.text(max_size=20), max_size=3))
def test_a_script_without_its_guard_is_as_it_was_written(body, overrides):
    written = f"#!/bin/bash\n#SBATCH -n2\n{body}\necho x\n"
    guard = script._guard(("SIGUSR1", 60), overrides, again=False)
    assert sbatch.without_guard(sbatch.with_guard(written, guard)) == sbatch.without_guard(written) == written


def task(rank: int, node: int, local: int, **more: str) -> dict[str, str]:
    return {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local),
            "SLURMD_NODENAME": f"n{node}", "SLURM_STEP_NODELIST": "n[0-1]", **more}  # fmt: skip


def test_places_of_equal_blocks():
    found = sbatch.places_of([task(each, *divmod(each, 2), SLURM_CPUS_PER_TASK="3") for each in (2, 0, 3, 1)])
    assert not isinstance(found, str)
    assert (found.nodes, found.per_node, found.cpus_per_node, found.nodelist) == (2, 2, "6", "n[0-1]")
    assert [each["SLURM_PROCID"] for each in found.hosts["n1"]] == ["2", "3"]


@pytest.mark.parametrize(
    "tasks",
    [
        [task(0, 0, 0), task(1, 0, 1), task(2, 1, 0)],
        [task(0, 0, 0), task(1, 1, 0), task(2, 0, 1), task(3, 1, 1)],
    ],
)
def test_other_places_are_refused(tasks):
    assert "not spread over 2 nodes" in str(sbatch.places_of(tasks))


def test_a_worker_has_the_environment_of_its_task():
    agents = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "7", "SLURM_NTASKS": "2", "SLURM_ONLY_AGENTS": "1", "PATH": "/bin",
              "SLURMFT_NODES": "n0", "SLURMFT_TASKS": "/t", "RANK": "3", "SLURMFT_PAGE": "/p", "OTHER": "x",
              "SLURM_CONF": "/c"}  # fmt: skip
    base = {"PATH": "/bin", "OTHER": "x"}
    changes = sbatch.changes_for(
        task(3, 1, 1, SLURM_STEP_ID="5", SLURM_NTASKS="4", PATH="/bin", MODE="given", PMIX_RANK="3"),
        base, ranks_are_tasks=True,
    )  # fmt: skip
    worker = sbatch.worker_of_task(agents, changes, gpus=0, local=1)
    assert worker == task(3, 1, 1, SLURM_STEP_ID="7", SLURM_NTASKS="4", PATH="/bin", MODE="given", SLURM_CONF="/c",
                          SLURMFT_PAGE="/p")  # fmt: skip


def test_ranks_of_a_launcher_keep_their_places_and_a_launcher_has_none():
    agents = {"RANK": "3", "SLURMFT_PAGE": "/p", "SLURM_PROCID": "9"}
    as_rank = sbatch.changes_for({"SLURM_PROCID": "0"}, {}, ranks_are_tasks=False)
    assert sbatch.worker_of_task(agents, as_rank, gpus=0, local=0) == {**agents, "SLURM_PROCID": "0"}
    as_launcher = sbatch.changes_for({"SLURM_PROCID": "0"}, {}, ranks_are_tasks=True, attached=False)
    assert sbatch.worker_of_task(agents, as_launcher, gpus=0, local=0) == {"SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("own", "bound", "local", "visible"),
    [
        ("0", True, 0, "0"),
        ("0", True, 3, "3"),  # each task counts from 0 in its cgroup
        ("0,1", True, 1, "2,3"),
        ("0,1,2,3", False, 1, "0,1,2,3"),
        ("0,1,2,3", True, 1, "0,1,2,3"),  # more than there are: all of the node's
    ],
)
def test_gpus_of_a_task(own, bound, local, visible):
    of_task = {"CUDA_VISIBLE_DEVICES": own, **({"SLURM_GPUS_PER_TASK": "1"} if bound else {})}
    agents = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    worker = sbatch.worker_of_task(agents, {}, gpus=sbatch.gpus_of(of_task), local=local)
    assert worker["CUDA_VISIBLE_DEVICES"] == visible


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("out-%j-%t.txt", "out-12-3.txt"),
        ("%x_%A_%a_%4t", "job_11_2_0003"),
        ("100%%", "100%"),
        ("%b", None),
        ("3", None),
    ],
)
def test_the_files_of_sruns_output(pattern, name):
    environment = {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "2", "SLURM_PROCID": "3",
                   "SLURM_JOB_NAME": "job"}  # fmt: skip
    assert sbatch.output_name(pattern, environment, user="me") == name


def known(number: int, words: str, code: int | None, start: str = "7.0") -> Known:
    return Known(number=number, words=tuple(words.split()), code=code, start=start)


BEFORE = [known(1, "srun python a.py", 0), known(2, "srun python b.py --fresh", None)]


@of_each(
    words__before__number=[
        ("srun python a.py", BEFORE, 1),
        ("srun python b.py --resume last", BEFORE, 2),  # unfinished: the same launch with other arguments
        ("srun python a.py --other", BEFORE, None),  # finished: another one
        ("srun python c.py", BEFORE, None),
        ("srun python a.py", [known(1, "srun python a.py", 0, "7.1")], None),  # of this very start: a loop
        ("srun python a.py", [known(1, "srun python a.py", 0, "7.1"), known(2, "srun python a.py", None)], 2),
    ]
)
def test_a_launch_of_an_earlier_start(words, before, number):
    found = sbatch.same_launch(words.split(), before, "7.1")
    assert (found.number if found else None) == number


def test_line_without_options_has_no_value():
    assert Line((), (), ()).value("nodes", "N") is None
