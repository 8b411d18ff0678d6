// Building and updating elements. Text only ever becomes text: nothing here, or anywhere else, parses markup.

export const $ = (id) => document.getElementById(id);

/** An element. `props`: class, text, attributes by name, on: {event: listener}, vars: {css variable: value}. */
export function h(tag, props = {}, ...children) {
  const svg = SVG_TAGS.has(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "on") for (const [event, run] of Object.entries(value)) element.addEventListener(event, run);
    else if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG_TAGS = new Set(["svg", "path", "line"]);

/** Sets an element's text where it differs: screen readers and the selection notice every write. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Shows an error under a form, or hides it for an empty text. */
export function showError(element, text) {
  setText(element, text);
  element.hidden = !text;
}

const whole = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);

/** 12,345 as 12.3 k, where room is short. */
export function short(value) {
  if (value < 10_000) return count(value);
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export const percent = (part, total) => (total ? `${Math.round((100 * part) / total)} %` : "–");

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${Number(value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0))} s`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 100 || unit === 0 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}
