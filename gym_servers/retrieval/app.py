"""retrieval: search a library, open documents, answer with citations. Rewards the answer and its support."""

import re
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, Field

from ngym import ServiceError, Session, ToolError, VerifyRequest, gym_server
from ngym.grading.answers import canonical, without_reasoning
from ngym.rollout import calls_in
from ngym.services.gym.server import ReferenceText

from .corpus import Index, Library, library, words

ANSWER, SUPPORT = 0.6, 0.4
HITS, SNIPPET = 5, 60
CITATION = re.compile(r"\[(d[0-9]{3})\]")
ANSWER_LINE = re.compile(r"^[ *#>_-]*answer[ *_]*:[ *_]*(\S.*)$", re.IGNORECASE | re.MULTILINE)
MAX_TEXT = 20_000
SENTENCE = re.compile(r"[^.!?\n]+(?:[.!?](?:\s*\[d[0-9]{3}\])*|\n|$)")
NAME = re.compile(r"\b(?:[A-Z][a-z]+|[0-9]{2,4})\b")


class Search(BaseModel):
    query: str = Field(max_length=500)


class Open(BaseModel):
    doc_id: str = Field(description="Such as d123.")


class Task(VerifyRequest):
    library: int
    expected_answer: ReferenceText
    support: list[ReferenceText] = Field(min_length=1, description="The documents that together prove the answer.")


async def search(body: Search, session: Session) -> list[dict[str, str]]:
    """The documents that fit a query best: id, title, beginning."""
    seed = _seed(session)
    found = [library(seed).documents[doc_id] for doc_id in index(seed).best(body.query, HITS)]
    return [{"doc_id": d.doc_id, "title": d.title, "begins": d.text[:SNIPPET]} for d in found]


async def open_document(body: Open, session: Session) -> dict[str, str]:
    """A whole document."""
    documents = library(_seed(session)).documents
    if body.doc_id not in documents:
        raise ToolError(f"there is no document {body.doc_id[:40]!r}")
    session.setdefault("opened", set()).add(body.doc_id)
    return documents[body.doc_id]._asdict()


@lru_cache(maxsize=256)
def index(seed: int) -> Index:
    return Index({doc_id: f"{d.title} {d.text}" for doc_id, d in library(seed).documents.items()})


def _seed(session: Session) -> int:
    if "task" not in session:
        raise ServiceError("POST /seed_session first: the library belongs to a rollout's session", status=409)
    return int(session["task"]["library"])


async def verify(task: Task, session: Session) -> dict[str, Any]:
    text = without_reasoning(task.text)[-MAX_TEXT:]
    asked = [call.arguments or {} for call in calls_in(task.response) if call.name == "open_document"]
    opened = session.get("opened", set()) | {str(arguments.get("doc_id")) for arguments in asked}
    cited = list(dict.fromkeys(CITATION.findall(text)))
    answered = ANSWER_LINE.findall(text)
    answer = CITATION.sub("", answered[-1]) if answered else None
    right = answer is not None and _same(answer, task.expected_answer)
    good = set(cited) & opened & set(task.support)  # unopened documents do not count
    f1 = 2 * len(good) / (len(cited) + len(task.support))
    parts = {"answer": ANSWER * right, "support": SUPPORT * f1 * right}
    claims, unsupported = _claims(text, library(task.library))
    return {
        "reward": sum(parts.values()),
        "reward_components": parts,
        "extracted_answer": answer and answer.strip()[:200],
        "cited": cited[:50],
        "cited_unopened": [doc_id for doc_id in cited if doc_id not in opened][:50],
        "claims": claims,
        "unsupported_claims": unsupported,
    }


def _same(answer: str, expected: str) -> bool:
    """Equality without case, marks and a leading article; `the river Ane` is `Ane`."""
    plain = [re.sub(r"^(?:(?:the|a|an) )?(?:river )?", "", canonical(text).strip(" -")) for text in (answer, expected)]
    return plain[0] == plain[1]


def _claims(text: str, known: Library) -> tuple[int, int]:
    """Counts sentences with citations, and those with a name or a number that is in no document they cite."""
    claims = unsupported = 0
    for sentence in SENTENCE.findall(text):
        cited = [known.documents[doc_id] for doc_id in CITATION.findall(sentence) if doc_id in known.documents]
        if not CITATION.search(sentence):
            continue
        there = {word for d in cited for word in words(f"{d.title} {d.text}")}
        first, *rest = NAME.findall(CITATION.sub("", sentence)) or [""]
        named = [first.casefold()] if first.isdigit() else []
        named += [word.casefold() for word in rest]
        claims += 1
        unsupported += not set(named) <= there
    return claims, unsupported


app = gym_server(tools=[search, open_document], verify=verify, replays=True)
