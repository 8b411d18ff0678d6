// The live view: asks the server for what changed, once a second while the page is seen, and hands it to the parts.

import { $, count, h, percent, seconds, setText, short } from "./dom.js";
import { ApiError, getJson } from "./api.js";
import { setSlots } from "./colours.js";
import { updateAdapters } from "./adapters.js";
import { updateBatch } from "./batch.js";
import { Chart } from "./charts.js";
import { updatePool } from "./pool.js";

const LONGEST_WAIT_S = 30;
const GIVEN_UP = new Set([401, 403]);

const perSecond = (value) => `${Number(value.toFixed(value < 100 ? 1 : 0))} tok/s`;
const throughput = new Chart(
  "throughput",
  [
    { name: "generated", cls: "one", area: true, join: true },
    { name: "prompt", cls: "two", join: true },
  ],
  perSecond,
  10,
);
const ttft = new Chart(
  "ttft",
  [
    { name: "median", cls: "one", join: false },
    { name: "95th percentile", cls: "two", join: false },
  ],
  seconds,
  0.01,
);

const tiles = new Map();
for (const [id, label] of [
  ["generation", "Generation"],
  ["first", "Time to first token"],
  ["requests", "Requests"],
  ["pool", "Pool in use"],
  ["prefix", "Prefix cache hits"],
  ["adapters", "Adapter hits"],
]) {
  const value = h("span", { class: "value", text: "–" });
  const note = h("span", { class: "note" });
  tiles.set(id, { value, note });
  $("tiles").append(h("div", { class: "tile" }, h("dt", { text: label }), h("dd", {}, value, note)));
}

function tile(id, value, note) {
  setText(tiles.get(id).value, value);
  setText(tiles.get(id).note, note);
}

let cursor = "";
let points = new Map();
let timer = 0;
let wait = 1;
let paused = false;
let onState = () => {};
let generation = 0;
let busy = false;

/** Start asking. `report(state, error)` is called with "live", "paused", "locked", "starting" or "lost". */
export function startLive(report) {
  onState = report;
  document.addEventListener("visibilitychange", () => !document.hidden && restart());
  restart();
}

/** Ask at once, from the beginning: the key is another one. */
export function restart() {
  generation += 1;
  clearTimeout(timer);
  wait = 1;
  ask(generation);
}

export function setPaused(value) {
  paused = value;
  if (paused) onState("paused");
  else restart();
}

async function ask(mine) {
  if (paused || document.hidden || (busy && mine === generation - 1)) return;
  busy = true;
  try {
    const state = await getJson(`page/live?cursor=${encodeURIComponent(cursor)}`);
    if (mine !== generation) return;
    show(state);
    wait = state.interval_s;
    onState("live");
  } catch (error) {
    if (mine !== generation) return;
    if (!(error instanceof ApiError)) throw error;
    if (GIVEN_UP.has(error.status)) {
      cursor = "";
      onState("locked", error);
      return; // until there is another key
    }
    wait = error.retryAfter ? Number(error.retryAfter) || 5 : Math.min(LONGEST_WAIT_S, wait * 1.7);
    onState(error.status === 503 && error.reason === "starting" ? "starting" : "lost", error);
  } finally {
    busy = false;
  }
  timer = setTimeout(ask, wait * 1000, mine);
}

function show(state) {
  if (state.pool.full) points = new Map();
  cursor = state.cursor;
  $("live").hidden = false;
  const changed = setSlots(state.adapters.rows);
  updatePool(state.pool, changed);
  updateBatch(state.requests, state.model);
  updateAdapters(state.adapters);
  showHistory(state.history);
  showTiles(state);
}

function showHistory(history) {
  for (const [number, ...values] of history.points) points.set(number, values);
  const last = history.points.at(-1)[0];
  for (const number of points.keys()) if (number <= last - history.buckets) points.delete(number);
  const rows = [...points.values()];
  const each = history.bucket_s;
  throughput.update(rows.map(([generated, prompt]) => [generated / each, prompt / each]), each);
  ttft.update(rows.map(([, , median, most]) => [median, most]), each);
}

function showTiles({ requests, totals, pool, adapters }) {
  const rows = [...points.values()];
  const recent = rows.slice(-3, -1); // the last one is being filled
  const rate = recent.reduce((sum, [generated]) => sum + generated, 0) / Math.max(1, recent.length) / 2;
  tile("generation", rate >= 100 ? count(rate) : rate.toFixed(rate ? 1 : 0), `tok/s, ${short(totals.generation_tokens)} in all`);
  const first = rows.findLast(([, , median]) => median !== null);
  tile("first", seconds(first?.[2]), first ? `95th percentile ${seconds(first[3])}` : "no request yet");
  tile("requests", count(requests.running), `running, ${count(requests.waiting)} waiting`);
  const used = pool.pages - pool.free;
  tile("pool", percent(used, pool.pages), `${count(used)} of ${count(pool.pages)} pages`);
  tile("prefix", percent(totals.prefix_hits, totals.prefix_queries), `of ${short(totals.prefix_queries)} prompt tokens`);
  const uses = totals.adapter_hits + totals.adapter_misses;
  tile("adapters", percent(totals.adapter_hits, uses), `of ${short(uses)} uses, ${count(adapters.registered)} registered`);
}
