const SORTS = new Map([  // no object: the address of the page may ask for __proto__
  ["order of the run", null],
  ["total reward", (i) => -at("total", i)],
  ["lowest total reward", (i) => at("total", i)],
  ["highest advantage", (i) => -Math.max(-Infinity, ...advantagesOf(i))],
  ["lowest advantage", (i) => Math.min(Infinity, ...advantagesOf(i))],
  ["tokens", (i) => -at("tokens", i)],
  ["turns", (i) => -at("advantages", i).length],
  ["latest iteration", (i) => -at("iteration", i)],
  ["first iteration", (i) => at("iteration", i)],
]);
// a click on the head of a column sorts by the first, another by the second
const HEADS = { iteration: ["latest iteration", "first iteration"], "total reward": ["total reward", "lowest total reward"], "turns and their advantages": ["highest advantage", "lowest advantage"] };
const advantagesOf = (i) => at("advantages", i).filter((value) => value !== null);
let lastList = "#/list";
let chosen = [];

const unique = (name) => [...new Set(columns()[name] || [])].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));

/** The address of the list with one thing changed, on its first page. */
function listWith(query, name, value) {
  const next = new URLSearchParams(query);
  next.delete("page");
  if (value === "") next.delete(name);
  else next.set(name, value);
  return listOf(next);
}

function filterForm(query) {
  const field = fieldOf(query);
  const select = (label, name, pairs) => el("label", {}, label, el("select", { name }, el("option", { value: "" }, "all"), pairs.map(([value, text]) => el("option", { value, selected: field(name) === String(value) }, text))));
  const form = el("form", { class: "filters", onsubmit: (event) => {
    event.preventDefault();
    const entries = [...new FormData(form)].filter(([, value]) => value !== "");
    location.hash = listOf(entries);
  }, onchange: (event) => { if (event.target.tagName === "SELECT") form.requestSubmit(); } },
    el("div", { class: "find" }, el("label", {}, "Text ", el("input", { type: "search", name: "q", id: "search", value: field("q") })),
      el("label", {}, el("input", { type: "checkbox", name: "in", value: "all", checked: field("in") === "all" }), " in turns and results too"),
      el("button", {}, "Show")),
    el("details", { open: folds(query) }, el("summary", {}, "More filters, and the order"), el("div", { class: "fields" },
      data.runs.length > 1 ? select("Run", "run", data.runs.map((run, n) => [n, run.name])) : null,
      select("Split", "split", unique("split").map((s) => [s, s])),
      select("Ended by", "ended_by", unique("ended_by").map((s) => [s, s])),
      select("Answer", "exact", [["1", "right"], ["0", "wrong"]]),
      select("Tool calls", "tools", [["1", "all succeeded"], ["part", "some succeeded"], ["0", "none succeeded"]]),
      select("Iteration", "iteration", unique("iteration").map((n) => [n, String(n)])),
      el("label", {}, "Total reward from", el("input", { type: "number", step: "any", name: "from", value: field("from") })),
      el("label", {}, "to", el("input", { type: "number", step: "any", name: "to", value: field("to") })),
      el("label", {}, "Sort by", el("select", { name: "sort" }, [...SORTS.keys()].map((name) => el("option", { value: name, selected: field("sort") === name }, name)))))));
  for (const name of ["kind", "won", "lost"]) if (field(name)) form.append(el("input", { type: "hidden", name, value: field(name) }));
  return form;
}

const fieldOf = (query) => (name) => query.get(name) || "";

/** The comparison whose questions are asked for, with the questions in which one side did better; null without one. */
function comparisonOf(query) {
  for (const which of ["won", "lost"]) {
    const number = fieldOf(query)(which);
    const one = /^\d+$/.test(number) ? data.comparisons[number] : null;
    if (!one) continue;
    const evaluations = new Set([...one.first, ...one.second].map(([run, iteration]) => `${run} ${iteration}`));
    return { better: which === "won" ? one.second : one.first, questions: new Set(one[which]), evaluations };
  }
  return null;
}

