// The official packages of OpenAI and Anthropic against a running server: node apis.cjs URL MODEL.
// Prints one JSON line: what each answer was whole, and what its stream added up to.
"use strict";

const OpenAI = require("openai").default ?? require("openai");
const Anthropic = require("@anthropic-ai/sdk").default ?? require("@anthropic-ai/sdk");

const [url, model] = process.argv.slice(2);
const ask = "A story about a fox";
const parameters = { type: "object", properties: { place: { enum: ["Oslo", "Rome"] } }, required: ["place"] };

async function responses(client) {
  const body = {
    model, input: ask, max_output_tokens: 40, temperature: 0,
    tools: [{ type: "function", name: "weather", parameters, strict: true }], tool_choice: "required",
    parallel_tool_calls: false,
  };
  const whole = await client.responses.create(body);
  const stream = client.responses.stream(body);
  let deltas = "";
  stream.on("response.function_call_arguments.delta", (event) => { deltas += event.delta; });
  const gathered = await stream.finalResponse();
  const call = whole.output[0];
  const output = { type: "function_call_output", call_id: call.call_id, output: "rain" };
  const next = await client.responses.create({
    model, input: [output], previous_response_id: whole.id, max_output_tokens: 8, temperature: 0,
  });
  await client.responses.delete(whole.id);
  return {
    whole: [call.name, call.arguments], deltas, gathered: gathered.output[0].arguments, next: next.output_text,
    previous: next.previous_response_id === whole.id,
  };
}

async function messages(client) {
  const body = { model, max_tokens: 40, messages: [{ role: "user", content: ask }], top_k: 1 };
  const tools = [{ name: "weather", input_schema: parameters }];
  const whole = await client.messages.create(body);
  const gathered = await client.messages.stream(body).finalMessage();
  const called = await client.messages.create({ ...body, tools, tool_choice: { type: "tool", name: "weather" } });
  const count = await client.messages.countTokens({ model, messages: body.messages });
  let refused = null;
  try {
    await client.messages.create({ ...body, speed: "fast" });
  } catch (error) {
    refused = [error.status, error.error.error.type];
  }
  return {
    whole: whole.content[0].text, gathered: gathered.content[0].text, stop: whole.stop_reason,
    input: called.content[0].input, reason: called.stop_reason, refused,
    count: count.input_tokens === whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
  };
}

async function main() {
  const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
  console.log(JSON.stringify({ responses: await responses(openai), messages: await messages(anthropic) }));
}

main().catch((error) => { console.error(error); process.exit(1); });
