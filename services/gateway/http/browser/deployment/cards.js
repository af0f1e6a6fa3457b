/* A card for each service, in the order in which a request meets them, and the wires between. */

import { button, element, figure, number, plural, share, write } from "../dom.js";

const SERVICES = {
  gateway: "takes requests, streams answers", tokenizer: "makes tokens of text", detokenizer: "makes text of tokens",
  scheduler: "plans every step", worker: "computes the model", draft: "proposes tokens",
  store: "keeps blocks of the KV cache",
};
const LAYOUT = [["gateway"], ["tokenizer", "detokenizer"], ["scheduler"], ["worker", "draft"], ["store"]];
const WIRES = [[["prompts", "down"], ["text", "up"]], [["token ids", "down"], ["token ids", "up"]],
               [["plans", "down"], ["samples", "up"]], [["blocks", "down"], ["blocks", "up"]]];
const FEWEST = { draft: 0, store: 0 };
const ALONE = new Set(["scheduler"]);
const STATES = { unready: "waiting" };
const MAX_SQUARES = 40;
const FAST = 60;  // tokens per second

export class Cards {
  constructor(box, give) {
    this.flow = element("div", "flow", box);
    this.cards = {};
    this.rows = [];
    for (const [place, row] of LAYOUT.entries()) {
      const wires = place ? wiresOf(WIRES[place - 1], this.flow) : null;
      const line = element("div", "row", this.flow);
      this.rows.push({ line, wires });
      for (const name of row) this.cards[name] = new Card(name, line, give);
    }
  }

  show(view, rates) {
    const moves = Math.max(rates.output, rates.prompt);
    this.flow.dataset.speed = moves > FAST ? "fast" : moves > 0 ? "slow" : "none";
    for (const card of Object.values(this.cards)) card.show(view, rates);
    for (const { line, wires } of this.rows) {
      const shown = [...line.children].filter((one) => !one.hidden).length;
      line.classList.toggle("pair", shown > 1);
      line.hidden = !shown;
      if (wires) wires.hidden = !shown;
    }
  }
}

function wiresOf(wires, parent) {
  const row = element("div", "wires", parent);
  row.setAttribute("aria-hidden", "true");
  for (const [text, way] of wires) element("span", way, row, text);
  return row;
}

class Card {
  constructor(name, parent, give) {
    this.name = name;
    this.box = element("article", "service", parent);
    this.box.dataset.service = name;
    this.box.setAttribute("aria-label", name);
    const head = element("header", "", this.box);
    element("i", "lamp", head).setAttribute("aria-hidden", "true");
    element("h3", "", head, name[0].toUpperCase() + name.slice(1)).title = SERVICES[name];
    this.state = element("span", "state", head);
    this.wasThere = false;
    this.gauge = element("div", "gauge", this.box);
    this.figures = element("p", "figures", this.box);
    this.processes = element("ul", "processes", this.box);
    this.processes.setAttribute("aria-label", `Processes of ${name}`);
    this.controls = new Controls(name, element("div", "controls", this.box), give);
  }

  show(view, rates) {
    const processes = processesOf(view, this.name);
    const state = stateOf(view, this.name, processes);
    this.box.dataset.state = state;
    this.wasThere ||= processes.length > 0;
    this.box.hidden = isOptional(this.name) && !this.wasThere;
    write(this.state, said(state, processes));
    showProcesses(this.processes, processes);
    FIGURES[this.name](this, view, rates);
    this.controls.show(view, processes);
  }
}

/* Restart, and more or fewer replicas: for an operator, where there is a supervisor. */
class Controls {
  constructor(name, box, give) {
    this.name = name;
    this.box = box;
    this.count = 0;
    const restart = () => give("/deployment/restart", { services: [name] });
    this.restart = button("", box, "Restart", restart, `Restart the ${name}`);
    const scale = (step) => () => give("/deployment/scale", { replicas: { [name]: this.count + step } });
    this.stepper = element("div", "stepper", box);
    this.fewer = button("", this.stepper, "−", scale(-1), `One ${name} fewer`);
    this.shown = element("output", "", this.stepper);
    this.more = button("", this.stepper, "+", scale(1), `One ${name} more`);
    this.stepper.hidden = ALONE.has(name);
  }

  show({ supervisor, refusal }, processes) {
    if (!supervisor?.order.startsWith("restart"))  // what is replaced leaves, and still counts
      this.count = processes.filter((one) => one.state !== "leaving").length;
    this.box.hidden = Boolean(refusal);
    const isBusy = supervisor?.order.split(/[^a-z]+/).includes(this.name) ?? false;
    this.restart.disabled = isBusy || !this.count;
    this.fewer.disabled = isBusy || this.count <= (FEWEST[this.name] ?? 1);
    this.more.disabled = isBusy;
    write(this.shown, String(this.count));
  }
}

/* Such a service has a card once there has been a process of it. */
function isOptional(service) {
  return FEWEST[service] === 0;
}

