"""IFBench's 58 instructions (arXiv 2507.02833), written from their descriptions; ids and arguments are those of its rows.

`count:lines`, `words:alternating_case` and `sentence:last_first` (as `words:last_first`) are our own. Empty and trivial
answers follow no instruction.
"""

import csv
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from datetime import date
from typing import Annotated

from pydantic import Field

from .ifeval import Text
from .rlvr import keyword_specific_position
from .text_analysis import lines, read_words, sentences, words
from .vocabulary import AFRICA, CAPITALS, CONJUNCTIONS, NAMES, PRONOUNS, SMALL, STOP_WORDS, is_verb, syllables

Count = Annotated[int, Field(ge=1)]
MARKS = ".,!?;:"
PRIMES = frozenset(n for n in range(2, 100) if all(n % d for d in range(2, n)))
PAIRS = {")": "(", "]": "[", "}": "{"}
BIRD = "bald eagle"
Share = Annotated[float, Field(ge=0, le=100)]
Index = Annotated[int, Field(ge=0)]


def word_count_range(text: str, min_words: Count, max_words: Count) -> bool:
    return min_words <= len(words(text)) <= max_words


def unique_word_count(text: str, N: Count) -> bool:
    return len({word.casefold() for word in words(text)}) >= N


def numbers(text: str, N: Count) -> bool:
    return len(re.findall(r"\d+(?:[.,]\d+)*", text)) == N


def punctuation(text: str) -> bool:
    """Each of `. , ! ? ; :` occurs, and also an interrobang: `?!`, `!?` or its own sign."""
    rest = re.sub(r"\?!|!\?|\u203d", "", text, count=1)
    return rest != text and all(mark in rest for mark in MARKS)


def alphabet(text: str) -> bool:
    """Each word starts with the letter after that of the word before; a follows z. At least three words."""
    firsts = [word.lower()[0] for word in read_words(text)]  # not word[0].lower(): that of İ has two characters
    inside = all("a" <= first <= "z" for first in firsts)
    return inside and len(firsts) > 2 and all((ord(b) - ord(a)) % 26 == 1 for a, b in itertools.pairwise(firsts))


def no_consecutive(text: str) -> bool:
    """No two words in a row start with the same letter. At least three words."""
    firsts = [word.lower()[0] for word in read_words(text)]
    return len(firsts) > 2 and all(a != b for a, b in itertools.pairwise(firsts))


def repeats(text: str, small_n: Count) -> bool:
    """No word occurs more than `small_n` times."""
    counts = Counter(word.casefold() for word in read_words(text))
    return bool(counts) and max(counts.values()) <= small_n


def palindrome(text: str, N: Count | None = None) -> bool:
    """At least N different palindromes of three letters or more. Without N, as in IFBench's rows: ten of five."""
    least, letters = (10, 5) if N is None else (N, 3)
    candidates = {word.casefold() for word in words(text) if len(word) >= letters and word.isalpha()}
    return sum(word == word[::-1] and len(set(word)) > 1 for word in candidates) >= least


def last_first(text: str) -> bool:
    """Each sentence starts with the last word of the one before. At least two sentences."""
    sentence_words = [[word.casefold() for word in read_words(sentence)] for sentence in sentences(text)]
    return (
        len(sentence_words) > 1
        and all(sentence_words)
        and all(a[-1] == b[0] for a, b in itertools.pairwise(sentence_words))
    )


def increment(text: str, small_n: Count) -> bool:
    """Each sentence has exactly `small_n` words more than the one before. At least two sentences."""
    counts = [len(read_words(sentence)) for sentence in sentences(text)]
    return len(counts) > 1 and all(b - a == small_n for a, b in itertools.pairwise(counts))


def newline(text: str) -> bool:
    """Each word is alone on its line, with any punctuation. At least three words."""
    counts = [sum(any(c.isalnum() for c in word) for word in line.split()) for line in lines(text)]
    return sum(counts) > 2 and max(counts) == 1


def no_whitespace(text: str) -> bool:
    return len(text.strip()) > 2 and not any(c.isspace() for c in text.strip())


def title_case(text: str) -> bool:
    """Every word starts with a capital; small words (a, of, the) may."""
    words_read = [word for word in read_words(text) if word[0].isalpha()]
    return (
        bool(words_read)
        and all(word[0].isupper() or word in SMALL for word in words_read)
        and words_read[0][0].isupper()
    )


