"""A debate of two: each side has read half of the digits. Each names one, hears the other's, and says which is the largest.

    python examples/agent_tasks.py --out runs/agents/task
    rlhf-spmd sft --nproc-per-node 2 --config configs/agents_sft.yaml
    rlhf-spmd train --config configs/agents_grpo.yaml agent.run=examples/agents/debate.py:run \\
        data.path=runs/agents/task/debate.jsonl run.dir=runs/agents/debate

A row: ``{"prompt": "4921 0735", "answer": "9"}``. An episode has two conversations, which run at the same time. The
reward is the share of sides that are right in the end, so a side must learn to tell what helps the other.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

CERTIFICATES = ssl.create_default_context()  # read once, and not by the client of each episode


async def run(base_url: str, row: dict[str, Any]) -> float:
    """Return the share of sides that are right in the end."""
    client = AsyncOpenAI(base_url=base_url, api_key="agents", http_client=DefaultAsyncHttpxClient(verify=CERTIFICATES))

    async def speak(conversation: list[Any]) -> str:
        """Add what the model says to a conversation."""
        answer = await client.chat.completions.create(model="actor", messages=conversation, max_tokens=8)
        conversation.append(answer.choices[0].message)
        return answer.choices[0].message.content or ""

    sides: list[list[Any]] = [[{"role": "user", "content": digits}] for digits in row["prompt"].split()]
    openings = await asyncio.gather(*map(speak, sides))
    for side, heard in zip(sides, reversed(openings), strict=True):
        side.append({"role": "user", "content": heard})
    closings = await asyncio.gather(*map(speak, sides))
    return closings.count(row["answer"]) / len(sides)
