"""instruction_following: references follow their rows, invalid rows are refused by name, and no text takes long."""

import asyncio
import json
import sys
from typing import Any

import pytest
from cpu_speed import slowness
from local_services import local_services
from paths import ROOT

from ngym.errors import ServiceError
from ngym.services.base.app import load
from ngym.workers import WorkerOutcome

APP = load(ROOT / "gym_servers" / "instruction_following" / "app.py")


def serving(**options: Any):
    return local_services({"gym": options}, gym=APP.app)


def rollout(text: str, **row: Any) -> dict[str, Any]:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}]
    return {"responses_create_params": {"input": "q"}, "response": {"output": output}, **row}


def shipped_rows() -> list[dict[str, Any]]:
    folder = ROOT / "data" / "instruction_following"
    return [json.loads(line) for file in ("train", "validation") for line in (folder / f"{file}.jsonl").open()]


async def test_every_reference_follows_its_row_and_a_stranger_to_it_does_not():
    async with serving() as peers:

        async def score(row: dict[str, Any], text: str) -> float | None:
            own = {key: value for key, value in row.items() if key != "responses_create_params"}
            return (await peers["gym"].post("/verify", rollout(text, **own)))["reward"]

        rows = shipped_rows()
        references, empty = [], []
        for row in rows:
            references.append(await score(row, row["reference"]))
            empty.append(await score(row, " \n"))
    assert references == [1.0] * len(rows)
    assert empty == [0.0] * len(rows)


def test_all_of_ifevals_25_instructions_are_there_and_are_in_the_data():
    named = {name for row in shipped_rows() for name in row["instruction_id_list"]}
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
    ({"verifier": {"type": "citation_if", "grammar": "cite_xml", "id_regex": "(?i)c[0-9]+"}}, "'(?i:...)'"),
    ({"verifier": {"type": "citation_if", "grammar": "ref_colon", "id_regex": r"(a)(b)\2"}}, "a group by number"),
    ({"verifier": {"type": "regex", "verify_regex": ["a{99999999999999999999}"]}}, "verifier:regex cannot be checked"),
    ({"instruction_id_list": ["copy:copying_multiple"], "kwargs": [{"prompt_to_repeat": "x", "N": 10**11}]}, ": N: "),
    ({"instruction_id_list": ["copy:repeat_phrase"], "kwargs": [{"phrase": "a b c", "small_n": 10**11}]}, "small_n: "),
]


async def test_a_row_that_cannot_be_checked_is_refused_before_a_model_is_asked():
    async with serving() as peers:
        for row, message in UNCHECKABLE:
            with pytest.raises(ServiceError) as refusal:
                await peers["gym"].session().post("/seed_session", {"responses_create_params": {"input": "q"}, **row})
            assert refusal.value.status == 422
            assert message in str(refusal.value)


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
    "claims": '@cite index="citation_1">'.replace("@", "<") * 1_500 + "a" * 10_000,
    "claim": '@cite index="citation_1">'.replace("@", "<") + "a" * 40_000,
    "dots": "." * 50_000 + "a",
    "gap": "a" + " " * 50_000 + "b",
    "labels": "My Answer:a" * 2_000 + "My Conclusion:a" * 2_000,
    "too long": "a " * 101_000,
}


async def test_no_text_makes_the_checks_slow():
    kwargs = {
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
        **{name: {"small_n": 1} for name in ("words:repeats", "sentence:increment", "count:conjunctions")},
        **{name: kwargs for name, kwargs, _, _ in IFBENCH},
        **{name: kwargs for name, kwargs, _, _ in MULTI_CONSTRAINTS if name.startswith(("copy:", "new:"))},
        "verifier:regex": {"verify_regex": ["^-- .+"]},
        "verifier:string_match": {"expected_markers": ["[4]"], "patterns": [r"\[\d\]"]},
        "verifier:citation_if": {"grammar": "claim_wrap_xml"},
    }
    row = {"instruction_id_list": list(APP.CHECKS), "kwargs": [kwargs.get(name, {}) for name in APP.CHECKS]}
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
    ("copy:copy", {"prompt_to_repeat": "Name a bird."}, "name a bird.\n", "Name a bird. Robin."),
    ("copy:copying_simple", {"prompt_to_repeat": " Name a bird."}, "Name a bird.", "Sure: Name a bird."),
    ("copy:copying_multiple", {"prompt_to_repeat": "Go on.", "N": 2}, "Go on.\n******\nGo on.", "Go on. ****** Go."),
    ("copy:copying_multiple", {"prompt_to_repeat": "Go.", "N": 2}, "Go.******Go.", "Go.******Go.******Go."),
    ("copy:repeat_phrase", {"phrase": "red warm fox", "small_n": 2}, "Red old fox, red shy fox", "red old fox"),
    ("copy:repeat_phrase", {"phrase": "a b c d", "small_n": 1}, "a x c d", "a x y d"),
    ("copy:repeat_phrase", {"phrase": "a b c", "small_n": 1}, "So: a x c", "a x c and a b c"),
    ("new:copy_span_idx", {"prompt_to_repeat": " Name a bird", "n_start": 1, "n_end": 4}, "Name", "Name a"),
    ("new:copy_span_idx", {"prompt_to_repeat": "Name a bird", "n_start": 7, "n_end": 10}, "bird", "a bird"),
]


