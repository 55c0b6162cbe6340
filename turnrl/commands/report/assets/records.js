// the recorded trajectories: a column for each thing known of all of them
const columns = () => data.trajectories;
/** How many there are. */
const recorded = () => (columns().run || []).length;
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
    for (let i = 0; i < recorded(); i++) places.set(link(i), i);
  }
  return places;
}

/** The attempts at the question of one, itself among them. */
function membersOf(i) {
  const same = ["run", "split", "policy_version", "group"];
  const found = [];
  for (let j = i; j >= 0 && same.every((name) => at(name, j) === at(name, i)); j--) found.unshift(j);
  for (let j = i + 1; j < recorded() && same.every((name) => at(name, j) === at(name, i)); j++) found.push(j);
  return found;
}

function experimentName(members) {
  const names = members.map((n) => data.runs[n].name);
  return names.length === 1 ? names[0] : `${names[0]} and ${names.length - 1} more seed${names.length > 2 ? "s" : ""}`;
}

// what an attempt did, in the order of the bars; those without a search that can find an answer are right or wrong, and those
// that nothing judges have how they ended
const KINDS = ["found it, right", "searched, right", "found it, answered wrong", "searched, not found", "searched, wrong", "guessed, right", "guessed, wrong", "right", "wrong", "ended by answer", "ended by tool", "ended by player", "ended by turns", "ended by length"];
let searches = null;

function kindOf(i) {
  if (!searches) {
    searches = new Set();
    columns().run.forEach((run, k) => { if (at("answer_in_results", k) !== null) searches.add(run); });
  }
  if (at("exact_match", i) === null) return "ended by " + at("ended_by", i);
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