/** Whether a trajectory is asked for, but for its kind. */
async function filterOf(query, comparison) {
  const field = fieldOf(query);
  const q = field("q").toLowerCase();
  const inside = q && field("in") ? await everywhere(q) : null;
  return (i) => {
    const tools = at("tool_execution", i);
    if (field("run") && String(at("run", i)) !== field("run")) return false;
    for (const name of ["split", "ended_by", "iteration"]) if (field(name) && String(at(name, i)) !== field(name)) return false;
    if (comparison && !(at("split", i) === "val" && comparison.questions.has(at("question", i)) && comparison.evaluations.has(`${at("run", i)} ${at("iteration", i)}`))) return false;
    if (field("exact") && String(at("exact_match", i)) !== field("exact")) return false;
    if (field("tools") && field("tools") !== (tools === 1 ? "1" : tools ? "part" : "0")) return false;
    if (field("from") && at("total", i) < Number(field("from"))) return false;
    if (field("to") && at("total", i) > Number(field("to"))) return false;
    if (!q) return true;
    if (inside) return inside.has(i);
    return [...asked(i).slice(0, 2), at("answer", i) || ""].some((text) => text.toLowerCase().includes(q));
  };
}

/** How many trajectories there are of each kind, and the way to them. */
function kindChips(query, kinds) {
  const now = fieldOf(query)("kind");
  const chip = (kind, name, some) => el("li", {}, el("a", { href: listWith(query, "kind", kind), "aria-current": now === kind ? "true" : null }, kind ? swatch(kind) : null, `${name} ${some.toLocaleString("en")}`));
  const all = [...kinds.values()].reduce((a, b) => a + b, 0);
  return el("ul", { class: "kinds", "aria-label": "What attempts did" }, chip("", "all", all), KINDS.filter((kind) => kinds.has(kind) || kind === now).map((kind) => chip(kind, kind, kinds.get(kind) || 0)));
}

/** The head of a column, which sorts if the column has an order. */
function headOf(query, name) {
  const [first, second] = HEADS[name] || [];
  const now = fieldOf(query)("sort");
  if (!first) return name;
  return el("th", { scope: "col", "aria-sort": now === first ? "descending" : now === second ? "ascending" : "none" },
    el("a", { href: listWith(query, "sort", now === first ? second : first) }, name, now === first ? " ↓" : now === second ? " ↑" : ""));
}

/** The row of some trajectories that are alike. */
function rowOf(same, names) {
  const i = same[0];
  const cells = [
    data.runs.length > 1 ? bdi(data.runs[at("run", i)].name) : null,
    at("split", i), num(String(at("iteration", i))), at("answer", i) === null ? `none, ended by ${at("ended_by", i)}` : bdi(at("answer", i).slice(0, 60)),
    bdi(asked(i)[2].slice(0, 60)),
    at("exact_match", i) === null ? "-" : at("exact_match", i) === 1 ? el("span", { class: "right" }, "yes") : el("span", { class: "bad" }, "no"),
    num(number(at("total", i))), at("advantages", i).some((a) => a !== null) ? el("span", { class: "chips" }, at("advantages", i).map((a) => advantage(a))) : "-",
  ].filter((cell) => cell !== null);
  return [
    el("th", { scope: "row", class: "question" }, el("a", { href: link(i) }, visible(asked(i)[1].slice(0, 160))), same.length > 1 ? el("span", { class: "dim" }, ` ×${same.length}`) : null),
    ...cells.map((cell, n) => labelled(cell, names[n + 1])),
  ];
}

const PAGE = 50;

