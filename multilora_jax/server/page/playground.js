// The playground: one prompt to several models at once, in one stream that carries all answers.

import { $, setText, showError } from "./dom.js";
import { ApiError, getJson, postEvents } from "./api.js";
import { Answer, showPlaceholder } from "./answers.js";
import { pickedModels, setModels } from "./picker.js";

const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const WHOLE = new Set(["max_tokens", "top_k", "seed"]);

let running = null;
let answers = [];
let needKey = () => {};

/** `askForKey()` is called when the server asks for a key. */
export function startPlayground(askForKey) {
  needKey = askForKey;
  showPlaceholder();
  showRoute();
}

/** Read the list of models again; the models of a first answer set the page's title too. */
export async function loadModels() {
  try {
    const { data } = await getJson("v1/models");
    setModels(data);
    const base = data.find((card) => card.parent === null);
    setText($("model"), base?.id ?? "");
    $("model").hidden = !base;
    $("run").disabled = false;
    return true;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("run").disabled = error.status !== 401;
    setText($("models-note"), error.advice);
    return false;
  }
}

const route = () => $("ask").elements.route.value;

function showRoute() {
  $("system-field").hidden = route() !== "chat";
}

/** The request's body; throws an Error that names the field which is no number. */
function readRequest() {
  const request = {};
  for (const name of NUMBERS) {
    const input = $(name);
    const label = input.labels[0].textContent;
    const text = input.value.trim();
    if (text === "" && !input.validity.badInput) continue;
    const value = Number(text);
    if (input.validity.badInput || !Number.isFinite(value) || (WHOLE.has(name) && !Number.isInteger(value))) {
      throw new Error(`${label} must be ${WHOLE.has(name) ? "a whole number" : "a number"}.`);
    }
    request[name] = value;
  }
  if ($("stop").value) request.stop = $("stop").value;
  const prompt = $("prompt").value;
  if (!prompt.trim()) throw new Error("Write a prompt first.");
  if (route() === "completions") return { ...request, prompt };
  const system = $("system").value.trim();
  const messages = system ? [{ role: "system", content: system }] : [];
  return { ...request, messages: [...messages, { role: "user", content: prompt }] };
}

async function run() {
  if (running) return;
  showError($("ask-error"), "");
  const models = pickedModels();
  let request;
  try {
    request = readRequest();
    if (!models.length) throw new Error("Choose at least one model.");
  } catch (error) {
    showError($("ask-error"), error.message);
    return;
  }
  running = new AbortController();
  $("run").disabled = true;
  $("stop-button").disabled = false;
  answers = models.map((model) => new Answer(model));
  $("answers").replaceChildren(...answers.map((answer) => answer.element));
  announce(`${models.length} answers are streaming`);
  let stopped = false;
  try {
    const events = postEvents("page/compare", { models, route: route(), request }, running.signal);
    for await (const event of events) take(event);
  } catch (error) {
    stopped = error.name === "AbortError";
    if (!stopped) failAll(error);
  }
  answers.forEach((answer) => answer.end(stopped));
  running = null;
  if (document.activeElement === $("stop-button")) $("run").focus();
  $("run").disabled = false;
  $("stop-button").disabled = true;
  announce(stopped ? "Stopped" : "All answers have ended");
}

function take(event) {
  if (!("index" in event)) throw ApiError.from(event, 500);
  const answer = answers[event.index];
  if (event.chunk) answer.chunk(event.chunk);
  else if (event.done) answer.end();
  else {
    const error = ApiError.from(event, event.error.code, event.retry_after_s);
    answer.fail(error.advice);
    if (error.status === 401) needKey();
  }
}

function failAll(error) {
  const text = error instanceof ApiError ? error.advice : "The answer could not be read.";
  const open = answers.filter((answer) => answer.ended === null);
  open.forEach((answer) => answer.fail(text));
  showError($("ask-error"), text);
  if (error.status === 401) needKey();
  if (!(error instanceof ApiError)) console.error(error);
}

const announce = (text) => setText($("announce"), text);

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("ask").addEventListener("change", showRoute);
$("stop-button").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && $("ask").contains(event.target)) {
    event.preventDefault();
    run();
  }
});
