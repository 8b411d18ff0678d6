"""Checks of a page that run in the browser: contrast of every text, names of every control, and nothing cut off."""

from __future__ import annotations

from typing import Any

MOST_STREAMING = """
window.mostStreaming = 0;
new MutationObserver(() => {
  const now = document.querySelectorAll(".state[data-state=streaming]").length;
  window.mostStreaming = Math.max(window.mostStreaming, now);
}).observe(document, { subtree: true, childList: true, attributes: true });
"""
"""Notes how many answers streamed at the same time at most."""

_CONTRAST = """
() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parse = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const own = parse(getComputedStyle(element).backgroundColor);
    return own[3] === 1 ? own.slice(0, 3) : over(own, behind(element.parentElement));
  };
  const faults = [];
  const judge = (element, text, colour) => {
    const style = getComputedStyle(element);
    const back = behind(element);
    const seen = over(parse(colour), back);
    const [light, dark] = [luminance(seen), luminance(back)].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (ratio < (large ? 3 : 4.5)) faults.push(`${text.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  };
  const visible = (element) => {
    const box = element.getBoundingClientRect();
    return element.checkVisibility({ visibilityProperty: true }) && box.width > 1 && box.height > 1;
  };
  // Controls that are off are exempt, as in WCAG 1.4.3.
  const off = (element) => element.closest(":disabled") || element.parentElement?.querySelector(":scope > :disabled");
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const dialog = document.querySelector("dialog[open]");
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !visible(element) || off(element) || (dialog && !dialog.contains(element))) continue;
    judge(element, node.data, getComputedStyle(element).color);
  }
  for (const element of document.querySelectorAll("input, textarea")) {
    if (!visible(element) || element.matches("[type=checkbox], [type=radio]") || off(element)) continue;
    judge(element, element.value || element.placeholder || "-", getComputedStyle(element).color);
    if (element.placeholder) judge(element, element.placeholder, getComputedStyle(element, "::placeholder").color);
  }
  return faults;
}
"""

_OVERFLOW = """
() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width) return [];
  const wide = [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > width + 1);
  return [`${document.documentElement.scrollWidth} > ${width}`, ...wide.map((e) => e.tagName + "." + e.className)];
}
"""

_CONTROLS = {"button", "textbox", "searchbox", "spinbutton", "checkbox", "radio", "slider", "link", "dialog", "img"}


def check_text(page: Any) -> list[str]:
    """Texts with less contrast than WCAG's level AA asks for, with their ratio."""
    return page.evaluate(_CONTRAST)


def overflow(page: Any) -> list[str]:
    """What is wider than the window."""
    return page.evaluate(_OVERFLOW)


def check_names(page: Any) -> list[str]:
    """Roles of the controls that a screen reader has no name for."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    found = [
        (node["role"]["value"], node.get("name", {}).get("value", "").strip())
        for node in nodes
        if not node.get("ignored") and node["role"]["value"] in _CONTROLS
    ]
    assert len(found) > 3, "the page has no controls at all"
    return [role for role, name in found if not name]
