// Charts in SVG. Each is drawn for the width that it has, and again when that changes.
function responsive(draw) {
  const home = node("div", { class: "chart" });
  let width = 0;
  const redraw = (force) => {
    const now = Math.max(260, Math.round(home.clientWidth));
    if (!home.clientWidth || (now === width && force !== true)) return;
    width = now;
    home.replaceChildren(draw(width));
  };
  new ResizeObserver(redraw).observe(home);
  home.redraw = () => redraw(true);
  return home;
}
function ticks(low, high, count = 4) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) found.push(place * step || 0);
  return found;
}
const scale = (low, high, start, end) => (value) => start + ((value - low) / (high - low || 1)) * (end - start);
const frame = (width, height, left = 66) => ({ width, height, left, right: width - 12, top: 18, bottom: height - 34 });
const picture = (box, label, attributes, ...children) =>
  mark("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img", "aria-label": label, ...attributes }, ...children);
function yAxis(box, y, places, format) {
  return mark("g", { "aria-hidden": "true" }, ...places.flatMap((place) => [
    mark("line", { class: "grid", x1: box.left, x2: box.right, y1: y(place), y2: y(place) }),
    mark("text", { class: "soft", x: box.left - 7, y: y(place) + 4, "text-anchor": "end" }, format(place))]));
}
function xAxis(box, x, places, format, label) {
  return mark("g", { "aria-hidden": "true" }, mark("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
    ...places.map((place) => mark("text", { class: "soft", x: x(place), y: box.bottom + 15, "text-anchor": "middle" }, format(place))),
    mark("text", { class: "soft", x: box.right, y: box.height - 4, "text-anchor": "end" }, label));
}
function budgetLine(box, y, size, start) {
  return mark("g", { class: "budget-line" }, mark("line", { class: "budget", x1: box.left, x2: box.right, y1: y(size), y2: y(size) }),
    mark("text", { class: "budget-word", x: start ? box.left + 4 : box.right - 2, y: y(size) - 5, "text-anchor": start ? "start" : "end" }, `budget ${bytes(size)}`));
}

// A name that must fit: of layers the end is kept, which tells them apart, of words the beginning.
const cut = (text, most) => (text.length <= most ? text : text.includes(" ") ? `${text.slice(0, most - 1)}…` : `…${text.slice(1 - most).replace(/^\./, "")}`);

// A step's live bytes stacked by category. The arrow keys, Home, End and P (the peak) move the chosen moment.
function timelineChart(name, step, budget) {
  const count = step.totals.length, kinds = kindsOf(step.parts);
  const shown = node("div"), said = node("p", { class: "readout", role: "status", "aria-live": "polite" });
  let chosen = step.peak_column, pinned = true, move = () => {};
  const phase = (column) => (step.spans.find((span) => column < span.end) || { phase: "" }).phase;
  function choose(column) {
    chosen = Math.max(0, Math.min(count - 1, column));
    move();
    shown.replaceChildren(legend([...kinds].reverse().map((kind) => ({ ...look(kind), value: bytes(step.parts[kind][chosen]) }))));
    const where = chosen === step.peak_column ? ", the peak" : "";
    said.textContent = `Moment ${chosen + 1} of ${count} (${phase(chosen)}${where}): ${bytes(step.totals[chosen])} alive`;
  }
  const chart = responsive((width) => {
    const box = frame(width, Math.min(320, Math.max(220, width * 0.42)));
    const most = Math.max(...step.totals), near = isNumber(budget) && budget < 3 * most;
    const top = (near ? Math.max(most, budget) : most) * 1.08 || 1;
    const x = scale(0, count, box.left, box.right), y = scale(0, top, box.bottom, box.top);
    const base = new Array(count).fill(0);
    const areas = kinds.map((kind) => {
      const low = [...base], sizes = step.parts[kind];
      sizes.forEach((size, column) => { base[column] += size; });
      const at = (level, column, end) => `${x(column + end).toFixed(1)} ${y(level[column]).toFixed(1)}`;
      const up = sizes.map((_, column) => `L${at(base, column, 0)}L${at(base, column, 1)}`).join("");
      const back = sizes.map((_, column) => `L${at(low, column, 1)}L${at(low, column, 0)}`).reverse().join("");
      return mark("path", { class: "area", "data-kind": kind, fill: look(kind).colour, d: `M${x(0)} ${y(low[0])}${up}${back}Z` });
    });
    const bands = step.spans.map((span, place) => mark("g", {},
      mark("rect", { x: x(span.first), y: box.bottom + 3, width: Math.max(0, x(span.end) - x(span.first) - 1), height: 4, fill: place % 2 ? "var(--muted)" : "var(--line)" }),
      x(span.end) - x(span.first) > 56 ? mark("text", { class: "soft", x: (x(span.first) + x(span.end)) / 2, y: box.bottom + 21, "text-anchor": "middle" }, span.phase) : null));
    const cursor = mark("line", { class: "cursor", y1: box.top, y2: box.bottom });
    const dot = mark("circle", { r: 4, fill: "var(--ink)", class: "peak-dot", cx: x(step.peak_column + 0.5), cy: y(step.totals[step.peak_column]) });
    const above = (height) => (near && y(budget) < height && y(budget) > height - 24 ? y(budget) : height) - 7; // nor the budget's
    const late = x(step.peak_column + 0.5) > box.right - 80; // then its number is left of the cursor's line, which must not cross it
    const peak = mark("text", { class: "peak-word", x: x(step.peak_column + 0.5) + (late ? -7 : 7), y: above(y(most)), "text-anchor": late ? "end" : "start" }, bytes(step.totals[step.peak_column]));
    move = () => { for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(chosen + 0.5)); };
    const column = (event) => {
      const area = event.currentTarget.getBoundingClientRect();
      return Math.floor(((event.clientX - area.left) * box.width / area.width - box.left) / (box.right - box.left) * count);
    };
    const keys = { ArrowLeft: () => chosen - 1, ArrowRight: () => chosen + 1, PageUp: () => chosen - 25, PageDown: () => chosen + 25, Home: () => 0, End: () => count - 1, p: () => step.peak_column, P: () => step.peak_column };
    const label = `Memory of the ${name} step over time, stacked by category; peak ${bytes(step.peak.bytes)} in ${step.peak.phase}. Arrow keys move through it, P goes to the peak.`;
    const drawn = picture(box, label, {
      class: "timeline", tabindex: 0,
      onpointermove: (event) => { if (!pinned) choose(column(event)); },
      onpointerenter: () => { pinned = false; },
      onclick: (event) => { choose(column(event)); pinned = true; },
      onkeydown: (event) => { if (Object.hasOwn(keys, event.key) && !event.ctrlKey && !event.metaKey) { event.preventDefault(); choose(keys[event.key]()); } },
    }, yAxis(box, y, ticks(0, top), (size) => bytes(size, 3)), ...areas, ...bands, near ? budgetLine(box, y, budget, step.peak_column > count / 2) : null, dot, peak, cursor);
    move();
    return drawn;
  });
  const jump = node("button", { type: "button", class: "jump", onclick: () => { pinned = true; choose(step.peak_column); chart.querySelector("svg").focus(); } }, "Jump to the peak");
  choose(step.peak_column);
  return node("div", {}, node("div", { class: "controls" }, jump), chart, shown, said);
}

