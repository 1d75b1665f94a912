"""Public multiple choice, as rows of ours (`ng_prepare arc_challenge`, `ng_prepare mmlu`)."""

from string import ascii_uppercase

from ngym.prepare import ConvertedRow, PublicSet, Unconvertible, part, saying
from ngym.schema import Json

PROMPT = "Answer the question. Put the letter of the right option in \\boxed{{}}.\n\n{question}\n{options}"


def arc(record: Json) -> ConvertedRow:
    """`{"question", "choices": {"label", "text"}, "answerKey"}`; labels are letters, or digits in some records."""
    labels = list(record["choices"]["label"])
    if record["answerKey"] not in labels:
        raise Unconvertible("the right option is not among the choices")
    return _make_row(record["question"], record["choices"]["text"], labels.index(record["answerKey"]))


def mmlu(record: Json) -> ConvertedRow:
    """`{"question", "subject", "choices": [...], "answer": 0..3}`."""
    made = _make_row(record["question"], record["choices"], record["answer"])
    return ConvertedRow({**made.row, "subject": record["subject"]}, made.answer)


def _make_row(question: str, choices: list[str], right: int) -> ConvertedRow:
    if len(set(choices)) != len(choices):
        raise Unconvertible("two of the options are the same")
    options = [{letter: text} for letter, text in zip(ascii_uppercase, choices, strict=False)]
    option_lines = "\n".join(f"{letter}: {text}" for option in options for letter, text in option.items())
    letter = ascii_uppercase[right]
    prompt = PROMPT.format(question=question.strip(), options=option_lines)
    row = {"responses_create_params": {"input": prompt}, "options": options, "expected_answer": letter}
    return ConvertedRow(row, saying(f"\\boxed{{{letter}}}"))


SETS = (
    PublicSet(
        name="arc_challenge",
        title="ARC",
        environment="mcqa",
        host="hugging_face",
        repo="allenai/ai2_arc",
        revision="210d026faf9955653af8916fad021475a3f00453",
        licence="CC-BY-SA-4.0",
        rows=1_418,
        parts=(
            part(
                "ARC-Challenge/train-00000-of-00001.parquet",
                "e488c1587ffdcfc8443f916c53488a95cd471c5790e0746c6bfe4cecf20962cb",
                "train",
            ),
            part(
                "ARC-Challenge/validation-00000-of-00001.parquet",
                "395a5c88d1580d69855fbaee9450270578df1ad5af6259771cd0a42c20e99f05",
                "validation",
            ),
        ),
        convert=arc,
    ),
    PublicSet(
        name="mmlu",
        title="MMLU",
        environment="mcqa",
        host="hugging_face",
        repo="cais/mmlu",
        revision="c30699e8356da336a370243923dbaf21066bb9fe",
        licence="MIT",
        rows=15_573,
        note="a benchmark: what was trained on it cannot be measured by it",
        parts=(
            part(
                "all/validation-00000-of-00001.parquet",
                "66cdf0b090ccb657d18d13cd81e31fdc55c3467da9642ffb178653268a97c8ef",
                "train",
            ),
            part(
                "all/test-00000-of-00001.parquet",
                "74a41822ce7d3def56e1682f958469c04642a5336a5ce912fa375fdb90fb25d7",
                "validation",
            ),
        ),
        convert=mmlu,
    ),
)
