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

/** A bar for each iteration of a run: the shares of what its recorded training attempts did. */
function did(run) {
  const bars = new Map();
  for (let i = 0; i < recorded(); i++) {
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

function attemptKinds() {
  const bars = data.runs.map((_, n) => did(n)).filter((one) => one);
  if (!bars.length) return [];
  const there = new Set();
  const sizes = new Map();
  for (let i = 0; i < recorded(); i++) {
    if (at("split", i) !== "train") continue;
    there.add(kindOf(i));
    const key = `${at("run", i)} ${at("iteration", i)}`;
    sizes.set(key, (sizes.get(key) || 0) + 1);
  }
  const most = Math.max(...sizes.values());
  return [
    el("h2", {}, "What the attempts did"),
    el("p", {}, `Attempts at training questions: a bar for each iteration, with the shares of what they did. Each bar shows up to ${most} recorded attempts; click a segment to list them.`),
    el("ul", { class: "legend", "aria-label": "What attempts did" }, KINDS.filter((kind) => there.has(kind)).map((kind) => el("li", {}, el("a", { href: listOf({ split: "train", kind }) }, swatch(kind), kind)))),
    el("div", { class: "grid deeds" }, bars),
  ];
}

/** How much more exact match in training than in validation is worth a sentence. */
const FARTHER = 0.2;

/** A run in a sentence or two: where it began and where it is. */
function sentence(run) {
  const points = (name) => run.metrics.filter((row) => row[name] !== undefined && row[name] !== null).map((row) => [row.iteration, row[name]]);
  const figures = [["exact match", "exact_match"], ["tool execution", "tool_execution"]];
  const course = (split) => figures.map(([title, name]) => [title, points(split + name)]).filter(([, found]) => found.length > 1)
    .map(([title, found]) => `${title} ${number(found[0][1], 2)} to ${number(found.at(-1)[1], 2)}`).join(", ");
  const [validated, sampled] = [course("val/"), course("train/")];
  if (!validated && !sampled) return null;
  const lasts = figures.map(([title, name]) => [title, points("train/" + name).at(-1)]).filter(([, one]) => one);
  const last = lasts.map(([title, [, value]]) => `${title} ${number(value, 2)}`).join(", ");
  const told = validated ? `${validated} on validation questions${last ? `. Its last training attempts: ${last}` : ""}` : `${sampled} in training attempts`;
  const [known, held] = ["train/", "val/"].map((split) => points(split + "exact_match").at(-1));
  const apart = known && held && known[1] - held[1] >= FARTHER ? " It does far better on training questions than on held-out ones." : "";
  const most = Math.max(...run.metrics.map((row) => row.iteration));
  return el("p", {}, data.runs.length > 1 ? [el("strong", {}, bdi(run.name)), ", "] : null, `${most} iteration${most === 1 ? "" : "s"}: ${told}.${apart}${uses(run)}`);
}

/** Since when most training attempts call a tool, if that began after the run did. */
function uses(run) {
  const calls = run.metrics.filter((row) => "train/tool_execution" in row);
  const began = calls.findLastIndex((row) => row["train/tool_execution"] < 0.5) + 1;
  return began && began < calls.length ? ` Since iteration ${calls[began].iteration}, most training attempts have used a tool.` : "";
}

/** What `turnrl compare` says of the runs: the difference, and whether it is one. */
function comparisons() {
  if (!data.comparisons.length) return data.not_compared ? [el("p", { class: "dim" }, `Not compared: ${data.not_compared}`)] : [];
  const several = data.comparisons[0].first.length > 1;
  const seeds = several ? `${data.comparisons[0].first.length} seeds each, paired.` : "One seed each: this says which of the trained policies is better, and not which settings are. The same settings with another seed train another policy.";
  return [el("div", { class: "verdict" }, data.comparisons.map((one, n) => [compared(one, n), one.notes.map((note) => el("p", { class: "dim" }, bdi(note)))]), el("p", { class: "dim" }, seeds))];
}

/** One comparison in words, from the side of the one that is better. */
function compared(one, n) {
  const side = (members) => bdi(experimentName(members.map(([run]) => run)));
  const turned = one.verdict !== "better";
  const [best, other] = turned ? [one.first, one.second] : [one.second, one.first];
  const [ours, theirs] = turned ? one.values : [one.values[1], one.values[0]];
  const [low, high] = turned ? [-one.interval[1], -one.interval[0]] : one.interval;
  const between = { level: " do not differ significantly", undecided: ": undecided, because all seeds differ by the same" }[one.verdict];
  const iterations = [...new Set([...one.first, ...one.second].map(([, iteration]) => iteration))].join(" and ");
  const right = one.main === "exact_match";
  const alone = (which, members) => {
    const all = one.counts[which], here = one[which].length;
    const text = [side(members), right && one.first.length === 1 ? " alone is right in " : " is higher in ", `${all}${here < all ? ` (${here} are in this report)` : ""}`];
    return here ? el("a", { href: listOf({ [which]: n }) }, text) : text;
  };
  return el("p", {}, el("strong", {}, side(best), between ? " and " : " is better than ", side(other), between || null),
    `: ${right ? "exact match" : one.main} ${number(ours)} against ${number(theirs)} after ${iterations} iteration${iterations === "1" ? "" : "s"} (difference ${signed(ours - theirs)}, 95 % interval ${signed(low)} to ${signed(high)}). Of ${one.questions} questions `,
    alone("won", one.second), ", ", alone("lost", one.first), ".");
}

/** All curves but the first four: those that a word finds, by part; those that never move by name alone. */
function otherCurves(names) {
  const partOf = (name) => PARTS.findIndex(([, takes]) => takes.test(name));
  const flat = (name) => data.runs.every((run) => run.metrics.every((row) => !row[name]));
  const shown = names.filter((name) => partOf(name) >= 0);
  const sections = PARTS.map(([title], k) => {
    const own = shown.filter((name) => partOf(name) === k);
    const zero = own.filter(flat);
    const figures = own.filter((name) => !flat(name)).map((name) => [name, chart(name.replace(/^reward\//, ""), [name])]).filter(([, made]) => made);
    const never = zero.length ? el("p", { class: "dim" }, `0 all the time: ${zero.join(", ")}.`) : null;
    const box = own.length ? el("section", {}, el("h3", {}, title), el("div", { class: "grid" }, figures.map(([, made]) => made)), never) : null;
    return { box, figures, zero, never };
  }).filter(({ box }) => box);
  if (!sections.length) return null;
  const found = el("span", { class: "dim", role: "status" });
  const search = el("input", { type: "search", id: "curves", oninput: () => {
    const words = search.value.toLowerCase().split(/\s+/).filter((word) => word);
    const fits = (name) => words.every((word) => name.toLowerCase().includes(word));
    let some = 0;
    for (const { box, figures, zero, never } of sections) {
      const fit = figures.filter(([name, made]) => !(made.hidden = !fits(name))).length;
      const idle = zero.filter(fits).length;
      if (never) never.hidden = !idle;
      box.hidden = !fit && !idle;
      some += fit + idle;
    }
    found.textContent = words.length ? ` ${some} of ${shown.length}` : "";
    drawCharts();
  } });
  return el("details", { class: "others", ontoggle: drawCharts }, el("summary", {}, `${shown.length} other curve${shown.length === 1 ? "" : "s"}`),
    el("label", { class: "find" }, "Find a curve ", search, found), sections.map(({ box }) => box));
}

function overview() {
  const problems = data.runs.flatMap((run) => run.problems.map((text) => el("p", { class: "problem" }, el("strong", {}, bdi(run.name), ": "), el("bdi", {}, visible(text)))));
  const alarms = data.runs.flatMap((run) => run.alarms.map((alarm) => el("p", { class: "problem" }, el("strong", {}, bdi(run.name), ", alarm: "), el("bdi", {}, visible(alarm.text)))));
  const every = [...new Set(data.runs.flatMap((run) => run.metrics.flatMap((row) => Object.keys(row))))].sort();
  const bands = data.experiments.some((members) => members.length > 1);
  const legend = el("ul", { class: "legend", "aria-label": "Lines" }, data.experiments.map((members, n) => el("li", {}, sample(n), bdi(experimentName(members)))));
  const changed = Object.entries(data.differences);
  const last = (run, name) => { const row = run.metrics.findLast((r) => name in r); return row ? number(row[name]) : "-"; };
  return [
    el("h1", {}, data.runs.length === 1 ? bdi(data.runs[0].name) : `${data.runs.length} runs`),
    el("div", { class: "told" }, data.runs.map(sentence)),
    ...comparisons(),
    ...alarms,
    el("p", {}, recorded() ? el("a", { href: "#/list" }, `${recorded().toLocaleString("en")} recorded trajectories`) : "There are no recorded trajectories", "."),
    ...problems,
    ...attemptKinds(),
    el("h2", {}, "Curves"),
    el("p", {}, "Thick lines with points: greedy answers to validation questions. Thin lines: sampled attempts at training questions.", bands ? " Bands: from the lowest to the highest of the runs that differ in their seeds alone. Open points: not all of them have that iteration." : ""),
    legend,
    el("div", { class: "grid four" }, CURVES.map(([title, name]) => chart(title, ["val/" + name, "train/" + name], [0, 1]))),
    otherCurves(every.filter((name) => !APART.includes(name))),
    el("h2", {}, "Runs"),
    table("Runs", ["run", "folder", "iterations", ...CURVES.map(([name]) => `${name}, last`)], data.runs.map((run) => {
      const rows = run.metrics.map((row) => row.iteration);
      return [bdi(run.name), bdi(run.folder), num(rows.length ? String(Math.max(...rows)) : "-"), ...CURVES.map(([, name]) => num(last(run, "val/" + name) !== "-" ? last(run, "val/" + name) : last(run, "train/" + name)))];
    }), { class: "wide", hideCaption: true }),
    changed.length ? [el("h2", {}, "What differs between their recipes"), table("Settings that differ", ["setting", ...data.runs.map((run) => bdi(run.name))], changed.map(([name, values]) => [el("code", {}, name), ...values.map((value) => (value ? bdi(value) : el("span", { class: "dim" }, "not set")))]), { class: "wide", hideCaption: true })] : data.runs.length > 1 ? el("p", {}, "Their recipes do not differ.") : null,
    el("p", { class: "dim" }, `Written ${data.written.slice(0, 16).replace("T", " ")}.`),
  ];
}
