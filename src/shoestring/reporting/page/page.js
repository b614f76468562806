"use strict";
// Elements, words and tables. Text reaches the page as text only: nothing in the data is ever read as HTML.
const DATA = JSON.parse(document.getElementById("data").textContent);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const node = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const mark = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

// -- words ----------------------------------------------------------------------------------------------------
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
function bytes(size, digits = 4) {
  if (!isNumber(size)) return "not known";
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "KB"]])
    if (Math.abs(size) >= factor) return `${Number((size / factor).toPrecision(digits))} ${unit}`;
  return `${Math.round(size)} B`;
}
const duration = (seconds, digits = 4) => {
  const [factor, unit] = seconds < 120 ? [1, "s"] : seconds < 7200 ? [60, "min"] : [3600, "h"];
  return `${Number((seconds / factor).toPrecision(digits)).toLocaleString("en")} ${unit}`;
};
const plain = (value) => (isNumber(value) ? Number(value.toPrecision(4)).toLocaleString("en") : "not known");
const look = (kind) => (Object.hasOwn(DATA.looks, kind) ? DATA.looks[kind] : { label: kind.replaceAll("_", " "), colour: "#7a7a7a" });
const kindsOf = (parts) => [...Object.keys(DATA.looks), ...Object.keys(parts).filter((kind) => !Object.hasOwn(DATA.looks, kind))]
  .filter((kind) => Object.hasOwn(parts, kind));
const layer = (name) => name || "(the model as a whole)";
function words(value) {
  if (value === null || value === undefined || value === "") return "-";
  if (isNumber(value)) return Number.isInteger(value) ? value.toLocaleString("en") : plain(value);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

// -- what is said beside a mark, by pointer or by keyboard ------------------------------------------------------
const tip = document.getElementById("tip");
let spoken = null; // the mark beside which something is said
function showTip(text, element, event) {
  spoken = [text, element];
  tip.textContent = text;
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  const [x, y] = event && event.clientX ? [event.clientX, event.clientY] : [box.left + box.width / 2, box.top + box.height / 2];
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${y + tip.offsetHeight + 20 > innerHeight ? y - tip.offsetHeight - 12 : y + 14}px`;
}
const hideTip = () => { spoken = null; tip.hidden = true; };
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", () => { if (spoken) showTip(...spoken); }, true); // a mark that gets the focus is scrolled to
function told(element, text) {
  fill(element, { tabindex: 0, role: "img", "aria-label": text.replaceAll("\n", ", ") }, []);
  for (const name of ["pointermove", "click", "focus"]) element.addEventListener(name, (event) => showTip(text, element, event));
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, hideTip);
  return element;
}

// -- parts of the page ------------------------------------------------------------------------------------------
function section(id, heading, ...children) {
  document.getElementById("main").append(node("section", { id, "aria-labelledby": `${id}-title` }, node("h2", { id: `${id}-title` }, heading), ...children));
  document.getElementById("contents").append(node("a", { href: `#${id}` }, heading));
}
function legend(entries) {
  return node("ul", { class: "legend" }, ...entries.map(({ label, colour, value }) =>
    node("li", {}, node("span", { class: "swatch", style: `background:${colour}`, "aria-hidden": "true" }), label, value ? node("b", {}, ` ${value}`) : null)));
}
// columns: {label, value(row), text(row), figure}; a click on a heading sorts by it
function table(caption, columns, rows, { sorted = null, rowClass = () => null, long = false } = {}) {
  const body = node("tbody");
  const heads = columns.map((column, place) => node("th", { scope: "col", class: column.figure ? "figure" : null, "aria-sort": "none" },
    node("button", { type: "button", onclick: () => sort(place) }, column.label)));
  const draw = (order) => body.replaceChildren(...order.map((row) => node("tr", { class: rowClass(row) }, ...columns.map((column, place) =>
    node(place ? "td" : "th", { class: [column.figure ? "figure" : "", column.look ? column.look(row) : ""].join(" ").trim() || null, scope: place ? null : "row" },
      (column.text || ((one) => words(column.value(one))))(row))))));
  function sort(place) {
    const up = heads[place].getAttribute("aria-sort") !== "ascending";
    heads.forEach((head, other) => head.setAttribute("aria-sort", other !== place ? "none" : up ? "ascending" : "descending"));
    const known = (row) => { const value = columns[place].value(row); return value === null || value === undefined ? null : value; };
    draw([...rows].sort((one, other) => {
      const [a, b] = [known(one), known(other)];
      if (a === null || b === null) return (a === null) - (b === null); // what is not known comes last
      return (isNumber(a) && isNumber(b) ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })) * (up ? 1 : -1);
    }));
  }
  draw(rows);
  if (sorted !== null) heads[sorted].setAttribute("aria-sort", "descending");
  return node("div", { class: long ? "scroll long" : "scroll", tabindex: 0, role: "region", "aria-label": caption },
    node("table", {}, node("caption", {}, caption), node("thead", {}, node("tr", {}, ...heads)), body));
}

const link = document.getElementById("download");
link.addEventListener("click", () => {
  link.href = URL.createObjectURL(new Blob([document.getElementById("data").textContent], { type: "application/json" }));
  link.download = "shoestring.json";
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
});
