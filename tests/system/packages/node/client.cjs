// Speaks to a gateway from JavaScript: node client.cjs ADDRESS PROTOS_DIR.  Prints one JSON object of what it saw.
"use strict";
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [address, protos] = process.argv.slice(2);
const options = { keepCase: true, longs: Number, enums: String, defaults: true, oneofs: true, includeDirs: [protos] };
const load = (name) => grpc.loadPackageDefinition(loader.loadSync(path.join("pageant/v1", name), options)).pageant.v1;
const inference = new (load("inference.proto").Inference)(address, grpc.credentials.createInsecure());
const control = new (load("control.proto").Control)(address, grpc.credentials.createInsecure());

function unary(client, method, request) {
  return new Promise((resolve, reject) =>
    client[method](request, (error, answer) => (error ? reject(error) : resolve(answer))));
}

/* All of a stream; where `after` is given, the call is cancelled after so many messages. */
function generate(request, after = Infinity) {
  return new Promise((resolve) => {
    const found = { text: "", token_ids: [], messages: 0, finish_reason: "", usage: null, status: null };
    const call = inference.Generate(request);
    call.on("metadata", (metadata) => { found.request_id = metadata.get("x-request-id")[0]; });
    call.on("data", (message) => {
      found.text += message.text;
      found.token_ids.push(...message.token_ids);
      found.messages += 1;
      if (message.usage) Object.assign(found, { usage: message.usage, finish_reason: message.finish_reason });
      if (found.messages === after) call.cancel();
    });
    call.on("error", () => {});
    call.on("status", (status) => {
      found.status = grpc.status[status.code];
      found.details = status.details;
      found.field = status.metadata.get("error-field")[0] ?? "";
      resolve(found);
    });
  });
}

async function main() {
  const sampling = { temperature: 1, seed: 7, max_tokens: 24 };
  const seen = {
    models: (await unary(inference, "ListModels", {})).models,
    tokens: (await unary(inference, "Tokenize", { text: "Once upon a time" })).token_ids,
    whole: await generate({ text: "One day", sampling, stream: { return_token_ids: true } }),
    chat: await generate({ chat: { messages: [{ role: "user", content: "Hi" }] }, sampling }),
    refused: await generate({ text: "x", sampling: { temperature: 9 } }),
    cancelled: await generate({ text: "Once", sampling: { max_tokens: 900, ignore_eos: true } }, 2),
  };
  seen.text = (await unary(inference, "Detokenize", { token_ids: seen.whole.token_ids })).text;
  seen.load = await unary(control, "GetLoad", {});
  console.log(JSON.stringify(seen));
  inference.close();
  control.close();
}

main().catch((error) => { console.error(error); process.exitCode = 1; });
