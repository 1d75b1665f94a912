"""The viewer in a browser: clicks and keys, on rollout files of a real ng_view."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from browser_pages import eventually, viewer_of
from viewer_process import Viewer, failure, of_task, rollout, run, viewer, write

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")

HIDDEN = "\x1b\x85\xad\u034f\u061c\u200b\u200e\u2028\u202e\u2066\u3164\ufeff\ufffb\U000e0041"
EVIL = (
    f"<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{HIDDEN}[31m \u202egnp.exe"
)
JOINED = "\u2764\ufe0f \U0001f468\u200d\U0001f469\u200d\U0001f467 \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
ROWS = 100_000
RECORD = """() => {
    window.headerTexts = "";
    const header = document.querySelector("header");
    const noted = new MutationObserver(() => (window.headerTexts += header.textContent));
    noted.observe(header, { childList: true, characterData: true, subtree: true });
}"""

Page = Any
Json = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("viewed")


@pytest.fixture(scope="module")
def web_viewer(folder: Path) -> Iterator[Viewer]:
    """yesterday (r1, with a failure), today (r2), hostile (r3, with an odd row), growing (r4)."""
    yesterday = [attempt(task, index, 1.0 if (task + index) % 3 else 0.25) for task in range(12) for index in range(4)]
    yesterday[9] = attempt(2, 1, 0.0, "I think it is 5.", extracted_answer="5")
    today = [attempt(task, index, 0.0 if task == 7 else 0.5) for task in range(12) for index in range(4)]
    files = [
        write(folder / "yesterday.jsonl", yesterday),
        write(folder / "today.jsonl", today),
        write(folder / "hostile.jsonl", [hostile(), attempt(1, 0, 1.0, "word " * 200_000), odd()]),
        write(folder / "growing.jsonl", [attempt(0, index, 1.0) for index in range(3)]),
    ]
    write(folder / "yesterday_failures.jsonl", [failure(3, 2)])
    for file in folder.glob("*.jsonl"):
        os.utime(file, (0, 0))  # none is growing, but for what a test adds
    with viewer(*files, cache=folder / "cache") as served:
        yield served


def attempt(task: int, index: int, reward: float, text: str | None = None, **own: Any) -> Json:
    """A rollout with a tool call, tokens, and what its verifier noted."""
    answer = str(task + 2)
    row = rollout(task, index, reward, text or f"It is {answer}.", expected_answer=answer, **own)
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": f'{{"a": {task}, "b": 2}}'}
    result = {"type": "function_call_output", "call_id": "c1", "output": answer}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I had better add them."}]}
    row["response"]["output"][:0] = [thought, call, result]
    calls = [("seed", 0.0, 0.1), ("model", 0.1, 0.6), ("tool:add", 0.7, 0.1), ("model", 0.8, 0.6), ("verify", 1.4, 0.1)]
    row["ng"]["spans"] = calls
    return row


def hostile() -> Json:
    """Markup, hidden characters and an image from elsewhere, wherever a text may be."""
    row = attempt(0, 0, 0.5, EVIL, extracted_answer=EVIL, level=EVIL, **{EVIL: {EVIL: EVIL}})
    row["agent_ref"]["name"] = row["response"]["model"] = EVIL
    row["ng"] |= {"stop_reason": EVIL, "reward_components": {EVIL: 0.5}, "timings": {f"{EVIL}_s": 1.0, "total_s": 1.0}}
    row["ng"] |= {"run_id": EVIL, "task_id": EVIL, "rollout_id": EVIL, "started_at": EVIL}
    row["responses_create_params"] |= {"instructions": EVIL, "tools": [{"type": "function", "name": EVIL}]}
    row["response"]["output"][0]["summary"][0]["text"] = EVIL
    image = {"type": "input_image", "image_url": "https://elsewhere.example/x.png"}
    row["responses_create_params"]["input"] = [
        {"role": "user", "content": [{"type": "input_text", "text": EVIL}, image]}
    ]
    row["response"]["output"][1] |= {"name": EVIL, "arguments": orjson.dumps({EVIL: EVIL}).decode()}
    row["response"]["output"][2]["output"] = EVIL
    row["response"]["output"].append({"type": EVIL, "value": EVIL})
    return row


def odd() -> Json:
    """Items of the wrong types, and one that is as it should be."""
    row = attempt(2, 0, 1.0, "Still here.", extracted_answer="5")
    row["expected_answer"] = {"toString": 1}
    row["ng"] |= {"timings": {"model_s": "soon"}, "stop_reason": ["constructor"], "spans": [7]}
    row["responses_create_params"]["input"] = [7, None, "bare words", {"role": ["user"], "content": "an odd role"}]
    row["response"]["output"][:0] = [
        {"type": {"toString": 1}, "note": "an odd type"},
        {"role": "assistant", "content": {"note": "an odd content"}},
        {"type": "reasoning", "summary": "Hm."},
        {"type": "function_call", "name": {"toString": 1}, "arguments": 7, "note": "an odd call"},
    ]
    return row


def go(page: Page, served: Viewer, route: str = "#/") -> None:
    page.goto(served.report["address"].rstrip("/") + "/" + route)


def first_row(page: Page) -> Any:
    return page.locator("#row-0")


def unfold(page: Page) -> None:
    """Open all that is folded; what is in it is made when it opens."""
    opened = """() => [...document.querySelectorAll("main details")].every((fold) => {
        fold.open = true;
        return fold.children.length > 1;
    })"""
    eventually(page, lambda: page.evaluate(opened))


def test_a_newcomer_finds_the_worst_rollout_and_why_it_failed_by_clicks(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    page.get_by_role("link", name="yesterday").click()
    playwright.expect(page.get_by_text(re.compile(r"^ ?· .*% unscored$")).first).to_be_visible()
    page.get_by_role("button", name="Worst").click()
    playwright.expect(first_row(page)).to_contain_text("What is 2 + 2?")
    first_row(page).click()
    verdict = page.get_by_label("Why this reward")
    playwright.expect(verdict.locator(".big")).to_have_text("0")
    playwright.expect(verdict.locator(".is-wrong")).to_have_text("5")
    playwright.expect(page.locator(".turn.is-assistant")).to_contain_text("I think it is 5.")
    calls = verdict.get_by_label("Timings").locator(".fall-line")
    playwright.expect(calls).to_have_text(["seed100 ms", "model1.2 s", "add100 ms", "verify100 ms", "together1.5 s"])
    playwright.expect(calls.nth(1).locator(".fall-bar")).to_have_count(2)
    page.go_back()
    page.get_by_role("button", name="Failed").click()
    playwright.expect(first_row(page)).to_contain_text("timeout")
    first_row(page).click()
    playwright.expect(page.locator(".failure")).to_contain_text("it took too long")


def test_the_task_on_which_two_runs_differ_most_is_the_first_line(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    page.get_by_label("compare yesterday").check()
    page.get_by_label("compare today").check()
    page.get_by_role("link", name="Compare the two").click()
    playwright.expect(first_row(page)).to_contain_text("What is 7 + 2?")
    playwright.expect(page.locator(".verdict-line")).to_contain_text("yesterday is better")
    first_row(page).click()
    columns = page.locator(".group-column")
    playwright.expect(columns).to_have_count(2)
    playwright.expect(columns.first.locator("h2")).to_contain_text("yesterday")
    playwright.expect(columns.last.locator("h2")).to_contain_text("today")
    # 0.25, 1, 1, 0.25 against 0.5: the best of the better run shows why
    go(page, web_viewer, "#/compare/r1/r2/task/3/3")
    playwright.expect(columns.first.locator("h2")).to_have_text("yesterday, rollout 1")
    playwright.expect(columns.last.locator("h2")).to_have_text("today, rollout 0")


def test_runs_without_a_common_task_are_not_compared(page: Page, tmp_path: Path) -> None:
    train = [of_task(name, draw, 0, 1.0) for draw, name in enumerate(["a", "b", "a", "b"])]
    held_out = [of_task(name, task, 0, 0.0) for task, name in enumerate(["c", "d"])]
    files = [write(tmp_path / "train.jsonl", train), write(tmp_path / "held_out.jsonl", held_out)]
    with viewer_of(page, *files, cache=tmp_path / "cache") as served:
        go(page, served, "#/compare/r1/r2")
        verdict = page.locator(".compare-summary")
        playwright.expect(verdict).to_contain_text("No task in common: these runs cannot be compared.")
        playwright.expect(verdict).to_contain_text("2 tasks only in train, 2 tasks only in held_out")
        playwright.expect(verdict).not_to_contain_text("better")
        go(page, served, "#/r/r1/tasks")
        first_row(page).click()
        playwright.expect(page.locator(".group-column")).to_have_count(2)


def test_the_list_of_runs_says_which_is_better(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    mean = page.locator(".runs tbody tr", has_text="today").locator("td").nth(2)
    playwright.expect(mean).to_have_text("0.458")


def test_a_group_is_shown_side_by_side_with_its_differences(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1/group/2?cols=r1:8,r1:9")
    columns = page.locator(".group-column")
    playwright.expect(columns).to_have_count(2)
    playwright.expect(columns.last.locator("del")).to_have_text(["It", "4"])
    playwright.expect(columns.last.locator("ins")).to_have_text(["I", "think it ", "5"])
    playwright.expect(columns.first.locator("ins, del")).to_have_count(0)
    page.locator(".picker .chip").nth(3).click()
    playwright.expect(columns).to_have_count(3)
    assert "r1%3A11" in page.url


def test_model_text_neither_runs_nor_hides_nor_fetches(page: Page, web_viewer: Viewer) -> None:
    for route in ("#/r/r3", "#/r/r3/row/0", "#/r/r3/row/0?view=tokens", "#/r/r3/group/0", "#/r/r3/tasks"):
        go(page, web_viewer, route)
        playwright.expect(page.locator("main")).to_contain_text(re.compile("elsewhere|onerror|token|script"))
        unfold(page)
        assert "owned" not in page.title()
        assert page.locator("main script, main img").count() == 0
        assert not set(HIDDEN) & set(page.content())
        assert not set(HIDDEN) & set(page.title())
    go(page, web_viewer, "#/r/r3/row/0")
    playwright.expect(page.locator(".turn.is-assistant")).to_contain_text("⟨U+E0041⟩[31m ⟨U+202E⟩gnp.exe")
    cleaned = page.evaluate("text => import('/static/safetext.js').then(({ safeLine }) => safeLine(text))", JOINED)
    assert cleaned == JOINED  # what joins what is seen is not a hidden character


def test_an_odd_item_is_shown_unchanged_and_hides_no_other(page: Page, web_viewer: Viewer) -> None:
    for route, part in (("#/r/r3/group/2", ".group-column"), ("#/r/r3/row/2", ".rollout-main")):
        go(page, web_viewer, route)
        playwright.expect(page.locator(part)).to_contain_text("Still here.")
        unfold(page)
        for note in ("an odd type", "an odd content", "Hm.", "an odd call"):
            playwright.expect(page.locator(part)).to_contain_text(note)
    playwright.expect(page.locator(part)).to_contain_text(re.compile("bare words.*an odd role", re.DOTALL))
    playwright.expect(page.locator(".rollout-side")).to_contain_text("toString")


def test_a_server_that_is_away_is_reported_and_what_it_owed_comes_when_it_is_back(
    browser: Any, web_viewer: Viewer
) -> None:
    with browser.new_context() as context:  # the browser itself logs failures to the console
        page = context.new_page()
        go(page, web_viewer, "#/r/r1")
        playwright.expect(first_row(page)).to_be_visible()
        page.route("**/api/**", lambda route: route.abort())
        first_row(page).click()
        playwright.expect(page.locator(".problem")).to_contain_text("ng_view does not answer")
        playwright.expect(page.locator("header")).to_contain_text("No answer")
        page.evaluate(RECORD)  # what comes next is shown for a few seconds only
        page.unroute("**/api/**")
        eventually(page, lambda: "It answers again" in page.evaluate("headerTexts"))
        playwright.expect(page.locator(".turn.is-assistant")).to_contain_text("It is 2.")


def test_a_figure_narrows_the_filter_and_the_spread_is_sorted_from_the_largest(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1/tasks?q=-task%3A2&sort=task")
    page.get_by_role("button", name="reward 0.25 to 0.3: 15").click()
    box = page.get_by_label("Filter", exact=True)
    playwright.expect(box).to_have_value("-task:2 reward>=0.25 reward<0.3")
    playwright.expect(page.locator(".status-line")).to_have_text("15 of 49 rollouts")
    go(page, web_viewer, "#/r/r1/tasks?sort=task")
    page.get_by_role("button", name="spread").click()
    playwright.expect(page.get_by_role("columnheader", name="spread")).to_have_attribute("aria-sort", "descending")
    go(page, web_viewer, "#/r/r3")
    page.get_by_text("Environments").wait_for()
    page.locator(".as-link").filter(has_text="onerror").click()
    playwright.expect(page.locator(".status-line")).to_have_text("1 of 3 rollouts")


def test_a_megabyte_of_text_is_folded_until_one_asks(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r3/row/1")
    answer = page.locator(".turn.is-assistant .text")
    more = page.get_by_role("button", name="Show all 1,000,000 characters")
    playwright.expect(more).to_be_visible()
    assert len(answer.text_content()) < 10_000
    more.click()
    eventually(page, lambda: len(answer.text_content()) == 1_000_000)


def test_an_address_says_filter_and_order_and_back_returns_to_it(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1?q=reward%3C0.5+-task%3A2&sort=-task")
    playwright.expect(first_row(page)).to_contain_text("What is 11 + 2?")
    playwright.expect(page.locator(".status-line")).to_have_text(re.compile("^15 of 49 rollouts"))
    first_row(page).click()
    playwright.expect(page.get_by_label("Why this reward")).to_be_visible()
    page.go_back()
    playwright.expect(page.get_by_label("Filter", exact=True)).to_have_value("reward<0.5 -task:2")
    playwright.expect(first_row(page)).to_contain_text("What is 11 + 2?")


def test_a_wrong_term_is_reported_with_a_near_one_and_a_name_is_suggested(
    page: Page, browser: Any, web_viewer: Viewer
) -> None:
    go(page, web_viewer, "#/r/r1")
    box = page.get_by_label("Filter", exact=True)
    box.press_sequentially("sta")
    page.get_by_role("option", name="status:", exact=True).click()
    page.get_by_role("option", name="status:failed").click()
    playwright.expect(page.locator(".status-line")).to_have_text(re.compile("^1 of 49 rollouts"))
    assert "q=status%3Afailed" in page.url
    with browser.new_context() as context:  # the browser itself tells the console of a 400
        other = context.new_page()
        go(other, web_viewer, "#/r/r1?q=rewrd%3C1")
        playwright.expect(other.locator(".filter-problem")).to_contain_text(re.compile("rewrd.*reward"))


def test_a_run_is_read_with_the_keyboard_alone(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1?q=status%3Aok")
    playwright.expect(first_row(page)).to_be_visible()
    for key in ("j", "j", "j", "k"):
        page.keyboard.press(key)
    playwright.expect(page.locator(".table-row.selected")).to_have_attribute("id", "row-1")
    page.keyboard.press("Enter")
    crumbs = page.get_by_label("Where you are")
    playwright.expect(crumbs).to_contain_text("task 0/rollout 1")
    page.keyboard.press("j")
    playwright.expect(crumbs).to_contain_text("rollout 2")
    page.keyboard.press("]")
    playwright.expect(crumbs).to_contain_text("rollout 3")
    page.keyboard.press("[")
    playwright.expect(crumbs).to_contain_text("rollout 2")
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_label("Filter", exact=True)).to_have_value("status:ok")
    page.keyboard.press("/")
    playwright.expect(page.get_by_label("Filter", exact=True)).to_be_focused()
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    playwright.expect(page.get_by_role("dialog")).to_contain_text("next row")
    page.keyboard.press("Escape")
    playwright.expect(page.get_by_role("dialog")).to_have_count(0)


def test_tokens_show_which_were_sampled_and_how_sure_the_policy_was(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1/row/0?view=tokens")
    tokens = page.locator(".token-text .token")
    playwright.expect(tokens).to_have_text(["5", "6", "7", "8", "9"])
    playwright.expect(page.locator(".token-text .is-context")).to_have_count(3)
    tokens.nth(4).hover()
    playwright.expect(page.locator(".token-readout")).to_contain_text("logprob \u22121.5")
    playwright.expect(page.locator(".token-readout")).to_contain_text("version 4")
    colour = "element => getComputedStyle(element).backgroundColor"
    assert tokens.nth(3).evaluate(colour) != tokens.nth(4).evaluate(colour)
    page.get_by_role("button", name="policy version").click()
    playwright.expect(page.locator(".token-legend")).to_contain_text("version 3version 4")


def test_a_growing_file_is_followed_and_its_torn_line_is_not_shown(
    page: Page, web_viewer: Viewer, folder: Path
) -> None:
    filtered = page.context.new_page()
    go(filtered, web_viewer, "#/r/r4?q=task%3A9")
    playwright.expect(filtered.locator(".table")).to_contain_text("No row fits this filter.")
    go(page, web_viewer, "#/r/r4")
    playwright.expect(page.locator(".status-line")).to_contain_text("3 rollouts")
    page.get_by_role("button", name="Columns").click()
    more = [orjson.dumps(attempt(9, index, 0.0, "I came later.")) for index in range(3)]
    with (folder / "growing.jsonl").open("ab") as file:
        file.write(more[0] + b"\n" + more[1] + b"\n" + more[2][:100])
    playwright.expect(page.locator(".status-line")).to_contain_text("5 rollouts")
    playwright.expect(page.locator("#row-4")).to_contain_text("What is 9 + 2?")
    playwright.expect(page.locator(".headline")).to_contain_text("0.6")
    playwright.expect(page.get_by_label("Columns")).to_be_visible()
    playwright.expect(first_row(filtered)).to_contain_text("What is 9 + 2?")


@pytest.mark.parametrize("pressed", ["#row-0", ".figures .pick:has(.tick)"])
def test_what_is_pressed_while_the_file_grows_is_clicked(page: Page, tmp_path: Path, pressed: str) -> None:
    file = write(tmp_path / "out.jsonl", [attempt(0, index, 1.0) for index in range(3)])
    with viewer_of(page, file, cache=tmp_path / "cache") as growing:
        other = page.context.new_page()
        go(other, growing)
        go(page, growing)
        box = page.locator(pressed).bounding_box()
        page.mouse.move(box["x"] + 9, box["y"] + box["height"] - 3)
        page.mouse.down()
        with file.open("ab") as more:
            more.writelines(orjson.dumps(attempt(task, index, 1.0)) + b"\n" for task in (1, 2) for index in range(3))
        playwright.expect(other.locator(".status-line")).to_contain_text("9 rollouts")
        page.wait_for_timeout(3000)  # in which this one is drawn again, too, if it is not held
        before = page.url
        page.mouse.up()
        page.wait_for_url(lambda url: url != before)
        other.close()


def test_a_run_without_a_row_says_that_none_came_and_not_that_none_fits(page: Page, tmp_path: Path) -> None:
    with viewer_of(page, write(tmp_path / "out.jsonl", []), cache=tmp_path / "cache") as empty:
        go(page, empty)
        playwright.expect(page.locator(".table-note")).to_contain_text("no rollout yet")


def test_dark_and_light_are_chosen_and_kept(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    ground = "getComputedStyle(document.body).backgroundColor"
    found = {page.evaluate(ground)}
    for _ in range(2):
        page.get_by_role("button", name="Colours").click()
        found.add(page.evaluate(ground))
    assert len(found) == 2
    page.reload()
    playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_a_report_shows_the_same_from_a_file_and_says_what_it_lacks(page: Page, folder: Path) -> None:
    write(folder / "reported.jsonl", [attempt(task, 0, task / 4, EVIL if task == 2 else None) for task in range(5)])
    report = folder / "report.html"
    written = run(folder / "reported.jsonl", "--export", report, "--rows", "4", cache=folder / "cache")
    assert written.returncode == 0, written.stderr
    page.goto(report.as_uri())
    playwright.expect(page.locator(".packed-note")).to_contain_text("holds 4 of them in full")
    page.get_by_role("button", name="Worst").click()
    playwright.expect(first_row(page)).to_contain_text("What is 0 + 2?")
    first_row(page).click()
    playwright.expect(page.locator(".turn.is-assistant")).to_contain_text("It is 2.")
    page.goto(report.as_uri() + "#/r/r1?q=reward%3A0.5")
    playwright.expect(page.locator(".status-line")).to_have_text(re.compile("^1 of 5"))
    page.goto(report.as_uri() + "#/r/r1?q=onerror")
    playwright.expect(page.locator(".status-line")).to_contain_text("in the lines of this report only")
    page.goto(report.as_uri() + "#/r/r1?q=run_id%3Arun-1")
    playwright.expect(page.locator(".filter-problem")).to_contain_text("No field 'run_id'")
    assert "owned" not in page.title()


def test_a_report_opens_the_task_on_which_two_runs_differ_most_in_full(page: Page, folder: Path) -> None:
    for name, reward in (("before", 0.0), ("after", 1.0)):
        rows = [attempt(task, index, reward if task == 7 else 0.5) for task in range(12) for index in range(4)]
        write(folder / f"{name}.jsonl", rows[::-1])  # the last rollout of a task was done first
    report = folder / "compared.html"
    written = run(
        folder / "before.jsonl", folder / "after.jsonl", "--export", report, "--rows", "8", cache=folder / "cache"
    )
    assert written.returncode == 0, written.stderr
    page.goto(report.as_uri() + "#/compare/r1/r2")
    first_row(page).click()
    columns = page.locator(".group-column")
    playwright.expect(columns.locator("h2")).to_have_text(["before, rollout 0", "after, rollout 0"])
    playwright.expect(columns.first).to_contain_text("It is 9.")
    playwright.expect(columns.last).to_contain_text("It is 9.")


def test_of_a_hundred_thousand_rows_only_those_on_the_screen_are_in_the_page(page: Page, folder: Path) -> None:
    template = rollout()
    template["ng"]["segments"] = []
    row = orjson.dumps(template)
    with (folder / "large.jsonl").open("wb") as file:
        numbered = (row.replace(b'"_ng_task_index":0', b'"_ng_task_index":%d' % task) for task in range(ROWS))
        file.writelines(line + b"\n" for line in numbered)
    with viewer_of(page, folder / "large.jsonl", cache=folder / "cache") as served:
        go(page, served)
        eventually(page, lambda: page.locator(".status-line").inner_text().startswith("100,000 rollouts"))
        page.evaluate("""async () => {
            const table = document.querySelector(".table");
            const step = (table.scrollHeight - table.clientHeight) / 60;
            for (let i = 1; i <= 60; i++) {
                table.scrollTop = i * step;
                await new Promise(requestAnimationFrame);
            }
        }""")
        playwright.expect(page.locator(f"#row-{ROWS - 1}")).to_contain_text(str(ROWS - 1))
        assert page.locator(".table-row").count() < 100
        playwright.expect(page.locator(".headline")).to_contain_text("100,000")
