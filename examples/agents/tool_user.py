"""An agent with tools: a question about two numbers, which the model answers with the help of one of three tools.

    python examples/agent_tasks.py --out runs/agents/task
    rlhf-spmd sft --nproc-per-node 2 --config configs/agents_sft.yaml
    rlhf-spmd train --config configs/agents_grpo.yaml agent.run=examples/agents/tool_user.py:run \\
        data.path=runs/agents/task/tool_user.jsonl run.dir=runs/agents/tool_user

A row: ``{"prompt": "17 times 6", "answer": "102"}``. The reward is a half if a tool returned the answer, and a half if
the model says it in the end.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

CERTIFICATES = ssl.create_default_context()  # read once, and not by the client of each episode

FUNCTIONS: dict[str, Callable[..., int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}
NUMBER = {"type": "integer"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in FUNCTIONS]


def use_tool(name: str, arguments: str) -> str:
    """Return what a tool says, also to a call that it cannot read."""
    try:
        return str(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError):
        return "none"


async def run(base_url: str, row: dict[str, Any]) -> float:
    """Ask, use the tools that the model calls, and ask again, until it calls none."""
    client = AsyncOpenAI(base_url=base_url, api_key="agents", http_client=DefaultAsyncHttpxClient(verify=CERTIFICATES))
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    results = list[str]()
    for _ in range(3):
        answer = await client.chat.completions.create(model="actor", messages=messages, tools=TOOLS, max_tokens=80)
        message = answer.choices[0].message
        if not message.tool_calls:
            return ((row["answer"] in results) + (message.content == row["answer"])) / 2
        messages.append(message)
        for call in message.tool_calls:
            results.append(use_tool(call.function.name, call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": results[-1]})
    return (row["answer"] in results) / 2
