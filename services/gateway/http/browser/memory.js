/* What survives a reload: settings and the conversation in this browser, the key in this tab alone. */

import { byId } from "./dom.js";

const STORED = "pageant", KEY = "pageant-key";
const MAX_TURNS = 100, MAX_CHARS = 500000;  // of a conversation that is kept: browsers keep a few megabytes
const FIELDS = ["system", "max_tokens", "temperature", "top_p", "seed", "stop", "tools", "tool_choice"];
const CHECKS = ["logprobs", "use_tools"];
const SPEAKERS = ["user", "assistant"];
const VIEWS = ["conversation", "both", "deployment"];

/* Storage may be full, or switched off: then nothing is remembered, and all else works. */
function remember(storage, name, value) {
  try {
    if (value) storage().setItem(name, value);
    else storage().removeItem(name);
  } catch { /* not remembered */ }
}

function recall(storage, name) {
  try { return storage().getItem(name) ?? ""; } catch { return ""; }
}

export function rememberKey(key) {
  remember(() => sessionStorage, KEY, key);
}

export function recallKey() {
  return recall(() => sessionStorage, KEY);
}

/* `said`: mode, messages and turns. */
export function saveAll(said) {
  const fields = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
  const checks = Object.fromEntries(CHECKS.map((name) => [name, byId(name).checked]));
  let turns = said.turns.slice(-MAX_TURNS);
  while (turns.length && turns.reduce((sum, one) => sum + one.text.length, 0) > MAX_CHARS) turns = turns.slice(1);
  const state = { mode: said.mode, fields, checks, model: byId("model").value, view: document.body.dataset.view,
                  messages: said.messages.slice(-MAX_TURNS), turns };
  remember(() => localStorage, STORED, JSON.stringify(state));
}

/* What was stored, where it is what this page stores; the fields are filled. */
export function restoreAll() {
  let state = null;
  try { state = JSON.parse(recall(() => localStorage, STORED)); } catch { /* nothing, or another page's */ }
  for (const name of FIELDS)
    if (typeof state?.fields?.[name] === "string") byId(name).value = state.fields[name];
  for (const name of CHECKS)
    if (typeof state?.checks?.[name] === "boolean") byId(name).checked = state.checks[name];
  const texts = (list, ...names) => Array.isArray(list)
    ? list.filter((one) => names.every((name) => typeof one?.[name] === "string")) : [];
  return { mode: state?.mode === "chat" ? "chat" : "completion", messages: texts(state?.messages, "role", "content"),
           turns: texts(state?.turns, "who", "text", "figures").filter(({ who }) => SPEAKERS.includes(who)),
           model: typeof state?.model === "string" ? state.model : "",
           view: VIEWS.includes(state?.view) ? state.view : null };
}
