// The table of adapters, and the buttons of those who may manage them.

import { $, count, h, percent, setText, short, showError } from "./dom.js";
import { ApiError, postJson } from "./api.js";
import { codeOf, swatchProps } from "./colours.js";

const TIERS = { resident: "Device", loading: "Loading", host: "Host", registered: "Disk" };
const COLUMNS = ["Adapter", "Tier", "Rank", "Pages", "Requests", "Tokens", "Hit rate", "Actions"];
const rows = new Map();
let adapters = { registered: 0, rows: [] };
let changed = () => {};

const body = h("tbody", { role: "rowgroup" });
const empty = h("p", { class: "empty", text: "No adapter matches." });
$("adapter-table").append(
  h(
    "table",
    { role: "table", "aria-labelledby": "adapters-title" },
    h(
      "thead",
      { role: "rowgroup" },
      h("tr", { role: "row" }, ...COLUMNS.map((text) => h("th", { role: "columnheader", scope: "col", text }))),
    ),
    body,
  ),
  empty,
);

/** `run()` is called when an adapter was loaded, pinned or unloaded. */
export function onAdapterChange(run) {
  changed = run;
}

export function showAdapters(visible) {
  $("adapters-live").hidden = !visible;
  $("adapters-empty").hidden = visible;
  if (!visible) setText($("adapters-count"), "");
}

export function updateAdapters(next) {
  adapters = next;
  const filter = $("adapter-filter").value.trim().toLowerCase();
  const shown = adapters.rows.filter(
    (row) => row.name.toLowerCase().includes(filter) || TIERS[row.tier].toLowerCase() === filter,
  );
  const left = new Set(rows.keys());
  shown.forEach((row, index) => {
    left.delete(row.name);
    if (!rows.has(row.name)) rows.set(row.name, new Row(row.name));
    const entry = rows.get(row.name);
    entry.update(row);
    if (body.children[index] !== entry.element) body.insertBefore(entry.element, body.children[index] ?? null);
  });
  for (const name of left) {
    rows.get(name).element.remove();
    rows.delete(name);
  }
  empty.hidden = shown.length > 0;
  setText(empty, adapters.rows.length ? "No adapter matches." : "No adapter is registered yet.");
  const rest = adapters.registered - adapters.rows.length;
  setText($("adapters-count"), `${count(adapters.registered)} registered${rest > 0 ? `, ${count(rest)} not listed` : ""}`);
}

class Row {
  constructor(name) {
    this.name = name;
    this.swatch = h("span", { class: "swatch" });
    this.digest = h("span", { class: "digest" });
    this.tier = h("span", { class: "tier" });
    this.pinMark = h("span", { class: "pinned", text: "Pinned" });
    this.meter = h("span", { class: "meter", "aria-hidden": "true" }, h("i"));
    this.rate = h("span", {});
    this.pin = h("button", { type: "button", class: "quiet", on: { click: () => this.togglePin() } });
    this.unload = h("button", {
      type: "button", class: "quiet", text: "Unload", "aria-label": `Unload ${name}`, on: { click: () => this.remove() },
    });
    const cell = (label, ...children) =>
      h("td", { role: "cell", "data-label": label }, h("span", { class: "cell" }, ...children));
    this.cells = { Rank: h("span"), Pages: h("span"), Requests: h("span"), Tokens: h("span") };
    this.element = h(
      "tr",
      { role: "row" },
      h(
        "th",
        { role: "rowheader", scope: "row" },
        h("span", { class: "cell" }, this.swatch, h("span", { class: "name", text: name, title: name }), this.digest),
      ),
      cell("Tier", this.tier, this.pinMark),
      ...Object.entries(this.cells).map(([label, element]) => cell(label, element)),
      cell("Hit rate", this.meter, this.rate),
      cell("Actions", this.pin, this.unload),
    );
  }

  update(row) {
    const code = codeOf(row.name);
    if (this.code !== code) {
      this.code = code;
      const { class: cls, vars } = swatchProps(code);
      this.swatch.className = cls;
      this.swatch.style.setProperty("--c", vars["--c"]);
    }
    this.pinned = row.pinned;
    setText(this.digest, row.digest ?? "");
    setText(this.tier, TIERS[row.tier]);
    this.tier.dataset.tier = row.tier;
    this.pinMark.hidden = !row.pinned;
    setText(this.cells.Rank, row.rank === null ? "–" : String(row.rank));
    setText(this.cells.Pages, row.pages === null ? "–" : count(row.pages));
    const now = [row.running && `${row.running} running`, row.waiting && `${row.waiting} waiting`].filter(Boolean);
    setText(this.cells.Requests, now.length ? `${count(row.requests)} done, ${now.join(", ")}` : `${count(row.requests)} done`);
    setText(this.cells.Tokens, `${short(row.tokens)} out, ${short(row.prompt_tokens)} in`);
    const uses = row.hits + row.misses;
    setText(this.rate, uses ? `${percent(row.hits, uses)} of ${count(uses)}` : "–");
    this.meter.style.setProperty("--share", uses ? row.hits / uses : 0);
    this.meter.hidden = !uses;
    setText(this.pin, row.pinned ? "Unpin" : "Pin");
    this.pin.setAttribute("aria-label", `${row.pinned ? "Unpin" : "Pin"} ${this.name}`);
  }

  togglePin() {
    return manage(this.pinned ? "unpin" : "pin", { lora_name: this.name }, this.pin);
  }

  remove() {
    if (window.confirm(`Unload the adapter ${this.name}? Requests that run on it finish first.`)) {
      manage("unload", { lora_name: this.name }, this.unload);
    }
  }
}

async function manage(what, request, button) {
  showError($("adapters-error"), "");
  button.disabled = true;
  try {
    await postJson(`v1/${what}_lora_adapter`, request);
    changed();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showError($("adapters-error"), error.advice);
  } finally {
    button.disabled = false;
  }
}

$("adapter-filter").addEventListener("input", () => updateAdapters(adapters));

const dialog = $("load-dialog");
$("load-button").addEventListener("click", () => {
  showError($("load-error"), "");
  dialog.showModal();
});
$("load-cancel").addEventListener("click", () => dialog.close());
$("load-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  $("load-submit").disabled = true;
  try {
    await postJson("v1/load_lora_adapter", {
      lora_name: $("load-name").value,
      lora_path: $("load-path").value,
      load_inplace: $("load-inplace").checked,
      pinned: $("load-pinned").checked,
    });
    dialog.close();
    changed();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showError($("load-error"), error.advice);
  } finally {
    $("load-submit").disabled = false;
  }
});
