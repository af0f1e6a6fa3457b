/* Tokens per second of the last minute, with a line at each thing that happened. */

import { drawing, element, figure, write } from "../dom.js";

const SPAN = 60;  // seconds
const WIDTH = 600, HEIGHT = 80;

export class Chart {
  constructor(box) {
    const figureBox = element("figure", "chart", box);
    const caption = element("figcaption", "", figureBox, "tokens per second, last minute");
    this.top = element("span", "", caption);
    const size = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.picture = drawing("svg", { ...size, role: "img" }, figureBox);
    this.marks = drawing("g", { class: "marks" }, this.picture);
    this.area = drawing("path", { class: "area" }, this.picture);
    this.line = drawing("path", { class: "line" }, this.picture);
    this.points = [];
    this.events = [];
  }

  add(value, time) {
    this.points.push([time, value]);
    this.points = this.points.filter(([at]) => time - at <= SPAN + 1);
    this.events = this.events.filter(({ at }) => time - at <= SPAN);
    this.draw(time);
  }

  mark({ text, kind }, time) {
    this.events.push({ text, kind, at: time });
  }

  draw(now) {
    const most = Math.max(10, ...this.points.map(([, value]) => value));
    const x = (at) => (WIDTH * (1 - (now - at) / SPAN)).toFixed(1);
    const y = (value) => (HEIGHT - 2 - (HEIGHT - 8) * value / most).toFixed(1);
    const path = this.points.map(([at, value], place) => `${place ? "L" : "M"}${x(at)} ${y(value)}`).join("");
    this.line.setAttribute("d", path);
    this.area.setAttribute("d", path ? `${path}L${x(now)} ${HEIGHT}L${x(this.points[0][0])} ${HEIGHT}Z` : "");
    this.marks.replaceChildren();
    for (const { at, kind, text } of this.events) {
      const line = drawing("line", { x1: x(at), x2: x(at), y1: 0, y2: HEIGHT, class: kind }, this.marks);
      drawing("title", {}, line).textContent = text;
    }
    const last = this.points.at(-1)?.[1] ?? 0;
    write(this.top, `most ${figure(most)}`);
    this.picture.setAttribute("aria-label",
      `Tokens per second: ${figure(last)} now, at most ${figure(most)} in the last minute`);
  }
}
