"""Public JSON Schemas, as rows of ours (`ng_prepare json_schema_bench`). Documents are checked for shape, not for values."""

from ngym.prepare import ConvertedRow, File, Part, PublicSet, Unconvertible
from ngym.schema import Json

PROMPT = (
    "Write a JSON document, with values of your own, that fits the JSON Schema below. Write the JSON only, in one code "
    "block.\n\n{schema}"
)
MAX_CHARS = 20_000


def json_schema_bench(record: Json) -> ConvertedRow:
    """`{"json_schema": text, "unique_id"}`."""
    schema = record["json_schema"]
    if len(schema) > MAX_CHARS:
        raise Unconvertible(f"a schema of more than {MAX_CHARS:,} characters")
    row = {
        "responses_create_params": {"input": PROMPT.format(schema=schema)},
        "schema_str": schema,
        "schema_type": "json",
    }
    return ConvertedRow(row)


SETS = (
    PublicSet(
        name="json_schema_bench",
        title="JSONSchemaBench",
        environment="structured_outputs",
        host="hugging_face",
        repo="epfl-dlab/JSONSchemaBench",
        revision="5bd0f4640badc6f3f02df796421d21cb0ca0b141",
        licence="MIT",
        rows=1_361,
        note="its part Github_easy; any document of the right shape is paid",
        parts=(
            Part(files=(File(path="Github_easy/train-00000-of-00001.parquet"),), split="train"),
            Part(files=(File(path="Github_easy/val-00000-of-00001.parquet"),), split="validation"),
        ),
        convert=json_schema_bench,
    ),
)
