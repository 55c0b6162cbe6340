// what an environment showed before the first turn, where it is shown once for all attempts
const opening = (text) => (text ? [el("p", { class: "label" }, "opening"), block(text, "Opening")] : null);
const sameOpening = (detail) => detail.rows.every((row) => row.opening === detail.rows[0].opening);

function verdict(i) {
  if (at("exact_match", i) === null) return el("span", { class: "dim" }, "not judged");
  return at("exact_match", i) === 1 ? el("span", { class: "right" }, "✓ right") : el("span", { class: "bad" }, "✗ wrong");
}

const accepted = (detail) => (detail.rows[0].answers || []).slice(0, 8).join(" | ");

function groupFacts(i, detail) {
  const run = data.runs[at("run", i)];
  return [
    ["run", bdi(run.name)], ["split", at("split", i)], ["iteration", String(at("iteration", i))],
    detail.mean === null ? null : [`total of the ${detail.rows.length} attempts`, `${number(detail.mean)} on average, deviation ${number(detail.std)}`],
    detail.estimator ? ["estimator", bdi(detail.estimator.name)] : null,
  ];
}

// ------------------------------------------------------------- what a turn said

const ELEMENT = /<([a-z][\w-]{0,30})>([\s\S]*?)<\/\1>/gi;
const OPENED = /^([\s\S]*?)<\/(think|thinking|thought|reasoning)>/i;
const kindOfElement = (tag) => (/^(think|thinking|thought|reasoning)$/i.test(tag) ? "thought" : /^answer$/i.test(tag) ? "answer" : "other");

/** The parts of a turn's text: thoughts, the answer, and the rest. Elements that are the turn's
 *  calls are left out, because the calls are shown. */
function written(turn) {
  let text = turn.text;
  if (text.length > SHOWN) return [{ kind: "rest", text }];
  const parts = [];
  const begun = text.match(OPENED);
  if (begun && !/<(think|thinking|thought|reasoning)>/i.test(begun[1])) {
    parts.push({ kind: "thought", text: begun[1] });
    text = text.slice(begun[0].length);
  }
  const elements = [...text.matchAll(ELEMENT)];
  let last = 0;
  for (const one of elements) {
    parts.push({ kind: "rest", text: text.slice(last, one.index) });
    last = one.index + one[0].length;
    const kind = kindOfElement(one[1]);
    if (kind !== "other") parts.push({ kind, text: one[2] });
    else if (!turn.reading.calls.some((call) => isOf(call, one))) parts.push({ kind: "rest", text: one[0] });
  }
  parts.push({ kind: "rest", text: text.slice(last) });
  return parts.map((part) => ({ ...part, text: part.text.trim() })).filter((part) => part.text);
}

/** Whether an element of a text is a call: it has the call's name, or one of its arguments. */
function isOf(call, [, tag, inside]) {
  let values = [];
  try { values = Object.values(JSON.parse(call.arguments || "{}")).map(String); } catch { /* no JSON */ }
  return Boolean(call.name && (tag === call.name || inside.includes(call.name))) || Boolean(call.error) || values.some((value) => value && inside.includes(value));
}

/** A call as code: search("country of Isparta"). */
function spelled(call) {
  let given = call.arguments || "";
  try {
    const read = JSON.parse(given);
    if (read && typeof read === "object" && !Array.isArray(read)) {
      const pairs = Object.entries(read);
      given = pairs.map(([name, value]) => (pairs.length > 1 ? name + "=" : "") + JSON.stringify(value)).join(", ");
    }
  } catch { /* a call that could not be read is shown as it was written */ }
  return `${call.name || "?"}(${given})`;
}

/** What a turn did, in a few words. */
function brief(turn) {
  if (turn.reading.calls.length) return turn.reading.calls.map(spelled).join(" ");
  const parts = written(turn);
  const answer = parts.find((part) => part.kind === "answer");
  const rest = answer || parts.findLast((part) => part.kind === "rest") || parts[0];
  return answer ? "answer " + answer.text : rest ? rest.text : "nothing";
}

