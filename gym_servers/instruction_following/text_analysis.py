"""Words, sentences and languages of a text."""

from __future__ import annotations

import re

# ruff: noqa: RUF001  (Cyrillic letters are meant)
import unicodedata
from functools import lru_cache

_WORD = re.compile(r"\w+")
_SPOKEN = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_STOP = re.compile(r"(?<![.!?\u3002\uff01\uff1f\u0964])[.!?\u3002\uff01\uff1f\u0964]+[\"'\u201d\u2019)\]*_]*(?:\s+|$)")
_SHORT = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|prof|sr|jr|st|vs|etc|no|vol|fig|inc|ltd|e\.g|i\.e|u\.s|a\.m|p\.m|p\.s|p\.p\.s)|(?<![^\s.(])[A-Za-z])\.$",
    re.IGNORECASE,
)
_TAIL = 12
SCRIPTS = {
    "ar": "ARABIC", "bg": "CYRILLIC", "bn": "BENGALI", "fa": "ARABIC", "gu": "GUJARATI", "he": "HEBREW",
    "hi": "DEVANAGARI", "ja": "JAPANESE", "kn": "KANNADA", "ko": "HANGUL", "ml": "MALAYALAM", "mr": "DEVANAGARI",
    "ne": "DEVANAGARI", "pa": "GURMUKHI", "ru": "CYRILLIC", "ta": "TAMIL", "te": "TELUGU", "th": "THAI",
    "uk": "CYRILLIC", "ur": "ARABIC", "zh": "CJK",
}  # fmt: skip
COMMON = {
    "de": "der die das und ist ein eine nicht mit von zu den im auf es ich für auch sich dem wir sie wird",
    "en": "the of and to in is that it was for on are as with his they at be this from have or by but not we an you",
    "es": "el la los las de que y en un una es por con para no se del su como más está son al lo",
    "fi": "ja on ei se että oli ovat hän mutta kun tai myös niin joka ole sen kanssa mitä voi",
    "fr": "le la les de des et est un une que qui dans pour pas sur avec il elle nous ce au du sont plus",
    "it": "il lo la gli di che e è un una per non con del della sono si come più nel anche ha le",
    "nl": "de het een en van is dat niet te op met voor zijn ik er aan ook als maar bij wordt",
    "pl": "i w na nie się to jest z do że o jak ale po co tak za od są przez dla",
    "pt": "o a os as de que e em um uma é por com para não se do da como mais são ao no na",
    "sw": "na ya wa ni kwa katika la za hii kuwa yake cha lakini huo watu sana hiyo kama au",
    "vi": "và là của có không một được cho trong người này các với đó để những khi tôi đã",
    "bg": "и на да се от за в с е не са че по като но това или към до",
    "ru": "и в на не что с по это как а из но он у к за то от мы она",
    "uk": "і в на не що з до це як та але він у за від про ми вона є її",
    "hi": "के है में की और से को का यह नहीं पर हैं एक था कि ने वह हम",
    "mr": "आणि आहे या च्या हे ते एक मध्ये नाही होते करून ची तो ती आहेत व त्या",
    "ne": "र छ को मा का यो हो लाई गर्न एक भएको ले छन् पनि थियो गरेको तर",
    "ar": "في من على أن إلى هذا التي كان هو لا ما مع هي عن الذي هذه",
    "fa": "و در به از که این است را با برای آن یک می است خود تا",
    "ur": "کے میں ہے کی اور سے کا کو یہ نہیں پر ہیں ایک تھا کہ نے",
}
WORDS = {language: frozenset(listed.split()) for language, listed in COMMON.items()}
LANGUAGES = frozenset(SCRIPTS) | frozenset(COMMON)
MIN_SCRIPT_SHARE = 0.8
MAX_LETTERS = 20_000


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, as IFEval counts them."""
    return _WORD.findall(text)


def read_words(text: str) -> list[str]:
    """Words as they are read: `don't` and `well-known` are one word each."""
    return _SPOKEN.findall(text)


def sentences(text: str) -> list[str]:
    """Split at `.`, `!` or `?` and a space, except after abbreviations and initials. The last one may lack an end."""
    return list(_sentences(text))


@lru_cache(maxsize=4)  # several instructions need the sentences of one text
def _sentences(text: str) -> tuple[str, ...]:
    found, begin = [], 0
    for stop in _STOP.finditer(text):
        marks = stop.group().rstrip()
        end = stop.start() + 1
        if marks == "." and stop.end() < len(text) and _SHORT.search(text[max(begin, end - _TAIL) : end]):
            continue
        found.append(text[begin : stop.end()].strip())
        begin = stop.end()
    return tuple(sentence for sentence in (*found, text[begin:].strip()) if _WORD.search(sentence))


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def is_in(text: str, language: str) -> bool:
    """Whether most letters are in the language's script and no other language of it has more common words."""
    script = SCRIPTS.get(language, "LATIN")
    if not text.strip() or script_share(text, script) < MIN_SCRIPT_SHARE:
        return False
    if language not in WORDS:
        return True
    rivals = [other for other in WORDS if SCRIPTS.get(other, "LATIN") == script]
    counts = {rival: common_words(text, rival) for rival in rivals}
    return counts[language] > 0 and counts[language] == max(counts.values())


def common_words(text: str, language: str) -> int:
    tokens = words(text)
    if SCRIPTS.get(language) == "DEVANAGARI":  # its words contain vowel signs, which are not word characters for `re`
        tokens = [word.strip(".,!?\u0964\"'()") for word in text.split()]
    return sum(word.casefold() in WORDS[language] for word in tokens)


def script_share(text: str, script: str) -> float:
    """The share of the text's letters that belong to the script, 0 to 1."""
    letters = [c for c in text[:MAX_LETTERS] if c.isalpha()]
    names = ("HIRAGANA", "KATAKANA", "CJK") if script == "JAPANESE" else (script,)
    return sum(unicodedata.name(c, "").startswith(names) for c in letters) / len(letters) if letters else 0.0
