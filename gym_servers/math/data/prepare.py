"""Public sets of mathematics, as rows of ours (`ng_prepare gsm8k`)."""

import re

from ngym.prepare import ConvertedRow, PublicSet, Unconvertible, part, saying
from ngym.schema import Json

INSTRUCTION = "Put the final answer in \\boxed{}."


def gsm8k(record: Json) -> ConvertedRow:
    """`{"question", "answer"}`: the last line of `answer` is `#### 1,234`, with its sums in `<<...>>`."""
    solution, mark, final = record["answer"].rpartition("####")
    if not mark:
        raise Unconvertible("no answer after ####")
    expected = final.strip().replace(",", "")
    row = {
        "responses_create_params": {"input": f"{record['question']} {INSTRUCTION}"},
        "question": record["question"],
        "expected_answer": expected,
    }
    steps = re.sub(r"<<[^<>]*>>", "", solution)
    return ConvertedRow(row, saying(f"{steps}\\boxed{{{expected}}}"))


SETS = (
    PublicSet(
        name="gsm8k",
        title="GSM8K",
        environment="math",
        host="github",
        repo="openai/grade-school-math",
        revision="3101c7d5072418e28b9008a6636bde82a006892c",
        licence="MIT",
        rows=8_792,
        parts=(
            part(
                "grade_school_math/data/train.jsonl",
                "17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
                "train",
            ),
            part(
                "grade_school_math/data/test.jsonl",
                "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
                "validation",
            ),
        ),
        convert=gsm8k,
    ),
)
