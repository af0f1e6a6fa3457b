/* One answer: its text as it comes, the pauses in it, its figures, and where its time went. */

import { byId, element, figure, milliseconds, number, seconds, write } from "../dom.js";
import { showLatency } from "./latency.js";
import { appendTokens, tokensOf } from "./tokens.js";
import { ToolCalls } from "./tools.js";

const PAUSE = 700;  // milliseconds without a token that are shown as a pause
const USUAL = 8;  // times the usual time between tokens: a slow model does not pause
const TICK = 100;
const CHAR = 9;  // pixels, in the ticker

/* `lead`: the text that a completion goes on with, which is shown as its beginning. */
export function turn(who, text = "", lead = "") {
  const box = element("section", `turn ${who}`, byId("answers"));
  element("div", "who", box, who);
  const parts = { thought: element("div", "text thought", box), text: element("div", "text", box, text),
                  calls: element("div", "calls", box), pause: element("div", "pausing", box),
                  figures: element("div", "figures", box), latency: element("div", "latency", box) };
  if (who === "user" && lead) box.classList.add("lead");
  if (who === "assistant") {
    parts.text.classList.add("answer");
    if (lead) parts.text.dataset.lead = lead;
    parts.text.tabIndex = 0;
    parts.text.setAttribute("aria-label", "Answer; arrow keys lead from token to token");
    parts.text.setAttribute("role", "group");
  }
  box.scrollIntoView({ block: "end" });
  return parts;
}

export class Answer {
  /* `whyPaused` says which service is missing, if one is known to be. */
  constructor(whyPaused, showTicker, lead) {
    this.parts = turn("assistant", "", lead);
    this.parts.text.classList.add("streaming");
    this.calls = new ToolCalls(this.parts.calls);
    this.whyPaused = whyPaused;
    this.showTicker = showTicker;
    this.text = "";
    this.reason = "";
    this.usage = null;
    this.numEvents = 0;
    this.paused = 0;  // milliseconds, in all
    this.begin = performance.now();
    this.first = 0;
    this.last = 0;
    this.timer = setInterval(() => this.tick(), TICK);
  }

  /* An event of the stream. */
  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.usage = event.usage;
    if (event.explanations) showLatency(this.parts.latency, event.explanations[0]);
    for (const choice of event.choices) this.takeChoice(choice);
    write(this.parts.figures, this.figures());
    const box = byId("answers");
    if (box.scrollHeight - box.scrollTop - box.clientHeight < 120) box.scrollTop = box.scrollHeight;
  }

  takeChoice(choice) {
    const delta = choice.delta ?? { content: choice.text };
    const now = performance.now();
    if (this.isPause(now)) this.seam(now - this.last);
    this.first ||= now;
    this.last = now;
    this.numEvents += 1;
    this.parts.thought.textContent += delta.reasoning_content ?? "";
    this.calls.take(delta.tool_calls);
    appendTokens(this.parts.text, delta.content ?? "", tokensOf(choice));
    this.text += delta.content ?? "";
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.showPause(0);
  }

  isPause(now) {
    const usual = this.numEvents > 1 ? (this.last - this.first - this.paused) / (this.numEvents - 1) : 0;
    return this.first > 0 && now - this.last > Math.max(PAUSE, USUAL * usual);
  }

  /* Leaves a mark where the stream stood still; it is no part of the text. */
  seam(time) {
    this.paused += time;
    const mark = element("i", "seam", this.parts.text);
    mark.dataset.time = milliseconds(time);
    mark.title = `no token came for ${milliseconds(time)}; then it went on from here`;
  }

  tick() {
    const now = performance.now();
    this.showPause(this.isPause(now) ? now - this.last : 0);
  }

  showPause(time) {
    const why = time ? this.whyPaused() : "";
    write(this.parts.pause, time ? `paused for ${seconds(time / 1000)}${why ? `: ${why}` : ""}` : "");
    this.parts.text.classList.toggle("paused", time > 0);
    const begin = time ? `paused ${seconds(time / 1000)} … ` : "… ";
    const room = Math.floor(Math.min(innerWidth, 900) / CHAR) - begin.length;
    const tail = this.text.replace(/\s+/g, " ").slice(-Math.max(10, room));
    this.showTicker(begin + tail, time ? "paused" : "streaming");
  }

  /* Under the names that `pageant chat` prints. */
  figures() {
    if (!this.first) return "";
    const tokens = this.usage?.completion_tokens ?? this.numEvents;
    const time = this.last - this.first;
    const rate = tokens > 1 && time > 0 ? figure((1000 * (tokens - 1)) / time) : "–";
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const parts = [`${number(tokens)} completion tokens`, `${rate} tokens/s`,
                   `time to first token ${milliseconds(this.first - this.begin)}`];
    const found = cached ? ` (${number(cached)} cached)` : "";
    if (this.usage) parts.unshift(`${number(this.usage.prompt_tokens)} prompt tokens${found}`);
    if (this.paused) parts.push(`paused ${seconds(this.paused / 1000)}`);
    return parts.join(" · ");
  }

  /* No more comes. */
  end(failed) {
    clearInterval(this.timer);
    this.showPause(0);
    this.showTicker("", "");
    this.parts.text.classList.remove("streaming", "paused");
    if (failed) element("div", "error", this.parts.figures, failed.name === "AbortError" ? "stopped" : failed.message);
    else this.parts.figures.append(` · finish reason: ${this.reason || "none"}`);
  }
}
