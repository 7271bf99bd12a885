"""The decisions of an endpoint, as tables of values and as properties."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each

from slurmft.config.inference import EngineConfig, InferenceConfig
from slurmft.policy.inference import is_open, normal
from slurmft.policy.serving import (
    AVOIDED_S,
    MOST_SAVED,
    SHARE,
    Breaker,
    Entry,
    Failure,
    GracefulDegradation,
    Load,
    Priority,
    Queue,
    RetryBudget,
    SecondTry,
    Served,
    after_failure,
    cheaper,
    choose_replica,
    end_to_end,
    entry_of,
    place_alone,
    seconds_asked,
    within_lag,
)

LOADS = st.lists(
    st.builds(Load, st.text("abcdefgh", min_size=1, max_size=3), st.integers(0, 9), avoided=st.booleans()),
    max_size=8, unique_by=lambda each: each.name,
)  # fmt: skip


@pytest.mark.parametrize(
    ("loads", "without", "chosen"),
    [
        ([], (), None),
        ([Load("a", 3), Load("b", 1), Load("c", 1)], (), "b"),
        ([Load("a", 3), Load("b", 1)], ("b",), "a"),
        ([Load("a", 4), Load("b", 1)], ("b",), "b"),
        ([Load("a", 4), Load("b", 4)], (), None),
        ([Load("a", 0, avoided=True), Load("b", 3)], (), "b"),
        ([Load("a", 0, avoided=True), Load("b", 4)], (), None),
        ([Load("a", 2, avoided=True), Load("b", 1, avoided=True)], (), "b"),
        ([Load("a", 0, kept=True), Load("b", 3)], (), "b"), ([Load("a", 0, kept=True)], (), None),
    ],
)  # fmt: skip
def test_which_replica_gets_a_request(loads, without, chosen):
    assert choose_replica(loads, limit=4, without=without) == chosen


@of_each(loads__without__chosen=[
        ([], (), None),
        ([Load("a", 3), Load("b", 1)], (), "b"),
        ([Load("a", 3), Load("b", 1)], ("b",), "a"),
        ([Load("a", 3), Load("b", 0, proven=False)], (), "a"),
        ([Load("a", 0, proven=False)], (), "a"),
        ([Load("a", 0, avoided=True), Load("b", 9)], (), "b"),
        ([Load("a", 0, avoided=True)], (), None),
        ([Load("a", 0), Load("b", 9, kept=True)], ("b",), "b"),
        ([Load("a", 0), Load("b", 1, kept=True, avoided=True)], (), None),
        ([Load("b", 0, kept=True), Load("a", 1, kept=True), Load("c", 0)], (), "a"),
        ([Load("a", 1, kept=True, taken=True), Load("b", 2), Load("c", 3), Load("d", 9)], (), "b"),
        ([Load("a", 1, kept=True, taken=True), Load("b", 2), Load("c", 3)], (), None),
        ([Load("a", 1, kept=True, avoided=True), Load("b", 1, kept=True), Load("c", 0), Load("d", 0)], (), "b"),
    ])  # fmt: skip
def test_on_which_replica_a_suspect_is_tried_alone(loads, without, chosen):
    assert place_alone(loads, without) == chosen


@pytest.mark.parametrize(
    ("served", "newest", "max_lag", "is_within"),
    [
        (None, None, 0, True),
        (None, Served(1, 5), None, True),
        (None, Served(1, 5), 9, False),
        (Served(1, 5), None, 0, True),
        (Served(1, 5), Served(1, 5), 0, True),
        (Served(1, 4), Served(1, 5), 0, False),
        (Served(1, 4), Served(1, 5), 1, True),
        (Served(1, 4), Served(1, 5), None, True),
        (Served(1, 6), Served(1, 5), 0, True),
        (Served(1, 5), Served(2, 5), None, False),
        (Served(1, 9), Served(2, 5), 9, False),
        (Served(2, 4), Served(1, 5), 0, True),
    ],
)
def test_whose_weights_are_new_enough(served, newest, max_lag, is_within):
    assert within_lag(served, newest, max_lag) is is_within


SERVED = st.builds(Served, st.integers(1, 4), st.integers(0, 40))


@given(SERVED, SERVED, st.none() | st.integers(0, 9), st.integers(0, 9))
def test_newer_weights_and_a_larger_lag_never_exclude(served, newest, max_lag, more):
    if within_lag(served, newest, max_lag):
        assert within_lag(Served(served.branch, served.version + more), newest, max_lag)
        assert within_lag(served, newest, None if max_lag is None else max_lag + more)
        if served < newest:
            assert served.branch == newest.branch
            assert max_lag is None or newest.version - served.version <= max_lag


@given(LOADS, st.integers(1, 9), st.integers(0, 7))
def test_a_stale_replica_gets_nothing_even_where_there_is_no_other(loads, limit, number):
    loads = [replace(each, stale=place <= number) for place, each in enumerate(loads)]
    chosen = {choose_replica(loads, limit=limit), place_alone(loads, ())} - {None}
    assert not chosen & {each.name for each in loads if each.stale}


@given(LOADS, st.integers(1, 9), st.sets(st.text("abcdefgh", min_size=1, max_size=3)))
def test_a_chosen_replica_has_room_and_none_that_may_be_chosen_has_less_to_do(loads, limit, without):
    name = choose_replica(loads, limit=limit, without=without)
    able = [each for each in loads if not each.avoided] or loads
    if name is None:
        assert all(each.in_flight >= limit for each in able)
        return
    chosen = next(each for each in loads if each.name == name)
    assert chosen in able and chosen.in_flight < limit
    assert all(
        each.in_flight >= chosen.in_flight for each in able if (each.name in without) <= (chosen.name in without)
    )


def test_a_breaker_opens_after_failures_in_a_row_and_closes_with_an_answer():
    breaker = Breaker()
    for _ in range(4):
        breaker = breaker.failed(10.0)
    assert not breaker.is_open(10.0)
    breaker = breaker.failed(10.0)
    assert breaker.is_open(10.0 + AVOIDED_S - 0.01) and not breaker.is_open(10.0 + AVOIDED_S)
    assert breaker.failed(20.0).is_open(20.0), "the one that tried it failed, too"
    assert not breaker.succeeded().is_open(10.0) and breaker.succeeded().failures == 0


QUIET = Queue(waiting=0, most=2, slots=4, mean_s=1.0, has_room=True)


@pytest.mark.parametrize(
    ("queue", "more", "entry"),
    [
        (QUIET, {}, Entry.ADMITTED),
        (QUIET, {"closing": True}, Entry.CLOSED),
        (QUIET, {"priority": Priority.LOW}, Entry.ADMITTED),
        (QUIET, {"priority": Priority.LOW, "degraded": True}, Entry.LOW_PRIORITY),
        (QUIET, {"degraded": True}, Entry.ADMITTED),
        (Queue(0, 2, 4, 1.0, has_room=False), {}, Entry.ADMITTED),
        (Queue(1, 2, 4, 1.0, has_room=True), {}, Entry.ADMITTED),
        (Queue(2, 2, 4, 1.0, has_room=True), {}, Entry.FULL),
        (Queue(0, 0, 4, 1.0, has_room=False), {}, Entry.FULL),
        (Queue(0, 0, 4, 1.0, has_room=True), {}, Entry.ADMITTED),
        (Queue(1, 2, 4, 30.0, has_room=False), {}, Entry.FULL),  # it would wait 15 s, and has 10
        (Queue(1, 2, 0, 30.0, has_room=False), {}, Entry.ADMITTED),  # no replica yet: how long is not known
    ],
)  # fmt: skip
def test_what_becomes_of_a_request_that_comes(queue, more, entry):
    given = {"left_s": 10.0, "priority": Priority.NORMAL, "degraded": False, "closing": False, **more}
    assert entry_of(queue, **given) is entry


TRY = {"failed": 1, "max_retries": 3, "left_s": 10.0, "budget": RetryBudget(), "base_delay_s": 1.0,
       "max_delay_s": 4.0, "others": False}  # fmt: skip


@of_each(failure__more__then=[
        (Failure.LOST, {}, SecondTry(again=True)),
        (Failure.LOST, {"budget": RetryBudget(0.0)}, SecondTry(again=True)),
        (Failure.LOST, {"left_s": 0.0}, SecondTry(again=False)),
        (Failure.LOST, {"failed": 4}, SecondTry(again=False)),
        (Failure.SICK, {}, SecondTry(again=True, spends=True, pause_s=1.0)),
        (Failure.SICK, {"failed": 3}, SecondTry(again=True, spends=True, pause_s=4.0)),
        (Failure.SICK, {"others": True}, SecondTry(again=True, spends=True)),
        (Failure.SICK, {"asked_s": 2.5}, SecondTry(again=True, spends=True, pause_s=2.5)),
        (Failure.SICK, {"asked_s": 99.0}, SecondTry(again=True, spends=True, pause_s=4.0)),
        (Failure.SICK, {"budget": RetryBudget(0.9)}, SecondTry(again=False)),
        (Failure.SICK, {"left_s": 0.5}, SecondTry(again=False, spends=True, pause_s=1.0)),
    ])  # fmt: skip
def test_what_follows_a_failed_try(failure, more, then):
    assert after_failure(failure, **{**TRY, **more}) == then


@given(st.lists(st.booleans(), max_size=400))
def test_retries_are_a_tenth_of_the_requests_and_what_was_saved_up(wishes):
    budget, retries = RetryBudget(), 0
    for wants in wishes:
        budget = budget.came()
        if wants and budget.has_one:
            budget, retries = budget.spent(), retries + 1
        assert 0 <= budget.saved <= MOST_SAVED
    assert retries <= SHARE * len(wishes) + MOST_SAVED / 2


def test_degradation_begins_below_its_share_and_ends_above_a_higher_one():
    state = GracefulDegradation(below=0.5, concurrency=32)
    seen = []
    for ready in (10, 5, 4, 5, 6, 5, 4, 0):
        state = state.saw(ready, 10)
        seen.append(state.degraded)
    assert seen == [False, False, True, True, False, False, True, True]
    assert (state.slots, state.timeout_factor) == (16, 2.0)
    assert GracefulDegradation(concurrency=1, degraded=True).slots == 1
    assert not GracefulDegradation(below=0.0).saw(0, 10).degraded, "0 switches it off"
    assert not GracefulDegradation(below=0.9).saw(0, 10).saw(10, 10).degraded, "all that there are is always enough"


ADMINISTRATIVE = {
    "vllm": ["/sleep", "/wake_up", "/collective_rpc", "/reset_prefix_cache", "/server_info", "/start_profile",
             "/scale_elastic_ep", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/update_weights",
             "/abort_requests", "/tokenizer_info"],
    "sglang": ["/flush_cache", "/update_weights_from_disk", "/release_memory_occupation", "/load_lora_adapter",
               "/set_internal_state", "/configure_logging", "/abort_request", "/close_session", "/get_server_info"],
    "llama-server": ["/slots", "/slots/0", "/props", "/lora-adapters", "/models/load", "/models/unload"],
    "transformers": ["/reset", "/load_model"],
    "another": ["/admin", "/debug/pprof", "/shutdown", "/v1", "/", "/v1/load_lora_adapter", "/openapi.json",
                "/v1/modelsx", "/health/../sleep"],
}  # fmt: skip


def open_paths(program: str, **keys: Any) -> tuple[str, ...]:
    return EngineConfig(command=(program, "{port}"), **keys).open_paths


@pytest.mark.parametrize("program", sorted(ADMINISTRATIVE))
def test_what_administers_an_engine_is_closed_however_it_is_written(program: str):
    allowed = open_paths(program)
    for path in ADMINISTRATIVE[program]:
        hidden = "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:])
        for written in (path, path + "/", path + "/below", path.upper(), hidden, path.replace("/", "%2f")):
            found = normal(written)
            assert found is None or not any(is_open(method, found, allowed) for method in ("GET", "POST")), written
        if normal(path) is not None:
            assert is_open("POST", path, open_paths(program, allow_paths=(path,)))
            assert is_open("POST", path, open_paths(program, allow_paths=("/",)))
    assert not is_open("POST", "/v1/models", allowed) and not is_open("DELETE", "/v1/models/m", allowed)


@of_each(program__method__path=[
        ("another", "POST", "/v1/chat/completions"), ("another", "GET", "/v1/models/org%2Fname"),
        ("another", "HEAD", "/v1/models"), ("another", "GET", "/v1/responses/resp_1"), ("another", "GET", "/health"),
        ("vllm", "POST", "/pooling"), ("sglang", "POST", "/generate"), ("llama-server", "POST", "/completion"),
        ("text-generation-launcher", "POST", "/generate_stream"),
    ])  # fmt: skip
def test_what_asks_an_engine_for_something_is_open(program: str, method: str, path: str):
    found = normal(path)
    assert found is not None and is_open(method, found, open_paths(program))


def test_paths_that_the_configuration_names_are_open():
    allowed = open_paths("mine", request_path="/predict?v=2", ready_path="/ready")
    assert is_open("POST", "/predict", allowed)
    assert is_open("GET", "/ready", allowed) and not is_open("POST", "/ready", allowed)


def test_a_kept_configuration_has_its_paths_in_another_section():
    section = {"engine": {"command": ["e", "{port}"]}, "serving": {"allow_paths": ["/sleep"]}}
    assert InferenceConfig.model_validate(section).engine.allow_paths == ("/sleep",)


@of_each(path=["/a/../b", "/a/./b", "//a", "/a//b", "/a%2f%2fb", "/a%2F../b", "/a%252fb", "/%2e%2e/a", "/a\\b",
             "/a%5cb", "/a%00", "/a%0d%0a", "/a;b", "/%2573leep", "a", "", "*", "http://h/a", "/a b"])  # fmt: skip
def test_a_path_with_two_meanings_is_none(path):
    assert normal(path) is None


@given(st.text(max_size=30))
def test_a_normal_path_is_read_as_itself_by_any_engine(text):
    if (found := normal("/" + text)) is not None:
        assert normal(found) == found
        assert "//" not in found and "/../" not in found + "/"


def test_headers_of_the_connection_stay_on_it():
    given = [("Connection", "close, X-Mine"), ("x-mine", "1"), ("Keep-Alive", "2"), ("X-Other", "3"),
             ("Transfer-Encoding", "chunked"), ("Content-Length", "4"), ("Set-Cookie", "a"), ("Set-Cookie", "b"),
             ("Authorization", "Bearer t"), ("X-API-Key", "t")]  # fmt: skip
    kept = [("X-Other", "3"), ("Set-Cookie", "a"), ("Set-Cookie", "b")]
    assert end_to_end(given, to_engine=True) == kept
    assert end_to_end(given) == [*kept, ("Authorization", "Bearer t"), ("X-API-Key", "t")]


@of_each(
    header__seconds=[
        (None, None),
        ("3", 3.0),
        ("0.5", 0.5),
        ("0", None),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
    ]
)
def test_the_time_that_a_client_gives(header, seconds):
    assert seconds_asked(header) == seconds


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@of_each(path__asked__becomes=[
        (TEXT, {"prompt": "x"}, {"prompt": "x", "max_tokens": 64, "model": "s"}),
        (TEXT, {"max_tokens": 10, "model": "l"}, {"max_tokens": 10, "model": "s"}),
        (CHAT, {"max_completion_tokens": 900}, {"max_completion_tokens": 64, "model": "s"}),
        (CHAT, {"max_tokens": 900, "min_tokens": 100}, {"max_tokens": 64, "min_tokens": 64, "model": "s"}),
        (CHAT, {"max_tokens": None}, {"max_tokens": 64, "model": "s"}),
        (CHAT, {"max_tokens": "many"}, {"max_tokens": "many", "model": "s"}),
        ("/v1/responses", {"max_output_tokens": 900}, {"max_output_tokens": 64, "model": "s"}),
        ("/v1/messages", {"max_tokens": 900}, {"max_tokens": 64, "model": "s"}),
        ("/v1/embeddings", {"input": "x"}, {"input": "x"}), (TEXT, ["x"], ["x"]),
    ])  # fmt: skip
def test_a_degraded_endpoint_asks_for_less_and_says_what(path, asked, becomes):
    body, told = cheaper(path, json.dumps(asked).encode(), 64, "s")
    assert json.loads(body) == becomes
    lowered = [name for name in becomes if becomes[name] != asked.get(name)] if isinstance(asked, dict) else []
    assert sorted(each.partition("=")[0] for each in told.split(", ") if each) == sorted(lowered)


@pytest.mark.parametrize("body", [b"", b"\x1f\x8b\x00", b"{", b"[" * 100_000, b"1" * 5000, b'"x"', b"\xff"])
def test_what_is_no_request_is_passed_on_as_it_is(body):
    assert cheaper(TEXT, body, 64, "s") == (body, "")


def test_what_is_not_set_is_not_touched():
    assert cheaper(TEXT, b'{"model": "l"}', None, "s") == (b'{"model": "s"}', "model=s")
    assert cheaper(TEXT, b'{"max_tokens": 99}', 64, None) == (b'{"max_tokens": 64}', "max_tokens=64")
    assert cheaper(TEXT, b'{"max_tokens":  9}', 64, None) == (b'{"max_tokens":  9}', "")
