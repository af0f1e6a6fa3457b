/* What happened: the differences of two views, in words, newest first. */

import { element, seconds } from "../dom.js";

const KEPT = 30;
const WORSE = new Set(["leaving", "down", "gone"]);

export class EventLog {
  constructor(box) {
    const section = element("section", "events", box);
    element("h3", "", section, "What happened");
    this.list = element("ol", "", section);
    this.list.setAttribute("role", "log");
    this.list.setAttribute("aria-label", "What happened to the services");
    const text = "Nothing since this page was opened: all processes are as they were.";
    this.empty = element("li", "empty", this.list, text);
  }

  /* The events between two views, which are shown; none at the first. */
  compare(view, before) {
    if (!before) return [];
    const events = view.supervisor && before.supervisor ? ofProcesses(view.supervisor, before.supervisor)
      : ofInstances(view.services, before.services);
    if (view.reason !== before.reason) events.push(view.reason ? { text: view.reason, kind: "worse" }
      : { text: "requests are served again", kind: "better" });
    for (const event of events) this.add(event);
    return events;
  }

  add({ text, kind }) {
    this.empty.remove();
    const line = element("li", kind);
    element("time", "", line, new Date().toLocaleTimeString("en-GB"));
    line.append(text);
    this.list.prepend(line);
    while (this.list.children.length > KEPT) this.list.lastChild.remove();
  }
}

const nameOf = (one) => `${one.service}-${one.index}`;
const keyOf = (one) => `${nameOf(one)} ${one.pid}`;

/* A process is known by its id: its successor in the same role is another one. */
function ofProcesses(now, before) {
  const old = new Map(before.processes.map((one) => [keyOf(one), one]));
  const events = [];
  for (const one of now.processes) {
    const was = old.get(keyOf(one));
    old.delete(keyOf(one));
    if (was?.state === one.state) continue;
    events.push({ text: `${nameOf(one)} ${sentence(one, was)}`, kind: kindOf(one.state) });
  }
  const seen = new Set(now.processes.filter((one) => one.state === "down").map(nameOf));
  for (const one of old.values())
    if (one.pid && !seen.has(nameOf(one)))
      events.push({ text: `${nameOf(one)} (process ${one.pid}) is gone`, kind: "worse" });
  return events;
}

function sentence({ state, seconds: age }, was) {
  if (state === "ready" && was?.state === "starting") return `is ready after ${seconds(age)}`;
  if (state === "unready") return "waits for other services";
  return state === "down" ? "ended" : `is ${state}`;
}

function ofInstances(now, before) {
  const events = [];
  for (const { service, instances } of now) {
    const old = before.find((one) => one.service === service)?.instances ?? [];
    for (const name of instances) if (!old.includes(name)) events.push({ text: `${name} joined`, kind: "better" });
    for (const name of old) if (!instances.includes(name)) events.push({ text: `${name} left`, kind: "worse" });
  }
  return events;
}

function kindOf(state) {
  return state === "ready" ? "better" : WORSE.has(state) ? "worse" : "changing";
}
