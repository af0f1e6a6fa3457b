/* Small helpers: elements, and how numbers are written. */

export const byId = (id) => document.getElementById(id);

export function element(kind, name, parent, text = "") {
  const made = document.createElement(kind);
  if (name) made.className = name;
  made.textContent = text;
  parent?.append(made);
  return made;
}

export function button(name, parent, text, act, title = "") {
  const made = element("button", name, parent, text);
  made.type = "button";
  made.onclick = act;
  if (title) {
    made.title = title;
    made.setAttribute("aria-label", title);
  }
  return made;
}

export function drawing(kind, attributes, parent) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent?.append(made);
  return made;
}

/* Writes only what differs: what is written anew is read out anew, and loses a selection. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const words = (name) => name.replaceAll("_", " ");

export const number = (value) => Math.round(value).toLocaleString("en");

export const figure = (value) => (value && value < 10 ? value.toFixed(1) : number(value));

export const milliseconds = (time) => (time < 999.5 ? `${figure(time)} ms` : seconds(time / 1000));

export const seconds = (time) => (time < 100 ? `${time.toFixed(1)} s` : time < 6000 ? `${Math.round(time / 60)} min`
  : `${Math.round(time / 3600)} h`);

export const share = (part) => `${part >= 0.0995 ? Math.round(100 * part) : (100 * part).toFixed(1)} %`;

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
