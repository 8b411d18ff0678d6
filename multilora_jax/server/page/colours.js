// One colour for each adapter, the same everywhere on the page.

export const FREE = 0;
export const KV = 1;
export const CACHED = 2;
export const OTHER = 3;
export const FIRST_SLOT = 4;
const PALETTE = 10;

let slots = new Map();
let names = new Map();

/** Take the slots that the server gave the adapters; returns whether any changed. */
export function setSlots(rows) {
  return assign(rows.filter((row) => row.slot >= FIRST_SLOT).map((row) => [row.name, row.slot]));
}

function assign(pairs) {
  const next = new Map(pairs);
  if (next.size === slots.size && pairs.every(([name, slot]) => slots.get(name) === slot)) return false;
  slots = next;
  names = new Map(pairs.map(([name, slot]) => [slot, name]));
  return true;
}

/** For those who may not see the server's slots: by the order in which the models are listed. */
export function setOrder(adapters) {
  if (!slots.size) assign(adapters.map((name, index) => [name, FIRST_SLOT + index]));
}

export const nameOf = (code) => names.get(code) ?? "another adapter";

/** CSS colour of what a cell holds. */
export function colourOf(code) {
  if (code === FREE) return "var(--free)";
  if (code === KV) return "var(--kv)";
  if (code === CACHED) return "var(--cached)";
  if (code === OTHER) return "var(--other)";
  return `var(--a${(code - FIRST_SLOT) % PALETTE})`;
}

/** Whether the colour is used a second time, so that a mark must tell the two apart. */
export const isSecond = (code) => code >= FIRST_SLOT + PALETTE;

export const codeOf = (name) => slots.get(name) ?? OTHER;

/** A small square in the colour of a code; `code` null stands for the base. */
export function swatchProps(code) {
  const second = code !== null && isSecond(code);
  return { class: second ? "swatch second" : "swatch", vars: { "--c": code === null ? "var(--base)" : colourOf(code) } };
}

const probe = document.createElement("i");

/** The colours as a canvas takes them, for the theme that is shown now. */
export function resolved(count) {
  probe.hidden = true;
  document.body.append(probe);
  const found = [];
  for (let code = 0; code < count; code += 1) {
    probe.style.color = colourOf(code);
    found.push(getComputedStyle(probe).color);
  }
  probe.style.color = "var(--surface)";
  const surface = getComputedStyle(probe).color;
  probe.remove();
  return { found, surface };
}
