// Choosing the models of the playground: the base and up to eight adapters.

import { $, count, h, setText } from "./dom.js";
import { codeOf, setOrder, swatchProps } from "./colours.js";

const MAX_ADAPTERS = 8;
const MAX_SHOWN = 40;
const FIRST_PICKED = 3;

let base = null;
let adapters = [];
const picked = new Set();

/** Take the models there are; a choice made before is kept where it can be. */
export function setModels(cards) {
  const first = base === null;
  base = cards.find((card) => card.parent === null)?.id ?? null;
  adapters = cards.filter((card) => card.parent !== null).map((card) => card.id);
  setOrder(adapters);
  for (const name of picked) if (name !== base && !adapters.includes(name)) picked.delete(name);
  if (first && base !== null) [base, ...adapters.slice(0, FIRST_PICKED)].forEach((name) => picked.add(name));
  $("model-filter").hidden = adapters.length <= MAX_ADAPTERS;
  render();
}

/** The chosen names, the base first, then as they are listed. */
export const pickedModels = () => [base, ...adapters].filter((name) => name !== null && picked.has(name));

export const isBase = (name) => name === base;

function toggle(name, on) {
  if (on) picked.add(name);
  else picked.delete(name);
  limit();
}

/** Nine are enough: what is not chosen cannot be, until another is given up. */
function limit() {
  const number = pickedModels().filter((name) => name !== base).length;
  setText($("picked"), adapters.length ? `${number} of at most ${MAX_ADAPTERS} adapters` : "");
  for (const input of $("models").querySelectorAll("input")) {
    input.disabled = !input.checked && !isBase(input.value) && number >= MAX_ADAPTERS;
  }
}

export function render() {
  const filter = $("model-filter").value.trim().toLowerCase();
  const found = adapters.filter((name) => name.toLowerCase().includes(filter));
  const chosen = adapters.filter((name) => picked.has(name) && !found.includes(name));
  const shown = [...(base === null ? [] : [base]), ...chosen, ...found.slice(0, MAX_SHOWN)];
  $("models").replaceChildren(...shown.map(chip));
  const hidden = found.length - Math.min(found.length, MAX_SHOWN);
  setText($("models-note"), hidden > 0 ? `${count(hidden)} more: type a part of the name.` : "");
  limit();
}

function chip(name) {
  const input = h("input", {
    type: "checkbox", value: name, checked: picked.has(name), on: { change: (event) => toggle(name, event.target.checked) },
  });
  const text = isBase(name) ? [h("span", { class: "name", text: name }), h("span", { class: "hint", text: "base" })] : [h("span", { class: "name", text: name, title: name })];
  return h("label", { class: "chip" }, input, h("span", { class: "chip-face" }, h("span", swatchProps(isBase(name) ? null : codeOf(name))), ...text));
}

$("model-filter").addEventListener("input", render);
