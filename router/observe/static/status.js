"use strict";
// Asks /status.json once a second and draws it. Everything from the server is put in as text, never as markup.

const SPAN_S = 180;
const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem("diptych-key") || "";

function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function svg(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [field, value] of Object.entries(attributes)) made.setAttribute(field, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

function count(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return String(Math.round(value * 10) / 10);
}

const bytes = (value) => (value ? `${count(value)}B` : "–");

function numbers(status) {
  const recent = status.series.filter((point) => point.age_s >= 1 && point.age_s <= 10);
  const sum = (field) => recent.reduce((total, point) => total + point[field], 0);
  const prompt = sum("prompt_tokens");
  const shown = [
    ["running", status.running],
    ["waiting for a first token", status.waiting],
    ["answers a second", count(sum("finished") / 10)],
    ["tokens a second", count(sum("tokens") / 10)],
    ["of prompts cached", prompt ? `${Math.round((100 * sum("cached_tokens")) / prompt)} %` : "–"],
    ["failed, last 10 s", sum("failed")],
  ];
  byId("numbers").replaceChildren(
    ...shown.map(([label, value]) => {
      const card = element("div", undefined, "number");
      card.append(element("b", String(value)), element("span", label));
      return card;
    }),
  );
}

function chart(id, points, fields, format) {
  const target = byId(id);
  const width = target.clientWidth || 400;
  const height = target.clientHeight || 140;
  const left = 46, bottom = 18, top = 6;
  const values = points.flatMap((point) => fields.map((field) => point[field])).filter((value) => value !== null);
  const most = Math.max(...values, 0) || 1;
  const x = (age) => left + ((width - left - 4) * (SPAN_S - age)) / SPAN_S;
  const y = (value) => top + (height - top - bottom) * (1 - value / most);
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.replaceChildren();
  for (const share of [0, 0.5, 1]) {
    const at = y(share * most);
    target.append(svg("line", { class: "grid", x1: left, x2: width, y1: at, y2: at }));
    target.append(svg("text", { x: left - 6, y: at + 3, "text-anchor": "end" }, format(share * most)));
  }
  for (const age of [180, 120, 60, 0]) {
    const anchor = age === 180 ? "start" : age === 0 ? "end" : "middle";
    target.append(svg("text", { x: x(age), y: height - 4, "text-anchor": anchor }, age ? `-${age} s` : "now"));
  }
  fields.forEach((field, number) => {
    const kind = number ? "p95" : "p50";
    let run = [];
    const flush = () => {
      if (run.length > 1) target.append(svg("polyline", { class: kind, points: run.map((p) => p.join(",")).join(" ") }));
      if (run.length === 1) target.append(svg("circle", { class: kind, cx: run[0][0], cy: run[0][1], r: 1.8 }));
      run = [];
    };
    let before = null;
    for (const point of points) {
      if (point[field] === null) continue;
      if (before !== null && before - point.age_s > 5) flush(); // no line across silence
      run.push([x(point.age_s).toFixed(1), y(point[field]).toFixed(1)]);
      before = point.age_s;
    }
    flush();
  });
}

function kvMap(worker) {
  // Shares of the pool in blocks: which block lies where is the worker's own matter.
  const canvas = element("canvas");
  const columns = 48, rows = 8, cells = columns * rows;
  canvas.width = columns * 4;
  canvas.height = rows * 4;
  const style = getComputedStyle(document.documentElement);
  const used = Math.round(worker.kv_usage * worker.num_blocks);
  const cached = Math.max(0, Math.min(worker.known_blocks, worker.num_blocks - used));
  const perCell = worker.num_blocks / cells;
  const paint = canvas.getContext("2d");
  for (let cell = 0; cell < cells; cell += 1) {
    const block = cell * perCell;
    const kind = block < used ? "--run" : block < used + cached ? "--cached" : "--free";
    paint.fillStyle = style.getPropertyValue(kind).trim();
    paint.fillRect((cell % columns) * 4, Math.floor(cell / columns) * 4, 3, 3);
  }
  canvas.title = `${used} blocks in use, ${cached} cached, ${worker.num_blocks} in all`;
  return [canvas, used, cached];
}

function gpuText(gpu) {
  const parts = [`${Math.round(100 * gpu.busy)}% busy`, `${Math.round(100 * gpu.memory_usage)}% of its memory`,
    `${Math.round(gpu.power_watts)} W`, `${Math.round(gpu.sm_clock_hz / 1e6)} MHz`];
  if (gpu.throttled.length) parts.push(`throttled: ${gpu.throttled.join(", ")}`);
  return parts.join(", ");
}

function workerCard(worker) {
  const card = element("article", undefined, "worker");
  card.dataset.worker = worker.id;
  const title = element("h3", worker.id);
  title.append(element("small", worker.role));
  const usable = !worker.why_not;
  title.append(element("span", usable ? worker.state : "not usable", `pill ${usable ? "good" : "bad"}`));
  card.append(title);
  if (worker.why_not) card.append(element("div", worker.why_not, "bad"));
  if (worker.untracked_workers) card.append(element("div", worker.untracked_workers, "bad"));
  const [canvas, used, cached] = kvMap(worker);
  card.append(canvas);
  const legend = element("div", undefined, "legend");
  for (const [kind, text] of [["run", `${used} in use`], ["cached", `${cached} cached`],
    ["free", `${worker.num_blocks - used - cached} free blocks`]]) {
    legend.append(element("i", undefined, kind), text);
  }
  card.append(legend);
  const list = element("dl");
  const links = Object.entries(worker.link_bytes_per_s);
  const rows = [
    ["running / at most", `${worker.running} / ${worker.max_num_seqs}`],
    ["waiting", `${worker.waiting} (${count(worker.waiting_prompt_tokens)} prompt tokens)`],
    ["placed, not ended", `${worker.pending_requests} (${count(worker.pending_tokens)} tokens)`],
    ["prefill", worker.prefill_tokens_per_s ? `${count(worker.prefill_tokens_per_s)} tokens/s` : "–"],
    ["decode step", worker.decode_step_s ? seconds(worker.decode_step_s) : "–"],
    ["cache index, breaker", `${worker.index_mode}, ${worker.breaker}`],
    ...(worker.gpu ? [["GPU", gpuText(worker.gpu)]] : []),
    ...links.map(([peer, rate]) => [`reads from ${peer}`, `${count(rate)}B/s`]),
    ...Object.entries(worker.pull_pays_from_tokens).map(([peer, tokens]) =>
      [`a pull from ${peer} pays`, tokens ? `from ${count(tokens)} tokens on` : "never"]),
  ];
  for (const [term, value] of rows) list.append(element("dt", term), element("dd", value));
  card.append(list);
  return card;
}

function rowsInto(id, rows) {
  byId(id).tBodies[0].replaceChildren(...rows.map((cells) => {
    const row = element("tr");
    for (const cell of cells) row.append(cell instanceof Node ? cell : element("td", String(cell)));
    return row;
  }));
}

const NONE = { workers: [], incompatible: [], placements: [] };

function workerCards(models) {
  if (models.length === 1) return models[0].cluster.workers.map(workerCard);
  return models.flatMap((one) => [element("h3", one.model, "model"), ...one.cluster.workers.map(workerCard)]);
}

function placements(models) {
  const all = models.flatMap((one) => one.cluster.placements.map((p) => ({ ...p, model: models.length > 1 ? one.model : "" })));
  return all.sort((a, b) => a.age_s - b.age_s);
}

function draw(status) {
  const models = [status, ...status.more_models].map((one) => ({ model: one.model, cluster: one.cluster || NONE }));
  byId("model").textContent = models.map((one) => one.model).join(", ");
  byId("version").textContent = `version ${status.version}`;
  const state = byId("state");
  state.textContent = status.ready ? "ready" : "not ready";
  state.className = `pill ${status.ready ? "good" : "bad"}`;
  const reasons = byId("reasons");
  reasons.replaceChildren(...status.reasons.map((reason) => element("li", reason)));
  reasons.hidden = status.reasons.length === 0;
  numbers(status);
  chart("ttft", status.series, ["ttft_p50", "ttft_p95"], seconds);
  chart("itl", status.series, ["itl_p50", "itl_p95"], seconds);
  chart("rate", status.series, ["tokens", "prompt_tokens"], count);
  byId("workers").replaceChildren(...workerCards(models));
  const unfit = models.flatMap((one) => one.cluster.incompatible);
  const pairs = byId("pairs");
  pairs.hidden = unfit.length === 0;
  pairs.textContent = unfit.map((p) => `${p.prefill} and ${p.decode} are incompatible: ${p.why.join("; ")}`).join(" · ");
  rowsInto("stages", Object.entries(status.stages).map(([name, s]) =>
    [name.replace("_", " "), seconds(s.p50), seconds(s.p95), s.count]));
  rowsInto("placements", placements(models).map((p) => [
    [p.label || p.request_id.slice(0, 12), p.model].filter(Boolean).join(" · "), seconds(p.age_s), p.local ? "(local)" : p.prefill || "–", p.decode || "–",
    p.prompt_tokens, p.cached_tokens, bytes(p.kv_bytes), p.ttft_s ? seconds(p.ttft_s) : "–",
    seconds(p.predicted_ttft_s), p.outcome, element("td", p.notes.join("; "), "notes"),
  ]));
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn || 0) + 1);
}

async function ask() {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch("status.json", { headers, cache: "no-store", signal: AbortSignal.timeout(5000) });
  byId("key-form").hidden = answer.status !== 401;
  if (!answer.ok) throw new Error(answer.status === 401 ? "needs a key" : `HTTP ${answer.status}`);
  return answer.json();
}

async function turn() {
  try {
    draw(await ask());
  } catch (error) {
    const state = byId("state");
    state.textContent = error.name === "TimeoutError" ? "no answer" : error.message;
    state.className = "pill bad";
  }
  setTimeout(turn, 1000);
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  sessionStorage.setItem("diptych-key", key);
});
turn();
