"""Public translations, as rows of ours (`ng_prepare ntrex_de`, `ntrex_es`, `ntrex_fr`)."""

from ngym.prepare import ConvertedRow, File, Part, PublicSet, Unconvertible, saying
from ngym.schema import Json

LANGUAGES = {"deu": "German", "spa": "Spanish", "fra": "French"}
FOLDER = "NTREX-128"
SOURCE = "newstest2019-src.eng.txt"


def reference(code: str) -> str:
    return f"newstest2019-ref.{code}.txt"


def ntrex(record: Json) -> ConvertedRow:
    """A line of the English news, and the same line of its translation, each under the name of its file."""
    source, (code, text) = (
        record[SOURCE].strip(),
        next((code, record[reference(code)].strip()) for code in LANGUAGES if reference(code) in record),
    )
    if not source or not text:
        raise Unconvertible("an empty line")
    prompt = f"Translate into {LANGUAGES[code]}. Write the translation only.\n\n{source}"
    row = {"responses_create_params": {"input": prompt}, "source": source, "references": [text]}
    return ConvertedRow(row, saying(text))


SETS = tuple(
    PublicSet(
        name=f"ntrex_{name}",
        title="NTREX-128",
        environment="translation",
        host="github",
        repo="MicrosoftTranslator/NTREX",
        revision="c9f006f2c132c932b83ccd7aaa6a35930dd9c370",
        licence="CC-BY-SA-4.0",
        rows=1_997,
        note="made for evaluation: news, English to " + LANGUAGES[code],
        parts=(Part(files=(File(path=f"{FOLDER}/{SOURCE}"), File(path=f"{FOLDER}/{reference(code)}"))),),
        convert=ntrex,
    )
    for name, code in (("de", "deu"), ("es", "spa"), ("fr", "fra"))
)
