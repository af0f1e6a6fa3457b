/* Puts the page together: header, views, settings, and what is asked of the server now and then. */

import { Conversation } from "./conversation/conversation.js";
import { EXAMPLE_TOOLS } from "./conversation/tools.js";
import { wireTokens } from "./conversation/tokens.js";
import { Deployment } from "./deployment/deployment.js";
import { byId, element, write } from "./dom.js";
import { recallKey, rememberKey, restoreAll, saveAll } from "./memory.js";
import { get, key } from "./server.js";

const LOOK_SECONDS = 10;
const NARROW = matchMedia("(max-width: 44rem)");

const deployment = new Deployment(byId("deployment"), showState);
const conversation = new Conversation({ save, openSettings, showTicker, whyPaused: () => deployment.reason });
let wantedModel = "";

function save() {
  saveAll(conversation.said);
}

/* -- views */

function showView(view) {
  const shown = view === "both" && NARROW.matches ? "conversation" : view;
  document.body.dataset.view = shown;
  for (const one of document.querySelectorAll("#top .segments button"))
    one.setAttribute("aria-pressed", String(one.dataset.view === shown));
  deployment.isShown = shown !== "conversation";
  conversation.isShown = shown !== "deployment";
}

/* The answer that streams, in one line: for a screen without room for both panes. */
function showTicker(text, state) {
  const ticker = byId("ticker");
  ticker.hidden = !text;
  ticker.dataset.state = state;
  write(ticker, text);
}

/* -- settings and models */

function openSettings(open, focus = "") {
  document.body.classList.toggle("with-settings", open);
  byId("settings").setAttribute("aria-expanded", String(open));
  if (open && focus) byId(focus).focus();
}

function showState(text, state) {
  write(byId("state"), text);
  byId("state").dataset.state = state;
}

function showModels(models) {
  const select = byId("model");
  const names = models.map((one) => one.id);
  if ([...select.options].map((one) => one.value).join("\n") === names.join("\n")) return;
  const chosen = select.value || wantedModel;
  select.replaceChildren();
  const groups = { Models: models.filter((one) => !one.parent), Adapters: models.filter((one) => one.parent) };
  for (const [label, list] of Object.entries(groups)) {
    if (!list.length) continue;
    const parent = groups.Adapters.length ? element("optgroup", "", select) : select;
    if (parent !== select) parent.label = label;
    for (const one of list) element("option", "", parent, one.id).value = one.id;
  }
  if (names.includes(chosen)) select.value = chosen;
}

async function look() {
  try {
    const health = await (await fetch("/health")).json();
    showModels((await (await get("/v1/models")).json()).data);
    showState(health.status === "ok" ? "ready" : health.reason, health.status === "ok" ? "ready" : "wait");
  } catch (error) {
    showState(error.status ? error.message : "the server does not answer", "fault");
  }
}

/* -- the beginning */

byId("tools").value = EXAMPLE_TOOLS;
byId("key").value = recallKey();
const stored = restoreAll();
wantedModel = stored.model;
conversation.restore(stored);
showView(stored.view ?? (innerWidth < 900 ? "conversation" : "both"));
wireTokens(byId("answers"), byId("tip"));
for (const one of document.querySelectorAll("#top .segments button"))
  one.onclick = () => { showView(one.dataset.view); save(); };
NARROW.onchange = () => showView(document.body.dataset.view);
byId("ticker").onclick = () => showView("conversation");
byId("settings").onclick = () => openSettings(!document.body.classList.contains("with-settings"));
byId("example_tool").onclick = () => { byId("tools").value = EXAMPLE_TOOLS; save(); };
byId("aside").onchange = save;
byId("model").onchange = save;
byId("key").onchange = () => { rememberKey(key()); look(); deployment.look(); };
look();
setInterval(look, 1000 * LOOK_SECONDS);