/* What the supervisor says of its processes, or else what the roster says. */
function processesOf(view, service) {
  if (view.supervisor)
    return view.supervisor.processes.filter((one) => one.service === service).sort((a, b) => a.index - b.index);
  const instances = view.services.find((one) => one.service === service)?.instances ?? [];
  return instances.map((name, index) => ({ service, index, state: "ready", pid: 0, name }));
}

function stateOf(view, service, processes) {
  if (!processes.length) return isOptional(service) ? "off" : "absent";
  const isLive = view.services.find((one) => one.service === service)?.instances.length > 0;
  const states = processes.map((one) => one.state);
  const unwell = ["down", "starting", "leaving", "unready"].find((state) => states.includes(state));
  return unwell ?? (isLive ? "ready" : "joining");
}

function said(state, processes) {
  const ready = processes.filter((one) => one.state === "ready").length;
  if (processes.length > 1 && ready < processes.length) return `${ready} of ${processes.length} ready`;
  return state === "ready" && processes.length > 1 ? `${processes.length} ready` : STATES[state] ?? state;
}

function showProcesses(list, processes) {
  while (list.children.length > processes.length) list.lastChild.remove();
  for (const [place, one] of processes.entries()) {
    const entry = list.children[place] ?? element("li", "", list);
    entry.dataset.state = one.state;
    write(entry, one.name ?? `${one.index}`);
    const name = one.pid ? `${one.service}-${one.index}, process ${one.pid}` : one.name ?? one.service;
    entry.title = `${name}: ${one.state}`;
  }
  list.hidden = processes.length < 2;
}

/* -- what each service has to show: a gauge and a line of figures */

const FIGURES = {
  gateway(card, view) {
    const { open_streams: open, paused_streams: paused } = view.gateway;
    write(card.figures, `${plural(open, "open stream")}${paused ? `, ${number(paused)} paused` : ""}`);
    squares(card.gauge, open - paused, paused, "open streams and paused ones");
  },
  tokenizer(card, view, rates) {
    write(card.figures, `${figure(rates.prompt)} tokens/s in`);
  },
  detokenizer(card, view, rates) {
    write(card.figures, `${figure(rates.output)} tokens/s out`);
  },
  scheduler(card, { counts }) {
    if (!counts) { write(card.figures, "no answer"); squares(card.gauge, 0, 0, ""); return; }
    const { prefix_cache_queries: queries, prefix_cache_hits: hits } = counts;
    const found = queries ? ` · prefix hits ${share(hits / queries)}` : "";
    write(card.figures, `${number(counts.running)} running, ${number(counts.waiting)} waiting${found}`);
    squares(card.gauge, counts.running, counts.waiting, "running and waiting sequences");
  },
  worker(card, { workers }, rates) {
    while (card.gauge.children.length > workers.length) card.gauge.lastChild.remove();
    for (const [place, worker] of workers.entries())
      blocks(card.gauge.children[place] ?? blockGauge(card.gauge), worker);
    const steps = Object.values(rates.steps).reduce((sum, one) => sum + one, 0);
    const speed = `${figure(steps)} steps/s · ${figure(rates.output)} tokens/s`;
    write(card.figures, workers.length ? speed : "none has joined");
  },
  draft(card, { counts }) {
    const { draft_tokens: drafted = 0, accepted_tokens: accepted = 0 } = counts ?? {};
    write(card.figures, drafted ? `drafts accepted ${share(accepted / drafted)}` : "no drafts");
  },
  store(card, { counts }) {
    const { stored_blocks: stored = 0, fetched_tokens: fetched = 0 } = counts ?? {};
    write(card.figures, `${plural(stored, "block")} given · ${plural(fetched, "token")} fetched`);
  },
};

/* One square for each: filled ones are under way, hollow ones wait. */
function squares(box, full, hollow, text) {
  const shown = Math.min(MAX_SQUARES, full + hollow);
  while (box.children.length > shown) box.lastChild.remove();
  while (box.children.length < shown) element("i", "square", box);
  for (const [place, one] of [...box.children].entries()) one.classList.toggle("hollow", place >= full);
  box.title = text && `${number(full)} and ${number(hollow)}: ${text}`;
}

function blockGauge(parent) {
  const box = element("div", "blocks", parent);
  const bar = element("div", "bar", box);
  bar.setAttribute("role", "img");
  for (const kind of ["used", "cached"]) element("i", kind, bar);
  element("span", "", box);
  return box;
}

function blocks(box, worker) {
  const [bar, text] = box.children;
  const used = worker.blocks - worker.free_blocks - worker.cached_blocks;
  bar.children[0].style.width = `${100 * used / worker.blocks}%`;
  bar.children[1].style.width = `${100 * worker.cached_blocks / worker.blocks}%`;
  const said = `${number(used)} of ${number(worker.blocks)} blocks used, ${number(worker.cached_blocks)} cached`;
  write(text, said);
  box.title = worker.instance;
  bar.setAttribute("aria-label", `${worker.instance}: ${said}`);
}