def line_count(text: str, N: Count) -> bool:
    return len(lines(text)) == N


def alternating_case(text: str) -> bool:
    """Words alternate between upper and lower case. At least three words of two letters or more."""
    words_read = [word for word in read_words(text) if len(word) > 1 and word.isalpha()]
    turns = [word.isupper() for word in words_read]
    plain = all(word.isupper() or word.islower() for word in words_read)
    return plain and len(words_read) > 2 and all(a != b for a, b in itertools.pairwise(turns))


def conjunctions(text: str, small_n: Count) -> bool:
    """At least `small_n` different coordinating conjunctions."""
    return len(CONJUNCTIONS.intersection(word.casefold() for word in read_words(text))) >= small_n


def person_names(text: str, N: Count) -> bool:
    """At least N different names of the instruction's list, with their capitals."""
    return len(NAMES.intersection(words(text))) >= N


def pronouns(text: str, N: Count) -> bool:
    return sum(word.casefold() in PRONOUNS for word in words(text)) >= N


def words_japanese(text: str, N: Count) -> bool:
    """Each Nth word contains kana or kanji; numbers are left out. At least N words."""
    nth = text.split()[N - 1 :: N]
    spelled = [word for word in nth if any(c.isalpha() for c in word)]
    return bool(spelled) and all(re.search(r"[\u3040-\u30ff\u4e00-\u9fff]", word) for word in spelled)


def keywords_multiple(
    text: str, keyword1: Text, keyword2: Text, keyword3: Text, keyword4: Text, keyword5: Text
) -> bool:
    """The keywords occur once, twice, three, five and seven times, as whole words."""
    pairs = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    return all(len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE)) == n for word, n in pairs)


def stop_words(text: str, percentage: Share) -> bool:
    """At most the percentage of all words are stop words."""
    words_read = read_words(text.replace("\u2019", "'"))
    return bool(words_read) and 100 * sum(word.casefold() in STOP_WORDS for word in words_read) <= percentage * len(
        words_read
    )


