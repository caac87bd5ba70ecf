"use strict";
/* The view of one run: its configuration, its curves, and a heatmap of its heads. Text is inserted as text nodes only. */

const $ = (id) => document.getElementById(id);
const coarse = matchMedia("(pointer: coarse)"); // on touch screens, plots must not zoom when the page is scrolled
const LABELS = {
  "logits.max": "largest logit",
  "logits.step_change": "mean change of the logits by one step",
  "logits.change": "mean change of the logits since the measurement before",
  "logits.entropy": "entropy of the attention",
  "logits.sink": "share of the attention on the first key",
};
const GROUPS = { norm: (role) => `norm of ${role}`, rate: (role) => `learning rate of ${role}, relative to the base` };
let opened = null; // the run that is shown
let before = null; // the run that was shown before it

/** An element with attributes and children; strings become text. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

const show = (value) => (Array.isArray(value) ? value.join(", ") : String(value ?? "-"));
const pair = (name, value) => make("span", { class: "pair" }, make("span", { class: "quiet" }, name), " ", show(value));
const seen = (values) => values.filter((value) => typeof value === "number");
const largest = (values) => values.reduce((one, other) => Math.max(one, other), -Infinity);
const smallest = (values) => values.reduce((one, other) => Math.min(one, other), Infinity);
const mean = (values) => values.reduce((one, other) => one + other, 0) / values.length;

/** Whether the values need a logarithmic scale. */
const spansDecades = (values) => values.length > 0 && smallest(values) > 0 && largest(values) > 30 * smallest(values);

/** [step, layers x heads] for each measurement, such as tables(run, "logits", "max"). */
function tables(run, group, name) {
  return run.history.filter((row) => row[group]?.[name]).map((row) => [row.step, row[group][name]]);
}

/** A curve of one number that combines all heads. */
function overHeads(run, group, name, combine) {
  const points = tables(run, group, name).map(([step, table]) => [step, seen(table.flat())]);
  const found = points.filter(([, values]) => values.length);
  return { x: found.map(([step]) => step), y: found.map(([, values]) => combine(values)) };
}

/** The curves of all heads as one trace with gaps, which is fast for hundreds of heads. */
function eachHead(run, group, name) {
  const found = tables(run, group, name);
  const trace = { x: [], y: [], text: [] };
  (found[0]?.[1] ?? []).forEach((heads, layer) =>
    heads.forEach((_, head) => {
      for (const [step, table] of [...found, [null, null]]) {
        trace.x.push(step);
        trace.y.push(table?.[layer]?.[head] ?? null);
        trace.text.push(`layer ${layer}, ${column(run, heads.length, head)}`);
      }
    }),
  );
  return trace;
}

/** The label of a column: a weight can have a block per head, per group, or one for all heads. */
function column(run, blocks, place) {
  if (blocks === run.config.attention.heads) return `head ${place}`;
  return blocks === 1 ? "all heads" : `group ${place}`;
}

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;"); // plotly interprets some tags

function trace(name, points, color, more = {}) {
  const { dash = "solid", width = 2, ...rest } = more;
  const line = { color: style(color), width, dash };
  const hover = points.text ? "%{text}<br>step %{x}: %{y:.4g}" : "step %{x}: %{y:.4g}";
  return { name: plain(name), mode: "lines", line, hovertemplate: hover, ...points, ...rest };
}

function validation(run) {
  const rows = run.history.filter((row) => row.val_loss !== undefined);
  return { x: rows.map((row) => row.step), y: rows.map((row) => row.val_loss) };
}

