"""retrieval: gold answers, properties of the library, citations, and documents with instructions for the model."""

import asyncio
import re

import pytest
from shipped_gym import calls, gold_failures, module, questions, rollout, rows, says, serving, unreproducible_files

from ngym.errors import ServiceError

NAME = "retrieval"
server = module(NAME)


async def test_every_gold_case_gets_the_reward_it_must_get():
    assert not await gold_failures(NAME)


def test_the_shipped_data_is_what_its_script_makes(tmp_path):
    assert unreproducible_files(NAME, tmp_path) == []


def test_validation_is_not_trained_on():
    assert not set(questions(NAME, "train")) & set(questions(NAME, "validation"))
    libraries = [{row["library"] for row in rows(NAME, file)} for file in ("train", "validation")]
    assert not libraries[0] & libraries[1]


def test_the_answer_is_in_the_support_and_each_step_to_it_can_be_found_by_name():
    for row in rows(NAME, "validation") + rows(NAME, "train"):
        shelf, question = server.library(row["library"]), row["responses_create_params"]["input"]
        pages = [shelf.documents[doc_id] for doc_id in row["support"]]
        assert any(row["expected_answer"] in page.text for page in pages)
        named = [page for page in pages if page.title in question]
        assert len(named) == 1, question
        for page in pages:
            found = server.index(row["library"]).best(page.title, server.HITS)
            assert page.doc_id in found, (question, page.title)
            assert page is named[0] or any(page.title in other.text for other in pages if other is not page)


def test_bm25_puts_the_rare_word_first_and_leaves_out_what_does_not_fit():
    index = server.Index({"a": "red red apple", "b": "red pear", "c": "red plum tart", "d": "blue"})
    assert index.best("Red PEAR", 3) == ["b", "a", "c"]
    assert index.best("quince", 3) == []
    assert index.best("", 3) == []


async def test_a_whole_number_of_another_type_is_the_same_library():
    row = one()
    async with serving(NAME) as peers:
        for number in (float(row["library"]), f"{row['library']}.0"):
            session = peers[NAME].session()
            await session.post("/seed_session", {**row, "library": number})
            assert (await session.post("/open_document", {"doc_id": row["support"][0]}))["text"]


def one(hops=2):
    return next(row for row in rows(NAME, "train") if len(row["support"]) == hops)


@pytest.fixture
async def scored():
    async with serving(NAME) as peers:

        async def score(row, text, *opened):
            tool_calls = calls(*(("open_document", {"doc_id": doc_id}) for doc_id in opened))
            return await peers[NAME].post("/verify", rollout(row, *tool_calls, says(text)))

        yield score


def cite(doc_ids):
    return " ".join(f"[{doc_id}]" for doc_id in doc_ids)


async def test_citing_everything_that_was_opened_is_worth_less_than_citing_the_support(scored):
    row = one()
    every = sorted(server.library(row["library"]).documents)
    right = f"\nAnswer: {row['expected_answer']}"
    exact = await scored(row, cite(row["support"]) + right, *row["support"])
    flood = await scored(row, cite(every) + right, *every)
    half = await scored(row, cite(row["support"][:1]) + right, *row["support"])
    made_up = await scored(row, cite(["d000", *row["support"]]) + right, *row["support"])
    assert exact["reward"] == pytest.approx(1.0)
    assert flood["reward"] < 0.65
    assert 0.6 < half["reward"] < made_up["reward"] < 1.0


async def test_a_cited_document_that_was_not_opened_supports_nothing(scored):
    row = one()
    answer = await scored(row, f"{cite(row['support'])} Answer\nAnswer: {row['expected_answer']}")
    assert answer["reward"] == pytest.approx(0.6)
    assert answer["cited_unopened"] == row["support"]


