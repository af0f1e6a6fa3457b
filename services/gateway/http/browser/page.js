/* The conversation: what is asked, and what comes. */

const NUM_CANDIDATES = 5;
const EXAMPLES = {
  completion: ["Once upon a time", "One day, a little fox", "The big dog and the small cat"],
  chat: ["Tell me a story about a fox", "What do you like to eat?", "Hello"],
};
let mode = "completion";
let messages = [];  // of a chat
let turns = [];  // as they are shown: who, text, figures
let running = null;

function byId(id) {
  return document.getElementById(id);
}

function element(kind, name, parent, text = "") {
  const made = document.createElement(kind);
  made.className = name;
  made.textContent = text;
  parent.append(made);
  return made;
}

function turn(who, text = "") {
  const box = element("section", "turn " + who, byId("answers"));
  element("div", "who", box, who);
  const parts = { thought: element("div", "text thought", box), text: element("div", "text", box, text),
                  calls: element("div", "call text", box), figures: element("div", "figures", box),
                  latency: element("div", "latency", box) };
  box.scrollIntoView({ block: "end" });
  return parts;
}

function showMode(next) {
  mode = next;
  for (const name of ["chat", "completion"]) {
    byId(name).classList.toggle("chosen", name === next);
    byId(name).setAttribute("aria-pressed", String(name === next));
  }
  for (const one of document.querySelectorAll(".only-chat")) one.hidden = next !== "chat";
}

function setMode(next) {
  if (next === mode) return;
  showMode(next);
  clear();
}

function clear() {
  running?.abort();
  messages = [];
  turns = [];
  byId("answers").replaceChildren();
  showExamples();
  save();
}

function save() {
  saveAll(mode, messages, turns);
}

/* Something to begin with, where nothing has been said. */
function showExamples() {
  const box = element("section", "examples", byId("answers"));
  element("p", "", box, mode === "chat" ? "Ask something, or begin with one of these:"
    : "Begin a text and the model goes on with it. Or start with one of these:");
  for (const text of EXAMPLES[mode]) {
    const button = element("button", "", box, text);
    button.type = "button";
    button.onclick = () => { byId("prompt").value = text; send(); };
  }
}

function openSettings(open) {
  document.body.classList.toggle("with-settings", open);
  byId("settings").setAttribute("aria-expanded", String(open));
}

function headers() {
  const key = byId("key").value.trim();
  return key ? { authorization: `Bearer ${key}` } : {};
}

/* A server that asks for a key says 401: say whether it is missing or not valid, and open the settings. */
function refusedKey() {
  byId("key").setAttribute("aria-invalid", "true");
  return byId("key").value.trim() ? "the server refuses this API key" : "the server asks for an API key: see Settings";
}

function acceptedKey() {
  byId("key").removeAttribute("aria-invalid");
}

function parameters() {
  const found = { stream: true, stream_options: { include_usage: true }, explain: true };
  for (const name of ["max_tokens", "temperature", "top_p", "seed"])
    if (byId(name).value !== "") found[name] = Number(byId(name).value);
  if (byId("stop").value !== "") found.stop = byId("stop").value;
  return found;
}

function completionBody(prompt) {
  const scores = byId("logprobs").checked ? { logprobs: NUM_CANDIDATES } : {};
  return { ...parameters(), ...scores, prompt };
}

function chatBody() {
  const scores = byId("logprobs").checked ? { logprobs: true, top_logprobs: NUM_CANDIDATES } : {};
  const system = byId("system").value.trim();
  const asked = system ? [{ role: "system", content: system }, ...messages] : messages;
  return { ...parameters(), ...scores, messages: asked };
}

/* Tokens of an event with their candidates, whichever of the two shapes it has. */
function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content)
    return found.content.map((one) => ({ token: one.token, logprob: one.logprob,
      candidates: one.top_logprobs.map((other) => [other.token, other.logprob]) }));
  return found.tokens.map((token, place) => ({ token, logprob: found.token_logprobs[place],
    candidates: Object.entries(found.top_logprobs[place] ?? {}) }));
}

/* Each token has its own span where the tokens are what the text consists of; else the text is one. */
function show(parts, text, tokens) {
  const fits = tokens.length > 0 && tokens.map((one) => one.token).join("") === text;
  for (const one of fits ? tokens : [{ token: text, group: tokens }]) {
    if (!one.token) continue;
    const span = element("span", "token", parts.text, one.token);
    span.scores = one.group ?? [one];
    const sure = one.logprob === undefined ? 1 : Math.exp(one.logprob);
    if (sure < 0.5) span.style.background = `color-mix(in srgb, var(--accent) ${Math.round(35 * (1 - sure))}%, transparent)`;
  }
}

function percent(logprob) {
  return (100 * Math.exp(logprob)).toFixed(1) + " %";
}

function showTip(event) {
  const scores = event.target.scores, tip = byId("tip");
  if (!scores?.length) { tip.style.display = "none"; return; }
  tip.replaceChildren();
  const table = element("table", "", tip);
  for (const one of scores) {
    const rows = one.candidates.some(([token]) => token === one.token) ? one.candidates
      : [...one.candidates, [one.token, one.logprob]];
    for (const [token, logprob] of rows) {
      const row = element("tr", token === one.token ? "own" : "", table);
      element("td", "", row, JSON.stringify(token));
      element("td", "", row, percent(logprob));
    }
  }
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8) + "px";
}

