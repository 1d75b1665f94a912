"""instruction_following: every reference follows its row, wrong rows are refused by name, and no text takes long."""

import asyncio
import json
from typing import Any

import pytest
from house import house
from paths import ROOT
from starting import slowness

from ngym.errors import ServiceError
from ngym.services.base.app import load

APP = load(ROOT / "gym_servers" / "instruction_following" / "app.py")


def serving(**options: Any):
    return house({"gym": options}, gym=APP.app)


def rollout(text: str, **row: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return {"responses_create_params": {"input": "q"}, "response": {"output": output}, **row}


def shipped() -> list[dict[str, Any]]:
    folder = ROOT / "data" / "instruction_following"
    return [json.loads(line) for file in ("train", "validation") for line in (folder / f"{file}.jsonl").open()]


async def test_every_reference_follows_its_row_and_a_stranger_to_it_does_not():
    async with serving() as peers:

        async def score(row: dict[str, Any], text: str) -> float | None:
            own = {key: value for key, value in row.items() if key != "responses_create_params"}
            return (await peers["gym"].post("/verify", rollout(text, **own)))["reward"]

        rows = shipped()
        references, empty = [], []
        for row in rows:
            references.append(await score(row, row["reference"]))
            empty.append(await score(row, " \n"))
    assert references == [1.0] * len(rows)
    assert empty == [0.0] * len(rows)


def test_all_of_ifevals_25_instructions_are_there_and_stand_in_the_data():
    named = {name for row in shipped() for name in row["instruction_id_list"]}
    ifeval = {name for name in named if name.split(":")[0] not in ("count", "words", "sentence", "format")}
    assert len(ifeval) == 25
    assert ifeval <= APP.CHECKS.keys()


UNCHECKABLE = [
    ({"instruction_id_list": ["a:b"], "kwargs": [{}]}, "unknown instruction 'a:b'"),
    ({"instruction_id_list": [], "kwargs": []}, "at least one"),
    ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "one entry for each instruction"),
    ({"instruction_id_list": ["count:numbers"], "kwargs": [{}]}, "count:numbers: N"),
    ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": "many"}]}, "count:numbers: N"),
    ({"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "xx"}]}, "unknown language 'xx'"),
]


async def test_a_row_that_cannot_be_checked_is_refused_before_a_model_is_asked():
    async with serving() as peers:
        for row, told in UNCHECKABLE:
            with pytest.raises(ServiceError) as refusal:
                await peers["gym"].session().post("/seed_session", {"responses_create_params": {"input": "q"}, **row})
            assert refusal.value.status == 422
            assert told in str(refusal.value)


HOSTILE = {
    "brackets": "a[" * 20_000,
    "angles": "a<<" * 16_000,
    "stars": "a*" * 20_000,
    "dividers": "a***" * 13_000,
    "stops": "a. " * 16_000,
    "initials": "A." * 20_000,
    "quotes": '"' * 50_000 + "a",
    "lines": "a\n" * 20_000,
    "spaces": "a" + " " * 50_000,
    "P.S.": "P.S.\n" * 10_000,
    "open JSON": '{"a":' * 10_000,
    "apostrophes": "a'" * 20_000,
    "digits": "1," * 20_000,
    "accents": "e\u0301" * 20_000,
    "too long": "a " * 101_000,
}


async def test_no_text_makes_the_checks_slow():
    given = {
        "keywords:existence": {"keywords": ["x"]},
        "keywords:frequency": {"keyword": "a", "frequency": 1},
        "keywords:forbidden_words": {"forbidden_words": ["x"]},
        "keywords:letter_frequency": {"letter": "a", "let_frequency": 1},
        "language:response_language": {"language": "en"},
        "length_constraints:number_sentences": {"num_sentences": 1},
        "length_constraints:number_paragraphs": {"num_paragraphs": 1},
        "length_constraints:number_words": {"num_words": 1},
        "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "a"},
        "detectable_content:number_placeholders": {"num_placeholders": 1},
        "detectable_content:postscript": {"postscript_marker": "P.S."},
        "detectable_format:number_bullet_lists": {"num_bullets": 1},
        "detectable_format:number_highlighted_sections": {"num_highlights": 1},
        "detectable_format:multiple_sections": {"section_spliter": "a", "num_sections": 1},
        "combination:repeat_prompt": {"prompt_to_repeat": "a"},
        "startend:end_checker": {"end_phrase": "a"},
        "change_case:capital_word_frequency": {"capital_frequency": 1},
        "count:word_count_range": {"min_words": 1, "max_words": 2},
        **{name: {"N": 1} for name in ("count:unique_word_count", "count:numbers", "count:lines")},
        "count:lowercase_counting": {"N": 0},
        "count:count_increment_word": {"keyword1": "x", "keyword2": "y"},
        "count:counting_composition": {"n_sent": 1, "n_words": 1},
        "letters:letter_counting": {"N": 1, "relation": "at least"},
        "letters:letter_counting2": {"letter": "a", "let_frequency": 1, "let_relation": "at least"},
        "keywords:word_count_different_numbers": {"keyword": "x", "frequency": 1, "relation": "at least"},
        "keywords:keyword_specific_position": {"keyword": "x", "n": 1, "m": 1},
        **{name: {"keyword": "x"} for name in ("keywords:word_once", "keywords:exclude_word_harder")},
        **{f"first_word:first_word_{where}": {"first_word": "x"} for where in ("sent", "answer")},
        **{f"last_word:last_word_{where}": {"last_word": "x"} for where in ("sent", "answer")},
        **{name: {"small_n": 1} for name in ("words:repeats", "sentence:increment")},
    }
    row = {"instruction_id_list": list(APP.CHECKS), "kwargs": [given.get(name, {}) for name in APP.CHECKS]}
    slower = slowness()  # what a text may take is CPU time, and no more of it on a slow machine
    texts = [text if name == "too long" else text[: int(len(text) / slower)] for name, text in HOSTILE.items()]
    async with serving() as peers:
        scored = await asyncio.gather(*(peers["gym"].post("/verify", rollout(text, **row)) for text in texts))
    assert {name: (answer["outcome"], answer["reward"]) for name, answer in zip(HOSTILE, scored, strict=True)} == (
        dict.fromkeys(HOSTILE, ("not_followed", 0.0))
    )


async def test_the_stanza_decides_which_reading_is_paid():
    row = {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}
    for reading, reward in (("strict", 0.0), ("loose", 1.0)):
        async with serving(reading=reading) as peers:
            answer = await peers["gym"].post("/verify", rollout('Sure!\n"Tea."', **row))
        assert (answer["reward"], answer["parts"]) == (reward, {"strict": 0.0, "loose": 1.0})


# id, arguments, a text that follows it, one that does not
MULTI_CONSTRAINTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:lowercase_counting", {"N": 2}, "ONE two THREE four", "one two three"),
    ("count:count_unique", {}, "All words here differ", "the cat saw the dog"),
    ("count:count_increment_word", {"keyword1": "cat", "keyword2": "dog"}, "cat dog dog", "cat cat dog dog"),
    ("count:counting_composition", {"n_sent": 1, "n_words": 2}, "A b. * * * C d. * * * E f.", "A b. * * * C d."),
    ("letters:letter_counting", {"N": 3, "relation": "less than"}, "a1b2", "abc"),
    ("letters:letter_counting2", {"letter": "a", "let_frequency": 2, "let_relation": "at least"}, "Aha", "ah"),
    ("paragraphs:paragraphs", {}, "one\n***\ntwo", "one\n\ntwo"),
    ("paragraphs:paragraphs2", {}, "one\n\ntwo", "one\ntwo"),
    ("first_word:first_word_sent", {"first_word": "cats"}, "Cats sleep. Cats eat.", "Cats sleep. Cats-like dogs eat."),
    ("first_word:first_word_answer", {"first_word": "cats"}, "Cats sleep. Dogs eat.", "Some cats sleep."),
    ("last_word:last_word_sent", {"last_word": "end"}, "This is the end. Another end!", "This is the end. No."),
    ("last_word:last_word_answer", {"last_word": "contest"}, 'A kind of "contest".', "A contest it was."),
    ("keywords:word_once", {"keyword": "cat"}, "A cat, and concatenation.", "A cat and a cat."),
    ("keywords:exclude_word_harder", {"keyword": "cat"}, "Concatenation.", "A Cat."),
    ("keywords:keyword_specific_position", {"keyword": "cat", "n": 2, "m": 2}, "Look. A cat sat.", "A cat. Sat it."),
    ("keywords:start_end", {}, "Home is my home", "Home is my home."),
    ("keywords:no_adjacent_consecutive", {}, "apples can fly", "apples become cider"),
    ("keywords:palindrome", {}, "A civic duty", "A city duty"),
    ("detectable_format:square_brackets", {}, "[all] [of] [it]", "[all] of [it]"),
    ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am>> at <<home now>>"),
    ("detectable_format:sentence_hyphens", {}, "I came.-I saw.-I won.", "I came. - I saw."),
    ("punctuation:punctuation_dot", {}, "No stop!", "A stop."),
    ("punctuation:punctuation_exclamation", {}, "Calm.", "Loud!"),
    ("keywords:word_count_different_numbers", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a b", "a a"),
]


async def test_the_further_instructions_of_if_multi_constraints_are_told_from_their_opposites():
    async with serving() as peers:
        wrong = []
        for name, given, good, bad in MULTI_CONSTRAINTS:
            row = {"instruction_id_list": [name], "kwargs": [given]}
            answers = [(await peers["gym"].post("/verify", rollout(text, **row)))["reward"] for text in (good, bad)]
            if answers != [1.0, 0.0]:
                wrong.append((name, answers))
    assert not wrong


# id, arguments, a text, whether it follows: where IFEval's and IFBench's own checkers were found to differ from ours
AS_THEIRS: list[tuple[str, dict[str, Any], str, bool]] = [
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "at least"},
        "It is a/b. So c,d. Yes.",
        True,
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "J. Doe came.", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "It ends with P.P.S.:\n\nP.P.S. Bye.", True),
    ("keywords:frequency", {"keyword": " tea ", "frequency": 2}, "Tea, tea.", True),
    ("format:newline", {}, "one .\ntwo\n***\nthree !", True),
    ("format:newline", {}, "one\ntwo words\nthree", False),
    ("words:last_first", {}, "Here is tea. Tea is hot.", True),
    ("words:palindrome", {}, "level radar civic refer", False),
    ("words:palindrome", {}, "level radar civic refer kayak rotor madam tenet sagas racecar", True),
    ("words:palindrome", {"N": 2}, "mum and dad", True),
]


async def test_instructions_are_read_as_the_checkers_of_their_public_sets_read_them():
    async with serving() as peers:
        for name, given, text, followed in AS_THEIRS:
            row = {"instruction_id_list": [name], "kwargs": [given]}
            assert (await peers["gym"].post("/verify", rollout(text, **row)))["reward"] == float(followed), (name, text)
