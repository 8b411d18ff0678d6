// Puts the page together: theme, key, and what is shown in which state of the server.

import { $, setText } from "./dom.js";
import { key } from "./api.js";
import { onAdapterChange, showAdapters } from "./adapters.js";
import { restart, setPaused, startLive } from "./live.js";
import { render } from "./picker.js";
import { loadModels, startPlayground } from "./playground.js";
import { redraw } from "./pool.js";

const PILLS = { live: "Live", paused: "Paused", locked: "Locked", starting: "Starting", lost: "No answer" };
let state = "";
let paused = false;

// ---- theme

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

function showTheme() {
  $("theme").setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  redraw();
}

$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("multilora-theme", theme);
  } catch {
    // Storage may be forbidden: the theme then lasts until the page is left.
  }
  showTheme();
});
dark.addEventListener("change", showTheme);
showTheme();

// ---- key

const dialog = $("key-dialog");

function askForKey() {
  $("key-input").value = "";
  if (!dialog.open) dialog.showModal();
}

function useKey(value) {
  key.set(value);
  dialog.close();
  setText($("key-button"), key.get() ? "Key set" : "Key");
  loadModels();
  restart();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key-input").value.trim());
});
$("key-forget").addEventListener("click", () => useKey(""));
$("key-cancel").addEventListener("click", () => dialog.close());
for (const id of ["key-button", "notice-key"]) $(id).addEventListener("click", askForKey);
setText($("key-button"), key.get() ? "Key set" : "Key");

// ---- states

const NOTICES = {
  starting: ["The server is starting", "The model is being loaded. This page goes on by itself."],
  lost: ["The server does not answer", ""],
};

function lockedNotice(error) {
  if (error.status === 401) {
    return key.get()
      ? ["This key is not known here", "Check it, or enter another."]
      : ["This server asks for a key", "Enter an API key to use the playground, or an admin key to see the live view too."];
  }
  if (error.reason === "admin_key_required") {
    return ["The live view needs an admin key", "Your key opens the playground below. The pool, the adapters and their buttons show what all callers do, so they are for administrators."];
  }
  return ["The live view is closed", error.message];
}

function show(next, error) {
  const notice = next === "locked" ? lockedNotice(error) : NOTICES[next];
  $("notice").hidden = !notice;
  if (notice) {
    setText($("notice-title"), notice[0]);
    setText($("notice-text"), notice[1] || error?.advice || "");
    $("notice-key").hidden = next !== "locked";
  }
  if (next === "locked") $("live").hidden = true;
  $("pause").hidden = next !== "live" && next !== "paused";
  showAdapters(next !== "locked" && !$("live").hidden);
  setText($("status"), PILLS[next]);
  $("status").dataset.state = next;
  if (next === "live" && state !== "live") loadModels();
  state = next;
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  setText($("pause"), paused ? "Resume" : "Pause");
  setPaused(paused);
});

onAdapterChange(() => {
  loadModels();
  restart();
});
startPlayground(askForKey);
loadModels().then(render);
startLive(show);
