// Shows the page of the address; the header above it stays.
import { comparedGroupsPage, groupPage } from "./group.js";
import { comparePage } from "./compare.js";
import { keepToken, openApi, takeToken } from "./data.js";
import { button, clear, el, link } from "./dom.js";
import { listenForKeys, pageKeys, toggleHelp } from "./keys.js";
import { followRuns } from "./run_list_feed.js";
import { rolloutPage } from "./rollout.js";
import { goInPlace, hrefOf, parseHash } from "./router.js";
import { runPage } from "./run.js";
import { homeOf, runsPage } from "./runs.js";
import { safeLine } from "./safetext.js";
import { themeButton } from "./theme.js";
import { render } from "./training/page.js";

const TOLD_MS = 5000;
const crumbLine = el("nav", { class: "crumbs", "aria-label": "Where you are" });
const parts = el("nav", { class: "parts", "aria-label": "Pages" });
const silence = el("span", { role: "status" }); // says that the server does not answer, and that it is back
const stage = el("div", { class: "stage" });
let title = "ngym";
let shown = null;
let told = 0;

function start() {
  takeToken();
  const api = openApi();
  const context = { api, live: followRuns(api), crumbs: showCrumbs };
  document.body.append(
    el(
      "header",
      { class: "top" },
      link("#/", "ngym", { class: "brand", title: "All runs (g)" }),
      crumbLine,
      el("div", { class: "fill" }),
      silence,
      parts,
      themeButton(),
      button("?", toggleHelp, { class: "button quiet icon", title: "Help (?)", "aria-label": "Help" }),
    ),
    stage,
  );
  listenForKeys();
  window.addEventListener("hashchange", () => show(context));
  context.live.onChange((state) => {
    if (shown === null || state.error) first(context, state);
    else shown.again?.();
    tellSilence(state);
  });
  context.live.refresh();
}

/** The first answer decides where to begin; a refusal is shown in place of a page. */
function first(context, { runs, error }) {
  if (error?.status === 401) return put(tokenForm(context));
  if (error && shown) return;
  if (error) {
    put(problemPage(error));
    shown = null; // the next answer is a first one, too
    return;
  }
  const home = context.api.packed?.home ?? homeOf(runs);
  if (home && parseHash(location.hash).path.length === 0) return goInPlace(home);
  show(context);
}

/** A page that stays says so when its server has ended, and when it is back. */
function tellSilence({ error }) {
  const isSilent = shown !== null && error !== null && error.status !== 401;
  if (isSilent === silence.classList.contains("is-bad")) return;
  silence.className = isSilent ? "is-bad" : "is-good";
  silence.textContent = isSilent ? safeLine(error.title ?? error.message) : "It answers again";
  silence.title = isSilent ? safeLine(error.message) : "";
  clearTimeout(told);
  if (!isSilent) told = setTimeout(() => (silence.textContent = ""), TOLD_MS);
}

function show(context) {
  const { runs } = context.live.state;
  if (!runs) return;
  title = context.live.state.title;
  const route = parseHash(location.hash);
  const now = (isHere) => ({ "aria-current": isHere ? "page" : null });
  clear(parts).append(
    ...[
      runs.length > 1 && link("#/", "Runs", { class: "wide", ...now(route.path.length === 0) }),
      runs.some((run) => run.kind === "training") &&
        link(
          hrefOf(["training"], {
            runs: runs
              .filter((run) => run.kind === "training")
              .map((run) => run.id)
              .join(","),
          }),
          "Training",
          now(route.path[0] === "training"),
        ),
    ].filter(Boolean),
  );
  try {
    if (!shown?.update?.(route)) put(pageFor(context, route));
  } catch (error) {
    put(problemPage(error));
  }
}

function pageFor(context, route) {
  const [kind, , part] = route.path;
  if (kind === undefined) return runsPage(context);
  if (kind === "training") return trainingPage(context, route);
  if (kind === "r" && part === "row") return rolloutPage(context, route);
  if (kind === "r" && (part === "group" || part === "task")) return groupPage(context, route);
  if (kind === "r") return runPage(context, route);
  if (kind === "compare" && route.path[3] === "task") return comparedGroupsPage(context, route);
  if (kind === "compare") return comparePage(context, route);
  throw new Error("There is no such page; go back to the list of runs.");
}

function put(page) {
  shown?.close?.();
  shown = page;
  pageKeys(page.keys ?? []);
  clear(stage).append(page.element);
}

function trainingPage(context, { params }) {
  const element = el("main", { class: "page training-page" });
  showCrumbs([{ text: "training" }]);
  const end = render(element, params, context.api);
  return { element, keys: [["Escape Backspace", "back", () => history.back()]], close: () => typeof end === "function" && end() };
}

function showCrumbs(crumbs) {
  clear(crumbLine).append(
    ...crumbs.flatMap(({ text, href, title }) => [
      el("span", { class: "slash", "aria-hidden": "true" }, "/"),
      href
        ? link(href, safeLine(text), { title })
        : el("span", { title: title && safeLine(title), "aria-current": "page" }, safeLine(text)),
    ]),
  );
  document.title = safeLine([title, ...crumbs.map(({ text }) => text)].reverse().join(" · "));
}

function problemPage(error) {
  return {
    element: el(
      "main",
      { class: "page" },
      el("p", { class: "problem", role: "alert" }, safeLine(error.message)),
      link("#/", "All runs", { class: "button" }),
    ),
  };
}

function tokenForm(context) {
  const input = el("input", { type: "password", "aria-label": "Token", autocomplete: "off" });
  const send = (event) => {
    event.preventDefault();
    keepToken(input.value.trim());
    shown = null;
    context.live.refresh();
  };
  return {
    element: el(
      "main",
      { class: "page token-page" },
      el(
        "form",
        { on: { submit: send } },
        el("h2", null, "This ng_view asks for its token"),
        el("p", { class: "muted" }, "The token is in the address that ng_view printed at its start."),
        input,
        el("button", { type: "submit", class: "button is-main" }, "Open"),
      ),
    ),
  };
}

start();
