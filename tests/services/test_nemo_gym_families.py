"""nemo_gym.yaml: each family's stanza accepts a row with NeMo Gym's fields and distinguishes right from wrong
answers."""

import json
from typing import Any

import pytest
import yaml
from local_services import local_services
from paths import ROOT

from ngym import ModelCall, model_server
from ngym.convert import message_item, new_response, output_text
from ngym.services.base.app import load

STANZAS = {
    name: stanza
    for name, stanza in yaml.safe_load((ROOT / "nemo_gym.yaml").read_text()).items()
    if stanza["kind"] == "gym_server"
}
CALENDAR = {
    "0": {"event_id": 0, "duration": 60, "constraint": "before 11am", "min_time": "9:00", "max_time": "17:00"},
    "1": {"event_id": 1, "duration": 30, "constraint": None, "min_time": "9:00", "max_time": "17:00"},
}
EVENTS = [{"event_id": 0, "start_time": "9:30", "duration": 60}, {"event_id": 1, "start_time": "10:30", "duration": 30}]
LATE = [{"event_id": 0, "start_time": "10:30", "duration": 60}, {"event_id": 1, "start_time": "12pm", "duration": 30}]
AT_ONCE = [EVENTS[0], {"event_id": 1, "start_time": "10:00", "duration": 30}]
CITED = {"type": "citation_if", "grammar": "ref_colon", "id_regex": "citation_[0-9]+", "valid_id_set": ["citation_1"]}
UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(double(2), 4)\n"
)
BLOCK = "```python\n{}\n```"

