// TeX formulas as MathML, which browsers draw themselves: what answers of language models use of LaTeX and amsmath. Its elements and
// attributes are those below; a formula that cannot be read is shown as it is written.
import { el, furnish } from "./dom.js";
import { safeLine } from "./safetext.js";

const MATH_SPACE = "http://www.w3.org/1998/Math/MathML";
const MOST_TOKENS = 3000;
const MOST_NESTED = 40;
const TOKEN = /\\(?:[a-zA-Z]+\*?|[^])|\d+(?:[.,]\d+)*|\s+|[^]/gu;
const pairsOf = (text) => new Map(text.trim().split(/\s+/).map((pair) => pair.split(":")));
const LETTERS = pairsOf(`alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ
  nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ
  Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω infty:∞ partial:∂ nabla:∇ ell:ℓ hbar:ℏ emptyset:∅ varnothing:∅ aleph:ℵ Re:ℜ
  Im:ℑ angle:∠ triangle:△ square:□ Box:□ blacksquare:■ degree:° circ:∘ imath:ı jmath:ȷ dagger:† top:⊤ bot:⊥ checkmark:✓ pounds:£`);
const OPERATORS = pairsOf(`times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ bullet:∙ oplus:⊕ ominus:⊖ otimes:⊗ odot:⊙ cup:∪ cap:∩ setminus:∖
  wedge:∧ land:∧ vee:∨ lor:∨ neg:¬ lnot:¬ leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ ll:≪ gg:≫ approx:≈ equiv:≡ sim:∼ simeq:≃ cong:≅ propto:∝
  leqslant:⩽ geqslant:⩾ prec:≺ succ:≻ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ subsetneq:⊊ mid:∣ nmid:∤ parallel:∥
  perp:⊥ to:→ rightarrow:→ longrightarrow:⟶ leftarrow:← gets:← leftrightarrow:↔ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹
  impliedby:⟸ iff:⟺ Longrightarrow:⟹ Longleftrightarrow:⟺ mapsto:↦ uparrow:↑ downarrow:↓ longmapsto:⟼ hookrightarrow:↪ forall:∀ exists:∃
  nexists:∄ therefore:∴ because:∵ ldots:… dots:… dotsc:… dotsb:⋯ cdots:⋯ vdots:⋮ ddots:⋱ prime:′ colon:: lvert:| rvert:| vert:| lVert:‖
  rVert:‖ Vert:‖ langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lbrace:{ rbrace:} lbrack:[ rbrack:] backslash:∖ models:⊨ vdash:⊢
  int:∫ iint:∬ iiint:∭ oint:∮ doteq:≐ coloneqq:≔ asymp:≍ triangleq:≜ rightleftharpoons:⇌`);
OPERATORS.set("colon", ":");
const LARGE = pairsOf("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀");
const NAMES = new Set("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp det dim ker deg arg hom Pr".split(" "));
const LIMITS = new Set("lim max min sup inf gcd lcm limsup liminf argmax argmin".split(" "));
const ACCENTS = pairsOf(`hat:^ widehat:^ bar:¯ overline:¯ tilde:~ widetilde:~ vec:→ overrightarrow:→ overleftrightarrow:↔ dot:˙ ddot:¨ overbrace:⏞ check:ˇ
  overarc:⏜ widearc:⏜`);
