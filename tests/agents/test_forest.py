"""An episode's forest: what a request goes on from, what is asked again, and which rows its paths become."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_spmd.agents.forest import Draws, Forest, RowTokens, Turn, canonical, row_tokens
from rlhf_spmd.data.messages import Message, check_messages

NO_OPTIONS: dict[str, Any] = {}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def ask(
    forest: Forest, messages: list[Message], answer: str, options: dict[str, Any] = NO_OPTIONS, delivered: bool = True
) -> Turn:
    """A request and its answer. Tokens: a number for each character."""
    parent, new = forest.attach(messages, options)
    turn = forest.add(parent, new, [ord(c) for message in new for c in message["content"]], options)
    draws = Draws([ord(c) for c in answer], [-1.0 / (1 + i) for i in range(len(answer))], [3] * len(answer), "stop")
    forest.finish(turn, draws, said(answer), options)
    turn.was_delivered = delivered
    turn.number = len(forest.turns)
    return turn


def tokens(forest: Forest) -> list[RowTokens]:
    """The tokens of each row."""
    draws = {turn.number: turn.draws for turn in forest.turns.values() if turn.draws}
    return [row_tokens(row.turns, draws) for row in forest.rows()]


def texts(forest: Forest) -> list[tuple[str, str]]:
    """Each row's text, and what of it is learned."""
    return [
        ("".join(map(chr, row.ids)), "".join(chr(i) if drawn else "." for i, drawn in zip(row.ids, row.mask, strict=True)))
        for row in tokens(forest)
    ]


def test_a_conversation_that_only_grows_is_one_row() -> None:
    forest = Forest("e")
    first = ask(forest, [user("ab")], "cd")
    second = ask(forest, [user("ab"), said("cd"), user("e")], "fg")
    assert second.parent is first and second.ids == [*map(ord, "abcdefg")]
    assert texts(forest) == [("abcdefg", "..cd.fg")] and forest.num_roots == 1
    (row,) = forest.rows()
    assert tokens(forest)[0].log_probs == [0.0, 0.0, -1.0, -0.5, 0.0, -1.0, -0.5] and row.num_turns == 2
    assert row.observations == [[user("ab")], [user("e")]]


def test_a_branch_learns_what_both_have_in_common_once() -> None:
    forest = Forest("e")
    ask(forest, [user("ab")], "cd")
    ask(forest, [user("ab"), said("cd"), user("x")], "1")
    ask(forest, [user("ab"), said("cd"), user("y")], "2")
    (first, first_mask), (other, other_mask) = texts(forest)
    assert {first, other} == {"abcdx1", "abcdy2"}
    assert first_mask == f"..cd.{first[-1]}" and other_mask == f".....{other[-1]}"
    rows = [*forest.rows()]
    assert rows[1].observations == [[user("ab"), said("cd"), user(other[4])]]
    assert sum(sum(row.mask) for row in tokens(forest)) == 4


def test_equal_requests_are_siblings_with_draws_of_their_own() -> None:
    forest = Forest("e")
    turns = [ask(forest, [user("ab")], answer) for answer in ("c", "c", "d")]
    assert len({turn.draw_number for turn in turns}) == 3 and len(texts(forest)) == 3
    assert all(0 <= turn.draw_number < 1 << 63 for turn in turns)


def test_rows_and_draws_do_not_depend_on_the_order_of_requests() -> None:
    requests = [([user("ab")], "c"), ([user("x")], "y"), ([user("q")], "r")]
    one, other = Forest("e"), Forest("e")
    for messages, answer in requests:
        ask(one, messages, answer)
    for messages, answer in reversed(requests):
        ask(other, messages, answer)
    assert texts(one) == texts(other)
    assert {turn.draw_number for turn in one.turns.values()} == {turn.draw_number for turn in other.turns.values()}
    another = ask(Forest("f"), [user("ab")], "c")
    assert another.draw_number not in {turn.draw_number for turn in one.turns.values()}, "other episodes draw otherwise"


def test_a_request_whose_answer_was_lost_gets_the_same_turn() -> None:
    forest = Forest("e")
    lost = ask(forest, [user("ab")], "c", delivered=False)
    assert forest.repeated(None, [user("ab")], NO_OPTIONS, retries=False) is lost
    lost.num_waiting = 1  # a client waits: another one with the same request is no retry
    assert forest.repeated(None, [user("ab")], NO_OPTIONS, retries=False) is None
    lost.was_delivered, lost.num_waiting = True, 0
    assert forest.repeated(None, [user("ab")], NO_OPTIONS, retries=False) is None
    assert forest.repeated(None, [user("ab")], NO_OPTIONS, retries=True) is lost, "it says that it is sent again"
    assert forest.repeated(None, [user("other")], NO_OPTIONS, retries=True) is None


