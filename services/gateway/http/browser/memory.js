"use strict";
/* What survives a reload: settings and the conversation in this browser, the key in this tab alone. */

const STORED = "pageant", KEY = "pageant-key";
const MAX_TURNS = 100, MAX_CHARS = 500000;  // of a conversation that is kept: browsers keep a few megabytes
const FIELDS = ["system", "max_tokens", "temperature", "top_p", "seed", "stop"];

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

function saveAll(mode, messages, turns) {
  const fields = Object.fromEntries(FIELDS.map((name) => [name, byId(name).value]));
  let kept = turns.slice(-MAX_TURNS);
  while (kept.length && kept.reduce((sum, one) => sum + one.text.length, 0) > MAX_CHARS) kept = kept.slice(1);
  const state = { mode, fields, logprobs: byId("logprobs").checked, messages: messages.slice(-MAX_TURNS), turns: kept };
  remember(() => localStorage, STORED, JSON.stringify(state));
}

/* What was stored, where it is what this page stores; the fields are filled. */
function restoreAll() {
  let state = null;
  try { state = JSON.parse(recall(() => localStorage, STORED)); } catch { /* nothing, or another page's */ }
  for (const name of FIELDS)
    if (typeof state?.fields?.[name] === "string") byId(name).value = state.fields[name];
  if (typeof state?.logprobs === "boolean") byId("logprobs").checked = state.logprobs;
  const texts = (list, ...names) => Array.isArray(list)
    ? list.filter((one) => names.every((name) => typeof one?.[name] === "string")) : [];
  return { mode: state?.mode === "chat" ? "chat" : "completion", messages: texts(state?.messages, "role", "content"),
           turns: texts(state?.turns, "who", "text", "figures").filter(({ who }) => ["user", "assistant"].includes(who)) };
}