/** The charts of a run, as [title, traces]; charts without numbers are omitted. */
function charts(run) {
  const dotted = { dash: "dot", width: 1.5 };
  const faint = { width: 1, opacity: 0.35 };
  const loss = [
    trace("training", { x: run.losses.map((_, place) => place + 1), y: run.losses }, "--c0", { width: 1 }),
    trace("validation", validation(run), "--c1", { mode: "lines+markers" }),
  ];
  if (before) loss.push(trace("validation, dotted run", validation(before), "--c2", dotted));
  const roles = Object.keys(run.history.find((row) => row.rate)?.rate ?? {});
  const found = {
    Loss: loss,
    "Largest logit": [
      trace("each head", eachHead(run, "logits", "max"), "--c1", faint),
      trace("all heads", overHeads(run, "logits", "max", largest), "--c1"),
    ],
    "Mean change of the logits": [
      trace("by one step, each head", eachHead(run, "logits", "step_change"), "--c1", faint),
      trace("by one step", overHeads(run, "logits", "step_change", mean), "--c1"),
      trace("since the measurement before", overHeads(run, "logits", "change", mean), "--c2", dotted),
    ],
    "Learning rates of heads, relative to the base": roles.map((role, place) =>
      trace(role, eachHead(run, "rate", role), `--c${1 + (place % 6)}`, { width: 1.25 }),
    ),
  };
  return Object.entries(found).filter(([, traces]) => traces.some(({ y }) => seen(y).length));
}

/** Run plotly.js, which the page has as text, when it is first needed. */
function plotly() {
  if (!window.Plotly) document.head.append(make("script", {}, $("plotly").textContent));
  return window.Plotly;
}

/** Ticks of a logarithmic axis: 1, 2, 5, 10 on a short one, powers of ten on a long one. */
function logarithmic(values) {
  return { type: "log", tickformat: "~g", dtick: largest(values) > 200 * smallest(values) ? 1 : "D2" };
}

function layout(values) {
  const lines = { gridcolor: style("--line"), zeroline: false, fixedrange: coarse.matches, automargin: true };
  return {
    font: { family: style("--sans"), size: 12, color: style("--quiet") },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    margin: { t: 8, r: 8, b: 8, l: 8 },
    height: 300,
    xaxis: { ...lines, title: { text: "step" }, showgrid: false },
    yaxis: { ...lines, ...(spansDecades(values) ? logarithmic(values) : { nticks: 6 }) },
    showlegend: true,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    hoverlabel: { font: { family: style("--sans") } },
  };
}

function drawCurves(run) {
  for (const plot of $("curves").querySelectorAll(".plot")) plotly().purge(plot);
  const figures = charts(run).map(([title, traces]) => {
    const ends = traces.map(({ name, y }) => `${name} ends at ${seen(y).at(-1)?.toPrecision(4) ?? "-"}`);
    const plot = make("div", { class: "plot", role: "img", "aria-label": `${title} by step: ${ends.join("; ")}` });
    return { plot, traces, figure: make("figure", {}, make("h3", {}, title), plot) };
  });
  $("curves").replaceChildren(...figures.map(({ figure }) => figure));
  for (const { plot, traces } of figures) {
    const values = seen(traces.flatMap(({ y }) => y));
    plotly().newPlot(plot, traces, layout(values), { displayModeBar: false, responsive: true });
  }
}

/** Everything measured by layer and head, as [group, name, label]. */
function measures(run) {
  const found = {};
  for (const row of run.history)
    for (const group of ["logits", "rate", "norm"])
      for (const name of Object.keys(row[group] ?? {}))
        found[`${group}.${name}`] = [group, name, LABELS[`${group}.${name}`] ?? GROUPS[group]?.(name) ?? name];
  const hasNumbers = ([, table]) => seen(table.flat()).length > 0;
  return Object.values(found).filter(([group, name]) => tables(run, group, name).some(hasNumbers));
}

function offerMeasures(run) {
  const chosen = $("measure").value;
  const offered = measures(run).map(([group, name, label]) => make("option", { value: `${group}.${name}` }, label));
  $("heat").hidden = $("heat-title").hidden = !offered.length;
  $("measure").replaceChildren(...offered);
  if (offered.some((option) => option.value === chosen)) $("measure").value = chosen;
}

/** The tables of the selected measure, whose name can contain a dot. */
function chosenTables() {
  const [group, ...name] = $("measure").value.split(".");
  return tables(opened, group, name.join("."));
}

