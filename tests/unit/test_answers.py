"""Extraction of answers: the policies of ngym.grading.answers, and that no text makes them slow."""

from decimal import Decimal
from time import process_time

import pytest

from ngym.grading.answers import (
    TEXT_LIMIT,
    asks_percent,
    boxed,
    formula,
    last_text,
    move,
    number,
    option_letter,
    response_problem,
    same_number,
    without_reasoning,
)

OPTIONS = {"A": "Lima", "B": "Paris", "C": "Rome", "D": "5 km"}
HOSTILE = {
    "open boxes": "\\boxed{" * 100_000,
    "open and closed boxes": "\\boxed{" * 50_000 + "}" * 50_000,
    "wrapped boxes": "\\boxed{" + "\\text{" * 30_000 + "}" * 30_001,
    "open braces": "{" * 300_000,
    "open formulas": "\\(" * 100_000,
    "dollars": "$" * 200_000,
    "phrases": "answer is " * 50_000,
    "half phrases": "answer " * 50_000,
    "spaces": "answer" + " " * 200_000,
    "digits": "9" * 300_000,
    "grouped digits": "1,111" * 60_000,
    "dots": "1." * 100_000,
    "letters in brackets": "(A" * 100_000,
    "reasoning": "<think>" * 50_000 + "</think>" * 50_000,
    "lines": "\n" * 300_000,
}


def test_the_last_complete_box_counts():
    assert boxed(r"\boxed{3} and then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{3} and then \boxed{4") == "3"
    assert boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert boxed(r"\boxed{\boxed{5}}") == "5"
    assert boxed(r"\boxed {6}") == "6"
    assert boxed("no box, {braces}") is None


