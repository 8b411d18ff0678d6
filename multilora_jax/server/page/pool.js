// The map of the pool: a canvas of cells, with a cursor for pointer and keys, and the legend.

import { $, bytes, count, h, setText } from "./dom.js";
import { CACHED, FIRST_SLOT, FREE, KV, OTHER, isSecond, nameOf, resolved, swatchProps } from "./colours.js";

const MAX_LEGEND = 12;
const map = $("map");
const canvas = $("map-canvas");
const cursor = $("map-cursor");
const detail = $("map-detail");

let codes = new Uint8Array(0);
let used = new Uint16Array(0);
let pool = null;
let columns = 1;
let pitch = 8;
let colours = null;
let at = null;
const picked = new Set();

const PLAIN = { [FREE]: "free", [KV]: "keys and values", [CACHED]: "cached prefix", [OTHER]: "other adapters" };
const label = (code) => PLAIN[code] ?? nameOf(code);

/** Show what a live answer says of the pool. */
export function updatePool(next, slotsChanged) {
  const fresh = next.full || codes.length !== next.cells;
  if (fresh) {
    codes = new Uint8Array(next.cells);
    used = new Uint16Array(next.cells);
  }
  pool = next;
  for (const [first, length, code, filled] of next.runs) {
    codes.fill(code, first, first + length);
    used.fill(filled, first, first + length);
  }
  if (fresh) layOut();
  else if (slotsChanged) draw();
  else for (const [first, length] of next.runs) drawCells(first, first + length);
  const share = next.pages_per_cell > 1 ? `, ${next.pages_per_cell} to a cell` : "";
  setText(
    $("pool-size"),
    `${count(next.pages)} pages of ${bytes(next.page_bytes)}, ${next.page_tokens} tokens each${share}`,
  );
  map.setAttribute("aria-valuemax", next.cells);
  if (at !== null) describe();
  updateLegend();
}

export function layOut() {
  const width = Math.floor(map.clientWidth);
  if (!pool || !width) return;
  const tall = width < 560 ? 380 : 340;
  pitch = 22;
  while (pitch > 4 && Math.ceil(pool.cells / Math.floor(width / pitch)) * pitch > tall) pitch -= 1;
  columns = Math.floor(width / pitch);
  const rows = Math.ceil(pool.cells / columns);
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(columns * pitch * scale);
  canvas.height = Math.round(rows * pitch * scale);
  canvas.style.width = `${columns * pitch}px`;
  canvas.style.height = `${rows * pitch}px`;
  canvas.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
  draw();
  placeCursor();
}

/** Draw everything again, for another theme. */
export function redraw() {
  colours = null;
  draw();
}

function draw() {
  drawCells(0, codes.length);
}

function drawCells(first, end) {
  if (!pool) return;
  colours ??= resolved(FIRST_SLOT + 10);
  const context = canvas.getContext("2d");
  const gap = pitch >= 12 ? 2.5 : pitch >= 7 ? 1.5 : 1;
  const size = pitch - gap;
  const radius = pitch >= 14 ? 3.5 : pitch >= 9 ? 2 : pitch >= 6 ? 1 : 0;
  for (let cell = first; cell < end; cell += 1) {
    const code = codes[cell];
    const x = (cell % columns) * pitch;
    const y = Math.floor(cell / columns) * pitch;
    context.clearRect(x, y, pitch, pitch);
    const faint = picked.size && !picked.has(code);
    context.globalAlpha = (code === FREE ? 1 : 0.4 + (0.6 * used[cell]) / pool.pages_per_cell) * (faint ? 0.22 : 1);
    context.fillStyle = colours.found[code < FIRST_SLOT ? code : FIRST_SLOT + ((code - FIRST_SLOT) % 10)];
    context.beginPath();
    context.roundRect(x, y, size, size, radius);
    context.fill();
    if (isSecond(code)) {
      context.fillStyle = colours.surface;
      context.fillRect(x + size / 3, y + size / 3, size / 3, size / 3);
    }
  }
  context.globalAlpha = 1;
}

function describe() {
  const each = pool.pages_per_cell;
  const first = at * each + 1;
  const last = Math.min(first + each - 1, pool.pages);
  const pages = first === last ? `Page ${count(first)}` : `Pages ${count(first)} to ${count(last)}`;
  const code = codes[at];
  const share = each === 1 || code === FREE ? "" : `, ${used[at]} of ${last - first + 1} in use`;
  const text = `${pages}: ${code >= FIRST_SLOT ? "adapter " : ""}${label(code)}${share}`;
  map.setAttribute("aria-valuenow", at + 1);
  map.setAttribute("aria-valuetext", text);
  detail.replaceChildren(h("span", swatchProps(code)), text);
}

function placeCursor() {
  cursor.hidden = at === null;
  if (at === null) return;
  cursor.style.transform = `translate(${(at % columns) * pitch}px, ${Math.floor(at / columns) * pitch}px)`;
  cursor.style.width = cursor.style.height = `${pitch - 1}px`;
}

function moveTo(cell) {
  if (!pool) return;
  at = Math.max(0, Math.min(codes.length - 1, cell));
  placeCursor();
  describe();
}

map.addEventListener("pointermove", (event) => {
  const box = canvas.getBoundingClientRect();
  const column = Math.floor((event.clientX - box.left) / pitch);
  const cell = Math.floor((event.clientY - box.top) / pitch) * columns + column;
  if (column >= 0 && column < columns && cell >= 0 && cell < codes.length) moveTo(cell);
});
map.addEventListener("focus", () => moveTo(at ?? 0));
map.addEventListener("keydown", (event) => {
  const page = Math.max(1, Math.round(codes.length / 10));
  const steps = {
    ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, PageDown: page, PageUp: -page,
    Home: -codes.length, End: codes.length,
  };
  if (!(event.key in steps)) return;
  event.preventDefault();
  moveTo((at ?? 0) + steps[event.key]);
});

function updateLegend() {
  const slots = Object.entries(pool.slots).map(([code, pages]) => [Number(code), pages]);
  slots.sort((a, b) => b[1] - a[1]);
  const entries = [
    [KV, pool.kv],
    [CACHED, pool.cached],
    ...slots.slice(0, MAX_LEGEND),
    [FREE, pool.free],
  ];
  const list = $("legend");
  const wanted = entries.map(([code]) => `${code} ${label(code)}`).join("\n");
  if (list.dataset.shown !== wanted) {
    list.dataset.shown = wanted;
    list.replaceChildren(...entries.map(([code]) => legendItem(code)));
    if (slots.length > MAX_LEGEND) list.append(h("li", { class: "more", text: `${slots.length - MAX_LEGEND} more` }));
  }
  entries.forEach(([, pages], index) => setText(list.children[index].querySelector(".n"), count(pages)));
}

function legendItem(code) {
  const toggle = (event) => {
    if (!picked.delete(code)) picked.add(code);
    event.currentTarget.setAttribute("aria-pressed", picked.has(code));
    draw();
  };
  return h(
    "li",
    {},
    h(
      "button",
      { type: "button", class: "legend-item", "aria-pressed": picked.has(code), on: { click: toggle } },
      h("span", swatchProps(code)),
      h("span", { class: "name", text: label(code) }),
      h("span", { class: "n" }),
    ),
  );
}

new ResizeObserver(layOut).observe(map);
