"""Sentences around a final answer, as today's models write them, for graders of mathematics and of choices.

Written for these tests. ``{}`` is the answer. None of them states another answer.
"""

from __future__ import annotations

from collections.abc import Iterator

# What comes before the answer, and what comes behind it. Some sentences have the word "answer", numbers, or letters of options.
BEFORE = (
    "",
    "Let me think about this step by step.\n\nStep 1: Rewrite the problem. We have $a = 12$ and $b = 7$.\n\n",
    "## Solution\n\nFirst, note that there are 3 cases; the first answer that comes to mind, 100, fails in case 2.\n\n",
    "Okay, so I need to find the answer. Hmm, 41 looks plausible. Wait, let me check: $41 \\neq 2 \\cdot 20$. So no.\n\n",
)
BEHIND = (
    "",
    "\n\nI am confident that this answer is correct.",
    "\n\nTo check the answer, substitute it back: both sides are equal, so the answer is right.",
    "\n\nThis answer makes sense, because it fits all 3 conditions. No other answer fits.",
    "\n\nI verified my answer twice. Let me know if you would like another explanation of the answer!",
)
# Forms that state an answer. {math} may be any text in LaTeX.
BOXED = (
    "Thus, \\boxed{{{}}}.",
    "**Final Answer**\n\n\\[ \\boxed{{{}}} \\]",
    "The final answer is $\\boxed{{{}}}$.",
    "$$x = \\ldots = \\boxed{{{}}}$$",
    "\\(\\boxed{{{}}}\\)",
)
STATED = (
    "The answer is ${}$.",
    "The final answer is: ${}$.",
    "**Answer:** ${}$",
    "**Final Answer**\n\n${}$",
    "Therefore, the answer is\n\\[\n{}\n\\]",
)
CHOICES = (
    "Answer: {}",
    "**Answer: {}**",
    "**Answer:** ({})",
    "\\boxed{{{}}}",
    "\\boxed{{\\text{{{}}}}}",
    "Final answer: {}.",
    "### Answer\n\n{}",
    "[[{}]]",
    "Answer: {}) none of these",
    '```json\n{{"reasoning": "see above", "answer": "{}"}}\n```',
)


def responses(answer: str, forms: tuple[str, ...]) -> Iterator[str]:
    """Yields the answer in each form, with each text before it and behind it."""
    for form in forms:
        for before in BEFORE:
            for behind in BEHIND:
                yield before + form.format(answer) + behind
