// Packs and unpacks v2 messages with didcomm-rust: one JSON request a line, one JSON answer a line.
// {op: "pack", message, to, from, sign_by, options, documents, secrets} -> {value: text}
// {op: "unpack", message, documents, secrets} -> {value: {message, metadata}}
const readline = require("readline");
const { Message } = require("didcomm-node");

function resolver(documents) {
  return { resolve: async (did) => documents.find((document) => document.id === did) ?? null };
}

function secrets(all) {
  return {
    get_secret: async (id) => all.find((secret) => secret.id === id) ?? null,
    find_secrets: async (ids) => ids.filter((id) => all.some((secret) => secret.id === id)),
  };
}

async function answer(request) {
  const documents = resolver(request.documents);
  const own = secrets(request.secrets);
  if (request.op === "pack") {
    const [text] = await new Message(request.message).pack_encrypted(
      request.to, request.from, request.sign_by, documents, own, { forward: false, ...request.options },
    );
    return text;
  }
  const [message, metadata] = await Message.unpack(request.message, documents, own, {});
  return { message: message.as_value(), metadata };
}

readline.createInterface({ input: process.stdin }).on("line", async (line) => {
  let result;
  try {
    result = { value: await answer(JSON.parse(line)) };
  } catch (error) {
    result = { error: String(error?.message ?? error) };
  }
  process.stdout.write(JSON.stringify(result) + "\n");
});
