"""The viewer's filter: selected rows, their order, and messages for invalid terms."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from viewer_process import failure, rollout, write

from ngym.errors import NotFound
from ngym.view.filter_query import LOOKUP_ROWS, MAX_TEXTS, Search, TextCondition, WrongFilter, order, parse
from ngym.view.growing_index import Index
from ngym.view.rows import COLUMNS, RunRows
from ngym.view.stats import Stats

OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    ":": operator.eq,
}
NUMBERED = 3 * LOOKUP_ROWS - 10
NUMBERS = ("reward", "task", "rollout", "output_tokens", "group_mean", "advantage", "attempt", "group_size")
ROLLOUTS = [
    rollout(
        task,
        index,
        (None, 0.0, 0.5, 1.0)[(task + index) % 4],
        level=("easy", "hard, very")[task % 2],
        n=task,
        sure=index == 0,
    )
    for task in range(6)
    for index in range(4)
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunRows]:
    folder = tmp_path_factory.mktemp("rollouts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        own = {"agent_ref": {"name": "code_agent"}, "my topic": "Zürich"}
        other = rollout(6, 0, 0.75, 'ΑΘΗΝΑ café says "no"\n<b>bold</b>', **own)
        escaped = json.dumps(rollout(7, 0, 0.75, "Straße 東京 naïve ÜBER"), ensure_ascii=True).encode()
        write(folder / "out.jsonl", [*ROLLOUTS, other, escaped])
        write(folder / "out_failures.jsonl", [failure(0, 1), failure(2, 0, "tool_error")])
        index = Index(folder / "out.jsonl", folder / "out_failures.jsonl")
        index.catch_up()
        yield RunRows(index)
        index.close()


def names(rows: RunRows, q: str, sort: str = "") -> list[str]:
    return [row["row"] for row in rows.page(q, sort, 0, 1000).rows]


@given(name=st.sampled_from(NUMBERS), sign=st.sampled_from(list(OPERATORS)), value=st.sampled_from([0, 0.25, 0.5, 1, 3, 5, 7]),
       negated=st.booleans())  # fmt: skip
def test_a_comparison_lets_through_what_it_says(
    rows: RunRows, name: str, sign: str, value: float, negated: bool
) -> None:
    every = rows.page("", "", 0, 1000).rows

    def holds(row: dict[str, Any]) -> bool:
        return row[name] is not None and OPERATORS[sign](row[name], value)

    found = names(rows, f"{'-' if negated else ''}{name}{sign}{value}")
    assert found == [row["row"] for row in every if holds(row) is not negated]


@given(
    keys=st.lists(st.sampled_from([*NUMBERS, "agent", "status", "prompt", "level"]), min_size=1, max_size=3),
    down=st.booleans(),
)
def test_a_sort_orders_by_its_keys_with_null_last(rows: RunRows, keys: list[str], down: bool) -> None:
    page = rows.page("", ",".join(("-" if down else "") + key for key in keys), 0, 1000)

    def value(row: dict[str, Any], key: str) -> Any:
        return row["fields"].get(key) if key == "level" else row[key]

    for before, after in pairwise(page.rows):
        for key in keys:
            first, second = value(before, key), value(after, key)
            if first == second:
                continue
            assert second is None or (first is not None and (first > second) is down)
            break


@given(st.text(max_size=60) | st.lists(st.sampled_from(
    ['reward', '<', ':', '"', '-', ' ', 'level', ',', '*', 'null', '0.5', 'component.', '\\', "'", '%', ';', '\0', '$', '!=', 'x']
), max_size=12).map("".join))  # fmt: skip
def test_any_text_is_a_filter_or_is_refused_with_the_reason(rows: RunRows, text: str) -> None:
    try:
        found = rows.page(text, "", 0, 5)
    except WrongFilter as error:
        assert error.status == 400
        assert error.detail
    else:
        assert found.total <= found.indexed


@given(st.text(max_size=30))
def test_any_text_is_a_sort_or_is_refused_with_the_reason(rows: RunRows, text: str) -> None:
    for page in (rows.page, rows.tasks):
        try:
            page("", text, 0, 5)
        except WrongFilter as error:
            assert error.detail


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ("agent:code_agent", ["24"]),
        ("agent:code*", ["24"]),
        ("status:failed", ["f0", "f1"]),
        ("status:failed -failure:timeout", ["f1"]),
        ("failure:timeout,tool_error", ["f0", "f1"]),
        ("reward:null status:unscored task:0", ["0"]),
        ("task:1 reward:null,1", ["6", "7"]),
        ('level:"hard, very" task:1 rollout<2', ["4", "5"]),
        ("level:EASY task:0 rollout:0", ["0"]),
        ("level:null status:ok", ["24", "25"]),
        ("sure:true task<2", ["0", "4"]),
        ("n>=5 rollout:3", ["23"]),
        ("n!=5 rollout:3 task>3", ["19"]),
        ("component.right>=1 task:1", ["6"]),
        ("tokens:5 task:3", ["12"]),
        ("task_id:0000000000000006", ["24"]),
        ("reward<0.8 reward>0.7 -agent:code_agent", ["25"]),
        ('"my topic":ZÜRICH', ["24"]),
        ('"my topic":zÜR*', ["24"]),
        ('-"my topic":null status:ok', ["24"]),
    ],
)
def test_a_filter_lets_through_what_it_names(rows: RunRows, q: str, expected: list[str]) -> None:
    assert names(rows, q) == expected


@pytest.mark.parametrize(
    ("q", "expected"),
    [
        ("<b>BOLD</b>", ["24"]),
        ('"says \\"no\\""', ["24"]),
        ("αθηνα", ["24"]),
        ("CAFÉ", ["24"]),
        ("straße", ["25"]),
        ("über", ["25"]),
        ("ÜBER", ["25"]),
        ("東京", ["25"]),
        ('"too long"', ["f0", "f1"]),
        ("-text -too", []),
        ('"What is 5" rollout:0', ["20"]),
        ("responses_create_params", []),
        ("token_ids", []),
        ("-calculator task:5 rollout:2", ["22"]),
        ("nothing-of-the-kind", []),
        ('"n<b>bold"', []),  # in the JSON stands \n<b>bold
        ('"\n<b>bold"', ["24"]),
        ("00efve", []),  # na\u00efve
        ("u00ef", []),
    ],
)
def test_a_text_is_looked_for_in_what_a_row_says_but_not_in_its_keys(
    rows: RunRows, q: str, expected: list[str]
) -> None:
    page = rows.page(q, "", 0, 1000)
    assert (page.scanned, [row["row"] for row in page.rows]) == (1.0, expected)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (
            "rewrd<1",
            "no field 'rewrd' (did you mean 'reward'?) in 'rewrd<1'; to look for the text itself, put it in quotes",
        ),
        (
            "status:faild",
            "no status 'faild' in 'status:faild' (did you mean 'failed'?); there are ok, truncated, unscored, failed",
        ),
        ("reward<half", "'half' in 'reward<half' is no number"),
        ("reward<nan", "'nan' in 'reward<nan' is no number"),
        ('"open', "the quote in '\"open' does not end; close it, or leave it out"),
        ("level:", "no value in 'level:'; say level:VALUE, or level:null for what is not known"),
        ("-", "nothing to look for in '-'; write a word or \"a text in quotes\" after it"),
        (
            "levl:easy",
            "no field 'levl' (did you mean 'level'?) in 'levl:easy'; to look for the text itself, put it in quotes",
        ),
        (
            '"my tpic":x',
            "no field 'my tpic' (did you mean 'my topic'?) in '\"my tpic\":x'; to look for the text itself, put it in quotes",
        ),
        ("x" * 5000, "the filter has 5,000 characters; at most 4,000 are read"),
    ],
)
def test_a_wrong_term_is_named_with_a_near_one(rows: RunRows, q: str, message: str) -> None:
    with pytest.raises(WrongFilter) as error:
        rows.page(q, "", 0, 1)
    assert error.value.detail == message


def test_a_wrong_sort_names_a_near_key() -> None:
    with pytest.raises(WrongFilter, match=r"nothing to sort by is called 'rewad' \(did you mean 'reward'\?\)"):
        order("-rewad")


def test_every_scalar_of_a_row_can_be_sorted_by_and_every_number_filtered_by(rows: RunRows) -> None:
    for name in COLUMNS.keys() - {"components", "fields"}:
        rows.page("", f"-{name}", 0, 1)
    for name, value in rows.page("", "", 0, 1).rows[0].items():
        if isinstance(value, int | float):
            parse(f"{name}>=0")


def test_pages_are_parts_of_one_order(rows: RunRows) -> None:
    every = names(rows, "status:ok,unscored", "-reward,task")
    parts = [rows.page("status:ok,unscored", "-reward,task", offset, 7) for offset in range(0, 28, 7)]
    assert [row["row"] for part in parts for row in part.rows] == every
    assert {part.total for part in parts} == {26}


def test_the_tasks_of_a_filter_follow_from_its_rows_alone(rows: RunRows) -> None:
    page = rows.tasks("reward>=0.5 task<2", "-mean", 0, 10)
    assert [(row["task"], row["n"], row["mean"], row["best"], row["worst"]) for row in page.rows] == [
        (0, 2, 0.75, 1.0, 0.5),
        (1, 2, 0.75, 1.0, 0.5),
    ]
    assert page.rows[0]["prompt"] == "What is 0 + 2?"


@pytest.fixture
def numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """More rows than a search looks at in one moment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = [f"number {number}" + " prime" * (number % 50 == 7) for number in range(NUMBERED)]
    write(tmp_path / "out.jsonl", [rollout(number, said=text) for number, text in enumerate(texts)])
    index = Index(tmp_path / "out.jsonl", tmp_path / "none.jsonl")
    index.catch_up()
    yield index
    index.close()