const letter = (c) => c !== undefined && /[\p{L}\p{N}]/u.test(c);

/** A text as nodes, with the accepted answers in it marked. */
function marked(text, answers) {
  const low = text.toLowerCase();
  const spans = [];
  for (const word of low.length === text.length ? answers.map((one) => one.toLowerCase()) : []) {
    for (let i = word ? low.indexOf(word) : -1; i >= 0 && spans.length < 99; i = low.indexOf(word, i + word.length)) {
      if (!letter(low[i - 1]) && !letter(low[i + word.length])) spans.push([i, i + word.length]);
    }
  }
  const nodes = [];
  let last = 0;
  for (const [from, to] of spans.sort((a, b) => a[0] - b[0] || b[1] - a[1])) {
    if (from < last) continue;
    nodes.push(...visible(text.slice(last, from)), el("mark", {}, visible(text.slice(from, to))));
    last = to;
  }
  return [...nodes, ...visible(text.slice(last))];
}

function readOf(result, answers) {
  const unread = result.content ? "" : result.unread || "";
  const paint = (text) => marked(text, answers);
  return [
    result.ok ? null : el("p", { class: "label" }, el("span", { class: "bad" }, "an error came back")),
    unread ? el("p", { class: "label" }, "came back, and was not read") : null,
    block(result.content || unread, "Result of the call", { class: "result", paint }),
  ];
}

function didSay(turn, k, row, right) {
  const parts = written(turn);
  const answers = row.answers || [];
  const raw = parts.length === 1 && parts[0].kind === "rest" && parts[0].text === turn.text.trim();
  return el("div", { class: "did-say" },
    el("h2", {}, `Turn ${k + 1}`, turn.cut ? el("span", { class: "bad" }, ", cut") : null),
    k < row.begins ? el("p", { class: "dim" }, "Shared with the trajectory that this one branched off: learned from there.") : null,
    parts.map((part) => part.kind === "answer"
      ? el("p", {}, el("span", { class: "label" }, "answer "), bdi(part.text), k === row.turns.length - 1 && row.answer !== null ? [" ", right] : null, whole(part.text, "answer"))
      : block(part.text, part.kind === "thought" ? `Turn ${k + 1}, thought` : `Turn ${k + 1}, said`, { class: part.kind })),
    turn.reading.format_error ? el("p", {}, el("span", { class: "bad" }, "form: "), bdi(turn.reading.format_error)) : null,
    whole(turn.reading.format_error, "form"),
    turn.reading.calls.map((call, c) => [
      block(spelled(call), "Call", { class: "call" }),
      call.error ? el("p", { class: "bad" }, bdi(call.error)) : null, whole(call.error, "error of the call"),
      turn.results[c] ? readOf(turn.results[c], answers) : el("p", { class: "label" }, "not run: nothing would have read the result"),
    ]),
    turn.reading.calls.length ? null : turn.results.map((result) => readOf(result, answers)),
    raw ? null : folded("as written", () => block(turn.text, `Turn ${k + 1}, as written`)));
}

// ------------------------------------------------------------- what it was worth

const given = (term) => term.weight * (term.value - term.baseline) / term.divisor;

/** A part of an advantage in words: what this turn has, and what those have that it is compared with. */
function because(term) {
  const here = exact(term.value, 3), mean = exact(term.mean, 3);
  const alone = term.count === 1;
  if (term.name === "turn rewards from here on") return `${here} earned from here on; ${alone ? "no other attempt got here" : `the ${term.count} attempts that got here earned ${mean} on average`}`;
  return `${term.name} ${here}; ${alone ? "nothing else is compared" : `the ${term.count} compared have ${mean} on average`}`;
}

/** A part of an advantage as a sum. Only a division by the deviation has a floor. */
function sum(term, estimator) {
  const settings = (estimator && estimator.arguments) || {};
  const floor = settings.scale === "std" && term.std !== null && term.std < term.divisor && Math.abs(term.divisor - settings.min_std) < 1e-6;
  return `${term.weight === 1 ? "" : exact(term.weight, 3) + " × "}(${exact(term.value, 3)} - ${exact(term.baseline, 3)}) / ${exact(term.divisor, 3)}${floor ? " (floor)" : ""} = ${signed(given(term), 2)}`;
}

