/* Calls of tools: cards that show them, and where their results are given. */

import { button, byId, element } from "../dom.js";

export const EXAMPLE_TOOLS = JSON.stringify([{ type: "function", function: {
  name: "get_weather", description: "The weather at a place, now.",
  parameters: { type: "object", required: ["city", "unit"],
                properties: { city: { type: "string" },
                              unit: { type: "string", enum: ["celsius", "fahrenheit"] } } } } }], null, 2);
const EXAMPLE_RESULT = { get_weather: '{"temperature": 18, "sky": "clear"}' };

/* The fields of a chat's body; raises an Error where the definitions are no JSON. */
export function toolFields() {
  if (!byId("use_tools").checked) return {};
  let tools = null;
  try { tools = JSON.parse(byId("tools").value); } catch (error) {
    throw new Error(`the tools are no JSON: ${error.message}`);
  }
  return { tools, tool_choice: byId("tool_choice").value };
}

/* The calls of one answer, as they come in pieces. */
export class ToolCalls {
  constructor(box) {
    this.box = box;
    this.calls = [];  // as messages have them
    this.cards = [];
  }

  take(deltas) {
    for (const delta of deltas ?? []) {
      const place = delta.index ?? this.calls.length;
      const call = this.calls[place] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
      if (delta.id) call.id = delta.id;
      call.function.name += delta.function?.name ?? "";
      call.function.arguments += delta.function?.arguments ?? "";
      this.cards[place] ??= card(this.box);
      fill(this.cards[place], call.function);
    }
  }

  /* Fields for the results, once the answer has ended; `send` gets the messages that carry them. */
  askResults(send) {
    if (!this.calls.length) return;
    const fields = this.calls.map(({ function: { name } }, place) => {
      const label = element("label", "", this.cards[place].box, "Result");
      const field = element("input", "", label);
      field.value = EXAMPLE_RESULT[name] ?? "";
      field.placeholder = "what the tool says";
      return field;
    });
    const last = button("main", this.box, "Send the results", () => {
      for (const field of fields) field.disabled = true;
      last.remove();
      send(this.calls.map((call, place) => ({ role: "tool", tool_call_id: call.id, content: fields[place].value })));
    });
  }
}

function card(parent) {
  const box = element("div", "card call", parent);
  const name = element("div", "name", box);
  return { box, name, table: element("dl", "", box) };
}

/* Arguments are a table as soon as they are whole, and text until then. */
function fill({ name, table }, call) {
  name.textContent = call.name;
  table.replaceChildren();
  let whole = null;
  try { whole = JSON.parse(call.arguments); } catch { /* there is more to come */ }
  if (whole && typeof whole === "object" && !Array.isArray(whole)) {
    for (const [key, value] of Object.entries(whole)) {
      element("dt", "", table, key);
      element("dd", "", table, typeof value === "string" ? value : JSON.stringify(value));
    }
  } else if (call.arguments) element("dd", "", table, call.arguments);
}
