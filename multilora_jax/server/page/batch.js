// The running and waiting requests, a square each.

import { $, h, setText } from "./dom.js";
import { codeOf, colourOf, swatchProps } from "./colours.js";

const MAX_SEATS = 96;
const MAX_WAITING = 64;
const MAX_NAMES = 6;

/** Names to counts as a list of one name for each request; what is left of `total` is the base's (null). */
function spread(byName, total, most) {
  const out = [];
  for (const [name, number] of Object.entries(byName)) {
    for (let i = 0; i < number && out.length < Math.min(total, most); i += 1) out.push(name);
  }
  while (out.length < Math.min(total, most)) out.push(null);
  return out;
}

const colour = (name) => (name === null ? "var(--base)" : colourOf(codeOf(name)));

export function updateBatch(requests, model) {
  const running = spread(requests.running_by, requests.running, MAX_SEATS);
  const waiting = spread(requests.waiting_by, requests.waiting, MAX_WAITING);
  const empty = Math.max(0, Math.min(model.seats, MAX_SEATS) - running.length);
  const squares = [
    ...running.map((name) => h("i", { class: "seat taken", vars: { "--c": colour(name) } })),
    ...Array.from({ length: empty }, () => h("i", { class: "seat" })),
    ...waiting.map((name) => h("i", { class: "seat waiting", vars: { "--c": colour(name) } })),
  ];
  const seats = $("seats");
  const shown = JSON.stringify([running, empty, waiting]);
  if (seats.dataset.shown === shown) return;
  seats.dataset.shown = shown;
  seats.replaceChildren(...squares);
  setText($("batch-count"), `${requests.running} of ${model.seats} running, ${requests.waiting} waiting`);
  const groups = new Map();
  for (const name of running) groups.set(name, (groups.get(name) ?? 0) + 1);
  const texts = [...groups].map(([name, number]) => `${name ?? model.name} ${number}`);
  seats.setAttribute(
    "aria-label",
    texts.length ? `Running: ${texts.join(", ")}. Waiting: ${requests.waiting}` : "No requests are running",
  );
  const names = [...groups].slice(0, MAX_NAMES).map(([name, number]) =>
    h("span", { class: "who" }, h("span", swatchProps(name === null ? null : codeOf(name))), `${name ?? model.name} ${number}`),
  );
  const more = groups.size > MAX_NAMES ? [h("span", { text: `${groups.size - MAX_NAMES} more` })] : [];
  $("batch-names").replaceChildren(...(names.length ? [...names, ...more] : ["No requests are running."]));
}
