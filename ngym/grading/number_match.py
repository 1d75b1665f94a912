"""Parses a short answer as a number, a unit or a date, written in digits or words.

The whole text must be the number or the date: `12 or 13` is not a number, and `3/4/2021` is ambiguous.
"""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import date
from decimal import Decimal

from ngym.grading.text_match import apart, signed

_ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_SMALL = {word: value for value, word in enumerate(_ONES)} | {word: 10 * i for i, word in enumerate(_TENS, start=2)}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MONTHS = [
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
]  # fmt: skip
_MONTH = {form: number for number, name in enumerate(_MONTHS, start=1) for form in (name, name[:3])} | {"sept": 9}

SCALE_SYMBOLS = {"k": 10**3, "mn": 10**6, "M": 10**6, "B": 10**9, "bn": 10**9, "T": 10**12, "tn": 10**12}
_PREFIXED = re.compile(r"[mM](?:[gmswvajlnWVAJLN]|pa|Pa|hz|Hz|cal|ol|wh|Wh)s?")
_BITS = re.compile(r"[kKMGT]i?[bB](?:ps|/s)?")
_DIGITS = re.compile(r"([-+]?(?:\d{1,3}(?:,\d{3}){1,20}|\d{1,60})(?:\.\d{1,60})?)(?:e([-+]?\d{1,3}))?\s*([a-z]*)")
_ISO = re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})")
_DAY_FIRST = re.compile(r"(\d{1,2})(?:st|nd|rd|th)?(?: of)? ([a-z]+) (\d{4})")
_MONTH_FIRST = re.compile(r"([a-z]+) (\d{1,2})(?:st|nd|rd|th)? (\d{4})")
_AROUND_A_DATE = re.compile(r"^on\b|\bthe\b|\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b")
_DATE_DASH = re.compile(r"(?<=\d)-(?=[a-z])|(?<=[a-z])-(?=\d)")
MAX_CHARS = 200
_UNITS = """
m meter metre | km kilometer kilometre | cm centimeter centimetre | mm millimeter millimetre | dm decimeter decimetre
nm nanometer nanometre | um micrometer micrometre micron | mi mile | ft foot feet | in inch inche | yd yard
kg kilogram kilogramme kilo | g gram gramme gm | mg milligram | t ton tonne | lb pound | oz ounce | st stone
s sec second | ms millisecond | min minute | h hr hour | d day | week wk | month | y yr year
l liter litre | ml milliliter millilitre | cl centiliter centilitre | gal gallon | pint | quart | ha hectare | acre
deg degree \u00b0 | rad radian | \u00b0c degc celsius | \u00b0f degf fahrenheit | k kelvin
usd dollar $ | eur euro \u20ac | gbp \u00a3 | jpy yen \u00a5 | cent | inr rupee
n newton | j joule | kj kilojoule | cal calorie | kcal kilocalorie | w watt | kw kilowatt | kwh | v volt | a amp ampere
pa pascal | kpa | bar | hz hertz | khz | mhz | ghz | b byte | kb kilobyte | mb megabyte | gb gigabyte | tb terabyte | mol | ohm | % percent pct
"""
_UNIT = {word: names.split()[0] for line in _UNITS.splitlines() for names in line.split("|") for word in names.split()}
_TEMPERATURES = {"c": "\u00b0c", "celsius": "\u00b0c", "f": "\u00b0f", "fahrenheit": "\u00b0f"}
_DEGREES = frozenset(["\u00b0", "deg", "degree", "degrees"])
_BYTES = {"kilobyte": "kB", "megabyte": "MB", "gigabyte": "GB", "terabyte": "TB"}
_SHORT = {
    "sqm": "m^2",
    "sqkm": "km^2",
    "sqft": "ft^2",
    "mph": "mi/h",
    "kmh": "km/h",
    "kph": "km/h",
    "kmph": "km/h",
    "mps": "m/s",
}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cu": "3", "cubed": "3"}
ZERO = 1e-12


def unit(text: str) -> str | None:
    """One name for all spellings of a unit: `kilometers`, `km` -> `km`; `sq. m`, `m^2` -> `m^2`. None: not known."""
    words = re.sub(r"\bper\b", "/", unicodedata.normalize("NFKC", text[:MAX_CHARS]).casefold().replace("^", ""))
    parts = [_one_unit(part) for part in words.split("/")]
    return "/".join(part for part in parts if part) if all(parts) else None


