const main = document.getElementById("main");
const status = document.getElementById("status");
let data = null;

/** An element; its children are elements or texts, never markup. */
function el(tag, options, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

// controls, marks of direction, and what has no width: shown, because a page must not act on them
const HIDDEN = /(?:[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\uffff]|[\u{e0000}-\u{e007f}]|[\ud800-\udfff])+/gu;

/** A text as nodes, with what cannot be seen named. */
function visible(text) {
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    nodes.push(text.slice(last, match.index));
    const codes = Array.from(match[0], (one) => "U+" + one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0"));
    nodes.push(el("span", { class: "ctl" }, codes.join(" ")));
    last = match.index + match[0].length;
  }
  nodes.push(text.slice(last));
  return nodes;
}

const SHOWN = 6000;

/** A text that a policy or a tool wrote. A long one is cut, and a button shows all of it. */
function block(text, name, { class: kind = "", paint = visible } = {}) {
  const made = el("div", { class: "text " + kind, role: "group", "aria-label": name });
  made.append(...paint(text.slice(0, SHOWN)));
  if (text.length <= SHOWN) return made;
  const more = el("button", { type: "button", onclick: () => {
    made.replaceChildren(...paint(text));
    more.remove();
  } }, `Show all ${text.length.toLocaleString("en")} characters`);
  return el("div", {}, made, more);
}

/** What is made only when somebody opens it. */
function folded(title, make) {
  return el("details", { ontoggle: (event) => {
    const box = event.target;
    if (!box.open || box.children.length > 1) return;
    box.append(...[make()].flat(3).filter((node) => node));
    focusable(box);
    if (box.closest("figure")) drawCharts();  // which has become wider
  } }, el("summary", {}, title));
}

/** What scrolls can be reached by keys; what does not is no stop on the way. A result that is longer than its place says so. */
function focusable(inside) {
  for (const box of inside.querySelectorAll(".result")) {
    if (box.scrollHeight <= box.clientHeight + 1 || box.nextElementSibling) continue;
    const more = el("button", { type: "button", class: "more", onclick: () => { box.classList.add("whole"); more.remove(); } }, "all of it");
    box.after(more);
  }
  for (const box of inside.querySelectorAll(".text, .scroll")) {
    if (box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

const LINE = 1000;
const cut = (text) => (text.length > LINE ? text.slice(0, LINE) + " ..." : text);

/** A text in a line. A long one is cut there: layout of one inside a flexible box takes quadratic time. */
function bdi(text) {
  return el("bdi", {}, visible(cut(text)));
}

/** The whole of a text that is cut in its line; nothing if it is not. */
function whole(text, name) {
  return text !== null && text !== undefined && text.length > LINE ? [el("p", { class: "label" }, name), block(text, name)] : null;
}

const number = (value, digits = 3) => (value === null || value === undefined ? "-" : Number(value).toFixed(digits).replace(/^-(0\.?0*)$/, "$1"));
const exact = (value, digits = 9) => (value === null || value === undefined ? "-" : String(Number(Number(value).toPrecision(digits))));
// as many digits as tell one tick from the next
const tick = (value, step) => String(Number(value.toPrecision(Math.max(3, 2 + Math.ceil(Math.log10(Math.abs(value) / step || 1))))));
const signed = (value, digits = 3) => {
  const text = number(value, digits);
  return value === null || value === undefined || text.startsWith("-") ? text : "+" + text;
};

const sign = (value) => (value === null || value === undefined ? "none" : value > 5e-4 ? "up" : value < -5e-4 ? "down" : "none");

function advantage(value) {
  return el("span", { class: "adv " + sign(value) }, value === null || value === undefined ? "none" : signed(value));
}

function table(caption, heads, rows, options = {}) {
  return el("div", { class: "scroll", role: "region", "aria-label": caption },
    el("table", { class: options.class || "" },
      el("caption", { class: options.hideCaption ? "visually-hidden" : "" }, caption),
      el("thead", {}, el("tr", {}, heads.map((head) => (head instanceof HTMLTableCellElement ? head : el("th", { scope: "col" }, head))))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => (cell instanceof HTMLTableCellElement ? cell : el(i ? "td" : "th", i ? {} : { scope: "row" }, cell))))))));
}

const num = (text) => el("td", { class: "num" }, text);

function facts(pairs) {
  return el("dl", { class: "facts" }, pairs.filter((pair) => pair).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}


async function unpack(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

const kept = new Map();

/** The details of some groups. A few are kept, so that the page's memory does not grow. */
async function details(chunk) {
  if (!kept.has(chunk)) {
    const value = await unpack("d" + chunk);
    if (kept.size >= 6) kept.delete(kept.keys().next().value);
    kept.set(chunk, value);
  }
  return kept.get(chunk);
}