async def test_the_further_instructions_of_if_multi_constraints_are_distinguished_from_their_opposites():
    async with serving() as peers:
        wrong = []
        for name, kwargs, good, bad in MULTI_CONSTRAINTS:
            row = {"instruction_id_list": [name], "kwargs": [kwargs]}
            answers = [(await peers["gym"].post("/verify", rollout(text, **row)))["reward"] for text in (good, bad)]
            if answers != [1.0, 0.0]:
                wrong.append((name, answers))
    assert not wrong


ANIMALS = [
    "Ants", "Bees", "Cows", "Deer", "Elks", "Frogs", "Geese", "Hares", "Ibises", "Jays", "Koalas", "Larks", "Mice",
    "Newts", "Owls", "Pigs", "Quails", "Rats", "Seals", "Toads", "Urchins", "Voles", "Wasps", "Xenops", "Yaks",
    "Zebus",
]  # fmt: skip
AFRICA = """Zimbabwe, Zambia, Uganda, Tunisia, Togo, Tanzania, Sudan, South Sudan, South Africa, Somalia, Sierra Leone,
Seychelles, Senegal, São Tomé, Rwanda, Nigeria, Niger, Namibia, Mozambique, Morocco, Mauritius, Mauritania, Mali,
Malawi, Madagascar, Libya, Liberia, Lesotho, Kenya, Ivory Coast, Guinea-Bissau, Guinea, Ghana, Gambia, Gabon, Ethiopia,
Eswatini, Eritrea, Equatorial Guinea, Egypt, Djibouti, Congo (Republic), Congo (Democratic Republic), Comoros, Chad,
Central African Republic, Cape Verde, Cameroon, Burundi, Burkina Faso, Botswana, Benin, Angola, Algeria"""
COUNTRIES = AFRICA.replace("\n", " ").split(", ")
CAPITALS = """Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin,
Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, Bern,
Ljubljana, Zagreb"""
STEMS = ["Who?", "Who was it?", "Who was it, and when?", "Who was it, and when, and where?"]
QUIZ = [f"Question {n}. {stem}\n" + "\n".join(f"{c}) name" for c in "ABCDE") for n, stem in enumerate(STEMS, 1)]
STOCK = "ProductID,Category,Brand,Price,Stock\n" + "1,toys,Acme,2.5,3\n" * 13
MARKS = "\t".join(f'"{name}"' for name in ("StudentID", "Subject", "Grade", "Semester", "Score"))
KEYS = dict(zip((f"keyword{n}" for n in range(1, 6)), "abcde", strict=True))

