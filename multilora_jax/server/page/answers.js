// The answers of the playground, a card each, side by side.

import { $, count, h, seconds, setText } from "./dom.js";
import { codeOf, swatchProps } from "./colours.js";
import { isBase } from "./picker.js";

const END = { stop: "Done", length: "Cut at max tokens", abort: "Stopped" };

export class Answer {
  constructor(model) {
    this.model = model;
    this.started = performance.now();
    this.first = null;
    this.ended = null;
    this.tokens = 0;
    this.reason = null;
    this.failed = false;
    this.state = h("span", { class: "state", "data-state": "waiting", text: "Waiting" });
    this.text = h("div", {
      class: "text", "aria-live": "polite", "aria-busy": "true", "aria-label": `Answer of ${model}`, role: "region", tabindex: "0",
    });
    this.usage = h("span", { text: "0 tokens" });
    this.speed = h("span", {});
    const code = isBase(model) ? null : codeOf(model);
    this.element = h(
      "article",
      { class: "answer", "data-model": model, vars: swatchProps(code).vars },
      h(
        "header",
        {},
        h("span", swatchProps(code)),
        h("h3", { class: "name", text: model, title: model }),
        this.state,
      ),
      this.text,
      h("footer", {}, this.usage, this.speed),
    );
  }

  setState(state, text) {
    this.state.dataset.state = state;
    setText(this.state, text);
  }

  /** One chunk of the model's stream. */
  chunk(chunk) {
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    if (choice && this.first === null && (piece || chunk.usage?.completion_tokens)) {
      this.first = performance.now();
      this.setState("streaming", "Streaming");
    }
    if (piece) this.text.append(piece);
    if (choice?.finish_reason) this.reason = choice.finish_reason;
    if (chunk.usage) this.count(chunk.usage);
  }

  count(usage) {
    this.tokens = usage.completion_tokens;
    const cached = usage.prompt_tokens_details?.cached_tokens;
    const prompt = `${count(usage.prompt_tokens)} in${cached ? ` (${count(cached)} cached)` : ""}`;
    setText(this.usage, `${count(this.tokens)} ${this.tokens === 1 ? "token" : "tokens"}, ${prompt}`);
    this.measure();
  }

  measure() {
    if (this.first === null) return;
    const spent = ((this.ended ?? performance.now()) - this.first) / 1000;
    const speed = this.tokens > 1 && spent > 0 ? `, ${((this.tokens - 1) / spent).toFixed(1)} tok/s` : "";
    setText(this.speed, `first after ${seconds((this.first - this.started) / 1000)}${speed}`);
  }

  fail(text) {
    this.failed = true;
    this.text.append(h("p", { class: "error", text }));
    this.setState("failed", "Failed");
  }

  /** The answer has ended: by itself, or because the reader stopped it. */
  end(stopped = false) {
    if (this.ended !== null) return;
    this.ended = performance.now();
    this.measure();
    this.text.setAttribute("aria-busy", "false");
    if (this.failed) return;
    if (stopped) this.setState("stopped", "Stopped");
    else this.setState("done", END[this.reason] ?? "Done");
    if (!this.text.textContent && !stopped) this.text.append(h("p", { class: "hint", text: "An empty answer." }));
  }
}

export function showPlaceholder() {
  if ($("answers").querySelector(".answer")) return;
  const line = (width) => h("span", { class: "ghost", vars: { "--w": width } });
  const ghosts = ["92%", "74%", "83%"].map((width) =>
    h("div", { class: "answer ghosted", "aria-hidden": "true" }, line("38%"), line(width), line("64%")),
  );
  $("answers").replaceChildren(
    ...ghosts,
    h("p", { class: "empty", text: "Choose some models, write a prompt and press Run: their answers stream here, side by side." }),
  );
}
