"""The decisions of inference, as tables of values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.policy.inference import (
    KILLS,
    MOST_PATIENCE,
    ORDINARY_BYTES,
    RAISE_AFTER,
    Circumstances,
    Death,
    Restarts,
    Slots,
    TryOutcome,
    counter_in,
    devices_of,
    engine_kind,
    evidence_of,
    is_loading,
    is_poison,
    is_suspect,
    judge,
    likeliest,
    model_in,
    next_alone,
    outcome_of_status,
    patience_for,
    retry_after_s,
    smallest,
    suspicion,
    with_another_path,
)
from slurmft.policy.verdict import EXIT_USAGE, Cause


@of_each(status__text__outcome=[
        (200, "", TryOutcome.ANSWER), (201, "", TryOutcome.ANSWER), (301, "", TryOutcome.ANSWER),
        (400, "", TryOutcome.ANSWER), (404, "", TryOutcome.ANSWER), (422, "out of memory", TryOutcome.ANSWER),
        (408, "", TryOutcome.RETRY), (429, "", TryOutcome.RETRY), (500, "oops", TryOutcome.RETRY),
        (503, "", TryOutcome.RETRY), (501, "", TryOutcome.ANSWER),
        (500, "torch.OutOfMemoryError: CUDA out of memory", TryOutcome.SMALLER),
        (503, "KV cache is full", TryOutcome.SMALLER),
    ])  # fmt: skip
def test_what_follows_a_status(status, text, outcome):
    assert outcome_of_status(status, text) is outcome


@pytest.mark.parametrize(
    ("body", "times"),
    [
        (b"", 1.0), (b'{"max_tokens": 100}', 1.0), (b'{"max_tokens": 3072}', 3.0),
        (b'{"prompt": "\\"max_tokens\\": 9999"}', 1.0), (b'{"max_completion_tokens":2048}', 2.0),
        (b'{"max_tokens": 999999999}', MOST_PATIENCE), (b'{"max_tokens": 4096, "stream": true}', 1.0),
        (b"x" * 4 * ORDINARY_BYTES, 4.0), (b"x" * (64 << 20), MOST_PATIENCE),
        (b"x" * 3 * ORDINARY_BYTES + b'"max_tokens": 8192}', 8.0),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_how_long_an_engine_may_be_silent_over_a_request(body, times):
    assert patience_for(body) == pytest.approx(times, rel=0.01)


def test_the_smallest_request_has_the_model_of_the_one_it_is_made_from():
    body = b'{"messages": [{"role": "user", "content": "\\"model\\": \\"x\\""}], "model": "org/m", "max_tokens": 9}'
    assert model_in(body) == "org/m"
    asked = smallest("/v1/chat/completions", {"model": "org/m", "messages": [1, 2], "max_tokens": 900, "tools": []})
    assert asked == {"model": "org/m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    assert smallest("/generate", {"model": "m"}) is None and smallest("/v1/completions", {"prompt": "p"}) is None
    assert model_in(b"\x00" * 100) == model_in(b"") == ""


@of_each(header__seconds=[(None, None), ("3", 3.0), ("0", 0.0), ("1e9", 30.0), ("-1", None), ("nan", None),
     ("inf", None), ("soon", None), ("Wed, 21 Oct 2015 07:28:00 GMT", None)])  # fmt: skip
def test_retry_after(header, seconds):
    assert retry_after_s(header, longest_s=30.0) == seconds


@given(st.integers(1, 4096), st.lists(st.booleans(), max_size=200))
def test_slots_stay_between_one_and_their_limit(limit, ends):
    slots = Slots.full(limit)
    for is_good in ends:
        before = slots
        slots = slots.ended_well() if is_good else slots.out_of_memory()
        assert 1 <= slots.now <= limit
        assert slots.now <= before.now + 1


def test_slots_halve_at_once_and_grow_slowly():
    slots = Slots.full(8).out_of_memory()
    assert slots.now == 4
    for _ in range(4 * RAISE_AFTER - 1):
        slots = slots.ended_well()
    assert slots.now == 4
    assert slots.ended_well().now == 5


@pytest.mark.parametrize(
    ("deaths", "poison"),
    [
        ([], False), ([("a", False)] * 5, False), ([("a", True)], False), ([("a", True), ("a", True)], False),
        ([("a", True), ("b", False)], False), ([("a", True), ("b", True)], True),
        ([("a", False), ("b", True), ("c", True)], True),
    ],
)  # fmt: skip
def test_only_a_request_that_killed_two_alone_is_poison(deaths, poison):
    found = [Death(replica, alone=alone, how="SIGSEGV") for replica, alone in deaths]
    assert is_poison(found) is poison
    if poison:
        assert "2 times" in evidence_of(found) and "SIGSEGV" in evidence_of(found)


@pytest.mark.parametrize(
    ("alone", "near", "suspect"),
    [
        ([], [], False), ([False], [True], False), ([True], [True], True), ([False] * 2, [True] * 2, True),
        ([False, True], [False] * 2, True), ([False] * 2, [True, False], False), ([False] * 2, [False] * 2, False),
        ([False] * 3, [False] * 3, True),
    ],
)  # fmt: skip
def test_which_request_is_tried_alone(alone, near, suspect):
    each = enumerate(zip(alone, near, strict=True))
    deaths = [Death(str(number), alone=by_itself, how="hang", near=close) for number, (by_itself, close) in each]
    assert is_suspect(deaths) is suspect


def test_the_first_quarter_is_likely_and_four_at_least():
    assert [len(likeliest(range(count))) for count in (1, 4, 8, 16, 40)] == [1, 4, 4, 4, 10]


def test_suspects_have_their_turns_by_suspicion_and_the_others_half_of_the_time():
    def turn(number, *, alone=0, near=0):
        deaths = [Death("r", alone=place < alone, how="hang", near=place < near) for place in range(3)]
        return suspicion(deaths), -number

    proved, likely, later, far = turn(4, alone=1, near=3), turn(1, near=2), turn(2, near=2), turn(3)
    line = [far, later, likely, proved]
    assert next_alone(line, in_vain_s=0.0, well_s=0.0) == proved
    assert next_alone(line[:3], in_vain_s=5.0, well_s=5.0) == likely, "the first of several"
    assert next_alone(line, in_vain_s=6.0, well_s=5.0) == far
    assert next_alone([proved], in_vain_s=6.0, well_s=5.0) == proved


@given(st.integers(2, 40), st.data())
def test_whatever_kills_at_the_same_time_is_found_and_nothing_else(count, data):
    """Requests on a few engines, of which any with a poisonous one dies; a turn alone is soon, or not."""
    guilty = data.draw(st.sets(st.integers(0, count - 1), max_size=4), label="guilty")
    engines = data.draw(st.integers(1, 6), label="engines")
    deaths: dict[int, list[Death]] = {each: [] for each in range(count)}
    lives, is_open = 0, set(deaths)

    def try_together(some: set[int]) -> None:
        nonlocal lives, is_open
        lives += 1
        if some & guilty:
            for each in some:
                deaths[each].append(Death(f"life {lives}", alone=len(some) == 1, how="hang"))
        else:
            is_open -= some

    while is_open:
        soon = data.draw(st.booleans())
        alone = {each for each in is_open if is_suspect(deaths[each]) or (soon and deaths[each])}
        for first in range(engines):
            if some := {each for each in is_open - alone if each % engines == first}:
                try_together(some)
        for each in alone:
            try_together({each})
        is_open -= {each for each in is_open if is_poison(deaths[each])}
    assert {each for each in deaths if is_poison(deaths[each])} == guilty
    assert all(len(deaths[each]) <= KILLS + 2 for each in deaths), "two in company at most, and the proof"


def test_restarts_have_a_pause_that_doubles_and_an_end():
    restarts, delays = Restarts(max_restarts=4, first_delay_s=1.0, longest_delay_s=3.0), []
    for _ in range(4):
        restarts = restarts.failed(0.0)
        delays.append(restarts.delay_s)
    assert delays == [0.0, 1.0, 2.0, 3.0]
    assert restarts.failed(0.0).delay_s is None
    assert restarts.succeeded().failed(0.0).delay_s == 0.0


@of_each(status__text__expected=[
        (503, "", True), (502, "<html>", True), (504, "", True), (500, '{"error": "Model m is not ready yet."}', True),
        (500, "the model is still loading", True), (500, "Engine is starting up", True), (500, "not initialized", True),
        (500, "", False), (500, "Internal Server Error", False), (500, "could not load model: no such file", False),
        (500, "Error loading model", False), (501, "", False), (404, "the model is not loaded", False),
        (200, "loading", False),
    ])  # fmt: skip
def test_an_engine_says_that_it_cannot_serve_yet(status, text, expected):
    assert is_loading(status, text) is expected


@of_each(command__name=[
        (["vllm", "serve", "m"], "vllm"), (["python", "-m", "vllm.entrypoints.openai.api_server"], "vllm"),
        (["/opt/bin/llama-server", "-m", "x.gguf"], "llama-server"),
        (["python3", "-m", "sglang.launch_server"], "sglang"),
        (["text-generation-launcher"], "text-generation-launcher"), (["python", "server.py", "vllm.py"], "vllm"),
        (["python", "own.py"], "another"), ([], "another"),
    ])  # fmt: skip
def test_engines_are_known_by_name(command, name):
    assert engine_kind(command).name == name


@of_each(text__value=[
        ("", None), ("other 3", None), ("made_total 3", 3.0),
        ('made_total{a="b c"} 3\nmade_total{a="d"} 4.5 17\n', 7.5),
        ("made_total_created 9", None), ("made_total{} x\nmade_total 2", 2.0),
        ("# HELP made_total x\nmade_total", None),
    ])  # fmt: skip
def test_a_counter_is_summed_over_its_labels(text, value):
    assert counter_in(text, "made_total") == value


@pytest.mark.parametrize(
    ("visible", "replica", "per_replica", "devices"),
    [
        ([], 3, 2, ()),
        (["0", "1"], 1, 1, ("1",)),
        (["a", "b", "c", "d"], 1, 2, ("c", "d")),
        (["a", "b"], 5, 0, ("a", "b")),
    ],
)
def test_the_gpus_of_a_replica(visible, replica, per_replica, devices):
    assert devices_of(visible, replica, per_replica) == devices


def test_too_few_gpus_are_told():
    with pytest.raises(ValueError, match="replica 1 needs GPUs 2 to 3, but there are 3"):
        devices_of(["0", "1", "2"], 1, 2)


@of_each(word__becomes=[("/m/a", "/x"), ("--model=/m/a", "--model=/x"), ("/m/a/b.gguf", "/x/b.gguf"),
     ("a=/m/a,b=/m/a", "a=/x,b=/x"), ("/m/a-b", "/m/a-b"), ("/m/a.gguf", "/m/a.gguf"), ("/c/m/a", "/c/m/a"),
     ("{port}", "{port}")])  # fmt: skip
def test_a_path_of_a_command_becomes_another_one(word: str, becomes: str) -> None:
    assert with_another_path(("serve", word), "/m/a/", "/x") == ("serve", becomes)


PLANNED = {"planned": Cause.PREEMPTED, "planned_reason": "SIGTERM"}
GONE = {"lost": {"n1": True, "n2": False}, "problem": "nothing was heard"}
DOWN = {"all_down": True, "problem": "no replica is left"}


@of_each(seen__cause__reason=[
        ({}, Cause.LAUNCH_FAILURE, "unknown"), ({"problem": "no srun"}, Cause.LAUNCH_FAILURE, "no srun"),
        (PLANNED, Cause.PREEMPTED, "SIGTERM"), (PLANNED | GONE | DOWN, Cause.PREEMPTED, "SIGTERM"),
        ({"outside": (Cause.TIME_LIMIT, "TIMEOUT")}, Cause.TIME_LIMIT, "TIMEOUT"),
        (PLANNED | {"outside": (Cause.TIME_LIMIT, "TIMEOUT")}, Cause.PREEMPTED, "SIGTERM"),
        (PLANNED | {"outside": (Cause.CANCELLED, "scancel")}, Cause.CANCELLED, "scancel"),
        (PLANNED | {"outside": (Cause.REQUEUED, "requeue")}, Cause.REQUEUED, "requeue"),
        (GONE | DOWN, Cause.WORKER_ERROR, "no replica is left"),
        (DOWN | GONE | {"works": False}, Cause.NODE_LOST, "the agents are gone: n1, n2; nothing was heard"),
        ({"works": False}, Cause.LAUNCH_FAILURE, "unknown"),
        ({"asking_failed": "trials.next: x"}, Cause.WORKER_ERROR, "trials.next: x"),
        (GONE | {"works": False, "asking_failed": "trials.next: x"}, Cause.WORKER_ERROR, "trials.next: x"),
        (PLANNED | {"asking_failed": "trials.next: x"}, Cause.PREEMPTED, "SIGTERM"),
    ])  # fmt: skip
def test_why_an_attempt_ended(seen, cause, reason):
    verdict = judge("", Circumstances(first=2, done=5, **seen))
    assert (verdict.cause, verdict.reason) == (cause, reason)
    assert (verdict.first_step, verdict.last_step, verdict.saved_step) == (2, 5, 5)
    answered = judge("7 requests are answered", Circumstances(first=2, done=7, **seen))
    assert (answered.cause, answered.reason, answered.exit_code) == (Cause.FINISHED, "7 requests are answered", 0)


def test_who_is_to_blame_for_it():
    lost = judge("", Circumstances(works=False, **GONE))
    assert (lost.suspect_nodes, lost.living, lost.exit_code) == (("n1", "n2"), ("n1",), 0)
    assert judge("", Circumstances(works=False, lost={"n2": False})).living is None
    assert judge("", Circumstances(**DOWN)).exit_code == 1
    assert judge("", Circumstances(is_hopeless=True, **DOWN)).exit_code == EXIT_USAGE
    assert judge("", Circumstances(asking_failed="trials.next: x", **DOWN)).exit_code == EXIT_USAGE
