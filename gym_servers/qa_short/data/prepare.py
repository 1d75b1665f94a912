"""Public short questions, as rows of ours (`ng_prepare nq_open`)."""

from ngym.prepare import ConvertedRow, File, Part, PublicSet, part, saying
from ngym.schema import Json

PROMPT = '{question}? Answer with a few words only, in the form "Answer: ...".'


def nq_open(record: Json) -> ConvertedRow:
    """`{"question", "answer": [...]}`: any of the answers counts."""
    answers = record["answer"]
    prompt = PROMPT.format(question=record["question"].rstrip("?"))
    row = {"responses_create_params": {"input": prompt}, "expected_answer": answers, "answer_kind": "text"}
    return ConvertedRow(row, saying(f"Answer: {answers[0]}"))


SETS = (
    PublicSet(
        name="nq_open",
        title="NQ-open",
        environment="qa_short",
        host="github",
        repo="google-research-datasets/natural-questions",
        revision="fb26a3073b1fe636c97302890a27b491d6530130",
        licence="CC-BY-SA-3.0",
        rows=91_535,
        parts=(
            Part(files=(File(path="nq_open/NQ-open.train.jsonl"),), split="train"),
            part(
                "nq_open/NQ-open.dev.jsonl",
                "f15567f38099f3615f5b8a685c0aef449c11ad90d3da3735e8d1b98115b40616",
                "validation",
            ),
        ),
        convert=nq_open,
    ),
)
