"""Public prompts with instructions that code can check, as rows of ours (`ng_prepare ifeval`)."""

from ngym.prepare import ConvertedRow, PublicSet, part
from ngym.schema import Json


def ifeval(record: Json) -> ConvertedRow:
    """`{"key", "prompt", "instruction_id_list", "kwargs": [{...}, ...]}`, one entry of kwargs for each instruction."""
    kwargs = [{name: value for name, value in arguments.items() if value is not None} for arguments in record["kwargs"]]
    return ConvertedRow(
        {
            "responses_create_params": {"input": record["prompt"]},
            "instruction_id_list": record["instruction_id_list"],
            "kwargs": kwargs,
        }
    )


SETS = (
    PublicSet(
        name="ifeval",
        title="IFEval",
        environment="instruction_following",
        host="hugging_face",
        repo="google/IFEval",
        revision="966cd89545d6b6acfd7638bc708b98261ca58e84",
        licence="Apache-2.0",
        rows=541,
        note="a benchmark: what was trained on it cannot be measured by it",
        parts=(part("ifeval_input_data.jsonl", "6a85310ca8ce15eff755aa08a3a4ff931c7e273e7515ebb3c492ea85fd8288f2"),),
        convert=ifeval,
    ),
)