def _one_unit(text: str) -> str | None:
    words = [word.strip(".") for word in text.split()]
    power = next((_POWERS[word] for word in words if word in _POWERS), "")
    name = " ".join(word for word in words if word not in _POWERS)
    if name[-1:] in ("2", "3") and not power:
        name, power = name[:-1], name[-1]
    if words and words[0] in _DEGREES and name.split()[-1] in _TEMPERATURES:
        return _TEMPERATURES[name.split()[-1]]
    known = _UNIT.get(name) or _UNIT.get(name.removesuffix("s")) or _SHORT.get(name)
    return known and (f"{known}^{power}" if power else known)


def same_symbol(text: str, other: str) -> bool:
    """Whether two spellings agree in the case of letters where it has a meaning: `KM` may be `km`, `Mb` is not `MB`.

    It has a meaning in the prefixes milli and mega, and in bits and bytes, unless a spelling has no capital letter.
    """
    text, other = _symbol(text), _symbol(other)
    if text == other or text.casefold() != other.casefold():
        return True
    if text.casefold() == "m" or (_PREFIXED.fullmatch(text) and _PREFIXED.fullmatch(other) and text[0] != other[0]):
        return False
    return not (_BITS.fullmatch(text) and _BITS.fullmatch(other)) or ("b" in text) == ("b" in other)


def _symbol(text: str) -> str:
    text = text.strip(" .")
    return _BYTES.get(text.casefold().removesuffix("s"), text)


def close(expected: float, found: float, tolerance: float) -> bool:
    """Whether two numbers agree within a relative tolerance; an expected 0 within ZERO, which is rounding noise."""
    try:
        return math.isclose(expected, found, rel_tol=tolerance, abs_tol=0.0 if expected else ZERO)
    except OverflowError:  # an int that no float can hold
        return False


def quantity(text: str) -> Decimal | None:
    """The number of a text: `1,234.5`, `-3e2`, `2.5 million`, `forty-two`; currency and unit are not part of it."""
    plain = _plain(text)
    match = _DIGITS.fullmatch(plain)
    if match is None:
        return _in_words(plain)
    digits, exponent, scale = match.groups()
    if scale and scale not in _SCALES:
        return None
    return Decimal(digits.replace(",", "")).scaleb(int(exponent or 0)) * _SCALES.get(scale, 1)


def _in_words(text: str) -> Decimal | None:
    """`minus two hundred and five thousand one` -> -205001. Every word has to be part of a number, in order."""
    words = text.replace("-", " ").replace(" and ", " ").split()
    sign = -1 if words[:1] in (["minus"], ["negative"]) else 1
    words = words[1:] if sign < 0 else words
    total, below, last_scale, room = 0, 0, 10**15, 100
    for word in words:
        if word in _SMALL and _SMALL[word] < room:
            below += _SMALL[word]
            room = 10 if _SMALL[word] >= 20 else 0
        elif word == "hundred" and 0 < below < 100 and below % 10**2 == below:
            below, room = below * 100, 100
        elif word in _SCALES and below > 0 and _SCALES[word] < last_scale:
            total, last_scale, below, room = total + below * _SCALES[word], _SCALES[word], 0, 100
        else:
            return None
    return Decimal(sign * (total + below)) if words else None


def day(text: str) -> date | None:
    """The date of a text: `2021-03-04`, `4 March 2021`, `4th of March, 2021`, `Mar. 4, 2021`."""
    plain = _AROUND_A_DATE.sub(" ", _plain(text).replace(",", " ").replace(". ", " "))
    plain = " ".join(_DATE_DASH.sub(" ", plain).split())
    if match := _ISO.fullmatch(plain):
        year, month, number = map(int, match.groups())
    elif (match := _DAY_FIRST.fullmatch(plain)) and match[2] in _MONTH:
        year, month, number = int(match[3]), _MONTH[match[2]], int(match[1])
    elif (match := _MONTH_FIRST.fullmatch(plain)) and match[1] in _MONTH:
        year, month, number = int(match[3]), _MONTH[match[1]], int(match[2])
    else:
        return None
    try:
        return date(year, month, number)
    except ValueError:
        return None


def _plain(text: str) -> str:
    text = unicodedata.normalize("NFKC", apart(signed(text[:MAX_CHARS]))).replace("\N{MINUS SIGN}", "-").casefold()
    return " ".join(text.split()).strip(" .,;:!*_`\"'")
