"""Agents that tests train with, and the model that they ask: characters are tokens, and a template marks turns. No torch here."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from threading import Thread
from typing import Any

Message = dict[str, Any]


def post(base_url: str, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
    """Return the answer to a chat request. Raises urllib.error.HTTPError."""
    headers = {"Content-Type": "application/json", **fields.pop("headers", {})}
    body = json.dumps({"model": "actor", "messages": list(messages), **fields}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


async def ask(base_url: str, messages: Sequence[Message], **fields: Any) -> list[Message]:
    """Return the messages of the answer, one for each of ``n``."""
    answer = await asyncio.to_thread(post, base_url, messages, **fields)
    return [choice["message"] for choice in answer["choices"]]


def post_form(base_url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request in another form. Raises urllib.error.HTTPError."""
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(f"{base_url}/{path}", json.dumps({"model": "actor", **body}).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def digits(text: str) -> float:
    """Return the share of digits in a text."""
    return sum(map(str.isdigit, text)) / max(len(text), 1)


async def tool_user(base_url: str, row: Mapping[str, Any]) -> float:
    """Ask, tell how many digits there were, ask again."""
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    total = 0.0
    for _ in range(3):
        (answer,) = await ask(base_url, messages, max_tokens=8)
        share = digits(answer["content"])
        total += share
        messages += [answer, {"role": "user", "content": f"{share:.2f}"}]
    return total / 3


async def tool_user_of_chats(base_url: str, row: Mapping[str, Any]) -> float:
    """The same for data whose prompts are messages."""
    (message,) = row["prompt"]
    return await tool_user(base_url, {"prompt": message["content"]})


async def tool_user_of_responses(base_url: str, row: Mapping[str, Any]) -> float:
    """The same over OpenAI's Responses."""
    items: list[Any] = [{"role": "user", "content": row["prompt"]}]
    total = 0.0
    for _ in range(3):
        answer = await asyncio.to_thread(post_form, base_url, "responses", {"input": items, "max_output_tokens": 8})
        share = digits(answer["output"][0]["content"][0]["text"])
        total += share
        items += [*answer["output"], {"role": "user", "content": f"{share:.2f}"}]
    return total / 3


async def tool_user_of_messages(base_url: str, row: Mapping[str, Any]) -> float:
    """The same over Anthropic's Messages."""
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    total = 0.0
    for _ in range(3):
        answer = await asyncio.to_thread(post_form, base_url, "messages", {"messages": messages, "max_tokens": 8})
        share = digits("".join(block["text"] for block in answer["content"]))
        total += share
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": f"{share:.2f}"}]
    return total / 3


async def uneven(base_url: str, row: Mapping[str, Any]) -> float:
    """Every third row takes six turns with a slow tool between them; the others take one."""
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    total = 0.0
    is_slow = int(row["prompt"].split()[0]) % 3 == 0
    for number in range(6 if is_slow else 1):
        await asyncio.sleep(0.3 * bool(number))
        (answer,) = await ask(base_url, messages, max_tokens=8)
        total += digits(answer["content"])
        messages += [answer, {"role": "user", "content": f"{number}"}]
    return total


async def late_debate(base_url: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The same debate, in which the first side asks later."""
    return await debate(base_url, row, 0.2)


async def debate(base_url: str, row: Mapping[str, Any], delay_s: float = 0.0) -> dict[str, float]:
    """Two sides at the same time, each with a system prompt, and the better of two closings."""

    async def side(name: str) -> tuple[list[Message], float]:
        messages: list[Message] = [{"role": "system", "content": name}, {"role": "user", "content": row["prompt"]}]
        await asyncio.sleep(delay_s * (name == "a"))
        (answer,) = await ask(base_url, messages, max_tokens=6)
        return [*messages, answer, {"role": "user", "content": "close"}], digits(answer["content"])

    (first, one), (second, two) = await asyncio.gather(side("a"), side("b"))
    closings = await ask(base_url, first, max_tokens=6, n=2)
    (last,) = await ask(base_url, second, max_tokens=6)
    return {"reward": one + two + max(digits(m["content"]) for m in closings) + digits(last["content"])}


async def compacting(base_url: str, row: Mapping[str, Any]) -> float:
    """Ask twice the same (other draws), send a request again as a client does, then go on with a summary in place of the history."""
    messages: list[Message] = [{"role": "user", "content": row["prompt"]}]
    (answer,), (other,) = [await ask(base_url, messages, max_tokens=6) for _ in range(2)]
    again = [*messages, answer, {"role": "user", "content": "more"}]
    (second,) = await ask(base_url, again, max_tokens=6)
    (repeated,) = await ask(base_url, again, max_tokens=6, headers={"x-stainless-retry-count": "1"})
    assert repeated["content"] == second["content"], "a request that is sent again gets the same answer"
    (summary,) = await ask(base_url, [{"role": "user", "content": f"summary {len(answer['content'])}"}], max_tokens=6)
    return digits(answer["content"]) + digits(other["content"]) + digits(second["content"]) + digits(summary["content"])


def go_away(base_url: str, messages: Sequence[Message]) -> None:
    """Ask, and close the connection before the answer can come."""
    address = urllib.parse.urlparse(base_url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    body = json.dumps({"model": "actor", "messages": list(messages), "max_tokens": 6})
    connection.request("POST", f"{address.path}/chat/completions", body, {"Content-Type": "application/json"})
    connection.close()


async def erratic(base_url: str, row: Mapping[str, Any]) -> float:
    """Six moves by chance: go on, branch, ask again, retry, go away (and come back or not), ask in parallel, begin anew."""
    chance = random.Random(row["seed"])
    root: list[Message] = [{"role": "user", "content": row["prompt"]}]
    histories: list[list[Message]] = [root]
    for number in range(6):
        messages = chance.choice(histories)
        move = chance.choice(["go on", "again", "retry", "leave", "leave and return", "parallel", "anew"])
        if move == "anew":
            messages = [{"role": "system", "content": f"s{number}"}, *root]
        if move.startswith("leave"):
            await asyncio.to_thread(go_away, base_url, [*messages, {"role": "user", "content": f"lost {number}"}])
            if move == "leave":
                continue
            messages = [*messages, {"role": "user", "content": f"lost {number}"}]
        times = 2 if move == "again" else 1
        asked = [ask(base_url, messages, max_tokens=6, n=2 if move == "parallel" else 1) for _ in range(times)]
        answers = [answer for group in await asyncio.gather(*asked) for answer in group]
        if move == "retry":
            (same,) = await ask(base_url, messages, max_tokens=6, headers={"x-stainless-retry-count": "1"})
            first = await ask(base_url, messages, max_tokens=6, headers={"x-stainless-retry-count": "2"})
            assert same == first[0], "a request that is sent again gets the answer that it had"
        histories += [[*messages, answer, {"role": "user", "content": f"next {number}"}] for answer in answers]
    return 1.0


async def outsider(base_url: str, row: Mapping[str, Any]) -> float:
    """Returns how many of the variables by which ranks find each other it has, after a moment."""
    await ask(base_url, [{"role": "user", "content": row["prompt"]}], max_tokens=2)
    await asyncio.sleep(1.0)
    return float(sum(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "RLHF_SPMD_KEY")))


async def late_asker(base_url: str, row: Mapping[str, Any]) -> float:
    """Row 0 returns while a request of its is open; row 1 takes longer than that request."""
    messages = [{"role": "user", "content": row["prompt"]}]
    await ask(base_url, messages, max_tokens=2)
    if row["prompt"].startswith("0 "):
        Thread(target=post, args=(base_url, [{"role": "user", "content": "slow"}]), daemon=True).start()
        await asyncio.sleep(0.5)
    else:
        await asyncio.sleep(4.0)
    return 1.0


async def hanging_once(base_url: str, row: Mapping[str, Any]) -> float:
    """Row 0 hangs, in code that does not wait."""
    if row["prompt"].startswith("0 "):
        time.sleep(600)
    return 1.0


async def hanging(base_url: str, row: Mapping[str, Any]) -> float:
    """Every second row hangs, in code that does not wait."""
    (answer,) = await ask(base_url, [{"role": "user", "content": row["prompt"]}], max_tokens=4)
    if len(row["prompt"]) % 2:
        time.sleep(60)
    return digits(answer["content"])


async def failing(base_url: str, row: Mapping[str, Any]) -> float:
    """Every second row fails."""
    (answer,) = await ask(base_url, [{"role": "user", "content": row["prompt"]}], max_tokens=4)
    if int(row["prompt"].split()[0]) % 2:
        raise RuntimeError("the tool is broken")
    return digits(answer["content"])


async def dying(base_url: str, row: Mapping[str, Any]) -> float:
    """Ends its process, and with it all other agents there."""
    await ask(base_url, [{"role": "user", "content": row["prompt"]}], max_tokens=4)
    os._exit(3)


async def wrong(base_url: str, row: Mapping[str, Any]) -> Any:
    """Returns no reward."""
    return None
