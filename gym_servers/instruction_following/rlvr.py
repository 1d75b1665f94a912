"""Instructions of IF_multi_constraints_upto5 (arXiv 2507.02833, appendix): its ids and arguments, our own checks."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from ngym.grading.text_match import visible

from .ifeval import Letter, Relation, Text, holds
from .text_analysis import sentences, words

Count = Annotated[int, Field(ge=0)]
MAX_COPIES = 30_000  # the longest text that is checked has no room for more
EDGES = ".,!?;:'\"()[]{}*_`\u2018\u2019\u201c\u201d"


def bare_words(text: str) -> list[str]:
    """Words between spaces, in lower case, without marks around them: `well-known` is one word, not `well`."""
    return [word.strip(EDGES).casefold() for word in text.split() if word.strip(EDGES)]


def lowercase_counting(text: str, N: Count) -> bool:
    """At most N words are in lower case."""
    return len(re.findall(r"\b[a-z]+\b", text)) <= N


def letter_counting(text: str, N: Count, relation: Relation) -> bool:
    return holds(sum(c.isalpha() for c in text), relation, N)


def letter_counting2(text: str, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    return holds(text.casefold().count(letter.casefold()), let_relation, let_frequency)


def paragraphs(text: str) -> bool:
    """Two paragraphs, separated by `***`."""
    return len(_parts(text, "***")) == 2


def paragraphs2(text: str) -> bool:
    """Two paragraphs, separated by an empty line."""
    return len([part for part in text.split("\n\n") if part.strip()]) == 2


def first_word_sent(text: str, first_word: Text) -> bool:
    """Every sentence starts with the word."""
    return all(bare_words(sentence)[:1] == [first_word.casefold()] for sentence in sentences(text))


def first_word_answer(text: str, first_word: Text) -> bool:
    return bare_words(text)[:1] == [first_word.casefold()]


def last_word_sent(text: str, last_word: Text) -> bool:
    """Every sentence ends with the word."""
    return all(bare_words(sentence)[-1:] == [last_word.casefold()] for sentence in sentences(text))


def last_word_answer(text: str, last_word: Text) -> bool:
    return bare_words(text)[-1:] == [last_word.casefold()]


def word_once(text: str, keyword: Text) -> bool:
    return _times(text, keyword) == 1


def word_count_different_numbers(text: str, keyword: Text, frequency: Count, relation: Relation) -> bool:
    return holds(_times(text, keyword), relation, frequency)


def exclude_word_harder(text: str, keyword: Text) -> bool:
    return _times(text, keyword) == 0


def count_increment_word(text: str, keyword1: Text, keyword2: Text) -> bool:
    """The first keyword occurs once, the second twice."""
    return _times(text, keyword1) == 1 and _times(text, keyword2) == 2


def keyword_specific_position(text: str, keyword: Text, n: Count, m: Count) -> bool:
    """The keyword is the m-th word of the n-th sentence, both counted from 1."""
    all_sentences = sentences(text)
    return (
        1 <= n <= len(all_sentences) and m >= 1 and bare_words(all_sentences[n - 1])[m - 1 : m] == [keyword.casefold()]
    )


def start_end(text: str) -> bool:
    """The last word is the first word again, and nothing follows it."""
    words = text.split()
    return len(words) > 1 and words[0].casefold() == words[-1].casefold() and words[-1][-1].isalnum()


def no_adjacent_consecutive(text: str) -> bool:
    """No two words in a row start with letters that follow each other in the alphabet."""
    firsts = [word.lower()[0] for word in words(text)]  # not word[0].lower(): that of İ has two characters
    return all(ord(b) - ord(a) != 1 for a, b in itertools.pairwise(firsts))


def count_unique(text: str) -> bool:
    """No word occurs twice."""
    return max(Counter(bare_words(text)).values(), default=0) == 1


def palindrome(text: str) -> bool:
    return any(len(word) > 1 and len(set(word)) > 1 and word == word[::-1] for word in bare_words(text))


def counting_composition(text: str, n_sent: Count, n_words: Count) -> bool:
    """Three paragraphs separated by `* * *`, each of n_sent sentences of n_words words."""
    parts = [sentences(part) for part in _parts(text, "* * *")]
    counts = [len(bare_words(sentence)) for part in parts for sentence in part]
    return len(parts) == 3 and all(len(part) == n_sent for part in parts) and set(counts) == {n_words}


def square_brackets(text: str) -> bool:
    """Every word is in its own brackets."""
    words = text.split()
    return all(re.fullmatch(r"\[[^\[\]]*\w[^\[\]]*\]", word) for word in words)


def bigram_wrapping(text: str) -> bool:
    """Every two words are in `<<...>>`."""
    pairs = re.findall(r"<<([^<>]*)>>", text)
    return bool(pairs) and not re.sub(r"<<[^<>]*>>", "", text).strip() and all(len(p.split()) == 2 for p in pairs)


def sentence_hyphens(text: str) -> bool:
    """Sentences are joined by a hyphen, without a space."""
    parts = re.split(r"(?<=[.!?])-", text.strip())
    return len(parts) > 1 and all(part and part == part.strip() and len(sentences(part)) == 1 for part in parts)


def punctuation_dot(text: str) -> bool:
    return "." not in text


def punctuation_exclamation(text: str) -> bool:
    return "!" not in text


def copying_simple(text: str, prompt_to_repeat: Text) -> bool:
    """The prompt and nothing else."""
    return _copied(text) == _copied(visible(prompt_to_repeat))


def copying_multiple(text: str, prompt_to_repeat: Text, N: Annotated[int, Field(ge=1, le=MAX_COPIES)]) -> bool:
    """The prompt N times, separated by six asterisks, and nothing else."""
    return [_copied(part) for part in text.split("*" * 6)] == [_copied(visible(prompt_to_repeat))] * N


def copy_span_idx(
    text: str, prompt_to_repeat: Annotated[str, Field(min_length=1)], n_start: Count, n_end: Count
) -> bool:
    """The characters from n_start to n_end of the prompt. The paper counts that at n_end; the public checker does not."""
    spans = {_copied(visible(prompt_to_repeat[n_start:end])) for end in (n_end, n_end + 1)}
    return _copied(text) in spans - {""}


def repeat_phrase(text: str, phrase: Text, small_n: Annotated[int, Field(ge=0, le=MAX_COPIES)]) -> bool:
    """The phrase small_n times, each time with exactly one other word, which is not its first or last."""
    phrase_words, text_words = bare_words(phrase), bare_words(text)
    size = len(phrase_words)
    starts = range(len(text_words) - size + 1)
    windows = (text_words[start : start + size] for start in starts)
    repeats = (
        [window for window in windows if (window[0], window[-1]) == (phrase_words[0], phrase_words[-1])]
        if size > 2
        else []
    )
    changed = [sum(a != b for a, b in zip(window, phrase_words, strict=True)) for window in repeats]
    return changed == [1] * small_n and small_n > 0


def _copied(text: str) -> str:
    return text.strip().casefold()


def _times(text: str, keyword: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE))


def _parts(text: str, divider: str) -> list[str]:
    return [part for part in text.split(divider) if any(c.isalnum() for c in part)]


GROUPS: dict[str, tuple[Callable[..., bool], ...]] = {
    "count": (lowercase_counting, count_unique, count_increment_word, counting_composition),
    "letters": (letter_counting, letter_counting2),
    "paragraphs": (paragraphs, paragraphs2),
    "first_word": (first_word_sent, first_word_answer),
    "last_word": (last_word_sent, last_word_answer),
    "keywords": (
        word_once,
        word_count_different_numbers,
        exclude_word_harder,
        keyword_specific_position,
        start_end,
        no_adjacent_consecutive,
        palindrome,
    ),
    "detectable_format": (square_brackets, bigram_wrapping, sentence_hyphens),
    "punctuation": (punctuation_dot, punctuation_exclamation),
    "copy": (copying_simple, copying_multiple, repeat_phrase),
    "new": (copy_span_idx,),
}
CHECKS = {f"{group}:{check.__name__}": check for group, checks in GROUPS.items() for check in checks}
CHECKS["copy:copy"] = copying_simple