# family, fields of the row, answers with their rewards
ROWS: list[tuple[str, dict[str, Any], dict[str, float]]] = [
    ("arc_agi", {"expected_output": [[1, 2], [3, 4]]}, {r"\boxed{[[1, 2], [3, 4]]}": 1, "[[1, 2], [3, 5]]": 0}),
    ("nvarc", {"expected_output": [[1, 2], [3, 4]]}, {"\\boxed{\n1 2\n3 4\n}": 1, "\\boxed{1 2}": 0}),
    ("graphwalks", {"expected_answer": '["a", "b"]'}, {"Hm.\nFinal Answer: [b, a]": 1, "Final Answer: [a]": 2 / 3}),
    ("graphwalks", {"expected_answer": "[]"}, {"Final Answer: []": 1, "none": 0}),
    ("mrcr", {"expected_answer": "k9A poem", "random_string_to_prepend": "k9"}, {"k9A poem": 1, "A poem": 0}),
    ("ruler", {"outputs": ["AB", "CD"], "subset": "vt"}, {"ab and cd": 1, "AB": 0.5}),
    ("ruler", {"outputs": ["AB", "CD"], "subset": "qa_1"}, {"It is CD.": 1, "EF": 0}),
    ("ruler2", {"expected_answer": ["17"], "match_type": "all"}, {"It is 17.": 1, "18": 0}),
    ("ruler2", {"expected_answer": ["a b"], "match_type": "2steps"}, {"x\n\na b": 1, "a b\n\nc": 0}),
    ("equivalence_rule", {"expected_answer": "Two  words"}, {"two words": 1, "two words more": 0}),
    ("string_match", {"expected_answer": "1,000", "extraction_mode": "boxed"}, {r"\boxed{1000}": 1, "1000": 0}),
    ("string_match", {"expected_answer": "Oslo", "extraction_mode": "last_line"}, {"Paris?\nOslo": 1, "Oslo\nNo": 0}),
    ("spartqa", {"target": "both of them", "options": ["a dot"]}, {"Answer: both of them": 1, "Answer: a dot": 0}),
    ("ragtruth", {"is_halu": False}, {'{"hallucination list": []}': 1, '{"hallucination list": ["x"]}': 0}),
    ("math_proof_judgement", {"expected_judgement": "Judgement: No"}, {"**Judgement**: No": 1, "Judgement: Yes": 0}),
    ("imo_gradingbench", {"expected_answer": "partial"}, {"I say **partial**.": 1, "almost": 0}),
    (
        "bunsenbench_chemistry_mcq",
        {"expected_answer": "B", "options": [{"A": "OH-"}, {"B": "H2O"}]},
        {"<choice>H2O</choice>": 1, "<choice>OH-</choice>": 0},
    ),
    ("litmus_agent", {"expected_answer": "18.02"}, {r"\boxed{18.02\ \text{g}}": 1, "((18.5))": 0}),
    ("litmus_agent", {"expected_answer": "true", "answer_type": "bool"}, {"((yes))": 1, "((no))": 0}),
    ("rolemrc", {"reference": "a b c d"}, {"a b c d": 1, "a x c": 4 / 7}),
    ("proof_verification", {"ground_truth_verify_score": 0.5}, {r"\boxed{0.5}": 1, r"\boxed{0}": 0.5}),
    (
        "assaybench",
        {"relevance_genes": ["P", "Q"], "relevance_scores": [1.0, 0.0]},
        {"[[ ## answer ## ]]\nP, Q": 1, "[[ ## answer ## ]]\nQ": 0},
    ),
    (
        "calendar",
        {"exp_cal_state": CALENDAR},
        {json.dumps(EVENTS): 1, json.dumps(LATE): 0, json.dumps(AT_ONCE): 0, json.dumps(EVENTS[:1]): 0},
    ),
    (
        "format_verification",
        {"verifier": {"type": "regex", "verify_regex": ["^-- .+"], "verify_min_matches": 2}},
        {"-- a\n-- b": 1, "-- a\n- b": 0},
    ),
    (
        "format_verification",
        {"verifier": {"type": "string_match", "patterns": [r"\[\d\]"], "expected_markers": ["[4]"]}},
        {"So [4].": 1, "So [4] [5].": 0},
    ),
    (
        "citation_if",
        {"verifier": CITED},
        {"So it is [ref:citation_1].": 1, "So it is [ref:citation_2].": 0, "So [citation_1].": 0, "[ref:citation_1]": 0},
    ),
    ("citation_if", {"verifier": {**CITED, "mode": "no_cite"}}, {"So it is.": 1, "So it is [ref:citation_1].": 0}),
    (
        "structeval",
        {"output_type": "JSON", "raw_output_metric": ["a.b[0]", "a.`c.d`"]},
        {'{"a": {"b": [1], "c.d": 2}}': 1, '{"a": {"b": [1]}}': 0.6, "a: 1": 0},
    ),
    ("structeval", {"output_type": "CSV", "raw_output_metric": ["csv::x"]}, {"<|BEGIN_CODE|>\nx,y\n<|END_CODE|>": 1}),
    (
        "structeval",
        {"output_type": "XML", "raw_output_metric": ["r.s.i"]},
        {"<r><s><i>1</i><i>2</i></s></r>": 1, "<r><s>1</s></r>": 0.2},
    ),
    ("bigcodebench", {"verifier_metadata": {"test": UNITTEST, "entry_point": "double"}}, {
        BLOCK.format("def double(n):\n    return 2 * n"): 1,
        BLOCK.format("def double(n):\n    return n"): 0,
        BLOCK.format("raise SystemExit"): 0,
    }),
    ("scicodepile", {"verifier_metadata": {
        "test": "def check(candidate):\n    assert candidate() == K", "entry_point": "f", "setup_code": "K = 3"
    }}, {BLOCK.format("def f():\n    return K"): 1, BLOCK.format("def f():\n    return 4"): 0}),
    ("swerl_llm_judge", {"expected_answer": "B"}, {"<solution>B</solution>": 1, "B": 0}),
    ("proof_genselect", {"correct_index": 2}, {"<best_solution>2</best_solution>": 1, "2": 0}),
    ("wmt_translation", {"text": "good day", "translation": "guten Tag"}, {"guten Tag": 1, "": 0}),
]  # fmt: skip


async def verify_row(
    family: str, row: dict[str, Any], text: str, output: list[Any] | None = None, **services: Any
) -> Any:
    stanza = STANZAS[family]
    options = {name: value for name, value in stanza.items() if name not in ("kind", "app", "optional")}
    items = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    body = {"responses_create_params": {"input": "q"}, "response": {"output": output or items}, **row}
    async with local_services({"gym": options}, gym=load(ROOT / stanza["app"] / "app.py").app, **services) as peers:
        return await peers["gym"].post("/verify", body)


@pytest.mark.parametrize("family", sorted({family for family, *_ in ROWS}))
async def test_a_familys_stanza_scores_right_and_wrong(family):
    found = {}
    cases = {
        (place, text): worth for place, row in enumerate(ROWS) if row[0] == family for text, worth in row[2].items()
    }
    for place, text in cases:
        found[place, text] = (await verify_row(family, ROWS[place][1], text))["reward"]
    assert found == pytest.approx(cases)


def verdicts(options: dict[str, Any], row: dict[str, Any], *answers: str) -> Any:
    """The results of answer_match for each answer to a row."""

    async def verify() -> list[Any]:
        async with local_services(
            {"gym": options}, gym=load(ROOT / "gym_servers" / "answer_match" / "app.py").app
        ) as peers:
            return [await peers["gym"].post("/verify", body | row | {"response": respond(text)}) for text in answers]

    def respond(text: str) -> Any:
        return {
            "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
        }

    body = {"responses_create_params": {"input": "q"}}
    return verify()


