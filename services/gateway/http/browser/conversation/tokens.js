/* An answer's tokens: each has a span, and a table of what else the model could have said. */

import { element, share } from "../dom.js";

const SURE = 0.4;  // tokens that were less likely are underlined

/* Tokens of an event with their candidates, whichever of the two shapes it has. */
export function tokensOf(choice) {
  const found = choice.logprobs;
  if (!found) return [];
  if (found.content)
    return found.content.map((one) => ({ token: one.token, logprob: one.logprob,
      candidates: one.top_logprobs.map((other) => [other.token, other.logprob]) }));
  return found.tokens.map((token, place) => ({ token, logprob: found.token_logprobs[place],
    candidates: Object.entries(found.top_logprobs[place] ?? {}) }));
}

/* Each token has its own span where the tokens are what the text consists of; else the text is one. */
export function appendTokens(box, text, tokens) {
  const fits = tokens.length > 0 && tokens.map((one) => one.token).join("") === text;
  for (const one of fits ? tokens : [{ token: text, group: tokens }]) {
    if (!one.token) continue;
    const span = element("span", "token", box, one.token);
    span.scores = one.group ?? [one];
    const sure = one.logprob === undefined ? 1 : Math.exp(one.logprob);
    if (sure < SURE) span.style.setProperty("--doubt", `${Math.round(65 * (1 - sure))}%`);
  }
}

/* The table shows for the token under the pointer, and for the one that the arrow keys lead to. */
export function wireTokens(answers, tip) {
  let chosen = null;
  const choose = (span) => {
    chosen?.classList.remove("chosen");
    chosen = span?.scores?.length ? span : null;
    chosen?.classList.add("chosen");
    tip.classList.toggle("shown", chosen !== null);
    if (chosen) fill(tip, chosen);
  };
  answers.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") choose(event.target); });
  answers.addEventListener("pointerleave", () => choose(null));
  answers.addEventListener("click", (event) => choose(event.target));
  answers.addEventListener("scroll", () => choose(null));
  answers.addEventListener("focusout", () => choose(null));
  answers.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const text = event.target.closest?.(".text.answer");
    if (!step || !text) return;
    event.preventDefault();
    const spans = [...text.querySelectorAll(".token")];
    const place = spans.indexOf(chosen);
    const first = step > 0 ? 0 : spans.length - 1;
    choose(spans[place < 0 ? first : Math.min(spans.length - 1, Math.max(0, place + step))]);
  });
}

function fill(tip, span) {
  tip.replaceChildren();
  const table = element("table", "", tip);
  const caption = element("caption", "", table);
  caption.textContent = span.scores.length > 1 ? "tokens of this text" : "what came, and what could have";
  for (const one of span.scores) {
    const rows = one.candidates.some(([token]) => token === one.token) ? one.candidates
      : [[one.token, one.logprob], ...one.candidates];
    for (const [token, logprob] of rows) row(table, token, logprob, token === one.token);
  }
  const place = span.getClientRects()[0] ?? span.getBoundingClientRect();
  const below = place.bottom + tip.offsetHeight + 10 < innerHeight;
  tip.style.left = `${Math.max(8, Math.min(place.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below ? place.bottom + 6 : Math.max(8, place.top - tip.offsetHeight - 6)}px`;
}

function row(table, token, logprob, isOwn) {
  const line = element("tr", isOwn ? "own" : "", table);
  element("td", "", line, JSON.stringify(token).slice(1, -1).replaceAll(" ", "\u2423"));
  const bar = element("i", "", element("td", "", line));
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  element("td", "", line, share(Math.exp(logprob)));
  element("td", "", line, logprob.toFixed(2));
}
