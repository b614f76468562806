// What the page shows, from its data.
const COLOURS = ["var(--a)", "var(--b)"];
const { runs, study } = DATA;
const record = (run) => run.record || {};
const said = (text) => (runs.length > 1 ? text : text[0].toUpperCase() + text.slice(1)); // after a run's name, or alone
const named = (run) => (runs.length > 1 ? `${run.name}: ` : "");

const judged = (name, value) => (name === "accuracy" ? `${value.toFixed(1)}%` : plain(value));
function facts(run) {
  const { quality_name: name, quality, best_quality: best, best_update: at, seconds, budget_bytes: budget } = record(run);
  const found = [["predicted peak", bytes(record(run).predicted_peak_bytes)], ["measured peak", bytes(record(run).measured_peak_bytes)]];
  if (isNumber(budget)) found.push(["budget", bytes(budget)]);
  if (isNumber(quality)) found.push([`${name} at the end`, judged(name, quality)]);
  if (isNumber(best)) found.push([`best ${name}${isNumber(at) ? `, update ${at.toLocaleString("en")}` : ""}`, judged(name, best)]);
  if (isNumber(seconds)) found.push(["trained for", duration(seconds)]);
  return node("dl", { class: "facts" }, ...found.map(([word, value]) => node("div", {}, node("dt", {}, word), node("dd", {}, value))));
}
function summary() {
  section("run", runs.length > 1 ? "The runs" : "The run", ...runs.flatMap((run) => [
    runs.length > 1 ? node("h3", {}, run.name) : null,
    node("p", { class: "state" }, `${record(run).task || "A run"}: ${run.state}.`),
    node("p", {}, Object.keys(run.techniques).length ? `Techniques: ${Object.entries(run.techniques).map(([key, value]) => `${key} ${value}`).join(", ")}.` : "No techniques: plain training."),
    facts(run), ...run.notes.map((note) => node("p", { class: "note" }, note))]));
}

function timelines() {
  const shown = runs.flatMap((run) => Object.entries(run.steps).map(([name, step]) => ({ run, name, step })));
  if (!shown.length) return;
  section("step", "Memory of a step", node("p", { class: "muted" }, "Bytes alive at each moment of a training step, by what they are for, as predicted by tracing it; from left to right allocations in their order (not time). Point at a moment, or use the arrow keys, for its values; a click keeps it."),
    ...shown.map(({ run, name, step }) => node("figure", {}, node("h3", {}, `${named(run)}${name} step, peak ${bytes(step.peak.bytes)}`),
      timelineChart(name, step, record(run).budget_bytes),
      node("p", {}, `The peak is in ${step.peak.phase}, at ${step.peak.operation || "the start"} of ${layer(step.peak.module)}.`),
      node("details", {}, node("summary", {}, `What is alive at the peak of the ${name} step`), alive(name, step)),
      ...(step.notes || []).map((note) => node("p", { class: "muted" }, `Note: ${note}.`)))));
}
const alive = (name, step) => table(`Alive at the peak of the ${name} step`, [
  { label: "layer", value: (row) => row.module, text: (row) => layer(row.module) },
  { label: "operation", value: (row) => row.operation },
  { label: "category", value: (row) => row.category, text: (row) => look(row.category).label },
  { label: "bytes", value: (row) => row.bytes, text: (row) => bytes(row.bytes), figure: true },
  { label: "storages", value: (row) => row.storages, figure: true }], step.alive || [], { sorted: 3, long: true });

function layers() {
  const shown = runs.flatMap((run) => Object.entries(run.steps).filter(([, step]) => (step.modules || []).length).map(([name, step]) => ({ label: `${named(run)}${name} step`, name, step })));
  if (!shown.length) return;
  const home = node("div"), kinds = [...new Set(shown.flatMap(({ step }) => Object.keys(step.parts)))];
  const draw = (place) => home.replaceChildren(treemap(shown[place].name, shown[place].step));
  const first = Math.max(0, shown.findIndex(({ name }) => name === "lean"));
  const choice = node("select", { id: "layers-of", onchange: (event) => draw(Number(event.target.value)) }, ...shown.map(({ label }, place) => node("option", { value: place, selected: place === first }, label)));
  draw(first);
  section("layers", "Layers at the peak", node("p", { class: "muted" }, "Each rectangle is a layer, as large as the bytes that it holds at the peak."),
    node("div", { class: "controls" }, node("label", { for: "layers-of" }, "of the"), choice), home,
    legend(kindsOf(Object.fromEntries(kinds.map((kind) => [kind, 1]))).map(look)));
}

