// Light or dark? As the system has it, until the reader chooses; what a reader chooses is kept in this browser.
import { button } from "./dom.js";

const NEXT = { auto: "light", light: "dark", dark: "auto" };
const SAID = { auto: "◐", light: "☀", dark: "☾" };

export function remembered(name, otherwise = null) {
  try {
    return JSON.parse(localStorage.getItem(`ngym.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`ngym.${name}`, JSON.stringify(value));
  } catch {
    return; // a browser without storage forgets, and works
  }
}

export function themeButton() {
  const made = button("", () => choose(NEXT[document.documentElement.dataset.theme]), { class: "button quiet icon" });
  const choose = (theme) => {
    document.documentElement.dataset.theme = theme;
    remember("theme", theme);
    made.textContent = SAID[theme];
    made.title = `Colours: ${theme === "auto" ? "as the system has it" : theme} (click for ${NEXT[theme]})`;
    made.setAttribute("aria-label", made.title);
  };
  const before = remembered("theme", "auto");
  choose(before in NEXT ? before : "auto");
  return made;
}