/** A bar from the middle: to the right what is above 0. `most` fills a half. */
function bar(value, most) {
  const wide = most ? 50 * Math.min(1, Math.abs(value) / most) : 0;
  return drawn("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: value < 0 ? "bar down" : "bar up", "aria-hidden": "true" },
    drawn("rect", { x: value < 0 ? 50 - wide : 50, y: 0, width: wide, height: 10 }), drawn("line", { x1: 50, x2: 50, y1: 0, y2: 10 }));
}

function worth(turn, k, n, row, detail, most) {
  const own = detail.why.find((one) => one.own);
  const terms = own && own.terms && k >= row.begins ? own.terms[n][k] : null;
  const paid = (turn.rewards || []).filter((one) => one.value);
  const asides = [`reward ${exact(turn.turn_reward, 4)}`, turn.reward && turn.reward !== turn.turn_reward ? `the world paid ${exact(turn.reward, 4)}` : null, `${turn.tokens} tokens`,
    (row.sample_tokens || []).length > 1 ? `history ${turn.sample + 1} of ${row.sample_tokens.length}` : null].filter(Boolean);
  return el("div", { class: "worth" },
    el("p", {}, turn.advantage === null ? el("strong", {}, k < row.begins ? "learned from in another attempt" : "evaluated, not learned from") : el("span", { class: "big" }, advantage(turn.advantage)), terms && terms.length > 1 ? ` = ${terms.map((term) => signed(given(term), 2).replace(/^(.)/, "$1 ")).join(" ").replace(/^\+ /, "").replace(/^- /, "-")}` : null, el("span", { class: "dim" }, "; ", asides.join(", "))),
    paid.length && turn.rewards.length > 1 ? el("p", { class: "dim" }, paid.map((one, n) => [n ? ", " : "", bdi(one.name), ` ${exact(one.value, 4)}`])) : null,
    terms && terms.length ? el("ul", { class: "parts", "aria-label": "Parts of the advantage" }, terms.map((term) => el("li", {}, because(term), el("div", {}, bar(given(term), most), el("span", {}, sum(term, detail.estimator)))))) : null,
    own && !own.terms ? el("p", {}, `${own.name}, this run: ${own.unexplained}. The recorded advantage is ${exact(turn.advantage)}.`) : null,
    el("div", { class: "folds" }, terms ? folded("digits", () => digits(turn, own, n, k)) : null, tokens(row, k)));
}

function digits(turn, own, n, k) {
  const terms = own.terms[n][k];
  const parts = (turn.rewards || []).map((r) => [bdi(r.name), num(exact(r.value))]);
  return [
    parts.length ? table("Rewards of this turn", ["reward", "value"], parts) : el("p", {}, `Reward of this turn: ${exact(turn.turn_reward)}`),
    table(`What ${own.name} compares`, ["value", "weight", "this one", "compared with", "divided by", "mean of the set", "deviation", "members", "gives"],
      terms.map((t) => [t.name, ...[t.weight, t.value, t.baseline, t.divisor, t.mean, t.std].map((value) => num(exact(value))), num(String(t.count)), num(signed(given(t), 4))])),
    el("p", { class: "equation" }, `advantage = ${equation(terms)} = ${exact(own.advantages[n][k])}`),
  ];
}

function equation(terms) {
  const text = terms.map((t) => `${exact(t.weight)} × (${exact(t.value)} - ${exact(t.baseline)}) / ${exact(t.divisor)}`);
  return text.length ? text.join("  +  ") : "0";
}