function saved() {
  const shown = runs.filter((run) => ((run.steps.lean || {}).stored || []).length);
  if (!shown.length) return;
  const size = (label, key) => ({ label, value: (row) => row[key], text: (row) => bytes(row[key]), figure: true });
  const share = (row) => row.stored_bytes / row.exact_bytes, percent = (part) => `${(100 * part).toFixed(1)}%`;
  const sum = (rows, key) => rows.reduce((total, row) => total + row[key], 0);
  section("saved", "Saved activations", ...shown.flatMap((run) => {
    const rows = run.steps.lean.stored, exact = sum(rows, "exact_bytes"), kept = sum(rows, "stored_bytes");
    return [node("p", {}, `${named(run)}${said("what codecs take")} of a microbatch is stored in ${bytes(kept)} in place of ${bytes(exact)}, ${percent(kept / exact)}.`),
      table("Saved activations, exact and as they are stored", [
        { label: "layer", value: (row) => row.module, text: (row) => layer(row.module) },
        { label: "operation", value: (row) => row.operation, text: (row) => row.operation || "input of a region" },
        { label: "codec", value: (row) => row.codec }, size("exact", "exact_bytes"), size("stored", "stored_bytes"),
        { label: "share", value: share, text: (row) => percent(share(row)), figure: true },
        { label: "fidelity", value: (row) => row.cosine, text: (row) => (isNumber(row.cosine) ? row.cosine.toFixed(4) : "-"), figure: true }], rows, { long: true })];
  }), node("p", { class: "muted" }, "Fidelity is the cosine between a layer's weight gradient under the codec and the exact one: ", node("code", {}, "shoestring fidelity MODEL --json"), " measures it, and ", node("code", {}, "shoestring report RUN --fidelity FILE"), " shows it here."));
}

function predictions() {
  const rows = runs.flatMap((run) => {
    const { predicted_bytes: parts, predicted_peak_bytes: predicted, measured_peak_bytes: measured } = record(run), found = [];
    const whole = parts && typeof parts === "object" && Object.keys(parts).length;
    if (isNumber(predicted)) found.push({ label: `${named(run)}predicted`, ...(whole ? { parts } : { size: predicted, colour: "var(--a)" }) });
    if (isNumber(measured)) found.push({ label: `${named(run)}measured`, size: measured, colour: "var(--line)" });
    return found;
  });
  if (!rows.length) return;
  const parts = Object.assign({}, ...rows.map((row) => row.parts || {})), budgets = [...new Set(runs.map((run) => record(run).budget_bytes))];
  section("prediction", "Predicted against measured", bars("Predicted and measured peaks", rows, budgets.length === 1 ? budgets[0] : null),
    legend([...kindsOf(parts).filter((kind) => parts[kind] > 0).map(look), { label: "measured", colour: "var(--line)" }]),
    ...runs.map((run) => {
      const { predicted_peak_bytes: predicted, measured_peak_bytes: measured, budget_bytes: budget, why_less: why } = record(run);
      if (!isNumber(predicted) || !isNumber(measured)) return node("p", { class: "note" }, `${named(run)}${said(isNumber(predicted) ? "no step of it was measured" : "its memory was not predicted")}.`);
      const within = isNumber(budget) ? `; ${measured <= budget ? "within" : "over"} the budget of ${bytes(budget)}` : "";
      if (predicted === measured) return node("p", {}, `${named(run)}${said("the memory was predicted to the byte")}${within}.`);
      return node("p", {}, `${named(run)}${said("the prediction")} is ${bytes(Math.abs(predicted - measured))} (${((100 * Math.abs(predicted - measured)) / measured).toFixed(2)}%) ${predicted < measured ? "under" : "over"} what was measured${within}${why ? ` (${why})` : ""}.`);
    }));
}