// Series by update: {label, colour, points: [{x, y, low, high}]}, and lines: {label, value} across.
function lineChart(label, series, format, { lines = [], stepped = false, zero = false, end = 0 } = {}) {
  const said = node("p", { class: "readout", role: "status", "aria-live": "polite" }, "Point at the chart, or use the arrow keys, for values.");
  const places = [...new Set(series.flatMap((one) => one.points.map((point) => point.x)))].sort((a, b) => a - b);
  const last = Math.max(places.at(-1), end);
  let chosen = places.length - 1;
  const chart = responsive((width) => {
    const box = frame(width, Math.min(240, Math.max(180, width * 0.4)));
    const all = [...series.flatMap((one) => one.points.flatMap((point) => [point.low, point.high])), ...lines.map((line) => line.value)].filter(isNumber);
    let [low, high] = [zero ? 0 : Math.min(...all), Math.max(...all)];
    const air = (high - low || Math.abs(high) || 1) * 0.08;
    [low, high] = [zero ? 0 : low - air, high + air];
    const x = scale(places.length > 1 && !stepped ? places[0] : 0, last, box.left, box.right - 8), y = scale(low, high, box.bottom, box.top);
    const drawn = series.map((one) => {
      const put = (key) => one.points.map((point) => `${x(point.x).toFixed(1)} ${y(point[key]).toFixed(1)}`);
      let path = `M${put("y").join("L")}`;
      if (stepped) path = one.points.map((point, place) => `${place ? "H" + x(point.x).toFixed(1) + "V" + y(point.y).toFixed(1) : "M" + x(point.x).toFixed(1) + " " + y(point.y).toFixed(1)}`).join("") + `H${box.right - 8}`;
      return mark("g", {}, mark("path", { d: `M${put("high").join("L")}L${put("low").reverse().join("L")}Z`, fill: one.colour, opacity: 0.18 }),
        mark("path", { class: "curve", d: path, fill: "none", stroke: one.colour, "stroke-width": 2, "stroke-dasharray": one.dash || null, "stroke-linejoin": "round" }),
        ...(one.points.length <= 40 ? one.points.map((point) => mark("circle", { cx: x(point.x), cy: y(point.y), r: 3, fill: one.colour })) : []));
    });
    const cursor = mark("line", { class: "cursor", y1: box.top, y2: box.bottom, x1: -9, x2: -9 });
    function choose(place) {
      chosen = Math.max(0, Math.min(places.length - 1, place));
      for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(places[chosen]));
      const values = series.map((one) => {
        const point = [...one.points].reverse().find((candidate) => candidate.x <= places[chosen]);
        return point ? `${one.label ? one.label + ": " : ""}${format(point.y)}` : null;
      });
      said.textContent = `Update ${places[chosen].toLocaleString("en")}: ${values.filter(Boolean).join("; ")}`;
    }
    const nearest = (event) => {
      const area = event.currentTarget.getBoundingClientRect();
      const at = (event.clientX - area.left) * box.width / area.width;
      return places.reduce((best, place, number) => (Math.abs(x(place) - at) < Math.abs(x(places[best]) - at) ? number : best), 0);
    };
    const keys = { ArrowLeft: () => chosen - 1, ArrowRight: () => chosen + 1, Home: () => 0, End: () => places.length - 1 };
    const crossed = (line) => lines.some((other) => other !== line && other.value >= line.value && y(other.value) > y(line.value) - 24); // then its word goes below it
    const across = lines.filter((line) => isNumber(line.value)).map((line) => mark("g", {},
      mark("line", { class: "budget", x1: box.left, x2: box.right, y1: y(line.value), y2: y(line.value), style: line.colour ? `stroke:${line.colour}` : null }),
      mark("text", { class: "budget-word", style: line.colour ? `fill:${line.colour}` : null, x: line.start ? box.left + 4 : box.right - 2, y: y(line.value) + (crossed(line) ? 14 : -5), "text-anchor": line.start ? "start" : "end" }, line.label)));
    return picture(box, `${label} by update. Arrow keys move through it.`, {
      class: "lines", tabindex: 0, onpointermove: (event) => choose(nearest(event)), onclick: (event) => choose(nearest(event)),
      onkeydown: (event) => { if (Object.hasOwn(keys, event.key)) { event.preventDefault(); choose(keys[event.key]()); } },
    }, yAxis(box, y, ticks(low, high), format), xAxis(box, x, ticks(x(0) >= box.left ? 0 : places[0], last, width < 500 ? 3 : 5).filter((place) => place >= places[0] || stepped), (place) => place.toLocaleString("en"), "updates"), ...drawn, ...across, cursor);
  });
  return node("figure", {}, node("h3", {}, label), chart, series.length > 1 ? legend(series) : null, said);
}

