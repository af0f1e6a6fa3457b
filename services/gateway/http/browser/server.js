/* What the page asks its server, and how that says no. */

import { byId } from "./dom.js";

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return byId("key").value.trim();
}

function headers() {
  return key() ? { authorization: `Bearer ${key()}` } : {};
}

export async function get(path) {
  return answered(await fetch(path, { headers: headers() }));
}

export async function post(path, body, signal) {
  return answered(await fetch(path, { method: "POST", headers: { "content-type": "application/json", ...headers() },
                                      body: JSON.stringify(body), signal }));
}

/* The response; raises a ServerError with the server's own words where it refuses. */
async function answered(response) {
  if (response.status === 401) {
    byId("key").setAttribute("aria-invalid", "true");
    const text = key() ? "the server refuses this API key" : "the server asks for an API key: see Settings";
    throw new ServerError(text, response.status);
  }
  byId("key").removeAttribute("aria-invalid");
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ServerError(body?.error?.message ?? `${response.status} ${response.statusText}`, response.status);
}

/* Server-sent events of a response: EventSource cannot post. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data: "));
      const data = lines.map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