function curves() {
  const series = (key) => runs.map((run, place) => ({ label: runs.length > 1 ? run.name : "", colour: COLOURS[place], dash: place ? "6 3" : null, points: run.curves[key] })).filter((one) => one.points.length);
  const names = [...new Set(runs.map((run) => run.curves.quality_name).filter(Boolean))], charts = [];
  if (series("loss").length) charts.push(lineChart("Loss", series("loss"), plain));
  if (series("quality").length && names.length === 1) charts.push(lineChart(names[0].charAt(0).toUpperCase() + names[0].slice(1), series("quality"), plain));
  if (names.length > 1) charts.push(node("p", { class: "note" }, `The runs are judged by different figures (${names.join(" and ")}), which are not drawn in one chart.`));
  if (series("memory").length) {
    const lines = runs.length > 1 ? [] : [{ value: record(runs[0]).budget_bytes, label: `budget ${bytes(record(runs[0]).budget_bytes)}` }, { value: record(runs[0]).predicted_peak_bytes, label: "predicted", colour: "var(--muted)", start: true }].filter((line) => isNumber(line.value));
    charts.push(lineChart("Measured peak of a step, so far", series("memory"), (size) => bytes(size, 3), { lines, stepped: true, zero: true, end: Math.max(...runs.map((run) => run.update)) }));
  }
  if (series("lr").length) charts.push(lineChart("Learning rate", series("lr"), plain));
  if (charts.length) section("course", "Over the run", node("div", { class: "pair" }, ...charts));
}

function settings() {
  const flat = (run) => {
    const { settings: chosen = {}, environment = {}, updates, seconds, quality, best_quality: best, predicted_peak_bytes: predicted, measured_peak_bytes: measured, budget_bytes: budget } = record(run);
    const { techniques, ...others } = chosen;
    const rows = { "predicted peak": isNumber(predicted) ? bytes(predicted) : null, "measured peak": isNumber(measured) ? bytes(measured) : null, budget: isNumber(budget) ? bytes(budget) : null, quality, "best quality": best, "updates done": updates, seconds };
    for (const [key, value] of Object.entries(techniques || {})) rows[`technique: ${key}`] = value;
    for (const [key, value] of Object.entries(others)) rows[key] = value;
    for (const [key, value] of Object.entries(environment)) rows[`environment: ${key}`] = value;
    return rows;
  };
  const all = runs.map(flat), keys = [...new Set(all.flatMap(Object.keys))];
  const rows = keys.map((key) => ({ key, values: all.map((one) => words(one[key])) }));
  if (!rows.length) return;
  const differs = (row) => new Set(row.values).size > 1;
  const columns = [{ label: "", value: (row) => row.key }, ...runs.map((run, place) => ({ label: runs.length > 1 ? run.name : "value", value: (row) => row.values[place] }))];
  if (runs.length > 1) columns.push({ label: "same?", value: (row) => (differs(row) ? "differs" : "same") });
  columns[0].label = "setting or result";
  section("settings", runs.length > 1 ? "The runs compared" : "Settings and result", table(runs.length > 1 ? "Settings and results side by side; rows that differ are marked" : "Settings and result", columns, rows, { rowClass: (row) => (differs(row) ? "differs" : null) }));
}