/** Set the slider to the steps of the selected measure, at the one nearest to `step`. */
function fitSlider(step) {
  const steps = chosenTables().map(([each]) => each);
  const far = steps.map((each) => Math.abs(each - step));
  $("slider").max = Math.max(0, steps.length - 1);
  $("slider").value = far.indexOf(smallest(far));
}

/** Draw the heatmap. The colour scale is the same at every step, so moving the slider shows growth. */
function drawHeat() {
  const found = chosenTables();
  if (!found.length) return;
  const [step, table] = found[Number($("slider").value)];
  const values = seen(found.flatMap(([, each]) => each.flat()));
  const log = spansDecades(values);
  const place = log ? Math.log : Number;
  const [low, high] = [smallest(values), largest(values)];
  const share = (value) => (high > low ? (place(value) - place(low)) / (place(high) - place(low)) : 0.5);
  const cell = (value) => {
    if (typeof value !== "number") return make("td", { class: "none" }, "-");
    return make("td", { style: `--t:${(100 * share(value)).toFixed(1)}%` }, show(value));
  };
  const label = $("measure").selectedOptions[0].textContent;
  const width = largest(table.map((heads) => heads.length));
  const heads = Array.from({ length: width }, (_, head) => make("th", { scope: "col" }, column(opened, width, head)));
  const layers = table.map((row, layer) =>
    make("tr", {}, make("th", { scope: "row" }, `layer ${layer}`), ...row.map(cell)),
  );
  $("heatmap").replaceChildren(
    make("caption", { class: "hidden" }, `${label} at step ${step}`),
    make("thead", {}, make("tr", {}, make("td", {}), ...heads)),
    make("tbody", {}, ...layers),
  );
  $("step").textContent = step;
  $("slider").setAttribute("aria-valuetext", `step ${step}`);
  const bar = make("span", { class: "ramp", "aria-hidden": "true" });
  const scale = `over all steps of this run${log ? ", on a logarithmic scale" : ""}`;
  $("legend").replaceChildren(show(low), bar, show(high), make("span", {}, scale));
}

/** A row for each part of the configuration, with its options as pairs: `heads 4`, `betas 0.9, 0.95`. */
function drawConfig(run) {
  const environment = { ...run.environment, ...run.environment.packages };
  delete environment.packages;
  const parts = { ...run.config, environment };
  const rows = Object.entries(parts).filter(([, part]) => Object.keys(part).length).map(([name, part]) => {
    const pairs = Object.entries(part).map(([option, value]) => pair(option, value));
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, ...pairs));
  });
  $("config").replaceChildren(make("tbody", {}, ...rows));
}

function drawFacts(run) {
  $("run-facts").replaceChildren(
    make("span", { class: "badge", "data-is": run.status }, run.status),
    ...(run.reason ? [make("span", { class: "reason" }, run.reason)] : []),
    pair("validation loss", run.result.val_loss),
    pair("best", run.result.best_val_loss),
    pair("bits a byte", run.result.val_bpb),
    pair("largest logit", run.result.max_logit),
    pair("tokens", run.result.tokens),
    pair("seconds a step", run.step_seconds),
    pair("fingerprint", run.key),
    ...(before ? [pair("dotted, for comparison, the run opened before:", before.name)] : []),
  );
}

/** Show the run with this fingerprint. */
function openRun(key) {
  const data = $(`data-${key}`);
  const run = data && JSON.parse(data.textContent);
  $("run").hidden = false;
  $("run-body").hidden = !run;
  $("run-title").textContent = run ? run.name : `There is no run ${key} on this page`;
  if (!run) return $("run-facts").replaceChildren();
  if (opened && opened.key !== key) before = opened;
  opened = run;
  drawFacts(run);
  drawConfig(run);
  offerMeasures(run);
  fitSlider(Infinity);
  drawHeat();
  drawCurves(run);
}

$("measure").addEventListener("change", () => {
  fitSlider(Number($("step").textContent));
  drawHeat();
});
$("slider").addEventListener("input", drawHeat);
for (const query of [matchMedia("(prefers-color-scheme: dark)"), coarse])
  query.addEventListener("change", () => opened && !$("run").hidden && drawCurves(opened));
