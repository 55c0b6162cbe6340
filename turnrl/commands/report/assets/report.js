"use strict";
(() => {
  const main = document.getElementById("main");
  const status = document.getElementById("status");
  let data = null;
  let charts = [];

  // ------------------------------------------------------------------ building

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
  function block(text, name) {
    const made = el("div", { class: "text", tabindex: "0", role: "group", "aria-label": name });
    made.append(...visible(text.slice(0, SHOWN)));
    if (text.length <= SHOWN) return made;
    const more = el("button", { type: "button", onclick: () => {
      made.replaceChildren(...visible(text));
      more.remove();
    } }, `Show all ${text.length.toLocaleString("en")} characters`);
    return el("div", {}, made, more);
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

  function advantage(value) {
    const kind = value === null || value === undefined ? "none" : value > 5e-4 ? "up" : value < -5e-4 ? "down" : "none";
    return el("span", { class: "adv " + kind }, value === null || value === undefined ? "none" : signed(value));
  }

  function table(caption, heads, rows, options = {}) {
    return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      el("table", { class: options.class || "" },
        el("caption", { class: options.hideCaption ? "visually-hidden" : "" }, caption),
        el("thead", {}, el("tr", {}, heads.map((head) => (head instanceof HTMLTableCellElement ? head : el("th", { scope: "col" }, head))))),
        el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, i) => (cell instanceof HTMLTableCellElement ? cell : el(i ? "td" : "th", i ? {} : { scope: "row" }, cell))))))));
  }

  const num = (text) => el("td", { class: "num" }, text);

  function facts(pairs) {
    return el("dl", { class: "facts" }, pairs.filter((pair) => pair).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  // ------------------------------------------------------------------- unpacking

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

  // ---------------------------------------------------------------------- charts

  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 2], [1, 4]];
  const colour = (n) => getComputedStyle(document.documentElement).getPropertyValue("--c" + (n % 6)).trim();
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** An element of a drawing; its children are elements or texts. */
  function drawn(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.flat(2));
    return made;
  }

  function sample(n) {
    return drawn("svg", { width: 36, height: 10, "aria-hidden": "true" },
      drawn("line", { x1: 0, x2: 36, y1: 5, y2: 5, "stroke-width": 2.5, stroke: `var(--c${n % 6})`, "stroke-dasharray": DASHES[n % 6].join(" ") }));
  }

  /** The curve of one experiment: iterations, and for each the mean, least and most over its runs.
   *  A run counts once: of several rows of an iteration its last one does. */
  function curve(members, name) {
    const at = new Map();
    for (const member of members) {
      const own = new Map(data.runs[member].metrics.filter((row) => name in row).map((row) => [row.iteration, row[name]]));
      for (const [x, value] of own) at.set(x, [...(at.get(x) || []), value]);
    }
    return [...at.entries()].sort((a, b) => a[0] - b[0]).map(([x, values]) => ({
      x, mean: values.reduce((a, b) => a + b, 0) / values.length, low: Math.min(...values), high: Math.max(...values), whole: values.length === members.length,
      runs: values.length === members.length ? "" : ` (${values.length} of ${members.length} runs)` }));
  }

  function chart(title, names, range) {
    const lines = [];
    data.experiments.forEach((members, n) => names.forEach((name, k) => {
      const points = curve(members, name);
      if (points.length) lines.push({ points, n, name, main: k === 0, members });
    }));
    if (!lines.length) return null;
    const xs = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
    const series = [{}];
    const values = [xs];
    const bands = [];
    for (const line of lines) {
      const at = new Map(line.points.map((p) => [p.x, p]));
      const pick = (part, whole = true) => xs.map((x) => (at.has(x) && at.get(x).whole === whole ? at.get(x)[part] : null));
      const stroke = () => colour(line.n);
      values.push(pick("mean"));
      series.push({ stroke, width: line.main ? 2.5 : 1, dash: DASHES[line.n % 6], spanGaps: true, points: { show: line.main && line.points.length < 30, size: 6, stroke, fill: stroke } });
      if (line.points.some((p) => !p.whole)) {
        values.push(pick("mean", false));
        series.push({ stroke, width: 0, points: { show: true, size: 5, width: 1, stroke, fill: "transparent" } });
      }
      if (line.members.length > 1) {
        for (const part of ["high", "low"]) {
          values.push(pick(part));
          series.push({ stroke: "transparent", width: 0, spanGaps: true, points: { show: false } });
        }
        bands.push({ series: [series.length - 2, series.length - 1], fill: () => colour(line.n) + "33" });
      }
    }
    const marks = data.experiments.flatMap((members, n) => members.flatMap((member) => data.runs[member].alarms
      .filter((alarm) => alarm.figures.some((name) => names.includes(name))).map((alarm) => ({ n, x: alarm.began }))));
    const box = el("div", { class: "plot" });
    const label = (line) => experimentName(line.members) + (names.length > 1 ? ", " + line.name : "");
    const last = lines.map((line) => `${label(line)}: from ${number(line.points[0].mean)}${line.points[0].runs} to ${number(line.points.at(-1).mean)}${line.points.at(-1).runs}`);
    box.setAttribute("role", "img");
    const told = marks.length ? ` Alarm from iteration ${marks.map((mark) => mark.x).join(", ")} on.` : "";
    box.setAttribute("aria-label", `${title} by iteration. ${last.join("; ")}.${told}`);
    const readout = el("p", { class: "readout", "aria-hidden": "true" });
    const rows = xs.map((x) => [String(x), ...lines.map((line) => {
      const point = line.points.find((p) => p.x === x);
      return num(point ? number(point.mean, 4) + (line.members.length > 1 ? ` (${number(point.low)} to ${number(point.high)})` : "") + point.runs : "");
    })]);
    const numbers = el("details", { ontoggle: (event) => {
      if (event.target.open && numbers.children.length === 1) numbers.append(table(`${title} by iteration`, ["iteration", ...lines.map(label)], rows));
    } }, el("summary", {}, "Numbers"));
    const made = el("figure", {}, el("figcaption", {}, title), box, readout, numbers);
    charts.push({ box, draw: () => new uPlot({
      width: Math.max(box.clientWidth, 200), height: 180, series, bands, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { time: false }, y: range ? { range } : {} },
      axes: [0, 1].map((axis) => ({ stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line") }, size: axis ? 66 : 34, ...(axis ? { values: (_, ticks) => ticks.map((v) => (v === null ? "" : tick(v, ticks[1] - ticks[0]))) } : {}) })),
      hooks: { draw: [(plot) => marks.forEach((mark) => drawMark(plot, mark))], setCursor: [(plot) => {
        const i = plot.cursor.idx;
        readout.textContent = i === null || i === undefined ? "" : `iteration ${xs[i]}: ` + lines.map((line) => {
          const point = line.points.find((p) => p.x === xs[i]);
          return point ? `${label(line)} ${number(point.mean)}${point.runs}` : null;
        }).filter((text) => text).join(", ");
      }] },
    }, values, box) });
    return made;
  }

  /** A line where an alarm began. */
  function drawMark(plot, mark) {
    const { ctx, bbox } = plot;
    const x = plot.valToPos(mark.x, "x", true);
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour(mark.n);
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textAlign = x > bbox.left + bbox.width / 2 ? "right" : "left";
    ctx.fillText(" alarm ", x, bbox.top + 11 * devicePixelRatio);
    ctx.restore();
  }

  function drawCharts() {
    for (const one of charts) {
      if (one.plot) one.plot.destroy();
      one.plot = one.draw();
    }
  }

  function experimentName(members) {
    const names = members.map((n) => data.runs[n].name);
    return names.length === 1 ? names[0] : `${names[0]} and ${names.length - 1} more seed${names.length > 2 ? "s" : ""}`;
  }

  // -------------------------------------------------------------------- overview

  const CURVES = [["tool execution", "tool_execution"], ["answer in results", "answer_in_results"], ["exact match", "exact_match"], ["format", "format"]];
  const APART = ["epoch", "iteration", "step", ...CURVES.flatMap(([, name]) => ["val/" + name, "train/" + name])];
  // a metric is in the first part that takes it
  const PARTS = [
    ["Rewards", /^reward\//],
    ["Rollouts", /^rollout\/(?!seconds|tokens_per_s|probe_tokens|redrawn)|\/findable$/],
    ["Learning", /^train\/(?!seconds|memory)|^critic\//],
    ["Time, tokens and memory", /^(rollout|train|time|memory)\//],
    ["Others", /^(?!val\/reward\/)/],
  ];

  // what an attempt did, in the order of the bars; those without a search that can find an answer are right or wrong
  const KINDS = ["found it, right", "searched, right", "found it, answered wrong", "searched, not found", "searched, wrong", "guessed, right", "guessed, wrong", "right", "wrong", "without an accepted answer"];
  let searches = null;

  function kindOf(i) {
    if (!searches) {
      searches = new Set();
      columns().run.forEach((run, k) => { if (at("answer_in_results", k) !== null) searches.add(run); });
    }
    if (at("exact_match", i) === null) return "without an accepted answer";
    const end = at("exact_match", i) === 1 ? "right" : "wrong";
    if (!searches.has(at("run", i))) return end;
    if (!at("tool_execution", i)) return "guessed, " + end;
    const found = at("answer_in_results", i);
    if (found === null) return "searched, " + end;  // the question holds its answer, or asks for yes or no
    return found !== 1 ? "searched, not found" : end === "right" ? "found it, right" : "found it, answered wrong";
  }

  const swatch = (kind) => el("span", { class: "swatch k" + KINDS.indexOf(kind), "aria-hidden": "true" });

  function listOf(filters) {
    return "#/list?" + new URLSearchParams(filters);
  }

  /** A bar for each iteration of a run: the shares of what its recorded training attempts did. */
  function did(run) {
    const bars = new Map();
    const count = columns().run ? columns().run.length : 0;
    for (let i = 0; i < count; i++) {
      if (at("run", i) !== run || at("split", i) !== "train") continue;
      const iteration = at("iteration", i), kind = kindOf(i);
      if (!bars.has(iteration)) bars.set(iteration, new Map());
      bars.get(iteration).set(kind, (bars.get(iteration).get(kind) || 0) + 1);
    }
    if (!bars.size) return null;
    const iterations = [...bars.keys()].sort((a, b) => a - b);
    const height = 120;
    const kinds = KINDS.filter((kind) => iterations.some((one) => bars.get(one).has(kind)));
    const rects = iterations.map((iteration, x) => {
      const counts = bars.get(iteration);
      const all = [...counts.values()].reduce((a, b) => a + b, 0);
      let y = height;
      return kinds.filter((kind) => counts.has(kind)).map((kind) => {
        const tall = height * counts.get(kind) / all;
        y -= tall;
        const rect = drawn("rect", { x: x + 0.04, y, width: 0.92, height: tall, class: "k" + KINDS.indexOf(kind) }, drawn("title", {}, `iteration ${iteration}: ${kind}, ${counts.get(kind)} of ${all}`));
        rect.addEventListener("click", () => { location.hash = listOf({ ...(data.runs.length > 1 ? { run } : {}), split: "train", iteration, kind }); });
        return rect;
      });
    });
    const last = iterations.length - 1;
    const said = kinds.map((kind) => `${kind} ${bars.get(iterations[0]).get(kind) || 0} to ${bars.get(iterations[last]).get(kind) || 0}`).join("; ");
    return el("figure", { class: "did" }, data.runs.length > 1 ? el("figcaption", {}, bdi(data.runs[run].name)) : null,
      drawn("svg", { viewBox: `0 0 ${iterations.length} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `What the attempts did, from iteration ${iterations[0]} to ${iterations[last]}: ${said}` }, rects),
      el("p", { class: "ends" }, el("span", {}, `iteration ${iterations[0]}`), last ? el("span", {}, String(iterations[last])) : null));
  }

  function deeds() {
    const bars = data.runs.map((_, n) => did(n)).filter((one) => one);
    if (!bars.length) return [];
    const count = columns().run.length;
    const there = new Set(Array.from({ length: count }, (_, i) => kindOf(i)));
    return [
      el("h2", {}, "What the attempts did"),
      el("p", {}, "Recorded attempts at training questions, a bar for each iteration. Click a part of a bar to read these attempts."),
      el("div", { class: "grid deeds" }, bars),
      el("ul", { class: "legend", "aria-label": "What attempts did" }, KINDS.filter((kind) => there.has(kind)).map((kind) => el("li", {}, el("a", { href: listOf({ kind }) }, swatch(kind), kind)))),
    ];
  }

  /** A run in a sentence: where it began and where it is. */
  function sentence(run) {
    const told = [["exact match", "exact_match"], ["tool execution", "tool_execution"]].map(([title, name]) => {
      const points = run.metrics.filter((row) => row["val/" + name] !== undefined && row["val/" + name] !== null);
      return points.length > 1 ? `${title} ${number(points[0]["val/" + name], 2)} to ${number(points.at(-1)["val/" + name], 2)}` : null;
    }).filter((text) => text);
    const most = Math.max(...run.metrics.map((row) => row.iteration));
    return told.length ? el("p", {}, data.runs.length > 1 ? [el("strong", {}, bdi(run.name)), ": "] : null, `${told.join(", ")} in ${most} iteration${most === 1 ? "" : "s"}, on validation questions.`) : null;
  }

  function earned() {
    const every = data.runs.flatMap((run) => run.earned.filter((one) => one.parts.length).map((one) => ({ run, ...one })));
    if (!every.length) return [];
    const known = (value) => num(value === null ? "-" : number(value));
    return [
      el("h2", {}, "What turn rewards paid"),
      el("p", {}, "Averages over the recorded attempts of an iteration that called a tool, and over the others. The correlation is that of the reward with the outcome, over all of them."),
      table("What turn rewards paid", ["run", "iteration", "turn reward", "with a call", "without", "correlation"], every.flatMap((one) => one.parts.map((part) => [
        bdi(one.run.name), num(String(one.iteration)), el("code", {}, part.name), known(part.acted), known(part.idle), known(part.correlation)])), { class: "wide", hideCaption: true }),
      ...every.filter((one) => one.verdict).map((one) => el("p", {}, bdi(one.run.name), `, iteration ${one.iteration}: ${one.verdict}.`)),
    ];
  }

  function overview() {
    const problems = data.runs.flatMap((run) => run.problems.map((text) => el("p", { class: "problem" }, el("strong", {}, bdi(run.name), ": "), el("bdi", {}, visible(text)))));
    const alarms = data.runs.flatMap((run) => run.alarms.map((alarm) => el("p", { class: "problem" }, el("strong", {}, bdi(run.name), ", alarm: "), el("bdi", {}, visible(alarm.text)))));
    const every = [...new Set(data.runs.flatMap((run) => run.metrics.flatMap((row) => Object.keys(row))))].sort();
    const bands = data.experiments.some((members) => members.length > 1);
    const legend = el("ul", { class: "legend", "aria-label": "Lines" }, data.experiments.map((members, n) => el("li", {}, sample(n), bdi(experimentName(members)))));
    const changed = Object.entries(data.differences);
    const count = data.trajectories.run ? data.trajectories.run.length : 0;
    const shown = every.filter((name) => !APART.includes(name));
    const partOf = (name) => PARTS.findIndex(([, takes]) => takes.test(name));
    const flat = (name) => data.runs.every((run) => run.metrics.every((row) => !row[name]));
    const section = (title, names) => {
      const zero = names.filter(flat);
      if (!names.length) return [];
      return [el("h2", {}, title), el("div", { class: "grid" }, names.filter((name) => !flat(name)).map((name) => chart(name.replace(/^reward\//, ""), [name]))),
        zero.length ? el("p", { class: "dim" }, `0 all the time: ${zero.join(", ")}.`) : null];
    };
    return [
      el("h1", {}, data.runs.length === 1 ? bdi(data.runs[0].name) : `${data.runs.length} runs`),
      ...data.runs.map(sentence),
      el("p", { class: "dim" }, `Written ${data.written}. `, count ? el("a", { href: "#/list" }, `${count.toLocaleString("en")} recorded trajectories`) : "There are no recorded trajectories", "."),
      ...problems,
      ...alarms,
      ...deeds(),
      el("h2", {}, "Runs"),
      table("Runs", ["run", "folder", "iterations", ...CURVES.map(([name]) => `${name}, last`)], data.runs.map((run) => {
        const last = (name) => { const row = run.metrics.findLast((r) => name in r); return row ? number(row[name]) : "-"; };
        const rows = run.metrics.map((row) => row.iteration);
        return [bdi(run.name), bdi(run.folder), num(rows.length ? String(Math.max(...rows)) : "-"), ...CURVES.map(([, name]) => num(last("val/" + name) !== "-" ? last("val/" + name) : last("train/" + name)))];
      }), { class: "wide", hideCaption: true }),
      changed.length ? [el("h2", {}, "What differs between their recipes"), table("Settings that differ", ["setting", ...data.runs.map((run) => bdi(run.name))], changed.map(([name, values]) => [el("code", {}, name), ...values.map((value) => bdi(value))]), { class: "wide", hideCaption: true })] : data.runs.length > 1 ? el("p", {}, "Their recipes do not differ.") : null,
      ...earned(),
      el("h2", {}, "Curves"),
      el("p", {}, "Thick lines with points: greedy answers to validation questions. Thin lines: sampled attempts at training questions.", bands ? " Bands: from the lowest to the highest of the runs that differ in their seeds alone. Open points: not all of them have that iteration." : ""),
      legend,
      el("div", { class: "grid" }, CURVES.map(([title, name]) => chart(title, ["val/" + name, "train/" + name], [0, 1]))),
      ...PARTS.flatMap(([title], k) => section(title, shown.filter((name) => partOf(name) === k))),
    ];
  }

  // ------------------------------------------------------------------------ list

  const columns = () => data.trajectories;
  const at = (name, i) => columns()[name][i];
  const asked = (i) => data.questions[at("question", i)];

  function link(i) {
    const place = [at("run", i), at("split", i), at("policy_version", i), at("group", i), at("member", i)];
    return "#/t/" + place.map(encodeURIComponent).join("/");
  }

  function groupLink(i) {
    return link(i).replace("#/t/", "#/g/").replace(/\/[^/]*$/, "");
  }

  let places = null;
  function placed() {
    if (!places) {
      places = new Map();
      const count = columns().run ? columns().run.length : 0;
      for (let i = 0; i < count; i++) places.set(link(i), i);
    }
    return places;
  }

  const SORTS = new Map([  // no object: the address of the page may ask for __proto__
    ["order of the run", null],
    ["total reward", (i) => -at("total", i)],
    ["lowest total reward", (i) => at("total", i)],
    ["largest advantage", (i) => -Math.max(0, ...at("advantages", i).map((a) => Math.abs(a || 0)))],
    ["tokens", (i) => -at("tokens", i)],
    ["turns", (i) => -at("advantages", i).length],
    ["latest iteration", (i) => -at("iteration", i)],
  ]);
  let chosen = [];

  const unique = (name) => [...new Set(columns()[name] || [])].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b))));

  async function list(query) {
    const field = (name) => query.get(name) || "";
    const select = (label, name, pairs) => el("label", {}, label, el("select", { name }, el("option", { value: "" }, "all"), pairs.map(([value, text]) => el("option", { value, selected: field(name) === String(value) }, text))));
    const form = el("form", { class: "filters", onsubmit: (event) => {
      event.preventDefault();
      const entries = [...new FormData(form)].filter(([, value]) => value !== "");
      location.hash = listOf(entries);
    }, onchange: (event) => { if (event.target.tagName === "SELECT") form.requestSubmit(); } },
      el("label", {}, "Text", el("input", { type: "search", name: "q", id: "search", value: field("q") })),
      el("label", { class: "check" }, el("input", { type: "checkbox", name: "in", value: "all", checked: field("in") === "all" }), "Search turns and results too"),
      data.runs.length > 1 ? select("Run", "run", data.runs.map((run, n) => [n, run.name])) : null,
      select("Split", "split", unique("split").map((s) => [s, s])),
      select("Ended by", "ended_by", unique("ended_by").map((s) => [s, s])),
      select("Answer", "exact", [["1", "right"], ["0", "wrong"]]),
      select("Tool calls", "tools", [["1", "all succeeded"], ["part", "some succeeded"], ["0", "none succeeded"]]),
      select("Iteration", "iteration", unique("iteration").map((n) => [n, String(n)])),
      el("label", {}, "Total reward from", el("input", { type: "number", step: "any", name: "from", value: field("from") })),
      el("label", {}, "to", el("input", { type: "number", step: "any", name: "to", value: field("to") })),
      el("label", {}, "Sort by", el("select", { name: "sort" }, [...SORTS.keys()].map((name) => el("option", { value: name, selected: field("sort") === name }, name)))),
      el("button", {}, "Show"));
    if (field("kind")) form.append(el("input", { type: "hidden", name: "kind", value: field("kind") }));
    const q = field("q").toLowerCase();
    const inside = q && field("in") ? await everywhere(q) : null;
    const wanted = (i) => {
      const tools = at("tool_execution", i);
      if (field("run") && String(at("run", i)) !== field("run")) return false;
      for (const name of ["split", "ended_by", "iteration"]) if (field(name) && String(at(name, i)) !== field(name)) return false;
      if (field("exact") && String(at("exact_match", i)) !== field("exact")) return false;
      if (field("tools") && field("tools") !== (tools === 1 ? "1" : tools ? "part" : "0")) return false;
      if (field("from") && at("total", i) < Number(field("from"))) return false;
      if (field("to") && at("total", i) > Number(field("to"))) return false;
      if (!q) return true;
      if (inside) return inside.has(i);
      return [...asked(i), at("answer", i) || ""].some((text) => text.toLowerCase().includes(q));
    };
    const count = columns().run ? columns().run.length : 0;
    chosen = [];
    const kinds = new Map();
    let fitting = 0;
    for (let i = 0; i < count; i++) {
      if (!wanted(i)) continue;
      const kind = kindOf(i);
      fitting += 1;
      kinds.set(kind, (kinds.get(kind) || 0) + 1);
      if (!field("kind") || kind === field("kind")) chosen.push(i);
    }
    const chip = (kind, name, some) => {
      const next = new URLSearchParams(query);
      next.delete("page");
      next.delete("kind");
      if (kind) next.set("kind", kind);
      return el("li", {}, el("a", { href: listOf(next), "aria-current": field("kind") === kind ? "true" : null }, kind ? swatch(kind) : null, `${name} ${some.toLocaleString("en")}`));
    };
    const chips = el("ul", { class: "kinds", "aria-label": "What attempts did" }, chip("", "all", fitting), KINDS.filter((kind) => kinds.has(kind) || kind === field("kind")).map((kind) => chip(kind, kind, kinds.get(kind) || 0)));
    const sort = SORTS.get(field("sort"));
    if (sort) {
      const keys = new Map(chosen.map((i) => [i, sort(i)]));
      chosen.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
    }
    const size = 50;
    const pages = Math.max(1, Math.ceil(chosen.length / size));
    const shown = Math.min(Math.max(1, Number(field("page")) || 1), pages);
    const turn = (to, text) => {
      const next = new URLSearchParams(query);
      next.set("page", to);
      return to < 1 || to > pages ? el("span", { class: "dim" }, text) : el("a", { href: listOf(next) }, text);
    };
    const pager = () => el("nav", { class: "pager", "aria-label": "Pages of the list" }, turn(shown - 1, "Previous"), el("span", {}, `page ${shown} of ${pages}`), turn(shown + 1, "Next"));
    const heads = ["question", data.runs.length > 1 ? "run" : null, "split", "iteration", "answer", "right", "ended by", "total reward", "turns and their advantages"].filter((head) => head);
    const rows = chosen.slice((shown - 1) * size, shown * size).map((i) => [
      el("th", { scope: "row", class: "question" }, el("a", { href: link(i) }, visible(asked(i)[1].slice(0, 160)))),
      data.runs.length > 1 ? bdi(data.runs[at("run", i)].name) : null,
      at("split", i), num(String(at("iteration", i))), at("answer", i) === null ? "none" : bdi(at("answer", i).slice(0, 60)),
      at("exact_match", i) === 1 ? el("span", { class: "right" }, "yes") : el("span", { class: "bad" }, "no"),
      at("ended_by", i), num(number(at("total", i))), el("span", { class: "chips" }, at("advantages", i).map((a) => advantage(a))),
    ].filter((cell) => cell !== null));
    status.textContent = `${chosen.length} trajectories`;
    const narrow = window.matchMedia("(max-width: 40rem)").matches;
    return [el("h1", {}, "Trajectories"), count ? chips : null, el("details", { class: "filters", open: !narrow }, el("summary", {}, "Search, filter and sort"), form),
      el("p", {}, `${chosen.length.toLocaleString("en")} of ${count.toLocaleString("en")}`),
      rows.length ? [pager(), table("Trajectories", heads, rows, { class: "list", hideCaption: true }), pager()] : el("p", {}, count ? "None fits. Choose less." : "No run has a record.")];
  }

  /** The numbers of the trajectories that have a text anywhere; each part is unpacked and let go. */
  async function everywhere(q) {
    const hits = new Set();
    const count = columns().run ? columns().run.length : 0;
    let chunk = null;
    let parts = null;
    let before = null;
    let member = 0;
    for (let i = 0; i < count; i++) {
      if (at("chunk", i) !== chunk) {
        chunk = at("chunk", i);
        status.textContent = main.textContent = `Searching, ${i} of ${count} ...`;
        parts = await unpack("d" + chunk);
      }
      const key = chunk + " " + at("place", i);
      member = key === before ? member + 1 : 0;
      before = key;
      const row = parts[at("place", i)].rows[member];
      const texts = [...asked(i), row.opening, row.answer, ...row.turns.flatMap((turn) => [turn.text, ...turn.results.map((r) => r.content)])];
      if (texts.some((text) => (text || "").toLowerCase().includes(q))) hits.add(i);
    }
    return hits;
  }

  // ----------------------------------------------------------------------- group

  function membersOf(i) {
    const same = ["run", "split", "policy_version", "group"];
    const found = [];
    for (let j = i; j >= 0 && same.every((name) => at(name, j) === at(name, i)); j--) found.unshift(j);
    for (let j = i + 1; j < columns().run.length && same.every((name) => at(name, j) === at(name, i)); j++) found.push(j);
    return found;
  }

  async function group(path) {
    const first = placed().get("#/t/" + path + "/0");
    if (first === undefined) return missing();
    const detail = (await details(at("chunk", first)))[at("place", first)];
    const members = membersOf(first);
    chosen = members;
    return [
      el("h1", {}, bdi(asked(first)[1])),
      whole(asked(first)[1], "question"),
      sameOpening(detail) ? opening(detail.rows[0].opening) : null,
      groupFacts(first, detail),
      whole(accepted(detail), "accepted"),
      el("p", {}, `${members.length} attempt${members.length > 1 ? "s" : ""} at one question, side by side.`),
      el("div", { class: "attempts", tabindex: "0", role: "region", "aria-label": "Attempts" }, members.map((i, n) => {
        const row = detail.rows[n];
        return el("section", { class: "attempt" },
          el("header", {}, el("h2", {}, el("a", { href: link(i) }, `Attempt ${n + 1}`)), verdict(i)),
          facts([["total", number(at("total", i))], ["ended by", at("ended_by", i)], ["answer", row.answer === null ? "none" : bdi(row.answer)]]),
          whole(row.answer, "answer"),
          sameOpening(detail) ? null : opening(row.opening),
          row.turns.map((turn, k) => el("div", {},
            el("p", { class: "label" }, `turn ${k + 1} `, advantage(turn.advantage), ` reward ${number(turn.reward)}`),
            block(turn.text, `Turn ${k + 1} of attempt ${n + 1}`),
            turn.results.map((result) => el("details", {}, el("summary", {}, result.ok ? "result" : "error"), block(result.content, "Result"))))));
      })),
    ];
  }

  // what an environment showed before the first turn, where it is shown once for all attempts
  const opening = (text) => (text ? [el("p", { class: "label" }, "opening"), block(text, "Opening")] : null);
  const sameOpening = (detail) => detail.rows.every((row) => row.opening === detail.rows[0].opening);

  function verdict(i) {
    return at("exact_match", i) === 1 ? el("span", { class: "right" }, "right") : el("span", { class: "bad" }, "wrong");
  }

  const accepted = (detail) => (detail.rows[0].answers || []).slice(0, 8).join(" | ");

  function groupFacts(i, detail) {
    const run = data.runs[at("run", i)];
    return facts([
      ["run", bdi(run.name)], ["split", at("split", i)], ["iteration", String(at("iteration", i))],
      ["accepted", bdi(accepted(detail))],
      detail.mean === null ? null : ["total reward of the group", `mean ${number(detail.mean)}, deviation ${number(detail.std)}`],
      detail.estimator ? ["estimator", bdi(detail.estimator.name)] : null,
    ]);
  }

  // ------------------------------------------------------------------ trajectory

  async function trajectory(path) {
    const i = placed().get("#/t/" + path);
    if (i === undefined) return missing();
    const detail = (await details(at("chunk", i)))[at("place", i)];
    const members = membersOf(i);
    const n = members.indexOf(i);
    const row = detail.rows[n];
    if (!chosen.includes(i)) chosen = members;
    const here = chosen.indexOf(i);
    const step = (by, text) => { const to = chosen[here + by]; return to === undefined ? el("span", { class: "dim" }, text) : el("a", { href: link(to) }, text); };
    return [
      el("nav", { class: "pager", "aria-label": "Trajectories" }, step(-1, "Previous"), step(1, "Next"), members.length > 1 ? el("a", { href: groupLink(i) }, `Group of ${members.length}`) : null, el("a", { href: "#/list" }, "List")),
      el("h1", {}, bdi(asked(i)[1])),
      whole(asked(i)[1], "question"),
      opening(row.opening),
      groupFacts(i, detail),
      whole(accepted(detail), "accepted"),
      facts([["attempt", `${n + 1} of ${members.length}`], ["answer", row.answer === null ? "none" : bdi(row.answer)], ["", verdict(i)], ["ended by", at("ended_by", i)],
        ["outcome", exact(at("outcome", i), 6)], ["total", exact(at("total", i), 6)], ["sampled tokens", String(at("tokens", i))]]),
      whole(row.answer, "answer"),
      (row.rewards || []).length ? table("Rewards of the whole trajectory", ["reward", "value"], row.rewards.map((r) => [bdi(r.name), num(exact(r.value))])) : null,
      (row.figures || []).length ? table("Figures of its tools", ["figure", "values"], row.figures.map((f) => [bdi(f.name), num(f.values.map(exact).join(", "))])) : null,
      row.turns.map((turn, k) => turnCard(turn, k, n, row, detail)),
    ];
  }

  function turnCard(turn, k, n, row, detail) {
    const shared = k < row.begins;
    return el("section", { class: "turn" },
      el("header", {}, el("h2", {}, `Turn ${k + 1}`), el("span", {}, "advantage ", advantage(turn.advantage)), el("span", { class: "dim" }, [`${turn.tokens} tokens${turn.cut ? ", cut" : ""}`,
        (row.sample_tokens || []).length > 1 ? `history ${turn.sample + 1} of ${row.sample_tokens.length}` : null,
        turn.world_reward ? `the world paid ${exact(turn.world_reward)}` : null].filter(Boolean).join(", "))),
      shared ? el("p", { class: "dim" }, "Shared with the trajectory that this one branched off: learned from there.") : null,
      el("p", { class: "label" }, "said"), block(turn.text, `Turn ${k + 1}, said`),
      turn.format_error ? el("p", {}, el("span", { class: "bad" }, "form: "), bdi(turn.format_error)) : null,
      whole(turn.format_error, "form"),
      turn.calls.map((call, c) => [
        el("p", { class: "label" }, "called ", el("code", {}, bdi(call.name || "?")), call.error ? [" ", el("span", { class: "bad" }, bdi(call.error))] : "", call.mended ? [" ", el("span", { class: "bad" }, bdi(call.mended))] : ""),
        whole(call.name, "name of the tool"), whole(call.error, "error of the call"), whole(call.mended, "what was wrong with the call"),
        block(call.arguments || "", "Arguments of the call"),
        turn.results[c] ? [el("p", { class: "label" }, turn.results[c].ok ? "read" : el("span", { class: "bad" }, "read, an error")), block(turn.results[c].content, "Result of the call")] : el("p", { class: "label" }, "not run: nothing would have read the result"),
      ]),
      turn.calls.length ? null : turn.results.map((result) => block(result.content, "Result")),
      tokens(row, k),
      shared ? null : why(turn, k, n, detail));
  }

  function tokens(row, k) {
    if (!row.turn_index) return null;
    const rows = [];
    row.turn_index.forEach((turn, t) => { if (turn === k) rows.push([String(rows.length + 1), num(number(Math.exp(row.learner_logprobs[t]), 4)), num(number(row.entropies[t], 4))]); });
    return el("details", { ontoggle: (event) => {
      const box = event.target;
      if (box.open && box.children.length === 1) box.append(table("Probability and entropy of each sampled token", ["token", "probability", "entropy, nats"], rows));
    } }, el("summary", {}, `Tokens: probability and entropy of ${rows.length}`));
  }

  function equation(terms) {
    const text = terms.map((t) => `${exact(t.weight)} × (${exact(t.value)} - ${exact(t.baseline)}) / ${exact(t.divisor)}`);
    return text.length ? text.join("  +  ") : "0";
  }

  function why(turn, k, n, detail) {
    if (!detail.why.length) return null;
    const own = detail.why.find((one) => one.own), others = detail.why.filter((one) => !one.own);
    const parts = (turn.rewards || []).map((r) => [bdi(r.name), num(exact(r.value))]);
    const terms = own.terms ? own.terms[n][k] : null;
    return el("details", { open: true }, el("summary", {}, "Why this advantage"),
      parts.length ? table("Rewards of this turn", ["reward", "value"], parts) : el("p", {}, `Reward of this turn: ${exact(turn.reward)}`),
      terms ? [
        table(`What ${own.name} compares`, ["value", "weight", "this one", "compared with", "divided by", "mean of the set", "deviation", "members", "gives"],
          terms.map((t) => [t.name, num(exact(t.weight)), num(exact(t.value)), num(exact(t.baseline)), num(exact(t.divisor)), num(exact(t.mean)), num(exact(t.std)), num(String(t.count)), el("td", { class: "num" }, signed(t.weight * (t.value - t.baseline) / t.divisor, 4))])),
        el("p", { class: "equation" }, `advantage = ${equation(terms)} = ${exact(own.advantages[n][k])}`),
      ] : el("p", {}, `${own.name}, this run: ${own.unexplained}. The recorded advantage is ${exact(turn.advantage)}.`),
      el("details", {}, el("summary", {}, "What other estimators would give this turn"),
        others.length ? null : el("p", {}, "None is shown: the record does not say which attempts of this group are branches."),
        table("Other estimators", ["estimator", "advantage", "how"], others.map((one) => [one.name,
          one.missing || !one.advantages[n] ? el("td", { class: "num" }, "-") : el("td", { class: "num" }, advantage(one.advantages[n][k])),
          one.missing || (!one.advantages[n] ? "it has no branches: only the attempts that branched off no other are compared" : one.terms ? el("span", { class: "equation" }, one.terms[n][k].map((t) => t.name).join(" + ") + ": " + equation(one.terms[n][k])) : one.unexplained)]), { hideCaption: true })));
  }

  function missing() {
    return [el("h1", {}, "Not in this report"), el("p", {}, "The address names a trajectory that is not here. ", el("a", { href: "#/list" }, "See those that are"), ".")];
  }

  // ---------------------------------------------------------------------- moving

  let going = 0;
  async function show() {
    const turn = ++going;
    const [path, query] = (location.hash.slice(1) || "/").split("?");
    if (path && !path.startsWith("/")) return;
    charts.forEach((one) => one.plot && one.plot.destroy());
    charts = [];
    let made;
    try {
      if (path.startsWith("/t/")) made = await trajectory(path.slice(3));
      else if (path.startsWith("/g/")) made = await group(path.slice(3));
      else if (path === "/list") made = await list(new URLSearchParams(query || ""));
      else made = overview();
    } catch (error) {
      made = [el("h1", {}, "This part cannot be shown"), el("p", {}, String(error))];
    }
    if (turn !== going) return;
    main.replaceChildren(...made.flat(3).filter((node) => node));
    for (const a of document.querySelectorAll("header nav a")) {
      if (a.getAttribute("href") === "#" + path) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    }
    drawCharts();
    const head = main.querySelector("h1");
    document.title = (head ? head.textContent.slice(0, 60) + " - " : "") + data.title;
    if (shownOnce) {
      main.focus({ preventScroll: true });
      window.scrollTo(0, 0);
    }
    shownOnce = true;
    document.documentElement.dataset.ready = path;
  }
  let shownOnce = false;

  function theme(next) {
    document.documentElement.dataset.theme = next;
    for (const one of charts) if (one.plot) one.plot.redraw(false, true);
  }
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  theme(dark.matches ? "dark" : "light");
  dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
  const other = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  document.getElementById("theme").addEventListener("click", other);
  const help = document.getElementById("help");
  help.addEventListener("click", () => {
    const keys = document.getElementById("keys");
    keys.hidden = !keys.hidden;
    help.setAttribute("aria-expanded", String(!keys.hidden));
  });

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const by = (label) => [...main.querySelectorAll("nav.pager a")].find((a) => a.textContent.startsWith(label));
    const follow = (a) => a && a.click();
    const act = {
      o: () => { location.hash = "#/"; }, l: () => { location.hash = "#/list"; }, t: other, "?": () => help.click(),
      j: () => follow(by("Next")), k: () => follow(by("Previous")), g: () => follow(by("Group")),
      "/": () => { const box = document.getElementById("search"); if (box) box.focus(); else location.hash = "#/list"; },
    }[event.key];
    if (act) { event.preventDefault(); act(); }
  });

  let resized = 0;
  window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawCharts, 150); });
  window.addEventListener("hashchange", show);
  unpack("summary").then((value) => { data = value; return show(); }, (error) => {
    main.replaceChildren(el("h1", {}, "The report cannot be opened"), el("p", {}, `${error}. Open it in a browser of 2023 or later.`));
  });
})();