async function list(query) {
  const field = fieldOf(query);
  const comparison = comparisonOf(query);
  const wanted = await filterOf(query, comparison);
  const kinds = new Map();
  const found = [];
  for (let i = 0; i < recorded(); i++) {
    if (!wanted(i)) continue;
    const kind = kindOf(i);
    kinds.set(kind, (kinds.get(kind) || 0) + 1);
    if (!field("kind") || kind === field("kind")) found.push(i);
  }
  const sort = SORTS.get(field("sort")) || (comparison ? (i) => at("question", i) : null);
  if (sort) {
    const keys = new Map(found.map((i) => [i, sort(i)]));
    found.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
  }
  const rows = merged(found);
  chosen = rows.map((same) => same[0]);
  lastList = location.hash || "#/list";
  status.textContent = `${found.length} trajectories`;
  const pages = Math.max(1, Math.ceil(rows.length / PAGE));
  const shown = Math.min(Math.max(1, Number(field("page")) || 1), pages);
  const turn = (to, text) => (to < 1 || to > pages ? el("span", { class: "dim" }, text) : el("a", { href: listWith(query, "page", to) }, text));
  const names = ["question", data.runs.length > 1 ? "run" : null, "split", "iteration", "answer", "accepted", "right", "total reward", "turns and their advantages"].filter((head) => head);
  return [el("h1", {}, "Trajectories"), recorded() ? kindChips(query, kinds) : null,
    comparison ? el("p", {}, "Questions in which ", bdi(experimentName(comparison.better.map(([run]) => run))), " did better, with the attempts of both sides. ", el("a", { href: "#/list" }, "All trajectories")) : null,
    filterForm(query),
    el("p", {}, `${found.length.toLocaleString("en")} of ${recorded().toLocaleString("en")}`, rows.length < found.length ? ` attempts, in ${rows.length.toLocaleString("en")} rows: identical results for a question are grouped` : ""),
    rows.length ? [table("Trajectories", names.map((name) => headOf(query, name)), rows.slice((shown - 1) * PAGE, shown * PAGE).map((same) => rowOf(same, names)), { class: "list", hideCaption: true }),
      el("nav", { class: "pager", "aria-label": "Pages of the list" }, turn(shown - 1, "Previous"), el("span", {}, `page ${shown} of ${pages}`), turn(shown + 1, "Next"))] : el("p", {}, recorded() ? "No trajectory matches. Clear a filter." : "No run has a record.")];
}

/** Whether the fields are open: where one says something that chips and heads do not. */
const folds = (query) => [...query.keys()].some((name) => !["kind", "page", "sort", "won", "lost", "q", "in"].includes(name));

/** A cell that names its column, which a narrow screen shows. */
function labelled(cell, name) {
  const made = cell instanceof HTMLTableCellElement ? cell : el("td", {}, cell);
  made.dataset.label = name;
  return made;
}

/** Trajectories in their order, as lists: those of a group that ended the same and earned the same are together. */
function merged(order) {
  const found = new Map();
  for (const i of order) {
    const key = ["run", "split", "policy_version", "group", "answer", "ended_by", "total", "exact_match", "advantages"].map((name) => at(name, i)).join("\n");
    if (found.has(key)) found.get(key).push(i);
    else found.set(key, [i]);
  }
  return [...found.values()];
}

/** The numbers of the trajectories that have a text anywhere; each part is unpacked and let go. */
async function everywhere(q) {
  const hits = new Set();
  let chunk = null;
  let parts = null;
  let before = null;
  let member = 0;
  for (let i = 0; i < recorded(); i++) {
    if (at("chunk", i) !== chunk) {
      chunk = at("chunk", i);
      status.textContent = main.textContent = `Searching, ${i} of ${recorded()} ...`;
      parts = await unpack("d" + chunk);
    }
    const key = chunk + " " + at("place", i);
    member = key === before ? member + 1 : 0;
    before = key;
    const row = parts[at("place", i)].rows[member];
    const texts = [...asked(i).slice(0, 2), row.opening, row.answer, ...row.turns.flatMap((turn) => [turn.text, ...turn.results.map((r) => r.content)])];
    if (texts.some((text) => (text || "").toLowerCase().includes(q))) hits.add(i);
  }
  return hits;
}