/** The sampled tokens of a turn, tinted by how likely they were. */
function tokens(row, k) {
  if (!row.turn_index) return null;
  const places = row.turn_index.flatMap((turn, t) => (turn === k ? [t] : []));
  const rows = () => places.map((t, i) => [String(i + 1), ...(row.token_texts ? [bdi(row.token_texts[t] || "")] : []), num(number(Math.exp(row.learner_logprobs[t]), 4)), num(number(row.entropies[t], 4))]);
  return folded(`${places.length} tokens`, () => [
    row.token_texts ? el("p", { class: "tinted" }, places.map((t) => {
      const likely = Math.exp(row.learner_logprobs[t]);
      return el("span", { class: "p" + Math.min(4, Math.floor(likely * 5)), title: `probability ${number(likely, 4)}, entropy ${number(row.entropies[t], 4)} nats` }, visible(row.token_texts[t] || ""));
    })) : null,
    table("Probability and entropy of each sampled token", ["token", ...(row.token_texts ? ["text"] : []), "probability", "entropy, nats"], rows()),
  ]);
}

// ------------------------------------------------------------------- trajectory

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
  const kind = kindOf(i);
  const own = detail.why.find((one) => one.own);
  const every = own && own.terms ? own.terms[n].flat().map((term) => Math.abs(given(term))) : [];
  const parts = (row.rewards || []).filter((r) => r.name.startsWith("outcome/") && r.value).map((r) => `${r.name.slice(8)} ${exact(r.value, 4)}`);
  const outcome = [(row.rewards || []).length ? table("Rewards of the whole trajectory", ["reward", "value"], row.rewards.map((r) => [bdi(r.name), num(exact(r.value))])) : null,
    (row.figures || []).length ? table("Figures of its tools", ["figure", "values"], row.figures.map((f) => [bdi(f.name), num(f.values.map((value) => exact(value)).join(", "))])) : null].filter(Boolean);
  return [
    el("nav", { class: "pager", "aria-label": "Trajectories" }, step(-1, "Previous"), step(1, "Next"), members.length > 1 ? el("a", { href: groupLink(i) }, `All ${members.length} attempts`) : null, el("a", { href: lastList }, "List"),
      el("a", { href: listOf({ ...(data.runs.length > 1 ? { run: at("run", i) } : {}), split: at("split", i), iteration: at("iteration", i), kind }) }, swatch(kind), kind)),
    el("h1", {}, bdi(asked(i)[1])),
    whole(asked(i)[1], "question"),
    facts([["answered", row.answer === null ? "none" : bdi(row.answer)], ["", verdict(i)], row.answers && row.answers.length ? ["accepted", bdi(accepted(detail))] : null,
      ["ended by", at("ended_by", i)], ["outcome", [exact(at("outcome", i), 4), parts.length ? el("span", { class: "dim" }, ` (${parts.join(", ")})`) : null]], ["total", exact(at("total", i), 6)], ["sampled tokens", String(at("tokens", i))]]),
    whole(row.answer, "answer"),
    whole(accepted(detail), "accepted"),
    facts([["attempt", `${n + 1} of ${members.length}`], ...groupFacts(i, detail)]),
    opening(row.opening),
    row.turns.map((turn, k) => el("section", { class: "turn" }, didSay(turn, k, row, verdict(i)), worth(turn, k, n, row, detail, Math.max(0, ...every)))),
    others(row, n, detail),
    outcome.length ? folded("Rewards of the whole trajectory, and figures", () => outcome) : null,
  ];
}

const PAPER = ["TurnLevel", "Merged", "OutcomeOnly"];

