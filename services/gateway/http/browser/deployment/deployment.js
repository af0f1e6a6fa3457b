/* The deployment, drawn live: asks /deployment twice a second while it is looked at. */

import { element, figure, number, share, write } from "../dom.js";
import { get, post } from "../server.js";
import { Cards } from "./cards.js";
import { Chart } from "./chart.js";
import { EventLog } from "./log.js";

const EVERY = 500;  // milliseconds
const HIDDEN_EVERY = 2000;  // while only the conversation is looked at, which says why it pauses
const TOTALS = [["out", "tokens/s"], ["running", "running"], ["waiting", "waiting"], ["cache", "KV cache"]];

export class Deployment {
  constructor(box, showState) {
    this.showState = showState;
    this.isShown = true;
    this.reason = "";  // why requests are not served now
    this.before = null;
    this.asked = 0;
    const head = element("header", "strip", box);
    element("h2", "", head, "Deployment");
    this.order = element("p", "order", head);
    this.order.setAttribute("role", "status");
    this.totals = Object.fromEntries(TOTALS.map(([name, text]) => [name, total(name, text, box)]));
    this.chart = new Chart(box);
    this.notice = element("p", "notice", box);
    this.notice.setAttribute("role", "alert");
    this.cards = new Cards(box, (path, body) => this.give(path, body));
    this.log = new EventLog(box);
    this.note = element("p", "note", box);
    this.box = box;
    this.look();
    setInterval(() => this.turn(), EVERY);
  }

  turn() {
    const due = this.isShown ? EVERY : HIDDEN_EVERY;
    if (!document.hidden && performance.now() - this.asked > due - 50) this.look();
  }

  async look() {
    if (this.isAsking) return;
    this.isAsking = true;
    this.asked = performance.now();
    try {
      this.show(await (await get("/deployment")).json());
    } catch (error) {
      this.reason = error.status ? "" : "the gateway does not answer";
      this.box.classList.add("stale");
      write(this.order, error.status ? error.message : this.reason);
    }
    this.isAsking = false;
  }

  show(view) {
    const rates = ratesOf(view, this.before);
    this.reason = view.reason;
    this.box.classList.remove("stale");
    this.showState(view.reason || "ready", view.reason ? "wait" : "ready");
    this.showTotals(view, rates);
    this.chart.add(rates.output, view.time);
    for (const event of this.log.compare(view, this.before)) this.chart.mark(event, view.time);
    this.cards.show(view, rates);
    const { supervisor } = view;
    write(this.order, supervisor?.order ? `${doing(supervisor.order)}${supervisor.num_waiting
      ? `, ${supervisor.num_waiting} more` : ""}` : "");
    if (supervisor?.failed) write(this.notice, supervisor.failed);
    write(this.note, view.refusal ? `To look at only: ${view.refusal}.` : "");
    this.before = view;
  }

  showTotals({ counts }, rates) {
    write(this.totals.out, counts ? figure(rates.output) : "–");
    write(this.totals.running, counts ? number(counts.running) : "–");
    write(this.totals.waiting, counts ? number(counts.waiting) : "–");
    write(this.totals.cache, counts ? share(counts.kv_cache_usage) : "–");
  }

  /* An order of an operator; what is wrong with it is said in the server's words. */
  async give(path, body) {
    write(this.notice, "");
    try {
      const { accepted } = await (await post(path, body)).json();
      write(this.order, doing(accepted));
    } catch (error) {
      write(this.notice, error.status ? error.message : "the gateway does not answer");
    }
    this.look();
  }
}

function total(name, text, box) {
  const parent = box.querySelector(".totals") ?? element("dl", "totals", box);
  const pair = element("div", name, parent);
  element("dt", "", pair, text);
  return element("dd", "", pair, "–");
}

function doing(order) {
  return order.replace("restart", "restarting").replace("scale", "scaling");
}

/* By second, of what counters grew since the view before; counters of a scheduler that was replaced begin anew. */
function ratesOf(view, before) {
  const passed = before ? view.time - before.time : 0;
  const grown = (now, old) => (now === undefined || old === undefined ? 0 : now >= old ? now - old : now);
  const rate = (now, old) => (passed > 0 ? grown(now, old) / passed : 0);
  const of = (name) => rate(view.counts?.[name], before?.counts?.[name]);
  const steps = {};
  for (const worker of view.workers)
    steps[worker.instance] = rate(worker.steps, before?.workers.find((one) => one.instance === worker.instance)?.steps);
  return { output: of("output_tokens"), prompt: of("prompt_tokens"), finished: of("finished"), steps };
}
