"""Which answers may be continued, how that is asked for, and that a joined answer is the undisturbed one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from of_each import of_each
from word_engine import prompt_of, tokens_in

from slurmft.policy.serving import Form, JoinedAnswer, Prefix, continued_forms, continuing, error_in, form_of, streaming

TEXT: dict[str, Any] = {"model": "m", "prompt": "p", "max_tokens": 100}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "p"}]}
TEXT_PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"


@of_each(
    path__body__form=[
        (TEXT_PATH, TEXT, Form.TEXT),
        (CHAT_PATH, CHAT, Form.CHAT),
        ("/v1/embeddings", TEXT, None),
        (TEXT_PATH, {**TEXT, "prompt": [1, 2]}, None),
        (TEXT_PATH, {**TEXT, "max_tokens": None}, None),
        (TEXT_PATH, {**TEXT, "max_tokens": 10}, None),
        (TEXT_PATH, {**TEXT, "max_tokens": "100"}, None),
        (TEXT_PATH, {**TEXT, "max_tokens": True}, None),
        (CHAT_PATH, {**CHAT, "max_tokens": 100, "max_completion_tokens": 100}, None),
        (CHAT_PATH, {**CHAT, "messages": []}, None),
        (CHAT_PATH, {**CHAT, "messages": "hi"}, None),
        (CHAT_PATH, {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": "I"}]}, None),
        (TEXT_PATH, {**TEXT, "n": 1, "stop": None, "stream": False, "frequency_penalty": 0.0}, Form.TEXT),
        (TEXT_PATH, {**TEXT, "n": 2}, None),
        (TEXT_PATH, {**TEXT, "n": True}, None),
        (TEXT_PATH, {**TEXT, "logprobs": 0}, None),
        (TEXT_PATH, {**TEXT, "stop": ["\n\n"]}, None),
        (TEXT_PATH, {**TEXT, "stream": True}, None),
        (TEXT_PATH, {**TEXT, "presence_penalty": 0.5}, None),
        (TEXT_PATH, {**TEXT, "seed": 3, "temperature": 0}, Form.TEXT),
        (TEXT_PATH, {**TEXT, "seed": 3}, None),
        (TEXT_PATH, {**TEXT, "guided_regex": "a+"}, None),
        (CHAT_PATH, {**CHAT, "tools": [{"type": "function"}]}, None),
        (CHAT_PATH, {**CHAT, "response_format": {"type": "json_object"}}, None),
        (CHAT_PATH, {**CHAT, "something_new": 1}, None),
    ]
)
def test_what_may_be_continued(path, body, form):
    assert form_of(path, body) is form


@pytest.mark.parametrize(("setting", "forms"), [("auto", set()), ("always", {Form.TEXT, Form.CHAT}), ("never", set())])
def test_nothing_is_continued_by_itself(setting, forms):
    assert continued_forms(setting) == forms


def test_the_rest_is_asked_for_with_what_was_generated_behind_the_prompt():
    prefix = Prefix(" so far", 30)
    asked = continuing({**TEXT, "min_tokens": 20}, Form.TEXT, prefix)
    assert asked == {**streaming(TEXT), "prompt": "p so far", "max_tokens": 70, "min_tokens": 0}
    chat = continuing({**CHAT, "max_completion_tokens": 100}, Form.CHAT, prefix)
    assert chat is not None and chat["max_completion_tokens"] == 70
    assert chat["messages"] == [*CHAT["messages"], {"role": "assistant", "content": " so far"}]
    assert (chat["continue_final_message"], chat["add_generation_prompt"]) == (True, False)
    assert continuing(TEXT, Form.TEXT, Prefix("all", 100)) is None, "nothing is left"
    assert TEXT == {"model": "m", "prompt": "p", "max_tokens": 100}, "the request itself stays as it is"


PIECE = st.tuples(st.sampled_from([" ", "\n", "A", "", "\t"]), st.text("0123456789abcdef", min_size=1, max_size=4)).map(
    "".join
)


def events(form: Form, pieces: list[str], before: int, *, counts: bool) -> list[dict[str, Any]]:
    """The stream of an engine whose prompt has ``before`` tokens."""
    head = {"id": "i", "object": "x.chunk", "created": 1, "model": "m"}

    def event(text: str, reason: str | None, count: int) -> dict[str, Any]:
        said = {"text": text} if form is Form.TEXT else {"delta": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": before, "completion_tokens": count, "total_tokens": before + count}
        choices = [{"index": 0, "finish_reason": reason, **said}]
        return {**head, "choices": choices, **({"usage": usage} if counts else {})}

    found = [event(piece, None, number) for number, piece in enumerate(pieces, 1)]
    found.append(event("", "length", len(pieces)))
    usage = {"prompt_tokens": before, "completion_tokens": len(pieces), "total_tokens": before + len(pieces)}
    return [*found, {**head, "choices": [], "usage": usage}]


def joined(form: Form, prefix: Prefix, stream: list[dict[str, Any]]) -> JoinedAnswer:
    answer = JoinedAnswer(form, prefix)
    for event in stream:
        answer.add(event)
    return answer


@given(
    form=st.sampled_from(Form),
    pieces=st.lists(PIECE, min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    counts=st.booleans(),
)
def test_wherever_it_is_cut_off_the_joined_answer_is_the_undisturbed_one(form, pieces, cuts, counts):
    """Each engine gets the prompt that ``continuing`` writes, tokenizes it anew, and makes the tokens that follow."""
    if not counts:  # where they are not told, tokens of the whole must be those of the parts
        pieces = [piece if piece[0] in " \n\tA" else f"A{piece}" for piece in pieces]
    body = TEXT if form is Form.TEXT else CHAT
    path = TEXT_PATH if form is Form.TEXT else CHAT_PATH
    prompt_tokens = tokens_in(prompt_of(path, body))
    whole = joined(form, Prefix(), events(form, pieces, prompt_tokens, counts=counts)).body()
    text = "".join(pieces)
    assert (whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]) == text
    prefix, done = Prefix(), 0
    for cut in sorted(cuts):
        asked = continuing(body, form, prefix) if prefix.text else body
        assert asked is not None
        stream = events(form, pieces[done:], tokens_in(prompt_of(path, asked)), counts=counts)[: max(0, cut - done)]
        answer = joined(form, prefix, stream)
        prefix = answer.continuable
        done = prefix.tokens
        assert "".join(pieces[:done]) == prefix.text, "it ends between two tokens"
        assert not prefix.text[-1:].isspace() and (form is Form.TEXT or prefix.text == prefix.text.strip())
        assert done == len(pieces) or not done or pieces[done][0].isspace()
    asked = continuing(body, form, prefix) if prefix.text else body
    assert asked is not None
    last = joined(form, prefix, events(form, pieces[done:], tokens_in(prompt_of(path, asked)), counts=counts))
    assert last.is_complete and last.body() == whole


def test_thoughts_and_calls_of_tools_are_not_continued_and_not_lost():
    def piece(reason: str | None = None, **delta: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    stream = [
        piece(role="assistant", content=""), piece(reasoning_content="I th"), piece(reasoning_content="ink"),
        piece(content="so"), piece(content=" yes"), piece("stop", content=""),
    ]  # fmt: skip
    answer = joined(Form.CHAT, Prefix(), stream)
    assert answer.continuable == Prefix()
    assert answer.body()["choices"][0]["message"] == {
        "role": "assistant", "reasoning_content": "I think", "content": "so yes"
    }  # fmt: skip


def test_an_unfinished_answer_says_so_and_what_the_last_piece_adds_is_kept():
    stream = [
        {"id": "i", "choices": [{"index": 0, "text": "a", "finish_reason": None, "stop_reason": None}]},
        {"id": "i", "choices": [{"index": 0, "text": "b", "finish_reason": "stop", "stop_reason": 7}]},
    ]
    assert not joined(Form.TEXT, Prefix(), stream[:1]).is_complete
    answer = joined(Form.TEXT, Prefix(), stream)
    assert answer.is_complete
    (choice,) = answer.body()["choices"]
    assert choice == {"index": 0, "logprobs": None, "text": "ab", "finish_reason": "stop", "stop_reason": 7}


@of_each(event__status=[({"error": {"message": "x", "code": 429}}, 429), ({"error": "x"}, 500),
     ({"error": {"code": "bad"}}, 500), ({"object": "error", "code": 400}, 400), ({"choices": []}, None),
     ({"choices": [], "error": None}, None)])  # fmt: skip
def test_an_error_within_a_stream_is_told_apart(event, status):
    found = error_in(event)
    assert (found and found[0]) == status
