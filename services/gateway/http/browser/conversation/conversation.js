/* The conversation: what is asked, and what comes. */

import { button, byId, element } from "../dom.js";
import { events, post } from "../server.js";
import { Answer, turn } from "./answer.js";
import { toolFields } from "./tools.js";

const NUM_CANDIDATES = 5;
const EXAMPLES = {
  completion: ["Once upon a time", "One day, a little fox", "The big dog and the small cat"],
  chat: ["Tell me a story about a fox", "What do you like to eat?", "Hello"],
};
const WELCOME = {
  completion: ["Begin a text", "The model goes on with it. Or start with one of these:"],
  chat: ["Ask something", "The model answers, and remembers what was said. Or start with one of these:"],
};

export class Conversation {
  /* `page`: save(), openSettings(open, focus), showTicker(text, state), whyPaused(). */
  constructor(page) {
    this.page = page;
    this.said = { mode: "completion", messages: [], turns: [] };  // messages of a chat; turns as they are shown
    this.running = null;
    this.isShown = true;
    byId("chat").onclick = () => this.setMode("chat");
    byId("completion").onclick = () => this.setMode("completion");
    byId("clear").onclick = () => this.clear();
    byId("cancel").onclick = () => this.running?.abort();
    byId("ask").onsubmit = (event) => { event.preventDefault(); this.send(); };
    byId("prompt").oninput = fitPrompt;
    byId("prompt").onkeydown = (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); }
    };
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running) { event.preventDefault(); this.running.abort(); }
    });
  }

  restore({ mode, messages, turns }) {
    this.said = { mode, messages, turns };
    this.showMode(mode);
    let asked = "";
    for (const one of turns) {
      if (one.who === "user") asked = one.text;
      turn(one.who, one.text, this.lead(asked)).figures.innerText = one.figures;
    }
    if (!turns.length) this.showExamples();
  }

  /* What an answer begins with: a completion goes on with the text that was given. */
  lead(prompt) {
    return this.said.mode === "completion" ? prompt : "";
  }

  showMode(mode) {
    this.said.mode = mode;
    for (const name of ["chat", "completion"]) byId(name).setAttribute("aria-pressed", String(name === mode));
    for (const one of document.querySelectorAll(".only-chat")) one.hidden = mode !== "chat";
    byId("prompt").placeholder = mode === "chat" ? "Your message" : "The beginning of a text";
  }

  setMode(mode) {
    if (mode === this.said.mode) return;
    this.showMode(mode);
    this.clear();
  }

  clear() {
    this.running?.abort();
    this.said = { mode: this.said.mode, messages: [], turns: [] };
    byId("answers").replaceChildren();
    this.showExamples();
    this.page.save();
  }

  /* Something to begin with, where nothing has been said. */
  showExamples() {
    const [title, text] = WELCOME[this.said.mode];
    const box = element("section", "examples", byId("answers"));
    element("h2", "", box, title);
    element("p", "", box, text);
    const list = element("div", "", box);
    for (const example of EXAMPLES[this.said.mode])
      button("", list, example, () => { byId("prompt").value = example; this.send(); });
  }

  send() {
    const prompt = byId("prompt").value;
    if (this.running || !prompt) return;
    byId("prompt").value = "";
    fitPrompt();
    turn("user", prompt, this.lead(prompt));
    this.said.turns.push({ who: "user", text: prompt, figures: "" });
    if (this.said.mode === "chat") this.said.messages.push({ role: "user", content: prompt });
    this.ask(prompt, 1);
  }

  /* Ask with what was said.  Where nothing comes of it, its last `numAsked` messages can be asked again. */
  async ask(prompt, numAsked) {
    const own = this.running = new AbortController();
    const { said } = this;
    byId("answers").querySelector(".examples")?.remove();
    this.showRunning(true);
    byId("said").textContent = "The model answers";
    const answer = new Answer(this.page.whyPaused, this.page.showTicker, this.lead(prompt));
    let failed = null;
    try {
      const [path, body] = said.mode === "chat" ? ["/v1/chat/completions", this.chatBody()]
        : ["/v1/completions", this.completionBody(prompt)];
      for await (const event of events(await post(path, body, own.signal))) answer.take(event);
    } catch (error) {
      failed = error;
      if (error.status === 401) this.page.openSettings(true, "key");
    }
    answer.end(failed);
    this.running = null;
    this.showRunning(false);
    if (said === this.said) this.finish(prompt, answer, failed, numAsked);
    if (document.activeElement === document.body) byId("prompt").focus();
  }

  showRunning(isRunning) {
    byId("send").hidden = isRunning;
    byId("cancel").hidden = !isRunning;
  }

  /* What was said is kept; what failed before its first word can be asked again. */
  finish(prompt, answer, failed, numAsked) {
    const { said } = this, { calls } = answer.calls;
    said.turns.push({ who: "assistant", text: answer.text, figures: answer.parts.figures.innerText });
    if (said.mode === "chat") {
      if (calls.length && !failed) said.messages.push({ role: "assistant", content: answer.text, tool_calls: calls });
      else if (answer.text) said.messages.push({ role: "assistant", content: answer.text });
      else said.messages.splice(said.messages.length - numAsked);
    }
    if (!failed) answer.calls.askResults((results) => this.sendResults(results));
    if (failed && !answer.text && failed.name !== "AbortError" && !byId("prompt").value) byId("prompt").value = prompt;
    byId("said").textContent = failed ? `${answer.text} ${failed.name === "AbortError" ? "Stopped" : failed.message}`
      : answer.text || calls.map((one) => `Calls ${one.function.name}`).join(", ") || "The answer is empty";
    this.page.save();
  }

  sendResults(results) {
    if (this.running) return;
    this.said.messages.push(...results);
    this.ask("", results.length);
  }

  parameters() {
    const found = { stream: true, stream_options: { include_usage: true }, explain: true };
    if (byId("model").value) found.model = byId("model").value;
    for (const name of ["max_tokens", "temperature", "top_p", "seed"])
      if (byId(name).value !== "") found[name] = Number(byId(name).value);
    if (byId("stop").value !== "") found.stop = byId("stop").value;
    return found;
  }

  completionBody(prompt) {
    const scores = byId("logprobs").checked ? { logprobs: NUM_CANDIDATES } : {};
    return { ...this.parameters(), ...scores, prompt };
  }

  chatBody() {
    const scores = byId("logprobs").checked ? { logprobs: true, top_logprobs: NUM_CANDIDATES } : {};
    const system = byId("system").value.trim(), { messages } = this.said;
    const asked = system ? [{ role: "system", content: system }, ...messages] : messages;
    return { ...this.parameters(), ...scores, ...toolFields(), messages: asked };
  }
}

/* As high as its text, up to what the style sheet allows. */
function fitPrompt() {
  const prompt = byId("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}