def test_a_search_continues_where_the_last_moment_ended(numbered: Index) -> None:
    candidates, sought = range(NUMBERED - 1, -1, -1), (TextCondition("prime", True), TextCondition("number 57", False))
    search = Search(numbered, moment_s=0)
    found = [search.filter(candidates, sought, 0) for _ in range(3)]
    assert [len(each.rows) for each in found] == [2, 4, 7]
    assert found[0].scanned < found[1].scanned < found[2].scanned == 1.0
    assert found[2].rows == [357, 307, 257, 207, 157, 107, 7]


def test_more_texts_than_are_kept_do_not_drive_each_other_out(numbered: Index) -> None:
    search, texts = Search(numbered, moment_s=0), [str(number) for number in range(10, 19)]
    sought = [TextCondition(f"number {text}", False) for text in texts]
    for _ in range(3):
        found = search.filter(range(NUMBERED), sought, 0)
    assert len(sought) > MAX_TEXTS and found.scanned == 1.0
    assert found.rows == [number for number in range(NUMBERED) if str(number)[:2] not in texts]


def test_a_search_in_a_file_that_is_gone_is_not_a_search_that_found_nothing(numbered: Index) -> None:
    numbered.paths[0].unlink()
    with pytest.raises(NotFound, match="cannot be read"):
        RunRows(numbered).page("prime", "", 0, 10)


def test_a_rows_own_field_may_be_called_as_what_only_sorts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "out.jsonl", [rollout(0, answer=7, row="b"), rollout(1, answer=5, row="c", prompt=True)])
    index = Index(tmp_path / "out.jsonl", tmp_path / "none.jsonl")
    index.catch_up()
    own = RunRows(index)
    assert (names(own, "answer>6"), names(own, "row:c"), names(own, "prompt:true")) == (["0"], ["1"], ["1"])
    assert (names(own, "", "answer"), names(own, "", "-row"), names(own, "", "prompt")) == (["1", "0"],) * 3
    index.close()


def test_a_bar_of_the_histogram_counts_what_its_edges_filter(rows: RunRows) -> None:
    histogram = Stats(rows).of("")["histogram"]
    edges, counts = histogram["edges"], histogram["counts"]
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        upper = "<=" if high == edges[-1] else "<"
        assert rows.page(f"reward>={low} reward{upper}{high}", "", 0, 0).total == count
    assert sum(counts) == rows.page("-reward:null", "", 0, 0).total
    assert edges[3] == 0.15