/** What each estimator gives the turns of this attempt: the run's own and the paper's, then all others on demand. */
function others(row, n, detail) {
  if (!detail.why.length) return null;
  const line = (one) => {
    const none = one.missing || !one.advantages[n];
    const told = one.missing || (none ? "it has no branches: only the attempts that branched off no other are compared" : one.terms ? null : one.unexplained);
    const how = told || folded("digits", () => one.terms[n].map((terms, k) => el("p", { class: "equation" }, `turn ${k + 1}: ${terms.map((t) => t.name).join(" + ")}: ${equation(terms)}`)));
    return [one.own ? el("strong", {}, one.name, ", this run") : one.name, ...row.turns.map((_, k) => el("td", { class: "num" }, none ? "-" : advantage(one.advantages[n][k]))), el("td", { class: "how" }, how)];
  };
  const first = detail.why.filter((one) => one.own || PAPER.some((name) => one.name.startsWith(name)));
  const rest = detail.why.filter((one) => !first.includes(one));
  const lines = (name, some) => table(name, ["estimator", ...row.turns.map((_, k) => `turn ${k + 1}`), "how"], some.map(line), { hideCaption: true });
  return el("section", { class: "estimators" }, el("h2", {}, "The same attempt with other estimators"), lines("Estimators", first),
    detail.why.length === 1 ? el("p", {}, "None is shown: the record does not say which attempts of this group are branches.") : null,
    rest.length ? folded(`${rest.length} more estimators`, () => lines("More estimators", rest)) : null);
}

// ------------------------------------------------------------------------ group

/** Attempts that did and earned the same, as lists of their places in the group. */
function alike(members, detail) {
  const found = new Map();
  members.forEach((i, n) => {
    const row = detail.rows[n];
    const key = JSON.stringify([row.answer, row.opening, at("ended_by", i), at("total", i), at("exact_match", i), row.begins, row.turns.map((turn) => [turn.text, turn.turn_reward, turn.advantage, turn.results.map((r) => [r.ok, r.content])])]);
    found.set(key, [...(found.get(key) || []), n]);
  });
  return [...found.values()];
}

async function group(path) {
  const first = placed().get("#/t/" + path + "/0");
  if (first === undefined) return missing();
  const detail = (await details(at("chunk", first)))[at("place", first)];
  const members = membersOf(first);
  const turns = Math.max(...detail.rows.map((row) => row.turns.length));
  const sets = alike(members, detail).sort((a, b) => at("total", members[b[0]]) - at("total", members[a[0]]) || a[0] - b[0]);
  chosen = sets.flat().map((n) => members[n]);
  const many = members.length === 1 ? "One attempt at this question." : `${members.length} attempts at one question, best first${sets.length < members.length ? `, in ${sets.length} rows: identical results are grouped` : ""}. Colours are advantages.`;
  return [
    el("nav", { class: "pager", "aria-label": "Trajectories" }, el("a", { href: lastList }, "List")),
    el("h1", {}, bdi(asked(first)[1])),
    whole(asked(first)[1], "question"),
    sameOpening(detail) ? opening(detail.rows[0].opening) : null,
    facts([...groupFacts(first, detail), accepted(detail) ? ["accepted", bdi(accepted(detail))] : null]),
    whole(accepted(detail), "accepted"),
    el("p", {}, many),
    table("Attempts", ["attempt", "", "answer", "total", ...Array.from({ length: turns }, (_, k) => `turn ${k + 1}`)], sets.map((set) => {
      const i = members[set[0]], row = detail.rows[set[0]];
      return [
        el("th", { scope: "row" }, set.map((n, k) => [k ? ", " : null, el("a", { href: link(members[n]), "aria-label": `Attempt ${n + 1}` }, String(n + 1))])),
        verdict(i), row.answer === null ? "none" : bdi(row.answer.slice(0, 80)), num(number(at("total", i))),
        ...Array.from({ length: turns }, (_, k) => {
          const turn = row.turns[k];
          return turn === undefined ? el("td", {}) : el("td", { class: "cell " + sign(turn.advantage) }, el("span", { class: "num" }, turn.advantage === null ? "" : signed(turn.advantage, 2)), " ", bdi(brief(turn).slice(0, 120)));
        }),
      ];
    }), { class: "group", hideCaption: true }),
    sameOpening(detail) ? null : detail.rows.map((row, n) => el("details", {}, el("summary", {}, `opening of attempt ${n + 1}`), row.opening ? block(row.opening, "Opening") : "none")),
  ];
}

function missing() {
  return [el("h1", {}, "Not in this report"), el("p", {}, "The address names a trajectory that is not here. ", el("a", { href: "#/list" }, "See those that are"), ".")];
}