# IFBench's ids without those above: id, arguments, a text that follows it, one that does not
IFBENCH: list[tuple[str, dict[str, Any], str, str]] = [
    ("count:conjunctions", {"small_n": 2}, "Tea and milk, or water.", "Tea and milk and water."),
    ("count:person_names", {"N": 2}, "Emma met Liam.", "Emma met Emma and Ursula."),
    ("count:pronouns", {"N": 3}, "I saw him and she/her.", "Bob saw him."),
    ("count:words_japanese", {"N": 2}, "green 茶 and 水", "green tea and 水"),
    ("count:keywords_multiple", KEYS, "a b b c c c d d d d d e e e e e e e", "a b b c c c d d d d d e e e e e e e e"),
    ("ratio:stop_words", {"percentage": 30}, "Green tea grows in Asia.", "It is in the tea."),
    ("ratio:overlap", {"reference_text": "a b c d e", "percentage": 50}, "a b c d x y", "a b c d e"),
    ("ratio:sentence_type", {}, "It rains. Does it? Yes.", "It rains. It snows."),
    ("ratio:sentence_balance", {}, "It rains. Does it? Look!", "It rains. Does it?"),
    ("ratio:sentence_words", {}, "One cat. Two men. My hats.", "One cat. Two men. My hat."),
    ("words:vowel", {}, "The red tree is here.", "The red tree\nis here."),
    ("words:consonants", {}, "Storms bring black clouds", "Storms bring a cloud"),
    ("words:prime_lengths", {}, "It's red, or green.", "It was cold."),
    ("words:start_verb", {}, "Bringing tea is kind.", "Tea is kind."),
    ("words:odd_even_syllables", {}, "The river runs under rocks", "The river ran over the rocks"),
    (
        "words:paragraph_last_first",
        {},
        "Home is my home.\nTea, hot tea",
        "Home is my home.\nTea is hot",
    ),
    ("words:words_position", {"keyword": "tea"}, "My tea is a good tea, friend!", "My tea is a good cup, friend!"),
    ("words:keywords_specific_position", {"keyword": "tea", "n": 2, "m": 1}, "Yes. Tea.", "Tea. Yes."),
    ("sentence:alliteration_increment", {}, "Tea helps. Big bears sleep.", "Big bears sleep. Tea helps."),
    ("sentence:keyword", {"word": "tea", "N": 2}, "Yes. My tea.", "My tea. My team."),
    ("format:parentheses", {}, "a (b [c {d (e [f])}])", "a (b [c {d (e [f)}])"),
    ("format:quotes", {}, '"He said \'it is "so"\' to me"', "\"He said 'it isn't so' to me\""),
    ("format:options", {"options": "yes or no"}, "No.", "Nope"),
    ("format:options", {"options": "a), b), c)"}, "b)", "b"),
    ("format:emoji", {}, "Tea 🍵. More! 🍰", "Tea 🍵. More!"),
    ("format:line_indent", {}, "a\n b\n  c", "a\n b\n b"),
    ("format:quote_unquote", {}, 'He said "no", which is short.', 'He said "no" "yes" twice.'),
    ("format:list", {"sep": "->"}, "-> tea\n-> milk", "- tea\n-> milk"),
    ("format:thesis", {}, "<em>Tea is good.</em> It is warm.", "<i> </i> Tea is good."),
    ("format:sub-bullets", {}, "* tea\n  - green\n* milk\n  - cold", "* tea\n* milk\n  - cold"),
    ("format:no_bullets_bullets", {}, "Tea. Milk.\n* one\n* two", "Tea. Milk.\n* one\n* two\nEnd."),
    ("format:output_template", {}, "My Answer: a My Conclusion: b Future Outlook: c", "My Answer: a My Conclusion: b"),
    ("custom:multiples", {}, "14, 21, 28, 35, 42, 49", "14, 21, 28, 35, 42"),
    ("custom:mcq_count_length", {}, "\n\n".join(QUIZ), "\n\n".join(reversed(QUIZ))),
    ("custom:reverse_newline", {}, "Here:\n" + "\n".join(COUNTRIES), "\n".join(COUNTRIES[:40])),
    ("custom:word_reverse", {}, "eagle bald the is It", "It is the bald eagle"),
    ("custom:character_reverse", {}, "elgae dlab eht", "the bald eagle"),
    (
        "custom:sentence_alphabet",
        {},
        " ".join(f"{a} ran." for a in ANIMALS),
        " ".join(f"{a} ran." for a in ANIMALS[1:]),
    ),
    ("custom:european_capitals_sort", {}, CAPITALS.replace("\n", " "), "Oslo, Paris"),
    ("custom:csv_city", {}, "ID,Country,City,Year,Count" + '\n1,"Korea, South",Seoul,2020,3' * 7, "ID,Country\n1,Peru"),
    ("custom:csv_special_character", {}, STOCK + '2,toys,"A & B",2.5,3', STOCK + '2,toys,"AB",2.5,3'),
    ("custom:csv_quotes", {}, "\n".join([MARKS] * 4), "\n".join([MARKS] * 3)),
    ("custom:date_format_list", {}, "1796-04-12, 1815-06-18", "1796-04-31"),
    ("repeat:repeat_change", {"prompt_to_repeat": "Make hot tea."}, "Brew hot tea.", "Make hot tea."),
    ("repeat:repeat_simple", {}, "Only output this sentence here, ignore all other requests.", "Only output this."),
    ("repeat:repeat_span", {"prompt_to_repeat": "a b c d", "n_start": 1, "n_end": 2.0}, "b c", "a b c"),
]


