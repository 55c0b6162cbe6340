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
  shownAt = location.hash;
  for (const a of document.querySelectorAll("header nav a")) {
    if (a.getAttribute("href") === "#" + path) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  const place = history.state || {};
  for (const fold of main.querySelectorAll("details")) if ((place.open || []).includes(nameOf(fold))) fold.open = true;
  drawCharts();
  focusable(main);
  for (const mark of main.querySelectorAll(".result mark:first-of-type")) mark.parentElement.scrollTop = mark.offsetTop - 20;
  const head = main.querySelector("h1");
  document.title = (head ? head.textContent.slice(0, 60) + " - " : "") + data.title;
  if (shownOnce || place.y) {
    const opened = [...main.querySelectorAll("a")].find((a) => path === "/list" && lastOpened && a.getAttribute("href") === lastOpened);
    (opened || main).focus({ preventScroll: true });
    window.scrollTo(0, place.y || 0);
    if (place.y) requestAnimationFrame(() => window.scrollTo(0, place.y));
  }
  if (path.startsWith("/t/")) lastOpened = "#" + path;
  shownOnce = true;
  document.documentElement.dataset.ready = path;
}
let shownOnce = false;
let shownAt = null;
let lastOpened = null;

/** A fold by what stands above it and on it, whose numbers may change. */
function nameOf(fold) {
  const box = fold.closest("figure, section") || main;
  const head = box.querySelector("figcaption, h2, h3");
  return `${head ? head.textContent : ""}: ${fold.querySelector("summary").textContent}`.replace(/\d+/g, "");
}

/** Keep where the reader is on this page, for when he comes back to it. */
function remember() {
  if (shownAt !== location.hash) return;  // the next page is on its way
  const open = [...main.querySelectorAll("details")].filter((one) => one.open).map(nameOf);
  history.replaceState({ y: window.scrollY, open }, "");
}
history.scrollRestoration = "manual";
let scrolled = 0;
window.addEventListener("scroll", () => { clearTimeout(scrolled); scrolled = setTimeout(remember, 60); });
main.addEventListener("toggle", remember, true);

const KEPT = "turnrl-theme";
/** A file from disk may be refused a place to keep things in. */
function keeps(act) {
  try { return act(localStorage); } catch { return null; }
}
function theme(next) {
  document.documentElement.dataset.theme = next;
  for (const one of charts) if (one.plot) one.plot.redraw(false, true);
}
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const chosenTheme = keeps((store) => store.getItem(KEPT));
theme(/^(dark|light)$/.test(chosenTheme) ? chosenTheme : dark.matches ? "dark" : "light");
dark.addEventListener("change", () => { if (!keeps((store) => store.getItem(KEPT))) theme(dark.matches ? "dark" : "light"); });
function toggleTheme() {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  keeps((store) => store.setItem(KEPT, document.documentElement.dataset.theme));
}
document.getElementById("theme").addEventListener("click", toggleTheme);
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
  /** To the next row of the list, or to the next page or trajectory. */
  const move = (step, label) => {
    const links = [...main.querySelectorAll("table.list th a, table.group th a")].filter((a) => !a.closest("thead"));
    const next = links[links.indexOf(document.activeElement) + (step > 0 || links.includes(document.activeElement) ? step : links.length)];
    if (next) next.focus();
    else follow(by(label));
  };
  const act = {
    o: () => { location.hash = "#/"; }, l: () => { location.hash = lastList; }, t: toggleTheme, "?": () => help.click(),
    j: () => move(1, "Next"), k: () => move(-1, "Previous"), g: () => follow(by("All")),
    "/": () => { const box = document.getElementById("search") || document.getElementById("curves"); if (!box) location.hash = "#/list"; else { const fold = box.closest("details"); if (fold) fold.open = true; box.focus(); } },
  }[event.key];
  if (act) { event.preventDefault(); act(); }
});

let resized = 0;
window.addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawCharts, 150); });
window.addEventListener("hashchange", show);
unpack("summary").then((value) => {
  data = value;
  return show();
}, (error) => {
  main.replaceChildren(el("h1", {}, "The report cannot be opened"), el("p", {}, `${error}. Open it in a browser of 2023 or later.`));
});
