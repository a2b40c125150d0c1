"""MATH-500 (arXiv 2305.20050), AIME 2024 and AIME 2025: with lighteval's question and Open-R1's sampling.

math-verify judges the answer: `math_answers.check`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .exam import Exam, Published, Question

PROMPT = (
    "Solve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{{ANSWER}}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before answering."
    "\n\n{problem}"
)
OPEN_R1 = "https://github.com/huggingface/open-r1#reproducing-deepseeks-evaluation-results"
LIGHTEVAL = "https://github.com/huggingface/lighteval/blob/main/src/lighteval/tasks/tasks/aime.py"
CHECK = "colograd.apps.exams.math_answers:check"
# DeepSeek's sampling for its R1 models; Open-R1 reproduces their numbers.
REASONING: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 32768}


def ask(row: Mapping[str, Any], number: int) -> Question:
    """Convert a row with the columns ``problem`` and ``answer``, in LaTeX."""
    return Question.of_user(PROMPT.format(problem=row["problem"]), str(row["answer"]))


MATH500 = Exam(
    name="math500",
    path="HuggingFaceH4/MATH-500",
    config=None,
    split="test",
    columns=("problem", "answer"),
    ask=ask,
    check=CHECK,
    source=OPEN_R1,
    published=(
        Published("DeepSeek-R1-Distill-Qwen-1.5B", 83.1, OPEN_R1, "DeepSeek reports 83.9"),
        Published("DeepSeek-R1-Distill-Qwen-7B", 94.5, OPEN_R1, "DeepSeek reports 92.8"),
    ),
    n=4,
    **REASONING,
)
AIME: dict[str, Any] = {
    "config": None, "split": "train", "columns": ("problem", "answer"), "ask": ask, "check": CHECK, "source": LIGHTEVAL,
    "n": 64, **REASONING,
}  # fmt: skip
AIME24 = Exam(
    name="aime24",
    path="HuggingFaceH4/aime_2024",
    published=(
        Published("DeepSeek-R1-Distill-Qwen-1.5B", 30.7, OPEN_R1, "DeepSeek reports 28.9"),
        Published("DeepSeek-R1-Distill-Qwen-7B", 50.8, OPEN_R1, "DeepSeek reports 55.5"),
        Published("DeepScaleR-1.5B-Preview", 43.1, "https://ollama.com/library/deepscaler", "16 completions"),
    ),
    **AIME,
)
AIME25 = Exam(
    name="aime25",
    path="yentinglin/aime_2025",
    published=(
        Published(
            "DeepSeek-R1-Distill-Qwen-32B",
            53.3,
            "https://huggingface.co/datasets/mlfoundations-dev/DeepSeek-R1-Distill-Qwen-32B_eval_2e29",
            "10 completions, another question",
        ),
        Published("Qwen3-30B-A3B", 70.9, "https://qwenlm.github.io/blog/qwen3/", "thinking; another question"),
    ),
    **AIME,
)