def test_reasoning_holds_no_answer():
    assert without_reasoning("<think>hm</think>yes") == "yes"
    assert without_reasoning("hm</think>yes") == "yes"
    assert without_reasoning("<think>cut off") == ""
    assert formula(r"<think>\boxed{3}</think> I give up") is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The answer is 95.", "95"),
        ("9-7", None),
        ("9 - 7", None),
        ("1\N{EN DASH}7", None),
        ("3 * 4 = 12", "12"),
        ("2+5=7", "7"),
        ("14 / 2", None),
        ("7\N{SUPERSCRIPT TWO}", None),
        ("7^2", None),
        ("2^{7}", None),
        ("7_8", None),
        ("7\N{VULGAR FRACTION ONE HALF}", None),
        ("7e5000", None),
        (r"\boxed{\frac{1}{7}}", None),
        (r"\boxed{\frac{14}{2} = 7}", "7"),
        (r"\boxed{\sqrt{7}}", None),
        (r"\boxed{\sqrt{49}=7}", "7"),
        (r"\log_2 7", None),
        (r"7\pi", None),
        ("7x + 7x-7", None),
        ("**7**", "7"),
        ("There are 7!", "7"),
        ("Total - 7", "7"),
        ("1\N{ZERO WIDTH SPACE}7", "17"),
        ("\N{FULLWIDTH DIGIT SEVEN}", "7"),
        ("(3) -7", None),
        ("x=-5", "-5"),
        ("it costs $1,234.50", "1234.50"),
        ("on 2026-11-21", None),
        ("\N{MINUS SIGN}7", "-7"),
        ("\N{EN DASH}7", "-7"),
        ("\N{NON-BREAKING HYPHEN}7", "-7"),
        ("5 \N{HYPHEN} 7", None),
        ("1\N{HYPHEN}7", None),
        ("minus 7", "-7"),
        ("It is Negative .5", "-0.5"),
        ("5 minus 7", None),
        ("7 million", "7000000"),
        ("7 dozens", "84"),
        ("7k", "7000"),
        ("7 M", "7000000"),
        ("7m", "7"),
        ("7%", None),
        (r"7\%", None),
        ("7 percent", None),
        ("7 tenths", None),
        ("7 and a half", None),
        ("8 or 7", None),
        ("8 apples or maybe 7", None),
        ("8 (or 7)", None),
        ("8 and 7", None),
        (r"\boxed{8, 7}", None),
        (r"\boxed{8 \text{ or } 7}", None),
        ("3 hats or 4 coats, so it is 7", "7"),
        ("1 or 2? It is 7", "7"),
        ("it is not 7", None),
        ("it isn't **7**", None),
        ("not 5 but 7", "7"),
        ("x > 7", None),
        ("at least 7", None),
        ("It has more than **7**", None),
        ("3 more than 4 is 7", "7"),
        ("7x", None),
        ("7x as many", "7"),
        ("8, 7", None),
        ("Sorted:\n8; 9; 7", None),
        ("In 2021, 7 of them were left", "7"),
        (r"x \neq 7", None),
        ("> 7", "7"),
        ("=> 7", "7"),
        ("<answer>7</answer>", "7"),
        ("1.5 thousand", "1500"),
        ("5e3 apples", "5e3"),
        (r"\boxed{12} in 3 steps", "12"),
        ("95kg", "95"),
        ("none", None),
        ("v1.2.3", None),
        ("14 m^2", "14"),
        (r"\boxed{14 \text{ cm}^3}", "14"),
        (r"$60^\circ$", "60"),
        ("14 x^2", None),
        ("14 T-shirts", "14"),
        ("14 M&Ms", "14"),
        ("14 k's", "14"),
        ("14 mln", "14000000"),
        ("2 crore", "20000000"),
        ("-$7.50", "-7.50"),
        (r"$-\$7$", "-7"),
        ("\N{MINUS SIGN}\N{EURO SIGN}7", "-7"),
        ("-(7)", "-7"),
        (r"\boxed{- 7}", "-7"),
        (r"\boxed{-\text{7}}", "-7"),
        ("- 7", "7"),
        ("$9 - $7", None),
        ("\N{PLUS-MINUS SIGN}7", None),
        (r"\boxed{\pm 7}", None),
        ("2\N{NARROW NO-BREAK SPACE}214", "2214"),
        (r"\boxed{2 214}", "2214"),
        (r"\boxed{8 7}", None),
        (r"\boxed{8 \& 7}", None),
        (r"\boxed{1 \text{ to } 7}", None),
        ("7.000.000", None),
        ("7.5.", "7.5"),
        ("10**7", None),
        ("so it is **7**", "7"),
        ("7 x 10", None),
        ("54 x 41 = 2214", "2214"),
        ("54 times 41", None),
        ("54 times 41 is 2214", "2214"),
        ("7 times", "7"),
        ("7 squared", None),
        ("7 \N{VULGAR FRACTION ONE HALF}", None),
        ("7 pct", None),
        ("\N{GREATER-THAN OR EQUAL TO} 7", None),
        (r"\geq 7", None),
        ("it cannot be 7", None),
        ("it isn't the number 7", None),
        ("anything but 7", None),
        ("7 is wrong", None),
        ("7 is not the answer", None),
        ("it cannot be 8, so it is 7", "7"),
        ("8, maybe 7", None),
        ("8, or else 7", None),
        ("maybe 7", "7"),
    ],
)
def test_the_last_number_counts(text, found):
    assert number(text) == (None if found is None else Decimal(found))


def test_a_percentage_is_a_number_only_if_the_question_asks_for_one():
    assert number("It is 7%.", percent=True) == number("It is 7.", percent=True) == 7
    assert number("It is 7%.", percent=asks_percent("How many percent?")) == 7
    assert number("It is 7%.", percent=asks_percent("How many apples?")) is None