function ofStudy() {
  section("study", "The study", node("p", {}, [study.place, study.title].filter(Boolean).join(": ") || study.name),
    node("p", {}, `Study ${study.name || "without a name"} at scale ${study.scale || "not said"}: ${study.rows.length} rows, ${study.claims.length} claims.`),
    ...study.rows.flatMap((row) => row.failed.map((reason) => node("p", { class: "note" }, `${row.label}: a trial failed: ${words(reason)}`))));
  const spread = (value, interval) => (isNumber(value) ? `${plain(value)}${isNumber(interval) ? ` ± ${plain(interval)}` : ""}` : "-");
  const size = (label, key) => ({ label, value: (row) => row[key], text: (row) => (isNumber(row[key]) ? bytes(row[key]) : "-"), figure: true });
  const name = (study.rows.find((row) => row.quality_name) || { quality_name: "quality" }).quality_name;
  if (study.claims.length) {
    const verdict = { label: "verdict", value: (claim) => claim.verdict, text: (claim) => `${claim.verdict === "confirmed" ? "✓ " : claim.verdict === "not confirmed" ? "✗ " : ""}${words(claim.verdict)}${claim.note ? ` (${claim.note})` : ""}`,
      look: (claim) => `verdict ${claim.verdict === "confirmed" ? "good" : claim.verdict === "not confirmed" ? "bad" : "muted"}` };
    section("claims", "Claims", table("What the paper claims, and what was found", [{ label: "claim", value: (claim) => claim.claim }, verdict,
      { label: "paper", value: (claim) => claim.paper, figure: true }, { label: "ours", value: (claim) => claim.ours, text: (claim) => spread(claim.ours, claim.interval), figure: true }], study.claims));
  }
  const known = (points) => points.filter((point) => isNumber(point.cost) && point.cost > 0 && isNumber(point.quality));
  const points = known(study.rows.flatMap((row) => [
    { label: row.label, cost: isNumber(row.measured_bytes) ? row.measured_bytes : row.predicted_bytes, quality: row.quality, interval: row.interval, paper: false },
    { label: row.label, cost: row.paper_bytes, quality: row.paper_quality, interval: row.paper_interval, paper: true }]));
  const cpus = [...new Set(study.rows.map((row) => row.step_cpu).filter(Boolean))].join(", ");
  const timed = known(study.rows.map((row) => ({ label: row.label, cost: row.step_seconds, quality: row.quality, interval: row.interval, paper: false })));
  if (points.length) section("pareto", "Memory, time and quality", node("p", { class: "muted" }, `Up and to the left is better; the lines join those that none beats in both. The paper trained at full scale${study.scale && study.scale !== "full" ? `, ours is at scale ${study.scale}: compare shapes, not heights` : ""}.`),
    points.some((point) => !point.paper) ? null : node("p", { class: "note" }, "Nothing of ours is trained at this scale: only the paper's points are drawn."),
    scatter(`${name} by memory`, points, name, "memory", bytes), timed.length ? scatter(`${name} by time`, timed, name, `processor time of a step, one thread${cpus ? ` of ${cpus}` : ""}`, duration) : null, legend([{ label: "ours (filled circles)", colour: "var(--a)" }, ...(points.some((point) => point.paper) ? [{ label: "the paper's (diamonds)", colour: "var(--b)" }] : [])]));
  const rates = new Set(study.rows.map((row) => row.lr_multiplier));
  const keys = [...new Set(study.rows.flatMap((row) => Object.keys(row.settings)))];
  section("rows", "Rows", table("Rows of the study; a heading sorts by its column", [{ label: "row", value: (row) => row.label },
    size("paper", "paper_bytes"), size("paper's rules", "rules_bytes"), size("predicted", "predicted_bytes"), size("measured", "measured_bytes"),
    { label: `${name}, paper`, value: (row) => row.paper_quality, text: (row) => spread(row.paper_quality, row.paper_interval), figure: true },
    { label: `${name}, ours`, value: (row) => row.quality, text: (row) => spread(row.quality, row.interval), figure: true },
    { label: "seeds", value: (row) => row.seeds, figure: true },
    { label: "step", value: (row) => row.step_seconds, text: (row) => (isNumber(row.step_seconds) ? duration(row.step_seconds) : "-"), figure: true },
    ...(rates.size > 1 ? [{ label: "learning rate, times the recipe's", value: (row) => row.lr_multiplier, figure: true }] : []),
    ...keys.map((key) => ({ label: key, value: (row) => row.settings[key] }))], study.rows));
}

if (runs.length) { summary(); timelines(); layers(); saved(); predictions(); curves(); settings(); }
if (study) ofStudy();