def test_a_retry_among_equal_requests_gets_the_turn_that_was_asked_for_last() -> None:
    forest = Forest("e")
    first, second, third = (ask(forest, [user("ab")], answer) for answer in "cde")

    def retried() -> Turn | None:
        return forest.repeated(None, [user("ab")], NO_OPTIONS, retries=True)

    assert retried() is third, "all were delivered: the client has not read the last one"
    third.num_waiting = 1
    assert retried() is third, "another retry is answered: that changes nothing"
    second.was_delivered, second.num_waiting = False, 1
    assert retried() is second, "its client seems to wait, and has gone"
    first.was_delivered = False
    assert retried() is first, "its client is known to have gone"
    assert forest.repeated(None, [user("ab")], NO_OPTIONS, retries=False) is first
    second.num_waiting = 0
    assert retried() is second, "of two that were lost the later one"


def test_what_the_agent_never_got_is_not_learned() -> None:
    forest = Forest("e")
    ask(forest, [user("ab")], "c")
    ask(forest, [user("ab"), said("c"), user("d")], "e", delivered=False)
    assert texts(forest) == [("abc", "..c")]


CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"query": "nile"}'}}
HISTORY: list[Message] = [user("ab"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
TOOL: Message = {"role": "tool", "content": "6650", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("rewritten", "is_same"),
    [
        ([*HISTORY, TOOL], True),
        ([HISTORY[0], {**HISTORY[1], "content": None}, TOOL], True),
        ([HISTORY[0], {**HISTORY[1], "reasoning_content": "aside", "refusal": None}, TOOL], True),
        ([HISTORY[0], {**HISTORY[1], "tool_calls": [{**CALL, "id": "2"}]}, TOOL], True),
        ([user("ab "), HISTORY[1], TOOL], False),
        ([HISTORY[0], {**HISTORY[1], "content": "I look it up"}, TOOL], False),
        ([{"role": "system", "content": "s"}, *HISTORY, TOOL], False),
        ([HISTORY[0], said("find nile"), TOOL], False),
        ([HISTORY[0], {**HISTORY[1], "tool_calls": [CALL, CALL]}, TOOL], False),
        ([HISTORY[1], TOOL], False),
        ([user("summary"), TOOL], False),
        (
            [
                HISTORY[0],
                {**HISTORY[1], "tool_calls": [{**CALL, "function": {"name": "find", "arguments": '{"query":"nile"}'}}]},
                TOOL,
            ],
            True,
        ),
        (
            [
                HISTORY[0],
                {**HISTORY[1], "tool_calls": [{**CALL, "function": {"name": "find", "arguments": '{"query": "nil"}'}}]},
                TOOL,
            ],
            False,
        ),
    ],
    ids=[
        "as it was",
        "null content",
        "thoughts left out",
        "another id",
        "a space",
        "content added",
        "a system prompt",
        "call as text",
        "a call twice",
        "beginning cut off",
        "summary",
        "arguments written anew",
        "other arguments",
    ],
)
def test_each_kind_of_rewritten_history(rewritten: list[Message], is_same: bool) -> None:
    """It goes on from the turn, or it begins a root; what was drawn stays in either case."""
    forest = Forest("e")
    turn = forest.add(None, [HISTORY[0]], [1], NO_OPTIONS)
    forest.finish(turn, Draws([2], [-1.0], [0], "stop"), check_messages([HISTORY[1]])[0], NO_OPTIONS)
    messages = check_messages(rewritten)
    parent, new = forest.attach(messages, NO_OPTIONS)
    assert (parent is turn) == is_same
    assert [canonical(message) for message in new] == [canonical(message) for message in ([TOOL] if is_same else messages)]


def test_other_tools_begin_a_root() -> None:
    forest = Forest("e")
    ask(forest, [user("ab")], "c", {"tools": ["find"]})
    assert forest.attach([user("ab"), said("c"), user("d")], {"tools": ["find"]})[0] is not None
    assert forest.attach([user("ab"), said("c"), user("d")], {"tools": None})[0] is None