// Rectangles with areas as `sizes` (largest first) that fill a box, as square as they can be.
function squarified(sizes, box) {
  const total = sizes.reduce((sum, size) => sum + size, 0) || 1, unit = (box.w * box.h) / total, out = [];
  let { x, y, w, h } = box, place = 0;
  const worst = (row, side) => {
    const sum = row.reduce((a, b) => a + b, 0);
    return Math.max(...row.map((area) => Math.max((side * side * area) / (sum * sum), (sum * sum) / (side * side * area))));
  };
  while (place < sizes.length) {
    const side = Math.min(w, h), row = [sizes[place++] * unit];
    while (place < sizes.length && worst([...row, sizes[place] * unit], side) <= worst(row, side)) row.push(sizes[place++] * unit);
    const depth = row.reduce((a, b) => a + b, 0) / (side || 1);
    let along = 0;
    for (const area of row) {
      const length = area / (depth || 1);
      out.push(w < h ? { x: x + along, y, w: length, h: depth } : { x, y: y + along, w: depth, h: length });
      along += length;
    }
    if (w < h) { y += depth; h -= depth; } else { x += depth; w -= depth; }
  }
  return out;
}
const isLight = (colour) => {
  const [red, green, blue] = [1, 3, 5].map((place) => parseInt(colour.slice(place, place + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 128;
};
function treemap(name, step) {
  const modules = step.modules.filter((one) => one.bytes > 0), total = modules.reduce((sum, one) => sum + one.bytes, 0);
  return responsive((width) => {
    const box = { width, height: Math.min(460, Math.max(300, width * 0.5)) };
    const rectangles = squarified(modules.map((one) => one.bytes), { x: 0, y: 0, w: width, h: box.height });
    const cells = modules.map((one, place) => {
      const { x, y, w, h } = rectangles[place], { module, bytes: size, ...parts } = one;
      const kinds = kindsOf(parts), lines = kinds.map((kind) => `${look(kind).label} ${bytes(parts[kind])}`);
      const text = `${layer(module)}\n${bytes(size)}, ${((100 * size) / total).toFixed(1)}% of the peak\n${lines.join("\n")}`;
      let along = 0;
      const strips = kinds.map((kind) => {
        const share = (parts[kind] / size) * (w >= h ? w : h), at = along;
        along += share;
        return mark("rect", { fill: look(kind).colour, ...(w >= h ? { x: x + at, y, width: share, height: h } : { x, y: y + at, width: w, height: share }) });
      });
      const widest = kinds.reduce((best, kind) => (parts[kind] > parts[best] ? kind : best), kinds[0]);
      const letters = Math.floor((w - 10) / 7), full = layer(module), fits = letters > 4 && h > 20;
      const offset = w >= h ? kinds.slice(0, kinds.indexOf(widest)).reduce((sum, kind) => sum + (parts[kind] / size) * w, 0) : 0;
      const room = Math.floor((w - offset - 10) / 7), low = w >= h ? 0 : kinds.slice(0, kinds.indexOf(widest)).reduce((sum, kind) => sum + (parts[kind] / size) * h, 0);
      const writing = fits && room > 4 && h - low > 20 ? [mark("text", { class: isLight(look(widest).colour) ? "on-light" : "on-dark", x: x + offset + 5, y: y + low + 15 }, cut(full, room)),
        h - low > 38 ? mark("text", { class: isLight(look(widest).colour) ? "on-light" : "on-dark", x: x + offset + 5, y: y + low + 30 }, bytes(size, 3)) : null] : [];
      return told(mark("g", { class: "module" }, ...strips, mark("rect", { class: "cell", x, y, width: w, height: h, fill: "none" }), ...writing), text);
    });
    return mark("svg", { viewBox: `0 0 ${width} ${box.height}`, class: "treemap", role: "group", "aria-label": `Layers of the ${name} step by the bytes that they hold at the peak` }, ...cells);
  });
}

// Horizontal bars: {label, parts: {kind: bytes}} or {label, size, colour}; a line for the budget.
function bars(label, rows, budget) {
  const total = (row) => (row.parts ? Object.values(row.parts).reduce((sum, size) => sum + size, 0) : row.size);
  return responsive((width) => {
    const left = Math.min(190, width * 0.34), each = 34, box = { width, height: rows.length * each + 34 };
    const x = scale(0, Math.max(...rows.map(total), isNumber(budget) ? budget : 0) * 1.02 || 1, left, width - 84);
    const after = (end) => (isNumber(budget) && x(budget) > end && x(budget) < end + 76 ? x(budget) : end) + 6; // the budget's line must not cross a number
    const drawn = rows.map((row, place) => {
      let at = 0;
      const parts = row.parts ? kindsOf(row.parts).filter((kind) => row.parts[kind] > 0).map((kind) => ({ name: look(kind).label, colour: look(kind).colour, size: row.parts[kind] })) : [{ name: "", colour: row.colour, size: row.size }];
      const most = Math.floor(left / 7), y = place * each + 22;
      return mark("g", {}, mark("text", { x: left - 8, y: y + 16, "text-anchor": "end" }, cut(row.label, most)),
        ...parts.map((part) => {
          const start = x(at);
          at += part.size;
          return told(mark("g", { class: "bar" }, mark("rect", { x: start, y, width: Math.max(0.5, x(at) - start), height: 22, fill: part.colour })), `${row.label}\n${part.name ? part.name + " " : ""}${bytes(part.size)}`);
        }),
        mark("text", { x: after(x(at)), y: y + 16 }, bytes(total(row))));
    });
    const line = isNumber(budget) ? mark("g", {}, mark("line", { class: "budget", x1: x(budget), x2: x(budget), y1: 16, y2: box.height - 8 }),
      mark("text", { class: "budget-word", x: Math.min(Math.max(x(budget), 70), width - 70), y: 12, "text-anchor": "middle" }, `budget ${bytes(budget)}`)) : null;
    return mark("svg", { viewBox: `0 0 ${width} ${box.height}`, role: "group", class: "bars", "aria-label": label }, ...drawn, line);
  });
}

// Points {label, cost, quality, interval, paper}: the cost on a logarithmic axis, and the best of each kind joined.
function scatter(label, points, quality, cost, format) {
  const best = (group) => [...group].sort((a, b) => a.cost - b.cost || b.quality - a.quality)
    .filter((point, place, sorted) => sorted.slice(0, place).every((other) => other.quality < point.quality));
  return responsive((width) => {
    const box = frame(width, Math.min(420, Math.max(260, width * 0.5)), 52);
    const logs = points.map((point) => Math.log10(point.cost)), values = points.flatMap((point) => [point.quality - (point.interval || 0), point.quality + (point.interval || 0)]);
    const wide = (Math.max(...logs) - Math.min(...logs) || 1) * 0.06, tall = (Math.max(...values) - Math.min(...values) || 1) * 0.08;
    const [first, end, low, high] = [Math.min(...logs) - wide, Math.max(...logs) + wide, Math.min(...values) - tall, Math.max(...values) + tall];
    const x = scale(first, end, box.left, box.right), y = scale(low, high, box.bottom, box.top);
    const powers = Array.from({ length: Math.ceil(end) - Math.floor(first) }, (_, place) => 10 ** (Math.floor(first) + place));
    const wholes = end - first < 0.8 ? ticks(10 ** first, 10 ** end, 6) : powers.flatMap((power) => [power, 2 * power, 5 * power]);
    const round = wholes.map(Math.log10).filter((place) => place >= first && place <= end);
    const room = round.reduce((kept, place) => (x(place) < box.right - 20 && (!kept.length || x(place) - x(kept.at(-1)) > 58) ? [...kept, place] : kept), []);
    const drawn = [true, false].flatMap((paper) => {
      const group = points.filter((point) => point.paper === paper), colour = paper ? "var(--b)" : "var(--a)";
      const at = (point) => [x(Math.log10(point.cost)), y(point.quality)];
      return [mark("path", { d: best(group).map((point, place) => `${place ? "L" : "M"}${at(point).join(" ")}`).join("") || "M0 0", fill: "none", stroke: colour, "stroke-width": 1.5, "stroke-dasharray": paper ? "4 4" : null, opacity: 0.7 }),
        ...group.map((point) => {
          const [px, py] = at(point), spread = point.interval ? mark("line", { x1: px, x2: px, y1: y(point.quality - point.interval), y2: y(point.quality + point.interval), stroke: colour }) : null;
          const shape = paper ? mark("path", { d: `M${px} ${py - 7}l7 7l-7 7l-7 -7Z`, fill: "var(--card)", stroke: colour, "stroke-width": 2 }) : mark("circle", { cx: px, cy: py, r: 6, fill: colour });
          const text = `${point.label} (${paper ? "the paper" : "ours"})\n${format(point.cost)}\n${quality} ${plain(point.quality)}${point.interval ? ` ± ${plain(point.interval)}` : ""}`;
          return told(mark("g", { class: paper ? "point paper" : "point" }, spread, shape), text);
        })];
    });
    return mark("svg", { viewBox: `0 0 ${width} ${box.height}`, role: "group", class: "scatter", "aria-label": label },
      yAxis(box, y, ticks(low, high), plain), xAxis(box, x, room, (place) => format(10 ** place, 2), `${cost}, logarithmic`),
      mark("text", { class: "soft", x: 4, y: 12 }, quality), ...drawn);
  });
}
