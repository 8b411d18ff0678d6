// Curves of the last minutes, as SVG: one chart holds up to two series on one axis.

import { $, h, setText } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 120;

/** The next of 1, 2, 5 times a power of ten that is at least `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= value * 0.999);
}

export class Chart {
  /** `series`: [{name, cls, area}], `format` writes a value, `least` is the smallest top of the axis. */
  constructor(id, series, format, least) {
    this.box = $(id);
    this.now = $(`${id}-now`);
    this.series = series;
    this.format = format;
    this.least = least;
    this.rows = [];
    this.areas = series.map((s) => (s.area ? h("path", { class: `area ${s.cls}` }) : null));
    this.lines = series.map((s) => h("path", { class: `line ${s.cls}` }));
    this.rule = h("line", { class: "rule", y1: 0, y2: HEIGHT });
    const grid = [0, 0.5, 1].map((y) => h("line", { class: "grid", x1: 0, x2: WIDTH, y1: y * HEIGHT, y2: y * HEIGHT }));
    this.svg = h(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      ...grid,
      ...this.areas,
      ...this.lines.toReversed(), // the first on top: where both are the same it must not be hidden
      this.rule,
    );
    this.top = h("span", { class: "tick" });
    this.middle = h("span", { class: "tick" });
    this.start = h("span", {});
    const key = series.map((s) => h("span", { class: "key" }, h("span", { class: `dash ${s.cls}` }), s.name));
    this.box.append(
      h("div", { class: "plot" }, this.svg, this.top, this.middle),
      h("div", { class: "axis" }, this.start, h("span", { class: "keys" }, ...key), h("span", { text: "now" })),
    );
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.point((event.clientX - box.left) / box.width);
    });
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.point(null);
  }

  /** `rows`: one array of values (null where there is none) for each bucket, oldest first. */
  update(rows, bucketSeconds) {
    this.rows = rows;
    this.bucketSeconds = bucketSeconds;
    const most = Math.max(this.least, ...rows.flat().filter((value) => value !== null));
    const top = roundUp(most);
    const x = (index) => (index / Math.max(1, rows.length - 1)) * WIDTH;
    const y = (value) => HEIGHT - (value / top) * HEIGHT;
    this.series.forEach((series, which) => {
      const { line, area } = curve(rows.map((row) => row[which]), x, y, series.join);
      this.lines[which].setAttribute("d", line);
      this.areas[which]?.setAttribute("d", area);
    });
    setText(this.top, this.format(top));
    setText(this.middle, this.format(top / 2));
    const span = rows.length * bucketSeconds;
    setText(this.start, span >= 60 ? `${Math.round(span / 60)} min ago` : `${Math.round(span)} s ago`);
    if (this.pointed === null) this.point(null);
    const latest = this.text(this.latest());
    this.svg.setAttribute("aria-label", `Latest: ${latest}; highest: ${this.format(most)}`);
  }

  /** The last bucket that is complete and has a value. */
  latest() {
    for (let i = this.rows.length - 2; i >= 0; i -= 1) if (this.rows[i].some((value) => value !== null)) return i;
    return -1;
  }

  text(index) {
    if (index < 0) return "none yet";
    const values = this.series.map((series, which) => [series.name, this.rows[index][which]]);
    return values.map(([name, value]) => `${name} ${value === null ? "–" : this.format(value)}`).join(", ");
  }

  /** Tell the values at a share of the width; null goes back to the latest. */
  point(share) {
    this.pointed = share;
    const index = share === null ? this.latest() : Math.round(share * (this.rows.length - 1));
    this.rule.setAttribute("visibility", share === null || !this.rows.length ? "hidden" : "visible");
    if (share !== null && this.rows.length) {
      const at = (index / Math.max(1, this.rows.length - 1)) * WIDTH;
      this.rule.setAttribute("x1", at);
      this.rule.setAttribute("x2", at);
      const ago = Math.round((this.rows.length - 1 - index) * this.bucketSeconds);
      setText(this.now, `${ago} s ago: ${this.text(index)}`);
    } else setText(this.now, this.rows.length ? this.text(index) : "");
  }
}

/** Path data of a line and of the area under it. Gaps are bridged where `join` is set, else the line stops there. */
function curve(values, x, y, join) {
  let line = "";
  let open = false;
  let first = null;
  let last = null;
  values.forEach((value, index) => {
    if (value === null) {
      if (!join) open = false;
      return;
    }
    // A point of its own is a dot: a stroke with round ends needs some length.
    const lone = !join && values[index - 1] == null && values[index + 1] == null;
    line += `${open ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}${lone ? "h.01" : ""}`;
    open = true;
    first ??= index;
    last = index;
  });
  const area = first === null ? "" : `${line}L${x(last).toFixed(1)} ${y(0)}L${x(first).toFixed(1)} ${y(0)}Z`;
  return { line, area };
}
