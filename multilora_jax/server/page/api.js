// Calls to the server, with the caller's key. The key is kept in sessionStorage: one tab, until it is closed.

const STORE = "multilora-key";
let kept = null;
try {
  kept = sessionStorage.getItem(STORE);
} catch {
  // Storage may be forbidden: the key then lasts until the page is left.
}

export const key = {
  get: () => kept,
  set(value) {
    kept = value || null;
    try {
      if (kept) sessionStorage.setItem(STORE, kept);
      else sessionStorage.removeItem(STORE);
    } catch {
      // as above
    }
  },
};

/** A refusal. `status` is 0 where no answer came. */
export class ApiError extends Error {
  constructor(status, message, reason = "", retryAfter = null) {
    super(message);
    this.status = status;
    this.reason = reason;
    this.retryAfter = retryAfter;
  }

  /** What to tell the reader: the server's words, and what to do about them. */
  get advice() {
    const wait = this.retryAfter ? ` Try again in ${this.retryAfter} s.` : "";
    if (this.status === 0) return "The server cannot be reached.";
    if (this.status === 401) return `${key.get() ? "This key is not known here" : "This server asks for a key"}.`;
    if (this.status === 403 && this.reason === "admin_key_required") return "This needs an admin key.";
    return `${this.message}${wait}`;
  }

  static from(body, status, retryAfter) {
    const error = body?.error ?? {};
    return new ApiError(status, String(error.message ?? `The server answered ${status}`), error.reason, retryAfter);
  }
}

async function call(path, options) {
  const headers = { ...options.headers };
  if (kept) headers.Authorization = `Bearer ${kept}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, error.message);
  }
  if (response.ok) return response;
  let body = null;
  try {
    body = await response.json();
  } catch {
    // An answer without an error object, from a proxy perhaps: its status says enough.
  }
  throw ApiError.from(body, response.status, response.headers.get("retry-after"));
}

export async function getJson(path) {
  return (await call(path, {})).json();
}

function post(path, body, signal) {
  return call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

export async function postJson(path, body) {
  return (await post(path, body)).json();
}

/** The events of a stream as objects, until its [DONE]. */
export async function* postEvents(path, body, signal) {
  const response = await post(path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new ApiError(0, "The connection ended in mid-stream.");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