/* Server-sent events of a fetch: EventSource cannot post. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const blocks = waiting.split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function failureOf(response) {
  if (response.status === 401) {
    const words = refusedKey();
    openSettings(true);
    byId("key").focus();
    return new Error(words);
  }
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `${response.status} ${response.statusText}`);
}

class Figures {
  begin = performance.now();
  first = 0;
  last = 0;
  usage = null;
  note() {
    this.last = performance.now();
    this.first ||= this.last;
  }
  text(numEvents) {
    if (!this.first) return "";
    const tokens = this.usage?.completion_tokens ?? numEvents;
    const rate = tokens > 1 && this.last > this.first ? (1000 * (tokens - 1) / (this.last - this.first)).toFixed(1) : "–";
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const prompt = this.usage ? `${this.usage.prompt_tokens} prompt tokens${cached ? ` (${cached} cached)` : ""} · ` : "";
    return `${prompt}${tokens} tokens · ${rate} tokens/s · first after ${Math.round(this.first - this.begin)} ms`;
  }
}

function take(choice, parts, answer) {
  const delta = choice.delta ?? { content: choice.text };
  if (delta.reasoning_content) parts.thought.textContent += delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    if (call.function.name) parts.calls.textContent += `${parts.calls.textContent ? "\n" : ""}${call.function.name} `;
    parts.calls.textContent += call.function.arguments ?? "";
  }
  show(parts, delta.content ?? "", tokensOf(choice));
  answer.text += delta.content ?? "";
  if (choice.finish_reason) answer.reason = choice.finish_reason;
}

async function generate(path, body, parts, answer, signal) {
  const figures = new Figures();
  let numEvents = 0;
  const response = await fetch(path, { method: "POST", headers: { "content-type": "application/json", ...headers() },
                                       body: JSON.stringify(body), signal });
  if (!response.ok) throw await failureOf(response);
  acceptedKey();
  for await (const one of events(response)) {
    if (one.error) throw new Error(one.error.message);
    if (one.usage) figures.usage = one.usage;
    if (one.explanations) showLatency(parts.latency, one.explanations[0]);
    for (const choice of one.choices) {
      figures.note();
      numEvents += 1;
      take(choice, parts, answer);
    }
    parts.figures.textContent = figures.text(numEvents);
    const box = byId("answers");
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  }
  parts.figures.textContent += ` · ended by ${answer.reason || "?"}`;
}

async function send() {
  const prompt = byId("prompt").value;
  if (running || !prompt) return;
  const own = running = new AbortController();
  const conversation = turns;
  byId("answers").querySelector(".examples")?.remove();
  byId("send").disabled = true;
  byId("cancel").disabled = false;
  byId("prompt").value = "";
  byId("said").textContent = "The model answers";
  if (mode === "chat") messages.push({ role: "user", content: prompt });
  turn("user", prompt);
  const parts = turn("assistant"), answer = { text: "", reason: "" };
  const asked = messages.length;
  let failed = null;
  try {
    const [path, body] = mode === "chat" ? ["/v1/chat/completions", chatBody()] : ["/v1/completions", completionBody(prompt)];
    await generate(path, body, parts, answer, own.signal);
  } catch (error) {
    failed = error;
    element("div", "error", parts.figures, error.name === "AbortError" ? "stopped" : error.message);
  }
  running = null;
  byId("send").disabled = false;
  byId("cancel").disabled = true;
  if (conversation === turns) finish(prompt, answer, parts, failed, asked);
  if (document.activeElement !== byId("key")) byId("prompt").focus();
}

/* What was said is kept; what failed before its first word can be asked again. */
function finish(prompt, answer, parts, failed, asked) {
  turns.push({ who: "user", text: prompt, figures: "" },
             { who: "assistant", text: answer.text, figures: parts.figures.innerText });
  if (mode === "chat") {
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.splice(asked - 1);
  }
  if (failed && !answer.text && failed.name !== "AbortError" && !byId("prompt").value) byId("prompt").value = prompt;
  byId("said").textContent = failed ? `${answer.text} ${failed.name === "AbortError" ? "Stopped" : failed.message}`
    : answer.text || "The answer is empty";
  save();
}

async function look() {
  try {
    const health = await (await fetch("/health")).json();
    const response = await fetch("/v1/models", { headers: headers() });
    let state = health.status === "ok" ? "" : health.reason;
    if (response.status === 401) state = refusedKey();
    else if (!response.ok) state = (await failureOf(response)).message;
    else {
      acceptedKey();
      byId("model").textContent = (await response.json()).data[0].id;
    }
    if (byId("state").textContent !== state) byId("state").textContent = state;
  } catch {
    byId("state").textContent = "the server does not answer";
  }
}

function restore() {
  byId("key").value = recall(() => sessionStorage, KEY);
  const stored = restoreAll();
  showMode(stored.mode);
  ({ messages, turns } = stored);
  for (const one of turns) turn(one.who, one.text).figures.innerText = one.figures;
  if (!turns.length) showExamples();
}

byId("chat").onclick = () => setMode("chat");
byId("completion").onclick = () => setMode("completion");
byId("clear").onclick = clear;
byId("settings").onclick = () => openSettings(!document.body.classList.contains("with-settings"));
byId("cancel").onclick = () => running?.abort();
byId("aside").onchange = save;
byId("key").onchange = () => { remember(() => sessionStorage, KEY, byId("key").value.trim()); look(); };
document.querySelector("form").onsubmit = (event) => { event.preventDefault(); send(); };
byId("prompt").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
document.onkeydown = (event) => {
  if (event.key === "Escape" && running) { event.preventDefault(); running.abort(); }
};
byId("answers").onmousemove = showTip;
byId("answers").onmouseleave = () => { byId("tip").style.display = "none"; };
restore();
look();
setInterval(look, 10000);
