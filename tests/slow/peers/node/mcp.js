// The TypeScript SDK of the Model Context Protocol as its users have it, against `mediator mcp`.
// Arguments: the command over stdio, or the URL and a token over HTTP. Ends with 1 when something is not as it should be.
const assert = require("node:assert/strict");
const { Client } = require("@modelcontextprotocol/sdk/client/index.js");
const { StdioClientTransport } = require("@modelcontextprotocol/sdk/client/stdio.js");
const { StreamableHTTPClientTransport } = require("@modelcontextprotocol/sdk/client/streamableHttp.js");

function transport([first, ...rest]) {
  if (!first.startsWith("http")) {
    return new StdioClientTransport({ command: first, args: rest });
  }
  const headers = { Authorization: `Bearer ${rest[0]}` };
  return new StreamableHTTPClientTransport(new URL(first), { requestInit: { headers } });
}

async function main() {
  const client = new Client({ name: "test", version: "1.0.0" });
  await client.connect(transport(process.argv.slice(2)));
  // After this the client checks each structured result against the schema of its tool.
  const { tools } = await client.listTools();
  assert(tools.every((tool) => tool.name.startsWith("mediator_") && tool.outputSchema), "names and schemas");

  const use = async (name, args = {}) => {
    const result = await client.callTool({ name: `mediator_${name}`, arguments: args });
    assert(!result.isError, JSON.stringify(result.content));
    return result.structuredContent;
  };
  assert((await use("who_am_i")).reachable);
  const { address } = await use("create_mailbox");
  assert.deepEqual(await use("send", { address, payload: "hello", tags: ["a"] }), { msg_id: 0 });
  const { messages } = await use("fetch", { address, wait_seconds: 5 });
  assert.equal(messages[0].payload, "hello");

  const { contents } = await client.readResource({ uri: `mailbox://${address}` });
  assert.equal(JSON.parse(contents[0].text).messages[0].payload, "hello");
  assert.deepEqual(await use("ack", { address, msg_ids: [0] }), { acknowledged: 1 });

  const refused = await client.callTool({ name: "mediator_send", arguments: { address, payload: "x", tag: "a" } });
  assert(refused.isError && refused.content[0].text.includes("tag"), JSON.stringify(refused));
  await assert.rejects(client.readResource({ uri: "mailbox://not.there" }), /mailbox_not_found/);
  await client.close();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