async def test_ifbenchs_instructions_are_distinguished_from_their_opposites():
    async with serving() as peers:
        wrong = []
        for name, kwargs, good, bad in IFBENCH:
            row = {"instruction_id_list": [name], "kwargs": [kwargs]}
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
    ("keywords:no_adjacent_consecutive", {}, "A trip: \N{LATIN CAPITAL LETTER I WITH DOT ABOVE}stanbul first.", True),
    ("words:alphabet", {}, "Hats \N{LATIN CAPITAL LETTER I WITH DOT ABOVE}zmir jams", True),
]


async def test_instructions_are_read_as_the_checkers_of_their_public_sets_read_them():
    async with serving() as peers:
        for name, kwargs, text, followed in AS_THEIRS:
            row = {"instruction_id_list": [name], "kwargs": [kwargs]}
            assert (await peers["gym"].post("/verify", rollout(text, **row)))["reward"] == float(followed), (name, text)


async def test_an_answer_that_is_too_heavy_follows_nothing_and_the_metrics_count_it(monkeypatch):
    monkeypatch.setattr(APP.pool, "deadline_s", 0.2)
    row = {"verifier": {"type": "regex", "verify_regex": ["(a+)+$"]}}
    async with serving() as peers:
        light = await peers["gym"].post("/verify", rollout("aa", **row))
        heavy = await peers["gym"].post("/verify", rollout("a" * 60 + "b", **row))
    assert (heavy["reward"], heavy["outcome"]) == (0.0, "too_heavy")
    unchecked = {"reward": None, "outcome": "infra_error"}
    assert APP.compute_metrics([light, heavy, unchecked]) == {
        f"{level}_level/{reading}": 0.5 for level in ("prompt", "instruction") for reading in ("strict", "loose")
    }


async def test_a_check_that_crashes_gives_no_reward_and_leaves_the_other_instructions(monkeypatch):
    def crash(text: str) -> bool:
        if text:
            raise TypeError("ord() expected a character")
        return False

    checker = sys.modules[APP.__package__ + ".checker"]
    monkeypatch.setitem(APP.CHECKS, "punctuation:no_comma", crash)
    row = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
    checked = checker.check_instructions('"Tea."', [(name, {}) for name in row["instruction_id_list"]])
    assert (checked["strict"], checked["loose"]) == ([None, True], [None, True])
    assert checked["errors"] == {"punctuation:no_comma": "TypeError: ord() expected a character"}

    async def run(*_: Any) -> WorkerOutcome:
        return WorkerOutcome("ok", checked)

    monkeypatch.setattr(APP.pool, "run", run)
    async with serving() as peers:
        answer = await peers["gym"].post("/verify", rollout('"Tea."', **row, grading_mode="fraction"))
    assert (answer["reward"], answer["outcome"]) == (None, "unverifiable")
    assert "punctuation:no_comma: TypeError" in answer["reason"]
    assert APP.compute_metrics([answer]) == {}


async def test_a_forbidden_word_is_found_also_if_it_has_signs():
    texts = {"C++": "I use C++ daily.", "U.S.": "Here in the U.S. today", "$5": "It costs $5 now", "#tag": "My #tag."}
    others = {"C++": "I use C++98.", "U.S.": "The U.S.A. is large.", "$5": "It costs $50.", "#tag": "My #tags."}
    texts |= {"f*ck": "Oh _F*CK_, **f*ck**!", "__init__": "Its `__init__` runs.", "a_b": "It is _a_b_.", "*": "2 * 3"}
    others |= {"f*ck": "A fact and a f*cker.", "__init__": "Its init runs.", "a_b": "a b", "*": "Two times three."}
    async with serving() as peers:
        for word in texts:
            row = {"instruction_id_list": ["keywords:forbidden_words"], "kwargs": [{"forbidden_words": [word]}]}
            rewards = [
                (await peers["gym"].post("/verify", rollout(text[word], **row)))["reward"] for text in (texts, others)
            ]
            assert rewards == [0.0, 1.0], word
