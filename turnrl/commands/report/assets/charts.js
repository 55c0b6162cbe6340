let charts = [];

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
  const numbers = folded("Numbers", () => table(`${title} by iteration`, ["iteration", ...lines.map(label)], rows));
  const made = el("figure", {}, el("div", { class: "above" }, el("figcaption", {}, title), readout), box, numbers);
  charts.push({ box, draw: () => new uPlot({
    width: Math.max(box.clientWidth, 200), height: 180, series, bands, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false }, sync: { key: "iteration", scales: ["x", null] } },
    scales: { x: { time: false }, y: range ? { range } : {} },
    axes: [0, 1].map((axis) => ({ stroke: () => css("--dim"), grid: { stroke: () => css("--line"), width: 1 }, ticks: { stroke: () => css("--line") }, size: axis ? 66 : 34, ...(axis ? { values: (_, ticks) => ticks.map((v) => (v === null ? "" : tick(v, ticks[1] - ticks[0]))) } : {}) })),
    hooks: { draw: [(plot) => marks.forEach((mark) => drawMark(plot, mark))], setCursor: [(plot) => {
      const i = plot.cursor.idx;
      const known = i === null || i === undefined ? [] : data.experiments.map((_, n) => {
        const of = lines.filter((line) => line.n === n).map((line) => line.points.find((p) => p.x === xs[i])).find((point) => point);
        return el("span", { class: "c" + (n % 6) }, of ? number(of.mean, 2) : "-");
      });
      // in the order of the legend: what a thick line has there, or else a thin one
      readout.replaceChildren(...(known.length ? [`at ${xs[i]}: `, ...known.flatMap((one, n) => (n ? [", ", one] : [one]))] : []));
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

/** Draw the charts that have a place on the page; those in what is folded wait. */
function drawCharts() {
  for (const one of charts) {
    if (one.plot) one.plot.destroy();
    one.plot = one.box.clientWidth ? one.draw() : null;
  }
}