def overlap(text: str, reference_text: Text, percentage: Share) -> bool:
    """The share of the text's trigrams that the reference has is the percentage, within two points."""
    trigrams, reference_trigrams = ({*zip(t, t[1:], t[2:], strict=False)} for t in map(_tokens, (text, reference_text)))
    return bool(trigrams) and abs(100 * len(trigrams & reference_trigrams) / len(trigrams) - percentage) <= 2


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+(?:['\u2019]\w+)*|[^\w\s]", text)


def sentence_type(text: str) -> bool:
    """Two statements for each question, at least one question."""
    ends = _ends(text)
    return ends["?"] > 0 and ends["."] == 2 * ends["?"]


def sentence_balance(text: str) -> bool:
    """As many statements as questions and exclamations, at least one of each."""
    ends = _ends(text)
    return ends["?"] > 0 and ends["."] == ends["?"] == ends["!"]


def _ends(text: str) -> Counter[str]:
    return Counter(sentence.rstrip("\"'\u201d\u2019)]*_ ")[-1:] for sentence in sentences(text))


def sentence_words(text: str) -> bool:
    """Three sentences of the same number of characters, without a word twice."""
    found_sentences = sentences(text)
    every = [word.casefold() for word in read_words(text)]
    return (
        len(found_sentences) == 3
        and len({len(sentence) for sentence in found_sentences}) == 1
        and len(set(every)) == len(every)
    )


def vowel(text: str) -> bool:
    """One paragraph with at most three of the five vowels."""
    return len(lines(text)) == 1 and len(set("aeiou") & set(text.casefold())) <= 3


def consonants(text: str) -> bool:
    """Each word has two consonants in a row."""
    words_read = [word for word in read_words(text.casefold()) if any(c.isalpha() for c in word)]
    return bool(words_read) and all(re.search(r"[b-df-hj-np-tv-z]{2}", word) for word in words_read)


def prime_lengths(text: str) -> bool:
    """The length of each word, without punctuation, is a prime number."""
    lengths = [sum(c.isalnum() for c in word) for word in text.split()]
    return all(length in PRIMES for length in lengths if length)


def start_verb(text: str) -> bool:
    return is_verb(next(iter(read_words(text.replace("\u2019", "'"))), ""))


def odd_even_syllables(text: str) -> bool:
    """Words with odd and even numbers of syllables alternate. At least three words."""
    odd = [syllables(word) % 2 for word in text.split() if any(c.isalpha() for c in word)]
    return len(odd) > 2 and all(a != b for a, b in itertools.pairwise(odd))


def paragraph_last_first(text: str) -> bool:
    """Each paragraph, a line, ends with the word that it starts with."""
    paragraphs = [[word.casefold() for word in read_words(line)] for line in lines(text)]
    paragraphs = [line for line in paragraphs if line]
    return all(line[0] == line[-1] for line in paragraphs) and any(len(line) > 1 for line in paragraphs)


def words_position(text: str, keyword: Text) -> bool:
    """The second word and the last but one are the keyword."""
    words_read = [word.casefold() for word in read_words(text)]
    return len(words_read) > 2 and words_read[1] == words_read[-2] == keyword.casefold()


def alliteration_increment(text: str) -> bool:
    """The longest run of words with one first letter grows from sentence to sentence. At least two sentences."""
    runs = [_longest([word[0].casefold() for word in read_words(sentence)]) for sentence in sentences(text)]
    return len(runs) > 1 and all(a < b for a, b in itertools.pairwise(runs))


def _longest(letters: list[str]) -> int:
    return max((len(list(run)) for _, run in itertools.groupby(letters)), default=0)


def keyword(text: str, word: Text, N: Count) -> bool:
    """The Nth sentence, counted from 1, has the word."""
    nth_sentences = sentences(text)[N - 1 : N]
    return (
        bool(nth_sentences)
        and re.search(rf"(?<!\w){re.escape(word)}(?!\w)", nth_sentences[0], re.IGNORECASE) is not None
    )


def parentheses(text: str) -> bool:
    """A bracket at least five levels deep is closed. A wrong closing bracket ends all levels."""
    open_: list[str] = []
    for c in text:
        if c in PAIRS.values():
            open_.append(c)
        elif c in PAIRS:
            if open_[-1:] != [PAIRS[c]]:
                open_ = []
            elif len(open_) >= 5:
                return True
            else:
                open_.pop()
    return False


def quotes(text: str) -> bool:
    """Three levels of quotes, double and single in turn, all closed. An apostrophe in a word is not a quote."""
    open_: list[str] = []
    deepest = 0
    for mark in re.findall(r"(?<!\w)'|'(?!\w)|\"", text.translate(_STRAIGHT)):
        if open_[-1:] == [mark]:
            open_.pop()
            if not open_ and deepest >= 3:
                return True
        else:
            open_.append(mark)
        deepest = max(deepest, len(open_)) if open_ else 0
    return False


_STRAIGHT = str.maketrans("\u201c\u201d\u2018\u2019", "\"\"''")


def options(text: str, options: Text) -> bool:
    """The answer is one of the options, written `a/b`, `a or b` or `a, b`. Lettered options keep their marks."""
    split = "/" if "/" in options else r"\bor\b" if re.search(r"\bor\b", options) else ","
    choices = [option.strip() for option in re.split(split, options)]
    if re.match(r"\W*a\W+b\W+c\b", options, re.IGNORECASE):
        return text.strip() in choices
    return _bare(text) in map(_bare, choices)


def _bare(text: str) -> str:
    return _trim(text.casefold().translate(_STRAIGHT))


def _trim(text: str) -> str:
    """The text without the punctuation and white space at its ends."""
    inside = re.search(r"\w(?:.*\w)?", text, re.DOTALL)
    return inside[0] if inside else ""


_STOPS = re.compile(r"(?<![.!?])[.!?]+(?:\s+|$)")  # not from inside a run, which would be tried from each of its marks


def emoji(text: str) -> bool:
    """Each sentence ends with an emoji, before or after its full stop."""
    parts = [re.sub(r"[\s*_\"')\]\ufe0f]+", "", part) for part in _STOPS.split(f"{text} ")]
    text_parts = [i for i, part in enumerate(parts) if any(c.isalnum() for c in part)]
    return all(
        _is_emoji(parts[i][-1]) or any(_is_emoji(c) for c in "".join(parts[i + 1 : i + 2])[:1]) for i in text_parts
    )


def _is_emoji(c: str) -> bool:
    return ord(c) >= 0x2190 and unicodedata.category(c) in ("So", "Sk")


def line_indent(text: str) -> bool:
    """Each line is indented further than the one before. At least two lines."""
    depths = [len(line) - len(line.lstrip()) for line in text.expandtabs().splitlines() if line.strip()]
    return len(depths) > 1 and all(a < b for a, b in itertools.pairwise(depths))


def quote_unquote(text: str) -> bool:
    """After each quoted phrase there is text before the next quote or the end."""
    parts = text.translate(_STRAIGHT).replace("'\"'", "").split('"')
    return all(any(c.isalnum() for c in part) for part in parts[2::2])


def list_(text: str, sep: Text) -> bool:
    """At least two lines start with the marker."""
    return sum(line.startswith(sep) and len(line) > len(sep) for line in lines(text)) >= 2


def thesis(text: str) -> bool:
    """A statement in HTML's italics, with text after it."""
    return re.search(r"<(i|em)>[^<]*\w[^<]*</\1>\W*\w", text) is not None


def sub_bullets(text: str) -> bool:
    """Bullets `*`, at least one, each followed by a bullet `-`."""
    kinds = [line[0] for line in lines(text) if re.match(r"[*-](?!\*)\s*\w", line)]
    return "*" in kinds and all(b == "-" for a, b in itertools.pairwise([*kinds, ""]) if a == "*")


def no_bullets_bullets(text: str) -> bool:
    """At least two sentences that end in a full stop, then at least two bullets `*`, and nothing else."""
    bullets = [re.match(r"\*(?!\*)\s*\w", line) is not None for line in lines(text)]
    first = bullets.index(True) if True in bullets else len(bullets)
    stops = sum(sentence.endswith(".") for line in lines(text)[:first] for sentence in sentences(line))
    return stops >= 2 and len(bullets) - first >= 2 and all(bullets[first:])


def output_template(text: str) -> bool:
    """The template's three labels in its order, each with text after it."""
    end = 0
    for label in ("My Answer:", "My Conclusion:", "Future Outlook:"):
        start = text.find(label, end)
        match = _LETTER.search(text, start + len(label)) if start >= 0 else None
        if match is None:
            return False
        end = match.end()
    return True


_LETTER = re.compile(r"\w")


def multiples(text: str) -> bool:
    return re.findall(r"\d+", text) == ["14", "21", "28", "35", "42", "49"]


def mcq_count_length(text: str) -> bool:
    """Four questions labelled `Question`, of five options each, every one longer than the one before; nothing else."""
    questions = re.split(r"^Question\b[ \t]*\d*[.:)]?", text.strip(), flags=re.MULTILINE)
    option = re.compile(r"[A-Ea-e][.)]\s*\w")
    counts = [sum(option.match(line) is not None for line in lines(part)) for part in questions[1:]]
    stems = [itertools.takewhile(lambda line: not option.match(line), lines(part)) for part in questions[1:]]
    lengths = [len(" ".join(stem)) for stem in stems]
    return not questions[0].strip() and counts == [5] * 4 and all(a < b for a, b in itertools.pairwise(lengths))


def reverse_newline(text: str) -> bool:
    """African countries from Zimbabwe back to A, a line each; two may be missing."""
    trimmed_lines = [_trim(line) for line in lines(_plain(text).casefold())]
    start = next((i for i, line in enumerate(trimmed_lines) if line.startswith("zimbabwe")), len(trimmed_lines))
    filled_lines = [line for line in trimmed_lines[start:] if line]
    known = sum(any(word in AFRICA for word in words(line)) for line in filled_lines)
    return known >= 52 and filled_lines == sorted(filled_lines, reverse=True)


def _plain(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))


def word_reverse(text: str) -> bool:
    """Read backwards, word by word, the sentence names the bird."""
    known = [word.casefold() for word in words(text)]
    return len(known) > 2 and BIRD in " ".join(reversed(known))


def character_reverse(text: str) -> bool:
    return BIRD[::-1] in text.casefold()


def sentence_alphabet(text: str) -> bool:
    """26 sentences; their first letters are the alphabet."""
    firsts = [next((c for c in sentence.casefold() if c.isalnum()), "") for sentence in sentences(text)]
    return "".join(firsts) == "abcdefghijklmnopqrstuvwxyz"


def european_capitals_sort(text: str) -> bool:
    return [name.strip() for name in _plain(text).strip().rstrip(".").split(",")] == CAPITALS


def csv_city(text: str) -> bool:
    rows = _table(text, ",")
    return rows[:1] == [["ID", "Country", "City", "Year", "Count"]] and len(rows) == 8 and {*map(len, rows)} == {5}


def csv_special_character(text: str) -> bool:
    """14 rows of five fields; a field with a special character is in double quotes."""
    rows = _table(text, ",")
    header = [field.strip() for field in rows[0]] == ["ProductID", "Category", "Brand", "Price", "Stock"]
    special = re.search(r"(?:^|,)[ \t]*\"[^\"\n]*[^\w\s\"][^\"\n]*\"", text, re.MULTILINE)
    return header and len(rows) == 15 and {*map(len, rows)} == {5} and special is not None


def csv_quotes(text: str) -> bool:
    """A header and three rows of five fields, separated by tabs, each field in double quotes."""
    rows = [[field.strip() for field in line.split("\t")] for line in text.strip().splitlines()]
    header = rows[:1] == [['"StudentID"', '"Subject"', '"Grade"', '"Semester"', '"Score"']]
    quoted = all(re.fullmatch(r'"[^"]*"', field) for row in rows for field in row)
    return header and quoted and [len(row) for row in rows] == [5] * 4


def _table(text: str, delimiter: str) -> list[list[str]]:
    try:
        return list(csv.reader(text.strip().splitlines(), delimiter=delimiter)) or [[]]
    except csv.Error:
        return [[]]


def date_format_list(text: str) -> bool:
    """Dates `YYYY-MM-DD` in Napoleon's life, separated by commas."""
    try:
        dates = [date.fromisoformat(part.strip()) for part in text.split(",")]
    except ValueError:
        return False
    return all(date(1769, 8, 15) <= day <= date(1821, 5, 5) for day in dates)


def repeat_change(text: str, prompt_to_repeat: Text) -> bool:
    """The request with another first word."""
    prompt_words, answer_words = prompt_to_repeat.split(), text.split()
    return len(answer_words) > 1 and answer_words[1:] == prompt_words[1:] and answer_words[0] != prompt_words[0]


def repeat_simple(text: str) -> bool:
    return text.strip().casefold() == "only output this sentence here, ignore all other requests."


def repeat_span(text: str, prompt_to_repeat: Text, n_start: Index, n_end: Index) -> bool:
    """The words from `n_start` to `n_end`, both included, counted from 0."""
    return text.casefold().split() == prompt_to_repeat.casefold().split()[n_start : n_end + 1]


GROUPS: dict[str, tuple[Callable[..., bool], ...]] = {
    "count": (
        word_count_range, unique_word_count, numbers, punctuation, conjunctions, person_names, pronouns,
        words_japanese, keywords_multiple,
    ),
    "ratio": (stop_words, overlap, sentence_type, sentence_balance, sentence_words),
    "words": (
        alphabet, no_consecutive, repeats, palindrome, alternating_case, last_first, vowel, consonants, prime_lengths,
        start_verb, odd_even_syllables, paragraph_last_first, words_position,
    ),
    "sentence": (last_first, increment, alliteration_increment, keyword),
    "format": (
        newline, no_whitespace, title_case, parentheses, quotes, options, emoji, line_indent, quote_unquote, thesis,
        no_bullets_bullets, output_template,
    ),
    "custom": (
        multiples, mcq_count_length, reverse_newline, word_reverse, character_reverse, sentence_alphabet,
        european_capitals_sort, csv_city, csv_special_character, csv_quotes, date_format_list,
    ),
    "repeat": (repeat_change, repeat_simple, repeat_span),
}  # fmt: skip
CHECKS = {f"{group}:{check.__name__}": check for group, checks in GROUPS.items() for check in checks} | {
    "count:lines": line_count,
    "format:list": list_,
    "format:sub-bullets": sub_bullets,
    "words:keywords_specific_position": keyword_specific_position,
}