const UNDER = pairsOf("underline:_ underbrace:⏟");
const SPACES = { ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, " ": 0.25, "!": -0.17, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.17 };
const SIZES = /^(?:big|Big|bigg|Bigg)[lrm]?$/;
const NOTHING = new Set(["displaystyle", "textstyle", "scriptstyle", "limits", "nolimits", "nonumber", "notag", "rm", "bf", "it", "left.", "hline"]);
const FENCES = { matrix: "", smallmatrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ " };
const ALIGNED = { class: "is-aligned", displaystyle: "true" };
const TEXTS = new Set(["text", "textbf", "textit", "textrm", "texttt", "mbox", "hbox", "textsf", "operatorname", "operatorname*"]);
const ALPHABETS = { mathbb: 0x1d538, mathbf: 0x1d400, boldsymbol: 0x1d400, bm: 0x1d400, mathcal: 0x1d49c, mathscr: 0x1d49c, mathfrak: 0x1d504 };
const PLAIN = new Set(["mathrm", "mathit", "mathsf", "mathtt", "mathop", "mathbin", "mathrel", "mathord", "ensuremath", "phantom"]);
// Letters that were in Unicode before its mathematical alphabets, and so are not in them.
const EARLIER = pairsOf(`mathbbC:ℂ mathbbH:ℍ mathbbN:ℕ mathbbP:ℙ mathbbQ:ℚ mathbbR:ℝ mathbbZ:ℤ mathcalB:ℬ mathcalE:ℰ mathcalF:ℱ mathcalH:ℋ
  mathcalI:ℐ mathcalL:ℒ mathcalM:ℳ mathcalR:ℛ mathfrakC:ℭ mathfrakH:ℌ mathfrakI:ℑ mathfrakR:ℜ mathfrakZ:ℨ`);

/** The formula as an element. isShown: in a line of its own. */
export function mathElement(tex, isShown) {
  try {
    const math = node("math", { display: isShown ? "block" : "inline", class: isShown ? "is-shown" : null }, new TexReader(tex, isShown).all());
    return isShown ? el("span", { class: "math-scroll", tabindex: 0 }, math) : math;
  } catch {
    return el("code", { class: "tex" }, safeLine(tex));
  }
}

function node(tag, attributes, ...children) {
  return furnish(document.createElementNS(MATH_SPACE, tag), attributes, children);
}

const row = (children) => (children.length === 1 ? children[0] : node("mrow", null, children));
const leaf = (tag, text, attributes) => node(tag, attributes, safeLine(text));

class TexReader {
  #at = 0;
  #nested = 0;

  constructor(tex, isShown) {
    this.tokens = tex.replace(/(?<!\\)%.*$/gm, "").match(TOKEN) ?? [];
    this.isShown = isShown;
    if (this.tokens.length > MOST_TOKENS) throw new Error("too long");
  }

  all() {
    const made = this.#table(() => this.#at >= this.tokens.length, false);
    if (this.#at < this.tokens.length) throw new Error("more than one formula");
    return made;
  }

  #peek() {
    while (/^\s/.test(this.tokens[this.#at] ?? "")) this.#at++;
    return this.tokens[this.#at];
  }

  #next() {
    const token = this.#peek();
    if (token === undefined) throw new Error("it ends too early");
    this.#at++;
    return token;
  }

  /** Cells up to the end: one row, or a table where there is an & or a \\. */
  #table(isEnd, always, attributes = ALIGNED) {
    const lines = [[[]]];
    while (this.#peek() !== undefined && !isEnd()) {
      const token = this.tokens[this.#at];
      if (token === "&") lines.at(-1).push([]);
      else if (token === "\\\\" || token === "\\cr") lines.push([[]]);
      else {
        lines.at(-1).at(-1).push(...this.#scripted());
        continue;
      }
      this.#at++;
      if (token === "\\\\" && this.#peek() === "[") this.#until("]");
    }
    if (lines.length > 1 && !lines.at(-1).flat().length) lines.pop();
    if (!always && lines.length === 1 && lines[0].length === 1) return row(lines[0][0]);
    return node("mtable", attributes, lines.map((cells) => node("mtr", null, cells.map((cell) => node("mtd", null, cell)))));
  }

  /** An atom with what is above and below it; a list, as some commands make nothing. */
  #scripted() {
    if (++this.#nested > MOST_NESTED) throw new Error("too deep");
    const { made, hasLimits } = this.#atom();
    const [base] = made.length === 1 ? made : [node("mrow", null, made)];
    let [sub, sup] = [null, null];
    for (;;) {
      const token = this.#peek();
      if (token === "\\limits" || token === "\\nolimits") this.#at++;
      else if (token === "_" && !sub) sub = this.#argument(++this.#at);
      else if (token === "^" && !sup) sup = this.#argument(++this.#at);
      else if (token === "'") {
        let primes = 0;
        for (; this.#peek() === "'"; primes++) this.#at++;
        const marks = leaf("mo", "′".repeat(primes));
        sup = sup ? node("mrow", null, marks, sup) : marks;
      } else break;
    }
    this.#nested--;
    if (!sub && !sup) return made;
    const [both, under, over] = hasLimits === "always" || (hasLimits && this.isShown) ? ["munderover", "munder", "mover"] : ["msubsup", "msub", "msup"];
    return [sub && sup ? node(both, null, base, sub, sup) : sub ? node(under, null, base, sub) : node(over, null, base, sup)];
  }

  #argument() {
    if (this.#peek() === "{") return this.#group();
    const token = this.tokens[this.#at];
    if (/^\d./.test(token ?? "")) {
      this.tokens[this.#at] = token.slice(1); // \frac12
      return leaf("mn", token[0]);
    }
    return row(this.#atom().made);
  }

  #group() {
    this.#at++;
    if (++this.#nested > MOST_NESTED) throw new Error("too deep");
    const made = this.#table(() => this.#peek() === "}", false);
    this.#nested--;
    if (this.#next() !== "}") throw new Error("a brace is open");
    return made;
  }

  /** The text up to a mark, or of a group in braces. */
  #until(mark) {
    const start = ++this.#at;
    for (let open = 0; this.#at < this.tokens.length; this.#at++) {
      const token = this.tokens[this.#at];
      if (token === mark && !open) return this.tokens.slice(start, this.#at++).join("");
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
    }
    throw new Error("it ends too early");
  }

  #words() {
    return this.#peek() === "{" ? this.#until("}") : this.#next();
  }

  #atom() {
    const token = this.#peek();
    const one = (made, hasLimits = false) => ({ made: [made].flat(), hasLimits });
    if (token === "{") return one(this.#group());
    if (token === "}" || token === "&" || token === undefined) throw new Error("not expected here");
    if (token === "^" || token === "_") return one(node("mrow"));
    this.#at++;
    if (token[0] === "\\" && token.length > 1) return this.#command(token.slice(1), one);
    if (/^\d/.test(token)) return one(leaf("mn", token));
    if (token === "~") return one(this.#space(0.25));
    if (/^\p{L}/u.test(token)) return one(leaf("mi", token));
    return one(leaf("mo", token === "-" ? "−" : token === "*" ? "∗" : token, /[()[\]|]/.test(token) ? { stretchy: "false" } : null));
  }

  #space(em) {
    return node("mspace", { width: `${em}em` });
  }

  #command(name, one) {
    if (LETTERS.has(name)) return one(leaf("mi", LETTERS.get(name), /^[A-Z∞∅]/.test(name) ? { mathvariant: "normal" } : null));
    if (OPERATORS.has(name)) return one(leaf("mo", OPERATORS.get(name), /^[lr]?[vV]ert$|^[lr](?:angle|floor|ceil|brac[ek])$/.test(name) ? { stretchy: "false" } : null));
    if (LARGE.has(name)) return one(leaf("mo", LARGE.get(name), { largeop: "true" }), true);
    if (NAMES.has(name)) return one([leaf("mi", name), this.#space(0.1)]);
    if (LIMITS.has(name)) return one(leaf("mi", name), true);
    if (Object.hasOwn(SPACES, name)) return one(this.#space(SPACES[name]));
    if (ACCENTS.has(name)) return one(node("mover", { accent: "true" }, this.#argument(), leaf("mo", ACCENTS.get(name))), name === "overbrace" && "always");
    if (UNDER.has(name)) return one(node("munder", null, this.#argument(), leaf("mo", UNDER.get(name))), name === "underbrace" && "always");
    if (TEXTS.has(name)) return one(leaf("mtext", this.#words().replace(/\\([{}$%&#_ ])/g, "$1").replace(/\$/g, ""), name === "textbf" ? { class: "is-bold" } : null));
    if (Object.hasOwn(ALPHABETS, name)) return one(this.#inAlphabet(name));
    if (name === "mathrm") return one(leaf("mi", this.#words(), { mathvariant: "normal" }));
    if (PLAIN.has(name)) return one(this.#argument());
    if (NOTHING.has(name)) return one([]);
    if (SIZES.test(name)) return one(leaf("mo", this.#fence(), { stretchy: "false" }));
    if (/^[{}$%&#_|]$/.test(name)) return one(leaf("mo", name === "|" ? "‖" : name, { stretchy: "false" }));
    return one(this.#structure(name));
  }

  #structure(name) {
    const two = () => [this.#argument(), this.#argument()];
    if (/^[dtc]?frac$/.test(name)) return node("mfrac", null, two());
    if (/^[dt]?binom$/.test(name)) return [leaf("mo", "("), node("mfrac", { linethickness: "0" }, two()), leaf("mo", ")")];
    if (name === "sqrt") {
      const index = this.#peek() === "[" ? new TexReader(this.#until("]"), false).all() : null;
      return index ? node("mroot", null, this.#argument(), index) : node("msqrt", null, this.#argument());
    }
    if (name === "boxed" || name === "fbox") return node("mrow", { class: "is-boxed" }, this.#argument());
    if (name === "cancel" || name === "bcancel") return node("mrow", { class: "is-cancelled" }, this.#argument());
    if (name === "overset" || name === "stackrel") return node("mover", null, two().reverse());
    if (name === "underset") return node("munder", null, two().reverse());
    if (name === "xrightarrow") return node("mover", null, leaf("mo", "→"), this.#argument());
    if (name === "substack") return this.#argument();
    if (name === "pmod") return [this.#space(0.5), leaf("mo", "("), leaf("mi", "mod"), this.#space(0.3), this.#argument(), leaf("mo", ")")];
    if (name === "bmod" || name === "mod") return [this.#space(0.3), leaf("mi", "mod"), this.#space(0.3)];
    if (name === "not") return leaf("mo", `${OPERATORS.get(this.#peek()?.slice(1)) ?? this.#peek()}\u0338`, this.#next() && null);
    if (name === "tag" || name === "tag*") return [this.#space(2), leaf("mtext", `(${this.#words()})`)];
    if (name === "color" || name === "label") return this.#words() && [];
    if (name === "textcolor") return this.#words() && this.#argument();
    if (name === "left") return this.#fenced();
    if (name === "begin") return this.#environment();
    throw new Error(`\\${name} is not known`);
  }

  /** The sign after \left, \right or \big; "" for a dot. */
  #fence() {
    const token = this.#next();
    if (token === ".") return "";
    if (token[0] !== "\\") return token;
    return OPERATORS.get(token.slice(1)) ?? (token === "\\|" ? "‖" : token.slice(1));
  }

  #fenced() {
    const sign = () => leaf("mo", this.#fence(), { stretchy: "true", fence: "true" });
    const parts = [sign()];
    const isEnd = () => ["\\right", "\\middle"].includes(this.#peek());
    for (;;) {
      parts.push(this.#table(isEnd, false));
      const end = this.#next();
      parts.push(sign());
      if (end === "\\right") return node("mrow", null, parts);
    }
  }

  #environment() {
    const name = this.#words();
    const bare = name.replace(/\*$/, "");
    if (bare === "array" || bare === "tabular") this.#words();
    const isAligned = /^(?:aligned|align|alignat|split|gather|gathered|equation|multline|eqnarray)$/.test(bare);
    if (!isAligned && !Object.hasOwn(FENCES, bare) && bare !== "array") throw new Error(`the environment ${name} is not known`);
    const kind = isAligned ? ALIGNED : bare === "cases" ? { class: "is-cases" } : null;
    const made = this.#table(() => this.#peek() === "\\end", true, kind);
    this.#at++;
    if (this.#words() !== name) throw new Error("another environment ends");
    const [open, close] = FENCES[bare] ?? "";
    return open ? node("mrow", null, leaf("mo", open, { stretchy: "true" }), made, close.trim() ? leaf("mo", close, { stretchy: "true" }) : null) : made;
  }

  #inAlphabet(name) {
    const words = this.#words();
    const command = /^\\([a-zA-Z]+)$/.exec(words);
    if (command) return leaf("mi", LETTERS.get(command[1]) ?? words, { class: "is-bold" });
    const family = name === "mathscr" ? "mathcal" : name;
    const letter = (one) => {
      if (EARLIER.has(family + one)) return EARLIER.get(family + one);
      if (/[A-Z]/.test(one)) return String.fromCodePoint(ALPHABETS[name] + one.charCodeAt(0) - 65);
      if (/[a-z]/.test(one)) return String.fromCodePoint(ALPHABETS[name] + 26 + one.charCodeAt(0) - 97);
      return /\d/.test(one) && ALPHABETS[name] === 0x1d400 ? String.fromCodePoint(0x1d7ce + Number(one)) : one;
    };
    return leaf("mi", [...words].map(letter).join(""));
  }
}