UNUSABLE = [
    ("exact", None, "None"),
    ("exact", ["a", None], "a"),
    ("exact", {"a": 1}, "{'a': 1}"),
    ("contains_any", "", "anything"),
    ("contains_all", [], "anything"),
    ("similarity", [], "anything"),
    ("rouge_l", [], "anything"),
    ("set_f1", None, "null"),
    ("truth", None, "no"),
    ("numeric", "five", "5"),
    ("numeric", "1e400", "1e500"),
    ("closeness", "abc", "5"),
    ("letter", "Z", "A"),
    ("grid", "[[1, 2]]", "[[1, 2]]"),
    ("grid", [[]], "[[]]"),
    ("schedule", [], "[]"),
    ("schedule", {"0": {"duration": 60, "constraint": None, "min_time": "noon", "max_time": "17:00"}}, "[]"),
    ("schedule", {"0": {"duration": 60, "constraint": "before", "min_time": "9am", "max_time": "17:00"}}, "[]"),
    ("schedule", {"0": {"duration": 60, "constraint": "between 9am", "min_time": "9am", "max_time": "17:00"}}, "[]"),
    ("ndcg", [5000, 0], '["x"]'),
    ("ndcg", [1], '["x"]'),
    ("ndcg", [0, 0], '["x"]'),
]


@pytest.mark.parametrize(("compare", "expected", "answer"), UNUSABLE)
async def test_a_row_whose_expected_value_cannot_be_compared_has_no_reward(compare, expected, answer):
    options = {"compare": compare, "extract": ["text"], "choices": "choices"}
    for found in await verdicts(options, {"expected_answer": expected, "choices": ["x", "y"]}, answer, "other"):
        assert found["reward"] is None and found["outcome"] == "unverifiable" and "'expected_answer'" in found["reason"]


@pytest.mark.parametrize(
    ("answer", "edits"),
    [
        ("a b x d", 1),
        ("b c d e", 2),  # one word fewer, one more
        ("a b x c d", 1),
        ("b d", 2),
        ("d c b a", 4),
        ("x y z", 4),
        ("b a c d x", 3),
    ],
)
async def test_soft_comparison_is_one_minus_the_word_error_rate(answer, edits):
    options = {"compare": "soft_any", "extract": ["text"]}
    (found,) = await verdicts(options, {"expected_answer": ["a b c d", "none of it"]}, answer)
    assert found["reward"] == 1 - edits / 4


@pytest.mark.parametrize(
    ("compare", "expected", "answer"),
    [
        ("set_f1", ["a"], "[" * 100_000),
        ("same_list", ["a"], "[" * 100_000),
        (
            "schedule",
            {"0": {"duration": 60, "constraint": None, "min_time": "9am", "max_time": "17:00"}},
            "[" * 100_000,
        ),
        ("grid", [[1]], "9" * 5000),
    ],
)
async def test_an_answer_that_python_cannot_read_gets_0(compare, expected, answer):
    (found,) = await verdicts({"compare": compare, "extract": ["text"]}, {"expected_answer": expected}, answer)
    assert found["reward"] == 0


async def test_long_texts_are_cut_alike_before_their_words_are_compared():
    text = " ".join(f"w{number}" for number in range(12_000))
    same, half, other = await verdicts(
        {"compare": "rouge_l", "extract": ["text"]}, {"expected_answer": text}, text, " ".join(text.split()[::2]), "x y"
    )
    assert same["reward"] == 1 and half["reward"] == pytest.approx(2 / 3, abs=0.2) and other["reward"] == 0


async def test_numbers_that_no_float_holds_are_not_equal():
    for compare in ("numeric", "closeness", "exact"):
        found = await verdicts({"compare": compare, "extract": ["text"]}, {"expected_answer": "5"}, "1e400", "inf", "5")
        assert [each["reward"] for each in found] == [0, 0, 1]
    huge = await verdicts({"extract": ["text"]}, {"expected_answer": "1e400"}, "1e500", "1e400")
    assert [each["reward"] for each in huge] == [0, 1]


CALLS = [
    ("xlam_fc", {"expected_answers": [{"name": "f", "arguments": {"x": 1}}]}),
    ("swe_pivot", {"expected_action": {"type": "function_call", "name": "f", "arguments": '{"x": 1}'}}),
    ("terminal_multi_harness", {"expected_action": {"calls": [{"name": "f", "arguments": '{"x": 1}'}]}}),
    ("example_tool_call_multireward", {"expected_call": {"name": "f", "arguments": {"x": 1}}}),
]