async def test_the_last_answer_line_counts_and_a_list_of_answers_does_not_count(scored):
    row = one()
    right = row["expected_answer"]
    for text, reward in (
        (f"Answer: {right}", 0.6),
        (f"**Answer:** The {right.upper()}.", 0.6),
        (f"Answer: 1\nAnswer: {right} {cite(row['support'][:1])}", 0.6),
        (f"Answer: {right}\nAnswer: something else", 0.0),
        (f"Answer: {right} or Aldford", 0.0),
        (f"It is {right}.", 0.0),
        (f"<think>Answer: {right}", 0.0),
        ("Answer:", 0.0),
        ("", 0.0),
    ):
        assert (await scored(row, text))["reward"] == pytest.approx(reward), text


async def test_claims_that_their_documents_do_not_hold_are_counted(scored):
    row = one()
    page = server.library(row["library"]).documents[row["support"][0]]
    true = f"{page.text.split('.')[0]}. [{page.doc_id}]"
    text = f"{true} It was also seen by Zaphod Beeblebrox in 1066. [{page.doc_id}] This needs no proof. And 3 more. [d000]\nAnswer: x"
    answer = await scored(row, text, page.doc_id)
    assert (answer["claims"], answer["unsupported_claims"]) == (3, 1)


async def test_documents_that_give_orders_move_no_reward(scored):
    row = next(row for row in rows(NAME, "train") if any("42" in d.text for d in orders(row)))
    for page in orders(row):
        for text in (page.text, f"{page.text}\nAnswer: 42 [{page.doc_id}]", "Answer: reward 1.0"):
            assert (await scored(row, text, page.doc_id))["reward"] == 0.0


def orders(row):
    documents = server.library(row["library"]).documents.values()
    return [page for page in documents if re.search("ignore your task|SYSTEM|Graders", page.text)]


async def test_a_hostile_text_is_scored_at_once(scored):
    for junk in ("[d123]", "Answer:", "\n", "A", ". ", "*", "answer *_ : ", "the river "):
        assert (await asyncio.wait_for(scored(one(), junk * 50_000), 60))["reward"] == 0.0


async def test_search_and_open_work_over_the_wire_and_belong_to_the_session():
    row = one()
    other = next(r for r in rows(NAME, "train") if r["library"] != row["library"])
    async with serving(NAME) as peers:
        session, second = peers[NAME].session(), peers[NAME].session()
        await session.post("/seed_session", row)
        await second.post("/seed_session", other)
        page = server.library(row["library"]).documents[row["support"][0]]
        hits = await session.post("/search", {"query": page.title})
        assert page.doc_id in [hit["doc_id"] for hit in hits]
        assert len(hits) <= 5
        assert (await session.post("/open_document", {"doc_id": page.doc_id}))["text"] == page.text
        assert page.title not in [hit["title"] for hit in await second.post("/search", {"query": "the town"})]
        with pytest.raises(ServiceError, match=r"there is no document '\.\./\.\./etc/passwd'"):
            await session.post("/open_document", {"doc_id": "../../etc/passwd"})
        with pytest.raises(ServiceError, match="field 'query'"):
            await session.post("/search", {"query": "x" * 501})
        answer = await session.post(
            "/verify", rollout(row, says(f"{cite(row['support'][:1])}\nAnswer: {row['expected_answer']}"))
        )
    assert answer["cited_unopened"] == []


async def test_a_document_that_the_row_names_twice_counts_once(scored):
    row = one(hops=1)
    text = f"{cite(row['support'])} Answer\nAnswer: {row['expected_answer']}"
    answer = await scored({**row, "support": row["support"] * 2}, text, *row["support"])
    assert answer["reward"] == 1.0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"expected_answer": ""}, "expected_answer is empty"),
        ({"expected_answer": " - "}, "expected_answer is empty"),
        ({"support": ["d000"]}, "has no document 'd000'"),
    ],
)
async def test_a_row_that_cannot_be_answered_is_refused(fields, reason):
    async with serving(NAME) as peers:
        for path in ("/seed_session", "/verify"):
            with pytest.raises(ServiceError, match=reason) as caught:
                await peers[NAME].session().post(path, rollout({**one(), **fields}))
            assert caught.value.status == 422
