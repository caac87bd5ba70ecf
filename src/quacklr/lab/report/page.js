"use strict";
/* Sorting and filtering the table of runs, and opening the run that the URL fragment names. */

const table = $("table");
const rows = table ? [...table.tBodies[0].rows] : [];
const texts = new Map(rows.map((row) => [row, `${row.dataset.name} ${row.textContent}`.replace(/\s+/g, " ")]));

/** The sort key of a row: a number or text, or null for an empty cell. */
function sortValue(row, index) {
  const { textContent, dataset } = row.cells[index];
  if (dataset.value === undefined) return textContent.trim() || null;
  return dataset.value === "" ? null : Number(dataset.value);
}

/** Rows without a value stay at the end in both directions. */
function compare(one, other, sign) {
  if (one === null || other === null) return (one === null) - (other === null);
  return sign * (typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true }));
}

function sortBy(header) {
  const index = header.cellIndex;
  const up = header.getAttribute("aria-sort") !== "ascending";
  for (const each of header.parentElement.cells) each.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", up ? "ascending" : "descending");
  const keyed = rows.map((row) => [row, sortValue(row, index)]);
  keyed.sort((one, other) => compare(one[1], other[1], up ? 1 : -1));
  table.tBodies[0].append(...keyed.map(([row]) => row));
}

/** A case-insensitive pattern for a phrase; `tau 1` does not match `tau 10`. */
function pattern(phrase) {
  const exact = phrase.replace(/[^\w\s]/g, "\\$&").replace(/\s+/g, " ");
  return new RegExp(/\s[\d.]+$/.test(phrase) ? `${exact}(?![\\d.])` : exact, "i");
}

/** Show the rows that contain all comma-separated phrases of the search and match all selected options. */
function filter() {
  const { text, ...chosen } = Object.fromEntries(new FormData($("filters")));
  const patterns = text.split(",").map((phrase) => pattern(phrase.trim()));
  const choices = Object.entries(chosen).filter(([, value]) => value);
  for (const row of rows)
    row.hidden =
      !patterns.every((each) => each.test(texts.get(row))) ||
      !choices.every(([name, value]) => row.dataset[name] === value);
  $("shown").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} runs`;
}

/** Open the run that the URL fragment names; any other fragment closes the open run. */
function route() {
  const key = /^#run=(.*)$/.exec(location.hash)?.[1];
  for (const row of rows) row.setAttribute("aria-current", row.dataset.key === key);
  if (key === undefined) {
    const was = opened && rows.find((row) => row.dataset.key === opened.key);
    if (!$("run").hidden) was?.querySelector("a").focus({ preventScroll: true });
    $("run").hidden = true;
    return;
  }
  openRun(key);
  $("run-title").focus({ preventScroll: true });
  $("run").scrollIntoView();
}

if (table) {
  for (const header of table.tHead.rows[0].cells)
    header.firstElementChild.addEventListener("click", () => sortBy(header));
  $("filters").addEventListener("input", filter);
  $("filters").addEventListener("submit", (event) => event.preventDefault());
  $("filters").addEventListener("reset", () => setTimeout(filter)); // the fields are empty only after the event
  table.tBodies[0].addEventListener("click", (event) => {
    const chosen = String(getSelection());
    if (!chosen && !event.target.closest("a")) location.hash = `run=${event.target.closest("tr").dataset.key}`;
  });
  filter(); // a reload can restore the fields
}

let unfolded = []; // opened for printing, closed afterwards
addEventListener("beforeprint", () => {
  unfolded = [...document.querySelectorAll("details:not([open])")];
  for (const each of unfolded) each.open = true;
});
addEventListener("afterprint", () => {
  for (const each of unfolded) each.open = false;
});
addEventListener("hashchange", route);
route();