@pytest.mark.parametrize(("family", "row"), CALLS)
async def test_expected_calls_have_other_names_in_their_rows(family, row):
    for x, reward in ((1, 1.0), (2, 0.0)):
        call = {"type": "function_call", "name": "f", "arguments": json.dumps({"x": x}), "call_id": "c"}
        assert (await verify_row(family, row, "", [call]))["reward"] == reward


async def test_a_message_is_the_expected_action_when_no_tool_is_called():
    row = {"expected_action": {"type": "message", "content": "Which one?"}}
    assert (await verify_row("single_step_tool_use_with_argument_comparison", row, "Which?"))["reward"] == 1.0


def judge(verdict: str, prompts: list[str]):
    async def respond(request: dict[str, Any], call: ModelCall) -> dict[str, Any]:
        system, user = (item["content"] for item in request["input"])
        prompts.append(user)
        verdict_text = f"VERDICT {system.rpartition('VERDICT ')[2].split(':')[0]}: {verdict}"
        return new_response(
            request, [message_item([output_text(verdict_text)], "msg_1")], response_id="r", model="judge"
        )

    return model_server(respond=respond)


JUDGED = [
    ("simpleqa", {"question": "Who?", "expected_answer": "Ada"}, "correct", 1.0, "Ada"),
    ("longmemeval", {"verifier_metadata": {"question": "Who?", "answer": "Ada"}}, "incorrect", 0.0, "Ada"),
    ("xstest", {"verifier_metadata": {"label": "unsafe"}}, "refused", 1.0, "q"),
    ("xstest", {"verifier_metadata": {"label": "safe"}}, "refused", 0.0, "q"),
    (
        "inverse_if",
        {"prompt": "p", "reference_response": "r", "rubric": [{"criteria": "short?"}]},
        "met",
        1.0,
        "short?",
    ),
    ("multichallenge", {"context": "c", "rubric": [{"question": "ok?", "pass_criteria": "NO"}]}, "no", 1.0, "ok?"),
    ("arena", {"question": "q", "baseline_answer": "b"}, "tie", 0.5, "b"),
]


@pytest.mark.parametrize(("family", "row", "verdict", "reward", "expected"), JUDGED)
async def test_a_judge_sees_the_rows_fields_and_its_verdict_is_the_reward(family, row, verdict, reward, expected):
    prompts: list[str] = []
    answer = await verify_row(family, row, "my answer", policy=judge(verdict, prompts))
    assert answer["reward"] == reward
    assert expected in prompts[0] and "my answer" in prompts[0]


async def test_a_verdict_that_the_form_does_not_know_and_a_row_without_the_field_have_no_reward():
    unknown = await verify_row("simpleqa", {"question": "Who?", "expected_answer": "Ada"}, "x", policy=judge("B", []))
    missing = await verify_row("simpleqa", {"question": "Who?"}, "x", policy=judge("correct", []))
    assert (unknown["reward"], missing["reward"]) == (None, None)
    assert "expected_answer" in missing["reason"]
    assert "outputs" in (await verify_row("ruler", {"subset": "vt"}, "x"))["reason"]


async def test_tests_of_a_task_id_come_from_the_file_and_a_missing_part_is_filled_in(tmp_path):
    file = tmp_path / "tests.jsonl"
    test = "def check(candidate):\n    assert candidate(3) == 6"
    complete = {"task_id": "a/0", "prompt": "import math\ndef twice(n):\n", "entry_point": "twice", "test": test}
    middle = {
        "task_id": "a/1",
        "prompt": "def f(n):\n    return ",
        "suffix": " * n\n",
        "entry_point": "f",
        "test": test,
    }
    file.write_text("".join(json.dumps(row) + "\n" for row in (complete, middle)))
    app = load(ROOT / "gym_servers" / "code_exec" / "app.py").app
    async with local_services({"gym": {"tests": str(file)}}, gym=app) as peers:

        async def reward(task_id: str, code: str) -> Any:
            output = [{"type": "message", "role": "assistant", "content": f"```python\n{code}\n```"}]
            row = {"responses_create_params": {"input": "q"}, "verifier_metadata": {"task_id": task_id}}
            return (await peers["gym"].post("/verify", {**row, "response": {"output": output}}))["reward"]

        assert await reward("a/0", "def twice(n):\n    return math.prod([2, n])") == 1.0
        assert await reward("a/0", "def twice(n):\n    return n") == 0.0
        assert await reward("a/0", "    return 2 * n") == 1.0
        assert await reward("a/1", "2") == await reward("a/1", "    return 2 * n") == 1.0
        assert await reward("a/1", "3") == 0.0
        assert await reward("a/2", "2") is None
