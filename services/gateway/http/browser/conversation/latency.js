/* Where an answer's time went: one bar of its phases, a legend, the cause. */

import { element, milliseconds, share, words } from "../dom.js";

/* Phases that have one colour, as in the report of `pageant trace`; those of the queue begin with its name. */
const COLOURS = { preempted: "interrupted", recompute: "interrupted", lost: "interrupted", untold: "interrupted",
  waking: "interrupted" };
const SMALL = 0.01;  // of the whole: such phases share one entry of the legend

function colour(phase) {
  const group = phase.startsWith("to_") ? "hops" : phase.startsWith("queue_") ? "queue" : COLOURS[phase] ?? phase;
  return `var(--${group}, var(--hops))`;
}

function legendEntry(list, name, time, total, background, title = "") {
  const entry = element("li", "", list);
  element("i", "", entry).style.background = background;
  entry.append(name);
  element("b", "", entry, milliseconds(time));
  entry.append(` ${share(time / total)}`);
  entry.title = title;
}

/* One bar of all phases in their order, what each took, and why it took so long. */
export function showLatency(box, explanation) {
  const phases = Object.entries(explanation.phases)
    .map(([name, time]) => ({ name: words(name), time, colour: colour(name) }));
  const total = phases.reduce((sum, one) => sum + one.time, 0) || 1;
  const said = ({ name, time }) => `${name} ${milliseconds(time)}, ${share(time / total)}`;
  box.replaceChildren();
  const bar = element("div", "bar", box);
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", `Where ${milliseconds(total)} went: ${phases.map(said).join("; ")}`);
  for (const one of phases) {
    const part = element("i", "", bar);
    part.style.flex = `${one.time / total} 1 0`;
    part.style.background = one.colour;
    part.title = said(one);
  }
  element("div", "cause", box, explanation.cause);
  const list = element("ul", "legend", box);
  const [large, small] = [true, false].map((wanted) => phases.filter((one) => (one.time >= SMALL * total) === wanted));
  for (const one of large) legendEntry(list, one.name, one.time, total, one.colour, said(one));
  if (small.length)
    legendEntry(list, small.length > 1 ? `${small.length} others` : small[0].name,
                small.reduce((sum, one) => sum + one.time, 0), total, "var(--hops)", small.map(said).join("\n"));
  const misses = Object.entries(explanation.misses).map(([reason, tokens]) => `${tokens} ${words(reason)}`).join(", ");
  const counts = [misses && `prompt tokens computed: ${misses}`,
                  explanation.num_ahead && `${explanation.num_ahead} requests ahead`,
                  explanation.num_chunks > 1 && `prompt in ${explanation.num_chunks} steps`,
                  explanation.num_preemptions && `preemptions: ${explanation.num_preemptions}`].filter(Boolean);
  element("div", "counts", box, counts.join(" · "));
}
