"""An agent that retries and compacts: the model guesses a letter, and hears whether it comes before or after that.

    python examples/agent_tasks.py --out runs/agents/task
    rlhf-spmd sft --nproc-per-node 2 --config configs/agents_sft.yaml
    rlhf-spmd train --config configs/agents_grpo.yaml agent.run=examples/agents/guess.py:run \\
        data.path=runs/agents/task/guess.jsonl run.dir=runs/agents/guess run.steps=40

A row: ``{"prompt": "a to g", "answer": "e"}``. The reward is 1 if the letter is found within four answers. Seven
letters need three of them, if each halves what is left.
"""

from __future__ import annotations

import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

CERTIFICATES = ssl.create_default_context()  # read once, and not by the client of each episode

ANSWERS = 4  # that the model has in all
GUESSES = 2  # after which the history becomes a line


async def run(base_url: str, row: dict[str, Any]) -> float:
    """Ask until the letter is found.

    A guess that cannot be right is not told to the model: it is asked the same again. After some guesses a new
    conversation begins, with what is known in place of the history.
    """
    client = AsyncOpenAI(base_url=base_url, api_key="agents", http_client=DefaultAsyncHttpxClient(verify=CERTIFICATES))
    first, last = row["prompt"].split(" to ")
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(ANSWERS):
        answer = await client.chat.completions.create(model="actor", messages=messages, max_tokens=4)
        guess = answer.choices[0].message.content or ""
        if guess == row["answer"]:
            return 1.0
        if len(guess) != 1 or not first <= guess <= last:
            continue
        is_later = row["answer"] > guess
        first, last = (chr(ord(guess) + 1), last) if is_later else (first, chr(ord(guess) - 1))
        messages += [answer.choices[0].message, {"role": "user", "content": "after" if is_later else "before"}]
        if len(messages) > 2 * GUESSES:
            messages = [{"role": "user", "content": f"{first} to {last}"}]
    return 0.0