def test_whole_numbers_are_equal_and_others_nearly():
    assert same_number(Decimal("95.0"), Decimal(95))
    assert not same_number(Decimal(1_000_001), Decimal(1_000_000))
    assert same_number(Decimal("0.3333333333"), Decimal("0.333333"))
    assert not same_number(Decimal("0.33"), Decimal("0.333333"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{x^2}, as $x = 3$", "x^2"),
        ("The answer is 1/2.", "1/2"),
        ("The answer is 3.14. I am sure.", "3.14"),
        (r"The final answer is: $\frac12$. I hope it is correct.", r"\frac12"),
        ("**Answer:** 42", "42"),
        ("48 + 24\n#### 72", "72"),
        ("first $x$, then $x+1$", "x+1"),
        (r"thus \[ x = 5 \]", "x = 5"),
        ("in total 12.", "12"),
        ("Final Answer: The final answer is 12,023. I hope it is correct.", "12,023"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        (r"The answer is $\frac{3}{4}$, which is close to 1.", r"\frac{3}{4}"),
        (r"\frac{10}{9}", r"\frac{10}{9}"),
        ("it is .4", ".4"),
        ("it is 9/7", "9/7"),
        ("it is 9 / 7", None),
        ("it is 7\N{SUPERSCRIPT TWO}.", "7\N{SUPERSCRIPT TWO}"),
        ("nothing", None),
    ],
)
def test_a_formula_is_the_box_or_the_phrase_or_the_last_formula_or_the_last_number(text, found):
    assert formula(text) == found


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{B: Paris}}", "B"),
        (r"\boxed{5 km}", "D"),
        (r"\boxed{Option B}", "B"),
        (r"\boxed{\text{Choice (B)}}", "B"),
        ("The answer is option B, because it is the capital.", "B"),
        ("The answer is option A or B", None),
        ("The answer is option a week ago", None),
        (r"\boxed{B - C}", None),
        ("\\boxed{B \N{EN DASH} Paris}", "B"),
        ("The answer is (B) or (C)", None),
        ("The answer is B.", "B"),
        ("Answer: Paris", "B"),
        ("hm\n**B**", "B"),
        ("B is good", None),
        ("Answer: A and B", None),
        ("answer is a fruit", None),
        ("Answer: B\nAnswer: unknown", None),
    ],
)
def test_a_letter_is_named_once_or_not_at_all(text, letter):
    assert option_letter(text, OPTIONS) == letter


def test_the_text_of_a_response_is_that_of_its_last_assistant_message():
    def message(text, role="assistant"):
        return {"type": "message", "role": role, "content": [{"type": "output_text", "text": text}]}

    call = {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"}
    assert last_text({"output": [message("one"), call, message("two"), message("asked", "user")]}) == "two"
    assert last_text({"output": [call]}) == ""
    assert last_text({"output": [{"role": "assistant", "content": "plain"}]}) == "plain"


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("find", [number, formula, lambda text: option_letter(text, OPTIONS)])
def test_no_text_keeps_an_extraction_busy(name, find):
    started = process_time()
    find(HOSTILE[name])
    assert process_time() - started < 5  # milliseconds, or minutes where it is quadratic


def test_of_a_text_that_is_too_long_the_end_counts_and_reasoning_stays_reasoning() -> None:
    def read(text: str) -> str:
        return last_text({"output": [{"role": "assistant", "content": text}]})

    filler = "x" * TEXT_LIMIT
    assert read(filler) == filler
    assert read("5" + filler) == filler
    assert read("5" + filler[:-2] + "\n4") == filler[:-2] + "\n4"
    for opened in ("<think>", "a</think><think>", "<think>a"):
        assert without_reasoning(read(opened + filler)) == ""
    for cut in range(1, len("<think>")):  # the mark itself is cut
        assert without_reasoning(read("<think>" + filler[cut:])) == ""
    assert without_reasoning(read("<think>" + filler + "</think>4")) == "4"
    assert without_reasoning(read("<think></think>" + filler)) == filler


def test_a_move_is_the_last_box_or_else_the_last_line() -> None:
    assert move("I go up.\nleft\n \n") == "left"
    assert move("\\boxed{left}\nThat was it.") == "left"
    assert move("<think>up</think>") == ""


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        ({}, None),
        ({"output": []}, None),
        ({"output": [{"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"}]}, None),
        ({"output": [{"role": "assistant", "content": "95"}]}, None),
        ({"output": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}, None),
        ({"output": [{"role": "user", "content": [{"type": "input_text", "text": "go on"}]}]}, None),
        ({"output": None}, "output must be a list of items, not NoneType"),
        ({"output_text": "95"}, "output must be a list of items"),
        ({"choices": [{"message": {"content": "95"}}]}, "this is a Chat Completion; send a Response"),
        ({"output": ["95"]}, "output[0] must be an object, not str"),
        ({"output": [{"type": "message", "content": "95"}]}, "output[0].role is missing"),
        ({"output": [{"role": "assistant", "content": 95}]}, "output[0].content must be text"),
        (
            {"output": [{"role": "assistant", "content": [{"type": "text", "text": "95"}]}]},
            "output[0].content[0].type is 'text'; the text of an assistant is output_text",
        ),
    ],
)
def test_a_response_whose_text_would_not_be_read_is_named(response, problem):
    assert (response_problem(response) or "").startswith(problem or "") and bool(problem) == bool(
        response_problem(response)
    )
