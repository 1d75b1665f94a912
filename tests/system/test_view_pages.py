"""ng_view's pages in a browser: texts, formulas, policy versions, filters, shared reports, phones."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_pages import eventually, findings, viewer_of
from viewer_process import Viewer, failure, rollout, viewer, write

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need the package playwright")

Page = Any
MARKDOWN = r"""# Answer

The **roots** of $x^2 - 5x + 6$ are \( x_1 = 2 \) and *3*; it costs $5, not $6, and 2*3*4 is snake_case_name.

\[ x = \frac{5 \pm \sqrt{25 - 24}}{2} \]

1. first
   - inner `code`
2. [second](https://elsewhere.example/?leak=1) ![dot](https://elsewhere.example/x.png)

| root | value |
|------|------:|
| $x_1$ | 2 |

```python
print("<script>document.title = 'owned'</script>")
```

<img src=x onerror="document.title='owned'"> <a href="https://elsewhere.example">here</a>
So \boxed{2} and $\mystery{x}$ stay.
"""
FORMULAS = [
    r"\frac{-b \pm \sqrt{b^2-4ac}}{2a}",
    r"\sum_{n=1}^\infty \frac1{n^2} = \frac{\pi^2}6",
    r"\begin{pmatrix} 1 & 0 \\ 0 & \lambda \end{pmatrix}",
    r"f(n) = \begin{cases} n/2 & \text{if } n \text{ is even} \\[2pt] 3n+1 & \text{otherwise} \end{cases}",
    r"\begin{aligned} a &= b \\ &\le c \end{aligned}",
    r"\left( \frac{a}{b} \middle| c \right]",
    r"\lim_{x \to 0} \frac{\sin x}{x} = 1, \quad \mathbb{R}^n \ni \vec{v}, \; a \equiv b \pmod{m}",
    r"\boxed{\{2, 3\}} \not= \binom{n}{k} + \overline{AB} \cdot \underbrace{x+y}_{2} f''(x) \sqrt[3]{8}",
    r"\mathbf{A}\mathcal{L}\operatorname{tr}\Big( X \Big) 50\% \$3",
]
BAD_FORMULAS = [r"\frac{1}", "{" * 5000, r"\href{javascript:alert(1)}{x}", r"\begin{evil}x\end{evil}", "}", r"\left("]
ALLOWED = {
    "math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup", "msubsup", "munder",
    "mover", "munderover", "mtable", "mtr", "mtd", "code", "span",
}  # fmt: skip
HARD = ["**a " * 4000, "`" * 9 + "x" * 9000, "[a" * 6000, "> " * 9000, "- " * 9000 + "x", "|-" * 9000, "$a " * 9000]
MATH = """async (texts) => {
    const { mathElement } = await import('/static/math.js');
    return texts.map((tex) => {
        const made = mathElement(tex, true);
        const tags = [made, ...made.querySelectorAll("*")].map((node) => node.localName);
        return { tags: [...new Set(tags)], isRead: made.querySelector("math") !== null, text: made.textContent };
    });
}"""

PACKED = """async (rows) => {
    const { packedApi } = await import('/static/packed.js');
    const api = packedApi({ runs: [{ id: 'r1' }], rows: { r1: rows } });
    return (await api.tasks('r1', { limit: 100 })).rows;
}"""

PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
DRAWN_IMAGES = """async (urls) => {
    const { conversation } = await import('/static/conversation.js');
    const content = urls.map((url) => ({ type: 'input_image', image_url: url }));
    const drawn = conversation({ responses_create_params: { input: [{ role: 'user', content }] } });
    const isOver = (img) => new Promise((done) => ['load', 'error'].forEach((event) => img.addEventListener(event, done)));
    await Promise.all([...drawn.querySelectorAll('img')].map(isOver));
    return [...drawn.querySelectorAll('.said-image, .image-name')].map((node) => node.src ?? node.textContent);
}"""

NAME_WIDTHS = """async (urls) => {
    const { conversation } = await import('/static/conversation.js');
    const content = urls.map((url) => ({ type: 'input_image', image_url: url }));
    const drawn = conversation({ responses_create_params: { input: [{ role: 'user', content }] } });
    document.querySelector('.conversation').replaceWith(drawn);
    return [...drawn.querySelectorAll('.image-name')].map((node) => [node.scrollWidth, node.clientWidth]);
}"""


@pytest.fixture(scope="module")
def web_viewer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    """r1: rollouts of four tasks under the weights of six steps, of which odd tasks get easier, and a failed attempt; r2: the
    same tasks with other rewards; t1: a training run.
    """
    folder = tmp_path_factory.mktemp("pages")
    rows = [trained_row(step, task, index) for step in range(6) for task in range(4) for index in range(2)]
    rows[0]["response"]["output"][0]["content"][0]["text"] = MARKDOWN
    files = [write(folder / "out.jsonl", rows), write(folder / "other.jsonl", [{**row, "reward": 0.5} for row in rows])]
    write(folder / "out_failures.jsonl", [failure(9, 5)])
    (folder / "grpo").mkdir()
    steps = [{"step": step, "time/elapsed": step, "reward/mean": step / 9, "lr": 0.1} for step in range(1, 9)]
    (folder / "grpo" / "metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    (folder / "grpo" / "recipe.yaml").write_text("seed: 0\n")
    write(folder / "grpo" / "rollouts.jsonl", rows)
    with viewer(*files, folder / "grpo", cache=folder / "cache") as served:
        yield served


def trained_row(step: int, task: int, index: int) -> dict[str, Any]:
    """A rollout of a task that training draws at every step."""
    row = rollout(4 * step + task, index, step / 5 if task % 2 else 0.5)
    row["ng"] |= {"task_id": f"{task:016x}", "policy_version": [step]}
    return {**row, "_ng_train": {"oldest": step}}


def go(page: Page, served: Viewer, route: str = "#/") -> None:
    page.goto(served.report["address"].rstrip("/") + "/" + route)


def test_answers_are_rendered_and_raw_on_request(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1/row/0")
    text = page.locator(".turn.is-assistant .text")
    playwright.expect(text.locator(".heading")).to_have_text("Answer")
    playwright.expect(text.locator("strong")).to_have_text("roots")
    playwright.expect(text.locator("em")).to_have_text("3")
    playwright.expect(text.locator("ol > li")).to_have_count(2)
    playwright.expect(text.locator("ol ul code")).to_have_text("code")
    playwright.expect(text.locator("td")).to_have_count(2)
    playwright.expect(text.locator("mfrac")).to_have_count(1)
    playwright.expect(text.locator("math")).to_have_count(4)
    playwright.expect(text.locator("code.tex")).to_have_text(r"\mystery{x}")
    playwright.expect(text.locator(".code-block code")).to_contain_text("<script>document.title")
    playwright.expect(text).to_contain_text("it costs $5, not $6, and 2*3*4 is snake_case_name.")
    page.get_by_role("button", name="Raw", exact=True).click()
    eventually(page, lambda: text.inner_text() == MARKDOWN)
    page.reload()
    eventually(page, lambda: text.inner_text() == MARKDOWN)
    page.keyboard.press("m")
    playwright.expect(text.locator(".heading")).to_have_text("Answer")


def test_markup_of_an_answer_is_text_and_its_addresses_are_neither_fetched_nor_linked(
    page: Page, web_viewer: Viewer
) -> None:
    go(page, web_viewer, "#/r/r1/row/0")
    text = page.locator(".turn.is-assistant .text")
    playwright.expect(text).to_contain_text("<img src=x onerror=\"document.title='owned'\">")
    playwright.expect(text).to_contain_text("second ⟨https://elsewhere.example/?leak=1⟩")
    playwright.expect(text).to_contain_text("image elsewhere, not fetched: https://elsewhere.example/x.png")
    assert text.locator("a, img, script, [href], [src], [style]").count() == 0
    assert "owned" not in page.title()


def test_an_image_in_the_row_is_shown_and_one_that_cannot_be_shown_is_named(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    shown = [f"data:image/{kind};base64,{PNG}" for kind in ("png", "PNG", "jpg", "jpeg")]
    shown.append(f"DATA:image/png;BASE64,{PNG}")
    named = ["data:image/bmp;base64,Qk0=", "https://elsewhere.example/x.png", f"data:image/png;base64,{PNG[:40]}"]
    drawn = page.evaluate(DRAWN_IMAGES, shown + named)
    assert [url.lower() for url in drawn[: len(shown)]] == [url.lower() for url in shown]
    assert drawn[len(shown) :] == [
        f"image in the row, not displayed: {named[0]}",
        f"image elsewhere, not fetched: {named[1]}",
        f"image in the row that the browser cannot read: {named[2]}",
    ]


def test_the_name_of_an_image_stays_in_its_column(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer, "#/r/r1/row/0")
    playwright.expect(page.locator(".conversation")).to_be_visible()
    urls = [f"data:image/bmp;base64,{'A' * 9000}", f"https://elsewhere.example/{'a' * 9000}.png"]
    widths = page.evaluate(NAME_WIDTHS, urls)
    assert len(widths) == len(urls) and all(text <= column for text, column in widths), widths


def test_formulas_become_mathml_and_what_cannot_be_read_stays_as_it_is(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    page.wait_for_load_state()
    for formula, found in zip(FORMULAS, page.evaluate(MATH, FORMULAS), strict=True):
        assert found["isRead"] and set(found["tags"]) <= ALLOWED, formula
    for formula, found in zip(BAD_FORMULAS, page.evaluate(MATH, BAD_FORMULAS), strict=True):
        assert found == {"tags": ["code"], "isRead": False, "text": formula}


def test_texts_made_to_be_slow_are_rendered_whole(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    page.wait_for_load_state()
    render = (
        "async (text) => (await import('/static/markdown.js')).markdown(text).map((node) => node.textContent).join('')"
    )
    for text in HARD:
        html = page.evaluate(render, text)
        assert html.count("a") == text.count("a") and html.count("x") == text.count("x"), json.dumps(text[:20])


def test_the_tasks_that_got_easier_are_first_and_a_slider_goes_through_the_versions(
    page: Page, web_viewer: Viewer
) -> None:
    go(page, web_viewer, "#/r/r1")
    page.get_by_role("button", name="Got easier").click()
    first = page.locator("#row-0")
    playwright.expect(first.locator(".trend")).to_have_text("+1")
    assert first.locator(".sparkline circle").count() == 6
    first.click()
    slider = page.get_by_role("slider", name="Weights")
    playwright.expect(page.locator(".versions output")).to_contain_text("all 6 versions of the weights; trend +1")
    slider.focus()
    slider.press("End")
    playwright.expect(page.locator(".versions output")).to_have_text(
        "weights of version 5: mean reward 1 of 2 rollouts"
    )
    playwright.expect(page.locator(".picker .chip")).to_have_count(2)
    slider.press("Home")
    playwright.expect(page.locator(".picker .chip")).to_have_count(12)


def test_tool_errors_and_failure_classes_are_chips(page: Page, tmp_path: Path) -> None:
    clumsy = rollout(1)
    clumsy["ng"]["tool_errors"] = 2
    file = write(tmp_path / "out.jsonl", [rollout(0), clumsy])
    write(tmp_path / "out_failures.jsonl", [failure(2), failure(3), failure(4, kind="a: b")])
    with viewer_of(page, file, cache=tmp_path / "cache") as served:
        go(page, served)
        chips = page.locator("button.chip")  # the chart of the failures has buttons of these names, too
        chips.filter(has_text="timeout 2").click()
        playwright.expect(page.locator(".status-line")).to_have_text("2 of 5 rollouts")
        chips.filter(has_text="a: b 1").click()
        playwright.expect(page.locator(".status-line")).to_have_text("1 of 5 rollouts")
        chips.filter(has_text="Tool errors 1").click()
        playwright.expect(page.locator(".status-line")).to_have_text("1 of 5 rollouts")
        page.locator("#row-0").click()
        playwright.expect(page.locator(".reward-box")).to_contain_text("2 tool errors")


@pytest.mark.parametrize(("route", "rows"), [("#/r/r1/row/3", 1), ("#/r/r1?q=task%3C2", 4)])
def test_what_is_seen_is_shared_as_one_file(
    page: Page, web_viewer: Viewer, tmp_path: Path, route: str, rows: int
) -> None:
    go(page, web_viewer, route)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Share").click()
    file = tmp_path / "shared.html"
    saved.value.save_as(file)
    page.goto(file.as_uri())
    if rows == 1:
        playwright.expect(page.locator(".turn.is-assistant")).to_contain_text("It is 4.")
        page.goto(file.as_uri() + "#/r/r1")
    playwright.expect(page.locator(".status-line")).to_have_text(re.compile(f"^{rows} (of|rollout)"))
    assert page.get_by_role("button", name="Share").count() == 0
    assert ('"task":3' in file.read_text()) is False


def test_a_run_leads_to_the_last_one_of_its_folder(page: Page, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [rollout(0)]) for name in ("monday", "tuesday", "wednesday")]
    for day, file in enumerate(files):
        os.utime(file, (day, day))
    with viewer_of(page, *files, cache=tmp_path / "cache") as served:
        go(page, served, "#/r/r3")
        playwright.expect(page.locator(".table-row").first).to_be_visible()
        assert page.locator(".later").count() == 0
        go(page, served, "#/r/r1")
        page.get_by_role("link", name="Later here: wednesday").click()
        playwright.expect(page.locator(".compare-summary")).to_be_visible()


def test_a_report_has_the_same_trends_as_the_server(page: Page, web_viewer: Viewer) -> None:
    go(page, web_viewer)
    page.wait_for_load_state()
    served = web_viewer.get("/api/runs/r1/tasks?sort=-trend")["rows"]
    rows = web_viewer.get("/api/runs/r1/rows?limit=1000")["rows"]
    trends = page.evaluate(PACKED, rows)
    found = [sorted(one["trend"] for one in some if one["trend"] is not None) for some in (served, trends)]
    assert found[0] == pytest.approx(found[1])
    assert [one["curve"] for one in served if one["task"] == 1] == [trends[1]["curve"]]


ROUTES = (
    "#/", "#/r/r1", "#/r/r1/tasks", "#/r/r1/row/0", "#/r/r1/row/1?view=tokens", "#/r/r1/row/f0", "#/r/r1/group/0",
    "#/r/r1/task/1", "#/compare/r1/r2", "#/compare/r1/r2/task/0/0", "#/training", "#/training?tab=values",
    "#/training?tab=config", "#/training?tab=samples", "#/training?step=2",
)  # fmt: skip
WAYS = [(1280, "light"), (390, "dark")]


@pytest.mark.parametrize(("width", "scheme"), WAYS)
def test_every_page_is_accessible_and_fits_its_window(page: Page, web_viewer: Viewer, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    for route in ROUTES:
        page.goto("about:blank")
        go(page, web_viewer, route)
        page.locator("main").wait_for()
        page.wait_for_load_state("networkidle")
        page.evaluate("document.querySelectorAll('main details').forEach((one) => (one.open = true))")
        assert findings(page) == [], route
        assert page.evaluate("document.documentElement.scrollWidth") <= width, route
        cut = (
            "[...document.querySelectorAll('.crumbs *')].filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        )
        assert page.evaluate(cut) == 0, route
    page.keyboard.press("?")
    assert findings(page) == []
    page.goto("about:blank")
